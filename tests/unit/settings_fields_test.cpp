// Settings of what other programs do (Megatron-LM, DeepSpeed, torch.compile, profilers, pods of TPUs): each field by
// where it arrives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "accelerate/config.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace settings_fields {
namespace {

using namespace accelerate;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(MegatronFields, ArriveInItsArguments) {
  struct Row {
    const char* argument;
    KwargsValue value;
    MegatronLMPlugin plugin;
  };
  const std::vector<Row> rows = {
      {"use_custom_fsdp", true, {.use_custom_fsdp = true}},
      {"overlap_cpu_optimizer_d2h_h2d", true, {.overlap_cpu_optimizer_d2h_h2d = true}},
      {"no_load_optim", true, {.no_load_optim = true}},
      {"eod_mask_loss", true, {.eod_mask_loss = true}},
      {"no_save_optim", true, {.no_save_optim = true}},
      {"optimizer_cpu_offload", true, {.optimizer_cpu_offload = true}},
      {"use_precision_aware_optimizer", true, {.use_precision_aware_optimizer = true}},
      {"decoder_last_pipeline_num_layers", int64_t{3}, {.decoder_last_pipeline_num_layers = 3}},
      {"recompute_granularity", std::string("selective"), {.recompute_granularity = "selective"}},
      {"recompute_method", std::string("block"), {.recompute_method = "block"}},
      {"recompute_num_layers", int64_t{4}, {.recompute_num_layers = 4}},
      {"attention_backend", false, {.attention_backend = false}},
      {"expert_model_parallel_size", int64_t{5}, {.expert_model_parallel_size = 5}},
      {"context_parallel_size", int64_t{6}, {.context_parallel_size = 6}},
      {"attention_dropout", 0.25, {.attention_dropout = 0.25}},
      {"hidden_dropout", 0.5, {.hidden_dropout = 0.5}},
      {"attention_softmax_in_fp32", false, {.attention_softmax_in_fp32 = false}},
      {"expert_tensor_parallel_size", int64_t{7}, {.expert_tensor_parallel_size = 7}},
      {"calculate_per_token_loss", false, {.calculate_per_token_loss = false}},
      {"use_rotary_position_embeddings", false, {.use_rotary_position_embeddings = false}},
      {"num_micro_batches", int64_t{8}, {.num_micro_batches = 8}},
      {"clip_grad", 2.0, {.gradient_clipping = 2.0}},
      {"sequence_parallel", true, {.sequence_parallelism = true}},
      {"use_distributed_optimizer", true, {.use_distributed_optimizer = true}},
      {"pipeline_model_parallel_size", int64_t{9}, {.pp_degree = 9}},
      {"pipeline_model_parallel_split_rank", int64_t{1}, {.pipeline_model_parallel_split_rank = 1}},
      {"num_layers_per_virtual_pipeline_stage", int64_t{2}, {.num_layers_per_virtual_pipeline_stage = 2}},
      {"lr_mult", 0.5, {.lr_mult = 0.5}},
      {"megatron_dataset_flag", true, {.megatron_dataset_flag = true}},
      {"eval_iters", int64_t{11}, {.eval_iters = 11}},
      {"eval_interval", int64_t{12}, {.eval_interval = 12}},
  };
  const auto usual = parallel::resolve(MegatronLMPlugin{}).megatron_lm_default_args();
  for (const auto& row : rows) {
    SCOPED_TRACE(row.argument);
    auto expected = usual;
    expected.at(row.argument) = row.value;
    EXPECT_NE(expected, usual);
    // Both make Megatron-LM average gradients in its own way.
    if (row.plugin.use_distributed_optimizer || row.plugin.pp_degree) expected.at("DDP_impl") = std::string("local");
    EXPECT_EQ(parallel::resolve(row.plugin).megatron_lm_default_args(), expected);
  }
}

/// Nobody but Megatron-LM reads these: they stay as they were given.
TEST(MegatronFields, StayAsTheyAre) {
  const auto plugin = parallel::resolve(MegatronLMPlugin{.recompute_activations = true,
                                                         .is_train_batch_min = false,
                                                         .train_iters = 1,
                                                         .train_samples = 2,
                                                         .weight_decay_incr_style = "linear",
                                                         .start_weight_decay = 0.25,
                                                         .end_weight_decay = 0.5,
                                                         .lr_decay_style = "cosine",
                                                         .lr_decay_iters = 3,
                                                         .lr_decay_samples = 4,
                                                         .lr_warmup_iters = 5,
                                                         .lr_warmup_samples = 6,
                                                         .lr_warmup_fraction = 0.125,
                                                         .min_lr = 1e-5,
                                                         .seq_length = 7,
                                                         .encoder_seq_length = 8,
                                                         .decoder_seq_length = 9,
                                                         .return_logits = true});
  EXPECT_TRUE(*plugin.recompute_activations && !plugin.is_train_batch_min && plugin.return_logits);
  EXPECT_THAT((std::vector{*plugin.train_iters, *plugin.train_samples, *plugin.lr_decay_iters, *plugin.lr_decay_samples,
                           *plugin.lr_warmup_iters, *plugin.lr_warmup_samples, *plugin.seq_length,
                           *plugin.encoder_seq_length, *plugin.decoder_seq_length}),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(
      (std::vector{*plugin.start_weight_decay, *plugin.end_weight_decay, *plugin.lr_warmup_fraction, plugin.min_lr}),
      ElementsAre(0.25, 0.5, 0.125, 1e-5));
  EXPECT_THAT((std::vector{plugin.weight_decay_incr_style, plugin.lr_decay_style}), ElementsAre("linear", "cosine"));
}

TEST(DeepSpeedFields, ArriveInItsConfiguration) {
  const auto plugin = parallel::resolve(DeepSpeedPlugin{.zero_stage = 3,
                                                        .is_train_batch_min = false,
                                                        .offload_optimizer_device = "nvme",
                                                        .offload_param_device = "nvme",
                                                        .offload_optimizer_nvme_path = "/states",
                                                        .offload_param_nvme_path = "/weights"});
  EXPECT_EQ(plugin.get_value("zero_optimization.offload_optimizer.nvme_path"), DeepSpeedValue("/states"));
  EXPECT_EQ(plugin.get_value("zero_optimization.offload_param.nvme_path"), DeepSpeedValue("/weights"));
  EXPECT_FALSE(plugin.is_train_batch_min) << "for DeepSpeed's own launcher";
  const auto narrow =
      parallel::resolve(DeepSpeedPlugin{.zero_stage = 2, .enable_msamp = true, .msamp_opt_level = "O2"});
  EXPECT_EQ(narrow.get_value("msamp.enabled"), DeepSpeedValue(true));
  EXPECT_EQ(narrow.get_value("msamp.opt_level"), DeepSpeedValue("O2"));
  EXPECT_FALSE(parallel::resolve(DeepSpeedPlugin{.zero_stage = 2}).get_value("msamp.enabled"));
}

TEST(ProfileFields, ArriveByName) {
  struct Row {
    const char* name;
    KwargsValue value;
    ProfileKwargs kwargs;
  };
  const std::vector<Row> rows = {
      {"record_shapes", true, {.record_shapes = true}}, {"profile_memory", true, {.profile_memory = true}},
      {"with_stack", true, {.with_stack = true}},       {"with_flops", true, {.with_flops = true}},
      {"with_modules", true, {.with_modules = true}},   {"output_trace_dir", "traces", {.output_trace_dir = "traces"}}};
  for (const auto& row : rows) EXPECT_EQ(to_kwargs(row.kwargs), (KwargsDict{{row.name, row.value}})) << row.name;
}

TEST(CompilerFields, ArriveByName) {
  EXPECT_EQ(to_kwargs(accelerate::resolve(TorchDynamoPlugin{.fullgraph = true})), (KwargsDict{{"fullgraph", true}}));
  EXPECT_EQ(to_kwargs(accelerate::resolve(TorchDynamoPlugin{.disable = true})), (KwargsDict{{"disable", true}}));
  EXPECT_EQ(
      to_dict(accelerate::resolve(TorchDynamoPlugin{.use_regional_compilation = true})).at("use_regional_compilation"),
      KwargsValue(true));
}

TEST(ParallelismFields, WhatTheReferenceIgnoresIsIgnoredWithAWord) {
  const auto said = [](bool async) {
    const support::Warnings warnings;
    parallel::resolve({.tp_size = 2, .tp_handler = TorchTensorParallelConfig{.enable_async_tp = async}});
    return warnings.text;
  };
  EXPECT_THAT(said(true), HasSubstr("enable_async_tp has no effect"));
  EXPECT_EQ(said(false), "");
}

TEST(TpuFields, ComeFromTheFile) {
  const auto file = std::filesystem::path(support::scratch_dir()) / "tpu.yaml";
  std::ofstream(file) << "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\n"
                      << "tpu_name: pod\ntpu_zone: europe-west4-a\ncommand_file: /setup.txt\ncommands:\n- ls\n- pwd\n";
  const TpuConfig config = tpu_config(file);
  EXPECT_EQ(config.name, "pod");
  EXPECT_EQ(config.zone, "europe-west4-a");
  EXPECT_EQ(config.command_file, "/setup.txt");
  EXPECT_THAT(config.commands, ElementsAre("ls", "pwd"));
}

}  // namespace
}  // namespace settings_fields
