#include "accelerate/formats/safetensors.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/models.hpp"
#include "run_state/whole_stream.hpp"
#include "utils/raise.hpp"

namespace accelerate {

namespace fs = std::filesystem;

void Accelerator::save(const c10::IValue& object, const fs::path& file) const {
  if (impl_->writes_for_all()) checkpointing::save_object(object, file);
}

void Accelerator::save(const std::map<std::string, at::Tensor>& tensors, const fs::path& file,
                       bool safe_serialization) const {
  if (!impl_->writes_for_all()) return;
  if (safe_serialization) save_safetensors(file, tensors, {{"format", "pt"}});
  else checkpointing::save_object(checkpointing::to_dict(tensors), file);
}

void Accelerator::register_custom(checkpointing::CustomObject object) {
  impl_->run.customs.push_back(std::move(object));
}

namespace {

template <class Hook> Scope add_hook(std::list<Hook>& hooks, Hook hook) {
  const auto position = hooks.insert(hooks.end(), std::move(hook));
  return Scope([&hooks, position] { hooks.erase(position); });
}

}  // namespace

Scope Accelerator::register_save_state_pre_hook(StateHook hook) { return add_hook(impl_->save_hooks, std::move(hook)); }
Scope Accelerator::register_load_state_pre_hook(StateHook hook) { return add_hook(impl_->load_hooks, std::move(hook)); }

namespace {

/// How models and optimizers are written: as the engine of this run wants it, models without pieces among them, so that
/// files have the reference's names for it; else as in plain training.
run_state::StateForm form_of_state(const parallel::ChosenEngine& engine, bool safe_serialization) {
  if (const auto type = engine.state_dict_type()) return run_state::form_of(*type);
  return safe_serialization ? run_state::StateForm::safetensors : run_state::StateForm::archive;
}

}  // namespace

fs::path Accelerator::save_state(const fs::path& output_dir, bool safe_serialization) {
  auto& project = impl_->options.project_config;
  const fs::path all = project.project_dir / "checkpoints";
  const bool writes = impl_->writes_for_all(), named = project.automatic_checkpoint_naming;
  if (!named && output_dir.empty())
    throw ConfigError(
        "save_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
        "off");
  const fs::path folder = named ? run_state::checkpoint_folder(all, project.iteration) : output_dir;
  // Who writes makes the folder; the others hear of a failure instead of waiting for what will not come.
  run_state::on_all_ranks_or_throw([&] {
    if (!writes) return;
    if (named && fs::exists(folder))
      raise<CheckpointError>(
          "save_state: '{}' exists already; set ProjectConfiguration::iteration to the next free number to go on after "
          "it",
          folder.string());
    run_state::make_folder(folder);
  });
  run_state::make_folder(folder);  // on a machine with a disk of its own
  for (const auto& hook : impl_->save_hooks) hook(folder);
  run_state::save(impl_->run, folder,
                  {.form = form_of_state(*impl_->engine, safe_serialization),
                   .writers = {.here = writes, .several = project.save_on_each_node},
                   .loaders = impl_->options.dataloader_config.use_stateful_dataloader,
                   .device = device()});
  ++project.iteration;
  wait_for_everyone();  // nobody goes on, or reads, before it is complete
  // The reference prunes first; a crash while writing then costs an old checkpoint as well as the new one.
  if (writes && named && project.total_limit) run_state::prune_checkpoints(all, *project.total_limit);
  return folder;
}

void Accelerator::load_state(const fs::path& input_dir) {
  auto& project = impl_->options.project_config;
  if (input_dir.empty() && !project.automatic_checkpoint_naming)
    throw ConfigError(
        "load_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
        "off");
  const fs::path folder =
      input_dir.empty() ? run_state::newest_checkpoint(project.project_dir / "checkpoints") : input_dir;
  if (!fs::is_directory(folder))
    raise<CheckpointError>("load_state: '{}' is not a folder; give the one that save_state wrote", folder.string());
  for (const auto& hook : impl_->load_hooks) hook(folder);
  run_state::load(impl_->run, folder,
                  {.preferred = form_of_state(*impl_->engine, /*safe_serialization=*/true),
                   .loaders = impl_->options.dataloader_config.use_stateful_dataloader,
                   .device = device()});
  if (project.automatic_checkpoint_naming)
    if (const auto number = run_state::checkpoint_number(folder)) project.iteration = *number + 1;
  wait_for_everyone();
}

namespace {

/// The prepared model, if ranks hold pieces of it.
std::shared_ptr<detail::PreparedModel> model_in_pieces(const run_state::RunState& run, const ModelRef& model) {
  auto known = run.find(model);
  return known && known->engine && known->engine->holds_pieces() ? known : nullptr;
}

}  // namespace

std::map<std::string, at::Tensor> Accelerator::state_dict_of(const ModelRef& model) const {
  const auto in_pieces = model_in_pieces(impl_->run, model);
  return in_pieces ? run_state::whole_state(*in_pieces) : checkpointing::state_dict(model);
}

void Accelerator::save_model_files(const ModelRef& model, const fs::path& folder, const std::string& max_shard_size,
                                   bool safe_serialization) const {
  const int64_t bytes = checkpointing::parse_size(max_shard_size);
  if (const auto in_pieces = model_in_pieces(impl_->run, model))
    run_state::save_weights(*in_pieces, folder, bytes, safe_serialization);
  else if (impl_->writes_for_all()) checkpointing::save_model(model, folder, bytes, safe_serialization);
}

}  // namespace accelerate
