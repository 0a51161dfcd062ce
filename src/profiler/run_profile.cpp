#include "profiler/run_profile.hpp"

#include <torch/csrc/profiler/orchestration/observer.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "observe/trace.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::profiler {
namespace {

constexpr const char* kFolder = "ACCELERATE_PROFILE_DIR";

/// Unset: all of the run.
std::optional<std::map<std::string, int64_t>> schedule() {
  constexpr std::array<std::pair<const char*, const char*>, 5> kFields = {
      {{"skip_first", "ACCELERATE_PROFILE_SKIP_FIRST"},
       {"wait", "ACCELERATE_PROFILE_WAIT"},
       {"warmup", "ACCELERATE_PROFILE_WARMUP"},
       {"active", "ACCELERATE_PROFILE_ACTIVE"},
       {"repeat", "ACCELERATE_PROFILE_REPEAT"}}};
  std::map<std::string, int64_t> option;
  for (const auto& [field, variable] : kFields)
    if (const auto value = environment::integer({variable})) option[field] = *value;
  if (option.empty()) return std::nullopt;
  if (!option.contains("active"))
    throw ConfigError(
        "profile of the run: found ACCELERATE_PROFILE_SKIP_FIRST, _WAIT, _WARMUP or _REPEAT without "
        "ACCELERATE_PROFILE_ACTIVE, expected the number of steps to record in it");
  option.try_emplace("wait", 0);
  option.try_emplace("warmup", 0);
  return option;
}

ProfileKwargs from_environment() {
  const auto flag = [](const char* name) { return environment::flag(name).value_or(false); };
  return {.schedule_option = schedule(),
          .record_shapes = flag("ACCELERATE_PROFILE_RECORD_SHAPES"),
          .profile_memory = flag("ACCELERATE_PROFILE_MEMORY"),
          .with_stack = flag("ACCELERATE_PROFILE_STACK"),
          .with_flops = flag("ACCELERATE_PROFILE_FLOPS"),
          .with_modules = flag("ACCELERATE_PROFILE_MODULES"),
          .output_trace_dir = environment::text(kFolder)};
}

}  // namespace

struct RunProfile::Impl {
  Impl(ProfileKwargs kwargs, ProfileProcess process)
      : scheduled(kwargs.schedule_option.has_value()), profile(std::move(kwargs), std::move(process)) {}

  const bool scheduled;
  Profile profile;
  trace::StepCount steps;
  const std::thread::id thread = std::this_thread::get_id();

  void step_done(const void* optimizer) {
    if (std::this_thread::get_id() == thread && steps.add(optimizer)) profile.step();
  }
};

namespace {
/// For programs that end by exit(): the one that records. None is made while there is one.
RunProfile* current = nullptr;
}  // namespace

bool RunProfile::asked() { return environment::text(kFolder).has_value(); }

std::unique_ptr<RunProfile> RunProfile::begin(ProfileProcess process) {
  if (!asked() || current || torch::profiler::impl::profilerEnabled()) return nullptr;
  return std::unique_ptr<RunProfile>(new RunProfile(std::make_unique<Impl>(from_environment(), std::move(process))));
}

RunProfile::RunProfile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  current = this;
  if (impl_->scheduled) trace::on_step([self = impl_.get()](const void* optimizer) { self->step_done(optimizer); });
  static std::once_flag once;
  std::call_once(once, [] {
    std::atexit([] {
      if (current) current->end();
    });
  });
}

RunProfile::~RunProfile() { end(); }

void RunProfile::end() noexcept {
  const auto self = std::move(impl_);
  if (!self) return;
  current = nullptr;
  trace::on_step(nullptr);
  try {
    self->profile.stop();
    self->profile.events();
  } catch (const ConfigError&) {
    logs::warn("accelerate.profiler",
               "profile of the run: nothing was recorded, because the program ended after {} steps of its optimizers, "
               "before the first that ACCELERATE_PROFILE_SKIP_FIRST, _WAIT and _WARMUP leave; lower them.",
               self->profile.step_num());
  } catch (const std::exception& error) {
    logs::warn("accelerate.profiler", "profile of the run: {}", error.what());
  }
}

void RunProfile::give_way() noexcept {
  if (!impl_) return;
  logs::warn("accelerate.profiler",
             "profile of the run: it ends here, because the program makes a profile of its own, and LibTorch records "
             "one at a time.");
  end();
}

}  // namespace accelerate::profiler
