#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/model/submodule.hpp"
#include "accelerate/precision/fp8.hpp"
#include "precision/fp8/handler.hpp"
#include "utils/raise.hpp"

namespace accelerate {

using fp8::Core;
using fp8::Fp8Weight;

struct FP8Training::Impl {
  std::shared_ptr<Core> core;
};

namespace {

constexpr int64_t kMultiple = 16;  // of the sizes that products in 8 bits take

struct Candidate {
  std::string name, module;
  at::Tensor weight;
  bool embeds = true;  ///< all modules that hold it are embeddings
  bool layer = false;  ///< it is the weight of a layer that is no embedding
};

/// Parameters of two dimensions, in the order of modules; tied ones at their last place, as an output layer is often
/// tied to the first.
std::vector<Candidate> candidates_of(const ModelRef& model) {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : model.parameters()) names.emplace(tensor.unsafeGetTensorImpl(), name);
  std::vector<Candidate> candidates;
  for (const Submodule& module : model.submodules())
    for (const auto& [name, parameter] : module.parameters) {
      const auto& tensor = parameter;  // which a lambda may capture
      if (!tensor.defined() || tensor.dim() != 2) continue;
      const bool embeds = module.class_name == "Embedding" || module.class_name == "EmbeddingBag";
      const auto same = [&](const Candidate& one) { return one.weight.is_same(tensor); };
      if (const auto before = std::find_if(candidates.begin(), candidates.end(), same); before != candidates.end()) {
        if (embeds) continue;
        candidates.erase(before);
      }
      candidates.push_back(
          {names.at(tensor.unsafeGetTensorImpl()), module.path, tensor, embeds, !embeds && name == "weight"});
    }
  return candidates;
}

bool fits(const at::Tensor& weight) {
  const auto type = weight.scalar_type();
  return weight.size(0) % kMultiple == 0 && weight.size(1) % kMultiple == 0 && weight.numel() > 0 &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf);
}

/// torchao's rule as Accelerate has it: the first and the last linear layer stay in high precision. A weight that
/// embeds, too, is the last one in disguise.
std::unordered_set<const at::TensorImpl*> left_out(const FP8Recipe& recipe, const std::vector<Candidate>& candidates) {
  std::unordered_set<const at::TensorImpl*> out;
  if (recipe.backend != FP8Backend::ao) return out;
  const auto leave = [&](const Candidate& one) { out.insert(one.weight.unsafeGetTensorImpl()); };
  if (recipe.module_filter_func) {
    for (const auto& one : candidates)
      if (!recipe.module_filter_func(one.module, one.weight)) leave(one);
    return out;
  }
  for (const auto& one : candidates)
    if (one.embeds) leave(one);
  const auto is_linear = [](const Candidate& one) { return one.layer; };
  const auto first = std::find_if(candidates.begin(), candidates.end(), is_linear);
  const auto last = std::find_if(candidates.rbegin(), candidates.rend(), is_linear);
  if (first != candidates.end()) leave(*first), leave(*last);
  return out;
}

const char* const kUpdates = "updates";

[[noreturn]] void refuse_state(const std::string& what) {
  throw CheckpointError("FP8Training::load_state_dict: " + what +
                        ", expected what state_dict() gives for the same model and recipe; nothing was loaded");
}

}  // namespace

FP8Training::FP8Training(FP8Recipe recipe, const ModelRef& model) : impl_(std::make_shared<Impl>()) {
  recipe.validate();
  impl_->core = std::make_shared<Core>(std::move(recipe));
  Core& core = *impl_->core;
  const auto candidates = candidates_of(model);
  const auto out = left_out(core.recipe, candidates);
  for (const auto& one : candidates) {
    Fp8Weight weight{.name = one.name, .tensor = one.weight, .slot = -1, .kept = {}};
    if (fits(one.weight) && !out.contains(one.weight.unsafeGetTensorImpl())) {
      weight.slot = static_cast<int64_t>(core.taking_part.size());
      core.taking_part.push_back(one.name);
    }
    core.weights.push_back(std::move(weight));
  }
  if (core.plan.is_delayed()) {
    const auto count = static_cast<int64_t>(core.taking_part.size());
    const auto rule = [&](codes::Float8 format) {
      return fp8::Histories::Rule{core.recipe.amax_history_len, core.recipe.margin, core.recipe.interval,
                                  core.recipe.amax_compute_algo, codes::largest(format)};
    };
    core.forward.emplace(rule(fp8::forward_format(core.recipe)), count, fp8::kForwardWidth);
    core.backward.emplace(rule(fp8::backward_format(core.recipe)), count, fp8::kBackwardWidth);
  }
}

FP8Training::~FP8Training() = default;

const FP8Recipe& FP8Training::recipe() const { return impl_->core->recipe; }
const std::vector<std::string>& FP8Training::weights() const { return impl_->core->taking_part; }
FP8Training::Counts FP8Training::counts() const { return impl_->core->counts; }

void FP8Training::set_amax_reduction(std::function<void(at::Tensor&)> all_reduce_max) {
  impl_->core->reduction = std::move(all_reduce_max);
}

void FP8Training::after_backward() {
  Core& core = *impl_->core;
  if (!core.backward) return;
  core.backward->update(core.reduction);
  ++core.counts.updates;
}

std::map<std::string, at::Tensor> FP8Training::state_dict() const {
  const Core& core = *impl_->core;
  std::map<std::string, at::Tensor> state;
  if (!core.forward) return state;
  for (const Fp8Weight& weight : core.weights) {
    if (weight.slot < 0) continue;
    state.emplace(weight.name + ".scale_fwd", core.forward->scale_of(weight.slot));
    state.emplace(weight.name + ".amax_history_fwd", core.forward->history_of(weight.slot));
    state.emplace(weight.name + ".scale_bwd", core.backward->scale_of(weight.slot));
    state.emplace(weight.name + ".amax_history_bwd", core.backward->history_of(weight.slot));
  }
  state.emplace(kUpdates, at::tensor({core.forward->updates(), core.backward->updates()}, at::kLong));
  return state;
}

void FP8Training::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  Core& core = *impl_->core;
  // All is looked at before anything is changed.
  std::set<std::string> expected;
  const auto check = [&](const std::string& name, at::ScalarType type, size_t dims, int64_t last) {
    expected.insert(name);
    const auto found = state.find(name);
    if (found == state.end()) refuse_state("'" + name + "' is missing");
    const at::Tensor& tensor = found->second;
    if (!tensor.defined() || tensor.scalar_type() != type || tensor.dim() != static_cast<int64_t>(dims) ||
        tensor.size(-1) != last || tensor.size(0) == 0)
      raise<CheckpointError>(
          "FP8Training::load_state_dict: '{}' is {} [{}], expected {} of {} dimension{}, the last of {}; nothing was "
          "loaded",
          name, tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined",
          tensor.defined() ? fmt::format("{}", fmt::join(tensor.sizes(), ", ")) : "", c10::toString(type), dims,
          dims == 1 ? "" : "s", last);
  };
  if (core.forward) {
    for (const auto& name : core.taking_part) {
      check(name + ".scale_fwd", at::kFloat, 1, fp8::kForwardWidth);
      check(name + ".amax_history_fwd", at::kFloat, 2, fp8::kForwardWidth);
      check(name + ".scale_bwd", at::kFloat, 1, fp8::kBackwardWidth);
      check(name + ".amax_history_bwd", at::kFloat, 2, fp8::kBackwardWidth);
    }
    check(kUpdates, at::kLong, 1, 2);
  }
  for (const auto& [name, tensor] : state)
    if (!expected.contains(name)) refuse_state("'" + name + "' belongs to no weight that takes part");
  if (!core.forward) return;
  for (const Fp8Weight& weight : core.weights) {
    if (weight.slot < 0) continue;
    core.forward->set(weight.slot, state.at(weight.name + ".scale_fwd"), state.at(weight.name + ".amax_history_fwd"));
    core.backward->set(weight.slot, state.at(weight.name + ".scale_bwd"), state.at(weight.name + ".amax_history_bwd"));
  }
  const at::Tensor updates = state.at(kUpdates).to(at::kCPU);
  core.forward->set_updates(updates[0].item<int64_t>());
  core.backward->set_updates(updates[1].item<int64_t>());
}

struct FP8Scope::Open {
  Open(std::shared_ptr<Core> shared, const fp8::ProductPass& pass)
      : core(std::move(shared)), records(pass.records), products(pass), scope(residency::Link::codes, products) {}
  const std::shared_ptr<Core> core;
  const bool records;
  fp8::Products products;
  const residency::HandlerScope scope;
};

FP8Scope::FP8Scope(FP8Training& training, FP8ScopeOptions options) {
  const std::shared_ptr<Core>& core = training.impl_->core;
  const FP8Recipe& recipe = core->recipe;
  if (!options.training && recipe.backend == FP8Backend::te && !recipe.use_autocast_during_eval) return;
  core->index();
  core->settle();
  // Also those of weights that this scope may not use: they have changed since.
  if (options.is_first_microbatch.value_or(false))
    for (Fp8Weight& weight : core->weights) weight.kept.reset();
  if (core->forward && !core->weights.empty()) {
    const auto device = core->weights.front().tensor.device();
    if (!device.is_meta()) {  // dry runs compute nothing
      core->forward->to(device);
      core->backward->to(device);
    }
  }
  open_ =
      std::make_unique<Open>(core, fp8::ProductPass{.core = core,
                                                    .scales = core->forward ? core->forward->scales() : at::Tensor(),
                                                    .records = options.training && at::GradMode::is_enabled(),
                                                    .replays = false,
                                                    .is_first_microbatch = options.is_first_microbatch});
}

FP8Scope::~FP8Scope() = default;

void FP8Scope::finish() {
  const auto open = std::move(open_);
  if (!open || !open->records || !open->core->forward) return;
  open->core->forward->update(open->core->reduction);
  ++open->core->counts.updates;
}

}  // namespace accelerate
