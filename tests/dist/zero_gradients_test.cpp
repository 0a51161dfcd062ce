/// How gradients are divided and added up under DeepSpeed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "ranks.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;

/// Its weight's gradient is its input.
struct ProductImpl : torch::nn::Module {
  ProductImpl() { weight = register_parameter("weight", torch::ones({6})); }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
  at::Tensor weight;
};
TORCH_MODULE(Product);

/// Where they may be divided before the sum.
std::string zero_of(int64_t number) {
  return R"("zero_optimization": {"stage": )" + std::to_string(number) + R"(, "reduce_scatter": false})";
}

/// The gradient that one backward of so many copies of `x` leaves, in fp16 without a loss scale.
at::Tensor average_in_fp16(int64_t number, const std::string& more, double x) {
  support::reset_states();
  Accelerator accelerator(
      {.mixed_precision = "fp16",
       .cpu = true,
       .deepspeed_plugin = DeepSpeedPlugin{
           .hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": true, "loss_scale": 1},)" +
                           zero_of(number) + more + "}"}});
  Product model;
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.1));
  accelerator.backward(m(torch::full({6}, x, at::kHalf)));
  return safe_get_full_grad(m->weight);
}

const std::vector<std::string> kDivisions{R"(, "prescale_gradients": true)", R"(, "gradient_predivide_factor": 4.0)",
                                          R"(, "gradient_predivide_factor": 0.5)",
                                          R"(, "prescale_gradients": true, "gradient_predivide_factor": 8.0)"};

}  // namespace

RANKS_TEST(ZeroGradients, DividedEarlyOrLateTheyAreAverages, 1, 2, 3) {
  ThreeLayers alone;
  auto plain = torch::optim::SGD(alone->parameters(), 0.2);
  for (int64_t step = 0; step < kSteps; ++step) {
    plain.zero_grad();
    for (int64_t rank = 0; rank < support::world_size(); ++rank)
      (loss_of(alone(batch_of(step, 0, rank))) / static_cast<double>(support::world_size())).backward();
    plain.step();
  }
  support::on_both_stores([&](const std::string& store) {
    for (int64_t number = 0; number <= 3; ++number)
      for (const auto& more : kDivisions) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + more);
        support::reset_states();
        Accelerator accelerator(
            {.cpu = true,
             .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
                                                   "gradient_clipping": 0,)" +
                                                                 zero_of(number) + more + "}"}});
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.2));
        for (int64_t step = 0; step < kSteps; ++step) {
          accelerator.backward(loss_of(m(batch_of(step, 0, support::rank()))));
          opt.step();
          opt.zero_grad();
        }
        expect_equal(m->parameters(), alone->parameters(), 1e-5);
      }
  });
}

// Values that the early division can't hold are lost; sums are exact here.
RANKS_TEST(ZeroGradients, EarlyDivisionsRoundInTheDtypeThatTravels, 1, 2, 3) {
  const double smallest = std::ldexp(1.0, -24);  // of fp16
  const bool several = support::world_size() > 1;
  support::on_both_stores([&](const std::string& store) {
    for (int64_t number = 0; number <= 3; ++number) {
      SCOPED_TRACE(store + ", stage " + std::to_string(number));
      const auto is = [&](const std::string& more, double x, double expected) {
        const auto found = average_in_fp16(number, more, x);
        EXPECT_TRUE(found.equal(torch::full({6}, expected))) << found << " of" << more << ", expected " << expected;
      };
      if (number > 0) is("", smallest, smallest);
      is(R"(, "prescale_gradients": true)", smallest, several ? 0 : smallest);
      is(R"(, "gradient_predivide_factor": 2.0)", smallest, 0);
      is("", 40000, 40000);
      is(R"(, "gradient_predivide_factor": 0.5)", 40000, std::numeric_limits<double>::infinity());
      is(R"(, "prescale_gradients": true, "gradient_predivide_factor": 0.5)", 39936, 39936);
      // Sums are not divided.
      if (number < 3)
        is(R"(, "gradient_allreduce_op": "sum", "prescale_gradients": true)", 8,
           8.0 * static_cast<double>(support::world_size()));
    }
  });
}

// Terms that the sum can't hold beside the first one are lost in 16 bits.
RANKS_TEST(ZeroGradients, SumsOfMicroStepsHaveTheDtypeThatIsAskedFor, 1, 2, 3) {
  const auto sum = [](int64_t number, const std::string& precision, const std::string& data_types, double large) {
    support::reset_states();
    Accelerator accelerator(
        {.mixed_precision = precision,
         .cpu = true,
         .deepspeed_plugin =
             DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
               "fp16": {"enabled": "auto", "loss_scale": 1}, "bf16": {"enabled": "auto"}, "data_types": {)" +
                                             data_types + "}," + zero_of(number) + "}"}});
    Product model;
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.1));
    for (const double x : {2 * large, 1.0}) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(m(torch::full({6}, x, m->weight.options().requires_grad(false))));
    }
    return safe_get_full_grad(m->weight)[0].item<double>();
  };
  support::on_both_stores([&](const std::string& store) {
    for (int64_t number = 1; number <= 3; ++number)
      for (const auto& [precision, large] : {std::pair("bf16", 128.0), std::pair("fp16", 1024.0)}) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + ", " + precision);
        EXPECT_EQ(sum(number, precision, R"("grad_accum_dtype": "fp32")", large), large + 0.5);
        EXPECT_EQ(sum(number, precision, R"("grad_accum_dtype": ")" + std::string(precision) + "\"", large), large);
      }
  });
}

namespace {

/// Both weights' gradients are the input.
struct TwoProductsImpl : torch::nn::Module {
  TwoProductsImpl() {
    first = register_module("first", Product());
    second = register_module("second", Product());
  }
  at::Tensor forward(const at::Tensor& x) { return first(x) + second(x); }
  Product first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoProducts);

/// Nobody knows that it steps element by element, so it keeps whole parameters.
struct OfWholes : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params()) parameter.sub_(parameter.grad() * group.options().get_lr());
    return {};
  }
};

}  // namespace

// fp16 holds scaled gradients; the quotient is below its range.
RANKS_TEST(ZeroGradients, OfWholeParametersTheyAreUnscaledInFp32, 1, 2, 3) {
  const double tiny = std::ldexp(1.0, -30), rate = std::ldexp(1.0, 28);
  support::on_both_stores([&](const std::string& store) {
    for (int64_t number = 1; number <= 3; ++number)  // stage 0 may divide before the sum
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + (clips ? ", clipped" : ""));
        support::reset_states();
        Accelerator accelerator({.cpu = true,
                                 .deepspeed_plugin = DeepSpeedPlugin{
                                     .hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
                   "zero_allow_untested_optimizer": true,
                   "fp16": {"enabled": true, "initial_scale_power": 15},)" +
                                                     zero_of(number) + "}"}});
        TwoProducts model;
        auto [m, opt] = accelerator.prepare(model, OfWholes(model->parameters(), torch::optim::SGDOptions(rate)));
        const at::Tensor x = torch::full({6}, std::ldexp(1.0, -10), at::kHalf);
        accelerator.backward(m(x).to(at::kFloat) * std::ldexp(1.0, -20));
        if (clips) accelerator.clip_grad_value_(m->parameters(), tiny / 2);
        opt.step();
        for (const auto& parameter : m->parameters()) EXPECT_EQ(parameter[5].item<double>(), clips ? 0.875 : 0.75);
      }
  });
}
