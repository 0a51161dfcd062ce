#include "accelerate/launch.hpp"

#include "../command.hpp"
#include "../options.hpp"
#include "accelerate/error.hpp"

namespace {

constexpr const char* kUsage =
    "Usage: accelerate launch [options] PROGRAM [arguments of PROGRAM]\n\n"
    "  accelerate launch --num_processes 4 ./train --epochs 3\n"
    "  accelerate launch --num_processes 2 --cpu train.py\n"
    "  accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500 ./train\n\n"
    "PROGRAM is an executable, or a .py file that Python runs. Options may be written with '-' for '_'.";

std::chrono::milliseconds milliseconds(const std::string& option, double seconds) {
  if (!(seconds >= 0 && seconds < 1e6)) throw accelerate::ConfigError(option + " is a number of seconds from 0 to 999999");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

int run(std::vector<std::string> arguments) {
  accelerate::LaunchOptions options;
  double monitor_interval = 0.1, grace_seconds = 10;
  cli::Parser parser("Start a program in one or many processes, on one machine or several.", "accelerate launch", kUsage);

  const auto option = [&](const char* group, const char* name, auto& value, const char* type, const std::string& help) {
    return parser.add_option(cli::spelled(name), value, help)->group(group)->type_name(type);
  };
  const auto flag = [&](const char* group, const std::string& names, bool& value, const std::string& help) { parser.add_flag(names, value, help)->group(group); };

  const char* processes = "Processes and machines";
  option(processes, "num_processes", options.num_processes, "N", "Processes over all machines together (default 1)");
  option(processes, "num_machines", options.num_machines, "N", "Machines; run the same command on each (default 1)");
  option(processes, "machine_rank", options.machine_rank, "N", "This machine's number, from 0 (needed with several)");
  option(processes, "main_process_ip", options.main_process_ip, "ADDRESS", "Address of machine 0 (needed with several)");
  option(processes, "main_process_port", options.main_process_port, "PORT", "Port on machine 0 where the processes meet; 0 or left out: a free one (needed with several machines)");

  const char* hardware = "Hardware and training";
  flag(hardware, "--cpu", options.cpu, "Compute on the CPU even where there is an accelerator");
  option(hardware, "num_cpu_threads_per_process", options.num_cpu_threads_per_process, "N",
         "Sets OMP_NUM_THREADS (default: as in the environment; else, with --cpu and --num_processes, cores / processes; else 1)");
  option(hardware, "mixed_precision", options.mixed_precision, "no|fp16|bf16|fp8", "Number format of the computation (default no)");
  option(hardware, "gradient_accumulation_steps", options.gradient_accumulation_steps, "N", "Batches per optimizer step, unless the program says otherwise");
  flag(hardware, "--debug", options.debug, "Compare tensor shapes across processes before each collective; slower, but an error instead of a hang");

  const char* program = "Program";
  flag(program, "-m,--module", options.module, "PROGRAM is a Python module, as in `python -m`");
  flag(program, cli::spelled("no_python"), options.no_python, "Execute PROGRAM directly even if its name ends in .py");

  const char* output = "Output";
  option(output, "log_dir", options.log_dir, "FOLDER", "Keep log files in FOLDER/<run>/attempt_0/<local rank>/{stdout,stderr}.log");
  option(output, "redirects", options.redirects, "STREAMS", "Streams written to log files only: 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:3 (default 0)");
  parser.add_option("-t,--tee", options.tee, "Streams written to log files and, after [rankN]:, to the terminal; as --redirects (default 0)")->group(output)->type_name("STREAMS");
  flag(output, "-q,--quiet", options.quiet, "At most one line from the launcher itself, when a process failed");

  const char* faults = "When something fails";
  option(faults, "monitor_interval", monitor_interval, "SECONDS", "After a failure, time for the other processes to fail by themselves before they are stopped (default 0.1)");
  option(faults, "grace_seconds", grace_seconds, "SECONDS", "Time from SIGTERM or Ctrl-C to SIGKILL (default 10); a second Ctrl-C kills at once");

  auto command = parser.read(std::move(arguments));
  if (!command) return 0;
  options.command = std::move(*command);
  options.monitor_interval = milliseconds("--monitor_interval", monitor_interval);
  options.grace = milliseconds("--grace_seconds", grace_seconds);
  return accelerate::launch(options);
}

const cli::Registered kRegistered({"launch", "Start a program in one or many processes", run});

}  // namespace
