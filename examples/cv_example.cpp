// A small convolutional network with batch norm on 5,000 handwritten digits (784 pixels and the label per line).
//   accelerate launch --num_processes 2 build/release/bin/cv_example --data .deps/data/mnist_5k.csv
#include <accelerate/accelerate.hpp>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <random>

#include "arguments.hpp"

using Digit = torch::data::Example<>;

// In a random order that is the same on every rank.
std::vector<Digit> read_digits(const std::string& path) {
  std::ifstream in(path);
  if (!in)
    throw accelerate::ConfigError("cv_example: --data '" + path + "' can't be opened; scripts/fetch_data.sh gets it");
  std::vector<Digit> digits;
  for (std::string line; std::getline(in, line);) {
    const torch::Tensor numbers = torch::empty({785});
    float* out = numbers.data_ptr<float>();
    const char *at = line.data(), *end = at + line.size();
    for (int64_t i = 0; i < 785; ++i, ++at) {
      const auto [next, error] = std::from_chars(at, end, out[i]);
      if (error != std::errc() || (i < 784 && (next == end || *next != ',')))
        throw accelerate::ConfigError("cv_example: '" + path + "' line " + std::to_string(digits.size() + 1) +
                                      " is not 785 numbers");
      at = next;
    }
    digits.emplace_back(numbers.slice(0, 0, 784).view({1, 28, 28}) / 255, numbers[784].to(torch::kLong));
  }
  std::shuffle(digits.begin(), digits.end(), std::mt19937(42));
  return digits;
}

torch::nn::Sequential make_network() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), BatchNorm2d(16), ReLU(), MaxPool2d(2),
                    Conv2d(Conv2dOptions(16, 32, 3).padding(1)), BatchNorm2d(32), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(32 * 7 * 7, 10));
}

void train(accelerate_examples::Arguments args) {
  const auto file = args.get<std::string>("--data", ".deps/data/mnist_5k.csv");
  const auto epochs = args.get<int64_t>("--epochs", 3), batch_size = args.get<int64_t>("--batch_size", 64),
             held_out = args.get<int64_t>("--held_out", 1000);
  const auto learning_rate = args.get<double>("--lr", 1e-2);
  args.check();

  // batch_size is the global one: each rank works on its share of every batch.
  accelerate::Accelerator accelerator({.split_batches = true});
  accelerate::set_seed(42);

  const auto digits = read_digits(file);
  if (held_out >= static_cast<int64_t>(digits.size()))
    throw accelerate::ConfigError("cv_example: --held_out leaves none of the " + std::to_string(digits.size()) +
                                  " digits to train on");
  auto train_loader = accelerate::data::DataLoader(std::vector<Digit>(digits.begin() + held_out, digits.end()),
                                                   {.batch_size = batch_size, .shuffle = true, .drop_last = true});
  auto eval_loader = accelerate::data::DataLoader(std::vector<Digit>(digits.begin(), digits.begin() + held_out),
                                                  {.batch_size = 4 * batch_size});

  auto network = make_network();
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
