#include "residency/homes/shard.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "accelerate/codes/float8.hpp"
#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "residency/counters.hpp"
#include "residency/homes/kept.hpp"
#include "utils/meta_memory.hpp"
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

/// f(stretch of the tensor, its place in the wire's list) for what `tensor`, elements of the flat storage from `begin`
/// on, has of each stretch.
template <class F> void for_each_stretch(const Float8Wire& wire, const at::Tensor& tensor, int64_t begin, F&& f) {
  for (size_t i = 0; i < wire.stretches.size(); ++i) {
    const int64_t from = std::max(wire.stretches[i].begin, begin);
    const int64_t to = std::min(wire.stretches[i].begin + wire.stretches[i].length, begin + tensor.numel());
    if (from < to) f(from - begin, to - from, wire.scales[static_cast<int64_t>(i)]);
  }
}

/// Bytes, one for each of the values.
at::Tensor codes_of(const Float8Wire& wire, const at::Tensor& values, int64_t begin) {
  const at::NoGradGuard no_grad;
  at::Tensor bytes = at::zeros(values.sizes(), values.options().dtype(at::kByte));
  if (values.is_meta()) return bytes;  // a dry run
  const at::Tensor all = bytes.view(codes::scalar_type(codes::Float8::e4m3));
  for_each_stretch(wire, values, begin, [&](int64_t at, int64_t length, const at::Tensor& scale) {
    all.narrow(0, at, length).copy_(codes::encode(values.narrow(0, at, length), scale, codes::Float8::e4m3));
  });
  return bytes;
}

void decode(const Float8Wire& wire, const at::Tensor& bytes, int64_t begin, const at::Tensor& to) {
  if (to.is_meta()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor all = bytes.view(codes::scalar_type(codes::Float8::e4m3));
  for_each_stretch(wire, to, begin, [&](int64_t at, int64_t length, const at::Tensor& scale) {
    to.narrow(0, at, length).copy_(codes::decode(all.narrow(0, at, length), scale, to.scalar_type()));
  });
}

class ShardHome final : public Home {
 public:
  ShardHome(at::Tensor shard, std::shared_ptr<comm::Group> group, std::shared_ptr<comm::Group> near, std::string name,
            std::optional<Float8Wire> wire)
      : shard_(std::move(shard)),
        kept_(shard_, group->rank() * shard_.numel()),
        group_(std::move(group)),
        near_(std::move(near)),
        name_(std::move(name)),
        wire_(std::move(wire)) {}
  ~ShardHome() override { forget(); }

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (group_->debug()) agree();
    const meta_memory::Purpose on_the_way(MemoryUse::staging);
    const auto& group = left_.defined() ? near_ : group_;
    // A shard in pinned memory goes to the device behind what that computes; nobody changes it before its gradient,
    // which comes later on the same stream.
    at::Tensor sent = left_;
    if (!sent.defined() && wire_) sent = as_codes(shard_.detach().to(flat.device(), /*non_blocking=*/true));
    else if (!sent.defined()) sent = shard_.detach().to(flat.options(), /*non_blocking=*/true);
    forget();
    if (wire_) {
      at::Tensor bytes = at::empty({flat.numel()}, flat.options().dtype(at::kByte));
      auto done = group->all_gather_async(bytes, sent, of_);
      return std::make_unique<Gathering>(group, std::move(done), std::move(sent),
                                         [this, bytes, flat] { decode(*wire_, bytes, 0, flat); });
    }
    auto done = group->all_gather_async(flat.view(at::kByte), sent.view(at::kByte), of_);
    return std::make_unique<Gathering>(group, std::move(done), std::move(sent), nullptr);
  }

  void keep_for_backward(const at::Tensor& flat) override {
    if (!near_) return;
    forget();
    const int64_t length = flat.numel() / near_->world_size();
    const int64_t begin = near_->rank() * length;
    left_ = flat.narrow(0, begin, length);
    // What was decoded encodes to the same codes: the rounding to the compute dtype is far less than half a code.
    left_ = wire_ ? codes_of(*wire_, left_, begin) : left_.clone();
    counters().add_resident(static_cast<int64_t>(left_.nbytes()));
  }
  void forget() override {
    if (left_.defined()) counters().add_resident(-static_cast<int64_t>(left_.nbytes()));
    left_.reset();
  }

  void store(const at::Tensor& flat) override {
    forget();
    if (!wire_) return kept_.take_back(flat);
    const int64_t begin = group_->rank() * shard_.numel();
    const at::Tensor came = at::empty({shard_.numel()}, flat.options());
    decode(*wire_, as_codes(shard_.detach().to(flat.device())), begin, came);
    kept_.take_back(flat, came);
  }

  std::optional<at::ScalarType> keeps() const override { return kept_.dtype(); }
  void refine(int64_t begin, const at::Tensor& values) const override { kept_.refine(begin, values); }
  void take(int64_t begin, const at::Tensor& values) override {
    forget();
    kept_.take(begin, values);
  }
  int64_t version() const override { return kept_.version(); }

  bool collective() const override { return true; }
  Place place() const override { return Place::shards; }

 private:
  at::Tensor as_codes(const at::Tensor& shard) const {
    return codes_of(*wire_, shard, group_->rank() * shard_.numel());
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

  at::Tensor shard_;
  Kept kept_;
  std::shared_ptr<comm::Group> group_, near_;
  at::Tensor left_;  ///< by keep_for_backward(): this rank's stretch among near_
  std::string name_;
  const uint64_t of_ = std::hash<std::string>()(name_);  ///< the unit, for groups
  std::optional<Float8Wire> wire_;
};

}  // namespace

std::unique_ptr<Home> shard_home(at::Tensor shard, std::shared_ptr<comm::Group> group,
                                 std::shared_ptr<comm::Group> near, std::string name, std::optional<Float8Wire> wire) {
  return std::make_unique<ShardHome>(std::move(shard), std::move(group), std::move(near), std::move(name),
                                     std::move(wire));
}

}  // namespace accelerate::residency
