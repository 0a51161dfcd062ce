#pragma once

#include <string>
#include <vector>

#include "launch/system/output.hpp"
#include "launch/system/warden.hpp"

namespace accelerate::launcher {

/// The lower part of a terminal, below the output that scrolls in the upper part.
///
/// The terminal is divided by its scrolling region (DECSTBM), so that the output needs no regard for it: progress bars,
/// colours and the scrollback work as ever. All goes through the sink of that terminal, in the order of time. Leaving
/// undoes it; should the launcher be killed, its warden does.
class TerminalView {
 public:
  /// Whether there is a terminal that understands it.
  static bool possible(int fd);
  TerminalView(Sink& sink, const Warden& warden) : sink_(sink), warden_(warden) {}
  ~TerminalView();
  TerminalView(const TerminalView&) = delete;

  /// How many lines and columns a view may have now; no lines when the terminal is too low.
  struct Room {
    size_t lines, columns;
  };
  Room room() const;
  /// Draws, after making room for so many lines, also after the terminal's size has changed. Nothing while the drawing
  /// before still waits for a slow terminal.
  void draw(const std::vector<std::string>& lines);
  /// Gives the terminal back, the cursor below the last output. Draw again to come back.
  void leave();

  /// The sequence that undoes the division, whatever has been drawn.
  static const char* restore();

 private:
  struct Size {
    size_t rows = 0, columns = 0;
    bool operator==(const Size&) const = default;
  };
  Size size() const;
  void divide(size_t lines);

  Sink& sink_;
  const Warden& warden_;
  Size divided_;        ///< the terminal's size when it was divided; no rows: it is not
  size_t lines_ = 0;    ///< of the view
  uint64_t drawn_ = 0;  ///< where in the sink's bytes the last drawing ends
};

}  // namespace accelerate::launcher
