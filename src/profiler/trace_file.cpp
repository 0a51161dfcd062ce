#include "profiler/trace_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::profiler {
namespace {

/// Threads that don't exist: above the largest number that the system gives (PID_MAX_LIMIT).
constexpr int64_t kSteps = (1 << 22) + 1, kCommunication = kSteps + 1;

constexpr const char* kAnnotation = "user_annotation";

class TraceText {
 public:
  explicit TraceText(int64_t base_ns) : base_ns_(base_ns) {}

  double microseconds(int64_t ns) const { return static_cast<double>(ns - base_ns_) / 1000; }

  void add_span(const char* category, const std::string& name, int64_t lane, int64_t begin_ns, int64_t end_ns) {
    add(fmt::format(R"("ph": "X", "cat": "{}", "name": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f})", category,
                    nlohmann::json(name).dump(), lane, microseconds(begin_ns),
                    static_cast<double>(end_ns - begin_ns) / 1000));
  }
  void name_lane(int64_t lane, const std::string& name) {
    add(fmt::format(R"("ph": "M", "name": "thread_name", "tid": {}, "args": {{"name": {}}})", lane,
                    nlohmann::json(name).dump()));
    add(fmt::format(R"("ph": "M", "name": "thread_sort_index", "tid": {0}, "args": {{"sort_index": {0}}})", lane));
  }
  const std::string& text() const { return text_; }

 private:
  void add(const std::string& members) { text_ += fmt::format(",\n  {{\"pid\": {}, {}}}", ::getpid(), members); }

  int64_t base_ns_;
  std::string text_;
};

/// Spans beside the threads get lanes of their own, as few as there are spans at a time: in one lane spans may contain,
/// but not overlap each other.
void add_communication(TraceText& text, std::vector<const trace::Event*> events) {
  std::stable_sort(events.begin(), events.end(), [](auto* a, auto* b) { return a->begin_ns < b->begin_ns; });
  std::vector<int64_t> ends;
  for (const auto* event : events) {
    auto lane = std::find_if(ends.begin(), ends.end(), [&](int64_t end) { return end <= event->begin_ns; });
    if (lane == ends.end()) lane = ends.insert(ends.end(), 0);
    *lane = event->end_ns;
    text.add_span(kAnnotation, event->name, kCommunication + (lane - ends.begin()), event->begin_ns, event->end_ns);
  }
  for (size_t i = 0; i < ends.size(); ++i)
    text.name_lane(kCommunication + static_cast<int64_t>(i),
                   "accelerate communication" + (i == 0 ? "" : " " + std::to_string(i + 1)));
}

std::string thread_name(int64_t system_thread) {
  std::ifstream in("/proc/self/task/" + std::to_string(system_thread) + "/comm");
  std::string name;
  return std::getline(in, name) ? name : "ended";
}

}  // namespace

void complete_trace(const std::filesystem::path& file, const trace::Recording& recording, nlohmann::json head) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const auto expect = [&](bool found, const char* what) {
    if (!found)
      raise<InternalError>(
          "export_chrome_trace: {} has no {}, expected a trace as Kineto of LibTorch 2.11 to 2.13 writes them; this "
          "LibTorch is of another version",
          file.string(), what);
  };
  constexpr std::streamoff kHead = 1 << 16;  // metadata of the process, devices
  std::string text(kHead, '\0');
  stream.read(text.data(), kHead);
  text.resize(static_cast<size_t>(stream.gcount()));
  constexpr std::string_view kBase = "\"baseTimeNanoseconds\":";
  constexpr std::string_view kEnd = "\n  ],";  // of traceEvents, in 2.11 and 2.13; other lists behind it have no lines
  const auto base = text.find(kBase);
  expect(base != std::string::npos, "baseTimeNanoseconds");
  TraceText more(std::stoll(text.substr(base + kBase.size(), 32)));

  stream.clear();
  stream.seekg(0, std::ios::end);
  const std::streamoff size = stream.tellg(), tail = std::min(size, kHead);
  text.resize(static_cast<size_t>(tail));
  stream.seekg(size - tail);
  stream.read(text.data(), tail);
  const auto end = text.rfind(kEnd);
  expect(end != std::string::npos, "end of traceEvents");

  std::vector<const trace::Event*> communication;
  std::set<int64_t> threads;
  for (const auto& event : recording.events) {
    if (event.lane == trace::Lane::communication) {
      communication.push_back(&event);
      continue;
    }
    more.add_span(event.is_operator ? "cpu_op" : kAnnotation, event.name, event.system_thread, event.begin_ns,
                  event.end_ns);
    threads.insert(event.system_thread);
  }
  // As Kineto names those that it knows.
  for (const int64_t thread : threads)
    more.name_lane(thread, fmt::format("thread {} ({})", thread, thread_name(thread)));
  add_communication(more, std::move(communication));
  auto& steps = head["accelerate_steps"] = nlohmann::json::array();
  if (!recording.steps.empty()) more.name_lane(kSteps, "accelerate steps");
  for (const auto& step : recording.steps) {
    more.add_span(kAnnotation, fmt::format("accelerate::step {} bytes=0", step.number), kSteps, step.begin_ns,
                  step.end_ns);
    steps.push_back({{"step", step.number},
                     {"begin_us", more.microseconds(step.begin_ns)},
                     {"end_us", more.microseconds(step.end_ns)}});
  }
  std::string members;
  for (const auto& [key, value] : head.items())
    members += fmt::format(",\n  {}: {}", nlohmann::json(key).dump(), value.dump());

  stream.clear();
  stream.seekp(size - tail + static_cast<std::streamoff>(end));
  stream << more.text() << "\n  ]" << members << "," << text.substr(end + kEnd.size());
  if (!stream.flush())
    raise<ResourceError>("export_chrome_trace: {} was not written to its end; is the disk full?", file.string());
}

void add_call_sites(const std::filesystem::path& file, const CallSites& sites) try {
  std::unordered_map<uint64_t, const CallSite*> of;  // by number
  for (const auto& call : sites.calls) of[call.number] = &sites.sites[call.site];
  const auto member = [](std::string_view key, const std::vector<std::string>& parts, const char* between) {
    return parts.empty()
               ? ""
               : fmt::format(", \"{}\": {}", key, nlohmann::json(fmt::to_string(fmt::join(parts, between))).dump());
  };
  constexpr std::string_view kNumber = "\"Record function id\": ", kStack = "Call stack", kModules = "Module Hierarchy";
  std::ifstream in(file);
  AtomicFile out("export_chrome_trace", file);
  std::string part;  // of the new file
  for (std::string line; std::getline(in, line);) {
    if (auto at = line.find(kNumber); at != std::string::npos) {
      at += kNumber.size();
      const size_t end = line.find_first_not_of("0123456789", at);
      const auto found = end == at ? of.end() : of.find(std::stoull(line.substr(at, end - at)));
      if (found != of.end()) {
        std::string more;
        if (line.find(kStack) == std::string::npos) more += member(kStack, found->second->stack, ";");
        if (line.find(kModules) == std::string::npos) more += member(kModules, found->second->modules, ".");
        line.insert(std::min(end, line.size()), more);
      }
    }
    part += line + "\n";
    constexpr size_t kPart = 1 << 20;
    if (part.size() < kPart) continue;
    out.write(part);
    part.clear();
  }
  out.write(part);
  out.finish(/*flush=*/false);
} catch (const CheckpointError& error) {  // what AtomicFile throws, which is mostly used for those
  throw ResourceError(error.what());
}

}  // namespace accelerate::profiler
