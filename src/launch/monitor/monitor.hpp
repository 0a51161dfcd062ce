#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/monitor/gpus.hpp"
#include "launch/monitor/history.hpp"
#include "launch/monitor/keyboard.hpp"
#include "launch/monitor/process_trees.hpp"
#include "launch/monitor/snapshot.hpp"
#include "launch/monitor/step_counter.hpp"
#include "launch/monitor/terminal_view.hpp"
#include "launch/monitor/web_page.hpp"
#include "launch/system/temporary_folder.hpp"

namespace accelerate::launcher {

struct Job;
struct RankRecord;

/// Shows live what the ranks of this machine do: --monitor on the terminal, --monitor_port as a page. One for a whole
/// launch, over all attempts.
///
/// It runs in the launcher's loop and has no thread: the loop polls its descriptors, wakes at next(), and hands it what
/// the supervisor knows. It reads all else (CPU, memory, GPUs, steps) itself.
class Monitor {
 public:
  using Clock = std::chrono::steady_clock;

  /// Null when nobody asked for it. Opens the page's port.
  static std::unique_ptr<Monitor> create(const Job& job);
  Monitor(const Monitor&) = delete;
  /// The page's address, or "".
  std::string url() const { return page_ ? page_->url() : ""; }
  bool open_to_others() const { return page_ && page_->open_to_others(); }

  /// Whether the terminal behind `fd` will be divided.
  bool divides(int fd) const { return table_ && TerminalView::possible(fd); }
  /// The ranks are about to be started, for the first time or again. The table goes to `sink`.
  void begin(const Job& job, Sink& sink, const Warden& warden);
  /// The file in which a rank counts its steps, for its environment; "" for a process that is not a rank.
  std::string step_file(int64_t local_rank) const;

  /// The supervisor's knowledge of a rank.
  struct Status {
    const RankRecord* record;
    bool asked = false;     ///< to stop
    std::string last_line;  ///< as it was written
  };
  Clock::time_point next() const { return next_; }
  void look(Clock::time_point now, const std::vector<Status>& ranks);
  /// The ranks are gone: the terminal is given back, the page keeps what was seen last.
  void end(const std::vector<Status>& ranks);
  /// An exception passes: as end(), at once and without a word.
  void drop() { keyboard_.reset(), view_.reset(), sink_ = nullptr; }
  /// Before and after the terminal is somebody else's (Ctrl-Z).
  void leave() {
    if (keyboard_) keyboard_->leave();
    if (view_) view_->leave();
  }
  void redraw();
  /// Between begin() and end().
  bool watches() const { return sink_ != nullptr; }

  void add_to(std::vector<pollfd>& fds);
  /// @param polled  what add_to() added, after poll()
  /// @return whether somebody has pressed "h": what do the ranks do?
  bool serve(std::span<const pollfd> polled);
  /// Serves the page until something can be read from `fd`, while the launcher waits for other machines.
  void serve_until(int fd);

 private:
  explicit Monitor(const Job& job);
  void update(Clock::time_point now, const std::vector<Status>& ranks);
  void print();

  const Clock::time_point began_ = Clock::now();
  std::optional<double> seconds_;     ///< --monitor_seconds
  std::optional<double> peak_flops_;  ///< --monitor_peak_flops
  bool table_ = false;
  std::unique_ptr<WebPage> page_;
  const TemporaryFolder folder_;  ///< of the step files

  Snapshot snapshot_;
  History history_;
  std::vector<std::string> names_, gpu_names_;
  bool ranks_are_ours_ = true;  ///< not machines that only speak through their output
  std::deque<StepCounter> steps_;
  ProcessTrees processes_;
  Gpus gpus_;
  Sink* sink_ = nullptr;
  std::optional<TerminalView> view_;
  std::optional<Keyboard> keyboard_;
  bool polls_keyboard_ = false;
  Clock::time_point next_{}, next_print_{};
  uint64_t printed_ = 0;  ///< where in the sink's bytes the last printed table ends
};

}  // namespace accelerate::launcher
