// Experiment tracking: numbers, texts, images, tables and histograms go to TensorBoard, to a file of JSON lines, and to
// a tracker of this program's own.
//   accelerate launch --num_processes 2 build/release/bin/tracking --project_dir runs
//   tensorboard --logdir runs
#include <accelerate/accelerate.hpp>

#include <iostream>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

// A tracker of one's own. Its members are called by a thread of its own, one call at a time, so it may take its time.
class BestLoss : public accelerate::GeneralTracker {
 public:
  std::string name() const override { return "best_loss"; }
  void store_init_configuration(const accelerate::TrackerValues& config) override {
    for (const auto& [name, value] : config)
      if (const auto number = value.number()) std::cout << "configuration: " << name << " = " << *number << std::endl;
  }
  void log(const accelerate::TrackerValues& values, std::optional<int64_t> step,
           const accelerate::TrackerValues&) override {
    const auto loss = values.find("loss");
    if (loss == values.end() || loss->second.number().value_or(best) >= best) return;
    best = *loss->second.number();
    at = step.value_or(0);
  }
  void finish() override { std::cout << "best loss " << best << " at step " << at << std::endl; }

 private:
  double best = std::numeric_limits<double>::infinity();
  int64_t at = 0;
};

// The network's answer for each point of the plane, as an image [H, W, 1].
torch::Tensor decision(torch::nn::Sequential network) {
  const torch::NoGradGuard no_grad;
  const auto axes = torch::meshgrid({torch::linspace(1.5, -1, 100), torch::linspace(-1.5, 2.5, 160)}, "ij");
  const auto points = torch::stack({axes[1], axes[0]}, -1).reshape({-1, 2});
  return network->forward(points).softmax(1).select(1, 1).reshape({100, 160, 1});
}

void train(examples::Arguments args) {
  const auto project_dir = args.get<std::string>("--project_dir", "runs");
  const auto epochs = args.get<int64_t>("--epochs", 5);
  args.check();

  // Names and objects in any mix; "all" stands for those that work on this machine.
  accelerate::Accelerator accelerator(
      {.log_with = {"tensorboard", "jsonl", std::make_shared<BestLoss>()}, .project_dir = project_dir});
  accelerate::set_seed(0);
  const double lr = 0.02;
  auto network = examples::make_network();
  auto [model, optimizer, loader] =
      accelerator.prepare(network, torch::optim::AdamW(network->parameters(), lr),
                          accelerate::data::DataLoader(examples::moons(512), {.batch_size = 32, .shuffle = true}));

  // Hyperparameters go to each tracker in its way, and so do arguments that only one of them knows.
  accelerator.init_trackers("moons", {{"lr", lr}, {"epochs", epochs}, {"network", "2-32-2"}},
                            {{"tensorboard", {{"filename_suffix", ".moons"}}}});
  int64_t step = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    int64_t correct = 0, seen = 0;
    for (auto& batch : loader) {
      const auto logits = model(batch.data);
      const auto loss = torch::cross_entropy_loss(logits, batch.target);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      // Every process may call it; the main process writes, after the step and in another thread.
      accelerator.log({{"loss", loss.item<double>()}}, step++);
      const auto [predicted, label] = accelerator.gather_for_metrics(std::make_tuple(logits.argmax(1), batch.target));
      correct += (predicted == label).sum().item<int64_t>();
      seen += label.size(0);
    }
    accelerator.log({{"accuracy", static_cast<double>(correct) / static_cast<double>(seen)}, {"epoch", epoch}}, step);
    // Not every tracker takes these: they go to those that do, here TensorBoard and JSON lines.
    accelerator.log_images({{"decision", decision(network)}}, step);
    accelerator.log_histogram("weights/0", network->parameters()[0], step);
  }
  accelerator.log_table("samples", {"x", "y", "moon"}, {{0.0, 1.0, "upper"}, {1.0, -0.5, "lower"}}, step);
  // One tracker alone. On processes that have none it does nothing.
  accelerator.get_tracker("tensorboard")->log({{"note", "trained on *two moons*"}}, step);
  accelerator.end_training();
  accelerator.print("logged", step, "steps to", (accelerator.logging_dir() / "moons").string());
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
