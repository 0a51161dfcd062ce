#include "precision/fp8/delayed.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace accelerate::fp8 {
namespace {

/// The maximum of the kernel whose rule this is passes over NaN.
at::Tensor without_nan(const at::Tensor& amax) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return amax.nan_to_num(0.0, kInfinity, -kInfinity);
}

}  // namespace

Histories::Histories(const Rule& rule, int64_t weights, int64_t width)
    : rule_(rule),
      width_(width),
      scales_(at::ones({weights * width}, at::kFloat)),
      history_(at::zeros({rule.length, weights * width}, at::kFloat)),
      updates_(at::zeros({}, at::kLong)) {}

void Histories::record(int64_t weight, int64_t tensor, const at::Tensor& amax) {
  at::Tensor slot = history_.select(0, 0).select(0, weight * width_ + tensor);
  slot.copy_(at::maximum(slot, amax));  // several uses in one pass; NaN stays
  recorded_ = true;
}

void Histories::update(const AmaxReduction& reduction) {
  const at::NoGradGuard no_grad;
  recorded_ = false;
  at::Tensor last = history_.select(0, 0).clone();
  if (reduction) {
    // Numbers without sign order like their bits, and the maximum of whole numbers is the same on every rank also where
    // one of them is the code of NaN.
    at::Tensor bits = last.view(at::kInt);
    reduction(bits);
    last = bits.view(at::kFloat);
  }
  const at::Tensor seen = last.ne(0);  // nothing was seen of the others: their histories wait
  // Row 1, the oldest, leaves with this roll, but still counts in it.
  const at::Tensor past = history_.narrow(0, 1, rule_.length - 1);
  const at::Tensor empty = at::zeros_like(last).unsqueeze(0), newest = last.unsqueeze(0);
  const at::Tensor rolled = rule_.length == 1   ? empty
                            : rule_.length == 2 ? at::cat({empty, newest})
                                                : at::cat({empty, past.narrow(0, 1, rule_.length - 2), newest});
  const at::Tensor amax =
      rule_.algorithm == AmaxComputeAlgo::most_recent ? last : without_nan(at::cat({past, newest})).amax(0);
  history_ = at::where(seen, rolled, history_);
  // If nothing was seen at all, on any rank, another model has computed. All stays on the device: nobody waits.
  const at::Tensor due = updates_.remainder(rule_.interval).eq(0);
  updates_.add_(seen.any());
  const float target = rule_.largest * std::exp2(-static_cast<float>(rule_.margin));
  const at::Tensor scale = at::full_like(amax, target).div_(amax).clamp_max_(std::numeric_limits<float>::max());
  const at::Tensor changed = seen.logical_and(amax.isfinite()).logical_and_(amax.gt(0)).logical_and_(due);
  scales_ = at::where(changed, scale, scales_);
}

void Histories::to(const at::Device& device) {
  if (scales_.device() == device) return;
  scales_ = scales_.to(device);
  history_ = history_.to(device);
  updates_ = updates_.to(device);
}

int64_t Histories::updates() const { return updates_.item<int64_t>(); }

at::Tensor Histories::scale_of(int64_t weight) const {
  return scales_.narrow(0, weight * width_, width_).to(at::kCPU).clone();
}

at::Tensor Histories::history_of(int64_t weight) const {
  return history_.narrow(1, weight * width_, width_).to(at::kCPU).contiguous().clone();
}

void Histories::set(int64_t weight, const at::Tensor& scale, const at::Tensor& history) {
  const at::NoGradGuard no_grad;
  // A copy: whoever keeps the scales of before goes on with them.
  scales_ = scales_.clone();
  scales_.narrow(0, weight * width_, width_).copy_(scale);
  at::Tensor own = history_.narrow(1, weight * width_, width_);
  own.zero_();
  const int64_t rows = std::min(rule_.length, history.size(0));
  own.narrow(0, 0, rows).copy_(history.narrow(0, 0, rows));
  recorded_ = recorded_ || history.select(0, 0).ne(0).any().item<bool>();
}

void Histories::set_updates(int64_t updates) { updates_.fill_(updates); }

}  // namespace accelerate::fp8
