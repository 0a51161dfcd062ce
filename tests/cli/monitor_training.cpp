// Trains something tiny for the monitor's tests, in one of these ways:
//   (no argument)  ten seconds at about 20 steps a second, with two optimizers, of which one steps at every second
//   batch itself         the same, and reports another number of steps by itself averaged       tokens are counted;
//   each batch takes 10 ms to read, and rank 1 takes 100 ms before its backward,
//                  for which rank 0 waits
//   sharded        the same with FSDP
//   figures        the program itself says steps, tokens and operations
// A second argument is the number of steps: of a program that is watched until it is ended.
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>

#include "accelerate/accelerator.hpp"
#include "accelerate/data.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/monitor.hpp"

namespace {

using std::chrono::milliseconds;

void steps(bool by_itself, int count) {
  accelerate::Accelerator accelerator;
  torch::nn::Linear model(2, 1), other(2, 1);
  torch::optim::SGD often(model->parameters(), 0.01), seldom(other->parameters(), 0.01);
  auto [m, o, first, second] = accelerator.prepare(model, other, often, seldom);
  for (int i = 0; i < count; ++i) {
    const auto loss = (m(torch::ones({4, 2})) + o(torch::ones({4, 2}))).sum();
    accelerator.backward(loss);
    accelerator.log({{"loss", loss.item<double>()}, {"note", "no number"}, {"epoch", 1}});
    first.step();
    if (i % 2) second.step();
    first.zero_grad();
    second.zero_grad();
    if (by_itself) accelerate::report_step(1000 + i);
    std::this_thread::sleep_for(milliseconds(50));
  }
}

/// 10 ms for each batch of 4.
struct SlowRows : torch::data::datasets::Dataset<SlowRows> {
  torch::data::Example<> get(size_t index) override {
    if (index % 4 == 0) std::this_thread::sleep_for(milliseconds(10));
    return {torch::arange(8), torch::zeros({1})};
  }
  std::optional<size_t> size() const override { return 4000; }
};

/// 100 x 16 parameters in a table that is only read, 16 x 24 + 24 that are multiplied with; of these 24 are not
/// trained.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("table", table);
    register_module("linear", linear);
    linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& ids) { return linear(table(ids)); }
  torch::nn::Embedding table{100, 16};
  torch::nn::Linear linear{16, 24};
};
TORCH_MODULE(Net);

void waits(bool sharded) {
  accelerate::AcceleratorOptions options{.gradient_accumulation_plugin = accelerate::GradientAccumulationPlugin{
                                             .num_steps = 1, .average = accelerate::GradientAverage::tokens}};
  if (sharded) options.fsdp_plugin.emplace();
  accelerate::Accelerator accelerator(options);
  Net net;
  auto model = accelerator.prepare(net);
  auto [optimizer, loader] = accelerator.prepare(torch::optim::SGD(net->parameters(), 0.01),
                                                 accelerate::data::DataLoader(SlowRows(), {.batch_size = 4}));
  for (const auto& batch : loader) {
    auto loss = model(batch.data).pow(2).mean();
    if (accelerator.process_index() == 1) std::this_thread::sleep_for(milliseconds(100));
    accelerator.backward(loss, batch.data.numel());
    optimizer.step();
    optimizer.zero_grad();
  }
}

void figures(int count) {
  for (int i = 1; i <= count; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    accelerate::report_tokens(300);
    accelerate::report_flops(6e9);
    accelerate::report_step(i);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string way = count > 1 ? arguments[1] : "";
  const int number = count > 2 ? std::stoi(arguments[2]) : 200;
  if (way == "averaged" || way == "sharded") waits(way == "sharded");
  else if (way == "figures") figures(number);
  else steps(way == "itself", number);
  return 0;
}
