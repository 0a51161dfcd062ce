/// prepare_pippy: several processes give what one gives, to the bit, and end when they can't.

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <numeric>

#include "accelerate/accelerator/inference.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "small_gpt.hpp"

namespace {

using namespace accelerate;
using support::rank;
using support::world_size;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace nn = torch::nn;

bool is_last() { return rank() == world_size() - 1; }

/// Rows of the parts that `rows` are cut into.
std::vector<int64_t> parts_of(int64_t rows, int64_t parts) {
  parts = std::min(parts, rows);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < parts; ++i) sizes.push_back(rows / parts + (i < rows % parts));
  return sizes;
}

/// One process's results from the same parts: kernels may round otherwise for other numbers of rows, so only equal
/// parts have equal bits.
template <class Forward> at::Tensor alone(const at::Tensor& input, int64_t parts, Forward&& forward) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> results;
  for (const auto& part : input.split_with_sizes(parts_of(input.size(0), parts))) results.push_back(forward(part));
  return torch::cat(results);
}

void expect_result(const at::Tensor& found, const at::Tensor& expected, bool gathered) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  ASSERT_EQ(found.scalar_type(), expected.scalar_type());
  if (gathered || is_last()) EXPECT_TRUE(found.is_cpu() && torch::equal(found, expected)) << "rank " << rank();
  else EXPECT_TRUE(found.is_meta()) << "rank " << rank();
}

/// Every rank builds the same weights.
template <class Make> auto same_everywhere(Make&& make) {
  torch::manual_seed(11);
  auto model = make();
  model->eval();
  return model;
}

/// Both ways of asking for the result, a batch that parts divide, one that they don't, and one with fewer rows than
/// parts.
template <class Make>
void expect_equals_one_process(Make&& make, PippyOptions options, const std::function<at::Tensor(int64_t rows)>& input,
                               bool with_example = true) {
  auto reference = same_everywhere(make);
  for (const bool gather : {false, true}) {
    options.gather_output = gather;
    auto model = same_everywhere(make);
    auto pipeline = with_example ? prepare_pippy(model, options, input(2)) : prepare_pippy(model, options);
    for (const int64_t rows : {6, 7, 1}) {
      SCOPED_TRACE("gather " + std::to_string(gather) + ", rows " + std::to_string(rows));
      const auto x = input(rows);
      const int64_t parts = options.num_chunks ? options.num_chunks : world_size();
      expect_result(pipeline(x), alone(x, parts, [&](const at::Tensor& part) { return reference->forward(part); }),
                    gather);
      const auto report = pipeline.report();
      EXPECT_GT(report.operators, 0) << "every rank has a stage";
      EXPECT_GT(report.skipped, 0);
      EXPECT_EQ(report.tensors_received > 0, rank() > 0);
      EXPECT_EQ(report.tensors_sent > 0, !is_last());
    }
  }
}

at::Tensor ids(int64_t rows) {
  torch::manual_seed(5 + rows);
  return torch::randint(0, 61, {rows, 9});
}

at::Tensor images(int64_t rows) {
  torch::manual_seed(3 + rows);
  return torch::randn({rows, 3, 17, 17});
}

models::GPT2Config gpt2() {
  models::GPT2Config config;
  config.vocab_size = 61, config.n_positions = 16, config.n_embd = 24, config.n_layer = 5, config.n_head = 4,
  config.initializer_range = 0.2;
  return config;
}

models::LlamaConfig llama() {
  models::LlamaConfig config;
  config.vocab_size = 61, config.hidden_size = 24, config.intermediate_size = 40, config.num_hidden_layers = 5,
  config.num_attention_heads = 4, config.num_key_value_heads = 2, config.initializer_range = 0.2;
  return config;
}

models::BertConfig bert() {
  models::BertConfig config;
  config.vocab_size = 61, config.hidden_size = 24, config.num_hidden_layers = 4, config.num_attention_heads = 4,
  config.intermediate_size = 40, config.max_position_embeddings = 16, config.initializer_range = 0.2;
  return config;
}

/// The first layer's result is used by the last one; one tensor is written to by a later stage than its own, another
/// one made on the device of a tensor that few ranks have.
struct SkipNetImpl : nn::Module {
  SkipNetImpl() {
    for (int i = 0; i < 6; ++i) layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(8, 8)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto first = layers[0](x);
    auto collected = torch::zeros({x.size(0), 8});
    auto running = torch::relu(first);
    for (size_t i = 1; i < layers.size(); ++i) {
      auto y = layers[i](running) + torch::arange(8, running.options());
      running.narrow(1, 0, 4).add_(y.narrow(1, 4, 4));  // a view of what an earlier stage made
      collected.add_(y);
      running = running + torch::tanh(y);
    }
    return running + 0.5 * first + collected;
  }
  std::vector<nn::Linear> layers;
};
TORCH_MODULE(SkipNet);

struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t in, int64_t out, int64_t stride) {
    conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)));
    bn1 = register_module("bn1", nn::BatchNorm2d(out));
    conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(out, out, 3).padding(1).bias(false)));
    bn2 = register_module("bn2", nn::BatchNorm2d(out));
    if (in != out)
      down = register_module(
          "downsample",
          nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), nn::BatchNorm2d(out)));
  }
  at::Tensor forward(at::Tensor x) {
    auto y = bn1(conv1(x));
    y = bn2(conv2(torch::relu_(y)));
    y += down ? down->forward(x) : x;
    return torch::relu_(y);
  }
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  nn::Sequential down{nullptr};
};
TORCH_MODULE(Residual);

/// The head is registered first, as nobody should, so that only the order of use tells what comes last.
struct SmallResNetImpl : nn::Module {
  SmallResNetImpl() {
    fc = register_module("fc", nn::Linear(16, 5));
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(3, 8, 5).stride(2).padding(2)));
    layers = register_module("layers", nn::Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1)));
    for (auto& buffer : buffers())
      if (buffer.is_floating_point()) torch::nn::init::uniform_(buffer, 0.5, 1.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = layers->forward(torch::max_pool2d(torch::relu(stem(x)), 3, 2, 1));
    return fc(torch::adaptive_avg_pool2d(y, {1, 1}).flatten(1));
  }
  nn::Linear fc{nullptr};
  nn::Conv2d stem{nullptr};
  nn::Sequential layers{nullptr};
};
TORCH_MODULE(SmallResNet);

RANKS_TEST(Pipeline, Bert, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return models::BertForSequenceClassification(bert()); }, {}, ids);
}

RANKS_TEST(Pipeline, Gpt2WithTiedEmbeddings, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return models::GPT2LMHeadModel(gpt2()); }, {}, ids);
}

RANKS_TEST(Pipeline, Llama, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return models::LlamaForCausalLM(llama()); }, {}, ids);
}

RANKS_TEST(Pipeline, WithoutExampleInTheOrderOfRegistration, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return models::GPT2LMHeadModel(gpt2()); }, {}, ids, /*with_example=*/false);
}

RANKS_TEST(Pipeline, NamedSplitPointsAndOtherNumbersOfParts, 2, 3) {
  const PartialState state;
  PippyOptions options{.split_points = {"model.layers.1"}, .num_chunks = 4};
  if (world_size() == 3) options.split_points.push_back("model.layers.3.mlp");
  expect_equals_one_process([] { return models::LlamaForCausalLM(llama()); }, options, ids);
  auto pipeline = prepare_pippy(same_everywhere([] { return models::LlamaForCausalLM(llama()); }), options, ids(2));
  EXPECT_THAT(pipeline.report().stages[0].modules, ::testing::Contains("model.layers.0.mlp.down_proj"));
  EXPECT_THAT(pipeline.report().stages[0].modules, ::testing::Not(::testing::Contains("model.layers.1.mlp.down_proj")));
}

RANKS_TEST(Pipeline, SkipConnectionsAndWritesAcrossStages, 2, 3) {
  const PartialState state;
  torch::manual_seed(1);
  expect_equals_one_process([] { return SkipNet(); }, {},
                            [](int64_t rows) {
                              return torch::arange(rows * 8).to(at::kFloat).view({rows, 8}).sin();
                            });
}

RANKS_TEST(Pipeline, TiedNetWithOddSizes, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return support::Gpt(61, 24, 4); }, {}, ids);
}

RANKS_TEST(Pipeline, ResidualConvNet, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return SmallResNet(); }, {}, images);
}

RANKS_TEST(Pipeline, BalancedByMeasuredTime, 2, 3) {
  const PartialState state;
  expect_equals_one_process([] { return SmallResNet(); }, {.balance = PipelineBalance::time}, images);
  auto pipeline =
      prepare_pippy(same_everywhere([] { return SmallResNet(); }), {.balance = PipelineBalance::time}, images(4));
  for (const auto& stage : pipeline.report().stages) EXPECT_GT(stage.milliseconds, 0);
}

RANKS_TEST(Pipeline, ARankHoldsItsStageOnly, 2, 3) {
  const PartialState state;
  auto config = llama();
  config.num_hidden_layers = 12;  // layers of the same size: an even split is possible up to one layer
  auto pipeline = prepare_pippy(same_everywhere([&] { return models::LlamaForCausalLM(config); }), {}, ids(2));
  const auto report = pipeline.report();
  const int64_t layer = report.model_bytes / 12;
  EXPECT_EQ(report.held_bytes, report.stages[static_cast<size_t>(rank())].parameter_bytes)
      << "no tied weights, no buffers";
  EXPECT_LE(report.held_bytes, report.model_bytes / world_size() + layer);
  int64_t sum = 0;
  for (const auto& stage : report.stages) sum += stage.parameter_bytes;
  EXPECT_EQ(sum, report.model_bytes);
  int64_t real = 0;
  for (const auto& parameter : pipeline.unwrap()->parameters())
    real += parameter.is_meta() ? 0 : static_cast<int64_t>(parameter.storage().nbytes());
  EXPECT_EQ(real, report.held_bytes);
}

RANKS_TEST(Pipeline, TiedWeightsStayWithAllThatUseThem, 2) {
  const PartialState state;
  auto make = [] { return models::GPT2LMHeadModel(gpt2()); };
  const auto x = ids(4);
  auto with = prepare_pippy(same_everywhere(make), {}, ids(2));
  with(x);
  EXPECT_EQ(with.report().tensors_received, rank() == 1 ? 2 : 0) << "one activation for each of two parts";
  EXPECT_TRUE(with.unwrap()->named_parameters()["transformer.wte.weight"].is_cpu())
      << "for the embedding here, for the head there";
  EXPECT_EQ(with.unwrap()->named_parameters()["transformer.wpe.weight"].is_cpu(), rank() == 0);
  auto without = prepare_pippy(same_everywhere(make), {});
  without(x);
  EXPECT_EQ(without.report().tensors_received, rank() == 1 ? 3 : 0) << "and the weight, once";
  without(x);
  EXPECT_EQ(without.report().tensors_received, rank() == 1 ? 2 : 0) << "which stays from call to call";
}

RANKS_TEST(Pipeline, AModelWithoutWeightsGetsItsStageOnly, 2, 3) {
  const PartialState state;
  const auto make = [] { return models::LlamaForCausalLM(llama()); };
  auto reference = same_everywhere(make);
  torch::manual_seed(11);
  auto model = [&] {
    auto empty = init_empty_weights();
    return make();
  }();
  model->eval();
  auto pipeline = prepare_pippy(model, {}, ids(2));
  EXPECT_EQ(pipeline.report().held_bytes, pipeline.report().stages[static_cast<size_t>(rank())].parameter_bytes);
  const auto x = ids(5);
  expect_result(pipeline(x), alone(x, world_size(), [&](const at::Tensor& part) { return reference->forward(part); }),
                false);
}

struct Batch {
  std::map<std::string, at::Tensor> tensors;
  std::optional<at::Tensor> scale;
  double offset = 0;
  ACCELERATE_FIELDS(tensors, scale, offset)
};

struct Outputs {
  std::vector<at::Tensor> hidden;  ///< of all stages
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> more;
  at::Tensor missing, input;
  int64_t layers = 0;
  ACCELERATE_FIELDS(hidden, more, missing, input, layers)
};

struct NestedNetImpl : nn::Module {
  NestedNetImpl() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(8, 8)));
  }
  Outputs forward(const Batch& batch, const std::vector<int64_t>& which) {
    Outputs out;
    auto x = batch.tensors.at("x") * *batch.scale + batch.offset;
    out.input = x;
    for (const int64_t i : which) out.hidden.push_back(x = torch::tanh(layers[static_cast<size_t>(i)](x)));
    if (x.defined() && batch.tensors.at("mask").any().item<bool>())
      x = x.masked_fill(batch.tensors.at("mask").unsqueeze(1), 0);  // inputs may be looked at
    out.more["last"] = {x, x.argmax(-1)};
    out.layers = static_cast<int64_t>(which.size());
    return out;
  }
  std::vector<nn::Linear> layers;
};
TORCH_MODULE(NestedNet);

RANKS_TEST(Pipeline, NestedArgumentsAndResultsOfAllStages, 2, 3) {
  const PartialState state;
  auto reference = same_everywhere([] { return NestedNet(); });
  for (const bool gather : {false, true}) {
    Batch batch{.tensors = {{"mask", torch::tensor({false, true, false, true, false})},
                            {"x", torch::arange(40).to(at::kFloat).view({5, 8}).cos()}},
                .scale = torch::tensor(1.5),
                .offset = 0.25};
    const std::vector<int64_t> which{0, 1, 2, 3, 1};  // a layer is used again
    auto pipeline = prepare_pippy(same_everywhere([] { return NestedNet(); }),
                                  {.num_chunks = 1, .gather_output = gather}, batch, which);
    const torch::NoGradGuard no_grad;
    const Outputs expected = reference->forward(batch, which);
    // Only rank 0's tensors count; others need none.
    Batch mine = batch;
    if (rank() != 0) mine.tensors = {{"mask", {}}, {"x", {}}}, mine.scale = at::Tensor();
    const Outputs found = pipeline(mine, which);
    ASSERT_EQ(found.hidden.size(), 5U);
    for (size_t i = 0; i < 5; ++i) expect_result(found.hidden[i], expected.hidden[i], gather);
    expect_result(found.more.at("last").first, expected.more.at("last").first, gather);
    expect_result(found.more.at("last").second, expected.more.at("last").second, gather);
    EXPECT_FALSE(found.missing.defined());
    EXPECT_TRUE(torch::equal(found.input, expected.input)) << "depends on inputs only, so every rank has it";
    EXPECT_EQ(found.layers, 5);
  }
}

RANKS_TEST(Pipeline, ModelsThatLookAtMasks, 2) {
  const PartialState state;
  auto reference = same_everywhere([] { return models::BertModel(bert()); });
  auto x = ids(4);
  auto mask = torch::ones_like(x);
  mask.narrow(1, 6, 3).narrow(0, 0, 2).zero_();
  auto pipeline = prepare_pippy(same_everywhere([] { return models::BertModel(bert()); }),
                                {.num_chunks = 1, .gather_output = true}, x, mask);
  const torch::NoGradGuard no_grad;
  const auto expected = reference->forward(x, mask);
  const auto found = pipeline(x, mask);
  EXPECT_TRUE(torch::equal(found.last_hidden_state, expected.last_hidden_state));
  EXPECT_TRUE(torch::equal(found.pooler_output, expected.pooler_output));
}

/// Any forward over four layers.
struct AnyNetImpl : nn::Module {
  using Forward = std::function<at::Tensor(AnyNetImpl&, const at::Tensor&)>;
  explicit AnyNetImpl(Forward forward) : body(std::move(forward)) {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(8, 8)));
  }
  at::Tensor forward(const at::Tensor& x) { return body(*this, x); }
  Forward body;
  std::vector<nn::Linear> layers;
};
TORCH_MODULE(AnyNet);

at::Tensor through(AnyNetImpl& net, at::Tensor x) {
  for (auto& layer : net.layers) x = layer(x);
  return x;
}

RANKS_TEST(Pipeline, ForwardsThatCannotBeSplitNameTheOperator, 2) {
  const PartialState state;
  const std::vector<std::pair<std::string, AnyNetImpl::Forward>> bad{
      {"aten::item",
       [](AnyNetImpl& net, const at::Tensor& x) {
         return net.layers[0](x).sum().item<double>() > 0 ? through(net, x) : x;
       }},
      {"aten::is_nonzero",
       [](AnyNetImpl& net, const at::Tensor& x) {
         return net.layers[0](x).sum().gt(0).is_nonzero() ? through(net, x) : x;
       }},
      {"aten::nonzero", [](AnyNetImpl& net, const at::Tensor& x) { return net.layers[0](x).nonzero(); }},
      {"aten::masked_select",
       [](AnyNetImpl& net, const at::Tensor& x) { return through(net, x).masked_select(x > 0); }},
      {"aten::index.Tensor",
       [](AnyNetImpl& net, const at::Tensor& x) {
         auto y = through(net, x);
         return y.index({y > 0});
       }},
      {"aten::equal", [](AnyNetImpl& net, const at::Tensor& x) { return through(net, x).equal(x) ? x : x + 1; }}};
  const auto x = torch::randn({4, 8});
  for (const auto& [name, forward] : bad) {
    SCOPED_TRACE(name);
    // Known when it is prepared with an example, else in the call; on all ranks, which then can go on.
    EXPECT_THAT(support::message_of<ConfigError>([&] { prepare_pippy(AnyNet(forward), {}, x); }),
                HasSubstr("operator " + name + " asks for values"));
    auto pipeline = prepare_pippy(AnyNet(forward));
    EXPECT_THAT(support::message_of<ConfigError>([&] { pipeline(x); }),
                HasSubstr("operator " + name + " asks for values"));
  }
  expect_result(prepare_pippy(same_everywhere([] { return AnyNet(through); }))(x),
                alone(x, 2, [net = same_everywhere([] {
                               return AnyNet(through);
                             })](const at::Tensor& part) mutable { return net->forward(part); }),
                false);
}

/// A tensor that has been sent is written to and asked for again: by then the first copy must have left, and the second
/// one must not be taken for it.
RANKS_TEST(Pipeline, AWriteAfterASendIsSentAgain, 2) {
  const PartialState state;
  const auto forward = [](AnyNetImpl& net, const at::Tensor& x) {
    auto a = net.layers[0](x);
    const auto b = net.layers[2](a);
    a.mul_(2);
    const auto c = net.layers[3](a);
    a.add_(net.layers[1](x));
    return torch::cat({b, c, net.layers[3](a)}, 1);
  };
  const auto x = torch::arange(32).to(at::kFloat).view({4, 8}).sin();
  auto pipeline =
      prepare_pippy(same_everywhere([&] { return AnyNet(forward); }),
                    {.gather_output = true});  // in the order of registration: layers 0 and 1, layers 2 and 3
  auto reference = same_everywhere([&] { return AnyNet(forward); });
  expect_result(pipeline(x), alone(x, 2, [&](const at::Tensor& part) { return reference->forward(part); }), true);
  EXPECT_EQ(pipeline.report().tensors_sent, rank() == 0 ? 2 * 3 : 0) << "three versions for each of two parts";
}

RANKS_TEST(Pipeline, MasksOfInputsMayBeIndices, 2) {
  const PartialState state;
  const auto forward = [](AnyNetImpl& net, const at::Tensor& x) {
    auto y = net.layers[0](x).index({x.sum(1) > 0}) + 1;
    return net.layers[3](y.index({torch::tensor({0, 1, 0})}));
  };
  const auto x = torch::arange(32).to(at::kFloat).view({4, 8}) - 5;
  auto pipeline =
      prepare_pippy(same_everywhere([&] { return AnyNet(forward); }), {.num_chunks = 1, .gather_output = true}, x);
  auto reference = same_everywhere([&] { return AnyNet(forward); });
  expect_result(pipeline(x), alone(x, 1, [&](const at::Tensor& part) { return reference->forward(part); }), true);
}

RANKS_TEST(Pipeline, WrongSplitPointsAreNamed, 3) {
  const PartialState state;
  const auto error = [](const PippyOptions& options) {
    return support::message_of<ConfigError>([&] { prepare_pippy(AnyNet(through), options); });
  };
  EXPECT_THAT(error({.split_points = "layer1"}), HasSubstr("found 1 split points, expected 2 for 3 processes"));
  EXPECT_THAT(error({.split_points = {"layer1", "layer9"}}),
              HasSubstr("'layer9' names no module with parameters, expected one of (or a module that contains some of) "
                        "layer0, layer1, layer2, layer3"));
  EXPECT_THAT(error({.split_points = {"layer2", "layer1"}}), HasSubstr("'layer1' leaves the stage before it empty"));
  EXPECT_THAT(error({.split_points = {"layer0", "layer1"}}), HasSubstr("'layer0' leaves the stage before it empty"));
  EXPECT_THAT(error({.num_chunks = -1}), HasSubstr("num_chunks is -1"));
  EXPECT_THAT(error({.no_split_module_classes = {"Linear", "Linaer"}}),
              HasSubstr("no_split_module_classes names 'Linaer', which is no class of a module of this model"));
  EXPECT_THAT(error({.balance = PipelineBalance::time}), HasSubstr("no example inputs were given"));
  EXPECT_THAT(support::message_of<ConfigError>([] { prepare_pippy(nn::Linear(2, 2)); }),
              HasSubstr("has 1 parts that can be a stage"));
  EXPECT_THAT(prepare_pippy(AnyNet(through), {.split_points = {"layer1", "layer2"}}).split_points(),
              ElementsAre("layer1", "layer2"));
}

RANKS_TEST(Pipeline, DifferentModelsAreFoundBeforeAnythingRuns, 2) {
  const PartialState state;
  EXPECT_THROW(prepare_pippy(support::Gpt(61, 24, rank() == 0 ? 3 : 4)), ShapeError);
}

at::Tensor half_of(const at::Tensor& x) { return x / 2; }
TORCH_LIBRARY_FRAGMENT(pipeline_test, m) {
  m.def("half_of(Tensor x) -> Tensor");
  m.impl("half_of", c10::DispatchKey::CPU, TORCH_FN(half_of));
}

/// The rank that has no values can't go on; it says why, and those that have learn it from it.
RANKS_TEST(Pipeline, OperatorsWithoutAKernelForSizesAreNamed, 2) {
  const PartialState state;
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("pipeline_test::half_of", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const auto forward = [&](AnyNetImpl& net, const at::Tensor& x) { return through(net, op.call(net.layers[0](x))); };
  const auto x = torch::randn({4, 8});
  EXPECT_THAT(support::message_of<ConfigError>([&] { prepare_pippy(AnyNet(forward), {}, x); }),
              HasSubstr("operator pipeline_test::half_of has no kernel that works out sizes without values"));
  auto pipeline = prepare_pippy(AnyNet(forward));
  std::string message;
  try {
    pipeline(x);
    pipeline(x);  // rank 0 runs the operator itself; it hears of it in the next call at the latest
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("operator pipeline_test::half_of has no kernel")) << "rank " << rank();
}

RANKS_TEST(Pipeline, AutocastIsRefused, 2) {
  const PartialState state;
  auto pipeline = prepare_pippy(AnyNet(through));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_THAT(support::message_of<ConfigError>([&] { pipeline(torch::randn({4, 8})); }), HasSubstr("autocast is on"));
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

/// The text of the CommError with which calls end. Nobody waits for the group's timeout, which comes after the deadline
/// of the ranks.
std::string comm_error_of(const std::function<void()>& calls) { return support::message_of<CommError>(calls); }

RANKS_TEST(Pipeline, RanksThatRunDifferentProgramsAreNamed, 2, 3) {
  const PartialState state;
  const auto forward = [](AnyNetImpl& net, const at::Tensor& x) {
    return through(net, is_last() ? torch::cat({x, x}) : x);
  };
  auto pipeline = prepare_pippy(AnyNet(forward));
  const auto text = comm_error_of([&] {
    for (int i = 0; i < 3; ++i) pipeline(torch::randn({4, 8}));
  });
  EXPECT_THAT(text, HasSubstr("The ranks don't run the same program")) << "rank " << rank();
}

/// A rank that one expects nothing of any more, or one that expects nothing: the end of the call is compared as well.
RANKS_TEST(Pipeline, RanksThatSendMoreOrLessAreNamed, 2) {
  const PartialState state;
  const auto forward = [](AnyNetImpl& net, const at::Tensor& x) {
    return rank() == 0 ? net.layers[0](x) + 1 : through(net, x);
  };
  auto pipeline = prepare_pippy(AnyNet(forward));
  const auto text = comm_error_of([&] {
    for (int i = 0; i < 3; ++i) pipeline(torch::randn({4, 8}));
  });
  EXPECT_THAT(text, HasSubstr("The ranks don't run the same program")) << "rank " << rank();
}

void die_in_the_third_call(int64_t victim) {
  const PartialState state;
  auto pipeline = prepare_pippy(AnyNet(through));
  const auto text = comm_error_of([&] {
    for (int call = 0; call < 400; ++call) {
      if (rank() == victim && call == 3) ::raise(SIGKILL);
      pipeline(torch::randn({6, 8}));
    }
  });
  EXPECT_THAT(text, HasSubstr("rank " + std::to_string(victim))) << text;
}

void others_hear_of(const std::string& test, int64_t victim) {
  const auto results = support::run_test_in_ranks(test, {.world_size = 3, .deadline = std::chrono::seconds(120)});
  for (int64_t r = 0; r < 3; ++r) {
    const auto& result = results[static_cast<size_t>(r)];
    if (r == victim) EXPECT_EQ(result.signal, SIGKILL);
    else EXPECT_EQ(result.exit_code, 0) << "rank " << r << "\n" << result.output;
  }
}

TEST(Pipeline, AKilledRankIsNamed) {
  if (support::is_rank()) return die_in_the_third_call(1);
  others_hear_of("Pipeline.AKilledRankIsNamed", 1);
}

TEST(Pipeline, AKilledLastRankIsNamed) {
  if (support::is_rank()) return die_in_the_third_call(2);
  others_hear_of("Pipeline.AKilledLastRankIsNamed", 2);
}

RANKS_TEST(Pipeline, AnExceptionOfOneRankReachesAll, 3) {
  const PartialState state;
  const auto forward = [](AnyNetImpl& net, const at::Tensor& x) {
    if (rank() == 1) throw std::runtime_error("the cat walked over the keyboard");
    return through(net, x);
  };
  auto pipeline = prepare_pippy(AnyNet(forward));
  const auto x = torch::randn({6, 8});
  if (rank() == 1) {
    EXPECT_THROW(pipeline(x), std::runtime_error);
    return;
  }
  const auto text = comm_error_of([&] {
    for (int i = 0; i < 3; ++i) pipeline(x);
  });
  EXPECT_THAT(text, HasSubstr("the cat walked over the keyboard"));
}

TEST(Pipeline, OneProcessRunsThePlainForward) {
  const PartialState state;
  auto model = same_everywhere([] { return models::GPT2LMHeadModel(gpt2()); });
  auto pipeline = prepare_pippy(model, {.num_chunks = 3, .gather_output = true}, ids(2));
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(torch::equal(pipeline(ids(5)), model->forward(ids(5))));
  EXPECT_EQ(pipeline.report().stages.size(), 1U);
  EXPECT_EQ(pipeline.report().held_bytes, pipeline.report().model_bytes);
}

}  // namespace
