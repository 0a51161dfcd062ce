// Rules of the loss scale other than PyTorch's, beyond DeepSpeed's own sequences
// (tests/conformance/cases/deepspeed_loss_scaler.json).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "optim/ivalue_access.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::optim;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// A parameter and what steps on it.
struct Trained {
  at::Tensor weight = torch::ones(2, torch::requires_grad());
  torch::optim::SGD sgd{{weight}, torch::optim::SGDOptions(0.5)};

  void backward(GradScaler& scaler, double gradient) {
    sgd.zero_grad();
    scaler.scale((weight * gradient).sum()).backward();
  }
  /// @return whether it stepped
  bool step(GradScaler& scaler, double gradient) {
    backward(scaler, gradient);
    const bool stepped = scaler.step(sgd);
    scaler.update(sgd);
    return stepped;
  }
};

class LossScale : public ::testing::Test {
 protected:
  void SetUp() override { GradientState::reset(); }
  void TearDown() override { GradientState::reset(), AcceleratorState::reset(true); }
  Trained one, other;
};

Dict changed(const GradScaler& scaler, const std::string& key, const c10::IValue& value) {
  Dict state = scaler.state_dict().toGenericDict().copy();
  state.insert_or_assign(key, value);
  return state;
}

TEST_F(LossScale, AnOverflowAtTheSmallestScaleIsAnErrorThatChangesNothing) {
  GradScaler scaler(DynamicLossScale{.initial_scale = 8, .window = 1, .hysteresis = 1, .min_scale = 4});
  EXPECT_FALSE(one.step(scaler, kInf));
  EXPECT_EQ(scaler.get_scale(), 4);
  one.backward(scaler, kInf);
  EXPECT_FALSE(scaler.step(one.sgd));
  const auto before = scaler.state_dict();
  for (int again = 0; again < 2; ++again)
    EXPECT_THAT(message_of<ConfigError>([&] { scaler.update(one.sgd); }),
                AllOf(HasSubstr("a loss scale of 4"), HasSubstr("smallest"), HasSubstr("min_loss_scale")));
  EXPECT_THAT(message_of<ConfigError>([&] { scaler.update(); }), HasSubstr("smallest"));
  const auto after = scaler.state_dict();
  for (const auto& entry : before.toGenericDict())
    EXPECT_EQ(entry.value(), after.toGenericDict().at(entry.key())) << entry.key();
  EXPECT_EQ(one.weight[0].item<float>(), 1);
}

TEST_F(LossScale, StepsOfOneRoundCountOnce) {
  const auto round = [&](GradScaler& scaler, double first, double second) {
    one.sgd.zero_grad(), other.sgd.zero_grad();
    scaler.scale((one.weight * first).sum() + (other.weight * second).sum()).backward();
    scaler.step(one.sgd);
    scaler.update(one.sgd);
    scaler.step(other.sgd);
    scaler.update(other.sgd);
  };
  GradScaler scaler(DynamicLossScale{.initial_scale = 64, .window = 2, .hysteresis = 3});
  round(scaler, kInf, kInf);
  EXPECT_EQ(scaler.get_hysteresis(), 2) << "two overflows, one round";
  round(scaler, 1, kInf);
  EXPECT_EQ(scaler.get_hysteresis(), 1);
  round(scaler, kInf, 1);
  EXPECT_EQ(scaler.get_scale(), 32);
  EXPECT_EQ(scaler.get_hysteresis(), 1);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scaler.get_growth_tracker(), i);
    EXPECT_EQ(scaler.get_scale(), 32);
    round(scaler, 1, 1);
  }
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_EQ(scaler.state_dict().toGenericDict().at("cur_iter").toInt(), 6);
}

TEST_F(LossScale, GradientsOfOneRoundAreDividedByWhatTheyWereMultipliedWith) {
  GradScaler scaler(DynamicLossScale{.initial_scale = 4, .window = 1, .hysteresis = 1});
  one.step(scaler, 1);
  scaler.scale((one.weight * 0.5).sum() + (other.weight * 0.5).sum()).backward();
  one.sgd.zero_grad();
  EXPECT_EQ(other.weight.grad()[0].item<float>(), 2) << "the scale grows with the second good step";
  one.weight.mutable_grad() = torch::full({2}, kInf);
  scaler.step(one.sgd), scaler.update(one.sgd);
  EXPECT_EQ(scaler.get_scale(), 2) << "the next one";
  scaler.step(other.sgd), scaler.update(other.sgd);
  EXPECT_EQ(other.weight[0].item<float>(), 0.75F);
  one.backward(scaler, 1);
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 2);
}

TEST_F(LossScale, AFixedScaleStaysAndLooksForOverflows) {
  GradScaler scaler(FixedLossScale{128});
  EXPECT_FALSE(one.step(scaler, kInf));
  EXPECT_EQ(scaler.get_scale(), 128);
  EXPECT_EQ(one.weight[0].item<float>(), 1);
  one.backward(scaler, 1);
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 128);
  EXPECT_TRUE(scaler.step(one.sgd));
  scaler.update();
  EXPECT_EQ(one.weight[0].item<float>(), 0.5F);
  EXPECT_EQ(scaler.get_hysteresis(), std::nullopt);
  EXPECT_EQ(GradScaler(GradScalerKwargs{}).get_hysteresis(), std::nullopt);
  // By 1: only looked at, in a whole run too, where the program may step as it likes.
  GradScaler looks(FixedLossScale{});
  looks.watch(other.sgd);
  for (int i = 0; i < 8; ++i) {
    other.backward(looks, 1);
    EXPECT_EQ(other.weight.grad()[0].item<float>(), 1);
    other.sgd.step();
    other.sgd.zero_grad();
  }
  EXPECT_FALSE(other.step(looks, kInf));
  EXPECT_TRUE(other.step(looks, 1));
  looks.unwatch(other.sgd);
}

TEST_F(LossScale, StatesResumeAnywhere) {
  const std::vector<int> overflows{0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0};
  const DynamicLossScale settings{.initial_scale = 1024, .window = 2, .hysteresis = 2};
  for (size_t cut = 0; cut < overflows.size(); ++cut) {
    GradScaler whole(settings);
    std::optional<GradScaler> part;
    for (size_t i = 0; i < overflows.size(); ++i) {
      if (i == cut) {
        part.emplace(DynamicLossScale{.window = 9, .hysteresis = 5});  // the state's settings are taken over
        part->load_state_dict(whole.state_dict());
      }
      one.step(whole, overflows[i] ? kInf : 1e-3);
      if (part) {
        other.step(*part, overflows[i] ? kInf : 1e-3);
        EXPECT_EQ(part->get_scale(), whole.get_scale()) << cut << " " << i;
        EXPECT_EQ(part->get_hysteresis(), whole.get_hysteresis()) << cut << " " << i;
      }
    }
  }
  // Also where the scale has its place already.
  GradScaler scaler(settings), saved(settings);
  one.step(scaler, 1);
  saved.load_state_dict(changed(scaler, "cur_scale", 16.0));
  scaler.load_state_dict(saved.state_dict());
  one.backward(scaler, 1);
  EXPECT_EQ(one.weight.grad()[0].item<float>(), 16);
}

TEST_F(LossScale, StatesAreReadStrictly) {
  GradScaler scaler(DynamicLossScale{.initial_scale = 64});
  one.step(scaler, kInf), one.step(scaler, 1), one.step(scaler, kInf);
  const auto before = scaler.state_dict();
  const std::vector<std::tuple<std::string, c10::IValue, std::string>> wrong{
      {"cur_scale", 0.5, "at least min_scale"},
      {"cur_scale", std::nan(""), "at least min_scale"},
      {"min_scale", 0.0, "min_scale"},
      {"cur_iter", -1, "cur_iter"},
      {"last_overflow_iter", 3, "last_overflow"},
      {"last_overflow_iter", -2, "last_overflow"},
      {"cur_hysteresis", 3, "cur_hysteresis 3"},
      {"cur_hysteresis", 0, "cur_hysteresis 0"},
      {"scale_window", 0, "window"},
      {"delayed_shift", 0, "hysteresis"},
      {"consecutive_hysteresis", 1, "bool"},
      {"scale_factor", 4.0, "scale_factor"},
      {"dynamic", false, "of a fixed loss scale"},
      {"cur_iter", "x", "number"}};
  for (const auto& [key, value, text] : wrong)
    EXPECT_THAT(message_of<CheckpointError>([&] { scaler.load_state_dict(changed(scaler, key, value)); }),
                HasSubstr(text))
        << key;
  for (const auto& entry : before.toGenericDict()) {
    Dict without = before.toGenericDict().copy();
    static_cast<void>(without.erase(entry.key()));
    EXPECT_THAT(message_of<CheckpointError>([&] { scaler.load_state_dict(without); }),
                HasSubstr("'" + entry.key().toStringRef() + "'"));
    EXPECT_EQ(entry.value(), scaler.state_dict().toGenericDict().at(entry.key()));
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { scaler.load_state_dict(GradScaler(GradScalerKwargs{}).state_dict()); }),
              HasSubstr("dynamic"));
  EXPECT_THAT(message_of<CheckpointError>([&] { GradScaler(FixedLossScale{2}).load_state_dict(before); }),
              HasSubstr("of a dynamic loss scale"));
  EXPECT_THROW(GradScaler(GradScalerKwargs{}).load_state_dict(before), CheckpointError);
  GradScaler fixed(FixedLossScale{2});
  EXPECT_THROW(fixed.load_state_dict(changed(fixed, "cur_scale", -1.0)), CheckpointError);
  fixed.load_state_dict(changed(fixed, "cur_scale", 32.0));
  EXPECT_EQ(fixed.get_scale(), 32);
}

TEST_F(LossScale, SettingsOutOfRangeAreRefused) {
  const auto refuses = [](const DynamicLossScale& settings, const char* text) {
    EXPECT_THAT(message_of<ConfigError>([&] { GradScaler{settings}; }), HasSubstr(text));
  };
  refuses({.window = 0}, "window 0");
  refuses({.hysteresis = 0}, "hysteresis 0");
  refuses({.min_scale = 0}, "min_scale 0");
  refuses({.initial_scale = 8, .min_scale = 16}, "loss scale of 8");
  refuses({.initial_scale = kInf}, "loss scale of inf");
  EXPECT_THAT(message_of<ConfigError>([&] { GradScaler{FixedLossScale{0}}; }), HasSubstr("loss scale 0"));
  const GradScaler scaler(DynamicLossScale{.window = 7});
  EXPECT_EQ(scaler.get_scale(), 65536);
  EXPECT_EQ(scaler.get_growth_interval(), 7);
  EXPECT_EQ(scaler.get_growth_factor(), 2);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
}

TEST_F(LossScale, GrowsNoFurtherThanItsTypeReaches) {
  GradScaler scaler(DynamicLossScale{.initial_scale = std::exp2(126), .window = 1});
  for (int i = 0; i < 6; ++i) one.step(scaler, 0);
  EXPECT_EQ(scaler.get_scale(), std::exp2(127));
}

TEST_F(LossScale, HalvesNoFurtherThanTheSmallest) {
  GradScaler scaler(DynamicLossScale{.initial_scale = 8, .hysteresis = 1, .min_scale = 6});
  one.step(scaler, kInf);
  EXPECT_EQ(scaler.get_scale(), 6);
}

TEST_F(LossScale, AScaleThatIsSetGoesOnByItsRule) {
  GradScaler scaler(DynamicLossScale{.initial_scale = 64, .hysteresis = 1});
  one.step(scaler, 1);
  scaler.update(16.0);
  EXPECT_EQ(scaler.get_scale(), 16);
  one.step(scaler, kInf);
  EXPECT_EQ(scaler.get_scale(), 8);
}

TEST_F(LossScale, Fp16GradientsAreTakenWhereTheyAreAllowed) {
  const at::Tensor weight = torch::ones({2}, at::TensorOptions().dtype(at::kHalf).requires_grad(true));
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.5));
  for (const bool allowed : {false, true}) {
    GradScaler scaler(DynamicLossScale{.initial_scale = 1024});
    scaler.set_fp16_gradients(allowed);
    sgd.zero_grad();
    scaler.scale((weight * 0.5).sum()).backward();
    if (!allowed) {
      EXPECT_THAT(message_of<ConfigError>([&] { scaler.unscale_(sgd); }), HasSubstr("fp16 gradient"));
      continue;
    }
    scaler.unscale_(sgd);
    EXPECT_EQ(weight.grad()[0].item<float>(), 0.5F);
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    EXPECT_EQ(weight[0].item<float>(), 0.75F);
  }
}

/// In fp16 the quotient would have two bits.
TEST_F(LossScale, WideningDividesInTheParametersType) {
  const at::Tensor weight = torch::zeros({2}, torch::requires_grad());
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1));
  GradScaler scaler(DynamicLossScale{.initial_scale = 65536});
  scaler.set_widening(true);
  scaler.scale(weight.sum());
  weight.mutable_grad() = torch::full({2}, 0.75, at::kHalf);
  scaler.unscale_(sgd);
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(weight.grad()[0].item<float>(), 0.75F / 65536);
}

}  // namespace
