// Cross-validation: a model for each fold, which has not seen it, and the mean of what they say about a test set.
//   accelerate launch --num_processes 2 build/release/bin/cross_validation --folds 4
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto folds = args.get<int64_t>("--folds", 4);
  const auto epochs = args.get<int64_t>("--epochs", 8);
  args.check();

  accelerate::Accelerator accelerator;
  const auto points = examples::moons(400, 1);
  auto test = accelerator.prepare(accelerate::data::DataLoader(examples::moons(256, 2), {.batch_size = 32}));
  torch::Tensor votes, targets;
  for (int64_t fold = 0; fold < folds; ++fold) {
    // Every folds-th point is held out; neighbours are of different classes, so pairs stay together.
    std::vector<examples::Point> learnt, held_out;
    for (size_t i = 0; i < points.size(); ++i)
      (static_cast<int64_t>(i / 2) % folds == fold ? held_out : learnt).push_back(points[i]);
    accelerate::set_seed(fold);
    auto network = examples::make_network();
    auto [model, optimizer, loader, checked] =
        accelerator.prepare(network, torch::optim::Adam(network->parameters(), 0.02),
                            accelerate::data::DataLoader(learnt, {.batch_size = 16, .shuffle = true}),
                            accelerate::data::DataLoader(held_out, {.batch_size = 16}));
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (auto& batch : loader) {
        optimizer.zero_grad();
        accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
        optimizer.step();
      }
    const torch::NoGradGuard no_grad;
    int64_t right = 0, all = 0;
    for (auto& batch : checked) {
      auto [found, target] = accelerator.gather_for_metrics(std::make_pair(model(batch.data).argmax(1), batch.target));
      right += (found == target).sum().item<int64_t>();
      all += target.size(0);
    }
    accelerator.print("fold", fold + 1, "accuracy", static_cast<double>(right) / static_cast<double>(all), "on", all);
    std::vector<torch::Tensor> outputs, labels;
    for (auto& batch : test) {
      auto [output, label] = accelerator.gather_for_metrics(std::make_pair(model(batch.data).softmax(1), batch.target));
      outputs.push_back(output);
      labels.push_back(label);
    }
    const auto of_fold = torch::cat(outputs);
    votes = votes.defined() ? votes + of_fold : of_fold;
    targets = torch::cat(labels);
  }
  const double right = (votes.argmax(1) == targets).to(torch::kDouble).mean().item<double>();
  accelerator.print("together accuracy", right, "on", targets.size(0), "test points");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
