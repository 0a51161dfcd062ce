#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>
#include <c10/util/strides.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/residency/recompute.hpp"
#include "residency/activations/activation_home.hpp"
#include "residency/activations/replay_state.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

// A storage moves as a whole: several operators save the same tensor, or views of it, and the whole storage is freed or
// nothing is. Only a tensor that is a small part of its storage moves as a copy of its own. A storage that was moved is
// an Entry; the saved variables that need it share it. Entries are numbered in the order in which they were saved, and
// backward asks for them in the opposite order, which the prefetch follows.

namespace accelerate {
namespace residency {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// A tensor of at least this part of its storage moves the whole: the chunks of a fused query-key-value projection are
/// a third each, or less with grouped heads.
constexpr int64_t kWorthTheWholeStorage = 8;

at::Tensor view_of(const c10::Storage& storage, at::TensorOptions options, int64_t offset, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  return at::empty({0}, options).set_(storage, offset, sizes, strides);
}

at::Tensor bytes_of(const c10::Storage& storage, c10::Device device) {
  return view_of(storage, at::TensorOptions().dtype(at::kByte).device(device), 0,
                 {static_cast<int64_t>(storage.nbytes())}, {1});
}

class Offloader final : public SavedTensorHooks, public std::enable_shared_from_this<Offloader> {
 public:
  Offloader(const ActivationOffloadOptions& options, std::unique_ptr<ActivationHome> home)
      : options_(options), home_(std::move(home)) {}

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    if (stays(tensor)) {
      const MutexLock lock(mutex_);
      ++stats_.saved, ++stats_.kept;
      return keep_in_place(tensor);
    }
    auto plain = without_graph(tensor);
    const bool whole =
        plain.numel() * plain.element_size() * kWorthTheWholeStorage >= static_cast<int64_t>(plain.storage().nbytes());
    auto key = key_of(plain, whole);
    std::shared_ptr<Entry> entry;
    {
      const MutexLock lock(mutex_);
      ++stats_.saved;
      if (const auto found = by_key_.find(key); found != by_key_.end()) entry = found->second.lock();
      if (entry) ++entry->users, ++entry->uses_left;
    }
    if (!entry) {
      if (!whole) plain = plain.clone(at::MemoryFormat::Contiguous);
      entry = std::make_shared<Entry>();
      entry->source = plain.storage().getWeakStorageImpl();
      entry->bytes = static_cast<int64_t>(plain.storage().nbytes());
      {
        const MutexLock fetching(entry->fetching);
        entry->away = home_->store(bytes_of(plain.storage(), plain.device()));
      }
      const MutexLock lock(mutex_);
      entry->number = ++last_number_;
      entry->key = key;
      by_number_.emplace(entry->number, entry);
      by_key_.insert_or_assign(std::move(key), entry);
      ++stats_.moved;
      stats_.bytes_moved += entry->bytes;
    }
    return std::make_unique<Away>(shared_from_this(), std::move(entry), tensor, whole);
  }

  ActivationOffloadStats stats() const {
    const MutexLock lock(mutex_);
    return stats_;
  }

 private:
  /// Which bytes: the storage, their version, and for a part of a storage which part.
  using Key = std::tuple<const void*, uint32_t, std::vector<int64_t>>;

  /// One storage that was moved. Members without a mutex of their own are guarded by the Offloader's, which the check
  /// can't follow from one object into another.
  struct Entry {
    int64_t number = 0;
    Key key;
    WeakStorage source{c10::intrusive_ptr<c10::StorageImpl>()};  ///< the original, as long as somebody else uses it or
                                                                 ///< the copy is not done
    int64_t bytes = 0;
    int64_t users = 1;      ///< saved variables
    int64_t uses_left = 1;  ///< of them in this pass of backward; then what was fetched is let go
    at::Tensor fetched;     ///< [bytes] uint8
    Mutex fetching;
    std::unique_ptr<AwayBytes> away ACCELERATE_GUARDED_BY(fetching);
  };

  class Away final : public PackedTensor {
   public:
    Away(std::shared_ptr<Offloader> owner, std::shared_ptr<Entry> entry, const at::Tensor& tensor, bool whole)
        : owner_(std::move(owner)),
          entry_(std::move(entry)),
          stamp_(tensor),
          options_(tensor.options()),
          offset_(whole ? tensor.storage_offset() : 0),
          sizes_(tensor.sizes()),
          strides_(whole ? at::DimVector(tensor.strides()) : c10::contiguous_strides(tensor.sizes())) {}
    ~Away() override { owner_->let_go(*entry_); }
    at::Tensor unpack() override {
      stamp_.check("backward, of a tensor saved within an ActivationOffload scope");
      return view_of(owner_->storage_of(*entry_), options_, offset_, sizes_, strides_);
    }

   private:
    const std::shared_ptr<Offloader> owner_;
    const std::shared_ptr<Entry> entry_;
    const VersionStamp stamp_;
    const at::TensorOptions options_;
    const int64_t offset_;
    const at::DimVector sizes_, strides_;
  };

  bool stays(const at::Tensor& tensor) const {
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.is_quantized() || tensor.is_nested() ||
        tensor.is_meta() || tensor.is_conj() || tensor.is_neg())
      return true;
    if (tensor.key_set().has(c10::DispatchKey::DeferredInit)) return true;  // a member of the residency engine
    if (tensor.device().is_cpu() && !options_.directory) return true;
    if (tensor.numel() * tensor.element_size() < options_.min_bytes || tensor.numel() == 0) return true;
    const auto& base = tensor.is_view() ? tensor._base() : tensor;
    if (base.is_leaf() && base.requires_grad()) return true;
    return options_.keep && options_.keep(tensor);
  }

  static Key key_of(const at::Tensor& tensor, bool whole) {
    std::vector<int64_t> part;
    if (!whole) {
      part = {tensor.storage_offset(), static_cast<int64_t>(tensor.scalar_type())};
      part.insert(part.end(), tensor.sizes().begin(), tensor.sizes().end());
      part.insert(part.end(), tensor.strides().begin(), tensor.strides().end());
    }
    return {tensor.storage().unsafeGetStorageImpl(), static_cast<uint32_t>(tensor._version()), std::move(part)};
  }

  c10::Storage storage_of(Entry& entry) {
    const MutexLock fetching(entry.fetching);
    auto storage = present(entry);
    if (!storage) {
      const bool ahead = entry.away->started();
      auto fetched = entry.away->fetch();
      storage = fetched.storage();
      const MutexLock lock(mutex_);
      entry.fetched = std::move(fetched);
      ++(ahead ? stats_.prefetched : stats_.fetched_late);
    }
    at::Tensor dropped;
    {
      const MutexLock lock(mutex_);
      if (--entry.uses_left <= 0) {
        entry.uses_left = entry.users;  // for another pass, if the graph is retained
        dropped = std::move(entry.fetched);
      }
    }
    prefetch_before(entry.number);
    return storage;
  }

  /// The storage, if it is in memory.
  c10::Storage present(Entry& entry) {
    const MutexLock lock(mutex_);
    if (entry.fetched.defined()) return entry.fetched.storage();
    auto source = entry.source.lock();
    if (source) ++stats_.alive;
    return c10::Storage(std::move(source));
  }

  void prefetch_before(int64_t number) {
    std::vector<std::shared_ptr<Entry>> next;
    {
      const MutexLock lock(mutex_);
      int64_t bytes = 0;
      for (auto i = by_number_.lower_bound(number); i != by_number_.begin() && bytes < options_.prefetch_bytes;) {
        --i;
        auto entry = i->second.lock();
        if (!entry || entry->fetched.defined() || entry->source.use_count() > 0) continue;
        bytes += entry->bytes;
        next.push_back(std::move(entry));
      }
    }
    for (const auto& entry : next) {
      if (!entry->fetching.try_lock()) continue;  // another thread of autograd is at it
      const MutexLock fetching(entry->fetching, std::adopt_lock);
      if (!entry->source.lock()) entry->away->prefetch();
    }
  }

  void let_go(Entry& entry) noexcept {
    at::Tensor dropped;
    const MutexLock lock(mutex_);
    --entry.users;
    if (entry.uses_left > entry.users) entry.uses_left = entry.users;
    if (entry.users > 0) return;
    dropped = std::move(entry.fetched);
    by_number_.erase(entry.number);
    if (const auto found = by_key_.find(entry.key); found != by_key_.end() && found->second.lock().get() == &entry)
      by_key_.erase(found);
  }

  const ActivationOffloadOptions options_;
  const std::unique_ptr<ActivationHome> home_;
  mutable Mutex mutex_;
  int64_t last_number_ ACCELERATE_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::weak_ptr<Entry>> by_number_ ACCELERATE_GUARDED_BY(mutex_);
  std::map<Key, std::weak_ptr<Entry>> by_key_ ACCELERATE_GUARDED_BY(mutex_);
  ActivationOffloadStats stats_ ACCELERATE_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace residency

struct ActivationOffload::State {
  std::shared_ptr<residency::Offloader> offloader;
  std::optional<residency::SavedTensorHooksScope> scope;
};

ActivationOffload::ActivationOffload(const ActivationOffloadOptions& options) : state_(std::make_unique<State>()) {
  for (const auto& [name, value] : {std::pair{"min_bytes", options.min_bytes},
                                    {"prefetch_bytes", options.prefetch_bytes},
                                    {"max_pending_bytes", options.max_pending_bytes}})
    if (value < 0)
      raise<ConfigError>("ActivationOffload: found {} = {}, expected a number of bytes from 0.", name, value);
  if (!options.directory && !residency::current_accelerator()) return;  // host memory is where everything is already
  state_->offloader = std::make_shared<residency::Offloader>(
      options, options.directory ? residency::make_disk_home(*options.directory, options.max_pending_bytes)
                                 : residency::make_host_home(options.pin_memory));
  state_->scope.emplace(state_->offloader);
}

ActivationOffload::~ActivationOffload() = default;

void ActivationOffload::close() { state_->scope.reset(); }

ActivationOffloadStats ActivationOffload::stats() const {
  return state_->offloader ? state_->offloader->stats() : ActivationOffloadStats{};
}

}  // namespace accelerate
