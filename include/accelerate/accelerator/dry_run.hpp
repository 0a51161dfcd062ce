#pragma once

/// Finds out on one processor, in seconds, how much a job of any size would need. The program runs as it is, as one
/// rank of as many as you like, with tensors that have sizes and no bytes. Each tensor that begins or ends and each
/// collective is counted. docs/dry_run.md compares the counts with the formulas of the ZeRO paper.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/comm/traffic.hpp"
#include "accelerate/parallel/zero_estimate.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/memory.hpp"

namespace accelerate {

/// The counts from one mark to the next, on this rank.
struct DryRunPhase {
  std::string name;
  MemoryByUse at_end;   ///< the bytes that are held when the phase ends
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
/// A dry run goes through the same code as a real run: prepare(), the residency engine, gradient reduction, the
/// optimizer. It differs in this:
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

}  // namespace accelerate
