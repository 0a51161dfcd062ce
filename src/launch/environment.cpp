#include "launch/environment.hpp"

namespace accelerate::launcher {

std::map<std::string, std::string> build_environment(const Job& job, const Host& host, int64_t local_rank) {
  const auto& o = job.options;
  std::map<std::string, std::string> env{
      {"ACCELERATE_MIXED_PRECISION", o.mixed_precision},
      {"OMP_NUM_THREADS", std::to_string(job.omp_threads)},
      // Compilers of graphs are Python's; a Python program started from here expects to find that none was asked for.
      {"ACCELERATE_DYNAMO_BACKEND", "NO"},
      {"ACCELERATE_DYNAMO_MODE", "default"},
      {"ACCELERATE_DYNAMO_USE_DYNAMIC", "False"},
      {"ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"},
      {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"},
  };
  // The reference leaves the variable out when it starts several processes that may use accelerators.
  if (o.cpu || !job.distributed()) env.emplace("ACCELERATE_USE_CPU", o.cpu ? "True" : "False");
  if (o.cpu) {
    env.emplace("KMP_AFFINITY", "granularity=fine,compact,1,0");
    env.emplace("KMP_BLOCKTIME", "1");
  }
  if (o.debug) env.emplace("ACCELERATE_DEBUG_MODE", "true");
  if (o.gradient_accumulation_steps) env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = std::to_string(*o.gradient_accumulation_steps);
  if (o.mixed_precision == "fp8")
    env.insert({{"ACCELERATE_FP8_MARGIN", "0"},
                {"ACCELERATE_FP8_INTERVAL", "1"},
                {"ACCELERATE_FP8_FORMAT", "HYBRID"},
                {"ACCELERATE_FP8_AMAX_HISTORY_LEN", "1024"},
                {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "most_recent"},
                {"ACCELERATE_FP8_OVERRIDE_FPROP", "False"},
                {"ACCELERATE_FP8_OVERRIDE_DGRAD", "False"},
                {"ACCELERATE_FP8_OVERRIDE_WGRAD", "False"},
                {"ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", "False"},
                {"ACCELERATE_FP8_OPT_LEVEL", "O2"},
                {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "1"},
                {"ACCELERATE_FP8_PAD_INNER_DIM", "1"}});
  if (!job.distributed()) return env;

  const auto rank = std::to_string(job.rank(local_rank));
  const auto world_size = std::to_string(job.world_size);
  env.insert({{"MASTER_ADDR", job.main_ip},
              {"MASTER_PORT", std::to_string(job.main_port)},
              {"RANK", rank},
              {"LOCAL_RANK", std::to_string(local_rank)},
              {"WORLD_SIZE", world_size},
              {"LOCAL_WORLD_SIZE", std::to_string(job.local_world_size)},
              {"GROUP_RANK", std::to_string(job.machine_rank)},
              {"GROUP_WORLD_SIZE", std::to_string(o.num_machines)},
              {"ROLE_NAME", "default"},
              {"ROLE_RANK", rank},
              {"ROLE_WORLD_SIZE", world_size},
              {"TORCHELASTIC_RUN_ID", job.run_id},
              {"TORCHELASTIC_RESTART_COUNT", "0"},
              {"TORCHELASTIC_MAX_RESTARTS", "0"},
              // The launcher opens no port: rank 0 hosts the store.
              {"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  if (!host.environment.contains("TORCH_NCCL_ASYNC_ERROR_HANDLING")) env.emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  return env;
}

std::vector<std::string> merged(const Host& host, const std::map<std::string, std::string>& changes) {
  auto all = changes;
  all.insert(host.environment.begin(), host.environment.end());  // keeps what `changes` already has
  std::vector<std::string> result;
  for (const auto& [name, value] : all) result.push_back(name + "=" + value);
  return result;
}

}  // namespace accelerate::launcher
