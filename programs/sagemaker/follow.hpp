#pragma once

#include <csignal>
#include <string>

#include "sagemaker/aws.hpp"

namespace sagemaker {

/// SIGINT and SIGTERM end the following, not the job: for as long as this lives they set a flag, once; the next one
/// ends the program.
class Interruption {
 public:
  Interruption();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;
  static bool happened();
  static int signal();

 private:
  struct sigaction before_int_ {
  }, before_term_{};
};

/// Prints what happens to a job, and what it prints, until it has ended or somebody interrupts.
///
/// Asks every ACCELERATE_SAGEMAKER_POLL_SECONDS (10 unless set). The last log lines of a job may arrive after its end,
/// so they are asked for once more then.
/// @return the job's last description
Json follow(Aws& aws, const std::string& job, const Environment& environment);

}  // namespace sagemaker
