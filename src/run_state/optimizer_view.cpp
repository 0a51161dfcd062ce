#include "run_state/optimizer_view.hpp"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <typeinfo>
#include <unordered_map>

#include "accelerate/comm.hpp"
#include "optim/optimizer_state.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

std::vector<parallel::Held> parameters_of(const AcceleratedOptimizer& optimizer, const PreparedModels& models) {
  std::unordered_map<const at::TensorImpl*, std::pair<size_t, parallel::Held>> known;
  for (size_t i = 0; i < models.size(); ++i)
    for (auto& holding : holdings_of(*models[i])) {
      // An optimizer that is not element-wise steps on whole parameters.
      if (holding.in_pieces() && !holding.value.is_same(holding.tensor))
        known.try_emplace(holding.tensor.unsafeGetTensorImpl(), i, whole_on_all_ranks(holding.names, holding.tensor));
      const auto* held = holding.value.unsafeGetTensorImpl();
      known.try_emplace(held, i, std::move(holding));
    }
  std::vector<parallel::Held> result;
  std::vector<std::optional<size_t>> model_of;
  std::set<size_t> owners;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      if (found == known.end()) {
        result.push_back(whole_on_all_ranks({"parameter_" + std::to_string(result.size())}, parameter));
        model_of.emplace_back();
      } else {
        result.push_back(found->second.second);
        owners.insert(model_of.emplace_back(found->second.first).value());
      }
    }
  // Several models may use the same names.
  if (owners.size() > 1)
    for (size_t i = 0; i < result.size(); ++i)
      if (model_of[i])
        for (auto& name : result[i].names) name = fmt::format("{}.{}", *model_of[i], name);
  return result;
}

void refuse_pieces(const AcceleratedOptimizer& accelerated, const char* operation) {
  const torch::optim::Optimizer& optimizer = accelerated.optimizer();
  raise<ConfigError>(
      "{}: found an optimizer of class {}, whose state is of a layout of its own (AdamW8bit's codes come in blocks), "
      "expected one whose states are tensors like their parameters; save it by save_state without FSDP, or use "
      "torch::optim::AdamW",
      operation, c10::demangle(typeid(optimizer).name()));
}

namespace {

/// One field of one parameter's state.
struct Field {
  int64_t parameter = 0;
  std::string kind;
  double steps = 0;  ///< of kSteps
  ACCELERATE_FIELDS(parameter, kind, steps)
};

}  // namespace

OptimizerView::OptimizerView(const AcceleratedOptimizer& optimizer, const PreparedModels& models, Untouched untouched)
    : parameters(parameters_of(optimizer, models)), state(parameters.size()) {
  if (optim::has_own_state_dict(optimizer.optimizer())) refuse_pieces(optimizer, "optimizer state");
  const auto dict = optimizer.state_dict().toGenericDict();
  std::vector<Field> fields;
  for (const auto& entry : dict.at("state").toGenericDict())
    for (const auto& field : entry.value().toGenericDict()) {
      const auto index = entry.key().toInt();
      const auto& kind = field.key().toStringRef();
      const auto tensor = field.value().toTensor();
      state[static_cast<size_t>(index)][kind] = tensor.detach();
      fields.push_back({index, kind, kind == kSteps ? tensor.item<double>() : 0});
    }
  for (const auto& field : gather_object(fields)) {
    auto& mine = state[static_cast<size_t>(field.parameter)];
    if (mine.contains(field.kind)) continue;
    const auto& held = parameters[static_cast<size_t>(field.parameter)].value;
    mine[field.kind] = field.kind == kSteps ? at::scalar_tensor(field.steps, at::kFloat)
                                            : at::zeros(held.sizes(), held.options().requires_grad(false));
  }
  size_t next = 0;
  if (untouched == Untouched::at_start)
    for (const auto& group : optimizer.param_groups())
      for (const auto& parameter : group.params()) {
        if (auto& fields = state[next++]; fields.empty() && parameter.requires_grad())
          fields = optim::initial_state(optimizer.optimizer(), group, parameter);
      }
  next = 0;
  for (const c10::IValue& item : dict.at("param_groups").toListRef()) {
    Dict group = make_dict();
    for (const auto& option : item.toGenericDict())
      if (option.key().toStringRef() != "params") group.insert(option.key(), option.value());
    std::vector<std::string> names;
    for (size_t i = 0, count = item.toGenericDict().at("params").toListRef().size(); i < count; ++i, ++next) {
      const auto& name = parameters[next].names.front();
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      else state[next].clear();  // tied, and listed twice: one state
    }
    group.insert("params", make_list(names));
    groups.push_back(std::move(group));
  }
}

std::vector<size_t> in_order_of_parts(const OptimizerView& view) {
  std::vector<size_t> order(view.parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::map<const parallel::Engine*, size_t> first;
  for (const size_t i : order) first.try_emplace(view.parameters[i].engine, i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto &x = view.parameters[a], &y = view.parameters[b];
    return std::pair(first[x.engine], x.part) <
           std::pair(first[y.engine], y.part);  // by first appearance: pointers differ from rank to rank
  });
  return order;
}

std::vector<WholeStream::Wanted> states_in_pieces(const OptimizerView& view, const std::vector<size_t>& order) {
  std::vector<WholeStream::Wanted> states;
  for (const size_t i : order)
    if (const auto& holding = view.parameters[i]; holding.in_pieces())
      for (const auto& [kind, piece] : view.state[i])
        if (kind != kSteps) states.push_back(wanted(holding, kind, piece));
  return states;
}

}  // namespace accelerate::run_state
