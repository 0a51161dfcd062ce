#include <algorithm>
#include <exception>
#include <set>
#include <typeindex>

#include "accelerate/parallel/communication_hook.hpp"
#include "accelerate/profiler.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/memory.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "accelerator/model_summary.hpp"
#include "accelerator/recording.hpp"
#include "adapters/lora_layer.hpp"
#include "comm/clock_offset.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "model/flops.hpp"
#include "observe/step_report.hpp"
#include "parallel/gradient_hook.hpp"
#include "state/deepspeed_plugins.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Files for DeepSpeed may say auto there, which leaves the number to the program.
std::optional<int64_t> steps_of_the_environment() {
  constexpr const char* kName = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
  return environment::text(kName) == "auto" ? std::nullopt : environment::integer({kName});
}

GradientAccumulationPlugin accumulation_of(const AcceleratorOptions& options) {
  if (options.gradient_accumulation_plugin) {
    if (options.gradient_accumulation_steps != 1)
      raise<ConfigError>(
          "Accelerator: found gradient_accumulation_steps = {} beside a gradient_accumulation_plugin, expected one of "
          "them; set the plugin's num_steps",
          options.gradient_accumulation_steps);
    return *options.gradient_accumulation_plugin;
  }
  return {.num_steps = steps_of_the_environment().value_or(options.gradient_accumulation_steps)};
}

/// Refuses handlers that would be without effect.
void refuse_handlers(const parallel::RunRules& rules, const std::vector<KwargsHandler>& handlers) {
  const auto refuse = [&](const char* handler) {
    raise<ConfigError>(
        "Accelerator: found {} among kwargs_handlers, but {} says how numbers are computed with; leave it out", handler,
        rules.decided_by);
  };
  for (const auto& handler : handlers) {
    if (handler.get_if<GradScalerKwargs>()) refuse("GradScalerKwargs");
    if (handler.get_if<AutocastKwargs>()) refuse("AutocastKwargs");
  }
}

/// The settings of their engine that all Accelerators of a process share.
struct SharedEngine {
  Given<FullyShardedDataParallelPlugin> fsdp_plugin;
  Given<DeepSpeedPlugin> deepspeed_plugin;
  std::vector<std::pair<std::string, Given<DeepSpeedPlugin>>> deepspeed_plugins;
  Given<ParallelismConfig> parallelism_config;
  std::vector<std::any> layer_plugins;
};

/// Settings that this Accelerator was not given are the first one's.
void take_shared(AcceleratorOptions& options) {
  const auto first = std::static_pointer_cast<SharedEngine>(detail::shared_engine());
  if (!first) return;
  if (!options.fsdp_plugin) options.fsdp_plugin = first->fsdp_plugin;
  if (!options.deepspeed_plugin && options.deepspeed_plugins.empty()) {
    options.deepspeed_plugin = first->deepspeed_plugin;
    options.deepspeed_plugins = first->deepspeed_plugins;
  }
  if (!options.parallelism_config) options.parallelism_config = first->parallelism_config;
  if (options.layer_plugins.empty()) options.layer_plugins = first->layer_plugins;
}

void share(const AcceleratorOptions& options) {
  auto& first = detail::shared_engine();
  if (!first)
    first = std::make_shared<SharedEngine>(SharedEngine{options.fsdp_plugin, options.deepspeed_plugin,
                                                        options.deepspeed_plugins, options.parallelism_config,
                                                        options.layer_plugins});
}

/// The precision that an Accelerator will run with, before it joins a group. @throws ConfigError for other names.
PrecisionType precision_to_be(const AcceleratorOptions& options) {
  if (AcceleratorState::initialized()) return AcceleratorState().mixed_precision();
  if (options.mixed_precision) return precision_from_string(*options.mixed_precision);
  return precision_from_string(environment::text("ACCELERATE_MIXED_PRECISION").value_or("no"));
}

/// MS-AMP's part beside the products. @throws ConfigError where the program says itself how gradients travel.
DistributedDataParallelKwargs with_fp8_gradients(DistributedDataParallelKwargs ddp) {
  const DistributedDataParallelKwargs defaults;
  if (ddp.communication_hook || ddp.comm_hook != defaults.comm_hook || ddp.comm_wrapper != defaults.comm_wrapper)
    throw ConfigError(
        "Accelerator: found a hook for gradients in DistributedDataParallelKwargs (comm_hook, comm_wrapper or "
        "communication_hook) beside MS-AMP's recipe, whose gradients travel as fp8, expected one of them; leave the "
        "hook out, or use AORecipeKwargs or TERecipeKwargs");
  ddp.communication_hook = parallel::fp8_gradients();
  return ddp;
}

}  // namespace

GivenFP8 given_fp8(const std::vector<KwargsHandler>& handlers) {
  GivenFP8 given;
  const auto take = [&](const auto* recipe) {
    if (!recipe) return;
    if (given.index() > 0)
      raise<ConfigError>(
          "Accelerator: kwargs_handlers holds {} and {}, expected one recipe of fp8: a product is computed by one of "
          "them; leave the other out",
          name_of(given), name_of(*recipe));
    given = *recipe;
  };
  for (const auto& handler : handlers) {
    take(handler.get_if<AORecipeKwargs>());
    take(handler.get_if<TERecipeKwargs>());
    take(handler.get_if<MSAMPRecipeKwargs>());
    take(handler.get_if<FP8RecipeKwargs>());
  }
  return given;
}

at::DeviceType computing_device(const at::Device& device) { return device.is_meta() ? at::kCPU : device.type(); }

Accelerator::Impl::Impl(AcceleratorOptions given)
    : asked(given), options(std::move(given)), exceptions_at_start(std::uncaught_exceptions()) {
  std::set<std::type_index> seen;
  for (const auto& handler : options.kwargs_handlers) {
    if (!seen.insert(handler.kind()).second)
      raise<ConfigError>(
          "Accelerator: kwargs_handlers holds two handlers of one kind (one more comes after {} others), expected at "
          "most one of each",
          seen.size());
    if (const auto* kwargs = handler.get_if<DistributedDataParallelKwargs>()) ddp = *kwargs;
    if (const auto* kwargs = handler.get_if<GradScalerKwargs>()) scaling = *kwargs;
    if (const auto* kwargs = handler.get_if<InitProcessGroupKwargs>()) process_group = *kwargs;
    if (const auto* kwargs = handler.get_if<AutocastKwargs>()) autocast = *kwargs;
    if (const auto* kwargs = handler.get_if<ProfileKwargs>()) profiling = *kwargs;
  }
  if (options.split_batches) options.dataloader_config.split_batches = *options.split_batches;
  loader_options = {
      .config = options.dataloader_config, .put_on_device = options.device_placement, .rng_types = options.rng_types};
  auto& project = options.project_config;
  if (project.project_dir.empty()) project.project_dir = options.project_dir;
  if (project.logging_dir.empty()) project.logging_dir = project.project_dir;
  if (project.save_on_signal && !project.automatic_checkpoint_naming)
    throw ConfigError(
        "Accelerator: ProjectConfiguration::save_on_signal is set without automatic_checkpoint_naming, expected both: "
        "nobody is there to name the folder, and load_state() without one is how the next run finds it");
  trackers.choose(options.log_with, project.logging_dir);
  take_shared(options);
  // Before this process joins a group, which the others would wait in.
  options.dynamo_plugin = without_compiler(options);
  parallelism = parallel::requested_parallelism(options.parallelism_config.to_optional());
  fp8 =
      choose_fp8(given_fp8(options.kwargs_handlers), precision_to_be(options),
                 options.fsdp_plugin || parallel::fsdp_requested() || (parallelism && parallelism->dp_shard_enabled()));
  if (fp8.backend == FP8BackendType::MSAMP) ddp = with_fp8_gradients(std::move(ddp));
  engine = parallel::choose_engine({.fsdp = options.fsdp_plugin.to_optional(),
                                    .deepspeed = options.deepspeed_plugin,
                                    .deepspeed_plugins = options.deepspeed_plugins,
                                    .megatron_lm = options.megatron_lm_plugin,
                                    .parallelism = parallelism,
                                    .ddp = ddp,
                                    .plugins = options.layer_plugins});
  auto plugin = accumulation_of(options);
  rules = engine->rules(precision_to_be(options));
  if (rules) {
    refuse_handlers(*rules, options.kwargs_handlers);
    options.mixed_precision = to_string(rules->mixed_precision);
    if (rules->gradient_accumulation_steps) plugin.num_steps = *rules->gradient_accumulation_steps;
    if (!process_group.timeout && !PartialState::initialized()) process_group.timeout = rules->process_group_timeout;
  }
  state.emplace(AcceleratorStateOptions{.mixed_precision = options.mixed_precision,
                                        .partial = {.cpu = options.cpu, .process_group = process_group}});
  check_precision(state->mixed_precision(), state->device());
  gradients.emplace(plugin);
  gradients->set_sync_gradients(true);  // a loop before may have been left in the middle of a group
  if (parallelism) parallelism = parallel::validate(*parallelism, engine->job(state->num_processes()));
  if (const auto& all = comm::mesh().all(); all && !detail::shared_engine())
    comm::set_mesh({all, engine->axes(parallelism, *all)});
  if (parallelism && state->use_distributed()) {
    loader_options.num_processes = parallelism->data_loader_num_processes(state->num_processes());
    loader_options.process_index = parallelism->data_loader_process_index(state->process_index());
  }
  engine->set_precision(state->mixed_precision());
  if (rules) run.scaler = rules->scaler;
  else if (state->mixed_precision() == PrecisionType::FP16) run.scaler = std::make_shared<optim::GradScaler>(scaling);
  share(options);
  prepare_profile(std::any_of(options.kwargs_handlers.begin(), options.kwargs_handlers.end(),
                              [](const auto& handler) { return handler.template get_if<ProfileKwargs>() != nullptr; }));
}

void Accelerator::Impl::prepare_profile(bool asked) {
  if (const auto& group = comm::world_group(); group && (asked || profiler::RunProfile::asked())) {
    const auto measured = comm::clock_offset(*group);
    clock = {.offset_ns = measured.offset_ns, .error_ns = measured.error_ns};
  }
  run_profile = profiler::RunProfile::begin(process());
}

ProfileProcess Accelerator::Impl::process() const {
  return {.rank = state->process_index(),
          .num_processes = state->num_processes(),
          .backend = state->backend(),
          .clock = clock};
}

void Accelerator::Impl::observe_signals(Accelerator& accelerator) {
  const auto& group = comm::world_group();
  if (!options.project_config.save_on_signal || (group && group->dry())) return;
  constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(30);
  on_signal = std::make_unique<SaveOnSignal>(accelerator, run, process_group.timeout.value_or(kPatience));
}

Accelerator::Accelerator(AcceleratorOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  impl_->live.belongs_to(*this);
  impl_->observe_signals(*this);
  expect_receipts(*this);
}

Accelerator::~Accelerator() {
  if (std::uncaught_exceptions() <= impl_->exceptions_at_start) {
    give_receipts(*this);
    return;
  }
  forget_receipts(*this);  // those of half a training
  if (!leave_announcement_to_record()) impl_->state->abort("an exception ended its training");
}

const AcceleratorState& Accelerator::state() const { return *impl_->state; }
const GradientState& Accelerator::gradient_state() const { return *impl_->gradients; }
const std::optional<ParallelismConfig>& Accelerator::parallelism_config() const { return impl_->parallelism; }
int64_t Accelerator::Impl::coordinate(const char* dim_name) const {
  if (!parallelism)
    raise<ConfigError>(
        "Accelerator: asked for this rank's place on the axis {}, but there are no axes, expected "
        "AcceleratorOptions::parallelism_config",
        dim_name);
  return parallelism->mesh().coordinate(state->process_index(), dim_name);
}
int64_t Accelerator::data_parallel_rank() const { return impl_->coordinate("dp_replicate"); }
int64_t Accelerator::data_parallel_shard_rank() const { return impl_->coordinate("dp_shard"); }
int64_t Accelerator::tensor_parallel_rank() const { return impl_->coordinate("tp"); }
const AcceleratorOptions& Accelerator::options() const { return impl_->options; }
const ProjectConfiguration& Accelerator::project_configuration() const { return impl_->options.project_config; }
std::filesystem::path Accelerator::logging_dir() const { return project_configuration().logging_dir; }
std::shared_ptr<optim::GradScaler> Accelerator::scaler() const { return impl_->run.scaler; }

FP8BackendType Accelerator::fp8_backend() const { return impl_->fp8.backend; }

std::shared_ptr<FP8Training> Accelerator::Impl::make_fp8(const ModelRef& model) {
  if (fp8.backend == FP8BackendType::NO) return nullptr;
  auto training = std::make_shared<FP8Training>(fp8.recipe, model);
  const auto* plugin = engine->sharding();
  if (plugin && plugin->fsdp_version == 2 && fp8.backend == FP8BackendType::AO &&
      fp8.recipe.enable_fsdp_float8_all_gather)
    engine->gather_in_fp8(training->weights());
  return training;
}

void Accelerator::Impl::set_autocast(detail::PreparedModel& core) const {
  core.autocast = autocast;
  core.autocast_dtype = autocast.enabled && autocasts() ? autocast_dtype(state->mixed_precision()) : std::nullopt;
  // Casts of parameters that come and go are made anew each time: kept ones would keep evicted bytes alive.
  if (core.engine && !core.engine->keeps_parameters()) core.autocast.cache_enabled = false;
}

std::shared_ptr<detail::PreparedModel> Accelerator::prepare_core(const ModelRef& model, bool evaluation_mode,
                                                                 std::optional<bool> device_placement) {
  // The same module again: the same preparation, not a second layer.
  if (const auto known = impl_->run.find(model); known && (known->engine || evaluation_mode || !use_distributed()))
    return known;
  // Another Accelerator's: the same engine, with this one's autocast.
  for (const auto* run : live_runs())
    if (const auto known = run->find(model); known && known->engine) {
      auto core = std::make_shared<detail::PreparedModel>(*known);
      impl_->set_autocast(*core);
      impl_->run.models.push_back(core);
      return core;
    }
  const auto& chosen = *impl_->engine;
  if (chosen.places_models() && device_placement && !*device_placement)
    raise<ConfigError>(
        "prepare: device_placement is false for a model that is sharded, expected true because {} says where its "
        "shards lie; leave the value out, or see the plugin's cpu_offload",
        to_string(distributed_type()));
  const bool placed = device_placement.value_or(impl_->options.device_placement);
  const auto fp8 = impl_->make_fp8(model);
  if (!chosen.places_models()) {
    materialize(model, {.device = placed ? std::optional(device()) : std::nullopt});
    if (placed) model.to(device());
  }
  auto core = std::make_shared<detail::PreparedModel>(
      detail::PreparedModel{.model = model, .device_type = computing_device(device()), .autocast = {}});
  core->engine = chosen.make(model, device(), evaluation_mode);
  core->deepspeed = chosen.deepspeed_files();
  if (fp8 && !device().is_meta()) core->fp8 = fp8;
  // Each of these ranks has activations for this weight.
  const auto group = comm::mesh().along(comm::kTokens | comm::Axes{comm::Axis::tp});
  if (core->fp8 && core->engine && group)
    core->fp8->set_amax_reduction([group](at::Tensor& bits) { group->all_reduce_(bits, Reduction::max); });
  detail::watch_all_again();  // weights may lie elsewhere now
  if (core->engine) {
    core->input_dtype = core->engine->input_dtype();
    core->output_dtype = core->engine->output_dtype();
  }
  impl_->set_autocast(*core);
  // One that was prepared for evaluation before, and is to be trained now, is still one model of the run.
  const auto same = std::find_if(impl_->run.models.begin(), impl_->run.models.end(),
                                 [&](const auto& known) { return known->model.identity() == model.identity(); });
  if (same != impl_->run.models.end()) *same = core;
  else impl_->run.models.push_back(core);
  if (is_monitored()) {
    const auto flops = flops_per_token(model);
    count_flops_per_token(flops.forward, evaluation_mode ? 0 : flops.backward);
  }
  return core;
}

void Accelerator::give_pieces_to_optimizers() {
  refuse_training_around_codes(impl_->run);
  run_state::give_pieces_to_optimizers(impl_->run);
}

DistributedType Accelerator::distributed_type() const {
  return impl_->engine->distributed_type().value_or(state().distributed_type());
}

namespace {

/// A schedule follows the optimizer that it drives; one that drives none of ours follows all, as in the reference.
std::vector<AcceleratedOptimizer> followed_by(const optim::Scheduler& scheduler,
                                              const std::vector<AcceleratedOptimizer>& optimizers) {
  std::vector<AcceleratedOptimizer> followed;
  for (const auto& optimizer : optimizers)
    if (&optimizer.optimizer() == &scheduler.optimizer()) followed.push_back(optimizer);
  return followed.empty() ? optimizers : followed;
}

}  // namespace

AcceleratedOptimizer Accelerator::register_optimizer(AcceleratedOptimizer optimizer) {
  impl_->engine->adopt(optimizer.optimizer());
  auto& optimizers = impl_->run.optimizers;
  // The same optimizer again: what it was prepared with last holds, and it is saved once.
  const auto same = std::find_if(optimizers.begin(), optimizers.end(),
                                 [&](const auto& known) { return &known.optimizer() == &optimizer.optimizer(); });
  if (same != optimizers.end()) *same = optimizer;
  else optimizers.push_back(optimizer);
  impl_->clip_before_steps(optimizer);
  impl_->record_steps(optimizer);
  impl_->observe();
  for (const auto& schedule : impl_->run.schedulers)
    schedule.follow(followed_by(schedule.scheduler(), optimizers));  // that were prepared before it
  return optimizer;
}

void Accelerator::Impl::observe() {
  observation.begin(engine->observed(), {.is_main_process = state->is_main_process(),
                                         .ranks = state->num_processes(),
                                         .device = state->device(),
                                         .samples_of_step = engine->samples_of_step()});
}

void Accelerator::Impl::record_steps(const AcceleratedOptimizer& optimizer) {
  if (!state->is_main_process() || monitors.is_open()) return;  // the first optimizer's steps are the run's
  monitors.open(engine->monitors());
  if (!monitors.is_open()) return;
  const auto record = [this, alive = std::weak_ptr(alive), &stepped = optimizer.optimizer(),
                       seen = std::optional<int64_t>()]() mutable {
    if (alive.expired()) return;
    for (const auto& one : run.optimizers) {
      if (&one.optimizer() != &stepped) continue;
      const auto counts = one.step_counts();  // without this step
      std::optional<double> scale;
      if (run.scaler && state->mixed_precision() == PrecisionType::FP16) scale = run.scaler->get_scale();
      const int64_t of_step = engine->samples_of_step(), before = (counts.taken + counts.skipped) * of_step;
      // Steps that the program decides about have as many micro-steps as they had.
      seen = counts_micro_steps() ? before + of_step
                                  : seen.value_or(before) + of_step / gradients->num_steps() * monitors.micro_steps();
      monitors.after_step(
          {.samples = *seen, .lr = stepped.param_groups().front().options().get_lr(), .loss_scale = scale});
    }
  };
  optimizer.set_step_hooks(&monitors, {.before = nullptr, .after = record});
}

AcceleratedScheduler Accelerator::prepare_scheduler(const optim::Scheduler& scheduler) {
  AcceleratedScheduler prepared(scheduler, followed_by(scheduler, impl_->run.optimizers),
                                impl_->options.step_scheduler_with_optimizer, split_batches());
  impl_->run.schedulers.push_back(prepared);
  return prepared;
}

void Accelerator::register_loader(std::shared_ptr<data::PreparedStatus> loader) {
  impl_->run.loaders.push_back(std::move(loader));
}

std::shared_ptr<const data::PrepareDataLoaderOptions> Accelerator::loader_options(
    std::optional<bool> device_placement) const {
  auto options = std::make_shared<data::PrepareDataLoaderOptions>(impl_->loader_options);
  if (device_placement) options->put_on_device = *device_placement;
  return options;
}

std::vector<std::optional<bool>> Accelerator::checked_placement(const DevicePlacement& placement, size_t num_objects) {
  const auto& given = placement.objects;
  if (given.size() != num_objects)
    raise<ConfigError>("prepare: device_placement has {} values for {} objects, expected one for each", given.size(),
                       num_objects);
  return {given.begin(), given.end()};
}

void Accelerator::set_even_batches(bool value) {
  impl_->options.dataloader_config.even_batches = impl_->loader_options.config.even_batches = value;
}

void Accelerator::set_trigger() { impl_->trigger = true; }

bool Accelerator::check_trigger() {
  bool set = false;
  for (const bool one : gather_object(std::vector<bool>{impl_->trigger})) set |= one;
  impl_->trigger = false;
  return set;
}

void Accelerator::free_memory() {
  impl_->run.clear();
  impl_->made.clear();
  gradient_state().set_sync_gradients(true);  // a loop may have been left in the middle of a group
  forget_flops_per_token();
  clear_device_cache();
}

void Accelerator::init_trackers(const std::string& project_name, const TrackerValues& config,
                                const TrackerKwargs& init_kwargs) {
  impl_->trackers.open({project_name, config, init_kwargs, process_index()});
}

void Accelerator::log(TrackerValues values, std::optional<int64_t> step, const TrackerKwargs& log_kwargs) {
  if (is_monitored())
    for (const auto& [name, value] : values)
      if (const auto number = value.number()) report_logged(name, *number);
  impl_->trackers.log({"log", log_kwargs}, [&] { return record_of_values(std::move(values), step); });
}

void Accelerator::log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                             const TrackerKwargs& log_kwargs) {
  impl_->trackers.log(
      {"log_images", log_kwargs}, [&] { return record_of_images(images, step); }, TrackerData::images);
}

void Accelerator::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                            const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                            const TrackerKwargs& log_kwargs) {
  impl_->trackers.log(
      {"log_table", log_kwargs}, [&] { return record_of_table(table_name, columns, rows, step); }, TrackerData::tables);
}

void Accelerator::log_histogram(const std::string& histogram_name, const at::Tensor& values,
                                std::optional<int64_t> step, const TrackerKwargs& log_kwargs) {
  impl_->trackers.log(
      {"log_histogram", log_kwargs}, [&] { return record_of_histogram(histogram_name, values, step); },
      TrackerData::histograms);
}

std::shared_ptr<GeneralTracker> Accelerator::get_tracker(const std::string& name, bool unwrap) {
  return impl_->trackers.get(name, unwrap);
}

ModelSummary Accelerator::summary(const ModelRef& model) const {
  const auto known = impl_->run.find(model);
  return summarize(model, known ? known->engine.get() : nullptr);
}

void Accelerator::print_summary(const ModelRef& model) const { print_summary(model, {}); }

void Accelerator::print_summary(const ModelRef& model, const SummaryOptions& options) const {
  const std::string text = summary(model).text(options);
  if (is_main_process()) state().print(text);
}

Profile Accelerator::profile() const { return profile(std::nullopt); }

Profile Accelerator::profile(const std::optional<ProfileKwargs>& kwargs) const {
  if (impl_->run_profile) impl_->run_profile->give_way();
  auto process = impl_->process();
  process.storages = [impl = impl_.get(), alive = std::weak_ptr(impl_->alive)] {
    return alive.expired() ? std::vector<ProfileStorage>() : impl->storages();
  };
  return Profile(kwargs ? *kwargs : impl_->profiling, std::move(process));
}

void Accelerator::end_training() {
  if (impl_->on_signal) impl_->on_signal->end();
  if (impl_->run_profile) impl_->run_profile->end();
  impl_->trackers.finish();
  impl_->monitors.finish();
  impl_->observation.end();
  wait_for_checkpoint();
  wait_for_everyone();
  give_receipts(*this);
}

}  // namespace accelerate
