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
#include "deadline.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "utils/raise.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;

template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }

fs::path folder(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / name;
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// The bytes of a safetensors file: tensors lie one after the other, and their elements are zero.
std::string header_file(json header) {
  int64_t data_bytes = 0;
  for (auto& [name, info] : header.items()) {
    if (!info.contains("data_offsets")) continue;
    const int64_t begin = data_bytes;
    data_bytes += info["data_offsets"].get<int64_t>();
    info["data_offsets"] = {begin, data_bytes};
  }
  const std::string text = header.dump();
  std::string bytes;
  for (size_t i = 0; i < 8; ++i) bytes += static_cast<char>(text.size() >> (8 * i) & 255);
  return bytes + text + std::string(static_cast<size_t>(data_bytes), '\0');
}

json entry(const std::string& dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = dtype.ends_with("64") ? 8 : dtype.ends_with("32") ? 4 : dtype.ends_with("16") ? 2 : 1;
  for (const auto size : shape) bytes *= size;
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", bytes}};
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
    EXPECT_EQ(json(model.keep_in_fp32_modules), expected["in_fp32"]) << config;
  }
  EXPECT_EQ(count, 36);
}

TEST(Architectures, UnknownOnesAndDamagedConfigsAreErrors) {
  using accelerate::describe_architecture;
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gtp2"})"); }),
              AllOf(HasSubstr("'gtp2' is not known"), HasSubstr("did you mean 'gpt2'"), EndsWith(".")));
  const auto dir = folder("unknown_config");
  write(dir / "config.json", R"({"model_type": "gtp2"})");
  EXPECT_THAT(message_of([&] { accelerate::find_model(dir.string()); }),
              AllOf(HasSubstr("'gtp2' is not known"), HasSubstr(". For another one give the file or folder")));
  EXPECT_THAT(message_of([] { describe_architecture("{}"); }), HasSubstr("no \"model_type\""));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", )"); }), HasSubstr("not a JSON object"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", "n_embd": "768"})"); }),
              AllOf(HasSubstr("n_embd is \"768\""), HasSubstr("expected a size")));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "gpt2", "n_layer": 1000000000})"); }),
              HasSubstr("n_layer is 1000000000"));
  std::string depths = "10000";
  for (int i = 1; i < 1000; ++i) depths += ",10000";
  EXPECT_THAT(message_of([&] {
                describe_architecture(R"({"model_type": "resnet", "depths": [)" + depths + R"(], "hidden_sizes": [)" +
                                      depths + "]}");
              }),
              HasSubstr("depths are 10000000 layers in all, expected at most 10000"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "llama", "num_attention_heads": 0})"); }),
              HasSubstr("num_attention_heads is 0"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "resnet", "depths": [1, 2]})"); }),
              HasSubstr("different lengths"));
  EXPECT_THAT(message_of([] { describe_architecture(R"({"model_type": "bert"})", "BertForSomething"); }),
              AllOf(HasSubstr("BertForSomething"), HasSubstr("expected BertModel")));
}

TEST(Architectures, SayWhatTransformersKeepsInFp32) {
  const auto kept = [](const std::string& config) {
    return accelerate::describe_architecture(config).keep_in_fp32_modules;
  };
  EXPECT_THAT(kept(R"({"model_type": "t5"})"), ElementsAre("wo"));
  EXPECT_THAT(kept(R"({"model_type": "llama"})"), testing::IsEmpty());
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

const std::string kSmallLlama =
    R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, )"
    R"("num_attention_heads": 4, "vocab_size": 10)";

/// Weights of which one is in few bits: 1306 bytes in a layer, and 640 of others.
std::string few_bits(const std::string& encoding) {
  const std::string weight = "model.layers.0.mlp.up_proj.weight";
  return header_file({{weight, entry("U8", {1024, 1})},
                      {weight + ".absmax", entry("F32", {32})},
                      {weight + ".quant_map", entry("F32", {16})},
                      {weight + ".quant_state.bitsandbytes__" + encoding, entry("U8", {90})},
                      {"model.embed_tokens.weight", entry("F16", {10, 32})}});
}

TEST(FindModel, SaysWhatIsStoredInFewBits) {
  const auto dir = folder("few_bits");
  write(dir / "model.safetensors", few_bits("nf4"));
  const auto stored = [&](const fs::path& path) { return accelerate::find_model(path.string()).stored; };
  for (const char* config :
       {"", R"(, "quantization_config": null)", R"(, "quantization_config": {"load_in_4bit": true})",
        R"(, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true})",
        R"(, "quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "fp4", "load_in_8bit": null})"}) {
    write(dir / "config.json", kSmallLlama + config + "}");
    const auto found = stored(dir);
    ASSERT_TRUE(found) << config;
    EXPECT_EQ(found->encoding, "nf4") << "by the codes, whatever the config says: " << config;
    EXPECT_EQ(found->total, 1946);
    EXPECT_EQ(found->largest_layer, 1306);
  }
  fs::remove(dir / "config.json");
  for (const auto& path : {dir, dir / "model.safetensors"}) {
    const auto found = stored(path);
    ASSERT_TRUE(found) << path;
    EXPECT_EQ(found->encoding, "nf4");
    EXPECT_EQ(found->total, 1946);
  }
  write(dir / "config.json", kSmallLlama + "}");
  write(dir / "model.safetensors", few_bits("af4"));
  EXPECT_THAT(message_of([&] { stored(dir); }),
              HasSubstr("'model.layers.0.mlp.up_proj.weight' in bitsandbytes' form: its type is 'af4', expected nf4"));
  write(dir / "model.safetensors", header_file({{"model.layers.0.mlp.up_proj.weight", entry("I8", {64, 32})},
                                                {"model.layers.0.mlp.up_proj.SCB", entry("F32", {64})}}));
  EXPECT_EQ(stored(dir)->encoding, "int8");
  EXPECT_EQ(stored(dir)->largest_layer, 64 * 32 + 4 * 64);
}

TEST(FindModel, WhatIsNotStoredInFewBitsHasNoSuchSize) {
  const auto dir = folder("no_codes");
  const std::string nf4 = R"(, "quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"})";
  write(dir / "config.json", kSmallLlama + nf4 + "}");
  write(dir / "model.safetensors", header_file({{"model.embed_tokens.weight", entry("F16", {10, 32})}}));
  EXPECT_FALSE(accelerate::find_model(dir.string()).stored) << "that comes when it is loaded";
  write(dir / "model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(message_of([&] { accelerate::find_model(dir.string()); }), HasSubstr("model.safetensors"));
  write(dir / "config.json", kSmallLlama + "}");
  EXPECT_FALSE(accelerate::find_model(dir.string()).stored) << "the architecture's sizes need no weights";
}

TEST(FindModel, RefusesAQuantizationConfigThatCantBeRead) {
  const auto dir = folder("foreign");
  write(dir / "model.safetensors", few_bits("nf4"));
  const auto error = [&](const std::string& quantization) {
    write(dir / "config.json", kSmallLlama + R"(, "quantization_config": )" + quantization + "}");
    return message_of([&] { accelerate::find_model(dir.string()); });
  };
  EXPECT_THAT(error(R"({"quant_method": "gptq", "bits": 4})"),
              AllOf(HasSubstr("quant_method is \"gptq\", expected \"bitsandbytes\""), HasSubstr("before it was")));
  EXPECT_THAT(error(R"({"quant_method": "unfinished_save"})"), HasSubstr("Save the model again"));
  EXPECT_THAT(error(R"({"load_in_4bit": true, "bnb_4bit_quant_type": "nf3"})"),
              HasSubstr("bnb_4bit_quant_type = \"nf3\", expected \"fp4\" or \"nf4\""));
  EXPECT_THAT(error(R"({"load_in_4bit": true, "load_in_8bit": true})"),
              HasSubstr("load_in_8bit = true and load_in_4bit = true, expected one of them"));
  EXPECT_THAT(error(R"({"quant_method": "bitsandbytes"})"), HasSubstr("load_in_8bit = false and load_in_4bit = false"));
  EXPECT_THAT(error(R"({"load_in_4bit": 1})"), HasSubstr("load_in_4bit is 1, expected true or false"));
  EXPECT_THAT(error(R"({})"), HasSubstr("quantization_config: found {}, expected what bitsandbytes"));
  EXPECT_THAT(error(R"("foo")"), HasSubstr("quantization_config: found \"foo\""));
  fs::remove(dir / "model.safetensors");
  write(dir / "config.json", kSmallLlama + R"(, "quantization_config": {"quant_method": "gptq"}})");
  EXPECT_GT(accelerate::find_model(dir.string()).tree.numel(), 0) << "it is about weights, of which there are none";
}

TEST(FindModel, ReadsAllFilesOfAnIndexAndMissesNone) {
  const auto dir = folder("index");
  write(dir / "model-00001-of-00002.safetensors", header_file({{"a.weight", entry("F32", {4})}}));
  write(dir / "model-00002-of-00002.safetensors", header_file({{"b.weight", entry("F32", {5})}}));
  write(dir / "model.safetensors.index.json", R"({"weight_map": {"a.weight": "model-00001-of-00002.safetensors", )"
                                              R"("b.weight": "model-00002-of-00002.safetensors"}})");
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
  Gguf& tensor(const std::string& name, const std::vector<uint64_t>& sizes, uint64_t begin) {
    text(name).number<uint32_t>(static_cast<uint32_t>(sizes.size()));
    for (const auto size : sizes) number(size);
    return number<uint32_t>(0).number(begin);  // F32
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
  return file.tensor("blk.0.attn_q.weight", {4, 6}, 0).tensor("output_norm.weight", {4}, 96);
}

TEST(FindModel, ReadsTheHeaderOfAGgufFile) {
  const auto dir = folder("gguf");
  constexpr size_t kDataBytes = 96 + 16 + 32;  // and what comes before, for the alignment
  write(dir / "small.gguf", small_gguf().bytes + std::string(kDataBytes, '\0'));
  const auto model = accelerate::find_model((dir / "small.gguf").string());
  EXPECT_EQ(model.tree.numel(), 28);
  EXPECT_EQ(accelerate::compute_module_sizes(model.tree)["blk.0"], 96);
  EXPECT_THAT(model.tree.children.front().children.front().children.front().parameters.front().shape,
              ElementsAre(6, 4));
  const auto whole = small_gguf().bytes;
  write(dir / "no_data.gguf", whole);
  EXPECT_THAT(message_of([&] { accelerate::find_model((dir / "no_data.gguf").string()); }),
              HasSubstr("takes 96 bytes from byte"))
      << "what the loader refuses";
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
  write(dir / "negative.safetensors", header_file({{"a", {{"dtype", "F32"}, {"shape", {-1}}, {"data_offsets", 4}}}}));
  // Files that the loader refuses are not counted either.
  const auto good = header_file({{"a", entry("F32", {2})}, {"b", entry("F32", {3})}});
  write(dir / "good.safetensors", good);
  write(dir / "cut.safetensors", good.substr(0, good.size() - 1));
  write(dir / "appended.safetensors", good + "x");
  const auto changed = [&](const std::string& from, const std::string& to) {
    auto bytes = good;
    EXPECT_EQ(from.size(), to.size());
    return bytes.replace(bytes.find(from), from.size(), to);
  };
  write(dir / "twice.safetensors", changed("\"b\"", "\"a\""));
  write(dir / "overlap.safetensors", changed("[8,20]", "[7,19]"));
  write(dir / "hole.safetensors", changed("[8,20]", "[9,21]"));
  write(dir / "huge.safetensors",
        header_file({{"a", {{"dtype", "F32"}, {"shape", {int64_t{1} << 62, 4}}, {"data_offsets", 0}}}}));
  write(dir / "weights.bin", "");
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "a.";
  write(dir / "deep.safetensors", header_file({{deep, entry("F32", {1})}}));
  const auto error = [&](const std::string& file) {
    return message_of([&] { accelerate::find_model((dir / file).string()); });
  };
  EXPECT_THAT(error("short.safetensors"), HasSubstr("it has 3 bytes, but the length of the header alone takes 8"));
  EXPECT_THAT(error("long.safetensors"), HasSubstr("its header claims 255 bytes, but only 2 follow"));
  EXPECT_THAT(error("noise.safetensors"), HasSubstr("does not start with '{'"));
  EXPECT_THAT(error("negative.safetensors"), HasSubstr("holds the negative number -1"));
  EXPECT_EQ(accelerate::find_model((dir / "good.safetensors").string()).tree.numel(), 5);
  EXPECT_THAT(error("cut.safetensors"), HasSubstr("probably truncated"));
  EXPECT_THAT(error("appended.safetensors"), HasSubstr("belong to no tensor"));
  EXPECT_THAT(error("twice.safetensors"), HasSubstr("has the key \"a\" twice"));
  EXPECT_THAT(error("overlap.safetensors"), HasSubstr("overlaps"));
  EXPECT_THAT(error("hole.safetensors"), HasSubstr("holes are not allowed"));
  EXPECT_THAT(error("huge.safetensors"), HasSubstr("overflows 64 bits"));
  EXPECT_THAT(error("deep.safetensors"), HasSubstr("more than 100 parts"));
  EXPECT_THAT(error("weights.bin"), HasSubstr("expected a folder, a config.json"));
  EXPECT_THAT(error(""), HasSubstr("neither config.json nor model.safetensors"));
  EXPECT_THAT(message_of([] { accelerate::find_model("llama-3-8"); }),
              AllOf(HasSubstr("neither a file or folder"), HasSubstr("Did you mean 'llama-3-8b'")));
}

TEST(FindModel, ReadsAHeaderOf400000TensorsInProportion) {
  const auto dir = folder("many");
  std::string header;
  for (int i = 0; i < 400'000; ++i)
    header += fmt::format(R"({}"model.layers.{}.weight{}":{{"dtype":"F16","shape":[0,128],"data_offsets":[0,0]}})",
                          i == 0 ? '{' : ',', i % 100, i);
  header += '}';
  const auto length = static_cast<uint64_t>(header.size());
  write(dir / "many.safetensors", std::string(reinterpret_cast<const char*>(&length), sizeof length) + header);
  const support::Deadline deadline;  // a quadratic reader takes longer
  const auto model = accelerate::find_model((dir / "many.safetensors").string());
  EXPECT_EQ(model.tree.children.front().children.front().children.size(), 100u);
}

TEST(FindModel, FollowsLinksOfShards) {
  const auto dir = folder("links"), snapshot = dir / "models--m/snapshots/1";
  fs::create_directories(snapshot);
  fs::create_directories(dir / "models--m/blobs");
  write(dir / "models--m/blobs/abc", header_file({{"a", entry("F32", {4})}}));
  write(dir / "elsewhere", header_file({{"a", entry("F32", {5})}}));
  write(snapshot / "model.safetensors.index.json", R"({"weight_map": {"a": "shard.safetensors"}})");
  fs::create_symlink("../../blobs/abc", snapshot / "shard.safetensors");
  EXPECT_EQ(accelerate::find_model(snapshot.string()).tree.numel(), 4);
  fs::remove(snapshot / "shard.safetensors");
  fs::create_symlink(dir / "elsewhere", snapshot / "shard.safetensors");
  EXPECT_EQ(accelerate::find_model(snapshot.string()).tree.numel(), 5) << "the user's own";
  write(snapshot / "model.safetensors.index.json", R"({"weight_map": {"a": "../../../elsewhere"}})");
  EXPECT_THAT(message_of([&] { accelerate::find_model(snapshot.string()); }),
              AllOf(HasSubstr("index.json"), HasSubstr("not the plain name of a file")));
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
