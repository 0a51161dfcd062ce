#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "utils/fd.hpp"

namespace accelerate {

/// A process with Python in it that answers requests, a line each (python_child.py). It can't do anything to this one:
/// it has no descriptor of it but the channel, reads nothing from the terminal, is in a process group of its own, and
/// what it prints comes here. It ends with this process, however that ends. For one thread at a time.
class PythonChild {
 public:
  /// @throws LaunchError when the interpreter can't be executed.
  explicit PythonChild(const std::string& interpreter);
  /// Does not wait: the child ends its run by itself, in at most five seconds.
  ~PythonChild();
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;

  /// Sends a request without its newline, and waits for the answer. A child that gives none in `limit` is killed.
  /// @throws ResourceError with the reason and the end of what the child printed; from then on at once.
  std::string ask(const std::string& request, std::chrono::milliseconds limit);
  /// Waits until the process has ended after its last answer, and kills it when it has not in `limit`.
  void end(std::chrono::milliseconds limit);

  pid_t pid() const { return pid_; }

 private:
  using Clock = std::chrono::steady_clock;
  void send(const std::string& line, Clock::time_point deadline);
  void wait(short channel_events, Clock::time_point deadline);
  void drain();
  bool ended();
  void kill();
  [[noreturn]] void give_up(const std::string& why);

  std::string interpreter_;
  Fd channel_, output_;
  std::string answers_;  ///< what has come, up to here less than a line
  std::string printed_;  ///< the end of what the child printed
  std::string gone_;     ///< why there is no child any more
  pid_t pid_ = -1;
};

/// ACCELERATE_PYTHON, else python3, for execvp's search.
std::string tracker_python();

/// The ones of `packages` that the interpreter would find. Nothing is imported. Empty when there is no interpreter, or
/// when it says nothing within ten seconds.
std::vector<std::string> installed_packages(const std::vector<std::string>& packages);

}  // namespace accelerate
