#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

std::optional<double> number_in(const fs::path& file) {
  std::ifstream stream(file);
  double number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;  // "max" is no number: no limit
}

/// The memory that the system could give without swapping.
double available_in_system() {
  std::ifstream stream("/proc/meminfo");
  for (std::string line; std::getline(stream, line);)
    if (line.starts_with("MemAvailable:")) return std::stod(line.substr(line.find(':') + 1)) * 1024;
  throw ResourceError(
      "get_max_memory: /proc/meminfo doesn't say how much memory is available. Give max_memory instead.");
}

/// The memory that is left within the limits of this process's control group (version 2) and of those around it. Page
/// cache counts as used there but is given back on demand.
std::optional<double> left_in_control_group() {
  std::ifstream stream("/proc/self/cgroup");
  std::optional<double> least;
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with("0::")) continue;
    const fs::path root = "/sys/fs/cgroup";
    for (fs::path group = line.substr(3);; group = group.parent_path()) {
      const fs::path folder = root / group.relative_path();
      const auto limit = number_in(folder / "memory.max"), used = number_in(folder / "memory.current");
      if (limit && used) {
        double cache = 0;
        std::ifstream stat(folder / "memory.stat");
        for (std::string key, value; stat >> key >> value;)
          if (key == "inactive_file") cache = std::stod(value);
        const double left = std::max(0.0, *limit - *used + cache);
        least = std::min(least.value_or(left), left);
      }
      if (group == group.root_path() || group.empty()) break;
    }
  }
  return least;
}

}  // namespace

MaxMemory get_max_memory() {
  MaxMemory memory;
  if (const auto accelerator = at::getAccelerator(); accelerator && at::accelerator::deviceCount() > 0) {
    at::globalContext().lazyInitDevice(*accelerator);
    for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i) {
      if (*accelerator == at::kMPS) memory.insert_or_assign("mps", available_in_system());
      else
        memory.insert_or_assign(Place(static_cast<int64_t>(i)),
                                static_cast<double>(at::accelerator::getMemoryInfo(i).first));
    }
  }
  const double system = available_in_system();
  if (!memory.contains("mps"))
    memory.insert_or_assign(
        "cpu", std::min(system, left_in_control_group().value_or(system)));  // with mps both are the same memory
  return memory;
}

}  // namespace accelerate
