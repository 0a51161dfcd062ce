// Finding a batch size that fits: what runs out of memory is tried again with a smaller one.
//   accelerate launch --num_processes 2 build/release/bin/automatic_batch_size
#include <accelerate/accelerate.hpp>

#include <new>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10),
             starting_batch_size = args.get<int64_t>("--starting_batch_size", 128);
  // Stands for the limits of a real device, so that this example behaves the same everywhere.
  const auto memory = args.get<int64_t>("--samples_that_fit", 40);
  args.check();

  accelerate::Accelerator accelerator;
  // Everything that depends on the batch size, or must start afresh, is made inside.
  const auto train_with = [&](int64_t batch_size) {
    accelerator.free_memory();  // of the attempt before
    accelerate::set_seed(0);
    accelerator.print("trying batch size", batch_size);
    auto network = examples::make_network();
    auto [model, optimizer, loader] = accelerator.prepare(
        network, torch::optim::AdamW(network->parameters(), 0.02),
        accelerate::data::DataLoader(examples::moons(512), {.batch_size = batch_size, .shuffle = true}));
    int64_t correct = 0, seen = 0;
    for (int64_t epoch = 0; epoch < epochs; ++epoch)
      for (auto& batch : loader) {
        if (batch.data.size(0) > memory) throw std::bad_alloc();
        const auto logits = model(batch.data);
        accelerator.backward(torch::cross_entropy_loss(logits, batch.target));
        optimizer.step();
        optimizer.zero_grad();
        if (epoch + 1 < epochs) continue;
        const auto [predicted, label] = accelerator.gather_for_metrics(std::make_tuple(logits.argmax(1), batch.target));
        correct += (predicted == label).sum().item<int64_t>();
        seen += label.size(0);
      }
    return std::make_pair(batch_size, static_cast<double>(correct) / static_cast<double>(seen));
  };
  const auto [batch_size, accuracy] = accelerate::find_executable_batch_size(
      train_with,
      {.starting_batch_size = starting_batch_size, .reduce_batch_size_fn = [](int64_t size) { return size / 2; }});
  accelerator.print("batch size", batch_size, "fits; accuracy in the last epoch", accuracy);
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
