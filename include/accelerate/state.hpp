#pragma once

/// Rank, world, device and the settings that all Accelerators of a process share.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include "accelerate/utils/core_kwargs.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

namespace comm {
class TrafficCounter;
}

/// Names of the reference; only the kinds that this build can run.
enum class DistributedType { NO, MULTI_CPU, MULTI_GPU, MULTI_XPU, DEEPSPEED, FSDP };
ACCELERATE_API const char* to_string(DistributedType type);

/// FP8: products of linear layers in 8 bits, all else as in BF16 (docs/fp8.md).
enum class PrecisionType { NO, FP16, BF16, FP8 };
ACCELERATE_API const char* to_string(PrecisionType type);
/// "no", "fp16", "bf16" or "fp8". @throws ConfigError naming the valid values.
ACCELERATE_API PrecisionType precision_from_string(const std::string& text);

// Of accelerate/utils/split.hpp, which the caller includes.
template <class T>
T split_between_processes(const T& inputs, int64_t num_processes, int64_t process_index, bool apply_padding);

struct PartialStateOptions {
  std::optional<bool> cpu;  ///< stay on the CPU; unset: the environment's ACCELERATE_USE_CPU
  InitProcessGroupKwargs process_group;
  /// Pretend to be one rank of many, on the meta device and without peers; see dry_run(). Set by that.
  struct Pretence {
    int64_t process_index, num_processes;
    std::shared_ptr<comm::TrafficCounter> traffic;
  };
  std::optional<Pretence> pretence;
};

/// The knowledge of a process about itself and its peers. All instances share one state: the first one reads the
/// environment (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or Open MPI's, MPICH's,
/// MVAPICH's and Slurm's variables) and joins the process group; alone (WORLD_SIZE unset or 1) there is no group and no
/// store.
/// Collective on first construction: every rank constructs one. Blocks until all have, at most the group's timeout.
/// @throws ConfigError on contradictory variables or when constructed again with another `cpu`; CommError when peers do
/// not arrive.
class ACCELERATE_API PartialState {
 public:
  explicit PartialState(const PartialStateOptions& options = {});
  const at::Device& device() const;
  DistributedType distributed_type() const;
  int64_t num_processes() const;
  int64_t process_index() const;
  int64_t local_process_index() const;
  int64_t num_local_processes() const;
  bool is_main_process() const { return process_index() == 0; }
  bool is_local_main_process() const { return local_process_index() == 0; }
  bool is_last_process() const { return process_index() == num_processes() - 1; }
  bool use_distributed() const { return num_processes() > 1; }
  /// ACCELERATE_DEBUG_MODE: collectives compare more over all ranks before they start (what is padded, FSDP's units).
  bool debug() const;
  const std::string& backend() const;         ///< "gloo", "nccl", "mpi", or "" alone
  void wait_for_everyone() const;             ///< collective barrier
  void print(const std::string& text) const;  ///< and a line end, on the main process of each machine
  /// This rank's part of inputs; see accelerate/utils/split.hpp, which the caller includes.
  template <class T> T split_between_processes(const T& inputs, bool apply_padding = false) const {
    return accelerate::split_between_processes(inputs, num_processes(), process_index(), apply_padding);
  }
  /// The text that the reference prints: a line each for the environment, the numbers of processes and the device.
  std::string text() const;
  /// RAII: the main process runs the scope first, the others after it has left.
  [[nodiscard]] std::shared_ptr<void> main_process_first() const;
  [[nodiscard]] std::shared_ptr<void> local_main_process_first() const;

  template <class F> void on_main_process(F&& f) const { on_process(f, 0); }
  template <class F> void on_local_main_process(F&& f) const { on_local_process(f, 0); }
  template <class F> void on_last_process(F&& f) const { on_process(f, num_processes() - 1); }
  template <class F> void on_process(F&& f, int64_t process) const {
    if (process_index() == process) f();
  }
  template <class F> void on_local_process(F&& f, int64_t local_process) const {
    if (local_process_index() == local_process) f();
  }
  /// Tells all peers that this rank can't go on: those that wait for it throw a CommError with `reason` within seconds.
  /// Not collective, never throws.
  void abort(const std::string& reason) const noexcept;
  static bool initialized();  ///< whether some PartialState of this process has been constructed
  static void reset();        ///< leaves the process group and forgets everything; for tests and the end of a program

 private:
  struct Shared;
  static std::shared_ptr<Shared>& shared();
  std::shared_ptr<Shared> shared_;
};

ACCELERATE_API std::ostream& operator<<(std::ostream& out, const PartialState& state);

struct DeepSpeedPlugin;  // accelerate/parallel/deepspeed_plugin.hpp
class LoaderStatus;      // accelerate/state/loader_status.hpp

struct AcceleratorStateOptions {
  std::optional<std::string> mixed_precision;  ///< "no", …, "fp8"; unset: ACCELERATE_MIXED_PRECISION, else "no"
  PartialStateOptions partial;
};

/// PartialState plus what concerns training; shared by all Accelerators.
/// @throws ConfigError when constructed again with another mixed_precision.
class ACCELERATE_API AcceleratorState : public PartialState {
 public:
  explicit AcceleratorState(const AcceleratorStateOptions& options = {});
  PrecisionType mixed_precision() const;
  std::string text() const;  ///< that of PartialState, and the precision

  // DeepSpeed's settings (accelerate/parallel/deepspeed_plugin.hpp), where models are trained by them.
  /// The one for objects that are prepared next, every field decided. All three throw ConfigError without any.
  const DeepSpeedPlugin& deepspeed_plugin() const;
  const DeepSpeedPlugin& get_deepspeed_plugin(const std::string& name) const;  ///< of the options' deepspeed_plugins
  /// From now on prepare() goes by this one; prepared objects stay as they are. Not collective, but on all ranks alike.
  void select_deepspeed_plugin(const std::string& name) const;
  static bool initialized();
  /// Forgets the training settings; with `reset_partial_state`, the process group too.
  static void reset(bool reset_partial_state = false);
};

ACCELERATE_API std::ostream& operator<<(std::ostream& out, const AcceleratorState& state);

/// The state of gradient accumulation; shared by all Accelerators.
class ACCELERATE_API GradientState {
 public:
  GradientState();
  explicit GradientState(const GradientAccumulationPlugin& plugin);
  bool sync_gradients() const;
  void set_sync_gradients(bool value) const;
  int64_t num_steps() const;
  void set_num_steps(int64_t value) const;
  bool adjust_scheduler() const;
  bool sync_with_dataloader() const;
  bool sync_each_batch() const;
  GradientAverage average() const;
  LoaderStatus* active_dataloader() const;  ///< innermost loader being iterated, or null
  bool in_dataloader() const { return active_dataloader() != nullptr; }
  /// See LoaderStatus; outside of a loop false, -1 and 0.
  bool end_of_dataloader() const;
  int64_t remainder() const;
  int64_t own_rows() const;
  void add_dataloader(LoaderStatus* loader) const;
  void remove_dataloader(LoaderStatus* loader) const;
  static void reset();

 private:
  struct Shared;
  static std::shared_ptr<Shared>& shared();
  std::shared_ptr<Shared> shared_;
};

}  // namespace accelerate
