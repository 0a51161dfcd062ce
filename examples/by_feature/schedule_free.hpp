#pragma once

/// AdamW without a schedule of learning rates (The Road Less Scheduled, arXiv:2405.15682), as an optimizer of one's
/// own.

#include <accelerate/accelerate.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace accelerate_examples {

struct ScheduleFreeOptions {
  double lr = 0.0025;    ///< stays; only the first warmup_steps are smaller
  double beta1 = 0.9;    ///< how far training runs ahead of the average, 0 to 1
  double beta2 = 0.999;  ///< of the mean of squared gradients
  double eps = 1e-8;
  double weight_decay = 0;
  int64_t warmup_steps = 0;
};

/// Three sequences: z takes plain steps, x is the average of z, and gradients are taken at y between them. Parameters
/// are y while training and x for evaluation and in checkpoints: call train() and eval() as you do on the model. Holds
/// z and squared gradients, like AdamW; x is computed from y and z.
class AdamWScheduleFree : public torch::optim::Optimizer, public accelerate::optim::ElementWise {
 public:
  explicit AdamWScheduleFree(std::vector<torch::Tensor> parameters, const ScheduleFreeOptions& options = {})
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::make_unique<GroupOptions>(options)) {
  }

  void train() { become(true); }
  void eval() { become(false); }

  torch::Tensor step(LossClosure closure = nullptr) override {
    if (!training_)
      throw accelerate::ConfigError("AdamWScheduleFree::step: parameters are those for evaluation; call train() first");
    torch::Tensor loss;
    if (closure) {
      const torch::AutoGradMode enable_grad(true);
      loss = closure();
    }
    const torch::NoGradGuard no_grad;
    averages_.resize(param_groups().size());
    for (size_t i = 0; i < averages_.size(); ++i) step_group(param_groups()[i], averages_[i]);
    return loss;
  }

 private:
  struct GroupOptions : torch::optim::OptimizerCloneableOptions<GroupOptions>, ScheduleFreeOptions {
    explicit GroupOptions(const ScheduleFreeOptions& options) : ScheduleFreeOptions(options) {}
    double get_lr() const override { return lr; }
    void set_lr(const double value) override { lr = value; }
  };
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    torch::Tensor z, mean_square;
  };
  /// The weight that the average of z has in one group.
  struct Average {
    int64_t steps = 0;
    double weight = 0, largest_lr = 0;
  };

  static const ScheduleFreeOptions& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const GroupOptions&>(group.options());
  }
  State* find(const torch::Tensor& parameter) const {
    const auto found = state().find(parameter.unsafeGetTensorImpl());
    return found == state().end() ? nullptr : static_cast<State*>(found->second.get());
  }
  State& state_of(const torch::Tensor& parameter) {
    if (auto* known = find(parameter)) return *known;
    auto fresh = std::make_unique<State>();
    fresh->z = parameter.detach().clone();
    fresh->mean_square = torch::zeros_like(parameter);
    State& result = *fresh;
    state()[parameter.unsafeGetTensorImpl()] = std::move(fresh);
    return result;
  }

  void step_group(torch::optim::OptimizerParamGroup& group, Average& average) {
    const auto& options = options_of(group);
    const auto step = static_cast<double>(++average.steps);
    const double lr =
        options.lr * (average.steps <= options.warmup_steps ? step / static_cast<double>(options.warmup_steps) : 1);
    // Steps count for as much as their rate squared, so that those of the warmup count for little.
    average.largest_lr = std::max(average.largest_lr, lr);
    const double weight = average.largest_lr * average.largest_lr;
    average.weight += weight;
    const double share = average.weight > 0 ? weight / average.weight : 0;
    const double correction = 1 - std::pow(options.beta2, step);
    for (auto& y : group.params()) {
      if (!y.grad().defined()) continue;
      State& state = state_of(y);
      state.mean_square.mul_(options.beta2).addcmul_(y.grad(), y.grad(), 1 - options.beta2);
      auto direction = y.grad() / (state.mean_square / correction).sqrt_().add_(options.eps);
      if (options.weight_decay != 0) direction.add_(y, options.weight_decay);
      // y = (1 - beta1) z + beta1 x, with the next z and x, without computing x.
      y.lerp_(state.z, share).add_(direction, lr * (options.beta1 * (1 - share) - 1));
      state.z.sub_(direction, lr);
    }
  }

  void become(bool training) {
    if (std::exchange(training_, training) == training) return;
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      const double beta1 = options_of(group).beta1;
      for (auto& parameter : group.params())
        if (const auto* known = find(parameter)) parameter.lerp_(known->z, training ? 1 - beta1 : 1 - 1 / beta1);
    }
  }

  std::vector<Average> averages_;
  bool training_ = false;
};

}  // namespace accelerate_examples
