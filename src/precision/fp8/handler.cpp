#include "precision/fp8/handler.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include "residency/member.hpp"
#include "residency/products.hpp"
#include "utils/raise.hpp"

namespace accelerate::fp8 {
namespace {

using residency::Member;
using residency::OperatorCall;
using residency::TorchLayers;

bool computes_with(const at::Tensor& x, const at::Tensor& w) {
  const auto type = x.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && x.dim() >= 1 && x.numel() > 0 &&
         x.device() == w.device() && !x.is_meta() && x.layout() == at::kStrided;
}

}  // namespace

std::shared_ptr<residency::Handler> Products::for_replay() {
  ProductPass again = pass_;
  again.records = false;
  again.replays = true;
  return std::make_shared<Products>(std::move(again));
}

bool Products::handle(OperatorCall& call, residency::Next next) {
  const auto* const places = residency::product_places(call.name());
  if (!places || call.facts.writes != 0) return false;  // those with out= have these names, too
  const at::Tensor operand = call.arguments()[places->weight].toTensor();
  const auto found = pass_.core->find(operand);
  if (!found || residency::within_backward()) return false;
  const at::Tensor x = call.arguments()[places->x].toTensor();
  const at::Tensor bias = places->bias == residency::kNoArgument
                              ? at::Tensor()
                              : call.arguments()[places->bias].toOptional<at::Tensor>().value_or(at::Tensor());
  Member* member = Member::of(operand);
  if (found->weight->slot < 0 || !computes_with(x, operand) || (bias.defined() && bias.dim() != 1) ||
      residency::has_other_factors(call) || (member && member->encoded())) {
    ++pass_.core->counts.high_products;
    return false;
  }
  const int64_t rows = x.numel() / x.size(-1);
  const ProductPlan& plan = pass_.core->plan;
  if (!plan.pads && plan.x_for_w.scaling != Scaling::none && rows % 16 != 0 && at::GradMode::is_enabled() &&
      operand.requires_grad())
    raise<ConfigError>(
        "{} with '{}': the input has {} rows, expected a multiple of 16, over which the weight's gradient sums; set "
        "AORecipeKwargs::pad_inner_dim (of its config: Float8LinearConfig::pad_inner_dim) to true, or choose another "
        "size of batches",
        call.name(), found->weight->name, rows);
  if (member) call.pins.add(member->unit(), /*writes=*/false);
  if (bias.defined())
    if (Member* other = Member::of(bias)) call.pins.add(other->unit(), /*writes=*/false);
  call.finish({next.compute(TorchLayers::program, residency::OwnLinks::none, [&] {
    const auto device = x.device().type();
    const bool casts = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
    const at::Tensor w = places->rows ? operand : operand.t();
    return linear(pass_, casts ? x.to(at::autocast::get_autocast_dtype(device)) : x, w, bias,
                  FoundWeight{found->weight, places->rows == found->turned});
  })});
  return true;
}

}  // namespace accelerate::fp8
