#include "residency/homes/shard.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <atomic>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "residency/counters.hpp"
#include "utils/meta_memory.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

class Gathering final : public Transfer {
 public:
  Gathering(std::shared_ptr<comm::Group> group, c10::intrusive_ptr<c10::ivalue::Future> done, at::Tensor sent)
      : group_(std::move(group)), done_(std::move(done)), sent_(std::move(sent)) {}
  ~Gathering() override {
    try {
      if (done_) done_->wait();
    } catch (...) {  // whoever did not wait does not want to know
    }
  }
  void wait() override { group_->wait("all_gather of parameters", *std::exchange(done_, nullptr)); }

 private:
  std::shared_ptr<comm::Group> group_;
  c10::intrusive_ptr<c10::ivalue::Future> done_;
  at::Tensor sent_;
};

class ShardHome final : public Home {
 public:
  ShardHome(at::Tensor shard, std::shared_ptr<comm::Group> group, std::shared_ptr<comm::Group> near, std::string name)
      : shard_(std::move(shard)), group_(std::move(group)), near_(std::move(near)), name_(std::move(name)) {}
  ~ShardHome() override { forget(); }

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (group_->debug()) agree();
    const meta_memory::Purpose on_the_way(MemoryUse::staging);
    const auto& group = left_.defined() ? near_ : group_;
    // A shard in pinned memory goes to the device behind what that computes; nobody changes it before its gradient,
    // which comes later on the same stream.
    at::Tensor sent = left_.defined() ? left_ : shard_.detach().to(flat.options(), /*non_blocking=*/true);
    forget();
    auto done = group->all_gather_async(flat.view(at::kByte), sent.view(at::kByte));
    return std::make_unique<Gathering>(group, std::move(done), std::move(sent));
  }

  void keep_for_backward(const at::Tensor& flat) override {
    if (!near_) return;
    forget();
    const int64_t length = flat.numel() / near_->world_size();
    left_ = flat.narrow(0, near_->rank() * length, length).clone();
    counters().add_resident(static_cast<int64_t>(left_.nbytes()));
  }
  void forget() override {
    if (left_.defined()) counters().add_resident(-static_cast<int64_t>(left_.nbytes()));
    left_.reset();
  }

  void store(const at::Tensor& flat) override {
    forget();
    const at::Tensor mine = flat.narrow(0, group_->rank() * shard_.numel(), shard_.numel());
    at::Tensor shard = shard_.detach();
    if (shard.scalar_type() == flat.scalar_type()) shard.copy_(mine);
    // What nobody changed keeps the precision that the cast took from it.
    else
      shard.copy_(
          at::where(at::eq(mine, shard.to(mine.options())), shard.to(mine.device()), mine.to(shard.scalar_type())));
  }

  bool collective() const override { return true; }
  Place place() const override { return Place::shards; }

 private:
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

  at::Tensor shard_;
  std::shared_ptr<comm::Group> group_, near_;
  at::Tensor left_;  ///< by keep_for_backward(): this rank's stretch among near_
  std::string name_;
};

}  // namespace

std::unique_ptr<Home> shard_home(at::Tensor shard, std::shared_ptr<comm::Group> group,
                                 std::shared_ptr<comm::Group> near, std::string name) {
  return std::make_unique<ShardHome>(std::move(shard), std::move(group), std::move(near), std::move(name));
}

}  // namespace accelerate::residency
