#pragma once

#include <optional>

#include "launch/system/temporary_folder.hpp"

namespace accelerate::launcher {

struct Job;

/// Receipts of the job, from the file in which its main process leaves them to the user. Nothing without --receipts.
class ReceiptsDesk {
 public:
  /// Says in the job where the file is to be. @throws LaunchError when there can't be one.
  explicit ReceiptsDesk(Job& job);

  /// Prints what is there, after all else. @return the job's exit code: `exit_code`, or 65 where --receipts=strict does
  /// not let it pass.
  int close(int exit_code) const;

 private:
  const Job& job_;
  std::optional<TemporaryFolder> folder_;
};

}  // namespace accelerate::launcher
