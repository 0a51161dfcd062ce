// An optimizer of one's own, which needs no schedule of learning rates: its averaged weights are as good at any time as
// a schedule's at its end. The weights that are trained are not those to evaluate, so it has a train() and an eval().
//   accelerate launch --num_processes 2 build/release/bin/schedule_free
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"
#include "schedule_free.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--num_epochs", 8);
  const auto learning_rate = args.get<double>("--lr", 0.1);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = examples::make_network();
  // Given as an lvalue it stays this program's, which switches its mode.
  examples::AdamWScheduleFree schedule_free(network->parameters(), {.lr = learning_rate, .warmup_steps = 10});
  auto [model, optimizer, train_loader, eval_loader] = accelerator.prepare(
      network, schedule_free, accelerate::data::DataLoader(examples::moons(512), {.batch_size = 16, .shuffle = true}),
      accelerate::data::DataLoader(examples::moons(256, 1), {.batch_size = 64}));

  const auto accuracy = [&, &model = model, &eval_loader = eval_loader] {
    const torch::NoGradGuard no_grad;
    int64_t correct = 0, seen = 0;
    for (auto& batch : eval_loader) {
      const auto [predicted, label] =
          accelerator.gather_for_metrics(std::make_tuple(model(batch.data).argmax(1), batch.target));
      correct += (predicted == label).sum().item<int64_t>();
      seen += label.size(0);
    }
    return static_cast<double>(correct) / static_cast<double>(seen);
  };
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    model->train();
    schedule_free.train();
    for (auto& batch : train_loader) {
      accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
      optimizer.step();
      optimizer.zero_grad();
    }
    model->eval();
    schedule_free.eval();  // before saving, too
    accelerator.print("epoch", epoch, "accuracy", accuracy(), "on 256 held-out points");
  }
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
