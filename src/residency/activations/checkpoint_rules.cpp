#include "residency/activations/checkpoint_rules.hpp"

#include <ATen/DeviceAccelerator.h>

#include <atomic>
#include <exception>
#include <utility>

#include "residency/activations/replay_state.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {
namespace {

struct RulesOfProcess {
  Mutex mutex;
  std::shared_ptr<const CheckpointRules> rules ACCELERATE_GUARDED_BY(mutex);
};
RulesOfProcess& rules_of_process() {
  static auto& only = *new RulesOfProcess;  // a static Accelerator may end after everything else
  return only;
}
std::atomic<int64_t> first_runs{0}, waits{0};

void wait_for_accelerator(const CheckpointRules& rules) {
  if (!rules.synchronize) return;
  const auto device = current_accelerator();
  if (!device) return;
  at::accelerator::synchronizeDevice(device->index());
  waits.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

CheckpointRulesScope::CheckpointRulesScope(CheckpointRules rules)
    : rules_(std::make_shared<const CheckpointRules>(std::move(rules))) {
  auto& process = rules_of_process();
  const MutexLock lock(process.mutex);
  process.rules = rules_;
}

CheckpointRulesScope::~CheckpointRulesScope() {
  auto& process = rules_of_process();
  const MutexLock lock(process.mutex);
  if (process.rules == rules_) process.rules.reset();
}

std::shared_ptr<const CheckpointRules> checkpoint_rules() {
  auto& process = rules_of_process();
  const MutexLock lock(process.mutex);
  return process.rules;
}

int64_t checkpointed_calls() { return first_runs.load(std::memory_order_relaxed); }
int64_t checkpoint_waits() { return waits.load(std::memory_order_relaxed); }

CheckpointRun::CheckpointRun(bool again) : rules_(checkpoint_rules()), again_(again) {
  if (!again) first_runs.fetch_add(1, std::memory_order_relaxed);
  if (!rules_) return;
  exceptions_ = std::uncaught_exceptions();
  wait_for_accelerator(*rules_);
  since_ = std::chrono::steady_clock::now();
}

CheckpointRun::~CheckpointRun() {
  if (!rules_ || std::uncaught_exceptions() > exceptions_) return;
  try {
    wait_for_accelerator(*rules_);
    if (rules_->timed)
      rules_->timed(again_,
                    std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since_).count());
  } catch (const std::exception&) {  // a device that can't be waited for says so at its next operator
  }
}

}  // namespace accelerate::residency
