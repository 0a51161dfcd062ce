#include "comm/watchdog.hpp"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "accelerate/utils/archive.hpp"

namespace accelerate::comm {
namespace {

constexpr const char* kEvents = "watch/events";
constexpr const char* kFailure = "watch/failure";
std::string status_key(int64_t rank) { return "watch/status/" + std::to_string(rank); }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

Watchdog::Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size, Callbacks callbacks)
    : store_(store->clone()),
      rank_(rank),
      world_size_(world_size),
      callbacks_(std::move(callbacks)),
      // A thousand ranks ask the one store a thousand times a second at most.
      period_(std::max<int64_t>(250, world_size)) {
  thread_ = std::thread([this] { run(); });
}

Watchdog::~Watchdog() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
  if (failed_) {
    // Rank 0's process serves the store: while it lingers the peers can read why it failed.
    if (rank_ == 0) std::this_thread::sleep_for(2 * period_);
    return;
  }
  try {
    RankStatus status = callbacks_.status();
    status.note = "left";
    status.round = std::numeric_limits<int64_t>::max();  // stays true whatever is asked later
    publish(status);
    if (rank_ == 0) wait_for_leavers();
  } catch (const std::exception&) {
    // The store may have gone first; then there is nobody to tell.
  }
}

void Watchdog::wait_for_leavers() {
  // The store ends with this process, and c10d complains aloud in every rank that still has a connection to it.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (int64_t rank = 1; rank < world_size_;) {
    const bool left = store_->check({status_key(rank)}) &&
                      !from_bytes<RankStatus>(text_of(store_->get(status_key(rank)))).note.empty();
    if (left) ++rank;
    else if (std::chrono::steady_clock::now() > deadline) return;
    else std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Watchdog::run() {
  int64_t seen = 0;
  MutexLock lock(mutex_);
  while (!stop_) {
    lock.wait_for(stop_changed_, period_);
    if (stop_) return;
    lock.unlock();
    try {
      const int64_t events = store_->add(kEvents, 0);
      if (events != seen) {
        if (store_->check({kFailure})) {
          const auto failure = from_bytes<std::pair<int64_t, std::string>>(text_of(store_->get(kFailure)));
          if (failure.first != rank_)
            callbacks_.on_peer_failure("rank " + std::to_string(failure.first) + " failed: " + failure.second);
        }
        RankStatus status = callbacks_.status();
        status.round = events;
        publish(status);
        seen = events;
      }
    } catch (const std::exception&) {
      // Rank 0 ended. That is no failure by itself: this rank may need nobody any more. A collective that does will say
      // so.
      return;
    }
    lock.lock();
  }
}

void Watchdog::publish(const RankStatus& status) { store_->set(status_key(rank_), bytes_of(to_bytes(status))); }

void Watchdog::announce_failure(const std::string& reason) noexcept {
  if (failed_.exchange(true)) return;
  try {
    // The first failure is the cause; later ones are usually its consequences.
    store_->compareSet(kFailure, {}, bytes_of(to_bytes(std::make_pair(rank_, reason))));
    RankStatus status = callbacks_.status();
    status.note = "failed: " + reason;
    status.round = std::numeric_limits<int64_t>::max();
    publish(status);
    store_->add(kEvents, 1);
  } catch (const std::exception&) {
    // Without a store the peers notice by their connections.
  }
}

std::vector<std::optional<RankStatus>> Watchdog::ask_peers(std::chrono::milliseconds patience, bool& store_is_gone) {
  std::vector<std::optional<RankStatus>> answers(static_cast<size_t>(world_size_));
  store_is_gone = false;
  try {
    const auto deadline = std::chrono::steady_clock::now() + patience + 2 * period_;
    const int64_t round = store_->add(kEvents, 1);
    int64_t missing = world_size_ - 1;
    for (;;) {
      for (int64_t rank = 0; rank < world_size_; ++rank) {
        auto& answer = answers[static_cast<size_t>(rank)];
        if (rank == rank_ || answer || !store_->check({status_key(rank)})) continue;
        auto status = from_bytes<RankStatus>(text_of(store_->get(status_key(rank))));
        if (status.round < round) continue;
        answer = std::move(status);
        --missing;
      }
      if (missing == 0 || std::chrono::steady_clock::now() > deadline) return answers;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  } catch (const std::exception&) {
    store_is_gone = true;
  }
  return answers;
}

}  // namespace accelerate::comm
