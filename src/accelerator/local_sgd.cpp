#include "accelerate/accelerator/local_sgd.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <unordered_set>

#include "accelerator/accelerator_impl.hpp"
#include "accelerator/join.hpp"
#include "comm/group.hpp"
#include "parallel/replica_average.hpp"
#include "snapshot/ledger.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// The tensors of the trained parameters that this rank holds and optimizers step on.
std::vector<at::Tensor> trained_of(const detail::PreparedModel& model) {
  std::vector<at::Tensor> trained;
  std::unordered_set<const at::TensorImpl*> in_pieces;
  for (const auto& holding : model.engine->pieces()) {
    in_pieces.insert(holding.tensor.unsafeGetTensorImpl());
    if (holding.tensor.requires_grad()) trained.push_back(holding.value.detach());
  }
  for (const auto& [name, parameter] : model.model.parameters())
    if (parameter.requires_grad() && !in_pieces.contains(parameter.unsafeGetTensorImpl()))
      trained.push_back(parameter.detach());
  return trained;
}

c10::List<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  c10::List<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().cpu().clone());
  return copies;
}

void take(const std::vector<at::Tensor>& tensors, const c10::List<at::Tensor>& values) {
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(values.get(i));
}

}  // namespace

struct LocalSGD::Impl {
  LocalSGDOptions options;
  Accelerator::Impl* accelerator = nullptr;
  std::shared_ptr<detail::PreparedModel> model;
  bool apart = false;
  int64_t num_steps = 0;
  int exceptions_at_start = std::uncaught_exceptions();
  std::vector<at::Tensor> trained, buffers;
  std::vector<char> trains;                  ///< which of the model's parameters did when it began
  std::vector<at::Tensor> common, velocity;  ///< of the outer optimizer: the last common parameters, fp32
  std::list<run_state::OwnState>::iterator registered;

  void begin() {
    trained = trained_of(*model);
    for (const auto& [name, parameter] : model->model.parameters())
      trains.push_back(static_cast<char>(parameter.requires_grad()));
    for (const auto& [name, buffer] : model->model.buffers()) buffers.push_back(buffer);
    at::NoGradGuard no_grad;
    if (options.outer_optimizer)
      for (const auto& tensor : trained) {
        common.push_back(tensor.to(at::promote_types(tensor.scalar_type(), at::kFloat), false, /*copy=*/true));
        velocity.push_back(at::zeros_like(common.back()));
      }
    model->engine->set_apart(true);
    apart = true;
    auto& states = accelerator->run.own_states;
    const auto& models = accelerator->run.models;
    const auto number = std::find(models.begin(), models.end(), model) - models.begin();
    registered =
        states.insert(states.end(), {.name = number == 0 ? "LocalSGD" : fmt::format("LocalSGD of model {}", number),
                                     .save = [this] { return state(); },
                                     .stage = [this](const c10::IValue& value) { return stage(value); }});
  }

  void leave() {
    model->engine->set_apart(false);
    apart = false;
    accelerator->run.own_states.erase(registered);
  }

  /// Ranks whose loops differ would average what does not belong together, or wait for nobody.
  void agree(bool at_end) const {
    const auto all = gather_object(std::vector<int64_t>{at_end ? -1 - num_steps : num_steps});
    for (size_t rank = 0; rank < all.size(); ++rank)
      if (all[rank] != all[0]) {
        const auto text = [](int64_t n) {
          return n < 0 ? fmt::format("ends after {}", -1 - n) : fmt::format("has made {}", n);
        };
        raise<ConfigError>(
            "LocalSGD: rank 0 {} steps and rank {} {}, expected equal numbers; let the loader give all ranks the same "
            "number of batches (even_batches)",
            text(all[0]), rank, text(all[rank]));
      }
  }

  /// Checks that all parameters which each rank trains by itself from here on are among those that are averaged.
  void check_trained() const {
    auto trained_then = trains.begin();
    for (const auto& [name, parameter] : model->model.parameters())
      if (!*trained_then++ && parameter.requires_grad())
        raise<ConfigError>(
            "LocalSGD: parameter '{}' was frozen when it began and is trained now, expected the same ones, which are "
            "averaged, until it ends; free layers (requires_grad_(true)) before LocalSGD or after its finish(), and "
            "begin another one",
            name);
  }

  void average(bool at_end) {
    check_trained();
    agree(at_end);
    auto& engine = *model->engine;
    engine.before_step();  // shards change
    snapshot::keep_all();
    parallel::average_in_place(*engine.replicas(), trained);
    // Not a second time for the same way.
    const bool made = at_end && num_steps > 0 && num_steps % options.local_sgd_steps == 0;
    if (options.outer_optimizer && !made) outer_step(*options.outer_optimizer);
    engine.after_step();
  }

  /// Optimizers that remember (momentum, say) have another memory in each replica: replicas that train together would
  /// leave each other again.
  void share_optimizers() const {
    std::unordered_set<const at::TensorImpl*> ours;
    for (const auto& held : model->engine->pieces()) ours.insert(held.value.unsafeGetTensorImpl());
    for (const auto& [name, parameter] : model->model.parameters()) ours.insert(parameter.unsafeGetTensorImpl());
    const auto is_ours = [&](const at::Tensor& tensor) { return ours.contains(tensor.unsafeGetTensorImpl()); };
    const auto& optimizers = accelerator->run.optimizers;
    for (size_t i = 0; i < optimizers.size(); ++i) {
      const auto& groups = optimizers[i].param_groups();
      if (std::none_of(groups.begin(), groups.end(), [&](const auto& group) {
            return std::any_of(group.params().begin(), group.params().end(), is_ours);
          }))
        continue;
      if (!share_state(optimizers[i], *model->engine->replicas(), 0) && accelerator->state->is_main_process())
        logs::warn("accelerate.local_sgd",
                   "LocalSGD: what prepared optimizer {} has learned in each replica (momentum, say) can't be made the "
                   "same at its end, because its class has no state_dict(): replicas may leave each other from here "
                   "on. Derive it from optim::OwnStateDict, too.",
                   i);
    }
  }

  void outer_step(const OuterOptimizer& outer) {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < trained.size(); ++i) {
      const at::Tensor way = common[i] - trained[i];
      velocity[i].mul_(outer.momentum).add_(way);
      common[i].sub_(outer.nesterov ? way + velocity[i] * outer.momentum : velocity[i], outer.lr);
      trained[i].copy_(common[i]);
    }
  }

  c10::IValue state() const {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    dict.insert("num_steps", num_steps);
    dict.insert("parameters", copies_of(trained));
    dict.insert("buffers", copies_of(buffers));
    dict.insert("common", copies_of(common));
    dict.insert("velocity", copies_of(velocity));
    c10::impl::GenericList optimizers(c10::AnyType::get());
    for (const auto& optimizer : accelerator->run.optimizers) optimizers.push_back(optimizer.state_dict());
    dict.insert("optimizers", optimizers);
    return dict;
  }

  std::function<void()> stage(const c10::IValue& value) {
    const auto dict = value.toGenericDict();
    const auto tensors = [&](const char* name, const std::vector<at::Tensor>& expected) {
      c10::List<at::Tensor> found;
      for (const auto& tensor : dict.at(name).toListRef()) found.push_back(tensor.toTensor());
      bool fits = found.size() == expected.size();
      for (size_t i = 0; fits && i < expected.size(); ++i) fits = found.get(i).sizes() == expected[i].sizes();
      if (!fits)
        raise<CheckpointError>(
            "load_state: the {} of LocalSGD in the checkpoint don't fit, found {} tensors, expected {} of this run's "
            "sizes; the model or the outer_optimizer has changed",
            name, found.size(), expected.size());
      return found;
    };
    std::vector<c10::IValue> optimizers;
    for (const auto& one : dict.at("optimizers").toListRef()) optimizers.push_back(one);
    if (optimizers.size() != accelerator->run.optimizers.size())
      raise<CheckpointError>("load_state: LocalSGD in the checkpoint has {} optimizers, expected the {} of this run",
                             optimizers.size(), accelerator->run.optimizers.size());
    return [this, steps = dict.at("num_steps").toInt(), parameters = tensors("parameters", trained),
            kept = tensors("buffers", buffers), before = tensors("common", common),
            speed = tensors("velocity", velocity), optimizers] {
      at::NoGradGuard no_grad;
      num_steps = steps;
      model->engine->before_step();
      snapshot::keep_all();
      take(trained, parameters);
      model->engine->after_step();
      take(buffers, kept);
      take(common, before);
      take(velocity, speed);
      for (size_t i = 0; i < optimizers.size(); ++i) accelerator->run.optimizers[i].load_state_dict(optimizers[i]);
    };
  }
};

LocalSGD::LocalSGD(Accelerator& accelerator, const std::shared_ptr<detail::PreparedModel>& model,
                   const LocalSGDOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->accelerator = accelerator.impl_.get();
  impl_->model = model;
  if (options.local_sgd_steps < 1)
    raise<ConfigError>("LocalSGD: local_sgd_steps is {}, expected at least 1", options.local_sgd_steps);
  if (!options.enabled || accelerator.num_processes() == 1) return;
  if (!model->engine)
    throw ConfigError(
        "LocalSGD: the model was prepared in evaluation mode, expected one that is trained; leave evaluation_mode out");
  if (accelerator.gradient_state().average() == GradientAverage::tokens)
    throw ConfigError(
        "LocalSGD: gradients are averaged over the tokens of all ranks (GradientAverage::tokens), which train apart "
        "here, expected GradientAverage::steps");
  impl_->begin();
}

LocalSGD::~LocalSGD() noexcept(false) {
  if (!impl_ || !impl_->apart) return;
  if (std::uncaught_exceptions() <= impl_->exceptions_at_start) finish();
  else impl_->leave();
}

void LocalSGD::step() {
  ++impl_->num_steps;
  if (impl_->apart && impl_->num_steps % impl_->options.local_sgd_steps == 0) impl_->average(/*at_end=*/false);
}

void LocalSGD::finish() {
  if (!impl_->apart) return;
  struct Leave {
    Impl& impl;
    ~Leave() { impl.leave(); }
  } const leave{*impl_};
  impl_->average(/*at_end=*/true);
  impl_->share_optimizers();
}

bool LocalSGD::enabled() const { return impl_->apart; }
int64_t LocalSGD::num_steps() const { return impl_->num_steps; }

}  // namespace accelerate
