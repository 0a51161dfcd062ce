#include "comm/comms_log.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <exception>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/comm/comms_log.hpp"
#include "comm/group.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::comm {
namespace {

struct Cost {
  int64_t count = 0;
  double ms = 0, tput = 0, busbw = 0;  ///< sums
  std::vector<float> each_ms = {};
};

struct CommsLog {
  Mutex mutex;
  CommsLogSettings settings ACCELERATE_GUARDED_BY(mutex);
  std::map<std::pair<Collective, int64_t>, Cost> costs ACCELERATE_GUARDED_BY(mutex);
};
CommsLog& comms_log() {
  static auto& only = *new CommsLog;  // threads of transports may end after everything else
  return only;
}
std::atomic<bool> counting{false};
thread_local int within = 0;  ///< scopes that this thread is in

/// Bits of the whole message, and those that cross a link of a ring, in 10^9.
std::pair<double, double> gigabits(Collective collective, int64_t bytes, int64_t ranks) {
  const auto n = static_cast<double>(ranks);
  const double bits = 8e-9 * static_cast<double>(bytes), over_a_link = (n - 1) / n;
  switch (collective) {
    case Collective::all_reduce:
      return {2 * bits, 2 * bits * over_a_link};
    case Collective::all_gather:
      return {n * bits, n * bits * over_a_link};
    case Collective::reduce_scatter:
      return {bits, bits * over_a_link};
    case Collective::broadcast:
    case Collective::barrier:
    case Collective::send:
    case Collective::recv:
      return {bits, bits};
  }
  return {};
}

/// "1.5 KB"
std::string size_text(int64_t bytes) {
  if (bytes == 0) return "0B";
  constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  double size = static_cast<double>(bytes);
  size_t unit = 0;
  for (; size >= 1024; size /= 1024) ++unit;
  return fmt::format("{} {}", std::round(size * 100) / 100, kUnits[unit]);
}

}  // namespace

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::broadcast:
      return "broadcast";
    case Collective::barrier:
      return "barrier";
    case Collective::send:
      return "send";
    case Collective::recv:
      return "recv";
  }
  return "?";
}

void start_comms_log(CommsLogSettings settings) {
  auto& log = comms_log();
  const MutexLock lock(log.mutex);
  log.settings = std::move(settings);
  log.costs.clear();
  counting.store(true, std::memory_order_relaxed);
}

void stop_comms_log() {
  auto& log = comms_log();
  const MutexLock lock(log.mutex);
  log.settings = {};
  counting.store(false, std::memory_order_relaxed);
}

LoggedCollective::LoggedCollective(Collective collective, int64_t bytes, const Group& group)
    : collective_(collective), bytes_(bytes) {
  if (!counting.load(std::memory_order_relaxed) || within > 0 || group.dry()) return;
  auto& log = comms_log();
  {
    const MutexLock lock(log.mutex);
    if (!log.settings.operations.empty() && !log.settings.operations.contains(collective)) return;
    prints_ = log.settings.verbose && group.global_ranks()[static_cast<size_t>(group.rank())] == 0;
  }
  ranks_ = group.world_size();
  if (!group.device().is_cpu() && group.backend() != "gloo") {
    device_ = group.device().index();
    at::accelerator::synchronizeDevice(static_cast<c10::DeviceIndex>(*device_));
  }
  begin_ = std::chrono::steady_clock::now();
}

void LoggedCollective::end() {
  if (!begin_) return;
  if (device_) at::accelerator::synchronizeDevice(static_cast<c10::DeviceIndex>(*device_));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - *begin_;
  begin_.reset();
  const double seconds = std::max(took.count(), 1e-9);
  const auto [message, link] = gigabits(collective_, bytes_, ranks_);
  const double tput = message / seconds, busbw = link / seconds;
  std::function<void(const std::string&)> say;
  auto& log = comms_log();
  {
    const MutexLock lock(log.mutex);
    if (!counting.load(std::memory_order_relaxed)) return;
    Cost& cost = log.costs[{collective_, bytes_}];
    ++cost.count;
    cost.ms += 1e3 * seconds, cost.tput += tput, cost.busbw += busbw;
    cost.each_ms.push_back(static_cast<float>(1e3 * seconds));
    if (prints_) say = log.settings.say;
  }
  if (say)
    say(fmt::format("comm op: {} | time (ms): {:.2f} | msg size: {} | algbw (Gbps): {:.2f} | busbw (Gbps): {:.2f}",
                    name_of(collective_), 1e3 * seconds, size_text(bytes_), tput, busbw));
}

LoggedScope::LoggedScope(Collective collective, int64_t bytes, const Group& group)
    : exceptions_(std::uncaught_exceptions()), logged_(collective, bytes, group) {
  ++within;
}

LoggedScope::~LoggedScope() {
  --within;
  if (std::uncaught_exceptions() > exceptions_) return;
  try {
    logged_.end();
  } catch (const std::exception&) {  // a device that can't be waited for says so at its next operator
  }
}

std::vector<CommsRecord> comms_records() {
  auto& log = comms_log();
  const MutexLock lock(log.mutex);
  std::vector<CommsRecord> records;
  for (const auto& [key, cost] : log.costs)
    records.push_back({.operation = name_of(key.first),
                       .bytes = key.second,
                       .count = cost.count,
                       .total_ms = cost.ms,
                       .tput_gbps = cost.tput / static_cast<double>(cost.count),
                       .busbw_gbps = cost.busbw / static_cast<double>(cost.count)});
  return records;
}

std::string comms_table() {
  std::string text = fmt::format("{:<20}{:<20}{:<20}{:<20}{:<20}{:<20}{:<20}", "Comm. Op", "Message Size", "Count",
                                 "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)");
  std::string operation;
  for (const auto& record : comms_records()) {
    if (record.operation != operation) text += "\n" + (operation = record.operation);
    text += fmt::format("\n{:<20}{:<20}{:<20}{:<20.2f}{:<20.2f}{:<20.2f}{:<20.2f}", "", size_text(record.bytes),
                        record.count, record.total_ms, record.average_ms(), record.tput_gbps, record.busbw_gbps);
  }
  return text;
}

namespace {

/// While it lives, this thread's collectives do not count.
struct Unlogged {
  Unlogged() { ++within; }
  ~Unlogged() { --within; }
};

std::string straggler_table(const std::vector<StragglerRecord>& records) {
  std::string text = fmt::format(
      "_______________________________\nBreakdown with straggler effect\n-------------------------------\n"
      "{:<20}{:<20}{:<20}{:<20}{:<20}{:<20}{:<20}",
      "Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)",
      "Avg straggler(ms)");
  std::string operation;
  for (const auto& record : records) {
    if (record.operation != operation) text += "\n" + (operation = record.operation);
    text += fmt::format("\n{:<20}{:<20}{:<20}{:<20.2f}{:<20.2f}{:<20.2f}{:<20.2f}", "", size_text(record.bytes),
                        record.count, record.total_comm_ms, record.total_straggler_ms, record.average_comm_ms(),
                        record.average_straggler_ms());
  }
  return text;
}

}  // namespace

std::vector<StragglerRecord> straggler_records() {
  const Unlogged uncounted;
  auto& log = comms_log();
  std::map<std::string, std::pair<StragglerRecord, std::vector<float>>> mine;  // by what ranks call it
  {
    const MutexLock lock(log.mutex);
    for (const auto& [key, cost] : log.costs)
      mine.emplace(fmt::format("{} {:020} {}", static_cast<int>(key.first), key.second, cost.count),
                   std::pair(StragglerRecord{.operation = name_of(key.first), .bytes = key.second, .count = cost.count},
                             cost.each_ms));
  }
  const auto group = world_group();
  if (group) {
    std::string names;
    for (const auto& [name, record] : mine) names += name + "\n";
    std::map<std::string, int64_t> ranks_with;
    for (const auto& theirs : all_gather_bytes(*group, names)) {
      std::istringstream lines(theirs);
      for (std::string name; std::getline(lines, name);) ++ranks_with[name];
    }
    std::erase_if(mine, [&](const auto& item) { return ranks_with.at(item.first) < group->world_size(); });
  }
  std::vector<float> times;
  for (const auto& [name, record] : mine) times.insert(times.end(), record.second.begin(), record.second.end());
  at::Tensor shortest = at::tensor(times, at::kFloat).neg_();
  if (group) {
    shortest = shortest.to(group->device());
    group->all_reduce_(shortest, Reduction::max);
  }
  shortest = shortest.neg_().cpu();
  const float* next = shortest.const_data_ptr<float>();
  std::vector<StragglerRecord> records;
  for (auto& [name, record] : mine) {
    for (const float ms : record.second) {
      record.first.total_comm_ms += *next;
      record.first.total_straggler_ms += ms - *next++;
    }
    records.push_back(std::move(record.first));
  }
  return records;
}

void log_summary(bool show_straggler) {
  std::string text = comms_table();
  if (show_straggler) text += "\n" + straggler_table(straggler_records());
  if (rank() != 0) return;
  std::fprintf(stdout, "%s\n", text.c_str());
  std::fflush(stdout);
}

void reset_comms_log() {
  auto& log = comms_log();
  const MutexLock lock(log.mutex);
  log.costs.clear();
}

}  // namespace accelerate::comm
