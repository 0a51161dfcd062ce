#pragma once

#include <termios.h>

#include <string>

namespace accelerate::launcher {

/// Keys that are pressed on the launcher's terminal, as they come and without showing them, while it is in the
/// foreground. Ctrl-C and its kin stay signals. Should the launcher be killed, its warden gives the terminal its modes
/// back.
class Keyboard {
 public:
  /// Whether standard input is the terminal behind `fd`.
  static bool possible(int fd);
  Keyboard() = default;
  ~Keyboard() { leave(); }
  Keyboard(const Keyboard&) = delete;
  Keyboard& operator=(const Keyboard&) = delete;

  /// Changes the terminal's modes; again after a shell has changed them back. Nothing in the background.
  void take();
  /// Whether standard input may be polled, and read, now.
  bool listens() const;
  /// The keys that have been pressed.
  std::string read();
  /// Gives the terminal its modes back.
  void leave();

 private:
  termios before_{};
  bool taken_ = false;  ///< `before_` has the modes that there were
  bool ended_ = false;  ///< the terminal has gone
};

}  // namespace accelerate::launcher
