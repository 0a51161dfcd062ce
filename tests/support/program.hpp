#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

/// Tests that run the real `accelerate` program.
namespace cli_test {

using std::chrono::milliseconds;

/// How a program ended.
struct Result {
  int exit_code = -1;  ///< or -1 when a signal ended it
  int signal = 0;
  std::string out, err;
  rusage usage{};
};

/// A running program with its streams on pipes (or a terminal), leader of a group of its own.
class Program {
 public:
  struct Options {
    std::vector<std::string> env;  ///< NAME=value on top of ours; the launcher's own variables are removed first
    std::string input;             ///< what it finds on standard input, then the end
    bool terminal = false;      ///< streams 0, 1, 2 are a pseudo-terminal, which is the program's controlling terminal
    int rows = 0, columns = 0;  ///< of the terminal; 0: it does not say
    bool read_output = true;    ///< false: nobody takes what it writes until wait()
    std::string folder;         ///< working folder
  };
  Program(const std::vector<std::string>& arguments, const Options& options);
  explicit Program(const std::vector<std::string>& arguments) : Program(arguments, Options{}) {}
  ~Program();  ///< kills what still runs
  Program(const Program&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  void type(const std::string& text) const;  ///< on the terminal
  void resize(int rows, int columns) const;  ///< the terminal, which tells the program
  bool shows_what_is_typed() const;          ///< the terminal, and gives it on line by line
  void close_output();                       ///< the reader of its stdout goes away
  /// Reads until stdout or stderr contains `text`; false when the deadline passes or the program ends first.
  bool wait_for(const std::string& text, milliseconds deadline = milliseconds(60000));
  /// Reads what comes in that time.
  void read_for(milliseconds time);
  /// All that it has written to the terminal, or to stdout, so far.
  const std::string& output() const { return result_.out; }
  const std::string& errors() const { return result_.err; }
  /// Reads until the end; kills it and adds a failure to the test when the deadline passes.
  Result wait(milliseconds deadline = milliseconds(60000));

 private:
  bool read_once(milliseconds timeout);
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1, terminal_ = -1;
  mutable int held_ = -1;  ///< the terminal's other end, so that its modes outlive the program
  Result result_;
};

/// Path of the `accelerate` program of this build.
std::string accelerate_path();

/// Runs `accelerate launch <arguments>` to its end.
Result launch(const std::vector<std::string>& arguments, const Program::Options& options = {});

/// True as soon as the process is gone or a zombie; false if it still runs when the deadline passes.
bool gone(pid_t pid, milliseconds deadline = milliseconds(60000));

/// The numbers written in a file, waiting until there are `count`.
std::vector<pid_t> pids_in(const std::string& file, size_t count);

}  // namespace cli_test
