// Where the memory of a training goes: snapshots between its parts, their peaks, and giving it back at the end.
//   accelerate launch --num_processes 2 build/release/bin/memory
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto width = args.get<int64_t>("--width", 1024), layers = args.get<int64_t>("--layers", 16);
  args.check();

  const auto logger = accelerate::get_logger("memory", "INFO");
  accelerate::Accelerator accelerator;
  // On a GPU what its tensors take; on the CPU what the system says of this process.
  const auto used = [](bool peak) {
    const auto now = accelerate::memory();
    if (now.devices.empty()) return peak ? now.peak_resident : now.resident;
    return peak ? now.devices.front().peak_allocated : now.devices.front().allocated;
  };
  const int64_t at_start = used(false);
  // All processes say it, one after the other.
  const auto report = [&](const std::string& what) {
    const auto mib = [&](int64_t bytes) { return std::to_string((bytes - at_start) >> 20) + " MiB"; };
    logger.info("process " + std::to_string(accelerator.process_index()) + ", " + what + ": " + mib(used(false)) +
                    ", at most " + mib(used(true)),
                {.in_order = true});
    accelerate::reset_peak_memory();
  };

  torch::nn::Sequential network;
  for (int64_t i = 0; i < layers; ++i) network->push_back(torch::nn::Linear(width, width));
  auto [model, optimizer] = accelerator.prepare(network, torch::optim::AdamW(network->parameters(), 1e-3));
  report("after prepare");
  auto input = torch::ones({16, width}, accelerator.device());
  for (int step = 0; step < 2; ++step) {
    auto loss = model(input).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    report("after step " + std::to_string(step + 1));
    accelerate::release_memory(loss);
  }
  logger.info("by purpose: " + accelerator.memory().text());
  accelerator.free_memory(model, optimizer, network, input);  // what it holds, and these
  report("after the end");
  logger.info("in full: " + accelerate::memory().text());
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
