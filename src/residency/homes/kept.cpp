#include "residency/homes/kept.hpp"

#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "snapshot/ledger.hpp"

namespace accelerate::residency {
namespace {

/// f(kept elements, the same ones in `values`), if there are any.
template <class F>
void overlap(const at::Tensor& kept, int64_t kept_begin, int64_t begin, const at::Tensor& values, F&& f) {
  const int64_t from = std::max(kept_begin, begin);
  const int64_t to = std::min(kept_begin + kept.numel(), begin + values.numel());
  if (from < to) f(kept.detach().narrow(0, from - kept_begin, to - from), values.narrow(0, from - begin, to - from));
}

}  // namespace

void Kept::refine(int64_t begin, const at::Tensor& values) const {
  overlap(values_, begin_, begin, values, [](const at::Tensor& kept, const at::Tensor& image) { image.copy_(kept); });
}

void Kept::take(int64_t begin, const at::Tensor& values) const {
  snapshot::keep(values_);
  overlap(values_, begin_, begin, values, [](const at::Tensor& kept, const at::Tensor& image) { kept.copy_(image); });
}

void Kept::take_back(const at::Tensor& flat, const at::Tensor& was) const {
  snapshot::keep(values_);
  const at::Tensor kept = values_.detach();
  const at::Tensor mine = flat.narrow(0, begin_, kept.numel());
  if (kept.scalar_type() == flat.scalar_type() && !was.defined()) return void(kept.copy_(mine));
  const at::Tensor before = was.defined() ? was : kept.to(mine.options());
  kept.copy_(at::where(at::eq(mine, before), kept.to(mine.device()), mine.to(kept.scalar_type())));
}

}  // namespace accelerate::residency
