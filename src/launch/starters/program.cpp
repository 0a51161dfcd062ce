#include "launch/starters/program.hpp"

#include <filesystem>

#include "accelerate/config.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/program_file.hpp"
#include "launch/job/require.hpp"
#include "launch/starters/deepspeed.hpp"
#include "launch/starters/mpirun.hpp"
#include "launch/starters/xla.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

fs::path find_python(const Host& host) {
  if (const auto python = host.variable("PYTHON")) {
    const fs::path path = python->find('/') == std::string::npos ? host.find_in_path(*python) : fs::path(*python);
    require(is_executable(path), "PYTHON is '{}', which is not an executable file. Correct or unset the variable",
            *python);
    return path;
  }
  // VENV/bin/accelerate is called by its path where nobody activates environments: by cron, systemd, in containers.
  for (const char* mark : {"pyvenv.cfg", "conda-meta"})
    if (std::error_code ignored; !host.folder.empty() && fs::exists(host.folder.parent_path() / mark, ignored))
      if (const fs::path path = host.folder / "python"; is_executable(path)) return path;
  if (const auto environment = host.variable("VIRTUAL_ENV"))
    if (const fs::path path = fs::path(*environment) / "bin/python"; is_executable(path)) return path;
  for (const char* name : {"python3", "python"})
    if (const auto path = host.find_in_path(name); !path.empty()) return path;
  raise<ConfigError>(
      "no Python was found: neither python3 nor python is in PATH. Install it or set PYTHON to its path");
}

std::string nearest_file(const fs::path& missing) {
  std::vector<std::string> names;
  std::error_code error;
  const fs::path folder = missing.has_parent_path() ? missing.parent_path() : fs::path(".");
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (is_file(entry->path())) names.push_back(entry->path().filename());
  const auto nearest = nearest_name(missing.filename().string(), names);
  return nearest ? fmt::format(". Did you mean '{}'?", (missing.parent_path() / *nearest).string()) : "";
}

/// The path of the program. @throws ConfigError when it is nowhere.
fs::path find_program(const std::vector<std::string>& command, const Host& host) {
  const std::string& name = command.front();
  std::error_code ignored;
  require(!fs::is_directory(name, ignored), "'{}' is a folder, expected a program", name);
  if (is_file(name)) return name;
  const bool bare = name.find('/') == std::string::npos;
  if (const fs::path program = bare ? host.find_in_path(name) : fs::path(); !program.empty()) return program;
  raise<ConfigError>(
      "there is no program '{}' {}{}", name,
      bare ? "in the current folder or in PATH" : fmt::format("(seen from {})", fs::current_path(ignored).string()),
      command.size() == 1 && name.find(' ') != std::string::npos
          ? ". It contains blanks: were the arguments quoted together with it?"
          : nearest_file(name));
}

std::vector<std::string> deepspeed_command(const Job& job, const Host& host) {
  auto words = deepspeed_words(job.settings, job.main_port);
  words.front() = host.find_in_path("deepspeed");
  require(!words.front().empty(),
          "Python programs are started on several machines by DeepSpeed's program `deepspeed`, which is not in PATH. "
          "Install DeepSpeed, or give --deepspeed_multinode_launcher standard and run this command on each machine");
  if (!job.settings.on("module") && !job.settings.on("no_python") && fs::path(job.command.front()).extension() != ".py")
    words.emplace_back("--no_python");
  words.insert(words.end(), job.command.begin(), job.command.end());
  return words;
}

}  // namespace

std::vector<std::string> command_line(const Job& job, const Host& host) {
  std::vector<std::string> result;
  if (job.starter == Job::Starter::deepspeed) return deepspeed_command(job, host);
  if (job.starter == Job::Starter::xla) {
    result = xla_words(job);
    result.insert(result.begin(), find_python(host));
    return result;
  }
  if (job.starter == Job::Starter::srun) result = deepspeed_srun_words(job, host);
  if (job.starter == Job::Starter::mpirun) {
    if (job.remote.empty()) {
      std::vector<std::string> variables;
      for (const auto& [name, value] : build_environment(job, host, 0)) variables.push_back(name);
      result = mpirun_words(Mpirun::find(host), job.settings, variables);
    } else {
      result = deepspeed_mpirun_words(job, host);
    }
  }
  const auto run_by_python = [&] {
    result.push_back(find_python(host));
    if (job.tells_ranks() || job.starter == Job::Starter::mpirun)
      result.emplace_back("-u");  // as torchrun does: in a pipe or a file Python would hold its output back
  };
  if (job.settings.on("module")) {
    run_by_python();
    result.emplace_back("-m");
    result.insert(result.end(), job.command.begin(), job.command.end());
    return result;
  }
  const fs::path program = find_program(job.command, host);
  const bool script = program.extension() == ".py" || (!is_executable(program) && may_be_python(program));
  if (script && !job.settings.on("no_python")) {
    run_by_python();
    result.push_back(program);
  } else {
    require(is_executable(program), "'{}' is not executable. If it is a program or a script: chmod +x {}",
            program.string(), program.string());
    // execve takes a bare name as a path already, but a program may look at argv[0] to find its own folder.
    result.push_back(program.has_parent_path() ? program.string() : "./" + program.string());
  }
  result.insert(result.end(), job.command.begin() + 1, job.command.end());
  return result;
}

}  // namespace accelerate::launcher
