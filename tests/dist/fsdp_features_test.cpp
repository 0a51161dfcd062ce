/// Real training loops with sharded models. Every case runs on both stores: shards in shared memory, and shards
/// that are gathered through c10d.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "fsdp_of.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
namespace nn = torch::nn;
using support::on_both_stores;
using testing::HasSubstr;

constexpr int64_t kWidth = 10, kRows = 12;

struct NetImpl : nn::Module {
  explicit NetImpl(int64_t seed = 5) {
    torch::manual_seed(seed);
    first = register_module("first", nn::Linear(kWidth, 14));
    second = register_module("second", nn::Linear(14, kWidth));
    left = register_module("left", nn::Linear(kWidth, 3));
    right = register_module("right", nn::Linear(kWidth, 3));
    never = register_module("never", nn::Linear(2, 2));
    one = register_parameter("one", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x, bool use_right = false) {
    const auto y = torch::tanh(second(torch::tanh(first(x)))) * one;
    return use_right ? right(y) : left(y);
  }
  nn::Linear first{nullptr}, second{nullptr}, left{nullptr}, right{nullptr}, never{nullptr};
  at::Tensor one;
};
TORCH_MODULE(Net);

FullyShardedDataParallelPlugin every_linear() {
  return {.sharding_strategy = ShardingStrategy::full_shard,
          .backward_prefetch = BackwardPrefetch::backward_pre,
          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
          .transformer_cls_names_to_wrap = {{"Linear"}}};
}

at::Tensor rows(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(50 + step));
  return torch::randn({kRows, kWidth}, generator);
}
at::Tensor mine(const at::Tensor& all) {
  const int64_t share = all.size(0) / support::world_size();
  return all.narrow(0, support::rank() * share, share);
}
at::Tensor loss_of(const at::Tensor& output) { return (output - 0.3).pow(2).mean(); }

/// The largest difference between the sharded model's parameters and the plain one's, on rank 0.
double distance(const Accelerator& accelerator, const Prepared<Net>& sharded, Net& plain) {
  double largest = 0;
  const auto state = accelerator.get_state_dict(sharded);
  for (const auto& item : plain->named_parameters())
    if (support::rank() == 0)
      largest = std::max(largest, (state.at(item.key()) - item.value()).abs().max().item<double>());
  return largest;
}

RANKS_TEST(FsdpFeatures, AccumulatesWithoutSynchronisation, 1, 2, 3) {
  on_both_stores([](const std::string& what) {
    Accelerator accelerator({.gradient_accumulation_steps = 3, .cpu = true, .fsdp_plugin = every_linear()});
    Net plain, net;
    torch::optim::SGD reference(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto [m, opt] = accelerator.prepare(net, optimizer);
    for (int64_t step = 0; step < 9; ++step) {
      (loss_of(plain->forward(rows(step))) / 3).backward();
      if (step % 3 == 2) reference.step(), reference.zero_grad();
      auto scope = accelerator.accumulate(m);
      accelerator.backward(loss_of(m(mine(rows(step)))));
      // Whole gradients stay on each rank until they are shared; then each holds its piece of the average.
      EXPECT_EQ(support::fsdp_of(m)->local_shard(net->second->weight).grad().defined(), accelerator.sync_gradients())
          << what;
      opt.step(), opt.zero_grad();
    }
    EXPECT_LT(distance(accelerator, m, plain), 1e-5) << what;
  });
}

RANKS_TEST(FsdpFeatures, ClipsByTheNormOfTheWhole, 1, 2, 4) {
  on_both_stores([](const std::string& what) {
    for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      AcceleratorState::reset();
      Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
      Net plain, net;
      auto m = accelerator.prepare(net);
      loss_of(plain->forward(rows(0))).backward();
      accelerator.backward(loss_of(m(mine(rows(0)))));
      const double expected = nn::utils::clip_grad_norm_(plain->parameters(), 0.01, p);
      EXPECT_NEAR(accelerator.clip_grad_norm_(m->parameters(), 0.01, p).item<double>(), expected, 1e-5 * expected)
          << what << " p " << p;
      const double after = accelerator.clip_grad_norm_(m->parameters(), 1e9, p).item<double>();
      EXPECT_NEAR(after, 0.01, 1e-5) << what << " p " << p;
    }
  });
}

RANKS_TEST(FsdpFeatures, UnusedParameters, 2, 3) {
  on_both_stores([](const std::string& what) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
    Net plain, net;
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.5);
    torch::optim::AdamW reference(plain->parameters(), options), optimizer(net->parameters(), options);
    auto [m, opt] = accelerator.prepare(net, optimizer);
    const int64_t share = kRows / support::world_size();
    for (int64_t step = 0; step < 5; ++step) {
      at::Tensor loss;
      for (int64_t r = 0; r < support::world_size(); ++r) {
        const auto part =
            loss_of(plain->forward(rows(step).narrow(0, r * share, share), step % 2 == 1)) / support::world_size();
        loss = loss.defined() ? loss + part : part;
      }
      loss.backward();
      reference.step(), reference.zero_grad();
      accelerator.backward(loss_of(m(mine(rows(step)), step % 2 == 1)));
      opt.step(), opt.zero_grad();
    }
    // Also: `never` was not decayed, because a gradient of zeros is not the same as none.
    EXPECT_LT(distance(accelerator, m, plain), 2e-5) << what;
  });
}

// By sockets each would wait for the other, so that a program which was tried on one host would stop on two.
RANKS_TEST(FsdpFeatures, RanksThatUseOtherHeadsOrLeaveABackwardOutAreNamed, 2, 3) {
  for (const bool head : {true, false}) {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
    Net net;
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [m, opt] = accelerator.prepare(net, sgd);
    const auto step = [&](bool alone) {
      const at::Tensor loss = loss_of(m(mine(rows(0)), alone && head));
      if (!alone || head) accelerator.backward(loss);
      opt.step(), opt.zero_grad();
    };
    step(false);
    const at::Tensor before = net->one.clone();
    const auto message = support::message_of<CommError>([&] { step(support::rank() == 1); });
    EXPECT_NE(message.find("in the same order"), std::string::npos) << message;
    const std::string used = support::rank() == 1 && head ? "'right'" : "'left'";
    EXPECT_NE(message.find(used), std::string::npos) << message;
    EXPECT_TRUE(at::equal(net->one, before)) << "named before anything is changed";
  }
}

RANKS_TEST(FsdpFeatures, TwoTrainedModelsAndAFrozenTeacher, 2) {
  on_both_stores([](const std::string& what) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
    Net plain_a(1), plain_b(2), plain_t(3), a(1), b(2), teacher(3);
    for (auto& p : teacher->parameters()) p.requires_grad_(false);
    torch::optim::SGD reference_a(plain_a->parameters(), 0.1), reference_b(plain_b->parameters(), 0.05),
        sgd_a(a->parameters(), 0.1), sgd_b(b->parameters(), 0.05);
    auto [ma, oa, mb, ob] = accelerator.prepare(a, sgd_a, b, sgd_b);
    auto mt = accelerator.prepare(teacher);
    for (int64_t step = 0; step < 5; ++step) {
      const auto together = [&](auto& x, auto& y, auto& t, const at::Tensor& input) {
        at::Tensor target;
        {
          torch::NoGradGuard no_grad;
          target = t(input);
        }
        return (x(input) - target).pow(2).mean() + (y(input) * x(input)).mean();
      };
      together(plain_a, plain_b, plain_t, rows(step)).backward();
      reference_a.step(), reference_b.step(), reference_a.zero_grad(), reference_b.zero_grad();
      accelerator.backward(together(ma, mb, mt, mine(rows(step))));
      oa.step(), ob.step(), oa.zero_grad(), ob.zero_grad();
    }
    EXPECT_LT(distance(accelerator, ma, plain_a), 1e-5) << what;
    EXPECT_LT(distance(accelerator, mb, plain_b), 1e-5) << what;
    EXPECT_EQ(distance(accelerator, mt, plain_t), 0) << what;
  });
}

RANKS_TEST(FsdpFeatures, Bf16ComputesInBf16AndStepsInFp32, 1, 2) {
  on_both_stores([](const std::string& what) {
    Accelerator accelerator({.mixed_precision = "bf16", .cpu = true, .fsdp_plugin = every_linear()});
    Net plain, net;
    torch::optim::AdamW reference(plain->parameters(), 1e-2), optimizer(net->parameters(), 1e-2);
    auto [m, opt] = accelerator.prepare(net, optimizer);
    EXPECT_EQ(net->first->weight.scalar_type(), at::kBFloat16);
    for (int64_t step = 0; step < 10; ++step) {
      const auto expected = loss_of(plain->forward(rows(step)));
      expected.backward();
      reference.step(), reference.zero_grad();
      const auto loss = loss_of(m(mine(rows(step))));
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      // bf16 keeps 8 bits: 0.4 % per operation, a few operations deep.
      EXPECT_NEAR(accelerator.reduce(loss.detach(), "mean").item<double>(), expected.item<double>(),
                  0.05 * expected.item<double>() + 0.01)
          << what << " step " << step;
      accelerator.backward(loss);
      opt.step(), opt.zero_grad();
    }
    for (const auto& [name, value] : accelerator.get_state_dict(m)) EXPECT_EQ(value.scalar_type(), at::kFloat) << name;
  });
}

RANKS_TEST(FsdpFeatures, DeferredModelsStartAsEagerOnes, 1, 2, 3) {
  on_both_stores([](const std::string& what) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
    Net eager;
    Net net = [] {
      const auto empty = init_empty_weights();
      return Net();
    }();
    EXPECT_TRUE(net->first->weight.is_meta());
    auto m = accelerator.prepare(net);
    EXPECT_EQ(distance(accelerator, m, eager), 0) << what;
    EXPECT_FALSE(net->first->weight.is_meta());
    const auto x = rows(0);
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(m(x), eager->forward(x))) << what;
  });
}

RANKS_TEST(FsdpFeatures, RankZerosValuesForEveryoneAlsoWhereNobodyElseHasAny, 2, 3) {
  on_both_stores([](const std::string& what) {
    for (const bool deferred : {false, true}) {
      AcceleratorState::reset();
      AcceleratorOptions options{.cpu = true, .fsdp_plugin = every_linear()};
      options.fsdp_plugin->sync_module_states = true;
      Accelerator accelerator(std::move(options));
      Net expected(100), net{nullptr};
      if (deferred && support::rank() > 0) {
        const auto empty = init_empty_weights();
        net = Net(7);
      } else {
        net = Net(100 + support::rank());
      }
      auto m = accelerator.prepare(net);
      EXPECT_EQ(distance(accelerator, m, expected), 0) << what << " deferred " << deferred;
    }
  });
}

RANKS_TEST(FsdpFeatures, WholeParametersAreFewAndShortLived, 2, 3) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
  nn::Sequential net;
  for (int i = 0; i < 12; ++i) net->push_back(nn::Linear(64, 64));
  auto [m, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  const int64_t unit = (64 * 64 + 64 + 16 * 3) * 4;  // at most this with padding
  for (int64_t step = 0; step < 4; ++step) {
    residency::reset_stats();
    const int64_t before = residency::stats().resident_bytes;
    accelerator.backward(m(torch::randn({2, 64})).pow(2).mean());
    EXPECT_LE(residency::stats().peak_resident_bytes - before, 2 * unit) << "step " << step;
    opt.step(), opt.zero_grad();
    if (step == 0) continue;
    // The order is known from the first step on, so the next unit is on its way when it is needed: not so for the very
    // first, and where forward turns into backward.
    EXPECT_LE(residency::stats().faults, 2);
    EXPECT_GE(residency::stats().prefetch_hits, 18) << "11 in forward, and nearly as many in backward, where the last "
                                                       "layer is still there and the first one is not needed";
  }
  EXPECT_EQ(residency::stats().resident_bytes, 0);
}

/// Trains two steps alone, then three prepared; `make` builds the optimizer.
template <class Make> void goes_on_where_it_stood(const std::string& what, const Make& make) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
  Net plain, net;
  auto reference = make(plain->parameters()), optimizer = make(net->parameters());
  const auto step = [](auto& model, auto& optimizer, int64_t number) {
    loss_of(model->forward(rows(number))).backward();
    optimizer.step(), optimizer.zero_grad();
  };
  for (int64_t number = 0; number < 2; ++number) step(plain, reference, number), step(net, optimizer, number);
  auto [m, opt] = accelerator.prepare(net, optimizer);
  for (int64_t number = 2; number < 5; ++number) {
    step(plain, reference, number);
    accelerator.backward(loss_of(m(mine(rows(number)))));
    opt.step(), opt.zero_grad();
  }
  EXPECT_LT(distance(accelerator, m, plain), 2e-5) << what;
}

RANKS_TEST(FsdpFeatures, OptimizersKeepTheStatesThatTheyHadBefore, 1, 2, 3) {
  on_both_stores([](const std::string& what) {
    using Parameters = std::vector<at::Tensor>;
    // Adagrad has a state from its start.
    goes_on_where_it_stood(what + ", Adagrad", [](const Parameters& p) {
      return torch::optim::Adagrad(p, torch::optim::AdagradOptions(0.05).initial_accumulator_value(0.1));
    });
    goes_on_where_it_stood(what + ", AdamW", [](const Parameters& p) { return torch::optim::AdamW(p, 1e-2); });
    goes_on_where_it_stood(what + ", SGD", [](const Parameters& p) {
      return torch::optim::SGD(p, torch::optim::SGDOptions(0.1).momentum(0.9));
    });
  });
}

RANKS_TEST(FsdpFeatures, MistakesAreNamed, 2) {
  on_both_stores([](const std::string&) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
    Net net;
    optim::AdamW8bit blocks(net->parameters());  // its codes can't be cut into pieces
    EXPECT_THAT(support::message_of<ConfigError>([&] { accelerator.prepare(net, blocks); }),
                HasSubstr("can't be saved and loaded in pieces"));
    AcceleratorState::reset();
    Accelerator another({.cpu = true, .fsdp_plugin = every_linear()});
    Net moved;
    auto m = another.prepare(moved);
    moved->to(torch::kDouble);
    EXPECT_THAT(support::message_of<ConfigError>([&] { m(rows(0)); }), HasSubstr("were replaced after prepare()"));
  });
}

TEST(FsdpFault, RanksThatPartWaysAreNamedInDebugMode) {
  if (!support::is_rank()) {
    support::expect_ranks_pass(
        "FsdpFault.RanksThatPartWaysAreNamedInDebugMode",
        {.world_size = 2, .env = {{"ACCELERATE_DEBUG_MODE", "1"}, {"ACCELERATE_SHARED_MEMORY", "0"}}});
    return;
  }
  Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
  Net net;
  auto m = accelerator.prepare(net);
  const std::string text = support::message_of<CommError>([&] {
    torch::NoGradGuard no_grad;
    m(rows(0), support::rank() == 1);
  });
  EXPECT_THAT(text, HasSubstr("'left'"));
  EXPECT_THAT(text, HasSubstr("'right'"));
}

/// Without debug mode nobody compares units, but a rank that needs what another never offers hears so when the time is
/// up, on either store.
void parted_without_debug_mode(const char* shared, const std::string& name) {
  if (!support::is_rank())
    return support::expect_ranks_pass(name, {.world_size = 2, .env = {{"ACCELERATE_SHARED_MEMORY", shared}}});
  constexpr std::chrono::seconds kTimeout(6);  // bounds their meeting, too
  Accelerator accelerator(
      {.cpu = true, .fsdp_plugin = every_linear(), .kwargs_handlers = {InitProcessGroupKwargs{.timeout = kTimeout}}});
  Net net;
  auto m = accelerator.prepare(net);
  if (support::rank() == 1) {  // trains nothing, and lives
    EXPECT_TRUE(support::heard("rank 1 never comes", 1, 5 * kTimeout));
    return;
  }
  const std::string text = support::message_of<CommError>([&] { accelerator.backward(loss_of(m(mine(rows(0))))); });
  EXPECT_THAT(text, HasSubstr("rank 1"));
  support::say("rank 1 never comes");
}

TEST(FsdpFault, RanksThatPartWaysEndByTheTimeout) {
  parted_without_debug_mode("0", "FsdpFault.RanksThatPartWaysEndByTheTimeout");
}
TEST(FsdpFault, RanksThatPartWaysEndByTheTimeoutOnSharedMemory) {
  parted_without_debug_mode("1", "FsdpFault.RanksThatPartWaysEndByTheTimeoutOnSharedMemory");
}

void killed_in_backward(const char* shared, const std::string& name) {
  if (!support::is_rank()) {
    const auto results =
        support::run_test_in_ranks(name, {.world_size = 3, .env = {{"ACCELERATE_SHARED_MEMORY", shared}}});
    EXPECT_EQ(results[1].signal, SIGKILL);
    for (const size_t r : {size_t{0}, size_t{2}}) EXPECT_EQ(results[r].exit_code, 0) << results[r].output;
    return;
  }
  // The group's timeout comes after the deadline of the ranks.
  Accelerator accelerator({.cpu = true, .fsdp_plugin = every_linear()});
  Net net;
  auto [m, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  const std::string text = support::message_of<CommError>([&] {
    for (int64_t step = 0; step < 10000; ++step) {
      auto output = m(mine(rows(step)));
      if (support::rank() == 1 && step == 3)
        output.register_hook([](const at::Tensor&) { ::kill(::getpid(), SIGKILL); });
      accelerator.backward(loss_of(output));
      opt.step(), opt.zero_grad();
    }
  });
  EXPECT_THAT(text, HasSubstr("rank 1"));
}

TEST(FsdpFault, ARankKilledInBackwardEndsTheOthersWithAnError) {
  killed_in_backward("0", "FsdpFault.ARankKilledInBackwardEndsTheOthersWithAnError");
}
TEST(FsdpFault, ARankKilledInBackwardEndsTheOthersWithAnErrorOnSharedMemory) {
  killed_in_backward("1", "FsdpFault.ARankKilledInBackwardEndsTheOthersWithAnErrorOnSharedMemory");
}

}  // namespace
