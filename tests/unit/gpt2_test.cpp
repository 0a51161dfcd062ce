/// GPT-2 against transformers, and alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using support::largest_difference;
using support::scratch;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

GPT2Config tiny() {
  GPT2Config config;
  config.vocab_size = 20;
  config.n_positions = 10;
  config.n_embd = 16;
  config.n_layer = 2;
  config.n_head = 4;
  config.initializer_range = 0.3;
  return config;
}

TEST(Gpt2, ParameterNamesAndFreshWeights) {
  torch::manual_seed(0);
  auto config = tiny();
  config.n_embd = 64;
  const auto parameters = GPT2LMHeadModel(config)->named_parameters();
  EXPECT_EQ(parameters.size(), 2 * 12 + 4U);
  for (const char* name : {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.1.attn.c_attn.bias",
                           "transformer.h.0.ln_2.bias", "transformer.h.0.mlp.c_fc.weight", "transformer.ln_f.weight"})
    EXPECT_THAT(parameters.keys(), Contains(name));
  EXPECT_EQ(parameters["transformer.h.0.attn.c_attn.weight"].sizes(), (std::vector<int64_t>{64, 192}));
  EXPECT_NEAR(parameters["transformer.h.0.mlp.c_fc.weight"].std().item<double>(), 0.3, 0.01);
  EXPECT_NEAR(parameters["transformer.h.0.mlp.c_proj.weight"].std().item<double>(), 0.3 / 2, 0.005)
      << "two residual branches in each of two layers";
  EXPECT_EQ(parameters["transformer.h.0.attn.c_attn.bias"].abs().sum().item<double>(), 0);
}

TEST(Gpt2, TokensSeeOnlyWhatIsBeforeThem) {
  GPT2LMHeadModel model(tiny());
  model->eval();
  auto input = torch::randint(0, 20, {1, 6});
  const auto before = model(input);
  input[0][4] = (input[0][4] + 1) % 20;
  const auto after = model(input);
  EXPECT_EQ(largest_difference(before.slice(1, 0, 4), after.slice(1, 0, 4)), 0);
  EXPECT_GT(largest_difference(before.slice(1, 4), after.slice(1, 4)), 1e-3);
  model->train();
  EXPECT_GT(largest_difference(model(input), model(input)), 0) << "dropout";
}

/// Tolerance: other shapes sum in another order; a few units in the last place of logits of a size of about 5.
TEST(Gpt2, ACacheChangesNothing) {
  torch::manual_seed(0);
  GPT2LMHeadModel model(tiny());
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(0, 20, {2, 9});
  const auto whole = model(ids);
  KeyValueCache cache;
  const auto forward = [&](int64_t from, int64_t to, int64_t keep = 0) {
    return model(ids.slice(1, from, to), torch::Tensor(), torch::Tensor(), &cache, keep);
  };
  std::vector<torch::Tensor> parts = {forward(0, 4), forward(4, 7), forward(7, 8), forward(8, 9)};
  EXPECT_LT(largest_difference(torch::cat(parts, 1), whole), 1e-5);
  EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] { forward(0, 2); }),
              HasSubstr("has 2 tokens a row after 9 in the cache, but the model has positions for 10"));
  cache.truncate(5);
  EXPECT_LT(largest_difference(forward(5, 9, 2), whole.slice(1, 7)), 1e-5);
}

TEST(Gpt2, WrongInputsAndFieldsAreNamed) {
  GPT2LMHeadModel model(tiny());
  EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] {
                model(torch::zeros({1, 11}, at::kLong));
              }),
              HasSubstr("has 11 tokens a row, but the model has positions for 10"));
  EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] {
                model(torch::zeros({1, 3}, at::kLong), torch::ones({1, 2}));
              }),
              HasSubstr("attention_mask has shape [1, 2]"));
  auto config = tiny();
  config.n_head = 3;
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { GPT2Model bad(config); }),
              HasSubstr("GPT2Config: n_embd is 16, expected a multiple of n_head, which is 3"));
}

/// Tolerance: the same fp32 operations in another order of summation; measured are at most 3e-6 for logits of a size of
/// about 5.
TEST(Gpt2Reference, LogitsAndGradientsEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  for (const std::string kind : {"plain", "untied", "scaled"}) {
    SCOPED_TRACE(kind);
    const auto folder = scratch("tiny-" + kind);
    const auto out = scratch("tiny.safetensors");
    const auto result = support::run_python("tests/unit/gpt2_peer.py", {"tiny", folder.string(), out.string()});
    ASSERT_EQ(result.exit_code, 0) << result.output;
    const auto expected = accelerate::load_safetensors(out);
    LoadReport report;
    auto model = GPT2LMHeadModel::from_pretrained(folder, &report);
    EXPECT_THAT(report.missing_keys, IsEmpty());
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    model->eval();
    const auto& ids = expected.at("input_ids");
    const auto logits = model(ids, torch::Tensor(), expected.at("position_ids"));
    EXPECT_LT(largest_difference(logits, expected.at("logits")), 1e-5);
    torch::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten()).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_LT(largest_difference(item.value().grad(), expected.at("grad." + item.key())), 1e-5) << item.key();
    const auto seen = expected.at("attention_mask").unsqueeze(-1);
    EXPECT_LT(largest_difference(model(ids, expected.at("attention_mask")) * seen, expected.at("masked_logits") * seen),
              1e-5);
  }
}

TEST(Gpt2Reference, TransformersLoadsWhatWeSave) {
  SKIP_WITHOUT_PYTHON();
  GPT2LMHeadModel model(tiny());
  model->eval();
  const auto folder = scratch("for_transformers");
  model->save_pretrained(folder);
  const std::map<std::string, at::Tensor> inputs = {{"input_ids", torch::randint(0, 20, {2, 7})},
                                                    {"position_ids", torch::arange(3, 10).repeat({2, 1})}};
  accelerate::save_safetensors(scratch("inputs.safetensors"), inputs);
  const auto out = scratch("logits.safetensors");
  const auto result = support::run_python(
      "tests/unit/gpt2_peer.py", {"logits", folder.string(), scratch("inputs.safetensors").string(), out.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_LT(largest_difference(model(inputs.at("input_ids"), torch::Tensor(), inputs.at("position_ids")),
                               accelerate::load_safetensors(out).at("logits")),
            1e-5);
}

}  // namespace
