// Checkpoints: a run that goes on from the middle of an epoch ends with the very weights of one that was never
// interrupted.
//   accelerate launch --num_processes 2 build/release/bin/checkpointing --project_dir build/checkpointing_output
#include <accelerate/accelerate.hpp>

#include <filesystem>
#include <map>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

struct Progress {  // anything that should survive: numbers, strings, containers, structs of them
  int64_t steps = 0;
  std::vector<double> losses;
  ACCELERATE_FIELDS(steps, losses)
};

struct Outcome {
  std::map<std::string, torch::Tensor> weights;  // of a sharded model on the main process
  Progress progress;
};

// Trains from the start, or goes on after `resume_from`.
Outcome run(const std::filesystem::path& project_dir, int64_t epochs, int64_t save_every,
            const std::filesystem::path& resume_from) {
  accelerate::Accelerator accelerator(
      {.dataloader_config = {.use_stateful_dataloader = true},  // checkpoints hold the loader's position, too
       .project_config = {.project_dir = project_dir, .automatic_checkpoint_naming = true, .total_limit = 3}});
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto optimizer = torch::optim::AdamW(network->parameters(), 0.02);
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, 10, 200);
  auto [model, opt, sched, loader] =
      accelerator.prepare(network, optimizer, scheduler,
                          accelerate::data::DataLoader(examples::moons(256), {.batch_size = 16, .shuffle = true}));
  Progress progress;
  accelerator.register_for_checkpointing(progress);
  if (!resume_from.empty()) {
    accelerator.load_state(resume_from);
    accelerator.print("resuming from", resume_from.string(), "after step", progress.steps);
  }

  // A restored loader starts its next pass where it stood, so an epoch may be the rest of one.
  for (int64_t epoch = loader.iteration(); epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      const auto loss =
          torch::cross_entropy_loss(model(batch.data + 0.05 * torch::randn_like(batch.data)), batch.target);
      accelerator.backward(loss);
      opt.step();
      sched.step();
      opt.zero_grad();
      progress.losses.push_back(
          accelerator.reduce(loss.detach(), "mean")
              .item<double>());  // the main process's copy is saved for all, so let it be everybody's
      if (++progress.steps % save_every == 0 && resume_from.empty())
        accelerator.print("saved", accelerator.save_state().string());
    }
  return {accelerator.get_state_dict(model), progress};
}

void train(examples::Arguments args) {
  const std::filesystem::path project_dir = args.get<std::string>("--project_dir", "build/checkpointing_output");
  const auto epochs = args.get<int64_t>("--epochs", 4), save_every = args.get<int64_t>("--save_every", 5);
  args.check();

  const accelerate::PartialState state;
  state.on_main_process([&] { std::filesystem::remove_all(project_dir / "checkpoints"); });
  state.wait_for_everyone();
  const auto whole = run(project_dir, epochs, save_every, "");
  // The oldest of those that total_limit left.
  std::vector<int64_t> kept;
  for (const auto& folder : std::filesystem::directory_iterator(project_dir / "checkpoints"))
    kept.push_back(std::stoll(folder.path().filename().string().substr(11)));
  const auto resumed =
      run(project_dir, epochs, save_every,
          project_dir / "checkpoints" / ("checkpoint_" + std::to_string(*std::min_element(kept.begin(), kept.end()))));

  bool same = whole.progress.losses == resumed.progress.losses;
  for (const auto& [name, weight] : whole.weights) same = same && weight.equal(resumed.weights.at(name));
  state.print("kept " + std::to_string(kept.size()) + " checkpoints; the resumed run ends with " +
              (same ? "the same weights" : "OTHER weights"));
  if (!same) throw accelerate::CheckpointError("checkpointing: the resumed run differs from the uninterrupted one");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
