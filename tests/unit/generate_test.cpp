/// Generation against transformers, and alone.

#include <fstream>
#include <limits>
#include <memory>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/generate.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "models/generation/logits.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using accelerate::ConfigError;
using nlohmann::json;
using support::scratch;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Says (a + 1) % V after a, whatever came before.
struct Counter {
  int64_t vocabulary = 10;
  int64_t calls = 0;
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask, const torch::Tensor& positions,
                        KeyValueCache* cache, int64_t logits_to_keep) {
    ++calls;
    const auto kv = torch::zeros({ids.size(0), 1, ids.size(1), 2});
    cache->update(0, kv, kv);
    return 5 * torch::one_hot((ids + 1) % vocabulary, vocabulary).to(at::kFloat).slice(1, ids.size(1) - logits_to_keep);
  }
};

std::vector<int64_t> row(const torch::Tensor& ids, int64_t i) {
  const auto flat = ids[i].contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(Generate, GreedyStopsAtEndTokensAndPads) {
  Counter model;
  const auto ids = torch::tensor({{1, 2}, {4, 5}}, at::kLong);
  auto result = generate(model, ids, {.max_new_tokens = 5, .eos_token_id = {4, 9}, .pad_token_id = 0});
  EXPECT_THAT(row(result, 0), ElementsAre(1, 2, 3, 4, 0, 0));
  EXPECT_THAT(row(result, 1), ElementsAre(4, 5, 6, 7, 8, 9));
  EXPECT_EQ(model.calls, 4) << "once for the prompts, then once a token";
  result = generate(model, ids, {.max_length = 4});
  EXPECT_THAT(row(result, 1), ElementsAre(4, 5, 6, 7));
  result = generate(model, ids.slice(0, 0, 1), {.max_new_tokens = 4, .min_new_tokens = 2, .eos_token_id = {3}});
  EXPECT_EQ(result.size(1), 6) << "the end token was not allowed when it was the likeliest";
  for (const int64_t at_least : {2, 3})
    EXPECT_EQ(
        generate(model, ids.slice(0, 0, 1), {.max_new_tokens = 4, .min_new_tokens = at_least, .eos_token_id = {5}})
            .size(1),
        at_least == 2 ? 5 : 6)
        << "5 is the third";
}

TEST(Generate, ShowsHowFarTheReadingIs) {
  const CausalForward three_layers = [](const torch::Tensor& ids, const torch::Tensor&, const torch::Tensor&,
                                        KeyValueCache* cache, int64_t) {
    const auto kv = torch::zeros({ids.size(0), 1, ids.size(1), 2});
    for (const int64_t layer : {0, 1, 2}) cache->update(layer, kv, kv);
    return torch::tensor({0.F, 1.F}).expand({ids.size(0), 1, 2});
  };
  for (const int64_t beams : {1, 2}) {
    std::vector<int64_t> layers;
    generate(three_layers, torch::zeros({1, 5}, at::kLong), {.max_new_tokens = 4, .num_beams = beams},
             {.on_layer = [&](int64_t layer) { layers.push_back(layer); }});
    EXPECT_THAT(layers, ElementsAre(0, 1, 2)) << beams << " beams: of the prompt, not of the tokens after it";
  }
}

TEST(Generate, PaddingIsNoRepetition) {
  const CausalForward three_before_four = [](const torch::Tensor& ids, const torch::Tensor&, const torch::Tensor&,
                                             KeyValueCache* cache, int64_t) {
    const auto kv = torch::zeros({ids.size(0), 1, ids.size(1), 2});
    cache->update(0, kv, kv);
    return torch::tensor({0.F, 0.F, 0.F, 5.F, 4.F}).expand({ids.size(0), 1, 5});
  };
  const auto ids = torch::tensor({{3, 2}}, at::kLong);
  const GenerationConfig config{.max_new_tokens = 1, .repetition_penalty = 1.5};
  EXPECT_THAT(row(generate(three_before_four, ids, config), 0), ElementsAre(3, 2, 4));
  EXPECT_THAT(row(generate(three_before_four, ids, config, {.attention_mask = torch::tensor({{0, 1}}, at::kLong)}), 0),
              ElementsAre(3, 2, 3));
}

/// Gives the third token's logits as they are, and sensible ones before.
CausalForward third_logits(const torch::Tensor& third) {
  return [third, calls = std::make_shared<int>(0)](const torch::Tensor& ids, const torch::Tensor&, const torch::Tensor&,
                                                   KeyValueCache* cache, int64_t) {
    const auto kv = torch::zeros({ids.size(0), 1, ids.size(1), 2});
    cache->update(0, kv, kv);
    return (++*calls == 3 ? third : torch::tensor({0.F, 1.F, 2.F, 3.F})).expand({ids.size(0), 1, 4});
  };
}

TEST(Generate, LogitsThatAreNoNumbersAreAnError) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  const auto ids = torch::zeros({1, 2}, at::kLong);
  for (const auto& third : {torch::full({4}, kNan), torch::tensor({0.F, kNan, 1.F, 0.F}),
                            torch::tensor({0.F, kInfinity, 1.F, 0.F}), torch::full({4}, -kInfinity)})
    for (const int64_t beams : {1, 2})
      for (const bool sample : {false, true})
        EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] {
                      generate(third_logits(third), ids,
                               {.max_new_tokens = 5, .do_sample = sample, .num_beams = beams});
                    }),
                    AllOf(HasSubstr("generate: the logits of new token 3 are no finite numbers"),
                          HasSubstr("weights may be damaged"), HasSubstr("compute in float32 or bfloat16")))
            << third << beams << " beams, drawn: " << sample;
  for (const bool sample : {false, true})
    EXPECT_EQ(generate(third_logits(torch::tensor({-kInfinity, 1.F, 2.F, -kInfinity})), ids,
                       {.max_new_tokens = 5, .do_sample = sample})
                  .size(1),
              7)
        << "words may be forbidden";
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                generate(third_logits(torch::zeros({4})), ids,
                         {.max_new_tokens = 5, .do_sample = true, .temperature = 1e-45});
              }),
              HasSubstr("the model's logits of new token 1 are finite numbers, but not its scores with temperature "))
      << "not the model's fault";
}

TEST(Generate, WhatComesAfterTheEndOfARowMayBeNoNumber) {
  const CausalForward none_after_zero = [](const torch::Tensor& ids, const torch::Tensor&, const torch::Tensor&,
                                           KeyValueCache* cache, int64_t) {
    const auto kv = torch::zeros({ids.size(0), 1, ids.size(1), 2});
    cache->update(0, kv, kv);
    const auto last = ids.slice(1, -1);
    return torch::one_hot((last + 1) % 10, 10)
        .to(at::kFloat)
        .masked_fill((last == 0).unsqueeze(2), std::numeric_limits<float>::quiet_NaN());
  };
  const auto result = generate(none_after_zero, torch::tensor({{1, 2}, {4, 5}}, at::kLong),
                               {.max_new_tokens = 5, .eos_token_id = {4, 9}, .pad_token_id = 0});
  EXPECT_THAT(row(result, 0), ElementsAre(1, 2, 3, 4, 0, 0));
  EXPECT_THAT(row(result, 1), ElementsAre(4, 5, 6, 7, 8, 9));
}

TEST(Generate, CallbackSeesTokensAndCanStop) {
  Counter model;
  std::vector<int64_t> seen;
  const auto result = generate(model, torch::tensor({{1}}, at::kLong), {.max_new_tokens = 8},
                               {.on_tokens = [&](const torch::Tensor& tokens) {
                                 seen.push_back(tokens.item<int64_t>());
                                 return seen.size() < 3;
                               }});
  EXPECT_THAT(seen, ElementsAre(2, 3, 4));
  EXPECT_THAT(row(result, 0), ElementsAre(1, 2, 3, 4));
}

TEST(Generate, ASeedGivesTheSameTokens) {
  Counter model;
  const auto ids = torch::tensor({{1}, {2}}, at::kLong);
  const auto draw = [&](uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    return generate(model, ids, {.max_new_tokens = 20, .do_sample = true, .temperature = 5, .top_k = 0},
                    {.generator = generator});
  };
  EXPECT_TRUE(draw(1).equal(draw(1)));
  EXPECT_FALSE(draw(1).equal(draw(2)));
  EXPECT_TRUE(generate(model, ids, {.max_new_tokens = 6, .do_sample = true, .top_k = 1})
                  .equal(generate(model, ids, {.max_new_tokens = 6})));
}

TEST(Generate, DrawsFromTheDistribution) {
  Counter model;  // logits 5 for one token and 0 for nine
  auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
  const auto ids = torch::full({20000, 1}, 3, at::kLong);
  const auto result = generate(model, ids, {.max_new_tokens = 1, .do_sample = true, .temperature = 2.5, .top_k = 0},
                               {.generator = generator});
  const double expected = std::exp(2.0) / (std::exp(2.0) + 9),
               found = (result.select(1, 1) == 4).to(at::kFloat).mean().item<double>();
  EXPECT_NEAR(found, expected, 4 * std::sqrt(expected * (1 - expected) / 20000)) << "four standard deviations";
}

TEST(Generate, WrongSettingsAreNamed) {
  Counter model;
  const auto ids = torch::tensor({{1, 2}}, at::kLong);
  const auto error = [&](const GenerationConfig& config, const GenerateOptions& options = {}) {
    return support::message_of<accelerate::Error>([&] { generate(model, ids, config, options); });
  };
  EXPECT_THAT(error({}), HasSubstr("neither max_new_tokens nor max_length"));
  EXPECT_THAT(error({.max_length = 2}), HasSubstr("leaves no room"));
  EXPECT_THAT(error({.max_new_tokens = 1, .temperature = 0}), HasSubstr("temperature is 0"));
  EXPECT_THAT(error({.max_new_tokens = 1, .top_p = 1.5}), HasSubstr("top_p is 1.5"));
  EXPECT_THAT(error({.max_new_tokens = 1}, {.attention_mask = torch::ones({1, 3})}),
              HasSubstr("attention_mask has shape [1, 3]"));
  EXPECT_THAT(error({.max_new_tokens = 1}, {.attention_mask = torch::tensor({{1, 0}})}),
              HasSubstr("padding on the left only"));
  EXPECT_THAT(error({.max_new_tokens = 1, .num_beams = 2}, {.on_tokens = [](const torch::Tensor&) { return true; }}),
              HasSubstr("on_tokens"));
  EXPECT_THROW(generate(model, torch::zeros({1, 0}, at::kLong), {.max_new_tokens = 1}), accelerate::ShapeError);
}

// Lengths that do not fit are refused before the model runs; the last token is never read, so it needs no position.
TEST(Generate, TheEndOfTheContextIsAnError) {
  Counter model;
  const auto generated = [&](int64_t prompt, int64_t new_tokens) {
    return generate(model, torch::ones({1, prompt}, at::kLong), {.max_new_tokens = new_tokens}, {.max_positions = 8})
        .size(1);
  };
  const auto error = [&](int64_t prompt, int64_t new_tokens) {
    model.calls = 0;
    const auto text = support::message_of<accelerate::Error>([&] { generated(prompt, new_tokens); });
    EXPECT_EQ(model.calls, 0);
    return text;
  };
  EXPECT_EQ(generated(8, 1), 9);
  EXPECT_EQ(generated(3, 6), 9);
  EXPECT_THAT(error(9, 1), HasSubstr("the prompts have 9 tokens, and the model has positions for 8"));
  EXPECT_THAT(error(3, 7), HasSubstr("the prompts have 3 tokens and up to 7 new ones are asked for, but the model has "
                                     "positions for 8: there is room for 6"));
  // Models say it by themselves; rotary positions of type dynamic have no end.
  LlamaConfig config{.vocab_size = 20,
                     .hidden_size = 16,
                     .intermediate_size = 16,
                     .num_hidden_layers = 1,
                     .num_attention_heads = 2,
                     .max_position_embeddings = 16};
  LlamaForCausalLM llama(config);
  const auto long_prompt = torch::ones({1, 17}, at::kLong);
  EXPECT_THROW(generate(llama, long_prompt, {.max_new_tokens = 1}), accelerate::ShapeError);
  EXPECT_THROW(generate(llama, long_prompt.slice(1, 0, 16), {.max_new_tokens = 2}), ConfigError);
  config.rope_scaling = {.type = "dynamic", .factor = 2};
  LlamaForCausalLM endless(config);
  EXPECT_EQ(generate(endless, long_prompt, {.max_new_tokens = 1}).size(1), 18);
  GPT2LMHeadModel gpt2(GPT2Config{.vocab_size = 20, .n_positions = 16, .n_embd = 16, .n_layer = 1, .n_head = 2});
  EXPECT_THROW(generate(gpt2, long_prompt.slice(1, 0, 16), {.max_new_tokens = 2}), ConfigError);
  const auto folder = scratch("context");
  llama->save_pretrained(folder);
  const auto loaded = AutoModelForCausalLM::from_pretrained(folder);
  EXPECT_EQ(loaded.max_positions(), 16);
  EXPECT_THROW(generate(loaded, long_prompt, {.max_new_tokens = 1}), accelerate::ShapeError);
}

/// A vocabulary of bytes '0' to '9' with the ids 0 to 9, and "67" as 10.
Tokenizer digits() {
  const auto path = scratch("digits");
  fs::create_directories(path);
  json vocab;
  for (int i = 0; i < 10; ++i) vocab[std::to_string(i)] = i;
  vocab["67"] = 10;
  const json level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  std::ofstream(path / "tokenizer.json") << json{
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"6 7"}}}},
      {"added_tokens", json::array()},
      {"pre_tokenizer", level},
      {"decoder", {{"type", "ByteLevel"}}}}.dump();
  return Tokenizer::from_pretrained(path);
}

TEST(Generate, StopStringsEndRowsWithTheirToken) {
  Counter model;
  const auto ids = torch::tensor({{1, 2}, {4, 5}}, at::kLong);
  const auto stopped = [&](std::vector<std::string> stops, int64_t beams = 1) {
    return generate(model, ids,
                    {.max_new_tokens = 5, .num_beams = beams, .pad_token_id = 9, .stop_strings = std::move(stops)},
                    {.tokenizer = digits()});
  };
  for (const int64_t beams : {1, 2}) {
    EXPECT_THAT(row(stopped({"34"}, beams), 0), ElementsAre(1, 2, 3, 4, 9, 9, 9));
    EXPECT_THAT(row(stopped({"34"}, beams), 1), ElementsAre(4, 5, 6, 7, 8, 9, 0)) << "the other row goes on";
    EXPECT_THAT(row(stopped({"8", "5"}, beams), 1), ElementsAre(4, 5, 6, 7, 8)) << "5 is in the prompt";
    EXPECT_THAT(row(stopped({"56", "23"}, beams), 1), ElementsAre(4, 5, 6)) << "begins in the prompt";
  }
  EXPECT_EQ(
      generate(model, ids, {.max_new_tokens = 3, .stop_strings = {"no such text"}}, {.tokenizer = digits()}).size(1),
      5);
  const auto error = [&](const GenerationConfig& config, const GenerateOptions& options) {
    return support::message_of<ConfigError>([&] { generate(model, ids, config, options); });
  };
  EXPECT_THAT(error({.max_new_tokens = 3, .stop_strings = {"a", "b"}}, {}),
              HasSubstr("there is no tokenizer to find them with"));
  EXPECT_THAT(error({.max_new_tokens = 3, .stop_strings = {"a", ""}}, {.tokenizer = digits()}),
              HasSubstr("stop_strings is an empty one"));
}

TEST(GenerationConfigFile, ReadsWhatItKnowsAndRefusesTheRest) {
  const auto folder = scratch("generation");
  fs::create_directories(folder);
  const auto read = [&](const json& fields) {
    std::ofstream(folder / "generation_config.json") << fields.dump();
    return GenerationConfig::from_pretrained(folder);
  };
  const auto config = read({{"do_sample", true},
                            {"temperature", 0.6},
                            {"top_p", 0.9},
                            {"eos_token_id", {128001, 128008}},
                            {"bos_token_id", 1},
                            {"transformers_version", "5"},
                            {"num_return_sequences", 1},
                            {"early_stopping", "never"}});
  EXPECT_TRUE(config.do_sample);
  EXPECT_EQ(config.temperature, 0.6);
  EXPECT_THAT(config.eos_token_id, ElementsAre(128001, 128008));
  EXPECT_EQ(config.early_stopping, EarlyStopping::never);
  EXPECT_THAT(read({{"eos_token_id", 5}}).eos_token_id, ElementsAre(5));
  EXPECT_THAT(read({{"stop_strings", {"\n\n", "User:"}}}).stop_strings, ElementsAre("\n\n", "User:"));
  EXPECT_THAT(read({{"stop_strings", "END"}}).stop_strings, ElementsAre("END"));
  const auto error = [&](const json& fields) {
    return support::message_of<accelerate::CheckpointError>([&] { read(fields); });
  };
  EXPECT_THAT(error({{"no_repeat_ngram_size", 3}}), HasSubstr("no_repeat_ngram_size is 3, expected nothing"));
  EXPECT_THAT(error({{"top_p", 2.0}}), HasSubstr("top_p is 2"));
  EXPECT_THAT(error({{"stop_strings", {1, 2}}}), HasSubstr("a text or a list of texts"));
  fs::remove(folder / "generation_config.json");
  std::ofstream(folder / "config.json") << R"({"eos_token_id": 7})";
  EXPECT_THAT(GenerationConfig::from_pretrained(folder).eos_token_id, ElementsAre(7));
}

// --- against the reference
// -----------------------------------------------------------------------------------------------------------

GenerationConfig config_of(const json& settings) {
  GenerationConfig config{.max_new_tokens = 12};
  config.num_beams = settings.value("num_beams", int64_t{1});
  config.min_new_tokens = settings.value("min_new_tokens", int64_t{0});
  config.repetition_penalty = settings.value("repetition_penalty", 1.0);
  config.length_penalty = settings.value("length_penalty", 1.0);
  config.eos_token_id = settings.value("eos_token_id", std::vector<int64_t>());
  if (settings.contains("pad_token_id")) config.pad_token_id = settings["pad_token_id"].get<int64_t>();
  if (const auto early = settings.value("early_stopping", json(false)); early == "never") {
    config.early_stopping = EarlyStopping::never;
  } else if (early == true) {
    config.early_stopping = EarlyStopping::yes;
  }
  return config;
}

torch::Tensor tensor_of(const json& rows) {
  std::vector<int64_t> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return torch::tensor(flat, at::kLong).view({static_cast<int64_t>(rows.size()), -1});
}

TEST(GenerateParity, GreedyAndBeamsOfLlamaGpt2AndT5) {
  SKIP_WITHOUT_PYTHON();
  const auto folder = scratch("small");
  fs::create_directories(folder);
  const auto peer = support::run_python("tests/unit/generate_peer.py", {"small", folder.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  auto llama = LlamaForCausalLM::from_pretrained(folder / "llama");
  auto gpt2 = GPT2LMHeadModel::from_pretrained(folder / "gpt2");
  const auto t5 = AutoModelForSeq2SeqLM::from_pretrained(folder / "t5");
  llama->eval(), gpt2->eval();
  const auto cases = json::parse(std::ifstream(folder / "cases.json"));
  EXPECT_EQ(cases.size(), 2 * 2 * 21U + 2U + 2 * 4U);
  std::set<json> hopeful;
  for (const auto& entry : cases)
    if (entry.contains("hopeful")) hopeful.insert(entry["result"]);
  EXPECT_EQ(hopeful.size(), 2U) << "early_stopping \"never\" should differ from false for these prompts";
  for (const auto& entry : cases) {
    GenerateOptions options;
    if (!entry["attention_mask"].is_null()) options.attention_mask = tensor_of(entry["attention_mask"]);
    const auto ids = tensor_of(entry["input_ids"]), expected = tensor_of(entry["result"]);
    const auto config = config_of(entry["settings"]);
    const auto result = entry["model"] == "llama"  ? generate(llama, ids, config, options)
                        : entry["model"] == "gpt2" ? generate(gpt2, ids, config, options)
                                                   : generate(t5.encode(ids, options.attention_mask),
                                                              torch::zeros({ids.size(0), 1}, at::kLong), config);
    EXPECT_TRUE(result.sizes() == expected.sizes() && result.equal(expected))
        << entry["model"] << entry["settings"] << (options.attention_mask.defined() ? " padded" : "") << "\n"
        << expected << "\n"
        << result;
  }
}

/// Where a text ends, by greedy search and by beams, in batches with padding.
TEST(GenerateParity, StopStrings) {
  SKIP_WITHOUT_PYTHON();
  const auto folder = scratch("with_stops");
  fs::create_directories(folder);
  const auto peer = support::run_python("tests/unit/generate_peer.py", {"stops", folder.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  auto llama = LlamaForCausalLM::from_pretrained(folder / "stops");
  llama->eval();
  const auto tokenizer = Tokenizer::from_pretrained(folder / "stops");
  const auto all = json::parse(std::ifstream(folder / "stops.json"));
  const auto ids = tensor_of(all["input_ids"]);
  int64_t shorter = 0;
  for (const auto& entry : all["cases"]) {
    auto config = config_of(entry["settings"]);
    config.max_new_tokens = 16;
    config.stop_strings = entry["settings"]["stop_strings"].get<std::vector<std::string>>();
    const auto expected = tensor_of(entry["result"]);
    const auto result =
        generate(llama, ids, config, {.attention_mask = tensor_of(entry["attention_mask"]), .tokenizer = tokenizer});
    EXPECT_TRUE(result.sizes() == expected.sizes() && result.equal(expected)) << entry["settings"] << "\n"
                                                                              << expected << "\n"
                                                                              << result;
    shorter += (expected.slice(1, 6) == 1).any().item<bool>() || expected.size(1) < 22;
  }
  EXPECT_GT(shorter, static_cast<int64_t>(all["cases"].size()) / 2) << "most of them stop something";
}

TEST(GenerateParity, ScoresAreProcessedAlike) {
  SKIP_WITHOUT_PYTHON();
  const auto path = scratch("warpers.safetensors");
  const auto peer = support::run_python("tests/unit/generate_peer.py", {"warpers", path.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto expected = accelerate::load_safetensors(path);
  const auto scores = expected.at("scores"), ids = expected.at("ids");
  // The same operators in the same order; rounding of a softmax may differ between builds of LibTorch.
  const auto same = [&](const torch::Tensor& found, const std::string& name) {
    return torch::allclose(found, expected.at(name), 1e-6, 0);
  };
  EXPECT_TRUE(same(penalize_repetition(scores, ids, 1.4), "repetition"));
  for (const int64_t k : {1, 5, 100}) EXPECT_TRUE(same(keep_top_k(scores, k), "top_k." + std::to_string(k))) << k;
  for (const auto& [p, name] : {std::pair{0.01, "top_p.0.01"}, {0.5, "top_p.0.5"}, {0.95, "top_p.0.95"}})
    EXPECT_TRUE(same(keep_top_p(scores, p), name)) << p;
  // Each alone: together they hide each other's absence.
  EXPECT_TRUE(same(process_scores(scores.clone(), ids, 0, {.repetition_penalty = 1.4}), "repetition"));
  EXPECT_TRUE(same(process_scores(scores.clone(), ids, 0, {.do_sample = true, .top_k = 5}), "top_k.5"));
  EXPECT_TRUE(same(process_scores(scores.clone(), ids, 0, {.do_sample = true, .top_k = 0, .top_p = 0.5}), "top_p.0.5"));
  GenerationConfig config{.do_sample = true, .temperature = 0.7, .top_k = 20, .top_p = 0.8, .repetition_penalty = 1.2};
  EXPECT_TRUE(same(process_scores(scores.clone(), ids, 0, config), "all"));
}

/// The model's real weights, decoded from 4 bits to fp32 on both sides.
TEST(GenerateParity, SmolLm2ContinuesTwentyPromptsAsTransformersDoes) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto path = *support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  const auto tokenizer = Tokenizer::from_pretrained(path);
  std::vector<std::string> texts = {"The capital of France is",
                                    "Once upon a time",
                                    "def fibonacci(n):",
                                    "Water boils at",
                                    "The first ten prime numbers are",
                                    "In 1969,",
                                    "Dear Sir or Madam,",
                                    "A recipe for pancakes:\n1.",
                                    "Q: What is gravity?\nA:",
                                    "import numpy as np\n",
                                    "Die Hauptstadt von Deutschland ist",
                                    "\u4f60\u597d",
                                    "E = mc",
                                    "To be or not to be,"};
  for (const char* question : {"What is the capital of Italy?", "Write a haiku about rain.",
                               "Translate 'cat' to French.", "2 + 2 = ?", "Who wrote Hamlet?", "List three colours."})
    texts.push_back(tokenizer.apply_chat_template({{"user", question}}));
  ASSERT_EQ(texts.size(), 20U);
  json prompts = json::array();
  for (const auto& text : texts) prompts.push_back(tokenizer.encode(text));
  std::ofstream(scratch("prompts.json")) << prompts.dump();
  const auto out = scratch("smollm2.safetensors");
  const auto peer = support::run_python("tests/unit/generate_peer.py",
                                        {"gguf", path.string(), scratch("prompts.json").string(), out.string(), "8"});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto expected = accelerate::load_safetensors(out);

  LoadReport report;
  auto model = LlamaForCausalLM::from_pretrained(path, {}, &report);
  EXPECT_TRUE(report.missing_keys.empty() && report.unexpected_keys.empty());
  model->eval();
  auto config = GenerationConfig::from_pretrained(path);
  EXPECT_THAT(config.eos_token_id, ElementsAre(2));
  config.max_new_tokens = 8;
  const torch::NoGradGuard no_grad;
  // Logits are of the order of 10, so 1e-4 is a relative 1e-5: sums over 576 to 1536 products in 30 layers in another
  // order.
  EXPECT_LT((model(torch::tensor(prompts[0].get<std::vector<int64_t>>()).unsqueeze(0)) - expected.at("logits"))
                .abs()
                .max()
                .item<double>(),
            1e-4);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto result = generate(model, torch::tensor(prompts[i].get<std::vector<int64_t>>()).unsqueeze(0), config);
    EXPECT_EQ(row(result, 0), row(expected.at("ids." + std::to_string(i)), 0)) << texts[i] << "\n"
                                                                               << tokenizer.decode(row(result, 0));
  }
}

}  // namespace
