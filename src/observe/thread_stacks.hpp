#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

/// The stacks of this process's own threads.
namespace accelerate::thread_stacks {

struct ThreadStack {
  pid_t thread;
  std::string name;           ///< as the system knows it
  char state;                 ///< R: runs, S: sleeps, D: waits for a device, T: is stopped
  std::vector<void*> frames;  ///< innermost first; none: it did not answer
};

/// Loads what the handler needs, which may allocate. Before the first signal.
void prepare();
/// To be called first by the handler of `take`'s signal: true when the signal was one of take()'s, and is dealt with.
/// Async-signal-safe.
bool handle(const siginfo_t& info, const void* context);
/// All threads but the calling one, the main thread first. One caller at a time. Some microseconds for each, a second
/// for one that should answer and does not.
/// @param signal  whose handler calls handle()
std::vector<ThreadStack> take(int signal);

}  // namespace accelerate::thread_stacks
