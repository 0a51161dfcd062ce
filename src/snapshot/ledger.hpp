#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "utils/thread_annotations.hpp"

/// Memory as it was at one moment, read later, while it is rewritten: a save behind training. Nothing is copied at that
/// moment, the mark. Each chunk of memory is read by the writer's thread, or kept by who is about to rewrite it,
/// whoever comes first; so whoever rewrites state tells so before: by keep(), or, where it goes over all of it anyway,
/// by a Keeping, which costs less.
namespace accelerate::snapshot {

inline constexpr int64_t kChunkBytes = int64_t{4} << 20;

/// The marks of this process so far. Marks are set between steps, on all ranks together, so that a number means the
/// same state on all of them.
int64_t epoch();
/// Sets one. @return its number
int64_t next_epoch();

/// A tensor of the state, with a name for errors.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What a save still has to read. Made and filled on the thread that trains, read on the writer's.
class Ledger {
 public:
  /// @param state  is read later from where it lies: parameters and optimizers' states, which nobody rewrites without a
  /// word but the program itself. All else is copied.
  /// @param views  other tensors of the same memory, whose writes count too: models' parameters, of shards
  explicit Ledger(const std::vector<NamedTensor>& state, const std::vector<NamedTensor>& views = {});
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  enum class Order {
    row_major,  ///< elements must lie one after the other, else they are copied so
    as_it_is,   ///< any, for files that say the strides
  };
  /// A tensor of the same values for the writer: without operators' handlers, and with a storage of its own, which
  /// tensors share that have one storage and take up all of it. Read it by bytes_at_mark() only. What its writer would
  /// refuse (no strides, no data) comes back as it is.
  at::Tensor hold(const at::Tensor& tensor, Order order);

  /// Of the writer: gives the bytes at `begin` as they were, piece by piece, from where they lie: steps that come to a
  /// chunk wait until it is taken. What was not held comes as it is.
  void read(const void* begin, int64_t bytes, const std::function<void(std::string_view)>& take);
  /// From here on reading throws. Any thread.
  void abandon() { abandoned_ = true; }
  /// Of the writer, when it has read all: what is wrong with it; empty: nothing. Nobody keeps anything any more.
  std::string finish();

  int64_t state_bytes() const { return state_bytes_; }
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  friend class Keeping;
  friend class StepWrites;
  friend void keep(const void* begin, int64_t bytes);
  friend void keep_all();

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Chunk {
    enum class State { live, being_read, being_kept, kept, read } state = State::live;
    int64_t reads = 0;  ///< that are still to come
    std::unique_ptr<char, Free> old = nullptr;
  };
  /// A tensor whose version tells of writes that nobody announced.
  struct Watched {
    at::Tensor tensor;
    int64_t version;
    const std::string* name;
    const void* place;  ///< of a view, whose writes count while it lies there; null: it is the state itself
  };
  struct Region {
    char* begin;
    int64_t bytes;
    c10::Storage storage;  ///< held: a tensor may get another one
    std::vector<Watched> watched = {};
    bool announced = false;  ///< a write, before which all that was live was kept
    std::vector<Chunk> chunks = {};
    int64_t bytes_of(size_t chunk) const;
  };
  using Regions = std::map<std::pair<const char*, int64_t>, Region>;

  const std::string* name_of(const char* begin, int64_t bytes) const;
  c10::Storage storage_for(const at::Tensor& tensor);
  void add_region(const at::Tensor& tensor, int64_t bytes, const std::string* name);
  at::Tensor copied(at::Tensor copy);
  template <class F> void for_each_overlapping(const char* begin, int64_t bytes, const F& f);
  void compare_versions(const Region& region) ACCELERATE_REQUIRES(mutex_);
  void announce(Region& region) ACCELERATE_REQUIRES(mutex_);
  void begin_step();
  void end_step();
  void keep(Region& region);
  void wait_until_read(Chunk& chunk, MutexLock& lock) ACCELERATE_REQUIRES(mutex_);
  static char* room(int64_t bytes);

  std::map<const char*, std::pair<const char*, std::string>> state_;  ///< by begin: end and name
  std::multimap<const char*, NamedTensor> views_;                     ///< by begin
  int64_t longest_view_ = 0;
  std::map<const c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;  ///< the given one and ours
  Regions regions_;
  int64_t longest_ = 0, state_bytes_ = 0, copied_bytes_ = 0;
  std::atomic<bool> finished_{false}, abandoned_{false};
  Mutex mutex_;
  std::condition_variable changed_;
  std::string failure_ ACCELERATE_GUARDED_BY(mutex_);
  bool in_step_ ACCELERATE_GUARDED_BY(mutex_) = false;
};

/// The one that is being read; null: none. Any thread.
std::shared_ptr<Ledger> current();
void set_current(std::shared_ptr<Ledger> ledger);

/// For tests: what the writer's thread does before it reads a chunk. Null: nothing.
void set_before_read(std::function<void()> f);

/// Before these bytes are rewritten: copies what a save still has to read of the tensors that they belong to.
void keep(const void* begin, int64_t bytes);
void keep(const at::Tensor& tensor);
/// The same of everything, where it is not known what will be rewritten.
void keep_all();

/// The same for who goes over all of some memory: it asks for old values on its way, so that nothing is read twice.
class Keeping {
 public:
  Keeping();
  /// The old values are there: on a thread that saw all of stream().
  ~Keeping();
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;

  /// Memory of which every byte will go through stream(). Before that.
  void add(const void* begin, int64_t bytes);
  bool any() const { return !claims_.empty(); }
  /// Before these bytes are rewritten, each once. Any thread; fence() after the last of it on each.
  void stream(const void* begin, int64_t bytes) const;
  static void fence();

 private:
  struct Claim {
    const char *begin, *end;
    char* to;
    Ledger::Chunk* chunk;
  };
  std::shared_ptr<Ledger> ledger_;
  std::vector<Claim> claims_;  ///< by begin
  int exceptions_;
};

/// While an optimizer steps: tensors that are views of one memory count each other's writes, so versions are compared
/// before it and taken anew after it.
class StepWrites {
 public:
  StepWrites();
  ~StepWrites();
  StepWrites(const StepWrites&) = delete;
  StepWrites& operator=(const StepWrites&) = delete;

 private:
  std::shared_ptr<Ledger> ledger_;
};

/// On the writer's thread while it writes: bytes_at_mark() reads by this ledger.
class ReadsBy {
 public:
  explicit ReadsBy(Ledger& ledger);
  ~ReadsBy();
  ReadsBy(const ReadsBy&) = delete;
  ReadsBy& operator=(const ReadsBy&) = delete;
};
/// For who writes files: these bytes, as they were at the mark where this thread writes behind training; else at once.
void bytes_at_mark(const void* begin, int64_t bytes, const std::function<void(std::string_view)>& take);

}  // namespace accelerate::snapshot
