#pragma once

/// Runs of a small net whose optimizer may step within backward, for the tests of step_in_backward and step_at_once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "optim/counts.hpp"
#include "parallel/sharding/counts.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "utils/counts.hpp"
#include "variable.hpp"
#include "zero_runs.hpp"

namespace step_runs {

using namespace accelerate;
using namespace zero_runs;
using optim::OptimCount;
using parallel::ShardingCount;
using testing::AllOf;
using testing::HasSubstr;

struct Optimizer {
  std::function<std::shared_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> make;
  bool has_states = true;  ///< which its first step makes
};
inline const Optimizer kSgd{[](const auto& parameters) {
                              return std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2));
                            },
                            /*has_states=*/false};
inline const Optimizer kMomentum{[](const auto& parameters) {
  return std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}};
inline const Optimizer kAdamW{[](const auto& parameters) {
  return std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.05).amsgrad(true));
}};

/// Several units, one of which has a parameter that is used only if it is asked for.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    namespace nn = torch::nn;
    torch::manual_seed(5);
    first = register_module("first", nn::Linear(5, 8));
    second = register_module("second", nn::Linear(8, 8));
    third = register_module("third", nn::Linear(8, 3));
    scale = register_parameter("scale", torch::linspace(0.5, 1.5, 8));
    spare = register_parameter("spare", torch::ones({8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::tanh(first(x)) * scale;
    if (uses_spare) y = y + spare;
    return third(torch::tanh(second(y)));
  }
  bool uses_spare = false;
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor scale, spare;
};
TORCH_MODULE(Net);
constexpr int64_t kUsed = 7;  ///< parameters

/// How a run is made, but for the program.
struct Setup {
  std::string name;
  AcceleratorOptions options;
  Optimizer optimizer = kMomentum;
};

inline FullyShardedDataParallelPlugin small_units(FullyShardedDataParallelPlugin plugin = {}) {
  plugin.auto_wrap_policy = AutoWrapPolicy::size_based_wrap;
  plugin.min_num_params = 20;
  return plugin;
}
inline AcceleratorOptions fsdp(FullyShardedDataParallelPlugin plugin = {}, const std::string& precision = "no") {
  AcceleratorOptions options{.mixed_precision = precision, .cpu = true, .fsdp_plugin = small_units(std::move(plugin))};
  if (precision == "fp16") options.kwargs_handlers.emplace_back(GradScalerKwargs{.init_scale = 64});
  return options;
}
inline AcceleratorOptions zero_stage(int64_t number, const std::string& more = kUnclipped,
                                     const std::string& precision = "no") {
  auto plugin = stage(number, more);
  plugin.hf_ds_config->set_value("gradient_accumulation_steps", int64_t{1});
  plugin.hf_ds_config->set_value("zero_optimization.reduce_bucket_size", int64_t{20});
  return {.mixed_precision = precision, .cpu = true, .deepspeed_plugin = std::move(plugin)};
}

// States and masters of another dtype than that of the computation lie on a disk, or all of these.
inline AcceleratorOptions zero_on_disk(int64_t number, const std::string& more = kUnclipped,
                                       const std::string& precision = "no", int64_t group = 40) {
  auto options = zero_stage(number, more, precision);
  auto& config = *options.deepspeed_plugin->hf_ds_config;
  config.set_value("zero_force_ds_cpu_optimizer", false);
  config.set_value("zero_optimization.sub_group_size", group);
  const auto lay = [&](const std::string& what) {
    config.set_value("zero_optimization." + what + ".device", std::string("nvme"));
    config.set_value("zero_optimization." + what + ".nvme_path", support::scratch("nvme").string());
  };
  lay("offload_optimizer");
  if (number == 3) lay("offload_param"), config.set_value("zero_optimization.offload_param.max_in_cpu", int64_t{0});
  return options;
}
inline AcceleratorOptions fsdp_on_disk(const std::string& precision = "no") {
  return fsdp({.offload_folder = support::scratch("shards")}, precision);
}

/// The objects that a program has in hand.
struct Run {
  Accelerator& accelerator;
  Net& model;
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::function<Scope()> accumulate;
  AcceleratedOptimizer& opt;
  std::vector<at::Tensor> seen = {};

  at::Tensor loss(int64_t step, int64_t micro = 0) const {
    const auto weight = model->first->weight.scalar_type();
    const bool low = accelerator.distributed_type() == DistributedType::DEEPSPEED && weight != at::kFloat;
    const auto batch = batch_of(step, micro, accelerator.process_index());
    return loss_of(forward(low ? batch.to(weight) : batch).to(at::kFloat));
  }
  void backward(int64_t step) const { accelerator.backward(loss(step)); }
  void step() const {
    opt.step();
    opt.zero_grad();
  }
  void see(const at::Tensor& tensor) { seen.push_back(tensor.detach().clone()); }
  /// All that a program can look at, but for gradients.
  void see_all() {
    for (const auto& parameter : model->parameters()) see(parameter);
    for (const auto& group : opt.param_groups())
      for (const auto& parameter : group.params()) see(parameter);
    const auto states = opt.state_dict().toGenericDict().at("state");
    for (const auto& entry : states.toGenericDict())
      for (const auto& state : entry.value().toGenericDict())
        if (state.value().isTensor()) see(state.value().toTensor());
  }
  std::vector<at::Tensor> stepped_on() const {
    std::vector<at::Tensor> all;
    for (const auto& group : opt.param_groups()) all.insert(all.end(), group.params().begin(), group.params().end());
    return all;
  }
};
using Program = std::function<void(Run&)>;

/// When the optimizer steps.
enum class Order { plain, as_the_environment_says, ahead, at_once };

struct Result {
  std::vector<at::Tensor> seen;
  int64_t computed, taken, bytes, at_once;
  int64_t groups, groups_taken;  ///< of those that lie on a disk
};

inline Result run(const Setup& setup, Order order, const Program& program) {
  support::reset_states();
  counts::reset();
  auto options = setup.options;
  const auto choose = [&](auto& plugin) {
    if (!plugin || order == Order::as_the_environment_says) return;
    plugin->step_in_backward = order == Order::ahead;
    plugin->step_at_once = order == Order::at_once;
  };
  choose(options.fsdp_plugin);
  choose(options.deepspeed_plugin);
  Accelerator accelerator(options);
  Net model;
  auto [m, opt] = accelerator.prepare(model, setup.optimizer.make(model->parameters()));
  Run one{.accelerator = accelerator,
          .model = model,
          .forward = [m = m](const at::Tensor& x) mutable { return m(x); },
          .accumulate = [&accelerator, m = m] { return accelerator.accumulate(m); },
          .opt = opt};
  program(one);
  one.see_all();
  return {.seen = std::move(one.seen),
          .computed = counts::read(OptimCount::steps_ahead),
          .taken = counts::read(OptimCount::steps_taken_over),
          .bytes = counts::read(OptimCount::ahead_bytes),
          .at_once = counts::read(OptimCount::steps_at_once),
          .groups = counts::read(ShardingCount::groups_ahead),
          .groups_taken = counts::read(ShardingCount::groups_taken_over)};
}

/// Runs it without and with the setting. @return the second, which has seen the same bits
inline Result same_as_plain(const Setup& setup, const Program& program, Order order = Order::ahead) {
  const auto expected = run(setup, Order::plain, program);
  EXPECT_EQ(expected.computed, 0);
  auto found = run(setup, order, program);
  EXPECT_EQ(found.seen.size(), expected.seen.size());
  for (size_t i = 0; i < std::min(found.seen.size(), expected.seen.size()); ++i)
    EXPECT_TRUE(at::allclose(found.seen[i], expected.seen[i], 0, 0, /*equal_nan=*/true))
        << "the tensor seen as number " << i << " of " << expected.seen.size() << ", of size "
        << expected.seen[i].sizes();
  return found;
}

inline void several_steps(Run& run) {
  for (int64_t step = 0; step < kSteps; ++step) {
    run.backward(step);
    run.step();
  }
}

/// `between` happens after each backward, before its step.
inline Program with_each_step(const std::function<void(Run&, int64_t step)>& between) {
  return [between](Run& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.backward(step);
      between(run, step);
      run.step();
    }
  };
}

/// Two steps under FSDP in a dry run, with the marks "backward" and "step".
inline DryRunReport two_dry_steps(const FullyShardedDataParallelPlugin& plugin) {
  return dry_run({.num_processes = 2}, [&](const DryRunMark& mark) {
    auto options = fsdp(plugin);
    options.cpu = false;  // the dry run has its own device
    Accelerator accelerator(options);
    Net model;
    auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 0.1));
    for (int64_t step = 0; step < 2; ++step) {
      accelerator.backward(m(torch::zeros({4, 5}, accelerator.device())).sum());
      mark("backward");
      opt.step();
      opt.zero_grad();
      mark("step");
    }
  });
}

}  // namespace step_runs
