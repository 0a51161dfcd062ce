// A moving average of the weights (EMA): a second, calmer copy of the model for evaluation, which checkpoints hold,
// too.
//   accelerate launch --num_processes 2 build/release/bin/ema
#include <accelerate/accelerate.hpp>

#include <array>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

struct MovingAverage {
  std::vector<torch::Tensor> weights;
  ACCELERATE_FIELDS(weights)  // what register_for_checkpointing needs to know

  MovingAverage() = default;  // what a checkpoint is read into
  explicit MovingAverage(const torch::nn::Module& module) {
    for (const auto& parameter : module.parameters()) weights.push_back(parameter.detach().clone());
  }
  // After each optimizer step. All processes have the same weights, hence the same average: nothing is communicated.
  void update(const torch::nn::Module& module, double decay) {
    const torch::NoGradGuard no_grad;
    const auto parameters = module.parameters();
    for (size_t i = 0; i < weights.size(); ++i) weights[i].lerp_(parameters[i], 1 - decay);
  }
  // Exchanges the averages and the model's weights; a second call exchanges them back.
  void swap(torch::nn::Module& module) {
    const torch::NoGradGuard no_grad;
    auto parameters = module.parameters();
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto kept = parameters[i].clone();
      parameters[i].copy_(weights[i]);
      weights[i].copy_(kept);
    }
  }
};

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10);
  const auto decay = args.get<double>("--decay", 0.98);
  args.check();

  accelerate::Accelerator accelerator({.gradient_accumulation_steps = 2});
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto [model, optimizer, loader, held_out] =
      accelerator.prepare(network, torch::optim::SGD(network->parameters(), 0.5),
                          accelerate::data::DataLoader(examples::moons(512, 1), {.batch_size = 4, .shuffle = true}),
                          accelerate::data::DataLoader(examples::moons(400, 2), {.batch_size = 50}));
  MovingAverage average(*network);  // after prepare: processes agree on the first weights there
  accelerator.register_for_checkpointing(average);
  const auto held_out_loss = [&, &model = model, &held_out = held_out] {
    const torch::NoGradGuard no_grad;
    torch::Tensor sum = torch::zeros({});
    for (auto& batch : held_out)
      sum += torch::cross_entropy_loss(model(batch.data), batch.target, {}, at::Reduction::Sum);
    return accelerator.reduce(sum, "sum").item<double>() / 400;
  };
  std::array<std::pair<double, double>, 2> range{{{1e9, 0}, {1e9, 0}}};  // of the weights' loss, of the average's
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate(model);
      // One label in five is wrong, so every step also leads astray.
      const auto wrong = torch::rand(batch.target.sizes()) < 0.2;
      accelerator.backward(
          torch::cross_entropy_loss(model(batch.data), batch.target.logical_xor(wrong).to(torch::kLong)));
      optimizer.step();
      optimizer.zero_grad();
      if (accelerator.sync_gradients()) average.update(*network, decay);  // only where step() did something
    }
    for (auto& [least, most] : range) {
      const double loss = held_out_loss();
      if (epoch >= epochs / 2) least = std::min(least, loss), most = std::max(most, loss);
      average.swap(*network);  // evaluation by the average, and after the second time training goes on
    }
  }
  for (size_t i = 0; i < 2; ++i)
    accelerator.print("held-out loss with", i == 0 ? "the weights:" : "their average:", range[i].first, "to",
                      range[i].second);
  const bool steadier = range[1].second - range[1].first < range[0].second - range[0].first;
  accelerator.print("the average is", steadier ? "steadier" : "NOT steadier");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
