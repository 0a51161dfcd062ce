#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Where a run's numbers go. Called on the main process only.
class ACCELERATE_API GeneralTracker {
 public:
  virtual ~GeneralTracker() = default;
  virtual std::string name() const = 0;
  virtual void store_init_configuration(const std::map<std::string, std::string>& config) = 0;
  virtual void log(const std::map<std::string, double>& values, std::optional<int64_t> step) = 0;
  /// Writes what is pending. Nothing may be logged after it.
  virtual void finish() = 0;
};

/// Event files that TensorBoard reads, in logging_dir/run_name; the configuration goes to hparams.yml beside them.
/// @throws CheckpointError when the folder can't be written to.
ACCELERATE_API std::unique_ptr<GeneralTracker> make_tensorboard_tracker(const std::string& run_name,
                                                                        const std::filesystem::path& logging_dir);

/// By its name in AcceleratorOptions::log_with. @throws ConfigError naming those that exist.
ACCELERATE_API std::unique_ptr<GeneralTracker> make_tracker(const std::string& name, const std::string& run_name,
                                                            const std::filesystem::path& logging_dir);
/// The names that make_tracker knows.
ACCELERATE_API bool is_tracker(const std::string& name);

}  // namespace accelerate
