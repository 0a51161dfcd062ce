#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tuple>

#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "optim/ivalue_access.hpp"

using namespace accelerate;

namespace {

using namespace accelerate::optim;

class GradScalerTest : public ::testing::Test {
 protected:
  void SetUp() override { GradientState::reset(); }
  void TearDown() override { GradientState::reset(), AcceleratorState::reset(true); }

  /// loss = sum(weight * factor): the gradient is `factor`.
  void backward(GradScaler& scaler, double factor) { scaler.scale((weight * factor).sum()).backward(); }

  at::Tensor weight = torch::ones(3, torch::requires_grad());
  torch::optim::SGD sgd{std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(0.5)};
};

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST_F(GradScalerTest, ScalesUnscalesAndSteps) {
  GradScaler scaler({.init_scale = 1024});
  backward(scaler, 0.25);
  EXPECT_EQ(weight.grad()[0].item<float>(), 256.0F);
  scaler.unscale_(sgd);
  EXPECT_EQ(weight.grad()[0].item<float>(), 0.25F);
  EXPECT_TRUE(scaler.step(sgd));
  scaler.update();
  EXPECT_EQ(weight[0].item<float>(), 0.875F);
  EXPECT_EQ(scaler.get_growth_tracker(), 1);
  sgd.zero_grad();
  backward(scaler, 0.25);
  EXPECT_TRUE(scaler.step(sgd)) << "unscales by itself";
  EXPECT_EQ(weight[0].item<float>(), 0.75F);
}

TEST_F(GradScalerTest, SkipsOverflowShrinksAndGrows) {
  GradScaler scaler({.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 2});
  for (const double bad : {kInf, -kInf, kNan}) {
    sgd.zero_grad();
    backward(scaler, bad);
    EXPECT_FALSE(scaler.step(sgd));
    scaler.update();
    EXPECT_EQ(weight[0].item<float>(), 1.0F);
  }
  EXPECT_EQ(scaler.get_scale(), 8.0 / 64);
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    backward(scaler, 0.125);
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 8.0 / 64 * 16) << "two growths in four good steps";
}

TEST_F(GradScalerTest, WrongOrderIsNamed) {
  GradScaler scaler;
  EXPECT_THROW(scaler.unscale_(sgd), ConfigError) << "nothing scaled";
  EXPECT_THROW(scaler.step(sgd), ConfigError);
  EXPECT_THROW(scaler.update(), ConfigError);
  backward(scaler, 1);
  EXPECT_THROW(scaler.update(), ConfigError) << "nothing checked";
  scaler.unscale_(sgd);
  EXPECT_THROW(scaler.unscale_(sgd), ConfigError);
  scaler.step(sgd);
  EXPECT_THROW(scaler.step(sgd), ConfigError);
  EXPECT_THROW(scaler.unscale_(sgd), ConfigError);
  scaler.update();
  scaler.unscale_(sgd);
  EXPECT_THROW(GradScaler({.growth_factor = 1.0}), ConfigError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1.0}), ConfigError);
  EXPECT_THROW(GradScaler({.init_scale = kInf}), ConfigError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), ConfigError);
}

TEST_F(GradScalerTest, RefusesToUnscaleHalfPrecision) {
  const auto half = torch::ones(2, at::TensorOptions(at::kHalf).requires_grad(true));
  torch::optim::SGD optimizer(std::vector<at::Tensor>{half}, torch::optim::SGDOptions(0.5));
  GradScaler scaler;
  scaler.scale(torch::ones({}));
  half.mutable_grad() = torch::ones(2, at::kHalf);
  EXPECT_THROW(scaler.unscale_(optimizer), ConfigError);
}

TEST_F(GradScalerTest, SparseGradients) {
  const auto table = torch::ones({4, 2}, torch::requires_grad());
  torch::optim::SGD optimizer(std::vector<at::Tensor>{table}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 4});
  scaler.scale(torch::ones({}));
  table.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1, 2}}), torch::full({2, 2}, 8.0), {4, 2});
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(table[1][0].item<float>(), 0.0F);
  scaler.update();
  table.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1}}), torch::full({1, 2}, kNan), {4, 2});
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST_F(GradScalerTest, DisabledDoesNothing) {
  GradScaler scaler({.enabled = false});
  const auto loss = (weight * 0.5).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(sgd);
  EXPECT_TRUE(scaler.step(sgd));
  scaler.update();
  EXPECT_EQ(weight[0].item<float>(), 0.75F);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_EQ(scaler.state_dict().toGenericDict().size(), 0U);
}

TEST_F(GradScalerTest, StateRoundTrips) {
  GradScaler saved({.init_scale = 512, .growth_interval = 5});
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    backward(saved, 0.1);
    saved.step(sgd), saved.update();
  }
  const auto state = saved.state_dict().toGenericDict();
  for (const char* key : {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
    EXPECT_TRUE(state.contains(key)) << key;
  GradScaler loaded;
  loaded.load_state_dict(state);
  EXPECT_EQ(loaded.get_scale(), 512);
  EXPECT_EQ(loaded.get_growth_tracker(), 3);
  for (int step = 0; step < 2; ++step) {
    sgd.zero_grad();
    backward(loaded, 0.1);
    loaded.step(sgd), loaded.update();
  }
  EXPECT_EQ(loaded.get_scale(), 1024) << "grows where the saved one would";
  loaded.load_state_dict(state);
  EXPECT_EQ(loaded.get_scale(), 512) << "also into one that is in use";
  auto bad = state.copy();
  bad.insert_or_assign("growth_factor", 0.5);
  EXPECT_THROW(loaded.load_state_dict(bad), CheckpointError);
  std::ignore = bad.erase("growth_factor");
  EXPECT_THROW(loaded.load_state_dict(bad), CheckpointError);
  EXPECT_THROW(loaded.load_state_dict(make_dict()), CheckpointError);
  EXPECT_EQ(loaded.get_scale(), 512);
}

TEST_F(GradScalerTest, OptimizerTellsThatItsStepWasSkippedAndTheScheduleWaits) {
  for (const bool fused : {true, false}) {
    const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 1024});
    const AcceleratedOptimizer optimizer(
        std::make_shared<torch::optim::AdamW>(std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(0.1)), true,
        scaler, {.fused = fused});
    const AcceleratedScheduler schedule(
        lambda_lr(optimizer, [](int64_t n) { return 1.0 - 0.1 * static_cast<double>(n); }), {optimizer});
    const AcceleratedScheduler independent(lambda_lr(optimizer, [](int64_t) { return 1.0; }), {optimizer},
                                           /*step_with_optimizer=*/false);
    const auto before = weight.detach().clone();
    backward(*scaler, kInf);
    optimizer.step(), schedule.step(), independent.step(), optimizer.zero_grad();
    EXPECT_TRUE(optimizer.step_was_skipped());
    EXPECT_TRUE(torch::equal(weight, before));
    EXPECT_TRUE(optimizer.state().empty()) << "a skipped first step leaves no state";
    EXPECT_EQ(schedule.last_epoch(), 0);
    EXPECT_EQ(independent.last_epoch(), 1);
    EXPECT_EQ(scaler->get_scale(), 512);
    backward(*scaler, 0.5);
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    EXPECT_FALSE(optimizer.step_was_skipped());
    EXPECT_EQ(optimizer.step_was_fused(), fused);
    EXPECT_FALSE(torch::equal(weight, before));
    EXPECT_EQ(schedule.last_epoch(), 1);
  }
}

TEST_F(GradScalerTest, FusedKernelUnscalesAsThePlainWayDoes) {
  const auto run = [](bool fused, bool clip) {
    const auto p = torch::linspace(-1, 1, 37).set_requires_grad(true);
    const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 4096});
    torch::optim::AdamW adamw(std::vector<at::Tensor>{p}, torch::optim::AdamWOptions(0.01));
    const AcceleratedOptimizer optimizer(adamw, true, scaler, {.fused = fused});
    for (int step = 0; step < 10; ++step) {
      scaler->scale((p.sin() * p).sum()).backward();
      if (clip) {
        scaler->unscale_(adamw);
        torch::nn::utils::clip_grad_norm_(p, 0.5);
      }
      optimizer.step(), optimizer.zero_grad();
    }
    return p.detach();
  };
  for (const bool clip : {false, true})
    EXPECT_TRUE(torch::allclose(run(true, clip), run(false, clip), 1e-6, 1e-7)) << clip;
}

TEST_F(GradScalerTest, FusedTrainsTrueHalfPrecision) {
  const auto half = torch::ones(5, at::TensorOptions(at::kHalf).requires_grad(true));
  const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 1024});
  const AcceleratedOptimizer optimizer(torch::optim::SGD(std::vector<at::Tensor>{half}, torch::optim::SGDOptions(0.5)),
                                       true, scaler, {.fused = true});
  scaler->scale((half.to(at::kFloat) * 0.25).sum()).backward();
  optimizer.step();
  EXPECT_EQ(half[0].item<float>(), 0.875F);
}

TEST_F(GradScalerTest, ClippingWithTwoOptimizersUnscalesEachOnce) {
  const auto other = torch::ones(3, torch::requires_grad());
  torch::optim::SGD second(std::vector<at::Tensor>{other}, torch::optim::SGDOptions(0.5));
  const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 1024});
  const AcceleratedOptimizer a(sgd, true, scaler), b(second, true, scaler);
  for (int step = 1; step <= 2; ++step) {
    scaler->scale(((weight + other) * 0.25).sum()).backward();
    scaler->unscale_(sgd), scaler->unscale_(second);
    a.step(), b.step(), a.zero_grad(), b.zero_grad();
    EXPECT_EQ(weight[0].item<float>(), 1.0F - 0.125F * static_cast<float>(step));
    EXPECT_EQ(other[0].item<float>(), 1.0F - 0.125F * static_cast<float>(step));
  }
  // Gradients that are dropped after clipping don't block the next step.
  scaler->unscale_(sgd);
  a.zero_grad();
  backward(*scaler, 0.25);
  scaler->unscale_(sgd);
}

TEST_F(GradScalerTest, OneOptimizersOverflowIsNotTheOthersStep) {
  for (const bool fused : {true, false}) {
    const auto other = torch::zeros(1, torch::requires_grad());
    const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 1024, .growth_interval = 2});
    const auto one = torch::zeros(1, torch::requires_grad());
    const auto prepared = [&](const at::Tensor& parameter) {
      return AcceleratedOptimizer(torch::optim::SGD(std::vector<at::Tensor>{parameter}, torch::optim::SGDOptions(1)),
                                  true, scaler, {.fused = fused});
    };
    const auto a = prepared(one), b = prepared(other);
    const auto both = [&](double factor) { scaler->scale((one * factor + other * 0.25).sum()).backward(); };
    both(kInf);
    a.step();
    EXPECT_EQ(scaler->get_scale(), 512) << "the new one is told at once";
    EXPECT_EQ(scaler->state_dict().toGenericDict().at("scale").toDouble(), 512);
    b.step();
    EXPECT_EQ(other.item<float>(), -0.25F);
    EXPECT_EQ(scaler->get_scale(), 512) << "once for both";
    a.zero_grad(), b.zero_grad();
    // Growth, after two steps of both and not of either.
    for (int step = 2; step <= 3; ++step) {
      both(0.5);
      EXPECT_EQ(one.grad().item<float>(), 256.0F);
      a.step(), b.step(), a.zero_grad(), b.zero_grad();
      EXPECT_EQ(scaler->get_growth_tracker(), step == 2 ? 1 : 0);
      EXPECT_EQ(other.item<float>(), -0.25F * static_cast<float>(step));
    }
    EXPECT_EQ(scaler->get_scale(), 1024);
    EXPECT_EQ(one.item<float>(), -1.0F);
  }
}

TEST_F(GradScalerTest, GradientsThatWaitFollowTheScale) {
  const auto other = torch::zeros(1, torch::requires_grad());
  torch::optim::SGD second(std::vector<at::Tensor>{other}, torch::optim::SGDOptions(1));
  const auto scaler = std::make_shared<GradScaler>(GradScalerKwargs{.init_scale = 1024, .growth_interval = 100});
  const AcceleratedOptimizer a(sgd, true, scaler), b(second, true, scaler);
  const auto both = [&](double factor) { scaler->scale(((weight * factor).sum() + other * 0.25).sum()).backward(); };
  // b steps every third time; meanwhile an overflow of a's halves the scale, and b is clipped too early.
  both(kInf);
  a.step(), a.zero_grad();
  both(1);
  EXPECT_EQ(other.grad().item<float>(), 0.5F * 512);
  scaler->unscale_(second);
  EXPECT_EQ(other.grad().item<float>(), 0.5F);
  a.step(), a.zero_grad();
  both(1);
  b.step();
  EXPECT_EQ(other.item<float>(), -0.75F);
  // The program sets the scale itself.
  b.zero_grad();
  both(1);
  scaler->update(64.0);
  b.step();
  EXPECT_EQ(other.item<float>(), -1.0F);
}

TEST_F(GradScalerTest, TheOldOptimizersStepIsNamed) {
  for (const bool momentum : {true, false}) {
    const auto parameter = torch::ones(3, torch::requires_grad());
    torch::optim::SGD old(std::vector<at::Tensor>{parameter},
                          torch::optim::SGDOptions(0.5).momentum(momentum ? 0.9 : 0.0));
    const auto scaler = std::make_shared<GradScaler>();
    const AcceleratedOptimizer prepared(old, true, scaler);
    const auto backward = [&] { scaler->scale((parameter * 0.25).sum()).backward(); };
    backward();
    old.zero_grad();  // a batch that the program throws away
    backward();
    for (int step = 0; step < 3; ++step) {
      backward();
      old.step(), old.zero_grad();
    }
    EXPECT_THAT(support::message_of<ConfigError>(backward),
                testing::AllOf(testing::HasSubstr("it has not stepped"), testing::HasSubstr("65536 times too large")));
  }
  {
    // Steps that leave nothing to be looked at a second time.
    const auto parameter = torch::ones(3, torch::requires_grad());
    torch::optim::SGD old(std::vector<at::Tensor>{parameter}, torch::optim::SGDOptions(1e38));
    const auto scaler = std::make_shared<GradScaler>();
    const AcceleratedOptimizer prepared(old, true, scaler);
    const auto backward = [&] { scaler->scale((parameter * 0.25).sum()).backward(); };
    backward();
    old.step(), old.zero_grad();
    EXPECT_FALSE(parameter.isfinite().any().item<bool>());
    EXPECT_THAT(support::message_of<ConfigError>(backward), testing::HasSubstr("it has not stepped"));
  }
  // Weights that are written to, before and after the first step of the handle, are the program's own affair.
  const auto scaler = std::make_shared<GradScaler>();
  const AcceleratedOptimizer prepared(sgd, true, scaler);
  for (int loss = 0; loss < 2; ++loss) {
    backward(*scaler, 0.25);
    prepared.zero_grad();
    at::NoGradGuard no_grad;
    weight.mul_(0.5);
  }
  backward(*scaler, 0.25);
  prepared.step(), prepared.zero_grad();
  {
    at::NoGradGuard no_grad;
    weight.mul_(0.5);
  }
  backward(*scaler, 0.25);
}

TEST_F(GradScalerTest, ClosureIsRefused) {
  const auto scaler = std::make_shared<GradScaler>();
  const AcceleratedOptimizer optimizer(sgd, true, scaler);
  backward(*scaler, 1);
  EXPECT_THROW(optimizer.step([] { return torch::zeros({}); }), ConfigError);
}

}  // namespace
