#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

/// LibTorch keeps its step count protected; a derived class may name it.
struct TorchStepCount : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&TorchStepCount::step_count_); }
};

class TorchSchedule : public LRScheduler {
 public:
  TorchSchedule(torch::optim::Optimizer& optimizer, std::shared_ptr<torch::optim::LRScheduler> scheduler)
      : LRScheduler(optimizer), scheduler_(std::move(scheduler)) {
    // One that was stepped before goes on from where it is.
    step_count_ = TorchStepCount::of(*scheduler_);
    last_epoch_ = step_count_ - 1;
  }

  void step(std::optional<double>) override {
    scheduler_->step();
    ++step_count_;
    ++last_epoch_;
    last_lrs_ = current_lrs();
  }

  void restart(const std::vector<double>& initial) override {
    base_lrs_ = initial;
    set_lrs(initial);
    TorchStepCount::of(*scheduler_) = 0;
    last_epoch_ = -1, step_count_ = 0;
    step(std::nullopt);
  }

  void load_state_dict(const c10::IValue& state) override {
    LRScheduler::load_state_dict(state);
    TorchStepCount::of(*scheduler_) = static_cast<unsigned>(last_epoch_ + 1);
  }

 protected:
  std::vector<double> compute_lrs() override { return current_lrs(); }

 private:
  std::shared_ptr<torch::optim::LRScheduler> scheduler_;
};

class TorchPlateauSchedule : public LRScheduler {
 public:
  TorchPlateauSchedule(torch::optim::Optimizer& optimizer,
                       std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler)
      : LRScheduler(optimizer), scheduler_(std::move(scheduler)) {}

  void step(std::optional<double> metric) override {
    if (!metric)
      throw ConfigError("ReduceLROnPlateauScheduler: step() was called without a metric, expected step(metric).");
    scheduler_->step(static_cast<float>(*metric));
    ++step_count_;
    ++last_epoch_;
    last_lrs_ = current_lrs();
  }

  void restart(const std::vector<double>&) override {
    throw ConfigError(
        "sequential_lr: found a ReduceLROnPlateauScheduler, expected schedules that step without a metric, which it "
        "can't pass on.");
  }
  c10::IValue state_dict() const override { no_state("saved"); }
  void load_state_dict(const c10::IValue&) override { no_state("loaded"); }

 protected:
  std::vector<double> compute_lrs() override { return current_lrs(); }

 private:
  void initial_step() override { step_count_ = 1, last_epoch_ = 0; }
  [[noreturn]] static void no_state(const char* what) {
    raise<ConfigError>(
        "torch::optim::ReduceLROnPlateauScheduler: its state can't be {} because LibTorch keeps it private. Use "
        "accelerate::optim::reduce_lr_on_plateau, which has the same rule.",
        what);
  }
  std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler_;
};

template <class T> std::shared_ptr<T> borrowed(T& object) {
  return std::shared_ptr<T>(std::shared_ptr<void>(), &object);
}

template <class Schedule, class T> Scheduler wrap(torch::optim::Optimizer& optimizer, std::shared_ptr<T> scheduler) {
  if (!scheduler) throw ConfigError("from_torch: found a null pointer, expected a scheduler.");
  return Scheduler(std::make_shared<Schedule>(optimizer, std::move(scheduler)));
}

}  // namespace

Scheduler from_torch(torch::optim::Optimizer& optimizer, std::shared_ptr<torch::optim::LRScheduler> scheduler) {
  return wrap<TorchSchedule>(optimizer, std::move(scheduler));
}
Scheduler from_torch(torch::optim::Optimizer& optimizer, torch::optim::LRScheduler& scheduler) {
  return from_torch(optimizer, borrowed(scheduler));
}
Scheduler from_torch(torch::optim::Optimizer& optimizer,
                     std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler) {
  return wrap<TorchPlateauSchedule>(optimizer, std::move(scheduler));
}
Scheduler from_torch(torch::optim::Optimizer& optimizer, torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  return from_torch(optimizer, borrowed(scheduler));
}

}  // namespace accelerate::optim
