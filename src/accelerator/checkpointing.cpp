#include <algorithm>
#include <charconv>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "accelerator/sharded_checkpoint.hpp"
#include "accelerator/state_files.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> checkpoint_number(const fs::path& folder) {
  const std::string name = folder.filename().string();
  const std::string prefix = "checkpoint_";
  if (!name.starts_with(prefix)) return std::nullopt;
  int64_t number = 0;
  const char* last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + prefix.size(), last, number);
  return error == std::errc() && end == last ? std::optional(number) : std::nullopt;
}

/// The automatic checkpoints, oldest first.
std::vector<std::pair<int64_t, fs::path>> automatic_checkpoints(const fs::path& folder) {
  std::vector<std::pair<int64_t, fs::path>> found;
  if (!fs::is_directory(folder)) return found;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto number = checkpoint_number(entry.path()); number && entry.is_directory())
      found.emplace_back(*number, entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

/// Removes the oldest checkpoints above the limit.
void prune(const fs::path& all, int64_t limit) {
  const auto present = automatic_checkpoints(all);
  for (size_t i = 0; i + static_cast<size_t>(limit) < present.size(); ++i) fs::remove_all(present[i].second);
}

void make_folder(const fs::path& folder) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (!fs::is_directory(folder))
    throw CheckpointError("save_state: the folder '" + folder.string() + "' can't be created: " + failure.message());
}

}  // namespace

void Accelerator::save(const c10::IValue& object, const fs::path& file) const {
  if (is_main_process() || (project_configuration().save_on_each_node && is_local_main_process()))
    checkpointing::save_object(object, file);
}

void Accelerator::save(const std::map<std::string, at::Tensor>& tensors, const fs::path& file,
                       bool safe_serialization) const {
  if (!(is_main_process() || (project_configuration().save_on_each_node && is_local_main_process()))) return;
  if (safe_serialization) save_safetensors(file, tensors, {{"format", "pt"}});
  else checkpointing::save_object(checkpointing::to_dict(tensors), file);
}

void Accelerator::register_custom(checkpointing::CustomObject object) { impl_->customs.push_back(std::move(object)); }

namespace {

template <class Hook> Scope add_hook(std::list<Hook>& hooks, Hook hook) {
  const auto position = hooks.insert(hooks.end(), std::move(hook));
  return Scope([&hooks, position] { hooks.erase(position); });
}

}  // namespace

Scope Accelerator::register_save_state_pre_hook(StateHook hook) { return add_hook(impl_->save_hooks, std::move(hook)); }
Scope Accelerator::register_load_state_pre_hook(StateHook hook) { return add_hook(impl_->load_hooks, std::move(hook)); }

fs::path Accelerator::save_state(const fs::path& output_dir, bool safe_serialization) {
  auto& project = impl_->options.project_config;
  fs::path folder = output_dir;
  const bool writes = is_main_process() || (project.save_on_each_node && is_local_main_process());
  const fs::path all = project.project_dir / "checkpoints";
  if (project.automatic_checkpoint_naming) folder = all / ("checkpoint_" + std::to_string(project.iteration));
  else if (folder.empty())
    throw ConfigError(
        "save_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
        "off");
  // Who writes makes the folder; the others hear of a failure instead of waiting for what will not come.
  together([&] {
    if (!writes) return;
    if (project.automatic_checkpoint_naming && fs::exists(folder))
      throw CheckpointError(
          "save_state: '" + folder.string() +
          "' exists already; set ProjectConfiguration::iteration to the next free number to go on after it");
    make_folder(folder);
  });
  make_folder(folder);  // on a machine with a disk of its own
  for (const auto& hook : impl_->save_hooks) hook(folder);
  // Whether models are sharded or not: under FSDP files have the reference's names for it.
  const auto form = impl_->fsdp          ? form_of(*impl_->fsdp->state_dict_type)
                    : safe_serialization ? StateForm::safetensors
                                         : StateForm::archive;
  if (impl_->fsdp) {
    for (size_t i = 0; i < impl_->models.size(); ++i)
      save_sharded_model(*impl_->models[i], in_form(model_files(folder, i), form));
    for (size_t i = 0; i < impl_->optimizers.size(); ++i)
      save_sharded_optimizer(impl_->optimizers[i], impl_->models, in_form(optimizer_files(folder, i), form));
  }
  together([&] {
    if (writes) {
      if (!impl_->fsdp) {
        for (size_t i = 0; i < impl_->models.size(); ++i) {
          const auto tensors = checkpointing::state_dict(impl_->models[i]->model);
          const auto file = in_form(model_files(folder, i), form).path;
          if (safe_serialization) save_safetensors(file, tensors, {{"format", "pt"}});
          else checkpointing::save_object(checkpointing::to_dict(tensors), file);
        }
        for (size_t i = 0; i < impl_->optimizers.size(); ++i)
          checkpointing::save_object(impl_->optimizers[i].state_dict(), folder / numbered("optimizer", i, ".bin"));
      }
      for (size_t i = 0; i < impl_->schedulers.size(); ++i)
        checkpointing::save_object(impl_->schedulers[i].state_dict(), folder / numbered("scheduler", i, ".bin"));
      if (impl_->options.dataloader_config.use_stateful_dataloader)
        for (size_t i = 0; i < impl_->loaders.size(); ++i)
          checkpointing::save_object(impl_->loaders[i].state_dict(), folder / numbered("dl_state_dict", i, ".bin"));
      if (impl_->scaler) checkpointing::save_object(impl_->scaler->state_dict(), folder / "scaler.pt");
      for (size_t i = 0; i < impl_->customs.size(); ++i)
        checkpointing::save_object(impl_->customs[i].state_dict(),
                                   folder / ("custom_checkpoint_" + std::to_string(i) + ".pkl"));
    }
    checkpointing::save_object(checkpointing::random_states(impl_->step, device()),
                               folder / ("random_states_" + std::to_string(process_index()) + ".pkl"));
    if (writes) {
      for (size_t i = 0; i < impl_->models.size(); ++i) remove_other_forms(model_files(folder, i), form);
      for (size_t i = 0; i < impl_->optimizers.size(); ++i) remove_other_forms(optimizer_files(folder, i), form);
    }
  });
  ++project.iteration;
  wait_for_everyone();  // nobody goes on, or reads, before it is complete
  // The reference prunes first; a crash while writing then costs an old checkpoint as well as the new one.
  if (writes && project.automatic_checkpoint_naming && project.total_limit) prune(all, *project.total_limit);
  return folder;
}

void Accelerator::load_state(const fs::path& input_dir) {
  auto& project = impl_->options.project_config;
  fs::path folder = input_dir;
  if (folder.empty()) {
    if (!project.automatic_checkpoint_naming)
      throw ConfigError(
          "load_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
          "off");
    const auto present = automatic_checkpoints(project.project_dir / "checkpoints");
    if (present.empty())
      throw CheckpointError("load_state: found no checkpoint_<n> in '" +
                            (project.project_dir / "checkpoints").string() +
                            "', expected at least one; was save_state() called with this project_dir?");
    folder = present.back().second;
  }
  if (!fs::is_directory(folder))
    throw CheckpointError("load_state: '" + folder.string() + "' is not a folder; give the one that save_state wrote");
  for (const auto& hook : impl_->load_hooks) hook(folder);

  // Read everything before anything changes, on any rank.
  std::vector<StagedModel> models;
  std::vector<c10::IValue> optimizers, schedulers, loaders, customs;
  std::optional<c10::IValue> scaler, random;
  const auto read = [&](std::vector<c10::IValue>& objects, size_t count, const std::string& stem,
                        const std::string& extension) {
    for (size_t i = 0; i < count; ++i)
      objects.push_back(checkpointing::load_object(folder / numbered(stem, i, extension)));
  };
  const auto preferred = impl_->fsdp ? form_of(*impl_->fsdp->state_dict_type) : StateForm::safetensors;
  together([&] {
    for (size_t i = 0; i < impl_->models.size(); ++i)
      models.emplace_back(*impl_->models[i],
                          find_state(model_files(folder, i), preferred, "prepared model " + std::to_string(i)));
    for (size_t i = 0; i < impl_->optimizers.size(); ++i)
      optimizers.push_back(
          read_optimizer(impl_->optimizers[i], impl_->models,
                         find_state(optimizer_files(folder, i), preferred, "prepared optimizer " + std::to_string(i))));
    read(schedulers, impl_->schedulers.size(), "scheduler", ".bin");
    read(loaders, impl_->options.dataloader_config.use_stateful_dataloader ? impl_->loaders.size() : 0, "dl_state_dict",
         ".bin");
    for (size_t i = 0; i < impl_->customs.size(); ++i)
      customs.push_back(checkpointing::load_object(folder / ("custom_checkpoint_" + std::to_string(i) + ".pkl")));
    if (impl_->scaler) scaler = checkpointing::load_object(folder / "scaler.pt");
    try {
      random = checkpointing::load_object(folder / ("random_states_" + std::to_string(process_index()) + ".pkl"));
    } catch (const CheckpointError& error) {
      // Absent when the checkpoint comes from fewer processes; Python's own holds numpy's generator, which we can't
      // read.
      TORCH_WARN("load_state: the random generators keep their present state: ", error.what());
    }
  });

  // Whatever refuses its part, on any rank: those that took theirs get back what they had. Models come last: they have
  // been checked, so that no copy of them is needed.
  std::vector<std::function<void()>> undo;
  const auto load = [&](auto& object, const c10::IValue& state) {
    undo.push_back([&object, before = object.state_dict()] { object.load_state_dict(before); });
    object.load_state_dict(state);
  };
  try {
    together([&] {
      for (size_t i = 0; i < optimizers.size(); ++i) load(impl_->optimizers[i], optimizers[i]);
      for (size_t i = 0; i < schedulers.size(); ++i) load(impl_->schedulers[i], schedulers[i]);
      for (size_t i = 0; i < loaders.size(); ++i) load(impl_->loaders[i], loaders[i]);
      if (scaler) load(*impl_->scaler, *scaler);
      for (size_t i = 0; i < customs.size(); ++i) load(impl_->customs[i], customs[i]);
      if (random) impl_->step = checkpointing::load_random_states(*random, device());
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  for (const auto& model : models) model.apply();
  if (project.automatic_checkpoint_naming)
    if (const auto number = checkpoint_number(folder)) project.iteration = *number + 1;
  wait_for_everyone();
}

}  // namespace accelerate
