#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "launch/job/outcome.hpp"

namespace accelerate::launcher {

/// When ranks are asked to stop after one has failed, and when those that were asked are killed.
///
/// It knows of time what it is told, and stops nobody itself.
class StopClock {
 public:
  /// @param patience  after a failure, for the others to end by themselves
  /// @param grace     from asking to killing
  StopClock(std::chrono::milliseconds patience, std::chrono::milliseconds grace) : patience_(patience), grace_(grace) {}

  /// A rank has failed. The failure that is to be answered first counts, if there are several; none does once ranks
  /// have been asked to stop.
  /// @param only_of_a_peer  it only reports that another rank is gone or has failed: that one, which may still be
  ///   unwinding, gets the time to say why
  void failed(Clock::time_point now, bool only_of_a_peer = false) {
    const auto at = now + (only_of_a_peer ? std::max(patience_, kForTheCause) : patience_);
    if (!kill_at_) ask_at_ = std::min(ask_at_.value_or(at), at);
  }
  /// The ranks have been asked to stop.
  void asked(Clock::time_point now) {
    ask_at_.reset();
    asked_at_ = now;
    kill_at_ = now + grace_;
  }
  /// They are about to end by themselves: looked at again in a moment, instead of being killed.
  void wait_on(Clock::time_point now) { kill_at_ = now + kLookAgain; }
  /// They have been killed; one that hangs in the kernel dies when it may.
  void killed(Clock::time_point now) { kill_at_ = now + std::chrono::hours(1); }

  /// Between failed() and asked().
  bool waits_for_failures() const { return ask_at_.has_value(); }
  bool has_asked() const { return kill_at_.has_value(); }
  Clock::duration since_asked(Clock::time_point now) const { return now - asked_at_; }

  /// The action that is due now.
  enum class Due { nothing, ask, kill };
  Due due(Clock::time_point now) const {
    return kill_at_ && now >= *kill_at_ ? Due::kill : ask_at_ && now >= *ask_at_ ? Due::ask : Due::nothing;
  }
  /// When due() may change by itself.
  std::optional<Clock::time_point> next() const { return ask_at_ ? ask_at_ : kill_at_; }

 private:
  static constexpr std::chrono::milliseconds kForTheCause{3000}, kLookAgain{500};
  const std::chrono::milliseconds patience_, grace_;
  std::optional<Clock::time_point> ask_at_, kill_at_;
  Clock::time_point asked_at_{};
};

}  // namespace accelerate::launcher
