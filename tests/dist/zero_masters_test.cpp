/// Masters of 16 bits under DeepSpeed, and the precision of the moments that go with them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "accelerate/accelerate.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
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
  auto [m, opt] =
      accelerator.prepare(model, optim::DeepSpeedAdam(model->parameters(), optim::DeepSpeedAdamOptions(0.05)));
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
  const auto refusal = [](size_t masters, auto&& optimizer) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true, .deepspeed_plugin = plugin_of(kMasters.at(masters), 2, /*has_optimizer=*/false)});
    ThreeLayers model;
    return support::message_of<ConfigError>([&] { accelerator.prepare(model, optimizer(model->parameters())); });
  };
  const auto torchs = [](const auto& parameters) { return torch::optim::AdamW(parameters); };
  const auto ours = [](bool exact) {
    return [exact](const auto& parameters) {
      return optim::DeepSpeedAdam(parameters, optim::DeepSpeedAdamOptions().fp32_optimizer_states(exact));
    };
  };
  EXPECT_THAT(refusal(0, torchs),
              HasSubstr("is AdamW, expected optim::DeepSpeedAdam with fp32_optimizer_states(true)"));
  EXPECT_THAT(refusal(0, ours(false)), HasSubstr("is DeepSpeedAdam with fp32_optimizer_states(false)"));
  EXPECT_THAT(refusal(4, ours(true)), HasSubstr("expected optim::DeepSpeedAdam with fp32_optimizer_states(false)"));
}

// Of torch's Adam. Gradients shrink, so that the largest second moment is not the latest.
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
