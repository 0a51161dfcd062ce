#include "layouts.hpp"

#include <filesystem>
#include <stdexcept>

#include "accelerate/accelerator.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/kwargs.hpp"

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

std::string json(bool value) { return value ? "true" : "false"; }
/// The JSON of a dtype's name.
std::string json(const std::string& name) { return '"' + (name == "f32" ? "fp32" : name) + '"'; }

/// A layout's words about 16 bits, as DeepSpeed has them.
std::string precision_of(const Layout& layout) {
  const WholeIn16Bits& low = *layout.whole_in_16_bits;
  const std::string masters = json(!low.masters), of_sums = R"("grad_accum_dtype": )",
                    of_buffers = R"("buffer_dtype": )";
  const std::string data_types = !low.sums.empty()         ? of_sums + json(low.sums)
                                 : layout.converts_buffers ? of_buffers + json(layout.precisions.front())
                                                           : "";
  return R"(, "fp16": {"enabled": "auto", "initial_scale_power": 10, "loss_scale_window": )" +
         std::to_string(low.window) + R"(, "hysteresis": )" + std::to_string(low.hysteresis) +
         R"(, "consecutive_hysteresis": )" + json(low.consecutive_hysteresis) + R"(, "min_loss_scale": )" +
         std::to_string(low.smallest_scale) + R"(, "auto_cast": )" + json(low.casts_inputs) +
         R"(, "fp16_master_weights_and_grads": )" + masters +
         R"(}, "bf16": {"enabled": "auto", "check_grad_overflow": )" + json(low.looks_in_bf16) +
         R"(, "bf16_master_weights_and_grads": )" + masters + R"(, "bf16_optimizer_states": )" +
         json(!low.masters && layout.optimizer.empty()) + R"(}, "data_types": {)" + data_types + "}" +
         (layout.reduce_dtype.empty() ? "" : R"(, "communication_data_type": )" + json(layout.reduce_dtype));
}

/// Buckets and modules are small here, too. Any optimizer steps on the host.
/// @param more  in its section  @param top  beside it
Choose zero(int64_t stage, const Layout& layout, const std::string& more, const std::string& top) {
  const auto config = R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": )" +
                      std::to_string(*layout.own_limit) + precision_of(layout) + top +
                      R"(, "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
                      "zero_optimization": {"stage": )" +
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
  sharded("fsdp2_weights_8_bits", kSeveral, fsdp2({.quantized_weights = true})).weights_as_codes = true;
  sharded("fsdp2_gradients_4_bits", kSeveral, fsdp2({.quantized_gradients = true})).gradients_as_codes = true;
  sharded("fsdp2_frozen_8_bits", kAny, fsdp2({.quantized_nontrainable_weights = true})).frozen_as_codes = true;
  sharded("fsdp2_replicas", kEven, fsdp2({.dp_replicate_size = 2})).shard_ranks = -2;
  sharded("fsdp2_pairs", kEven, fsdp2({.dp_shard_size = 2})).shard_ranks = 2;
  sharded("fsdp2_offload", kAny, fsdp2({.cpu_offload = true}));
  sharded("fsdp2_disk", kAny, fsdp2({.offload_folder = std::filesystem::temp_directory_path() / "equivalence"}));
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
  const auto stage = [&](Layout layout, int64_t number, const std::string& more = "", const std::string& top = "") {
    if (layout.ranks.empty()) layout.ranks = kAny;
    layout.sharded = layout.starts_from_rank0 = true;
    layout.keeps = number < 3;
    layout.always_reduces |= number >= 2;
    if (!layout.own_limit) layout.own_limit = 0;
    if (!layout.whole_in_16_bits) layout.whole_in_16_bits.emplace();
    if (number == 0) layout.shard_ranks = 1;
    layout.choose = zero(number, layout, more, top);
    all.push_back(std::move(layout));
  };
  const std::string states_on_host = R"(, "offload_optimizer": {"device": "cpu"})";
  const std::string all_on_host = states_on_host + R"(, "offload_param": {"device": "cpu"})";
  const std::vector<std::string> bf16{"bf16"}, fp16{"fp16"}, low{"bf16", "fp16"};
  stage({.name = "deepspeed0"}, 0);
  stage({.name = "deepspeed1"}, 1);
  stage({.name = "deepspeed1_clipped", .own_limit = 0.05}, 1);
  stage({.name = "deepspeed2"}, 2);
  stage({.name = "deepspeed2_clipped", .own_limit = 0.05}, 2);
  stage({.name = "deepspeed3"}, 3);
  stage({.name = "deepspeed3_clipped", .own_limit = 0.05}, 3);
  stage({.name = "deepspeed3_eager"}, 3, R"(, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 30)");
  stage({.name = "deepspeed3_sequential"}, 3,
        R"(, "stage3_allgather_sequential": true, "stage3_max_live_parameters": 60)");
  stage({.name = "deepspeed3_modules"}, 3, R"(, "stage3_module_granularity_threshold": 100)");
  stage({.name = "deepspeed3_near", .ranks = kEven}, 3, R"(, "zero_hpz_partition_size": 2)");
  stage({.name = "deepspeed3_gradients_4_bits", .ranks = kSeveral, .gradients_as_codes = true}, 3,
        R"(, "zero_quantized_gradients": true)");
  stage({.name = "deepspeed3_few_bits",
         .ranks = kEven,
         .weights_as_codes = true,
         .gradients_as_codes = true,
         .frozen_as_codes = true},
        3,
        R"(, "zero_quantized_weights": true, "zero_quantized_gradients": true,
           "zero_quantized_nontrainable_weights": true, "zero_hpz_partition_size": 2)");
  stage({.name = "deepspeed0_prescaled"}, 0, "", R"(, "prescale_gradients": true)");
  stage({.name = "deepspeed1_predivided"}, 1, "", R"(, "gradient_predivide_factor": 2.0)");
  stage({.name = "deepspeed2_prescaled"}, 2, R"(, "reduce_scatter": false)", R"(, "prescale_gradients": true)");
  stage({.name = "deepspeed1_offload"}, 1, states_on_host);
  stage({.name = "deepspeed2_offload"}, 2, states_on_host);
  stage({.name = "deepspeed3_offload"}, 3, all_on_host);
  // On a disk.
  const auto on_disk = [](const char* what, const std::string& more = "") {
    return R"(, ")" + std::string(what) + R"(": {"device": "nvme", "nvme_path": ")" +
           (std::filesystem::temp_directory_path() / "equivalence").string() + "\"" + more + "}";
  };
  const std::string states_on_disk = on_disk("offload_optimizer");
  const std::string small_groups =
      on_disk("offload_optimizer", R"(, "pipeline_read": true, "pipeline_write": true)") + R"(, "sub_group_size": 20)";
  stage({.name = "deepspeed1_disk"}, 1, states_on_disk);
  stage({.name = "deepspeed2_disk_pipelined", .own_limit = 0.05}, 2, small_groups);
  stage({.name = "deepspeed3_disk_states"}, 3, states_on_disk);
  stage({.name = "deepspeed3_disk_parameters"}, 3, on_disk("offload_param", R"(, "max_in_cpu": 100)"));
  stage({.name = "deepspeed3_disk"}, 3, small_groups + on_disk("offload_param", R"(, "max_in_cpu": 0)"));
  stage({.name = "deepspeed3_disk_adam",
         .whole_in_16_bits = WholeIn16Bits{.masters = false},
         .precisions = low,
         .optimizer = "host_adam"},
        3, states_on_disk + on_disk("offload_param", R"(, "max_in_cpu": 0)"));
  // The dtype that gradients travel in, and add up in.
  stage({.name = "deepspeed0_sends_f32", .reduce_dtype = "f32"}, 0);
  stage({.name = "deepspeed1_sends_bf16", .reduce_dtype = "bf16"}, 1);
  stage({.name = "deepspeed2_sends_fp16", .reduce_dtype = "fp16"}, 2);
  stage({.name = "deepspeed3_sends_f32", .reduce_dtype = "f32"}, 3);
  stage({.name = "deepspeed1_sums_f32",
         .always_reduces = true,
         .whole_in_16_bits = WholeIn16Bits{.sums = "f32"},
         .precisions = low},
        1);
  stage({.name = "deepspeed1_sums_bf16", .whole_in_16_bits = WholeIn16Bits{.sums = "bf16"}, .precisions = bf16}, 1);
  stage({.name = "deepspeed2_sums_f32", .whole_in_16_bits = WholeIn16Bits{.sums = "f32"}, .precisions = low}, 2);
  stage({.name = "deepspeed3_sums_fp16", .whole_in_16_bits = WholeIn16Bits{.sums = "fp16"}, .precisions = fp16}, 3);
  // The loss scale.
  stage({.name = "deepspeed1_sensitive",
         .whole_in_16_bits = WholeIn16Bits{.window = 1, .hysteresis = 1},
         .precisions = fp16},
        1);
  stage({.name = "deepspeed2_patient",
         .whole_in_16_bits = WholeIn16Bits{.window = 1, .hysteresis = 3, .consecutive_hysteresis = true},
         .precisions = fp16},
        2);
  stage({.name = "deepspeed3_smallest_scale",
         .whole_in_16_bits = WholeIn16Bits{.hysteresis = 1, .smallest_scale = 512},
         .precisions = fp16},
        3);
  stage({.name = "deepspeed2_unchecked", .whole_in_16_bits = WholeIn16Bits{.looks_in_bf16 = false}, .precisions = bf16},
        2);
  stage({.name = "deepspeed0_unchecked", .whole_in_16_bits = WholeIn16Bits{.looks_in_bf16 = false}, .precisions = bf16},
        0);
  // Optimizers step on 16 bits; so have their states, unless DeepSpeed's Adam for the host keeps them.
  const WholeIn16Bits no_masters{.masters = false};
  stage({.name = "deepspeed1_low", .whole_in_16_bits = no_masters, .precisions = bf16}, 1);
  stage({.name = "deepspeed2_low", .own_limit = 0.05, .whole_in_16_bits = no_masters, .precisions = bf16}, 2);
  stage({.name = "deepspeed3_low", .whole_in_16_bits = no_masters, .precisions = bf16}, 3);
  for (const int64_t number : {1, 2, 3})
    stage({.name = "deepspeed" + std::to_string(number) + "_host_adam",
           .whole_in_16_bits = no_masters,
           .precisions = low,
           .optimizer = "host_adam"},
          number, number < 3 ? states_on_host : all_on_host);
  // The dtype that the model reads.
  stage({.name = "deepspeed3_casts", .whole_in_16_bits = WholeIn16Bits{.casts_inputs = true}, .precisions = fp16}, 3);
  stage({.name = "deepspeed2_buffers", .converts_buffers = true, .precisions = bf16}, 2);
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
