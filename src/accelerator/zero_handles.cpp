#include "accelerate/parallel/zero_handles.hpp"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <list>

#include "accelerate/comm.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "residency/member.hpp"
#include "residency/raw_access.hpp"
#include "run_state/holdings.hpp"
#include "run_state/optimizer_view.hpp"
#include "snapshot/ledger.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using parallel::Held;

struct FoundRun {
  run_state::RunState* run = nullptr;
  std::shared_ptr<detail::PreparedModel> model;
  Held held;
};

FoundRun find(const at::Tensor& parameter, const char* operation) {
  for (auto* run : live_runs())
    for (const auto& model : run->models)
      for (auto& held : run_state::holdings_of(*model))
        if (held.tensor.is_same(parameter)) return {run, model, std::move(held)};
  raise<ConfigError>(
      "{}: the tensor of size {} is no parameter of a prepared model, expected the module's own, as m->weight",
      operation, parameter.defined() ? fmt::format("{}", parameter.sizes()) : "nothing");
}

/// A tensor that lies as the parameter does, whole on all ranks: a copy in fp32. @param shard  undefined: this rank has
/// none
at::Tensor whole_of(const Held& held, const at::Tensor& piece) {
  if (!held.in_pieces()) return piece.defined() ? piece.detach().to(at::kFloat, false, /*copy=*/true) : at::Tensor();
  // Where any rank has a shard, those without bring zeros.
  std::vector<int64_t> here{piece.defined() ? 1 : 0};
  const auto all = gather_object(here);
  if (std::none_of(all.begin(), all.end(), [](int64_t one) { return one != 0; })) return {};
  const at::Tensor mine = piece.defined() ? piece.detach() : at::zeros_like(held.value);
  at::Tensor whole;
  held.engine->gather_each([&](const at::Tensor& parameter,
                               const at::Tensor&) { return parameter.is_same(held.tensor) ? mine : at::Tensor(); },
                           [&](const parallel::Engine::Whole& one) {
                             if (one.value.defined() && one.parameter.is_same(held.tensor))
                               whole = one.value.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
                           },
                           /*everywhere=*/true);
  return whole;
}

void check_size(const at::Tensor& value, const Held& held, const char* operation) {
  if (value.sizes() != held.whole.sizes())
    raise<ShapeError>("{}: found a value of size {}, expected {}, the parameter's", operation, value.sizes(),
                      held.whole.sizes());
}
/// This rank's part of a whole value.
void write(const Held& held, const at::Tensor& piece, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  snapshot::keep(piece);
  piece.copy_(held.in_pieces() ? parallel::slice_of(held, value) : value);
}

/// This rank's shard of a state of the optimizer that steps on the parameter. Collective.
std::pair<Held, at::Tensor> state_of(const at::Tensor& parameter, const std::string& key, const char* operation) {
  const auto found = find(parameter, operation);
  for (const auto& optimizer : found.run->optimizers) {
    const auto& groups = optimizer.param_groups();
    const bool steps_on_it = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
      return std::any_of(group.params().begin(), group.params().end(), [&](const at::Tensor& one) {
        return one.is_same(found.held.value) || one.is_same(found.held.tensor);
      });
    });
    if (!steps_on_it) continue;
    const run_state::OptimizerView view(optimizer, found.run->models);
    for (size_t i = 0; i < view.parameters.size(); ++i) {
      if (!view.parameters[i].tensor.is_same(parameter)) continue;
      const auto state = view.state[i].find(key);
      if (state == view.state[i].end()) continue;  // tied, and listed twice: one of them has it
      return {view.parameters[i], state->second};
    }
    return {found.held, at::Tensor()};
  }
  raise<ConfigError>("{}: no prepared optimizer steps on the parameter '{}'", operation, found.held.names.front());
}

}  // namespace

at::Tensor safe_get_full_fp32_param(const at::Tensor& parameter) {
  const auto found = find(parameter, "safe_get_full_fp32_param");
  return whole_of(found.held, found.held.value);
}

at::Tensor safe_get_full_grad(const at::Tensor& parameter) {
  const auto found = find(parameter, "safe_get_full_grad");
  if (!found.held.in_pieces()) return whole_of(found.held, parameter.grad());
  const auto gradient = found.model->engine->gradient(parameter);
  return whole_of(found.held, gradient ? gradient->value : at::Tensor());
}

at::Tensor safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state_key) {
  const auto [held, piece] = state_of(parameter, state_key, "safe_get_full_optimizer_state");
  return piece.defined() && piece.sizes() != held.value.sizes() ? piece.clone() : whole_of(held, piece);
}

void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value) {
  const auto found = find(parameter, "safe_set_full_fp32_param");
  check_size(value, found.held, "safe_set_full_fp32_param");
  if (found.model->engine) found.model->engine->before_step();
  write(found.held, found.held.value.detach(), value);
  if (found.model->engine) found.model->engine->after_step();
}

void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value) {
  const auto found = find(parameter, "safe_set_full_grad");
  check_size(value, found.held, "safe_set_full_grad");
  const auto gradient = found.held.in_pieces() ? found.model->engine->gradient(parameter) : std::nullopt;
  const at::Tensor piece = found.held.in_pieces() ? gradient ? gradient->value : at::Tensor() : parameter.grad();
  if (!piece.defined())
    raise<ConfigError>("safe_set_full_grad: '{}' has no gradient, expected a backward that reached it before",
                       found.held.names.front());
  write(found.held, piece, value);
}

void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state_key) {
  const auto [held, piece] = state_of(parameter, state_key, "safe_set_full_optimizer_state");
  check_size(value, held, "safe_set_full_optimizer_state");
  if (!piece.defined() || piece.sizes() != held.value.sizes())
    raise<ConfigError>(
        "safe_set_full_optimizer_state: the optimizer keeps no '{}' like the parameter '{}', expected one of its "
        "states, after its first step",
        state_key, held.names.front());
  write(held, piece, value);
}

struct GatheredParameters::Impl {
  std::vector<at::Tensor> parameters;
  std::optional<int64_t> modifier_rank;
  std::list<residency::RawAccess> whole;
  int exceptions = std::uncaught_exceptions();
};

GatheredParameters::GatheredParameters(const std::vector<at::Tensor>& parameters, std::optional<int64_t> modifier_rank,
                                       bool enabled) {
  if (!enabled) return;
  if (modifier_rank && (*modifier_rank < 0 || *modifier_rank >= comm::world_size()))
    raise<ConfigError>("GatheredParameters: modifier_rank is {}, expected a rank below {}", *modifier_rank,
                       comm::world_size());
  if (modifier_rank) snapshot::keep_all();
  impl_ = std::make_unique<Impl>(Impl{.parameters = parameters, .modifier_rank = modifier_rank, .whole = {}});
  std::vector<const void*> seen;
  for (const auto& parameter : parameters) {
    const auto found = find(parameter, "GatheredParameters");
    if (std::find(seen.begin(), seen.end(), found.model->model.identity()) != seen.end()) continue;
    seen.push_back(found.model->model.identity());
    auto& access = impl_->whole.emplace_back(modifier_rank ? residency::RawAccess::Writes::alone
                                                           : residency::RawAccess::Writes::lost);
    for (const auto& [name, tensor] : found.model->model.parameters())  // in one order on all ranks
      if (const auto* member = residency::Member::of(tensor)) access.add(*member);
  }
}

GatheredParameters::GatheredParameters(const ModelRef& model, std::optional<int64_t> modifier_rank, bool enabled)
    : GatheredParameters(
          [&] {
            std::vector<at::Tensor> all;
            for (const auto& [name, parameter] : model.parameters()) all.push_back(parameter);
            return all;
          }(),
          modifier_rank, enabled) {}

void GatheredParameters::close() {
  if (!impl_) return;
  const auto closing = std::move(impl_);
  if (!closing->modifier_rank || comm::world_size() == 1) return;
  at::NoGradGuard no_grad;
  for (const auto& parameter : closing->parameters) {
    const at::Tensor value = broadcast(parameter.detach().clone(), *closing->modifier_rank);
    if (comm::rank() != *closing->modifier_rank) at::Tensor(parameter).copy_(value);
  }
}

GatheredParameters::~GatheredParameters() noexcept(false) {
  if (impl_ && std::uncaught_exceptions() <= impl_->exceptions) close();
}

}  // namespace accelerate
