// Trains something tiny that saves on signals, for the launcher's tests: FOLDER MILLISECONDS STEPS
// A save takes so long at least, and the process's end some time behind it. A run that goes on from a checkpoint takes
// so many steps more, one from the start takes steps until somebody ends it.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/data.hpp"

namespace {

struct Count {
  int64_t steps = 0;
  ACCELERATE_FIELDS(steps)
};

}  // namespace

int main(int, char** arguments) {
  const std::filesystem::path folder = arguments[1];
  const std::chrono::milliseconds save(std::stoi(arguments[2]));
  if (save.count() > 0) std::atexit([] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); });
  accelerate::Accelerator accelerator(
      {.cpu = true,
       .dataloader_config = {.use_stateful_dataloader = true},
       .project_config = {.project_dir = folder, .automatic_checkpoint_naming = true, .save_on_signal = true}});
  torch::nn::Linear net(2, 1);
  torch::optim::SGD sgd(net->parameters(), 0.01);
  auto [model, optimizer, loader] = accelerator.prepare(
      net, sgd, accelerate::data::DataLoader(std::vector<at::Tensor>(4000, torch::ones({2})), {.batch_size = 2}));
  Count count;
  accelerator.register_for_checkpointing(count);
  const auto hook = accelerator.register_save_state_pre_hook([&](const std::filesystem::path&) {
    std::printf("saves\n");
    std::fflush(stdout);
    std::this_thread::sleep_for(save);
  });
  int64_t last = -1;
  if (std::filesystem::exists(folder / "checkpoints")) {
    accelerator.load_state();
    last = count.steps + std::stoi(arguments[3]);
    if (accelerator.is_main_process())
      std::printf("goes on after a step, on %d processes\n", static_cast<int>(accelerator.num_processes()));
  }
  for (;;)
    for (const auto& batch : loader) {
      accelerator.backward(model(batch).sum());
      optimizer.step();
      optimizer.zero_grad();
      if (++count.steps == last) return 0;
      if (count.steps == 3) std::printf("trains\n");
      std::fflush(stdout);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}
