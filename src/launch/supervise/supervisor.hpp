#pragma once

#include <string>
#include <vector>

#include "launch/job/outcome.hpp"

namespace accelerate::launcher {

struct Host;
struct Job;
class LogFiles;
class Monitor;
class Peers;

/// The ranks that supervise() starts, and the others that have a say.
struct Supervision {
  const Job& job;
  const Host& host;
  const LogFiles& logs;
  /// The commands that are run in the ranks' places: one for all, or one for each. Element 0 is the path of a file.
  std::vector<std::vector<std::string>> commands;
  /// With a text: what each of them reads first from a pipe whose end asks it to stop. Empty: rank 0 has the launcher's
  /// standard input, unless that is a terminal that it does not have for itself.
  std::string first_input;
  /// The report that is to follow the ranks' output; "" for none.
  std::string (*say)(const Job&, const LogFiles&, const Outcome&);
  Peers* peers = nullptr;      ///< hear of a failure at once, and may have the ranks stopped; null on one machine
  Monitor* monitor = nullptr;  ///< shows the ranks while they run; null: nobody wants to see them
};

/// Starts and watches the ranks; returns when everything has ended.
///
/// One thread, which polls pipes, a signalfd and its peers' news. RankStreams carries the ranks' output, StopClock
/// knows when to stop them, Warden and Subreaper see to it that nothing outlives the launcher.
/// @throws LaunchError when a program can't be executed; what was started has been killed.
Outcome supervise(const Supervision& supervision);

}  // namespace accelerate::launcher
