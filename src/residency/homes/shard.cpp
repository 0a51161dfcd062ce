#include "residency/homes/shard.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "memory/meta_memory.hpp"
#include "residency/counters.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/kept.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

class Gathering final : public Transfer {
 public:
  Gathering(std::shared_ptr<comm::Group> group, c10::intrusive_ptr<c10::ivalue::Future> done, at::Tensor sent,
            std::function<void()> arrived)
      : group_(std::move(group)), done_(std::move(done)), sent_(std::move(sent)), arrived_(std::move(arrived)) {}
  ~Gathering() override {
    try {
      if (done_) done_->wait();
    } catch (...) {  // whoever did not wait does not want to know
    }
  }
  void wait() override {
    group_->wait("all_gather of parameters", *std::exchange(done_, nullptr));
    if (arrived_) arrived_();
  }

 private:
  std::shared_ptr<comm::Group> group_;
  c10::intrusive_ptr<c10::ivalue::Future> done_;
  at::Tensor sent_;
  std::function<void()> arrived_;
};

/// The transfer of a shard that has to be fetched itself before it is gathered.
class FetchedFirst final : public Transfer {
 public:
  FetchedFirst(std::shared_ptr<comm::Group> group, std::unique_ptr<Transfer> coming,
               std::function<std::unique_ptr<Transfer>()> gather)
      : group_(std::move(group)), coming_(std::move(coming)), gather_(std::move(gather)) {}
  void wait() override {
    try {
      coming_->wait();
    } catch (const std::exception& error) {
      group_->announce_failure(error.what());  // peers wait for this rank's slice
      throw;
    }
    gather_()->wait();
  }

 private:
  std::shared_ptr<comm::Group> group_;
  std::unique_ptr<Transfer> coming_;
  std::function<std::unique_ptr<Transfer>()> gather_;
};

class ShardHome final : public Home {
 public:
  ShardHome(KeptSlice own, std::shared_ptr<comm::Group> group, std::shared_ptr<comm::Group> near, std::string name,
            std::unique_ptr<Wire> wire)
      : own_(std::move(own)),
        begin_(group->rank() * own_.numel),
        group_(std::move(group)),
        near_(std::move(near)),
        name_(std::move(name)),
        wire_(std::move(wire)) {
    if (own_.masters.defined()) kept_.emplace(own_.masters, begin_);
    if (const auto mapped = own_.home->mapped()) {
      here_ = *mapped;
      if (!kept_) kept_.emplace(here_, begin_);
    }
  }
  ~ShardHome() override { forget(); }

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (group_->debug()) agree();
    const meta_memory::Purpose on_the_way(MemoryUse::staging);
    if (at::Tensor sent = left_; sent.defined()) {
      const bool current = left_of_ == version();
      forget();
      if (current) return gather(near_, std::move(sent), flat);
    }
    own_.make_current();
    if (here_.defined() || own_.message.defined()) return gather(group_, message_of(here_, flat), flat);
    at::Tensor mine = at::empty({own_.numel}, flat.options().dtype(own_.dtype));
    auto coming = own_.home->fetch(mine);
    auto then = [this, mine, flat] { return gather(group_, message_of(mine, flat), flat); };
    if (!coming) return then();
    return std::make_unique<FetchedFirst>(group_, std::move(coming), std::move(then));
  }

  void keep_for_backward(const at::Tensor& flat) override {
    if (!near_) return;
    at::Tensor kept = std::move(came_);
    const bool current = came_of_ == version();
    forget();
    if (wire_ && !(kept.defined() && current)) return;
    const int64_t length = flat.numel() / near_->world_size();
    left_ = wire_ ? std::move(kept) : flat.narrow(0, near_->rank() * length, length).clone();
    left_of_ = version();
    counters().add_resident(static_cast<int64_t>(left_.nbytes()));
  }
  void forget() override {
    if (left_.defined()) counters().add_resident(-static_cast<int64_t>(left_.nbytes()));
    left_.reset();
    came_.reset();
  }

  void store(const at::Tensor& flat) override {
    forget();
    with_kept(flat, /*changes=*/true, [&](const Kept& kept, const at::Tensor& values) {
      if (!wire_) return kept.take_back(flat);
      const at::Tensor came = flat.narrow(0, begin_, own_.numel).clone();
      wire_->decode(message_of(values, flat), begin_, came);
      kept.take_back(flat, came);
    });
  }

  std::optional<at::ScalarType> keeps() const override { return kept_ ? kept_->dtype() : own_.dtype; }
  bool lossy() const override { return wire_ && !own_.message.defined(); }
  bool rounds() const override { return own_.message.defined(); }
  void refine(int64_t begin, const at::Tensor& values) const override {
    with_kept(values, /*changes=*/false, [&](const Kept& kept, const at::Tensor&) { kept.refine(begin, values); });
  }
  void take(int64_t begin, const at::Tensor& values) override {
    forget();
    with_kept(values, /*changes=*/true, [&](const Kept& kept, const at::Tensor&) { kept.take(begin, values); });
  }
  int64_t version() const override { return kept_ ? kept_->version() : changes_ + own_.home->version(); }

  bool collective() const override { return true; }
  BytesPlace place() const override { return BytesPlace::shards; }

 private:
  /// The message with this rank's slice. Pinned memory goes to the device behind what the device computes; nobody
  /// changes it before its gradient, which comes later on the same stream.
  at::Tensor message_of(const at::Tensor& slice, const at::Tensor& flat) const {
    if (own_.message.defined()) return own_.message.to(flat.device(), /*non_blocking=*/true);
    if (!wire_) return slice.detach().to(flat.options(), /*non_blocking=*/true);
    return wire_->encode(slice.detach().to(flat.device(), /*non_blocking=*/true), begin_);
  }

  /// Neighbours send each other the very messages that all have sent them: codes of what was decoded would be others.
  std::unique_ptr<Transfer> gather(const std::shared_ptr<comm::Group>& group, at::Tensor sent, const at::Tensor& flat) {
    if (!wire_) {
      auto done = group->all_gather_async(flat.view(at::kByte), sent.view(at::kByte), of_);
      return std::make_unique<Gathering>(group, std::move(done), std::move(sent), nullptr);
    }
    at::Tensor messages = at::empty({group->world_size() * sent.numel()}, sent.options());
    auto done = group->all_gather_async(messages, sent, of_);
    came_of_ = version();
    return std::make_unique<Gathering>(group, std::move(done), sent, [this, messages, flat] {
      if (near_) {
        const int64_t length = messages.numel() / near_->world_size();
        came_ = messages.narrow(0, near_->rank() * length, length).clone();
      }
      if (wire_->joins()) return wire_->decode(messages, 0, flat);
      const int64_t ranks = group_->world_size(), size = messages.numel() / ranks, length = flat.numel() / ranks;
      for (int64_t r = 0; r < ranks; ++r)
        wire_->decode(messages.narrow(0, r * size, size), r * length, flat.narrow(0, r * length, length));
    });
  }

  /// f(what this rank keeps, its values); what is not in memory comes, and goes back where that changes it.
  template <class F> void with_kept(const at::Tensor& like, bool changes, F&& f) const {
    if (kept_) return f(*kept_, here_.defined() ? here_ : own_.masters.to(own_.dtype));
    at::Tensor values = at::empty({own_.numel}, like.options().dtype(own_.dtype));
    if (const auto coming = own_.home->fetch(values)) coming->wait();
    f(Kept(values, begin_), values);
    if (!changes) return;
    own_.home->store(values);
    ++changes_;
  }

  /// Debug mode: do all ranks want the same unit, at the same place in their order?
  void agree() {
    static std::atomic<int64_t> sequence{0};
    const std::string mine = name_ + "#" + std::to_string(++sequence);
    const auto all = comm::all_gather_bytes(*group_, mine);
    const auto& ranks = group_->global_ranks();
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] == mine) continue;
      const auto unit = [](const std::string& text) {
        return "'" + text.substr(0, text.rfind('#')) + "' (fetch " + text.substr(text.rfind('#') + 1) + ")";
      };
      raise<CommError>(
          "all_gather of parameters: rank {} needs unit {} but rank {} needs unit {}; with sharded parameters "
          "all ranks must use the parts of the model in the same order: look for control flow that depends on "
          "the rank or on its data",
          ranks[static_cast<size_t>(group_->rank())], unit(mine), ranks[rank], unit(all[rank]));
    }
  }

  KeptSlice own_;
  int64_t begin_;             ///< of the slice, in the flat storage
  at::Tensor here_;           ///< the slice, if it is mapped
  std::optional<Kept> kept_;  ///< the same
  mutable int64_t changes_ = 0;
  std::shared_ptr<comm::Group> group_, near_;
  at::Tensor came_;       ///< the messages that this rank may have to send among near_
  int64_t came_of_ = -1;  ///< the version of what they were made from
  at::Tensor left_;       ///< by keep_for_backward(): what this rank sends among near_
  int64_t left_of_ = -1;  ///< the version of what it was made from: a backward may leave it, and a step come then
  std::string name_;
  const uint64_t of_ = std::hash<std::string>()(name_);  ///< the unit, for groups
  std::unique_ptr<Wire> wire_;
};

}  // namespace

std::unique_ptr<Home> shard_home(KeptSlice own, std::shared_ptr<comm::Group> group, std::shared_ptr<comm::Group> near,
                                 std::string name, std::unique_ptr<Wire> wire) {
  return std::make_unique<ShardHome>(std::move(own), std::move(group), std::move(near), std::move(name),
                                     std::move(wire));
}

}  // namespace accelerate::residency
