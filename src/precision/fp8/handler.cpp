#include "precision/fp8/handler.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string_view>
#include <unordered_map>

#include "residency/member.hpp"
#include "utils/raise.hpp"

namespace accelerate::fp8 {
namespace {

using residency::kKey;
using residency::Link;
using residency::Member;
using residency::OperatorCall;

constexpr size_t kNone = ~size_t{0};

/// Which arguments of an operator are what.
struct Places {
  size_t x, weight, bias;
  bool rows;  ///< each row of the weight gives an output, as linear's; else each column
};

const Places* places_of(const std::string& name) {
  static const std::unordered_map<std::string_view, Places> places{
      {"aten::linear", {0, 1, 2, true}},  {"accelerate_models::row_product", {0, 1, 2, true}},
      {"aten::mm", {0, 1, kNone, false}}, {"aten::matmul", {0, 1, kNone, false}},
      {"aten::addmm", {1, 2, 0, false}},
  };
  const auto found = places.find(name);
  return found == places.end() ? nullptr : &found->second;
}

/// Backward multiplies by weights, too, with the same operators; recomputed forwards run there with gradients on.
bool within_backward() { return torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled(); }

bool has_other_factors(const OperatorCall& call) {
  for (const char* factor : {"alpha", "beta"})
    if (const auto i = call.schema.argumentIndexWithName(factor))
      if (call.arguments()[static_cast<size_t>(*i)].toScalar().toDouble() != 1) return true;
  return false;
}

bool computes_with(const at::Tensor& x, const at::Tensor& w) {
  const auto type = x.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && x.dim() >= 1 && x.numel() > 0 &&
         x.device() == w.device() && !x.is_meta() && x.layout() == at::kStrided;
}

}  // namespace

std::shared_ptr<residency::Handler> Products::for_replay() {
  Pass again = pass_;
  again.records = false;
  again.replays = true;
  return std::make_shared<Products>(std::move(again));
}

bool Products::handle(OperatorCall& call, residency::Next next) {
  const auto others = [&] {
    auto* handler = residency::process_handler(Link::codes);
    return handler && handler->handle(call, next);
  };
  const Places* places = places_of(call.name());
  if (!places) return others();
  const at::Tensor operand = call.arguments()[places->weight].toTensor();
  const auto found = pass_.core->find(operand);
  if (!found || within_backward()) return others();
  at::Tensor x = call.arguments()[places->x].toTensor();
  const at::Tensor bias = places->bias == kNone
                              ? at::Tensor()
                              : call.arguments()[places->bias].toOptional<at::Tensor>().value_or(at::Tensor());
  Member* member = Member::of(operand);
  if (found->weight->slot < 0 || !computes_with(x, operand) || (bias.defined() && bias.dim() != 1) ||
      has_other_factors(call) || (member && member->encoded())) {
    ++pass_.core->counts.high_products;
    return others();
  }
  const int64_t rows = x.numel() / x.size(-1);
  const Plan& plan = pass_.core->plan;
  if (!plan.pads && plan.x_for_w.scaling != Scaling::none && rows % 16 != 0 && at::GradMode::is_enabled() &&
      operand.requires_grad())
    raise<ConfigError>(
        "{} with '{}': the input has {} rows, expected a multiple of 16, over which the weight's gradient sums; set "
        "AORecipe's pad_inner_dim to true, or choose another size of batches",
        call.name(), found->weight->name, rows);
  if (member) call.pins.add(member->unit(), /*writes=*/false);
  if (bias.defined())
    if (Member* other = Member::of(bias)) call.pins.add(other->unit(), /*writes=*/false);
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto device = x.device().type();
  if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device))
    x = x.to(at::autocast::get_autocast_dtype(device));
  const at::Tensor w = places->rows ? operand : operand.t();
  call.finish({linear(pass_, x, w, bias, Found{found->weight, places->rows == found->turned})});
  return true;
}

}  // namespace accelerate::fp8
