#include "comm/watchdog.hpp"

#include <pthread.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "accelerate/utils/archive.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::comm {
namespace {

constexpr const char* kEvents = "watch/events";
constexpr const char* kFailure = "watch/failure";
constexpr const char* kCall = "watch/call";
constexpr const char* kAnswers = "watch/call/answers";
constexpr const char* kFurthest = "watch/call/furthest";
std::string answer_key(int64_t rank) { return "watch/call/answer/" + std::to_string(rank); }
std::string status_key(int64_t rank) { return "watch/status/" + std::to_string(rank); }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

/// The conversation with the store. Nothing ends a thread that waits for an answer which never comes, because the
/// process that serves the store is stopped: it stays behind, with this.
struct Watchdog::Talk {
  const c10::intrusive_ptr<c10d::Store> store;
  const int64_t rank, world_size;
  const Callbacks callbacks;
  const std::chrono::milliseconds period;
  std::atomic<bool> failed{false};  ///< and the peers have been told
  std::atomic<bool> silent{false};  ///< the store has not answered in time
  Mutex telling;
  bool told_all ACCELERATE_GUARDED_BY(telling) = false;
  Mutex mutex;
  std::condition_variable changed;
  bool stop ACCELERATE_GUARDED_BY(mutex) = false;
  bool stopped ACCELERATE_GUARDED_BY(mutex) = false;
  std::atomic<bool> calls{false};         ///< this rank wants all to be asked how far they are
  std::atomic<int64_t> furthest{-1};      ///< the greatest answer, when all have answered
  bool called = false, answered = false;  ///< of the watchdog's thread: somebody has called, and this rank has answered
  Mutex asking;
  std::function<int64_t()> how_far ACCELERATE_GUARDED_BY(asking);

  /// @throws CommError when it was written by somebody else
  template <class T> T read(const std::string& key) {
    const auto bytes = text_of(store->get(key));
    try {
      return from_bytes<T>(bytes);
    } catch (const Error& error) {
      raise<CommError>(
          "what the store has under {} can't be read ({}): another program, or another version of this library, writes "
          "to this job's store. Use a port of its own for each job",
          key, error.what());
    }
  }
  /// Once this rank has said that it leaves or failed it says nothing else: an answer that was under way must not hide
  /// that.
  void publish(const RankStatus& status) {
    const MutexLock lock(telling);
    if (told_all) return;
    told_all = !status.note.empty();
    store->set(status_key(rank), bytes_of(to_bytes(status)));
  }

  void watch() {
    constexpr int64_t kLooks = 4;  // to one comparison
    // Until all have answered a call, for which somebody may wait.
    const auto soon = std::clamp(std::chrono::milliseconds(world_size), std::chrono::milliseconds(20), period);
    int64_t seen = 0;
    MutexLock lock(mutex);
    for (int64_t looks = 1; !stop; ++looks) {
      lock.wait_for(changed, called && furthest < 0 ? soon : period);
      if (stop) return;
      lock.unlock();
      try {
        look(seen);
        if (called && furthest < 0) hear_call();
        if (looks % kLooks == 0) compare(seen);
      } catch (const CommError& error) {
        callbacks.on_peer_failure(error.what());
        return;
      } catch (const std::exception&) {
        // Rank 0 ended. That is no failure by itself: this rank may need nobody any more. A collective that does will
        // say so.
        return;
      }
      lock.lock();
    }
  }

  void look(int64_t& seen) {
    if (calls.exchange(false) && !called) {
      called = true;
      store->set(kCall, bytes_of("all"));
      store->add(kEvents, 1);
    }
    const int64_t events = store->add(kEvents, 0);
    if (events == seen) return;
    if (store->check({kFailure})) {
      const auto failure = read<std::pair<int64_t, std::string>>(kFailure);
      if (failure.first != rank)
        callbacks.on_peer_failure("rank " + std::to_string(failure.first) + " failed: " + failure.second);
    }
    called = called || store->check({kCall});
    RankStatus status = callbacks.status();
    status.round = events;
    publish(status);
    seen = events;
  }

  void hear_call() {
    if (!answered) {
      const MutexLock lock(asking);
      if (how_far) answer(how_far());
    }
    if (store->check({kFurthest})) furthest = read<int64_t>(kFurthest);
  }

  /// The last rank that answers has all answers, and tells the greatest.
  void answer(int64_t place) {
    answered = true;
    store->set(answer_key(rank), bytes_of(to_bytes(place)));
    if (store->add(kAnswers, 1) < world_size) return;
    for (int64_t peer = 0; peer < world_size; ++peer) place = std::max(place, read<int64_t>(answer_key(peer)));
    store->set(kFurthest, bytes_of(to_bytes(place)));
  }

  /// Whether what this rank waits for can come. Where a ring's members do not all agree some neighbours differ, and
  /// both wait sooner or later.
  void compare(int64_t round) {
    constexpr int64_t kPatienceMs = 1000;
    RankStatus status = callbacks.status();
    status.round = round;
    bool told = false;
    for (const auto& [key, mine] : status.groups) {
      if (!mine.inside || mine.age_ms < kPatienceMs || mine.next < 0) continue;
      if (!std::exchange(told, true)) publish(status);
      if (!store->check({status_key(mine.next)})) continue;
      const auto why = disagreement(key, mine, mine.next, read<RankStatus>(status_key(mine.next)));
      if (why.empty()) continue;
      const std::string reason = why + ". All ranks must call the same collectives in the same order";
      callbacks.on_peer_failure(reason);
      if (!failed.exchange(true)) announce(reason);  // for those that wait in step with this rank
      return;
    }
  }

  void say_goodbye() {
    RankStatus status = callbacks.status();
    status.note = "left";
    status.round = std::numeric_limits<int64_t>::max();  // stays true whatever is asked later
    {
      const MutexLock lock(asking);
      if (how_far && !answered) answer(std::numeric_limits<int64_t>::max());  // nobody waits for an answer of its own
    }
    publish(status);
    if (rank == 0) wait_for_leavers();
  }

  void wait_for_leavers() {
    // The store ends with this process, and c10d complains aloud in every rank that still has a connection to it.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    for (int64_t peer = 1; peer < world_size;) {
      const bool left = store->check({status_key(peer)}) && !read<RankStatus>(status_key(peer)).note.empty();
      if (left) ++peer;
      else if (std::chrono::steady_clock::now() > deadline) return;
      else std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void announce(const std::string& reason) {
    // The first failure is the cause; later ones are usually its consequences.
    store->compareSet(kFailure, {}, bytes_of(to_bytes(std::make_pair(rank, reason))));
    RankStatus status = callbacks.status();
    status.note = "failed: " + reason;
    status.round = std::numeric_limits<int64_t>::max();
    publish(status);
    store->add(kEvents, 1);
  }

  /// By rank. `answers` has what came so far when this throws, because the store is gone.
  void ask(std::chrono::milliseconds patience, std::vector<std::optional<RankStatus>>& answers) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    const int64_t round = store->add(kEvents, 1);
    int64_t missing = world_size - 1;
    for (;;) {
      for (int64_t peer = 0; peer < world_size; ++peer) {
        auto& answer = answers[static_cast<size_t>(peer)];
        if (peer == rank || answer || !store->check({status_key(peer)})) continue;
        RankStatus status;
        try {
          status = read<RankStatus>(status_key(peer));
        } catch (const CommError& error) {
          status = {.note = std::string("failed: ") + error.what(), .round = round};
        }
        if (status.round < round) continue;
        answer = std::move(status);
        --missing;
      }
      if (missing == 0 || std::chrono::steady_clock::now() > deadline) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
};

namespace {

/// `ask` on a thread of its own, since the store's calls have no deadline. @return false: no answer in time, nor later.
/// @throws what `ask` throws.
template <class Talk, class Ask>
bool answered(const std::shared_ptr<Talk>& talk, std::chrono::milliseconds limit, Ask ask) {
  if (talk->silent) return false;
  std::packaged_task<void()> task([talk, ask = std::move(ask)] { ask(*talk); });
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  talk->silent = answer.wait_for(limit) != std::future_status::ready;
  if (!talk->silent) answer.get();
  return !talk->silent;
}

/// A connection of the watchdog's own, since a waiting call holds the one that it was made on.
c10::intrusive_ptr<c10d::Store> connect_again(c10d::Store& store, int64_t rank, std::chrono::milliseconds timeout) {
  try {
    store.setTimeout(std::min(timeout, std::chrono::milliseconds(30000)));  // it was there a moment ago
    auto again = store.clone();
    again->setTimeout(timeout);
    store.setTimeout(timeout);
    return again;
  } catch (const std::exception& error) {
    raise<CommError>(
        "joining the process group: rank {} could not connect to rank 0's store for a second time; rank 0 may have "
        "failed since (look at its output), or no file descriptors are left (`ulimit -n`). ({})",
        rank, accelerate::text_of(error));
  }
}

}  // namespace

Watchdog::Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size,
                   std::chrono::milliseconds timeout, Callbacks callbacks)
    : talk_(new Talk{.store = connect_again(*store, rank, timeout),
                     .rank = rank,
                     .world_size = world_size,
                     .callbacks = std::move(callbacks),
                     // A thousand ranks ask the one store a thousand times a second at most.
                     .period = std::chrono::milliseconds(std::max<int64_t>(250, world_size))}) {
  std::thread([talk = talk_] {
    ::pthread_setname_np(::pthread_self(), "rank-watchdog");
    talk->watch();
    const MutexLock lock(talk->mutex);
    talk->stopped = true;
    talk->changed.notify_all();
  }).detach();
}

void Watchdog::leave() {
  constexpr auto kLimit = std::chrono::seconds(5);
  {
    MutexLock lock(talk_->mutex);
    if (std::exchange(talk_->stop, true)) return;
    talk_->changed.notify_all();
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    while (!talk_->stopped && !talk_->silent && std::chrono::steady_clock::now() < deadline)
      lock.wait_for(talk_->changed, talk_->period);
    if (!talk_->stopped) return;  // it waits for the store, and so would we
  }
  if (talk_->failed) {
    // Rank 0's process serves the store: while it lingers the peers can read why it failed.
    if (talk_->rank == 0) std::this_thread::sleep_for(2 * talk_->period);
    return;
  }
  try {
    answered(talk_, kLimit, [](Talk& talk) { talk.say_goodbye(); });
  } catch (const std::exception&) {
    // The store may have gone first; then there is nobody to tell.
  }
}

void Watchdog::announce_failure(const std::string& reason) noexcept {
  if (talk_->failed.exchange(true)) return;
  try {
    answered(talk_, std::chrono::seconds(5), [reason](Talk& talk) { talk.announce(reason); });
  } catch (const std::exception&) {
    // Without a store the peers notice by their connections.
  }
}

void Watchdog::call_ranks() {
  talk_->calls = true;
  talk_->changed.notify_all();
}

void Watchdog::answer_calls(std::function<int64_t()> how_far) {
  const MutexLock lock(talk_->asking);
  talk_->how_far = std::move(how_far);
}

std::optional<int64_t> Watchdog::furthest() const {
  const int64_t place = talk_->furthest;
  return place < 0 ? std::nullopt : std::optional(place);
}

std::vector<std::optional<RankStatus>> Watchdog::ask_peers(std::chrono::milliseconds patience, StoreState& store) {
  const auto size = static_cast<size_t>(talk_->world_size);
  const auto answers = std::make_shared<std::vector<std::optional<RankStatus>>>(size);
  patience += 2 * talk_->period;
  try {
    const bool in_time =
        answered(talk_, patience + std::chrono::seconds(1), [=](Talk& talk) { talk.ask(patience, *answers); });
    store = in_time ? StoreState::answers : StoreState::silent;
    if (!in_time) return std::vector<std::optional<RankStatus>>(size);  // the others belong to a thread that waits
  } catch (const std::exception&) {
    store = StoreState::gone;
  }
  return *answers;
}

}  // namespace accelerate::comm
