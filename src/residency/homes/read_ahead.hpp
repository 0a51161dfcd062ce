#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace accelerate::residency {

/// Bytes in a mapped file.
struct MappedBytes {
  const void* data = nullptr;
  int64_t bytes = 0;
};

/// A thread that brings the pages of mapped files into memory, in the order given, in requests as large as a disk likes
/// them: a first use of a mapping, page by page, would wait for each. Whatever `keep_alive` holds (the mappings)
/// outlives it. Changes nothing but times; its destructor stops it.
class ReadAhead {
 public:
  ReadAhead(std::vector<MappedBytes> bytes, std::shared_ptr<const void> keep_alive);

 private:
  std::jthread thread_;
};

}  // namespace accelerate::residency
