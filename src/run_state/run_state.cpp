#include "run_state/run_state.hpp"

#include <c10/util/Exception.h>

#include <functional>
#include <unordered_map>

#include "accelerate/comm.hpp"
#include "optim/optimizer_state.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/whole_stream.hpp"
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
  loaders.clear();
  step = 0;
}

namespace {

using PieceOfParameter = std::unordered_map<const at::TensorImpl*, parallel::Holding>;

void give_pieces(const PieceOfParameter& pieces, torch::optim::Optimizer& optimizer) {
  // Adagrad has states from its start, others when they have stepped before they are prepared.
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params())
      if (const auto found = pieces.find(parameter.unsafeGetTensorImpl()); found != pieces.end())
        optim::move_optimizer_state(optimizer, parameter, found->second.piece,
                                    [&](const at::Tensor& whole) { return parallel::piece_of(found->second, whole); });
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) {
      const auto found = pieces.find(parameter.unsafeGetTensorImpl());
      if (found == pieces.end()) continue;
      if (optimizer.state().find(parameter.unsafeGetTensorImpl()) != optimizer.state().end())
        throw ConfigError(
            "prepare: the optimizer holds states of parameters that are to be sharded, expected one that has not "
            "stepped; prepare it first and read its states with load_state()");
      parameter = found->second.piece;
    }
}

}  // namespace

void give_pieces_to_optimizers(const RunState& run) {
  for (const auto& engine : run.engines()) {
    if (!engine->holds_pieces()) continue;
    PieceOfParameter pieces;
    for (auto& holding : engine->pieces()) pieces.emplace(holding.tensor.unsafeGetTensorImpl(), holding);
    for (const auto& optimizer : run.optimizers) {
      give_pieces(pieces, optimizer.optimizer());
      optimizer.set_step_hooks(
          engine.get(), {.before = [engine] { engine->before_step(); }, .after = [engine] { engine->after_step(); }});
    }
  }
}

namespace {

fs::path custom_file(const fs::path& folder, size_t index) {
  return folder / fmt::format("custom_checkpoint_{}.pkl", index);
}
fs::path random_states_file(const fs::path& folder) {
  return folder / fmt::format("random_states_{}.pkl", comm::rank());
}

}  // namespace

void save(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  const StateForm form = options.form;
  for (size_t i = 0; i < run.models.size(); ++i)
    save_model(*run.models[i], in_form(model_files(folder, i), form), options.writers);
  for (size_t i = 0; i < run.optimizers.size(); ++i)
    save_optimizer(run.optimizers[i], run.models, {form, in_form(optimizer_files(folder, i), form).path},
                   options.writers);
  on_all_ranks_or_throw([&] {
    using checkpointing::save_object;
    if (options.writers.here) {
      for (size_t i = 0; i < run.schedulers.size(); ++i)
        save_object(run.schedulers[i].state_dict(), folder / numbered("scheduler", i, ".bin"));
      if (options.loaders)
        for (size_t i = 0; i < run.loaders.size(); ++i)
          save_object(run.loaders[i]->state_dict().to_ivalue(), folder / numbered("dl_state_dict", i, ".bin"));
      if (run.scaler) save_object(run.scaler->state_dict(), folder / "scaler.pt");
      for (size_t i = 0; i < run.customs.size(); ++i) save_object(run.customs[i].state_dict(), custom_file(folder, i));
    }
    save_object(checkpointing::random_states(run.step, options.device), random_states_file(folder));
    if (options.writers.here) {
      for (size_t i = 0; i < run.models.size(); ++i) remove_other_forms(model_files(folder, i), form);
      for (size_t i = 0; i < run.optimizers.size(); ++i) remove_other_forms(optimizer_files(folder, i), form);
    }
  });
}

void load(RunState& run, const fs::path& folder, const LoadOptions& options) {
  // Read everything before anything changes, on any rank.
  std::vector<StagedModel> models;
  std::vector<c10::IValue> optimizers, schedulers, customs;
  std::vector<data::DataLoaderState> loaders;
  std::optional<c10::IValue> scaler, random;
  on_all_ranks_or_throw([&] {
    using checkpointing::load_object;
    for (size_t i = 0; i < run.models.size(); ++i)
      models.emplace_back(*run.models[i],
                          find_state(model_files(folder, i), options.preferred, fmt::format("prepared model {}", i)));
    for (size_t i = 0; i < run.optimizers.size(); ++i)
      optimizers.push_back(read_optimizer(
          run.optimizers[i], run.models,
          find_state(optimizer_files(folder, i), options.preferred, fmt::format("prepared optimizer {}", i))));
    for (size_t i = 0; i < run.schedulers.size(); ++i)
      schedulers.push_back(load_object(folder / numbered("scheduler", i, ".bin")));
    if (options.loaders)
      for (size_t i = 0; i < run.loaders.size(); ++i)
        loaders.push_back(
            data::DataLoaderState::from_ivalue(load_object(folder / numbered("dl_state_dict", i, ".bin"))));
    for (size_t i = 0; i < run.customs.size(); ++i) customs.push_back(load_object(custom_file(folder, i)));
    if (run.scaler) scaler = load_object(folder / "scaler.pt");
    try {
      random = load_object(random_states_file(folder));
    } catch (const CheckpointError& error) {
      // Absent when the checkpoint comes from fewer processes; Python's own holds numpy's generator, which we can't
      // read.
      TORCH_WARN("load_state: the random generators keep their present state: ", error.what());
    }
  });

  // Whatever refuses its part, on any rank: those that took theirs get back what they had. Models come last: they have
  // been checked, so that no copy of them is needed.
  std::vector<std::function<void()>> undo;
  const auto take = [&](auto& object, const auto& state) {
    undo.push_back([&object, before = object.state_dict()] { object.load_state_dict(before); });
    object.load_state_dict(state);
  };
  try {
    on_all_ranks_or_throw([&] {
      for (size_t i = 0; i < optimizers.size(); ++i) take(run.optimizers[i], optimizers[i]);
      for (size_t i = 0; i < schedulers.size(); ++i) take(run.schedulers[i], schedulers[i]);
      for (size_t i = 0; i < loaders.size(); ++i) take(*run.loaders[i], loaders[i]);
      if (scaler) take(*run.scaler, *scaler);
      for (size_t i = 0; i < customs.size(); ++i) take(run.customs[i], customs[i]);
      if (random) run.step = checkpointing::load_random_states(*random, options.device);
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  for (const auto& model : models) model.apply();
}

}  // namespace accelerate::run_state
