#include "snapshot/ledger.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>

#include "snapshot/counts.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace accelerate::snapshot {
namespace {

std::atomic<int64_t>& epochs() {
  static std::atomic<int64_t> count{0};
  return count;
}

/// Past the cache: nobody reads it soon.
void stream_copy(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t kVector = 16;
  const int64_t head =
      std::min(bytes, (kVector - static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kVector)) % kVector);
  std::memcpy(to, from, static_cast<size_t>(head));
  to += head, from += head, bytes -= head;
  for (; bytes >= kVector; to += kVector, from += kVector, bytes -= kVector)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

struct CurrentLedger {
  Mutex mutex;
  std::shared_ptr<Ledger> ledger ACCELERATE_GUARDED_BY(mutex);
  std::atomic<bool> any{false};
};
CurrentLedger& current_ledger() {
  static CurrentLedger one;
  return one;
}

struct BeforeRead {
  Mutex mutex;
  std::function<void()> f ACCELERATE_GUARDED_BY(mutex);
};
BeforeRead& before_reads() {
  static BeforeRead one;
  return one;
}
std::function<void()> before_read() {
  const MutexLock lock(before_reads().mutex);
  return before_reads().f;
}

Ledger*& read_by() {
  thread_local Ledger* ledger = nullptr;
  return ledger;
}

}  // namespace

int64_t epoch() { return epochs().load(); }
int64_t next_epoch() { return ++epochs(); }

// ---- at the mark

Ledger::Ledger(const std::vector<NamedTensor>& state, const std::vector<NamedTensor>& views) {
  const auto has_memory = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0;
  };
  for (const auto& view : views) {
    if (!has_memory(view.tensor) || view.tensor.is_inference()) continue;
    views_.emplace(static_cast<const char*>(view.tensor.const_data_ptr()), view);
    longest_view_ = std::max(longest_view_, static_cast<int64_t>(view.tensor.nbytes()));
  }
  for (const auto& [name, tensor] : state) {
    if (!has_memory(tensor)) continue;
    const bool dense = tensor.is_non_overlapping_and_dense();
    const auto* const begin = static_cast<const char*>(dense ? tensor.const_data_ptr() : tensor.storage().data());
    const auto* const end = begin + (dense ? tensor.nbytes() : tensor.storage().nbytes());
    auto& known = state_.try_emplace(begin, end, name).first->second;
    if (known.first < end) known = {end, name};
  }
}

int64_t Ledger::Region::bytes_of(size_t chunk) const {
  return std::min(kChunkBytes, bytes - static_cast<int64_t>(chunk) * kChunkBytes);
}

char* Ledger::room(int64_t bytes) {
  constexpr size_t kLine = 64;
  const auto whole = (static_cast<size_t>(bytes) + kLine - 1) / kLine * kLine;
  auto* const memory = static_cast<char*>(std::aligned_alloc(kLine, whole));
  if (!memory) throw std::bad_alloc();
  return memory;
}

const std::string* Ledger::name_of(const char* begin, int64_t bytes) const {
  auto after = state_.upper_bound(begin);
  if (after == state_.begin()) return nullptr;
  const auto& [end, name] = std::prev(after)->second;
  return begin + bytes <= end ? &name : nullptr;
}

void Ledger::add_region(const at::Tensor& tensor, int64_t bytes, const std::string* name) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is only read
  auto* const begin = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  const auto [found, fresh] = regions_.try_emplace({begin, bytes}, Region{begin, bytes, tensor.storage()});
  Region& region = found->second;
  if (fresh) {
    const auto watch = [&](const at::Tensor& watched, const std::string* its_name, const void* place) {
      region.watched.push_back({watched, static_cast<int64_t>(watched._version()), its_name, place});
    };
    if (!tensor.is_inference()) watch(tensor, name, nullptr);
    for (auto view = views_.lower_bound(begin - longest_view_); view != views_.end() && view->first < begin + bytes;
         ++view)
      if (view->first + view->second.tensor.nbytes() > begin)
        watch(view->second.tensor, &view->second.name, view->first);
    region.chunks.resize(static_cast<size_t>((bytes + kChunkBytes - 1) / kChunkBytes));
    longest_ = std::max(longest_, bytes);
    state_bytes_ += bytes;
  }
  for (auto& chunk : region.chunks) ++chunk.reads;
}

at::Tensor Ledger::copied(at::Tensor copy) {
  copied_bytes_ += static_cast<int64_t>(copy.nbytes());
  return copy;
}

/// For a tensor that takes up all of its storage: ours, at the same bytes or at a copy of them.
c10::Storage Ledger::storage_for(const at::Tensor& tensor) {
  const auto& given = tensor.storage();
  const auto bytes = static_cast<int64_t>(given.nbytes());
  const auto* const name = name_of(static_cast<const char*>(given.data()), bytes);
  if (name) add_region(tensor, bytes, name);
  const auto found = storages_.find(given.unsafeGetStorageImpl());
  if (found != storages_.end()) return found->second.second;
  c10::Storage ours;
  if (name) {
    ours = c10::Storage(c10::Storage::use_byte_size_t(), given.nbytes(),
                        at::DataPtr(given.mutable_data(), at::Device(at::kCPU)));
  } else {
    const auto copy = copied(at::empty({bytes}, at::TensorOptions().dtype(at::kByte)));
    std::memcpy(copy.mutable_data_ptr(), given.data(), given.nbytes());
    ours = copy.storage();
  }
  storages_.emplace(given.unsafeGetStorageImpl(), std::pair(given, ours));
  return ours;
}

at::Tensor Ledger::hold(const at::Tensor& given, Order order) {
  if (!given.defined() || given.layout() != at::kStrided || given.is_meta()) return given;
  const auto tensor = given.detach();
  if (!tensor.is_cpu()) return copied(tensor.cpu());
  if (tensor.is_conj() || tensor.is_neg()) return copied(tensor.resolve_conj().resolve_neg().clone());
  const auto options = tensor.options().requires_grad(false);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  const bool whole = tensor.nbytes() == tensor.storage().nbytes();
  if (whole && (order == Order::as_it_is || tensor.is_contiguous()))
    return at::empty({0}, options).set_(storage_for(tensor), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const auto* const name =
      tensor.is_contiguous() ? name_of(static_cast<const char*>(tensor.const_data_ptr()), bytes) : nullptr;
  if (!name) return copied(tensor.clone(at::MemoryFormat::Contiguous));
  add_region(tensor, bytes, name);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), options);
}

// ---- the writer

namespace {

/// In pieces that stay in a core's own cache while checksums are computed and they are copied.
void give(const char* begin, int64_t bytes, const std::function<void(std::string_view)>& take) {
  constexpr int64_t kPieceBytes = 64 << 10;
  for (int64_t at = 0; at < bytes; at += kPieceBytes)
    take({begin + at, static_cast<size_t>(std::min(kPieceBytes, bytes - at))});
}

}  // namespace

void Ledger::read(const void* begin, int64_t bytes, const std::function<void(std::string_view)>& take) {
  const auto found = regions_.find({static_cast<const char*>(begin), bytes});
  if (found == regions_.end()) return give(static_cast<const char*>(begin), bytes, take);
  using State = Chunk::State;
  Region& region = found->second;
  for (size_t i = 0; i < region.chunks.size(); ++i) {
    Chunk& chunk = region.chunks[i];
    bool live = false;
    if (const auto pause = before_read()) pause();
    AtomicFile::make_room_here();  // a step that comes to the chunk meanwhile waits for a copy, and not for the disk
    if (abandoned_) throw CheckpointError("the program ended before its files were written");
    {
      MutexLock lock(mutex_);
      while (chunk.state == State::being_kept) lock.wait(changed_);
      if (chunk.state == State::read) throw InternalError("saving behind training: found a chunk that is read again");
      live = chunk.state == State::live;
      if (live) chunk.state = State::being_read;
    }
    const auto let_go = [&] {
      {
        const MutexLock lock(mutex_);
        if (--chunk.reads == 0) chunk.state = State::read, chunk.old.reset();
        else chunk.state = live ? State::live : State::kept;
      }
      changed_.notify_all();
    };
    try {
      give(live ? region.begin + static_cast<int64_t>(i) * kChunkBytes : chunk.old.get(), region.bytes_of(i), take);
    } catch (...) {
      let_go();
      throw;
    }
    let_go();
  }
}

std::string Ledger::finish() {
  MutexLock lock(mutex_);
  while (in_step_) lock.wait(changed_);
  // Versions are compared now, when writes that came beside reading have counted themselves.
  for (auto& [place, region] : regions_)
    if (!region.announced) announce(region);
  finished_ = true;
  for (auto& [place, region] : regions_)
    for (auto& chunk : region.chunks) {
      while (chunk.state == Chunk::State::being_kept) lock.wait(changed_);  // a step writes there
      chunk.state = Chunk::State::read;
      chunk.old.reset();
    }
  return failure_;
}

// ---- who rewrites

void Ledger::compare_versions(const Region& region) {
  for (const auto& one : region.watched) {
    const auto version = static_cast<int64_t>(one.tensor._version());
    if (version == one.version || !failure_.empty()) continue;
    if (one.place && one.place != one.tensor.const_data_ptr())
      continue;  // moved away: who writes it back announces that
    failure_ = fmt::format(
        "'{}' was changed behind the save ({} writes since), expected writes by optimizers' steps and this library "
        "only: call wait_for_checkpoint() before the program writes to parameters or optimizers' states itself",
        *one.name, version - one.version);
  }
}

void Ledger::announce(Region& region) {
  if (!std::exchange(region.announced, true) && !in_step_) compare_versions(region);
}

void Ledger::begin_step() {
  const MutexLock lock(mutex_);
  for (const auto& [place, region] : regions_)
    if (!region.announced) compare_versions(region);
  in_step_ = true;
}

void Ledger::end_step() {
  {
    const MutexLock lock(mutex_);
    for (auto& [place, region] : regions_)
      for (auto& one : region.watched) one.version = static_cast<int64_t>(one.tensor._version());
    in_step_ = false;
  }
  changed_.notify_all();
}

StepWrites::StepWrites() : ledger_(current()) {
  if (ledger_ && ledger_->finished_) ledger_.reset();
  if (ledger_) ledger_->begin_step();
}
StepWrites::~StepWrites() {
  if (ledger_) ledger_->end_step();
}

template <class F> void Ledger::for_each_overlapping(const char* begin, int64_t bytes, const F& f) {
  for (auto at = regions_.lower_bound({begin - longest_, 0}); at != regions_.end() && at->first.first < begin + bytes;
       ++at)
    if (at->first.first + at->first.second > begin) f(at->second);
}

void Ledger::wait_until_read(Chunk& chunk, MutexLock& lock) {
  if (chunk.state != Chunk::State::being_read) return;
  const auto begun = std::chrono::steady_clock::now();
  counts::add(SnapshotCount::waits);
  while (chunk.state == Chunk::State::being_read) lock.wait(changed_);
  counts::add(SnapshotCount::waited_ns, (std::chrono::steady_clock::now() - begun) / std::chrono::nanoseconds(1));
}

void Ledger::keep(Region& region) {
  MutexLock lock(mutex_);
  announce(region);
  for (size_t i = 0; i < region.chunks.size(); ++i) {
    Chunk& chunk = region.chunks[i];
    wait_until_read(chunk, lock);
    if (chunk.state != Chunk::State::live) continue;
    const auto bytes = region.bytes_of(i);
    chunk.old.reset(room(bytes));
    std::memcpy(chunk.old.get(), region.begin + static_cast<int64_t>(i) * kChunkBytes, static_cast<size_t>(bytes));
    chunk.state = Chunk::State::kept;
    counts::add(SnapshotCount::kept_bytes, bytes);
  }
}

void set_before_read(std::function<void()> f) {
  const MutexLock lock(before_reads().mutex);
  before_reads().f = std::move(f);
}

std::shared_ptr<Ledger> current() {
  auto& now = current_ledger();
  if (!now.any.load(std::memory_order_acquire)) return nullptr;
  const MutexLock lock(now.mutex);
  return now.ledger;
}

void set_current(std::shared_ptr<Ledger> ledger) {
  auto& now = current_ledger();
  const MutexLock lock(now.mutex);
  now.any = ledger != nullptr;
  now.ledger = std::move(ledger);
}

void keep(const void* begin, int64_t bytes) {
  const auto ledger = current();
  if (!ledger || ledger->finished_ || bytes == 0) return;
  ledger->for_each_overlapping(static_cast<const char*>(begin), bytes,
                               [&](Ledger::Region& region) { ledger->keep(region); });
}

void keep(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return;
  if (tensor.is_non_overlapping_and_dense()) keep(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  else keep(tensor.storage().data(), static_cast<int64_t>(tensor.storage().nbytes()));
}

void keep_all() {
  const auto ledger = current();
  if (!ledger || ledger->finished_) return;
  for (auto& [place, region] : ledger->regions_) ledger->keep(region);
}

Keeping::Keeping() : ledger_(current()), exceptions_(std::uncaught_exceptions()) {}

void Keeping::add(const void* begin, int64_t bytes) {
  if (!ledger_ || ledger_->finished_ || bytes == 0) return;
  using State = Ledger::Chunk::State;
  const auto* const from = static_cast<const char*>(begin);
  ledger_->for_each_overlapping(from, bytes, [&](Ledger::Region& region) {
    if (region.begin < from || region.begin + region.bytes > from + bytes) return ledger_->keep(region);
    MutexLock lock(ledger_->mutex_);
    ledger_->announce(region);
    for (size_t i = 0; i < region.chunks.size(); ++i) {
      auto& chunk = region.chunks[i];
      ledger_->wait_until_read(chunk, lock);
      if (chunk.state != State::live) continue;
      const auto size = region.bytes_of(i);
      chunk.old.reset(Ledger::room(size));
      chunk.state = State::being_kept;
      const char* const place = region.begin + static_cast<int64_t>(i) * kChunkBytes;
      const Claim claim{place, place + size, chunk.old.get(), &chunk};
      claims_.insert(std::upper_bound(claims_.begin(), claims_.end(), claim,
                                      [](const Claim& a, const Claim& b) { return a.begin < b.begin; }),
                     claim);
      counts::add(SnapshotCount::kept_bytes, size);
    }
  });
}

void Keeping::stream(const void* begin, int64_t bytes) const {
  const auto* const from = static_cast<const char*>(begin);
  const auto* const end = from + bytes;
  auto claim = std::lower_bound(claims_.begin(), claims_.end(), from - kChunkBytes,
                                [](const Claim& one, const char* place) { return one.begin < place; });
  for (; claim != claims_.end() && claim->begin < end; ++claim) {
    const auto *const first = std::max(from, claim->begin), *const last = std::min(end, claim->end);
    if (first < last) stream_copy(claim->to + (first - claim->begin), first, last - first);
  }
}

void Keeping::fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

Keeping::~Keeping() {
  if (claims_.empty()) return;
  {
    const MutexLock lock(ledger_->mutex_);
    for (const auto& claim : claims_) claim.chunk->state = Ledger::Chunk::State::kept;
    if (std::uncaught_exceptions() > exceptions_ && ledger_->failure_.empty())
      ledger_->failure_ = "a step failed in its middle, while it kept old values for the save";
  }
  ledger_->changed_.notify_all();
}

ReadsBy::ReadsBy(Ledger& ledger) { read_by() = &ledger; }
ReadsBy::~ReadsBy() { read_by() = nullptr; }

void bytes_at_mark(const void* begin, int64_t bytes, const std::function<void(std::string_view)>& take) {
  if (auto* const ledger = read_by()) return ledger->read(begin, bytes, take);
  give(static_cast<const char*>(begin), bytes, take);
}

}  // namespace accelerate::snapshot
