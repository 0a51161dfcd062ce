// Trains something tiny on each rank and knows nothing of profiles. Arguments: "sharded"; "slow_data": a batch takes
// 20 ms to read; "slow_rank": rank 1 does something else for 20 ms in each step.
#include <torch/torch.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "accelerate/accelerate.hpp"

namespace {

void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

struct Rows : torch::data::datasets::Dataset<Rows> {
  explicit Rows(bool slow) : slow(slow) {}
  torch::data::Example<> get(size_t index) override {
    if (slow && index % 8 == 0) rest();
    return {torch::full({64}, static_cast<double>(index % 7)), torch::ones({8})};
  }
  torch::optional<size_t> size() const override { return 128; }
  bool slow;
};

}  // namespace

int main(int count, char** words) {
  const std::set<std::string> asked(words + 1, words + count);
  accelerate::AcceleratorOptions options{.cpu = true};
  if (asked.contains("sharded")) options.fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{};
  accelerate::Accelerator accelerator(options);
  torch::nn::Sequential network(torch::nn::Linear(64, 256), torch::nn::ReLU(), torch::nn::Linear(256, 8));
  auto [model, optimizer, loader] =
      accelerator.prepare(network, torch::optim::SGD(network->parameters(), 0.01),
                          accelerate::data::DataLoader(Rows(asked.contains("slow_data")), {.batch_size = 8}));
  for (auto& batch : loader) {
    if (asked.contains("slow_rank") && accelerator.process_index() == 1) rest();
    accelerator.backward(torch::mse_loss(model(batch.data), batch.target));
    optimizer.step();
    optimizer.zero_grad();
  }
  return 0;
}
