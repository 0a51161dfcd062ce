// Programs that were written for LibTorch alone, and loops off the beaten track, under data parallelism: right,
// as one plain process has it, or named on all ranks. SGD without clipping: adaptive steps hide wrong averages.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::AllOf;
using testing::HasSubstr;

namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr int64_t kRows = 2;  ///< per rank and step

torch::Tensor rows_of(int64_t step, int64_t r) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * step + r));
  return torch::randn({kRows, 3}, generator);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    body = register_module("body", torch::nn::Linear(3, 3));
    head = register_module("head", torch::nn::Linear(3, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = head(torch::tanh(body(x)));
    return late ? y + late(x) : y;
  }
  torch::nn::Linear body{nullptr}, head{nullptr}, late{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor loss_of(const torch::Tensor& y) { return (y - 0.3).pow(2).mean(); }
torch::optim::SGD sgd(const Tensors& parameters, double momentum = 0) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.5).momentum(momentum));
}
void require(torch::nn::Module& module, bool gradients) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(gradients);
}

double distance(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

void expect_same_on_all_ranks(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    const auto all = gather(tensor.detach().unsqueeze(0));
    for (int64_t r = 1; r < world_size(); ++r) EXPECT_TRUE(all[r].equal(all[0])) << "rank " << r << " differs";
  }
}

/// One plain process: gradients of the mean of the losses of those ranks that have data.
void plain_backward(
    Net& net, int64_t step, const std::function<bool(int64_t)>& has_data = [](int64_t) { return true; }) {
  for (int64_t r = 0; r < world_size(); ++r)
    if (has_data(r)) (loss_of(net(rows_of(step, r))) / static_cast<double>(world_size())).backward();
}

}  // namespace

RANKS_TEST(DdpHabits, LayersAreThawedAndFrozenAfterPrepare, 2, 3) {
  for (const bool own_forward : {false, true}) {
    SCOPED_TRACE(own_forward);
    Accelerator accelerator;
    Net net, alone;
    for (auto* one : {&net, &alone}) require(*(*one)->body, false);
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    auto plain = sgd(alone->parameters());
    for (int64_t step = 0; step < 6; ++step) {
      for (auto* one : {&net, &alone}) {
        if (step == 2) require(*(*one)->body, true);
        if (step == 4) require(*(*one)->head, false);
      }
      const auto x = rows_of(step, rank());
      accelerator.backward(loss_of(own_forward ? net->forward(x) : model(x)));
      optimizer.step(), optimizer.zero_grad();
      plain_backward(alone, step);
      plain.step(), plain.zero_grad();
      ASSERT_LE(distance(net->parameters(), alone->parameters()), 1e-6) << step;
    }
    expect_same_on_all_ranks(net->parameters());
  }
  // Neither the handle's forward nor the Accelerator's backward: nobody has heard of it before the step.
  Accelerator accelerator;
  Net net;
  require(*net->body, false);
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  require(*net->body, true);
  loss_of(net->forward(rows_of(0, rank()))).backward();
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.step(); }),
              AllOf(HasSubstr("parameter 'body.weight' was frozen"), HasSubstr("has averaged over ranks")));
}

RANKS_TEST(DdpHabits, ALayerThatComesLaterIsNamedInEachStep, 2) {
  Accelerator accelerator;
  Net net;
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  accelerator.backward(loss_of(model(rows_of(0, rank()))));
  optimizer.step(), optimizer.zero_grad();
  net->late = net->register_module("late", torch::nn::Linear(3, 1));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(net->late->parameters()));
  for (int64_t step = 1; step < 3; ++step)
    EXPECT_THAT(message_of<ConfigError>([&] { accelerator.backward(loss_of(model(rows_of(step, rank())))); }),
                AllOf(HasSubstr("parameter 4 of prepared optimizer 0"), HasSubstr("after all its layers")));
}

RANKS_TEST(DdpHabits, AModelThatWasForgottenIsNamed, 2) {
  Accelerator accelerator;
  Net net;
  auto optimizer = accelerator.prepare(sgd(net->parameters()));
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.backward(loss_of(net(rows_of(0, rank())))); }),
              AllOf(HasSubstr("parameter 0 of prepared optimizer 0"), HasSubstr("belongs to no model"),
                    HasSubstr("each of the 2 processes")));
}

// LibTorch's torch::load and module->to() may take the parameters from under the hooks of the averaging.
RANKS_TEST(DdpHabits, ReplacedParametersAreRightOrNamed, 2) {
  const auto file = support::scratch_dir() + "/net.pt";
  Net saved;
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : saved->parameters()) parameter.mul_(-1);
  }
  if (rank() == 0) torch::save(saved, file);
  const auto replaced = [](const std::string& message) {
    EXPECT_THAT(message, AllOf(HasSubstr("bytes of parameter 'body.weight' were replaced after prepare()"),
                               HasSubstr("torch::load, module->to(...)")));
  };
  for (const bool own_forward : {false, true}) {
    SCOPED_TRACE(own_forward);
    for (const bool load : {true, false}) {
      SCOPED_TRACE(load);
      Accelerator accelerator;
      accelerator.wait_for_everyone();
      Net net;
      auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
      accelerator.backward(loss_of(model(rows_of(0, rank()))));
      optimizer.step(), optimizer.zero_grad();
      if (load) torch::load(net, file);
      else net->to(torch::kDouble);
      const auto x = rows_of(1, rank()).to(load ? torch::kFloat : torch::kDouble);
      replaced(
          message_of<ConfigError>([&] { accelerator.backward(loss_of(own_forward ? net->forward(x) : model(x))); }));
    }
  }
  // With a backward of the program's own, too.
  Accelerator accelerator;
  Net net;
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  torch::load(net, file);
  loss_of(net->forward(rows_of(0, rank()))).backward();
  replaced(message_of<ConfigError>([&] { optimizer.step(); }));
}

// Its line search and its end depend on the loss, which each rank has another of.
RANKS_TEST(DdpHabits, LbfgsEvaluatesEquallyOftenOnAllRanks, 2, 3) {
  Accelerator accelerator;
  Net net, alone;
  net->to(torch::kDouble), alone->to(torch::kDouble);
  const auto lbfgs = [](const Tensors& parameters) {
    return torch::optim::LBFGS(
        parameters, torch::optim::LBFGSOptions(1).max_iter(8).tolerance_change(1e-4).line_search_fn("strong_wolfe"));
  };
  auto [model, optimizer] = accelerator.prepare(net, lbfgs(net->parameters()));
  auto plain = lbfgs(alone->parameters());
  int64_t evaluations = 0, plain_evaluations = 0;
  for (int64_t step = 0; step < 2; ++step) {
    const auto loss = optimizer.step([&] {
      ++evaluations;
      optimizer.zero_grad();
      // Losses that differ much, as those of ranks' own data may.
      auto own = loss_of(model(rows_of(step, rank()).to(torch::kDouble))) * (1 + 9.0 * static_cast<double>(rank()));
      accelerator.backward(own);
      return own;
    });
    const auto plain_loss = plain.step([&] {
      ++plain_evaluations;
      plain.zero_grad();
      torch::Tensor sum = torch::zeros({}, torch::kDouble);
      for (int64_t r = 0; r < world_size(); ++r)
        sum = sum + loss_of(alone(rows_of(step, r).to(torch::kDouble))) * (1 + 9.0 * static_cast<double>(r));
      sum = sum / static_cast<double>(world_size());
      sum.backward();
      return sum;
    });
    EXPECT_NEAR(loss.item<double>(), plain_loss.item<double>(), 1e-9);
    ASSERT_LE(distance(net->parameters(), alone->parameters()), 1e-6) << step;
  }
  EXPECT_EQ(evaluations, plain_evaluations);
  expect_same_on_all_ranks(net->parameters());
  EXPECT_THAT(message_of<ConfigError>([&] { static_cast<void>(optimizer.state_dict()); }),
              HasSubstr("class torch::optim::LBFGS"));
}

namespace {

/// Ranks that end after different numbers of steps, then two steps of all.
void join_and_go_on(Accelerator& accelerator, const std::function<void(const torch::Tensor&)>& backward,
                    int64_t overflow_at, double tolerance) {
  Net net, alone;
  auto optimizer = sgd(net->parameters(), 0.5);
  auto schedule = optim::lambda_lr(optimizer, [](int64_t n) { return 1.0 / static_cast<double>(n + 1); });
  auto [model, opt, sched] = accelerator.prepare(net, optimizer, schedule);
  auto plain = sgd(alone->parameters(), 0.5);
  int64_t plain_steps = 0;
  const auto steps_of = [](int64_t r) { return 5 - 2 * r; };  // the last rank stops first
  const auto train = [&](int64_t step) {
    backward(loss_of(model(rows_of(step, rank()))) * (step == overflow_at ? 1e38 : 1.0));
    opt.step(), sched.step(), opt.zero_grad();
  };
  const auto train_plainly = [&](int64_t step, const std::function<bool(int64_t)>& has_data) {
    if (step == overflow_at) return;
    plain_backward(alone, step, has_data);
    plain.step(), plain.zero_grad();
    plain_steps += world_size();
    plain.param_groups()[0].options().set_lr(0.5 / static_cast<double>(plain_steps + 1));
  };
  accelerator.join_uneven_inputs(model, [&] {
    for (int64_t step = 0; step < steps_of(rank()); ++step) train(step);
  });
  for (int64_t step = 0; step < 5; ++step) train_plainly(step, [&](int64_t r) { return step < steps_of(r); });
  EXPECT_LE(distance(net->parameters(), alone->parameters()), tolerance);
  for (int64_t step = 5; step < 7; ++step) {
    train(step), train_plainly(step, [](int64_t) { return true; });
    EXPECT_LE(distance(net->parameters(), alone->parameters()), tolerance) << "after joining, step " << step;
  }
  expect_same_on_all_ranks(net->parameters());
  EXPECT_EQ(sched.last_epoch(), plain_steps);
}

}  // namespace

RANKS_TEST(DdpHabits, RanksThatEndedEarlyGoOnAsTheOthers, 2) {
  Accelerator accelerator;
  join_and_go_on(
      accelerator, [&](const torch::Tensor& loss) { accelerator.backward(loss); }, -1, 1e-6);
}

RANKS_TEST(DdpHabits, RanksThatEndedEarlyAreNotAskedForOverflows, 2, 3) {
  Accelerator accelerator(
      {.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024, .growth_interval = 3}}});
  // Steps 0, 1, 2 are good and the scale grows; the fourth overflows where the last rank has gone.
  join_and_go_on(
      accelerator, [&](const torch::Tensor& loss) { accelerator.backward(loss); }, 3, 0.02);
  const auto scales = gather_object(std::vector<double>{accelerator.scaler()->get_scale()});
  for (const double scale : scales) EXPECT_EQ(scale, 2048) << "grown, shrunk, and grown again by the last three";
}

// A rank without data has no backward in which they would be.
RANKS_TEST(DdpHabits, WhatWaitsOfFrozenLayersIsAveragedBeforeAJoin, 2, 3) {
  Accelerator accelerator;
  Net net, alone;
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  auto plain = sgd(alone->parameters());
  for (auto* const one : {&net, &alone}) require(*(*one)->head, false);
  {
    const auto apart = accelerator.no_sync(model);
    accelerator.backward(loss_of(model(rows_of(0, rank()))));
  }
  plain_backward(alone, 0);
  for (auto* const one : {&net, &alone}) require(*(*one)->body, false), require(*(*one)->head, true);
  constexpr int64_t kSteps = 2;
  accelerator.join_uneven_inputs(model, [&] {
    for (int64_t step = 1; rank() == 0 && step <= kSteps; ++step) {
      accelerator.backward(loss_of(model(rows_of(step, rank()))));
      optimizer.step(), optimizer.zero_grad();
    }
  });
  for (int64_t step = 1; step <= kSteps; ++step) {
    plain_backward(alone, step, [](int64_t r) { return r == 0; });
    plain.step(), plain.zero_grad();
  }
  EXPECT_LE(distance(net->parameters(), alone->parameters()), 1e-6);
}

RANKS_TEST(DdpHabits, RanksThatEndedEarlyHaveNoTokens, 2, 3) {
  Accelerator accelerator(
      {.gradient_accumulation_plugin = GradientAccumulationPlugin{.average = GradientAverage::tokens}});
  Net net, alone;
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  auto plain = sgd(alone->parameters());
  const auto steps_of = [](int64_t r) { return 5 - 2 * r; };
  accelerator.join_uneven_inputs(model, [&] {
    for (int64_t step = 0; step < steps_of(rank()); ++step) {
      const auto x = rows_of(step, rank()).slice(0, 0, 1 + (step + rank()) % 2);
      accelerator.backward((model(x) - 0.3).pow(2).mean(), x.size(0));
      optimizer.step(), optimizer.zero_grad();
    }
  });
  for (int64_t step = 0; step < 5; ++step) {
    torch::Tensor sum = torch::zeros({});
    int64_t count = 0;
    for (int64_t r = 0; r < world_size(); ++r) {
      if (step >= steps_of(r)) continue;
      const auto x = rows_of(step, r).slice(0, 0, 1 + (step + r) % 2);
      sum = sum + (alone(x) - 0.3).pow(2).sum();
      count += x.size(0);
    }
    (sum / count).backward();
    plain.step(), plain.zero_grad();
  }
  EXPECT_LE(distance(net->parameters(), alone->parameters()), 1e-6);
  Net other;
  const auto second = accelerator.prepare(other);
  EXPECT_THAT(message_of<ConfigError>([&] {
                accelerator.join_uneven_inputs(std::vector{model, second}, [] { FAIL() << "not begun"; });
              }),
              HasSubstr("several models are averaged over tokens"));
}

// One rank's loader ends, and ends the group there; the others' groups go on.
RANKS_TEST(DdpHabits, DataThatEndsWithinAGroupIsNamedOnAllRanks, 2, 3) {
  for (const bool sync_with_dataloader : {true, false}) {
    Accelerator accelerator({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                 .num_steps = 3, .sync_with_dataloader = sync_with_dataloader}});
    Net net;
    const Tensors samples(static_cast<size_t>(4 * world_size() + 1), torch::ones({3}));  // 5 for rank 0, 4 for others
    auto [model, optimizer, loader] =
        accelerator.prepare(net, sgd(net->parameters()), data::DataLoader(samples, {.batch_size = 1}));
    const auto loop = [&] {
      accelerator.join_uneven_inputs(
          model,
          [&] {
            for (auto& batch : loader) {
              auto step = accelerator.accumulate(model);
              accelerator.backward(loss_of(model(batch)));
              optimizer.step(), optimizer.zero_grad();
            }
          },
          /*even_batches=*/false);
    };
    if (sync_with_dataloader) {
      EXPECT_THAT(message_of<ConfigError>(loop), HasSubstr("in the middle of an accumulation group"));
      continue;
    }
    loop();
    // Batches left over on a rank count in the next group, which begins on all ranks where the longest one stands.
    for (int64_t step = 0; step < 4; ++step) {
      auto scope = accelerator.accumulate(model);
      EXPECT_EQ(accelerator.sync_gradients(), step % 3 == 0) << step;
      accelerator.backward(loss_of(model(rows_of(step, rank()))));
      optimizer.step(), optimizer.zero_grad();
    }
    expect_same_on_all_ranks(net->parameters());
  }
}

namespace {

struct OnNetImpl : torch::nn::Module {
  explicit OnNetImpl(const Net& net) : net(register_module("net", net)) {
    torch::manual_seed(4);
    scale = register_parameter("scale", torch::full({1}, 0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return net(x) * scale; }
  Net net;
  torch::Tensor scale;
};
TORCH_MODULE(OnNet);

// An embedding's max_norm writes its rows in forward, each rank those that it has looked up.
TEST(DdpHabits, WeightsThatDriftApartAreNamedSoon) {
  if (!support::is_rank()) {
    for (const int64_t ranks : {1, 2, 3, 5})
      support::expect_ranks_pass("DdpHabits.WeightsThatDriftApartAreNamedSoon", {.world_size = ranks});
    return;
  }
  for (const bool writes : {false, true}) {
    support::reset_states();
    Accelerator accelerator({.cpu = true});
    torch::manual_seed(0);
    torch::nn::EmbeddingOptions options(16, 4);
    if (writes) options.max_norm(0.5);
    torch::nn::Embedding net(options);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [m, optimizer] = accelerator.prepare(net, sgd);
    const auto train = [&, m = m, optimizer = optimizer](int64_t steps) {
      for (int64_t step = 0; step < steps; ++step) {
        accelerator.backward(m(torch::tensor({(3 * rank() + step) % 16, 2 * rank() + 1})).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    if (!writes || world_size() == 1) train(5);
    else
      EXPECT_THAT(
          message_of<ConfigError>([&] { train(5); }),
          AllOf(HasSubstr("after 1 of them parameter 'weight' has other values on rank 1"), HasSubstr("max_norm")));
  }
}

RANKS_TEST(DdpHabits, WeightsThatDriftApartAreNamedAfterSomeTime, 3) {
  struct Way {
    int64_t every, written_after, seen_after;
  };
  for (const auto [every, written_after, seen_after] : {Way{500, 300, 500}, {7, 5, 7}, {500, 5, 8}, {0, 5, 0}}) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true, .kwargs_handlers = {DistributedDataParallelKwargs{.compare_parameters_every = every}}});
    Net net;
    auto [m, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.01));
    const auto train = [&, m = m, optimizer = optimizer, written_after = written_after] {
      for (int64_t step = 0; step < 501; ++step) {
        {
          // Between averaged backwards others don't count.
          const auto scope = accelerator.no_sync(m);
          accelerator.backward(loss_of(m(rows_of(step, rank()))));
        }
        accelerator.backward(loss_of(m(rows_of(step, rank()))));
        optimizer.step(), optimizer.zero_grad();
        const at::NoGradGuard no_grad;
        if (step + 1 == written_after) net->head->weight.add_(0.01 * static_cast<double>(rank() == 2));
      }
    };
    if (every == 0) {
      train();
      continue;
    }
    EXPECT_THAT(message_of<ConfigError>(train),
                HasSubstr("after " + std::to_string(seen_after) +
                          " of them parameter 'head.weight' has other values on rank 2"));
  }
}

}  // namespace

/// c10d has a collective of its own there, which no group counts by itself.
RANKS_TEST(DdpHabits, ARankThatAgreesOnBucketsIsSeenThere, 2, 3) {
  Accelerator accelerator({.cpu = true});
  Net net;
  auto [m, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  accelerator.backward(loss_of(m(rows_of(0, rank()))));
  optimizer.step(), optimizer.zero_grad();
  const auto text = message_of<CommError>([&, m = m] {
    if (rank() == 0) accelerator.gather(torch::ones({1}));
    else m(rows_of(1, rank()));
  });
  EXPECT_THAT(text, AllOf(HasSubstr("is elsewhere: its collective "), HasSubstr("order of buckets"))) << text;
}

// Gradients of modules that two models share are scaled once.
RANKS_TEST(DdpHabits, TokensOfModelsThatShareModulesCountOnce, 2) {
  Accelerator accelerator(
      {.gradient_accumulation_plugin = GradientAccumulationPlugin{.average = GradientAverage::tokens}});
  Net net, alone;
  OnNet on_net(net), on_alone(alone);
  auto [a, b, optimizer] = accelerator.prepare(net, on_net, sgd(on_net->parameters()));
  auto plain = sgd(on_alone->parameters());
  for (int64_t step = 0; step < 3; ++step) {
    const auto items = [](int64_t r) { return 1 + r; };
    const auto x = rows_of(step, rank());
    accelerator.backward(loss_of(a(x)) + loss_of(b(x)), items(rank()));
    optimizer.step(), optimizer.zero_grad();
    int64_t all = 0;
    for (int64_t r = 0; r < world_size(); ++r) all += items(r);
    for (int64_t r = 0; r < world_size(); ++r) {
      const auto y = rows_of(step, r);
      ((loss_of(alone(y)) + loss_of(on_alone(y))) * static_cast<double>(items(r)) / static_cast<double>(all))
          .backward();
    }
    plain.step(), plain.zero_grad();
    ASSERT_LE(distance(on_net->parameters(), on_alone->parameters()), 1e-6) << step;
  }
}

// Two optimizers in fp16, of which one steps every second time, and clipping: a GAN's loop.
RANKS_TEST(DdpHabits, AGanClipsInFp16, 1, 2) {
  Accelerator accelerator(
      {.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024, .growth_interval = 2}}});
  Net net, critic_net, alone, critic_alone;  // both take three numbers; the generator's one is repeated
  auto [generator, critic, g_opt, c_opt] =
      accelerator.prepare(net, critic_net, sgd(net->parameters()), sgd(critic_net->parameters()));
  auto g_plain = sgd(alone->parameters()), c_plain = sgd(critic_alone->parameters());
  const auto made = [](auto& g, const torch::Tensor& x) { return g(x).expand({kRows, 3}); };
  for (int64_t step = 0; step < 6; ++step) {
    const auto x = rows_of(step, rank());
    accelerator.backward(loss_of(critic(made(generator, x).detach())) - critic(x).mean());
    accelerator.clip_grad_norm_(critic->parameters(), 0.2);
    c_opt.step(), c_opt.zero_grad();
    accelerator.backward(-critic(made(generator, x)).mean());
    if (step % 2 == 1) {
      accelerator.clip_grad_norm_(generator->parameters(), 0.2);
      g_opt.step(), g_opt.zero_grad();
    }
    c_opt.zero_grad();

    for (int64_t r = 0; r < world_size(); ++r) {
      const auto y = rows_of(step, r);
      ((loss_of(critic_alone(made(alone, y).detach())) - critic_alone(y).mean()) / world_size()).backward();
    }
    torch::nn::utils::clip_grad_norm_(critic_alone->parameters(), 0.2);
    c_plain.step(), c_plain.zero_grad();
    for (int64_t r = 0; r < world_size(); ++r)
      (-critic_alone(made(alone, rows_of(step, r))).mean() / world_size()).backward();
    if (step % 2 == 1) {
      torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.2);
      g_plain.step(), g_plain.zero_grad();
    }
    c_plain.zero_grad();
    ASSERT_LE(distance(net->parameters(), alone->parameters()), 5e-3) << step;
    ASSERT_LE(distance(critic_net->parameters(), critic_alone->parameters()), 5e-3) << step;
  }
}

// A step by hand of the functional kind, whose gradients never come to grad().
RANKS_TEST(DdpHabits, WhatAutogradGradGivesIsAveraged, 3) {
  Accelerator accelerator;
  Net net, plain;
  auto model = accelerator.prepare(net);
  for (int64_t step = 0; step < 3; ++step) {
    const Tensors found = torch::autograd::grad({loss_of(model(rows_of(step, rank())))}, net->parameters());
    torch::Tensor loss = torch::zeros({});
    for (int64_t r = 0; r < world_size(); ++r) loss = loss + loss_of(plain(rows_of(step, r))) / world_size();
    const Tensors expected = torch::autograd::grad({loss}, plain->parameters());
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < found.size(); ++i) {
      net->parameters()[i].sub_(found[i]);
      plain->parameters()[i].sub_(expected[i]);
    }
    ASSERT_LE(distance(net->parameters(), plain->parameters()), 1e-5) << step;
  }
  const std::string message = message_of<ConfigError>([&] {
    accelerator.join_uneven_inputs(
        model, [&] { torch::autograd::grad({loss_of(model(rows_of(9, rank())))}, net->parameters()); });
  });
  EXPECT_THAT(message, AllOf(HasSubstr("autograd::grad: found it with respect to parameter"),
                             HasSubstr("within join_uneven_inputs")));
}

// Another Accelerator clips a model that the first one prepared, and prepares it again without a second layer.
RANKS_TEST(DdpHabits, ASecondAcceleratorSeesWhatTheFirstTrains, 2) {
  Accelerator first({.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}}}), second;
  Net net;
  auto [model, optimizer] = first.prepare(net, sgd(net->parameters()));
  EXPECT_EQ(second.prepare(net).core()->engine, model.core()->engine);
  first.backward(loss_of(model(rows_of(0, rank()))));
  second.clip_grad_norm_(net->parameters(), 0.125);
  double sum = 0;
  for (const auto& parameter : net->parameters()) sum += parameter.grad().pow(2).sum().item<double>();
  EXPECT_NEAR(std::sqrt(sum), 0.125, 1e-5);
  const auto before = net->head->bias.item<double>(), gradient = net->head->bias.grad().item<double>();
  optimizer.step();
  EXPECT_NEAR(net->head->bias.item<double>(), before - 0.5 * gradient, 1e-6) << "unscaled once";
}
