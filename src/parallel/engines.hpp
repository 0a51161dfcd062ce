#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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
#include "comm/mesh.hpp"

/// Which engine a program's options, and the environment that the launcher made, ask for.
namespace accelerate::parallel {

/// What the program says; what it leaves out may come from the environment.
struct EngineRequest {
  std::optional<FullyShardedDataParallelPlugin> fsdp = {};
  Given<DeepSpeedPlugin> deepspeed = {};
  Given<MegatronLMPlugin> megatron_lm = {};
  std::optional<ParallelismConfig> parallelism = {};  ///< resolved
  DistributedDataParallelKwargs ddp = {};
};

/// An engine that a run has chosen: makes the engine of each of its models.
class ChosenEngine {
 public:
  virtual ~ChosenEngine() = default;

  /// What Accelerator::distributed_type() says; unset: what the processes are.
  virtual std::optional<DistributedType> distributed_type() const { return std::nullopt; }
  /// How save_state() writes models and optimizers; unset: whole, in the files of plain training.
  virtual std::optional<StateDictType> state_dict_type() const { return std::nullopt; }
  /// Who gets a whole state dict that the program asks for, and where its tensors lie: of models and of optimizers.
  virtual StateDictConfig state_dict_config() const { return {.rank0_only = true}; }
  virtual StateDictConfig optim_state_dict_config() const { return {.rank0_only = true}; }
  /// The plugin with every field decided, of an engine that shards; null otherwise.
  virtual const FullyShardedDataParallelPlugin* sharding() const { return nullptr; }
  /// Axes of a ParallelismConfig that this engine splits besides those of the data: "tp", "cp", "sp".
  virtual bool splits(const std::string& /*axis*/) const { return false; }
  /// What the axes are checked against, of a job of so many ranks.
  virtual JobFacts job(int64_t num_processes) const {
    return {.num_processes = num_processes, .multi_device = num_processes > 1};
  }
  /// How the job's ranks are laid out, outermost axis first. @param config  as it applies to the job
  virtual std::vector<comm::AxisSize> axes(const std::optional<ParallelismConfig>& config,
                                           const comm::Group& all) const;
  /// Once it is known, before the first make().
  virtual void set_precision(PrecisionType /*mixed_precision*/) {}

  /// Before each make(): names of the model's weights that may travel as fp8, because that is what they compute as.
  virtual void gather_in_fp8(const std::vector<std::string>& /*weights*/) {}

  /// Whether make() gives the model its memory and its place. Otherwise prepare() has moved it to the device before.
  virtual bool places_models() const { return false; }
  /// The engine of one model; null where it needs none (alone, or in evaluation mode). Collective.
  /// @throws ConfigError when the settings don't fit together, ShapeError when ranks bring different models.
  virtual std::shared_ptr<Engine> make(const ModelRef& model, const at::Device& device, bool evaluation_mode) const = 0;
};

/// An engine that can be asked for.
struct EngineKind {
  std::string name;
  /// Null when it is not asked for. Runs before this process joins a group. @throws ConfigError for settings that
  /// contradict each other, and for an engine that is not here, naming what comes nearest.
  std::function<std::unique_ptr<ChosenEngine>(const EngineRequest&)> choose;
};

/// All of them, in the order in which they are asked; the last one takes what nobody else does. A test may put one of
/// its own in front.
std::vector<EngineKind>& engine_kinds();

/// The first that is asked for. @throws ConfigError also for axes of the parallelism configuration that it can't split.
std::unique_ptr<ChosenEngine> choose_engine(const EngineRequest& request);

/// The resolved parallelism configuration, if the program or the environment has one.
std::optional<ParallelismConfig> requested_parallelism(const std::optional<ParallelismConfig>& given);

// The choices of engine_kinds(), each in its engine's folder.
std::unique_ptr<ChosenEngine> choose_deepspeed(const EngineRequest& request);
std::unique_ptr<ChosenEngine> choose_megatron_lm(const EngineRequest& request);
std::unique_ptr<ChosenEngine> choose_fsdp(const EngineRequest& request);
std::unique_ptr<ChosenEngine> choose_ddp(const EngineRequest& request);

}  // namespace accelerate::parallel
