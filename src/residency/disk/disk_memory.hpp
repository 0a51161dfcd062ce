#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "residency/disk/direct_io.hpp"
#include "residency/spill_file.hpp"

namespace accelerate::residency {

/// Contiguous CPU tensors whose bytes lie in a file without a name, past the system's cache. They are ordinary tensors
/// at all times: a touch of one finds its bytes in the file, which the system reads page by page. A user of many, one
/// group after the other, brings each group into memory before and sends it back after, by few large requests; its
/// tensors are in memory meanwhile. One thread at a time. Source: ZeRO-Infinity, arXiv:2104.07857 (optimizer states and
/// parameters on NVMe).
class DiskMemory : public std::enable_shared_from_this<DiskMemory> {
 public:
  /// @param memory  bytes that there are for the process: once half as many lie on the disk, what malloc frees goes
  /// back to the system (glibc's thresholds, for the whole process); unset: what is available now
  /// @throws as SpillFile
  DiskMemory(const std::filesystem::path& folder, const DiskRequests& requests, const SpillFile::Wording& wording,
             std::optional<int64_t> memory = std::nullopt);
  DiskMemory(const DiskMemory&) = delete;
  DiskMemory& operator=(const DiskMemory&) = delete;
  ~DiskMemory();

  /// @throws ResourceError where the disk has no room for it
  at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype);
  /// Gives the tensor's storage a place in the file; it is in memory, as after bring(). Nothing for one that has one,
  /// of this disk or another, and for one that is not the whole of its storage. @throws ResourceError as above
  /// @param whole  false: a part of its storage stands for all of it
  void take(const at::Tensor& tensor, bool whole = true);
  /// The same of a tensor whose values are still to come: it lies in the file, with whatever is there.
  void place(const at::Tensor& tensor);
  /// Whether this disk is where the tensor's bytes have their place.
  bool has(const at::Tensor& tensor) const;
  /// Which one is; null: none.
  static std::shared_ptr<DiskMemory> of(const at::Tensor& tensor);

  /// Brings those that have a place here and are not in memory; waited for, they are. @throws ResourceError (wait())
  /// when the disk fails; they lie in the file then, as before.
  std::unique_ptr<Transfer> bring(const std::vector<at::Tensor>& tensors);
  /// Writes those that are in memory to their places; waited for, their memory is free. Nobody may write to them
  /// meanwhile. @throws ResourceError (wait()) when the disk fails; they stay in memory then, and lose nothing.
  std::unique_ptr<Transfer> send(const std::vector<at::Tensor>& tensors);
  /// Tensors that are in memory and have not been written to lie in the file again, without being written. Those that
  /// have not reached the file since they were taken or sent stay.
  void drop(const std::vector<at::Tensor>& tensors);

  /// Reads a tensor with a place here into `to`: CPU memory, contiguous, of as many bytes. Null: it was in memory.
  std::unique_ptr<Transfer> read(const at::Tensor& tensor, const at::Tensor& to);
  /// Writes values to a place here; blocks. @param values  as `to` of read()
  void write(const at::Tensor& tensor, const at::Tensor& values);

  /// Whether somebody may have written to it where it lies: false is certain as long as the system has kept its pages.
  bool may_have_been_touched(const at::Tensor& tensor) const;
  /// Whether bytes pass by the system's cache, so that what nobody touches shows as such.
  bool tells_touches() const { return direct_ >= 0 && direct_works_; }

  // Other values beside those that tensors have, in second places of their own in the file. A tensor knows nothing of
  // them until they are exchanged.

  /// Finds these places, for good. @throws ResourceError where the disk has no room for them
  void make_room_beside(const std::vector<at::Tensor>& tensors);
  /// Of those that are in memory: what they are now is written beside, and they lie in the file, as they were when they
  /// came, from now on. @throws ResourceError (wait()) when the disk fails
  std::unique_ptr<Transfer> send_beside(const std::vector<at::Tensor>& tensors);
  /// The same of values. @param values  as of write()
  std::unique_ptr<Transfer> write_beside(const at::Tensor& tensor, const at::Tensor& values);
  /// What was written beside them becomes what they are, and what they were is beside. Nothing is read or written. Not
  /// of those that are in memory and have been written to.
  void exchange(const std::vector<at::Tensor>& tensors);
  /// Whether those that are in memory lie in the file, too, as they were when they came.
  bool are_copies(const std::vector<at::Tensor>& tensors) const;

  struct Place;

 private:
  struct Buffer;
  class Moving;
  class Reading;
  class Beside;
  /// One for a tensor that take() and place() have something to do with; null: they have not.
  std::shared_ptr<Place> new_place(const at::Tensor& tensor, bool whole);
  static Place* any_place_of(const at::Tensor& tensor);
  static std::shared_ptr<Place> shared_place_of(const at::Tensor& tensor);  ///< which has one
  Place* place_of(const at::Tensor& tensor) const;                          ///< if it is here
  /// Each once, those that are in memory, or those that are not.
  std::vector<std::shared_ptr<Place>> places_of(const std::vector<at::Tensor>& tensors, bool in_memory) const;
  std::unique_ptr<Transfer> begin(bool writes, std::vector<DirectIo::Range> ranges);
  /// Waits. @param again  begins it anew
  void finish(bool writes, std::unique_ptr<Transfer>& under_way, const std::function<void()>& again);
  std::unique_ptr<Buffer> take_buffer(int64_t bytes);
  /// With these values, which may be fewer bytes.
  std::unique_ptr<Buffer> buffer_with(int64_t bytes, const at::Tensor& values);
  void give_buffer(std::unique_ptr<Buffer> buffer);
  /// So many bytes more have a place, or fewer.
  void count_on_disk(int64_t bytes);

  SpillFile file_;
  int direct_ = -1;  ///< the same file, past the cache; -1 where the file system can't
  bool direct_works_ = true;
  DirectIo io_;
  int64_t memory_, on_disk_ = 0;
  std::multimap<int64_t, std::unique_ptr<Buffer>> free_;  ///< by their bytes
  int64_t in_use_ = 0, most_in_use_ = 0;                  ///< bytes of buffers
};

}  // namespace accelerate::residency
