#include "residency/disk/direct_io.hpp"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "memory/huge_pages.hpp"
#include "residency/counters.hpp"

namespace accelerate::residency {
namespace {

using DiskRange = DirectIo::Range;

/// The error that it means when not one byte was moved.
int error_of_nothing(bool writes) { return writes ? ENOSPC : EIO; }

/// The requests that ranges are cut into, one after the other.
class Cut {
 public:
  Cut(std::vector<DiskRange> ranges, int64_t bytes) : ranges_(std::move(ranges)), bytes_(bytes) {}
  std::optional<DiskRange> next() {
    while (!ranges_.empty() && ranges_.back().bytes == 0) ranges_.pop_back();
    if (ranges_.empty()) return std::nullopt;
    DiskRange& rest = ranges_.back();
    const DiskRange request{rest.offset, rest.data, std::min(rest.bytes, bytes_)};
    rest.offset += request.bytes, rest.bytes -= request.bytes;
    if (rest.data) rest.data += request.bytes;  // else requests get windows
    return request;
  }

 private:
  std::vector<DiskRange> ranges_;
  int64_t bytes_;
};

/// Memory for requests that have none of their own, and who gets what has come into it.
struct Windows {
  char* memory;   ///< of a request for each that is on its way
  int64_t bytes;  ///< of one
  const std::function<void(int64_t offset, const char* data, int64_t bytes)>& take;

  char* begin(size_t slot) const { return memory + static_cast<int64_t>(slot) * bytes; }
  void give(size_t slot, const DiskRange& done) const {
    const int64_t count = done.data - begin(slot);
    take(done.offset - count, begin(slot), count);
  }
};

/// The queue of one thread.
class Ring {
 public:
  explicit Ring(int64_t depth) { works_ = ::io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0) == 0; }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (works_) ::io_uring_queue_exit(&ring_);
  }
  /// The kernel may know nothing of it, or forbid it (in containers, mostly).
  bool works() const { return works_ && works_after_; }

  /// @return the first error, or 0. Nothing is on its way any more then.
  int move(bool writes, int file, Cut cut, const DiskRequests& how, const Windows* windows) {
    std::vector<DiskRange> requests(static_cast<size_t>(how.depth));
    std::vector<size_t> free;
    for (size_t i = requests.size(); i > 0; --i) free.push_back(i - 1);
    std::vector<size_t> again;  // came back in part
    int error = 0;
    bool refill = true;
    for (;;) {
      while (refill && error == 0) {
        size_t slot = 0;
        if (!again.empty()) {
          slot = again.back();
          again.pop_back();
        } else if (free.empty()) {
          break;
        } else if (const auto next = cut.next()) {
          slot = free.back();
          free.pop_back();
          requests[slot] = *next;
          if (windows) requests[slot].data = windows->begin(slot);
        } else {
          break;
        }
        if (const int failed = ask(writes, file, requests[slot], slot, how.one_by_one)) error = failed;
      }
      if (!how.one_by_one && error == 0) error = submit();
      if (const auto unheard = static_cast<int64_t>(::io_uring_sq_ready(&ring_)); unheard > 0) {
        on_their_way_ -= unheard;  // the kernel refuses them for good
        works_after_ = false;
      }
      if (on_their_way_ == 0 && (error != 0 || again.empty())) return error;
      if (on_their_way_ == 0) continue;
      ::io_uring_cqe* done = nullptr;
      if (const int failed = ::io_uring_wait_cqe(&ring_, &done); failed == -EINTR) continue;
      else if (failed < 0) return -failed;
      do {
        const auto slot = static_cast<size_t>(done->user_data);
        const int moved = done->res;
        ::io_uring_cqe_seen(&ring_, done);
        --on_their_way_;
        DiskRange& request = requests[slot];
        if (moved == -EINTR || moved == -EAGAIN) {
          again.push_back(slot);
        } else if (moved <= 0) {
          if (error == 0) error = moved < 0 ? -moved : error_of_nothing(writes);
        } else if (request.offset += moved, request.data += moved, request.bytes -= moved; request.bytes > 0) {
          again.push_back(slot);
        } else {
          if (windows) windows->give(slot, request);
          free.push_back(slot);
        }
      } while (::io_uring_peek_cqe(&ring_, &done) == 0);
      refill = how.refills_at_once || on_their_way_ == 0;
    }
  }

 private:
  int ask(bool writes, int file, const DiskRange& request, size_t slot, bool at_once) {
    ::io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (writes)
      ::io_uring_prep_write(entry, file, request.data, static_cast<unsigned>(request.bytes),
                            static_cast<uint64_t>(request.offset));
    else
      ::io_uring_prep_read(entry, file, request.data, static_cast<unsigned>(request.bytes),
                           static_cast<uint64_t>(request.offset));
    entry->user_data = slot;
    counts::add(ResidencyCount::disk_requests);
    counts::most(ResidencyCount::disk_requests_most, ++on_their_way_);
    return at_once ? submit() : 0;
  }
  int submit() {
    if (::io_uring_sq_ready(&ring_) > 0) counts::add(ResidencyCount::disk_submissions);
    while (::io_uring_sq_ready(&ring_) > 0) {
      const int done = ::io_uring_submit(&ring_);
      if (done < 0 && done != -EINTR && done != -EAGAIN) return -done;
    }
    return 0;
  }

  ::io_uring ring_{};
  bool works_ = false, works_after_ = true;
  int64_t on_their_way_ = 0;
};

/// @return the first error, or 0
int move_plainly(bool writes, int file, Cut cut, const Windows* windows) {
  while (auto request = cut.next()) {
    if (windows) request->data = windows->begin(0);
    while (request->bytes > 0) {
      const auto count = static_cast<size_t>(request->bytes);
      const auto moved = writes ? ::pwrite(file, request->data, count, request->offset)
                                : ::pread(file, request->data, count, request->offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return moved < 0 ? errno : error_of_nothing(writes);
      request->offset += moved, request->data += moved, request->bytes -= moved;
    }
    if (windows) windows->give(0, *request);
  }
  return 0;
}

void move(bool writes, int file, std::vector<DiskRange> ranges, const DiskRequests& how,
          const Windows* windows = nullptr) {
  std::reverse(ranges.begin(), ranges.end());  // Cut takes them from the end
  thread_local std::unique_ptr<Ring> ring;
  thread_local int64_t depth = 0;
  if (!ring || depth != how.depth) ring = std::make_unique<Ring>(depth = how.depth);
  if (ring->works()) {
    int64_t bytes = 0;
    for (const auto& range : ranges) bytes += range.bytes;
    counts::add(ResidencyCount::disk_bytes_by_ring, bytes);
  }
  const Cut cut(std::move(ranges), how.bytes);
  if (const int error =
          ring->works() ? ring->move(writes, file, cut, how, windows) : move_plainly(writes, file, cut, windows))
    throw std::system_error(error, std::generic_category());
}

/// Aligned memory of the calling thread, which it keeps. In huge pages, because a virtual disk answers a request into
/// few shards of memory half as fast again as one into a thousand.
char* windows_of_thread(int64_t bytes) {
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t has = 0;
  if (has < bytes) {
    const int64_t aligned = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    memory.reset(std::aligned_alloc(kHugePage, static_cast<size_t>(aligned)));
    if (!memory) throw std::bad_alloc();
    prefer_huge_pages(memory.get(), aligned);
    has = aligned;
  }
  return static_cast<char*>(memory.get());
}

/// Shares of about equal size.
std::vector<std::vector<DiskRange>> shared_out_over_threads(const std::vector<DiskRange>& ranges, int64_t threads,
                                                            int64_t request) {
  int64_t all = 0;
  for (const auto& range : ranges) all += range.bytes;
  constexpr int64_t kBlock = DiskRequests::kBlock;
  const int64_t share = std::max(request, (all / threads + kBlock) / kBlock * kBlock);
  std::vector<std::vector<DiskRange>> shares(1);
  int64_t room = share;
  for (DiskRange rest : ranges)
    while (rest.bytes > 0) {
      if (room == 0) shares.emplace_back(), room = share;
      const int64_t bytes = std::min(room, rest.bytes);
      shares.back().push_back({rest.offset, rest.data, bytes});
      rest.offset += bytes, rest.data += bytes, rest.bytes -= bytes, room -= bytes;
    }
  return shares;
}

class AllShares final : public Transfer {
 public:
  explicit AllShares(std::vector<std::unique_ptr<Transfer>> shares) : shares_(std::move(shares)) {}
  void wait() override {
    for (auto& share : shares_) share->wait();
  }

 private:
  std::vector<std::unique_ptr<Transfer>> shares_;
};

}  // namespace

std::unique_ptr<Transfer> DirectIo::read(int file, std::vector<Range> ranges) {
  return start(/*writes=*/false, file, std::move(ranges));
}
std::unique_ptr<Transfer> DirectIo::write(int file, std::vector<Range> ranges) {
  return start(/*writes=*/true, file, std::move(ranges));
}

void DirectIo::read_by_requests(int file, int64_t offset, int64_t bytes, const DiskRequests& requests,
                                const std::function<void(int64_t offset, const char* data, int64_t bytes)>& take) {
  const Windows windows{windows_of_thread(requests.bytes * requests.depth), requests.bytes, take};
  counts::add(ResidencyCount::disk_bytes_read, bytes);
  move(/*writes=*/false, file, {{offset, nullptr, bytes}}, requests, &windows);
}

std::unique_ptr<Transfer> DirectIo::start(bool writes, int file, std::vector<Range> ranges) {
  auto& workers = writes ? writers_ : readers_;
  int64_t bytes = 0;
  for (const auto& range : ranges) bytes += range.bytes;
  counts::add(writes ? ResidencyCount::disk_bytes_written : ResidencyCount::disk_bytes_read, bytes);
  std::vector<std::unique_ptr<Transfer>> shares;
  for (auto& share : shared_out_over_threads(ranges, requests_.threads, requests_.bytes)) {
    const size_t thread = shares.size();
    counts::add(ResidencyCount::disk_shares);
    while (workers.size() <= thread) workers.push_back(std::make_shared<Worker>());
    shares.push_back(workers[thread]->run(
        [writes, file, share = std::move(share), how = requests_] { move(writes, file, share, how); }));
  }
  return std::make_unique<AllShares>(std::move(shares));
}

}  // namespace accelerate::residency
