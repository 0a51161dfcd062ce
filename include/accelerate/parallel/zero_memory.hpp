#pragma once

/// The bytes that a model needs for its states by DeepSpeed's functions of these names: in 16 bits, with Adam, without
/// activations. Rules of thumb by the number of parameters; what a training loop needs here is told by a dry run
/// (accelerator/dry_run.hpp, `accelerate estimate-memory --strategy`).
/// Source: DeepSpeed's manual, "Memory Requirements".

#include <cstdint>
#include <string>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Bytes.
struct ZeroMemoryNeeds {
  int64_t cpu = 0;            ///< on one host
  int64_t gpu = 0;            ///< on one GPU
  int64_t largest_layer = 0;  ///< of `gpu`: stage 3's largest layer while it is whole; 0 at stage 2
};

struct Zero2MemoryOptions {
  int64_t total_params;
  int64_t num_gpus_per_node = 1, num_nodes = 1;
  bool cpu_offload = true;                ///< of the optimizer
  double additional_buffer_factor = 1.5;  ///< that the host's need is multiplied by
};

struct Zero3MemoryOptions {
  int64_t total_params, largest_layer_params;
  int64_t num_gpus_per_node = 1, num_nodes = 1;
  bool cpu_offload = true;         ///< of the optimizer
  bool cpu_offload_params = true;  ///< of parameters; of no effect without the other, as theirs
  bool zero_init = true;           ///< the model is split while it is made
  double additional_buffer_factor = 1.5;
};

/// @throws ConfigError for numbers of parameters below 0, of GPUs or hosts below 1, and for more than bytes can be
/// counted. So do all of these.
ACCELERATE_API ZeroMemoryNeeds estimate_zero2_model_states_mem_needs(const Zero2MemoryOptions& options);
ACCELERATE_API ZeroMemoryNeeds estimate_zero3_model_states_mem_needs(const Zero3MemoryOptions& options);

/// Print a table of all combinations, to stdout.
ACCELERATE_API void estimate_zero2_model_states_mem_needs_all_cold(int64_t total_params, int64_t num_gpus_per_node = 1,
                                                                   int64_t num_nodes = 1,
                                                                   double additional_buffer_factor = 1.5);
ACCELERATE_API void estimate_zero3_model_states_mem_needs_all_cold(int64_t total_params, int64_t largest_layer_params,
                                                                   int64_t num_gpus_per_node = 1, int64_t num_nodes = 1,
                                                                   double additional_buffer_factor = 1.5);
/// The same of a model, deferred or not: each of its parameters once, and the module that has most of its own.
ACCELERATE_API void estimate_zero2_model_states_mem_needs_all_live(const ModelRef& model, int64_t num_gpus_per_node = 1,
                                                                   int64_t num_nodes = 1,
                                                                   double additional_buffer_factor = 1.5);
ACCELERATE_API void estimate_zero3_model_states_mem_needs_all_live(const ModelRef& model, int64_t num_gpus_per_node = 1,
                                                                   int64_t num_nodes = 1,
                                                                   double additional_buffer_factor = 1.5);
/// The tables as text.
ACCELERATE_API std::string zero2_memory_table(const Zero2MemoryOptions& options);
ACCELERATE_API std::string zero3_memory_table(const Zero3MemoryOptions& options);

}  // namespace accelerate
