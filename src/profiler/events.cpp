#include "profiler/events.hpp"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>

namespace accelerate::profiler {
namespace {

using torch::autograd::profiler::KinetoEvent;

constexpr std::string_view kMemory = "[memory]", kOutOfMemory = "[OutOfMemory]";

/// Calls that serve the recording only.
bool is_hidden(const std::string& name) {
  static const std::set<std::string_view> kHidden = {kMemory,
                                                     kOutOfMemory,
                                                     "profiler::_record_function_enter",
                                                     "profiler::_record_function_enter_new",
                                                     "profiler::_record_function_exit",
                                                     "aten::is_leaf",
                                                     "aten::output_nr",
                                                     "aten::_version"};
  return kHidden.contains(name);
}

bool is_on_host(c10::DeviceType type) {
  return type == c10::DeviceType::CPU || type == c10::DeviceType::MKLDNN || type == c10::DeviceType::IDEEP;
}

bool is_kernel(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA || type == c10::DeviceType::PrivateUse1 || type == c10::DeviceType::XPU;
}

void add_memory(ProfileEvent& event, const KinetoEvent& record) {
  const auto device = record.deviceType();
  if (is_on_host(device)) event.cpu_memory_usage += record.nBytes();
  else if (is_kernel(device) || device == c10::DeviceType::HIP) event.device_memory_usage += record.nBytes();
}

double microseconds(uint64_t ns, uint64_t start_ns) {
  return static_cast<double>(static_cast<int64_t>(ns - start_ns)) / 1000;
}

std::string table_name(std::string name) {
  if (name.size() > 1) name = c10::demangle(name.c_str());
  return name.starts_with("ProfilerStep#") ? "ProfilerStep*" : name;
}

ProfileEvent event_of(const KinetoEvent& from, uint64_t start_ns) {
  constexpr uint8_t kUserAnnotation = 1, kGpuUserAnnotation = 2;  // libkineto's, which installs no header for it
  ProfileEvent event;
  event.id = static_cast<int64_t>(from.correlationId());
  event.name = table_name(from.name());
  event.overload_name = from.overload_name();
  event.start_us = microseconds(from.startNs(), start_ns);
  event.end_us = microseconds(from.endNs(), start_ns);
  event.thread = from.startThreadId();
  event.forward_thread = from.fwdThreadId();
  event.sequence_number = from.sequenceNr();
  event.is_backward = from.scope() == static_cast<uint8_t>(at::RecordScope::BACKWARD_FUNCTION);
  event.is_async = from.isAsync() || from.startThreadId() != from.endThreadId();
  event.is_user_annotation = from.activityType() == kUserAnnotation || from.activityType() == kGpuUserAnnotation;
  event.device_type = from.deviceType();
  event.device_index = from.deviceIndex();
  event.input_shapes = from.shapes().vec();
  event.stack = from.stack().vec();
  event.module_hierarchy = from.moduleHierarchy().vec();
  event.flops = static_cast<int64_t>(from.flops());
  return event;
}

ProfileEvent event_of(const trace::Event& from, uint64_t start_ns) {
  ProfileEvent event;
  event.name = from.name;
  event.start_us = microseconds(static_cast<uint64_t>(from.begin_ns), start_ns);
  event.end_us = microseconds(static_cast<uint64_t>(from.end_ns), start_ns);
  event.thread = event.forward_thread = from.thread;
  event.is_async = from.lane == trace::Lane::communication;
  event.is_user_annotation = !from.is_operator;
  return event;
}

/// By the time of its begin; of those that begin together the longest first, as it holds the others.
bool begins_before(const ProfileEvent& a, const ProfileEvent& b) {
  return a.start_us != b.start_us ? a.start_us < b.start_us : a.end_us > b.end_us;
}

/// A call belongs to the smallest one of its thread that lasts at least as long.
void find_parents(std::vector<ProfileEvent>& events) {
  std::map<uint64_t, std::vector<int64_t>> open;  // per thread
  for (size_t i = 0; i < events.size(); ++i) {
    auto& event = events[i];
    if (event.is_async || event.device_type != c10::DeviceType::CPU) continue;
    auto& around = open[event.thread];
    while (!around.empty()) {
      auto& parent = events[around.back()];
      if (event.start_us < parent.end_us && event.end_us <= parent.end_us) {
        parent.children.push_back(static_cast<int64_t>(i));
        event.parent = around.back();
        break;
      }
      around.pop_back();
    }
    around.push_back(static_cast<int64_t>(i));
  }
}

/// Leaves one of each pair of calls where the outer does nothing but call another of its name.
/// @param kernels_us  per event, of its own kernels
void remove_doubles(std::vector<ProfileEvent>& events, std::vector<double>& kernels_us) {
  std::vector<bool> gone(events.size());
  for (bool found = true; found;) {
    found = false;
    for (size_t i = 0; i < events.size(); ++i) {
      if (gone[i] || !events[i].parent) continue;
      auto& parent = events[*events[i].parent];
      if (parent.name != events[i].name || parent.children.size() != 1) continue;
      parent.children = events[i].children;
      kernels_us[*events[i].parent] = kernels_us[i];
      for (const int64_t child : events[i].children) events[child].parent = events[i].parent;
      gone[i] = found = true;
    }
  }
  std::vector<int64_t> place(events.size());
  size_t kept = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    if (gone[i]) continue;
    place[i] = static_cast<int64_t>(kept);
    if (kept != i) events[kept] = std::move(events[i]), kernels_us[kept] = kernels_us[i];
    ++kept;
  }
  events.resize(kept);
  for (auto& event : events) {
    if (event.parent) event.parent = place[*event.parent];
    for (auto& child : event.children) child = place[child];
  }
}

/// Backwards, and what they call, stand where their forwards were called.
void take_stacks_of_forwards(std::vector<ProfileEvent>& events) {
  struct Site {
    std::vector<std::string> stack, modules;
  };
  std::vector<std::optional<size_t>> backward(events.size());  // that an event is within; parents come first
  std::map<std::pair<int64_t, uint64_t>, Site> sites;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto& event = events[i];
    if (event.is_backward) backward[i] = i;
    else if (event.parent) backward[i] = backward[*event.parent];
    if (!backward[i])
      sites.try_emplace({event.sequence_number, event.thread}, Site{event.stack, event.module_hierarchy});
  }
  for (size_t i = 0; i < events.size(); ++i) {
    if (!backward[i]) continue;
    const auto& of = events[*backward[i]];
    const auto found = sites.find({of.sequence_number, of.forward_thread});
    const auto site = found == sites.end() ? Site() : found->second;
    events[i].stack = site.stack;
    events[i].module_hierarchy = site.modules;
  }
}

/// Totals and what is left of them without the calls within. Children come after their parents.
void sum_up(std::vector<ProfileEvent>& events, const std::vector<double>& kernels_us, bool device) {
  for (size_t i = events.size(); i-- > 0;) {
    auto& event = events[i];
    const bool on_cpu = event.device_type == c10::DeviceType::CPU;
    if (on_cpu) event.cpu_time_total = event.end_us - event.start_us;
    if (device && !event.is_async) event.device_time_total = on_cpu ? kernels_us[i] : event.end_us - event.start_us;
    ProfileCosts within;
    for (const int64_t place : event.children) {
      const auto& child = events[place];
      within.cpu_time_total += child.cpu_time_total;
      within.device_time_total += child.device_time_total;
      within.cpu_memory_usage += child.cpu_memory_usage;
      within.device_memory_usage += child.device_memory_usage;
    }
    if (on_cpu) event.device_time_total += within.device_time_total;
    if (event.is_async) continue;
    event.self_device_time_total = event.device_time_total - (on_cpu ? within.device_time_total : 0);
    if (!on_cpu) continue;
    event.self_cpu_time_total = event.cpu_time_total - within.cpu_time_total;
    event.self_cpu_memory_usage = event.cpu_memory_usage - within.cpu_memory_usage;
    event.self_device_memory_usage = event.device_memory_usage - within.device_memory_usage;
  }
}

}  // namespace

ProfileEvents collect_events(const torch::autograd::profiler::ProfilerResult& recording,
                             const std::vector<trace::Event>& spans, const CallSites& sites, ProfileContext context) {
  const uint64_t start_ns = recording.trace_start_ns();
  struct Allocation {
    const KinetoEvent* record;
    bool within_a_call;
  };
  std::vector<Allocation> allocations;
  std::vector<const KinetoEvent*> failures;
  for (const auto& record : recording.events()) {
    if (record.name() == kMemory) allocations.push_back({&record, false});
    if (record.name() == kOutOfMemory) failures.push_back(&record);
  }
  std::stable_sort(allocations.begin(), allocations.end(),
                   [](const auto& a, const auto& b) { return a.record->startNs() < b.record->startNs(); });

  const auto add_allocations = [&](ProfileEvent& event, int64_t begin_ns, int64_t end_ns) {
    auto at = std::lower_bound(allocations.begin(), allocations.end(), static_cast<uint64_t>(begin_ns),
                               [](const auto& a, uint64_t ns) { return a.record->startNs() < ns; });
    for (; at != allocations.end() && at->record->startNs() <= static_cast<uint64_t>(end_ns); ++at) {
      add_memory(event, *at->record);
      at->within_a_call = true;
    }
  };

  std::vector<ProfileEvent> events;
  std::unordered_map<int64_t, size_t> callers;                     // by id
  std::unordered_map<uint64_t, std::vector<size_t>> on_behalf_of;  // events by the id of their caller
  const auto site_of = sites.of(recording.events());
  for (size_t i = 0; i < recording.events().size(); ++i) {
    const auto& record = recording.events()[i];
    if (is_hidden(record.name()) || record.isHiddenEvent()) continue;
    auto event = event_of(record, start_ns);
    if (const auto* const site = site_of[i]) {
      if (event.stack.empty()) event.stack = site->stack;
      if (event.module_hierarchy.empty()) event.module_hierarchy = site->modules;
    }
    if (event.device_type == c10::DeviceType::CPU)
      add_allocations(event, static_cast<int64_t>(record.startNs()), static_cast<int64_t>(record.endNs()));
    if (record.linkedCorrelationId() > 0) on_behalf_of[record.linkedCorrelationId()].push_back(events.size());
    else if (event.device_type == c10::DeviceType::CPU && !event.is_async) callers[event.id] = events.size();
    events.push_back(std::move(event));
  }
  for (const auto& span : spans) {
    auto event = event_of(span, start_ns);
    if (!event.is_async) add_allocations(event, span.begin_ns, span.end_ns);
    events.push_back(std::move(event));
  }
  std::vector<double> kernels_us(events.size());
  for (const auto& [id, called] : on_behalf_of) {
    const auto caller = callers.find(static_cast<int64_t>(id));
    if (caller == callers.end()) continue;
    for (const size_t i : called) {
      auto& event = events[i];
      if (is_kernel(event.device_type)) kernels_us[caller->second] += event.end_us - event.start_us;
      else if (event.device_type == c10::DeviceType::CPU) event.thread = events[caller->second].thread;
    }
  }
  const auto add_record = [&](const KinetoEvent& record) {
    ProfileEvent event;
    event.name = record.name();
    event.thread = event.forward_thread = record.startThreadId();
    event.start_us = event.end_us = microseconds(record.startNs(), start_ns);
    add_memory(event, record);
    events.push_back(std::move(event));
    kernels_us.push_back(0);
  };
  for (const auto& one : allocations)
    if (!one.within_a_call) add_record(*one.record);
  for (const auto* const record : failures) add_record(*record);

  std::vector<size_t> order(events.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return begins_before(events[a], events[b]); });
  ProfileEvents sorted{.events = {}, .context = std::move(context)};
  std::vector<double> kernels;
  for (const size_t i : order) sorted.events.push_back(std::move(events[i])), kernels.push_back(kernels_us[i]);

  find_parents(sorted.events);
  remove_doubles(sorted.events, kernels);
  take_stacks_of_forwards(sorted.events);
  sum_up(sorted.events, kernels, !sorted.context.device.empty());
  return sorted;
}

}  // namespace accelerate::profiler
