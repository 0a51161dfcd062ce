#pragma once

#include <cstdint>
#include <functional>
#include <string>

/// Tells what this process is doing. SIGUSR2 asks, whatever its threads are blocked in.
namespace accelerate::hang_report {

/// From now on this process answers SIGUSR2 with two log records ("accelerate.hang_report", whatever the levels are):
/// what `activity` says, and the stacks of all threads. Nothing where the program, or whoever started it, has something
/// else in mind for that signal. Later calls only take another `activity`.
///
/// A signal handler wakes a thread of ours, which asks one thread after the other to write its stack down in that
/// handler, and does everything else itself. A system call that a thread is blocked in is interrupted, as by any
/// handler; one that blocks the signal is listed without a stack.
/// @param activity  lines for people; called on that thread, also while the caller's is blocked
void answer(int64_t rank, std::function<std::string()> activity);
/// There is nothing to say any more but the stacks.
void forget_activity();

}  // namespace accelerate::hang_report
