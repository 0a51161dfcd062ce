#include "accelerator/run_observation.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unordered_set>
#include <utility>
#include <vector>

#include "accelerate/accelerator/memory_snapshot.hpp"
#include "accelerate/comm/comms_log.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/state.hpp"
#include "comm/agreement.hpp"
#include "comm/comms_log.hpp"
#include "profiler/module_profile.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using run_phases::Phase;

struct PhaseNames {
  const char *line, *record, *memory;
};
constexpr std::array<PhaseNames, run_phases::kPhases> kNames{{{"fwd", "forward", "forward"},
                                                              {"bwd", "backward", "backward"},
                                                              {"bwd_inner", "backward_inner", nullptr},
                                                              {"bwd_allreduce", "backward_allreduce", nullptr},
                                                              {"step", "step", "step"}}};

void say(const std::string& text) {
  std::fprintf(stdout, "%s\n", text.c_str());
  std::fflush(stdout);
}

/// For a profile.
std::ofstream opened(const std::filesystem::path& path, std::ios::openmode mode) {
  std::error_code ignored;  // opening says what is wrong
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), ignored);
  return std::ofstream(path, std::ios::binary | mode);
}
std::string not_written(const std::filesystem::path& path) {
  return fmt::format(
      "flops_profiler: can't write to '{}' (flops_profiler.output_file of the DeepSpeed configuration), expected a "
      "file in a folder that may be written; is the disk full?",
      path.string());
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (int64_t{1} << 30); }

/// The settings that a module of LibTorch prints of itself, without its name: "in_features=5, out_features=8,
/// bias=true".
std::string settings_text(const Submodule& submodule) {
  if (!submodule.module || !submodule.module->children().empty()) return {};
  std::ostringstream out;
  submodule.module->pretty_print(out);
  const std::string text = out.str();
  const size_t open = text.find('('), close = text.rfind(')');
  return open == text.npos || close == text.npos || close < open ? "" : text.substr(open + 1, close - open - 1);
}

std::vector<profiler::ProfiledModule> modules_of(const ModelRef& model) {
  const auto submodules = model.submodules();
  std::vector<profiler::ProfiledModule> modules;
  std::vector<std::unordered_set<const at::TensorImpl*>> below(submodules.size());  // tied ones count once
  for (const auto& submodule : submodules) {
    auto& module =
        modules.emplace_back(profiler::ProfiledModule{.name = submodule.path.substr(submodule.path.rfind('.') + 1),
                                                      .class_name = submodule.class_name,
                                                      .settings = settings_text(submodule),
                                                      .parent = submodule.parent});
    for (const auto& [name, parameter] : submodule.parameters)
      module.parameters.push_back(parameter.unsafeGetTensorImpl());
    for (auto at = static_cast<int64_t>(modules.size()) - 1; at >= 0; at = modules[static_cast<size_t>(at)].parent)
      for (const auto& [name, parameter] : submodule.parameters)
        if (below[static_cast<size_t>(at)].insert(parameter.unsafeGetTensorImpl()).second)
          modules[static_cast<size_t>(at)].num_parameters += parameter.numel();
  }
  return modules;
}

}  // namespace

RunObservation::RunObservation(const run_state::RunState& run, FileMonitors& monitors, const void* accelerator)
    : run_(run), monitors_(monitors), accelerator_(accelerator) {}

RunObservation::~RunObservation() {
  if (wanted_.comms) comm::stop_comms_log();
}

void RunObservation::begin(const parallel::Observed& wanted, const Facts& facts) {
  if (facts.device.is_meta()) return;  // a dry run: nothing takes time
  if (wanted == wanted_ && facts.samples_of_step == facts_.samples_of_step) return;
  // One rank writes it, much later: all learn now that it can't.
  if (wanted.flops && wanted.flops != wanted_.flops && !wanted.flops->file.empty())
    comm::on_all_ranks_or_throw<ResourceError>([&] {
      if (facts.is_main_process && !opened(wanted.flops->file, std::ios::app))
        throw ResourceError(not_written(wanted.flops->file));
    });
  if (wanted.comms && wanted.comms != wanted_.comms)
    comm::start_comms_log({.verbose = wanted.comms->verbose, .operations = wanted.comms->only, .say = say});
  if (wanted_.comms && !wanted.comms) comm::stop_comms_log();
  summary_due_ = wanted.comms.has_value();
  if (wanted.flops != wanted_.flops) profiling_ = Profiling::not_yet;
  wanted_ = wanted;
  facts_ = facts;
  watching_.reset();
  const bool phases = wanted.times || wanted.memory || wanted.flops || !wanted.of_recomputation.empty();
  checkpointed_before_ = residency::checkpointed_calls();
  if (phases && facts.is_main_process) watching_ = std::make_unique<run_phases::Watching>(*this);
}

void RunObservation::end() {
  if (std::exchange(summary_due_, false) && facts_.is_main_process) say(comm::comms_table());
}

bool RunObservation::is_ours(Phase phase, const void* of) const {
  switch (phase) {
    case Phase::forward:
      return c10::GradMode::is_enabled() && of &&
             std::any_of(run_.models.begin(), run_.models.end(),
                         [&](const auto& model) { return model->engine.get() == of; });
    case Phase::step:
      return std::any_of(run_.optimizers.begin(), run_.optimizers.end(),
                         [&](const auto& optimizer) { return &optimizer.optimizer() == of; });
    case Phase::backward:
    case Phase::backward_inner:
    case Phase::backward_reduce:
      return of == accelerator_;
  }
  return false;
}

RunObservation::Clock::time_point RunObservation::now() const {
  if (!facts_.device.is_cpu()) at::accelerator::synchronizeDevice(facts_.device.index());
  return Clock::now();
}

void RunObservation::begins(Phase phase, const void* of) {
  if (!is_ours(phase, of) || timer(phase).depth++ > 0) return;
  print_memory("before", phase);
  if (phase == Phase::forward) begin_profile(of);
  timer(phase).since = now();
}

void RunObservation::ends(Phase phase, const void* of) {
  if (!is_ours(phase, of) || timer(phase).depth == 0 || --timer(phase).depth > 0) return;
  Timer& timer = this->timer(phase);
  const std::chrono::duration<double, std::milli> took = now() - timer.since;
  timer.micro_ms += took.count();
  timer.ms += took.count();
  ++timer.times;
  if (phase == Phase::forward && profiling_ == Profiling::in_forward) {
    profile_->stop();
    profiling_ = Profiling::forward_done;
  }
  print_memory("after", phase);
  if (phase == Phase::backward && !GradientState().sync_gradients()) end_micro_step();
  if (phase == Phase::step && !run_.optimizers.empty() && &run_.optimizers.front().optimizer() == of) end_step();
}

void RunObservation::begin_profile(const void* engine) {
  if (!wanted_.flops || profiling_ != Profiling::not_yet || run_.optimizers.empty()) return;
  const auto steps = run_.optimizers.front().step_counts();
  if (steps.taken + steps.skipped != wanted_.flops->step) return;
  const auto model = std::find_if(run_.models.begin(), run_.models.end(),
                                  [&](const auto& model) { return model->engine.get() == engine; });
  profile_ = std::make_unique<profiler::ModuleProfile>(modules_of((*model)->model), facts_.device);
  profiling_ = Profiling::in_forward;
  profile_->start();
}

void RunObservation::end_micro_step() {
  if (!wanted_.times) return;
  std::string line = "[Rank 0] time (ms)";
  for (size_t i = 0; i < timers_.size(); ++i)
    line += fmt::format(" | {}_microstep: {:.2f}", kNames[i].line, std::exchange(timers_[i].micro_ms, 0));
  say(line);
}

void RunObservation::end_step() {
  const auto steps = run_.optimizers.front().step_counts();
  if (profiling_ == Profiling::forward_done) {
    print_profile(steps.taken + steps.skipped - 1);
    profiling_ = Profiling::done;
    profile_.reset();
  }
  if (!told_of_recomputation_ && !wanted_.of_recomputation.empty() &&
      residency::checkpointed_calls() == checkpointed_before_)
    logs::warn("accelerate.accelerator",
               "DeepSpeed configuration: these keys have no meaning here: {}; no layer is recomputed: call "
               "accelerate::checkpoint() in the model's forward",
               fmt::join(wanted_.of_recomputation, ", "));
  told_of_recomputation_ = true;
  end_micro_step();
  std::string line = "[Rank 0] time (ms)";
  TrackerValues values;
  for (size_t i = 0; i < timers_.size(); ++i) {
    line += fmt::format(" | {}: {:.2f}", kNames[i].line, timers_[i].ms);
    values.emplace(fmt::format("Train/Samples/elapsed_time_ms_{}", kNames[i].record), timers_[i].ms);
    timers_[i].ms = 0, timers_[i].times = 0;
  }
  if (!wanted_.times) return;
  say(line);
  monitors_.record(values);
}

void RunObservation::print_profile(int64_t step) {
  const auto& wanted = *wanted_.flops;
  const auto micro_steps = std::max<int64_t>(1, timer(Phase::backward).times);
  const auto seconds = [&](Phase phase, int64_t times) { return timer(phase).ms / 1e3 / static_cast<double>(times); };
  const std::string text =
      profiler::text_of(*profile_, {.step = step,
                                    .ranks = facts_.ranks,
                                    .batch_size = facts_.samples_of_step / facts_.ranks / micro_steps,
                                    .samples = facts_.samples_of_step,
                                    .micro_steps = micro_steps,
                                    .forward_seconds = seconds(Phase::forward, micro_steps),
                                    .backward_seconds = seconds(Phase::backward, micro_steps),
                                    .step_seconds = seconds(Phase::step, 1),
                                    .recompute_fwd_factor = wanted.recompute_fwd_factor,
                                    .module_depth = wanted.module_depth,
                                    .top_modules = wanted.top_modules,
                                    .detailed = wanted.detailed});
  if (wanted.file.empty()) return say(text);
  auto file = opened(wanted.file, std::ios::trunc);
  file << text << std::flush;
  if (file) return;
  // The others are on their way to the next forward.
  if (const auto group = comm::world_group()) comm::throw_alone<ResourceError>(*group, not_written(wanted.file));
  throw ResourceError(not_written(wanted.file));
}

void RunObservation::print_memory(const char* when, Phase phase) const {
  const char* const name = kNames[static_cast<size_t>(phase)].memory;
  if (!wanted_.memory || !name) return;
  const auto memory = accelerate::memory();
  std::string text = fmt::format("Engine {} {}\n", when, name);
  for (const auto& device : memory.devices)
    text +=
        fmt::format("{} MA {:.2f} GB  Max_MA {:.2f} GB  CA {:.2f} GB  Max_CA {:.2f} GB\n", device.device,
                    gib(device.allocated), gib(device.peak_allocated), gib(device.reserved), gib(device.peak_reserved));
  const int64_t used = memory.host_total - memory.host_available;
  text += fmt::format(
      "Process Memory:  resident = {:.2f} GB, peak = {:.2f} GB\nCPU Virtual Memory:  used = {:.2f} GB, percent = "
      "{:.1f}%",
      gib(memory.resident), gib(memory.peak_resident), gib(used),
      memory.host_total > 0 ? 100 * static_cast<double>(used) / static_cast<double>(memory.host_total) : 0);
  say(text);
}

}  // namespace accelerate
