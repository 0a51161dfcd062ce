#include "observe/run_phases.hpp"

#include <exception>
#include <vector>

#include "utils/log.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::run_phases {
namespace detail {
std::atomic<int> watchers{0};
}

namespace {
struct Watchers {
  Mutex mutex;
  std::vector<Watcher*> all ACCELERATE_GUARDED_BY(mutex);
};
Watchers& watchers_of_process() {
  static auto& only = *new Watchers;  // a static Accelerator may end after everything else
  return only;
}
}  // namespace

Watching::Watching(Watcher& watcher) : watcher_(watcher) {
  auto& watchers = watchers_of_process();
  const MutexLock lock(watchers.mutex);
  watchers.all.push_back(&watcher);
  detail::watchers.fetch_add(1, std::memory_order_relaxed);
}

Watching::~Watching() {
  auto& watchers = watchers_of_process();
  const MutexLock lock(watchers.mutex);
  std::erase(watchers.all, &watcher_);
  detail::watchers.fetch_sub(1, std::memory_order_relaxed);
}

void detail::tell(Phase phase, const void* of, bool begins) {
  std::vector<Watcher*> all;
  {
    auto& watchers = watchers_of_process();
    const MutexLock lock(watchers.mutex);
    all = watchers.all;
  }
  for (auto* const watcher : all)
    if (begins) watcher->begins(phase, of);
    else watcher->ends(phase, of);
}

void ends_quietly(Phase phase, const void* of) noexcept {
  try {
    ends(phase, of);
  } catch (const std::exception& error) {
    logs::warn("accelerate", "what watches the run's phases failed: {}", error.what());
  }
}

}  // namespace accelerate::run_phases
