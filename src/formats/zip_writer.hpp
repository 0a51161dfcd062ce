#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

/// The zip around a torch archive, as LibTorch's PyTorchStreamWriter writes it, byte for byte, of records that come
/// piece by piece: that one wants all of a record at one place, and reads it twice. Records are not compressed, begin
/// at multiples of 64, and have their checksums behind them. Source: caffe2/serialize/inline_container.cc, and
/// APPNOTE.TXT 6.3.10 of PKWARE for the fields.
namespace accelerate::formats {

class ZipWriter {
 public:
  using Write = std::function<void(std::string_view)>;
  explicit ZipWriter(Write write) : write_(std::move(write)) {}

  /// @param pieces  gives the record's bytes to what it is called with, as many as `bytes`
  void record(const std::string& name, int64_t bytes, const std::function<void(const Write&)>& pieces);
  void record(const std::string& name, std::string_view bytes);
  /// The records that every archive ends with, and the directory. Once.
  void finish();

 private:
  struct Entry {
    std::string name;
    uint64_t bytes, begin;
    uint32_t crc;
  };
  void write(const std::string& bytes);
  std::string directory() const;

  Write write_;
  uint64_t position_ = 0, sums_ = 0;
  std::vector<Entry> entries_;
  std::unordered_set<std::string> names_;  ///< in the order of which the archive's number is made
};

}  // namespace accelerate::formats
