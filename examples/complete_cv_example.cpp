// cv_example with everything on: mixed precision, gradient accumulation, checkpoints by steps or epochs, going on from
// one of them to the very same weights, and trackers.
//   accelerate launch --num_processes 2 build/release/bin/complete_cv_example --checkpointing_steps 50 --with_tracking
//   accelerate launch --num_processes 2 build/release/bin/complete_cv_example --checkpointing_steps 50 --with_tracking
//   --resume_from_checkpoint build/complete_output/step_100
#include <accelerate/accelerate.hpp>

#include "complete.hpp"
#include "digits.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const examples::CompleteOptions options(args);
  const auto file = args.get<std::string>("--data", ".deps/data/mnist_5k.csv");
  const auto epochs = args.get<int64_t>("--num_epochs", 3), batch_size = args.get<int64_t>("--batch_size", 64),
             held_out = args.get<int64_t>("--held_out", 1000), seed = args.get<int64_t>("--seed", 42);
  const auto learning_rate = args.get<double>("--lr", 1e-2);
  args.check();

  accelerate::Accelerator accelerator(options.accelerator());
  accelerate::set_seed(seed);

  const auto digits = examples::read_digits(file, held_out);
  auto train_loader =
      accelerate::data::DataLoader(digits.train, {.batch_size = batch_size, .shuffle = true, .drop_last = true});
  auto eval_loader = accelerate::data::DataLoader(digits.eval, {.batch_size = 4 * batch_size});

  auto network = examples::make_digit_network();
  auto optimizer = torch::optim::AdamW(network->parameters(), torch::optim::AdamWOptions(learning_rate));
  auto scheduler = accelerate::optim::one_cycle(
      optimizer,
      {.max_lr = {learning_rate},
       .epochs = epochs,
       // Steps of the optimizer: a schedule stands still while gradients accumulate, and each epoch ends with a step.
       .steps_per_epoch = (train_loader.size() - 1) / options.gradient_accumulation_steps + 1});
  auto [model, opt, train_dl, eval_dl, sched] =
      accelerator.prepare(network, optimizer, train_loader, eval_loader, scheduler);

  if (options.with_tracking)
    accelerator.init_trackers("complete_cv_example", {{"lr", learning_rate},
                                                      {"num_epochs", epochs},
                                                      {"seed", seed},
                                                      {"batch_size", batch_size},
                                                      {"mixed_precision", accelerator.mixed_precision()}});
  examples::Progress progress;
  examples::Checkpoints checkpoints(accelerator, options, progress);

  // A restored loader starts its next pass where it stood, so an epoch may be the rest of one.
  for (int64_t epoch = train_dl.iteration(); epoch < epochs; ++epoch) {
    model->train();
    for (auto& batch : accelerate::tqdm(train_dl, {.description = "epoch " + std::to_string(epoch)})) {
      {
        auto step = accelerator.accumulate(model);
        const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
        accelerator.backward(loss);
        opt.step();
        sched.step();
        opt.zero_grad();
        // Of all processes, since a checkpoint holds the main process's sum for all.
        progress.loss += accelerator.reduce(loss.detach(), "mean").item<double>();
      }
      ++progress.steps;
      checkpoints.after_step();
    }

    model->eval();
    int64_t correct = 0, seen = 0;
    for (auto& batch : eval_dl) {
      const torch::NoGradGuard no_grad;
      const auto [predicted, label] =
          accelerator.gather_for_metrics(std::make_tuple(model(batch.data).argmax(1), batch.target));
      correct += (predicted == label).sum().item<int64_t>();
      seen += label.size(0);
    }
    const double accuracy = static_cast<double>(correct) / static_cast<double>(seen),
                 mean_loss = std::exchange(progress.loss, 0) / static_cast<double>(train_dl.size());
    accelerator.print("epoch", epoch, "accuracy", accuracy, "train_loss", mean_loss);
    if (options.with_tracking) {
      accelerator.log({{"accuracy", accuracy}, {"train_loss", mean_loss}, {"epoch", epoch}}, epoch);
      accelerator.log_images({{"first_digits", digits.eval.front().data.permute({1, 2, 0})}}, epoch);
    }
    checkpoints.after_epoch(epoch);
  }

  accelerator.save_model(model, options.output_dir);
  accelerator.print("after", progress.steps, "steps the model is in", options.output_dir.string());
  accelerator.end_training();
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
