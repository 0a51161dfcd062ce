#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "accelerate/trackers/tracker.hpp"
#include "parallel/engines.hpp"
#include "trackers/tracker_set.hpp"

namespace accelerate {

/// Trackers that the settings of a run name (a DeepSpeed configuration's tensorboard, csv_monitor, wandb, comet): the
/// main process gives them the numbers of each step, by the samples that all ranks have seen. Source: DeepSpeed's
/// manual, "Monitoring"; names and files are its.
class FileMonitors {
 public:
  bool is_open() const { return !open_.empty(); }
  /// Once. @throws what the trackers throw
  void open(const std::vector<parallel::FileMonitor>& monitors);
  /// The loss of a micro-step.
  void note_loss(const at::Tensor& loss);
  struct Step {
    int64_t samples;
    double lr;
    std::optional<double> loss_scale;
  };
  void after_step(const Step& step);
  /// More of the step that after_step() was told of last, to those that recorded it.
  void record(const TrackerValues& values);
  /// Since the latest step.
  int64_t micro_steps() const { return num_losses_; }
  void finish();

 private:
  struct Open {
    parallel::FileMonitor settings;
    TrackerSet tracker;
    int64_t last = 0;  ///< samples at its latest record
  };
  std::list<Open> open_;
  at::Tensor losses_;
  int64_t num_losses_ = 0, latest_ = 0;  ///< `latest_`: samples after the latest step
};

}  // namespace accelerate
