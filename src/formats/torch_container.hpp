#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/input_file.hpp"
#include "formats/pickle.hpp"
#include "formats/zip_archive.hpp"
#include "utils/raise.hpp"

/// The files of Python's torch.save and of TorchScript, down to the pickle and to where the bytes of each tensor are.
/// Nothing in it is executed. Needs no LibTorch.
namespace accelerate::formats {

inline constexpr std::string_view kTorchSize = "torch.Size";

/// A typed storage as pickles name it.
struct TorchStorage {
  std::string_view global, dtype;  ///< "torch.FloatStorage", "float32"
  int64_t bytes;                   ///< of an element
};
inline constexpr TorchStorage kTorchStorages[] = {
    {"torch.FloatStorage", "float32", 4},
    {"torch.DoubleStorage", "float64", 8},
    {"torch.HalfStorage", "float16", 2},
    {"torch.BFloat16Storage", "bfloat16", 2},
    {"torch.LongStorage", "int64", 8},
    {"torch.IntStorage", "int32", 4},
    {"torch.ShortStorage", "int16", 2},
    {"torch.CharStorage", "int8", 1},
    {"torch.ByteStorage", "uint8", 1},
    {"torch.BoolStorage", "bool", 1},
    {"torch.ComplexFloatStorage", "complex64", 8},
    {"torch.ComplexDoubleStorage", "complex128", 16},
};
/// Storages that LibTorch writes and Python does not know.
inline constexpr TorchStorage kScriptStorages[] = {
    {"torch.UInt16Storage", "uint16", 2},
    {"torch.UInt32Storage", "uint32", 4},
    {"torch.UInt64Storage", "uint64", 8},
    {"torch.ComplexHalfStorage", "complex32", 4},
    {"torch.Float8_e4m3fnStorage", "float8_e4m3fn", 1},
    {"torch.Float8_e5m2Storage", "float8_e5m2", 1},
    {"torch.Float8_e4m3fnuzStorage", "float8_e4m3fnuz", 1},
    {"torch.Float8_e5m2fnuzStorage", "float8_e5m2fnuz", 1},
    {"torch.Float8_e8m0fnuStorage", "float8_e8m0fnu", 1},
    {"torch.Float4_e2m1fn_x2Storage", "float4_e2m1fn_x2", 1},
};
/// Calls `take` with each of both.
template <class Take> void for_each_torch_storage(const Take& take) {
  for (const auto& row : kTorchStorages) take(row);
  for (const auto& row : kScriptStorages) take(row);
}
/// Bytes of an element of PyTorch's dtype, by its name without "torch."; 0 for a name that is not known.
inline int64_t torch_element_bytes(std::string_view dtype) {
  int64_t bytes = 0;
  for_each_torch_storage([&](const TorchStorage& row) {
    if (row.dtype == dtype) bytes = row.bytes;
  });
  return bytes;
}
/// Holds bytes; the tensor says what they are.
inline constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";

/// A tensor as its pickle describes it: possible by itself, but not compared with the storage, which need not be in the
/// file (TorchScript leaves it out on the meta device).
struct PickledTensor {
  std::string dtype;                    ///< PyTorch's name without "torch."
  std::vector<int64_t> sizes, strides;  ///< as many strides as sizes, none negative
  int64_t numel = 0;
  int64_t first = 0;    ///< element of the storage
  int64_t last = -1;    ///< the last one that it reaches; -1 without elements
  std::string storage;  ///< its key
};

/// A zip with a pickle and uncompressed records, as torch.save and TorchScript write it, or the one stream of pickles
/// and bytes that torch.save wrote before PyTorch 1.6.
class TorchContainer {
 public:
  /// @param source   begins the messages
  /// @param globals  names that may occur in the pickle besides those of tensors; "*" allows all, see Pickle
  /// @throws CheckpointError if these bytes of the file are neither.
  TorchContainer(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length, std::string source,
                 std::vector<std::string_view> globals, ZipArchive::Look look = ZipArchive::Look::checks);
  TorchContainer(const TorchContainer&) = delete;
  TorchContainer& operator=(const TorchContainer&) = delete;

  const Pickle& pickle() const { return *pickle_; }
  /// Whether it has code: TorchScript.
  bool is_script() const;
  /// Nothing for a value that is no tensor. @throws CheckpointError for a malformed one.
  std::optional<PickledTensor> tensor_of(const PickleNode& node) const;
  /// What leads to it was peeked at only. @throws CheckpointError when it is not there or compressed
  ZipArchive::Bytes storage(const std::string& key) const;
  /// Null for the stream of old, which has no checksums either.
  const ZipArchive* zip() const { return zip_ ? &*zip_ : nullptr; }
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("{}: {}", source_, fmt::format(what, std::forward<Args>(args)...));
  }

 private:
  std::string read(uint64_t begin, uint64_t size) const;
  void read_stream();
  std::vector<int64_t> numbers(const PickleNode& node, const std::string& what) const;

  std::shared_ptr<const InputFile> file_;
  int64_t begin_;
  uint64_t length_;
  std::string source_;
  std::vector<std::string_view> globals_;
  ZipArchive::Look look_;
  std::optional<ZipArchive> zip_;                      ///< unset: a stream
  std::map<std::string, ZipArchive::Bytes> storages_;  ///< of a stream
  std::string bytes_;                                  ///< of the pickle
  std::optional<Pickle> pickle_;
};

}  // namespace accelerate::formats
