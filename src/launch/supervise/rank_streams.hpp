#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "launch/job/outcome.hpp"
#include "launch/job/streams.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/system/output.hpp"

namespace accelerate::launcher {

struct Job;

/// The launcher's two output streams and, on their way there, those of the ranks.
///
/// A rank's stream goes to a log file, or through a pipe to be forwarded in whole lines, or is the launcher's own: that
/// only for the one rank or, where it is a terminal, the first; and when nobody wants to see what it writes.
class RankStreams {
 public:
  /// @param watched  somebody wants to see the last lines of each rank
  RankStreams(const Job& job, const LogFiles& logs, bool watched);

  /// The descriptors that become a rank's streams; without one the launcher's own.
  struct Ends {
    Fd out, err;
  };
  /// @throws LaunchError when a log file can't be opened.
  Ends connect(int64_t local_rank);

  /// The destination of the launcher's own messages: standard error, or standard output if both are the same file, so
  /// that their lines don't mix either.
  Sink& errors() { return *errors_; }

  /// Adds what is to be polled, and deals with what came of it: the same entries, in the same order.
  void add_to(std::vector<pollfd>& fds);
  void serve(std::span<const pollfd> polled, Clock::time_point now);
  /// Something that was read waits for its reader.
  bool pending() const { return out_.pending() || err_.pending(); }
  /// All streams have ended and all they brought is written.
  bool finished() const;
  /// Readers take so little that the ranks are not read.
  bool blocked() const { return !out_.has_room() || !err_.has_room(); }
  /// Passes unfinished lines on, and closes the pipes of processes that left their rank's group.
  void close();

  /// Fills in what the rank wrote last to stderr, from what came through here, else from its log file.
  void describe_end(RankRecord& rank) const;
  /// Its last line on either stream: as it came through here, else the end of its log file.
  std::string last_line(int64_t local_rank) const;

 private:
  Fd connect(int64_t local_rank, Streams kind);
  bool is_direct(int64_t local_rank, Streams kind) const;

  /// A stream that passes through here.
  struct Passing {
    int64_t local_rank;
    Streams kind;
    LineForwarder forwarder;
  };
  const Job& job_;
  const LogFiles& logs_;
  const bool direct_;  ///< a rank may write to the launcher's own streams
  Sink out_, err_;
  Sink* const errors_;
  std::deque<Passing> passing_;
  std::vector<LineForwarder*> polled_;  ///< those of the last add_to()
};

}  // namespace accelerate::launcher
