#include "comm/group.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <numeric>

#include "comm/backends/backend.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/group_impl.hpp"
#include "comm/mesh.hpp"
#include "comm/rank_list.hpp"
#include "comm/store.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

/// A rank that ends as soon as it has connected closes its ends of connections that others are still making, who would
/// take it for failed.
void wait_until_all_have_connected(c10d::Store& store, const GroupOptions& options) {
  try {
    if (store.add("connected", 1) == options.world_size) store.set("all_connected", std::vector<uint8_t>{1});
    store.wait({"all_connected"}, options.timeout);
  } catch (const std::exception& error) {
    raise<CommError>(
        "joining the process group: rank {} of {} is connected, but not all of its peers are after {} s; one of them "
        "has probably failed: look at its output. ({})",
        options.rank, options.world_size, options.timeout.count() / 1000, text_of(error));
  }
}

/// Blocks until all ranks have called it.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const GroupOptions& options,
                                                          const std::vector<int64_t>& ranks) {
  if (options.dry) return c10::make_intrusive<DryProcessGroup>(options.rank, options.world_size, options.dry);
  const BackendFactory& factory = find_backend(options.backend);
  const auto backend = [&] {
    try {
      return factory.create(store, {.rank = options.rank,
                                    .world_size = options.world_size,
                                    .master_addr = options.master_addr,
                                    .timeout = options.timeout,
                                    .ranks = std::vector<int>(ranks.begin(), ranks.end())});
    } catch (const std::exception& error) {
      raise<CommError>(
          "joining the process group: rank {} could not connect to its peers by {}; a peer may have failed while "
          "joining, or the network interface is wrong (GLOO_SOCKET_IFNAME selects one). ({})",
          ranks[static_cast<size_t>(options.rank)], options.backend, text_of(error));
    }
  }();
  wait_until_all_have_connected(*store, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(options.rank),
                                                       static_cast<int>(options.world_size));
  const auto type = options.backend == "nccl"  ? c10d::ProcessGroup::BackendType::NCCL
                    : options.backend == "mpi" ? c10d::ProcessGroup::BackendType::MPI
                                               : c10d::ProcessGroup::BackendType::GLOO;
  group->setBackend(options.device.type(), type, backend);
  if (type == c10d::ProcessGroup::BackendType::GLOO) group->setBackend(at::kCPU, type, backend);  // transfers' way
  group->setDefaultBackend(type);
  return group;
}

std::shared_ptr<Group>& world() {
  struct World {
    /// exit() in the middle of a training destroys nothing that is on the stack: the others shall hear of it.
    ~World() {
      if (group) group->leave();
    }
    std::shared_ptr<Group> group;
  };
  static World world;
  return world.group;
}

}  // namespace

void Group::Impl::connect(const std::string& name) {
  process_group = make_process_group(store, options, ranks);
  const auto after = static_cast<size_t>((options.rank + 1) % options.world_size);
  activity = &progress->activity(key, name, ranks.size() > 1 ? ranks[after] : -1);
}

std::shared_ptr<Group> Group::join(const GroupOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->ranks.resize(static_cast<size_t>(options.world_size));
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  const auto progress = impl->progress = std::make_shared<Progress>();
  const std::string ranks = std::to_string(options.world_size) + " ranks";
  if (options.dry) {
    impl->connect("dry group of " + ranks);
  } else {
    find_backend(options.backend);  // a wrong name is an error before anybody waits
    impl->store = open_store({.rank = options.rank,
                              .world_size = options.world_size,
                              .master_addr = options.master_addr,
                              .master_port = options.master_port,
                              .timeout = options.timeout});
    impl->connect("group of all " + ranks);
    impl->watchdog = std::make_shared<Watchdog>(
        impl->store, options.rank, options.world_size, options.timeout,
        Watchdog::Callbacks{
            .status = [progress] { return progress->status(); },
            .on_peer_failure = [progress](const std::string& reason) { progress->peer_failed(reason); }});
  }
  return std::shared_ptr<Group>(new Group(std::move(impl)));
}

SharedMemory* Group::board() {
  constexpr int64_t kEnough = 32;  // about what making it takes
  Impl& self = *impl_;
  if (self.messages++ == kEnough && self.key.empty())
    self.board = SharedMemory::create({std::shared_ptr<void>(), this}, SharedMemory::exchange_bytes(world_size()));
  return self.board.get();
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
  impl->key = outer.key + "/" + std::to_string(outer.splits.size()) + ":" + std::to_string(mine);
  impl->progress = outer.progress;
  impl->watchdog = outer.watchdog;
  if (!dry()) impl->store = c10::make_intrusive<c10d::PrefixStore>("group" + impl->key, outer.store);
  impl->connect(name + " group of ranks " + list_of(impl->ranks));
  known = std::shared_ptr<Group>(new Group(std::move(impl)));
  return known;
}

Group::Group(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Group::~Group() {
  // A peer that has failed and lives on would keep the back end's destructor waiting for what it does not send. So that
  // is left to the end of the process, which is what remains after a failure.
  if (impl_->options.dry || impl_->progress->failure().empty()) return;
  const auto settles = find_backend(impl_->options.backend).settles;
  if (!settles) return;
  const auto backend = impl_->process_group->getBackend(impl_->options.device.type());
  if (settles(*backend, std::chrono::seconds(1))) return;
  // Reached from here, for leak checkers. NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a failed process's last
  static auto& left = *new std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
  left.push_back(impl_->process_group);
}

void Group::leave() noexcept {
  if (impl_->watchdog) impl_->watchdog->leave();
}

void Group::call_ranks() {
  if (impl_->watchdog) impl_->watchdog->call_ranks();
}
void Group::answer_calls(std::function<int64_t()> how_far) {
  if (impl_->watchdog) impl_->watchdog->answer_calls(std::move(how_far));
}
std::optional<int64_t> Group::furthest() const { return impl_->watchdog ? impl_->watchdog->furthest() : std::nullopt; }

int64_t Group::rank() const { return impl_->options.rank; }
int64_t Group::world_size() const { return impl_->options.world_size; }
const std::vector<int64_t>& Group::global_ranks() const { return impl_->ranks; }
int64_t Group::local_world_size() const { return impl_->options.local_world_size; }
const std::string& Group::backend() const { return impl_->options.backend; }
const at::Device& Group::device() const { return impl_->options.device; }
bool Group::debug() const { return impl_->options.debug; }
bool Group::dry() const { return impl_->options.dry != nullptr; }
const c10::intrusive_ptr<c10d::ProcessGroup>& Group::process_group() const { return impl_->process_group; }

const std::shared_ptr<Group>& world_group() { return world(); }
void set_world_group(std::shared_ptr<Group> group) {
  world() = std::move(group);
  set_mesh(world() ? Mesh(world(), {{Axis::dp_replicate, world()->world_size()}}) : Mesh());
}

}  // namespace accelerate::comm
