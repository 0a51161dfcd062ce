#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

/// Ranks of tests without the cost of loading LibTorch in each of them.
///
/// Loading LibTorch takes a quarter of a second of processor time, most of what a small case with ranks costs. So the
/// program is started once more, when the first rank is asked for, and stops in front of its main(): the *rank server*,
/// with LibTorch loaded, one thread, and nothing done yet. Each rank is a fork of it that then runs main() with its own
/// arguments and environment, as fresh as one that was started in the usual way.
namespace support {

/// The main() of a test program: returns run(argc, argv), or serves ranks where this process was started for
/// that.
int main_or_rank_server(int argc, char** argv, int (*run)(int argc, char** argv));

/// The arguments and the environment of a rank that starts.
struct RankStart {
  std::vector<std::string> arguments;    ///< without the program's name
  std::vector<std::string> environment;  ///< all of it, NAME=value each
  int output = -1;                       ///< becomes its stdout and stderr; the caller closes its own copy
};

/// Starts this program as one more process. The server is for ranks that agree with it in what is read while a program
/// is loaded (OpenMP's, GoogleTest's, the dynamic linker's variables); the few others are executed anew.
/// Not thread-safe. Ends the process where the system refuses another one.
class Rank {
 public:
  explicit Rank(const RankStart& start);
  pid_t pid() const { return pid_; }
  /// Waits for its end. Returns waitpid()'s status. Call it once.
  int wait();

 private:
  pid_t pid_ = -1;
  bool served_ = false;
};

}  // namespace support
