#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/trackers/value.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Kinds of records, beside values, that not every tracker takes.
enum class TrackerData { images, tables, histograms };

/// Thrown by a tracker that can't go on (its program has died, its server is gone): what is given to it from then on
/// goes to a local file. Any other exception concerns the one record.
struct ACCELERATE_API TrackerGone : CommError {
  using CommError::CommError;
};

/// A destination of a run's numbers; derive from it for one of your own. Names and behaviour are the reference's.
///
/// An Accelerator puts each tracker behind a queue of its own: the constructor and start() are called by the thread
/// that calls init_trackers, everything else by one thread that belongs to the tracker, one call at a time. So it may
/// be slow. A record for which it throws goes to a local file (docs/tracking.md), with one warning; nothing of it
/// reaches the training.
class ACCELERATE_API GeneralTracker {
 public:
  GeneralTracker() = default;
  GeneralTracker(const GeneralTracker&) = delete;
  GeneralTracker& operator=(const GeneralTracker&) = delete;
  virtual ~GeneralTracker() = default;

  virtual std::string name() const = 0;
  /// Else every process opens it and logs to it.
  virtual bool main_process_only() const { return true; }
  /// An error is thrown early if there is no AcceleratorOptions::project_dir (or logging_dir) for it.
  virtual bool requires_logging_directory() const { return false; }
  /// Whether log_images, log_table, log_histogram are there.
  virtual bool takes(TrackerData) const { return false; }

  /// Opens it, quickly: on the calling thread of init_trackers, out of which its exceptions come. Constructors open
  /// nothing: trackers are made on all processes.
  virtual void start() {}
  /// Opening that takes time, e.g. asking a server: called on the tracker's thread, before the first record. An
  /// exception counts as TrackerGone.
  virtual void connect() {}
  /// The run's hyperparameters, once.
  virtual void store_init_configuration(const TrackerValues& config) = 0;
  /// @param step      nothing: the caller did not say
  /// @param log_kwargs  for this tracker, as in the reference
  virtual void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) = 0;
  /// Images by name: each a tensor on the host, [N, H, W, C] or [N, C, H, W] with C = 1, 3 or 4 (without N: one image),
  /// uint8, or floating from 0 to 1. `log_kwargs["dataformats"]`, "NHWC" or "NCHW" (or without N), decides where the
  /// sizes do not. These three throw ConfigError where takes() says no.
  virtual void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                          const TrackerValues& log_kwargs = {});
  /// @throws ShapeError where a row is not as long as `columns`
  virtual void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                         const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                         const TrackerValues& log_kwargs = {});
  /// @param values  of any shape and number type, on the host
  virtual void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                             const TrackerValues& log_kwargs = {});
  /// Called at least every half second while there is something new: what was logged should outlive this process.
  /// Until then a tracker may keep what it is given: if this throws, all that came since the last flush goes to the
  /// file.
  virtual void flush() {}
  /// Writes what is pending. Nothing is logged after it.
  virtual void finish() {}

  /// When the record was logged that is being written, in seconds since 1970.
  double time() const;
  /// Of the records to come; nothing: the time at which they come.
  void set_time(std::optional<double> seconds) { time_ = seconds; }

 private:
  std::optional<double> time_;
};

/// The arguments that a tracker is made from.
struct TrackerSetup {
  std::string project_name;
  /// Empty where there is none.
  std::filesystem::path logging_dir;
  /// init_trackers' init_kwargs for this tracker. Names that it does not know are errors.
  TrackerValues init_kwargs = {};
};

/// A kind of tracker that AcceleratorOptions::log_with may name.
struct TrackerClass {
  std::function<std::shared_ptr<GeneralTracker>(const TrackerSetup&)> make;
  /// Whether "all" takes it, on this machine.
  std::function<bool()> available = [] { return true; };
  bool requires_logging_directory = false;
};

/// Makes a name known to AcceleratorOptions::log_with; before the Accelerator is made. One that is known already is
/// replaced, with a warning. @throws ConfigError if `name` is empty or "all", or `make` is missing.
ACCELERATE_API void register_tracker_class(const std::string& name, TrackerClass tracker);
/// The names that are known, in alphabetical order.
ACCELERATE_API std::vector<std::string> tracker_names();
/// Those of them that work here: what "all" is.
ACCELERATE_API std::vector<std::string> available_trackers();
/// @throws ConfigError naming those that exist.
ACCELERATE_API TrackerClass tracker_class(const std::string& name);

}  // namespace accelerate
