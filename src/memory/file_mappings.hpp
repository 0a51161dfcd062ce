#pragma once

#include <cstdint>
#include <map>

namespace accelerate {

/// Where files are mapped into this process, as the kernel says it when this is made: such bytes are the file's until
/// they are written to. None on systems that don't say it.
class FileMappings {
 public:
  FileMappings();
  bool hold(const void* address) const;

 private:
  std::map<uintptr_t, uintptr_t> ends_;  ///< by begin
};

}  // namespace accelerate
