/// Models that know nothing of the engine: same results, bit for bit, when all their parameters come and go, also after
/// every single operator (paranoid).

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "residency_support.hpp"
#include "small_gpt.hpp"

namespace {

using namespace residency_test;
namespace nn = torch::nn;

struct Result {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class Forward>
Result run(const std::shared_ptr<nn::Module>& module, const at::Tensor& input, const Forward& forward) {
  module->zero_grad();
  torch::manual_seed(3);
  auto x = input.detach().clone();
  if (x.is_floating_point()) x.requires_grad_();
  Result result;
  result.output = forward(x);
  (result.output * torch::linspace(-1, 1, result.output.numel()).view(result.output.sizes())).sum().backward();
  if (x.requires_grad()) result.input_gradient = x.grad().clone();
  for (const auto& p : module->parameters())
    result.gradients.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  return result;
}

void expect_same(const Result& a, const Result& b, const std::string& what) {
  EXPECT_TRUE(torch::equal(a.output, b.output)) << what;
  if (a.input_gradient.defined()) {
    EXPECT_TRUE(torch::equal(a.input_gradient, b.input_gradient)) << what;
  }
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    ASSERT_EQ(a.gradients[i].defined(), b.gradients[i].defined()) << what << " gradient " << i;
    if (a.gradients[i].defined()) {
      EXPECT_TRUE(torch::equal(a.gradients[i], b.gradients[i])) << what << " gradient " << i;
    }
  }
}

/// Plain, with units that go after use, and paranoid; `forward(x)` uses the module.
template <class Module, class Forward>
void check(Module module, const at::Tensor& input, const Forward& forward, bool stateful = false) {
  std::vector<at::Tensor> buffers;
  for (const auto& b : module->buffers()) buffers.push_back(b.clone());
  const auto restore = [&] {
    torch::NoGradGuard no_grad;
    size_t i = 0;
    for (auto& b : module->buffers()) b.copy_(buffers[i++]);
  };
  const Result plain = run(module.ptr(), input, forward);
  auto engine = shard_children(module.ptr(), {.prefetch = 1, .evict_after_use = true});
  if (stateful) restore();
  for (int round = 0; round < 3; ++round) {
    restore();
    engine->release();
    expect_same(plain, run(module.ptr(), input, forward), "sharded, round " + std::to_string(round));
  }
  residency::set_paranoid(true);
  restore();
  engine->release();
  const auto before = residency::stats().faults;
  expect_same(plain, run(module.ptr(), input, forward), "paranoid");
  residency::set_paranoid(false);
  EXPECT_GT(residency::stats().faults, before);
}

TEST(ResidencyModels, Transformer) {
  nn::Sequential model(support::Block(32, 4), support::Block(32, 4), support::Block(32, 4));
  check(model, torch::randn({2, 8, 32}), [&](const at::Tensor& x) { return model->forward(x); });
}

TEST(ResidencyModels, ConvolutionsAndBatchNorm) {
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                       nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 4, 3)),
                       nn::GroupNorm(nn::GroupNormOptions(2, 4)), nn::PReLU());
  check(
      model, torch::randn({2, 3, 10, 10}), [&](const at::Tensor& x) { return model->forward(x); }, true);
}

struct RecurrentImpl : nn::Module {
  RecurrentImpl()
      : lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(8, 16).num_layers(2)))),
        gru(register_module("gru", nn::GRU(nn::GRUOptions(16, 8)))) {}
  at::Tensor forward(const at::Tensor& x) { return std::get<0>(gru->forward(std::get<0>(lstm->forward(x)))); }
  nn::LSTM lstm;
  nn::GRU gru;
};
TORCH_MODULE(Recurrent);

TEST(ResidencyModels, FlatWeightsOfRecurrentLayers) {
  Recurrent model;
  check(model, torch::randn({5, 3, 8}), [&](const at::Tensor& x) { return model->forward(x); });
}

struct AttentionImpl : nn::Module {
  AttentionImpl()
      : attention(register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(32, 4)))),
        encoder(register_module("encoder",
                                nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(32, 4).dropout(0.1)))),
        bilinear(register_module("bilinear", nn::Bilinear(nn::BilinearOptions(32, 32, 4)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = encoder->forward(std::get<0>(attention->forward(x, x, x)));
    return bilinear->forward(y, x);
  }
  nn::MultiheadAttention attention;
  nn::TransformerEncoderLayer encoder;
  nn::Bilinear bilinear;
};
TORCH_MODULE(Attention);

TEST(ResidencyModels, AttentionDropoutAndBilinear) {
  Attention model;
  check(model, torch::randn({5, 3, 32}), [&](const at::Tensor& x) { return model->forward(x); });
}

/// One embedding used at both ends and twice in between, and a layer that is applied three times.
struct SharedImpl : nn::Module {
  SharedImpl()
      : embedding(register_module("embedding", nn::Embedding(20, 16))),
        layer(register_module("layer", nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& ids) {
    auto x = embedding(ids);
    for (int i = 0; i < 3; ++i) x = torch::tanh(layer(x)) + embedding(ids);
    return torch::matmul(x, embedding->weight.t());
  }
  nn::Embedding embedding;
  nn::Linear layer;
};
TORCH_MODULE(Shared);

TEST(ResidencyModels, TiedWeightsAndParametersUsedTwice) {
  Shared model;
  check(model, torch::randint(0, 20, {3, 4}), [&](const at::Tensor& ids) { return model->forward(ids); });
}

TEST(ResidencyModels, ViewsAndSavedVariablesFaultIn) {
  nn::Sequential model(nn::Linear(6, 6), nn::Linear(6, 6));
  auto first = model->children()[0]->as<nn::Linear>(), second = model->children()[1]->as<nn::Linear>();
  // A view that is made before its bytes go, and used after.
  check(model, torch::randn({4, 6}), [&](const at::Tensor& x) {
    const auto half = first->weight.narrow(0, 0, 3).t();
    const auto chunks = second->weight.unbind(0);
    auto y = torch::relu(model->forward(x));
    return torch::matmul(y, half).sum(1, true) * chunks[2] +
           second->weight.view({36}).slice(0, 0, 6) * torch::stack(chunks).sum(0);
  });
}

TEST(ResidencyModels, FrozenParametersAmongTrainedOnes) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 2));
  for (auto& p : model->children()[2]->parameters()) p.requires_grad_(false);
  check(model, torch::randn({4, 6}), [&](const at::Tensor& x) { return model->forward(x); });
}

TEST(ResidencyModels, AutocastKeepsNoEvictedWeightsAlive) {
  nn::Sequential model(nn::Linear(64, 64), nn::Linear(64, 64));
  const auto forward = [&](const at::Tensor& x) {
    struct Region {
      Region() { at::autocast::set_autocast_enabled(at::kCPU, true), at::autocast::set_autocast_cache_enabled(false); }
      ~Region() {
        at::autocast::set_autocast_enabled(at::kCPU, false), at::autocast::set_autocast_cache_enabled(true),
            at::autocast::clear_cache();
      }
    } region;
    return model->forward(x).to(torch::kFloat);
  };
  check(model, torch::randn({4, 64}), forward);
}

TEST(ResidencyModels, InferenceMode) {
  nn::Sequential model(support::Block(32, 4), support::Block(32, 4));
  const auto x = torch::randn({2, 8, 32});
  at::Tensor plain;
  {
    c10::InferenceMode inference;
    plain = model->forward(x);
  }
  auto engine = shard_children(model.ptr(), {.prefetch = 1, .evict_after_use = true});
  c10::InferenceMode inference;
  for (const bool paranoid : {false, true}) {
    residency::set_paranoid(paranoid);
    for (int round = 0; round < 3; ++round) EXPECT_TRUE(torch::equal(model->forward(x), plain));
  }
  residency::set_paranoid(false);
}

TEST(ResidencyModels, SecondBackwardAndGradientOfGradient) {
  nn::Sequential model(nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 1));
  const auto x = torch::randn({4, 6});
  const auto penalty = [&] {
    auto input = x.clone().requires_grad_();
    const auto y = model->forward(input).sum();
    const auto gradient = torch::autograd::grad({y}, {input}, {}, true, true)[0];
    model->zero_grad();
    (gradient.pow(2).sum() + y).backward({}, /*keep_graph=*/true);
    (gradient.pow(2).sum() + y).backward();
    std::vector<at::Tensor> result;
    for (const auto& p : model->parameters()) result.push_back(p.grad().clone());
    return result;
  };
  const auto plain = penalty();
  auto engine = shard_children(model.ptr(), {.prefetch = 1, .evict_after_use = true});
  for (const bool paranoid : {false, true}) {
    residency::set_paranoid(paranoid);
    const auto sharded = penalty();
    for (size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(torch::equal(plain[i], sharded[i])) << i << " paranoid " << paranoid;
  }
  residency::set_paranoid(false);
}

TEST(ResidencyModels, InPlaceTrainingOnAbsentParameters) {
  const auto make = [] {
    torch::manual_seed(1);
    return nn::Sequential(nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 1));
  };
  const auto train = [](nn::Sequential& model) {
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::manual_seed(2);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      model->forward(torch::randn({4, 6})).pow(2).sum().backward();
      optimizer.step();
    }
  };
  auto plain = make(), sharded = make(), paranoid = make();
  train(plain);
  auto engine = shard_children(sharded.ptr(), {.prefetch = 1, .evict_after_use = true});
  train(sharded);
  engine->release();
  auto engine2 = shard_children(paranoid.ptr(), {.prefetch = 1, .evict_after_use = true});
  residency::set_paranoid(true);
  train(paranoid);
  residency::set_paranoid(false);
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(plain->parameters()[i], sharded->parameters()[i])) << i;
    EXPECT_TRUE(torch::equal(plain->parameters()[i], paranoid->parameters()[i])) << i;
  }
}

TEST(ResidencyModels, ScriptModulesFaultInAlike) {
  torch::jit::Module script("scripted");
  script.register_parameter("weight", torch::randn({5, 5}), false);
  script.register_parameter("bias", torch::randn({5}), false);
  script.define(R"(
    def forward(self, x):
        y = torch.matmul(x, self.weight) + self.bias
        if bool(y.sum() > 0):
            y = torch.relu(y)
        return torch.matmul(y, self.weight.t())
  )");
  const auto x = torch::randn({3, 5});
  const auto forward = [&] { return script.forward({x}).toTensor(); };
  const auto plain = forward();
  residency::Residency engine({.prefetch = 0});
  add_unit(engine, "root", ModelRef(script).parameters(),
           [](at::Tensor bytes) { return std::make_unique<CountingHome>(std::move(bytes)); });
  for (const bool paranoid : {false, true}) {
    residency::set_paranoid(paranoid);
    for (int round = 0; round < 4; ++round)
      EXPECT_TRUE(torch::equal(forward(), plain));  // also once the profiling executor has optimised it
    engine.release();
  }
  residency::set_paranoid(false);
}

}  // namespace
