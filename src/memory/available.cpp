#include "memory/available.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace accelerate {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;  // "max" is no number: no limit
}

std::optional<int64_t> number_behind(const fs::path& file, std::string_view wanted) {
  std::ifstream stream(file);
  std::string key;
  for (int64_t number = 0; stream >> key >> number; stream.ignore(80, '\n'))
    if (key == wanted) return number;
  return std::nullopt;
}

/// What the two versions of control groups call their files.
struct Names {
  fs::path root;
  const char *limit, *used, *cache;
};
const Names kNames[] = {
    {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
    {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"}};

std::optional<int64_t> left_in(const fs::path& group, const Names& names) {
  const auto folder = names.root / group.relative_path();
  const auto limit = number_in(folder / names.limit), used = number_in(folder / names.used);
  if (!limit || !used) return std::nullopt;
  return std::max<int64_t>(0, *limit - *used + number_behind(folder / "memory.stat", names.cache).value_or(0));
}

/// Least of this process's group and those around it; nothing without a limit.
std::optional<int64_t> left_in_control_groups() {
  std::ifstream stream("/proc/self/cgroup");
  std::optional<int64_t> least;
  for (std::string line; std::getline(stream, line);) {  // NUMBER:CONTROLLERS:GROUP
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers != ",," && controllers.find(",memory,") == std::string::npos) continue;
    const Names& names = kNames[controllers == ",,"];
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      if (const auto left = left_in(group, names)) least = std::min(least.value_or(*left), *left);
      if (group == group.root_path() || group.empty()) break;
    }
  }
  return least;
}

}  // namespace

std::optional<int64_t> available_in_system() {
  const auto kib = number_behind("/proc/meminfo", "MemAvailable:");
  return kib ? std::optional(*kib * 1024) : std::nullopt;
}

std::optional<int64_t> available_memory() {
  const auto system = available_in_system(), left = left_in_control_groups();
  return system && left ? std::min(*system, *left) : system ? system : left;
}

}  // namespace accelerate
