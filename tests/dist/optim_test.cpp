#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/comm.hpp"
#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "ranks.hpp"

using namespace accelerate;

namespace {

using namespace accelerate::optim;

// One rank's overflow makes all ranks skip, with and without a fused step, with and without unscale_ before; then all
// go on together.
RANKS_TEST(OptimRanks, OverflowOnOneRankIsSkippedByAll, 2, 3) {
  const PartialState state;
  for (const bool fused : {true, false}) {
    for (const bool unscale_first : {true, false}) {
      const auto weight = torch::ones(3, torch::requires_grad());
      torch::optim::AdamW adamw(std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(0.1));
      const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 256});
      const AcceleratedOptimizer optimizer(adamw, true, scaler, {.fused = fused});
      const AcceleratedScheduler schedule(constant_schedule(adamw), {optimizer});
      const auto step = [&](double factor) {
        scaler->scale((weight * factor).sum()).backward();
        if (unscale_first) scaler->unscale_(adamw);
        optimizer.step(), schedule.step(), optimizer.zero_grad();
      };
      step(state.is_last_process() ? std::numeric_limits<double>::quiet_NaN() : 1.0);
      EXPECT_TRUE(optimizer.step_was_skipped());
      EXPECT_EQ(weight[0].item<float>(), 1.0F);
      EXPECT_EQ(scaler->get_scale(), 128);
      EXPECT_EQ(schedule.last_epoch(), 0);
      step(1.0);
      EXPECT_FALSE(optimizer.step_was_skipped());
      EXPECT_LT(weight[0].item<float>(), 1.0F);
      EXPECT_EQ(schedule.last_epoch(), state.num_processes());
      const auto all = gather(weight.detach().clone());
      EXPECT_TRUE(torch::equal(all, all[0].expand_as(all)));
    }
  }
}

// A rank without gradients still takes part in the agreement.
RANKS_TEST(OptimRanks, RankWithoutGradientsAgrees, 2) {
  const PartialState state;
  const auto weight = torch::ones(3, torch::requires_grad());
  torch::optim::SGD sgd(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  const auto loss = scaler.scale((weight * std::numeric_limits<double>::infinity()).sum());
  if (state.is_main_process()) loss.backward();
  EXPECT_FALSE(scaler.step(sgd));
}

// The reference's test_scheduler.py on several processes.
RANKS_TEST(OptimRanks, SchedulesStepOncePerProcess, 2, 3) {
  const PartialState state;
  const int64_t world = state.num_processes();
  const auto weight = torch::ones(3, torch::requires_grad());
  torch::optim::SGD sgd(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(1.0));
  const AcceleratedOptimizer optimizer(sgd);
  const auto tenth_less = [](int64_t n) { return 1.0 - static_cast<double>(n) / 10.0; };
  const auto rate_after_a_step = [&](bool step_with_optimizer, bool split_batches) {
    sgd.param_groups()[0].options().set_lr(1.0);
    const AcceleratedScheduler schedule(lambda_lr(sgd, tenth_less), {optimizer}, step_with_optimizer, split_batches);
    schedule.step();
    return schedule.get_last_lr()[0];
  };
  EXPECT_DOUBLE_EQ(rate_after_a_step(true, false), tenth_less(world));
  EXPECT_DOUBLE_EQ(rate_after_a_step(true, true), tenth_less(1));
  EXPECT_DOUBLE_EQ(rate_after_a_step(false, false), tenth_less(1));
  const AcceleratedScheduler cycle(
      one_cycle(sgd, {.max_lr = {0.01}, .epochs = 1, .steps_per_epoch = 2, .cycle_momentum = false}), {optimizer});
  cycle.step();
  EXPECT_EQ(cycle.last_epoch(), std::min<int64_t>(world, 2));
  for (int i = 0; i < 3; ++i) cycle.step();
  EXPECT_EQ(cycle.last_epoch(), 2);
}

// A metric is one observation, of all ranks together: the rate falls when the mean has stopped falling, on all ranks at
// once, whatever the rank's own metric does.
RANKS_TEST(OptimRanks, AMetricCountsOnceAndIsTheMeanOfTheRanks, 2, 3, 5) {
  const PartialState state;
  const auto weight = torch::ones(3, torch::requires_grad());
  for (const bool step_with_optimizer : {true, false})
    for (const bool split_batches : {true, false}) {
      torch::optim::SGD sgd(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(1.0));
      const AcceleratedOptimizer optimizer(sgd);
      const AcceleratedScheduler schedule(reduce_lr_on_plateau(sgd, {.factor = 0.5, .patience = 2, .threshold = 0}),
                                          {optimizer}, step_with_optimizer, split_batches);
      // Rank 0 gets better in each step, the others worse by as much in all.
      const double others = state.is_main_process() ? -1.0 : 1.0 / static_cast<double>(state.num_processes() - 1);
      for (int step = 0; step < 6; ++step) schedule.step(1.0 / (1 + step));
      EXPECT_EQ(schedule.get_last_lr()[0], 1.0) << "six metrics, each better than the one before";
      EXPECT_EQ(schedule.last_epoch(), 6);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(schedule.get_last_lr()[0], 1.0) << step;
        schedule.step(1.0 / 4 + others * step);
      }
      EXPECT_EQ(schedule.get_last_lr()[0], 0.5) << "the mean was no better three times";
    }
}

// A NaN of one rank is a bad epoch for all.
RANKS_TEST(OptimRanks, AMetricThatIsNaNOnOneRankIsNaNOnAll, 2, 3) {
  const PartialState state;
  const auto weight = torch::ones(3, torch::requires_grad());
  torch::optim::SGD sgd(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(1.0));
  const AcceleratedScheduler schedule(reduce_lr_on_plateau(sgd, {.factor = 0.5, .patience = 0}),
                                      {AcceleratedOptimizer(sgd)});
  schedule.step(1.0);
  schedule.step(state.is_last_process() ? std::numeric_limits<double>::quiet_NaN() : 0.5);
  EXPECT_EQ(schedule.get_last_lr()[0], 0.5);
}

}  // namespace
