#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optim/counts.hpp"
#include "optim/kernels/operators.hpp"

namespace accelerate::optim {

/// New values of parameters that were computed before their step. A program may do anything between the two; so the old
/// values stay where they are, and a step takes the new ones over only where it would compute the same: parameters and
/// gradients are compared by digests, since not every write is counted by a tensor's version (LibTorch's own SGD writes
/// through data()). @param Rule  of the step's kernel
template <class Rule> class StepsAhead {
 public:
  bool empty() const { return ahead_.empty(); }

  /// Computes the step on all of these. On the meta device it only makes room.
  void compute(const Rule& rule, const kernels::StepLists& lists, double divisor) {
    std::vector<at::Tensor> params, first, second, largest;
    for (size_t i = 0; i < lists.parameters.size(); ++i) {
      Ahead& one = ahead_[lists.parameters[i].unsafeGetTensorImpl()];
      one.is_there = false;
      one.rule = rule;
      const auto room = [](std::vector<at::Tensor>& all, at::Tensor& fresh, const at::Tensor& old) {
        if (old.defined()) all.push_back(room_like(old, fresh));
      };
      room(params, one.parameter, lists.parameters[i]);
      const States old = states_at(lists, i);
      for (size_t s = 0; s < kStates; ++s) one.old_states[s] = OldState(old[s]);
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
    explicit OldState(const at::Tensor& state) : tensor_(state) {
      if (state.defined()) version_ = state._version(), sample_ = sample_of(state);
    }
    bool is_still(const at::Tensor& state) const {
      return state.is_same(tensor_) &&
             (!state.defined() || (state._version() == version_ && sample_of(state) == sample_));
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
  };
  struct Ahead {
    bool is_there = false, was_there = false;  ///< was: until a step took it over
    Rule rule = {};
    kernels::StepDigest read;
    std::array<OldState, kStates> old_states;
    at::Tensor parameter;  ///< new
    States states;         ///< new
  };

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
    const at::Tensor& parameter = lists.parameters[i];
    const auto found = ahead_.find(parameter.unsafeGetTensorImpl());
    if (found == ahead_.end() || !found->second.is_there) return false;
    Ahead& one = found->second;
    const States states = states_at(lists, i);
    for (size_t s = 0; s < kStates; ++s)
      if (!one.old_states[s].is_still(states[s])) return false;
    const auto part = [i](at::TensorList list) { return list.empty() ? list : list.slice(i, 1); };
    const kernels::StepLists alone{part(lists.parameters), part(lists.gradients), {}};
    if (!(one.rule == rule) || one.parameter.sizes() != parameter.sizes() ||
        kernels::digests(alone.slices(), divisor).front() != one.read)
      return false;
    parameter.detach().copy_(one.parameter);
    for (size_t s = 0; s < kStates; ++s)
      if (states[s].defined()) take_bytes(states[s], one.states[s]);
    if (divisor != 1) kernels::divide_gradients(alone.slices(), divisor);
    one.is_there = false;
    one.was_there = true;
    counts::add(OptimCount::steps_taken_over);
    return true;
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
