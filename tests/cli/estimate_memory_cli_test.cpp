// The program's tables: those that Hugging Face has published, and how it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "program.hpp"
#include "ranks.hpp"

namespace {

using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;

Result estimate(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {accelerate_path(), "estimate-memory"});
  return Program(arguments).wait();
}

/// A row of the table with its spaces taken out.
std::string row(const Result& result, const std::string& dtype) {
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    std::erase(line, ' ');
    if (line.find("│" + dtype + "│") == 0) return line;
  }
  return "no row of " + dtype + " in:\n" + result.out + result.err;
}

TEST(EstimateMemory, PrintsThePublishedTables) {
  const auto bert = estimate({"bert-base-cased"});
  EXPECT_EQ(bert.exit_code, 0) << bert.err;
  EXPECT_THAT(bert.out, HasSubstr("Memory Usage for loading `bert-base-cased`"));
  // Published with 84.95 MB, when embeddings were not kept whole: docs/differences.md.
  EXPECT_EQ(row(bert, "float32"), "│float32│86.47MB│413.18MB│1.61GB│");
  EXPECT_EQ(row(bert, "float16"), "│float16│43.23MB│206.59MB│826.36MB│");
  EXPECT_EQ(row(bert, "int8"), "│int8│21.62MB│103.29MB│N/A│");
  EXPECT_EQ(row(bert, "int4"), "│int4│10.81MB│51.65MB│N/A│");
  EXPECT_THAT(bert.out, HasSubstr("Counted: BertModel in float32, 108310272 parameters (413.17 MB), buffers "));
  EXPECT_THAT(bert.out, HasSubstr("A layer is a module without parts, or a BertEmbeddings, a BertLayer\n"));
  // Published are 112.84 GB, which is four times the rounded number.
  const auto llama = estimate({"llama-3-8B"});
  EXPECT_THAT(row(llama, "float32"), HasSubstr("│28.21GB│112.83GB│"));
  EXPECT_THAT(llama.out,
              HasSubstr("Counted: LlamaModel in float32, 7504924672 parameters (27.96 GB), buffers "
                        "inv_freq, cos_cached, sin_cached (256.01 MB). A layer is a module without parts, or a "
                        "LlamaDecoderLayer\n"));
  const auto idefics = estimate({"HuggingFaceM4/idefics-80b-instruct", "--library_name", "transformers"});
  EXPECT_EQ(row(idefics, "float32"), "│float32│3.02GB│297.12GB│1.16TB│");
  EXPECT_EQ(row(idefics, "float16"), "│float16│1.51GB│148.56GB│594.24GB│");
  EXPECT_EQ(row(idefics, "int8"), "│int8│772.52MB│74.28GB│N/A│");
  EXPECT_EQ(row(idefics, "int4"), "│int4│386.26MB│37.14GB│N/A│");
  const auto resnet = estimate({"timm/resnet50.a1_in1k", "--library-name", "timm"});
  EXPECT_EQ(row(resnet, "float32"), "│float32│9.0MB│97.7MB│390.78MB│");
  EXPECT_EQ(row(resnet, "float16"), "│float16│4.5MB│48.85MB│195.39MB│");
  EXPECT_EQ(row(resnet, "int8"), "│int8│2.25MB│24.42MB│N/A│");
  EXPECT_EQ(row(resnet, "int4"), "│int4│1.12MB│12.21MB│N/A│");
}

TEST(EstimateMemory, PrintsOnlyTheDtypesAskedFor) {
  const auto result = estimate({"bert-base-cased", "--dtypes", "float16", "int8"});
  EXPECT_EQ(row(result, "float16"), "│float16│43.23MB│206.59MB│826.36MB│");
  EXPECT_THAT(row(result, "float32"), HasSubstr("no row"));
  EXPECT_THAT(row(result, "int4"), HasSubstr("no row"));
  const auto attached = estimate({"--dtypes=int4", "bert-base-cased"});
  EXPECT_EQ(row(attached, "int4"), "│int4│10.81MB│51.65MB│N/A│");
  EXPECT_THAT(row(attached, "float32"), HasSubstr("no row"));
}

TEST(EstimateMemory, PrintsJson) {
  const auto result = estimate({"--json", "bert-base-cased", "--dtypes", "float32", "--trust_remote_code"});
  EXPECT_THAT(result.err, HasSubstr("no code of the model is run"));
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["parameters"], 108310272);
  EXPECT_EQ(json["counted"]["parameters"], 4 * 108310272);
  EXPECT_EQ(json["counted"]["parameters"].get<int64_t>() + json["counted"]["buffers"].get<int64_t>(), 433249280);
  EXPECT_EQ(json["counted"]["kept_whole"], nlohmann::json::parse(R"(["BertEmbeddings", "BertLayer"])"));
  EXPECT_EQ(json["rows"], nlohmann::json::parse(R"([{"dtype": "float32", "largest_layer": 90669056, "total": 433249280,
      "training_adam": {"model": 433249280, "gradients": 433249280, "optimizer": 866498560, "step": 1732997120, "peak": 1732997120}}])"));
}

TEST(EstimateMemory, ReadsAConfigOfTheUser) {
  const auto path = std::filesystem::path(support::scratch_dir()) / "config.json";
  std::ofstream(path)
      << R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 1000, "n_positions": 100})";
  const auto json = nlohmann::json::parse(estimate({path.string(), "--json"}).out);
  EXPECT_EQ(json["parameters"], 1000 * 64 + 100 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64);
  EXPECT_EQ(json["class"], "GPT2Model");
}

TEST(EstimateMemory, FindsModelsOfTheHuggingFaceCache) {
  const auto home = std::filesystem::path(support::scratch_dir()) / "hf_home";
  const auto model = home / "hub/models--someone--tiny";
  std::filesystem::create_directories(model / "refs");
  std::filesystem::create_directories(model / "snapshots/0123abc");
  std::ofstream(model / "refs/main") << "0123abc";
  std::ofstream(model / "snapshots/0123abc/config.json")
      << R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "vocab_size": 1000, "n_positions": 100})";
  const auto run = [](const std::vector<std::string>& words, std::vector<std::string> env) {
    std::vector<std::string> all{cli_test::accelerate_path(), "estimate-memory"};
    all.insert(all.end(), words.begin(), words.end());
    return cli_test::Program(all, {.env = std::move(env)}).wait();
  };
  using Env = std::vector<std::string>;
  for (const auto& env :
       {Env{"HF_HUB_CACHE=", "HF_HOME=" + home.string()}, Env{"HF_HUB_CACHE=" + home.string() + "/hub"}}) {
    const auto found = run({"someone/tiny", "--json"}, env);
    ASSERT_EQ(found.exit_code, 0) << found.err;
    const auto json = nlohmann::json::parse(found.out);
    EXPECT_EQ(json["class"], "GPT2Model");
    EXPECT_EQ(json["source"], (model / "snapshots/0123abc/config.json").string());
  }
  const auto missing = run({"someone/else"}, {"HF_HUB_CACHE=", "HF_HOME=" + home.string()});
  EXPECT_EQ(missing.exit_code, 64);
  EXPECT_THAT(missing.err, HasSubstr("the Hugging Face cache " + (home / "hub").string()));
  std::istringstream lines(missing.err);  // the list of built-in names is wrapped
  std::string first;
  std::getline(lines, first);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_THAT(missing.err, HasSubstr("\n  google-bert/bert-base-cased bert-base-cased"));
}

TEST(EstimateMemory, SaysWhatIsWrong) {
  const auto expect = [](const std::vector<std::string>& arguments, const std::string& text) {
    const auto result = estimate(arguments);
    EXPECT_EQ(result.exit_code, 64) << result.out;
    EXPECT_THAT(result.err, HasSubstr(text));
  };
  expect({}, "MODEL is missing");
  expect({"bert-base-casd"}, "Did you mean 'bert-base-cased'");
  expect({"gpt2", "opt-125m"}, "nothing that 'opt-125m' could mean");
  expect({"gpt2", "--dtypes"}, "--dtypes needs a value: DTYPE");
  expect({"gpt2", "--dtypes", "float23"}, "expected one of: float32, float16, int8, int4");
  expect({"gpt2", "--library_name", "timm"}, "a model of transformers, not of timm");
  expect({"gpt2", "--librari_name", "timm"}, "Did you mean '--library_name'");
}

/// A GPT-2 small enough to be quick, and large enough that padding of shards to equal sizes is below the tolerance of 3
/// %.
std::filesystem::path small_gpt2() {
  const auto path = std::filesystem::path(support::scratch_dir()) / "config.json";
  std::ofstream(path)
      << R"({"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "vocab_size": 1000, "n_positions": 100})";
  return path;
}
constexpr double kSmallGpt2 = 1000 * 128 + 100 * 128 + 3 * (12 * 128 * 128 + 13 * 128) + 2 * 128;

nlohmann::json train(const std::string& strategy, std::vector<std::string> more = {}) {
  more.insert(more.begin(),
              {small_gpt2().string(), "--strategy", strategy, "--num_processes", "4", "--seq", "16", "--json"});
  const auto result = estimate(more);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out, nullptr, false);
}

auto about(double bytes) { return testing::DoubleNear(bytes, 0.03 * bytes); }

/// Model states after Rajbhandari et al., arXiv:1910.02054, figure 1, in fp32: 4 bytes of value, 4 of gradient, 8 of
/// moments; and the messages of a step, section 7.
TEST(EstimateTraining, EachStrategyHoldsWhatThePaperSays) {
  struct Expected {
    std::string strategy;
    double parameters, whole, gradients, moments, volume;  ///< bytes per parameter
  };
  // Parameters below DeepSpeed's stage3_param_persistence_threshold stay whole: here, all of them.
  for (const auto& [strategy, parameters, whole, gradients, moments, volume] :
       {Expected{"ddp", 4, 0, 4, 8, 8}, Expected{"zero1", 1, 4, 1, 2, 8}, Expected{"zero2", 1, 4, 1, 2, 8},
        Expected{"zero3", 1, 4, 1, 2, 8}, Expected{"fsdp", 1, -1, 1, 2, 12}}) {
    SCOPED_TRACE(strategy);
    const auto json = train(strategy);
    EXPECT_EQ(json["parameters"], kSmallGpt2);
    const auto& backward = json["phases"]["backward"];
    EXPECT_THAT(backward["parameters"].get<double>(), about(parameters * kSmallGpt2));
    if (whole >= 0) {
      EXPECT_THAT(backward["gathered"].get<double>(), about(whole * kSmallGpt2));
    }
    EXPECT_THAT(backward["optimizer"].get<double>(), about(moments * kSmallGpt2));
    EXPECT_THAT(json["phases"]["step"]["gradients"].get<double>(), about(gradients * kSmallGpt2));
    // FULL_SHARD gathers the last layer and the embeddings once instead of twice (docs/dry_run.md).
    const double saved = volume > 8 ? 4 * (1000 * 128 + 100 * 128 + 2 * 128 + 12 * 128 * 128 + 13 * 128) : 0;
    EXPECT_THAT(json["communication"]["volume"].get<double>(), about(volume * kSmallGpt2 - saved));
    EXPECT_GE(json["peak"], backward["total"]);
    EXPECT_EQ(json["from"].get<std::string>().find("ZeRO's stage") != std::string::npos, strategy.starts_with("zero"));
  }
}

/// Offloading moves pieces of parameters, gradients and states to the host, and nothing else.
TEST(EstimateTraining, OffloadSaysWhatLiesOnTheHost) {
  for (const char* strategy : {"zero2", "fsdp"}) {
    SCOPED_TRACE(strategy);
    const auto here = train(strategy), there = train(strategy, {"--offload"});
    EXPECT_EQ(here["peak_on_host"], 0);
    EXPECT_EQ(here["peak"], there["peak"]);
    EXPECT_TRUE(there["offload"]);
    // A quarter of values, gradients (of which the last may be to come) and moments, and the temporaries of a step on
    // the largest of them.
    EXPECT_GT(there["peak_on_host"].get<double>(), 12 * kSmallGpt2 / 4);
    EXPECT_LT(there["peak_on_host"].get<double>(), 1.5 * 16 * kSmallGpt2 / 4);
  }
  const auto table =
      estimate({small_gpt2().string(), "--strategy", "zero3", "--num_processes", "4", "--seq", "16", "--offload"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("Of that on the host (parameters, gradients, optimizer): "),
                               HasSubstr("ZeRO's stage 3 with what the optimizer works on on the host")));
  EXPECT_EQ(table.err, "");
}

/// Every architecture of the zoo, from its config.json: the table counts the parameters (with heads, which the
/// table's bodies lack), and a shard is half of them.
TEST(EstimateTraining, TheWholeZooCanBeRunDry) {
  const std::string layers =
      R"("hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128)";
  const std::pair<std::string, int64_t> configs[] = {
      {R"({"model_type": "bert", "vocab_size": 500, )" + layers + "}", -1},
      {R"({"model_type": "llama", "vocab_size": 500, )" + layers + "}",
       500 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64},
      {R"({"model_type": "mistral", "vocab_size": 500, "num_key_value_heads": 4, )" + layers + "}",
       500 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64},
      {R"({"model_type": "qwen2", "vocab_size": 500, "num_key_value_heads": 4, )" + layers + "}",
       500 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 + 3 * 64 * 128 + 2 * 64) + 64},
      {R"({"model_type": "mixtral", "vocab_size": 500, "num_key_value_heads": 4, "num_local_experts": 2, )" + layers +
           "}",
       500 * 64 * 2 + 2 * (4 * 64 * 64 + 2 * 64 + 2 * 3 * 64 * 128 + 2 * 64) + 64},
      {R"({"model_type": "gpt_neox", "vocab_size": 500, )" + layers + "}",
       500 * 64 * 2 + 2 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 128 + 3 * 64 + 4 * 64) + 2 * 64},
      {R"({"model_type": "gptj", "vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8})",
       500 * 64 * 2 + 500 + 2 * (12 * 64 * 64 + 5 * 64 + 2 * 64) + 2 * 64},
      {R"({"model_type": "opt", "vocab_size": 500, "ffn_dim": 128, "max_position_embeddings": 200, "hidden_size": 64,)"
       R"( "num_hidden_layers": 2, "num_attention_heads": 4})",
       -1},
      {R"({"model_type": "t5", "vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, )"
       R"("num_heads": 4})",
       -1},
      {R"({"model_type": "vit", "image_size": 32, "patch_size": 8, )" + layers + "}", -1},
      {R"({"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]})", -1},
      {R"({"architecture": "tf_efficientnet_lite0"})", 4652008},
  };
  const auto folder = std::filesystem::path(support::scratch_dir()) / "zoo";
  std::filesystem::create_directories(folder);
  for (const auto& [config, parameters] : configs) {
    SCOPED_TRACE(config);
    std::ofstream(folder / "config.json") << config;
    const auto result = estimate({folder.string(), "--strategy", "fsdp", "--num_processes", "2", "--json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const auto json = nlohmann::json::parse(result.out);
    if (parameters >= 0) {
      EXPECT_EQ(json["parameters"], parameters);
    }
    const double bytes = 4 * json["parameters"].get<double>();
    // Two processes hold half each: values, and moments after the first step. Batch norms' running means and padding to
    // equal pieces come on top.
    EXPECT_NEAR(json["phases"]["backward"]["optimizer"].get<double>(), bytes, 0.03 * bytes);
    EXPECT_GT(json["communication"]["volume"].get<double>(), bytes);
    EXPECT_EQ(json["seq"].is_null(), config.find("vocab_size") == std::string::npos);
  }
}

TEST(EstimateTraining, ActivationsGrowWithTheBatch) {
  const auto other = [](const nlohmann::json& json) { return json["phases"]["forward"]["other"].get<double>(); };
  const auto one = train("ddp"), four = train("ddp", {"--batch", "4"});
  EXPECT_GT(other(four), 3 * other(one));
  EXPECT_EQ(one["communication"], four["communication"]);
  EXPECT_LT(train("fsdp", {"--mixed_precision", "bf16"})["communication"]["volume"],
            train("fsdp")["communication"]["volume"]);
}

TEST(EstimateTraining, PrintsATableForBuiltInModels) {
  const auto result = estimate({"bert-base-cased", "--strategy", "zero2", "--num_processes", "8", "--batch", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("Training `bert-base-cased` with zero2 on 8 processes"),
                                HasSubstr("activations and other"), HasSubstr("Communication of a step"),
                                HasSubstr("a dry run of ZeRO's stage 2")));
}

TEST(EstimateTraining, WeightsInFewBitsAreNotTrained) {
  const auto folder = std::filesystem::path(support::scratch_dir()) / "few_bits";
  std::filesystem::create_directories(folder);
  const std::string config = R"({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 100)";
  const auto refused = [&](const std::string& whose) {
    const auto result = estimate({folder.string(), "--strategy", "ddp"});
    EXPECT_EQ(result.exit_code, 64) << result.out;
    EXPECT_THAT(result.err, AllOf(HasSubstr("'" + folder.string() + "' has weights in few bits (" + whose + ")"),
                                  HasSubstr("such weights are frozen")));
  };
  std::ofstream(folder / "config.json") << config << R"(, "quantization_config": {"load_in_4bit": true}})";
  refused("the quantization_config of its config.json");
  std::ofstream(folder / "config.json") << config << "}";
  EXPECT_EQ(estimate({folder.string(), "--strategy", "ddp"}).exit_code, 0);
  const std::string header =
      R"({"h.weight.quant_state.bitsandbytes__nf4": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})";
  const uint64_t size = header.size();
  std::ofstream(folder / "model.safetensors", std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&size), sizeof size) << header << "x";
  refused("nf4");
  EXPECT_EQ(row(estimate({folder.string()}), "nf4,stored"), "│nf4,stored│1bytes│1bytes│N/A│");
}

TEST(EstimateTraining, SaysWhatIsWrong) {
  const auto expect = [](const std::vector<std::string>& arguments, const std::string& text) {
    const auto result = estimate(arguments);
    EXPECT_EQ(result.exit_code, 64) << result.out;
    EXPECT_THAT(result.err, HasSubstr(text));
  };
  expect({"gpt2", "--strategy", "zero4"}, "expected one of: ddp, fsdp, zero1, zero2, zero3");
  expect({"gpt2", "--strategy", "ddp", "--offload"}, "--offload was given with --strategy ddp");
  expect({"gpt2", "--offload"}, "--offload was given without --strategy");
  expect({"gpt2", "--batch", "2"}, "--batch was given without --strategy");
  expect({"gpt2", "--strategy", "ddp", "--batch", "0"}, "--batch is '0', expected a whole number from 1 on");
  expect({"gpt2", "--strategy", "ddp", "--dtypes", "float16"}, "--dtypes is for the table of weights");
  expect({"distilbert-base-uncased", "--strategy", "ddp"},
         "'distilbert-base-uncased': model_type is \"distilbert\", expected one of bert, efficientnet_lite, gpt2, ");
  expect({"google/vit-base-patch16-224", "--strategy", "ddp", "--seq", "5"}, "takes images, expected --batch alone");
  expect({"gpt-2x", "--strategy", "ddp"}, "nor the name of a built-in model");
}

/// The reference needs seconds and hundreds of megabytes, since it loads PyTorch. This takes 12 ms.
TEST(EstimateMemory, LoadsNoLibTorch) {
  const auto usage = estimate({"HuggingFaceM4/idefics-80b-instruct"}).usage;
  EXPECT_GT(usage.ru_maxrss, 0);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(usage.ru_maxrss, 40'000) << "kB";
#endif
}

}  // namespace
