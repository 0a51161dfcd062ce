#include "run_state/run_state.hpp"

#include <c10/util/Type.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/comm.hpp"
#include "accelerate/precision/fp8.hpp"
#include "optim/optimizer_state.hpp"
#include "run_state/accumulation.hpp"
#include "run_state/fp8_states.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/own_buffers.hpp"
#include "run_state/own_states.hpp"
#include "run_state/whole_stream.hpp"
#include "utils/counts.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/trace.hpp"

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
  num_items = 0;
}

namespace {

using PieceOfParameter = std::unordered_map<const at::TensorImpl*, parallel::Held>;

void give_pieces(const PieceOfParameter& pieces, torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  if (optim::has_own_state_dict(optimizer) && std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(), [&](const at::Tensor& parameter) {
          return pieces.contains(parameter.unsafeGetTensorImpl());
        });
      }))
    raise<ConfigError>(
        "prepare: found an optimizer of class {} for parameters that are sharded, expected one whose states are "
        "tensors "
        "like their parameters: a state of a layout of its own (AdamW8bit's codes come in blocks of 256) can't be "
        "saved "
        "and loaded in pieces. Use torch::optim::AdamW, of whose states each rank holds its shard, or train without "
        "fsdp_plugin",
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

/// What steps on whole parameters is told to, once per class: it takes their memory.
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

/// Looks whether the optimizer lists parameters of which the engine has pieces, and gives it these. Not collective.
void look_for_whole(parallel::Engine& engine, const std::unordered_set<const void*>& sharded,
                    torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  const bool any = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const at::Tensor& parameter) { return sharded.contains(parameter.unsafeGetTensorImpl()); });
  });
  if (!any) return;
  if (!optim::is_element_wise(optimizer) && !optim::has_own_state_dict(optimizer))
    return tell_of_whole_parameters(optimizer);
  PieceOfParameter pieces;
  for (auto& holding : engine.pieces()) pieces.emplace(holding.whole.unsafeGetTensorImpl(), holding);
  give_pieces(pieces, optimizer);
}

}  // namespace

void give_pieces_to_optimizers(const RunState& run) {
  using Tensors = std::unordered_set<const void*>;
  for (const auto& engine : run.engines()) {
    const auto sharded = std::make_shared<Tensors>(), pieces = std::make_shared<Tensors>();
    if (engine->holds_pieces())
      for (const auto& holding : engine->pieces()) {
        sharded->insert(holding.whole.unsafeGetTensorImpl());
        if (holding.value.numel() != holding.whole.numel()) pieces->insert(holding.value.unsafeGetTensorImpl());
      }
    for (const auto& optimizer : run.optimizers) {
      // An optimizer does not keep the engine: its hooks on the parameters end with the prepared model.
      const auto told = std::weak_ptr(engine);
      const auto tell = [told](void (parallel::Engine::*what)()) {
        return [told, what] {
          if (const auto here = told.lock()) ((*here).*what)();
        };
      };
      AcceleratedOptimizer::StepHooks hooks;
      hooks.look = [told, sharded, &bare = optimizer.optimizer()] {
        if (const auto here = told.lock()) look_for_whole(*here, *sharded, bare);
      };
      hooks.cleared = [told](const at::Tensor& parameter) {
        if (const auto here = told.lock()) here->clear_gradient(parameter);
      };
      hooks.look();
      // Who steps on whole parameters writes to them as any operator does.
      const bool whole = engine->holds_pieces() && !optim::is_element_wise(optimizer.optimizer());
      hooks.before = tell(whole ? &parallel::Engine::settle_gradients : &parallel::Engine::before_step);
      if (!whole)
        hooks.after = [told, pieces, &bare = optimizer.optimizer()] {
          if (const auto here = told.lock()) here->after_step();
          if (!pieces->empty())
            optim::refuse_torch_save(bare, [&](const void* parameter) { return pieces->contains(parameter); });
        };
      optimizer.set_step_hooks(engine.get(), std::move(hooks));
    }
  }
}

namespace {

const detail::PreparedModel& prepared_of(const RunState& run, const ModelRef& model) {
  const auto found = run.find(model);
  if (!found)
    throw ConfigError(
        "load_state: a hook has put a model that was not prepared into the list of those to load, expected it to "
        "remove "
        "or to reorder models only");
  return *found;  // the run holds it, too
}

fs::path custom_file(const fs::path& folder, size_t index) {
  return folder / fmt::format("custom_checkpoint_{}.pkl", index);
}
fs::path random_states_file(const fs::path& folder) {
  return folder / fmt::format("random_states_{}.pkl", comm::rank());
}

}  // namespace

void save(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  const StateForm form = options.form;
  counts::add(counts::Count::checkpoints);
  if (options.loaders) counts::add(counts::Count::loader_positions, static_cast<int64_t>(run.loaders.size()));
  if (options.weights)
    on_all_ranks_or_throw([&] {
      for (size_t i = 0; options.writers.here && i < options.weights->size(); ++i)
        save_tensors((*options.weights)[i], in_form(model_files(folder, i), form));
    });
  for (size_t i = 0; !options.weights && i < run.models.size(); ++i)
    save_model(*run.models[i], in_form(model_files(folder, i), form), options.writers);
  for (size_t i = 0; i < run.optimizers.size(); ++i)
    save_optimizer(run.optimizers[i], run.models, {form, in_form(optimizer_files(folder, i), form).path},
                   options.writers);
  if (form != StateForm::local) save_own_buffers(run, folder);  // a rank's own pieces have them
  on_all_ranks_or_throw([&] {
    using checkpointing::save_object;
    if (options.writers.here) {
      for (size_t i = 0; i < run.schedulers.size(); ++i)
        save_object(run.schedulers[i].state_dict(), folder / numbered("scheduler", i, ".bin"));
      if (options.loaders)
        for (size_t i = 0; i < run.loaders.size(); ++i)
          save_object(run.loaders[i]->state_dict().to_ivalue(), folder / numbered("dl_state_dict", i, ".bin"));
      if (run.scaler) save_object(run.scaler->state_dict(), folder / "scaler.pt");
      save_fp8_states(run, folder);
      for (size_t i = 0; i < run.customs.size(); ++i) save_object(run.customs[i].state_dict(), custom_file(folder, i));
    }
    save_object(checkpointing::random_states(run.step % options.num_steps, options.device), random_states_file(folder));
    save_accumulation(run, folder, options);
    save_own_states(run, folder);
  });
}

std::vector<std::string> lacks(const RunState& run, bool models, const fs::path& folder, const LoadOptions& options) {
  std::vector<std::string> missing;
  const auto need = [&](const fs::path& file) {
    if (!fs::exists(file)) missing.push_back(file.filename().string());
  };
  const auto need_one_of = [&](const std::vector<StateFile>& files) {
    for (const auto& file : files)
      if (fs::exists(file.path)) return;
    missing.push_back(in_form(files, options.preferred).path.filename().string());
  };
  for (size_t i = 0; models && i < run.models.size(); ++i) need_one_of(model_files(folder, i));
  for (size_t i = 0; i < run.optimizers.size(); ++i) need_one_of(optimizer_files(folder, i));
  for (size_t i = 0; i < run.schedulers.size(); ++i) need(folder / numbered("scheduler", i, ".bin"));
  if (options.loaders)
    for (size_t i = 0; i < run.loaders.size(); ++i) need(folder / numbered("dl_state_dict", i, ".bin"));
  if (run.scaler) need(folder / "scaler.pt");
  for (size_t i = 0; i < run.customs.size(); ++i) need(custom_file(folder, i));
  return missing;
}

void load(RunState& run, const std::vector<ModelRef>& models, const fs::path& folder, const LoadOptions& options) {
  // Read everything before anything changes, on any rank.
  std::vector<StagedModel> staged;
  std::vector<c10::IValue> optimizers, schedulers, customs;
  std::vector<data::DataLoaderState> loaders;
  std::vector<std::pair<FP8Training*, std::map<std::string, at::Tensor>>> scales;
  std::optional<c10::IValue> scaler, random;
  std::optional<StagedAccumulation> accumulation;
  std::vector<std::function<void()>> own_states, own_buffers;
  on_all_ranks_or_throw([&] {
    using checkpointing::load_object;
    for (size_t i = 0; i < models.size(); ++i)
      staged.emplace_back(prepared_of(run, models[i]),
                          find_state(model_files(folder, i), options.preferred, fmt::format("prepared model {}", i)),
                          options.strict);
    for (size_t i = 0; i < run.optimizers.size(); ++i) {
      const auto file =
          find_state(optimizer_files(folder, i), options.preferred, fmt::format("prepared optimizer {}", i));
      std::error_code is_folder;  // of a distributed checkpoint, of which each rank reads some parts
      const auto bytes = fs::file_size(file.path, is_folder);
      const trace::Span span(trace::Kind::checkpoint_read, file.path.filename().string(),
                             is_folder ? 0 : static_cast<int64_t>(bytes));
      optimizers.push_back(read_optimizer(run.optimizers[i], run.models, file));
    }
    for (size_t i = 0; i < run.schedulers.size(); ++i)
      schedulers.push_back(load_object(folder / numbered("scheduler", i, ".bin")));
    if (options.loaders)
      for (size_t i = 0; i < run.loaders.size(); ++i)
        loaders.push_back(
            data::DataLoaderState::from_ivalue(load_object(folder / numbered("dl_state_dict", i, ".bin"))));
    for (size_t i = 0; i < run.customs.size(); ++i) customs.push_back(load_object(custom_file(folder, i)));
    if (run.scaler) scaler = load_object(folder / "scaler.pt");
    scales = read_fp8_states(run, folder);
    accumulation.emplace(run, folder, options);
    own_buffers = stage_own_buffers(run, models, folder, options.strict);
    own_states = stage_own_states(run, folder);
    const auto of_generators = random_states_file(folder);
    try {
      if (fs::exists(of_generators)) random = load_object(of_generators);
      else
        logs::warn(
            "accelerate.run_state",
            "load_state: the random generators of rank {} keep their present state: the checkpoint has no {}, so "
            "it was saved by fewer processes",
            comm::rank(), of_generators.filename().string());
    } catch (const CheckpointError& error) {  // Python's own holds numpy's generator, which we can't read
      logs::warn("accelerate.run_state", "load_state: the random generators keep their present state: {}",
                 error.what());
    }
  });

  accumulation->agree();

  // Whatever refuses its part, on any rank: those that took theirs get back what they had. Models come last: they have
  // been checked, so that no copy of them is needed.
  std::vector<std::function<void()>> undo;
  std::vector<int64_t> step{run.step};
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
      for (auto& [training, state] : scales) take(*training, state);
      for (size_t i = 0; i < customs.size(); ++i) take(run.customs[i], customs[i]);
      if (random) step[0] = checkpointing::load_random_states(*random, options.device);
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  for (const auto& model : staged) model.apply();
  for (const auto& take_own : own_buffers) take_own();
  for (const auto& take_own : own_states) take_own();
  broadcast_object_list(step);  // ranks that wrote no file of their own count with the others
  accumulation->apply(run, step[0] % options.num_steps);
}

}  // namespace accelerate::run_state
