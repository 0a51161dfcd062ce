// Products in 8-bit floating point: one network is trained in bf16 and by each recipe of fp8, and the losses come out
// alike. The model knows nothing of it.
//   accelerate launch --num_processes 2 build/release/bin/fp8
// Or with settings from outside, as in Python:
//   accelerate launch --mixed_precision fp8 --fp8_backend te --fp8_margin 1 ./your_program
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;
namespace nn = torch::nn;

struct Settings {
  int64_t train_size, epochs, batch_size;
};

/// Sizes that are multiples of 16 can be in fp8; the first and the last layer have others.
nn::Sequential make_wide_network() {
  return nn::Sequential(nn::Linear(2, 64), nn::Tanh(), nn::Linear(64, 64), nn::Tanh(), nn::Linear(64, 64), nn::Tanh(),
                        nn::Linear(64, 2));
}

void train(const Settings& settings, const std::string& name, const std::string& mixed_precision,
           const std::vector<accelerate::KwargsHandler>& handlers) {
  accelerate::AcceleratorState::reset();  // the runs of this program differ in what all Accelerators share
  accelerate::Accelerator accelerator({.mixed_precision = mixed_precision, .kwargs_handlers = handlers});
  accelerate::set_seed(42);
  auto network = make_wide_network();
  auto optimizer = torch::optim::AdamW(network->parameters(), torch::optim::AdamWOptions(5e-3));
  auto [model, opt, loader] =
      accelerator.prepare(network, optimizer,
                          accelerate::data::DataLoader(examples::moons(settings.train_size),
                                                       {.batch_size = settings.batch_size, .shuffle = true}));
  double sum = 0;
  int64_t steps = 0;
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch)
    for (auto& batch : loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(network->parameters(), 1.0);
      opt.step();
      opt.zero_grad();
      if (epoch + 1 < settings.epochs) continue;
      sum += accelerator.reduce(loss.detach(), "mean").item<double>();
      ++steps;
    }
  const auto& fp8 = model.core()->fp8;
  accelerator.print(name + ":", fp8 ? fp8->counts().fp8_products : 0,
                    "forward products in fp8, mean loss of the last "
                    "epoch",
                    sum / static_cast<double>(steps));
}

void run(examples::Arguments args) {
  const Settings settings{.train_size = args.get<int64_t>("--train_size", 512),
                          .epochs = args.get<int64_t>("--epochs", 8),
                          .batch_size = args.get<int64_t>("--batch_size", 32)};
  args.check();
  train(settings, "bf16", "bf16", {});
  train(settings, "delayed scaling", "fp8",
        {accelerate::TERecipeKwargs{.amax_history_len = 16, .amax_compute_algo = "max"}});
  train(settings, "blocks of 32", "fp8", {accelerate::TERecipeKwargs{.use_mxfp8_block_scaling = true}});
  train(settings, "scales as they are now", "fp8", {accelerate::AORecipeKwargs{}});
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
