#include "accelerate/residency/recompute.hpp"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <thread>

#include "accelerate/utils/error.hpp"
#include "counting_allocator.hpp"
#include "message_of.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"

using namespace accelerate;

namespace {

namespace nn = torch::nn;
using at::Tensor;

/// The tensors are tiny: on a busy machine OpenMP's threads cost these tests fifty times what they compute.
const bool one_thread = (at::set_num_threads(1), true);

/// Equal bit for bit: the second run executes the same kernels on the same values in the same thread.
void expect_same(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(found[i].defined() && expected[i].defined()) << "tensor " << i;
    EXPECT_TRUE(torch::equal(found[i], expected[i]))
        << "tensor " << i << " differs by " << (found[i] - expected[i]).abs().max().item<double>();
  }
}

/// The loss of one training step and its gradients with respect to `x` and all parameters, from a fixed seed.
std::vector<Tensor> step(nn::Module& model, const Tensor& x, const std::function<Tensor(const Tensor&)>& forward) {
  torch::manual_seed(7);
  model.zero_grad();
  auto input = x.detach().clone().requires_grad_();
  const auto loss = forward(input).pow(2).mean();
  loss.backward();
  std::vector<Tensor> result{loss.detach(), input.grad()};
  for (const auto& p : model.parameters()) result.push_back(p.grad().clone());
  result.push_back(torch::rand({4}));  // the generator goes on where it would have
  return result;
}

nn::Sequential mlp(int64_t width = 32, double dropout = 0.3) {
  return nn::Sequential(nn::Linear(width, 2 * width), nn::GELU(), nn::Dropout(dropout), nn::Linear(2 * width, width),
                        nn::LayerNorm(nn::LayerNormOptions({width})));
}

/// Plain, captured, given as an argument, without early stop: all the same numbers.
void expect_checkpoint_changes_nothing(nn::Module& model, const Tensor& x,
                                       const std::function<Tensor(const Tensor&)>& forward) {
  const auto plain = step(model, x, forward);
  expect_same(step(model, x, [&](const Tensor& in) { return checkpoint([&forward, in] { return forward(in); }); }),
              plain);
  expect_same(step(model, x, [&](const Tensor& in) { return checkpoint(forward, {}, in); }), plain);
  expect_same(step(model, x, [&](const Tensor& in) { return checkpoint(forward, {.early_stop = false}, in); }), plain);
}

TEST(Checkpoint, MlpWithDropout) {
  auto model = mlp();
  expect_checkpoint_changes_nothing(*model, torch::randn({8, 32}), [&](const Tensor& x) { return model->forward(x); });
}

struct BlockImpl : nn::Module {
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  int64_t heads;
  explicit BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) {
    auto parts = qkv(norm1(x)).chunk(3, -1);
    for (auto& part : parts) part = part.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.1, true);
    const auto h = x + out(attended.transpose(1, 2).reshape(x.sizes()));
    return h + torch::dropout(down(torch::gelu(up(norm2(h)))), 0.1, true);
  }
};
TORCH_MODULE(Block);

TEST(Checkpoint, TransformerBlockWithAttention) {
  auto model = Block(32, 4);
  expect_checkpoint_changes_nothing(*model, torch::randn({2, 16, 32}),
                                    [&](const Tensor& x) { return model->forward(x); });
}

TEST(Checkpoint, ConvolutionAndBatchNormMoveTheRunningStatisticsTwice) {
  auto norm = nn::BatchNorm2d(8);
  auto model = nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), norm, nn::ReLU(nn::ReLUOptions().inplace(true)),
                              nn::Conv2d(nn::Conv2dOptions(8, 4, 3)));
  const auto x = torch::randn({4, 3, 12, 12});
  expect_checkpoint_changes_nothing(*model, x, [&](const Tensor& in) { return model->forward(in); });
  norm->reset_running_stats();
  step(*model, x, [&](const Tensor& in) { return model->forward(in); });
  step(*model, x, [&](const Tensor& in) { return model->forward(in); });
  const auto twice = norm->running_mean.clone();
  norm->reset_running_stats();
  step(*model, x,
       [&](const Tensor& in) { return checkpoint([&, in] { return model->forward(in); }, {.early_stop = false}); });
  EXPECT_TRUE(torch::equal(norm->running_mean, twice));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

TEST(Checkpoint, Lstm) {
  auto model = nn::LSTM(nn::LSTMOptions(16, 24).num_layers(2).batch_first(true).dropout(0.2));
  expect_checkpoint_changes_nothing(*model, torch::randn({3, 9, 16}),
                                    [&](const Tensor& x) { return std::get<0>(model->forward(x)); });
}

struct Shards {
  Tensor a;
  std::vector<Tensor> more;
  int64_t count = 0;
  ACCELERATE_FIELDS(a, more, count)
};

TEST(Checkpoint, ReturnsAndTakesAnything) {
  const auto x = torch::randn({4}, torch::requires_grad()), y = torch::randn({4}, torch::requires_grad());
  const auto gradients = [&](const Tensor& loss) { return torch::autograd::grad({loss}, {x, y}); };
  const auto expected = gradients((x.exp() * y.sin()).sum());

  const auto [e, s] = checkpoint([=] { return std::tuple(x.exp(), y.sin()); });
  expect_same(gradients((e * s).sum()), expected);
  const auto list = checkpoint([=] { return std::vector{x.exp(), y.sin()}; });
  expect_same(gradients((list[0] * list[1]).sum()), expected);
  const auto pair =
      checkpoint([](const auto& p) { return std::pair(p.first.exp(), p.second.sin()); }, {}, std::pair(x, y));
  expect_same(gradients((pair.first * pair.second).sum()), expected);
  const auto pieces = checkpoint(
      [](const Shards& in, int64_t n) {
        return Shards{in.a.exp(), {in.more.at(0).sin()}, in.count + n};
      },
      {}, Shards{x, {y}, 3}, int64_t{4});
  EXPECT_EQ(pieces.count, 7);
  expect_same(gradients((pieces.a * pieces.more[0]).sum()), expected);
  Tensor out;
  checkpoint([&out, x, y, owned = std::make_unique<int>(1)] {  // returns nothing, can't be copied
    if (!out.defined()) out = (x.exp() * y.sin()).sum() * *owned;
    else (x.exp() * y.sin()).sum() * *owned;
  });
  expect_same(gradients(out), expected);
}

TEST(Checkpoint, StopsOnceTheLastSavedTensorIsThere) {
  const auto x = torch::randn({4}, torch::requires_grad());
  int begun = 0, ended = 0;
  const auto run = [&](bool early_stop) {
    begun = ended = 0;
    checkpoint(
        [&] {
          ++begun;
          const auto y = x.exp() + 1;  // exp saves its result, the addition nothing
          ++ended;
          return y;
        },
        {.early_stop = early_stop})
        .sum()
        .backward();
  };
  run(true);
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);
  run(false);
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 2);
}

TEST(Checkpoint, StopsBeforeANestedCheckpointThatNothingFollows) {
  const auto x = torch::randn({4}, torch::requires_grad());
  int outer = 0, inner = 0;
  checkpoint([&] {
    ++outer;
    const auto h = x.sin();
    return checkpoint([&inner, h] {
      ++inner;
      return h.exp() * 2;
    });
  })
      .sum()
      .backward();
  EXPECT_EQ(outer, 2);
  EXPECT_EQ(inner, 2)
      << "once in the first run, once for the inner checkpoint; the outer's second run stops in front of it";
}

TEST(Checkpoint, NestsToAnyDepth) {
  auto a = mlp(), b = mlp(), c = mlp(), d = mlp();
  auto all = nn::ModuleList(a, b, c, d);
  const auto x = torch::randn({4, 32});
  const auto plain =
      step(*all, x, [&](const Tensor& in) { return d->forward(c->forward(b->forward(a->forward(in)))); });
  for (const bool early_stop : {true, false}) {
    const CheckpointOptions options{.early_stop = early_stop};
    const auto nested = [&](const Tensor& in) {
      return checkpoint(
          [&, in] {
            const auto h = a->forward(in);
            return checkpoint(
                [&, h] {
                  const auto k = checkpoint([&](const Tensor& h) { return b->forward(h); }, options, h);
                  const auto l =
                      checkpoint([&, k] { return checkpoint([&, k] { return c->forward(k); }, options); }, options);
                  return d->forward(l);
                },
                options);
          },
          options);
    };
    expect_same(step(*all, x, nested), plain);
  }
}

TEST(Checkpoint, AnInnerOneKeepsNothingOfTheOuterOnes) {
  const auto x = torch::randn({1000}, torch::requires_grad());
  c10::weak_intrusive_ptr<c10::TensorImpl> captured{c10::intrusive_ptr<c10::TensorImpl>()}, given = captured;
  const auto y = checkpoint([&] {
    const auto h = x.sin();
    const auto k = x.cos();
    captured = c10::weak_intrusive_ptr<c10::TensorImpl>(h.getIntrusivePtr());
    given = c10::weak_intrusive_ptr<c10::TensorImpl>(k.getIntrusivePtr());
    return checkpoint([h] { return h.exp(); }) + checkpoint([](const Tensor& k) { return k.exp(); }, {}, k);
  });
  EXPECT_TRUE(captured.expired());
  EXPECT_TRUE(given.expired());
  expect_same(torch::autograd::grad({y.sum()}, {x}), {x.sin().exp() * x.cos() + x.cos().exp() * -x.sin()});
}

TEST(Checkpoint, RepeatsRandomNumbersAndPutsTheGeneratorBack) {
  const auto x = torch::ones({1000}, torch::requires_grad());
  const auto mask_and_gradient = [&](const CheckpointOptions& options) {
    torch::manual_seed(1);
    const auto y = checkpoint([=] { return torch::dropout(x, 0.5, true) * x; }, options);
    torch::rand({10});  // draws in between
    const auto before = at::detail::getDefaultCPUGenerator().get_state();
    const auto gradient = torch::autograd::grad({y.sum()}, {x})[0];
    EXPECT_EQ(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), before), options.preserve_rng_state);
    return std::pair(y.detach(), gradient);
  };
  const auto [mask, gradient] = mask_and_gradient({});
  EXPECT_TRUE(torch::equal(gradient, 2 * mask));
  const auto [other_mask, other_gradient] = mask_and_gradient({.preserve_rng_state = false});
  EXPECT_FALSE(torch::equal(other_gradient, 2 * other_mask));
}

TEST(Checkpoint, RepeatsTheModelsOwnRandomNumbers) {
  const auto x = torch::ones({1000}, torch::requires_grad());
  auto own = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto mask = [&] { return at::bernoulli(torch::full({1000}, 0.5), own); };
  mask();  // it is somewhere in its sequence
  // Nested, and with the default generator between.
  const auto y = checkpoint([=] {
    const auto z = checkpoint([=] { return x * mask() * x; });
    return z * torch::dropout(z, 0.5, true) * mask();
  });
  mask();
  const auto before = own.get_state();
  const auto gradient = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_TRUE(torch::equal(gradient, 4 * y)) << "y is x^4 where all masks let it through";
  EXPECT_GT(y.sum().item<float>(), 50);
  EXPECT_TRUE(torch::equal(own.get_state(), before));
}

TEST(Checkpoint, RunsAgainUnderTheAutocastStateOfTheFirstRun) {
  auto model = mlp(32, 0.0);
  const auto x = torch::randn({8, 32});
  std::vector<at::ScalarType> dtypes;
  const auto forward = [&](const Tensor& in) {
    const auto y = model->forward(in);
    dtypes.push_back(torch::mm(in, in.t()).scalar_type());
    return y;
  };
  const auto step_with = [&](bool with_checkpoint, bool backward_inside, bool cache) {
    model->zero_grad();
    auto input = x.clone().requires_grad_();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
    auto y = with_checkpoint ? checkpoint(forward, {.early_stop = false}, input) : forward(input);
    const auto leave = [] {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::set_autocast_cache_enabled(true);
    };
    if (!backward_inside) leave();
    y.to(at::kFloat).pow(2).sum().backward();
    if (backward_inside) leave();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    std::vector<Tensor> result{y.detach(), input.grad()};
    for (const auto& p : model->parameters()) result.push_back(p.grad().clone());
    return result;
  };
  for (const bool backward_inside : {false, true})
    for (const bool cache : {true, false}) {
      const auto plain = step_with(false, backward_inside, cache);
      dtypes.clear();
      expect_same(step_with(true, backward_inside, cache), plain);
      EXPECT_EQ(dtypes, (std::vector{at::kBFloat16, at::kBFloat16}));
    }
}

TEST(Checkpoint, NamesWhatDiffersInTheSecondRun) {
  const auto x = torch::randn({4, 4}, torch::requires_grad());
  const auto backward_of = [&](const std::function<Tensor(bool again)>& closure,
                               const CheckpointOptions& options = {}) {
    auto again = std::make_shared<bool>(false);
    const auto y = checkpoint([=] { return closure(std::exchange(*again, true)); }, options);
    y.sum().backward();
  };
  const auto message = [&](const std::function<Tensor(bool)>& closure, const CheckpointOptions& options = {}) {
    return support::message_of<ShapeError>([&] { backward_of(closure, options); });
  };
  const auto other_shape = [=](bool again) { return (again ? x.slice(0, 0, 2) : x).exp().sum(); };
  EXPECT_NE(message(other_shape)
                .find("at place 0 of 1 when it ran again in backward is a tensor [2, 4] Float on cpu, expected a "
                      "tensor [4, 4] Float on cpu"),
            std::string::npos)
      << message(other_shape);
  const auto other_dtype = [=](bool again) { return x.to(again ? at::kDouble : at::kFloat).exp().sum(); };
  EXPECT_NE(message(other_dtype).find("[4, 4] Double on cpu, expected a tensor [4, 4] Float"), std::string::npos);
  const auto fewer = [=](bool again) { return again ? x.exp() : x.exp().exp(); };
  EXPECT_NE(message(fewer).find("saved 1 tensors when it ran again in backward, expected 2"), std::string::npos)
      << message(fewer);
  EXPECT_NE(message(fewer, {.determinism_check = "none"}).find("saved 1 tensors"), std::string::npos);
  const auto more = [=](bool again) { return again ? x.exp().exp() : x.exp(); };
  EXPECT_NE(message(more, {.early_stop = false}).find("saved 2 tensors when it ran again in backward, expected 1"),
            std::string::npos);
  const auto nested_instead = [=](bool again) { return again ? checkpoint([=] { return x.exp(); }) : x.exp(); };
  EXPECT_NE(message(nested_instead).find("is a nested checkpoint, expected a tensor [4, 4] Float"), std::string::npos)
      << message(nested_instead);
  EXPECT_NO_THROW(backward_of([=](bool again) { return (again ? x.to(at::kDouble) : x).exp().sum(); },
                              {.determinism_check = "none"}));
  EXPECT_NE(support::message_of<ConfigError>([&] {
              checkpoint([=] { return x; }, {.determinism_check = "strict"});
            }).find("\"strict\""),
            std::string::npos);
  EXPECT_EQ(residency::saved_tensor_hooks_depth(), 0);
}

TEST(Checkpoint, RunsAgainInEachBackwardPass) {
  const auto x = torch::randn({4}, torch::requires_grad());
  int runs = 0;
  const auto y = checkpoint([&] { return ++runs, (x.exp() * x.sin()).sum(); });
  const auto first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true);
  EXPECT_EQ(runs, 2);
  expect_same(torch::autograd::grad({y}, {x}), first);
  EXPECT_EQ(runs, 3);
  EXPECT_THROW(torch::autograd::grad({y}, {x}), c10::Error) << "the graph is gone, as without checkpoint";
}

TEST(Checkpoint, GradientOfTheGradient) {
  auto model = mlp(16, 0.0);
  const auto x = torch::randn({4, 16}, torch::requires_grad());
  const auto penalty = [&](const Tensor& y) {
    model->zero_grad();
    const auto g = torch::autograd::grad({y.pow(2).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    (g.pow(2).sum() + y.sum()).backward({}, false, false, model->parameters());
    std::vector<Tensor> result;
    for (const auto& p : model->parameters()) result.push_back(p.grad().clone());
    return result;
  };
  const auto plain = penalty(model->forward(x));
  expect_same(penalty(checkpoint([&] { return model->forward(x); })), plain);
  expect_same(
      penalty(checkpoint([&](const Tensor& x) { return checkpoint([&, x] { return model->forward(x); }); }, {}, x)),
      plain);
}

TEST(Checkpoint, AClosureMayDifferentiateWithinItself) {
  const auto x = torch::randn({8}, torch::requires_grad()), w = torch::randn({8}, torch::requires_grad());
  const auto closure = [=] {
    const auto y = (x * w).sin().exp().sum();
    return torch::autograd::grad({y}, {x}, {}, true, true)[0].pow(2).sum() + y;
  };
  const auto expected = torch::autograd::grad({closure()}, {x, w});
  for (const bool early_stop : {true, false}) {
    expect_same(torch::autograd::grad({checkpoint(closure, {.early_stop = early_stop})}, {x, w}), expected);
    expect_same(torch::autograd::grad({checkpoint([=] { return checkpoint(closure, {.early_stop = early_stop}); },
                                                  {.early_stop = early_stop})},
                                      {x, w}),
                expected);
  }
}

TEST(Checkpoint, AnExceptionInTheSecondRunLeavesTheThreadAsItWas) {
  const auto x = torch::randn({4}, torch::requires_grad());
  int runs = 0;
  const auto y = checkpoint([&runs, x] {
    const auto h = torch::dropout(x.exp(), 0.5, true);
    if (++runs == 2) throw std::out_of_range("closure failed");
    return (h * h.sin()).sum();
  });
  const auto rng = at::detail::getDefaultCPUGenerator().get_state();
  const auto backward = [&] { return torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true); };
  EXPECT_EQ(support::message_of<std::out_of_range>(backward), "closure failed");
  EXPECT_EQ(residency::saved_tensor_hooks_depth(), 0);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), rng));
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_EQ(at::autocast::increment_nesting(), 1);
  at::autocast::decrement_nesting();
  EXPECT_NO_THROW(backward()) << "a retained graph can be tried again";
  EXPECT_THROW(checkpoint([]() -> Tensor { throw std::out_of_range("first run"); }), std::out_of_range);
  EXPECT_EQ(residency::saved_tensor_hooks_depth(), 0);
}

TEST(Checkpoint, HoldsNothingWhereNothingWasSavedOrNoGradientIsWanted) {
  const auto x = torch::randn({4}, torch::requires_grad());
  auto token = std::make_shared<int>(0);
  const auto y = checkpoint([token, x] { return x + 1; });
  EXPECT_EQ(token.use_count(), 1);
  expect_same(torch::autograd::grad({y.sum()}, {x}), {torch::ones({4})});
  const at::NoGradGuard off;
  const auto z = checkpoint([token, x] { return x.exp(); });
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_FALSE(z.requires_grad());
}

TEST(Checkpoint, LetsGoOfItsCapturesWithTheGraph) {
  const auto x = torch::randn({1000}, torch::requires_grad());
  for (const bool backward : {true, false}) {
    auto big = torch::randn({1000});
    const c10::weak_intrusive_ptr<c10::TensorImpl> weak(big.getIntrusivePtr());
    auto y = checkpoint([big, x] { return (x * big).exp().sum(); });
    big.reset();
    EXPECT_FALSE(weak.expired());
    if (backward) {
      y.backward();
      EXPECT_TRUE(weak.expired()) << "backward without retain_graph frees the closure";
    }
    y.reset();
    EXPECT_TRUE(weak.expired());
  }
}

TEST(Checkpoint, InPlaceChangesBeforeBackwardAreErrors) {
  auto weight = torch::randn({4}, torch::requires_grad());
  const auto x = torch::randn({4}, torch::requires_grad());
  {
    const auto y = checkpoint([=] { return (x * weight).exp().sum(); });
    const at::NoGradGuard off;
    weight.add_(1);  // an optimizer step
    EXPECT_NE(support::message_of<ShapeError>([&] { y.backward(); }).find("modified in place"), std::string::npos);
  }
  auto h = x * 2;
  const auto y = checkpoint([](const Tensor& h) { return (h + 1).exp().sum(); }, {}, h);  // no operator saves h
  h.add_(1);
  EXPECT_NE(support::message_of<c10::Error>([&] { y.backward(); }).find("modified by an inplace operation"),
            std::string::npos);
  auto counter = torch::zeros({4});
  const auto z = checkpoint([=] { return (x * counter.add_(1)).sum(); });  // can't be repeated: the counter goes on
  EXPECT_NE(support::message_of<ShapeError>([&] { z.backward(); }).find("after its closure ran again"),
            std::string::npos);
}

TEST(Checkpoint, ABackwardPassThatWantsLessLeavesNothingBehind) {
  auto& memory = support::CountingAllocator::install();
  const auto x = torch::randn({1 << 16}, torch::requires_grad()), w = torch::randn({1 << 16}, torch::requires_grad());
  const auto y = checkpoint([=] { return std::vector{x.exp().sin(), w.exp().sin()}; });
  const auto before = memory.live();
  const auto g =
      torch::autograd::grad({y[0].sum()}, {x}, {}, /*retain_graph=*/true);  // fills the slots of w's operators too
  EXPECT_EQ(memory.live() - before, g[0].numel() * 4);
}

TEST(Checkpoint, MemoryFallsToOneSegmentAndParametersAreNotCopied) {
  auto& memory = support::CountingAllocator::install();
  constexpr int64_t kLayers = 16, kRows = 512, kWidth = 64;
  std::vector<nn::Sequential> layers;
  for (int64_t i = 0; i < kLayers; ++i)
    layers.push_back(nn::Sequential(nn::Linear(kWidth, kWidth), nn::Tanh(), nn::Linear(kWidth, kWidth), nn::Tanh()));
  const auto x = torch::randn({kRows, kWidth});
  const auto measure = [&](bool with_checkpoint) {
    for (auto& layer : layers) {
      for (auto& p : layer->parameters()) p.mutable_grad() = torch::zeros_like(p);
    }
    const auto before = memory.live();
    auto h = x;
    for (auto& layer : layers)
      h = with_checkpoint ? checkpoint([layer](const Tensor& h) mutable { return layer->forward(h); }, {}, h)
                          : layer->forward(h);
    const auto loss = h.sum();
    h.reset();
    const auto after_forward = memory.live() - before;
    memory.reset_peak();
    loss.backward();
    return std::pair(after_forward, memory.peak() - before);
  };
  measure(false);  // what LibTorch allocates once
  const auto [plain, plain_peak] = measure(false);
  const auto [forward, peak] = measure(true);
  constexpr int64_t kTensor = kRows * kWidth * 4;
  EXPECT_GE(plain, 2 * kLayers * kTensor);
  // One tensor per layer boundary, and 8 KiB per layer for generator states while it runs.
  EXPECT_LE(forward, kLayers * kTensor + kLayers * 8192);
  EXPECT_LT(peak, plain_peak - (kLayers - 8) * kTensor);
  std::cout << "saved after forward " << plain / 1024 << " KiB plain, " << forward / 1024 << " KiB checkpointed; peak "
            << plain_peak / 1024 << " and " << peak / 1024 << " KiB\n";
}

/// Reads its saved tensor twice in backward.
struct ReadsTwice : torch::autograd::Function<ReadsTwice> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x.exp();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& g) {
    return {g[0] * context->get_saved_variables()[0].exp() + 0 * context->get_saved_variables()[0]};
  }
};

TEST(Checkpoint, OperatorsMayUnpackTwice) {
  const auto x = torch::randn({4}, torch::requires_grad());
  expect_same(torch::autograd::grad({checkpoint([=] { return ReadsTwice::apply(x); }).sum()}, {x}), {x.exp()});
}

TEST(Checkpoint, ThreadsHaveTheirOwnScopes) {
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&right, t] {
      for (int i = 0; i < 20; ++i) {
        const auto x = torch::full({16}, 0.01 * (t + i), torch::requires_grad());
        const auto y = checkpoint([x] {
          const auto h = x.sin();
          return checkpoint([h] { return h.exp(); }).sum();
        });
        const auto g = torch::autograd::grad({y}, {x})[0];
        right += torch::equal(g, x.sin().exp() * x.cos());
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 80);
}

TEST(Checkpoint, OneGraphFromSeveralThreads) {
  const auto x = torch::randn({64}, torch::requires_grad());
  const auto y = checkpoint([=] { return (x.sin().exp() * x.cos()).sum(); });
  const auto expected = torch::autograd::grad({y}, {x}, {}, true)[0];
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) right += torch::equal(torch::autograd::grad({y}, {x}, {}, true)[0], expected);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 80);
}

TEST(Checkpoint, ThreadsThatNeedTheSameRunWaitForIt) {
  // As autograd's device threads do in one backward pass: here by looking at a saved variable outside of any pass,
  // which all threads share.
  const auto x = torch::randn({64}, torch::requires_grad());
  const auto y = checkpoint([=] { return x.sin(); });
  auto* node = dynamic_cast<torch::autograd::generated::SinBackward0*>(y.grad_fn().get());
  ASSERT_TRUE(node);
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) right += torch::equal(node->self_.unpack(), x);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 800);
}

TEST(Checkpoint, BackwardInAnotherThread) {
  const auto x = torch::randn({64}, torch::requires_grad());
  const auto y = checkpoint([=] { return torch::dropout(x.sin(), 0.0, true).exp().sum(); });
  std::thread([&] { y.backward(); }).join();
  EXPECT_TRUE(torch::equal(x.grad(), x.sin().exp() * x.cos()));
}

// The hooks by themselves.

struct CountingHooks : residency::SavedTensorHooks {
  std::unique_ptr<residency::PackedTensor> pack(const Tensor& tensor) override {
    ++packed;
    pointers.push_back(tensor.data_ptr());
    return residency::keep_in_place(tensor);
  }
  int packed = 0;
  std::vector<void*> pointers;
};

TEST(SavedTensorHooks, TheInnermostScopeOfTheThreadIsAsked) {
  const auto x = torch::randn({4}, torch::requires_grad());
  const auto outer = std::make_shared<CountingHooks>(), inner = std::make_shared<CountingHooks>();
  Tensor y;
  {
    const residency::SavedTensorHooksScope scope(outer);
    y = x.exp();
    {
      const residency::SavedTensorHooksScope inside(inner);
      y = y.sin();
    }
    {
      const residency::SavedTensorHooksScope none(nullptr);
      y = y.sin();
    }
    std::thread([&] { x.exp(); }).join();
  }
  EXPECT_EQ(outer->packed, 1);
  EXPECT_EQ(inner->packed, 1);
  EXPECT_EQ(residency::current_saved_tensor_hooks(), nullptr);
  const auto g = torch::autograd::grad({y.sum()}, {x})[0];
  const auto plain = x.exp().sin().sin();
  EXPECT_TRUE(torch::equal(g, torch::autograd::grad({plain.sum()}, {x})[0]));
  EXPECT_EQ(outer.use_count(), 1) << "autograd holds what was packed, not the hooks";
}

TEST(SavedTensorHooks, AKeptTensorIsTheSameMemoryAndGuardedAgainstChanges) {
  auto x = torch::randn({4}, torch::requires_grad());
  const auto hooks = std::make_shared<CountingHooks>();
  const auto make = [&] {
    const residency::SavedTensorHooksScope scope(hooks);
    return (x * x).sum();
  };
  auto y = make();
  EXPECT_EQ(hooks->pointers.at(0), x.data_ptr());
  y.backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * x));
  y = make();
  {
    const at::NoGradGuard off;
    x.add_(1);
  }
  EXPECT_NE(support::message_of<ShapeError>([&] {
              y.backward();
            }).find("found a tensor saved for backward at version 1, expected version 0"),
            std::string::npos);
}

/// An engine of somebody else, such as Python's: default hooks of its own, counts what goes through.
struct ForeignEngine : torch::autograd::Engine {
  struct Kept : torch::autograd::SavedVariableHooks {
    explicit Kept(int& unpacked) : unpacked(unpacked) {}
    void call_pack_hook(const Tensor& t) override { tensor = t.detach(); }
    Tensor call_unpack_hook() override { return ++unpacked, tensor; }
    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
      return std::nullopt;
    }
    Tensor tensor;
    int& unpacked;
  };
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep, bool create,
                                         bool accumulate, const torch::autograd::edge_list& outputs) override {
    ++executed;
    return torch::autograd::Engine::get_base_engine().execute(roots, inputs, keep, create, accumulate, outputs);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hooks ? std::make_unique<Kept>(unpacked) : nullptr;
  }
  int executed = 0, unpacked = 0;
  bool hooks = true;
};

TEST(SavedTensorHooks, AnEngineInstalledBySomebodyElseGoesOnWorking) {
  static auto* foreign = new ForeignEngine;
  const auto x = torch::randn({4}, torch::requires_grad());
  const auto expected = x.sin().exp() * x.cos();
  checkpoint([=] { return x.sin().exp().sum(); }).backward();  // ours is there
  torch::autograd::set_default_engine_stub([]() -> torch::autograd::Engine& { return *foreign; });
  foreign->executed = 0;
  const auto y = checkpoint([=] { return x.sin().exp().sum(); });  // ours goes in front again
  expect_same(torch::autograd::grad({y}, {x}), {expected});
  EXPECT_EQ(foreign->executed, 1) << "what is not about hooks goes to the other engine";
  EXPECT_EQ(foreign->unpacked, 0);
  expect_same(torch::autograd::grad({x.sin().exp().sum()}, {x}), {expected});
  EXPECT_EQ(foreign->unpacked, 2) << "its hooks hold where there are none of ours";
  foreign->hooks = false;
}

}  // namespace
