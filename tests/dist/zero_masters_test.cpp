/// Masters of 16 bits under DeepSpeed, and the precision of the moments that go with them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "accelerate/accelerate.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/lion.hpp"
#include "accelerate/parallel/zero_handles.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using testing::HasSubstr;

struct Masters {
  std::string name;
  std::string section;  ///< of the file
  std::string params;   ///< of its optimizer
  at::ScalarType dtype, moments;
};
const std::vector<Masters> kMasters{
    {"fp16", R"("fp16": {"enabled": true, "loss_scale": 1, "fp16_master_weights_and_grads": true})", "", at::kHalf,
     at::kFloat},
    {"fp16, moments too", R"("fp16": {"enabled": true, "loss_scale": 1, "fp16_master_weights_and_grads": true})",
     R"(, "fp32_optimizer_states": false)", at::kHalf, at::kHalf},
    {"bf16", R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true})", "", at::kBFloat16, at::kFloat},
    {"bf16, moments by the optimizer", R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true})",
     R"(, "fp32_optimizer_states": false)", at::kBFloat16, at::kBFloat16},
    {"bf16, moments too",
     R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true})",
     R"(, "fp32_optimizer_states": true)", at::kBFloat16, at::kBFloat16}};

/// @param has_optimizer  else it is the program's
DeepSpeedPlugin plugin_of(const Masters& masters, int64_t number, bool has_optimizer = true) {
  const std::string optimizer =
      R"(, "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1)" + masters.params + "}}";
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, )" + masters.section +
                          (has_optimizer ? optimizer : "") + R"(, "zero_optimization": {"stage": )" +
                          std::to_string(number) + R"(, "cpu_offload": true}})"};
}

at::Tensor output_of(auto& model, int64_t step, at::ScalarType dtype) {
  return model(batch_of(step, 0, /*rank=*/0).to(dtype)).to(at::kFloat);  // the same on all ranks
}

/// The same arithmetic in one process.
std::vector<at::Tensor> trained_alone(const Masters& masters) {
  ThreeLayers model;
  model->to(masters.dtype);
  const AcceleratedOptimizer optimizer(std::make_shared<optim::DeepSpeedAdam>(
      model->parameters(),
      optim::DeepSpeedAdamOptions(0.01).weight_decay(0.1).fp32_optimizer_states(masters.moments == at::kFloat)));
  for (int64_t step = 0; step < kSteps; ++step) {
    loss_of(output_of(model, step, masters.dtype)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return model->parameters();
}

void train_some(Accelerator& accelerator, auto& m, auto& opt, int64_t from, at::ScalarType dtype) {
  for (int64_t step = from; step < from + kSteps; ++step) {
    accelerator.backward(loss_of(output_of(m, step, dtype)));
    opt.step();
    opt.zero_grad();
  }
}

void expect_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(found[i].equal(expected[i])) << "parameter " << i << ": " << (found[i] - expected[i]).abs().max();
}

}  // namespace

// The average of equal gradients is each of them, so that nothing is rounded otherwise.
RANKS_TEST(ZeroMasters, StepInTheirOwnPrecision, 1, 2, 3) {
  for (const auto& masters : kMasters) {
    const auto expected = trained_alone(masters);
    support::on_both_stores([&](const std::string& store) {
      for (int64_t number = 1; number <= 3; ++number) {
        SCOPED_TRACE(masters.name + ", " + store + ", stage " + std::to_string(number));
        support::reset_states();
        Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(masters, number)});
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
        train_some(accelerator, m, opt, 0, masters.dtype);
        expect_same(m->parameters(), expected);
        size_t pieces = 0;
        for (const auto& group : opt.param_groups())
          for (const auto& piece : group.params()) {
            EXPECT_EQ(piece.scalar_type(), masters.dtype);
            const auto found = opt.state().find(piece.unsafeGetTensorImpl());
            if (found == opt.state().end()) continue;
            EXPECT_EQ(static_cast<optim::DeepSpeedAdamParamState&>(*found->second).exp_avg().scalar_type(),
                      masters.moments);
            ++pieces;
          }
        EXPECT_GT(pieces, 0U);
      }
    });
  }
}

RANKS_TEST(ZeroMasters, GoOnFromDeepSpeedsFiles, 1, 2) {
  for (const auto& masters : kMasters)
    for (const int64_t number : {2, 3}) {
      SCOPED_TRACE(masters.name + ", stage " + std::to_string(number));
      const auto weights_after = [&](bool resumes) {
        support::reset_states();
        const auto folder = support::scratch_dir() + "/" + masters.name + std::to_string(number);
        std::vector<at::Tensor> weights;
        for (int64_t run = 0; run < (resumes ? 2 : 1); ++run) {
          support::reset_states();
          Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(masters, number)});
          ThreeLayers model;
          auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
          if (run == 0) train_some(accelerator, m, opt, 0, masters.dtype);
          else m.load_checkpoint(folder);
          if (resumes && run == 0) m.save_checkpoint(folder);
          if (!resumes || run == 1) train_some(accelerator, m, opt, kSteps, masters.dtype);
          weights.clear();
          for (const auto& parameter : m->parameters()) weights.push_back(parameter.detach().clone());
        }
        return weights;
      };
      const auto found = weights_after(true);
      expect_same(found, weights_after(false));
    }
}

namespace {

/// Two groups; the second has options of its own.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> two_groups(std::vector<at::Tensor> parameters, const Options& second) {
  const auto middle = parameters.begin() + 2;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), middle));
  groups.emplace_back(std::vector<at::Tensor>(middle, parameters.end()), std::make_unique<Options>(second));
  return groups;
}
template <class Options> Options with_numbers(double lr) {
  return Options(lr).betas({0.8, 0.95}).eps(1e-5).weight_decay(0.1);
}
template <class Optimizer, class Options> auto torchs_adam() {
  return [](const auto& parameters) {
    return Optimizer(two_groups(parameters, with_numbers<Options>(0.002)), with_numbers<Options>(0.01));
  };
}
auto deepspeeds_adam(bool adam_w_mode) {
  return [adam_w_mode](const auto& parameters) {
    using Options = optim::DeepSpeedAdamOptions;
    return optim::DeepSpeedAdam(two_groups(parameters, with_numbers<Options>(0.002).adam_w_mode(adam_w_mode)),
                                with_numbers<Options>(0.01).adam_w_mode(adam_w_mode));
  };
}

/// Weights after training by an optimizer of the program's, whose rate it halves by its own name in the middle.
std::vector<at::Tensor> weights_by(const Masters& masters, int64_t number, const auto& make,
                                   std::optional<bool> fused = std::nullopt) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(masters, number, /*has_optimizer=*/false)});
  ThreeLayers model;
  auto optimizer = make(model->parameters());
  auto m = accelerator.prepare(model);
  auto opt = accelerator.prepare_optimizer(optimizer, {.fused = fused});
  EXPECT_EQ(&opt.optimizer(), &optimizer);
  train_some(accelerator, m, opt, 0, masters.dtype);
  EXPECT_EQ(opt.step_was_fused(), fused.value_or(true));
  for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() / 2);
  train_some(accelerator, m, opt, kSteps, masters.dtype);
  std::vector<at::Tensor> weights;
  for (const auto& parameter : m->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

const std::vector<const Masters*> kOfFp32Moments{&kMasters.at(0), &kMasters.at(2)};

}  // namespace

RANKS_TEST(ZeroMasters, AProgramsAdamStepsAsDeepSpeedsToTheBit, 1, 2, 3) {
  for (const auto* masters : kOfFp32Moments)
    support::on_both_stores([&](const std::string& store) {
      for (int64_t number = 1; number <= 3; ++number)
        for (const auto& fused : {std::optional<bool>(), std::optional<bool>(false)}) {
          SCOPED_TRACE(masters->name + ", " + store + ", stage " + std::to_string(number) + (fused ? ", plain" : ""));
          expect_same(
              weights_by(*masters, number, torchs_adam<torch::optim::AdamW, torch::optim::AdamWOptions>(), fused),
              weights_by(*masters, number, deepspeeds_adam(true), fused));
          expect_same(weights_by(*masters, number, torchs_adam<torch::optim::Adam, torch::optim::AdamOptions>(), fused),
                      weights_by(*masters, number, deepspeeds_adam(false), fused));
        }
    });
}

// It has stepped in fp32, on a model that prepare() then makes one of 16 bits.
RANKS_TEST(ZeroMasters, StatesThatAProgramsAdamHasAreKept, 1, 2) {
  for (const auto* masters : kOfFp32Moments) {
    SCOPED_TRACE(masters->name);
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(*masters, 2, /*has_optimizer=*/false)});
    ThreeLayers model;
    torch::optim::AdamW optimizer(model->parameters());
    loss_of(model(batch_of(0, 0, /*rank=*/0))).backward();
    optimizer.step();
    optimizer.zero_grad();
    std::vector<at::Tensor> moments;
    for (const auto& parameter : model->parameters())
      moments.push_back(
          static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()))
              .exp_avg()
              .clone());
    auto [m, opt] = accelerator.prepare(model, optimizer);
    for (size_t i = 0; i < moments.size(); ++i) {
      const auto found = safe_get_full_optimizer_state(m->parameters()[i], "exp_avg");
      EXPECT_EQ(found.scalar_type(), at::kFloat);
      EXPECT_TRUE(found.equal(moments[i])) << "parameter " << i;
    }
  }
}

RANKS_TEST(ZeroMasters, AProgramsAdamGoesOnFromDeepSpeedsFiles, 1, 2) {
  for (const auto* masters : kOfFp32Moments) {
    SCOPED_TRACE(masters->name);
    const auto folder = support::scratch_dir() + "/" + masters->name;
    std::vector<std::vector<at::Tensor>> weights;
    for (const bool resumes : {false, true}) {
      support::reset_states();
      Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(*masters, 2, /*has_optimizer=*/false)});
      ThreeLayers model;
      auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 0.01));
      if (resumes) {
        m.load_checkpoint(folder);
      } else {
        train_some(accelerator, m, opt, 0, masters->dtype);
        m.save_checkpoint(folder);
      }
      train_some(accelerator, m, opt, kSteps, masters->dtype);
      for (const auto& group : opt.param_groups())
        for (const auto& piece : group.params())
          if (const auto found = opt.state().find(piece.unsafeGetTensorImpl()); found != opt.state().end())
            EXPECT_EQ(static_cast<torch::optim::AdamWParamState&>(*found->second).exp_avg_sq().scalar_type(),
                      at::kFloat);
      weights.emplace_back();
      for (const auto& parameter : m->parameters()) weights.back().push_back(parameter.detach().clone());
    }
    expect_same(weights[1], weights[0]);
  }
}

TEST(ZeroMasters, TheExchangeIsSaidOnce) {
  const auto said = support::warnings_of([] {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin_of(kMasters.at(0), 2, /*has_optimizer=*/false)});
    ThreeLayers model, other;
    accelerator.prepare(model, torch::optim::AdamW(model->parameters()));
    accelerator.prepare(other, torch::optim::Adam(other->parameters()));
  });
  const std::string line = "the program's AdamW keeps fp32 moments and rounds once in a step";
  EXPECT_THAT(said, HasSubstr(line));
  EXPECT_EQ(said.find("keeps fp32 moments", said.find(line) + line.size()), std::string::npos) << said;
}

// The tutorial on mixtures of experts: no section `optimizer`, and the old spelling of the offload.
RANKS_TEST(ZeroMasters, TheTutorialsFileTrains, 1, 2) {
  const DeepSpeedPlugin tutorial{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": true, "fp16_master_weights_and_grads": true, "initial_scale_power": 8},
    "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true,
      "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
      "contiguous_gradients": true, "cpu_offload": true}})"};
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = tutorial});
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 0.05));
  const auto loss = [&] { return loss_of(output_of(m, 0, at::kHalf)).item<double>(); };
  const double before = loss();
  for (int64_t step = 0; step < 20; ++step) {
    accelerator.backward(loss_of(output_of(m, 0, at::kHalf)));
    opt.step();
    opt.zero_grad();
  }
  EXPECT_LT(loss(), before / 4);
}

TEST(ZeroMasters, OptimizersThatWouldKeepOtherMomentsAreNamed) {
  const auto refusal = [](size_t masters, auto&& optimizer, bool forced = true) {
    support::reset_states();
    auto plugin = plugin_of(kMasters.at(masters), 2, /*has_optimizer=*/false);
    if (!forced) plugin.hf_ds_config->set_value("zero_force_ds_cpu_optimizer", false);
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin});
    ThreeLayers model;
    return support::message_of<ConfigError>([&] { accelerator.prepare(model, optimizer(model->parameters())); });
  };
  const auto torchs = [](const auto& parameters) { return torch::optim::AdamW(parameters); };
  const auto largest = [](const auto& parameters) {
    return torch::optim::AdamW(parameters, torch::optim::AdamWOptions().amsgrad(true));
  };
  const auto lion = [](const auto& parameters) { return optim::Lion(parameters); };
  const auto ours = [](bool exact) {
    return [exact](const auto& parameters) {
      return optim::DeepSpeedAdam(parameters, optim::DeepSpeedAdamOptions().fp32_optimizer_states(exact));
    };
  };
  EXPECT_THAT(refusal(0, largest), HasSubstr("AdamW has amsgrad, which DeepSpeed's Adam for the host refuses, too"));
  EXPECT_THAT(refusal(0, lion), HasSubstr("is Lion, expected torch::optim::Adam or AdamW, optim::DeepSpeedAdam with "
                                          "fp32_optimizer_states(true)"));
  EXPECT_THAT(refusal(0, torchs, /*forced=*/false),
              HasSubstr("is AdamW, expected zero_force_ds_cpu_optimizer true with torch::optim::Adam"));
  EXPECT_THAT(refusal(4, torchs),
              HasSubstr("is AdamW, expected optim::DeepSpeedAdam with fp32_optimizer_states(false)"));
  EXPECT_THAT(refusal(0, ours(false)), HasSubstr("is DeepSpeedAdam with fp32_optimizer_states(false)"));
  EXPECT_THAT(refusal(4, ours(true)), HasSubstr("expected optim::DeepSpeedAdam with fp32_optimizer_states(false)"));
}

// The reference is torch's Adam. Gradients shrink, so that the largest second moment is not the latest.
RANKS_TEST(ZeroMasters, AmsgradIsTorchs, 1, 2) {
  for (const std::string type : {"Adam", "AdamW"}) {
    ThreeLayers alone;
    const auto train_alone = [&](auto optimizer) {
      for (int64_t step = 0; step < 2 * kSteps; ++step) {
        optimizer.zero_grad();
        (loss_of(output_of(alone, 0, at::kFloat)) * std::pow(0.1, step)).backward();
        optimizer.step();
      }
    };
    if (type == "Adam")
      train_alone(torch::optim::Adam(alone->parameters(), torch::optim::AdamOptions(0.01).amsgrad(true)));
    else
      train_alone(
          torch::optim::AdamW(alone->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.01).amsgrad(true)));
    for (int64_t number = 0; number <= 3; ++number) {
      SCOPED_TRACE(type + ", stage " + std::to_string(number));
      support::reset_states();
      const std::string optimizer = R"({"type": ")" + type +
                                    R"(", "params": {"lr": 0.01, "torch_adam": true, "amsgrad": true)" +
                                    (type == "Adam" ? R"(, "adam_w_mode": false)" : "") + "}}";
      Accelerator accelerator({.cpu = true,
                               .deepspeed_plugin =
                                   DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
              "gradient_clipping": 0, "optimizer": )" + optimizer + R"(, "zero_optimization": {"stage": )" +
                                                                   std::to_string(number) + "}}"}});
      ThreeLayers model;
      auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
      const auto folder = support::scratch_dir() + "/" + type + std::to_string(number);
      for (int64_t step = 0; step < 2 * kSteps; ++step) {
        if (step == kSteps) {
          m.save_checkpoint(folder);
          accelerator.backward(loss_of(output_of(m, 0, at::kFloat)));
          opt.step();
          opt.zero_grad();
          m.load_checkpoint(folder);
        }
        accelerator.backward(loss_of(output_of(m, 0, at::kFloat)) * std::pow(0.1, step));
        opt.step();
        opt.zero_grad();
      }
      expect_equal(m->parameters(), alone->parameters(), 1e-5);
    }
  }
}
