// Processes that train apart and average their models now and then (LocalSGD), for slow networks.
//   accelerate launch --num_processes 2 build/release/bin/local_sgd --local_sgd_steps 8
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto steps = args.get<int64_t>("--local_sgd_steps", 8);
  const auto epochs = args.get<int64_t>("--epochs", 6);
  const bool diloco = args.flag("--diloco");  // an optimizer takes up what the processes have found apart
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto [model, optimizer, loader, held_out] =
      accelerator.prepare(network, torch::optim::SGD(network->parameters(), 0.5),
                          accelerate::data::DataLoader(examples::moons(512, 1), {.batch_size = 8, .shuffle = true}),
                          accelerate::data::DataLoader(examples::moons(256, 2), {.batch_size = 32}));
  accelerate::LocalSGDOptions options{.local_sgd_steps = steps};
  if (diloco) options.outer_optimizer = accelerate::OuterOptimizer{};
  {
    accelerate::LocalSGD local_sgd(accelerator, model, options);
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (auto& batch : loader) {
        accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
        optimizer.step();
        optimizer.zero_grad();
        local_sgd.step();
      }
    local_sgd.finish();
    accelerator.print("made", local_sgd.num_steps(), "steps, and met after each", steps);
  }
  const auto weights = accelerator.gather(network->parameters()[0].detach().flatten().slice(0, 0, 1));
  accelerator.print("the models are", (weights == weights[0]).all().item<bool>() ? "equal" : "NOT equal");
  int64_t right = 0, all = 0;
  const torch::NoGradGuard no_grad;
  for (auto& batch : held_out) {
    auto [found, target] = accelerator.gather_for_metrics(std::make_pair(model(batch.data).argmax(1), batch.target));
    right += (found == target).sum().item<int64_t>();
    all += target.size(0);
  }
  accelerator.print("accuracy", static_cast<double>(right) / static_cast<double>(all), "on", all, "points");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
