#include "launch/program.hpp"

#include <unistd.h>

#include <filesystem>
#include <sstream>

#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"
#include "launch/deepspeed.hpp"
#include "launch/environment.hpp"
#include "launch/mpirun.hpp"
#include "launch/tpu.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

std::string variable(const Host& host, const std::string& name) {
  const auto found = host.environment.find(name);
  return found == host.environment.end() ? "" : found->second;
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

bool can_execute(const fs::path& path) { return is_file(path) && ::access(path.c_str(), X_OK) == 0; }

std::string find_python(const Host& host) {
  if (const auto python = variable(host, "PYTHON"); !python.empty()) {
    const fs::path path = python.find('/') == std::string::npos ? find_in_path(python, host) : fs::path(python);
    if (!can_execute(path))
      throw ConfigError("PYTHON is '" + python + "', which is not an executable file. Correct or unset the variable");
    return path;
  }
  if (const auto environment = variable(host, "VIRTUAL_ENV"); !environment.empty())
    if (const fs::path path = fs::path(environment) / "bin/python"; can_execute(path)) return path;
  for (const char* name : {"python3", "python"})
    if (const auto path = find_in_path(name, host); !path.empty()) return path;
  throw ConfigError("no Python was found: neither python3 nor python is in PATH. Install it or set PYTHON to its path");
}

std::string nearest_file(const fs::path& missing) {
  std::vector<std::string> names;
  std::error_code error;
  const fs::path folder = missing.has_parent_path() ? missing.parent_path() : fs::path(".");
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (is_file(entry->path())) names.push_back(entry->path().filename());
  const auto nearest = nearest_name(missing.filename().string(), names);
  return nearest ? ". Did you mean '" + (missing.parent_path() / *nearest).string() + "'?" : "";
}

}  // namespace

fs::path find_in_path(const std::string& name, const Host& host) {
  std::istringstream folders(variable(host, "PATH"));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const fs::path path = fs::path(folder.empty() ? "." : folder) / name; can_execute(path)) return path;
  return {};
}

std::vector<std::string> command_line(const Job& job, const Host& host) {
  const auto& options = job.options;
  const std::string& name = options.command.front();
  std::vector<std::string> result;
  if (job.starter == Job::Starter::xla) {
    const auto words = xla_arguments(job);
    result = {find_python(host), job.xla_starter};
    result.insert(result.end(), words.begin(), words.end());
    return result;
  }
  if (job.starter == Job::Starter::mpirun) {
    std::vector<std::string> variables;
    for (const auto& [variable_name, value] : build_environment(job, host, 0)) variables.push_back(variable_name);
    result = mpirun_words(Mpirun::find(host), job.settings, variables);
  }
  if (job.starter == Job::Starter::deepspeed) {
    result = deepspeed_words(job.settings, job.main_port);
    const fs::path starter = find_in_path("deepspeed", host);
    if (starter.empty())
      throw ConfigError(
          "DeepSpeed on several machines is started by its program `deepspeed`, which is not in PATH. Install "
          "DeepSpeed, or give --deepspeed_multinode_launcher standard and run this command on each machine");
    result.front() = starter;
    if (!options.module && !options.no_python && fs::path(name).extension() != ".py") result.push_back("--no_python");
    result.insert(result.end(), options.command.begin(), options.command.end());
    return result;
  }
  const auto run_by_python = [&] {
    result.push_back(find_python(host));
    if (job.local_world_size > 1 || job.starter == Job::Starter::mpirun)
      result.push_back("-u");  // its output goes through a pipe, where Python would hold it back
  };
  if (options.module) {
    run_by_python();
    result.push_back("-m");
    result.insert(result.end(), options.command.begin(), options.command.end());
    return result;
  }
  fs::path program = name;
  std::error_code ignored;
  if (fs::is_directory(program, ignored)) throw ConfigError("'" + name + "' is a folder, expected a program");
  if (!is_file(program)) {
    program = name.find('/') == std::string::npos ? find_in_path(name, host) : fs::path();
    if (program.empty())
      throw ConfigError("there is no program '" + name + "' " +
                        (name.find('/') == std::string::npos
                             ? "in the current folder or in PATH"
                             : "(seen from " + fs::current_path(ignored).string() + ")") +
                        (options.command.size() == 1 && name.find(' ') != std::string::npos
                             ? ". It contains blanks: were the arguments quoted together with it?"
                             : nearest_file(name)));
  }
  if (program.extension() == ".py" && !options.no_python) {
    run_by_python();
    result.push_back(program);
  } else {
    if (!can_execute(program))
      throw ConfigError("'" + program.string() + "' is not executable. If it is a program or a script: chmod +x " +
                        program.string());
    // execve takes a bare name as a path already, but a program may look at argv[0] to find its own folder.
    result.push_back(program.has_parent_path() ? program.string() : "./" + program.string());
  }
  result.insert(result.end(), options.command.begin() + 1, options.command.end());
  return result;
}

}  // namespace accelerate::launcher
