#pragma once

#include <any>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/given.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "accelerate/utils/receipts.hpp"
#include "comm/comms_log.hpp"
#include "comm/mesh.hpp"
#include "parallel/layer.hpp"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace accelerate {
struct DummyOptim;
struct DummyScheduler;
namespace optim {
class GradScaler;
class Scheduler;
}  // namespace optim
}  // namespace accelerate

/// Which layers a program's options, and the environment that the launcher made, ask for.
namespace accelerate::parallel {

/// The program's settings; those that it leaves out may come from the environment.
struct EngineRequest {
  std::optional<FullyShardedDataParallelPlugin> fsdp = {};
  Given<DeepSpeedPlugin> deepspeed = {};
  std::vector<std::pair<std::string, Given<DeepSpeedPlugin>>> deepspeed_plugins = {};  ///< instead, several by name
  Given<MegatronLMPlugin> megatron_lm = {};
  std::optional<ParallelismConfig> parallelism = {};  ///< resolved
  DistributedDataParallelKwargs ddp = {};
  std::vector<std::any> plugins = {};  ///< AcceleratorOptions::layer_plugins

  /// The plugin of this type; null: not given.
  template <class Plugin> const Plugin* plugin() const {
    for (size_t i = 0; i < plugins.size(); ++i)
      if (const auto* found = std::any_cast<Plugin>(&plugins[i])) return taken.insert(i), found;
    return nullptr;
  }
  mutable std::set<size_t> taken = {};  ///< those that somebody has asked for
  /// fsdp as it applies to the run, every field decided; null until somebody asks.
  mutable std::shared_ptr<const std::optional<FullyShardedDataParallelPlugin>> sharding = {};
};

struct PrepareFacts;
struct DeepSpeedFiles;

/// The rules of a run that a layer's settings decide besides how its model is split, where they do (DeepSpeed's file
/// does).
struct RunRules {
  std::string decided_by;  ///< for people: what says all this
  PrecisionType mixed_precision = PrecisionType::NO;
  bool autocasts = true;  ///< false: parameters are of the type that is computed in, and nothing else is done about it
  /// The scaler of the loss. Null: none.
  std::shared_ptr<optim::GradScaler> scaler = {};
  /// Gradients are clipped by their norm before each step, to so much; 0: not. Unset: as the program does.
  std::optional<double> max_norm = {};
  std::optional<int64_t> gradient_accumulation_steps = {};
  /// accumulate() makes groups of so many; false: the program decides, each step() of an optimizer is one.
  bool counts_micro_steps = true;
  /// Why whole weights of a sharded model can't be had; empty: they can.
  std::string no_whole_state;
  /// How long ranks wait for each other, unless the program says.
  std::optional<std::chrono::milliseconds> process_group_timeout = {};
};

/// A tracker that the settings of a run name, and not the program.
struct FileMonitor {
  std::string tracker;  ///< a name of AcceleratorOptions::log_with, or csv_monitor
  std::string project_name;
  std::string folder;  ///< empty: where it writes by itself
  std::map<std::string, std::variant<bool, std::string>> arguments = {};
  int64_t every = 1;  ///< samples from record to record, at least
};

/// The observations that the settings of a run ask for, on the main process (DeepSpeed's file: wall_clock_breakdown,
/// …).
struct Observed {
  bool times = false;   ///< of each step's phases: lines, and records for the monitors
  bool memory = false;  ///< lines before and after each phase
  struct Flops {
    int64_t step = 1;  ///< optimizer steps before the one that is profiled
    int64_t module_depth = -1, top_modules = 1;
    bool detailed = true;
    std::string file = {};  ///< empty: standard output
    double recompute_fwd_factor = 0;
    bool operator==(const Flops&) const = default;
  };
  std::optional<Flops> flops = {};  ///< operations by module, once
  struct Comms {
    bool verbose = false;                  ///< a line for each
    std::set<comm::Collective> only = {};  ///< empty: all
    bool operator==(const Comms&) const = default;
  };
  std::optional<Comms> comms = {};  ///< counts and times of collectives, on all ranks
  /// Keys that do something only where the model recomputes layers (accelerate::checkpoint): to be told of, once, if
  /// the first step has recomputed none.
  std::vector<std::string> of_recomputation = {};
  bool operator==(const Observed&) const = default;
};

/// A layer that a run has chosen: makes it for each of its models.
class ChosenLayer {
 public:
  virtual ~ChosenLayer() = default;

  /// Whether it makes gradients those of all ranks along the axes of the data. There is one such: the first that is
  /// asked for.
  virtual bool joins_data() const { return false; }

  /// The answer of Accelerator::distributed_type(); unset: the processes decide it.
  virtual std::optional<DistributedType> distributed_type() const { return std::nullopt; }
  /// How save_state() writes models and optimizers; unset: whole, in the files of plain training.
  virtual std::optional<StateDictType> state_dict_type() const { return std::nullopt; }
  /// The ranks that get a whole state dict that the program asks for, and the place of its tensors: of models and of
  /// optimizers.
  virtual StateDictConfig state_dict_config() const { return {.rank0_only = true}; }
  virtual StateDictConfig optim_state_dict_config() const { return {.rank0_only = true}; }
  /// The plugin with every field decided, of a layer that shards; null otherwise.
  virtual const FullyShardedDataParallelPlugin* sharding() const { return nullptr; }
  /// Axes of a ParallelismConfig that this layer splits besides those of the data: "tp", "cp", "sp".
  virtual bool splits(const std::string& /*axis*/) const { return false; }
  /// The facts about a job of so many ranks that the axes are checked against.
  virtual JobFacts job(int64_t num_processes) const {
    return {.num_processes = num_processes, .multi_device = num_processes > 1};
  }
  /// How the job's ranks are laid out, outermost axis first, where this layer knows more of it than the
  /// ParallelismConfig says; the first that does decides.
  virtual std::vector<comm::AxisSize> axes(const comm::Group& /*all*/) const { return {}; }
  /// Once it is known, before the first make().
  virtual void set_precision(PrecisionType /*mixed_precision*/) {}
  /// Before each make(): names of the model's weights that may travel as fp8, because that is what they compute as.
  virtual void gather_in_fp8(const std::vector<std::string>& /*weights*/) {}
  /// The receipts of its own plugin's settings, an entry for each.
  virtual std::vector<Receipt> receipts() const { return {}; }
  /// Whether make() gives the model its memory and its place.
  virtual bool places_models() const { return false; }
  /// How checkpoints of the models that are made now are written, if as DeepSpeed does; null: in other forms.
  virtual std::shared_ptr<const DeepSpeedFiles> deepspeed_files() const { return nullptr; }

  /// The rules that this layer's settings have for the run, once for the run. @param asked  by the program. Not
  /// collective; before this process joins a group
  virtual std::optional<RunRules> rules(PrecisionType asked) {
    static_cast<void>(asked);
    return std::nullopt;
  }
  /// Before prepare() makes anything: what it is given. @param num_steps  of an accumulation group. Not collective.
  /// @return rules that hold from now on, where other settings were chosen meanwhile (select_deepspeed_plugin)
  /// @throws ConfigError
  virtual std::optional<RunRules> hear(const PrepareFacts& facts, int64_t num_steps);
  /// The monitors that the settings ask for, with the number of samples that all ranks see in a step. After hear().
  virtual std::vector<FileMonitor> monitors() const { return {}; }
  virtual int64_t samples_of_step() const { return 0; }
  virtual Observed observed() const { return {}; }
  /// Before an optimizer is prepared, the program's or one of make_optimizer(): how it is to keep its states.
  /// @throws ConfigError
  virtual void adopt(torch::optim::Optimizer& /*optimizer*/) {}
  /// The optimizer or the schedule of the settings, for a stand-in that prepare() is given.
  /// @throws ConfigError: the default, as there is nothing that it stands for
  virtual std::shared_ptr<torch::optim::Optimizer> make_optimizer(const DummyOptim& dummy) const;
  virtual optim::Scheduler make_scheduler(const DummyScheduler& dummy, torch::optim::Optimizer& optimizer) const;

  /// Before make(): what is given may be something else to this layer and those after it. Not collective.
  virtual void hand_on(std::vector<Held>& /*given*/) const {}
  /// The layer of one model; null where it needs none (alone, or in evaluation mode). Collective.
  /// @param given  what the layers before it have left of the model's parameters
  /// @throws ConfigError when the settings don't fit together, ShapeError when ranks bring different models.
  virtual std::unique_ptr<Layer> make(const ModelRef& model, const at::Device& device, bool evaluation_mode,
                                      const std::vector<Held>& given) const = 0;
};

/// The stack that a run has chosen; see ChosenLayer for what it is asked.
class ChosenEngine {
 public:
  /// @param layers  in the order of the stack; one joins the data
  explicit ChosenEngine(std::vector<std::unique_ptr<ChosenLayer>> layers);

  std::optional<DistributedType> distributed_type() const;
  std::optional<StateDictType> state_dict_type() const;
  StateDictConfig state_dict_config() const { return data_->state_dict_config(); }
  StateDictConfig optim_state_dict_config() const { return data_->optim_state_dict_config(); }
  const FullyShardedDataParallelPlugin* sharding() const { return data_->sharding(); }
  bool splits(const std::string& axis) const;
  JobFacts job(int64_t num_processes) const { return data_->job(num_processes); }
  /// These ask the layer that joins the data, as do the two that make something.
  std::optional<RunRules> rules(PrecisionType asked) { return data_->rules(asked); }
  std::optional<RunRules> hear(const PrepareFacts& facts, int64_t num_steps) { return data_->hear(facts, num_steps); }
  void adopt(torch::optim::Optimizer& optimizer) { data_->adopt(optimizer); }
  std::shared_ptr<torch::optim::Optimizer> make_optimizer(const DummyOptim& dummy) const {
    return data_->make_optimizer(dummy);
  }
  optim::Scheduler make_scheduler(const DummyScheduler& dummy, torch::optim::Optimizer& optimizer) const;
  /// How the job's ranks are laid out, outermost axis first. @param config  as it applies to the job
  std::vector<comm::AxisSize> axes(const std::optional<ParallelismConfig>& config, const comm::Group& all) const;
  void set_precision(PrecisionType mixed_precision);
  void gather_in_fp8(const std::vector<std::string>& weights);
  std::vector<Receipt> receipts() const;
  /// Otherwise prepare() has moved the model to the device before make().
  bool places_models() const;
  std::shared_ptr<const DeepSpeedFiles> deepspeed_files() const { return data_->deepspeed_files(); }
  std::vector<FileMonitor> monitors() const { return data_->monitors(); }
  int64_t samples_of_step() const { return data_->samples_of_step(); }
  Observed observed() const { return data_->observed(); }
  /// The engine of one model; null where no layer is needed. Collective.
  std::shared_ptr<Engine> make(const ModelRef& model, const at::Device& device, bool evaluation_mode) const;

 private:
  std::vector<std::unique_ptr<ChosenLayer>> layers_;
  ChosenLayer* data_;  ///< the one that joins the data
};

/// A layer that can be asked for.
struct LayerKind {
  std::string name;
  /// Null when it is not asked for. Runs before this process joins a group. @throws ConfigError for settings that
  /// contradict each other, and for a layer that is not here, naming what comes nearest.
  std::function<std::unique_ptr<ChosenLayer>(const EngineRequest&)> choose;
};

/// All of them, in the order of the stack: engines.cpp has a line for each. Averaging joins the data where nobody
/// before it does. A test may put one of its own in front.
std::vector<LayerKind>& layer_kinds();

/// All that are asked for. @throws ConfigError also for axes of the parallelism configuration that none of them splits.
std::unique_ptr<ChosenEngine> choose_engine(const EngineRequest& request);

/// The axes that a configuration names, of a job of so many ranks, outermost first. Ranks that they leave over (under
/// DeepSpeed they need not name all ranks) read other samples.
std::vector<comm::AxisSize> axes_of(const std::optional<ParallelismConfig>& config, int64_t ranks);

/// The resolved parallelism configuration, if the program or the environment has one.
std::optional<ParallelismConfig> requested_parallelism(const std::optional<ParallelismConfig>& given);

/// Runs `backward` (autograd) so that a transport error in gradient averaging becomes a CommError that names the ranks.
/// Used by Accelerator::backward.
void guard_backward(const std::function<void()>& backward);

}  // namespace accelerate::parallel
