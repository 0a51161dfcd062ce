// A DeepSpeed configuration, read: the examples of DeepSpeed's documentation and of Accelerate's, HJSON, unknown keys,
// defaults of older versions, the effective configuration, and what prepare() fills. Conformance has deepspeed_config,
// deepspeed_batch and deepspeed_auto.
#include "parallel/zero/zero_settings.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "parallel/zero/auto_values.hpp"
#include "parallel/zero/settings_table.hpp"
#include "ranks.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
using accelerate::zero::AutoFacts;
using accelerate::zero::Entry;
using accelerate::zero::fill_auto;
using accelerate::zero::read_settings;
using accelerate::zero::ReadOptions;
using accelerate::zero::Verdict;
using accelerate::zero::ZeroSettings;
using support::message_of;
using support::Variable;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

/// Members beside the size of the batch, which must be there: R"("fp16": {"enabled": true})".
std::string with_batch(const std::string& members) {
  return R"({"train_micro_batch_size_per_gpu": 1)" + (members.empty() ? "" : ", " + members) + "}";
}
ZeroSettings settings_of(const std::string& members, const ReadOptions& options = {.ranks = 2}) {
  return read_settings(with_batch(members), options);
}
std::string refusal(const std::string& members, const ReadOptions& options = {.ranks = 2}) {
  return message_of<ConfigError>([&] { settings_of(members, options); });
}
const Entry& entry_of(const ZeroSettings& settings, const std::string& key) {
  for (const auto& entry : settings.effective)
    if (entry.key == key) return entry;
  throw std::runtime_error("no entry " + key);
}

TEST(Hjson, HasWhatPeopleWriteIntoTheseFiles) {
  const DeepSpeedConfig config(
      "{\n"
      "  # a comment\n"
      "  // another\n"
      "  train_batch_size: 8  /* and\n one of two lines */\n"
      "  'gradient_clipping': 0.5,\n"
      "  zero_optimization: { stage: 2, reduce_bucket_size: 5E8, \"sub_group_size\": 5e8, }\n"
      "  _note: all, of this: is # text\n"
      "  _lines: '''\n"
      "            first\n"
      "      second\n"
      "    '''\n"
      "  steps_per_print: Infinity\n"
      "  _list: [1, -2.5, true\n null\n]\n"
      "}\n");
  EXPECT_EQ(config.to_json(),
            R"({"train_batch_size":8,"gradient_clipping":0.5,"zero_optimization":{"stage":2,)"
            R"("reduce_bucket_size":500000000.0,"sub_group_size":500000000.0},"_note":"all, of this: is # text",)"
            R"("_lines":"  first\nsecond","steps_per_print":Infinity,"_list":[1,-2.5,true,null]})");
  EXPECT_EQ(DeepSpeedConfig("\xEF\xBB\xBF{\"a\": 1}").to_json(), R"({"a":1})");
  EXPECT_EQ(DeepSpeedConfig(R"({"a": "\ud83d\ude00\u00e9\n\/"})").to_json(),
            "{\"a\":\"\xF0\x9F\x98\x80\xC3\xA9\\n/\"}");
}

TEST(Hjson, AFileMayDoWithoutItsOuterBraces) {
  const auto file = std::filesystem::path(support::scratch_dir()) / "zero.hjson";
  std::ofstream(file) << "train_batch_size: 8\nzero_optimization: {stage: 1}\n";
  EXPECT_EQ(DeepSpeedConfig(file).to_json(), R"({"train_batch_size":8,"zero_optimization":{"stage":1}})");
  EXPECT_THAT(message_of<ConfigError>([] { DeepSpeedConfig("C: a path of another system"); }),
              HasSubstr("found \"C\", expected '{'"));
}

TEST(Hjson, WhatIsWrongIsNamedWithLineAndColumn) {
  const auto problem = [](const std::string& text) {
    return message_of<ConfigError>([&] { DeepSpeedConfig config(text); });
  };
  EXPECT_THAT(problem("{\"a\": 1,\n \"b\" = 2}"),
              HasSubstr("line 2, column 6: found \"=\", expected ':' behind the name \"b\""));
  EXPECT_THAT(problem("{a: {b: 1\n"), HasSubstr("line 2, column 1: found the end of the text, expected ',' or '}'"));
  EXPECT_THAT(problem("{a: [1, 2}"), HasSubstr("line 1, column 10: found \"}\", expected a value"));
  EXPECT_THAT(problem("{\"a\": \"x\ny\"}"), HasSubstr("found the end of the line, expected no control character"));
  EXPECT_THAT(problem("{\"a\": \"\\ud83d\"}"), HasSubstr("line 1, column 8: half a pair of \\u stands alone"));
  EXPECT_THAT(problem("{\"a\": \"\\q\"}"), HasSubstr("behind a backslash"));
  EXPECT_THAT(problem("{a: /* 1}"), HasSubstr("line 1, column 5: found a comment that begins with /*"));
  EXPECT_THAT(problem("{a: '''x}"), HasSubstr("expected a closing '''"));
  EXPECT_THAT(problem("{a: 1e999}"), HasSubstr("larger than any that can be held"));
  EXPECT_THAT(problem("{\"a\": \"\xFF\"}"), HasSubstr("is not valid UTF-8 (byte 7 is 0xff)"));
  EXPECT_THAT(problem("{a: 1} {b: 2}"), HasSubstr("column 8: found \"{\", expected the end of the text"));
  std::string nested = "1";
  for (int i = 0; i < 65; ++i) nested = "{a: " + nested + "\n}";
  EXPECT_THAT(problem(nested), HasSubstr("nested deeper than 64 levels"));
}

TEST(Hjson, ANameTwiceInAnObjectIsAnErrorAtEveryLevel) {
  const auto problem = [](const std::string& text) {
    return message_of<ConfigError>([&] { DeepSpeedConfig config(text); });
  };
  EXPECT_THAT(problem(R"({"a": 1, "b": 2, "a": 1})"), HasSubstr("column 18: the object has the name \"a\" twice"));
  EXPECT_THAT(problem(R"({"x": [{"a": 1, a: 1}]})"), HasSubstr("has the name \"a\" twice"));
  EXPECT_NO_THROW(DeepSpeedConfig(R"({"a": {"a": 1}, "b": {"a": 1}})"));
}

// ---- The examples of the documentation.

/// Settings of a file that this version does not do yet, as the error names them: none for most.
const std::map<std::string, std::vector<std::string>>& expected_later() {
  static const std::map<std::string, std::vector<std::string>> later{};
  return later;
}

/// The key that has to be named where a parallelism is asked for that is not there.
std::string key_of_missing_layer(const std::string& want) {
  return want == "tp"   ? "tensor_parallel.autotp_size"
         : want == "ep" ? "expert_parallel.enabled"
                        : "sequence_parallel_size";
}

class Examples {
 public:
  Examples() {
    std::ifstream file(ACCELERATE_SOURCE_DIR "/tests/unit/fixtures/deepspeed_examples.jsonl");
    for (std::string line; std::getline(file, line);) {
      rows_.push_back(Json::parse(line));
      by_name_[rows_.back()["name"]] = rows_.back();
    }
  }
  const std::vector<Json>& rows() const { return rows_; }

  /// The settings that a program on two ranks reads of it.
  ZeroSettings read(const Json& row) const {
    const ReadOptions options{.ranks = 2};
    if (row.contains("yaml")) return read_settings(filled(of_yaml(row["yaml"])).deepspeed_config(), options);
    DeepSpeedConfig config(row.contains("text") ? row["text"].get<std::string>() : row["config"].dump());
    const bool fills = row["want"] == "fill";
    const char* const micro = "train_micro_batch_size_per_gpu";
    if (!config.contains("train_batch_size") && (!config.contains(micro) || (!fills && config.is_auto(micro))))
      config.set_value(micro, int64_t{1});
    if (fills) return read_settings(filled({.hf_ds_config = config}).deepspeed_config(), options);
    return read_settings(config, options);
  }

 private:
  DeepSpeedPlugin of_yaml(const Json& yaml) const {
    DeepSpeedPlugin plugin;
    std::string keys;
    for (const auto& [key, value] : yaml.items()) {
      if (key == "deepspeed_config_file") plugin.hf_ds_config = DeepSpeedConfig(by_name_.at(value)["config"].dump());
      else if (key == "gradient_accumulation_steps") plugin.gradient_accumulation_steps = value.get<int64_t>();
      else if (key == "gradient_clipping") plugin.gradient_clipping = value.get<double>();
      else if (key == "offload_optimizer_device") plugin.offload_optimizer_device = value.get<std::string>();
      else if (key == "offload_param_device") plugin.offload_param_device = value.get<std::string>();
      else if (key == "zero3_init_flag") plugin.zero3_init_flag = value.get<bool>();
      else if (key == "zero3_save_16bit_model") plugin.zero3_save_16bit_model = value.get<bool>();
      else if (key == "zero_stage") plugin.zero_stage = value.get<int64_t>();
      else throw std::runtime_error("no such field: " + key);
      keys += (keys.empty() ? "" : ",") + key;
    }
    const Variable fields("ACCELERATE_CONFIG_DS_FIELDS", keys);
    return parallel::resolve(std::move(plugin));
  }

  static DeepSpeedPlugin filled(DeepSpeedPlugin given) {
    auto plugin = parallel::resolve(std::move(given));
    const auto& config = plugin.deepspeed_config();
    AutoFacts facts{.ranks = 2, .hidden_size = 64, .loader_batch_sizes = {4}};
    if (config.contains("optimizer")) facts.optimizer = zero::DummyOptimizerFacts{};
    else facts.optimizer = zero::ProgramOptimizerFacts{.class_name = "AdamW"};
    if (config.contains("scheduler"))
      facts.scheduler = zero::DummySchedulerFacts{.total_num_steps = 100, .warmup_num_steps = 10};
    facts.mixed_precision = config.is_true("fp16.enabled") && !config.is_auto("fp16.enabled") ? "fp16" : "bf16";
    fill_auto(plugin, facts);
    return plugin;
  }

  std::vector<Json> rows_;
  std::map<std::string, Json> by_name_;
};

TEST(ZeroExamples, RunOrAreRefusedByTheKeyThatTheyNameFirst) {
  const Examples examples;
  ASSERT_EQ(examples.rows().size(), 92U);
  size_t read = 0, later = 0, refused = 0;
  for (const auto& row : examples.rows()) {
    const std::string name = row["name"], want = row["want"];
    SCOPED_TRACE(name);
    std::string error;
    try {
      const auto settings = examples.read(row);
      // Every key that the table has, once.
      std::set<std::string> keys;
      for (const auto& entry : settings.effective) EXPECT_TRUE(keys.insert(entry.key).second) << entry.key;
      for (const auto& entry : settings.effective)
        EXPECT_EQ(entry.reason.empty(), entry.verdict == Verdict::acts) << entry.key;
    } catch (const ConfigError& problem) {
      error = problem.what();
    }
    if (want == "refuse (no JSON)") {
      EXPECT_THAT(error, HasSubstr("is not valid JSON"));
      ++refused;
    } else if (want.starts_with("refuse ")) {
      EXPECT_THAT(error, HasSubstr(want.substr(7)));
      EXPECT_THAT(error, Not(HasSubstr("not in this version")));
      ++refused;
    } else if (want == "tp" || want == "ep" || want == "sp") {
      EXPECT_THAT(error, HasSubstr("'" + key_of_missing_layer(want) + "'"));
      ++refused;
    } else if (const auto expected = expected_later().find(name); expected != expected_later().end()) {
      for (const auto& key : expected->second) EXPECT_THAT(error, HasSubstr("'" + key + "' is "));
      size_t lines = 0;
      for (size_t at = error.find("not in this version"); at != error.npos;
           at = error.find("not in this version", at + 1))
        ++lines;
      EXPECT_EQ(lines, expected->second.size()) << error;
      ++later;
    } else {
      EXPECT_EQ(error, "");
      ++read;
    }
  }
  EXPECT_EQ(later, expected_later().size());
  std::cout << read << " read, " << later << " not in this version, " << refused << " refused\n";
}

// ---- Reading.

TEST(ZeroSettings, UnknownKeysAreErrorsWithTheNearestName) {
  EXPECT_THAT(refusal(R"("gradient_cliping": 0.1)"),
              HasSubstr("'gradient_cliping' is no setting of DeepSpeed's; did you mean gradient_clipping?"));
  EXPECT_THAT(refusal(R"("zero_optimisation": {"stage": 2})"), HasSubstr("did you mean zero_optimization?"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage3_prefetch_bucketsize": 5})"),
              HasSubstr("did you mean zero_optimization.stage3_prefetch_bucket_size?"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "AdamW", "params": {"beta": [0.9, 0.99]}})"),
              HasSubstr("'optimizer.params.beta' is no parameter of AdamW; did you mean optimizer.params.betas?"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "AdamW", "params": {"dampening": 0.1}})"),
              HasSubstr("is no parameter of AdamW"))
      << "a parameter of other types";
  EXPECT_THAT(refusal(R"("quark": 1)"), HasSubstr("let its name begin with _ if it is a note"));
  const auto noted = settings_of(R"("_quark": [1, 2])");
  EXPECT_EQ(entry_of(noted, "_quark").value, "[1,2]");
  EXPECT_EQ(entry_of(noted, "_quark").verdict, Verdict::no_meaning);
}

TEST(ZeroSettings, AllProblemsAreToldAtOnce) {
  EXPECT_THAT(
      refusal(R"("gradient_clipping": "auto", "fp16": {"enabled": 3}, "quark": 1, "wandb": {"enabled": true})"),
      AllOf(HasSubstr("'gradient_clipping' is \"auto\", and nothing has filled it"),
            HasSubstr("'fp16.enabled' is 3, expected true or false"), HasSubstr("'quark'"), Not(HasSubstr("wandb"))))
      << "what is not in this version is told when all else is right";
}

TEST(ZeroSettings, ValuesHaveTypesAndRanges) {
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 4})"),
              HasSubstr("'zero_optimization.stage' is 4, expected a whole number from 0 to 3"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"reduce_bucket_size": "5e8"})"),
              HasSubstr("expected a whole number above 0"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"offload_param": {"device": "disk"}})"),
              HasSubstr("expected one of none, cpu, nvme"));
  EXPECT_THAT(refusal(R"("fp16": {"loss_scale": true})"),
              HasSubstr("'fp16.loss_scale' is true, expected a finite number"));
  EXPECT_THAT(refusal(R"("aio": {"block_size": "x"})"), HasSubstr("'aio.block_size' is \"x\""));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}})"),
              HasSubstr("a list of two numbers"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "adan"})"), HasSubstr("did you mean Adam?"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "sgd"})"), HasSubstr("did you mean SGD?"))
      << "torch's classes are spelled exactly";
  EXPECT_THAT(refusal(R"("optimizer": {"params": {"lr": 1}})"), HasSubstr("'optimizer.type' is missing"));
  EXPECT_THAT(refusal(R"("scheduler": {"type": "StepLR"})"), HasSubstr("fails with torch's schedules"));
  EXPECT_THAT(refusal(R"("scheduler": {"type": "WarmupDecayLR"})"),
              HasSubstr("'scheduler.params.total_num_steps' is missing"));
  EXPECT_THAT(refusal(R"("zero_optimization": 3)"), HasSubstr("'zero_optimization' is 3, expected a section"));
  EXPECT_THAT(refusal(R"("gradient_clipping": null)"), HasSubstr("'gradient_clipping' is null"));
  const auto lists = settings_of(
      R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 0.5}},
         "zero_optimization": {"stage": "2", "overlap_comm": "on", "leaf_module": {"names": "a.b"}})");
  EXPECT_THAT(lists.scheduler->params.cycle_min_lr, ElementsAre(0.1, 0.2));
  EXPECT_THAT(lists.scheduler->params.cycle_max_lr, ElementsAre(0.5));
  EXPECT_EQ(lists.zero_optimization.stage, 2);
  EXPECT_EQ(lists.zero_optimization.overlap_comm, true);
  EXPECT_THAT(lists.zero_optimization.leaf_module.names, ElementsAre("a.b"));
}

TEST(ZeroSettings, BothFormsOfStage3sKeysAreOne) {
  EXPECT_EQ(settings_of(R"("zero_optimization": {"stage": 3, "prefetch_bucket_size": 7})")
                .zero_optimization.prefetch_bucket_size,
            7);
  EXPECT_EQ(settings_of(R"("zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7})")
                .zero_optimization.prefetch_bucket_size,
            7);
  EXPECT_THAT(refusal(R"("zero_optimization": {"prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 7})"),
              HasSubstr("are one setting"));
}

TEST(ZeroSettings, OlderKeysAreRead) {
  const auto old = settings_of(R"("zero_optimization": true, "allgather_size": 1000, "bfloat16": {"enabled": true})");
  EXPECT_EQ(old.zero_optimization.stage, 1);
  EXPECT_EQ(old.zero_optimization.allgather_bucket_size, 1000);
  EXPECT_TRUE(old.bf16.enabled);
  EXPECT_EQ(settings_of(R"("zero_optimization": {"stage": 2, "cpu_offload": true})")
                .zero_optimization.offload_optimizer.device,
            "cpu");
  EXPECT_THAT(refusal(R"("zero_optimization": {"cpu_offload": true, "offload_optimizer": {}})"),
              HasSubstr("'zero_optimization.cpu_offload' is the old name"));
  EXPECT_TRUE(settings_of(R"("zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true})")
                  .zero_optimization.gather_16bit_weights_on_model_save);
  const auto aio = settings_of(R"("aio": {"thread_count": 4, "single_submit": "true"})");
  EXPECT_EQ(aio.aio.intra_op_parallelism, 4);
  EXPECT_TRUE(aio.aio.single_submit);
  EXPECT_THAT(aio.warnings,
              AllOf(Contains(HasSubstr("is called aio.intra_op_parallelism now")), Contains(HasSubstr("is the text"))));
  EXPECT_THAT(refusal(R"("allgather_size": 1000)"), HasSubstr("zero_optimization.allgather_bucket_size"));
}

TEST(ZeroSettings, SettingsThatExcludeEachOther) {
  EXPECT_THAT(refusal(R"("fp16": {"enabled": true}, "bf16": {"enabled": true})"), HasSubstr("expected at most one"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 2, "compute_grad_norm": false})"),
              HasSubstr("found stage 2, gradient_clipping 1"));
  EXPECT_NO_THROW(
      settings_of(R"("gradient_clipping": 0, "zero_optimization": {"stage": 2, "compute_grad_norm": false})"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})"),
              HasSubstr("'zero_optimization.offload_optimizer.ratio' is 0.5"));
  const auto unmanaged = [](const std::string& zero) {
    return R"("managed_gradient_accumulation": false, "zero_optimization": {)" + zero + "}";
  };
  for (const char* number : {"0", "1"})
    EXPECT_THAT(refusal(unmanaged(std::string(R"("overlap_comm": true, "stage": )") + number)),
                HasSubstr("'managed_gradient_accumulation' is false"));
  EXPECT_NO_THROW(settings_of(unmanaged(R"("overlap_comm": true, "stage": 2)")));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}})"),
              HasSubstr("nvme_path' is missing"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"})"),
              HasSubstr("'zero_allow_untested_optimizer' is false"));
  EXPECT_NO_THROW(settings_of(
      R"("zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"})"));
  EXPECT_THAT(refusal(R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})"),
              HasSubstr("at stage 0 gradients add up"));
  EXPECT_THAT(refusal(R"("prescale_gradients": true, "zero_optimization": {"stage": 2})"),
              HasSubstr("does not go with zero_optimization.reduce_scatter"));
  EXPECT_NO_THROW(
      settings_of(R"("prescale_gradients": true, "zero_optimization": {"stage": 2, "reduce_scatter": false})"));
  EXPECT_NO_THROW(
      settings_of(R"("prescale_gradients": true, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2})"));
  EXPECT_THAT(refusal(R"("gradient_predivide_factor": 2, "zero_optimization": {"stage": 3})"),
              HasSubstr("'gradient_predivide_factor' does not go with zero_optimization.reduce_scatter"));
  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2})", {.ranks = 3}),
              HasSubstr("expected a divisor of the 3 ranks"));
  EXPECT_THAT(refusal(R"("gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3})"),
              HasSubstr("which stage 3 does not have"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "AdamW", "params": {"amsgrad": true}})"),
              HasSubstr("set torch_adam with Adam or AdamW"));
  EXPECT_THAT(refusal(R"("optimizer": {"type": "AdamW",
                           "params": {"torch_adam": true, "amsgrad": true, "bias_correction": false}})"),
              HasSubstr("which torch's Adam does not have"));
  EXPECT_THAT(refusal(R"("data_parallel_size": 3)"), HasSubstr("but there are 2 ranks"));
}

// DeepSpeed's Adam for the host has fp32 moments of them.
TEST(ZeroSettings, MastersOf16BitsNeedAnOptimizerForThem) {
  const std::string fp16 = R"("fp16": {"enabled": true, "fp16_master_weights_and_grads": true})";
  const std::string bf16 = R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true})";
  const std::string both =
      R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true})";
  const auto zero = [](const char* device, const std::string& more = "") {
    return R"(, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": ")" + std::string(device) + "\"}}" +
           more;
  };
  for (const auto& one : {fp16, bf16}) {
    EXPECT_THAT(refusal(one + zero("none")), HasSubstr("true without zero_optimization.offload_optimizer"));
    EXPECT_TRUE(settings_of(one + zero("cpu")).has_low_masters());
  }
  EXPECT_NO_THROW(settings_of(both + zero("none")));
  for (const auto& one : {fp16, bf16, both}) {
    EXPECT_THAT(refusal(one + zero("cpu", R"(, "optimizer": {"type": "Lion"})")), HasSubstr("'optimizer.type' Lion, "));
    EXPECT_THAT(refusal(one + zero("cpu", R"(, "optimizer": {"type": "Adam", "params": {"torch_adam": true}})")),
                HasSubstr("Adam (torch_adam)"));
  }
  const auto reason = [&](const std::string& members) {
    const std::string adam = R"(, "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": false}})";
    return entry_of(settings_of(members + adam), "optimizer.params.fp32_optimizer_states").reason;
  };
  EXPECT_EQ(reason(fp16 + zero("cpu")), "");
  EXPECT_EQ(reason(R"("fp16": {"enabled": true})" + zero("cpu")), "masters are fp32, and so are moments");
  EXPECT_EQ(reason(both + zero("none")), "without offload_optimizer moments have the masters' dtype");
  EXPECT_EQ(reason(both + zero("cpu")), "bf16_optimizer_states has moments in bf16");
}

TEST(ZeroSettings, DataTypesMustBeThoseOfTheModel) {
  const std::string bf16 = R"("bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "data_types": )";
  EXPECT_EQ(settings_of(bf16 + R"({"grad_accum_dtype": "bf16", "param_dtype": "bf16"})").data_types.grad_accum_dtype,
            "bf16");
  EXPECT_NO_THROW(settings_of(bf16 + R"({"grad_accum_dtype": "fp32"})"));
  EXPECT_THAT(refusal(bf16 + R"({"grad_accum_dtype": "fp16"})"), HasSubstr("is fp16 in a model of bf16"));
  EXPECT_THAT(refusal(bf16 + R"({"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32")"),
              HasSubstr("whose gradients travel in fp32"));
  EXPECT_THAT(refusal(bf16 + R"({"param_dtype": "fp32"})"), HasSubstr("but the sections fp16 and bf16 say bf16"));
}

TEST(ZeroSettings, KeysOfWhatIsNotDividedSayWhy) {
  const auto reason = [](const std::string& members, const char* key) {
    return entry_of(settings_of(members), key).reason;
  };
  EXPECT_EQ(reason(R"("gradient_predivide_factor": 2)", "gradient_predivide_factor"), "");
  EXPECT_EQ(reason(R"("prescale_gradients": true)", "prescale_gradients"), "");
  EXPECT_EQ(reason(R"("prescale_gradients": true, "gradient_predivide_factor": 2)", "gradient_predivide_factor"),
            "prescale_gradients has gradients divided by the number of ranks");
  EXPECT_EQ(reason(R"("prescale_gradients": true, "gradient_allreduce_op": "sum")", "prescale_gradients"),
            "gradients are summed (gradient_allreduce_op)");
}

TEST(ZeroSettings, WhatIsNotInThisVersionIsRefusedWhereItWouldAct) {
  const auto muon = [](const std::string& device) {
    return R"("optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 3,
               "save_muon_momentum_buffer_in_memory": true, "offload_optimizer": {"device": ")" +
           device + R"(", "nvme_path": "/local"}})";
  };
  const std::string key = "zero_optimization.save_muon_momentum_buffer_in_memory";
  EXPECT_THAT(refusal(muon("nvme")), HasSubstr("'" + key + "' is true, which is not in this version"));
  EXPECT_NE(entry_of(settings_of(muon("cpu")), key).reason, "");
  EXPECT_TRUE(settings_of(muon("nvme"), {.ranks = 2, .later_is_error = false})
                  .zero_optimization.save_muon_momentum_buffer_in_memory);
}

TEST(ZeroSettings, ZeroPlusPlusActsWhereSomethingTravels) {
  const auto of = [](int64_t stage, const std::string& key, const std::string& value, int64_t ranks) {
    const auto settings =
        settings_of(R"("zero_optimization": {"stage": )" + std::to_string(stage) + ", \"" + key + "\": " + value + "}",
                    {.ranks = ranks});
    return entry_of(settings, "zero_optimization." + key);
  };
  for (const char* key :
       {"zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"}) {
    EXPECT_EQ(of(3, key, "true", 2).reason, "") << key;
    EXPECT_EQ(of(2, key, "true", 2).reason, "only stage 3 splits parameters") << key;
  }
  EXPECT_EQ(of(3, "zero_quantized_weights", "true", 1).reason, "one process sends nothing");
  EXPECT_EQ(of(3, "zero_quantized_gradients", "true", 1).reason, "one process sends nothing");
  EXPECT_EQ(of(3, "zero_quantized_nontrainable_weights", "true", 1).reason, "") << "they are kept so";

  EXPECT_EQ(of(3, "zero_hpz_partition_size", "2", 4).reason, "");
  EXPECT_THAT(of(3, "zero_hpz_partition_size", "4", 4).reason, HasSubstr("all ranks together are the node"));
  EXPECT_EQ(of(2, "zero_hpz_partition_size", "2", 4).reason, "only stage 3 splits parameters");
  const auto more_than_ranks =
      settings_of(R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8})", {.ranks = 2});
  EXPECT_EQ(more_than_ranks.zero_optimization.zero_hpz_partition_size, 2);
  EXPECT_THAT(more_than_ranks.warnings, Contains(HasSubstr("more than the 2 ranks: it is now 2")));

  EXPECT_THAT(refusal(R"("zero_optimization": {"stage": 3, "zero_quantized_gradients": true, "reduce_scatter": false})",
                      {.ranks = 2}),
              HasSubstr("'zero_optimization.zero_quantized_gradients' is true and 'zero_optimization.reduce_scatter' "
                        "false"));
}

TEST(ZeroSettings, OnlyWhatIsFetchedHasAnOrder) {
  const auto reason = [](const std::string& more, const ReadOptions& options) {
    return entry_of(settings_of(R"("zero_optimization": {"log_trace_cache_warnings": true)" + more + "}", options),
                    "zero_optimization.log_trace_cache_warnings")
        .reason;
  };
  const std::string stage3 = R"(, "stage": 3)", offloads = stage3 + R"(, "offload_param": {"device": "cpu"})";
  EXPECT_EQ(reason(R"(, "stage": 2)", {.ranks = 2}), "only stage 3 splits parameters");
  EXPECT_EQ(reason(stage3, {.ranks = 2}), "");
  EXPECT_EQ(reason(stage3, {.ranks = 1}), "one process has all parameters, and fetches none");
  EXPECT_EQ(reason(offloads, {.ranks = 1, .cuda = true}), "");
}

TEST(ZeroSettings, BuffersAreCastOnlyInSixteenBits) {
  const std::string keys = R"("data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["bias"]})";
  for (const char* key : {"data_types.buffer_dtype", "data_types.keep_in_fp32_modules"}) {
    EXPECT_EQ(entry_of(settings_of(keys), key).reason, "buffers are cast only with fp16 or bf16");
    EXPECT_EQ(entry_of(settings_of(keys + R"(, "bf16": {"enabled": true})"), key).reason, "");
  }
  EXPECT_THAT(entry_of(settings_of(R"("bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": "auto"})"),
                       "data_types.keep_in_fp32_modules")
                  .reason,
              HasSubstr("models here have no list"));
  EXPECT_THAT(refusal(R"("bf16": {"enabled": true}, "data_types": {"keep_in_fp32_modules": "bias"})"),
              HasSubstr("expected a list of texts or auto"));
  EXPECT_THAT(refusal(R"("data_types": {"keep_in_fp32_modules": [")" + std::string(5000, '(') + "\"]}"),
              HasSubstr("expected a pattern of names"));
}

TEST(ZeroSettings, WhatIsSeenOfARunActsWhereThereIsSomethingToSee) {
  const auto reason = [](const std::string& members, const std::string& key,
                         const ReadOptions& options = {.ranks = 2}) {
    return entry_of(settings_of(members, options), key).reason;
  };
  const std::string comms = R"("comms_logger": {"enabled": true, "prof_ops": ["all_reduce"], "debug": true})";
  EXPECT_EQ(reason(comms, "comms_logger.enabled"), "");
  EXPECT_EQ(reason(comms, "comms_logger.enabled", {.ranks = 1}), "one process has no collectives");
  EXPECT_EQ(reason(R"("comms_logger": {"enabled": true, "prof_all": false})", "comms_logger.enabled"),
            "prof_all is false, and prof_ops names nothing");
  EXPECT_EQ(reason(comms, "comms_logger.prof_ops"), "prof_all counts all operations");
  EXPECT_THAT(reason(comms, "comms_logger.debug"), HasSubstr("Python"));
  EXPECT_EQ(reason(R"("comms_logger": {"verbose": true})", "comms_logger.verbose"), "comms_logger is off");
  EXPECT_THAT(refusal(R"("comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["allreduce"]})"),
              HasSubstr("'comms_logger.prof_ops' has 'allreduce', which DeepSpeed logs nothing as"));
  EXPECT_THAT(settings_of(R"("comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["gather"]})").warnings,
              Contains(HasSubstr("gather, which nothing here does")));
  EXPECT_EQ(reason(R"("flops_profiler": {"top_modules": 3})", "flops_profiler.top_modules"), "flops_profiler is off");
  EXPECT_THAT(refusal(R"("flops_profiler": {"module_depth": -2})"), HasSubstr("'flops_profiler.module_depth' is -2"));
  const auto flops = settings_of(R"("flops_profiler": {"enabled": true})");
  EXPECT_TRUE(flops.wall_clock_breakdown) << "as DeepSpeed's";
  EXPECT_EQ(entry_of(flops, "wall_clock_breakdown").value, "true");
  const std::string recomputes = R"("activation_checkpointing": {"cpu_checkpointing": true, "profile": true,
      "synchronize_checkpoint_boundary": true, "partition_activations": true, "contiguous_memory_optimization": true,
      "number_checkpoints": 4})";
  for (const bool cuda : {false, true}) {
    const ReadOptions options{.ranks = 2, .cuda = cuda};
    const std::string key = "activation_checkpointing.";
    EXPECT_EQ(reason(recomputes, key + "cpu_checkpointing", options).empty(), cuda);
    EXPECT_EQ(reason(recomputes, key + "synchronize_checkpoint_boundary", options).empty(), cuda);
    EXPECT_EQ(reason(recomputes, key + "profile", options), "");
    EXPECT_THAT(reason(recomputes, key + "partition_activations", options), HasSubstr("not split over ranks"));
    EXPECT_NE(reason(recomputes, key + "contiguous_memory_optimization", options), "");
    EXPECT_NE(reason(recomputes, key + "number_checkpoints", options), "");
  }
  EXPECT_THAT(refusal(R"("activation_checkpointing": {"contiguous_memory_optimization": true})"),
              HasSubstr("needs partition_activations and number_checkpoints"));
}

TEST(ZeroSettings, RemovedKeysNameWhatDoesItNow) {
  EXPECT_THAT(refusal(R"("amp": {"enabled": false})"),
              AllOf(HasSubstr("'amp'"), HasSubstr("refuses it also where it is off"), HasSubstr("fp16 or bf16")));
  EXPECT_THAT(refusal(R"("zero_optimization": {"mics_shard_size": 8})"), HasSubstr("dp_replicate and dp_shard"));
  const ReadOptions before{.ranks = 2, .as_of_version = "0.19.6"};
  EXPECT_EQ(entry_of(settings_of(R"("amp": {"enabled": false, "opt_level": "O1"})", before), "amp").verdict,
            Verdict::no_meaning);
  EXPECT_THAT(refusal(R"("amp": {"enabled": true})", before), HasSubstr("'amp'"));
  EXPECT_NO_THROW(settings_of(R"("zero_optimization": {"mics_shard_size": -1})", before));
}

TEST(ZeroSettings, DefaultsAreThoseOfAVersion) {
  const auto at = [](const char* version, const std::string& members = "") {
    return settings_of(members, {.ranks = 2, .as_of_version = version});
  };
  EXPECT_EQ(at("0.19.8").gradient_clipping, 1.0);
  EXPECT_EQ(at("0.19.3").gradient_clipping, 1.0);
  EXPECT_EQ(at("0.19.2").gradient_clipping, 0.0);
  EXPECT_EQ(at("0.19.2", R"("gradient_clipping": 0.5)").gradient_clipping, 0.5);
  EXPECT_FALSE(at("0.19.2").bf16.check_grad_overflow);
  EXPECT_TRUE(at("0.19.3").bf16.check_grad_overflow);
  EXPECT_FALSE(at("0.19.4").zero_optimization.offload_param.pin_memory);
  EXPECT_TRUE(at("0.19.5").zero_optimization.offload_optimizer.pin_memory);
  EXPECT_EQ(at("0.19.5").timeout_minutes, 30);
  EXPECT_EQ(at("0.19.6").timeout_minutes, 10);
  EXPECT_EQ(at("0.15.1").steps_per_print, 10.0);
  EXPECT_EQ(at("0.15.2").steps_per_print, std::nullopt);
  const std::string warmup = R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}})";
  EXPECT_EQ(at("0.19.5", warmup).scheduler->params.warmup_num_steps, 2);
  EXPECT_FALSE(at("0.19.5", warmup).scheduler->first_groups_lr_for_all);
  EXPECT_TRUE(at("0.19.3", warmup).scheduler->first_groups_lr_for_all);
  EXPECT_THAT(refusal(warmup), HasSubstr("'scheduler.params.warmup_num_steps' is 0"));
  EXPECT_THAT(at("0.19.5", R"("gradient_allreduce_op": "mean")").warnings,
              Contains(HasSubstr("came with DeepSpeed 0.19.6")));
  EXPECT_THAT(refusal("", {.ranks = 2, .as_of_version = "new"}), HasSubstr("as_of_version is 'new'"));
  EXPECT_TRUE(zero::is_before("0.9.9", "0.10.0"));
  EXPECT_FALSE(zero::is_before("0.19.10", "0.19.9"));
}

TEST(ZeroSettings, TypesHaveTheirOwnDefaults) {
  const auto params = [](const std::string& optimizer) {
    return settings_of("\"optimizer\": " + optimizer).optimizer->params;
  };
  EXPECT_EQ(params(R"({"type": "adagrad"})").lr, 0.01);
  EXPECT_EQ(params(R"({"type": "Adagrad", "params": {"lr": 0.5}})").lr, 0.5);
  EXPECT_EQ(params(R"({"type": "AdamW"})").weight_decay, 0.0);
  EXPECT_EQ(params(R"({"type": "AdamW", "params": {"torch_adam": true}})").weight_decay, 0.01);
  EXPECT_EQ(settings_of(R"("optimizer": {"type": "ADAMW"})").optimizer->type, "AdamW");
  const auto decay = settings_of(R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}})");
  EXPECT_THAT(decay.scheduler->params.warmup_max_lr, ElementsAre(0.001));
  EXPECT_TRUE(settings_of(R"("scheduler": {"type": "WarmupLR"})").scheduler->params.warmup_max_lr.empty());
}

// ---- The effective configuration.

TEST(EffectiveConfiguration, SaysWhatTheFileGaveWithoutMeaning) {
  const auto settings =
      settings_of(R"("zero_optimization": {"stage": 2, "allgather_partitions": true, "sub_group_size": 5, )"
                  R"("reduce_bucket_size": 9})");
  std::vector<std::string> keys;
  for (const auto& entry : settings.without_meaning()) keys.push_back(entry.key);
  EXPECT_THAT(keys, ElementsAre("zero_optimization.allgather_partitions", "zero_optimization.sub_group_size"));
  EXPECT_EQ(entry_of(settings, "zero_optimization.reduce_bucket_size").value, "9");
  EXPECT_TRUE(entry_of(settings, "zero_optimization.reduce_bucket_size").given);
  EXPECT_EQ(entry_of(settings, "zero_optimization.stage3_max_live_parameters").value, "1000000000");
  EXPECT_FALSE(entry_of(settings, "zero_optimization.stage3_max_live_parameters").given);
  EXPECT_EQ(entry_of(settings, "optimizer").value, "null");
  EXPECT_EQ(entry_of(settings, "train_batch_size").value, "2");
  EXPECT_GT(settings.effective.size(), 250U);
}

TEST(EffectiveConfiguration, NeverHasTheKeyToAnAccount) {
  const auto settings = settings_of(R"("comet": {"api_key": "tell-nobody", "project": "p"})");
  EXPECT_EQ(entry_of(settings, "comet.api_key").value, "\"(hidden)\"");
  EXPECT_EQ(entry_of(settings, "comet.project").value, "\"p\"");
  for (const auto& entry : settings.effective) EXPECT_EQ(entry.value.find("tell-nobody"), std::string::npos);
  EXPECT_THAT(refusal(R"("comet": {"api_keys": "tell-nobody"})"),
              AllOf(HasSubstr("comet.api_key"), Not(HasSubstr("tell-nobody"))));
}

TEST(EffectiveConfiguration, APluginWithoutAFileHasGivenNothing) {
  auto plugin = parallel::resolve({.zero_stage = 2});
  fill_auto(plugin, {.ranks = 2, .loader_batch_sizes = {4}});
  EXPECT_TRUE(read_settings(plugin.deepspeed_config(), {.ranks = 2}).without_meaning().empty());
  const auto given = [](const char* text) {
    auto resolved = parallel::resolve({.hf_ds_config = text});
    return entry_of(read_settings(resolved.deepspeed_config(), {.ranks = 2}), "steps_per_print");
  };
  EXPECT_TRUE(given(R"({"train_batch_size": 2, "zero_optimization": {"stage": 2}, "steps_per_print": 5})").given);
  EXPECT_FALSE(given(R"({"train_batch_size": 2, "zero_optimization": {"stage": 2}})").given);
}

// ---- The plugin, and "auto".

TEST(DeepSpeedPluginVersion, ComesFromTheProgramOrTheEnvironment) {
  EXPECT_EQ(parallel::resolve(DeepSpeedPlugin{}).as_of_version, "0.19.8");
  const Variable version("ACCELERATE_DEEPSPEED_AS_OF_VERSION", "0.18.5");
  EXPECT_EQ(parallel::resolve(DeepSpeedPlugin{}).as_of_version, "0.18.5");
  EXPECT_EQ(parallel::resolve({.as_of_version = "0.17.0"}).as_of_version, "0.17.0");
  EXPECT_THAT(message_of<ConfigError>([] { parallel::resolve({.as_of_version = "0.17"}); }),
              HasSubstr("as_of_version is '0.17'"));
}

TEST(FillAuto, WhatNothingFillsIsDeepSpeedsDefaultOrAnError) {
  auto plugin = parallel::resolve({.hf_ds_config = R"({train_micro_batch_size_per_gpu: 1
      zero_optimization: {stage: 3, stage3_max_live_parameters: "auto", offload_param: {buffer_size: "auto"}}})"});
  fill_auto(plugin, {.ranks = 2});
  EXPECT_FALSE(plugin.deepspeed_config().contains("zero_optimization.stage3_max_live_parameters"));
  EXPECT_FALSE(plugin.deepspeed_config().contains("zero_optimization.offload_param.buffer_size"));
  EXPECT_EQ(read_settings(plugin.deepspeed_config(), {.ranks = 2}).zero_optimization.max_live_parameters,
            1'000'000'000);
  auto betas = parallel::resolve({.hf_ds_config = R"({train_micro_batch_size_per_gpu: 1, zero_optimization: {stage: 3},
      optimizer: {type: "Adam", params: {betas: "auto"}}})"});
  EXPECT_THAT(message_of<ConfigError>([&] { fill_auto(betas, {.optimizer = zero::DummyOptimizerFacts{}}); }),
              HasSubstr("'optimizer.params.betas' is \"auto\""));
}

TEST(FillAuto, TheConfigurationsAccumulationHoldsWithAWarning) {
  auto plugin = parallel::resolve(
      {.hf_ds_config = R"({train_batch_size: "auto", train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 3
         zero_optimization: {stage: 1}})"});
  EXPECT_THAT(fill_auto(plugin, {.ranks = 2, .gradient_accumulation_steps = 4}).warnings,
              ElementsAre(HasSubstr("is 3 in the DeepSpeed configuration and 4 in the program")));
  EXPECT_EQ(plugin.get_value("train_batch_size"), DeepSpeedValue(int64_t{12}));
  auto automatic =
      parallel::resolve({.hf_ds_config = R"({train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: "auto"
                            zero_optimization: {}})"});
  EXPECT_TRUE(fill_auto(automatic, {.gradient_accumulation_steps = 4}).warnings.empty());
}

TEST(FillAuto, AnOptimizerOfTheProgramStepsByTheKernelOfItsClass) {
  const auto kernel = [](const char* class_name, const char* more = "") {
    auto plugin = parallel::resolve({.hf_ds_config = std::string(
                                                         R"({train_micro_batch_size_per_gpu: 1
                              zero_optimization: {stage: 2, offload_optimizer: {device: "cpu"}})") +
                                                     more + "}"});
    return fill_auto(plugin, {.optimizer = zero::ProgramOptimizerFacts{.class_name = class_name}}).host_kernel;
  };
  EXPECT_EQ(kernel("AdamW"), "AdamW");
  EXPECT_EQ(kernel("Adam"), "Adam");
  EXPECT_EQ(kernel("DeepSpeedAdam"), "DeepSpeedAdam");
  EXPECT_EQ(kernel("SGD", ", zero_force_ds_cpu_optimizer: false"), "");
  EXPECT_THAT(message_of<ConfigError>([&] { kernel("SGD"); }),
              HasSubstr("the program's optimizer is SGD, expected Adam, AdamW, Adagrad, Lion or DeepSpeedAdam"));
}

// ---------------------------------------------------------------- the documentation

/// Names between backticks in the part of docs/differences.md on configurations.
std::set<std::string> names_in_differences() {
  std::ifstream file(ACCELERATE_SOURCE_DIR "/docs/differences.md");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  text = text.substr(text.find("### DeepSpeed's configuration"));
  text = text.substr(0, text.find("\n## "));
  std::set<std::string> names;
  for (size_t begin = text.find('`'); begin != std::string::npos; begin = text.find('`', begin)) {
    const size_t end = text.find('`', begin + 1);
    names.insert(text.substr(begin + 1, end - begin - 1));
    begin = end + 1;
  }
  return names;
}

// The name of a section is enough for keys of it where none acts. A key may be shortened to parts that no other ends
// with.
TEST(ZeroSettings, WhatIsRefusedIsNamedInTheDocumentation) {
  const auto named = names_in_differences();
  const auto ends_with_part = [](std::string_view key, const std::string& part) {
    return key == part || key.ends_with("." + part);
  };
  std::set<std::string> acting;  // sections
  for (const auto& row : zero::setting_rows())
    for (std::string section = row.key; row.state == zero::SettingState::acts && section.find('.') < section.size();)
      acting.insert(section = section.substr(0, section.rfind('.')));
  size_t refused = 0;
  const auto is_refused = [&](zero::SettingState state) {
    const bool is = state == zero::SettingState::refused || state == zero::SettingState::later;
    refused += is;
    return is;
  };
  for (const auto& row : zero::setting_rows()) {
    if (!is_refused(row.state)) continue;
    const bool found = std::any_of(named.begin(), named.end(), [&](const std::string& name) {
      if (std::string_view(row.key).starts_with(name + ".") && !acting.contains(name)) return true;
      const auto& rows = zero::setting_rows();
      return ends_with_part(row.key, name) && std::count_if(rows.begin(), rows.end(), [&](const auto& other) {
                                                return ends_with_part(other.key, name);
                                              }) == 1;
    });
    EXPECT_TRUE(found) << row.key << " is refused, and docs/differences.md does not name it";
  }
  for (const auto* types : {&zero::optimizer_types(), &zero::scheduler_types()})
    for (const auto& type : *types)
      if (is_refused(type.state)) EXPECT_TRUE(named.contains(type.name)) << type.name << " is refused as a type";
  EXPECT_GT(refused, 50u);
}

}  // namespace
