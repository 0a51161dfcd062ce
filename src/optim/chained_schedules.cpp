#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

// Schedules whose next rate follows from the present one, as PyTorch has them: what else changes a group's rate stays
// in force.

namespace accelerate::optim {
namespace {

/// The rates of all groups through one function.
template <class F> std::vector<double> each(std::vector<double> lrs, F&& f) {
  for (double& lr : lrs) lr = f(lr);
  return lrs;
}

class ExponentialLR : public LRScheduler {
 public:
  ExponentialLR(torch::optim::Optimizer& optimizer, double gamma) : LRScheduler(optimizer), gamma_(gamma) {}

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    state.insert("gamma", gamma_);
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override {
    return each(current_lrs(), [&](double lr) { return last_epoch_ == 0 ? lr : lr * gamma_; });
  }
  std::vector<double> first_lrs() override { return base_lrs_; }

 private:
  double gamma_;
};

class MultiStepLR : public LRScheduler {
 public:
  MultiStepLR(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& milestones, double gamma)
      : LRScheduler(optimizer), gamma_(gamma) {
    for (const int64_t milestone : milestones) ++milestones_[milestone];
  }

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    Dict counts(c10::IntType::get(), c10::AnyType::get());
    for (const auto& [milestone, count] : milestones_) counts.insert(milestone, count);
    state.insert("milestones", counts);
    state.insert("gamma", gamma_);
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override { return decayed(current_lrs()); }
  std::vector<double> first_lrs() override { return decayed(base_lrs_); }

 private:
  /// A milestone that is named twice counts twice.
  std::vector<double> decayed(std::vector<double> lrs) const {
    const auto found = milestones_.find(last_epoch_);
    if (found == milestones_.end()) return lrs;
    return each(std::move(lrs), [&](double lr) { return lr * std::pow(gamma_, found->second); });
  }

  std::map<int64_t, int64_t> milestones_;
  double gamma_;
};

class LinearLR : public LRScheduler {
 public:
  LinearLR(torch::optim::Optimizer& optimizer, const LinearOptions& options)
      : LRScheduler(optimizer), options_(options) {
    if (!(options.start_factor > 0 && options.start_factor <= 1))
      raise<ConfigError>("linear_lr: found start_factor {}, expected more than 0 and at most 1.", options.start_factor);
    if (!(options.end_factor >= 0 && options.end_factor <= 1))
      raise<ConfigError>("linear_lr: found end_factor {}, expected a number from 0 to 1.", options.end_factor);
    if (options.total_iters < 1)
      raise<ConfigError>("linear_lr: found total_iters {}, expected at least 1.", options.total_iters);
  }

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    state.insert("start_factor", options_.start_factor);
    state.insert("end_factor", options_.end_factor);
    state.insert("total_iters", options_.total_iters);
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override {
    const auto& [start, end, total] = options_;
    if (last_epoch_ > total) return current_lrs();
    const double factor = last_epoch_ == 0
                              ? start
                              : 1.0 + (end - start) / (static_cast<double>(total) * start +
                                                       static_cast<double>(last_epoch_ - 1) * (end - start));
    return each(current_lrs(), [&](double lr) { return lr * factor; });
  }
  std::vector<double> first_lrs() override {
    return each(base_lrs_, [&](double lr) { return lr * options_.start_factor; });
  }

 private:
  LinearOptions options_;
};

class CosineAnnealingLR : public LRScheduler {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, int64_t T_max, double eta_min)
      : LRScheduler(optimizer), half_wave_(T_max), eta_min_(eta_min) {
    if (T_max < 1) raise<ConfigError>("cosine_annealing_lr: found T_max {}, expected at least 1.", T_max);
  }

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    state.insert("T_max", half_wave_);
    state.insert("eta_min", eta_min_);
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override {
    auto lrs = current_lrs();
    if (last_epoch_ == 0) return lrs;
    for (size_t i = 0; i < lrs.size(); ++i) {
      // At the bottom of a wave there is nothing that a factor could raise again.
      if ((last_epoch_ - 1 - half_wave_) % (2 * half_wave_) == 0)
        lrs[i] += (base_lrs_[i] - eta_min_) * (1 - cosine(1)) / 2;
      else lrs[i] = (1 + cosine(last_epoch_)) / (1 + cosine(last_epoch_ - 1)) * (lrs[i] - eta_min_) + eta_min_;
    }
    return lrs;
  }
  std::vector<double> first_lrs() override { return base_lrs_; }

 private:
  double cosine(int64_t step) const {
    return std::cos(std::numbers::pi * static_cast<double>(step) / static_cast<double>(half_wave_));
  }

  int64_t half_wave_;
  double eta_min_;
};

}  // namespace

Scheduler exponential_lr(torch::optim::Optimizer& optimizer, double gamma) {
  return Scheduler(std::make_shared<ExponentialLR>(optimizer, gamma));
}

Scheduler multi_step_lr(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& milestones, double gamma) {
  return Scheduler(std::make_shared<MultiStepLR>(optimizer, milestones, gamma));
}

Scheduler linear_lr(torch::optim::Optimizer& optimizer, const LinearOptions& options) {
  return Scheduler(std::make_shared<LinearLR>(optimizer, options));
}

Scheduler cosine_annealing_lr(torch::optim::Optimizer& optimizer, int64_t T_max, double eta_min) {
  return Scheduler(std::make_shared<CosineAnnealingLR>(optimizer, T_max, eta_min));
}

}  // namespace accelerate::optim
