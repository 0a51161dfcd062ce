#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/dcp.hpp"

/// The contents of a checkpoint before it is read, whoever wrote it and however it is split: names, sizes, and
/// functions that read just the part that a rank needs.
namespace accelerate::formats {
class DcpCheckpoint;
}

namespace accelerate::checkpointing {

/// A rectangular part of a tensor and the elements of a slice that are this part.
struct SliceBox {
  formats::DcpBox box;
  at::Tensor values;  ///< [box.sizes], a view of the slice
};

/// A slice of a tensor's elements, in the order of its memory, as rectangles: the rest of a row, whole rows, the
/// beginning of a row, and so within each dimension.
/// @param like     dense; its sizes and strides are the tensor's
/// @param slice  1-D; its first element is the tensor's element `begin`
std::vector<SliceBox> parts_of(const at::Tensor& like, int64_t begin, const at::Tensor& slice);

/// The place of a tensor's elements in one file, row major and without gaps: for code that reads them by itself.
struct StoredBytes {
  std::filesystem::path file;
  int64_t begin = 0, bytes = 0;
  /// Null: elements of the tensor's dtype. Else they are codes, and this reads and decodes them: `to` is 1-D,
  /// contiguous, on the CPU, of any floating-point dtype.
  std::function<void(const at::Tensor& to)> decode;
};

/// A tensor in a file, or in many.
struct StoredTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::optional<StoredBytes> bytes;  ///< empty for what lies in several shards
  /// Fills `destination` ([box.sizes], any dtype, device and strides). That takes some MB of memory, or as much as the
  /// part has where this lies in shards of DeepSpeed's and becomes numbers of another dtype.
  /// @throws CheckpointError when the file is damaged.
  std::function<void(const formats::DcpBox& box, const at::Tensor& destination)> read;
  std::function<at::Tensor()> read_whole;  ///< on the CPU; mapped where the format allows it
  /// See find_part(). Null: what was found with the tensor is all that can be.
  std::function<formats::FoundPart(const formats::DcpBox& box)> find = nullptr;
};

/// The first half of read(), which reads no elements: the second one is in what it returns. @throws CheckpointError for
/// a part that is not there.
formats::FoundPart find_part(const StoredTensor& stored, const formats::DcpBox& box);

using StoredTensors = std::map<std::string, StoredTensor>;

/// One of a distributed checkpoint.
StoredTensor stored_in(const std::shared_ptr<const formats::DcpCheckpoint>& checkpoint, const formats::DcpEntry& entry);

/// safetensors. @throws CheckpointError, as the following.
StoredTensors open_safetensors(const std::filesystem::path& file);
/// A dict of tensors by torch.save.
StoredTensors open_archive(const std::filesystem::path& file);
/// The weights of a program of torch.export.save (.pt2).
StoredTensors open_pt2(const std::filesystem::path& file);
/// The weights that merge_fsdp_weights() would write, of the folder that it takes. @throws also ConfigError where they
/// are no flat list of tensors
StoredTensors open_merged(const std::filesystem::path& folder);
/// The tensors under the top-level key `model` of a distributed checkpoint.
StoredTensors open_distributed(const std::filesystem::path& folder);

/// The state of an optimizer by torch's rules.
struct StoredOptimizer {
  struct Group {
    c10::impl::GenericDict options;       ///< without `params`
    std::vector<std::string> parameters;  ///< keys of `state`
  };
  std::string source;    ///< for messages
  bool by_name = false;  ///< keys are names of parameters; else numbers, counted through all groups
  std::vector<Group> groups;
  std::map<std::string, StoredTensors> state;
};

StoredOptimizer open_optimizer_archive(const std::filesystem::path& file);
/// The optimizer under the top-level key `optimizer`.
StoredOptimizer open_distributed_optimizer(const std::filesystem::path& folder);

}  // namespace accelerate::checkpointing
