#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "formats/input_file.hpp"
#include "formats/pickle.hpp"

namespace accelerate::snapshot {
class Ledger;
}

/// Archives as Python's torch.save writes them, piece by piece: a zip with a pickle and, uncompressed, the bytes of
/// each tensor.
namespace accelerate::formats {

/// The place of a tensor's elements in a file.
struct SavedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  ///< in elements
  /// Byte of the file at which element [0, 0, ...] lies; all of them were checked to lie within the archive.
  int64_t begin = 0;
  int64_t storage_begin = 0;  ///< byte of the file at which its storage lies, which other tensors may view too
  int64_t storage_bytes = 0;
  /// So many bytes before the storage say that it is there. Nobody has looked at them yet; readers of its elements do.
  int64_t header_bytes = 0;
};

/// The treatment of objects of Python classes that are no plain data. None of them is executed in any case.
enum class PickledObjects {
  refused,
  numpy_numbers,  ///< refused, but for arrays of numpy's uint32, which are tuples: generators keep their states so
  as_data,        ///< the dict of its attributes; of a call of an unknown function its arguments, of a name its text
};

/// An archive within a file, opened for reading. Nothing in it is executed.
class TorchArchive {
 public:
  /// @param source  Begins the messages, e.g. "item 'model.weight' in '/run/__0_0.distcp'".
  /// @param peeks   InputFile::peek(): the caller checks all of these bytes before anything rests on them
  /// @throws CheckpointError if these bytes of the file are no such archive.
  TorchArchive(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length, std::string source,
               PickledObjects objects = PickledObjects::refused, bool peeks = false);
  ~TorchArchive();

  /// The tensor that was saved, not yet read. @throws CheckpointError if it is something else.
  SavedTensor tensor() const;
  /// The saved object, with its tensors read: numbers, strings (bytes become strings too), None, lists, tuples, dicts,
  /// tensors. Tensors that view one storage share it, as in Python, so that no more bytes are read than the archive
  /// has.
  /// @throws CheckpointError for objects of other Python classes and for damaged contents.
  c10::IValue value() const;
  /// The same with `read(saved)` in the place of each tensor, so that the caller decides when, and how much of it, is
  /// read.
  c10::IValue value(const std::function<at::Tensor(const SavedTensor&)>& read) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The name that a dict of tensors gives by a key: whole numbers count as their digits, as the indices of a list do.
/// Unset for keys that are neither text nor whole numbers.
std::optional<std::string> tensor_name(const c10::IValue& key);

/// A dict of tensors by torch.save, in memory. @throws CheckpointError for anything else
std::map<std::string, at::Tensor> load_archive(const std::filesystem::path& path);

/// Looks at the bytes that lead to a tensor's storage, for who reads elements by their place.
void check_header(const InputFile& file, const SavedTensor& saved);

/// Copies the part of a saved tensor that begins at `offsets` into `destination` (any device, dtype and strides), whose
/// sizes are the part's. No more memory than some MB is taken for it.
void read_part(const InputFile& file, const SavedTensor& saved, const std::vector<int64_t>& offsets,
               const at::Tensor& destination);

/// The pickle of an archive under construction. Tensors are announced while it is written and read when their turn
/// comes.
class TorchPickle : public PickleWriter {
 public:
  /// A contiguous tensor. `read` is called once, while the archive is written, and may return it on any device.
  void tensor(at::ScalarType dtype, const std::vector<int64_t>& sizes, bool requires_grad,
              std::function<at::Tensor()> read);
  /// Numbers, strings, None, lists, tuples, dicts, tensors. @throws CheckpointError for anything else.
  void value(const c10::IValue& value);
  /// Holds all tensors for who writes the archive behind training.
  void hold(snapshot::Ledger& ledger);

 private:
  friend void write_torch_archive(TorchPickle&& pickle, const std::function<void(std::string_view)>& write);
  std::vector<std::function<at::Tensor()>> storages_;
};

/// Writes the archive, one tensor after the other; torch.load(weights_only=True) reads it. Errors that `write` throws
/// come out.
void write_torch_archive(TorchPickle&& pickle, const std::function<void(std::string_view)>& write);

}  // namespace accelerate::formats
