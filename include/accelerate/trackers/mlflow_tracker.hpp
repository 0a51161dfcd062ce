#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/trackers/tracker.hpp"

namespace accelerate {

/// A run on an MLflow server, by its REST interface. `get_tracker("mlflow", true)` gives it, for artifacts.
///
/// Where: MLFLOW_TRACKING_URI, which must begin with http:// or https://. MLFLOW_TRACKING_USERNAME and _PASSWORD, or
/// MLFLOW_TRACKING_TOKEN; MLFLOW_TRACKING_INSECURE_TLS, MLFLOW_TRACKING_SERVER_CERT_PATH; MLFLOW_HTTP_REQUEST_TIMEOUT
/// (seconds, 120), MLFLOW_HTTP_REQUEST_MAX_RETRIES (7).
///
/// init_kwargs, with the reference's names, and the variables that win over them: `experiment_name`
/// (MLFLOW_EXPERIMENT_NAME; else the project's name), `run_id` (MLFLOW_RUN_ID: goes on with that run), `tags` (a map,
/// or JSON of one; MLFLOW_TAGS), `nested_run` (MLFLOW_NESTED_RUN) with `parent_run_id`, `run_name`, `description`,
/// `logging_dir` (where a new experiment keeps artifacts).
///
/// Metrics are sent in batches; `log_kwargs["timestamp"]` (milliseconds since 1970) replaces the time of the record.
/// Values that are no numbers are left out, as in the reference, with one warning for each name. Images become
/// images/NAME/STEP.png (STEP_N.png of several), tables NAME.json, which grow with each call. Needs libcurl, at run
/// time only.
class ACCELERATE_API MlflowTracker : public GeneralTracker {
 public:
  /// Reads the variables; asks nobody. @throws ConfigError
  explicit MlflowTracker(const TrackerSetup& setup);
  ~MlflowTracker() override;

  std::string name() const override { return "mlflow"; }
  bool takes(TrackerData kind) const override { return kind != TrackerData::histograms; }
  /// Finds or makes the experiment and begins the run. @throws TrackerGone
  void connect() override;
  void store_init_configuration(const TrackerValues& config) override;
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) override;
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs = {}) override;
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs = {}) override;
  void flush() override;
  /// The run's status becomes FINISHED.
  void finish() override;

  /// Sends a file, to the folder `artifact_path` of the run's artifacts. Blocking. @throws CheckpointError,
  /// ResourceError with the server's words; ConfigError where the run keeps its artifacts in a store that only MLflow's
  /// own client can reach (s3:// and the like; a server with --artifacts-destination passes them on).
  void log_artifact(const std::filesystem::path& local_path, const std::string& artifact_path = "");
  /// All files of a folder and of those below it.
  void log_artifacts(const std::filesystem::path& local_dir, const std::string& artifact_path = "");

  /// Empty before connect().
  const std::string& run_id() const;
  const std::string& experiment_id() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
