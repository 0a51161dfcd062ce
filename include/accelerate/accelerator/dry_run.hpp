#pragma once

/// What a job of any size would need, found out on one processor in seconds: the program runs as it is, with tensors
/// that have sizes and no bytes, as one rank of as many as you like, and each tensor that begins or ends and each
/// collective is counted. docs/dry_run.md compares the counts with the formulas of the ZeRO paper.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/memory.hpp"

namespace accelerate {

/// What happened from one mark to the next, on this rank.
struct DryRunPhase {
  std::string name;
  MemoryByUse at_end;   ///< what is held when the phase ends
  MemoryByUse at_peak;  ///< when the sum was highest
  MemoryByUse peaks;    ///< each use's own highest, not at the same time
  comm::Traffic traffic;
};

struct DryRunReport {
  int64_t process_index = 0, num_processes = 1;
  std::vector<DryRunPhase> phases;  ///< in the order of their marks

  /// The last phase of that name. @throws ConfigError listing the names that there are.
  const DryRunPhase& phase(std::string_view name) const;
  int64_t peak_bytes() const;
};

struct DryRunOptions {
  int64_t num_processes = 1;
  int64_t process_index = 0;
};

/// Ends the phase that began with the last mark, or with the run, and gives it a name.
using DryRunMark = std::function<void(const std::string& phase)>;

/// Calls `program` as rank process_index of num_processes, on the meta device, and reports what it did. In it construct
/// an Accelerator, build the model under init_empty_weights(), prepare, and take some steps with inputs on
/// `accelerator.device()`; take at least two, because the first one doesn't know yet in which order units are used.
///
/// All runs through the same code as a real run: prepare(), the residency engine, gradient reduction, the optimizer.
/// What differs:
/// - values don't exist: a program that looks at one (item(), a comparison) throws c10's error for meta tensors.
/// Gradients never overflow; fp16's scaler can't run.
/// - the peers are always where this rank is. Nobody is late, and parameters are not compared.
/// - fused optimizer kernels have no version for the meta device: the plain step's temporaries, of the size of one
/// parameter's shard, are counted.
/// - CPU offload is counted as if there were one memory only; memory that an allocator loses to fragments is not
/// counted.
/// @throws ConfigError when this process has joined a group already, or for a rank outside of the group; what `program`
/// throws.
ACCELERATE_API DryRunReport dry_run(const DryRunOptions& options,
                                    const std::function<void(const DryRunMark& mark)>& program);

/// The closed formulas of the ZeRO paper (arXiv:1910.02054, sections 3.1, 5 and 7) for Adam, and the terms that our
/// engine adds to them. Bytes, on one rank.
struct ZeroEstimate {
  int64_t model_states = 0;  ///< after step(): parameters, gradients, moments
  int64_t gathered = 0;      ///< at most: whole parameters that are present at a time; the formulas leave them out
  int64_t volume = 0;        ///< of a step's collectives, as the paper counts: 2 or 3 times the parameters
  int64_t volume_saved =
      0;  ///< what of it is not needed because backward finds parameters still present, or needs no values of them
};

/// What the formulas need to know of a model. Elements.
struct ZeroShape {
  int64_t parameters = 0;
  int64_t largest_unit = 0;  ///< without the root
  int64_t root = 0;          ///< parameters of no other unit
  int64_t last_unit = 0;     ///< the unit that backward starts with
  int64_t num_processes = 1;
  int64_t master_bytes = 4;   ///< of a parameter in the shard, of its gradient there, and of each of Adam's two moments
  int64_t compute_bytes = 4;  ///< of a gathered parameter
  int64_t reduce_bytes = 4;   ///< of a gradient on the wire
};
/// Of a model, deferred or not, under a plugin's wrap policy and precision. @throws ConfigError as the wrap policy
/// does.
ACCELERATE_API ZeroShape zero_shape(const ModelRef& model, FullyShardedDataParallelPlugin plugin,
                                    int64_t num_processes);
/// @throws ConfigError for hybrid strategies.
ACCELERATE_API ZeroEstimate zero_estimate(ShardingStrategy strategy, const ZeroShape& shape);

}  // namespace accelerate
