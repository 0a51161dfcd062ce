// Data parallel training against one process on the same global batch: after every step the parameters must be the
// same. Each rank computes the one-process answer by itself, with nothing of this library.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "message_of.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::AllOf;
using testing::HasSubstr;

namespace {

constexpr int64_t kRows = 4;   ///< per rank and micro-step
constexpr int64_t kSteps = 6;  ///< optimizer steps of each comparison

/// Micro-step `step`: the rows of all ranks.
torch::Tensor rows(int64_t step, int64_t width, int64_t ranks = world_size()) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + static_cast<uint64_t>(step));
  return torch::randn({ranks * kRows, width}, generator);
}
torch::Tensor share(const torch::Tensor& all, int64_t r = rank()) { return all.slice(0, r * kRows, (r + 1) * kRows); }

std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

double distance(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

struct NetOptions {
  bool tied = false, frozen = false, norm = false, heads = false;
};

/// A small network with everything that makes averaging hard, as wanted.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const NetOptions& options) : options(options) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", torch::nn::Linear(6, 6));
    if (options.tied) second->weight = second->register_parameter("weight2", first->weight);
    if (options.norm) norm = register_module("norm", torch::nn::BatchNorm1d(6));
    left = register_module("left", torch::nn::Linear(6, 2));
    if (options.heads) right = register_module("right", torch::nn::Linear(6, 2));
    if (options.frozen) first->bias.set_requires_grad(false);
  }
  torch::Tensor forward(torch::Tensor x, bool use_right = false) {
    x = torch::tanh(first(x));
    if (norm) x = norm(x);
    // With weights tied the own weight of `second` is a leftover that nobody trains.
    x = torch::tanh(torch::nn::functional::linear(x, options.tied ? first->weight : second->weight, second->bias));
    return use_right ? right(x) : left(x);
  }
  std::vector<torch::Tensor> trained() {
    std::vector<torch::Tensor> result;
    std::set<at::TensorImpl*> seen;
    for (auto& parameter : parameters())
      if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) result.push_back(parameter);
    return result;
  }
  NetOptions options;
  torch::nn::Linear first{nullptr}, second{nullptr}, left{nullptr}, right{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor loss_of(const torch::Tensor& output) { return (output - 0.3).pow(2).mean(); }
torch::optim::SGD sgd(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

void expect_equal_on_all_ranks(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    const auto all = gather(parameter.detach().unsqueeze(0));
    for (int64_t r = 1; r < world_size(); ++r)
      EXPECT_TRUE(all[r].equal(all[0])) << "rank " << r << " has other parameters than rank 0";
  }
}

struct Case {
  const char* name;
  DistributedDataParallelKwargs kwargs = {};
  NetOptions net = {};
  int64_t accumulate = 1;
  double tolerance = 1e-6;
  bool sync_each_batch = false;
  bool own_forward = false;  ///< the module's own is called, in LibTorch's way
};

/// Does this rank use the right head in this step? None at all does in step 2, so that one head has no gradient
/// anywhere.
bool uses_right(const NetOptions& net, int64_t step, int64_t r) {
  return net.heads && step != 2 && (step + r) % 2 == 0;
}

void compare_with_one_process(const Case& test) {
  SCOPED_TRACE(test.name);
  Accelerator accelerator(
      {.gradient_accumulation_plugin =
           GradientAccumulationPlugin{.num_steps = test.accumulate, .sync_each_batch = test.sync_each_batch},
       .kwargs_handlers = {test.kwargs}});
  Net net(test.net), alone(test.net);
  // Ranks that begin with other values must be given rank 0's.
  if (rank() != 0) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.add_(0.1 * static_cast<double>(rank()));
  }
  auto alone_optimizer = sgd(alone->trained());
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
  for (int64_t step = 0; step < kSteps * test.accumulate; ++step) {
    const auto all = rows(step, 6);
    {
      auto scope = accelerator.accumulate(model);
      const bool right = uses_right(test.net, step, rank());
      accelerator.backward(loss_of(test.own_forward ? net->forward(share(all), right) : model(share(all), right)));
      if (test.sync_each_batch) {
        const auto gradients = gather(net->left->bias.grad().unsqueeze(0));
        EXPECT_TRUE(gradients[0].equal(gradients[1])) << "sync_each_batch did not average micro-step " << step;
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    // One process: the mean of the ranks' losses. Batch statistics are a rank's own, running ones rank 0's.
    std::vector<torch::Tensor> first_buffers;
    const auto before = copies(alone->buffers());
    for (int64_t r = 0; r < world_size(); ++r) {
      for (size_t i = 0; i < before.size(); ++i) alone->buffers()[i].copy_(before[i]);
      auto loss = loss_of(alone->forward(share(all, r), uses_right(test.net, step, r)));
      (loss / static_cast<double>(world_size() * test.accumulate)).backward();
      if (r == 0) first_buffers = copies(alone->buffers());
    }
    for (size_t i = 0; i < before.size(); ++i) alone->buffers()[i].copy_(first_buffers[i]);
    if ((step + 1) % test.accumulate == 0) {
      alone_optimizer.step();
      alone_optimizer.zero_grad();
    }
    ASSERT_LE(distance(net->trained(), alone->trained()), test.tolerance) << "after micro-step " << step;
    if (test.tolerance > 1e-6 && step + 1 == kSteps) {
      EXPECT_GT(distance(net->trained(), alone->trained()), 1e-6) << "nothing was compressed";
    }
  }
  EXPECT_GT(distance(alone->trained(), Net(test.net)->trained()), 0.01)
      << "nothing was learned, so nothing was compared";
  expect_equal_on_all_ranks(net->parameters());
  if (test.net.norm) {
    // The first evaluating forward takes rank 0's statistics: all ranks evaluate one model.
    torch::NoGradGuard no_grad;
    net->eval();
    model(share(rows(99, 6)));
    expect_equal_on_all_ranks(net->buffers());
    EXPECT_LE(distance(net->buffers(), alone->buffers()), 1e-6);
  }
}

}  // namespace

RANKS_TEST(Ddp, EqualsOneProcessAfterEveryStep, 2, 3) {
  const Case cases[] = {
      {.name = "plain"},
      {.name = "accumulation", .accumulate = 3},
      {.name = "accumulation, synchronised each time", .accumulate = 2, .sync_each_batch = true},
      {.name = "gradient_as_bucket_view", .kwargs = {.gradient_as_bucket_view = true}, .accumulate = 2},
      {.name = "static_graph", .kwargs = {.static_graph = true}},
      {.name = "static_graph, accumulation", .kwargs = {.static_graph = true}, .accumulate = 2},
      {.name = "static_graph, unused parameters", .kwargs = {.static_graph = true}, .net = {.tied = true}},
      {.name = "small buckets", .kwargs = {.bucket_cap_mb = 1}},
      {.name = "unused parameters", .kwargs = {.find_unused_parameters = true}, .net = {.heads = true}},
      {.name = "unused parameters, accumulation",
       .kwargs = {.find_unused_parameters = true},
       .net = {.heads = true},
       .accumulate = 2},
      {.name = "tied weights", .kwargs = {.find_unused_parameters = true}, .net = {.tied = true}},
      {.name = "frozen parameter", .net = {.frozen = true}},
      {.name = "batch norm", .net = {.norm = true}},
      {.name = "fp16 on the wire", .kwargs = {.comm_hook = DDPCommunicationHookType::fp16}, .tolerance = 1e-3},
      {.name = "own forward", .own_forward = true},
      {.name = "own forward, accumulation", .accumulate = 3, .own_forward = true},
      {.name = "own forward, gradient_as_bucket_view",
       .kwargs = {.gradient_as_bucket_view = true},
       .accumulate = 2,
       .own_forward = true},
      {.name = "own forward, static_graph", .kwargs = {.static_graph = true}, .accumulate = 2, .own_forward = true},
      {.name = "own forward, unused parameters",
       .kwargs = {.find_unused_parameters = true},
       .net = {.heads = true},
       .accumulate = 2,
       .own_forward = true},
      {.name = "own forward, batch norm", .net = {.norm = true}, .own_forward = true},
      {.name = "bf16 on the wire", .kwargs = {.comm_hook = DDPCommunicationHookType::bf16}, .tolerance = 1e-2},
  };
  for (const auto& test : cases) compare_with_one_process(test);
}

// The averages are the same either way: these options show in whose buffers ranks have, and where gradients lie.
RANKS_TEST(Ddp, BuffersAndBucketsAreAsAskedFor, 2) {
  for (const bool on : {false, true}) {
    Accelerator accelerator(
        {.kwargs_handlers = {DistributedDataParallelKwargs{.broadcast_buffers = on, .gradient_as_bucket_view = on}}});
    Net net(NetOptions{.norm = true});
    net->norm->running_mean.fill_(static_cast<double>(7 - rank()));
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
    EXPECT_TRUE(net->norm->running_mean.eq(7).all().item<bool>()) << "all begin with rank 0's";
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      accelerator.backward(loss_of(model(share(rows(step, 6)))));
      optimizer.step();
    }
    EXPECT_EQ(net->first->weight.grad().is_alias_of(net->second->weight.grad()), on) << "one bucket has both";
    const torch::NoGradGuard no_grad;
    net->eval();
    model(share(rows(99, 6)));
    const auto means = gather(net->norm->running_mean.unsqueeze(0));
    EXPECT_EQ(means[0].equal(means[1]), on);
  }
}

// The step is on the average, whoever calls backward, and however often for one forward.
RANKS_TEST(Ddp, EveryBackwardIsAveraged, 2, 3) {
  for (const bool facade : {true, false}) {
    SCOPED_TRACE(facade ? "accelerator.backward" : "loss.backward");
    Accelerator accelerator;
    Net net(NetOptions{}), alone(NetOptions{});
    auto alone_optimizer = sgd(alone->trained());
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
    const auto backward = [&](const torch::Tensor& loss) { facade ? accelerator.backward(loss) : loss.backward(); };
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto one = rows(3 * step, 6), two = rows(3 * step + 1, 6), three = rows(3 * step + 2, 6);
      const auto first = loss_of(model(share(one))), second = loss_of(model(share(two)));
      backward(first);
      backward(second);
      backward(loss_of(net->forward(share(three))));
      optimizer.step();
      optimizer.zero_grad();
      (loss_of(alone(one)) + loss_of(alone(two)) + loss_of(alone(three))).backward();
      alone_optimizer.step();
      alone_optimizer.zero_grad();
      ASSERT_LE(distance(net->trained(), alone->trained()), 1e-6) << "after step " << step;
    }
  }
}

RANKS_TEST(Ddp, WhatCannotBeAveragedIsNamed, 2) {
  {
    Accelerator accelerator;
    Net net(NetOptions{.heads = true});
    auto model = accelerator.prepare(net);
    accelerator.backward(loss_of(model(share(rows(0, 6)))));
    const auto text = message_of<ConfigError>([&] { model(share(rows(1, 6))); });
    EXPECT_THAT(text, HasSubstr("gave no gradient to 'right.weight', 'right.bias', expected"));
    EXPECT_THAT(text, HasSubstr("DistributedDataParallelKwargs{.find_unused_parameters = true}"));
    EXPECT_THAT(message_of<ConfigError>([&] {
                  accelerator.backward(loss_of(net->forward(share(rows(1, 6)))));
                  accelerator.backward(loss_of(net->forward(share(rows(1, 6)))));
                }),
                HasSubstr("'right.weight'"));
  }
  {  // also before what acts on gradients that were not averaged
    Accelerator accelerator;
    Net net(NetOptions{.heads = true});
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
    accelerator.backward(loss_of(model(share(rows(0, 6)))));
    const std::string expected = "step: the last backward gave no gradient to 'right.weight', 'right.bias', expected";
    EXPECT_THAT(message_of<ConfigError>([&] { accelerator.clip_grad_norm_(net->trained(), 1.0); }),
                HasSubstr(expected));
    EXPECT_THAT(message_of<ConfigError>([&, &optimizer = optimizer] { optimizer.step(); }), HasSubstr(expected));
  }
  {
    Accelerator accelerator({.kwargs_handlers = {DistributedDataParallelKwargs{.find_unused_parameters = true}}});
    Net net(NetOptions{.heads = true});
    auto model = accelerator.prepare(net);
    EXPECT_THAT(message_of<ConfigError>([&] { loss_of(net->forward(share(rows(0, 6)))).backward(); }),
                HasSubstr("expected m(x) with the prepared handle m, or accelerator.backward(loss)"));
  }
  {
    Accelerator accelerator;
    Net net(NetOptions{});
    auto model = accelerator.prepare(net);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  accelerator.join_uneven_inputs(
                      model, [&] { accelerator.backward(loss_of(net->forward(share(rows(0, 6))))); });
                }),
                HasSubstr("within join_uneven_inputs"));
  }
}

RANKS_TEST(Ddp, WhatIsTrainedButNotPreparedIsNamed, 2) {
  {
    Accelerator accelerator;
    Net net(NetOptions{});
    torch::nn::Linear other(2, 2);
    auto [model, optimizer] = accelerator.prepare(net, sgd(other->parameters()));
    EXPECT_THAT(
        message_of<ConfigError>([&] { accelerator.backward(loss_of(other(model(share(rows(0, 6)))))); }),
        AllOf(HasSubstr("parameter 0 of prepared optimizer 0, of shape [2, 2], has a gradient and belongs to no model"),
              HasSubstr("each of the 2 processes")));
  }
  {
    Accelerator accelerator;
    Net net(NetOptions{}), copy(NetOptions{});
    auto [model, optimizer] = accelerator.prepare(net, sgd(copy->trained()));
    const auto warned = support::warnings_of([&] {
      for (int64_t step = 0; step < 2; ++step) accelerator.backward(loss_of(model(share(rows(step, 6)))));
    });
    EXPECT_THAT(warned, HasSubstr("prepared optimizer 0 holds no parameter of a prepared model"));
    EXPECT_EQ(warned.find("prepared optimizer 0"), warned.rfind("prepared optimizer 0")) << "once";
  }
  Accelerator accelerator;
  Net net(NetOptions{});
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
  const std::vector<torch::Tensor> samples(4, torch::ones({6}));
  const auto train = [&](auto& loader) {
    return support::warnings_of([&] {
      for (auto& batch : loader) accelerator.backward(loss_of(model(batch)));
    });
  };
  auto prepared = accelerator.prepare(data::DataLoader(samples, {.batch_size = 2}));
  EXPECT_EQ(train(prepared), "");
  auto plain = data::DataLoader(samples, {.batch_size = 2});
  const auto warned = train(plain);
  if (rank() == 0) EXPECT_THAT(warned, HasSubstr("reads a DataLoader that was not prepared, while 2 processes train"));
  else EXPECT_EQ(warned, "");
  EXPECT_EQ(train(plain), "") << "once";
}

RANKS_TEST(Ddp, TwoModelsAndSeveralForwards, 2) {
  Accelerator accelerator;
  Net a(NetOptions{}), b(NetOptions{}), alone_a(NetOptions{}), alone_b(NetOptions{});
  auto alone_optimizer = sgd([&] {
    auto all = alone_a->trained();
    for (auto& p : alone_b->trained()) all.push_back(p);
    return all;
  }());
  auto [model_b, first, second, model_a] = accelerator.prepare(b, sgd(a->trained()), sgd(b->trained()), a);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto all = rows(step, 6), more = rows(step + 50, 6);
    // Both models in one graph, one of them twice.
    const auto loss = [](auto& one, auto& two, const torch::Tensor& x, const torch::Tensor& y) {
      return loss_of(one(x)) + loss_of(two(x)) + loss_of(two(y)).mul(0.5);
    };
    accelerator.backward(loss(model_a, model_b, share(all), share(more)));
    first.step(), second.step();
    first.zero_grad(), second.zero_grad();
    loss(alone_a, alone_b, all, more).backward();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
    ASSERT_LE(distance(a->trained(), alone_a->trained()), 1e-6) << step;
    ASSERT_LE(distance(b->trained(), alone_b->trained()), 1e-6) << step;
  }
}

RANKS_TEST(Ddp, ForwardsWithoutSyncThenOneBackwardThatSyncs, 2) {
  Accelerator accelerator;
  Net net(NetOptions{}), alone(NetOptions{});
  auto alone_optimizer = sgd(alone->trained());
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto one = rows(2 * step, 6), two = rows(2 * step + 1, 6);
    torch::Tensor first, second;
    {
      auto local = accelerator.no_sync(model);
      first = loss_of(model(share(one)));
      second = loss_of(model(share(two)));
      accelerator.backward(first);
    }
    EXPECT_GT(distance({gather(net->first->weight.grad().unsqueeze(0))[0]},
                       {gather(net->first->weight.grad().unsqueeze(0))[1]}),
              0)
        << "no_sync communicated";
    {
      auto scope = accelerator.trigger_sync_in_backward(model);
      accelerator.backward(second);
    }
    optimizer.step();
    optimizer.zero_grad();
    (loss_of(alone(one)) + loss_of(alone(two))).backward();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
    ASSERT_LE(distance(net->trained(), alone->trained()), 1e-6) << step;
  }
}

RANKS_TEST(Ddp, JoinUnevenInputs, 2, 3) {
  const Case cases[] = {
      {.name = "plain"},
      {.name = "batch norm", .net = {.norm = true}},
      {.name = "unused parameters", .kwargs = {.find_unused_parameters = true}, .net = {.heads = true}},
      {.name = "accumulation", .accumulate = 2},
      {.name = "bf16", .kwargs = {.comm_hook = DDPCommunicationHookType::bf16}, .tolerance = 1e-2}};
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    Accelerator accelerator({.gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = test.accumulate},
                             .kwargs_handlers = {test.kwargs}});
    Net net(test.net), alone(test.net);
    auto alone_optimizer = sgd(alone->trained());
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->trained()));
    const auto steps_of = [&](int64_t r) {
      return (3 + 2 * ((r + 1) % world_size())) * test.accumulate;
    };  // the last rank stops first
    accelerator.join_uneven_inputs(model, [&] {
      for (int64_t step = 0; step < steps_of(rank()); ++step) {
        auto scope = accelerator.accumulate(model);
        accelerator.backward(loss_of(model(share(rows(step, 6)), uses_right(test.net, step, rank()))));
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    expect_equal_on_all_ranks(net->parameters());
    expect_equal_on_all_ranks(net->buffers());
    for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
    if (test.net.norm) continue;  // whose statistics count depends on who is there
    for (int64_t step = 0; step < steps_of(world_size() - 2); ++step) {
      for (int64_t r = 0; r < world_size(); ++r) {
        if (step >= steps_of(r)) continue;
        auto loss = loss_of(alone->forward(share(rows(step, 6), r), uses_right(test.net, step, r)));
        (loss / static_cast<double>(world_size() * test.accumulate)).backward();
      }
      if ((step + 1) % test.accumulate) continue;
      alone_optimizer.step();
      alone_optimizer.zero_grad();
    }
    EXPECT_LE(distance(net->trained(), alone->trained()), test.tolerance);
  }
}

RANKS_TEST(Ddp, JoinWithUnevenBatchesOfALoader, 2) {
  Accelerator accelerator;
  Net net(NetOptions{});
  std::vector<torch::Tensor> samples;
  for (int64_t i = 0; i < 7; ++i) samples.push_back(torch::full({6}, static_cast<double>(i)));
  auto [model, optimizer, loader] =
      accelerator.prepare(net, sgd(net->trained()), data::DataLoader(samples, {.batch_size = 2}));
  int64_t steps = 0, seen = 0;
  accelerator.join_uneven_inputs(
      model,
      [&] {
        for (auto& batch : loader) {
          accelerator.backward(loss_of(model(batch)));
          optimizer.step();
          optimizer.zero_grad();
          ++steps, seen += batch.size(0);
        }
      },
      false);
  EXPECT_EQ(reduce(torch::tensor(seen), Reduction::sum).item<int64_t>(), 7) << "no sample is repeated or lost";
  expect_equal_on_all_ranks(net->parameters());
  steps = 0;
  for (auto& batch : loader) steps += batch.size(0);
  EXPECT_EQ(steps, 4) << "the loader's own setting is back";
}

RANKS_TEST(Ddp, DifferentModelsAreRefusedOnEveryRank, 3) {
  Accelerator accelerator;
  const auto refused = [&](auto model) {
    try {
      accelerator.prepare(model);
    } catch (const ShapeError& error) {
      return std::string(error.what());
    }
    ADD_FAILURE() << "accepted";
    return std::string();
  };
  auto text = refused(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, rank() == 2 ? 3 : 2)));
  EXPECT_THAT(text, HasSubstr("parameter 2 is '1.weight' Float [3, 4] on rank 2 and '1.weight' Float [2, 4] on rank 0"))
      << "the same text on every rank";
  text = refused(torch::nn::Sequential(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(rank() != 1))));
  EXPECT_THAT(text, HasSubstr("parameter 1 is missing on rank 1 and '0.bias' Float [4] on rank 0"));
  torch::nn::Linear frozen(2, 2);
  frozen->weight.set_requires_grad(rank() != 1);
  EXPECT_THAT(refused(frozen), HasSubstr("(frozen) on rank 1"));
  torch::nn::Linear half(2, 2);
  if (rank() == 2) half->to(torch::kHalf);
  EXPECT_THAT(refused(half), HasSubstr("Half [2, 2] on rank 2"));
  torch::nn::Linear fine(2, 2);
  EXPECT_TRUE(accelerator.prepare(fine).core()->engine);
}

RANKS_TEST(Ddp, TokenWeightedAverageIsTheMeanOverAllTokens, 2, 3) {
  Accelerator accelerator(
      {.gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = 3, .average = GradientAverage::tokens}});
  torch::manual_seed(1);
  torch::nn::Linear net(6, 1), alone(6, 1);
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) alone->parameters()[i].copy_(net->parameters()[i]);
  }
  auto alone_optimizer = sgd(alone->parameters());
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) alone->parameters()[i].copy_(net->parameters()[i]);
  }
  for (int64_t group = 0; group < 5; ++group) {
    for (int64_t micro = 0; micro < 3; ++micro) {
      const auto all = rows(group * 3 + micro, 6);
      const auto tokens_of = [&](int64_t r) { return (group + 2 * micro + 3 * r) % (kRows + 1); };  // 0 to all rows
      const auto tokens = tokens_of(rank());
      auto scope = accelerator.accumulate(model);
      accelerator.backward((model(share(all).slice(0, 0, tokens)) - 1).pow(2).mean(), tokens);  // NaN without any
      optimizer.step();
      optimizer.zero_grad();
    }
    torch::Tensor sum = torch::zeros({});
    int64_t count = 0;
    for (int64_t micro = 0; micro < 3; ++micro)
      for (int64_t r = 0; r < world_size(); ++r) {
        const int64_t tokens = (group + 2 * micro + 3 * r) % (kRows + 1);
        sum = sum + (alone(share(rows(group * 3 + micro, 6), r).slice(0, 0, tokens)) - 1).pow(2).sum();
        count += tokens;
      }
    (sum / count).backward();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
    ASSERT_LE(distance(net->parameters(), alone->parameters()), 1e-6) << "after group " << group;
  }
  EXPECT_THROW(accelerator.backward(loss_of(model(share(rows(0, 6))))), ConfigError);
}

RANKS_TEST(Ddp, TorchScriptModule, 2) {
  Accelerator accelerator;
  const auto build = [] {
    torch::manual_seed(3);
    torch::jit::Module module("Script");
    module.register_parameter("weight", torch::randn({2, 6}), false);
    module.register_parameter("bias", torch::randn({2}), false);
    module.define("def forward(self, x):\n    return torch.tanh(torch.linear(x, self.weight, self.bias)), {'x': x}\n");
    for (auto parameter : module.parameters()) parameter.requires_grad_(true);
    return module;
  };
  auto module = build(), alone = build();
  const auto tensors = [](const torch::jit::Module& m) {
    std::vector<torch::Tensor> all;
    for (const auto& parameter : m.parameters()) all.push_back(parameter);
    return all;
  };
  auto alone_optimizer = sgd(tensors(alone));
  auto [model, optimizer] = accelerator.prepare(module, sgd(tensors(module)));
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto all = rows(step, 6);
    const c10::IValue output = model(share(all));
    accelerator.backward(loss_of(output.toTupleRef().elements()[0].toTensor()));
    optimizer.step();
    optimizer.zero_grad();
    loss_of(alone.forward({all}).toTupleRef().elements()[0].toTensor()).backward();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
    ASSERT_LE(distance(tensors(module), tensors(alone)), 1e-6) << step;
  }
  EXPECT_GT(distance(tensors(alone), tensors(build())), 0.01);
}

RANKS_TEST(Ddp, FrozenModelAndEvaluationNeedNoGroup, 2) {
  Accelerator accelerator;
  torch::nn::Linear net(6, 2);
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  auto model = accelerator.prepare(net);
  EXPECT_EQ(model(share(rows(0, 6))).size(1), 2);
  torch::nn::Linear other(2 + rank(), 2);  // evaluation: every rank may have its own
  auto evaluated = accelerator.prepare_model(other, true);
  EXPECT_EQ(evaluated(torch::ones({1, 2 + rank()})).size(1), 2);
  EXPECT_TRUE(accelerator.unwrap_model(model).get() == net.get());
}
