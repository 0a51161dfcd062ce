// Fewer bytes between processes: gradients that travel compressed, and a hook of one's own.
//   accelerate launch --num_processes 2 build/release/bin/ddp_comm_hook --hook power_sgd
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;
using Hook = accelerate::DDPCommunicationHookType;

accelerate::DistributedDataParallelKwargs settings_of(const std::string& name) {
  if (name == "no") return {};
  if (name == "fp16") return {.comm_hook = Hook::fp16};
  if (name == "bf16") return {.comm_hook = Hook::bf16};
  // The first steps are averaged whole: early gradients matter most.
  const accelerate::PowerSGDOptions options{.start_powerSGD_iter = 5};
  if (name == "power_sgd") return {.comm_hook = Hook::power_sgd, .comm_state_option = options};
  if (name == "batched_power_sgd") return {.comm_hook = Hook::batched_power_sgd, .comm_state_option = options};
  if (name == "own") {
    // Sends the signs of the gradients and their mean size.
    const accelerate::parallel::CommunicationHook hook = [](auto& bucket, auto& group) {
      const torch::Tensor signs = bucket.buffer.sign() * bucket.buffer.abs().mean();
      return group.all_reduce(signs / group.world_size());
    };
    return {.communication_hook = hook};
  }
  throw accelerate::ConfigError("--hook is '" + name +
                                "', expected no, fp16, bf16, power_sgd, batched_power_sgd or own");
}

void train(examples::Arguments args) {
  const auto hook = args.get("--hook", "power_sgd");
  const auto epochs = args.get<int64_t>("--epochs", 6);
  args.check();

  accelerate::Accelerator accelerator({.kwargs_handlers = {settings_of(hook)}});
  accelerate::set_seed(0);
  torch::nn::Sequential network(torch::nn::Linear(2, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                                torch::nn::Tanh(), torch::nn::Linear(64, 2));
  auto [model, optimizer, loader, held_out] =
      accelerator.prepare(network, torch::optim::Adam(network->parameters(), 0.005),
                          accelerate::data::DataLoader(examples::moons(512, 1), {.batch_size = 16, .shuffle = true}),
                          accelerate::data::DataLoader(examples::moons(256, 2), {.batch_size = 32}));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      optimizer.zero_grad();
      accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
      optimizer.step();
    }
  int64_t right = 0, all = 0;
  const torch::NoGradGuard no_grad;
  for (auto& batch : held_out) {
    auto [found, target] = accelerator.gather_for_metrics(std::make_pair(model(batch.data).argmax(1), batch.target));
    right += (found == target).sum().item<int64_t>();
    all += target.size(0);
  }
  accelerator.print("with the hook", hook, "accuracy", static_cast<double>(right) / static_cast<double>(all));
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
