#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/trackers/tracker.hpp"

namespace accelerate {

/// A service that has only a Python SDK: `wandb`, `comet_ml`, `clearml`, `aim`, `swanlab`, `trackio`. The SDK lives in
/// a process of its own (ACCELERATE_PYTHON, else python3), which gets what is logged and dies with this one. It has no
/// terminal, so an SDK that asks for a login fails; what it prints is kept for messages.
///
/// init_kwargs go to the SDK's own start, log_kwargs to the function of the SDK that logs, both unchanged, as in the
/// reference. An SDK that takes more than ACCELERATE_TRACKER_TIMEOUT seconds (60) for one thing is killed, and
/// TrackerGone thrown.
class ACCELERATE_API PythonTracker : public GeneralTracker {
 public:
  /// Starts nothing. @throws ConfigError for a name that is none of the above.
  PythonTracker(const std::string& name, const TrackerSetup& setup);
  ~PythonTracker() override;

  std::string name() const override;
  /// Aim's: that is its repository.
  bool requires_logging_directory() const override;
  bool takes(TrackerData kind) const override;
  /// Starts the process and the run. @throws TrackerGone saying why there is none: no interpreter, no package, no
  /// login.
  void connect() override;
  void store_init_configuration(const TrackerValues& config) override;
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) override;
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs = {}) override;
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs = {}) override;
  void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                     const TrackerValues& log_kwargs = {}) override;
  void finish() override;

  /// The SDK's description of its run, as far as it gives one: `id`, `name`, `url`, `folder`. Empty before connect().
  const std::map<std::string, std::string>& details() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The trackers that are a PythonTracker, and the package that each needs.
ACCELERATE_API const std::map<std::string, std::string>& python_tracker_packages();

}  // namespace accelerate
