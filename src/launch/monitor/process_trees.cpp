#include "launch/monitor/process_trees.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

#include "launch/system/process.hpp"

namespace accelerate::launcher {
namespace {

constexpr int64_t kLooksPerSearch = 5;

struct Stat {
  pid_t parent = 0, group = 0;
  uint64_t ticks = 0, started = 0;
  int64_t pages = 0;
};

/// /proc/<pid>/stat; nothing when the process is gone.
std::optional<Stat> read_stat(pid_t pid) {
  char path[32], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  const Fd fd(::open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t got = fd ? ::read(fd.get(), text, sizeof(text) - 1) : -1;
  if (got <= 0) return std::nullopt;
  text[got] = '\0';
  const char* after_name = std::strrchr(text, ')');  // the name itself may contain blanks and brackets
  Stat stat;
  unsigned long long user = 0, system = 0, started = 0;
  long long pages = 0;
  if (!after_name ||
      std::sscanf(after_name + 1,
                  " %*c %d %d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d %*d %*d %llu %*u %lld",
                  &stat.parent, &stat.group, &user, &system, &started, &pages) != 6)
    return std::nullopt;
  stat.ticks = user + system;
  stat.started = started;
  stat.pages = pages;
  return stat;
}

}  // namespace

void ProcessTrees::find_members(const std::vector<pid_t>& roots) {
  std::unordered_map<pid_t, size_t> tree_of;  // index of the root
  for (size_t i = 0; i < roots.size(); ++i)
    if (roots[i] > 0) tree_of[roots[i]] = i;
  std::map<pid_t, pid_t> parents;
  DIR* folder = ::opendir("/proc");
  if (!folder) return;
  while (const dirent* entry = ::readdir(folder)) {
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid <= 0) continue;
    const auto stat = read_stat(pid);
    if (!stat || stat->parent == 2) continue;  // threads of the kernel
    parents[pid] = stat->parent;
    // A process whose parent has ended is init's child, but still in the group of its rank.
    if (const auto group = tree_of.find(stat->group); group != tree_of.end() && stat->group == roots[group->second])
      tree_of.emplace(pid, group->second);
  }
  ::closedir(folder);
  for (const auto& [pid, parent] : parents) {
    pid_t ancestor = pid;
    for (int depth = 0; depth < 100 && ancestor > 1 && !tree_of.contains(ancestor); ++depth) {
      const auto known = parents.find(ancestor);
      ancestor = known == parents.end() ? 0 : known->second;
    }
    if (const auto found = tree_of.find(ancestor); found != tree_of.end())
      trees_[found->second].processes.try_emplace(pid);
  }
}

std::vector<std::optional<ProcessUse>> ProcessTrees::look(const std::vector<pid_t>& roots, Clock::time_point now) {
  trees_.resize(roots.size());
  bool changed = false;
  for (size_t i = 0; i < roots.size(); ++i)
    if (trees_[i].root != roots[i]) {
      trees_[i] = {roots[i], {}};
      if (roots[i] > 0) trees_[i].processes.try_emplace(roots[i]);
      changed = true;
    }
  if (!changed && looks_ % kLooksPerSearch == 0) find_members(roots);  // new processes have nobody yet
  ++looks_;
  const double seconds = std::chrono::duration<double>(now - before_).count();
  before_ = now;
  static const auto ticks_per_second = static_cast<double>(::sysconf(_SC_CLK_TCK));
  static const int64_t page_bytes = ::sysconf(_SC_PAGESIZE);
  std::vector<std::optional<ProcessUse>> uses;
  for (auto& tree : trees_) {
    ProcessUse use;
    double ticks = 0;
    bool compared = false, alive = false;
    for (auto process = tree.processes.begin(); process != tree.processes.end();) {
      const auto stat = read_stat(process->first);
      auto& [started, before] = process->second;
      if (!stat || (started != 0 && stat->started != started)) {
        process = tree.processes.erase(process);
        continue;
      }
      if (started != 0) ticks += static_cast<double>(stat->ticks - before), compared = true;
      started = stat->started;
      before = stat->ticks;
      use.resident_bytes += stat->pages * page_bytes;
      alive = alive || process->first == tree.root;
      ++process;
    }
    if (compared && seconds > 0) use.cpu_percent = 100 * ticks / ticks_per_second / seconds;
    uses.push_back(alive ? std::optional(use) : std::nullopt);
  }
  return uses;
}

}  // namespace accelerate::launcher
