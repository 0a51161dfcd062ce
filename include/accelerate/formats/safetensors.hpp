#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "accelerate/formats/safetensors_info.hpp"
#include "accelerate/utils/export.hpp"

/// Reading and writing of safetensors files. The format is described in docs/formats/safetensors.md.
///
/// A file that breaks a rule of the format is refused as a whole with a CheckpointError that names the file, the rule
/// and the numbers; nothing is half loaded. A file that is written appears under its name complete or not at all.
namespace accelerate {

/// A safetensors file opened for reading.
///
/// Opening reads and checks the header only; the data is mapped, so that a file larger than memory can be opened and
/// the pages of a tensor come from the disk when they are first touched. Copies of this object share one mapping. Safe
/// to use from several threads. While it is mapped the file must not be shortened by others: the system answers an
/// access behind the new end with SIGBUS.
class ACCELERATE_API SafetensorsFile {
 public:
  /// @throws CheckpointError if the file can't be opened or breaks a rule of the format.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  /// Names of the tensors in the order of their bytes in the file.
  const std::vector<std::string>& names() const;
  /// The free text entries of the header ("__metadata__").
  const std::map<std::string, std::string>& metadata() const;
  bool contains(const std::string& name) const;
  /// @throws CheckpointError if the file has no tensor of that name; the message shows the nearest names.
  const SafetensorsInfo& info(const std::string& name) const;
  /// Byte of the file at which the data section starts.
  int64_t data_begin() const;
  /// The tensor on the CPU, without a copy: it points into the mapping and keeps it alive, also after this object is
  /// gone. Writing to it changes private pages and never the file. (A tensor whose bytes are not aligned for its dtype,
  /// which other writers may produce, is copied.)
  /// @throws CheckpointError as info(), and if LibTorch has no such dtype (F6_E2M3, F6_E3M2).
  at::Tensor tensor(const std::string& name) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// All tensors of one file, mapped as SafetensorsFile::tensor does. @throws CheckpointError
ACCELERATE_API std::map<std::string, at::Tensor> load_safetensors(const std::filesystem::path& path);

/// Writes tensors (of any device, strided; copied to the CPU one by one) and metadata to `path`.
///
/// The bytes depend on the arguments alone and are those of the reference writer: tensors ordered by dtype, largest
/// alignment first, then by name, behind a header padded with spaces to a multiple of 8. The file is written under a
/// temporary name in the same folder, flushed to the disk and renamed, so that a crash leaves the old file or the new
/// one.
/// @throws CheckpointError if two tensors share memory (the message names them: save one and tie them after loading),
/// if a
///   dtype has no name in the format, if a tensor has no data (meta) or is sparse, if a text is not UTF-8, or if the
///   file can't be written; ResourceError if the disk, a quota or a limit is exhausted.
ACCELERATE_API void save_safetensors(const std::filesystem::path& path,
                                     const std::map<std::string, at::Tensor>& tensors,
                                     const std::map<std::string, std::string>& metadata = {});

/// All tensors of a model that was saved in the Hugging Face layout, mapped.
///
/// @param path  A folder with `model.safetensors`, or else with `model.safetensors.index.json` and the shards that it
/// names;
///   or one of these files itself. Or a folder with `pytorch_model.bin` or its shards with an index, which are read
///   into memory: as data, nothing in a pickle is executed.
/// @throws CheckpointError if there is neither, if the index is malformed, points out of its folder (a link counts as
///   what it points at, except into the blobs of the Hugging Face cache that the folder belongs to), or names a tensor
///   that its shard lacks.
ACCELERATE_API std::map<std::string, at::Tensor> load_checkpoint_files(const std::filesystem::path& path);
/// The same without pickles, but which file holds each tensor instead of the tensors.
ACCELERATE_API std::map<std::string, SafetensorsFile> open_checkpoint_files(const std::filesystem::path& path);

}  // namespace accelerate
