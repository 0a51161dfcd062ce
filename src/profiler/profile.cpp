#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>
#include <utility>

#include "accelerate/profiler.hpp"
#include "input/json.hpp"
#include "observe/trace.hpp"
#include "profiler/events.hpp"
#include "profiler/memory_timeline.hpp"
#include "profiler/native_stacks.hpp"
#include "profiler/other_threads.hpp"
#include "profiler/schedule.hpp"
#include "profiler/trace_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

// Declared in kineto_shim.h, which includes a header of libkineto that LibTorch's include paths don't reach.
namespace torch::autograd::profiler {
// NOLINTNEXTLINE(readability-identifier-naming): its own name
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}  // namespace torch::autograd::profiler

namespace accelerate {
namespace {

namespace kineto = torch::autograd::profiler;
using kineto::ActivityType;
using profiler::Action;

struct KinetoActivity {
  const char* name;
  ActivityType type;
  bool there;
};

std::vector<KinetoActivity> all_activities() {
  auto& context = at::globalContext();
  return {{"cpu", ActivityType::CPU, true},
          {"cuda", ActivityType::CUDA, context.hasCUDA()},
          {"xpu", ActivityType::XPU, context.hasXPU()},
          {"mtia", ActivityType::MTIA, context.hasMTIA()},
          {"hpu", ActivityType::HPU, context.hasHPU()}};
}

std::vector<KinetoActivity> chosen_activities(const std::optional<std::vector<std::string>>& asked) {
  const auto all = all_activities();
  std::vector<KinetoActivity> chosen;
  if (!asked) {
    for (const auto& one : all)
      if (one.there) chosen.push_back(one);
    return chosen;
  }
  for (const auto& name : *asked) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
    if (found == all.end())
      raise<ConfigError>("ProfileKwargs: activities has '{}', expected cpu, cuda, xpu, mtia or hpu", name);
    if (found->there) chosen.push_back(*found);
    else
      logs::warn("accelerate.profiler",
                 "ProfileKwargs: activities has '{}', of which this process has none; it is left out.", name);
  }
  if (chosen.empty())
    raise<ConfigError>("ProfileKwargs: activities is [{}], expected at least one that is there, e.g. \"cpu\"",
                       fmt::join(*asked, ", "));
  return chosen;
}

/// A named range of the trace, while somebody records.
std::unique_ptr<at::RecordFunction> named_range(const std::string& name) {
  auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (range->isActive()) range->before(name);
  return range;
}

/// Kineto's state is the process's: a second profile, on another thread, would end the first one's recording.
class OnlyOne {
 public:
  OnlyOne() {
    if (taken.exchange(true))
      throw ConfigError("Profile: another one of this process has not ended, expected one at a time; stop() it first");
  }
  ~OnlyOne() { taken = false; }
  OnlyOne(const OnlyOne&) = delete;
  OnlyOne& operator=(const OnlyOne&) = delete;

 private:
  static inline std::atomic<bool> taken{false};
};

}  // namespace

struct Profile::Impl {
  std::unique_ptr<OnlyOne> claim;  ///< until it is stopped
  ProfileKwargs kwargs;
  ProfileProcess process;
  std::optional<profiler::Schedule> schedule;
  std::vector<KinetoActivity> activities;
  int64_t step = 0;
  Action action = Action::record;
  bool stopped = false;
  std::unique_ptr<at::RecordFunction> step_range;
  int64_t step_begin_ns = c10::getTime();
  std::vector<trace::Step> steps;                       ///< of this recording, as the program counts them by step()
  std::optional<trace::Recorder> recorder;              ///< while it records
  std::optional<profiler::OtherThreads> other_threads;  ///< the same
  std::optional<profiler::NativeStacks> native_stacks;  ///< the same, where they are asked for
  trace::Recording spans;                               ///< of the last one that ended
  profiler::CallSites call_sites;                       ///< the same
  std::unique_ptr<kineto::ProfilerResult> recording;
  std::vector<ProfileStorage> storages;  ///< that lived at its end
  std::optional<ProfileEvents> events;
  mutable std::optional<std::filesystem::path> saved;  ///< where Kineto wrote it, which it does once

  Action action_at(int64_t n) const { return schedule ? schedule->at(n) : Action::record; }

  std::set<ActivityType> types() const {
    std::set<ActivityType> types;
    for (const auto& one : activities) types.insert(one.type);
    return types;
  }
  kineto::ProfilerConfig config() const {
    // Formulas for operations need shapes.
    return kineto::ProfilerConfig(kineto::ProfilerState::KINETO, kwargs.record_shapes || kwargs.with_flops,
                                  kwargs.profile_memory, kwargs.with_stack, kwargs.with_flops, kwargs.with_modules);
  }
  ProfileContext context() const {
    ProfileContext context{.device = {}, .memory = kwargs.profile_memory, .flops = kwargs.with_flops};
    for (const auto& one : activities)
      if (one.type != ActivityType::CPU && context.device.empty()) context.device = one.name;
    return context;
  }

  void prepare() const { kineto::prepareProfiler(config(), types()); }
  void begin() {
    kineto::enableProfiler(config(), types());
    recorder.emplace();
    other_threads.emplace();
    if (kwargs.with_stack || kwargs.with_modules) native_stacks.emplace(kwargs.with_stack, kwargs.with_modules);
    steps.clear();
    if (process.num_processes > 1)
      kineto::addMetadataJson(
          "distributedInfo",
          nlohmann::json{{"backend", process.backend}, {"rank", process.rank}, {"world_size", process.num_processes}}
              .dump());
  }
  void end() {
    other_threads.reset();
    spans = recorder->stop();
    recorder.reset();
    if (!steps.empty()) spans.steps = std::exchange(steps, {});
    recording = kineto::disableProfiler();
    storages.clear();
    if (kwargs.profile_memory && process.storages) storages = process.storages();
    call_sites = native_stacks ? native_stacks->stop() : profiler::CallSites();
    native_stacks.reset();
    events = profiler::collect_events(*recording, spans.events, call_sites, context());
    saved.reset();
  }

  /// From one step's action to the next one's, or to the end of the profile: what of PyTorch's table of transitions the
  /// schedule can reach.
  void go(Profile& profile, std::optional<Action> before, std::optional<Action> now) {
    const bool recorded = before == Action::record || before == Action::record_and_save;
    const bool goes_on = before == Action::record && now && *now != Action::none && *now != Action::warmup;
    if (before == Action::warmup && (!now || *now == Action::none)) {
      begin();
      native_stacks.reset();
      other_threads.reset();
      recorder.reset();
      kineto::disableProfiler();
    }
    if (recorded && !goes_on) {
      end();
      if ((before == Action::record_and_save || !now) && kwargs.on_trace_ready) kwargs.on_trace_ready(profile);
    }
    if (!now || *now == Action::none || goes_on) return;
    if (before != Action::warmup) prepare();
    if (*now != Action::warmup) begin();
  }
  void mark_step() {
    if (schedule) step_range = named_range("ProfilerStep#" + std::to_string(step));
  }
};

Profile::Profile(ProfileKwargs kwargs, ProfileProcess process) : impl_(std::make_unique<Impl>()) {
  auto& self = *impl_;
  self.kwargs = std::move(kwargs);
  self.process = std::move(process);
  self.activities = chosen_activities(self.kwargs.activities);
  if (self.kwargs.schedule_option) self.schedule = profiler::parse_schedule(*self.kwargs.schedule_option);
  if (torch::profiler::impl::profilerEnabled())
    throw ConfigError("Profile: another profiler records in this thread, expected one at a time; end it first");
  self.claim = std::make_unique<OnlyOne>();
  if (self.schedule && self.schedule->warmup == 0)
    logs::warn("accelerate.profiler",
               "ProfileKwargs: schedule_option has warmup = 0, so the first recorded step pays for the start.");
  self.action = self.action_at(0);
  self.go(*this, std::nullopt, self.action);
  self.mark_step();
}

Profile::Profile(Profile&&) noexcept = default;

Profile::~Profile() {
  if (!impl_) return;
  try {
    stop();
  } catch (const std::exception& error) {
    logs::warn("accelerate.profiler", "Profile: {}", error.what());
  }
}

void Profile::step() {
  auto& self = *impl_;
  if (self.stopped) throw ConfigError("Profile: step() after stop(), expected it before");
  self.step_range.reset();
  const int64_t now_ns = c10::getTime();
  if (self.recorder) self.steps.push_back({self.step, self.step_begin_ns, now_ns});
  self.step_begin_ns = now_ns;
  const Action before = self.action;
  self.action = self.action_at(++self.step);
  self.go(*this, before, self.action);
  self.mark_step();
}

void Profile::stop() {
  auto& self = *impl_;
  if (std::exchange(self.stopped, true)) return;
  const auto claim = std::move(self.claim);
  self.step_range.reset();
  self.go(*this, self.action, std::nullopt);
  if (!self.kwargs.output_trace_dir || !self.recording) return;
  const std::filesystem::path folder = *self.kwargs.output_trace_dir;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    raise<ResourceError>("Profile: can't make the folder {} of output_trace_dir: {}", folder.string(), error.message());
  export_chrome_trace(folder / fmt::format("profile_{}.json", self.process.rank));
}

int64_t Profile::step_num() const { return impl_->step; }

const ProfileEvents& Profile::events() const {
  if (!impl_->events)
    throw ConfigError("Profile: asked for events, but no recording has ended, expected stop() or a schedule's cycle");
  return *impl_->events;
}

void Profile::export_chrome_trace(const std::filesystem::path& file) const {
  events();
  std::error_code error;
  if (!impl_->saved) {
    // Kineto does not say when it can't write.
    if (!std::ofstream(file)) raise<ResourceError>("export_chrome_trace: can't write {}", file.string());
    impl_->recording->save(file.string());
    if (std::filesystem::file_size(file, error) == 0 || error)
      raise<ResourceError>("export_chrome_trace: {} was not written; is the disk full?", file.string());
    auto head = nlohmann::json::object();
    if (const auto& clock = impl_->process.clock)
      head["accelerate_clock"] = {{"offset_ns", clock->offset_ns}, {"error_ns", clock->error_ns}};
    profiler::complete_trace(file, impl_->spans, head);
    if (!impl_->call_sites.calls.empty()) profiler::add_call_sites(file, impl_->call_sites);
    impl_->saved = std::filesystem::absolute(file);
    return;
  }
  if (std::filesystem::equivalent(*impl_->saved, file, error)) return;
  std::filesystem::copy_file(*impl_->saved, file, std::filesystem::copy_options::overwrite_existing, error);
  if (error)
    raise<ResourceError>("export_chrome_trace: can't copy {}, the file to which this recording went first, to {}: {}",
                         impl_->saved->string(), file.string(), error.message());
}

void Profile::export_stacks(const std::filesystem::path& file, const std::string& metric) const {
  const bool device =
      metric == "self_cuda_time_total" || metric == "self_xpu_time_total" || metric == "self_privateuse1_time_total";
  if (!device && metric != "self_cpu_time_total")
    raise<ConfigError>("export_stacks: metric is '{}', expected self_cpu_time_total or self_cuda_time_total", metric);
  std::string text;
  for (const auto& event : events().events) {
    const auto us = static_cast<int64_t>(device ? event.self_device_time_total : event.self_cpu_time_total);
    if (event.stack.empty() || us <= 0) continue;
    std::string line;
    for (auto entry = event.stack.rbegin(); entry != event.stack.rend(); ++entry) {
      std::string frame = *entry;
      for (char& c : frame)
        if (c == ' ' || c == ';' || c == '\t' || c == '\n') c = '_';
      line += (line.empty() ? "" : ";") + frame;
    }
    text += line + " " + std::to_string(us) + "\n";
  }
  std::ofstream out(file);
  out << text;
  if (!out.flush()) raise<ResourceError>("export_stacks: can't write {}", file.string());
}

void Profile::export_memory_timeline(const std::filesystem::path& file, const std::string& device) const {
  events();
  if (!impl_->kwargs.profile_memory || !impl_->kwargs.record_shapes)
    raise<ConfigError>(
        "export_memory_timeline: profile_memory is {} and record_shapes is {}, expected both to be true: allocations "
        "come from the one, what they are for from the other",
        impl_->kwargs.profile_memory, impl_->kwargs.record_shapes);
  const std::string name = file.filename().string();
  const bool raw = name.ends_with(".raw.json"), page = name.ends_with(".html");
  if (!page && !name.ends_with(".json"))
    raise<ConfigError>("export_memory_timeline: the file is '{}', expected .json, .raw.json or .html{}", name,
                       name.ends_with(".json.gz") ? "; compress it when it is written (gzip FILE)" : "");
  std::optional<at::Device> of;
  try {
    of.emplace(device);
  } catch (const c10::Error&) {
    raise<ConfigError>("export_memory_timeline: device is '{}', expected one like cpu or cuda:0", device);
  }
  const auto lifetimes = profiler::memory_lifetimes(*impl_->recording, impl_->storages);
  const auto changes = profiler::memory_changes(lifetimes, *of);
  AtomicFile out("export_memory_timeline", file);
  if (raw) out.write(profiler::to_json(changes));
  else if (page) out.write(profiler::to_page(profiler::memory_moments(changes), *of));
  else out.write(profiler::to_json(profiler::memory_moments(changes)));
  out.finish(/*flush=*/false);
}

}  // namespace accelerate
