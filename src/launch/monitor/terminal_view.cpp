#include "launch/monitor/terminal_view.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace accelerate::launcher {
namespace {

constexpr const char* kSave = "\0337";
constexpr const char* kBack = "\0338";

}  // namespace

const char* TerminalView::restore() { return "\0337\033[r\0338\033[J"; }

bool TerminalView::possible(int fd) {
  const char* kind = std::getenv("TERM");
  return ::isatty(fd) && kind && *kind && std::strcmp(kind, "dumb") != 0;
}

TerminalView::~TerminalView() {
  if (divided_.rows == 0) return;
  // An exception passes: what is queued is lost, and the terminal must not be.
  [[maybe_unused]] const ssize_t written = ::write(sink_.fd(), restore(), std::strlen(restore()));
  warden_.terminal_divided(false);
}

TerminalView::Size TerminalView::size() const {
  winsize size{};
  if (::ioctl(sink_.fd(), TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) return {24, 80};
  return {size.ws_row, size.ws_col};
}

TerminalView::Room TerminalView::room() const {
  const auto [rows, columns] = size();
  // A third to a half for the view. The last column stays free: a character there makes terminals differ about where
  // the cursor is.
  return {rows < 8 ? 0 : rows / 2 - 1, std::max<size_t>(columns, 2) - 1};
}

void TerminalView::divide(size_t lines) {
  const Size now = size();
  if (divided_ == now && lines_ == lines) return;
  std::string text;
  if (divided_.rows > 0) text += restore();
  else warden_.terminal_divided(true);
  // New lines push the output up where the cursor stands low; then back to where it was.
  text += std::string(lines + 1, '\n') + "\033[" + std::to_string(lines + 1) + "A";
  text += kSave + ("\033[1;" + std::to_string(now.rows - lines - 1) + "r") + kBack;
  sink_.control(text);
  divided_ = now;
  lines_ = lines;
}

void TerminalView::draw(const std::vector<std::string>& lines) {
  if (sink_.written() < drawn_ || sink_.closed()) return;
  if (room().lines == 0) return leave();
  divide(std::min(lines.size(), room().lines));
  const auto [rows, columns] = divided_;
  // The region is set each time: a program's output may have undone it.
  std::string text = kSave + ("\033[1;" + std::to_string(rows - lines_ - 1) + "r\033[0m");
  const auto line = [&](size_t row, const std::string& content) {
    text += "\033[" + std::to_string(row) + ";1H" + content + "\033[0m\033[K";
  };
  std::string rule;
  for (size_t i = 1; i < columns; ++i) rule += "─";
  line(rows - lines_, rule);
  for (size_t i = 0; i < lines_; ++i) line(rows - lines_ + 1 + i, lines[i]);
  sink_.control(text + kBack);
  drawn_ = sink_.queued();
}

void TerminalView::leave() {
  if (divided_.rows == 0) return;
  sink_.control(restore());
  warden_.terminal_divided(false);
  divided_ = {};
}

}  // namespace accelerate::launcher
