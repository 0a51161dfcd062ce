#pragma once

#include <chrono>
#include <climits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/system/process.hpp"

namespace accelerate::launcher {

/// One of the launcher's own output streams, written without ever waiting for its reader.
///
/// Bytes that can't be written yet are queued up to a limit, beyond which the ranks' pipes are not read, so that a slow
/// reader slows the ranks down. The descriptor stays in blocking mode (it is shared with other processes, e.g. the
/// shell); a terminal is opened anew for a mode of our own, since it may take less than it promises.
class Sink {
 public:
  explicit Sink(int fd);
  /// Queues `text`. If another owner left its line unfinished (a progress bar), that line is ended first.
  void write(const void* owner, std::string_view text);
  /// Queues a sequence that controls the terminal and leaves the cursor where the output goes on.
  void control(std::string_view sequence) {
    if (!closed_) queue_ += sequence;
  }
  /// Writes what fits now.
  void flush();
  bool pending() const { return head_ < queue_.size(); }
  /// Bytes that have been written since the beginning, and what that will be once all is written that is queued now.
  uint64_t written() const { return written_; }
  uint64_t queued() const { return written_ + queue_.size() - head_; }
  bool has_room() const { return queue_.size() - head_ < kQueueBytes; }
  /// The reader has gone.
  bool closed() const { return closed_; }
  /// To poll.
  int fd() const { return fd_; }

 private:
  static constexpr size_t kQueueBytes = 256 << 10;
  Fd own_;
  int fd_;
  size_t chunk_ = PIPE_BUF;  ///< bytes that one write() may take without blocking once poll() says "writable"
  bool closed_ = false;
  const void* open_line_ = nullptr;
  std::string queue_;
  size_t head_ = 0;
  uint64_t written_ = 0;
};

/// Reads one stream of one rank and passes it on line by line, so that lines of several ranks never mix.
///
/// Text after a carriage return is a progress bar and passed on at once, unfinished. Lines over 1 MiB are passed on in
/// pieces.
class LineForwarder {
 public:
  struct Options {
    Sink* sink = nullptr;       ///< null: not shown
    std::string prefix;         ///< put before each line that is shown
    Fd log;                     ///< file that receives a copy as it is
    std::string log_name = {};  ///< for a message where it can't be written
  };
  LineForwarder(Fd pipe, Options options);
  /// The pipe to poll, or -1: finished, or nothing may be read now because the sink is full.
  int wants() const;
  /// Reads what is there, once. `now` is remembered as the time of it.
  void read_some(std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());
  bool finished() const { return !pipe_; }
  /// Passes an unfinished line on and closes the pipe.
  void finish();
  /// When something last came through, or the stream ended without a word.
  std::optional<std::chrono::steady_clock::time_point> last_word() const { return last_word_; }
  /// The last few KiB that came through.
  const std::string& tail() const { return tail_; }

 private:
  void show(std::string_view text);
  Fd pipe_;
  Options options_;
  std::string partial_, tail_;
  std::optional<std::chrono::steady_clock::time_point> last_word_;
  bool mid_line_ = false;  ///< what was shown last did not end its line
};

/// Prints a line of the launcher's own: "accelerate launch: LINE". Where ranks run, their supervisor's sink does it.
void say_on_stderr(const std::string& line);

/// The last `count` lines of `text` without the backtraces that LibTorch appends to errors, each cut to a readable
/// length and, for a progress bar, reduced to its last state.
std::vector<std::string> last_lines(std::string_view text, size_t count);

}  // namespace accelerate::launcher
