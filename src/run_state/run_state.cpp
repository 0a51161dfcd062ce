#include "run_state/run_state.hpp"

#include <c10/util/Type.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/optim/step_hooks.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "comm/agreement.hpp"
#include "optim/optimizer_state.hpp"
#include "parallel/layer.hpp"
#include "run_state/counts.hpp"
#include "run_state/holdings.hpp"
#include "run_state/pieces_for_steps.hpp"
#include "run_state/state_parts.hpp"
#include "snapshot/put_off.hpp"
#include "utils/error_text.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

namespace fs = std::filesystem;

parallel::Engines RunState::engines() const {
  parallel::Engines all;
  for (const auto& model : models)
    if (model->engine) all.push_back(model->engine);
  return all;
}

std::shared_ptr<detail::PreparedModel> RunState::find(const ModelRef& model) const {
  for (const auto& known : models)
    if (known->model.identity() == model.identity()) return known;
  return nullptr;
}

void RunState::clear() {
  models.clear();
  optimizers.clear();
  schedulers.clear();
  engine_schedulers.clear();
  loaders.clear();
  step = 0;
  steps_before = 0;
  num_items = 0;
  undefined.clear();
}

namespace {

using ShardOfParameter = std::unordered_map<const at::TensorImpl*, parallel::Held>;

void give_pieces(const ShardOfParameter& pieces, torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  if (optim::has_own_state_dict(optimizer) && std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(), [&](const at::Tensor& parameter) {
          return pieces.contains(parameter.unsafeGetTensorImpl());
        });
      }))
    raise<ConfigError>(
        "prepare: found an optimizer of class {} for parameters that are sharded, expected one whose states are "
        "tensors like their parameters: a state of a layout of its own (AdamW8bit's codes come in blocks of 256) can't "
        "be saved and loaded in pieces. Use torch::optim::AdamW, of whose states each rank holds its shard, or train "
        "without fsdp_plugin",
        c10::demangle(typeid(optimizer).name()));
  // Adagrad has states from its start, others when they have stepped before they are prepared.
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params())
      if (const auto found = pieces.find(parameter.unsafeGetTensorImpl()); found != pieces.end())
        optim::move_optimizer_state(optimizer, parameter, found->second.value,
                                    [&](const at::Tensor& whole) { return parallel::slice_of(found->second, whole); });
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      const auto found = pieces.find(parameter.unsafeGetTensorImpl());
      if (found == pieces.end()) continue;
      if (optimizer.state().find(parameter.unsafeGetTensorImpl()) != optimizer.state().end())
        throw ConfigError(
            "prepare: the optimizer holds states of parameters that are to be sharded, expected one that has not "
            "stepped; prepare it first and read its states with load_state()");
      parameter = found->second.value;
    }
}

/// Tells the user of an optimizer that steps on whole parameters, once per class: it takes their memory.
void tell_of_whole_parameters(const torch::optim::Optimizer& optimizer) {
  static std::set<std::string> told;
  const std::string name = c10::demangle(typeid(optimizer).name());
  if (comm::rank() != 0 || !told.insert(name).second) return;
  logs::warn("accelerate.run_state",
             "prepare: an optimizer of class {} is not known to work element by element, so it steps on whole "
             "parameters of the sharded model, and holds whole states on each rank. If it does, derive it from "
             "accelerate::optim::ElementWise, too: then each rank holds its piece.",
             name);
}

/// Looks whether the optimizer lists parameters of which the engine has shards, and gives it these. Not collective.
void look_for_whole(parallel::Engine& engine, const std::unordered_set<const void*>& sharded,
                    torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  const bool any = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const at::Tensor& parameter) { return sharded.contains(parameter.unsafeGetTensorImpl()); });
  });
  if (!any) return;
  const bool whole = !optim::steps_on_pieces(optimizer) && !optim::has_own_state_dict(optimizer);
  ShardOfParameter pieces;
  for (auto& holding : engine.pieces()) {
    const bool computes = holding.value.is_same(holding.tensor);  // modules have a part only: there is no whole one
    if (computes && whole && holding.slice.numel < holding.whole.numel())
      raise<ConfigError>(
          "prepare: found an optimizer of class {} for '{}', of which each rank computes with a part, expected one "
          "that works element by element. If it does, derive it from accelerate::optim::ElementWise, too",
          c10::demangle(typeid(optimizer).name()), holding.names.front());
    if (!computes) pieces.emplace(holding.tensor.unsafeGetTensorImpl(), holding);
  }
  if (whole) return tell_of_whole_parameters(optimizer);
  give_pieces(pieces, optimizer);
}

}  // namespace

namespace {

/// Null: optimizers of its parameters step on all of them at once.
parallel::Layer* layer_with_parts(const parallel::Engine& engine) {
  const auto found = std::find_if(engine.layers().begin(), engine.layers().end(),
                                  [](const auto& layer) { return !layer->step_parts().empty(); });
  return found == engine.layers().end() ? nullptr : found->get();
}

AcceleratedOptimizer::StepHooks::Ahead steps_ahead_of(const std::shared_ptr<parallel::Engine>& engine) {
  using States = std::vector<at::Tensor>;
  const auto layer = [told = std::weak_ptr(engine), owned = layer_with_parts(*engine)] {
    return told.expired() ? nullptr : owned;
  };
  return {
      .before = [layer](size_t part, const States& states) { return layer() && layer()->before_ahead(part, states); },
      .after =
          [layer](size_t part, const States& states) {
            if (layer()) layer()->after_ahead(part, states);
          },
      .elsewhere = [layer](const at::Tensor& tensor) { return layer() && layer()->is_elsewhere(tensor); },
      .take = [layer](size_t part, bool divides) { return layer() && layer()->take_ahead(part, divides); },
      .taken =
          [layer](size_t part) {
            if (layer()) layer()->after_take(part);
          }};
}

}  // namespace

namespace {

/// @throws ConfigError that says why optimizers can't step within backward
void expect_steps_at_once(const RunState& run, const parallel::Engine& engine) {
  std::unordered_set<const void*> own;
  for (const auto& holding : engine.pieces())
    own.insert({holding.value.unsafeGetTensorImpl(), holding.tensor.unsafeGetTensorImpl()});
  int64_t number = 0;
  for (const auto& optimizer : run.optimizers) {
    const auto& groups = optimizer.optimizer().param_groups();
    if (std::none_of(groups.begin(), groups.end(), [&](const auto& group) {
          return std::any_of(group.params().begin(), group.params().end(), [&](const at::Tensor& parameter) {
            return own.contains(parameter.unsafeGetTensorImpl());
          });
        }))
      continue;
    const std::string kind = c10::demangle(typeid(optimizer.optimizer()).name());
    if (++number > 1)
      throw ConfigError(
          "step_at_once: found two optimizers of one model, expected one: a backward would step on what the other one "
          "trains, too. Leave step_at_once out");
    if (optimizer.scaler() && optimizer.scaler()->is_enabled())
      throw ConfigError(
          "step_at_once: found loss scaling, or a look for gradients that overflow (fp16; DeepSpeed's "
          "bf16.check_grad_overflow), expected none: it is known when all gradients are there. step_in_backward "
          "computes steps within backward all the same, and takes them over when it is");
    if (!optim::steps_on_pieces(optimizer.optimizer()) ||
        dynamic_cast<const optim::AsksOtherRanks*>(&optimizer.optimizer()))
      raise<ConfigError>(
          "step_at_once: found an optimizer of class {}, which needs all of a parameter or of its parameters at once, "
          "expected one that steps element by element (SGD, Adam, AdamW, Adagrad, RMSprop, optim::Lion, DeepSpeedAdam, "
          "AdamW8bit). Leave step_at_once out",
          kind);
  }
}

/// A step at once leaves no gradients; so does one that step() had to take.
void forget_gradients(parallel::Engine& engine, torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      parameter.mutable_grad().reset();
      engine.clear_gradient(parameter);
    }
}

}  // namespace

void give_pieces_to_optimizers(const RunState& run) {
  using Tensors = std::unordered_set<const void*>;
  const auto engines = run.engines();
  for (const auto& optimizer : run.optimizers)
    if (auto* asking = dynamic_cast<optim::AsksOtherRanks*>(&optimizer.optimizer()))
      asking->set_pieces(std::make_shared<const ShardsForSteps>(engines));
  for (const auto& engine : engines) {
    const auto sharded = std::make_shared<Tensors>(), pieces = std::make_shared<Tensors>();
    if (engine->holds_pieces())
      for (const auto& holding : engine->pieces()) {
        sharded->insert(holding.tensor.unsafeGetTensorImpl());
        if (holding.value.numel() != holding.whole.numel()) pieces->insert(holding.value.unsafeGetTensorImpl());
      }
    for (const auto& optimizer : run.optimizers) {
      // An optimizer does not keep the engine: its hooks on the parameters end with the prepared model.
      const auto told = std::weak_ptr(engine);
      AcceleratedOptimizer::StepHooks hooks;
      hooks.look = [told, sharded, &bare = optimizer.optimizer()] {
        if (const auto here = told.lock()) look_for_whole(*here, *sharded, bare);
      };
      hooks.cleared = [told](const at::Tensor& parameter) {
        if (const auto here = told.lock()) here->clear_gradient(parameter);
      };
      hooks.look();
      // An optimizer that steps on whole parameters writes to them as any operator does.
      const bool whole = engine->holds_pieces() && !optim::steps_on_pieces(optimizer.optimizer());
      hooks.before = [told, whole, &bare = optimizer.optimizer()] {
        const auto here = told.lock();
        if (!here) return;
        here->expect_gradients([&] {
          std::vector<at::Tensor> stepped_on;
          for (const auto& group : bare.param_groups())
            stepped_on.insert(stepped_on.end(), group.params().begin(), group.params().end());
          return stepped_on;
        });
        if (whole) here->settle_gradients();
        else here->before_step();
      };
      if (!whole)
        hooks.after = [told, pieces, &bare = optimizer.optimizer()] {
          if (const auto here = told.lock()) {
            here->after_step();
            if (here->steps_at_once()) forget_gradients(*here, bare);
          }
          if (!pieces->empty())
            optim::refuse_torch_save(bare, [&](const void* parameter) { return pieces->contains(parameter); });
        };
      // Null cost where no layer has parts: nobody is asked in a step.
      if (!engine->step_parts().empty()) {
        hooks.parts = [told] {
          const auto here = told.lock();
          return here ? here->step_parts() : std::vector<std::vector<at::Tensor>>{};
        };
        const auto tell_part = [told](void (parallel::Engine::*what)(size_t, const std::vector<at::Tensor>&)) {
          return [told, what](size_t part, const std::vector<at::Tensor>& states) {
            if (const auto here = told.lock()) ((*here).*what)(part, states);
          };
        };
        hooks.before_part = tell_part(&parallel::Engine::before_part);
        hooks.after_part = tell_part(&parallel::Engine::after_part);
        if (engine->steps_ahead()) hooks.ahead = steps_ahead_of(engine);
      }
      optimizer.set_step_hooks(engine.get(), std::move(hooks));
    }
    if (engine->steps_at_once())
      comm::on_all_ranks_or_throw<ConfigError>([&, &engine = *engine] { expect_steps_at_once(run, engine); });
    engine->set_step([optimizers = run.optimizers](const std::vector<at::Tensor>& parameters) {
      for (const auto& optimizer : optimizers) optimizer.step_on(parameters);
    });
    if (!engine->steps_ahead()) continue;
    const auto step_ahead = [optimizers = run.optimizers](const std::vector<at::Tensor>& parameters) {
      for (const auto& optimizer : optimizers) optimizer.step_ahead(parameters);
    };
    std::vector<at::Tensor> all;
    for (const auto& holding : engine->pieces()) all.push_back(holding.value), all.push_back(holding.tensor);
    step_ahead(all);  // an optimizer that can't says so now
    engine->set_step_ahead(step_ahead);
  }
}

namespace {

/// Whether ranks that share files out can write them at the same time: nobody gathers for another meanwhile.
bool can_write_at_once(const RunState& run, const SaveOptions& options) {
  if (snapshot::PutOff::here() || (options.form != StateForm::safetensors && options.form != StateForm::archive))
    return false;
  return std::all_of(run.models.begin(), run.models.end(), [](const auto& model) {
    const auto holdings = holdings_of(*model);
    return std::none_of(holdings.begin(), holdings.end(), [](const auto& holding) { return holding.in_pieces(); });
  });
}

}  // namespace

void save(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  refuse_undefined(run, "save_state");
  counts::add(CheckpointCount::checkpoints);
  if (options.loaders) counts::add(CheckpointCount::loader_positions, static_cast<int64_t>(run.loaders.size()));
  snapshot::LaterFiles at_once;
  {
    std::optional<snapshot::PutOff> off;
    if (can_write_at_once(run, options)) off.emplace(nullptr);
    for (const auto& part : state_parts())
      if (part.scope == WriteScope::together) part.save(run, folder, options);
    if (off) at_once = std::move(off->files());
  }
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    for (auto& write : at_once.writes) std::exchange(write, nullptr)();
    for (const auto& part : state_parts())
      if (part.scope == WriteScope::each_rank || (part.scope == WriteScope::once && options.writers.here))
        part.save(run, folder, options);
  });
}

void load_in_place(RunState& run, std::string_view operation, const fs::path& folder,
                   const std::function<void()>& fill) {
  run.undefined = folder;
  try {
    fill();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    raise<CheckpointError>(
        "{}: the checkpoint '{}' was being read into the tensors of this run when it failed: weights and states of "
        "optimizers are undefined now, all else is as it was. Load another checkpoint, an older one, into the same "
        "objects, or begin anew; nothing is saved until one is loaded. What failed: {}",
        operation, folder.string(), text_of(error));
  }
  run.undefined.clear();
}

void refuse_undefined(const RunState& run, std::string_view operation) {
  if (run.undefined.empty()) return;
  raise<CheckpointError>(
      "{}: loading '{}' failed in the middle, so that weights and states of optimizers are undefined, expected a load "
      "that has succeeded since: load another checkpoint into the same objects, or begin anew",
      operation, run.undefined.string());
}

std::vector<std::string> lacks(const RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  std::vector<std::string> missing;
  for (const auto& part : state_parts())
    if (part.lacks)
      for (auto& name : part.lacks(run, folder, options)) missing.push_back(std::move(name));
  return missing;
}

void load(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  // Open, compare and find everything before anything changes, on any rank.
  std::vector<StagedPart> staged;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    const checkpointing::OpenedOnce once;
    for (const auto& part : state_parts()) staged.push_back(part.stage(run, folder, options));
  });
  for (const auto& part : staged)
    if (part.agree) part.agree();
  // Whatever refuses its part, on any rank: those that took theirs get back what they had.
  Undo undo;
  try {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      for (const auto& part : staged)
        for (const auto& take : part.take) take(undo);
    });
    load_in_place(run, "load_state", folder, [&] {
      for (const auto& part : staged)
        if (part.fill) part.fill();
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  for (const auto& part : staged)
    if (part.finish) part.finish();
}

}  // namespace accelerate::run_state
