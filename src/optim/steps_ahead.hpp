#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim/counts.hpp"
#include "optim/kernels/operators.hpp"
#include "snapshot/ledger.hpp"

namespace accelerate::optim {

/// New values of parameters that were computed before their step. A program may do anything between the two; so the old
/// values stay where they are, and a step takes the new ones over only where it would compute the same: parameters and
/// gradients are compared by digests, since not every write is counted by a tensor's version (LibTorch's own SGD writes
/// through data()). Some tensors are elsewhere: nobody reads them again to compare, new values are computed in their
/// place, and who has brought them keeps those beside the old ones and knows whether these were touched. @param Rule of
/// the step's kernel
template <class Rule> class StepsAhead {
 public:
  bool empty() const { return ahead_.empty(); }

  using Elsewhere = std::function<bool(const at::Tensor&)>;  ///< null: nothing is

  /// Computes the step on all of these. On the meta device it only makes room.
  void compute(const Rule& rule, const kernels::StepLists& lists, double divisor, const Elsewhere& elsewhere) {
    std::vector<at::Tensor> params, first, second, largest;
    for (size_t i = 0; i < lists.parameters.size(); ++i) {
      Ahead& one = ahead_[lists.parameters[i].unsafeGetTensorImpl()];
      one.is_there = false;
      one.rule = rule;
      one.divisor = divisor;
      one.of_part = elsewhere != nullptr;
      const auto room = [&](std::vector<at::Tensor>& all, at::Tensor& fresh, const at::Tensor& old) {
        if (!old.defined()) return;
        if (is(elsewhere, old)) fresh.reset(), all.push_back(old);
        else all.push_back(room_like(old, fresh));
      };
      room(params, one.parameter, lists.parameters[i]);
      const States old = states_at(lists, i);
      for (size_t s = 0; s < kStates; ++s) one.old_states[s] = OldState(old[s], is(elsewhere, old[s]));
      // Where nothing is elsewhere bytes tell, and backward shall use the gradient's memory again.
      if (elsewhere)
        one.old_gradient = OldState(lists.gradients[i], true), one.old_version = lists.parameters[i]._version();
      room(first, one.states[0], old[0]);
      room(second, one.states[1], old[1]);
      room(largest, one.states[2], old[2]);
    }
    if (lists.parameters.empty() || lists.parameters.front().is_meta()) return;
    const auto read = kernels::step_ahead(rule, lists, {params, {}, first, second, largest}, divisor);
    for (size_t i = 0; i < read.size(); ++i) {
      Ahead& one = ahead_[lists.parameters[i].unsafeGetTensorImpl()];
      one.read = read[i];
      one.is_there = true;
    }
    counts::add(OptimCount::steps_ahead, static_cast<int64_t>(read.size()));
  }

  /// A step on these: new values that are there take their place. @return the numbers of those that are left
  std::vector<size_t> take_over(const Rule& rule, const kernels::StepLists& lists, double divisor) {
    std::vector<size_t> left;
    for (size_t i = 0; i < lists.parameters.size(); ++i)
      if (!take_one_over(rule, lists, i, divisor)) left.push_back(i);
    return left;
  }

  /// How many of these have new values.
  size_t count(const std::unordered_set<const at::TensorImpl*>& parameters) const {
    return static_cast<size_t>(std::count_if(parameters.begin(), parameters.end(), [&](const auto* parameter) {
      const auto found = ahead_.find(parameter);
      return found != ahead_.end() && found->second.is_there;
    }));
  }
  /// Whether a step on these would compute all of them the same, as far as can be seen without what is elsewhere.
  bool fits(const Rule& rule, const kernels::StepLists& lists, double divisor, const Elsewhere& elsewhere) const {
    for (size_t i = 0; i < lists.parameters.size(); ++i)
      if (!fits_one(rule, lists, i, divisor, elsewhere)) return false;
    return true;
  }
  /// A step on these is what was computed.
  void take(const kernels::StepLists& lists, double divisor) {
    for (size_t i = 0; i < lists.parameters.size(); ++i) take_one(lists, i, divisor);
  }

  /// Whether nothing is to be computed for the next step: it would probably be for nothing, as before (a program that
  /// clips gradients in each step).
  bool waits() const { return waits_ > 0; }
  /// Values that no step has taken over are worth nothing any more.
  void end_step() {
    constexpr int64_t kLongest = 16;
    if (waits_ > 0) return void(--waits_);
    bool any = false, missed = false;
    for (auto& [parameter, one] : ahead_) {
      any |= one.was_there;
      missed |= one.is_there;
      one.is_there = one.was_there = false;
      one.old_states = {};
      one.old_gradient = {};
    }
    if (missed) waits_ = next_wait_ = std::clamp<int64_t>(2 * next_wait_, 1, kLongest);
    else if (any) next_wait_ = 0;
  }

 private:
  static constexpr size_t kStates = 3;
  using States = std::array<at::Tensor, kStates>;

  /// A state as it was read. Programs that write to it past its version, through data(), write to all of it, which a
  /// sample tells; to read all of it would take as long as a step.
  class OldState {
   public:
    OldState() = default;
    /// @param elsewhere  it is, where no sample is taken
    OldState(const at::Tensor& state, bool elsewhere) : tensor_(state), elsewhere_(elsewhere) {
      if (state.defined()) version_ = state._version(), sample_ = elsewhere ? 0 : sample_of(state);
    }
    bool is_still(const at::Tensor& state) const {
      return state.is_same(tensor_) &&
             (!state.defined() || (state._version() == version_ && (elsewhere_ || sample_of(state) == sample_)));
    }

   private:
    static uint64_t sample_of(const at::Tensor& state) {
      constexpr int64_t kPlaces = 64, kElements = 16;
      if (state.is_meta() || state.numel() == 0) return 0;
      const auto type = state.scalar_type();
      const int64_t places = std::clamp<int64_t>(state.numel() / (2 * kElements), 1, kPlaces);
      std::vector<kernels::StepSlice> slices;
      for (int64_t i = 0; i < places; ++i) {
        void* const here = static_cast<char*>(state.mutable_data_ptr()) +
                           state.numel() / places * i * static_cast<int64_t>(state.element_size());
        slices.push_back({.count = std::min(state.numel(), kElements),
                          .parameter_type = type,
                          .gradient_type = type,
                          .parameter = here,
                          .gradient = here});
      }
      uint64_t sample = 0;
      for (const auto& digest : kernels::digests(slices)) sample = sample * 31 + digest.parameter;
      return sample;
    }
    at::Tensor tensor_;  ///< held, so that no other one comes to lie in its place
    int64_t version_ = 0;
    uint64_t sample_ = 0;
    bool elsewhere_ = false;
  };
  struct Ahead {
    bool is_there = false, was_there = false;  ///< was: until a step took it over
    Rule rule = {};
    double divisor = 1;
    bool of_part = false;  ///< of which something may be elsewhere: all of it is taken, or nothing
    kernels::StepDigest read;
    std::array<OldState, kStates> old_states;
    OldState old_gradient;    ///< of a part
    int64_t old_version = 0;  ///< of the parameter, likewise
    // New ones; undefined where they are elsewhere.
    at::Tensor parameter;
    States states;
  };

  static bool is(const Elsewhere& elsewhere, const at::Tensor& tensor) {
    return elsewhere && tensor.defined() && elsewhere(tensor);
  }

  static States states_at(const kernels::StepLists& lists, size_t i) {
    const auto at = [i](at::TensorList list) { return list.empty() ? at::Tensor() : list[i]; };
    return {at(lists.first), at(lists.second), at(lists.largest)};
  }

  static const at::Tensor& room_like(const at::Tensor& old, at::Tensor& fresh) {
    const bool fits = fresh.defined() && fresh.scalar_type() == old.scalar_type() && fresh.device() == old.device() &&
                      fresh.sizes() == old.sizes() && fresh.strides() == old.strides();
    if (!fits) {
      fresh = at::empty_like(old);
      counts::add(OptimCount::ahead_bytes, static_cast<int64_t>(fresh.nbytes()));
    }
    return fresh;
  }

  bool take_one_over(const Rule& rule, const kernels::StepLists& lists, size_t i, double divisor) {
    if (!fits_one(rule, lists, i, divisor, nullptr)) return false;
    take_one(lists, i, divisor);
    return true;
  }

  bool fits_one(const Rule& rule, const kernels::StepLists& lists, size_t i, double divisor,
                const Elsewhere& elsewhere) const {
    const at::Tensor& parameter = lists.parameters[i];
    const auto found = ahead_.find(parameter.unsafeGetTensorImpl());
    if (found == ahead_.end() || !found->second.is_there) return false;
    const Ahead& one = found->second;
    const States states = states_at(lists, i);
    for (size_t s = 0; s < kStates; ++s)
      if (!one.old_states[s].is_still(states[s])) return false;
    if (!(one.rule == rule) || one.of_part != (elsewhere != nullptr)) return false;
    if (!elsewhere)
      return one.parameter.defined() && one.parameter.sizes() == parameter.sizes() &&
             kernels::digests(alone(lists, i).slices(), divisor).front() == one.read;
    // One of the two may be elsewhere.
    const at::Tensor& gradient = lists.gradients[i];
    const auto digest = [](const at::Tensor& tensor, double by) {
      return kernels::digests(kernels::StepLists{tensor, tensor, {}}.slices(), by).front();
    };
    const bool same_parameter = is(elsewhere, parameter)
                                    ? !one.parameter.defined() && parameter._version() == one.old_version
                                    : one.parameter.defined() && one.parameter.sizes() == parameter.sizes() &&
                                          digest(parameter, 1).parameter == one.read.parameter;
    return same_parameter && (is(elsewhere, gradient) ? divisor == one.divisor && one.old_gradient.is_still(gradient)
                                                      : digest(gradient, divisor).gradient == one.read.gradient);
  }

  void take_one(const kernels::StepLists& lists, size_t i, double divisor) {
    Ahead& one = ahead_.at(lists.parameters[i].unsafeGetTensorImpl());
    for (const auto list : {lists.parameters, lists.first, lists.second, lists.largest})
      if (!list.empty()) snapshot::keep(list[i]);
    if (one.parameter.defined()) lists.parameters[i].detach().copy_(one.parameter);
    const States states = states_at(lists, i);
    for (size_t s = 0; s < kStates; ++s)
      if (states[s].defined() && one.states[s].defined()) take_bytes(states[s], one.states[s]);
    if (divisor != 1) kernels::divide_gradients(alone(lists, i).slices(), divisor);
    one.is_there = false;
    one.was_there = true;
    counts::add(OptimCount::steps_taken_over);
  }

  /// What a digest is of.
  static kernels::StepLists alone(const kernels::StepLists& lists, size_t i) {
    return {lists.parameters.slice(i, 1), lists.gradients.slice(i, 1), {}};
  }

  /// `fresh` may have any values afterwards. Nothing is copied where each has a storage for itself: they are exchanged.
  static void take_bytes(const at::Tensor& old, const at::Tensor& fresh) {
    const auto has_all = [](const at::Tensor& tensor) {
      return tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
    };
    if (!has_all(old) || !has_all(fresh)) return void(old.detach().copy_(fresh));
    auto& mine = *old.storage().unsafeGetStorageImpl();
    auto& theirs = *fresh.storage().unsafeGetStorageImpl();
    at::DataPtr kept = mine.set_data_ptr(at::DataPtr());
    at::DataPtr taken = theirs.set_data_ptr(std::move(kept));
    mine.set_data_ptr(std::move(taken));
  }

  std::unordered_map<const at::TensorImpl*, Ahead> ahead_;
  int64_t waits_ = 0, next_wait_ = 0;  ///< steps
};

}  // namespace accelerate::optim
