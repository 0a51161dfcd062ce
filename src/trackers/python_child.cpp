#include "trackers/python_child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "trackers/python_script.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using std::chrono::milliseconds;

/// The child's own numbers, beyond the three that everybody has.
constexpr int kChannel = 3, kScript = 4;
/// Our descriptors lie above this while they are handed over, so that none is overwritten before it was.
constexpr int kAboveAll = 16;
constexpr size_t kMostPrinted = 4096;
constexpr size_t kMostAnswer = 1 << 20;
/// Between two looks whether the process is there: its end closes the channel, unless it left it to a child of its own.
constexpr milliseconds kLook{50};

Fd lifted(Fd fd) {
  const int number = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, kAboveAll);
  if (number < 0) raise<ResourceError>("a tracker's Python: {}. Are there descriptors left?", std::strerror(errno));
  return Fd(number);
}

[[noreturn]] void no_descriptors() {
  raise<ResourceError>("a tracker's Python: no channel to it: {}. Are there descriptors left (ulimit -n)?",
                       std::strerror(errno));
}

Fd file_of(const std::string& text) {
  Fd file(::memfd_create("accelerate-tracker", MFD_CLOEXEC));
  if (!file || ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::lseek(file.get(), 0, SEEK_SET) != 0)
    no_descriptors();
  return file;
}

struct Spawned {
  pid_t pid = -1;
  Fd output;
};

/// @param channel, script  ours, to be the child's kChannel and kScript; -1: none
Spawned spawn_python(const std::string& interpreter, std::vector<std::string> words, int channel, int script) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) no_descriptors();
  Spawned result{-1, Fd(ends[0])};
  const Fd printed = lifted(Fd(ends[1]));
  ::fcntl(result.output.get(), F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, printed.get(), 1);
  ::posix_spawn_file_actions_adddup2(&actions, printed.get(), 2);
  if (channel >= 0) ::posix_spawn_file_actions_adddup2(&actions, channel, kChannel);
  if (script >= 0) ::posix_spawn_file_actions_adddup2(&actions, script, kScript);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, script >= 0 ? kScript + 1 : 3);  // sockets of the job, devices
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  words.insert(words.begin(), interpreter);
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const int error = ::posix_spawnp(&result.pid, interpreter.c_str(), &actions, &attributes, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error)
    raise<LaunchError>(
        "a tracker's Python: '{}' can't be executed: {}. Set ACCELERATE_PYTHON to the interpreter that has the "
        "tracker's package",
        interpreter, std::strerror(error));
  return result;
}

milliseconds left_until(std::chrono::steady_clock::time_point deadline) {
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now()));
}

}  // namespace

std::string tracker_python() { return environment::text("ACCELERATE_PYTHON").value_or("python3"); }

std::vector<std::string> installed_packages(const std::vector<std::string>& packages) {
  // As python_child.py looks for them: not in the current folder, and a folder without code is no package.
  static constexpr const char* kAsk =
      "import sys\n"
      "sys.path[:] = [p for p in sys.path if p]\n"
      "import importlib.util as u\n"
      "print(*(n for n in sys.argv[1:] if (s := u.find_spec(n)) and s.origin))";
  std::vector<std::string> words{"-c", kAsk};
  words.insert(words.end(), packages.begin(), packages.end());
  Spawned python;
  try {
    python = spawn_python(tracker_python(), words, -1, -1);
  } catch (const LaunchError&) {
    return {};
  }
  std::string text;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (char bytes[1024];;) {
    pollfd one{python.output.get(), POLLIN, 0};
    const auto left = left_until(deadline);
    if (left.count() == 0 || ::poll(&one, 1, static_cast<int>(left.count())) == 0) {
      text.clear();
      break;
    }
    const ssize_t got = ::read(python.output.get(), bytes, sizeof(bytes));
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) break;
    if (got > 0) text.append(bytes, static_cast<size_t>(got));
  }
  ::kill(-python.pid, SIGKILL);
  while (::waitpid(python.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  std::vector<std::string> found;
  std::istringstream in(text);
  for (std::string name; in >> name;) found.push_back(name);
  return found;
}

PythonChild::PythonChild(const std::string& interpreter) : interpreter_(interpreter) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) no_descriptors();
  channel_.reset(ends[0]);
  const Fd theirs = lifted(Fd(ends[1])), script = lifted(file_of(kPythonScript));
  ::fcntl(channel_.get(), F_SETFL, O_NONBLOCK);
  // Only installed packages are meant: a folder "wandb" in the current one, which wandb itself makes, is none, and a
  // base64.py there is not Python's.
  static constexpr const char* kStart =
      "import sys\n"
      "sys.path[:] = [p for p in sys.path if p]\n"
      "import os\n"
      "exec(compile(os.fdopen(4).read(), 'accelerate_tracker', 'exec'))";
  auto python = spawn_python(interpreter, {"-c", kStart}, theirs.get(), script.get());
  pid_ = python.pid;
  output_ = std::move(python.output);
}

PythonChild::~PythonChild() {
  channel_.reset();
  ended();
}

bool PythonChild::ended() {
  if (pid_ < 0) return true;
  int status = 0;
  const pid_t got = ::waitpid(pid_, &status, WNOHANG);
  // Somebody else in this process waits for all children: then it is theirs to know.
  if (got == 0 || (got < 0 && errno == EINTR)) return false;
  if (got < 0 && ::kill(pid_, 0) == 0) return false;
  pid_ = -1;
  if (got > 0 && WIFSIGNALED(status)) gone_ = fmt::format("it was ended by signal {}", WTERMSIG(status));
  else if (got > 0) gone_ = fmt::format("it ended with status {}", WEXITSTATUS(status));
  else gone_ = "it ended";
  return true;
}

void PythonChild::kill() {
  if (pid_ < 0) return;
  ::kill(-pid_, SIGKILL);  // with what the SDK has started
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

void PythonChild::drain() {
  char bytes[16384];
  for (ssize_t got = 0; (got = ::read(output_.get(), bytes, sizeof(bytes))) > 0;) {
    printed_.append(bytes, static_cast<size_t>(got));
    if (printed_.size() > 2 * kMostPrinted) printed_.erase(0, printed_.size() - kMostPrinted);
    // A flood must not keep us here: the deadline is the caller's to look at.
    if (got < static_cast<ssize_t>(sizeof(bytes))) break;
  }
}

void PythonChild::give_up(const std::string& why) {
  drain();
  kill();
  channel_.reset();
  std::string last;  // the line that says why, in what Python prints at its end
  std::istringstream in(printed_);
  for (std::string line; std::getline(in, line);)
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line.substr(0, 300);
  gone_ = why + (last.empty() ? "" : fmt::format("; the last that it printed: {}", last));
  raise<ResourceError>("{}", gone_);
}

void PythonChild::wait(short channel_events, Clock::time_point deadline) {
  const auto left = left_until(deadline);
  pollfd both[2] = {{channel_events ? channel_.get() : -1, channel_events, 0}, {output_.get(), POLLIN, 0}};
  // Without anybody who writes, the pipe would be "ready" for ever.
  if (!output_) both[1].fd = -1;
  ::poll(both, 2, static_cast<int>(std::min(left, kLook).count()));
  if (both[1].revents & POLLIN) drain();
  else if (both[1].revents & (POLLHUP | POLLERR)) output_.reset();
}

void PythonChild::send(const std::string& line, Clock::time_point deadline) {
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t now = ::send(channel_.get(), line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (now > 0) sent += static_cast<size_t>(now);
    else if (now < 0 && errno != EAGAIN && errno != EINTR) return;  // gone: whoever reads finds out how
    else if (left_until(deadline).count() == 0) return;
    else wait(POLLOUT, deadline);
  }
}

std::string PythonChild::ask(const std::string& request, milliseconds limit) {
  if (!channel_) raise<ResourceError>("{}", gone_);
  const auto deadline = Clock::now() + limit;
  send(request + "\n", deadline);
  for (;;) {
    const bool gone = ended();  // before reading: what it said before its end is read then
    char bytes[4096];
    for (;;) {
      const ssize_t got = ::recv(channel_.get(), bytes, sizeof(bytes), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        if (got == 0 && !gone) {
          for (int look = 0; look < 20 && !ended(); ++look) std::this_thread::sleep_for(milliseconds(10));
          give_up(gone_.empty() ? "it closed its channel" : gone_);
        }
        break;
      }
      answers_.append(bytes, static_cast<size_t>(got));
      if (answers_.size() > kMostAnswer) give_up("its answer is longer than any should be");
    }
    if (const size_t end = answers_.find('\n'); end != std::string::npos) {
      std::string answer = answers_.substr(0, end);
      answers_.erase(0, end + 1);
      return answer;
    }
    if (gone) give_up(gone_);
    if (left_until(deadline).count() == 0)
      give_up(fmt::format("it did not answer in {} s", std::chrono::duration<double>(limit).count()));
    wait(POLLIN, deadline);
  }
}

void PythonChild::end(milliseconds limit) {
  if (!channel_) return;
  ::shutdown(channel_.get(), SHUT_WR);
  const auto deadline = Clock::now() + limit;
  while (!ended() && left_until(deadline).count() > 0) wait(0, deadline);
  kill();
  channel_.reset();
  if (gone_.empty()) gone_ = "it has finished";
}

}  // namespace accelerate
