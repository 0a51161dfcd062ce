#include "layouts.hpp"

#include <stdexcept>

#include "accelerate/accelerator.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"

namespace equivalence {
namespace {

using accelerate::AcceleratorOptions;
using accelerate::DistributedDataParallelKwargs;
using accelerate::FullyShardedDataParallelPlugin;
using accelerate::ShardingStrategy;

using Choose = std::function<void(AcceleratorOptions&)>;

Choose ddp(const DistributedDataParallelKwargs& kwargs) {
  return [kwargs](AcceleratorOptions& options) { options.kwargs_handlers.emplace_back(kwargs); };
}

/// Units are small, so that each model has several; states come whole.
Choose fsdp(FullyShardedDataParallelPlugin plugin) {
  plugin.auto_wrap_policy = accelerate::AutoWrapPolicy::size_based_wrap;
  plugin.min_num_params = 20;
  plugin.state_dict_type = accelerate::StateDictType::full_state_dict;
  return [plugin](AcceleratorOptions& options) { options.fsdp_plugin = plugin; };
}
Choose fsdp1(ShardingStrategy strategy, FullyShardedDataParallelPlugin plugin = {}) {
  plugin.fsdp_version = 1;
  plugin.sharding_strategy = strategy;
  return fsdp(plugin);
}
Choose fsdp2(FullyShardedDataParallelPlugin plugin = {}) {
  plugin.fsdp_version = 2;
  return fsdp(plugin);
}

/// Buckets and modules are small here, too.
/// @param more  in its section  @param top  beside it
Choose zero(int64_t stage, double limit, const std::string& more = "", const std::string& top = "") {
  const auto config = R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": )" + std::to_string(limit) + top +
                      R"(, "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": )" +
                      std::to_string(stage) + R"(, "reduce_bucket_size": 20, "allgather_bucket_size": 50,
                      "stage3_param_persistence_threshold": 4, "stage3_gather_16bit_weights_on_model_save": true)" +
                      more + "}}";
  return [config](AcceleratorOptions& options) {
    auto document = accelerate::DeepSpeedConfig(config);
    document.set_value("gradient_accumulation_steps", options.gradient_accumulation_steps);
    options.deepspeed_plugin = accelerate::DeepSpeedPlugin{.hf_ds_config = document};
  };
}

const std::vector<int64_t> kAny = {1, 2, 3, 4, 5, 6}, kSeveral = {2, 3, 4, 5, 6}, kEven = {4, 6};

std::vector<Layout> make_layouts() {
  std::vector<Layout> all = {
      {.name = "one", .ranks = {1}, .choose = [](AcceleratorOptions&) {}},
      {.name = "ddp", .ranks = kSeveral, .buffers_from_rank0 = true, .finds_unused = false, .choose = ddp({})},
      {.name = "ddp_unused",
       .ranks = kSeveral,
       .buffers_from_rank0 = true,
       .choose = ddp({.find_unused_parameters = true})},
      {.name = "ddp_static",
       .ranks = kSeveral,
       .buffers_from_rank0 = true,
       .finds_unused = false,
       .choose = ddp({.static_graph = true})},
      {.name = "ddp_views",
       .ranks = kSeveral,
       .buffers_from_rank0 = true,
       .finds_unused = false,
       .choose = ddp({.gradient_as_bucket_view = true})},
      {.name = "ddp_own_buffers",
       .ranks = kSeveral,
       .finds_unused = false,
       .choose = ddp({.broadcast_buffers = false})},
      {.name = "ddp_bf16_hook",
       .ranks = kSeveral,
       .buffers_from_rank0 = true,
       .finds_unused = false,
       .wire_dtype = "bf16",
       .choose = ddp({.comm_hook = accelerate::DDPCommunicationHookType::bf16})},
      {.name = "ddp_fp16_hook",
       .ranks = kSeveral,
       .buffers_from_rank0 = true,
       .finds_unused = false,
       .wire_dtype = "fp16",
       .choose = ddp({.comm_hook = accelerate::DDPCommunicationHookType::fp16})},
  };
  for (auto& layout : all) layout.starts_from_rank0 = true;
  const auto sharded = [&](const char* name, const std::vector<int64_t>& ranks, Choose choose) -> Layout& {
    const bool first = std::string(name).starts_with("fsdp1");
    all.push_back(
        {.name = name, .ranks = ranks, .sharded = true, .converts_buffers = first, .choose = std::move(choose)});
    return all.back();
  };
  sharded("fsdp2", kAny, fsdp2());
  sharded("fsdp2_keep", kAny, fsdp2({.reshard_after_forward = false})).keeps = true;
  sharded("fsdp2_near", kEven, fsdp2({.reshard_after_forward = int64_t{2}}));
  sharded("fsdp2_replicas", kEven, fsdp2({.dp_replicate_size = 2})).shard_ranks = -2;
  sharded("fsdp2_pairs", kEven, fsdp2({.dp_shard_size = 2})).shard_ranks = 2;
  sharded("fsdp2_offload", kAny, fsdp2({.cpu_offload = true}));
  sharded("fsdp2_recompute", kAny, fsdp2({.activation_checkpointing = true}));
  sharded("fsdp2_unlimited", kAny, fsdp2({.limit_all_gathers = false}));
  const auto in_bf16 = [](accelerate::MixedPrecision policy) {
    return FullyShardedDataParallelPlugin{.mixed_precision_policy = policy};
  };
  sharded("fsdp2_params_bf16", kAny, fsdp2(in_bf16({.param_dtype = at::kBFloat16}))).param_dtype = "bf16";
  sharded("fsdp2_reduce_bf16", kAny, fsdp2(in_bf16({.reduce_dtype = at::kBFloat16}))).reduce_dtype = "bf16";
  Layout& precise =
      sharded("fsdp2_reduce_f32", kAny, fsdp2(in_bf16({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat})));
  precise.param_dtype = "bf16";
  precise.reduce_dtype = "f32";
  sharded("fsdp1", kAny, fsdp1(ShardingStrategy::full_shard));
  sharded("fsdp1_prefetch", kAny,
          fsdp1(ShardingStrategy::full_shard,
                {.backward_prefetch = accelerate::BackwardPrefetch::backward_post, .forward_prefetch = true}));
  sharded("fsdp1_grad_op", kAny, fsdp1(ShardingStrategy::shard_grad_op)).keeps = true;
  Layout& whole = sharded("fsdp1_no_shard", kAny, fsdp1(ShardingStrategy::no_shard));
  whole.starts_from_rank0 = true;
  whole.shard_ranks = 1;
  whole.keeps = true;
  sharded("fsdp1_hybrid", kEven, fsdp1(ShardingStrategy::hybrid_shard, {.dp_shard_size = 2})).shard_ranks = 2;
  Layout& hybrid =
      sharded("fsdp1_hybrid_zero2", kEven, fsdp1(ShardingStrategy::hybrid_shard_zero2, {.dp_replicate_size = 2}));
  hybrid.shard_ranks = -2;
  hybrid.keeps = true;
  sharded("fsdp1_from_rank0", kAny, fsdp1(ShardingStrategy::full_shard, {.sync_module_states = true}))
      .starts_from_rank0 = true;
  const auto stage = [&](const char* name, int64_t number, double limit, const std::string& more = "",
                         const std::string& top = "") {
    Layout& layout = sharded(name, kAny, zero(number, limit, more, top));
    layout.starts_from_rank0 = layout.own_precision = layout.converts_buffers = true;
    layout.keeps = number < 3;
    layout.always_reduces = number >= 2;
    layout.own_limit = limit;
    if (number == 0) layout.shard_ranks = 1;
  };
  stage("deepspeed0", 0, 0);
  stage("deepspeed1", 1, 0);
  stage("deepspeed1_clipped", 1, 0.05);
  stage("deepspeed2", 2, 0);
  stage("deepspeed2_clipped", 2, 0.05);
  stage("deepspeed3", 3, 0);
  stage("deepspeed3_clipped", 3, 0.05);
  stage("deepspeed3_eager", 3, 0, R"(, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 30)");
  stage("deepspeed3_sequential", 3, 0, R"(, "stage3_allgather_sequential": true, "stage3_max_live_parameters": 60)");
  stage("deepspeed3_modules", 3, 0, R"(, "stage3_module_granularity_threshold": 100)");
  stage("deepspeed0_prescaled", 0, 0, "", R"(, "prescale_gradients": true)");
  stage("deepspeed1_predivided", 1, 0, "", R"(, "gradient_predivide_factor": 2.0)");
  stage("deepspeed2_prescaled", 2, 0, R"(, "reduce_scatter": false)", R"(, "prescale_gradients": true)");
  return all;
}

}  // namespace

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = make_layouts();
  return all;
}

const Layout& layout_named(const std::string& name) {
  for (const auto& layout : layouts())
    if (layout.name == name) return layout;
  throw std::runtime_error("case: unknown layout " + name);
}

}  // namespace equivalence
