// Frozen layers: a trained backbone stays as it is, and only a new head learns.
//   accelerate launch --num_processes 2 build/release/bin/frozen_layers
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

struct ClassifierImpl : torch::nn::Module {
  torch::nn::Sequential backbone = register_module(
      "backbone", torch::nn::Sequential(torch::nn::Linear(2, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU()));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(64, 2));
  torch::Tensor forward(const torch::Tensor& x) { return head(backbone->forward(x)); }
};
TORCH_MODULE(Classifier);

std::vector<torch::Tensor> copies(const torch::nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : module.parameters()) all.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) all.push_back(tensor.clone());
  return all;
}

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 20);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  Classifier classifier;  // a real backbone would now be filled: accelerate::load_checkpoint_in_model(...)

  // Freeze before prepare(), so that nothing is set up for gradients that will never come: no averaging over processes,
  // no optimizer state.
  for (auto& parameter : classifier->backbone->parameters()) parameter.requires_grad_(false);
  std::vector<torch::Tensor> trainable;
  for (const auto& parameter : classifier->parameters())
    if (parameter.requires_grad()) trainable.push_back(parameter);
  auto [model, optimizer, loader] =
      accelerator.prepare(classifier, torch::optim::AdamW(trainable, 0.02),
                          accelerate::data::DataLoader(examples::moons(512), {.batch_size = 16, .shuffle = true}));

  const auto backbone = copies(*classifier->backbone), head = copies(*classifier->head);
  model->train();
  model->backbone->eval();  // after train(): batch norm must not move its statistics either
  double first = 0, last = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    double sum = 0;
    for (auto& batch : loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      sum += accelerator.reduce(loss.detach(), "mean").item<double>();
    }
    last = sum / static_cast<double>(loader.size());
    if (epoch == 0) first = last;
  }

  const auto changed = [](const std::vector<torch::Tensor>& before, const torch::nn::Module& module) {
    const auto after = copies(module);
    int64_t count = 0;
    for (size_t i = 0; i < before.size(); ++i) count += !before[i].equal(after[i]);
    return count;
  };
  accelerator.print("loss", first, "->", last);
  accelerator.print("tensors that changed: backbone", changed(backbone, *classifier->backbone), "of", backbone.size(),
                    ", head", changed(head, *classifier->head), "of", head.size());
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
