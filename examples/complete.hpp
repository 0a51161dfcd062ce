#pragma once

/// The common part of the complete examples: their flags, and when they save what.

#include <accelerate/accelerate.hpp>

#include <filesystem>
#include <optional>
#include <string>

#include "arguments.hpp"

namespace accelerate_examples {

struct CompleteOptions {
  explicit CompleteOptions(Arguments& args)
      : mixed_precision(args.get<std::string>("--mixed_precision", "")),
        checkpointing_steps(args.get<std::string>("--checkpointing_steps", "")),
        resume_from_checkpoint(args.get<std::string>("--resume_from_checkpoint", "")),
        output_dir(args.get<std::string>("--output_dir", "build/complete_output")),
        project_dir(args.get<std::string>("--project_dir", "build/complete_logs")),
        gradient_accumulation_steps(args.get<int64_t>("--gradient_accumulation_steps", 1)),
        cpu(args.flag("--cpu")),
        with_tracking(args.flag("--with_tracking")) {}

  /// `accelerate launch` decides what is left empty.
  accelerate::AcceleratorOptions accelerator() const {
    accelerate::AcceleratorOptions options{
        .split_batches = true,  // a batch size is the global one: each process works on its share of every batch
        .gradient_accumulation_steps = gradient_accumulation_steps,
        .dataloader_config = {.use_stateful_dataloader = true},  // checkpoints hold where loaders stand, too
        .project_dir = project_dir};
    if (!mixed_precision.empty()) options.mixed_precision = mixed_precision;
    if (cpu) options.cpu = true;
    if (with_tracking) options.log_with = {"tensorboard", "jsonl"};
    return options;
  }

  std::string mixed_precision;                    ///< no, fp16, bf16 or fp8
  std::string checkpointing_steps;                ///< a number of batches, or "epoch": when to save a checkpoint
  std::filesystem::path resume_from_checkpoint;   ///< a folder step_<n> or epoch_<n>, to go on from there
  std::filesystem::path output_dir, project_dir;  ///< of checkpoints and the model; of trackers
  int64_t gradient_accumulation_steps;
  bool cpu, with_tracking;
};

/// How far a run is; goes into its checkpoints.
struct Progress {
  int64_t steps = 0;
  double loss = 0;  ///< of the epoch up to now, summed over its batches
  ACCELERATE_FIELDS(steps, loss)
};

/// Saves everything into folders of output_dir, and goes on from one of them.
class Checkpoints {
 public:
  /// All ranks. Everything has been prepared.
  Checkpoints(accelerate::Accelerator& accelerator, const CompleteOptions& options, Progress& progress)
      : accelerator_(accelerator), output_dir_(options.output_dir), progress_(progress) {
    if (options.checkpointing_steps == "epoch") {
      each_epoch_ = true;
    } else if (!options.checkpointing_steps.empty()) {
      try {
        every_ = std::stoll(options.checkpointing_steps);
      } catch (const std::exception&) {
      }
      if (every_ <= 0)
        throw accelerate::ConfigError("--checkpointing_steps is '" + options.checkpointing_steps +
                                      "', expected a number of batches, or 'epoch'");
    }
    accelerator.register_for_checkpointing(progress);
    if (options.resume_from_checkpoint.empty()) return;
    accelerator.load_state(options.resume_from_checkpoint);
    accelerator.print("resumed from", options.resume_from_checkpoint.string(), "after step", progress.steps);
  }

  void after_step() {
    if (every_ > 0 && progress_.steps % every_ == 0) save("step_" + std::to_string(progress_.steps));
  }
  void after_epoch(int64_t epoch) {
    if (each_epoch_) save("epoch_" + std::to_string(epoch));
  }

 private:
  void save(const std::string& name) {
    accelerator_.print("saved", accelerator_.save_state(output_dir_ / name).string());
  }

  accelerate::Accelerator& accelerator_;
  std::filesystem::path output_dir_;
  Progress& progress_;
  int64_t every_ = 0;
  bool each_epoch_ = false;
};

}  // namespace accelerate_examples
