#include <algorithm>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

class SequentialLR : public LRScheduler {
 public:
  SequentialLR(torch::optim::Optimizer& optimizer, std::vector<Scheduler> schedulers, std::vector<int64_t> milestones)
      : LRScheduler(optimizer), schedulers_(std::move(schedulers)), milestones_(std::move(milestones)) {
    if (schedulers_.empty()) throw ConfigError("sequential_lr: found no schedules, expected at least one.");
    if (milestones_.size() + 1 != schedulers_.size())
      raise<ConfigError>("sequential_lr: found {} milestones for {} schedules, expected one less than schedules.",
                         milestones_.size(), schedulers_.size());
    if (std::adjacent_find(milestones_.begin(), milestones_.end(), std::greater_equal<>()) != milestones_.end())
      raise<ConfigError>("sequential_lr: found milestones {}, expected growing ones.", fmt::join(milestones_, ", "));
    for (size_t i = 0; i < schedulers_.size(); ++i)
      if (&schedulers_[i].optimizer() != &optimizer)
        raise<ConfigError>("sequential_lr: schedule {} drives another optimizer, expected the one that is given.", i);
    // Each of them has set the rate of its step 0 when it was made: the first one saw the optimizer's own.
    base_lrs_ = std::min_element(schedulers_.begin(), schedulers_.end(),
                                 [](const auto& a, const auto& b) { return a.schedule().made() < b.schedule().made(); })
                    ->schedule()
                    .base_lrs();
  }

  void step(std::optional<double>) override {
    ++step_count_;
    ++last_epoch_;
    const size_t at = index();
    if (last_epoch_ == 0 || (at > 0 && milestones_[at - 1] == last_epoch_))
      schedulers_[at].schedule().restart(base_lrs_);
    else schedulers_[at].step();
    last_lrs_ = schedulers_[at].get_last_lr();
  }

  void restart(const std::vector<double>& initial) override {
    base_lrs_ = initial;
    last_epoch_ = -1, step_count_ = 0;
    step(std::nullopt);
  }

  c10::IValue state_dict() const override {
    Dict state = make_dict();
    state.insert("_milestones", make_list(milestones_));
    state.insert("last_epoch", last_epoch_);
    state.insert("_last_lr", make_list(last_lrs_));
    std::vector<c10::IValue> states;
    for (const auto& scheduler : schedulers_) states.push_back(scheduler.state_dict());
    state.insert("_schedulers", make_list(states));
    return state;
  }

  void load_state_dict(const c10::IValue& state) override {
    DictReader reader(state, "sequential scheduler state");
    const auto states = reader.items("_schedulers");
    if (states.size() != schedulers_.size())
      reader.fail("found {} schedules, expected {} as this one was made of", states.size(), schedulers_.size());
    const int64_t last_epoch = reader.integer("last_epoch");
    auto last_lrs = reader.numbers("_last_lr", base_lrs_.size());
    std::vector<c10::IValue> before;
    try {
      for (size_t i = 0; i < states.size(); ++i) {
        before.push_back(schedulers_[i].state_dict());
        schedulers_[i].load_state_dict(states[i]);
      }
    } catch (const CheckpointError&) {
      for (size_t i = 0; i < before.size(); ++i) schedulers_[i].load_state_dict(before[i]);
      throw;
    }
    last_epoch_ = last_epoch;
    step_count_ = last_epoch + 1;
    last_lrs_ = std::move(last_lrs);
  }

 protected:
  std::vector<double> compute_lrs() override { return current_lrs(); }  // step() leaves it to the schedules

 private:
  /// The one that is in force.
  size_t index() const {
    return static_cast<size_t>(std::upper_bound(milestones_.begin(), milestones_.end(), last_epoch_) -
                               milestones_.begin());
  }

  std::vector<Scheduler> schedulers_;
  std::vector<int64_t> milestones_;
};

}  // namespace

Scheduler sequential_lr(torch::optim::Optimizer& optimizer, std::vector<Scheduler> schedulers,
                        std::vector<int64_t> milestones) {
  return Scheduler(std::make_shared<SequentialLR>(optimizer, std::move(schedulers), std::move(milestones)));
}

}  // namespace accelerate::optim
