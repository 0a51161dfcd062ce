#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "comm/mesh.hpp"
#include "residency/disk/direct_io.hpp"
#include "residency/residency.hpp"

namespace torch::nn {
class Module;
}

namespace accelerate::parallel {

/// Parameters that are gathered and given back together.
struct ShardedUnit {
  /// Dotted name of the module that the unit belongs to; "" is the model itself.
  std::string path;
  /// Full names, in the order of registration. Any mixture of dtypes and of trained and frozen ones.
  NamedTensors parameters;
  /// Computes in the parameters' own dtype, and so do its buffers.
  bool full_precision = false;
  /// Whole as long as nothing else asks for its place to change: no pass gives it back.
  bool stays = false;
};

/// The dtype of averaged gradients between backward and step.
enum class KeptGradients {
  in_master_dtype,         ///< the optimizer's
  as_reduced,              ///< as they travelled, sums over backwards too
  as_reduced_until_added,  ///< as they travelled, which nothing is lost by; sums are in the optimizer's
};

/// A folder, and how bytes go to its disk and come back.
struct DiskPlace {
  std::filesystem::path folder;
  residency::DiskRequests requests = {};
};

/// Optimizers' states lie on a disk, as do masters of another dtype than that of the computation, and gradients from
/// backward to step. A step goes through them in groups.
struct StatesOnDisk {
  DiskPlace place;
  bool reads_ahead = false;    ///< the next group, while one is stepped on
  bool writes_behind = false;  ///< the one before
  int64_t group_elements = 0;  ///< of this rank's shards at most, unless one unit has more
  int64_t groups_in_memory = 1;
};

/// Shards that units are gathered from lie on a disk.
struct ParametersOnDisk {
  DiskPlace place;
  int64_t elements_in_memory = 0;  ///< of this rank's, the first ones
};

/// How a model is sharded, in terms of nobody's plugin: src/parallel/fsdp translates PyTorch's and the reference's.
struct ShardingSettings {
  /// dp_replicate and dp_shard, whose product is all ranks that train the model.
  std::vector<comm::AxisSize> axes = {};
  /// So many neighbours keep parameters together between forward and backward, a divisor of dp_shard; 0: all of a
  /// replica.
  int64_t near = 0;
  const char* near_name = nullptr;  ///< the setting that says so, to warn of it where nothing goes; null: no warning
  /// The model's parameters by unit, each once; those in no unit are left alone. Called once, when deferred parameters
  /// may still be without values.
  std::function<std::vector<ShardedUnit>(const ModelRef&)> units = {};

  /// How units come and go.
  residency::Policy forward = {}, backward = {};
  bool prefetch_after_unit = false;  ///< in backward, the next one when a unit's gradients are complete
  /// Units that are whole when a pass ends stay so until values change, for the next micro-step. false: they go.
  bool keep_until_step = false;
  bool tells_changed_order = false;  ///< a warning when units are used in another order than before
  bool all_have_gradients = false;   ///< else a step is an error, which names what has none on any rank
  /// Why gradients can't be kept back and be averaged later, for who asks to; null: they can.
  const char* always_reduces = nullptr;

  std::optional<at::ScalarType> param_dtype = {};   ///< that units compute in; optimizers step in fp32 then
  bool masters_in_param_dtype = false;              ///< optimizers step in it, too
  bool first_values_in_param_dtype = false;         ///< what optimizers begin with has been rounded to it
  std::optional<at::ScalarType> reduce_dtype = {};  ///< of gradients on the wire; unset: their own
  /// Parameters whose gradients travel in `their_reduce_dtype` instead.
  std::function<bool(const at::Tensor& parameter)> travels_low = {};
  at::ScalarType their_reduce_dtype = at::kFloat;
  KeptGradients kept_gradients = {};
  bool sums_gradients = false;  ///< over all ranks, in place of averages
  /// Gradients are divided by it in the dtype in which they travel, and rounded to that, before they are added up;
  /// their sum is divided by what is left of the number of ranks. 1: all of it comes after the sum, where the sum can
  /// hold it.
  double divides_before = 1;
  bool step_in_backward = false;  ///< optimizers compute their steps when gradients are there, see Layer::steps_ahead()
  bool step_at_once = false;      ///< optimizers step when gradients are there, see Layer::steps_at_once()
  bool overlap_reduction = true;  ///< else backward waits for each, and holds one whole gradient less
  std::optional<at::ScalarType> buffer_dtype = {};
  std::set<std::string> fp32_buffers = {};                            ///< full names: fp32 instead
  std::optional<at::ScalarType> input_dtype = {}, output_dtype = {};  ///< of the model's forward
  /// Names of parameters of two or more dimensions that travel between ranks as fp8 (E4M3, scaled by the largest value
  /// of the whole parameter) and are decoded where they are used. No effect where nothing travels: alone, and where
  /// ranks share memory.
  std::set<std::string> fp8_weights = {};
  /// Values that travel or are kept in few bits: parameters of two or more dimensions in floating point (ZeRO++). With
  /// any of these ranks share no memory: numbers are those of what travels, wherever ranks are. Alone nothing travels.
  struct Quantized {
    bool any() const { return weights || gradients || frozen; }

    bool weights = false;    ///< are gathered as 8-bit codes, but those of units that stay
    bool gradients = false;  ///< travel as 4-bit codes: among a machine's ranks, and what these have, between machines
    bool frozen = false;     ///< weights that are frozen at the start are kept as 8-bit codes, and travel so
  } quantized = {};

  bool offload = false;      ///< what this rank holds lies on the host
  double offload_share = 1;  ///< of its elements, the last ones; what comes first stays on the device
  bool pin_memory = false;   ///< there
  std::optional<StatesOnDisk> states_on_disk = {};
  std::optional<ParametersOnDisk> parameters_on_disk = {};

  /// Why offload_states() is refused; null: it is not.
  const char* states_stay = "the model's states are where its plugin's cpu_offload has them";

  bool from_rank0 = false;          ///< all start with rank 0's values; the others need not have any
  bool ignored_from_rank0 = false;  ///< also of parameters in no unit
  /// Gives parameters of a module that has none yet memory and values; null: memory without values.
  std::function<void(torch::nn::Module&)> initialise = {};
  /// Replicas compare the shards that they hold alike, and all ranks what they have written to parameters, so often. 0:
  /// never. See DistributedDataParallelKwargs.
  int64_t compare_parameters_every = 0;
};

}  // namespace accelerate::parallel
