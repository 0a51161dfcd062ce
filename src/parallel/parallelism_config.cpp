#include "accelerate/parallel/parallelism_config.hpp"

#include <algorithm>
#include <array>
#include <cctype>

#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using Names = std::vector<std::string>;
using Size = std::optional<int64_t> ParallelismConfig::*;

struct ConfigAxis {
  const char* name;
  Size size;
  const char* variable;
};
/// In the mesh's order. Loops over them are the one place that knows it.
constexpr std::array<ConfigAxis, 5> kAxes = {
    {{"dp_replicate", &ParallelismConfig::dp_replicate_size, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"},
     {"dp_shard", &ParallelismConfig::dp_shard_size, "PARALLELISM_CONFIG_DP_SHARD_SIZE"},
     {"cp", &ParallelismConfig::cp_size, "PARALLELISM_CONFIG_CP_SIZE"},
     {"sp", &ParallelismConfig::sp_size, "PARALLELISM_CONFIG_SP_SIZE"},
     {"tp", &ParallelismConfig::tp_size, "PARALLELISM_CONFIG_TP_SIZE"}}};

Names enabled(std::initializer_list<std::pair<const char*, bool>> axes) {
  Names names;
  for (const auto& [name, on] : axes)
    if (on) names.emplace_back(name);
  return names;
}

template <class... Args> [[noreturn]] void refuse_parallelism(fmt::format_string<Args...> text, Args&&... args) {
  raise<ConfigError>("ParallelismConfig: {}", fmt::format(text, std::forward<Args>(args)...));
}

void warn_on_rank_zero(const std::string& warnings) {
  if (!warnings.empty() && environment::integer({"RANK"}).value_or(0) == 0)
    logs::warn("accelerate.parallel", "ParallelismConfig:{}", warnings);
}

TorchContextParallelConfig resolve_handler(TorchContextParallelConfig handler) {
  if (!handler.cp_comm_strategy)
    handler.cp_comm_strategy = environment::text("PARALLELISM_CONFIG_CP_COMM_STRATEGY").value_or("allgather");
  if (*handler.cp_comm_strategy != "allgather" && *handler.cp_comm_strategy != "alltoall")
    refuse_parallelism(
        "cp_comm_strategy is '{}', expected allgather or alltoall; see PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        *handler.cp_comm_strategy);
  return handler;
}

DeepSpeedSequenceParallelConfig resolve_handler(DeepSpeedSequenceParallelConfig handler) {
  if (!handler.sp_seq_length_is_variable)
    handler.sp_seq_length_is_variable =
        environment::flag("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE").value_or(true);
  if (!*handler.sp_seq_length_is_variable && !handler.sp_seq_length) {
    const auto given = environment::text("PARALLELISM_CONFIG_SP_SEQ_LENGTH");
    if (!given)
      refuse_parallelism(
          "sp_seq_length_is_variable is false, and sp_seq_length is unset, expected the length of all sequences there "
          "or in PARALLELISM_CONFIG_SP_SEQ_LENGTH");
    if (*given != "None") handler.sp_seq_length = environment::integer({"PARALLELISM_CONFIG_SP_SEQ_LENGTH"});
  }
  auto& attention = handler.sp_attn_implementation;
  if (!attention) attention = environment::text("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION");
  if (attention) {
    const Names known = {"flash_attention_2", "flash_attention_3", "sdpa"};
    const bool from_hub =
        attention->find('/') != std::string::npos && attention->find("flash-attn") != std::string::npos;
    if (std::find(known.begin(), known.end(), *attention) == known.end() && !from_hub)
      refuse_parallelism(
          "sp_attn_implementation is '{}', expected flash_attention_2, flash_attention_3, sdpa or a kernel from the "
          "hub such as kernels-community/flash-attn2; others can't run on a part of a sequence",
          *attention);
  }
  return handler;
}

}  // namespace

std::vector<int64_t> ParallelMesh::coordinates(int64_t rank) const {
  std::vector<int64_t> result(shape.size());
  int64_t rest = rank;
  for (size_t i = shape.size(); i-- > 0;) {
    result[i] = rest % shape[i];
    rest /= shape[i];
  }
  if (rank < 0 || rest != 0)
    refuse_parallelism(
        "rank {} is outside of the mesh; compare the job's number of processes with the product of the sizes", rank);
  return result;
}

int64_t ParallelMesh::coordinate(int64_t rank, const std::string& dim_name) const {
  const auto axis = std::find(dim_names.begin(), dim_names.end(), dim_name);
  return axis == dim_names.end() ? 0 : coordinates(rank)[static_cast<size_t>(axis - dim_names.begin())];
}

int64_t ParallelismConfig::total_size() const {
  int64_t product = 1;
  for (const auto& axis : kAxes) product *= (this->*axis.size).value_or(1);
  return product;
}
int64_t ParallelismConfig::data_parallel_size() const {
  return dp_replicate_size.value_or(1) * dp_shard_size.value_or(1);
}

Names ParallelismConfig::dp_dim_names() const {
  return enabled({{"dp_replicate", dp_replicate_enabled()}, {"dp_shard", dp_shard_enabled()}});
}
Names ParallelismConfig::non_dp_dim_names() const {
  return enabled({{"tp", tp_enabled()}, {"cp", cp_enabled()}, {"sp", sp_enabled()}});
}
Names ParallelismConfig::dp_shard_cp_dim_names() const {
  return enabled({{"dp_shard", dp_shard_enabled()}, {"cp", cp_enabled()}});
}
Names ParallelismConfig::dp_cp_dim_names() const {
  return enabled({{"dp_replicate", dp_replicate_enabled()}, {"dp_shard", dp_shard_enabled()}, {"cp", cp_enabled()}});
}
Names ParallelismConfig::fsdp_dim_names() const {
  return enabled({{"dp_replicate", dp_replicate_enabled()}, {"dp_shard_cp", true}});
}

ParallelMesh ParallelismConfig::mesh() const {
  ParallelMesh mesh;
  for (const auto& axis : kAxes) {
    const int64_t size = (this->*axis.size).value_or(1);
    if (size == 1) continue;
    mesh.dim_names.emplace_back(axis.name);
    mesh.shape.push_back(size);
  }
  return mesh;
}

namespace parallel {

bool parallelism_config_requested() { return environment::flag("ACCELERATE_USE_PARALLELISM_CONFIG").value_or(false); }

ParallelismConfig resolve(ParallelismConfig config) {
  int64_t product = 1;
  for (const auto& axis : kAxes) {
    auto& size = config.*axis.size;
    if (!size) size = environment::integer({axis.variable}).value_or(1);
    if (*size < 1)
      refuse_parallelism("{}_size is {}, expected a number of ranks, 1 at least (1: not used); see {}", axis.name,
                         *size, axis.variable);
    if (__builtin_mul_overflow(product, *size, &product))
      refuse_parallelism("the sizes up to {}_size = {} have a product that no job has; check them", axis.name, *size);
  }
  const auto backend = [](std::optional<std::string>& field, const char* name, const char* variable, const char* only) {
    if (!field) field = environment::text(variable).value_or(only);
    if (*field != only)
      refuse_parallelism("{} is '{}', expected {}, the only one that there is; see {}", name, *field, only, variable);
  };
  backend(config.cp_backend, "cp_backend", "PARALLELISM_CONFIG_CP_BACKEND", "torch");
  backend(config.sp_backend, "sp_backend", "PARALLELISM_CONFIG_SP_BACKEND", "deepspeed");
  if (config.cp_enabled() && config.sp_enabled())
    refuse_parallelism("cp_size is {} and sp_size {}, but both split the same sequences; set one of them to 1",
                       *config.cp_size, *config.sp_size);
  if ((config.tp_enabled() || config.cp_enabled()) && config.dp_replicate_enabled() && !config.dp_shard_enabled())
    refuse_parallelism(
        "tp_size is {} and cp_size {} with {} replicas that are not sharded, expected dp_shard_size above 1: gradients "
        "of split layers are averaged by the sharding engine only. Use dp_shard_size instead of dp_replicate_size, or "
        "both",
        *config.tp_size, *config.cp_size, *config.dp_replicate_size);

  // Handlers that the program gave are checked also where their axis is not used; the environment's are read only where
  // it is.
  if (config.tp_enabled() && !config.tp_handler) config.tp_handler.emplace();
  if (config.cp_enabled() && !config.cp_handler) config.cp_handler.emplace();
  if (config.sp_enabled() && !config.sp_handler) config.sp_handler.emplace();
  if (config.tp_handler && config.tp_handler->enable_async_tp) warn_on_rank_zero("\n  enable_async_tp has no effect.");
  if (config.cp_handler) config.cp_handler = resolve_handler(std::move(*config.cp_handler));
  if (config.sp_handler) config.sp_handler = resolve_handler(std::move(*config.sp_handler));
  return config;
}

ParallelismConfig validate(ParallelismConfig config, const JobFacts& job) {
  if (!job.multi_device && config.total_size() == 1) return config;
  if (config.total_size() == 1) config.dp_replicate_size = job.num_processes;
  // DeepSpeed forms the groups of its sequence parallelism from all processes; the configuration describes one of them.
  if (config.uses_device_mesh() && config.total_size() != job.num_processes) {
    std::vector<std::string> factors;
    for (const auto& axis : kAxes)
      if (const int64_t size = (config.*axis.size).value_or(1); size > 1)
        factors.push_back(fmt::format("{}_size {}", axis.name, size));
    refuse_parallelism("found {} = {}, but the job has {} processes; make the product of the sizes equal to it",
                       fmt::join(factors, " * "), config.total_size(), job.num_processes);
  }
  if (job.is_fsdp2 && !config.dp_shard_enabled() && !config.cp_enabled())
    refuse_parallelism(
        "sharding (FSDP) is on, but dp_shard_size and cp_size are 1, so that there is nothing to shard over; set "
        "dp_shard_size, or start without FSDP. Perhaps all ranks went into tp_size {} or dp_replicate_size {}",
        config.tp_size.value_or(1), config.dp_replicate_size.value_or(1));
  if (config.total_size() > 1 && !job.is_fsdp2 && !job.multi_device && !job.is_deepspeed)
    refuse_parallelism(
        "found sizes with the product {} in a job that is sharded by fsdp_version 1, or of one process, expected "
        "fsdp_version 2 or several processes without sharding; set fsdp_version to 2",
        config.total_size());
  std::string warnings;
  const auto unused = [&](bool given, bool used, const char* name) {
    if (given && !used) warnings += fmt::format("\n  {0}_handler is set, but {0}_size is 1: it has no effect.", name);
  };
  unused(config.tp_handler.has_value(), config.tp_enabled(), "tp");
  unused(config.cp_handler.has_value(), config.cp_enabled(), "cp");
  unused(config.sp_handler.has_value(), config.sp_enabled(), "sp");
  warn_on_rank_zero(warnings);
  return config;
}

}  // namespace parallel
}  // namespace accelerate
