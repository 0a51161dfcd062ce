#include <exception>

#include "accelerate/parallel/ddp.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/memory.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "accelerator/parallelism.hpp"
#include "optim/optimizer_state.hpp"
#include "utils/environment.hpp"

namespace accelerate {
namespace {

GradientAccumulationPlugin accumulation_of(const AcceleratorOptions& options) {
  if (options.gradient_accumulation_plugin) {
    if (options.gradient_accumulation_steps != 1)
      throw ConfigError(
          "Accelerator: found gradient_accumulation_steps = " + std::to_string(options.gradient_accumulation_steps) +
          " beside a gradient_accumulation_plugin, expected one of them; set the plugin's num_steps");
    return *options.gradient_accumulation_plugin;
  }
  return {.num_steps = environment::integer({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS"})
                           .value_or(options.gradient_accumulation_steps)};
}

}  // namespace

at::DeviceType computing_device(const at::Device& device) { return device.is_meta() ? at::kCPU : device.type(); }

Accelerator::Impl::Impl(AcceleratorOptions given)
    : options(std::move(given)), exceptions_at_start(std::uncaught_exceptions()) {
  std::array<bool, std::variant_size_v<KwargsHandler>> seen{};
  for (const auto& handler : options.kwargs_handlers) {
    if (std::exchange(seen[handler.index()], true))
      throw ConfigError("Accelerator: kwargs_handlers holds two handlers of one kind (number " +
                        std::to_string(handler.index()) + " of the variant), expected at most one of each");
    std::visit(
        [this](const auto& kwargs) {
          using T = std::decay_t<decltype(kwargs)>;
          if constexpr (std::is_same_v<T, DistributedDataParallelKwargs>) ddp = kwargs;
          else if constexpr (std::is_same_v<T, GradScalerKwargs>) scaling = kwargs;
          else if constexpr (std::is_same_v<T, InitProcessGroupKwargs>) process_group = kwargs;
          else if constexpr (std::is_same_v<T, AutocastKwargs>) autocast = kwargs;
          else
            throw ConfigError(
                "Accelerator: kwargs_handlers holds ProfileKwargs, but this version has no profiler of its own; leave "
                "it out, and trace with LibTorch's torch::autograd::profiler");
        },
        handler);
  }
  for (const auto& name : options.log_with)
    if (!is_tracker(name))
      throw ConfigError("Accelerator: log_with holds '" + name +
                        "', expected tensorboard, the tracker that this version has");
  if (options.split_batches) options.dataloader_config.split_batches = *options.split_batches;
  auto& project = options.project_config;
  if (project.project_dir.empty()) project.project_dir = options.project_dir;
  if (project.logging_dir.empty()) project.logging_dir = project.project_dir;
  if (!options.log_with.empty() && project.logging_dir.empty())
    throw ConfigError(
        "Accelerator: log_with is set without a folder to write to, expected project_dir (or "
        "project_config.logging_dir)");
  // Before this process joins a group, which the others would wait in.
  refuse_missing_engines(options);
  parallelism = requested_parallelism(options);
  const auto plugin = accumulation_of(options);
  state.emplace(AcceleratorStateOptions{.mixed_precision = options.mixed_precision,
                                        .partial = {.cpu = options.cpu, .process_group = process_group}});
  check_precision(state->mixed_precision(), state->device());
  gradients.emplace(plugin);
  fsdp = requested_sharding(options, parallelism);
  if (parallelism)
    parallelism = parallel::validate(*parallelism, {.num_processes = state->num_processes(),
                                                    .is_fsdp2 = fsdp && fsdp->fsdp_version == 2,
                                                    .multi_device = state->use_distributed() && !fsdp});
  if (fsdp) {
    if (!fsdp->mixed_precision_policy && state->mixed_precision() != PrecisionType::NO)
      fsdp->mixed_precision_policy =
          parallel::mixed_precision_policy(to_string(state->mixed_precision()), *fsdp->fsdp_version);
  }
  if (state->mixed_precision() == PrecisionType::FP16) scaler = std::make_shared<optim::GradScaler>(scaling);
}

Accelerator::Accelerator(AcceleratorOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Accelerator::~Accelerator() {
  if (std::uncaught_exceptions() > impl_->exceptions_at_start) impl_->state->abort("an exception ended its training");
}

const AcceleratorState& Accelerator::state() const { return *impl_->state; }
const GradientState& Accelerator::gradient_state() const { return *impl_->gradients; }
const std::optional<ParallelismConfig>& Accelerator::parallelism_config() const { return impl_->parallelism; }
int64_t Accelerator::coordinate(const char* dim_name) const {
  if (!impl_->parallelism)
    throw ConfigError(std::string("Accelerator: asked for this rank's place on the axis ") + dim_name +
                      ", but there are no axes, expected AcceleratorOptions::parallelism_config");
  return impl_->parallelism->mesh().coordinate(process_index(), dim_name);
}
const AcceleratorOptions& Accelerator::options() const { return impl_->options; }
const ProjectConfiguration& Accelerator::project_configuration() const { return impl_->options.project_config; }
std::filesystem::path Accelerator::logging_dir() const { return project_configuration().logging_dir; }
std::shared_ptr<optim::GradScaler> Accelerator::scaler() const { return impl_->scaler; }

std::shared_ptr<detail::PreparedModel> Accelerator::prepare_core(ModelRef model, bool evaluation_mode) {
  for (const auto& known : impl_->models)  // the same module again: the same preparation, not a second layer
    if (known->model.identity() == model.identity() && (known->engine || evaluation_mode || !use_distributed()))
      return known;
  const bool shards = impl_->fsdp && parallel::effective_strategy(*impl_->fsdp) != ShardingStrategy::no_shard;
  if (!shards && impl_->fsdp && impl_->fsdp->activation_checkpointing.value_or(false))
    throw ConfigError(
        "prepare: activation_checkpointing recomputes the units of sharded models, but the sharding strategy is "
        "NO_SHARD, expected another one; HYBRID_SHARD with dp_shard_size 1 keeps whole models on all ranks and has "
        "units");
  if (!shards) {  // sharding moves piece by piece, and initialises so what has no memory yet
    materialize(model, {.device = impl_->options.device_placement ? std::optional(device()) : std::nullopt});
    if (impl_->options.device_placement) model.to(device());
  }
  auto core = std::make_shared<detail::PreparedModel>(
      detail::PreparedModel{.model = model, .device_type = computing_device(device()), .autocast = impl_->autocast});
  if (impl_->autocast.enabled) core->autocast_dtype = autocast_dtype(state().mixed_precision());
  if (shards) {
    // Also in evaluation mode: a teacher that is never trained may be too large to be whole everywhere.
    core->engine = core->fsdp = std::make_shared<parallel::FullyShardedDataParallel>(model, device(), *impl_->fsdp);
    if (const auto& precision = impl_->fsdp->mixed_precision_policy;
        precision && precision->param_dtype &&
        (impl_->fsdp->fsdp_version == 2 ? precision->cast_forward_inputs.value_or(true)
                                        : precision->cast_root_forward_inputs))
      core->input_dtype = *precision->param_dtype;
    // Casts of parameters are made anew each time: kept ones would keep evicted bytes alive.
    core->autocast.cache_enabled = false;
  } else if (use_distributed() && !evaluation_mode) {
    core->engine =
        std::make_shared<parallel::DistributedDataParallel>(model.parameters(), model.buffers(), impl_->ddp);
  }
  impl_->models.push_back(core);
  return core;
}

/// Optimizers and models may be prepared in any order.
void Accelerator::adopt_shards() {
  for (const auto& model : impl_->models) {
    if (!model->fsdp) continue;
    for (const auto& optimizer : impl_->optimizers) {
      // Adagrad has states from its start, others when they have stepped before they are prepared.
      for (const auto& group : optimizer.optimizer().param_groups())
        for (const auto& parameter : group.params())
          if (const at::Tensor shard = model->fsdp->local_shard(parameter); shard.defined())
            optim::move_optimizer_state(optimizer.optimizer(), parameter, shard, [&](const at::Tensor& whole) {
              return model->fsdp->piece_of(parameter, whole);
            });
      model->fsdp->adopt(optimizer.optimizer());
      optimizer.set_step_hooks(model->fsdp.get(), {.before = [fsdp = model->fsdp] { fsdp->before_step(); },
                                                   .after = [fsdp = model->fsdp] { fsdp->after_step(); }});
    }
  }
}

std::vector<at::Tensor> Accelerator::model_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& model : impl_->models) {
    for (const auto& [name, parameter] : model->model.parameters()) {
      const at::Tensor shard = model->fsdp ? model->fsdp->local_shard(parameter) : at::Tensor();
      if (const auto& gradient = shard.defined() ? shard.grad() : parameter.grad(); gradient.defined())
        gradients.push_back(gradient);
    }
  }
  return gradients;
}

DistributedType Accelerator::distributed_type() const {
  return impl_->fsdp ? DistributedType::FSDP : state().distributed_type();
}

AcceleratedOptimizer Accelerator::register_optimizer(AcceleratedOptimizer optimizer) {
  impl_->optimizers.push_back(optimizer);
  return optimizer;
}

AcceleratedScheduler Accelerator::prepare_scheduler(const optim::Scheduler& scheduler) {
  // A schedule follows the optimizer that it drives; one that drives none of ours follows all, as in the reference.
  std::vector<AcceleratedOptimizer> followed;
  for (const auto& optimizer : impl_->optimizers)
    if (&optimizer.optimizer() == &scheduler.optimizer()) followed.push_back(optimizer);
  AcceleratedScheduler prepared(scheduler, followed.empty() ? impl_->optimizers : followed,
                                impl_->options.step_scheduler_with_optimizer, split_batches());
  impl_->schedulers.push_back(prepared);
  return prepared;
}

void Accelerator::register_loader(LoaderEntry entry) { impl_->loaders.push_back(std::move(entry)); }

data::PrepareDataLoaderOptions Accelerator::loader_options() const {
  return {.config = impl_->options.dataloader_config,
          .put_on_device = impl_->options.device_placement,
          .rng_types = impl_->options.rng_types};
}

void Accelerator::set_trigger() { impl_->trigger = true; }

bool Accelerator::check_trigger() {
  bool set = false;
  for (const bool one : gather_object(std::vector<bool>{impl_->trigger})) set |= one;
  impl_->trigger = false;
  return set;
}

void Accelerator::free_memory() {
  impl_->models.clear();
  impl_->optimizers.clear();
  impl_->schedulers.clear();
  impl_->loaders.clear();
  impl_->step = 0;
  impl_->num_items = 0;
  clear_device_cache();
}

void Accelerator::init_trackers(const std::string& project_name, const std::map<std::string, std::string>& config) {
  if (impl_->options.log_with.empty())
    throw ConfigError(
        "init_trackers: no tracker was asked for, expected names in AcceleratorOptions::log_with, e.g. "
        "{\"tensorboard\"}");
  if (!is_main_process()) return;
  for (const auto& name : impl_->options.log_with) {
    auto tracker = make_tracker(name, project_name, logging_dir());
    if (!config.empty()) tracker->store_init_configuration(config);
    impl_->trackers.push_back(std::move(tracker));
  }
}

void Accelerator::log(const std::map<std::string, double>& values, std::optional<int64_t> step) {
  for (const auto& tracker : impl_->trackers) tracker->log(values, step);
}

void Accelerator::end_training() {
  for (const auto& tracker : impl_->trackers) tracker->finish();
  impl_->trackers.clear();
  wait_for_everyone();
}

}  // namespace accelerate
