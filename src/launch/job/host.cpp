#include "launch/job/host.hpp"

#include <sched.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "accelerate/config.hpp"
#include "utils/device_types.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration): only GNU's headers declare it

namespace accelerate::launcher {
namespace {

int64_t count_physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  std::set<std::string> cores;  // hyper-threads of one core have the same list of siblings
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = "cpu" + std::to_string(cpu);
    std::ifstream("/sys/devices/system/cpu/" + siblings + "/topology/thread_siblings_list") >> siblings;
    cores.insert(siblings);
  }
  return std::max<int64_t>(1, static_cast<int64_t>(cores.size()));
}

}  // namespace

Host Host::current() {
  Host host{.physical_cores = count_physical_cores(), .environment = {}};
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (const size_t equals = text.find('='); equals != std::string_view::npos)
      host.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  if (const auto* called = reinterpret_cast<const char*>(::getauxval(AT_EXECFN))) {
    std::error_code ignored;
    host.folder = std::filesystem::absolute(called, ignored).parent_path();
  }
  host.accelerators = count_accelerators();
  if (const auto* type = devices::present("/")) host.device_type = type->name;
  host.peer_access_is_broken = devices::peer_access_is_broken("/");
  return host;
}

std::optional<std::string> Host::variable(const std::string& name) const {
  const auto found = environment.find(name);
  return found == environment.end() || found->second.empty() ? std::nullopt : std::optional(found->second);
}

std::optional<int64_t> Host::number(const std::string& name) const {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size()) return std::nullopt;
  return value;
}

std::filesystem::path Host::find_in_path(const std::string& name) const {
  std::istringstream folders(variable("PATH").value_or(""));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const auto path = std::filesystem::path(folder.empty() ? "." : folder) / name; is_executable(path)) return path;
  return {};
}

bool is_executable(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

}  // namespace accelerate::launcher
