#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace accelerate {

/// TensorBoard's file of events: a sequence of records {length, crc of length, bytes, crc of bytes}, each a protocol
/// buffer `Event`. Few fields are needed, so they are written by hand; LibTorch exports protobuf symbols of its own
/// that a second copy would clash with.
class EventFile {
 public:
  explicit EventFile(const std::filesystem::path& folder);
  void scalar(const std::string& tag, double value, int64_t step);
  void flush() { out_.flush(); }

 private:
  void record(const std::string& event);
  std::filesystem::path path_;
  std::ofstream out_;
};

}  // namespace accelerate
