#pragma once

namespace accelerate {

/// The status of a rank that has saved because of a signal (ProjectConfiguration::save_on_signal), and of a job whose
/// ranks all have: EX_TEMPFAIL of sysexits.h, start again.
inline constexpr int kSavedExitCode = 75;

}  // namespace accelerate
