#include "program.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "ranks.hpp"

extern char** environ;

namespace cli_test {
namespace {

using Clock = std::chrono::steady_clock;

/// Variables of a launch around the tests, and what would change the launcher's choices.
bool is_launchers(const std::string& entry) {
  if (entry.starts_with("ACCELERATE_FAULT=")) return false;  // of scripts/mutate.py
  for (const char* prefix : {"RANK=", "LOCAL_", "WORLD_SIZE=", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_",
                             "ACCELERATE_", "OMP_NUM_THREADS=", "TMPDIR=", "HF_HOME="})
    if (entry.starts_with(prefix)) return true;
  return false;
}

}  // namespace

std::string accelerate_path() { return std::string(ACCELERATE_BIN_DIR) + "/accelerate"; }

Program::Program(const std::vector<std::string>& arguments, const Options& options) {
  std::vector<std::string> env;
  for (char** entry = environ; *entry; ++entry)
    if (!is_launchers(*entry) && std::none_of(options.env.begin(), options.env.end(), [&](const auto& ours) {
          return ours.starts_with(std::string(*entry, std::strcspn(*entry, "=") + 1));
        }))
      env.push_back(*entry);
  const auto unless_given = [&](const std::string& name, const std::string& value) {
    if (std::none_of(options.env.begin(), options.env.end(), [&](const auto& ours) { return ours.starts_with(name); }))
      env.push_back(name + value);
  };
  unless_given("TMPDIR=", support::scratch_dir());
  unless_given("HF_HOME=", support::scratch_dir() + "/no_config_file");  // the user's own config file must not decide
  env.insert(env.end(), options.env.begin(), options.env.end());
  std::vector<char*> argv, envp;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  for (auto& entry : env) envp.push_back(entry.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
  if (options.terminal) {
    const winsize size{static_cast<unsigned short>(options.rows), static_cast<unsigned short>(options.columns), 0, 0};
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    ::fcntl(terminal_, F_SETFD, FD_CLOEXEC);
  } else {
    if (::pipe2(in, O_CLOEXEC) || ::pipe2(out, O_CLOEXEC) || ::pipe2(err, O_CLOEXEC)) std::abort();
    pid_ = ::vfork();  // copying the pages' table of a test program takes longer than the launcher needs to start
  }
  if (pid_ == 0) {
    // A shell without job control and nohup start what runs in the background with these ignored; that is inherited.
    for (const int number : {SIGINT, SIGQUIT, SIGHUP}) ::signal(number, SIG_DFL);
    if (!options.terminal) {
      ::setpgid(0, 0);
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      ::dup2(err[1], 2);
    }
    if (!options.folder.empty() && ::chdir(options.folder.c_str()) != 0) ::_exit(126);
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  if (options.terminal) {
    out_ = terminal_;
    return;
  }
  ::close(in[0]);
  ::close(out[1]);
  ::close(err[1]);
  [[maybe_unused]] const ssize_t written = ::write(in[1], options.input.data(), options.input.size());
  ::close(in[1]);
  out_ = out[0];
  err_ = err[0];
}

Program::~Program() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (const int fd : {out_, err_, held_})
    if (fd >= 0) ::close(fd);
}

void Program::signal(int number) const { ::kill(pid_, number); }

void Program::type(const std::string& text) const {
  ASSERT_EQ(::write(terminal_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

bool Program::shows_what_is_typed() const {
  termios modes{};
  if (held_ < 0) held_ = ::open(::ptsname(terminal_), O_RDONLY | O_NOCTTY | O_CLOEXEC);
  return ::tcgetattr(held_, &modes) == 0 && (modes.c_lflag & ECHO) != 0 && (modes.c_lflag & ICANON) != 0;
}

void Program::resize(int rows, int columns) const {
  const winsize size{static_cast<unsigned short>(rows), static_cast<unsigned short>(columns), 0, 0};
  ASSERT_EQ(::ioctl(terminal_, TIOCSWINSZ, &size), 0);
}

void Program::read_for(milliseconds time) {
  for (const auto end = Clock::now() + time; Clock::now() < end && read_once(milliseconds(20));) {
  }
}

void Program::close_output() {
  ::close(out_);
  out_ = -1;
}

bool Program::read_once(milliseconds timeout) {
  pollfd fds[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  if (out_ < 0 && err_ < 0) return false;
  ::poll(fds, 2, static_cast<int>(timeout.count()));
  for (auto& [fd, events, revents] : fds) {
    if (!revents) continue;
    char buffer[65536];
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got > 0) {
      (fd == out_ ? result_.out : result_.err).append(buffer, static_cast<size_t>(got));
    } else {
      int& mine = fd == out_ ? out_ : err_;
      ::close(mine);
      mine = -1;
    }
  }
  return true;
}

bool Program::wait_for(const std::string& text, milliseconds deadline) {
  const auto end = Clock::now() + deadline;
  const auto found = [&] {
    return result_.out.find(text) != std::string::npos || result_.err.find(text) != std::string::npos;
  };
  while (!found() && Clock::now() < end && read_once(milliseconds(50))) {
  }
  return found();
}

Result Program::wait(milliseconds deadline) {
  if (held_ >= 0) ::close(std::exchange(held_, -1));  // its end would never come
  const auto end = Clock::now() + deadline;
  int status = 0;
  bool late = false;
  while (::wait4(pid_, &status, WNOHANG, &result_.usage) == 0) {
    if (!read_once(milliseconds(20))) std::this_thread::sleep_for(milliseconds(5));
    if (!late && Clock::now() > end) {
      late = true;
      ADD_FAILURE() << "the deadline of " << deadline.count() << " ms passed; stdout so far:\n"
                    << result_.out << "\nstderr so far:\n"
                    << result_.err;
      ::kill(pid_, SIGKILL);
    }
  }
  pid_ = -1;
  // Reads what it wrote just before its end; a process that it left behind would keep the pipes open, which is for the
  // test to find.
  for (const auto grace = Clock::now() + milliseconds(300); Clock::now() < grace && read_once(milliseconds(20));) {
  }
  if (WIFEXITED(status)) result_.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result_.signal = WTERMSIG(status);
  return result_;
}

Result launch(const std::vector<std::string>& arguments, const Program::Options& options) {
  std::vector<std::string> all{accelerate_path(), "launch"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return Program(all, options).wait();
}

bool gone(pid_t pid, milliseconds deadline) {
  for (const auto end = Clock::now() + deadline; Clock::now() < end; std::this_thread::sleep_for(milliseconds(10))) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    if (!std::getline(stat, line)) return true;
    if (line.compare(line.rfind(')') + 2, 1, "Z") == 0) return true;
  }
  return false;
}

std::vector<pid_t> pids_in(const std::string& file, size_t count) {
  std::vector<pid_t> pids;
  for (const auto end = Clock::now() + milliseconds(120000); Clock::now() < end;
       std::this_thread::sleep_for(milliseconds(10))) {
    pids.clear();
    std::ifstream in(file);
    for (pid_t pid; in >> pid;) pids.push_back(pid);
    if (pids.size() >= count) return pids;
  }
  ADD_FAILURE() << file << " has " << pids.size() << " process numbers, expected " << count;
  return pids;
}

}  // namespace cli_test
