// A small convolutional network with batch norm on 5,000 handwritten digits (784 pixels and the label per line).
//   accelerate launch --num_processes 2 build/release/bin/cv_example --data .deps/data/mnist_5k.csv
#include <accelerate/accelerate.hpp>

#include "arguments.hpp"
#include "digits.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto file = args.get<std::string>("--data", ".deps/data/mnist_5k.csv");
  const auto epochs = args.get<int64_t>("--epochs", 3), batch_size = args.get<int64_t>("--batch_size", 64),
             held_out = args.get<int64_t>("--held_out", 1000);
  const auto learning_rate = args.get<double>("--lr", 1e-2);
  args.check();

  // batch_size is the global one: each rank works on its share of every batch.
  accelerate::Accelerator accelerator({.split_batches = true});
  accelerate::set_seed(42);

  const auto digits = examples::read_digits(file, held_out);
  auto train_loader =
      accelerate::data::DataLoader(digits.train, {.batch_size = batch_size, .shuffle = true, .drop_last = true});
  auto eval_loader = accelerate::data::DataLoader(digits.eval, {.batch_size = 4 * batch_size});

  auto network = examples::make_digit_network();
  auto optimizer = torch::optim::AdamW(network->parameters(), torch::optim::AdamWOptions(learning_rate));
  auto scheduler = accelerate::optim::one_cycle(
      optimizer, {.max_lr = {learning_rate}, .epochs = epochs, .steps_per_epoch = train_loader.size()});
  auto [model, opt, train_dl, eval_dl, sched] =
      accelerator.prepare(network, optimizer, train_loader, eval_loader, scheduler);

  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    model->train();
    accelerate::ProgressBar bar(train_dl.size(), "epoch " + std::to_string(epoch));
    for (auto& batch : train_dl) {
      accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
      opt.step();
      sched.step();
      opt.zero_grad();
      bar.update();
    }
    bar.close();

    model->eval();
    torch::NoGradGuard no_grad;
    int64_t correct = 0, seen = 0;
    for (auto& batch : eval_dl) {
      const auto [predicted, label] =
          accelerator.gather_for_metrics(std::make_tuple(model(batch.data).argmax(1), batch.target));
      correct += (predicted == label).sum().item<int64_t>();
      seen += label.size(0);
    }
    accelerator.print("epoch", epoch, "accuracy", static_cast<double>(correct) / static_cast<double>(seen), "on", seen,
                      "held-out digits");
  }
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
