#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

namespace accelerate {

/// TensorBoard's file of events: a sequence of records {length, crc of length, bytes, crc of bytes}, each a protocol
/// buffer `Event`.
class EventFile {
 public:
  struct Options {
    std::string filename_suffix;
    /// TensorBoard forgets what the folder's older files say of this step and later ones.
    std::optional<int64_t> purge_step;
  };
  /// Makes the folder. @throws CheckpointError
  EventFile(const std::filesystem::path& folder, double time, const Options& options);
  /// One of the summaries of summaries.hpp. @param time  seconds since 1970. @throws ResourceError
  void add(const std::string& summary, int64_t step, double time);
  /// Out of this process. @throws ResourceError
  void flush();

 private:
  void event(const std::string& fields, int64_t step, double time);
  void check() const;

  std::filesystem::path path_;
  std::ofstream out_;
};

}  // namespace accelerate
