#include "adapters/own_values.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include "residency/member.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

at::Tensor indices_of(const OwnValues& own) { return at::tensor(own.rows, own.parameter.options().dtype(at::kLong)); }

void write(const OwnValues& own, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  if (own.rows.empty()) own.parameter.copy_(value);
  else own.parameter.index_copy_(0, indices_of(own), value.to(own.parameter.options().requires_grad(false)));
}

}  // namespace

at::Tensor OwnValues::part_of(const at::Tensor& whole) const {
  return rows.empty() ? whole : whole.detach().index_select(0, indices_of(*this).to(whole.device()));
}

void OwnValues::require_own_bytes(const char* operation) const {
  if (residency::Member::of(parameter))
    raise<ConfigError>(
        "{}: the adapter has values of its own for '{}', whose bytes are kept by a residency (sharded, offloaded or "
        "quantized), expected a whole model in memory",
        operation, name);
}

void OwnValues::set_enabled(bool wanted) {
  if (wanted == enabled) return;
  const at::NoGradGuard no_grad;
  const auto now = part_of(parameter).clone();
  write(*this, other);
  other = now;
  enabled = wanted;
}

void put(OwnValues& own, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  own.other = own.part_of(own.parameter).clone();
  write(own, value);
}

}  // namespace accelerate::detail
