#include "launch/system/warden.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "launch/system/temporary_folder.hpp"

namespace accelerate::launcher {
namespace {

struct Note {
  pid_t target, wanted;
};                                             // smaller than PIPE_BUF: arrives whole
constexpr pid_t kTerminal = 0, kFarewell = 1;  // no targets: 1 is init

/// As `rm -r`, by a process of its own: little is safe after fork() in a program with threads.
void remove(char* const* words) {
  if (const pid_t child = ::fork(); child == 0) {
    ::execv("/bin/rm", words);
    ::_exit(127);
  } else if (child > 0) {
    ::waitpid(child, nullptr, 0);
  }
}

[[noreturn]] void stand_guard(int pipe, std::vector<pid_t>& targets, char* const* remove_folders, int terminal,
                              const char* restore) {
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
  termios modes{};
  const bool has_modes = terminal >= 0 && ::tcgetattr(1, &modes) == 0;  // nobody has changed them yet
  bool divided = false, farewell = false;
  Note note;
  while (::read(0, &note, sizeof(note)) == sizeof(note)) {
    if (note.target == kTerminal) divided = note.wanted != 0;
    else if (note.target == kFarewell) farewell = true;
    else
      for (auto& target : targets)
        if (target == (note.wanted ? 0 : note.target)) {
          target = note.wanted ? note.target : 0;
          break;
        }
  }
  for (pid_t target : targets)
    if (target != 0) ::kill(target, SIGKILL);
  if (divided) {
    [[maybe_unused]] const ssize_t written = ::write(1, restore, std::strlen(restore));
    if (has_modes) ::tcsetattr(1, TCSANOW, &modes);
  }
  if (!farewell && remove_folders[3]) remove(remove_folders);
  ::_exit(0);
}

}  // namespace

Warden::Warden(size_t capacity, int terminal, const char* restore) {
  std::vector<pid_t> targets(capacity, 0);
  std::vector<std::string> words{"rm", "-rf", "--"};
  for (auto& folder : temporary_folders()) words.push_back(std::move(folder));
  std::vector<char*> remove_folders;
  for (auto& word : words) remove_folders.push_back(word.data());
  remove_folders.push_back(nullptr);
  Pipe pipe = make_pipe();
  pid_ = ::fork();
  if (pid_ < 0) raise_no_process();
  if (pid_ == 0) {
    pipe.write.reset();
    stand_guard(pipe.read.get(), targets, remove_folders.data(), terminal, restore);
  }
  pipe_ = std::move(pipe.write);
}

Warden::~Warden() {
  tell(kFarewell, 1);
  pipe_.reset();
  ::waitpid(pid_, nullptr, 0);
}

void Warden::terminal_divided(bool divided) const { tell(kTerminal, divided); }

void Warden::tell(pid_t target, pid_t wanted) const {
  const Note note{target, wanted};
  [[maybe_unused]] const ssize_t written = ::write(pipe_.get(), &note, sizeof(note));
}

}  // namespace accelerate::launcher
