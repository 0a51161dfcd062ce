#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "accelerate/utils/nested.hpp"
#include "formats/dcp/folder.hpp"
#include "formats/dcp/layout.hpp"
#include "formats/dcp/metadata.hpp"

/// Folders as torch.distributed.checkpoint (DCP) reads and writes them: each rank's items in a file of its own, and
/// `.metadata`, which says what lies where; or, in its place, a layout that has rules for it. docs/formats/dcp.md is
/// the specification. No communication and no policy here: the caller decides who saves what, and also carries the
/// records of all ranks to the one that writes the metadata.
namespace accelerate::formats {

// ---- writing
// ---------------------------------------------------------------------------------------------------------------------

/// This rank's part of a tensor.
struct DcpTensorItem {
  std::string name;            ///< flat name, e.g. "model.0.weight"
  std::vector<int64_t> sizes;  ///< of the whole tensor
  DcpBox box;                  ///< the part that `tensor` is
  at::Tensor tensor;           ///< [box.sizes], any device, dtype and strides; read while the items are written
};

/// An object that is not sharded: numbers, strings, None, and lists, tuples and dicts of them.
struct DcpObjectItem {
  std::string name;
  c10::IValue value;
  bool is_bytes = false;  ///< `value` is a string that becomes Python's bytes; read_object() makes no difference
};

/// The items that one rank wrote, for the metadata. Plain data that can be sent to another rank.
struct DcpRecord {
  std::string name;
  bool is_tensor = false;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  std::vector<int64_t> sizes = {};
  DcpBox box = {};
  DcpLocation location = {};
  ACCELERATE_FIELDS(name, is_tensor, dtype, requires_grad, sizes, box.offsets, box.sizes, location.file,
                    location.offset, location.length)
};

/// Makes `folder` ready for a new checkpoint: creates it, and removes what an earlier one left, its `.metadata` or
/// layout first, so that an old one never stands beside new data. One rank calls it before any rank writes.
void prepare_dcp_folder(const std::filesystem::path& folder);

/// Writes `__{rank}_0.distcp` in `folder`, which exists: objects first, then tensors, in the order given. Parts without
/// elements are left out unless the whole tensor has none. The file appears when it is complete and flushed to the
/// disk. Without items nothing is written.
/// @param layout  not null: these are exactly the items that the rank has by it, and their index comes last in the file
/// @return one record per item that was written. Every element of a tensor must be written by exactly one rank, an
/// object by one.
/// @throws ShapeError if a tensor doesn't have the sizes of its box or the box doesn't lie within the tensor;
/// CheckpointError, ResourceError; InternalError for items that are not the layout's.
std::vector<DcpRecord> write_dcp_items(const std::filesystem::path& folder, int64_t rank,
                                       const std::vector<DcpObjectItem>& objects,
                                       const std::vector<DcpTensorItem>& tensors, const DcpLayout* layout = nullptr);

/// Writes `.metadata`, after which the checkpoint is there. One rank calls it when all files are complete.
/// @param records  Of all ranks, in the order of ranks. Names appear in the metadata in the order in which they come
/// first.
/// @param paths    For each name the keys and indices that lead to the value in the saved object, from which Python
/// rebuilds the nested dicts and lists.
/// @throws CheckpointError if the parts of a tensor overlap or leave a gap, if records contradict each other, or if a
/// name has no path, or a dtype none in Python.
void write_dcp_metadata(const std::filesystem::path& folder, const std::vector<DcpRecord>& records,
                        const std::map<std::string, DcpPath>& paths);

/// Writes a layout in the place of `.metadata`, after which the checkpoint is there. One rank calls it when all files
/// are complete; the layout has said all that there is to know since before the first item was written.
void write_dcp_layout(const std::filesystem::path& folder, const DcpLayout& layout);

// ---- reading
// ---------------------------------------------------------------------------------------------------------------------

/// LibTorch's type of a tensor of the metadata.
at::ScalarType scalar_type(const DcpTensorInfo& info);

/// A part of a tensor whose place in files is known and right: reading it fails for the disk, and for bytes that are
/// not those that were written.
struct FoundPart {
  std::filesystem::path file = {};  ///< empty: in several, or nobody knows
  int64_t begin = 0;                ///< byte of it, for who reads many in the order of the disk
  /// @param destination  of the part's sizes; any device, dtype (converted) and strides
  std::function<void(const at::Tensor& destination)> read;
};

/// A checkpoint folder opened for reading. Opening reads the metadata or the layout only; every read takes just the
/// items, and of them the bytes, that it needs, whatever the number of ranks that saved. Safe to use from several
/// threads.
class DcpCheckpoint {
 public:
  /// @throws CheckpointError if there is no metadata or it is damaged.
  explicit DcpCheckpoint(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return places_.folder(); }
  /// Everything that was saved, in the file's order.
  const std::vector<DcpEntry>& entries() const { return places_.metadata().entries; }
  /// Null if there is none of that name.
  const DcpEntry* find(const std::string& name) const;
  /// @throws CheckpointError if there is no tensor of that name; the message shows near ones.
  const DcpTensorInfo& tensor(const std::string& name) const;

  /// Reads a part of a tensor, assembled from whatever parts were saved, into `destination`: [box.sizes], any device,
  /// dtype (converted) and strides. Nothing is written to it if a part of the box was never saved.
  /// @throws ShapeError if the sizes differ or the box doesn't lie within the tensor; CheckpointError if a file is
  /// missing or damaged or the box is not covered.
  void read_chunk(const std::string& name, const DcpBox& box, const at::Tensor& destination) const;
  /// Throws what the above would throw, but for errors of the disk and for damage, and reads no elements yet. What is
  /// found is good as long as the checkpoint.
  FoundPart find_chunk(const std::string& name, const DcpBox& box) const;
  /// As above into a new tensor on the CPU, of the saved dtype, contiguous.
  at::Tensor read_chunk(const std::string& name, const DcpBox& box) const;
  at::Tensor read_full(const std::string& name) const;
  /// @throws CheckpointError if there is no object of that name or it holds more than plain data.
  c10::IValue read_object(const std::string& name) const;

 private:
  struct SavedRegion;
  const DcpEntry& entry(const std::string& name) const;
  std::vector<SavedRegion> find_regions(const std::string& name, const DcpBox& box) const;
  static void copy_regions(const std::vector<SavedRegion>& regions, const DcpBox& box, const at::Tensor& destination);
  std::string describe(const std::string& name, const DcpLocation& place) const;

  DcpFolder places_;
  std::map<std::string, size_t> by_name_;
};

}  // namespace accelerate::formats
