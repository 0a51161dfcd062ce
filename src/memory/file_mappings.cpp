#include "memory/file_mappings.hpp"

#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

namespace accelerate {

FileMappings::FileMappings() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    // 7f00-7f10 rw-p 00000000 08:01 123456   /data/model.safetensors
    const size_t path = line.find('/');
    if (path == std::string::npos || line.compare(path, 5, "/dev/") == 0 || line.compare(path, 7, "/memfd:") == 0)
      continue;
    uintptr_t begin = 0, end = 0;
    const char* const last = line.data() + line.size();
    const auto first = std::from_chars(line.data(), last, begin, 16);
    if (first.ec == std::errc() && first.ptr != last && *first.ptr == '-' &&
        std::from_chars(first.ptr + 1, last, end, 16).ec == std::errc())
      ends_.emplace(begin, end);
  }
}

bool FileMappings::hold(const void* address) const {
  const auto value = reinterpret_cast<uintptr_t>(address);
  const auto after = ends_.upper_bound(value);
  return after != ends_.begin() && value < std::prev(after)->second;
}

}  // namespace accelerate
