// Activation checkpointing: blocks keep only their inputs and run again in backward; the gradients are the same, bit
// for bit.
//   accelerate launch --num_processes 2 build/release/bin/activation_checkpointing
#include <accelerate/accelerate.hpp>

#include <malloc.h>

#include "../arguments.hpp"

// The memory that this process has allocated and not freed, in MiB.
int64_t memory() {
  const auto info = ::mallinfo2();
  return static_cast<int64_t>((info.uordblks + info.hblkhd) >> 20);
}

struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i)
      blocks->push_back(torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})),
                                              torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Dropout(0.1),
                                              torch::nn::Linear(256, 64)));
  }

  torch::Tensor forward(torch::Tensor x, bool with_checkpoints) {  // [B, 64]
    for (const auto& block : *blocks) {
      // The closure outlives this call, so it takes what it needs by value; what it returns is used as always. Dropout
      // draws the same numbers in both runs.
      const auto run = [block](const torch::Tensor& h) { return h + block->as<torch::nn::Sequential>()->forward(h); };
      x = with_checkpoints ? accelerate::checkpoint(run, {}, x) : run(x);
    }
    return x;
  }

  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
};
TORCH_MODULE(Deep);

void run(accelerate_examples::Arguments args) {
  const auto num_blocks = args.get<int64_t>("--blocks", 12), rows = args.get<int64_t>("--rows", 2048);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  Deep deep(num_blocks);
  auto model = accelerator.prepare(deep);
  const auto x = torch::randn({rows, 64});
  // The gradients of one step, and what the forward pass has kept for it.
  const auto step = [&](bool with_checkpoints) {
    accelerate::set_seed(1);  // of dropout
    deep->zero_grad();
    const int64_t before = memory();
    const auto loss = model(x, with_checkpoints).pow(2).mean();
    accelerator.print(with_checkpoints ? "with" : "without", "checkpoints the forward pass keeps", memory() - before,
                      "MiB; loss", loss.item<double>());
    accelerator.backward(loss);
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : deep->parameters()) gradients.push_back(parameter.grad().clone());
    return gradients;
  };
  const auto usual = step(false), small = step(true);
  bool equal = true;
  for (size_t i = 0; i < usual.size(); ++i) equal = equal && usual[i].equal(small[i]);
  accelerator.print("the gradients of", usual.size(), "tensors are", equal ? "equal to the bit" : "DIFFERENT");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
