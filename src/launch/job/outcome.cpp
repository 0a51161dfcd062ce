#include "launch/job/outcome.hpp"

#include <fmt/format.h>

#include <csignal>
#include <tuple>

#include "launch/system/process.hpp"
#include "utils/saved_exit_code.hpp"

namespace accelerate::launcher {
namespace {

/// Several ranks may fail within moments of each other: the least value is the likeliest cause; the others died of it.
///
/// The order in which the kernel reports ends is not enough: a dying process drops its connections first, and a peer
/// that dies of that may be reported before it. The kind of death tells more. Among equals the first to have said its
/// last word on stderr is the cause, since it spoke before it dropped its connections. Words long before the end are
/// about something else.
std::tuple<int, Clock::time_point, int64_t> blame(const RankRecord& rank) {
  const End& end = *rank.end;
  const bool recent = rank.last_word && *rank.last_word < end.at && end.at - *rank.last_word < std::chrono::seconds(2);
  return {blame_kind(end), recent ? *rank.last_word : end.at, rank.place};
}

}  // namespace

std::string describe(const End& end) {
  return end.signal ? fmt::format("was killed by signal {} ({})", end.signal, signal_name(end.signal))
                    : fmt::format("ended with exit code {}", end.exit_code);
}

int blame_kind(const End& end) { return end.signal && end.signal != SIGABRT ? 0 : end.exit_code == 69 ? kOfAPeer : 1; }

std::optional<size_t> first_failure(const std::vector<RankRecord>& ranks) {
  std::optional<size_t> first;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const End& end = *ranks[i].end;
    if (!end.good() && !end.asked && (!first || blame(ranks[i]) < blame(ranks[*first]))) first = i;
  }
  return first;
}

bool Outcome::saved() const {
  bool any = false;
  for (const auto& rank : ranks) {
    // One that had nothing left to do ends well.
    if (!rank.end || rank.end->signal || (!rank.end->good() && rank.end->exit_code != kSavedExitCode)) return false;
    any = any || !rank.end->good();
  }
  return any;
}

int Outcome::exit_code() const {
  if (saved()) return kSavedExitCode;
  if (first_failure) return ranks[*first_failure].end->status();
  return stop_signal ? 128 + stop_signal : 0;
}

}  // namespace accelerate::launcher
