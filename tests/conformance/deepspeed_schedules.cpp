// DeepSpeed's schedules: rates, and betas of its one cycle, after construction and after each step; states; errors.
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "accelerate/optim.hpp"
#include "optim/ivalue_access.hpp"
#include "runner.hpp"

namespace conformance::deepspeed_schedules_cases {
namespace {

using namespace accelerate::optim;

/// The options' types refuse such values, as DeepSpeed does when it looks at them.
struct WrongType : accelerate::ConfigError {
  using ConfigError::ConfigError;
};

int64_t whole(const json& value) {
  if (!value.is_number_integer()) throw WrongType("expected a whole number, found " + value.dump());
  return value.get<int64_t>();
}
PerGroup per_group(const json& value) {
  if (value.is_array()) return value.get<std::vector<double>>();
  return value.get<double>();
}

/// Reads params into options: unknown names are errors of the cases.
class Params {
 public:
  explicit Params(const json& params) : left_(params) {}
  template <class Option, class Read> void operator()(const char* name, Option& option, const Read& read) {
    const auto at = left_.find(name);
    if (at == left_.end()) return;
    if constexpr (requires { option.reset(); }) {
      if (at->is_null()) option.reset();
      else option = read(*at);
    } else {
      option = read(*at);
    }
    left_.erase(at);
  }
  void end() const {
    if (!left_.empty()) throw std::runtime_error("the runner knows no param " + left_.dump());
  }

 private:
  json left_;
};

double number(const json& value) { return value.get<double>(); }
bool boolean(const json& value) { return value.get<bool>(); }
std::string text(const json& value) { return value.get<std::string>(); }

template <class Options> void warmup_params(Params& params, Options& o) {
  params("warmup_num_steps", o.warmup_num_steps, whole), params("warmup_type", o.warmup_type, text);
  params("last_batch_iteration", o.last_batch_iteration, whole);
  if constexpr (requires { o.warmup_min_lr; }) {
    params("warmup_min_lr", o.warmup_min_lr, per_group), params("warmup_max_lr", o.warmup_max_lr, per_group);
  }
  if constexpr (requires { o.total_num_steps; }) params("total_num_steps", o.total_num_steps, whole);
}

DeepSpeedOneCycleOptions one_cycle_params(Params& params) {
  DeepSpeedOneCycleOptions o{.cycle_min_lr = 0, .cycle_max_lr = 0};
  std::optional<PerGroup> least, most;
  params("cycle_min_lr", least, per_group), params("cycle_max_lr", most, per_group);
  if (!least || !most) throw WrongType("cycle_min_lr and cycle_max_lr are needed");  // there is no making one without
  o.cycle_min_lr = *least, o.cycle_max_lr = *most;
  params("decay_lr_rate", o.decay_lr_rate, number);
  params("cycle_first_step_size", o.cycle_first_step_size, number);
  params("cycle_second_step_size", o.cycle_second_step_size, number);
  params("cycle_first_stair_count", o.cycle_first_stair_count, whole);
  params("cycle_second_stair_count", o.cycle_second_stair_count, whole);
  params("decay_step_size", o.decay_step_size, number), params("cycle_momentum", o.cycle_momentum, boolean);
  params("cycle_min_mom", o.cycle_min_mom, per_group), params("cycle_max_mom", o.cycle_max_mom, per_group);
  params("decay_mom_rate", o.decay_mom_rate, number), params("last_batch_iteration", o.last_batch_iteration, whole);
  return o;
}

Scheduler make(const std::string& name, const json& given, torch::optim::Optimizer& optimizer) {
  Params params(given);
  const auto made = [&]() -> Scheduler {
    if (name == "WarmupLR") {
      WarmupLROptions o;
      warmup_params(params, o);
      return warmup_lr(optimizer, o);
    }
    if (name == "WarmupDecayLR") {
      WarmupDecayLROptions o;
      warmup_params(params, o);
      return warmup_decay_lr(optimizer, o);
    }
    if (name == "WarmupCosineLR") {
      WarmupCosineLROptions o;
      warmup_params(params, o);
      params("warmup_min_ratio", o.warmup_min_ratio, number), params("cos_min_ratio", o.cos_min_ratio, number);
      return warmup_cosine_lr(optimizer, o);
    }
    if (name == "LRRangeTest") {
      LRRangeTestOptions o;
      params("lr_range_test_min_lr", o.lr_range_test_min_lr, per_group);
      params("lr_range_test_step_size", o.lr_range_test_step_size, whole);
      params("lr_range_test_step_rate", o.lr_range_test_step_rate, number);
      params("lr_range_test_staircase", o.lr_range_test_staircase, boolean);
      params("last_batch_iteration", o.last_batch_iteration, whole);
      return lr_range_test(optimizer, o);
    }
    if (name == "OneCycle") return deepspeed_one_cycle(optimizer, one_cycle_params(params));
    throw std::runtime_error("no such schedule: " + name);
  }();
  params.end();
  return made;
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> optimizer_with(const std::vector<double>& lrs, const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : lrs)
    groups.emplace_back(std::vector<at::Tensor>{torch::zeros({1}, torch::requires_grad())},
                        std::make_unique<Options>(Options(options).lr(lr)));
  return std::make_unique<Optimizer>(groups, options);
}
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind, const std::vector<double>& lrs) {
  if (kind == "adam") return optimizer_with<torch::optim::Adam>(lrs, torch::optim::AdamOptions(1e-3));
  return optimizer_with<torch::optim::SGD>(lrs, torch::optim::SGDOptions(1e-3).momentum(0.9));
}

/// The cases' answer for one schedule, or {"error": …}.
json trace_of(const json& row) {
  const auto fresh = [&] { return make_optimizer(row[3], row[2].get<std::vector<double>>()); };
  const bool with_betas = row[3] == "adam" && row[0] == "OneCycle";
  json lrs = json::array(), betas = json::array(), state;
  std::string what;
  const bool failed = throws_error(
      [&] {
        auto optimizer = fresh();
        std::optional<Scheduler> schedule = make(row[0], row[1], *optimizer);
        const auto note = [&] {
          json now = json::array(), now_betas = json::array();
          for (const auto& group : optimizer->param_groups()) {
            now.push_back(group.options().get_lr());
            if (!with_betas) continue;
            const auto [one, two] = static_cast<const torch::optim::AdamOptions&>(group.options()).betas();
            now_betas.push_back({one, two});
          }
          lrs.push_back(now), betas.push_back(now_betas);
        };
        note();
        for (int64_t i = 0; i < row[4].get<int64_t>(); ++i) {
          if (row[5] == i) {
            const auto saved = schedule->state_dict();
            auto next = fresh();
            schedule = make(row[0], row[1], *next);
            schedule->load_state_dict(saved);
            optimizer = std::move(next);
          }
          schedule->step();
          note();
        }
        for (const auto& entry : schedule->state_dict().toGenericDict())
          state[entry.key().toStringRef()] = entry.value().toInt();
      },
      &what);
  if (failed) return {{"error", what}};
  json found{{"lr", lrs}, {"state", state}};
  if (with_betas) found["betas"] = betas;
  return found;
}

/// Within the last bits of a double.
bool same(const json& found, const json& expected) {
  if (expected.is_number() && found.is_number()) {
    const double wanted = expected.get<double>();
    return std::abs(found.get<double>() - wanted) <= 1e-15 * std::abs(wanted);
  }
  if (expected.is_structured() && found.is_structured() && expected.size() == found.size()) {
    for (const auto& [key, value] : expected.items()) {
      const auto other = found.is_array() ? found.at(std::stoul(key)) : found.value(key, json());
      if (!same(other, value)) return false;
    }
    return true;
  }
  return found == expected;
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases"))
    report.guarded(row, [&] {
      const json expected = row.back(), found = trace_of(row);
      const auto detail = [&] { return row.dump() + "\n    found " + found.dump(); };
      if (expected.contains("error")) return report.check(row, found.contains("error"), detail);
      const auto type = row[1].value("warmup_type", "log");
      if (type != "log" && type != "linear") {
        const bool named = found.contains("error") && found["error"].get<std::string>().find(type) != std::string::npos;
        if (named) return report.differs(row, "DeepSpeed's schedules refuse a warmup_type that is unknown");
      }
      report.check(row, same(found, expected), detail);
    });
}

const Registration registration("deepspeed_schedules", {run});

}  // namespace
}  // namespace conformance::deepspeed_schedules_cases
