#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "comm/group.hpp"
#include "memory/meta_memory.hpp"
#include "observe/trace.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/gradient_reducer.hpp"
#include "parallel/sharding/quantized_reduction.hpp"
#include "parallel/sharding/replicas.hpp"
#include "parallel/sharding/used_units.hpp"
#include "residency/buffers.hpp"

namespace accelerate::parallel {
namespace {

class LocalReducer final : public GradientReducer {
 public:
  LocalReducer(std::vector<ShardedPart>& parts, const ReducerOptions& options)
      : parts_(parts), options_(options), arrived_(parts.size()) {}

  bool take(ShardedPart& part, ShardedMember& member, const at::Tensor& gradient) override {
    at::NoGradGuard no_grad;
    auto& arrived = arrived_[part.index];
    if (arrived.empty()) tell_coming(part);
    auto& shard = member.shard;
    // In the order of the parameter's bytes, which need not be the order of its indices.
    const auto type =
        options_.keeps_low_precision() ? part.reduce_dtype.value_or(gradient.scalar_type()) : shard.scalar_type();
    at::Tensor flat = gradient.as_strided({gradient.numel()}, {1});
    if (options_.before != 1)  // what travels nowhere is rounded as what does
      flat = flat.to(part.reduce_dtype.value_or(gradient.scalar_type())).div(options_.before).mul_(options_.before);
    flat = flat.to(shard.device(), type).variable_data();
    if (options_.keeps_low_precision() && type != shard.scalar_type())
      counts::add(ShardingCount::low_precision_gradients);
    add_to_gradient(shard, flat, options_.widens());
    arrived.resize(part.members.size());
    arrived[member.index] = 1;
    if (!has_all(part.index)) return false;
    tell_given(part);
    return true;
  }
  bool came(const ShardedMember& member) const override {
    const auto& arrived = arrived_[member.part];
    return member.index < arrived.size() && arrived[member.index];
  }
  void finish() override {
    for (const auto& part : parts_)
      if (!arrived_[part.index].empty() && !has_all(part.index)) tell_given(part);
    for (auto& arrived : arrived_) arrived.clear();
  }

 private:
  bool has_all(size_t part) const {
    return std::count(arrived_[part].begin(), arrived_[part].end(), 1) ==
           static_cast<int64_t>(parts_[part].members.size());
  }

  const std::vector<ShardedPart>& parts_;
  ReducerOptions options_;
  std::vector<std::vector<char>> arrived_;  ///< by part and member
};

class CollectiveReducer final : public GradientReducer {
 public:
  CollectiveReducer(std::vector<ShardedPart>& parts, const ShardGroups& groups, const ReducerOptions& options,
                    UsedUnits* used)
      : parts_(parts),
        group_(groups.shard),
        replicas_(groups.replicate ? std::make_unique<Replicas>(parts, groups.replicate,
                                                                group_->world_size() == 1 ? options.before : 1)
                                   : nullptr),
        options_(options),
        used_(used),
        states_(parts.size()) {
    if (group_->world_size() > 1 && std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.int4; }))
      quantized_ = std::make_unique<QuantizedReduction>(parts, groups);
    // Gradients come from the last unit to the first; the real order is learnt in the first backward.
    for (size_t i = parts.size(); i-- > 0;)
      if (parts[i].trainable) order_.push_back(i);
  }

  bool take(ShardedPart& part, ShardedMember& member, const at::Tensor& gradient) override {
    at::NoGradGuard no_grad;
    State& state = states_[part.index];
    if (!state.gradient.begun()) {
      make_room();
      begin(part, part.reduce_dtype.value_or(gradient.scalar_type()));
    }
    if (!state.gradient.take(member, gradient)) return false;
    if (!learnt_) seen_.push_back(static_cast<int64_t>(part.index));
    advance();
    while (!options_.overlap && !running_.empty()) collect();
    return true;
  }
  bool came(const ShardedMember& member) const override { return states_[member.part].gradient.came(member.index); }

  void finish() override {
    at::NoGradGuard no_grad;
    std::vector<size_t> trained;
    int64_t members = 0;
    for (size_t i : order_) {
      if (!parts_[i].trained) continue;
      trained.push_back(i);
      members += static_cast<int64_t>(parts_[i].members.size());
    }
    if (members == 0) return;
    at::Tensor present = at::zeros({members + kDigestWords}, at::kInt);
    auto* flags = present.data_ptr<int32_t>();
    for (size_t i : trained)
      for (size_t m = 0; m < parts_[i].members.size(); ++m) *flags++ = states_[i].gradient.came(m);
    const uint64_t digest = used_ ? used_->digest() : 0;
    for (int word = 0; word < kDigestWords / 2; ++word) {
      const auto bits = static_cast<int32_t>(digest >> (32 * word));
      *flags++ = bits, *flags++ = ~bits;
    }
    // A rank without a gradient sends zeros, of whole parts too: others may have sent theirs already, and all must send
    // the same in the same order.
    for (size_t i : trained)
      if (!states_[i].gradient.complete()) complete(i);
    advance();
    while (!running_.empty()) collect();
    for (size_t i : trained) {
      if (!is_quantized(i)) continue;
      states_[i].result = quantized_->take_result(i);
      reduced(i);
    }
    // The parameters that have a gradient on any rank: without one anywhere the optimizer must not see zeros.
    at::Tensor common = present.to(group_->device());
    group_->all_reduce_(common, Reduction::max);
    common = common.cpu();
    const auto* common_flags = common.data_ptr<int32_t>();
    std::vector<std::vector<char>> used(parts_.size());
    for (size_t i : trained)
      for (size_t m = 0; m < parts_[i].members.size(); ++m) used[i].push_back(static_cast<char>(*common_flags++ != 0));
    // The largest number and the largest complement of all ranks are of one number.
    bool alike = true;
    for (int word = 0; word < kDigestWords; word += 2) alike &= common_flags[word] == ~common_flags[word + 1];
    if (used_) used_->check("backward", alike || group_->dry());
    if (replicas_ && !apart_) replicas_->finish(used);
    for (size_t i : trained) {
      if (!states_[i].given) give(parts_[i], states_[i].result, used[i]);
      states_[i] = {};
    }
    next_ = 0;
    learn_order();
  }

  void trim() override { buffers_.trim(); }

 private:
  static constexpr int kDigestWords = 4;  ///< each half of a digest, and its complement
  struct State {
    FlatGradient gradient;  ///< whole
    at::Tensor result;      ///< this rank's slice of the average
    bool given = false;     ///< to the shards
    c10::intrusive_ptr<c10::ivalue::Future> reduced;
  };

  bool is_quantized(size_t index) const { return quantized_ && parts_[index].int4; }

  /// The device on which the part is computed with and gradients travel; offloaded masters lie elsewhere.
  static at::Device device_of(const ShardedPart& part) { return part.members.front().tensor.device(); }

  void begin(const ShardedPart& part, at::ScalarType dtype) {
    // A part of which nobody else has a shard of is the result.
    const meta_memory::Purpose whole(group_->world_size() == 1 ? MemoryUse::gradients : MemoryUse::staging);
    at::Tensor flat = buffers_.take(part.numel(), dtype, device_of(part));
    if (is_quantized(part.index)) flat.zero_();  // what lies between members has a share in their scales
    states_[part.index].gradient.begin(part, std::move(flat));
  }

  /// Zeros for the members that have no gradient here.
  void complete(size_t index) {
    const auto& part = parts_[index];
    FlatGradient& gradient = states_[index].gradient;
    if (!gradient.begun()) begin(part, part.reduce_dtype.value_or(part.compute_dtype));
    gradient.fill(part);
  }

  /// Starts what is complete, in the common order only, so that ranks whose gradients come in different orders still
  /// meet.
  void advance() {
    for (; next_ < order_.size(); ++next_) {
      const size_t index = order_[next_];
      if (!parts_[index].trained) continue;
      State& state = states_[index];
      if (!state.gradient.complete()) return;
      if (group_->world_size() == 1) {
        state.result = state.gradient.release();
        reduced(index);
        continue;
      }
      at::Tensor flat = state.gradient.flat();
      if (is_quantized(index)) {
        const trace::Topic topic(trace::SpanKind::gradient_reduce, parts_[index].unit_name(),
                                 static_cast<int64_t>(flat.nbytes()));
        quantized_->start(index, flat);
        running_.push_back(index);
        continue;
      }
      const Division division = divide(flat.scalar_type());
      if (division.before != 1) flat.div_(division.before);
      const int64_t length = parts_[index].numel() / group_->world_size();
      const meta_memory::Purpose shard(MemoryUse::gradients);
      state.result = at::empty({length}, flat.options());
      count_reduced(flat);
      const trace::Topic topic(trace::SpanKind::gradient_reduce, parts_[index].unit_name(),
                               static_cast<int64_t>(flat.nbytes()));
      state.reduced = group_->reduce_scatter_async(state.result, flat, division.within);
      running_.push_back(index);
    }
  }

  /// Divisors of the gradients, of their sum before it is rounded, and of the result: together the number of ranks.
  struct Division {
    double before = 1, within = 1, after = 1;
  };
  /// On the host before the sum is rounded, as in shared memory. On a device sums in half precision must not overflow,
  /// so part of the division comes first (PyTorch's rule); else all of it comes last, on the small result.
  Division divide(at::ScalarType dtype) const {
    const int64_t world = group_->world_size();
    if (const double before = options_.before; before != 1) {
      const double rest = static_cast<double>(world) / before;
      return group_->device().is_cpu() ? Division{.before = before, .within = rest}
                                       : Division{.before = before, .after = rest};
    }
    if (group_->device().is_cpu()) return {.within = static_cast<double>(world)};
    int64_t factor = 1;
    if (dtype == at::kHalf || dtype == at::kBFloat16)
      while (world % factor == 0 && world / factor > factor) factor *= 2;
    return {.before = static_cast<double>(factor), .after = static_cast<double>(world) / static_cast<double>(factor)};
  }

  /// At most two whole gradients wait for their turn on the wire.
  void make_room() {
    while (running_.size() >= 2) collect();
  }

  void collect() {
    const size_t index = running_.front();
    running_.pop_front();
    State& state = states_[index];
    if (is_quantized(index)) {
      quantized_->pass_on(index);
      return buffers_.give(state.gradient.release());
    }
    group_->wait("backward", *state.reduced);
    state.reduced.reset();
    buffers_.give(state.gradient.release());
    const double after = divide(state.result.scalar_type()).after;
    if (after != 1) state.result.div_(after);
    reduced(index);
  }
  /// The replica has its average.
  void reduced(size_t index) {
    State& state = states_[index];
    if (replicas_ && !apart_) return replicas_->add(index, state.result);
    // Whether any rank has a gradient of a member that has none here is known at the end.
    const std::vector<char> used(parts_[index].members.size(), 1);
    for (size_t m = 0; m < used.size(); ++m)
      if (!state.gradient.came(m)) return;
    state.given = true;
    give(parts_[index], std::exchange(state.result, {}), used);
  }

  void give(ShardedPart& part, at::Tensor result, const std::vector<char>& used) {
    const meta_memory::Purpose shards(MemoryUse::gradients);
    const bool keeps = options_.keeps_low_precision();
    if (options_.times != 1) result.mul_(options_.times);
    if (keeps && result.scalar_type() != part.master_dtype) counts::add(ShardingCount::low_precision_gradients);
    // Offloaded masters take their gradients on the host.
    result = result.to(part.master.device(), keeps ? result.scalar_type() : part.master_dtype);
    tell_coming(part);
    part.add_to_gradients(result, used, options_.widens());
    tell_given(part);
  }

  /// Rank 0's order of the first backward becomes everyone's.
  void learn_order() {
    if (std::exchange(learnt_, true)) return;
    std::vector<int64_t> order = seen_;
    for (size_t i : order_)
      if (std::find(order.begin(), order.end(), static_cast<int64_t>(i)) == order.end())
        order.push_back(static_cast<int64_t>(i));
    at::Tensor shared = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
    std::copy(order.begin(), order.end(), shared.data_ptr<int64_t>());
    shared = group_->broadcast(shared.to(group_->device()), 0).cpu();
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<size_t>(shared.data_ptr<int64_t>()[i]);
  }

  std::vector<ShardedPart>& parts_;
  std::shared_ptr<comm::Group> group_;
  std::unique_ptr<Replicas> replicas_;  ///< null: there is one
  ReducerOptions options_;
  UsedUnits* used_;
  std::unique_ptr<QuantizedReduction> quantized_;  ///< of parts whose gradients travel in 4 bits; null: there are none
  std::vector<State> states_;
  std::vector<size_t> order_;   ///< of reductions, the same on all ranks
  size_t next_ = 0;             ///< in order_
  std::deque<size_t> running_;  ///< reductions under way
  std::vector<int64_t> seen_;
  bool learnt_ = false;
  residency::Buffers buffers_;
};

}  // namespace

std::unique_ptr<GradientReducer> local_reducer(std::vector<ShardedPart>& parts, const ReducerOptions& options) {
  return std::make_unique<LocalReducer>(parts, options);
}

std::unique_ptr<GradientReducer> collective_reducer(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                                    const ReducerOptions& options, UsedUnits* used) {
  return std::make_unique<CollectiveReducer>(parts, groups, options, used);
}

}  // namespace accelerate::parallel
