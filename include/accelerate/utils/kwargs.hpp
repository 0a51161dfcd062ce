#pragma once

/// The reference's plugins and keyword handlers, as aggregates: name the fields that differ from the default.
/// Source: reference features table, section 1.6. Fields that the reference fills from the environment are filled the
/// same way where that is said.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/core_kwargs.hpp"

namespace accelerate {

enum class DDPCommunicationHookType { no, fp16, bf16, power_sgd, batched_power_sgd };

/// How PowerSGD compresses gradients: a matrix travels as two narrow ones whose product comes near it. The loss
/// is added to the next step's gradients. Defaults and meaning are those of PyTorch's PowerSGDState (arXiv:1905.13727).
struct PowerSGDOptions {
  /// Columns of the narrow matrices, at least 1. Each doubling doubles what travels.
  int64_t matrix_approximation_rank = 1;
  /// Steps that are averaged whole before; at least 2 with use_error_feedback or warm_start.
  int64_t start_powerSGD_iter = 1000;
  /// A matrix is compressed if that makes it smaller by more than this factor. power_sgd only.
  double min_compression_rate = 2;
  /// Add what compression has lost to the next step's gradients; takes memory for the gradients a second time.
  bool use_error_feedback = true;
  /// Begin with the last step's matrices instead of random ones.
  bool warm_start = true;
  /// Added to norms of columns, for gradients that may be all zeros. power_sgd only.
  double orthogonalization_epsilon = 0;
  /// Of the random matrices, which are the same on all ranks.
  uint32_t random_seed = 0;
  /// Rank 0 writes a line about what compression has saved to stderr, each so many steps; unset: never.
  std::optional<int64_t> compression_stats_logging_frequency;
  /// Matrices of one shape are multiplied together. power_sgd only.
  bool batch_tensors_with_same_shape = false;

  bool operator==(const PowerSGDOptions&) const = default;
};

namespace parallel {
struct GradientBucket;
class HookGroup;
class GradientFuture;
/// A communication hook of your own, see accelerate/parallel/communication_hook.hpp.
using CommunicationHook = std::function<GradientFuture(GradientBucket&, HookGroup&)>;
}  // namespace parallel

struct DistributedDataParallelKwargs {
  /// Refused unless 0: a process computes on one device, and no batch is split along a dimension.
  int64_t dim = 0;
  bool broadcast_buffers = true;
  int64_t bucket_cap_mb = 25;
  bool find_unused_parameters = false;
  /// Refused: whether all gradients were averaged is always checked.
  bool check_reduction = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  /// Compress gradients on the wire.
  DDPCommunicationHookType comm_hook = DDPCommunicationHookType::no;
  /// Convert gradients to this type (no, fp16, bf16) before comm_hook, or communication_hook, gets them.
  DDPCommunicationHookType comm_wrapper = DDPCommunicationHookType::no;
  /// Of power_sgd and batched_power_sgd.
  PowerSGDOptions comm_state_option = {};
  /// Extension: averages gradients in the place of comm_hook.
  parallel::CommunicationHook communication_hook = {};
  /// Extension: after each so many averaged backwards, and after 1, 2, 4, … 256, all ranks compare their parameters,
  /// and one that differs from rank 0's by more than roundings is a ConfigError with its name. Never where ranks join
  /// with uneven inputs or have a communication_hook. Of sharded models replicas (HYBRID_SHARD, NO_SHARD) do so, and
  /// what ranks have written to parameters is compared. 0: never.
  int64_t compare_parameters_every = 500;
};

struct GradScalerKwargs {
  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;
};

class Profile;  // accelerate/profiler.hpp

/// Settings of `Accelerator::profile`.
struct ProfileKwargs {
  /// "cpu", "cuda", "xpu", "mtia" or "hpu"; unset: all that there are. One that is not there is left out with a
  /// warning.
  std::optional<std::vector<std::string>> activities;
  /// Steps, counted by Profile::step(): skip_first once, then wait, warmup, active, over and over or `repeat` times.
  /// wait, warmup and active must be there. Unset: all is recorded, and steps mark nothing.
  std::optional<std::map<std::string, int64_t>> schedule_option;
  /// Called with each recording that is complete: at the end of each cycle of the schedule, and of the profile where it
  /// still records then. In step() or stop(), on the thread that calls them.
  std::function<void(Profile&)> on_trace_ready;
  /// Shapes of operators' inputs.
  bool record_shapes = false;
  /// Bytes that operators allocate and release.
  bool profile_memory = false;
  /// The callers of operators: the lines of TorchScript, else the functions of C++ on the stack, as far as the program
  /// and its libraries have names for them. LibTorch's own are left out.
  bool with_stack = false;
  /// Floating point operations of matrix products, convolutions, additions and multiplications, by formulas.
  bool with_flops = false;
  /// The modules in which operators were called: those of TorchScript, as in PyTorch, else the classes whose `forward`
  /// was on the stack, by the names of functions. Not those that the compiler inlined, nor of stripped programs.
  bool with_modules = false;
  /// When the profile ends, its last recording goes here as profile_<rank>.json, in Chrome's format; unset: nowhere.
  std::optional<std::string> output_trace_dir;
};

}  // namespace accelerate
