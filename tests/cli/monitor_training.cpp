// Trains something tiny for ten seconds at about 20 steps a second, with two optimizers, of which one steps at every
// second batch. With an argument it reports another number of steps by itself.
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "accelerate/accelerator.hpp"
#include "accelerate/utils/monitor.hpp"

int main(int count, char**) {
  accelerate::Accelerator accelerator;
  torch::nn::Linear model(2, 1), other(2, 1);
  torch::optim::SGD often(model->parameters(), 0.01), seldom(other->parameters(), 0.01);
  auto [m, o, first, second] = accelerator.prepare(model, other, often, seldom);
  for (int i = 0; i < 200; ++i) {
    accelerator.backward((m(torch::ones({4, 2})) + o(torch::ones({4, 2}))).sum());
    first.step();
    if (i % 2) second.step();
    first.zero_grad();
    second.zero_grad();
    if (count > 1) accelerate::report_step(1000 + i);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}
