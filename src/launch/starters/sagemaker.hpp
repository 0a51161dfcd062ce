#pragma once

namespace accelerate::launcher {

struct Host;
struct Job;

/// Hands the job to accelerate-sagemaker, a program beside this one, and waits for it. With --dry_run that prints the
/// request and sends nothing. Blocking.
///
/// Ctrl-C and SIGTERM end the waiting, not the job.
/// @return 0 when the job completed, 1 when it failed or was stopped, 128 + signal when the waiting was ended; errors
/// have their own codes (error.hpp)
/// @throws ConfigError for what SageMaker can't run; NotBuiltError when the program is not there
int launch_on_sagemaker(const Job& job, const Host& host);

}  // namespace accelerate::launcher
