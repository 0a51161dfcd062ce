// Models from configs and headers, against transformers and by hand. Needs no LibTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }

fs::path folder(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / name;
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// The bytes of a safetensors file whose tensors have no data: the header is all that is read here.
std::string header_file(const json& header) {
  const std::string text = header.dump();
  std::string bytes;
  for (size_t i = 0; i < 8; ++i) bytes += static_cast<char>(text.size() >> (8 * i) & 255);
  return bytes + text;
}

json entry(const std::string& dtype, const std::vector<int64_t>& shape) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {0, 0}}};
}

TEST(Architectures, AreWhatTransformersBuilds) {
  SKIP_WITHOUT_PYTHON();
  const auto configs = fs::path(ACCELERATE_SOURCE_DIR) / "tests/unit/fixtures/estimate_configs.jsonl",
             sizes = folder("estimate_peer") / "sizes.jsonl";
  const auto result = support::run_python("tests/unit/estimate_peer.py", {configs.string(), sizes.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  std::ifstream configs_in(configs), sizes_in(sizes);
  int count = 0;
  for (std::string config, expected_text; std::getline(configs_in, config) && std::getline(sizes_in, expected_text);
       ++count) {
    const json expected = json::parse(expected_text);
    const auto model = accelerate::describe_architecture(config, json::parse(config).value("_class", ""));
    json found = json::object();
    for (const auto& [name, bytes] : accelerate::compute_module_sizes(model.tree).entries()) found[name] = bytes;
    EXPECT_EQ(found, expected["sizes"]) << config << json::diff(found, expected["sizes"]).dump(1);
    const auto largest = accelerate::calculate_maximum_sizes(model.tree, model.no_split_module_classes).largest_layer;
    EXPECT_EQ(json(largest.bytes), expected["largest"]) << config;
    EXPECT_EQ(json(largest.names), expected["names"]) << config;
    EXPECT_EQ(model.tree.class_name, expected["class"]) << config;
  }
  EXPECT_EQ(count, 36);
}

TEST(Architectures, UnknownOnesAndDamagedConfigsAreErrors) {
  using accelerate::describe_architecture;
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gtp2"})"); }),
              AllOf(HasSubstr("'gtp2' is not known"), HasSubstr("did you mean 'gpt2'")));
  EXPECT_THAT(message_of([] { describe_architecture("{}"); }), HasSubstr("no \"model_type\""));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", )"); }), HasSubstr("not a JSON object"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", "n_embd": "768"})"); }),
              AllOf(HasSubstr("n_embd is \"768\""), HasSubstr("expected a size")));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", "n_layer": 1000000000})"); }),
              HasSubstr("n_layer is 1000000000"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "llama", "num_attention_heads": 0})"); }),
              HasSubstr("num_attention_heads is 0"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "resnet", "depths": [1, 2]})"); }),
              HasSubstr("different lengths"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "bert"})", "BertForSomething"); }),
              AllOf(HasSubstr("BertForSomething"), HasSubstr("expected BertModel")));
}

TEST(BuiltInModels, AllOfThemAreBuiltAndHaveDifferentNames) {
  std::set<std::string> names;
  for (const auto& name : accelerate::built_in_models()) {
    EXPECT_GT(accelerate::find_model(name).tree.numel(), 0) << name;
    EXPECT_TRUE(names.insert(name.substr(name.find('/') + 1)).second) << name;
  }
}

/// Published numbers of parameters, which the models' own papers and cards give.
TEST(BuiltInModels, HaveThePublishedNumbersOfParameters) {
  const std::map<std::string, double> millions = {{"gpt2", 124.4},
                                                  {"gpt2-xl", 1557.6},
                                                  {"bert-large-uncased", 335.1},
                                                  {"Mistral-7B-v0.1", 7110.7},
                                                  {"Mixtral-8x7B-v0.1", 46571.7},
                                                  {"t5-small", 60.5}};
  for (const auto& [name, expected] : millions)
    EXPECT_NEAR(static_cast<double>(accelerate::find_model(name).tree.numel()) / 1e6, expected, 0.1)
        << name;  // without heads
}

TEST(FindModel, ReadsTheHeadersOfWeightsOfAnUnknownArchitecture) {
  const auto dir = folder("unknown");
  write(dir / "config.json", R"({"model_type": "new_thing"})");
  write(dir / "model.safetensors", header_file({{"__metadata__", {{"format", "pt"}}},
                                                {"a.weight", entry("F16", {10, 10})},
                                                {"a.bias", entry("BF16", {10})},
                                                {"b.c.steps", entry("I64", {3})},
                                                {"d", entry("F8_E4M3", {7})}}));
  for (const auto& path : {dir, dir / "model.safetensors"}) {
    const auto model = accelerate::find_model(path.string());
    const auto sizes = accelerate::compute_module_sizes(model.tree);
    EXPECT_EQ(sizes[""], 4 * (100 + 10 + 7) + 8 * 3);
    EXPECT_EQ(sizes["a"], 440);
    EXPECT_EQ(sizes["b.c"], 24);
    EXPECT_EQ(model.source, (dir / "model.safetensors").string());
    EXPECT_EQ(accelerate::calculate_maximum_sizes(model.tree).largest_layer.names, std::vector<std::string>{"a"});
  }
}

TEST(FindModel, ReadsAllFilesOfAnIndexAndMissesNone) {
  const auto dir = folder("index");
  write(dir / "model-00001-of-00002.safetensors", header_file({{"a.weight", entry("F32", {4})}}));
  write(dir / "model-00002-of-00002.safetensors", header_file({{"b.weight", entry("F32", {5})}}));
  write(
      dir / "model.safetensors.index.json",
      R"({"weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(accelerate::find_model(dir.string()).tree.numel(), 9);
  write(dir / "index.json",
        R"({"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"})");
  EXPECT_EQ(accelerate::find_model((dir / "index.json").string()).tree.numel(), 9) << "the map alone";
  fs::remove(dir / "model-00002-of-00002.safetensors");
  EXPECT_THAT(message_of([&] { accelerate::find_model(dir.string()); }),
              AllOf(HasSubstr("no file 'model-00002-of-00002.safetensors'"), HasSubstr("Copy all files")));
}

/// A GGUF file's header, built up by hand.
struct Gguf {
  std::string bytes;
  template <class T> Gguf& number(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Gguf& text(const std::string& value) {
    number<uint64_t>(value.size()).bytes += value;
    return *this;
  }
  Gguf& tensor(const std::string& name, const std::vector<uint64_t>& sizes) {
    text(name).number<uint32_t>(static_cast<uint32_t>(sizes.size()));
    for (const auto size : sizes) number(size);
    return number<uint32_t>(0).number<uint64_t>(0);  // F32
  }
};

Gguf small_gguf() {
  constexpr uint32_t kFloat = 6, kText = 8, kArray = 9, kLong = 11;
  Gguf file;
  file.number<uint32_t>(0x46554747).number<uint32_t>(3).number<uint64_t>(2).number<uint64_t>(4);
  file.text("general.name").number(kText).text("small");
  file.text("rope.theta").number(kFloat).number(1.5F);
  file.text("tokens").number(kArray).number(kText).number<uint64_t>(2).text("a").text("bc");
  file.text("counts")
      .number(kArray)
      .number(kLong)
      .number<uint64_t>(3)
      .number<int64_t>(1)
      .number<int64_t>(2)
      .number<int64_t>(3);
  return file.tensor("blk.0.attn_q.weight", {4, 6}).tensor("output_norm.weight", {4});
}

TEST(FindModel, ReadsTheHeaderOfAGgufFile) {
  const auto dir = folder("gguf");
  write(dir / "small.gguf", small_gguf().bytes);
  const auto model = accelerate::find_model((dir / "small.gguf").string());
  EXPECT_EQ(model.tree.numel(), 28);
  EXPECT_EQ(accelerate::compute_module_sizes(model.tree)["blk.0"], 96);
  EXPECT_THAT(model.tree.children.front().children.front().children.front().parameters.front().shape,
              ElementsAre(6, 4));
  const auto whole = small_gguf().bytes;
  for (size_t length = 0; length < whole.size(); ++length) {
    write(dir / "cut.gguf", whole.substr(0, length));
    EXPECT_THAT(message_of([&] { accelerate::find_model((dir / "cut.gguf").string()); }), HasSubstr("GGUF file"))
        << length;
  }
  auto noise = whole;
  noise[8] = '\xff', noise[15] = '\x7f';
  write(dir / "noise.gguf", noise);
  EXPECT_THAT(message_of([&] { accelerate::find_model((dir / "noise.gguf").string()); }),
              HasSubstr("has room for fewer"));
}

TEST(FindModel, SaysWhatIsWrongWithAFile) {
  const auto dir = folder("damaged");
  write(dir / "short.safetensors", "abc");
  write(dir / "long.safetensors", std::string("\xff\0\0\0\0\0\0\0{}", 10));
  write(dir / "noise.safetensors", header_file("text"));
  write(dir / "negative.safetensors", header_file({{"a", {{"dtype", "F32"}, {"shape", {-1}}}}}));
  write(dir / "weights.bin", "");
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "a.";
  write(dir / "deep.safetensors", header_file({{deep, entry("F32", {1})}}));
  const auto error = [&](const std::string& file) {
    return message_of([&] { accelerate::find_model((dir / file).string()); });
  };
  EXPECT_THAT(error("short.safetensors"), HasSubstr("truncated or no safetensors file"));
  EXPECT_THAT(error("long.safetensors"), HasSubstr("its header has 255 bytes, the file 10"));
  EXPECT_THAT(error("noise.safetensors"), HasSubstr("not a JSON object"));
  EXPECT_THAT(error("negative.safetensors"), HasSubstr("'a' has no dtype and shape"));
  EXPECT_THAT(error("deep.safetensors"), HasSubstr("more than 100 parts"));
  EXPECT_THAT(error("weights.bin"), HasSubstr("expected a folder, a config.json"));
  EXPECT_THAT(error(""), HasSubstr("neither config.json nor model.safetensors"));
  EXPECT_THAT(message_of([] { accelerate::find_model("llama-3-8"); }),
              AllOf(HasSubstr("neither a file or folder"), HasSubstr("Did you mean 'llama-3-8b'")));
}

TEST(MemoryTable, IsAsWideAsItsTitle) {
  const auto estimates = accelerate::estimate_memory({.total = 4096}, {"float32", "int8"});
  for (const size_t length : {1, 20, 24, 30, 40, 100}) {
    std::istringstream lines(accelerate::memory_table(std::string(length, 'x'), estimates));
    std::set<size_t> widths;
    for (std::string line; std::getline(lines, line);)
      widths.insert(
          static_cast<size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; })));
    EXPECT_EQ(widths.size(), 1U) << length;
  }
}

TEST(Tie, MakesOneTensorOfTwo) {
  accelerate::ModuleTree tree{.class_name = "Model",
                              .children = {{.name = "a", .parameters = {{"weight", {4, 2}}}},
                                           {.name = "b", .parameters = {{"weight", {2, 4}}}},
                                           {.name = "c", .parameters = {{"weight", {1}}}}}};
  accelerate::tie(tree, "b.weight", "a.weight");
  EXPECT_EQ(tree.numel(), 9);
  EXPECT_THAT(accelerate::find_tied_parameters(tree), ElementsAre(ElementsAre("a.weight", "b.weight")));
  accelerate::tie(tree, "c.weight", "b.weight");
  EXPECT_THAT(accelerate::find_tied_parameters(tree), ElementsAre(ElementsAre("a.weight", "b.weight", "c.weight")));
  EXPECT_EQ(accelerate::compute_module_sizes(tree)[""], 32);
  EXPECT_EQ(accelerate::compute_module_sizes(tree)["c"], 0);
  EXPECT_THAT(message_of([&] { accelerate::tie(tree, "a.weight", "d.weight"); }), HasSubstr("no tensor 'd.weight'"));
}

}  // namespace
