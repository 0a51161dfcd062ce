#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/home.hpp"
#include "residency/unit.hpp"
#include "residency/worker.hpp"

namespace accelerate::residency {

struct FileOptions {
  /// Read past the system's cache of files, where the file system can: bytes that are read once for each use would only
  /// push out what is needed. Bytes that the cache holds already come from there. By io_uring, or plain calls where
  /// the kernel forbids that.
  bool direct = true;
  /// Folder for the values of units that were changed; the checkpoint itself is never written. Empty: the system's for
  /// temporary files. Nothing stays behind.
  std::filesystem::path scratch;
  /// Threads that read at the same time, the worker included: a disk does better with several requests to choose from.
  int64_t readers = 1;
};

/// A tensor's bytes in some file: row major, without gaps.
struct TensorInFile {
  std::filesystem::path file;
  int64_t begin = 0, bytes = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  /// The tensor where it lies; null where that can't be.
  std::function<at::Tensor()> map;
  /// Null: the bytes are elements of `dtype`. Else they are codes: this reads and decodes them, into a 1-D contiguous
  /// CPU tensor of any floating-point dtype. Called by any thread.
  std::function<void(const at::Tensor& to)> decode;
};

/// Files, those of a checkpoint for example, as the home of a model's units, in one of two ways:
/// - **mapped**: members point straight into the files; no copy is made, the system reads pages as they are touched
///   and drops them when memory is short. Writes go to private pages. Fastest where the model fits into memory.
///   While it is mapped nobody may shorten a file: the system answers with SIGBUS.
/// - **read**: the worker reads a unit's bytes into a recycled buffer when it is touched or prefetched; a changed unit
///   goes to a scratch file when it leaves.
///   For models larger than memory, for devices, and for other dtypes than the files' (converted on the way). A file
///   that is shortened meanwhile is a CheckpointError at the touch; the unit is absent then, and the touch may be
///   repeated.
///   A full disk is a ResourceError where the unit should leave; the unit stays, changed as it is. Deleting or
///   replacing the files changes nothing: they are open.
/// Copies share the open files. Source: ZeRO-Infinity, arXiv:2104.07857 (parameters on NVMe).
class FileTensors {
 public:
  /// @param path    as load_checkpoint_files takes it
  /// @param worker  reads; null: read parts can't be made
  /// @throws CheckpointError as load_checkpoint_files.
  FileTensors(const std::filesystem::path& path, std::shared_ptr<Worker> worker, const FileOptions& options = {});
  /// Any other files, by the tensors' names.
  FileTensors(std::map<std::string, TensorInFile> tensors, std::shared_ptr<Worker> worker,
              const FileOptions& options = {});

  bool contains(const std::string& name) const;
  /// The size of the named tensors in the files.
  int64_t bytes(const NamedTensors& members) const;

  /// The ingredients of units. Members are named as in the files, of the same shape, and their values are not looked
  /// at.
  /// @throws CheckpointError naming a tensor that is missing or has another shape; ConfigError for members that can't
  /// be mapped (see mappable()).
  std::vector<PartSpec> mapped(const NamedTensors& members) const;
  /// @param dtype  that members get; default: their own
  std::vector<PartSpec> read(const NamedTensors& members, const at::Device& device = at::kCPU,
                             std::optional<at::ScalarType> dtype = std::nullopt) const;

  /// On the CPU, contiguous, and of the files' dtypes.
  bool mappable(const NamedTensors& members, const at::Device& device) const;

 private:
  struct Files;
  const TensorInFile& find(const std::string& name, const at::Tensor& member) const;
  std::shared_ptr<Files> files_;
};

}  // namespace accelerate::residency
