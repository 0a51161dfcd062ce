#pragma once

/// The facade: builds the modules from one set of options, wraps your objects and forwards. Source: features table 1.2.

#include <any>
#include <concepts>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <sstream>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/checkpoint/custom_object.hpp"
#include "accelerate/data/forward.hpp"
#include "accelerate/data/metrics.hpp"
#include "accelerate/optim/accelerated_scheduler.hpp"
#include "accelerate/trackers/value.hpp"
#include "accelerate/utils/given.hpp"
#include "accelerate/utils/release_memory.hpp"
#include "accelerate/utils/split.hpp"

namespace torch::data {
template <typename Dataset, typename Batch, typename BatchRequest> class DataLoaderBase;
}  // namespace torch::data
namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace accelerate {

// Types of which this header needs only the names: who gives or reads one includes its header.
class DeepSpeedEngineWrapper;  // accelerate/accelerator/deepspeed_engine.hpp
struct DeepSpeedPlugin;        // accelerate/parallel/deepspeed_plugin.hpp
struct DummyOptim;             // accelerate/optim/dummies.hpp
struct DummyScheduler;
struct FullyShardedDataParallelPlugin;  // accelerate/parallel/fsdp_plugin.hpp
struct MegatronLMPlugin;                // accelerate/parallel/megatron_lm_plugin.hpp
struct MemorySnapshot;                  // accelerate/accelerator/memory_snapshot.hpp
struct ModelSummary;                    // accelerate/accelerator/model_summary.hpp
struct SummaryOptions;
struct ParallelismConfig;              // accelerate/parallel/parallelism_config.hpp
class Profile;                         // accelerate/profiler.hpp
struct SaveStateOptions;               // accelerate/accelerator/save_state.hpp
struct Receipts;                       // accelerate/utils/receipts.hpp
struct TorchDynamoPlugin;              // accelerate/utils/kwargs_dict.hpp
struct DistributedDataParallelKwargs;  // accelerate/utils/kwargs.hpp
struct GradScalerKwargs;
struct ProfileKwargs;
struct AORecipeKwargs;  // accelerate/precision/fp8_kwargs.hpp
struct TERecipeKwargs;
struct MSAMPRecipeKwargs;
struct FP8RecipeKwargs;
enum class FP8BackendType;

namespace parallel {
struct PrepareFacts;
}
namespace detail {
template <class T, class... Kinds> inline constexpr bool is_one_of = (std::is_same_v<T, Kinds> || ...);
template <class T>
concept Kwargs = is_one_of<T, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, AutocastKwargs,
                           ProfileKwargs, AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs>;
}  // namespace detail

/// One of the reference's keyword handlers (utils/kwargs.hpp), or a recipe of fp8 (precision/fp8_kwargs.hpp).
class KwargsHandler {
 public:
  template <detail::Kwargs T> KwargsHandler(T kwargs) : kwargs_(std::move(kwargs)) {}
  /// Null where it is of another kind.
  template <detail::Kwargs T> const T* get_if() const { return std::any_cast<T>(&kwargs_); }
  const std::type_info& kind() const { return kwargs_.type(); }

 private:
  std::any kwargs_;
};

/// Fields in the reference's order. Those left out come from the environment of `accelerate launch`, or the default.
struct AcceleratorOptions {
  bool device_placement = true;                ///< move models, optimizers' state and batches to this process's device
  std::optional<bool> split_batches;           ///< short for dataloader_config.split_batches
  std::optional<std::string> mixed_precision;  ///< "no", "fp16", "bf16" or "fp8"
  int64_t gradient_accumulation_steps = 1;     ///< micro-steps per step; ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins
  std::optional<bool> cpu;                     ///< stay on the CPU
  DataLoaderConfiguration dataloader_config;
  std::vector<RNGType> rng_types = {RNGType::generator};  ///< generators that ranks synchronise before each pass
  /// Where `log` writes: names ("tensorboard", "jsonl", "memory", …), "all", trackers of your own, in any mix.
  std::vector<TrackerChoice> log_with;
  std::filesystem::path project_dir;  ///< short for project_config.project_dir
  ProjectConfiguration project_config;
  std::optional<GradientAccumulationPlugin> gradient_accumulation_plugin;  ///< instead of gradient_accumulation_steps
  /// Shard parameters, gradients and optimizer states. Also on when `accelerate launch --use_fsdp` started this
  /// process. A later Accelerator that is given none has the first one's until AcceleratorState::reset().
  Given<FullyShardedDataParallelPlugin> fsdp_plugin;
  /// Train by a DeepSpeed configuration (docs/deepspeed.md): ZeRO's stages, precision, clipping, and what stands in for
  /// optimizers and schedules. Also on when `accelerate launch --use_deepspeed` started this process. Shared as
  /// fsdp_plugin is, beside which it is an error.
  Given<DeepSpeedPlugin> deepspeed_plugin;
  /// Several by name, for models that are trained (or asked) by settings of their own, such as student and teacher: the
  /// first one holds until AcceleratorState::select_deepspeed_plugin() chooses another for what is prepared next. Give
  /// each model that is trained an Accelerator of its own. Instead of deepspeed_plugin.
  std::vector<std::pair<std::string, Given<DeepSpeedPlugin>>> deepspeed_plugins;
  Given<MegatronLMPlugin> megatron_lm_plugin;  ///< refused, as ACCELERATE_USE_MEGATRON_LM is: it is a Python program
  bool step_scheduler_with_optimizer = true;   ///< schedules step when their optimizers did, num_processes times
  std::vector<KwargsHandler> kwargs_handlers;  ///< at most one of each kind, and one recipe of fp8
  std::optional<std::string> dynamo_backend;   ///< short for dynamo_plugin.backend; only "no" is not refused
  /// torch.compile's settings: read, completed from the environment and kept in options(). A backend other than "no",
  /// also ACCELERATE_DYNAMO_BACKEND's, is refused unless the plugin says `disable`: LibTorch has no compiler for
  /// graphs. The error says what runs compiled models.
  Given<TorchDynamoPlugin> dynamo_plugin;
  /// How ranks are laid out. dp_replicate_size alone: data parallelism. With dp_shard_size: sharding within groups of
  /// so many ranks, with fsdp_plugin's other settings (fsdp_version 2, also when nothing else asks for it). Other axes
  /// are refused. Also read where `accelerate launch --use_parallelism_config` started this. Shared as fsdp_plugin.
  Given<ParallelismConfig> parallelism_config;
  /// Extension: settings of further ways to split the training of a model (src/parallel), each a struct of a header of
  /// its own, at most one of each: {ColumnsPlugin{.size = 2}}. One that nothing here takes is refused by name. A later
  /// Accelerator that is not given any has the first one's.
  std::vector<std::any> layer_plugins;
};

struct BackwardOptions {
  bool retain_graph = false;
  bool create_graph = false;
};

/// Whether each object that prepare() gets comes to this process's device, in their order (nothing moves a schedule),
/// instead of AcceleratorOptions::device_placement: `prepare(DevicePlacement{true, false}, model, loader)`.
struct DevicePlacement {
  DevicePlacement(std::initializer_list<bool> values) : objects(values) {}
  std::vector<bool> objects;
};

struct LoadStateOptions {
  /// Models: false takes the weights that model and checkpoint both have, and a warning names the others, which are let
  /// be. Shapes must be right in any case. All else that was prepared is read whole.
  bool strict = true;
};

/// RAII scopes that the facade hands out. Leaving one never communicates.
class [[nodiscard]] Scope {
 public:
  Scope() = default;
  explicit Scope(std::function<void()> leave);
  Scope(Scope&& other) noexcept = default;
  Scope& operator=(Scope&& other) noexcept = default;

 private:
  std::shared_ptr<void> leave_;
};

namespace detail {
template <class T> concept OptimizerObject = std::derived_from<std::remove_cvref_t<T>, torch::optim::Optimizer>;
template <class T> concept OptimizerPointer = requires(T& p) {
  requires std::derived_from<std::remove_reference_t<decltype(*p)>, torch::optim::Optimizer>;
};
template <class T> inline constexpr bool is_loader = false;
template <class Batch> inline constexpr bool is_loader<data::DataLoader<Batch>> = true;
/// A model that load_and_quantize_model, dispatch_model or one of their kin has returned.
template <class T> concept DispatchedObject = WrappedModel<T> && requires(const T& m) { m.hf_device_map(); };
template <class T> concept ScheduleObject = std::same_as<T, optim::Scheduler>;
/// T, or what a pointer of this type points to.
template <class T> auto* pointer_to_target(T& object) {
  if constexpr (std::is_pointer_v<T>) return object;
  else if constexpr (requires { std::addressof(*object), object.get(); }) return std::addressof(*object);
  else return std::addressof(object);
}
template <class T>
using target_t = std::remove_cv_t<std::remove_pointer_t<decltype(pointer_to_target(std::declval<T&>()))>>;
template <class T> concept TorchLoader = requires(T* p) {
  []<class D, class B, class R>(torch::data::DataLoaderBase<D, B, R>*) {}(p);
};
template <class T>
concept TorchSchedule =
    std::derived_from<T, torch::optim::LRScheduler> || std::derived_from<T, torch::optim::ReduceLROnPlateauScheduler>;

/// Facts about the objects that prepare() is given, from which settings that were left open follow.
using PrepareNotes = std::shared_ptr<parallel::PrepareFacts>;
ACCELERATE_API PrepareNotes no_notes();
ACCELERATE_API void note(const PrepareNotes& notes, const ModelRef& model);
ACCELERATE_API void note(const PrepareNotes& notes, const torch::optim::Optimizer& optimizer);
ACCELERATE_API void note(const PrepareNotes& notes, const DummyOptim& dummy);
ACCELERATE_API void note(const PrepareNotes& notes, const DummyScheduler& dummy);
ACCELERATE_API void note_loader(const PrepareNotes& notes, std::optional<int64_t> batch_size);
ACCELERATE_API void note_schedule(const PrepareNotes& notes);
}  // namespace detail

/// One per training run; several of a process share state: others may clip, or prepare again without a second layer,
/// objects that one has prepared. The first construction is collective (see PartialState). Only reads are thread-safe.
class ACCELERATE_API Accelerator {
 public:
  explicit Accelerator(AcceleratorOptions options = {});
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;
  /// Destroyed while an exception unwinds, it tells the other ranks, so that none waits for this one.
  ~Accelerator();

  // This process.
  const AcceleratorState& state() const;
  const GradientState& gradient_state() const;
  const at::Device& device() const { return state().device(); }
  DistributedType distributed_type() const;  ///< FSDP where models are sharded, else as the processes are
  int64_t num_processes() const { return state().num_processes(); }
  int64_t process_index() const { return state().process_index(); }
  int64_t local_process_index() const { return state().local_process_index(); }
  bool is_main_process() const { return state().is_main_process(); }
  bool is_local_main_process() const { return state().is_local_main_process(); }
  bool is_last_process() const { return state().is_last_process(); }
  bool use_distributed() const { return state().use_distributed(); }
  std::string mixed_precision() const { return to_string(state().mixed_precision()); }
  /// The library whose fp8 recipe computes: by kwargs_handlers, else ACCELERATE_FP8_BACKEND, else AO. NO without fp8.
  FP8BackendType fp8_backend() const;
  const AcceleratorOptions& options() const;
  /// As it applies to this job; nothing when nobody gave one.
  const std::optional<ParallelismConfig>& parallelism_config() const;
  /// This rank's place on an axis of parallelism_config, 0 on an unused one. @throws ConfigError without such a config
  int64_t data_parallel_rank() const;
  int64_t data_parallel_shard_rank() const;
  int64_t tensor_parallel_rank() const;
  const ProjectConfiguration& project_configuration() const;
  std::filesystem::path project_dir() const { return project_configuration().project_dir; }
  std::filesystem::path logging_dir() const;
  int64_t save_iteration() const { return project_configuration().iteration; }
  bool split_batches() const { return options().dataloader_config.split_batches; }
  bool even_batches() const { return options().dataloader_config.even_batches; }
  void set_even_batches(bool value);  ///< for loaders that are prepared from now on
  std::optional<bool> dispatch_batches() const { return options().dataloader_config.dispatch_batches; }
  bool use_seedable_sampler() const { return options().dataloader_config.use_seedable_sampler; }
  bool non_blocking() const { return options().dataloader_config.non_blocking; }
  bool sync_gradients() const { return gradient_state().sync_gradients(); }
  void set_sync_gradients(bool value) { gradient_state().set_sync_gradients(value); }
  int64_t gradient_accumulation_steps() const { return gradient_state().num_steps(); }
  void set_gradient_accumulation_steps(int64_t value) { gradient_state().set_num_steps(value); }

  // Processes.
  template <class F> void on_main_process(F&& f) const { state().on_main_process(f); }
  template <class F> void on_local_main_process(F&& f) const { state().on_local_main_process(f); }
  template <class F> void on_last_process(F&& f) const { state().on_last_process(f); }
  template <class F> void on_process(F&& f, int64_t index) const { state().on_process(f, index); }
  template <class F> void on_local_process(F&& f, int64_t index) const { state().on_local_process(f, index); }
  [[nodiscard]] std::shared_ptr<void> main_process_first() const { return state().main_process_first(); }
  [[nodiscard]] std::shared_ptr<void> local_main_process_first() const { return state().local_main_process_first(); }
  void wait_for_everyone() const { state().wait_for_everyone(); }
  /// Prints the arguments, separated by spaces, on the main process of each machine.
  template <class... Args> void print(const Args&... args) const {
    if (!is_local_main_process()) return;
    std::ostringstream text;
    size_t n = 0;
    ((text << (n++ ? " " : "") << args), ...);
    state().print(text.str());
  }
  /// This rank's contiguous part; see split.hpp. Not collective.
  template <class T> T split_between_processes(const T& inputs, bool apply_padding = false) const {
    return accelerate::split_between_processes(inputs, num_processes(), process_index(), apply_padding);
  }

  // Preparation.
  /// Prepares any number of models, optimizers, loaders and schedules, in any order, and returns the prepared ones in
  /// that order (a tuple; one argument: the object itself). Of what load_and_quantize_model and dispatch_model return,
  /// the model is prepared, and keeps it. Objects of other types, and prepared ones, come back as they are; but
  /// LibTorch's own loaders and schedules, and modules without a holder, are errors when compiled, which say what to
  /// use. Optimizers and schedules given as lvalues stay yours: keep them alive. Collective when models are among them.
  /// @throws ConfigError also for an optimizer of all the rest of a model with weights in few bits and no adapter
  template <class... Objects>
  requires(!(std::same_as<std::remove_cvref_t<Objects>, DevicePlacement> || ...)) auto prepare(Objects&&... objects) {
    return prepare_placed(std::vector<std::optional<bool>>(sizeof...(Objects)), std::forward<Objects>(objects)...);
  }
  /// @throws ConfigError for another number of values than objects, and for a model that is to stay where it is
  /// although an engine that cuts it (FSDP) says where its shards lie.
  template <class... Objects> auto prepare(const DevicePlacement& device_placement, Objects&&... objects) {
    return prepare_placed(checked_placement(device_placement, sizeof...(Objects)), std::forward<Objects>(objects)...);
  }

  // `device_placement` of the following: instead of AcceleratorOptions::device_placement.
  /// `evaluation_mode`: no gradient averaging. Collective otherwise. @throws ConfigError as prepare()
  template <ModelLike Model>
  Prepared<Model> prepare_model(Model model, bool evaluation_mode = false, std::optional<bool> device_placement = {}) {
    Prepared<Model> prepared(model, prepare_core(model, evaluation_mode, device_placement));
    give_pieces_to_optimizers();
    return prepared;
  }
  /// `fused`: see AcceleratedOptimizerOptions.
  template <class Optimizer>
  AcceleratedOptimizer prepare_optimizer(Optimizer&& optimizer, const AcceleratedOptimizerOptions& options = {},
                                         std::optional<bool> device_placement = std::nullopt) {
    auto prepared = register_optimizer(AcceleratedOptimizer(std::forward<Optimizer>(optimizer),
                                                            device_placement.value_or(this->options().device_placement),
                                                            scaler(), options));
    give_pieces_to_optimizers();
    return prepared;
  }
  /// @param slice_fn_for_dispatch  see data::SliceFunction. @throws ConfigError as data::prepare_data_loader()
  template <class Batch>
  data::PreparedDataLoader<Batch> prepare_data_loader(
      const data::DataLoader<Batch>& loader, std::optional<bool> device_placement = {},
      std::type_identity_t<data::SliceFunction<Batch>> slice_fn_for_dispatch = {}) {
    auto prepared = detail::prepare_loader(loader, *loader_options(device_placement), std::move(slice_fn_for_dispatch));
    register_loader(prepared.status());
    return prepared;
  }
  AcceleratedScheduler prepare_scheduler(const optim::Scheduler& scheduler);
  /// Your module. A sharded one's parameters are present only in operators, or held by `residency::summon(module)`.
  template <ModelLike Model> Model unwrap_model(const Prepared<Model>& model) const { return model.unwrap(); }
  template <ModelLike Model> Model unwrap_model(const Model& model) const { return model; }

  // Training.
  /// Gradients of `loss`, a scalar. Scaled by the loss scaler; divided by gradient_accumulation_steps. On a
  /// synchronising step it is collective. The first one looks whether all that is trained was prepared: it warns of an
  /// optimizer whose parameters nobody trains, and of a loader of which each rank reads everything.
  /// @throws ConfigError with GradientAverage::tokens, which needs the number of items; on several ranks also for a
  /// prepared optimizer with parameters that no engine averages.
  void backward(const at::Tensor& loss, const BackwardOptions& options = {});
  /// The same with GradientAverage::tokens: over a whole accumulation group and all ranks every item weighs the same.
  /// @param num_items  how many items `loss` is the mean of. Call it once per micro-step, with the sum of the losses if
  ///                   several models train.
  /// @throws ConfigError without that setting.
  void backward(const at::Tensor& loss, int64_t num_items, const BackwardOptions& options = {});
  /// One micro-step: decides whether gradients are synchronised in it; the models don't communicate otherwise.
  template <class... Models> Scope accumulate(const Models&... models) {
    return begin_accumulate(detail::engines_of({models.core()...}));
  }
  /// Within the scope backward only accumulates locally.
  template <class Model> Scope no_sync(const Prepared<Model>& model) {
    return suspend_sync(detail::engines_of({model.core()}));
  }
  /// After several forwards under no_sync: the next backward of `model` synchronises.
  template <class Model> Scope trigger_sync_in_backward(const Prepared<Model>& model) {
    return resume_sync(detail::engines_of({model.core()}).front());
  }
  /// Runs `loop`, in which ranks may have different numbers of batches. Collective.
  /// @param even_batches  replaces the setting of all prepared loaders (map data sets) for the time of the loop.
  template <class Model>
  void join_uneven_inputs(const std::vector<Prepared<Model>>& models, const std::function<void()>& loop,
                          std::optional<bool> even_batches = std::nullopt) {
    std::vector<std::shared_ptr<detail::PreparedModel>> prepared;
    for (const auto& model : models) prepared.push_back(model.core());
    join(detail::engines_of(prepared), loop, even_batches);
  }
  template <class Model>
  void join_uneven_inputs(const Prepared<Model>& model, const std::function<void()>& loop,
                          std::optional<bool> even_batches = std::nullopt) {
    join(detail::engines_of({model.core()}), loop, even_batches);
  }
  /// Autocast in this run's mixed precision, for code outside of prepared models.
  /// @param autocast_handler  for this scope; unset: that of the kwargs_handlers
  [[nodiscard]] AutocastGuard autocast(const std::optional<AutocastKwargs>& autocast_handler = std::nullopt) const;
  /// Divides gradients by the loss scale: those of all prepared optimizers, or of some. Nothing without a scaler, and
  /// for an optimizer whose gradients wait for their step unscaled already.
  void unscale_gradients();
  void unscale_gradients(const AcceleratedOptimizer& optimizer);
  void unscale_gradients(const std::vector<AcceleratedOptimizer>& optimizers);
  /// Scales gradients so that their norm is at most max_norm. Unscales those of the optimizers that hold one of these
  /// parameters first. A parameter that is listed several times (tied weights) counts once. @return the norm before, a
  /// scalar tensor. Collective with sharded parameters, whose gradients count as wholes.
  at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);
  void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);
  /// Under DeepSpeed: the engine of the first model that it trains, see accelerator/deepspeed_engine.hpp.
  /// @throws ConfigError before there is one
  DeepSpeedEngineWrapper deepspeed_engine_wrapped() const;
  bool optimizer_step_was_skipped() const;  ///< some prepared optimizer's last one, because of an overflow
  std::shared_ptr<optim::GradScaler> scaler() const;
  /// Tells all ranks, at their next check_trigger(), that something happened here (stop early, say). Not collective.
  void set_trigger();
  bool check_trigger();  ///< whether any rank set the trigger since the last check; collective

  // Collectives; see comm.hpp.
  template <class T> T gather(const T& data) const { return accelerate::gather(data); }
  /// The sum by default, as the reference's member; the free function accelerate::reduce() gives the mean.
  template <class T> T reduce(const T& data, std::string_view reduction = "sum", double scale = 1.0) const {
    return accelerate::reduce(data, reduction, scale);
  }
  template <class T> T pad_across_processes(const T& data, const PadOptions& options = {}) const {
    return accelerate::pad_across_processes(data, options);
  }
  template <class T>
  T pad_across_processes(const T& data, int64_t dim, double pad_index = 0, bool pad_first = false) const {
    return accelerate::pad_across_processes(data, dim, pad_index, pad_first);
  }
  /// Gathers and, on the last batch of the loader being iterated, drops the samples that were repeated to fill it.
  /// Lists of things that are not tensors go as objects, with `use_gather_object` everything: see metrics.hpp.
  template <class T> T gather_for_metrics(const T& data, bool use_gather_object = false) const {
    return accelerate::gather_for_metrics(data, use_gather_object);
  }

  // Files.
  /// Writes an IValue (numbers, strings, tensors, lists, dicts) as Python's torch.save does, on the main process.
  void save(const c10::IValue& object, const std::filesystem::path& file) const;
  /// Named tensors, as safetensors with `safe_serialization`.
  void save(const std::map<std::string, at::Tensor>& tensors, const std::filesystem::path& file,
            bool safe_serialization = false) const;
  /// The weights in the Hugging Face layout: model.safetensors, or shards of at most `max_shard_size` ("10GB", "500MB",
  /// …) with an index. Of a sharded model it is collective, and rank 0 holds one of its units at a time.
  /// @throws CheckpointError, ResourceError; of a sharded model on all ranks.
  void save_model(const ModelRef& model, const std::filesystem::path& folder,
                  const std::string& max_shard_size = "10GB", bool safe_serialization = true) const;
  /// `weights` in its own's place, whole and by its names (averages, …). Not collective: the main process has them.
  void save_model(const ModelRef& model, const std::filesystem::path& folder,
                  const std::map<std::string, at::Tensor>& weights, const std::string& max_shard_size = "10GB",
                  bool safe_serialization = true) const;
  /// Parameters and buffers by name, in the parameters' own dtype. Of a sharded model whole, on rank 0's host (empty
  /// elsewhere), collective; with full_state_dict the plugin's state_dict_config says who gets them and where they lie.
  std::map<std::string, at::Tensor> get_state_dict(const ModelRef& model) const;
  /// An optimizer's state by its parameters' names, for checkpoints of your own: {"state": {name: {kind: tensor}},
  /// "param_groups": […]}. Tensors are whole copies on the host, in the optimizer's dtypes. Collective. Of sharded
  /// parameters rank 0 gets it, others an empty dict; with full_state_dict by the plugin's optim_state_dict_config.
  c10::IValue get_optimizer_state_dict(const AcceleratedOptimizer& optimizer) const;
  /// Writes everything that was prepared or registered; with automatic naming into a new folder. Collective. @return
  /// the folder. It appears whole or not at all: when all is on the disk it gets its name. One that is there already
  /// keeps what is no checkpoint's, and its older checkpoint until the new one is complete. In the middle of an
  /// accumulation group each rank saves its gradients so far. Files of FSDP, DeepSpeed: accelerator/save_state.hpp.
  /// @throws CheckpointError, ResourceError, on all ranks; with automatic naming also beside a later run's checkpoints.
  std::filesystem::path save_state(const std::filesystem::path& output_dir = {}, bool safe_serialization = true);
  std::filesystem::path save_state(const std::filesystem::path& output_dir, const SaveStateOptions& options);
  /// Waits for one that is written behind training. Collective. @throws CheckpointError on all ranks, once: it failed
  void wait_for_checkpoint();
  /// Reads it back into the same objects and tensors; no folder: the newest complete automatic checkpoint, and a
  /// warning names newer ones. Collective. All forms but local fit any ranks and plugins, also Python's. Loaders go on
  /// within a pass, accumulation within a group: with as many micro-steps as before, or batches of a rank in all.
  /// @throws CheckpointError on all ranks, and leaves all as it was, if a file is missing or does not fit on any of
  /// them, or if the run can't go on with these ranks: then with the numbers. Damaged bytes show in the middle: weights
  /// and states are undefined then, and save_state() refuses until a checkpoint is loaded (docs/checkpoints.md).
  void load_state(const std::filesystem::path& input_dir = {}, const LoadStateOptions& options = {});
  /// Your own objects: anything with `c10::IValue state_dict()` and `load_state_dict(const c10::IValue&)`, or any value
  /// that an archive takes (numbers, strings, containers, structs with ACCELERATE_FIELDS). Kept by reference.
  template <class... Objects> void register_for_checkpointing(Objects&... objects) {
    (register_custom(checkpointing::custom_object(objects)), ...);
  }
  /// Called before save_state writes / load_state reads, with the folder that it writes into (not yet by its name) or
  /// reads. The returned scope removes the hook when it ends; keep it. On all ranks.
  using StateHook = std::function<void(const std::filesystem::path&)>;
  Scope register_save_state_pre_hook(StateHook hook);
  Scope register_load_state_pre_hook(StateHook hook);
  /// Hooks that change what is saved, as the reference's: `weights`, of `models` in their order, whole and on the host,
  /// are written as the hook leaves them. ConfigError where each rank writes pieces (sharded, local, DeepSpeed's).
  using ModelWeights = std::vector<std::map<std::string, at::Tensor>>;
  using SaveStateHook =
      std::function<void(const std::vector<ModelRef>& models, ModelWeights& weights, const std::filesystem::path&)>;
  Scope register_save_state_pre_hook(SaveStateHook hook);
  /// And in loading: models that the hook removes are left alone, the others are read in the order that it leaves.
  using LoadStateHook = std::function<void(std::vector<ModelRef>& models, const std::filesystem::path&)>;
  Scope register_load_state_pre_hook(LoadStateHook hook);
  template <class Loader> auto skip_first_batches(const Loader& loader, int64_t num_batches = 0) const {
    return detail::skip_batches(loader, num_batches);
  }
  /// Forgets all prepared objects and gives cached device memory back. Handles that you hold keep their objects alive.
  void free_memory();
  void clear() { free_memory(); }
  /// And empties those, see release_memory(): `accelerator.free_memory(model, optimizer, loader);`
  template <class First, class... Objects> void free_memory(First& first, Objects&... objects) {
    free_memory();
    release_memory(first, objects...);
  }
  template <class First, class... Objects> void clear(First& first, Objects&... all) { free_memory(first, all...); }

  // Tracking. None of these is collective, and none waits for a tracker (docs/tracking.md says what happens to records
  // that one does not take). On the main process, but for trackers whose main_process_only() is false.
  /// Opens a run in every tracker of log_with, whose exceptions come out of it. A second call closes the first's runs.
  /// @param config       hyperparameters; maps of numbers, texts, … do, too (to_tracker_values)
  /// @param init_kwargs  by tracker: what its start takes, as in the reference. @throws ConfigError for a tracker that
  ///                     log_with does not name, and for names that the tracker does not know
  void init_trackers(const std::string& project_name, const TrackerValues& config = {},
                     const TrackerKwargs& init_kwargs = {});
  /// Sends values to all trackers, and numbers to the monitor's page, also where there are no trackers.
  /// @param log_kwargs  by tracker, as in the reference. @throws ConfigError for one that log_with does not name
  void log(TrackerValues values, std::optional<int64_t> step = std::nullopt, const TrackerKwargs& log_kwargs = {});
  template <class T>
  void log(const std::map<std::string, T>& values, std::optional<int64_t> step = std::nullopt,
           const TrackerKwargs& log_kwargs = {}) {
    log(to_tracker_values(values), step, log_kwargs);
  }
  /// To those trackers that take them: see GeneralTracker for shapes. Tensors are copied to the host before it returns.
  /// @throws ConfigError if trackers are open and none takes them, ShapeError
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step = std::nullopt,
                  const TrackerKwargs& log_kwargs = {});
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step = std::nullopt,
                 const TrackerKwargs& log_kwargs = {});
  void log_histogram(const std::string& histogram_name, const at::Tensor& values,
                     std::optional<int64_t> step = std::nullopt, const TrackerKwargs& log_kwargs = {});
  /// The tracker of that name, to log to it alone, by any thread. Where it is not open, one that does nothing.
  /// @param unwrap  the tracker itself, after all that was logged up to now is written (waits, at most
  ///                ACCELERATE_TRACKER_TIMEOUT seconds). From then on mind that its own thread may use it.
  /// @throws ConfigError for a name that is none of log_with's, or before init_trackers
  std::shared_ptr<GeneralTracker> get_tracker(const std::string& name, bool unwrap = false);
  /// Closes all trackers and waits for everyone. Collective. With ACCELERATE_RECEIPTS=1 the main process prints its
  /// receipts; where this is never called, the Accelerator's destructor or the process's end does.
  void end_training();
  /// This run's settings so far, on this rank: each one, its source, and its effect in numbers, which count the whole
  /// process (see utils/receipts.hpp). Not collective.
  Receipts receipts() const;
  /// The model's modules, where their tensors live, and what each rank keeps of them; see model_summary.hpp. Takes
  /// models prepared or not, dispatched, sharded, without memory yet. Reads no values. Collective; the same on all
  /// ranks but for bytes_here. print_summary() shows it as a table on the main process, and is collective, too.
  ModelSummary summary(const ModelRef& model) const;
  void print_summary(const ModelRef& model) const;
  void print_summary(const ModelRef& model, const SummaryOptions& options) const;
  /// accelerate::memory(), with what the prepared models and optimizers hold of it. Not collective.
  MemorySnapshot memory() const;
  /// Records operators until the scope ends; see accelerate/profiler.hpp, which the caller includes. Without `kwargs`
  /// as the ProfileKwargs among kwargs_handlers say, else with defaults. Not collective: each rank records itself, and
  /// may leave it to others. @throws ConfigError for kwargs that can't be met, or while another profiler records.
  [[nodiscard]] Profile profile() const;
  [[nodiscard]] Profile profile(const std::optional<ProfileKwargs>& kwargs) const;

 private:
  struct Impl;
  friend class LocalSGD;                // accelerator/local_sgd.hpp
  friend class DeepSpeedEngineWrapper;  // accelerator/deepspeed_engine.hpp

  /// @param placement  by object; unset: as the options say
  template <class... Objects>
  auto prepare_placed(const std::vector<std::optional<bool>>& placement, Objects&&... objects) {
    [[maybe_unused]] auto placed = placement.begin();
    const auto notes = detail::no_notes();
    (take_note(notes, objects), ...);
    hear(notes);
    // Schedules need their prepared optimizers, wherever those stand in the list.
    // Braces, because they evaluate from left to right: the order is that of the files of a checkpoint.
    auto first = std::tuple<decltype(prepare_one(std::forward<Objects>(objects), *placed))...>{
        prepare_one(std::forward<Objects>(objects), *placed++)...};
    give_pieces_to_optimizers();
    auto prepared = std::apply([&](auto&... items) { return std::make_tuple(finish_one(items)...); }, first);
    if constexpr (sizeof...(Objects) == 1) return std::get<0>(std::move(prepared));
    else return prepared;
  }
  template <class T> static void take_note(const detail::PrepareNotes& notes, const T& object) {
    if constexpr (ModelLike<T> || WrappedModel<T>) detail::note(notes, ModelRef(object));
    else if constexpr (detail::is_loader<T>) detail::note_loader(notes, object.batch_size());
    else if constexpr (detail::is_one_of<T, DummyOptim, DummyScheduler> || detail::OptimizerObject<T>)
      detail::note(notes, object);
    else if constexpr (detail::ScheduleObject<T>) detail::note_schedule(notes);
    else if constexpr (detail::OptimizerPointer<T>)
      if (object) detail::note(notes, *object);
  }
  template <class T> auto prepare_one(T&& object, std::optional<bool> placed) {
    using U = std::remove_cvref_t<T>;
    if constexpr (ModelLike<U>) return prepare_model(object, false, placed);
    else if constexpr (detail::DispatchedObject<U>) return prepare_dispatched(object, placed);
    else if constexpr (detail::is_loader<U>) return prepare_data_loader(object, placed);
    else if constexpr (detail::OptimizerObject<T> || detail::OptimizerPointer<U>)
      return prepare_optimizer(std::forward<T>(object), {}, placed);
    else if constexpr (std::same_as<U, DummyOptim>) return prepare_dummy(object, placed);
    else {
      using Target = detail::target_t<U>;
      static_assert(!detail::TorchLoader<Target>,
                    "prepare can't share out LibTorch's loader, of which every process would read everything: make an "
                    "accelerate::data::DataLoader of the data set, with the same batch size");
      static_assert(
          !detail::TorchSchedule<Target>,
          "prepare can't see which optimizer LibTorch's schedule drives: pass "
          "accelerate::optim::from_torch(optimizer, schedule), or a schedule of accelerate/optim/schedules.hpp");
      static_assert(!std::derived_from<Target, torch::nn::Module>,
                    "prepare takes a module by its holder (TORCH_MODULE) or by a std::shared_ptr to a class with a "
                    "forward: this is the module itself, or a pointer that does not share it");
      return U(std::forward<T>(object));
    }
  }
  /// Its module, and the handle with it: it owns the weights.
  template <class D> auto prepare_dispatched(const D& dispatched, std::optional<bool> placed) {
    auto prepared = prepare_model(dispatched.unwrap(), false, placed);
    detail::keep_owner(*prepared.core(), std::make_shared<D>(dispatched));
    return prepared;
  }
  template <class T> auto finish_one(T& object) {
    if constexpr (detail::ScheduleObject<T>) return prepare_scheduler(object);
    else if constexpr (std::same_as<T, DummyScheduler>) return prepare_dummy(object);
    else return std::move(object);
  }
  std::shared_ptr<detail::PreparedModel> prepare_core(const ModelRef& model, bool evaluation_mode,
                                                      std::optional<bool> device_placement);
  AcceleratedOptimizer register_optimizer(AcceleratedOptimizer optimizer);
  void hear(const detail::PrepareNotes& notes);
  AcceleratedOptimizer prepare_dummy(const DummyOptim& dummy, std::optional<bool> device_placement);
  AcceleratedScheduler prepare_dummy(const DummyScheduler& dummy);
  void register_loader(std::shared_ptr<data::PreparedStatus> loader);
  void give_pieces_to_optimizers();
  void register_custom(checkpointing::CustomObject object);
  std::shared_ptr<const data::PrepareDataLoaderOptions> loader_options(std::optional<bool> device_placement) const;
  static std::vector<std::optional<bool>> checked_placement(const DevicePlacement& placement, size_t num_objects);
  Scope begin_accumulate(const parallel::Engines& models);
  Scope suspend_sync(const parallel::Engines& models);
  Scope resume_sync(const std::shared_ptr<parallel::Engine>& model);
  void join(const parallel::Engines& models, const std::function<void()>& loop, std::optional<bool> even_batches);
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
