/// GGUF files: encodings against the Python package, damage, and models as llama.cpp's converter writes them.

#include <fstream>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_header.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::CheckpointError;
using accelerate::GgufFile;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

fs::path scratch(const std::string& name) { return fs::path(support::scratch_dir()) / name; }

/// A file built up by hand.
struct Writer {
  std::string bytes;
  template <class T> Writer& number(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(const std::string& value) {
    number<uint64_t>(value.size()).bytes += value;
    return *this;
  }
  Writer& head(uint64_t tensors, uint64_t values, uint32_t version = 3) {
    return number<uint32_t>(0x46554747).number(version).number(tensors).number(values);
  }
  Writer& tensor(const std::string& name, const std::vector<uint64_t>& sizes, uint32_t encoding, uint64_t offset) {
    text(name).number<uint32_t>(static_cast<uint32_t>(sizes.size()));
    for (const auto size : sizes) number(size);
    return number(encoding).number(offset);
  }
  Writer& data(size_t count) {
    bytes.resize((bytes.size() + 31) / 32 * 32 + count, '\1');
    return *this;
  }
};

constexpr uint32_t kF32 = 0, kQ8 = 8, kU32 = 4, kF32Value = 6, kBool = 7, kText = 8, kArray = 9, kU64 = 10;

Writer small() {
  Writer file;
  file.head(2, 2)
      .text("general.name")
      .number(kText)
      .text("small")
      .text("list")
      .number(kArray)
      .number(kText)
      .number<uint64_t>(2)
      .text("a")
      .text("bc");
  return file.tensor("v", {3}, kF32, 0).tensor("m", {64, 2}, kQ8, 32).data(32 + 4 * 34);
}

fs::path save(const std::string& name, const std::string& bytes) {
  std::ofstream(scratch(name), std::ios::binary) << bytes;
  return scratch(name);
}

std::string error_of(const Writer& file) {
  return support::message_of<CheckpointError>([&] { GgufFile(save("bad.gguf", file.bytes)); });
}

torch::Tensor decoded(const GgufFile& file, const std::string& name, at::ScalarType dtype = at::kFloat) {
  const auto tensor = torch::full(file.info(name).shape, 7, dtype);
  file.read(name, tensor);
  return tensor;
}

/// NaN equals NaN.
bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && torch::allclose(a, b, 0, 0, true) && a.signbit().equal(b.signbit());
}

TEST(Gguf, ReadsNamesShapesAndParts) {
  const GgufFile file(save("small.gguf", small().bytes));
  EXPECT_THAT(file.names(), ElementsAre("v", "m"));
  EXPECT_EQ(*file.metadata().find_as<std::string>("general.name"), "small");
  EXPECT_THAT(*file.metadata().find_as<std::vector<std::string>>("list"), ElementsAre("a", "bc"));
  EXPECT_THAT(file.info("m").shape, ElementsAre(2, 64));
  EXPECT_EQ(file.info("m").encoding, "Q8_0");
  EXPECT_EQ(file.info("m").stored_bytes, 136);
  const auto whole = decoded(file, "m");
  auto row = torch::empty({64});
  file.read("m", row, 1);
  EXPECT_TRUE(row.equal(whole[1]));
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble})
    EXPECT_TRUE(decoded(file, "m", dtype).equal(whole.to(dtype))) << dtype;
  for (const auto& bad :
       {torch::empty({63}), torch::empty({64}, at::kLong), torch::empty({3, 64}), torch::empty({64, 2}).t()})
    EXPECT_THROW(file.read("m", bad), accelerate::ShapeError) << bad.sizes();
  EXPECT_THROW(file.read("m", row, 2), accelerate::ShapeError);
  EXPECT_THAT(support::message_of<CheckpointError>([&] { file.info("w"); }),
              HasSubstr("no tensor 'w'; it has 2 others"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { file.config_json(); }), HasSubstr("names no architecture"));
}

TEST(Gguf, SaysWhatIsWrongWithAFile) {
  const auto whole = small().bytes;
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto path = save("cut.gguf", whole.substr(0, length));
    EXPECT_THROW(GgufFile{path}, CheckpointError) << length;
  }
  EXPECT_THAT(error_of(Writer().head(0, 0, 1)), HasSubstr("version 1, expected 2 or 3"));
  EXPECT_THAT(error_of(Writer().number<uint32_t>(0x47475546).data(64)), HasSubstr("big-endian"));
  EXPECT_THAT(error_of(Writer().number<uint32_t>(1).data(64)), HasSubstr("does not begin with GGUF"));
  EXPECT_THAT(error_of(Writer().head(1ULL << 60, 0)), HasSubstr("has room for fewer"));
  EXPECT_THAT(error_of(Writer().head(0, 1).text("k").number<uint32_t>(99).data(64)), HasSubstr("value of type 99"));
  EXPECT_THAT(
      error_of(
          Writer().head(0, 2).text("k").number(kU32).number<uint32_t>(1).text("k").number(kU32).number<uint32_t>(1)),
      HasSubstr("'k' occurs twice"));
  EXPECT_THAT(
      error_of(Writer().head(0, 1).text("k").number(kArray).number(kText).number<uint64_t>(1ULL << 61).data(64)),
      HasSubstr("values in an array"));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {4}, 77, 0).data(64)),
              AllOf(HasSubstr("'t'"), HasSubstr("encoding number 77")));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {33}, kQ8, 0).data(640)),
              HasSubstr("rows of 33 elements, but Q8_0 stores blocks of 32"));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {1ULL << 40, 1ULL << 40}, kF32, 0).data(64)),
              HasSubstr("more elements than there are numbers"));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {1ULL << 62}, kF32, 0).data(64)),
              HasSubstr("more bytes than there are numbers"));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {4}, kF32, 8).data(64)),
              HasSubstr("multiple of the alignment 32"));
  EXPECT_THAT(error_of(Writer().head(1, 0).tensor("t", {17}, kF32, 0).data(64)),
              AllOf(HasSubstr("takes 68 bytes"), HasSubstr("truncated")));
  EXPECT_THAT(error_of(Writer().head(2, 0).tensor("t", {4}, kF32, 0).tensor("t", {4}, kF32, 0).data(64)),
              HasSubstr("two tensors of the name 't'"));
  EXPECT_THAT(error_of(Writer().head(2, 0).tensor("b", {9}, kF32, 32).tensor("a", {9}, kF32, 0).data(96)),
              AllOf(HasSubstr("tensor 'b' begins at byte"), HasSubstr("within 'a'")));
  EXPECT_THAT(error_of(Writer()
                           .head(0, 2)
                           .text("split.no")
                           .number(kU32)
                           .number<uint32_t>(1)
                           .text("split.count")
                           .number(kU32)
                           .number<uint32_t>(3)),
              AllOf(HasSubstr("part 2 of a model in 3 files"), HasSubstr("llama-gguf-split --merge")));
  EXPECT_THAT(error_of(Writer().head(0, 1).text("general.alignment").number(kU32).number<uint32_t>(0)),
              HasSubstr("expected a power of two"));
}

/// A LLaMA's file with one number in its metadata, which may be any.
Writer llama(const std::string& key, uint64_t value) {
  return Writer()
      .head(1, 2)
      .text("general.architecture")
      .number(kText)
      .text("llama")
      .text("llama." + key)
      .number(kU64)
      .number(value);
}

TEST(Gguf, NumbersOfExpertsAndHeadsAreComparedWithTheTensor) {
  const auto experts = [](uint64_t count, uint64_t size, size_t bytes) {
    return llama("expert_count", count).tensor("blk.0.ffn_gate_exps.weight", {size, size, count}, kF32, 0).data(bytes);
  };
  EXPECT_THAT(GgufFile(save("experts.gguf", experts(2, 1, 8).bytes)).names(),
              ElementsAre("model.layers.0.block_sparse_moe.experts.0.w1.weight",
                          "model.layers.0.block_sparse_moe.experts.1.w1.weight"));
  EXPECT_THAT(error_of(experts(2, 0, 0)),
              HasSubstr("tensor 'blk.0.ffn_gate_exps.weight' has the shape [2, 0, 0], expected 1 to 65536 experts"))
      << "names without bytes, of which a few bytes could ask for any number";
  EXPECT_THAT(error_of(experts(65537, 1, 4 * 65537)), HasSubstr("[65537, 1, 1], expected 1 to 65536 experts"));
  EXPECT_THAT(error_of(experts(0, 0, 0)), HasSubstr("expected 1 to 65536 experts"));
  for (const uint64_t heads : {uint64_t{4}, uint64_t{1} << 62, (uint64_t{1} << 63) - 1})
    EXPECT_THAT(error_of(llama("attention.head_count", heads).tensor("blk.0.attn_q.weight", {4, 6}, kF32, 0).data(96)),
                HasSubstr("expected an even number of rows for each of the " + std::to_string(heads) + " heads"));
}

TEST(Gguf, LongListsComeWhenTheyAreAskedFor) {
  const auto file = [](const std::string& second) {
    Writer writer;
    writer.head(0, 2);
    for (const auto& [key, count] : {std::pair(std::string("long"), 1025), {second, 1024}}) {
      writer.text(key).number(kArray).number(kU32).number<uint64_t>(static_cast<uint64_t>(count));
      for (int i = 0; i < count; ++i) writer.number<uint32_t>(static_cast<uint32_t>(i));
    }
    return writer;
  };
  const auto whole = file("short").bytes;
  const auto header = accelerate::formats::parse_gguf_header(whole, "file", accelerate::formats::GgufLists::short_ones);
  EXPECT_FALSE(header.metadata.contains("long"));
  ASSERT_NE(header.metadata.find_as<std::vector<int64_t>>("short"), nullptr);
  EXPECT_EQ(header.metadata.find_as<std::vector<int64_t>>("short")->size(), 1024U);
  ASSERT_EQ(header.entries.size(), 2U);
  EXPECT_EQ(header.entries[0].elements, 1025);
  const GgufFile opened(save("long.gguf", whole));
  const auto* values = opened.metadata().find_as<std::vector<int64_t>>("long");
  ASSERT_NE(values, nullptr);
  EXPECT_EQ(values->size(), 1025U);
  EXPECT_EQ(values->back(), 1024);
  EXPECT_THAT(error_of(file("long")), HasSubstr("the key 'long' occurs twice"));
  auto cut = file("short");
  cut.bytes.resize(1000);
  EXPECT_THAT(error_of(cut), HasSubstr("truncated"));
}

TEST(Gguf, TheBigEndianVariantIsNamed) {
  EXPECT_THAT(error_of(Writer().head(0, 0, 3U << 24)), HasSubstr("big-endian"));
  SKIP_WITHOUT_PYTHON();
  const auto path = scratch("big.gguf");
  const auto peer = support::run_python("tests/unit/gguf_peer.py", {"big_endian", path.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  EXPECT_THAT(support::message_of<CheckpointError>([&] { GgufFile{path}; }),
              AllOf(HasSubstr("big-endian"), HasSubstr("Convert it to little-endian")));
}

/// The error of config_json() for a file of LLaMA with this and nothing else in its metadata.
std::string config_error_of(const std::string& key, const auto& put, const std::string& architecture = "llama") {
  Writer file;
  file.head(0, 2).text("general.architecture").number(kText).text(architecture).text(architecture + "." + key);
  put(file);
  return support::message_of<CheckpointError>([&] { GgufFile(save("keys.gguf", file.bytes)).config_json(); });
}

TEST(Gguf, KeysThatCouldChangeResultsAreKnownOrRefusedByName) {
  const auto real = [](float value) { return [=](Writer& file) { file.number(kF32Value).number(value); }; };
  const auto whole = [](uint32_t value) { return [=](Writer& file) { file.number(kU32).number(value); }; };
  EXPECT_THAT(config_error_of("attention.temperature_scale", real(0.5F)),
              AllOf(HasSubstr("'" + scratch("keys.gguf").string() + "'"),
                    HasSubstr("llama.attention.temperature_scale = 0.5, which is not known here"),
                    HasSubstr("Use the model's Hugging Face folder")));
  EXPECT_THAT(config_error_of("attention.clamp_kqv", real(8)),
              HasSubstr("llama.attention.clamp_kqv (limit of queries, keys and values) is 8, expected 0 or none"));
  EXPECT_THAT(config_error_of("rope.scaling.yarn_beta_fast", real(16), "qwen2"),
              HasSubstr("qwen2.rope.scaling.yarn_beta_fast"));
  EXPECT_THAT(config_error_of("attention.causal", [](Writer& file) { file.number(kBool).number<uint8_t>(0); }),
              HasSubstr("llama.attention.causal (whether a token sees those after it) is false"));
  EXPECT_THAT(config_error_of("expert_count", whole(4), "gpt2"), HasSubstr("gpt2.expert_count"));
  // These have no effect, so that the error names what is missing.
  for (const char* key : {"pooling_type", "rope.scaling.finetuned", "expert_count", "logit_scale"})
    EXPECT_THAT(config_error_of(key, whole(0)), HasSubstr("lacks the number 'llama.vocab_size'")) << key;
  const auto list = [](std::vector<uint32_t> values) {
    return [=](Writer& file) {
      file.number(kArray).number(kU32).number<uint64_t>(values.size());
      for (const auto value : values) file.number(value);
    };
  };
  Writer heads;
  heads.head(1, 2).text("general.architecture").number(kText).text("llama").text("llama.attention.head_count");
  list({4, 8})(heads);
  EXPECT_THAT(error_of(heads.tensor("blk.0.attn_q.weight", {4, 8}, kF32, 0).data(128)),
              HasSubstr("'llama.attention.head_count' is a list of 2 numbers, one for each layer, that are not all the "
                        "same (4, 8)"));
}

TEST(Gguf, NumbersThatDivideAreAboveZero) {
  const auto config_with = [](float epsilon, float base) {
    Writer file;
    file.head(0, 9).text("general.architecture").number(kText).text("llama");
    for (const char* key : {"vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
                            "attention.head_count"})
      file.text(std::string("llama.") + key).number(kU32).number<uint32_t>(8);
    file.text("llama.attention.layer_norm_rms_epsilon").number(kF32Value).number(epsilon);
    file.text("llama.rope.freq_base").number(kF32Value).number(base);
    return GgufFile(save("above_0.gguf", file.data(32).bytes)).config_json();
  };
  const auto error_with = [&](float epsilon, float base) {
    return support::message_of<CheckpointError>([&] { config_with(epsilon, base); });
  };
  EXPECT_THAT(config_with(0.5F, 10000), HasSubstr("\"rms_norm_eps\""));
  for (const float wrong : {0.F, -1e-5F, NAN, INFINITY}) {
    EXPECT_THAT(error_with(wrong, 10000), HasSubstr("'llama.attention.layer_norm_rms_epsilon' is")) << wrong;
    EXPECT_THAT(error_with(1e-5F, wrong), HasSubstr("'llama.rope.freq_base' is")) << wrong;
  }
}

/// A vocabulary of byte-level BPE, and embeddings with a row of 32 for each of so many tokens.
Writer vocabulary(const std::vector<std::string>& tokens, const std::vector<std::string>& merges, uint64_t rows) {
  Writer file;
  file.head(1, 12).text("general.architecture").number(kText).text("llama");
  for (const char* key :
       {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"})
    file.text(std::string("llama.") + key).number(kU32).number<uint32_t>(8);
  file.text("llama.attention.layer_norm_rms_epsilon").number(kF32Value).number(1e-5F);
  file.text("tokenizer.ggml.model").number(kText).text("gpt2").text("tokenizer.ggml.pre").number(kText).text("gpt-2");
  for (const auto& [key, list] : {std::pair("tokens", tokens), {"merges", merges}}) {
    file.text(std::string("tokenizer.ggml.") + key).number(kArray).number(kText).number<uint64_t>(list.size());
    for (const auto& one : list) file.text(one);
  }
  file.text("llama.rope.freq_base").number(kF32Value).number(1e4F);
  return file.tensor("token_embd.weight", {32, rows}, kF32, 0).data(32 * 4 * rows);
}

TEST(Gguf, TokensHaveRowsAndMergesTwoParts) {
  const auto of_file = [](const std::vector<std::string>& merges, uint64_t rows) {
    const GgufFile file(save("tokens.gguf", vocabulary({"a", "b", "ab"}, merges, rows).bytes));
    file.config_json();
    return accelerate::formats::tokenizer_files(file.metadata(), "tokens.gguf");
  };
  EXPECT_TRUE(of_file({"a b"}, 3).contains("tokenizer.json"));
  EXPECT_TRUE(of_file({"a b"}, 4).contains("tokenizer.json")) << "rows for tokens to come";
  EXPECT_THAT(support::message_of<CheckpointError>([&] { of_file({"a b"}, 2); }),
              AllOf(HasSubstr("has 3 tokens, and its embeddings 2 rows"), HasSubstr("of another model?")));
  for (const std::string bad : {"ab", "a b c", " ab", "ab ", ""})
    EXPECT_THAT(support::message_of<CheckpointError>([&] {
                  of_file({"a b", bad}, 3);
                }),
                HasSubstr("the merge '" + bad + "' is not of two tokens"));
}

TEST(Gguf, NoiseIsAnErrorOrAFileButNothingElse) {
  const auto whole = small().bytes;
  std::mt19937 draw(3);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    auto bytes = whole;
    for (int k = 0; k < 1 + i % 3; ++k) bytes[draw() % (bytes.size() - 136)] = static_cast<char>(draw());
    try {
      const GgufFile file(save("noise.gguf", bytes));
      for (const auto& name : file.names())
        if (const auto& encoding = file.info(name).encoding; encoding != "IQ4_NL") decoded(file, name);
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(Gguf, DecodesWhatThePythonPackageDecodes) {
  SKIP_WITHOUT_PYTHON();
  const auto path = scratch("encodings.gguf"), expected = scratch("encodings.safetensors");
  const auto peer = support::run_python("tests/unit/gguf_peer.py", {"encodings", path.string(), expected.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const GgufFile file(path);
  const auto values = accelerate::load_safetensors(expected);
  EXPECT_EQ(values.size(), 18U);
  for (const auto& [name, value] : values) {
    EXPECT_TRUE(same_bits(decoded(file, name), value)) << name;
    const auto row = torch::empty({value.size(-1)});
    file.read(name, row, 2);
    EXPECT_TRUE(same_bits(row, value.view({-1, value.size(-1)})[2])) << name;
  }
  EXPECT_THAT(support::message_of<CheckpointError>([&] { decoded(file, "IQ4_NL"); }),
              AllOf(HasSubstr("stored as IQ4_NL"), HasSubstr("llama-quantize")));

  const auto& metadata = file.metadata();
  const std::map<std::string, int64_t> integers = {{"u8", 200},        {"i8", -100},         {"u16", 60000},
                                                   {"i16", -30000},    {"u32", 4000000000},  {"i32", -2000000000},
                                                   {"u64", 1LL << 60}, {"i64", -(1LL << 60)}};
  for (const auto& [key, value] : integers) EXPECT_EQ(metadata.integer("kind." + key), value) << key;
  EXPECT_EQ(metadata.number("kind.f32"), 0.5);
  EXPECT_EQ(metadata.number("kind.f64"), 0.1);
  EXPECT_EQ(*metadata.find_as<bool>("kind.bool"), true);
  EXPECT_EQ(*metadata.find_as<std::string>("kind.text"), "gr\u00fc\u00df");
  EXPECT_THAT(*metadata.find_as<std::vector<std::string>>("kind.texts"), ElementsAre("a", "", "c\u0300"));
  EXPECT_THAT(*metadata.find_as<std::vector<int64_t>>("kind.numbers"), ElementsAre(1, -2, 3));
  EXPECT_THAT(*metadata.find_as<std::vector<double>>("kind.reals"), ElementsAre(0.25, -4.0));
}

/// Against the model that the file was made of, so names and the order of rows are checked by themselves.
void expect_logits(const std::string& kind) {
  const auto path = scratch(kind + ".gguf"), expected = scratch(kind + ".safetensors");
  const auto peer = support::run_python("tests/unit/gguf_peer.py", {"model", kind, path.string(), expected.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  accelerate::models::LoadReport report;
  const auto model = accelerate::models::AutoModelForCausalLM::from_pretrained(path, {}, &report);
  EXPECT_TRUE(report.missing_keys.empty() && report.unexpected_keys.empty()) << kind;
  const auto values = accelerate::load_safetensors(expected);
  const torch::NoGradGuard no_grad;
  // fp32 sums in another order; logits are of the order of 1.
  EXPECT_LT((model.forward(values.at("input_ids")) - values.at("logits")).abs().max().item<double>(), 1e-5) << kind;
}

TEST(GgufModels, LlamaIsWhatWasConverted) {
  SKIP_WITHOUT_PYTHON();
  expect_logits("llama");
}
TEST(GgufModels, Llama3sFrequenciesAreRecognised) {
  SKIP_WITHOUT_PYTHON();
  expect_logits("llama3");
  // Where sizes alone are wanted first, and the configuration is read within that.
  const accelerate::models::AutoLoadOptions disk{.device_map = "disk"};
  const auto whole = accelerate::models::AutoModelForCausalLM::from_pretrained(scratch("llama3.gguf"));
  const auto on_disk = accelerate::models::AutoModelForCausalLM::from_pretrained(scratch("llama3.gguf"), disk);
  const torch::NoGradGuard no_grad;
  const auto ids = torch::tensor({{1, 2, 3}});
  EXPECT_TRUE(torch::allclose(on_disk.forward(ids), whole.forward(ids)));
}
TEST(GgufModels, FrequenciesAreStretchedHoweverAFileSaysIt) {
  SKIP_WITHOUT_PYTHON();
  for (const char* kind : {"typed", "of_2023", "without_type", "typed_of_2023"}) {
    expect_logits(kind);
    accelerate::quantize_files(scratch(std::string(kind) + ".gguf"), scratch(kind), {.to = "nf4"});
    std::ifstream file(scratch(kind) / "config.json");
    EXPECT_EQ(nlohmann::json::parse(file)["rope_scaling"], nlohmann::json({{"rope_type", "linear"}, {"factor", 4.0}}))
        << kind;
  }
}
TEST(GgufModels, WhatChangesNothingIsReadOver) {
  SKIP_WITHOUT_PYTHON();
  for (const char* kind : {"none", "by_one", "remarks", "lists"}) expect_logits(kind);
}
TEST(GgufModels, Qwen2IsWhatWasConverted) {
  SKIP_WITHOUT_PYTHON();
  expect_logits("qwen2");
}
TEST(GgufModels, MixtralIsWhatWasConverted) {
  SKIP_WITHOUT_PYTHON();
  expect_logits("mixtral");
}
TEST(GgufModels, Gpt2IsWhatWasConverted) {
  SKIP_WITHOUT_PYTHON();
  expect_logits("gpt2");
}

}  // namespace
