#include "launch/tpu.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "accelerate/utils/error.hpp"
#include "launch/environment.hpp"
#include "launch/log_files.hpp"
#include "launch/program.hpp"
#include "launch/report.hpp"
#include "launch/supervisor.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

// FORK_LAUNCHED is how Hugging Face Accelerate knows that somebody has started its processes.
constexpr const char* kStarter =
    R"PY(# Written by `accelerate launch`: calls a function of a program in each of PyTorch/XLA's processes.
import importlib
import os
import sys


def call(index, module, function):
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    kind, name, function = sys.argv[1:4]
    try:
        import torch_xla.distributed.xla_multiprocessing as xmp
    except ImportError as error:
        sys.stderr.write(f"accelerate launch: --tpu needs PyTorch/XLA, and {sys.executable} can't import it: {error}. Install torch_xla there, or set PYTHON to a Python that has it\n")
        sys.exit(78)
    if kind == "script":
        sys.path.append(os.path.dirname(os.path.abspath(name)))
        name = os.path.splitext(os.path.basename(name))[0]
    else:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(name)
    if not hasattr(module, function):
        sys.stderr.write(f"accelerate launch: {module.__file__} has no function '{function}', which each TPU process would call. --main_training_function names another one\n")
        sys.exit(64)
    sys.argv = [module.__file__] + sys.argv[4:]
    os.environ["FORK_LAUNCHED"] = "1"
    xmp.spawn(call, args=(name, function))
)PY";

std::string function_of(const Job& job) {
  const std::string name = job.settings.text("main_training_function");
  return name.empty() ? "main" : name;
}

/// The workers by name: the flags', else the config file's.
config::Value named_workers(const Settings& settings) {
  const config::Value& given = settings["vm"];
  return given.is_array() && !given.empty() ? given : settings["tpu_vm"];
}

/// The command for a worker, which a shell there reads.
std::string worker_command(const Job& job, const Host& host) {
  const Settings& s = job.settings;
  std::vector<std::string> words;
  if (s.on("tpu_use_sudo")) words.push_back("sudo");
  words.push_back("env");  // behind sudo, which would drop the variables
  for (const auto& [name, value] : protocol(s, host)) words.push_back(name + "=" + value);
  words.push_back("ACCELERATE_IN_TPU_POD=1");
  for (const char* list : {"tpu_env", "env"})  // of two values the last one counts
    if (s[list].is_array())
      for (const auto& entry : s[list]) {
        const std::string text = config::python_text(entry);
        if (text.find('=') == std::string::npos || text.front() == '=')
          throw ConfigError(std::string(std::strcmp(list, "env") == 0 ? "--env" : "tpu_env of the config file") +
                            " has '" + text + "', expected NAME=VALUE");
        words.push_back(text);
      }
  // A worker is one machine for itself, whose TPU chips PyTorch/XLA makes part of the pod.
  words.insert(words.end(), {"accelerate-launch", "--tpu", "--no_tpu_cluster", "--num_machines", "1",
                             "--mixed_precision", "no", "--dynamo_backend", "no"});
  if (s.num_processes() > 0) words.insert(words.end(), {"--num_processes", std::to_string(s.num_processes())});
  words.insert(words.end(), {"--main_training_function", function_of(job)});
  if (job.options.module) words.push_back("--module");
  words.insert(words.end(), job.options.command.begin(), job.options.command.end());
  return shell_text(words);
}

void check_python(const Job& job) {
  const std::string& name = job.options.command.front();
  if (job.options.no_python || (!job.options.module && fs::path(name).extension() != ".py"))
    throw ConfigError("TPUs are driven by PyTorch/XLA, which is Python and which LibTorch does not have: '" + name +
                      "' is " + (job.options.no_python ? "given with --no_python" : "no Python script (.py)") +
                      ". Start a Python script or --module");
}

std::string say_of_pod(const Job& job, const LogFiles&, const Outcome& outcome) {
  if (outcome.stop_signal)
    return job.options.quiet ? ""
                             : "accelerate launch: stopped by " + signal_name(outcome.stop_signal) +
                                   "; what runs on the pod's workers may go on.\n";
  if (!outcome.first_failure) return "";
  const RankRecord& record = outcome.ranks[*outcome.first_failure];
  const config::Value names = named_workers(job.settings);
  const std::string where = names.is_array() && !names.empty()
                                ? config::python_text(names.at(static_cast<size_t>(record.rank)))
                                : "the workers of " + job.settings.text("tpu_name");
  return "accelerate launch: gcloud for " + where + " " + describe(*record.end) + "\n";
}

}  // namespace

XlaStarter::XlaStarter() {
  std::string name = (fs::temp_directory_path() / "accelerate-xla-XXXXXX").string();
  if (!::mkdtemp(name.data()))
    throw ResourceError("no temporary folder " + name + " can be made: " + std::strerror(errno));
  folder_ = name;
  if (!(std::ofstream(file()) << kStarter).flush())
    throw ResourceError("the file " + file().string() + " can't be written");
}

XlaStarter::~XlaStarter() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

std::vector<std::string> xla_arguments(const Job& job) {
  check_python(job);
  const auto& command = job.options.command;
  std::error_code ignored;
  if (!job.options.module && !fs::is_regular_file(command.front(), ignored))
    throw ConfigError("there is no script '" + command.front() + "' (seen from " + fs::current_path(ignored).string() +
                      ")");
  std::vector<std::string> words{job.options.module ? "module" : "script", command.front(), function_of(job)};
  words.insert(words.end(), command.begin() + 1, command.end());
  return words;
}

size_t num_pod_commands(const Settings& settings) {
  const config::Value workers = named_workers(settings);
  return workers.is_array() && !workers.empty() ? workers.size() : 1;
}

std::vector<std::vector<std::string>> pod_commands(const Job& job) {
  check_python(job);
  const Settings& s = job.settings;
  const std::string zone = s.text("tpu_zone"), command = worker_command(job, Host{});
  const auto finished = [&](std::vector<std::string> words) {
    if (!zone.empty()) words.insert(words.end(), {"--zone", zone});
    words.insert(words.end(), {"--command", command});
    return words;
  };
  std::vector<std::vector<std::string>> commands;
  if (const config::Value workers = named_workers(s); workers.is_array() && !workers.empty()) {
    for (const auto& worker : workers)
      commands.push_back(finished({"gcloud", "compute", "ssh", config::python_text(worker)}));
    return commands;
  }
  const std::string name = s.text("tpu_name");
  if (name.empty())
    throw ConfigError(
        "--tpu_cluster starts the program on all workers of a pod, whose name is not known: `accelerate config` asks "
        "for tpu_name and tpu_zone");
  auto words = finished({"gcloud", "alpha", "compute", "tpus", "tpu-vm", "ssh", name});
  words.insert(words.end(), {"--worker", "all"});
  return {words};
}

int launch_on_pod(Job job, const Host& host, Monitor* monitor) {
  job.commands = pod_commands(job);
  const fs::path gcloud = find_in_path("gcloud", host);
  if (gcloud.empty())
    throw NotBuiltError(
        "the workers of a TPU pod are reached by Google Cloud's program gcloud, which is not in PATH. Install it "
        "(Google Cloud CLI) and log in, or run this on each worker with --no_tpu_cluster");
  for (auto& words : job.commands) words.front() = gcloud;
  const LogFiles logs(job);
  return supervise(job, host, logs, say_of_pod, nullptr, monitor).exit_code();
}

std::string shell_text(const std::vector<std::string>& words) {
  std::string line;
  for (const auto& word : words) {
    const bool plain =
        !word.empty() &&
        word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,@%+") ==
            std::string::npos;
    std::string text = plain ? word : "'";
    if (!plain) {
      for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
      text += "'";
    }
    line += (line.empty() ? "" : " ") + text;
  }
  return line;
}

}  // namespace accelerate::launcher
