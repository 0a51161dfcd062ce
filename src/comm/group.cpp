#include "comm/group.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "accelerate/error.hpp"
#include "comm/backends/backend.hpp"
#include "comm/compat.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/store.hpp"
#include "comm/watchdog.hpp"

namespace accelerate::comm {
namespace {

using Clock = std::chrono::steady_clock;

std::string seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time.count()) / 1000.0);
  return text;
}

/// Without the stack trace that c10's errors carry.
std::string text_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error ? c10_error->what_without_backtrace() : error.what();
}

/// A future that either the transport or the watchdog completes, whoever is first.
struct Pending {
  explicit Pending(const char* name) : operation(name) {}
  void fail(const std::exception_ptr& error) {
    if (!done.exchange(true)) future->setError(error);
  }
  void complete(const at::Tensor& tensor) {
    if (!done.exchange(true)) future->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor}));
  }
  const char* operation;
  std::atomic<bool> done{false};
  c10::intrusive_ptr<c10::ivalue::Future> future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
};

/// What this rank does in one group.
struct Activity {
  std::string group;  ///< for messages: "group of all 4 ranks"
  int64_t sequence = 0;
  const char* operation = "none";
  int64_t inside = 0;
  Clock::time_point since = Clock::now();
};

/// Shared by all groups of the process, and with callbacks that may outlive them.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Activity> activities;  ///< by the groups' keys; none is ever removed
  std::string peer_failure;  ///< what a peer announced, or why the groups are broken
  std::string async_error;   ///< an asynchronous operation's transport error
  std::set<std::shared_ptr<Pending>> pending;
  std::set<c10d::Work*> transfers;  ///< that somebody blocks on; a failure elsewhere ends the wait

  void begin(Activity& activity, const char* name) {
    std::lock_guard lock(mutex);
    ++activity.sequence, ++activity.inside;
    activity.operation = name;
    activity.since = Clock::now();
  }
  void end(Activity& activity) {
    {
      std::lock_guard lock(mutex);
      --activity.inside;
      activity.since = Clock::now();
    }
    changed.notify_all();
  }
  RankStatus status() {
    const std::lock_guard lock(mutex);
    RankStatus status;
    for (const auto& [key, activity] : activities)
      status.groups[key] = {.name = activity.group,
                            .sequence = activity.sequence,
                            .operation = activity.operation,
                            .inside = activity.inside > 0,
                            .age_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - activity.since).count()};
    return status;
  }
};

/// For the length of a scope.
class InCollective {
 public:
  InCollective(Progress& progress, Activity& activity, const char* operation) : progress_(progress), activity_(activity) { progress_.begin(activity_, operation); }
  ~InCollective() { progress_.end(activity_); }
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

 private:
  Progress& progress_;
  Activity& activity_;
};

std::string list_of(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

/// Where a peer is that did not come to collective `mine` of group `key`.
std::string whereabouts(const RankStatus& peer, const std::string& key, const GroupStatus& here) {
  for (const auto& [other, status] : peer.groups)
    if (other != key && status.inside)
      return "is in collective " + std::to_string(status.sequence) + " (" + status.operation + ") of the " + status.name + " since " + seconds(std::chrono::milliseconds(status.age_ms));
  return std::string(here.inside ? "is in" : "came out of") + " collective " + std::to_string(here.sequence) + " (" + here.operation + ") " + seconds(std::chrono::milliseconds(here.age_ms)) + " ago" +
         (here.inside ? "" : " and is outside of collectives");
}

/// Also when nobody has asked for its exit status yet.
bool has_ended(int64_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(in, text)) return true;
  const size_t name_end = text.rfind(')');  // a name may contain anything
  return name_end != std::string::npos && name_end + 2 < text.size() && (text[name_end + 2] == 'Z' || text[name_end + 2] == 'X');
}

const BackendFactory* const kBackends[] = {&kGloo, &kNccl, &kMpi};

}  // namespace

const BackendFactory& find_backend(const std::string& name) {
  for (const auto* factory : kBackends) {
    if (name != factory->name) continue;
    if (!factory->available) throw NotBuiltError("process group: back end '" + name + "' was asked for, but this build lacks it; " + factory->how_to_build);
    return *factory;
  }
  throw ConfigError("process group: back end '" + name + "' was asked for, expected gloo, nccl or mpi");
}

namespace {

/// Blocks until all ranks have called it.
c10::intrusive_ptr<c10d::ProcessGroup> connect(const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options, const std::vector<int64_t>& ranks) {
  const BackendFactory& factory = find_backend(options.backend);
  const auto backend = [&] {
    try {
      return factory.create(store, {.rank = options.rank,
                                    .world_size = options.world_size,
                                    .master_addr = options.master_addr,
                                    .timeout = options.timeout,
                                    .ranks = std::vector<int>(ranks.begin(), ranks.end())});
    } catch (const std::exception& error) {
      throw CommError("joining the process group: rank " + std::to_string(ranks[static_cast<size_t>(options.rank)]) + " could not connect to its peers by " + options.backend +
                      "; a peer may have failed while joining, or the network interface is wrong (GLOO_SOCKET_IFNAME selects one). (" + error.what() + ")");
    }
  }();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(options.rank), static_cast<int>(options.world_size));
  const auto type = options.backend == "nccl"  ? c10d::ProcessGroup::BackendType::NCCL
                    : options.backend == "mpi" ? c10d::ProcessGroup::BackendType::MPI
                                               : c10d::ProcessGroup::BackendType::GLOO;
  group->setBackend(options.device.type(), type, backend);
  group->setDefaultBackend(type);
  return group;
}

}  // namespace

struct Group::Impl {
  GroupOptions options;        ///< rank and world_size are those of this group
  std::vector<int64_t> ranks;  ///< the job's, by rank
  std::string key;             ///< the same on all members; "" is the group of all
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  std::map<std::pair<std::string, std::vector<int64_t>>, std::shared_ptr<Group>> splits;  ///< by name and all ranks' colors
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Watchdog> watchdog;
  Activity* activity = nullptr;  ///< in progress
  std::vector<int64_t> pids;

  int64_t own() const { return ranks[static_cast<size_t>(options.rank)]; }

  std::shared_ptr<Transfer> begin_transfer(const at::Tensor& tensor, int64_t other);

  void join_as(const std::string& name) {
    const std::lock_guard lock(progress->mutex);
    activity = &progress->activities[key];
    activity->group = name;
  }

  void check_usable(const char* operation) const {
    std::lock_guard lock(progress->mutex);
    if (!progress->peer_failure.empty())
      throw CommError(std::string(operation) + " on rank " + std::to_string(own()) + ": the process group is not usable any more: " + progress->peer_failure);
  }

  [[noreturn]] void fail(const std::string& what) { fail(what, key, ranks); }

  /// @param key, ranks  what was going on among whom: the group's own, or two ranks of it
  [[noreturn]] void fail(const std::string& what, const std::string& key, const std::vector<int64_t>& ranks) {
    const GroupStatus mine = progress->status().groups.at(key);
    std::string message = mine.operation + " (collective " + std::to_string(mine.sequence) + " of the " + mine.name + ", " + options.backend + ") on rank " + std::to_string(own()) + ": ";
    {
      std::lock_guard lock(progress->mutex);
      if (!progress->peer_failure.empty()) throw CommError(message + progress->peer_failure);
    }
    bool store_is_gone = false;
    const auto peers = watchdog->ask_peers(std::chrono::milliseconds(1500), store_is_gone);
    message += "no result after " + seconds(std::chrono::milliseconds(mine.age_ms)) + " (limit " + seconds(options.timeout) + ")";
    std::string late, arrived, cause;
    for (int64_t rank = 0; rank < static_cast<int64_t>(peers.size()); ++rank) {
      if (rank == own()) continue;
      const auto& peer = peers[static_cast<size_t>(rank)];
      const bool member = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      std::string line = "\n  rank " + std::to_string(rank) + (member ? "" : " (of another group)");
      if (!peer) {
        if (rank == 0 && store_is_gone) late += line + " has gone: its process ended (it served the store)";
        else if (store_is_gone) continue;  // nobody can be asked any more
        else late += line + " has gone or is stopped: its process does not answer";
        continue;
      }
      if (peer->note.starts_with("failed: ")) {
        late += line + " " + peer->note;
        cause = peer->note;
        continue;
      }
      if (!member) continue;
      const auto found = peer->groups.find(key);
      const GroupStatus here = found == peer->groups.end() ? GroupStatus{} : found->second;
      if (peer->note == "left") {
        late += line + " has left: it ended normally after collective " + std::to_string(here.sequence) + " (" + here.operation + ")";
      } else if (here.sequence < mine.sequence || (here.sequence == mine.sequence && !here.inside && here.operation != mine.operation)) {
        late += line + " has not arrived: it " + whereabouts(*peer, key, here);
      } else if (here.operation != mine.operation && here.sequence == mine.sequence) {
        late += line + " is elsewhere: its collective " + std::to_string(here.sequence) + " is " + here.operation;
      } else {
        arrived += (arrived.empty() ? " Arrived: rank " : ", ") + std::to_string(rank);
      }
    }
    if (!late.empty()) message += ". Missing:" + late + "\n ";
    message += arrived.empty() ? "" : arrived + ".";
    message += " All ranks must call the same collectives in the same order; look first at the output of the ranks named above. (" + what + ")";
    {
      std::lock_guard lock(progress->mutex);
      progress->peer_failure = "an earlier collective failed: " + what;
    }
    // Peers that hear of this before they find out themselves should learn who was missing, not just that this rank gave up.
    watchdog->announce_failure(mine.operation + ": " + (!cause.empty() ? cause : late.empty() ? what : "missing:" + late));
    throw CommError(message);
  }
};

std::shared_ptr<Group> Group::join(const GroupOptions& options) {
  if (options.dry) {
    auto alone = std::make_unique<Impl>();
    alone->options = options;
    for (int64_t rank = 0; rank < options.world_size; ++rank) alone->ranks.push_back(rank);
    alone->process_group = c10::make_intrusive<DryProcessGroup>(options.rank, options.world_size, options.dry);
    alone->progress = std::make_shared<Progress>();
    alone->join_as("dry group of " + std::to_string(options.world_size) + " ranks");
    return std::shared_ptr<Group>(new Group(std::move(alone)));
  }
  find_backend(options.backend);
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  for (int64_t rank = 0; rank < options.world_size; ++rank) impl->ranks.push_back(rank);
  impl->store = open_store({.rank = options.rank, .world_size = options.world_size, .master_addr = options.master_addr, .master_port = options.master_port, .timeout = options.timeout});
  impl->process_group = connect(impl->store, options, impl->ranks);
  auto progress = impl->progress = std::make_shared<Progress>();
  impl->join_as("group of all " + std::to_string(options.world_size) + " ranks");
  impl->watchdog = std::make_shared<Watchdog>(
      impl->store, options.rank, options.world_size,
      Watchdog::Callbacks{.status = [progress] { return progress->status(); },
                          .on_peer_failure = [progress](std::string reason) {
                            std::set<std::shared_ptr<Pending>> pending;
                            {
                              std::lock_guard lock(progress->mutex);
                              if (progress->peer_failure.empty()) progress->peer_failure = reason;
                              pending.swap(progress->pending);
                              for (c10d::Work* transfer : progress->transfers) transfer->abort();
                            }
                            progress->changed.notify_all();
                            for (const auto& work : pending) work->fail(std::make_exception_ptr(CommError(std::string(work->operation) + ": " + reason)));
                          }});
  return std::shared_ptr<Group>(new Group(std::move(impl)));
}

std::shared_ptr<Group> Group::split(const std::string& name, const std::function<int64_t(int64_t)>& color_of) {
  const Impl& outer = *impl_;
  std::vector<int64_t> colors;
  for (int64_t rank = 0; rank < world_size(); ++rank) colors.push_back(color_of(rank));
  auto& known = impl_->splits[{name, colors}];
  if (known) return known;
  auto impl = std::make_unique<Impl>();
  impl->options = outer.options;
  const int64_t mine = colors[static_cast<size_t>(rank())];
  for (size_t rank = 0; rank < colors.size(); ++rank) {
    if (colors[rank] != mine) continue;
    if (static_cast<int64_t>(rank) == outer.options.rank) impl->options.rank = static_cast<int64_t>(impl->ranks.size());
    impl->ranks.push_back(outer.ranks[rank]);
  }
  if (impl->ranks.size() == colors.size()) return shared_from_this();
  impl->options.world_size = static_cast<int64_t>(impl->ranks.size());
  impl->progress = outer.progress;
  impl->key = outer.key + "/" + std::to_string(outer.splits.size()) + ":" + std::to_string(mine);
  if (dry()) {
    impl->process_group = c10::make_intrusive<DryProcessGroup>(impl->options.rank, impl->options.world_size, impl->options.dry);
  } else {
    impl->store = c10::make_intrusive<c10d::PrefixStore>("group" + impl->key, outer.store);
    impl->process_group = connect(impl->store, impl->options, impl->ranks);
    impl->watchdog = outer.watchdog;
  }
  impl->join_as(name + " group of ranks " + list_of(impl->ranks));
  known = std::shared_ptr<Group>(new Group(std::move(impl)));
  return known;
}

Group::Group(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Group::~Group() = default;

int64_t Group::rank() const { return impl_->options.rank; }
int64_t Group::world_size() const { return impl_->options.world_size; }
const std::vector<int64_t>& Group::global_ranks() const { return impl_->ranks; }
int64_t Group::local_world_size() const { return impl_->options.local_world_size; }
const std::string& Group::backend() const { return impl_->options.backend; }
const at::Device& Group::device() const { return impl_->options.device; }
bool Group::debug() const { return impl_->options.debug; }
bool Group::dry() const { return impl_->options.dry != nullptr; }
const c10::intrusive_ptr<c10d::ProcessGroup>& Group::process_group() const { return impl_->process_group; }

void Group::run(const char* operation, const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  const InCollective inside(*progress, *impl_->activity, operation);
  try {
    const auto work = start();
    if (impl_->options.backend == "gloo") {
      // Wait for the transport or for news of a failed peer, whichever comes first.
      auto done = std::make_shared<std::atomic<bool>>(false);
      work->getFuture()->addCallback([progress, done](c10::ivalue::Future&) {
        {
          std::lock_guard lock(progress->mutex);
          *done = true;
        }
        progress->changed.notify_all();
      });
      std::unique_lock lock(progress->mutex);
      progress->changed.wait(lock, [&] { return done->load() || !progress->peer_failure.empty(); });
      if (!*done) throw CommError(progress->peer_failure);
    }
    work->wait();
  } catch (const std::exception& error) {
    impl_->fail(text_of(error));
  }
}

namespace {

/// Back ends know few dtypes; copying bytes needs none.
at::Tensor as_bytes(const at::Tensor& contiguous) { return contiguous.view({-1}).view(at::kByte); }

void check_device(const Group& group, const char* operation, const at::Tensor& tensor) {
  if (tensor.device().type() != group.device().type() && !(group.dry() && tensor.is_meta()))
    throw ShapeError(std::string(operation) + ": found a tensor on " + tensor.device().str() + ", expected one on " + group.device().str() +
                     ", which the back end '" + group.backend() + "' serves; move it there first (send_to_device)");
}

/// Found out here, and not by a back end in the middle of a collective, the group stays usable.
void check_reducible(const at::Tensor& tensor, Reduction reduction) {
  constexpr auto is_one_of = [](at::ScalarType type, auto... types) { return ((type == types) || ...); };
  const auto type = tensor.scalar_type();
  if (is_one_of(type, at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble)) return;
  if (reduction != Reduction::max && is_one_of(type, at::kComplexFloat, at::kComplexDouble)) return;
  throw ShapeError(std::string("reduce: found a tensor of type ") + at::toString(type) + ", which has no " + (reduction == Reduction::max ? "maximum" : "sum") +
                   " in the back ends, expected Bool, an integer up to 64 bits, Half, BFloat16, Float, Double or, for sums, a complex type; convert it first");
}

}  // namespace

at::Tensor Group::all_gather(const at::Tensor& tensor) {
  check_device(*this, "gather", tensor);
  const at::Tensor input = (tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor).contiguous();
  auto sizes = input.sizes().vec();
  sizes[0] *= world_size();
  at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() == 0) {  // nothing to send, but ranks must still meet
    barrier();
    return output;
  }
  at::Tensor in = as_bytes(input), out = as_bytes(output);
  run("gather", [&] { return compat::all_gather_single(*impl_->process_group, out, in); });
  return output;
}

at::Tensor Group::broadcast(const at::Tensor& tensor, int64_t from) {
  check_device(*this, "broadcast", tensor);
  if (from < 0 || from >= world_size())
    throw ConfigError("broadcast: from_process is " + std::to_string(from) + ", expected a rank from 0 to " + std::to_string(world_size() - 1));
  at::Tensor output = tensor.detach().clone(at::MemoryFormat::Contiguous);
  if (output.numel() == 0) {
    barrier();
    return output;
  }
  std::vector<at::Tensor> bytes{as_bytes(output)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  run("broadcast", [&] { return impl_->process_group->broadcast(bytes, options); });
  return output;
}

void Group::all_reduce_(at::Tensor& tensor, Reduction reduction) {
  check_device(*this, "reduce", tensor);
  check_reducible(tensor, reduction);
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction == Reduction::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  if (tensor.numel() == 0) return barrier();
  run("reduce", [&] { return impl_->process_group->allreduce(tensors, options); });
}

void Group::barrier() {
  at::Tensor token = at::zeros({1}, at::TensorOptions().device(device()));
  std::vector<at::Tensor> tensors{token};
  run("barrier", [&] { return impl_->process_group->allreduce(tensors); });
  if (!device().is_cpu()) token.item<float>();  // the host must wait too
}

c10::intrusive_ptr<c10::ivalue::Future> Group::run_async(const char* operation, const at::Tensor& result, const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                                                              std::function<void()> after) {
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  Activity* activity = impl_->activity;
  progress->begin(*activity, operation);
  const auto work = start();
  const auto future = work->getFuture();
  if (!device().is_cpu()) {  // streams order device work; nothing blocks the host
    progress->end(*activity);
    return future;
  }
  auto pending = std::make_shared<Pending>(operation);
  {
    std::lock_guard lock(progress->mutex);
    progress->pending.insert(pending);
  }
  future->addCallback([progress, activity, pending, result, after = std::move(after)](c10::ivalue::Future& transport) {
    if (!transport.hasError() && after) after();
    {
      std::lock_guard lock(progress->mutex);
      progress->pending.erase(pending);
      if (transport.hasError() && progress->async_error.empty()) progress->async_error = transport.tryRetrieveErrorMessage();
    }
    progress->end(*activity);
    if (transport.hasError()) pending->fail(transport.exception_ptr());
    else pending->complete(result);
  });
  return pending->future;
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_reduce_async(at::Tensor tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return run_async("all_reduce of gradients", tensor, [&] { return impl_->process_group->allreduce(tensors); });
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_gather_async(at::Tensor output, at::Tensor input) {
  return run_async("all_gather of parameters", output, [&] { return compat::all_gather_single(*impl_->process_group, output, input); });
}

c10::intrusive_ptr<c10::ivalue::Future> Group::reduce_scatter_async(at::Tensor output, at::Tensor input) {
  constexpr const char* kName = "reduce_scatter of gradients";
  if (!device().is_cpu() || dry()) return run_async(kName, output, [&] { return compat::reduce_scatter_single(*impl_->process_group, output, input); });
  // gloo's reduce-scatter can't be waited for together with other events, and sends everything to everyone. Each rank gets its pieces instead, and adds them in the
  // order of the ranks.
  at::Tensor pieces = at::empty_like(input);
  return run_async(kName, output, [&] { return compat::all_to_all_single(*impl_->process_group, pieces, input); }, [output, pieces, input, world = world_size()]() mutable {
    at::NoGradGuard no_grad;
    const auto rows = pieces.view({world, -1});
    at::Tensor sum = output;
    sum.copy_(rows[0]);
    for (int64_t rank = 1; rank < world; ++rank) sum.add_(rows[rank]);
  });
}

void Group::wait(const char* operation, c10::ivalue::Future& future) {
  guard(operation, [&] { future.waitAndThrow(); });
}

class Group::Transfer {
 public:
  Transfer(at::Tensor tensor, std::string key, std::vector<int64_t> ranks, std::shared_ptr<Progress> progress, Activity& activity)
      : tensor(std::move(tensor)), key(std::move(key)), ranks(std::move(ranks)), inside_(std::in_place, *progress, activity, "transfer"), progress_(std::move(progress)) {}
  void end() { inside_.reset(); }

  const at::Tensor tensor;  ///< lives as long as the transport reads it
  const std::string key;    ///< of the two ranks' activity
  const std::vector<int64_t> ranks;
  c10::intrusive_ptr<c10d::Work> work;

 private:
  std::optional<InCollective> inside_;
  std::shared_ptr<Progress> progress_;
};

std::shared_ptr<Group::Transfer> Group::Impl::begin_transfer(const at::Tensor& tensor, int64_t other) {
  check_usable("transfer");
  std::vector<int64_t> pair{ranks[static_cast<size_t>(std::min(options.rank, other))], ranks[static_cast<size_t>(std::max(options.rank, other))]};
  std::string pair_key = key + "/pair:" + list_of(pair);
  Activity* activity_of_pair = nullptr;
  {
    const std::lock_guard lock(progress->mutex);
    activity_of_pair = &progress->activities[pair_key];
    activity_of_pair->group = "ranks " + list_of(pair);
  }
  return std::make_shared<Transfer>(tensor, std::move(pair_key), std::move(pair), progress, *activity_of_pair);
}

std::shared_ptr<Group::Transfer> Group::send(const at::Tensor& contiguous, int64_t to) {
  check_device(*this, "transfer", contiguous);
  auto transfer = impl_->begin_transfer(contiguous, to);
  std::vector<at::Tensor> bytes{as_bytes(contiguous)};
  try {
    transfer->work = impl_->process_group->send(bytes, static_cast<int>(to), /*tag=*/0);
  } catch (const std::exception& error) {
    impl_->fail(text_of(error), transfer->key, transfer->ranks);
  }
  return transfer;
}

void Group::receive_(at::Tensor& contiguous, int64_t from) {
  check_device(*this, "transfer", contiguous);
  const auto transfer = impl_->begin_transfer(contiguous, from);
  std::vector<at::Tensor> bytes{as_bytes(contiguous)};
  try {
    transfer->work = impl_->process_group->recv(bytes, static_cast<int>(from), /*tag=*/0);
  } catch (const std::exception& error) {
    impl_->fail(text_of(error), transfer->key, transfer->ranks);
  }
  wait(*transfer);
}

void Group::wait(Transfer& transfer) {
  auto& progress = *impl_->progress;
  bool broken = false;
  {
    const std::lock_guard lock(progress.mutex);
    broken = !progress.peer_failure.empty();
    if (!broken) progress.transfers.insert(transfer.work.get());
  }
  std::string error = broken ? "a peer failed" : "";
  if (!broken) {
    try {
      if (!transfer.work->wait()) error = "interrupted by a failure elsewhere";
    } catch (const std::exception& thrown) {
      error = text_of(thrown);
    }
    const std::lock_guard lock(progress.mutex);
    progress.transfers.erase(transfer.work.get());
  }
  if (!error.empty()) impl_->fail(error, transfer.key, transfer.ranks);
  transfer.end();
}

void Group::watch_processes(std::vector<int64_t> pids) { impl_->pids = std::move(pids); }

void Group::wait_until(const char* operation, const std::function<bool()>& done) {
  constexpr int kSpins = 2000;  // some microseconds: peers on other cores are about as far as we are
  constexpr auto kYields = std::chrono::milliseconds(1);
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  const InCollective inside(*progress, *impl_->activity, operation);
  for (int i = 0; i < kSpins; ++i)
    if (done()) return;
  constexpr auto kLook = std::chrono::milliseconds(200);
  const auto start = Clock::now();
  Clock::duration next_look = kLook;
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited < kYields) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    bool failed = false;
    {
      std::lock_guard lock(progress->mutex);
      failed = !progress->peer_failure.empty();
    }
    if (failed || waited > impl_->options.timeout) impl_->fail(failed ? "a peer failed" : "timed out");
    if (waited < next_look) continue;
    next_look = waited + kLook;
    for (size_t rank = 0; rank < impl_->pids.size(); ++rank)
      if (has_ended(impl_->pids[rank]) && !done()) impl_->fail("the process of rank " + std::to_string(impl_->ranks[rank]) + " has ended");
  }
}

void Group::guard(const char* operation, const std::function<void()>& body) {
  impl_->check_usable(operation);
  try {
    body();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    bool transport = false;
    {
      std::lock_guard lock(impl_->progress->mutex);
      transport = !impl_->progress->async_error.empty();
    }
    const std::string text = text_of(error);
    // c10d's own collectives (buckets' order, buffers) report through gloo's exceptions, which have no type of their own here.
    transport = transport || text.find("gloo") != std::string::npos || text.find("NCCL") != std::string::npos;
    if (transport) impl_->fail(text);
    throw;
  }
}

void Group::announce_failure(const std::string& reason) noexcept {
  if (impl_->watchdog) impl_->watchdog->announce_failure(reason);
}

namespace {
std::shared_ptr<Group>& world() {
  static std::shared_ptr<Group> group;
  return group;
}
}  // namespace

const std::shared_ptr<Group>& world_group() { return world(); }
void set_world_group(std::shared_ptr<Group> group) { world() = std::move(group); }

}  // namespace accelerate::comm
