// Metrics over all processes: the last batch is filled up with repeated samples, and gather_for_metrics drops them
// again.
//   accelerate launch --num_processes 2 build/release/bin/multi_process_metrics
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10), held_out = args.get<int64_t>("--held_out", 101),
             batch_size = args.get<int64_t>("--batch_size", 8);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto [model, optimizer, train_loader, eval_loader] = accelerator.prepare(
      network, torch::optim::AdamW(network->parameters(), 0.02),
      accelerate::data::DataLoader(examples::moons(512, 1), {.batch_size = batch_size, .shuffle = true}),
      accelerate::data::DataLoader(examples::moons(held_out, 2), {.batch_size = batch_size}));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : train_loader) {
      accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
      optimizer.step();
      optimizer.zero_grad();
    }

  torch::NoGradGuard no_grad;
  int64_t gathered = 0;                                          // what came back from all processes, with repetitions
  torch::Tensor confusion = torch::zeros({2, 2}, torch::kLong);  // [label, prediction]
  std::vector<std::string> mistakes;
  for (auto& batch : eval_loader) {
    const auto predicted = model(batch.data).argmax(1);
    gathered += accelerator.gather(predicted).size(0);

    // Any nested structure of tensors is gathered at once ...
    const auto [all_predicted, all_labels] = accelerator.gather_for_metrics(std::make_tuple(predicted, batch.target));
    confusion.view(-1).scatter_add_(0, all_labels * 2 + all_predicted, torch::ones_like(all_labels));

    // ... and so are lists of anything else, here one text per sample.
    std::vector<std::string> notes;
    for (int64_t i = 0; i < predicted.size(0); ++i)
      notes.push_back(predicted[i].equal(batch.target[i]) ? ""
                                                          : "process " + std::to_string(accelerator.process_index()));
    for (const auto& note : accelerator.gather_for_metrics(notes))
      if (!note.empty()) mistakes.push_back(note);
  }
  const auto seen = confusion.sum().item<int64_t>(), correct = confusion.diagonal().sum().item<int64_t>();
  accelerator.print("gather gave", gathered, "samples, gather_for_metrics", seen, "of", held_out);
  accelerator.print("confusion matrix:", confusion[0][0].item<int64_t>(), confusion[0][1].item<int64_t>(), "/",
                    confusion[1][0].item<int64_t>(), confusion[1][1].item<int64_t>());
  accelerator.print("accuracy", static_cast<double>(correct) / static_cast<double>(seen), "with", mistakes.size(),
                    "mistakes");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
