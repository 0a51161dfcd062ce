// Two models with two optimizers that train against each other: a generator learns to draw points on a ring that a
// critic can't tell from real ones (a GAN).
//   accelerate launch --num_processes 2 build/release/bin/two_models
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"

torch::nn::Sequential make_network(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, 64), torch::nn::LeakyReLU(), torch::nn::Linear(64, 64),
                               torch::nn::LeakyReLU(), torch::nn::Linear(64, out));
}

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 300);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  const auto angle = torch::rand({1024}) * 2 * M_PI;
  const auto ring = torch::stack({2 * angle.cos(), 2 * angle.sin()}, 1) + 0.05 * torch::randn({1024, 2});
  auto generator = make_network(4, 2), critic = make_network(2, 1);
  const auto rates = torch::optim::AdamOptions(1e-3).betas({0.5, 0.9});
  auto [g, c, g_optimizer, c_optimizer, loader] =
      accelerator.prepare(generator, critic, torch::optim::Adam(generator->parameters(), rates),
                          torch::optim::Adam(critic->parameters(), rates),
                          accelerate::data::DataLoader(ring.unbind(), {.batch_size = 64, .shuffle = true, .seed = 0}));

  accelerate::set_seed(0, {.device_specific = true});  // from here on every process draws noise of its own
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& real : loader) {
      const int64_t n = real.size(0);
      const auto fake = g(torch::randn({n, 4}));

      // The critic's step. detach(): the generator has no part in it. One forward for both halves, because gradients
      // are averaged over processes once per forward of a prepared model.
      const auto judged = c(torch::cat({real, fake.detach()}));
      const auto is_real = torch::cat({torch::ones({n, 1}), torch::zeros({n, 1})});
      accelerator.backward(torch::binary_cross_entropy_with_logits(judged, is_real));
      c_optimizer.step();
      c_optimizer.zero_grad();

      // The generator's step goes through the critic, whose own gradients nobody needs: they are not computed, and so
      // not averaged.
      for (auto& parameter : c->parameters()) parameter.requires_grad_(false);
      accelerator.backward(torch::binary_cross_entropy_with_logits(c(fake), torch::ones({n, 1})));
      for (auto& parameter : c->parameters()) parameter.requires_grad_(true);
      g_optimizer.step();
      g_optimizer.zero_grad();
    }

  torch::NoGradGuard no_grad;
  const auto radius = accelerator.gather(g(torch::randn({256, 4})).norm(2, 1));
  accelerator.print("radius of", radius.size(0), "drawn points:", radius.mean().item<double>(), "+-",
                    radius.std().item<double>(), "(real ones: 2 +- 0.05)");
  const auto weight = accelerator.gather(generator->parameters().front().sum().view({1}));
  accelerator.print("generators of all processes are", weight.eq(weight[0]).all().item<bool>() ? "equal" : "DIFFERENT");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
