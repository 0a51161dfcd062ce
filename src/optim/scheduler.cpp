#include "accelerate/optim/scheduler.hpp"

#include <atomic>

#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {

namespace {
std::atomic<int64_t> schedules_made{0};
}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer) : optimizer_(optimizer), made_(schedules_made++) {
  base_lrs_ = current_lrs();
  last_lrs_ = base_lrs_;
}

std::vector<double> LRScheduler::current_lrs() const {
  std::vector<double> lrs;
  for (const auto& group : optimizer_.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

void LRScheduler::set_lrs(const std::vector<double>& lrs) {
  auto& groups = optimizer_.param_groups();
  if (lrs.size() != groups.size())
    raise<ConfigError>(
        "LRScheduler: found {} learning rates for {} parameter groups; a group was probably added after the schedule "
        "was made. Add all groups first.",
        lrs.size(), groups.size());
  for (size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(lrs[i]);
  last_lrs_ = lrs;
}

void LRScheduler::step(std::optional<double>) {
  ++step_count_;
  ++last_epoch_;
  set_lrs(compute_lrs());
}

void LRScheduler::restart(const std::vector<double>& initial) {
  base_lrs_ = initial;
  last_epoch_ = 0;
  step_count_ = 1;
  set_lrs(first_lrs());
}

c10::IValue LRScheduler::state_dict() const {
  Dict state = make_dict();
  state.insert("base_lrs", make_list(base_lrs_));
  state.insert("last_epoch", last_epoch_);
  state.insert("_step_count", step_count_);
  state.insert("_is_initial", false);
  state.insert("_get_lr_called_within_step", false);
  state.insert("_last_lr", make_list(last_lrs_));
  return state;
}

void LRScheduler::load_state_dict(const c10::IValue& state) {
  DictReader reader(state, "scheduler state");
  const size_t groups = optimizer_.param_groups().size();
  auto base_lrs = reader.numbers("base_lrs", groups);
  auto last_lrs = reader.numbers("_last_lr", groups);
  const int64_t last_epoch = reader.integer("last_epoch");
  const int64_t step_count = reader.integer("_step_count");
  base_lrs_ = std::move(base_lrs);
  last_lrs_ = std::move(last_lrs);
  last_epoch_ = last_epoch;
  step_count_ = step_count;
}

Scheduler::Scheduler(std::shared_ptr<LRScheduler> schedule) : schedule_(std::move(schedule)) {
  if (!schedule_) throw ConfigError("Scheduler: found a null pointer, expected a schedule.");
  if (schedule_->step_count() == 0) schedule_->initial_step();
}

c10::IValue Scheduler::state_dict() const { return schedule_->state_dict(); }
void Scheduler::load_state_dict(const c10::IValue& state) const { schedule_->load_state_dict(state); }

}  // namespace accelerate::optim
