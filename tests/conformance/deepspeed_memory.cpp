// DeepSpeed's rules of thumb for model states, in bytes and as they are printed.
#include "accelerate/parallel/zero_memory.hpp"
#include "runner.hpp"

namespace conformance::deepspeed_memory_cases {
namespace {

using accelerate::Zero2MemoryOptions;
using accelerate::Zero3MemoryOptions;

std::string printed(const std::string& function, const json& a) {
  if (function == "estimate_zero2_model_states_mem_needs_all_cold")
    return accelerate::zero2_memory_table({.total_params = a.at("total_params"),
                                           .num_gpus_per_node = a.value("num_gpus_per_node", int64_t{1}),
                                           .num_nodes = a.value("num_nodes", int64_t{1}),
                                           .additional_buffer_factor = a.value("additional_buffer_factor", 1.5)});
  if (function != "estimate_zero3_model_states_mem_needs_all_cold")
    throw std::runtime_error("there is no function " + function);
  return accelerate::zero3_memory_table({.total_params = a.at("total_params"),
                                         .largest_layer_params = a.at("largest_layer_params"),
                                         .num_gpus_per_node = a.value("num_gpus_per_node", int64_t{1}),
                                         .num_nodes = a.value("num_nodes", int64_t{1}),
                                         .additional_buffer_factor = a.value("additional_buffer_factor", 1.5)});
}

void run(const json& file, Report& report) {
  const auto compare = [&](const json& row, const json& found) {
    report.check(row.back() == found, [&] { return row.dump() + "\n    found " + found.dump(); });
  };
  for (const json& row : file.at("zero2"))
    report.guarded(row, [&] {
      const auto needs = accelerate::estimate_zero2_model_states_mem_needs({.total_params = row[0],
                                                                            .num_gpus_per_node = row[1],
                                                                            .num_nodes = row[2],
                                                                            .cpu_offload = row[3],
                                                                            .additional_buffer_factor = row[4]});
      compare(row, {needs.cpu, needs.gpu});
    });
  for (const json& row : file.at("zero3"))
    report.guarded(row, [&] {
      const auto needs = accelerate::estimate_zero3_model_states_mem_needs({.total_params = row[0],
                                                                            .largest_layer_params = row[1],
                                                                            .num_gpus_per_node = row[2],
                                                                            .num_nodes = row[3],
                                                                            .cpu_offload = row[5],
                                                                            .cpu_offload_params = row[4],
                                                                            .zero_init = row[6],
                                                                            .additional_buffer_factor = row[7]});
      compare(row, {needs.cpu, needs.gpu, needs.largest_layer});
    });
  for (const json& row : file.at("texts")) report.guarded(row, [&] { compare(row, printed(row[0], row[1])); });
}

const Registration registration("deepspeed_memory", {run});

}  // namespace
}  // namespace conformance::deepspeed_memory_cases
