#include "parallel/sharding/whole_gradients.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "comm/group.hpp"
#include "parallel/slice_of.hpp"
#include "residency/home.hpp"
#include "residency/residency.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// The widest dtype of the part's members.
at::ScalarType dtype_of(const ShardedPart& part) {
  std::optional<at::ScalarType> dtype;
  for (const auto& member : part.members)
    if (const at::Tensor& piece = member.shard.grad(); piece.defined())
      dtype = c10::promoteTypes(dtype.value_or(piece.scalar_type()), piece.scalar_type());
  return dtype.value_or(part.master_dtype);
}

std::string absent_text(const std::string& name) {
  return "the gradient of '" + name +
         "' is not resident: the parameter is sharded, and the gradient's data was asked for outside of an operator "
         "(data_ptr(), torch::save, accessors), or after zero_grad() or the next backward had put an end to it; take "
         "clone() of it while it is there, on all ranks";
}

/// The gradients of one part's shards.
class GradientHome final : public residency::Home {
 public:
  GradientHome(ShardedPart& part, std::shared_ptr<comm::Group> group, std::function<void()> meet, at::ScalarType dtype,
               const int64_t& shown)
      : part_(part), group_(std::move(group)), meet_(std::move(meet)), dtype_(dtype), shown_(shown) {}

  std::unique_ptr<residency::Transfer> fetch(const at::Tensor& flat) override {
    meet_();
    at::Tensor slice = at::zeros({part_.numel() / group_->world_size()}, flat.options());
    for (const auto& member : part_.members)
      if (const at::Tensor& piece = member.shard.grad(); piece.defined() && piece.numel() > 0)
        member.piece_in(slice).copy_(piece);
    at::Tensor(flat).copy_(group_->all_gather(slice, "all_gather of gradients"));
    return nullptr;
  }
  void store(const at::Tensor& flat) override {
    for (const auto& member : part_.members) take(member.offset, flat.narrow(0, member.offset, member.tensor.numel()));
  }
  bool collective() const override { return true; }
  residency::BytesPlace place() const override { return residency::BytesPlace::shards; }
  std::optional<at::ScalarType> keeps() const override { return dtype_; }
  void take(int64_t begin, const at::Tensor& values) override {
    for (auto& member : part_.members) {
      if (member.offset != begin || member.tensor.numel() != values.numel()) continue;
      if (!member.shard.grad().defined() || member.shard.numel() == 0) continue;
      member.shard.mutable_grad().copy_(values.narrow(0, member.begin, member.shard.numel()));
    }
  }
  /// Clipping and unscaling change the shards' gradients by themselves; other tensors, which may lie where old ones
  /// lay, are shown first.
  int64_t version() const override {
    size_t all = c10::hash_combine(0, static_cast<size_t>(shown_));
    for (const auto& member : part_.members) {
      const at::Tensor& piece = member.shard.grad();
      all = c10::hash_combine(all, piece.defined() ? 1 + static_cast<size_t>(piece._version()) : 0);
      all = c10::hash_combine(all, std::bit_cast<size_t>(piece.unsafeGetTensorImpl()));
    }
    return static_cast<int64_t>(all);
  }

 private:
  ShardedPart& part_;
  std::shared_ptr<comm::Group> group_;
  std::function<void()> meet_;
  at::ScalarType dtype_;
  const int64_t& shown_;
};

/// A tensor of the parameter's sizes and strides, without a byte.
at::Tensor shape_of(const at::Tensor& parameter, const at::TensorOptions& options) {
  at::Tensor shape = at::empty({0}, options);
  shape.unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  return shape;
}

}  // namespace

WholeGradients::WholeGradients(std::vector<ShardedPart>& parts, const ShardGroups& groups, std::function<void()> meet)
    : parts_(parts), groups_(groups), meet_(std::move(meet)), states_(parts.size()), residencies_(parts.size()) {
  for (const auto& part : parts) states_[part.index].resize(part.members.size());
}

WholeGradients::~WholeGradients() {
  for (auto& part : parts_)
    for (auto& member : part.members)
      if (state(member).shows == Shows::whole) member.tensor.mutable_grad().reset();
}

bool WholeGradients::is_held(const ShardedPart& part) const {
  constexpr size_t kOwners = 2, kStorages = 2;  // the state and the member; the tensor's and the member's
  return std::any_of(states_[part.index].begin(), states_[part.index].end(), [](const State& state) {
    return state.whole.defined() && (state.whole.use_count() > kOwners + (state.shows == Shows::whole ? 1 : 0) ||
                                     state.whole.unsafeGetTensorImpl()->unsafe_storage().use_count() > kStorages);
  });
}

void WholeGradients::make(ShardedPart& part) {
  const auto dtype = dtype_of(part);
  auto& states = states_[part.index];
  auto& residency = residencies_[part.index];
  if (residency && residency->units().front()->parts().front().dtype == dtype && !is_held(part)) return;
  for (auto& state : states) state.whole.reset();
  residency = std::make_unique<residency::Residency>(
      residency::Policy{.prefetch = 0, .outstanding = 1, .evict_after_use = true});
  residency::PartSpec spec;
  spec.layout = part.layout;
  spec.dtype = dtype;
  spec.device = part.members.front().tensor.device();
  spec.home = std::make_unique<GradientHome>(part, groups_.shard, meet_, dtype, shown_);
  spec.absent = absent_text;
  for (auto& member : part.members) {
    at::Tensor& whole = states[member.index].whole;
    whole = shape_of(member.tensor, at::TensorOptions().dtype(dtype).device(spec.device));
    spec.members.emplace_back(member.name, whole);
  }
  std::vector<residency::PartSpec> specs;
  specs.push_back(std::move(spec));
  residency->add("gradients of " + std::string(part.unit_name()), std::move(specs));
}

void WholeGradients::show() {
  const at::NoGradGuard no_grad;
  ++shown_;
  for (auto& part : parts_) {
    for (auto& member : part.members) drop_cleared(member);
    // Also where it has been frozen since: steps go on with a gradient that is there.
    if (part.members.front().tensor.is_meta()) continue;
    const bool any = std::any_of(part.members.begin(), part.members.end(),
                                 [](const ShardedMember& member) { return member.shard.grad().defined(); });
    if (!any) continue;
    if (groups_.ranks() > 1) make(part);
    for (auto& member : part.members) {
      const at::Tensor& piece = member.shard.grad();
      State& now = state(member);
      if (!piece.defined() || (member.tensor.grad().defined() && now.shows != Shows::whole)) continue;
      // Alone the shard is the whole, in the order of the parameter's bytes.
      if (groups_.ranks() == 1)
        now.whole = piece.detach()
                        .as_strided(member.tensor.sizes(), member.tensor.strides(), piece.storage_offset())
                        .variable_data();
      now.shows = Shows::whole;
      member.tensor.mutable_grad() = now.whole;
    }
  }
}

void WholeGradients::show_nothing(State& state) {
  state.shows = Shows::nothing;
  // Alone it is the gradient itself, whose memory it would keep.
  if (groups_.ranks() == 1) state.whole.reset();
}

bool WholeGradients::settle(ShardedMember& member, bool left) {
  const at::NoGradGuard no_grad;
  drop_cleared(member);
  State& was = state(member);
  at::Tensor& now = member.tensor.mutable_grad();
  if (shows(member)) return false;
  if (!now.defined()) {
    if (was.shows != Shows::nothing) member.shard.mutable_grad().reset();
    show_nothing(was);
  } else if (was.shows == Shows::whole || !left) {
    const at::Tensor given = std::exchange(now, at::Tensor());
    show_nothing(was);
    const int64_t length = member.shard.numel();
    const at::Tensor mine =
        slice_of(member.tensor, given.to(member.tensor.device()), length > 0 ? member.begin : 0, length);
    member.shard.mutable_grad() = mine.to(member.shard.device(), member.shard.scalar_type(), false, /*copy=*/true);
    return true;
  }
  return false;
}

void WholeGradients::drop_cleared(ShardedMember& member) {
  if (!member.shard.grad().defined() && shows(member)) take(member);
}

bool WholeGradients::shows(const ShardedMember& member) const {
  return state(member).shows == Shows::whole && member.tensor.grad().is_same(state(member).whole);
}

void WholeGradients::make_way(ShardedMember& member) {
  if (!member.shard.grad().defined() && state(member).shows == Shows::whole && member.tensor.grad().defined() &&
      !shows(member))
    raise<ConfigError>(
        "backward: the gradient of '{}' was replaced, and cleared by an optimizer past the prepared one, expected one "
        "of "
        "them: nothing tells which came last; clear gradients by the prepared optimizer's zero_grad(), or the model's",
        member.name);
  settle(member, /*left=*/true);
  State& was = state(member);
  if (was.shows != Shows::whole) return;
  member.tensor.mutable_grad().reset();
  show_nothing(was);
}

void WholeGradients::start_anew() {
  for (auto& part : parts_)
    for (auto& member : part.members) {
      if (shows(member)) member.tensor.mutable_grad().reset();
      state(member).shows = member.tensor.grad().defined() ? Shows::local : Shows::nothing;
    }
}

void WholeGradients::note_local(const ShardedMember& member) { state(member).shows = Shows::local; }

at::Tensor WholeGradients::take(ShardedMember& member) {
  show_nothing(state(member));
  return std::exchange(member.tensor.mutable_grad(), at::Tensor());
}

void WholeGradients::release() {
  for (auto& residency : residencies_)
    if (residency) residency->release();
}

void WholeGradients::clear(ShardedMember& member, bool by_whole) {
  State& was = state(member);
  if (was.shows == Shows::nothing) return;
  at::Tensor& now = member.tensor.mutable_grad();
  if (!now.defined()) member.shard.mutable_grad().reset();
  if (member.shard.grad().defined() && shows(member)) return;  // it was filled with zeros
  // So was what the program has put in its place, and the shard learns of it before the step.
  if (by_whole && now.defined() && was.shows == Shows::whole) return;
  now.reset();
  show_nothing(was);
}

}  // namespace accelerate::parallel
