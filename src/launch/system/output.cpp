#include "launch/system/output.hpp"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <fmt/format.h>

namespace accelerate::launcher {
namespace {

constexpr size_t kLongLine = 1 << 20;
constexpr size_t kTailBytes = 32 << 10;  // LibTorch prints 128 frames after an error's text

}  // namespace

Sink::Sink(int fd) : fd_(fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) closed_ = true;
  if (S_ISREG(status.st_mode)) chunk_ = kQueueBytes;
  if (!::isatty(fd)) return;
  // A write to a stopped terminal blocks although poll() has said that there is room, even if it is for few bytes.
  struct stat ours {};
  own_ = Fd(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (own_ && ::fstat(own_.get(), &ours) == 0 && ours.st_rdev == status.st_rdev) fd_ = own_.get();
  else chunk_ = 256;  // somebody else's terminal (su); it promises room for about so much
}

void Sink::write(const void* owner, std::string_view text) {
  if (closed_ || text.empty()) return;
  if (open_line_ && open_line_ != owner) queue_ += '\n';
  queue_ += text;
  open_line_ = text.back() == '\n' ? nullptr : owner;
}

void Sink::flush() {
  while (pending() && !closed_) {
    pollfd ready{fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0) break;
    const ssize_t written = ::write(fd_, queue_.data() + head_, std::min(chunk_, queue_.size() - head_));
    if (written >= 0) head_ += static_cast<size_t>(written), written_ += static_cast<uint64_t>(written);
    else if (errno == EAGAIN) break;
    else if (errno != EINTR) closed_ = true;
  }
  if (closed_ || head_ == queue_.size()) queue_.clear(), head_ = 0;
  else if (head_ > kQueueBytes) queue_.erase(0, head_), head_ = 0;
}

LineForwarder::LineForwarder(Fd pipe, Options options) : pipe_(std::move(pipe)), options_(std::move(options)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);  // the read end is ours alone; the rank's end stays blocking
}

int LineForwarder::wants() const { return options_.sink && !options_.sink->has_room() ? -1 : pipe_.get(); }

void LineForwarder::read_some(std::chrono::steady_clock::time_point now) {
  char buffer[64 << 10];
  const ssize_t got = ::read(pipe_.get(), buffer, sizeof(buffer));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0 || !last_word_) last_word_ = now;
  if (got <= 0) return finish();
  const std::string_view bytes(buffer, static_cast<size_t>(got));
  for (size_t done = 0; options_.log && done < bytes.size();) {
    const ssize_t written = ::write(options_.log.get(), bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written > 0) {
      done += static_cast<size_t>(written);
      continue;
    }
    // A full disk costs the log, not the training run.
    if (options_.sink)
      options_.sink->write(&options_.log, fmt::format("accelerate launch: the log file {} ends here: {}\n",
                                                      options_.log_name, std::strerror(errno)));
    options_.log.reset();
  }
  tail_ += bytes.substr(bytes.size() - std::min(bytes.size(), kTailBytes));
  if (tail_.size() > 4 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  if (!options_.sink) return;
  if (options_.sink->closed() && !options_.log)
    return pipe_.reset();  // so that the rank gets SIGPIPE, as if it wrote there itself

  partial_ += bytes;
  size_t whole = partial_.rfind('\n') + 1;  // 0 when there is none
  const bool bar = partial_.find('\r', whole) != std::string::npos || (mid_line_ && whole == 0);
  if (bar || partial_.size() - whole > kLongLine) whole = partial_.size();
  show(std::string_view(partial_).substr(0, whole));
  partial_.erase(0, whole);
}

void LineForwarder::show(std::string_view text) {
  if (text.empty()) return;
  if (options_.prefix.empty()) {
    options_.sink->write(this, text);
    mid_line_ = text.back() != '\n';
    return;
  }
  std::string marked;
  for (char c : text) {
    if (!mid_line_ && c != '\r') marked += options_.prefix, mid_line_ = true;
    marked += c;
    if (c == '\n' || c == '\r') mid_line_ = false;
  }
  options_.sink->write(this, marked);
  mid_line_ = text.back() != '\n' && text.back() != '\r';
}

void LineForwarder::finish() {
  if (options_.sink && (!partial_.empty() || mid_line_)) {
    show(partial_);
    options_.sink->write(this, "\n");
    partial_.clear();
  }
  mid_line_ = false;
  pipe_.reset();
}

void say_on_stderr(const std::string& line) { std::fprintf(stderr, "accelerate launch: %s\n", line.c_str()); }

namespace {

/// A line of the C++ backtrace that LibTorch appends to its errors' texts.
bool is_backtrace(std::string_view line) {
  return (line.starts_with("frame #") && line.find(": ") != std::string_view::npos) ||
         (line.starts_with("Exception raised from ") && line.ends_with("(most recent call first):"));
}

}  // namespace

std::vector<std::string> last_lines(std::string_view text, size_t count) {
  constexpr size_t kWidth = 500;
  std::vector<std::string> lines;
  while (!text.empty() && lines.size() < count) {
    if (text.back() == '\n') text.remove_suffix(1);
    const size_t start = text.rfind('\n') + 1;
    std::string_view line = text.substr(start);
    text.remove_suffix(line.size());
    while (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    line.remove_prefix(line.rfind('\r') + 1);
    if (!line.empty() && !is_backtrace(line))
      lines.push_back(std::string(line.substr(0, kWidth)) + (line.size() > kWidth ? " ..." : ""));
  }
  std::reverse(lines.begin(), lines.end());
  return lines;
}

}  // namespace accelerate::launcher
