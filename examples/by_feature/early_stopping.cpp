// Stopping early: one process sees the reason, all of them stop after the same step.
//   accelerate launch --num_processes 2 build/release/bin/early_stopping
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

// Lets training go on until the loss has not improved by `min_delta` for `patience` steps, or has reached `goal`.
struct EarlyStopping {
  double goal, min_delta = 1e-3;
  int64_t patience = 50, since = 0;
  double best = std::numeric_limits<double>::infinity();

  bool should_stop(double loss) {
    since = loss < best - min_delta ? 0 : since + 1;
    best = std::min(best, loss);
    return loss < goal || since >= patience;
  }
};

void train(examples::Arguments args) {
  const auto goal = args.get<double>("--goal", 0.1);
  const auto max_steps = args.get<int64_t>("--max_steps", 2000);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto [model, optimizer, loader] =
      accelerator.prepare(network, torch::optim::AdamW(network->parameters(), 0.02),
                          accelerate::data::DataLoader(examples::moons(512), {.batch_size = 32, .shuffle = true}));
  EarlyStopping stopping{.goal = goal};
  int64_t steps = 0;
  for (bool stop = false; !stop && steps < max_steps;)
    for (auto& batch : loader) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      ++steps;
      // Each process looks at its own loss: without the trigger one would stop and the others wait for it.
      if (stopping.should_stop(loss.item<double>())) accelerator.set_trigger();
      stop = accelerator.check_trigger();
      if (stop || steps == max_steps) break;
    }
  const auto all_steps = accelerator.gather(torch::tensor({steps}));
  accelerator.print(all_steps.eq(steps).all().item<bool>() ? "all" : "NOT all", "processes stopped after step", steps,
                    steps < max_steps ? "(early)" : "(at the limit)");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
