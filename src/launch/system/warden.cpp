#include "launch/system/warden.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

namespace accelerate::launcher {
namespace {

struct Note {
  pid_t target, wanted;
};  // smaller than PIPE_BUF: arrives whole

[[noreturn]] void stand_guard(int pipe, std::vector<pid_t>& targets, int terminal, const char* restore) {
  // A session of its own: neither Ctrl-C nor the end of the terminal reaches it. All signals stay blocked.
  ::setsid();
  ::prctl(PR_SET_NAME, "accelerate-ward");
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  // Holding on to anything but the pipe would keep readers of the launcher's output waiting; a terminal's don't wait
  // for an end.
  ::dup2(pipe, 0);
  if (terminal >= 0) ::dup2(terminal, 1);
  ::close_range(terminal >= 0 ? 2 : 1, ~0U, 0);
  bool divided = false;
  Note note;
  while (::read(0, &note, sizeof(note)) == sizeof(note)) {
    if (note.target == 0) divided = note.wanted != 0;
    for (auto& target : targets)
      if (note.target != 0 && target == (note.wanted ? 0 : note.target)) {
        target = note.wanted ? note.target : 0;
        break;
      }
  }
  for (pid_t target : targets)
    if (target != 0) ::kill(target, SIGKILL);
  if (divided) [[maybe_unused]]
    const ssize_t written = ::write(1, restore, std::strlen(restore));
  ::_exit(0);
}

}  // namespace

Warden::Warden(size_t capacity, int terminal, const char* restore) {
  std::vector<pid_t> targets(capacity, 0);
  Pipe pipe = make_pipe();
  pid_ = ::fork();
  if (pid_ < 0) raise_no_process();
  if (pid_ == 0) {
    pipe.write.reset();
    stand_guard(pipe.read.get(), targets, terminal, restore);
  }
  pipe_ = std::move(pipe.write);
}

Warden::~Warden() {
  pipe_.reset();
  ::waitpid(pid_, nullptr, 0);
}

void Warden::tell(pid_t target, pid_t wanted) const {
  const Note note{target, wanted};
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), &note, sizeof(note));
}

}  // namespace accelerate::launcher
