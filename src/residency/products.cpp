#include "residency/products.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string_view>
#include <unordered_map>

#include "residency/operator_call.hpp"

namespace accelerate::residency {

WeightView weight_view(const at::Tensor& view, const at::Tensor& weight) {
  if (view.storage_offset() != weight.storage_offset()) return WeightView::part;
  if (view.sizes() == weight.sizes() && view.strides() == weight.strides()) return WeightView::whole;
  const auto is = [&](int64_t mine, int64_t its) {
    return view.size(mine) == weight.size(its) && view.stride(mine) == weight.stride(its);
  };
  return view.dim() == 2 && weight.dim() == 2 && is(0, 1) && is(1, 0) ? WeightView::turned : WeightView::part;
}

const ProductPlaces* product_places(const std::string& name) {
  static const std::unordered_map<std::string_view, ProductPlaces> places{
      {"aten::linear", {0, 1, 2, true}},        {"accelerate_models::row_product", {0, 1, 2, true}},
      {"aten::mm", {0, 1, kNoArgument, false}}, {"aten::matmul", {0, 1, kNoArgument, false}},
      {"aten::addmm", {1, 2, 0, false}},
  };
  const auto found = places.find(name);
  return found == places.end() ? nullptr : &found->second;
}

bool has_other_factors(const OperatorCall& call) {
  for (const char* factor : {"alpha", "beta"})
    if (const auto i = call.schema.argumentIndexWithName(factor))
      if (call.arguments()[static_cast<size_t>(*i)].toScalar().toDouble() != 1) return true;
  return false;
}

bool within_backward() { return torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled(); }

}  // namespace accelerate::residency
