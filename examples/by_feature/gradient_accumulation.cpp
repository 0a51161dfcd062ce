// Gradient accumulation: four micro-batches make one optimizer step, and the result is that of one big batch.
//   accelerate launch --num_processes 2 build/release/bin/gradient_accumulation
#include <accelerate/accelerate.hpp>

#include <iomanip>
#include <sstream>

#include "../arguments.hpp"

std::string five_digits(const torch::Tensor& number) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(5) << number.item<double>();
  return text.str();
}

void train(accelerate_examples::Arguments args) {
  const auto learning_rate = args.get<double>("--lr", 0.02);
  const auto micro_batches = args.get<int64_t>("--micro_batches", 4);  // of the one optimizer step, over all processes
  args.check();

  const accelerate::PartialState state;
  const int64_t num_steps = micro_batches / state.num_processes();
  if (num_steps < 1 || 8 % micro_batches || micro_batches % state.num_processes())
    throw accelerate::ConfigError(
        "gradient_accumulation: --micro_batches must divide 8 and be a multiple of the number of processes");
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = num_steps});

  // Learn y = 2 x from eight points, starting at a weight of 0.
  std::vector<torch::data::Example<>> points;
  for (int i = 1; i <= 8; ++i) points.emplace_back(torch::full({1}, 1.0 * i), torch::full({1}, 2.0 * i));
  const auto make_model = [] {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    torch::nn::init::zeros_(model->weight);
    return model;
  };

  auto model = make_model();
  auto [m, optimizer, loader] =
      accelerator.prepare(model, torch::optim::SGD(model->parameters(), learning_rate),
                          accelerate::data::DataLoader(points, {.batch_size = 8 / micro_batches}));
  for (auto& batch : loader) {
    // In this scope nothing is communicated and step() does nothing until the last micro-batch of a group; backward()
    // divides the loss.
    auto scope = accelerator.accumulate(m);
    accelerator.backward(torch::mse_loss(m(batch.data), batch.target));
    optimizer.step();
    optimizer.zero_grad();
  }

  // The same in plain LibTorch, with all points in one batch.
  auto plain = make_model();
  torch::optim::SGD plain_optimizer(plain->parameters(), learning_rate);
  const auto all = accelerate::data::default_collate(points);
  torch::mse_loss(plain(all.data), all.target).backward();
  plain_optimizer.step();

  accelerator.print("with accumulation over", num_steps, "micro-batches on", accelerator.num_processes(),
                    "process(es) the weight is", five_digits(model->weight));
  accelerator.print("without accumulation the weight is", five_digits(plain->weight));
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
