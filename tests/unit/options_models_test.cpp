// Fields of the models' configurations and of the tokenizer's options: what each changes, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/models/wordpiece.hpp"
#include "accelerate/utils/error.hpp"
#include "ranks.hpp"

namespace options_models {
namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

GPT2Config small_gpt2() {
  GPT2Config config;
  config.vocab_size = 20, config.n_positions = 10, config.n_embd = 16, config.n_layer = 2, config.n_head = 4;
  config.initializer_range = 0.3;
  config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0;
  return config;
}
LlamaConfig small_llama() {
  LlamaConfig config;
  config.vocab_size = 20, config.hidden_size = 16, config.intermediate_size = 24, config.num_hidden_layers = 2;
  config.num_attention_heads = 4, config.initializer_range = 0.3;
  return config;
}
BertConfig small_bert() {
  BertConfig config;
  config.vocab_size = 20, config.hidden_size = 16, config.num_hidden_layers = 2, config.num_attention_heads = 4;
  config.intermediate_size = 24, config.max_position_embeddings = 10, config.initializer_range = 0.3;
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  return config;
}

/// The output for the same random numbers each time.
template <class Model, class Config> at::Tensor output_of(const Config& config, bool training) {
  torch::manual_seed(3);
  Model model(config);
  model->train(training);
  torch::manual_seed(4);
  return model->forward(torch::arange(6).unsqueeze(0));
}

template <class Config> struct Field {
  const char* name;
  std::function<void(Config&)> change;
  bool in_training_only = false;
};

template <class Model, class Config>
void each_field_acts(const Config& usual, const std::vector<Field<Config>>& fields) {
  const auto evaluated = output_of<Model>(usual, false), trained = output_of<Model>(usual, true);
  for (const auto& field : fields) {
    Config config = usual;
    field.change(config);
    EXPECT_EQ(torch::equal(output_of<Model>(config, false), evaluated), field.in_training_only) << field.name;
    EXPECT_FALSE(torch::equal(output_of<Model>(config, true), trained)) << field.name << ", in training";
  }
}

template <class Model, class Config> std::vector<std::string> parameters_of(const Config& config) {
  return Model(config)->named_parameters().keys();
}

/// Fields that no model reads are written again.
template <class Model, class Config> void expect_other_fields_are_kept(Config config) {
  config.other_fields = R"({"a_field_of_somebody": 7})";
  const fs::path folder = support::scratch_dir();
  Model(config)->save_pretrained(folder);
  std::stringstream text;
  text << std::ifstream(folder / "config.json").rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("a_field_of_somebody"));
}

TEST(OptionsOfModels, Gpt2) {
  each_field_acts<GPT2LMHeadModel, GPT2Config>(
      small_gpt2(),
      {{"resid_pdrop", [](auto& config) { config.resid_pdrop = 0.5; }, true},
       {"embd_pdrop", [](auto& config) { config.embd_pdrop = 0.5; }, true},
       {"attn_pdrop", [](auto& config) { config.attn_pdrop = 0.5; }, true},
       {"layer_norm_epsilon", [](auto& config) { config.layer_norm_epsilon = 0.5; }},
       {"activation_function", [](auto& config) { config.activation_function = "relu"; }},
       {"scale_attn_weights", [](auto& config) { config.scale_attn_weights = false; }},
       {"scale_attn_by_inverse_layer_idx", [](auto& config) { config.scale_attn_by_inverse_layer_idx = true; }},
       {"n_inner", [](auto& config) { config.n_inner = 5; }}});
  auto config = small_gpt2();
  config.n_inner = 5;
  EXPECT_EQ(GPT2LMHeadModel(config)->named_parameters()["transformer.h.0.mlp.c_fc.weight"].size(1), 5);
  expect_other_fields_are_kept<GPT2LMHeadModel>(small_gpt2());
}

TEST(OptionsOfModels, Llama) {
  each_field_acts<LlamaForCausalLM, LlamaConfig>(
      small_llama(), {{"rms_norm_eps", [](auto& config) { config.rms_norm_eps = 0.5; }},
                      {"attention_dropout", [](auto& config) { config.attention_dropout = 0.5; }, true},
                      {"num_local_experts", [](auto& config) { config.num_local_experts = 3; }}});
  auto experts = small_llama();
  experts.num_local_experts = 3, experts.num_experts_per_tok = 1;
  each_field_acts<LlamaForCausalLM, LlamaConfig>(
      experts, {{"num_experts_per_tok", [](auto& config) { config.num_experts_per_tok = 2; }}});

  const std::string layer = "model.layers.0.", attention = layer + "self_attn.";
  const auto with = [](auto change) {
    auto config = small_llama();
    change(config);
    return parameters_of<LlamaForCausalLM>(config);
  };
  EXPECT_THAT(with([](auto& config) { config.attention_bias = true; }), Contains(attention + "o_proj.bias"));
  EXPECT_THAT(with([](auto& config) { config.qkv_bias = true; }),
              AllOf(Contains(attention + "q_proj.bias"), Not(Contains(attention + "o_proj.bias"))));
  EXPECT_THAT(with([](auto& config) { config.mlp_bias = true; }), Contains(layer + "mlp.up_proj.bias"));
  EXPECT_THAT(with([](auto&) {}),
              AllOf(Not(Contains(attention + "q_proj.bias")), Not(Contains(layer + "mlp.up_proj.bias"))));
  auto mistral = small_llama();
  mistral.model_type = "mistral";
  std::vector<std::string> classes;
  for (const auto& module : accelerate::ModelRef(LlamaForCausalLM(mistral).ptr()).submodules())
    classes.push_back(module.class_name);
  EXPECT_THAT(classes, Contains("MistralDecoderLayer"));
  expect_other_fields_are_kept<LlamaForCausalLM>(small_llama());
}

TEST(OptionsOfModels, Bert) {
  each_field_acts<BertForSequenceClassification, BertConfig>(
      small_bert(),
      {{"attention_probs_dropout_prob", [](auto& config) { config.attention_probs_dropout_prob = 0.5; }, true},
       {"hidden_dropout_prob", [](auto& config) { config.hidden_dropout_prob = 0.5; }, true},
       {"classifier_dropout", [](auto& config) { config.classifier_dropout = 0.5; }, true},
       {"layer_norm_eps", [](auto& config) { config.layer_norm_eps = 0.5; }}});
  auto config = small_bert();
  config.type_vocab_size = 5;
  const auto parameters = BertModel(config)->named_parameters();
  EXPECT_EQ(parameters["embeddings.token_type_embeddings.weight"].size(0), 5);
  expect_other_fields_are_kept<BertForSequenceClassification>(small_bert());
}

TEST(OptionsOfModels, WordPiece) {
  const std::vector<std::string> vocabulary = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<p>",
                                               "<u>",   "<c>",   "<s>",   "<m>",   "the",    "\u4e2d"};
  const auto with = [&](const WordPieceOptions& options) { return WordPieceTokenizer(vocabulary, options); };
  const std::string mixed = "the\u4e2dthe";
  EXPECT_THAT(with({}).tokenize(mixed), ElementsAre("the", "\u4e2d", "the"));
  EXPECT_THAT(with({.tokenize_chinese_chars = false}).tokenize(mixed), ElementsAre("[UNK]"));
  EXPECT_THAT(with({.max_input_chars_per_word = 2}).tokenize("the"), ElementsAre("[UNK]"));
  EXPECT_THAT(with({.max_input_chars_per_word = 3}).tokenize("the"), ElementsAre("the"));
  EXPECT_THAT(with({.unk_token = "<u>"}).tokenize("what"), ElementsAre("<u>"));
  EXPECT_THAT(with({.cls_token = "<c>", .sep_token = "<s>"}).encode("the").input_ids, ElementsAre(7, 10, 8));
  EXPECT_EQ(with({.pad_token = "<p>"}).pad_token_id(), 5);
  EXPECT_EQ(with({.mask_token = "<m>"}).decode({9, 10}), "the") << "a special one";
  EXPECT_EQ(with({}).decode({9, 10}), "<m> the");
  EXPECT_THAT(with({.additional_special_tokens = {"<m>"}}).tokenize("the<m>"), ElementsAre("the", "<m>"));
  EXPECT_EQ(with({.additional_special_tokens = {"<m>"}}).decode({9, 10}), "the") << "a special one";
  const WordPieceTokenizer cleaning({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "'", "s", "."},
                                    {.clean_up_tokenization_spaces = true});
  EXPECT_EQ(cleaning.decode({5, 6, 7, 8}), "it's.");
}

}  // namespace
}  // namespace options_models
