#include "launch/monitor/keyboard.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace accelerate::launcher {
namespace {

/// Otherwise the terminal stops whoever reads it or changes its modes.
bool in_foreground() { return ::tcgetpgrp(STDIN_FILENO) == ::getpgrp(); }

}  // namespace

bool Keyboard::possible(int fd) {
  struct stat input {
  }, output{};
  return ::isatty(STDIN_FILENO) && ::fstat(STDIN_FILENO, &input) == 0 && ::fstat(fd, &output) == 0 &&
         input.st_rdev == output.st_rdev;
}

void Keyboard::take() {
  termios modes{};
  if (!in_foreground() || ::tcgetattr(STDIN_FILENO, &modes) != 0 || (modes.c_lflag & ICANON) == 0) return;
  before_ = modes;
  taken_ = true;
  modes.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  modes.c_cc[VMIN] = 0, modes.c_cc[VTIME] = 0;  // reading never waits
  ::tcsetattr(STDIN_FILENO, TCSANOW, &modes);
}

bool Keyboard::listens() const { return taken_ && !ended_ && in_foreground(); }

std::string Keyboard::read() {
  char keys[64];
  const ssize_t got = ::read(STDIN_FILENO, keys, sizeof(keys));
  if (got > 0) return {keys, static_cast<size_t>(got)};
  ended_ = got == 0 || (errno != EINTR && errno != EAGAIN);  // it was readable, so this is its end
  return {};
}

void Keyboard::leave() {
  if (!taken_) return;
  taken_ = false;
  if (in_foreground()) ::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
}

}  // namespace accelerate::launcher
