// Cases that conformance's deepspeed_plugin.json lacks: where a configuration comes from, damaged ones, precedence,
// must_match, warnings, MS-AMP. Also Megatron-LM's and the compiler's settings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
using support::message_of;
using support::Variable;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Value = DeepSpeedValue;

std::string unreadable(const std::string& source) {
  return message_of<ConfigError>([&] { DeepSpeedConfig config(source); });
}
std::string refusal(DeepSpeedPlugin plugin) {
  return message_of<ConfigError>([&] { parallel::resolve(std::move(plugin)); });
}

TEST(DeepSpeedConfig, IsReadFromAFileTextOrBase64) {
  const auto file = std::filesystem::path(support::scratch_dir()) / "ds_config.json";
  std::ofstream(file) << R"({"zero_optimization": {"stage": 3}})";
  EXPECT_TRUE(DeepSpeedConfig(file).is_zero3());
  EXPECT_TRUE(DeepSpeedConfig(file.string()).is_zero3());
  EXPECT_TRUE(DeepSpeedConfig(R"({"zero_optimization": {"stage": 3}})").is_zero3());
  // Both alphabets: the bytes of "?>?" and "~~~" need the last two letters.
  EXPECT_EQ(DeepSpeedConfig("eyJhIjogIj8-P35-fiJ9").to_json(), R"({"a":"?>?~~~"})");
  EXPECT_EQ(DeepSpeedConfig("eyJhIjogIj8+P35+fiJ9").to_json(), R"({"a":"?>?~~~"})");
  EXPECT_EQ(DeepSpeedConfig("eyJhYiI6IDF9\n").to_json(), R"({"ab":1})");
  EXPECT_EQ(DeepSpeedConfig("eyJhIjogMX0=").to_json(), R"({"a":1})");
}

TEST(DeepSpeedConfig, WhatIsNoConfigurationIsNamed) {
  EXPECT_THAT(unreadable("no_such_file.json"),
              AllOf(HasSubstr("'no_such_file.json'"), HasSubstr("path of an existing file, JSON, or JSON in base64")));
  EXPECT_THAT(unreadable(std::filesystem::temp_directory_path().string()), HasSubstr("is no file"));
  const auto file = std::filesystem::path(support::scratch_dir()) / "cut.json";
  std::ofstream(file) << R"({"zero_optimization": {"stage")";
  EXPECT_THAT(unreadable(file.string()), AllOf(HasSubstr("cut.json' is not valid JSON"), HasSubstr("line 1")));
  EXPECT_THAT(unreadable("[1]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(unreadable("7"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(unreadable(""), HasSubstr("expected the path"));
  EXPECT_THAT(unreadable(std::string(100'000, '[')), HasSubstr("nested deeper than 64 levels"));
  EXPECT_THAT(unreadable(R"({"a\u0000b": 1})"), HasSubstr("zero byte"));
  EXPECT_THAT(unreadable(R"({"a": "\u0000number 1"})"), HasSubstr("zero byte"));
  EXPECT_THAT(unreadable("{NaN: 1}"), HasSubstr("name of a setting"));
  EXPECT_LT(unreadable(std::string(10'000, 'x')).size(), 1000U);
}

TEST(DeepSpeedConfig, KeepsWhatItDoesNotKnowInOrderAndNumbersAsPythonWritesThem) {
  const std::string text =
      R"({"z":1,"a":{"list":[1,2.5,{"x":null}],"big":200000000.0},"inf":Infinity,"minus":-Infinity,"none":NaN,)"
      R"("quote":"say \"Infinity\" \\"})";
  const DeepSpeedConfig config(text);
  EXPECT_EQ(config.to_json(), text);
  EXPECT_EQ(config.to_json("a.list"), R"([1,2.5,{"x":null}])");
  EXPECT_EQ(config.get_value("inf"), Value(std::numeric_limits<double>::infinity()));
  EXPECT_TRUE(std::isnan(std::get<double>(*config.get_value("none"))));
  EXPECT_EQ(DeepSpeedConfig(config.to_json({}, 2)).to_json(), text);
}

TEST(DeepSpeedConfig, ValuesByDottedKey) {
  DeepSpeedConfig config(R"({"a": {"b": {"c": 5, "word": "auto"}, "n": null, "zero": 0, "empty": {}}, "top": true})");
  EXPECT_EQ(config.get_value("a.b.c"), Value(int64_t{5}));
  EXPECT_EQ(config.get_value("a.x.c"), std::nullopt);
  EXPECT_EQ(config.get_value("a.n"), std::nullopt);
  EXPECT_EQ(config.get_value("a.n.c"), std::nullopt);
  EXPECT_TRUE(config.contains("a.n"));
  EXPECT_THAT(message_of<ConfigError>([&] { config.get_value("a.b"); }), HasSubstr("'a.b' is a section"));
  EXPECT_THAT(message_of<ConfigError>([&] { config.get_value("top.x"); }),
              AllOf(HasSubstr("'top' is true"), HasSubstr("has 'x'")));
  EXPECT_TRUE(config.is_auto("a.b.word"));
  EXPECT_FALSE(config.is_auto("a.b.c"));
  EXPECT_TRUE(config.is_true("a.b.c"));
  EXPECT_FALSE(config.is_true("a.zero"));
  EXPECT_TRUE(config.is_false("a.zero"));
  EXPECT_TRUE(config.is_false("a.empty"));
  EXPECT_FALSE(config.is_true("missing") || config.is_false("missing") || config.is_false("a.n"));
  config.set_value("a.new.deep", 0.5);
  EXPECT_EQ(config.get_value("a.new.deep"), Value(0.5));
  EXPECT_THROW(config.set_value("top.x", 1.0), ConfigError);
  const DeepSpeedConfig copy = config;
  EXPECT_TRUE(config.del_config_sub_tree("a.b"));
  EXPECT_FALSE(config.del_config_sub_tree("a.b"));
  EXPECT_TRUE(config.del_config_sub_tree("top"));
  EXPECT_FALSE(config.contains("a.b") || config.contains("top"));
  EXPECT_TRUE(copy.contains("a.b.c") && copy.contains("top")) << "a copy is a document of its own";
}

TEST(DeepSpeedConfig, OffloadCountsInStages2And3) {
  const auto offloads = [](int64_t stage, const char* device) {
    DeepSpeedConfig config("{}");
    config.set_value("zero_optimization.stage", stage);
    config.set_value("zero_optimization.offload_optimizer.device", device);
    return config.is_offload();
  };
  EXPECT_FALSE(offloads(1, "cpu"));
  EXPECT_TRUE(offloads(2, "cpu"));
  EXPECT_TRUE(offloads(3, "nvme"));
  EXPECT_FALSE(offloads(3, "none"));
}

TEST(DeepSpeedPlugin, AConfigurationWinsOverTheProgramWhichWinsOverTheEnvironment) {
  const Variable stage("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"), clipping("ACCELERATE_GRADIENT_CLIPPING", "0.25"),
      steps("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8");
  const auto program = parallel::resolve({.gradient_accumulation_steps = 3, .zero_stage = 2});
  EXPECT_EQ(program.zero_stage, 2);
  EXPECT_EQ(program.get_value("gradient_accumulation_steps"), Value(int64_t{3}));
  EXPECT_EQ(program.get_value("gradient_clipping"), Value(0.25));
  const auto file =
      parallel::resolve({.hf_ds_config = R"({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", )"
                                         R"("zero_optimization": {"stage": 3.0, "offload_param": {"device": "auto"}}})",
                         .zero_stage = 2,
                         .offload_param_device = "cpu"});
  EXPECT_EQ(file.zero_stage, 3) << "a whole number with a point is one";
  EXPECT_EQ(file.get_value("zero_optimization.offload_param.device"), Value("cpu"));
  EXPECT_EQ(file.get_value("gradient_accumulation_steps"), Value(int64_t{8}));
  EXPECT_EQ(std::get<double>(*file.gradient_clipping), 0.25);
  EXPECT_TRUE(*file.zero3_init_flag);
  EXPECT_FALSE(file.deepspeed_config().contains("zero_optimization.offload_optimizer"))
      << "nothing is added but what must be there";
}

TEST(DeepSpeedPlugin, ComesFromTheEnvironment) {
  const Variable file("ACCELERATE_DEEPSPEED_CONFIG_FILE",
                      R"({"zero_optimization": {"stage": 1}, "train_batch_size": 16})"),
      moe("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A,B"), steps("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto");
  const auto plugin = parallel::resolve(DeepSpeedPlugin{});
  EXPECT_EQ(plugin.zero_stage, 1);
  EXPECT_EQ(plugin.get_value("train_batch_size"), Value(int64_t{16}));
  EXPECT_EQ(plugin.transformer_moe_cls_names, (std::vector<std::string>{"A", "B"}));
  const Variable none("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none");
  const auto made = parallel::resolve(DeepSpeedPlugin{.gradient_clipping = 0.0});
  EXPECT_TRUE(made.is_auto("train_batch_size"));
  EXPECT_FALSE(made.deepspeed_config().contains("gradient_clipping")) << "0 clips nothing";
}

TEST(DeepSpeedPlugin, WrongValuesAreRefused) {
  EXPECT_THAT(refusal({.zero_stage = 4}), HasSubstr("zero_stage is 4, expected 0, 1, 2 or 3"));
  EXPECT_THAT(refusal({.offload_param_device = "cup"}),
              HasSubstr("offload_param_device is 'cup', expected none, cpu or nvme; did you mean cpu?"));
  EXPECT_THAT(refusal({.hf_ds_config = R"({"zero_optimization": {"stage": "three"}})"}),
              HasSubstr("zero_optimization.stage is \"three\", expected a whole number"));
  EXPECT_THAT(refusal({.hf_ds_config = R"({"zero_optimization": {"stage": 2.5}})"}), HasSubstr("2.5"));
  EXPECT_THAT(refusal({.hf_ds_config = R"({"zero_optimization": true})"}),
              HasSubstr("'zero_optimization' is true, expected a section"));
  EXPECT_THAT(refusal({.hf_ds_config = "{}"}), HasSubstr("no section zero_optimization"));
  EXPECT_THAT(message_of<ConfigError>([] { DeepSpeedPlugin().fill_match("a", {}); }), HasSubstr("parallel::resolve"));
  {
    const Variable steps("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many");
    EXPECT_THAT(refusal(DeepSpeedPlugin{}), HasSubstr("ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'many'"));
  }
  {
    const Variable clipping("ACCELERATE_GRADIENT_CLIPPING", "1,5");
    EXPECT_THAT(refusal(DeepSpeedPlugin{}), HasSubstr("ACCELERATE_GRADIENT_CLIPPING is '1,5', expected a number"));
  }
  const Variable fields("ACCELERATE_CONFIG_DS_FIELDS",
                        "deepspeed_config_file,zero_stage,zero3_init_flag,mixed_precision");
  EXPECT_THAT(refusal({.hf_ds_config = R"({"zero_optimization": {"stage": 2}})"}),
              AllOf(HasSubstr("beside it zero_stage, mixed_precision,"), Not(HasSubstr("zero3_init_flag"))));
  EXPECT_NO_THROW(parallel::resolve(DeepSpeedPlugin{})) << "without a configuration of DeepSpeed's own they count";
}

TEST(DeepSpeedPlugin, ProcessingFillsAutoAndReportsAllMismatches) {
  const char* source =
      R"({"train_batch_size": 16, "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.99], "amsgrad": true}}, )"
      R"("zero_optimization": {"stage": 1}, "null": null})";
  auto plugin = parallel::resolve({.hf_ds_config = source});
  const DeepSpeedValues values{
      {"train_batch_size", int64_t{32}},        {"optimizer.params.lr", 0.1}, {"zero_optimization.stage", int64_t{2}},
      {"optimizer.params.amsgrad", int64_t{1}}, {"null", int64_t{1}},         {"unknown", "x"}};
  EXPECT_THAT(message_of<ConfigError>([&] { plugin.deepspeed_config_process(values); }),
              AllOf(HasSubstr("train_batch_size is 16, but 32"), HasSubstr("zero_optimization.stage is 1, but 2"),
                    Not(HasSubstr("amsgrad")), Not(HasSubstr("lr")), Not(HasSubstr("null"))));
  EXPECT_EQ(plugin.get_value("optimizer.params.lr"), Value(0.1)) << "what was \"auto\" is filled nevertheless";
  plugin.deepspeed_config_process(values, /*must_match=*/false);
  EXPECT_EQ(plugin.get_value("train_batch_size"), Value(int64_t{16}));
  auto empty = parallel::resolve({.hf_ds_config = source});
  EXPECT_THAT(message_of<ConfigError>([&] { empty.deepspeed_config_process({}, false); }),
              HasSubstr("'optimizer.params.lr' is \"auto\""));
  std::vector<std::string> mismatches;
  plugin.fill_match("train_batch_size", values, &mismatches);
  EXPECT_EQ(mismatches.size(), 1U);
  plugin.fill_match("scheduler.params.lr", values, &mismatches);  // not there: nothing to fill
  EXPECT_FALSE(plugin.deepspeed_config().contains("scheduler"));
}

TEST(DeepSpeedPlugin, InitFlagBelowStage3WarnsOnRankZero) {
  support::Warnings warnings;
  EXPECT_FALSE(*parallel::resolve({.zero_stage = 2, .zero3_init_flag = true}).zero3_init_flag);
  EXPECT_THAT(warnings.text, HasSubstr("zero3_init_flag has no effect"));
  warnings.text.clear();
  const Variable rank("RANK", "1");
  parallel::resolve({.zero_stage = 2, .zero3_init_flag = true});
  EXPECT_EQ(warnings.text, "");
}

TEST(DeepSpeedPlugin, MsAmp) {
  const Variable backend("ACCELERATE_FP8_BACKEND", "MSAMP"), level("ACCELERATE_FP8_OPT_LEVEL", "O2");
  const auto plugin = parallel::resolve(DeepSpeedPlugin{});
  EXPECT_EQ(plugin.deepspeed_config().to_json("msamp"), R"({"enabled":true,"opt_level":"O2"})");
  EXPECT_THAT(refusal({.zero_stage = 3}), HasSubstr("MS-AMP does not have zero_stage 3"));
  EXPECT_THAT(refusal({.msamp_opt_level = "O3"}), HasSubstr("'O3', expected O1 or O2"));
  EXPECT_NO_THROW(
      parallel::resolve({.hf_ds_config = R"({"zero_optimization": {"stage": 3}, "msamp": {"enabled": false}})"}))
      << "what the configuration says about it is left alone";
}

TEST(DeepSpeedPlugin, PrecisionsThatAreNoneAndThatContradict) {
  auto plugin =
      parallel::resolve({.hf_ds_config = R"({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "True"}})"});
  EXPECT_THAT(message_of<ConfigError>([&] { plugin.set_mixed_precision("fp16"); }), HasSubstr("enables bf16"));
  EXPECT_THAT(message_of<ConfigError>([&] { plugin.set_mixed_precision("fp12"); }),
              HasSubstr("expected no, fp16, bf16 or fp8"));
}

TEST(MegatronLMPlugin, TheProgramWinsAndArgumentsAreAdded) {
  const Variable degree("MEGATRON_LM_TP_DEGREE", "4"), layers("MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS", "7");
  auto args = parallel::resolve({.tp_degree = 2,
                                 .consumed_samples = {{5}},
                                 .tensorboard_dir = "runs",
                                 .other_megatron_args = {{"swiglu", true}, {"clip_grad", 2.0}}})
                  .megatron_lm_default_args();
  EXPECT_EQ(args.at("tensor_model_parallel_size"), KwargsValue(int64_t{2}));
  EXPECT_EQ(args.at("decoder_last_pipeline_num_layers"), KwargsValue(int64_t{7}));
  EXPECT_EQ(args.at("consumed_samples"), KwargsValue(std::vector<int64_t>{5, 0, 0}));
  EXPECT_EQ(args.at("tensorboard_dir"), KwargsValue("runs"));
  EXPECT_EQ(args.at("swiglu"), KwargsValue(true));
  EXPECT_EQ(args.at("clip_grad"), KwargsValue(2.0));
  EXPECT_EQ(args.at("DDP_impl"), KwargsValue("torch"));
  EXPECT_EQ(parallel::resolve({.use_distributed_optimizer = true}).megatron_lm_default_args().at("DDP_impl"),
            KwargsValue("local"));
  EXPECT_THAT(message_of<ConfigError>([] { parallel::resolve({.pp_degree = 0}); }),
              HasSubstr("MEGATRON_LM_PP_DEGREE is 0"));
  const Variable dropout("MEGATRON_LM_ATTENTION_DROPOUT", "much");
  EXPECT_THAT(message_of<ConfigError>([] { parallel::resolve(MegatronLMPlugin{}); }),
              HasSubstr("MEGATRON_LM_ATTENTION_DROPOUT is 'much'"));
}

TEST(KwargsDict, OnlyWhatDiffersFromTheDefaults) {
  EXPECT_EQ(to_kwargs(GradScalerKwargs{}), KwargsDict{});
  EXPECT_EQ(to_kwargs(DistributedDataParallelKwargs{.bucket_cap_mb = 10, .static_graph = true}),
            (KwargsDict{{"bucket_cap_mb", int64_t{10}}, {"static_graph", true}}));
  EXPECT_EQ(to_kwargs(AutocastKwargs{.cache_enabled = true}), (KwargsDict{{"cache_enabled", true}}));
  EXPECT_EQ(to_kwargs(ProfileKwargs{.activities = {{"cpu"}}, .schedule_option = {{{"wait", 1}}}}),
            (KwargsDict{{"activities", std::vector<std::string>{"cpu"}},
                        {"schedule_option", std::map<std::string, int64_t>{{"wait", 1}}}}));
  const Variable backend("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
      regions("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1");
  EXPECT_EQ(to_kwargs(accelerate::resolve(TorchDynamoPlugin{})), (KwargsDict{{"backend", "inductor"}}))
      << "the environment is not the default, and how to call is no argument";
  EXPECT_EQ(to_kwargs(accelerate::resolve(TorchDynamoPlugin{.backend = "Eager", .dynamic = false})),
            (KwargsDict{{"backend", "eager"}, {"dynamic", false}}));
}

}  // namespace
