#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/models/wordpiece.hpp"
#include "accelerate/utils/error.hpp"
#include "deadline.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using support::largest_difference;
using support::scratch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

BertConfig tiny() {
  BertConfig config;
  config.vocab_size = 20;
  config.hidden_size = 8;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.intermediate_size = 12;
  config.max_position_embeddings = 10;
  return config;
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

std::string read(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

torch::Tensor ids(std::vector<std::vector<int64_t>> rows) {
  std::vector<torch::Tensor> tensors;
  for (auto& row : rows) tensors.push_back(torch::tensor(row, at::kLong));
  return torch::stack(tensors);
}

TEST(Bert, ParameterNamesAreHuggingFaces) {
  std::vector<std::string> names;
  for (const auto& item : BertForSequenceClassification(tiny())->named_parameters()) names.push_back(item.key());
  EXPECT_EQ(names.size(), 5U + 2 * 16 + 2 + 2);
  for (const char* name :
       {"bert.embeddings.word_embeddings.weight", "bert.embeddings.LayerNorm.bias",
        "bert.encoder.layer.1.attention.self.query.weight", "bert.encoder.layer.0.attention.output.LayerNorm.weight",
        "bert.encoder.layer.0.intermediate.dense.bias", "bert.encoder.layer.1.output.dense.weight",
        "bert.pooler.dense.weight", "classifier.weight"})
    EXPECT_THAT(names, ::testing::Contains(name));
  EXPECT_EQ(BertModel(tiny(), BertModelOptions{.add_pooling_layer = false})->parameters().size(), 5U + 2 * 16);
}

TEST(Bert, FreshWeightsFollowTheConfiguration) {
  torch::manual_seed(0);
  auto config = tiny();
  config.vocab_size = 5000;
  config.initializer_range = 0.1;
  const auto parameters = BertForSequenceClassification(config)->named_parameters();
  const auto& words = parameters["bert.embeddings.word_embeddings.weight"];
  EXPECT_NEAR(words.std().item<double>(), 0.1, 0.005);
  EXPECT_EQ(words[0].abs().sum().item<double>(), 0) << "the padding row is zero";
  EXPECT_EQ(parameters["classifier.bias"].abs().sum().item<double>(), 0);
  EXPECT_EQ(parameters["bert.embeddings.LayerNorm.weight"].min().item<double>(), 1);
}

TEST(Bert, PaddingChangesNothingAndGetsNoGradient) {
  BertForSequenceClassification model(tiny());
  model->eval();
  const auto plain = model(ids({{2, 5, 6, 3}}));
  const auto padded = model(ids({{2, 5, 6, 3, 0, 0}}), ids({{1, 1, 1, 1, 0, 0}}));
  EXPECT_LT(largest_difference(plain, padded), 1e-5);
  EXPECT_GT(largest_difference(plain, model(ids({{2, 5, 6, 3, 0, 0}}))), 1e-6) << "without a mask they must count";
  EXPECT_GT(largest_difference(plain, model(ids({{2, 5, 6, 3}}), torch::Tensor(), ids({{0, 0, 1, 1}}))), 0);
  padded.sum().backward();
  const auto gradient = model->named_parameters()["bert.embeddings.word_embeddings.weight"].grad();
  EXPECT_EQ(gradient[0].abs().sum().item<double>(), 0);
  EXPECT_GT(gradient[5].abs().sum().item<double>(), 0);
  EXPECT_FALSE(torch::isnan(model(ids({{2, 3}}), ids({{0, 0}}))).any().item<bool>())
      << "a row of padding only must stay finite";
}

TEST(Bert, DropoutIsActiveInTrainingOnly) {
  BertForSequenceClassification model(tiny());
  const auto input = ids({{2, 5, 6, 3}});
  EXPECT_GT(largest_difference(model(input), model(input)), 0);
  model->eval();
  EXPECT_EQ(largest_difference(model(input), model(input)), 0);
}

TEST(Bert, CloneIsIndependent) {
  BertForSequenceClassification model(tiny());
  model->eval();
  const auto copy = std::dynamic_pointer_cast<BertForSequenceClassificationImpl>(model->clone());
  const auto input = ids({{2, 5, 3}});
  EXPECT_EQ(largest_difference(model(input), copy->forward(input)), 0);
  const auto before = model(input);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.add_(1);
  }
  EXPECT_EQ(largest_difference(model(input), before), 0);
}

TEST(Bert, WrongInputsNameTheirShapes) {
  BertForSequenceClassification model(tiny());
  const auto error = [&](const torch::Tensor& input, const torch::Tensor& mask = {}, const torch::Tensor& types = {}) {
    return support::message_of<accelerate::ShapeError>([&] { model(input, mask, types); });
  };
  EXPECT_THAT(error(torch::zeros({3}, at::kLong)), HasSubstr("[3]"));
  EXPECT_THAT(error(torch::zeros({1, 3})), HasSubstr("Float"));
  EXPECT_THAT(error(torch::zeros({1, 11}, at::kLong)),
              HasSubstr("has 11 tokens a row, but the model has positions for 10"));
  EXPECT_THAT(error(torch::zeros({1, 3}, at::kLong), torch::zeros({1, 4}, at::kLong)),
              HasSubstr("attention_mask has shape [1, 4], but input_ids [1, 3]"));
  EXPECT_THAT(error(torch::zeros({1, 3}, at::kLong), {}, torch::zeros({2, 3}, at::kLong)),
              HasSubstr("token_type_ids has shape [2, 3]"));
}

TEST(BertConfig, InvalidFieldsAreNamed) {
  const auto error = [](auto&& change) {
    auto config = tiny();
    change(config);
    return support::message_of<accelerate::ConfigError>([&] { BertModel model(config); });
  };
  EXPECT_THAT(error([](BertConfig& c) { c.num_attention_heads = 3; }),
              HasSubstr("hidden_size is 8, expected a multiple of num_attention_heads, which is 3"));
  EXPECT_THAT(error([](BertConfig& c) { c.num_hidden_layers = 0; }),
              HasSubstr("num_hidden_layers is 0, expected at least 1"));
  EXPECT_THAT(error([](BertConfig& c) { c.hidden_act = "gleu"; }),
              HasSubstr("hidden_act is 'gleu', expected one of gelu, gelu_python, gelu_new"));
  EXPECT_THAT(error([](BertConfig& c) { c.hidden_dropout_prob = 1; }),
              HasSubstr("hidden_dropout_prob is 1, expected a probability"));
  EXPECT_THAT(error([](BertConfig& c) { c.pad_token_id = 20; }),
              HasSubstr("pad_token_id is 20, expected an id below vocab_size, which is 20"));
  EXPECT_THAT(error([](BertConfig& c) { c.labels.clear(); }), HasSubstr("num_labels is 0"));
}

TEST(BertConfig, DamagedFilesAreRefused) {
  const auto folder = scratch("bad_config");
  fs::create_directory(folder);
  const auto load = [&](const std::string& json) {
    write(folder / "config.json", json);
    return support::message_of<accelerate::CheckpointError>([&] { BertConfig::from_pretrained(folder); });
  };
  write(folder / "config.json", "{}");
  EXPECT_EQ(BertConfig::from_pretrained(folder).hidden_size, 768) << "defaults are those of bert-base-uncased";
  EXPECT_THAT(load(""), HasSubstr("not a JSON object"));
  EXPECT_THAT(load(R"({"model_type":"roberta"})"), HasSubstr("model_type is 'roberta', expected 'bert'"));
  EXPECT_THAT(load(R"({"position_embedding_type":"relative_key"})"), HasSubstr("'relative_key', expected 'absolute'"));
  EXPECT_THAT(load(R"({"is_decoder":true})"), HasSubstr("is_decoder is true"));
  EXPECT_THAT(load(R"({"hidden_size":"768"})"), HasSubstr("hidden_size is \"768\", expected an integer"));
  EXPECT_THAT(load(R"({"hidden_size":770})"), HasSubstr("config.json': BertConfig: hidden_size is 770"));
  EXPECT_THAT(load(R"({"id2label":{"0":"a","2":"b"}})"), HasSubstr("id2label is"));
  for (const std::string number : {"0", "-1", "1000000000000"})
    EXPECT_THAT(load("{\"num_labels\":" + number + "}"),
                HasSubstr("config.json': num_labels is " + number + ", expected 1 to 1000000"));
  EXPECT_THAT(load(R"({"num_hidden_layers":1000000000000})"), HasSubstr("expected at most 10000"));
  std::string names;
  for (int i = 0; i < 500'000; ++i) names += (i ? ",\"" : "\"") + std::to_string(i) + "\":\"x\"";
  write(folder / "config.json", "{\"id2label\":{" + names + "}}");
  {
    const support::Deadline deadline;  // a search for each label takes longer
    EXPECT_EQ(BertConfig::from_pretrained(folder).labels.size(), 500'000u);
  }
  EXPECT_THAT(
      support::message_of<accelerate::CheckpointError>([] { BertConfig::from_pretrained(scratch("no_such_folder")); }),
      HasSubstr("can't open"));
}

// The weights of a sharded model come from elsewhere.
TEST(Bert, OtherWeightsAreSavedInPlaceOfItsOwn) {
  const auto folder = scratch("given");
  const auto refusal = [](auto&& save) { return support::message_of<accelerate::CheckpointError>(save); };
  const BertModel model(tiny()), other(tiny());
  std::map<std::string, torch::Tensor> weights;
  for (const auto& entry : other->named_parameters()) weights[entry.key()] = entry.value();
  for (const auto& entry : other->named_buffers()) weights[entry.key()] = entry.value();
  model->save_pretrained(folder, weights);
  const auto read = BertModel::from_pretrained(folder);
  for (const auto& entry : read->named_parameters()) EXPECT_TRUE(entry.value().equal(weights.at(entry.key())));
  auto fewer = weights;
  fewer.erase(fewer.begin());
  EXPECT_THAT(refusal([&] { model->save_pretrained(folder, fewer); }), HasSubstr("the weights have no '"));
  weights.begin()->second = torch::zeros({1});
  EXPECT_THAT(refusal([&] { model->save_pretrained(folder, weights); }), HasSubstr("has the shape [1], expected"));
  EXPECT_THAT(refusal([&] { model->save_pretrained(folder, {}); }), HasSubstr("save on the main process"));
}

TEST(BertConfig, UnknownFieldsSurviveSaving) {
  const auto folder = scratch("config_fields");
  BertForSequenceClassification(tiny())->save_pretrained(folder);
  auto text = read(folder / "config.json");
  text.replace(text.find('{'), 1, R"({"my_field": [1, 2], "torch_dtype": "float16", "num_labels": 2,)");
  write(folder / "config.json", text);
  const auto again = scratch("config_fields_again");
  BertForSequenceClassification::from_pretrained(folder, {.num_labels = 2})->save_pretrained(again);
  EXPECT_THAT(read(again / "config.json"), HasSubstr("my_field"));
  EXPECT_THAT(read(again / "config.json"), Not(HasSubstr("torch_dtype")));
}

TEST(BertLoading, RoundTripAndReports) {
  const auto folder = scratch("round");
  BertForSequenceClassification model(tiny());
  model->eval();
  model->save_pretrained(folder);
  LoadReport report;
  auto loaded = BertForSequenceClassification::from_pretrained(folder, {}, &report);
  loaded->eval();
  const auto input = ids({{2, 5, 6, 3}});
  EXPECT_EQ(largest_difference(model(input), loaded(input)), 0);
  EXPECT_THAT(report.missing_keys, IsEmpty());
  EXPECT_THAT(report.unexpected_keys, IsEmpty());
  EXPECT_EQ(accelerate::SafetensorsFile(folder / "model.safetensors").metadata().at("format"), "pt");

  // The base model finds its weights behind the prefix; the head is left over.
  auto base = BertModel::from_pretrained(folder, {.add_pooling_layer = false}, &report);
  base->eval();
  EXPECT_THAT(report.unexpected_keys, ElementsAre("bert.pooler.dense.bias", "bert.pooler.dense.weight",
                                                  "classifier.bias", "classifier.weight"));
  EXPECT_FALSE(base->forward(input).pooler_output.defined());

  // And the classifier finds the base model's without one; its own head is fresh.
  const auto base_folder = scratch("base");
  base->save_pretrained(base_folder);
  auto fresh = BertForSequenceClassification::from_pretrained(base_folder, {.num_labels = 3}, &report);
  fresh->eval();
  EXPECT_THAT(report.missing_keys, ElementsAre("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias",
                                               "classifier.weight"));
  EXPECT_EQ(fresh(input).size(1), 3);
  EXPECT_TRUE(fresh->named_parameters()["bert.encoder.layer.1.output.dense.weight"].equal(
      model->named_parameters()["bert.encoder.layer.1.output.dense.weight"]));
}

TEST(BertLoading, HalfPrecisionOldNamesAndPositionIdsAreUnderstood) {
  const auto folder = scratch("old");
  BertForSequenceClassification model(tiny());
  model->save_pretrained(folder);
  std::map<std::string, at::Tensor> old;
  for (const auto& [name, tensor] : accelerate::load_safetensors(folder / "model.safetensors")) {
    auto key = name;
    if (const auto at = key.find("LayerNorm.weight"); at != std::string::npos)
      key.replace(at, std::string::npos, "LayerNorm.gamma");
    if (const auto at = key.find("LayerNorm.bias"); at != std::string::npos)
      key.replace(at, std::string::npos, "LayerNorm.beta");
    old[key] = tensor.to(at::kHalf);
  }
  old["bert.embeddings.position_ids"] = torch::arange(10).unsqueeze(0);
  accelerate::save_safetensors(folder / "model.safetensors", old);
  LoadReport report;
  const auto loaded = BertForSequenceClassification::from_pretrained(folder, {}, &report);
  EXPECT_THAT(report.missing_keys, IsEmpty());
  EXPECT_THAT(report.unexpected_keys, IsEmpty());
  for (const auto& item : loaded->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), at::kFloat);
    EXPECT_LT(largest_difference(item.value(), model->named_parameters()[item.key()]), 1e-3);
  }
}

TEST(BertLoading, EveryShapeThatDiffersIsListed) {
  const auto folder = scratch("shapes");
  BertForSequenceClassification model(tiny());
  model->save_pretrained(folder);
  const auto other_head = support::message_of<accelerate::CheckpointError>(
      [&] { BertForSequenceClassification::from_pretrained(folder, {.num_labels = 5}); });
  EXPECT_THAT(other_head, HasSubstr("2 tensors do not fit the model"));
  EXPECT_THAT(other_head, HasSubstr("classifier.bias: [2] Float in the file, [5] Float in the model"));
  EXPECT_THAT(other_head, HasSubstr("classifier.weight: [2, 8] Float in the file, [5, 8] Float in the model"));
  LoadReport report;
  auto loaded = BertForSequenceClassification::from_pretrained(
      folder, {.num_labels = 5, .ignore_mismatched_sizes = true}, &report);
  EXPECT_THAT(report.mismatched_keys, ElementsAre("classifier.bias", "classifier.weight"));
  EXPECT_EQ(loaded(ids({{2, 3}})).size(1), 5);
}

TEST(BertLoading, AnIncompleteEncoderIsRefused) {
  const auto folder = scratch("incomplete");
  BertForSequenceClassification model(tiny());
  model->save_pretrained(folder);
  auto tensors = accelerate::load_safetensors(folder / "model.safetensors");
  tensors.erase("bert.encoder.layer.1.output.dense.weight");
  accelerate::save_safetensors(folder / "model.safetensors", tensors);
  EXPECT_THAT(
      support::message_of<accelerate::CheckpointError>([&] { BertForSequenceClassification::from_pretrained(folder); }),
      HasSubstr("1 tensors of the model are missing:\n  bert.encoder.layer.1.output.dense.weight"));
}

TEST(BertReference, MiniLmSentenceEmbedding) {
  SKIP_WITHOUT_DATA();
  const auto folder = *support::data_dir() / "minilm";
  const auto encoding =
      WordPieceTokenizer::from_pretrained(folder).encode_batch({"This is an example sentence"}, EncodeOptions{});
  EXPECT_TRUE(encoding.input_ids.equal(ids({{101, 2023, 2003, 2019, 2742, 6251, 102}})));
  LoadReport report;
  auto model = BertModel::from_pretrained(folder, {}, &report);
  EXPECT_THAT(report.missing_keys, IsEmpty());
  EXPECT_THAT(report.unexpected_keys, IsEmpty());
  model->eval();
  const auto mean = model(encoding.input_ids, encoding.attention_mask).last_hidden_state.mean(1)[0];
  const auto embedding = mean / mean.norm();
  const auto expected = torch::tensor({.0677, .0635, .0487, .0793, .0374, .0027, .0394, -.0071});
  EXPECT_LT(largest_difference(embedding.slice(0, 0, 8), expected), 5.1e-5) << embedding.slice(0, 0, 8);
}

TEST(BertReference, HiddenStatesOfAPaddedBatchEqualTransformers) {
  SKIP_WITHOUT_DATA();
  SKIP_WITHOUT_PYTHON();
  const auto folder = *support::data_dir() / "minilm";
  const auto out = scratch("hidden.safetensors");
  const auto result = support::run_python("tests/unit/bert_peer.py", {"hidden", folder.string(), out.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const auto expected = accelerate::load_safetensors(out);
  EXPECT_EQ(expected.at("attention_mask").min().item<int64_t>(), 0) << "the batch must hold padding";
  auto model = BertModel::from_pretrained(folder);
  model->eval();
  const auto output = model(expected.at("input_ids"), expected.at("attention_mask"), expected.at("token_type_ids"));
  const auto mask = expected.at("attention_mask").unsqueeze(-1);  // hidden states of padding have no meaning
  EXPECT_LT(largest_difference(output.last_hidden_state * mask, expected.at("last_hidden_state") * mask), 1e-5);
  EXPECT_LT(largest_difference(output.pooler_output, expected.at("pooler_output")), 1e-5);
}

TEST(BertReference, LogitsAndGradientsEqualTransformersForEachActivation) {
  SKIP_WITHOUT_PYTHON();
  for (const std::string activation : {"gelu", "gelu_new"}) {
    SCOPED_TRACE(activation);
    const auto folder = scratch("tiny-" + activation);
    const auto out = scratch("tiny.safetensors");
    const auto result = support::run_python("tests/unit/bert_peer.py", {"tiny", folder.string(), out.string()});
    ASSERT_EQ(result.exit_code, 0) << result.output;
    const auto expected = accelerate::load_safetensors(out);
    LoadReport report;
    auto model = BertForSequenceClassification::from_pretrained(folder, {}, &report);
    EXPECT_THAT(report.missing_keys, IsEmpty());
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    EXPECT_THAT(model->config().labels, ElementsAre("no", "yes", "maybe"));
    model->eval();
    const auto logits = model(expected.at("input_ids"), expected.at("attention_mask"), expected.at("token_type_ids"));
    EXPECT_LT(largest_difference(logits, expected.at("logits")), 1e-5);
    torch::cross_entropy_loss(logits, torch::tensor({0, 2, 1}, at::kLong)).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_LT(largest_difference(item.value().grad(), expected.at("grad." + item.key())), 1e-5) << item.key();
  }
}

TEST(BertReference, TransformersLoadsWhatWeSave) {
  SKIP_WITHOUT_PYTHON();
  torch::manual_seed(1);
  auto config = tiny();
  config.labels = {"no", "yes", "maybe"};
  config.problem_type = "single_label_classification";
  config.initializer_range = 0.5;
  BertForSequenceClassification model(config);
  model->eval();
  const auto folder = scratch("for_transformers");
  model->save_pretrained(folder);
  const std::map<std::string, at::Tensor> inputs = {{"input_ids", ids({{2, 5, 6, 3, 0}, {2, 7, 8, 9, 3}})},
                                                    {"attention_mask", ids({{1, 1, 1, 1, 0}, {1, 1, 1, 1, 1}})},
                                                    {"token_type_ids", ids({{0, 0, 1, 1, 0}, {0, 0, 0, 1, 1}})}};
  accelerate::save_safetensors(scratch("inputs.safetensors"), inputs);
  const auto out = scratch("logits.safetensors");
  const auto result = support::run_python(
      "tests/unit/bert_peer.py", {"logits", folder.string(), scratch("inputs.safetensors").string(), out.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_LT(largest_difference(model(inputs.at("input_ids"), inputs.at("attention_mask"), inputs.at("token_type_ids")),
                               accelerate::load_safetensors(out).at("logits")),
            1e-5);
}

}  // namespace
