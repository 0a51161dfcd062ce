// A TorchScript model: from Python's torch.jit.save, or from source as here, it trains like a C++ module, and what is
// saved can be loaded in Python again.
//   accelerate launch --num_processes 2 build/release/bin/torchscript_model
#include <torch/script.h>
#include <accelerate/accelerate.hpp>

#include <filesystem>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

// With a file: torch::jit::load("model.pt").
torch::jit::Module make_model() {
  torch::jit::Module module("MoonNetwork");
  const auto weight = [&](const char* name, std::vector<int64_t> shape) {
    const auto values = torch::randn(shape) / std::sqrt(static_cast<double>(shape.back()));
    module.register_parameter(name, values.requires_grad_(), /*is_buffer=*/false);
  };
  weight("inner", {32, 2});
  weight("offset", {32});
  weight("outer", {2, 32});
  module.define(R"(
    def forward(self, points):
        hidden = torch.tanh(torch.linear(points, self.inner, self.offset))
        return torch.linear(hidden, self.outer)
  )");
  return module;
}

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10);
  const std::filesystem::path file =
      args.get<std::string>("--file", std::filesystem::temp_directory_path() / "moon_network.pt");
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto module = make_model();
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : module.parameters()) parameters.push_back(parameter);
  auto [model, optimizer, loader] =
      accelerator.prepare(module, torch::optim::AdamW(parameters, 0.02),
                          accelerate::data::DataLoader(examples::moons(512), {.batch_size = 16, .shuffle = true}));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      // A script returns a c10::IValue: toTensor(), toTuple(), ... say what it is.
      accelerator.backward(torch::cross_entropy_loss(model(batch.data).toTensor(), batch.target));
      optimizer.step();
      optimizer.zero_grad();
    }

  torch::NoGradGuard no_grad;
  int64_t correct = 0, seen = 0;
  for (auto& batch : loader) {
    const auto right = accelerator.gather_for_metrics(model(batch.data).toTensor().argmax(1) == batch.target);
    correct += right.sum().item<int64_t>();
    seen += right.size(0);
  }
  accelerator.print("accuracy", static_cast<double>(correct) / static_cast<double>(seen), "on", seen, "points");
  const auto weights = accelerator.get_state_dict(model);  // on all ranks: each may hold a part
  accelerator.on_main_process([&] {
    auto trained = make_model();
    for (const auto& parameter : trained.named_parameters()) parameter.value.copy_(weights.at(parameter.name));
    trained.save(file.string());  // code and weights
    auto loaded = torch::jit::load(file.string());
    const auto point = torch::tensor({{0.5F, 0.25F}});
    const bool same = loaded.forward({point}).toTensor().equal(trained.forward({point}).toTensor());
    accelerator.print("the saved program", same ? "gives the same answer" : "DIFFERS");
    std::filesystem::remove(file);
  });
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
