#include <algorithm>
#include <chrono>
#include <utility>

#include "accelerate/accelerator/save_state.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "checkpoint/model_state.hpp"
#include "checkpoint/weight_files.hpp"
#include "comm/agreement.hpp"
#include "formats/input_file.hpp"
#include "residency/homes/encoded.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/counts.hpp"
#include "run_state/manifest.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/room.hpp"
#include "run_state/zero_files.hpp"
#include "snapshot/counts.hpp"
#include "snapshot/ledger.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {

namespace fs = std::filesystem;

void Accelerator::save(const c10::IValue& object, const fs::path& file) const {
  if (impl_->writes_for_all()) checkpointing::save_object(object, file);
}

void Accelerator::save(const std::map<std::string, at::Tensor>& tensors, const fs::path& file,
                       bool safe_serialization) const {
  if (!impl_->writes_for_all()) return;
  if (safe_serialization) save_safetensors(file, checkpointing::each_memory_once(tensors), {{"format", "pt"}});
  else checkpointing::save_object(checkpointing::to_dict(tensors), file);
}

void Accelerator::register_custom(checkpointing::CustomObject object) {
  impl_->run.customs.push_back(std::move(object));
}

namespace {

/// @param alive  of the Accelerator that has the list: a program's scope may outlive it
template <class Hook> Scope add_hook(std::list<Hook>& hooks, Hook hook, const std::weak_ptr<void>& alive) {
  const auto position = hooks.insert(hooks.end(), std::move(hook));
  return Scope([&hooks, position, alive] {
    if (!alive.expired()) hooks.erase(position);
  });
}

}  // namespace

Scope Accelerator::register_save_state_pre_hook(StateHook hook) {
  const auto call = [hook = std::move(hook)](const auto&, auto&, const fs::path& folder) { hook(folder); };
  return add_hook(impl_->save_hooks, Impl::OneSaveHook{call, /*wants_weights=*/false}, impl_->alive);
}
Scope Accelerator::register_save_state_pre_hook(SaveStateHook hook) {
  return add_hook(impl_->save_hooks, Impl::OneSaveHook{std::move(hook), /*wants_weights=*/true}, impl_->alive);
}
Scope Accelerator::register_load_state_pre_hook(StateHook hook) {
  return register_load_state_pre_hook(
      [hook = std::move(hook)](std::vector<ModelRef>&, const fs::path& folder) { hook(folder); });
}
Scope Accelerator::register_load_state_pre_hook(LoadStateHook hook) {
  return add_hook(impl_->load_hooks, std::move(hook), impl_->alive);
}

namespace {

/// How models and optimizers are written: as the engine of this run wants it, models without shards among them, so that
/// files have the reference's names for it; else as in plain training.
run_state::StateForm form_of_state(const parallel::ChosenEngine& engine, bool safe_serialization) {
  if (const auto type = engine.state_dict_type()) return run_state::form_of(*type);
  if (engine.deepspeed_files()) return run_state::StateForm::deepspeed;
  return safe_serialization ? run_state::StateForm::safetensors : run_state::StateForm::archive;
}

}  // namespace

namespace {

/// Whole weights of a model, each memory once, on the ranks that write. Collective.
std::map<std::string, at::Tensor> weights_for_hooks(const detail::PreparedModel& model, bool on_each_node) {
  const auto& engine = model.engine;
  if (!engine || !engine->holds_pieces()) return checkpointing::state_dict(model.model);
  auto weights = run_state::whole_state(model, {.offload_to_cpu = true, .rank0_only = !on_each_node});
  // Those in few bits stay in the files that the model was quantized from.
  for (const auto& [name, tensor] : model.model.parameters())
    if (residency::encoded_weight(tensor)) weights.erase(name);
  return checkpointing::each_memory_once(std::move(weights));
}

}  // namespace

std::optional<Accelerator::ModelWeights> Accelerator::Impl::weights_by_hooks(const fs::path& folder,
                                                                             run_state::StateForm form) {
  using run_state::StateForm;
  const bool asked =
      std::any_of(save_hooks.begin(), save_hooks.end(), [](const auto& hook) { return hook.wants_weights; });
  if (asked && (form == StateForm::sharded || form == StateForm::local || form == StateForm::deepspeed))
    raise<ConfigError>(
        "save_state: found a save hook that takes weights, and models that are saved in pieces, each rank its own "
        "({}), "
        "expected whole ones, because a hook could change or see no more than a rank's pieces. Set "
        "FullyShardedDataParallelPlugin::state_dict_type to full_state_dict, or register a hook that takes the folder "
        "alone: get_state_dict() gives it whole weights, all ranks calling it",
        form == StateForm::deepspeed ? "DeepSpeed's files"
        : form == StateForm::sharded ? "sharded_state_dict"
                                     : "local_state_dict");
  std::vector<ModelRef> models;
  ModelWeights weights;
  for (const auto& model : run.models) {
    models.push_back(model->model);
    if (asked) weights.push_back(weights_for_hooks(*model, options.project_config.save_on_each_node));
  }
  for (const auto& hook : save_hooks) hook.call(models, weights, folder);
  return asked ? std::optional(std::move(weights)) : std::nullopt;
}

run_state::RunLoadOptions Accelerator::Impl::load_options() const {
  std::vector<ModelRef> models;
  for (const auto& model : run.models) models.push_back(model->model);
  return {.models = std::move(models),
          .preferred = form_of_state(*engine, /*safe_serialization=*/true),
          .loaders = options.dataloader_config.use_stateful_dataloader,
          .num_steps = gradients->num_steps(),
          .average = gradients->average(),
          .device = state->device()};
}

run_state::Lacks Accelerator::Impl::lacks() const {
  return [this](const fs::path& folder) {
    auto options = load_options();
    if (!load_hooks.empty()) options.models.clear();  // which may load them in their own way
    auto lacking = run_state::lacks(run, folder, options);
    if (state->is_local_main_process())
      for (auto& name : run_state::lacks_by_manifest(folder))
        if (std::find(lacking.begin(), lacking.end(), name) == lacking.end()) lacking.push_back(std::move(name));
    return lacking;
  };
}

void Accelerator::Impl::prune_beside(const fs::path& newest) const {
  const auto& project = options.project_config;
  if (writes_for_all() && project.automatic_checkpoint_naming && project.total_limit)
    run_state::prune_checkpoints(project.project_dir / "checkpoints", *project.total_limit, newest, lacks());
}

fs::path Accelerator::save_state(const fs::path& output_dir, bool safe_serialization) {
  return save_state(output_dir, SaveStateOptions{.safe_serialization = safe_serialization});
}

void Accelerator::wait_for_checkpoint() {
  if (!impl_->behind) return;
  const auto behind = std::move(impl_->behind);
  behind->wait();
  impl_->prune_beside(impl_->behind_folder);
}

fs::path Accelerator::save_state(const fs::path& output_dir, const SaveStateOptions& options) {
  wait_for_checkpoint();
  if (snapshot::current())
    throw ConfigError(
        "save_state: found a checkpoint of another Accelerator that is being written behind training, expected one at "
        "a "
        "time; call that one's wait_for_checkpoint() before");
  const auto begun = std::chrono::steady_clock::now();
  auto& project = impl_->options.project_config;
  const fs::path all = project.project_dir / "checkpoints";
  const bool writes = impl_->writes_for_all(), named = project.automatic_checkpoint_naming;
  if (!named && output_dir.empty())
    throw ConfigError(
        "save_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
        "off");
  if (named && project.total_limit.value_or(1) < 1)
    raise<ConfigError>(
        "save_state: ProjectConfiguration::total_limit is {}, expected at least 1, the checkpoint that is being "
        "written",
        *project.total_limit);
  const fs::path folder = named ? run_state::checkpoint_folder(all, project.iteration) : output_dir;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (const int64_t last = run_state::last_checkpoint(all); writes && named && last >= project.iteration)
      raise<CheckpointError>(
          "save_state: '{}' exists already, from a run that this one did not continue, and would count as newer than "
          "number {}, which comes next; call load_state() before training to go on after it, set "
          "ProjectConfiguration::iteration to {}, or choose another project_dir",
          run_state::checkpoint_folder(all, last).string(), project.iteration, last + 1);
    if (writes) run_state::keep_file_of_another(folder);
  });
  auto written = std::make_unique<run_state::UnfinishedCheckpoint>(folder, is_local_main_process());
  run_state::UnfinishedCheckpoint& checkpoint = *written;
  const auto form = form_of_state(*impl_->engine, options.safe_serialization);
  run_state::SaveOptions saving{
      .form = form,
      .writers = {.here = writes, .several = project.save_on_each_node, .sharers = checkpoint.beside_first()},
      .first_on_its_disk = checkpoint.is_first_on_its_disk(),
      .loaders = impl_->options.dataloader_config.use_stateful_dataloader,
      .num_steps = impl_->gradients->num_steps(),
      .average = impl_->gradients->average(),
      .device = device()};
  const auto& hooks = impl_->save_hooks;
  run_state::need_room(impl_->run, checkpoint.where(), saving,
                       {.models_as_they_are = std::none_of(hooks.begin(), hooks.end(),
                                                           [](const auto& hook) { return hook.wants_weights; }),
                        .is_first_on_its_disk = checkpoint.is_first_on_its_disk(),
                        .one_disk = checkpoint.firsts().size() == 1});
  const auto weights = impl_->weights_by_hooks(checkpoint.where(), form);
  saving.weights = weights ? &*weights : nullptr;
  auto files = std::make_unique<run_state::CheckpointFiles>(checkpoint.where());
  const auto facts = run_state::manifest_facts(impl_->run, form, project.iteration);
  if (options.behind_training) {
    impl_->behind = std::make_unique<run_state::BehindTraining>(
        impl_->run, saving,
        run_state::BehindTraining::Parts{.folder = std::move(written), .files = std::move(files), .facts = facts});
    impl_->behind_folder = folder;
    counts::add(snapshot::SnapshotCount::mark_ns,
                (std::chrono::steady_clock::now() - begun) / std::chrono::nanoseconds(1));
  } else {
    run_state::save(impl_->run, checkpoint.where(), saving);
    files->gather();
    // Nobody goes on, or reads, before it is complete.
    checkpoint.publish([&] { files->write_manifest(facts); });
  }
  if (named) counts::add(run_state::CheckpointCount::automatic_checkpoints);
  if (writes && !is_main_process()) counts::add(run_state::CheckpointCount::copies_on_nodes);
  ++project.iteration;
  // The reference prunes first; a crash while writing then costs an old checkpoint as well as the new one.
  if (!impl_->behind) impl_->prune_beside(folder);
  return folder;
}

void Accelerator::load_state(const fs::path& input_dir, const LoadStateOptions& options) {
  wait_for_checkpoint();
  auto& project = impl_->options.project_config;
  if (input_dir.empty() && !project.automatic_checkpoint_naming)
    throw ConfigError(
        "load_state: no folder was given, expected one because ProjectConfiguration::automatic_checkpoint_naming is "
        "off");
  const fs::path all = project.project_dir / "checkpoints";
  const fs::path folder = input_dir.empty() ? run_state::newest_checkpoint(all, impl_->lacks()) : input_dir;
  run_state::finish_checkpoint(folder, is_local_main_process());
  if (!fs::is_directory(folder))
    raise<CheckpointError>("load_state: '{}' is not a folder; give the one that save_state wrote", folder.string());
  using run_state::CheckpointCount;
  const bool checksums =
      project.verify_checkpoints.value_or(environment::flag("ACCELERATE_VERIFY_CHECKPOINTS").value_or(true));
  const run_state::CheckedCheckpoint checked(folder, {.checksums = checksums, .first_here = is_local_main_process()});
  const int64_t read_before = formats::InputFile::bytes_read();
  auto how = impl_->load_options();
  how.strict = options.strict;
  for (const auto& hook : impl_->load_hooks) hook(how.models, folder);
  run_state::load(impl_->run, folder, how);
  counts::add(CheckpointCount::checkpoints_loaded);
  counts::add(CheckpointCount::parts_checked, checked.parts_checked());
  counts::add(CheckpointCount::records_checked, checked.records_checked());
  counts::add(CheckpointCount::bytes_read, formats::InputFile::bytes_read() - read_before);
  if (!checksums) counts::add(CheckpointCount::checkpoints_unchecked);
  if (const auto* manifest = checked.manifest())
    impl_->run.steps_before += manifest->step - run_state::steps_taken(impl_->run);
  if (project.automatic_checkpoint_naming)
    if (const auto number = run_state::checkpoint_number(folder))
      // Behind those that were passed over, too; a program that asks for an older one decides itself what comes next.
      project.iteration = (input_dir.empty() ? std::max(*number, run_state::last_checkpoint(all)) : *number) + 1;
  wait_for_everyone();
}

namespace {

/// The prepared model, if ranks hold shards of it.
std::shared_ptr<detail::PreparedModel> model_in_pieces(const run_state::RunState& run, const ModelRef& model) {
  auto known = run.find(model);
  return known && known->engine && known->engine->holds_pieces() ? known : nullptr;
}

/// Whole weights are wanted.
void allow_whole_state(const std::optional<parallel::RunRules>& rules, const char* operation) {
  if (rules && !rules->no_whole_state.empty()) raise<ConfigError>("{}: {}", operation, rules->no_whole_state);
}

}  // namespace

std::map<std::string, at::Tensor> Accelerator::get_state_dict(const ModelRef& model) const {
  const auto in_pieces = model_in_pieces(impl_->run, model);
  if (in_pieces) allow_whole_state(impl_->rules, "get_state_dict");
  if (in_pieces) counts::add(run_state::CheckpointCount::whole_states);
  return in_pieces ? run_state::whole_state(*in_pieces, impl_->engine->state_dict_config())
                   : checkpointing::every_name(model, checkpointing::value_of);
}

c10::IValue Accelerator::get_optimizer_state_dict(const AcceleratedOptimizer& optimizer) const {
  counts::add(run_state::CheckpointCount::whole_optimizer_states);
  return run_state::whole_state(optimizer, impl_->run.models, impl_->engine->optim_state_dict_config());
}

void Accelerator::save_model(const ModelRef& model, const fs::path& folder, const std::string& max_shard_size,
                             bool safe_serialization) const {
  const int64_t bytes = checkpointing::parse_size(max_shard_size);
  const auto parameters = model.parameters();
  const auto in_few_bits = std::count_if(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return residency::encoded_weight(parameter.second) != nullptr;
  });
  if (in_few_bits > 0 && is_main_process())
    logs::warn(
        "accelerate.accelerator",
        "save_model: {} weights that are kept in few bits are written decoded, as ordinary tensors, which take 2 "
        "to 8 times the room; save_quantized_model() writes their codes",
        in_few_bits);
  const auto in_pieces = model_in_pieces(impl_->run, model);
  if (in_pieces) allow_whole_state(impl_->rules, "save_model");
  if (in_pieces) run_state::save_weights(*in_pieces, folder, bytes, safe_serialization);
  else if (impl_->writes_for_all()) checkpointing::save_model(model, folder, bytes, safe_serialization);
}

void Accelerator::save_model(const ModelRef& model, const fs::path& folder,
                             const std::map<std::string, at::Tensor>& weights, const std::string& max_shard_size,
                             bool safe_serialization) const {
  const int64_t max_bytes = checkpointing::parse_size(max_shard_size);
  if (!impl_->writes_for_all()) return;
  const auto known = impl_->run.find(model);
  const auto sizes = known ? run_state::sizes_by_name(*known) : checkpointing::Sizes();
  checkpointing::save_model(model, weights, &sizes, folder, max_bytes, safe_serialization);
}

}  // namespace accelerate
