#pragma once

#include <memory>

#include "accelerate/profiler.hpp"

namespace accelerate::profiler {

/// The profile that `accelerate profile` asks for, of a program that need not know of it: the environment says where to
/// (ACCELERATE_PROFILE_DIR), of which steps, and what. Steps are those of the prepared optimizers that synchronise.
/// Made, ended and destroyed on one thread, which should be the one that trains.
class RunProfile {
 public:
  /// Whether the environment asks for one.
  static bool asked();
  /// @return null: nobody asks, or a profiler records in this thread already. @throws ConfigError for values that don't
  /// fit
  static std::unique_ptr<RunProfile> begin(ProfileProcess process);
  ~RunProfile();
  RunProfile(const RunProfile&) = delete;
  RunProfile& operator=(const RunProfile&) = delete;

  /// Writes the file. Nothing the second time. Never throws; errors become warnings.
  void end() noexcept;
  /// The program makes a profile of its own: ends, with a warning.
  void give_way() noexcept;

 private:
  struct Impl;
  explicit RunProfile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::profiler
