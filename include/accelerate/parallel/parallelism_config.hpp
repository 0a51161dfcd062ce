#pragma once

/// How the ranks of a job are laid out over kinds of parallelism: the reference's ParallelismConfig and its handlers.
/// Needs no LibTorch.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct TorchTensorParallelConfig {
  /// Overlap communication with products. The reference warns that it ignores it; `resolve` does too.
  bool enable_async_tp = false;
};

struct TorchContextParallelConfig {
  /// "allgather" or "alltoall". PARALLELISM_CONFIG_CP_COMM_STRATEGY, else allgather.
  std::optional<std::string> cp_comm_strategy;
};

struct DeepSpeedSequenceParallelConfig {
  /// Needed when sp_seq_length_is_variable is false, read only then: PARALLELISM_CONFIG_SP_SEQ_LENGTH ("None": none).
  std::optional<int64_t> sp_seq_length;
  /// PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE, else true.
  std::optional<bool> sp_seq_length_is_variable;
  /// "flash_attention_2", "flash_attention_3", "sdpa", or a kernel from the hub with "flash-attn" in its name.
  /// PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION, else unset.
  std::optional<std::string> sp_attn_implementation;
};

/// Axes with more than one rank, outermost first: dp_replicate, dp_shard, cp, sp, tp. Ranks count through them with the
/// last axis fastest.
struct ACCELERATE_API ParallelMesh {
  std::vector<std::string> dim_names;
  std::vector<int64_t> shape;

  /// The place of a rank on each axis. @throws ConfigError for a rank outside of the mesh.
  std::vector<int64_t> coordinates(int64_t rank) const;
  /// Its place on one axis; 0 on an axis of one rank, which the mesh leaves out.
  int64_t coordinate(int64_t rank, const std::string& dim_name) const;
};

/// Numbers of ranks along each axis; their product is the job's. Fields that are unset come from
/// PARALLELISM_CONFIG_<FIELD>, else 1; what is set wins. The functions below read unset sizes as 1; call them on what
/// `parallel::resolve` returns.
///
/// `Accelerator` builds from it what exists here: dp_replicate alone is data parallelism, dp_shard alone sharding over
/// all ranks (FSDP version 2), both together replicas of a sharded model. Other axes are described (and refused there),
/// so that tools can plan with them. Source: accelerate 1.15.0, ParallelismConfig. Conformance:
/// parallelism_config.json.
struct ACCELERATE_API ParallelismConfig {
  /// Copies of the (sharded) model.
  std::optional<int64_t> dp_replicate_size;
  /// Ranks that parameters, gradients and optimizer states are split over.
  std::optional<int64_t> dp_shard_size;
  /// Ranks that split each layer.
  std::optional<int64_t> tp_size;
  /// Ranks that split a sequence in attention.
  std::optional<int64_t> cp_size;
  /// "torch".
  std::optional<std::string> cp_backend;
  /// Ranks that split a sequence between layers, and heads in attention. Not with cp.
  std::optional<int64_t> sp_size;
  /// "deepspeed".
  std::optional<std::string> sp_backend;
  /// A default one where the axis has more than one rank.
  std::optional<TorchTensorParallelConfig> tp_handler;
  std::optional<TorchContextParallelConfig> cp_handler;
  std::optional<DeepSpeedSequenceParallelConfig> sp_handler;

  int64_t total_size() const;
  int64_t data_parallel_size() const;
  int64_t non_data_parallel_size() const { return total_size() / data_parallel_size(); }
  bool dp_replicate_enabled() const { return dp_replicate_size.value_or(1) > 1; }
  bool dp_shard_enabled() const { return dp_shard_size.value_or(1) > 1; }
  bool tp_enabled() const { return tp_size.value_or(1) > 1; }
  bool cp_enabled() const { return cp_size.value_or(1) > 1; }
  bool sp_enabled() const { return sp_size.value_or(1) > 1; }

  /// Axes over which ranks get different batches, …
  std::vector<std::string> dp_dim_names() const;
  /// … and the same one (or parts of its sequences).
  std::vector<std::string> non_dp_dim_names() const;
  /// Axes that are joined to one, over which the parameters are split.
  std::vector<std::string> dp_shard_cp_dim_names() const;
  /// Axes over which the loss is averaged.
  std::vector<std::string> dp_cp_dim_names() const;
  /// Axes of the mesh that FSDP is given: the joint one, and that of the replicas.
  std::vector<std::string> fsdp_dim_names() const;
  ParallelMesh mesh() const;
  /// Whether this library's mesh has the groups: DeepSpeed makes those of its sequence parallelism itself.
  bool uses_device_mesh() const { return !(sp_enabled() && sp_backend.value_or("deepspeed") == "deepspeed"); }

  /// Which part of the data a rank's (sharding) loader reads, of how many: ranks that differ only in tp or cp read the
  /// same. Without a device mesh nothing is known about ranks, and a loader reads by its rank in the whole job.
  int64_t data_loader_process_index(int64_t rank) const {
    return uses_device_mesh() ? rank / non_data_parallel_size() : rank;
  }
  int64_t data_loader_num_processes(int64_t num_processes) const {
    return uses_device_mesh() ? data_parallel_size() : num_processes;
  }
};

namespace parallel {

/// Whether `accelerate launch --use_parallelism_config` started this process. @throws ConfigError when
/// ACCELERATE_USE_PARALLELISM_CONFIG is no truth value.
ACCELERATE_API bool parallelism_config_requested();

/// The configuration with every field decided, handlers of used axes included. @throws ConfigError for values and
/// combinations that don't exist.
ACCELERATE_API ParallelismConfig resolve(ParallelismConfig config);

/// The facts about a job that a configuration is checked against.
struct JobFacts {
  int64_t num_processes = 1;
  bool is_fsdp2 = false;      ///< models are sharded by an fsdp plugin of version 2
  bool multi_device = false;  ///< several processes, without sharding
  bool is_deepspeed = false;
};

/// A resolved configuration as it applies to a job: one that names no axis at all means a replica per process where
/// there are several (and no sharding). Handlers of axes of one rank are warned of on rank 0. @throws ConfigError when
/// it does not fit.
ACCELERATE_API ParallelismConfig validate(ParallelismConfig resolved, const JobFacts& job);

}  // namespace parallel
}  // namespace accelerate
