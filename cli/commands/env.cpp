#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "accelerate/config.hpp"
#include "accelerate/utils/version.hpp"
#include "command.hpp"
#include "input/json.hpp"

namespace {

namespace fs = std::filesystem;
using Facts = std::vector<std::pair<std::string, std::string>>;

/// The value after `key` and a colon in a file of such lines.
std::string line_of(const fs::path& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key))
      if (const size_t colon = line.find(':'); colon != std::string::npos)
        return line.substr(std::min(line.find_first_not_of(" \t", colon + 1), line.size()));
  return "";
}

std::string first_line_of(const char* command) {
  std::FILE* pipe = ::popen(command, "r");
  if (!pipe) return "";
  char line[256] = "";
  if (!std::fgets(line, sizeof(line), pipe)) line[0] = 0;
  ::pclose(pipe);
  std::string text(line);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

std::string gpus() {
  std::string names;
  std::error_code ignored;
  for (fs::directory_iterator entry("/proc/driver/nvidia/gpus", ignored), end; !ignored && entry != end;
       entry.increment(ignored))
    names += (names.empty() ? "" : ", ") + line_of(entry->path() / "information", "Model");
  return names.empty() ? "none" : names;
}

Facts facts() {
  utsname system{};
  ::uname(&system);
  struct sysinfo memory {};
  ::sysinfo(&memory);
  char ram[32];
  std::snprintf(ram, sizeof(ram), "%.2f GB", static_cast<double>(memory.totalram) * memory.mem_unit / (1 << 30));
  const std::string python = first_line_of("python3 -c 'import sys; print(sys.version.split()[0])' 2>/dev/null");
  // The metadata alone: importing the package takes seconds.
  const std::string peer =
      // Not modules of the current folder, which anybody may have put there.
      first_line_of(
          "python3 -c 'import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.metadata as m; "
          "print(m.version(\"accelerate\"))' 2>/dev/null");
  std::error_code ignored;
  return {{"`accelerate` version", ACCELERATE_VERSION},
          {"Platform", std::string(system.sysname) + "-" + system.release + "-" + system.machine},
          {"`accelerate` location", fs::read_symlink("/proc/self/exe", ignored).string()},
          {"LibTorch version", ACCELERATE_TORCH_VERSION},
          {"Compiler", ACCELERATE_COMPILER},
          {"Back ends", ACCELERATE_BACKENDS},
          {"CPU", line_of("/proc/cpuinfo", "model name") + ", " + std::to_string(::sysconf(_SC_NPROCESSORS_ONLN)) +
                      " logical cores"},
          {"System RAM", ram},
          {"GPU", gpus()},
          {"Python version", python.empty() ? "none" : python},
          {"Hugging Face Accelerate", peer.empty() ? "none" : peer}};
}

int run_env(const cli::Arguments& arguments) {
  const std::string named = arguments.text("config_file");
  const fs::path file = named.empty() ? accelerate::default_config_file() : fs::path(named);
  std::error_code ignored;
  const bool there = !named.empty() || fs::is_regular_file(file, ignored);
  if (arguments.on("json")) {
    nlohmann::ordered_json result;
    for (const auto& [name, value] : facts()) result[name] = value;
    result["config file"] = there ? nlohmann::ordered_json(file.string()) : nlohmann::ordered_json();
    result["`accelerate` configs"] =
        there ? accelerate::parse_json<nlohmann::ordered_json>(accelerate::config_as_json(file))
              : nlohmann::ordered_json("Not found");
    std::printf("%s\n", result.dump(2).c_str());
    return 0;
  }
  const auto values = there ? accelerate::config_values(file) : Facts{};
  for (const auto& [name, value] : facts()) std::printf("- %s: %s\n", name.c_str(), value.c_str());
  std::printf("- Config file: %s%s\n", file.c_str(), there ? "" : " (not there)");
  for (const auto& [name, value] : values) std::printf("\t- %s: %s\n", name.c_str(), value.c_str());
  return 0;
}

const cli::Registered kEnvCommand("env", run_env);

}  // namespace
