#pragma once

#include <cstdint>
#include <map>

namespace accelerate {

/// The mappings of files into this process, as the kernel tells them when this is made: their bytes are the file's
/// until they are written to. None on systems that don't tell.
class FileMappings {
 public:
  FileMappings();
  bool hold(const void* address) const;

 private:
  std::map<uintptr_t, uintptr_t> ends_;  ///< by begin
};

}  // namespace accelerate
