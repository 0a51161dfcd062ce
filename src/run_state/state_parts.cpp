#include "run_state/state_parts.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/optim/scheduler.hpp"
#include "accelerate/precision/fp8.hpp"
#include "checkpoint/archive.hpp"
#include "comm/agreement.hpp"
#include "formats/expected_files.hpp"
#include "observe/trace.hpp"
#include "parallel/deepspeed_files.hpp"
#include "run_state/accumulation.hpp"
#include "run_state/fp8_states.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/own_buffers.hpp"
#include "run_state/own_states.hpp"
#include "run_state/zero_files.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using checkpointing::load_object;
using checkpointing::save_object;
using Names = std::vector<std::string>;

/// `state` for an object that can give its own.
template <class Object, class State> std::function<void(Undo&)> to_be_taken(Object& object, State state) {
  return [&object, state = std::move(state)](Undo& undo) {
    undo.push_back([&object, before = object.state_dict()] { object.load_state_dict(before); });
    object.load_state_dict(state);
  };
}
void need(const fs::path& file, Names& missing) {
  if (!fs::exists(file)) missing.push_back(file.filename().string());
}
void need_one_of(const std::vector<StateFile>& files, StateForm preferred, Names& missing) {
  for (const auto& file : files)
    if (fs::exists(file.path)) return;
  missing.push_back(in_form(files, preferred).path.filename().string());
}
std::function<void()> one_after_the_other(std::vector<std::function<void()>> all) {
  return [all = std::move(all)] {
    for (const auto& one : all) one();
  };
}

/// Whether the settings of the model ask for a universal checkpoint.
bool wants_universal(const detail::PreparedModel& model) { return model.deepspeed && model.deepspeed->load_universal; }
/// Where DeepSpeed's files of a model are.
fs::path files_of(const RunState& run, const fs::path& folder, size_t model) {
  return deepspeed_folder(folder, model, model < run.models.size() && wants_universal(*run.models[model]));
}

// ---- models

const detail::PreparedModel& prepared_of(const RunState& run, const ModelRef& model) {
  const auto found = run.find(model);
  if (!found)
    throw ConfigError(
        "load_state: a hook has put a model that was not prepared into the list of those to load, expected it to "
        "remove or to reorder models only");
  return *found;  // the run holds it, too
}
/// A model's folder as DeepSpeed's tag, with its optimizers and its schedule.
void save_zero_models(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  for (size_t i = 0; i < run.models.size(); ++i) {
    const auto tag = numbered("pytorch_model", i, "");
    const bool here = options.writers.here || writes_for_others(*run.models[i], options.first_on_its_disk);
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      fs::create_directories(folder / tag);
      if (here && i + 1 == run.models.size()) write_latest(folder, tag), write_zero_to_fp32(folder);
    });
    save_zero(run, *run.models[i], folder / tag, {.first_on_its_disk = options.first_on_its_disk});
  }
}
void save_models(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  const auto file = [&](size_t i) { return in_form(model_files(folder, i), options.form); };
  if (options.weights)
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      for (size_t i = 0; options.writers.here && i < options.weights->size(); ++i)
        save_tensors((*options.weights)[i], file(i));
    });
  else if (options.form == StateForm::deepspeed) save_zero_models(run, folder, options);
  else
    for (size_t i = 0; i < run.models.size(); ++i) save_model(*run.models[i], file(i), options.writers);
}
/// Files of the i-th model that is loaded.
std::vector<StateFile> files_to_load(const RunState& run, const fs::path& folder, const RunLoadOptions& options,
                                     size_t i) {
  return model_files(folder, i, wants_universal(prepared_of(run, options.models[i])));
}
Names models_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  Names missing;
  for (size_t i = 0; i < options.models.size(); ++i)
    need_one_of(files_to_load(run, folder, options, i), options.preferred, missing);
  return missing;
}
StagedPart stage_models(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  auto staged = std::make_shared<std::vector<StagedModel>>();
  for (size_t i = 0; i < options.models.size(); ++i) {
    const auto& model = prepared_of(run, options.models[i]);
    const auto file =
        find_state(files_to_load(run, folder, options, i), options.preferred, fmt::format("prepared model {}", i));
    if (wants_universal(model)) checkpointing::ZeroCheckpoint::need_universal(file.path);
    staged->emplace_back(model, file, options.strict);
  }
  return {.agree =
              [staged] {
                for (const auto& model : *staged) model.agree();
              },
          .fill =
              [staged] {
                for (const auto& model : *staged) model.apply();
              }};
}

// ---- optimizers

bool has_file_of_its_own(const fs::path& folder, size_t i) {
  const auto files = optimizer_files(folder, i);
  return std::any_of(files.begin(), files.end(), [](const auto& file) { return fs::exists(file.path); });
}
struct WithItsModel {
  fs::path files;
  const detail::PreparedModel& model;
  std::vector<size_t> together;  ///< the optimizers that these files hold
};
/// Where DeepSpeed's files hold an optimizer, with its model: the folder says it, since stages differ in that.
std::optional<WithItsModel> with_its_model(const RunState& run, const fs::path& folder, size_t i) {
  if (has_file_of_its_own(folder, i)) return std::nullopt;
  for (size_t model = 0; model < run.models.size(); ++model) {
    auto all = optimizers_on(run, *run.models[model]);
    if (std::find(all.begin(), all.end(), i) == all.end()) continue;
    const auto files = files_of(run, folder, model);
    if (!checkpointing::ZeroCheckpoint::is_one(files)) return std::nullopt;
    std::erase_if(all, [&](size_t other) { return has_file_of_its_own(folder, other); });
    return WithItsModel{files, *run.models[model], std::move(all)};
  }
  return std::nullopt;
}

/// What the rates of an optimizer's groups were when its schedule was made.
std::vector<double> initial_rates_of(const RunState& run, const AcceleratedOptimizer& optimizer) {
  for (const auto& scheduler : run.schedulers)
    if (&scheduler.optimizer() == &optimizer.optimizer()) return scheduler.scheduler().schedule().base_lrs();
  return {};
}

void save_optimizers(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    const bool deepspeed = options.form == StateForm::deepspeed;
    if (deepspeed && model_of(run, i)) continue;  // saved with the model
    const auto form = deepspeed ? StateForm::archive : options.form;
    save_optimizer(run.optimizers[i], run.models, {form, in_form(optimizer_files(folder, i), form).path},
                   options.writers, i, initial_rates_of(run, run.optimizers[i]));
  }
}
Names optimizers_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  Names missing;
  for (size_t i = 0; i < run.optimizers.size(); ++i)
    if (!with_its_model(run, folder, i)) need_one_of(optimizer_files(folder, i), options.preferred, missing);
  return missing;
}
StagedPart stage_optimizers(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  StagedPart staged;
  const auto found = std::make_shared<std::vector<StagedOptimizer>>();
  found->reserve(run.optimizers.size());
  const auto take = [&](StagedOptimizer one) {
    found->push_back(std::move(one));
    staged.take.push_back([found, &here = found->back()](Undo& undo) { undo.push_back(here.take()); });
  };
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    if (const auto with = with_its_model(run, folder, i)) {
      const auto opened = checkpointing::ZeroCheckpoint::opened(with->files);
      const auto& checkpoint = *opened;
      auto& optimizer = run.optimizers[i];
      take({optimizer, run.models, optimizer_in(run, with->model, checkpoint, i, with->together),
            with->files.filename().string()});
      staged.take.push_back(
          [&optimizer, steps = checkpoint.global_steps(), skipped = checkpoint.skipped_steps()](Undo& undo) {
            undo.push_back([&optimizer, before = optimizer.step_counts()] { optimizer.set_step_counts(before); });
            optimizer.set_step_counts({.taken = steps - skipped, .skipped = skipped});
          });
      continue;
    }
    const auto file =
        find_state(optimizer_files(folder, i), options.preferred, fmt::format("prepared optimizer {}", i));
    take({run.optimizers[i], run.models, file});
  }
  staged.fill = [found] {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      for (const auto& one : *found) one.fill();
    });
  };
  return staged;
}

// ---- schedules, loaders, the scaler, the user's objects

fs::path scheduler_file(const fs::path& folder, size_t i) { return folder / numbered("scheduler", i, ".bin"); }
fs::path loader_file(const fs::path& folder, size_t i) { return folder / numbered("dl_state_dict", i, ".bin"); }
fs::path custom_file(const fs::path& folder, size_t i) { return folder / fmt::format("custom_checkpoint_{}.pkl", i); }
fs::path scaler_file(const fs::path& folder) { return folder / "scaler.pt"; }

/// DeepSpeed's files hold the schedule that its settings have made, with its model; files count the others only.
/// `with_model(i, folder)` and `alone(i, file)`, for each schedule.
template <class WithModel, class Alone>
void for_each_scheduler(const RunState& run, const fs::path& folder, bool deepspeed, WithModel&& with_model,
                        Alone&& alone) {
  size_t number = 0;
  for (size_t i = 0; i < run.schedulers.size(); ++i) {
    const auto model = deepspeed ? model_of_scheduler(run, i) : std::nullopt;
    if (model) with_model(i, files_of(run, folder, *model));
    else alone(i, scheduler_file(folder, number++));
  }
}
bool is_deepspeed(const RunState& run, const fs::path& folder) {
  return checkpointing::ZeroCheckpoint::is_one(files_of(run, folder, 0));
}

void save_schedulers(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  for_each_scheduler(
      run, folder, options.form == StateForm::deepspeed, [](size_t, const fs::path&) {},
      [&](size_t i, const fs::path& file) { save_object(run.schedulers[i].state_dict(), file); });
}
Names schedulers_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions&) {
  Names missing;
  for_each_scheduler(
      run, folder, is_deepspeed(run, folder), [](size_t, const fs::path&) {},
      [&](size_t, const fs::path& file) { need(file, missing); });
  return missing;
}
StagedPart stage_schedulers(RunState& run, const fs::path& folder, const RunLoadOptions&) {
  StagedPart staged;
  for_each_scheduler(
      run, folder, is_deepspeed(run, folder),
      [&](size_t i, const fs::path& files) {
        const auto state = checkpointing::ZeroCheckpoint::opened(files)->lr_scheduler();
        if (state.isNone())
          raise<CheckpointError>("load '{}': found no state of a schedule, expected one for prepared schedule {}",
                                 files.string(), i);
        staged.take.push_back(to_be_taken(run.schedulers[i], state));
      },
      [&](size_t i, const fs::path& file) {
        staged.take.push_back(to_be_taken(run.schedulers[i], load_object(file)));
      });
  return staged;
}

void save_loaders(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  for (size_t i = 0; options.loaders && i < run.loaders.size(); ++i)
    save_object(run.loaders[i]->state_dict().to_ivalue(), loader_file(folder, i));
}
Names loaders_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  Names missing;
  for (size_t i = 0; options.loaders && i < run.loaders.size(); ++i) need(loader_file(folder, i), missing);
  return missing;
}
StagedPart stage_loaders(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  StagedPart staged;
  for (size_t i = 0; options.loaders && i < run.loaders.size(); ++i)
    staged.take.push_back(
        to_be_taken(*run.loaders[i], data::DataLoaderState::from_ivalue(load_object(loader_file(folder, i)))));
  return staged;
}

void save_scaler(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  if (run.scaler && options.form != StateForm::deepspeed) save_object(run.scaler->state_dict(), scaler_file(folder));
}
Names scaler_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions&) {
  Names missing;
  if (run.scaler && !is_deepspeed(run, folder)) need(scaler_file(folder), missing);
  return missing;
}
StagedPart stage_scaler(RunState& run, const fs::path& folder, const RunLoadOptions&) {
  StagedPart staged;
  if (!run.scaler) return staged;
  if (!is_deepspeed(run, folder) || fs::exists(scaler_file(folder)))
    staged.take.push_back(to_be_taken(*run.scaler, load_object(scaler_file(folder))));
  else if (const auto state =
               scaler_state_in(*checkpointing::ZeroCheckpoint::opened(files_of(run, folder, 0)), *run.scaler))
    staged.take.push_back(to_be_taken(*run.scaler, *state));
  return staged;
}

void save_customs(const RunState& run, const fs::path& folder, const SaveOptions&) {
  for (size_t i = 0; i < run.customs.size(); ++i) save_object(run.customs[i].state_dict(), custom_file(folder, i));
}
Names customs_lacking(const RunState& run, const fs::path& folder, const RunLoadOptions&) {
  Names missing;
  for (size_t i = 0; i < run.customs.size(); ++i) need(custom_file(folder, i), missing);
  return missing;
}
StagedPart stage_customs(RunState& run, const fs::path& folder, const RunLoadOptions&) {
  StagedPart staged;
  for (size_t i = 0; i < run.customs.size(); ++i)
    staged.take.push_back(to_be_taken(run.customs[i], load_object(custom_file(folder, i))));
  return staged;
}

// ---- what is not needed, or not always there

StagedPart stage_fp8(RunState& run, const fs::path& folder, const RunLoadOptions&) {
  StagedPart staged;
  for (auto& [training, state] : read_fp8_states(run, folder))
    staged.take.push_back(to_be_taken(*training, std::move(state)));
  return staged;
}

void save_buffers_of_ranks(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  if (options.form != StateForm::local) save_own_buffers(run, folder);  // a rank's own shards have them
}
StagedPart stage_buffers_of_ranks(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  return {.finish = one_after_the_other(stage_own_buffers(run, options.models, folder, options.strict))};
}

StagedPart stage_states_of_ranks(RunState& run, const fs::path& folder, const RunLoadOptions&) {
  return {.finish = one_after_the_other(stage_own_states(run, folder))};
}

fs::path random_states_file(const fs::path& folder) {
  return folder / fmt::format("random_states_{}.pkl", comm::rank());
}
/// The generators, and where the run is among the micro-steps of a group.
void save_random(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  const auto states = checkpointing::random_states(run.step % options.num_steps, options.device);
  checkpointing::add_python_generators(
      states, run.python_generators
                  ? *run.python_generators
                  : checkpointing::seeded_generators(at::detail::getDefaultCPUGenerator().current_seed()));
  save_object(states, random_states_file(folder));
}
StagedPart stage_random(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  const auto file = random_states_file(folder);
  StagedPart staged;
  try {
    if (fs::exists(file))
      staged.take.push_back(
          [&run, device = options.device,
           state = checkpointing::read_object(file, formats::PickledObjects::numpy_numbers)](Undo& undo) {
            undo.push_back([&run, device, step = run.step, before = checkpointing::random_states(run.step, device),
                            python = run.python_generators] {
              checkpointing::load_random_states(before, device);
              run.step = step;
              run.python_generators = python;
            });
            run.step = checkpointing::load_random_states(state, device);
            run.python_generators = checkpointing::python_generators(state);
          });
    else
      logs::warn("accelerate.run_state",
                 "load_state: the random generators of rank {} keep their present state: the checkpoint has no {}, so "
                 "it was saved by fewer processes",
                 comm::rank(), file.filename().string());
  } catch (const formats::DamagedFile&) {
    throw;
  } catch (const CheckpointError& error) {  // of Python, with a generator that can't be read here
    logs::warn("accelerate.run_state", "load_state: the random generators keep their present state: {}", error.what());
  }
  staged.finish = [&run] {
    std::vector<int64_t> step{run.step};
    broadcast_object_list(step);  // ranks that wrote no file of their own count with the others
    run.step = step[0];
  };
  return staged;
}

StagedPart stage_accumulation(RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  const auto staged = std::make_shared<const StagedAccumulation>(run, folder, options);
  return {.agree = [staged] { staged->agree(); },
          .finish = [staged, &run, num_steps = options.num_steps] { staged->apply(run, run.step % num_steps); }};
}

constexpr StatePart kParts[] = {
    {R"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin|pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin|)"
     R"(pytorch_model_fsdp_\d+|pytorch_model(_\d+)?|latest|zero_to_fp32\.py)",
     WriteScope::together, save_models, models_lacking, stage_models},
    {R"(optimizer(_\d+)?\.bin|optimizer_\d+(_rank\d+\.bin)?)", WriteScope::together, save_optimizers,
     optimizers_lacking, stage_optimizers},
    {R"(buffers_\d+\.bin)", WriteScope::together, save_buffers_of_ranks, nullptr, stage_buffers_of_ranks},
    {R"(scheduler(_\d+)?\.bin)", WriteScope::once, save_schedulers, schedulers_lacking, stage_schedulers},
    {R"(dl_state_dict(_\d+)?\.bin)", WriteScope::once, save_loaders, loaders_lacking, stage_loaders},
    {R"(scaler\.pt)", WriteScope::once, save_scaler, scaler_lacking, stage_scaler},
    {R"(fp8_states\.bin)", WriteScope::once,
     [](const RunState& run, const fs::path& folder, const SaveOptions&) { save_fp8_states(run, folder); }, nullptr,
     stage_fp8},
    {R"(custom_checkpoint_\d+\.pkl)", WriteScope::once, save_customs, customs_lacking, stage_customs},
    {R"(random_states_\d+\.pkl)", WriteScope::each_rank, save_random, nullptr, stage_random},
    {R"(own_states_\d+\.bin)", WriteScope::each_rank,
     [](const RunState& run, const fs::path& folder, const SaveOptions&) { save_own_states(run, folder); }, nullptr,
     stage_states_of_ranks},
    {R"(gradients_\d+\.bin)", WriteScope::each_rank, save_accumulation, nullptr, stage_accumulation},
};

}  // namespace

std::span<const StatePart> state_parts() { return kParts; }

}  // namespace accelerate::run_state
