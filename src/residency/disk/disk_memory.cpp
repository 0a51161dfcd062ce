#include "residency/disk/disk_memory.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "memory/available.hpp"
#include "memory/held_bytes.hpp"
#include "memory/huge_pages.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

/// The folder, which need not have been there.
const std::filesystem::path& made(const std::filesystem::path& folder, const SpillFile::Wording& wording) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    raise<ConfigError>("{}: the folder '{}' can't be made: {}. Expected one on a disk with room for {}", wording.user,
                       folder.string(), error.message(), wording.contents);
  return folder;
}

int64_t in_blocks(int64_t bytes) {
  constexpr int64_t kBlock = DiskRequests::kBlock;
  return (bytes + kBlock - 1) / kBlock * kBlock;
}

}  // namespace

/// Memory of direct transfers.
struct DiskMemory::Buffer {
  explicit Buffer(int64_t count) : bytes(count) {
    const auto alignment = static_cast<size_t>(count >= kHugePage ? kHugePage : DiskRequests::kBlock);
    data = static_cast<char*>(
        std::aligned_alloc(alignment, (static_cast<size_t>(count) + alignment - 1) / alignment * alignment));
    if (!data) throw std::bad_alloc();
    prefer_huge_pages(data, count);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  int64_t bytes;
  char* data;
};

/// Where the bytes of one storage are; the storage owns it, as what its memory is freed by.
struct DiskMemory::Place {
  Place(std::shared_ptr<DiskMemory> of, int64_t count)
      : disk(std::move(of)), bytes(in_blocks(count)), here(region()), held(HeldFor::offloaded_file, bytes) {}
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    give_back(here);
    if (beside) give_back(*beside);
    if (buffer) disk->give_buffer(std::move(buffer));
  }

  static void let_go(void* context) {
    const std::unique_ptr<std::shared_ptr<Place>> owner(static_cast<std::shared_ptr<Place>*>(context));
    if (!(*owner)->moves) (*owner)->storage = nullptr;
  }
  static at::DataPtr pointer(const std::shared_ptr<Place>& place, char* data) {
    return {data, new std::shared_ptr<Place>(place), &let_go, at::Device(at::kCPU)};
  }
  /// The storage's bytes are there from now on.
  static void point(const std::shared_ptr<Place>& place, char* data) {
    place->moves = true;
    place->storage->set_data_ptr_noswap(pointer(place, data));
    place->moves = false;
  }
  DirectIo::Range range(char* data) const { return {here.offset, data, bytes}; }

  /// Of the file.
  struct Region {
    int64_t offset;
    char* mapped;
  };
  Region region() const {
    const int64_t offset = disk->file_.reserve(bytes);
    disk->count_on_disk(bytes);
    return {offset, static_cast<char*>(disk->file_.map(offset, bytes))};
  }
  void give_back(const Region& region) const {
    ::munmap(region.mapped, static_cast<size_t>(bytes));
    disk->file_.release(region.offset, bytes);
    disk->count_on_disk(-bytes);
  }

  std::shared_ptr<DiskMemory> disk;
  int64_t bytes;
  Region here;
  std::optional<Region> beside;  ///< for other values
  HeldBytes held;
  std::unique_ptr<Buffer> buffer;       ///< where the bytes are, if they are in memory
  bool is_copy = false;                 ///< of what the file has; else memory alone has it (nobody may have written)
  c10::StorageImpl* storage = nullptr;  ///< null when it has ended
  bool moves = false;
};

class DiskMemory::Moving final : public Transfer {
 public:
  Moving(std::shared_ptr<DiskMemory> disk, bool writes, std::vector<std::shared_ptr<Place>> places)
      : disk_(std::move(disk)), writes_(writes), places_(std::move(places)) {
    if (!writes_)
      for (const auto& place : places_) arriving_.push_back(disk_->take_buffer(place->bytes));
    else
      for (const auto& place : places_) place->is_copy = false;  // what the file has is half written, if it fails
    if (!places_.empty()) start();
  }
  ~Moving() override {
    under_way_.reset();  // which waits
    for (auto& buffer : arriving_) disk_->give_buffer(std::move(buffer));
  }
  void wait() override {
    if (places_.empty()) return;
    disk_->finish(writes_, under_way_, [this] { start(); });
    for (size_t i = 0; i < places_.size(); ++i) {
      auto& place = places_[i];
      if (!place->storage) continue;
      if (writes_) {
        Place::point(place, place->here.mapped);
        disk_->give_buffer(std::move(place->buffer));
      } else {
        place->buffer = std::move(arriving_[i]);
        place->is_copy = true;
        Place::point(place, place->buffer->data);
      }
    }
    places_.clear();
    for (auto& buffer : std::exchange(arriving_, {}))
      if (buffer) disk_->give_buffer(std::move(buffer));
  }

 private:
  void start() {
    std::vector<DirectIo::Range> ranges;
    for (size_t i = 0; i < places_.size(); ++i)
      ranges.push_back(places_[i]->range((writes_ ? places_[i]->buffer : arriving_[i])->data));
    under_way_ = disk_->begin(writes_, std::move(ranges));
  }

  std::shared_ptr<DiskMemory> disk_;
  bool writes_;
  std::vector<std::shared_ptr<Place>> places_;
  std::vector<std::unique_ptr<Buffer>> arriving_;
  std::unique_ptr<Transfer> under_way_;
};

/// Reads a place into memory that is no storage's.
class DiskMemory::Reading final : public Transfer {
 public:
  Reading(std::shared_ptr<DiskMemory> disk, std::shared_ptr<Place> place, at::Tensor to)
      : disk_(std::move(disk)),
        place_(std::move(place)),
        to_(std::move(to)),
        buffer_(disk_->take_buffer(place_->bytes)) {
    start();
  }
  ~Reading() override {
    under_way_.reset();
    disk_->give_buffer(std::move(buffer_));
  }
  void wait() override {
    disk_->finish(/*writes=*/false, under_way_, [this] { start(); });
    std::memcpy(to_.mutable_data_ptr(), buffer_->data, to_.nbytes());
  }

 private:
  void start() { under_way_ = disk_->begin(/*writes=*/false, {place_->range(buffer_->data)}); }

  std::shared_ptr<DiskMemory> disk_;
  std::shared_ptr<Place> place_;
  at::Tensor to_;
  std::unique_ptr<Buffer> buffer_;
  std::unique_ptr<Transfer> under_way_;
};

/// Of buffers that are no storage's to where other values of places are.
class DiskMemory::Beside final : public Transfer {
 public:
  Beside(std::shared_ptr<DiskMemory> disk, std::vector<std::shared_ptr<Place>> places,
         std::vector<std::unique_ptr<Buffer>> values)
      : disk_(std::move(disk)), places_(std::move(places)), values_(std::move(values)) {
    if (!places_.empty()) start();
  }
  ~Beside() override {
    under_way_.reset();
    for (auto& buffer : values_) disk_->give_buffer(std::move(buffer));
  }
  void wait() override {
    if (places_.empty()) return;
    disk_->finish(/*writes=*/true, under_way_, [this] { start(); });
    places_.clear();
    for (auto& buffer : std::exchange(values_, {})) disk_->give_buffer(std::move(buffer));
  }

 private:
  void start() {
    std::vector<DirectIo::Range> ranges;
    for (size_t i = 0; i < places_.size(); ++i)
      ranges.push_back({places_[i]->beside->offset, values_[i]->data, places_[i]->bytes});
    under_way_ = disk_->begin(/*writes=*/true, std::move(ranges));
  }

  std::shared_ptr<DiskMemory> disk_;
  std::vector<std::shared_ptr<Place>> places_;
  std::vector<std::unique_ptr<Buffer>> values_;
  std::unique_ptr<Transfer> under_way_;
};

namespace {

/// What comes from a disk and goes has its memory from malloc, as all tensors of LibTorch have. glibc's keeps what was
/// freed in the holes of its heap, for good: of a model that is larger than memory, more than there is. From now on the
/// system gets it back at once, unless the user has set either of these. That costs a page fault for each page of each
/// larger tensor, so it is for who needs it.
void let_memory_go() {
#ifdef __GLIBC__
  constexpr int kOwnMapping = 256 << 10, kKept = 4 << 20;  // bytes
  if (std::getenv("MALLOC_MMAP_THRESHOLD_") == nullptr) ::mallopt(M_MMAP_THRESHOLD, kOwnMapping);
  if (std::getenv("MALLOC_TRIM_THRESHOLD_") == nullptr) ::mallopt(M_TRIM_THRESHOLD, kKept);
#endif
}

}  // namespace

DiskMemory::DiskMemory(const std::filesystem::path& folder, const DiskRequests& requests,
                       const SpillFile::Wording& wording, std::optional<int64_t> memory)
    : file_(made(folder, wording), wording), io_(requests), memory_(memory ? *memory : available_memory().value_or(0)) {
  // The same file once more. Not every file system has such a thing (EINVAL).
  const std::string same = "/proc/self/fd/" + std::to_string(file_.descriptor());
  direct_ = ::open(same.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
}

void DiskMemory::count_on_disk(int64_t bytes) {
  static std::once_flag once;
  on_disk_ += bytes;
  if (on_disk_ >= memory_ / 2) std::call_once(once, let_memory_go);
}

DiskMemory::~DiskMemory() {
  if (direct_ >= 0) ::close(direct_);
}

std::unique_ptr<Transfer> DiskMemory::begin(bool writes, std::vector<DirectIo::Range> ranges) {
  const int file = direct_ >= 0 && direct_works_ ? direct_ : file_.descriptor();
  return writes ? io_.write(file, std::move(ranges)) : io_.read(file, std::move(ranges));
}

void DiskMemory::finish(bool writes, std::unique_ptr<Transfer>& under_way, const std::function<void()>& again) {
  for (;;) {
    try {
      return std::exchange(under_way, nullptr)->wait();
    } catch (const std::system_error& error) {
      if (error.code().value() != EINVAL || direct_ < 0 || !std::exchange(direct_works_, false))
        file_.fail(writes ? "writing" : "reading", 0, error.code().value());
      again();  // through the cache: this file system wants larger blocks, or can't after all
    }
  }
}

std::unique_ptr<DiskMemory::Buffer> DiskMemory::take_buffer(int64_t bytes) {
  in_use_ += bytes;
  most_in_use_ = std::max(most_in_use_, in_use_);
  if (const auto found = free_.find(bytes); found != free_.end()) return std::move(free_.extract(found).mapped());
  return std::make_unique<Buffer>(bytes);
}

std::unique_ptr<DiskMemory::Buffer> DiskMemory::buffer_with(int64_t bytes, const at::Tensor& values) {
  auto buffer = take_buffer(bytes);
  std::memcpy(buffer->data, values.const_data_ptr(), values.nbytes());
  std::memset(buffer->data + values.nbytes(), 0, static_cast<size_t>(bytes) - values.nbytes());
  return buffer;
}

void DiskMemory::give_buffer(std::unique_ptr<Buffer> buffer) {
  in_use_ -= buffer->bytes;
  // Keeps as much as has been needed at a time: the next group's, mostly of the same sizes.
  int64_t kept = in_use_ + buffer->bytes;
  for (const auto& [bytes, one] : free_) kept += bytes;
  for (auto oldest = free_.begin(); kept > most_in_use_ && oldest != free_.end(); oldest = free_.erase(oldest))
    kept -= oldest->first;
  free_.emplace(buffer->bytes, std::move(buffer));
}

DiskMemory::Place* DiskMemory::any_place_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  // Unchecked: a gradient that is elsewhere has no bytes to point to, and lies on no disk.
  const at::DataPtr& pointer = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (pointer.get_deleter() != &Place::let_go) return nullptr;
  return static_cast<std::shared_ptr<Place>*>(pointer.get_context())->get();
}

std::shared_ptr<DiskMemory::Place> DiskMemory::shared_place_of(const at::Tensor& tensor) {
  return *static_cast<std::shared_ptr<Place>*>(tensor.storage().data_ptr().get_context());
}

DiskMemory::Place* DiskMemory::place_of(const at::Tensor& tensor) const {
  Place* const place = any_place_of(tensor);
  return place && place->disk.get() == this ? place : nullptr;
}

std::vector<std::shared_ptr<DiskMemory::Place>> DiskMemory::places_of(const std::vector<at::Tensor>& tensors,
                                                                      bool in_memory) const {
  std::vector<std::shared_ptr<Place>> places;
  for (const auto& tensor : tensors) {
    Place* const place = place_of(tensor);
    if (!place || (place->buffer != nullptr) != in_memory) continue;
    const bool known =
        std::any_of(places.begin(), places.end(), [place](const auto& other) { return other.get() == place; });
    if (!known) places.push_back(shared_place_of(tensor));
  }
  return places;
}

at::Tensor DiskMemory::zeros(at::IntArrayRef sizes, at::ScalarType dtype) {
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype));
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0) return tensor.resize_(sizes);
  const auto place = std::make_shared<Place>(shared_from_this(), bytes);
  // Others' bytes may have been there.
  if (::fallocate(file_.descriptor(), FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, place->here.offset, place->bytes) !=
      0)
    std::memset(place->here.mapped, 0, static_cast<size_t>(place->bytes));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
                                                       Place::pointer(place, place->here.mapped), /*allocator=*/nullptr,
                                                       /*resizable=*/false);
  place->storage = storage.get();
  return tensor.set_(c10::Storage(std::move(storage)), 0, sizes);
}

std::shared_ptr<DiskMemory::Place> DiskMemory::new_place(const at::Tensor& tensor, bool whole) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage() || tensor.nbytes() == 0) return nullptr;
  const c10::Storage& storage = tensor.storage();
  if ((whole && storage.nbytes() != tensor.nbytes()) || storage.data_ptr().get_deleter() == &Place::let_go)
    return nullptr;
  auto place = std::make_shared<Place>(shared_from_this(), static_cast<int64_t>(storage.nbytes()));
  place->storage = storage.unsafeGetStorageImpl();
  return place;
}

void DiskMemory::take(const at::Tensor& tensor, bool whole) {
  const auto place = new_place(tensor, whole);
  if (!place) return;
  const c10::Storage& storage = tensor.storage();
  place->buffer = take_buffer(place->bytes);
  std::memcpy(place->buffer->data, storage.data(), storage.nbytes());
  std::memset(place->buffer->data + storage.nbytes(), 0, static_cast<size_t>(place->bytes) - storage.nbytes());
  Place::point(place, place->buffer->data);
}

void DiskMemory::place(const at::Tensor& tensor) {
  if (const auto place = new_place(tensor, /*whole=*/true)) Place::point(place, place->here.mapped);
}

bool DiskMemory::has(const at::Tensor& tensor) const { return place_of(tensor) != nullptr; }

std::shared_ptr<DiskMemory> DiskMemory::of(const at::Tensor& tensor) {
  const Place* const place = any_place_of(tensor);
  return place ? place->disk : nullptr;
}

std::unique_ptr<Transfer> DiskMemory::bring(const std::vector<at::Tensor>& tensors) {
  return std::make_unique<Moving>(shared_from_this(), /*writes=*/false, places_of(tensors, /*in_memory=*/false));
}

std::unique_ptr<Transfer> DiskMemory::send(const std::vector<at::Tensor>& tensors) {
  return std::make_unique<Moving>(shared_from_this(), /*writes=*/true, places_of(tensors, /*in_memory=*/true));
}

void DiskMemory::drop(const std::vector<at::Tensor>& tensors) {
  for (const auto& place : places_of(tensors, /*in_memory=*/true)) {
    if (!place->is_copy) continue;
    Place::point(place, place->here.mapped);
    give_buffer(std::move(place->buffer));
  }
}

std::unique_ptr<Transfer> DiskMemory::read(const at::Tensor& tensor, const at::Tensor& to) {
  if (!place_of(tensor) || to.nbytes() != tensor.nbytes() || !to.is_contiguous())
    throw InternalError("disk memory: reading what has no place on the disk, or into memory of another size");
  if (const auto places = places_of({tensor}, /*in_memory=*/false); !places.empty())
    return std::make_unique<Reading>(shared_from_this(), places.front(), to);
  std::memcpy(to.mutable_data_ptr(), tensor.const_data_ptr(), to.nbytes());
  return nullptr;
}

void DiskMemory::write(const at::Tensor& tensor, const at::Tensor& values) {
  Place* const place = place_of(tensor);
  if (!place || values.nbytes() != tensor.nbytes() || !values.is_contiguous())
    throw InternalError("disk memory: writing what has no place on the disk, or values of another size");
  if (place->buffer) {
    std::memcpy(place->buffer->data, values.const_data_ptr(), values.nbytes());
    place->is_copy = false;
    return;
  }
  auto buffer = buffer_with(place->bytes, values);
  std::unique_ptr<Transfer> under_way;
  const auto start = [&] { under_way = begin(/*writes=*/true, {place->range(buffer->data)}); };
  start();
  finish(/*writes=*/true, under_way, start);
  give_buffer(std::move(buffer));
}

void DiskMemory::make_room_beside(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    Place* const place = place_of(tensor);
    if (!place || place->beside) continue;
    place->beside = place->region();
    place->held.add(place->bytes);
  }
}

std::unique_ptr<Transfer> DiskMemory::send_beside(const std::vector<at::Tensor>& tensors) {
  auto places = places_of(tensors, /*in_memory=*/true);
  std::vector<std::unique_ptr<Buffer>> values;
  for (const auto& place : places) {
    Place::point(place, place->here.mapped);
    values.push_back(std::move(place->buffer));
  }
  return std::make_unique<Beside>(shared_from_this(), std::move(places), std::move(values));
}

std::unique_ptr<Transfer> DiskMemory::write_beside(const at::Tensor& tensor, const at::Tensor& values) {
  if (!place_of(tensor) || values.nbytes() != tensor.nbytes() || !values.is_contiguous())
    throw InternalError("disk memory: writing beside what has no place on the disk, or values of another size");
  make_room_beside({tensor});
  std::vector<std::unique_ptr<Buffer>> buffers;
  buffers.push_back(buffer_with(place_of(tensor)->bytes, values));
  return std::make_unique<Beside>(shared_from_this(), std::vector{shared_place_of(tensor)}, std::move(buffers));
}

void DiskMemory::exchange(const std::vector<at::Tensor>& tensors) {
  drop(tensors);
  for (const auto& place : places_of(tensors, /*in_memory=*/false)) {
    std::swap(place->here, place->beside.value());
    Place::point(place, place->here.mapped);
  }
}

bool DiskMemory::are_copies(const std::vector<at::Tensor>& tensors) const {
  const auto places = places_of(tensors, /*in_memory=*/true);
  return std::all_of(places.begin(), places.end(), [](const auto& place) { return place->is_copy; });
}

bool DiskMemory::may_have_been_touched(const at::Tensor& tensor) const {
  const Place* const place = place_of(tensor);
  if (!place || place->buffer) return true;
  std::vector<unsigned char> pages(static_cast<size_t>(place->bytes / DiskRequests::kBlock));
  if (::mincore(place->here.mapped, static_cast<size_t>(place->bytes), pages.data()) != 0) return true;
  return std::any_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1U) != 0; });
}

}  // namespace accelerate::residency
