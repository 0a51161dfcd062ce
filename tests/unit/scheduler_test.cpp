#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "optim/ivalue_access.hpp"

using namespace accelerate;

namespace {

using namespace accelerate::optim;
using Json = nlohmann::json;

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind = "SGD") {
  const auto groups = [](auto options) {
    using Options = decltype(options);
    std::vector<torch::optim::OptimizerParamGroup> result;
    result.emplace_back(std::vector<at::Tensor>{torch::zeros(2, torch::requires_grad())},
                        std::make_unique<Options>(options));
    result.emplace_back(std::vector<at::Tensor>{torch::zeros(3, torch::requires_grad())},
                        std::make_unique<Options>(Options(options).lr(0.03)));
    return result;
  };
  if (kind == "AdamW") {
    const auto options = torch::optim::AdamWOptions(0.1);
    return std::make_shared<torch::optim::AdamW>(groups(options), options);
  }
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  return std::make_shared<torch::optim::SGD>(groups(options), options);
}

double momentum_of(torch::optim::OptimizerParamGroup& group) {
  if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&group.options())) return std::get<0>(adamw->betas());
  return static_cast<torch::optim::SGDOptions&>(group.options()).momentum();
}

using ScheduleMaker = std::function<Scheduler(torch::optim::Optimizer&)>;

const std::map<std::string, ScheduleMaker>& makers() {
  using Opt = torch::optim::Optimizer&;
  static const std::map<std::string, ScheduleMaker> all{
      {"constant", [](Opt o) { return constant_schedule(o); }},
      {"constant_warmup", [](Opt o) { return constant_schedule_with_warmup(o, 7); }},
      {"linear", [](Opt o) { return linear_schedule_with_warmup(o, 7, 30); }},
      {"linear_no_warmup", [](Opt o) { return linear_schedule_with_warmup(o, 0, 30); }},
      {"linear_all_warmup", [](Opt o) { return linear_schedule_with_warmup(o, 10, 10); }},
      {"cosine", [](Opt o) { return cosine_schedule_with_warmup(o, 7, 30); }},
      {"cosine_two_waves", [](Opt o) { return cosine_schedule_with_warmup(o, 3, 30, 2.0); }},
      {"cosine_restarts", [](Opt o) { return cosine_with_hard_restarts_schedule_with_warmup(o, 5, 29, 3); }},
      {"polynomial", [](Opt o) { return polynomial_decay_schedule_with_warmup(o, 4, 28); }},
      {"polynomial_power",
       [](Opt o) { return polynomial_decay_schedule_with_warmup(o, 4, 28, {.lr_end = 1e-3, .power = 2.5}); }},
      {"inverse_sqrt", [](Opt o) { return inverse_sqrt_schedule(o, 6); }},
      {"inverse_sqrt_timescale", [](Opt o) { return inverse_sqrt_schedule(o, 6, 50); }},
      {"inverse_sqrt_no_warmup", [](Opt o) { return inverse_sqrt_schedule(o, 0); }},
      {"lambda", [](Opt o) { return lambda_lr(o, [](int64_t n) { return std::pow(0.95, n); }); }},
      {"lambda_per_group",
       [](Opt o) {
         return lambda_lr(o, std::vector<LambdaFactor>{[](int64_t n) { return 1.0 / static_cast<double>(n + 1); },
                                                       [](int64_t n) { return 1.0 - static_cast<double>(n) / 100; }});
       }},
      {"one_cycle", [](Opt o) { return one_cycle(o, {.max_lr = {0.5}, .total_steps = 32}); }},
      {"one_cycle_linear",
       [](Opt o) {
         return one_cycle(o, {.max_lr = {0.5, 0.2},
                              .epochs = 4,
                              .steps_per_epoch = 8,
                              .pct_start = 0.4,
                              .anneal_strategy = AnnealStrategy::linear});
       }},
      {"one_cycle_three_phase",
       [](Opt o) { return one_cycle(o, {.max_lr = {0.5}, .total_steps = 32, .three_phase = true}); }},
      {"one_cycle_no_momentum",
       [](Opt o) { return one_cycle(o, {.max_lr = {0.5}, .total_steps = 32, .cycle_momentum = false}); }},
      {"exponential", [](Opt o) { return exponential_lr(o, 0.9); }},
      {"multi_step",
       [](Opt o) {
         return multi_step_lr(o, {3, 3, 11, 20}, 0.5);
       }},
      {"linear_lr", [](Opt o) { return linear_lr(o); }},
      {"linear_lr_down",
       [](Opt o) { return linear_lr(o, {.start_factor = 1.0, .end_factor = 0.1, .total_iters = 17}); }},
      {"cosine_annealing", [](Opt o) { return cosine_annealing_lr(o, 9, 1e-3); }},
      {"cosine_annealing_long", [](Opt o) { return cosine_annealing_lr(o, 40); }},
      {"warm_restarts", [](Opt o) { return cosine_annealing_warm_restarts(o, {.T_0 = 7}); }},
      {"warm_restarts_longer",
       [](Opt o) { return cosine_annealing_warm_restarts(o, {.T_0 = 4, .T_mult = 2, .eta_min = 1e-4}); }},
      {"cyclic",
       [](Opt o) {
         return cyclic_lr(o, {.base_lr = {0.01}, .max_lr = {0.1, 0.2}, .step_size_up = 5});
       }},
      {"cyclic_halved",
       [](Opt o) {
         return cyclic_lr(o, {.base_lr = {0.01, 0.02},
                              .max_lr = {0.1},
                              .step_size_up = 5,
                              .step_size_down = 3,
                              .mode = CyclicMode::triangular2});
       }},
      {"cyclic_exponential",
       [](Opt o) {
         return cyclic_lr(o, {.base_lr = {0.01},
                              .max_lr = {0.1},
                              .step_size_up = 4,
                              .mode = CyclicMode::exp_range,
                              .gamma = 0.97,
                              .cycle_momentum = false});
       }},
      {"cyclic_own_scale",
       [](Opt o) {
         return cyclic_lr(o, {.base_lr = {0.01},
                              .max_lr = {0.1},
                              .step_size_up = 4,
                              .scale_fn = [](double n) { return 1 / (n + 1); },
                              .scale_mode = ScaleMode::iterations});
       }},
      {"sequential",
       [](Opt o) {
         // Made in another order than they follow in: the rates that the optimizer had are those of the first that was
         // made.
         const auto second = cosine_annealing_lr(o, 20, 1e-4);
         return sequential_lr(o, {linear_lr(o, {.total_iters = 6}), second}, {6});
       }},
      {"sequential_of_all",
       [](Opt o) {
         return sequential_lr(
             o,
             {multi_step_lr(o, {0, 2}, 0.5), exponential_lr(o, 0.8), cosine_annealing_warm_restarts(o, {.T_0 = 3}),
              lambda_lr(o, [](int64_t n) { return std::pow(0.95, n); }),
              // Python's can't hold another one that begins later; it is as if its parts were there.
              sequential_lr(
                  o,
                  {linear_lr(o, {.total_iters = 2}), from_torch(o, std::make_shared<torch::optim::StepLR>(o, 2, 0.7))},
                  {3})},
             {4, 9, 15, 21});
       }},
      {"step", [](Opt o) { return from_torch(o, std::make_shared<torch::optim::StepLR>(o, 5, 0.7)); }},
      {"plateau",
       [](Opt o) {
         return reduce_lr_on_plateau(o, {.factor = 0.3, .patience = 2, .cooldown = 1, .min_lr = {1e-3, 1e-4}});
       }},
      {"plateau_max_abs",
       [](Opt o) {
         return reduce_lr_on_plateau(o,
                                     {.maximize = true, .patience = 1, .threshold = 0.05, .absolute_threshold = true});
       }},
  };
  return all;
}

const Json& cases() {
  static const Json all = [] {
    std::ifstream file(ACCELERATE_SOURCE_DIR "/tests/unit/fixtures/schedules.json");
    return Json::parse(file).at("cases");
  }();
  return all;
}

void expect_close(double found, double expected, const std::string& where) {
  EXPECT_LE(std::abs(found - expected), 1e-12 * std::abs(expected) + 1e-300)
      << where << ": found " << found << ", Python has " << expected;
}

TEST(Scheduler, EveryScheduleGivesPythonsRates) {
  ASSERT_EQ(cases().size(), makers().size());
  for (const Json& expected : cases()) {
    const auto name = expected["name"].get<std::string>();
    auto optimizer = make_optimizer(expected["optimizer"]);
    const Scheduler schedule = makers().at(name)(*optimizer);
    for (size_t step = 0; step < expected["rates"].size(); ++step) {
      if (step > 0)
        schedule.step(expected.contains("metrics") ? std::optional(expected["metrics"][step - 1].get<double>())
                                                   : std::nullopt);
      EXPECT_EQ(schedule.last_epoch(), static_cast<int64_t>(step)) << name;
      EXPECT_EQ(schedule.step_count(), static_cast<int64_t>(step + 1)) << name;
      for (size_t group = 0; group < 2; ++group) {
        const std::string where = name + " step " + std::to_string(step) + " group " + std::to_string(group);
        expect_close(optimizer->param_groups()[group].options().get_lr(), expected["rates"][step][group], where);
        expect_close(schedule.get_last_lr()[group], expected["rates"][step][group], where + " (get_last_lr)");
        if (expected.contains("momenta"))
          expect_close(momentum_of(optimizer->param_groups()[group]), expected["momenta"][step][group],
                       where + " (momentum)");
      }
    }
  }
}

TEST(Scheduler, StateHasPythonsKeysAndResumesAnywhere) {
  for (const Json& expected : cases()) {
    const auto name = expected["name"].get<std::string>();
    if (name == "step" || name == "sequential_of_all") continue;  // with LibTorch's own: see below
    auto first = make_optimizer(expected["optimizer"]);
    const Scheduler saved = makers().at(name)(*first);
    const auto metric = [&](size_t step) {
      return expected.contains("metrics") ? std::optional(expected["metrics"][step].get<double>()) : std::nullopt;
    };
    for (size_t step = 0; step < 13; ++step) saved.step(metric(step));
    const c10::IValue state = saved.state_dict();
    std::vector<std::string> keys;
    for (const auto& entry : state.toGenericDict()) keys.push_back(entry.key().toStringRef());
    std::sort(keys.begin(), keys.end());
    EXPECT_EQ(Json(keys), expected["state_keys"]) << name;

    auto second = make_optimizer(expected["optimizer"]);
    const Scheduler loaded = makers().at(name)(*second);
    loaded.load_state_dict(state);
    for (size_t group = 0; group < 2; ++group)
      second->param_groups()[group].options().set_lr(saved.get_last_lr()[group]);  // comes with the optimizer's state
    EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr()) << name;
    for (size_t step = 13; step < 32; ++step) {
      loaded.step(metric(step));
      for (size_t group = 0; group < 2; ++group)
        expect_close(second->param_groups()[group].options().get_lr(), expected["rates"][step + 1][group],
                     name + " resumed, step " + std::to_string(step));
    }
  }
}

TEST(Scheduler, TorchScheduleResumes) {
  auto first = make_optimizer(), second = make_optimizer();
  torch::optim::StepLR a(*first, 5, 0.7), b(*second, 5, 0.7);
  const Scheduler saved = from_torch(*first, a);
  for (int step = 0; step < 8; ++step) saved.step();
  const Scheduler loaded = from_torch(*second, b);
  loaded.load_state_dict(saved.state_dict());
  for (size_t group = 0; group < 2; ++group) second->param_groups()[group].options().set_lr(saved.get_last_lr()[group]);
  for (int step = 8; step < 20; ++step) {
    saved.step(), loaded.step();
    EXPECT_EQ(saved.get_last_lr(), loaded.get_last_lr());
  }
}

TEST(Scheduler, TorchPlateauStepsAndSaysThatItHasNoState) {
  auto optimizer = make_optimizer();
  const Scheduler schedule =
      from_torch(*optimizer, std::make_shared<torch::optim::ReduceLROnPlateauScheduler>(
                                 *optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5F, 1));
  for (double loss : {1.0, 1.0, 1.0, 1.0}) schedule.step(loss);
  EXPECT_NEAR(schedule.get_last_lr()[0], 0.05, 1e-9);
  EXPECT_THROW(schedule.step(), ConfigError);
  EXPECT_THROW(schedule.state_dict(), ConfigError);
}

TEST(Scheduler, WrongUseIsNamed) {
  auto optimizer = make_optimizer();
  EXPECT_THROW(lambda_lr(*optimizer, std::vector<LambdaFactor>{[](int64_t) { return 1.0; }}), ConfigError);
  EXPECT_THROW(polynomial_decay_schedule_with_warmup(*optimizer, 1, 2, {.lr_end = 0.2}), ConfigError);
  EXPECT_THROW(one_cycle(*optimizer, {.max_lr = {1.0}}), ConfigError);
  EXPECT_THROW(one_cycle(*optimizer, {.max_lr = {1.0, 2.0, 3.0}, .total_steps = 4}), ConfigError);
  EXPECT_THROW(one_cycle(*optimizer, {.max_lr = {1.0}, .total_steps = 0}), ConfigError);
  EXPECT_THROW(linear_lr(*optimizer, {.start_factor = 0}), ConfigError);
  EXPECT_THROW(linear_lr(*optimizer, {.end_factor = 1.5}), ConfigError);
  EXPECT_THROW(linear_lr(*optimizer, {.total_iters = 0}), ConfigError);
  EXPECT_THROW(cosine_annealing_lr(*optimizer, 0), ConfigError);
  EXPECT_THROW(cosine_annealing_warm_restarts(*optimizer, {.T_0 = 0}), ConfigError);
  EXPECT_THROW(cosine_annealing_warm_restarts(*optimizer, {.T_0 = 1, .T_mult = 0}), ConfigError);
  EXPECT_THROW(cyclic_lr(*optimizer, {.base_lr = {0.1}, .max_lr = {}}), ConfigError);
  EXPECT_THROW(cyclic_lr(*optimizer, {.base_lr = {0.1}, .max_lr = {1.0}, .step_size_up = 0}), ConfigError);
  EXPECT_THROW(sequential_lr(*optimizer, {}, {}), ConfigError);
  EXPECT_THROW(sequential_lr(*optimizer, {linear_lr(*optimizer)}, {1}), ConfigError);
  EXPECT_THROW(sequential_lr(*optimizer, {linear_lr(*optimizer), linear_lr(*optimizer), linear_lr(*optimizer)}, {4, 4}),
               ConfigError);
  EXPECT_THROW(sequential_lr(*optimizer, {reduce_lr_on_plateau(*optimizer)}, {}), ConfigError);
  auto another = make_optimizer();
  EXPECT_THROW(sequential_lr(*optimizer, {linear_lr(*another)}, {}), ConfigError);
  EXPECT_THROW(reduce_lr_on_plateau(*optimizer, {.factor = 1.0}), ConfigError);
  EXPECT_THROW(reduce_lr_on_plateau(*optimizer).step(), ConfigError);
  torch::optim::Adagrad adagrad(std::vector<at::Tensor>{torch::zeros(1, torch::requires_grad())},
                                torch::optim::AdagradOptions(0.1));
  EXPECT_THROW(one_cycle(adagrad, {.max_lr = {1.0}, .total_steps = 4}), ConfigError);
  EXPECT_THROW(cyclic_lr(adagrad, {.base_lr = {0.1}, .max_lr = {1.0}}), ConfigError);
  const Scheduler cycle = one_cycle(*optimizer, {.max_lr = {1.0}, .total_steps = 3});
  for (int step = 0; step < 3; ++step) cycle.step();
  EXPECT_THROW(cycle.step(), ConfigError);
}

TEST(Scheduler, BadStatesAreRefusedAndChangeNothing) {
  auto optimizer = make_optimizer();
  const Scheduler schedule = linear_schedule_with_warmup(*optimizer, 2, 10);
  schedule.step();
  const auto refuses = [&](const char* what, auto&& damage) {
    auto state = schedule.state_dict().toGenericDict().copy();
    damage(state);
    EXPECT_THROW(schedule.load_state_dict(state), CheckpointError) << what;
    EXPECT_EQ(schedule.last_epoch(), 1) << what;
  };
  refuses("missing key", [](Dict& s) { std::ignore = s.erase("last_epoch"); });
  refuses("wrong number of groups",
          [](Dict& s) { s.insert_or_assign("base_lrs", make_list(std::vector<double>{1.0})); });
  refuses("wrong type", [](Dict& s) { s.insert_or_assign("last_epoch", "seven"); });
  refuses("fraction", [](Dict& s) { s.insert_or_assign("last_epoch", 1.5); });
  EXPECT_THROW(schedule.load_state_dict(c10::IValue(3)), CheckpointError);
  const Scheduler cycle = one_cycle(*optimizer, {.max_lr = {1.0}, .total_steps = 5});
  EXPECT_THROW(one_cycle(*optimizer, {.max_lr = {1.0}, .total_steps = 6}).load_state_dict(cycle.state_dict()),
               CheckpointError);
}

// The cases of the reference's test_scheduler.py, for one process. Two and three ranks: tests/dist/optim_test.cpp.

class AcceleratedSchedulerTest : public ::testing::Test {
 protected:
  void SetUp() override { GradientState::reset(); }
  void TearDown() override { GradientState::reset(), AcceleratorState::reset(true); }
  at::Tensor weight = torch::zeros(2, torch::requires_grad());
  torch::optim::AdamW adamw{std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(1.0)};
  AcceleratedOptimizer optimizer{adamw};
  LambdaFactor tenth_less = [](int64_t n) { return 1.0 - static_cast<double>(n) / 10.0; };
};

TEST_F(AcceleratedSchedulerTest, StepsWithTheOptimizer) {
  const AcceleratedScheduler schedule(lambda_lr(adamw, tenth_less), {optimizer});
  EXPECT_EQ(&schedule.optimizer(), &adamw);
  optimizer.step(), schedule.step();
  EXPECT_DOUBLE_EQ(schedule.get_last_lr()[0], 0.9);
}

TEST_F(AcceleratedSchedulerTest, WaitsWhileGradientsAccumulate) {
  const AcceleratedScheduler schedule(lambda_lr(adamw, tenth_less), {optimizer});
  GradientState().set_sync_gradients(false);
  schedule.step();
  EXPECT_DOUBLE_EQ(schedule.get_last_lr()[0], 1.0);
  EXPECT_EQ(schedule.last_epoch(), 0);
  EXPECT_EQ(schedule.step_count(), 2) << "adjust_scheduler counts the step";
  GradientState().set_sync_gradients(true);
  schedule.step();
  EXPECT_EQ(schedule.last_epoch(), 1);
}

TEST_F(AcceleratedSchedulerTest, DoesNotCountWithoutAdjustScheduler) {
  GradientState gradients(GradientAccumulationPlugin{.num_steps = 2, .adjust_scheduler = false});
  const AcceleratedScheduler schedule(lambda_lr(adamw, tenth_less), {optimizer});
  gradients.set_sync_gradients(false);
  schedule.step();
  EXPECT_EQ(schedule.step_count(), 1);
}

TEST_F(AcceleratedSchedulerTest, IndependentOfTheOptimizerWhenToldSo) {
  const AcceleratedScheduler schedule(lambda_lr(adamw, tenth_less), {optimizer}, /*step_with_optimizer=*/false);
  GradientState().set_sync_gradients(false);
  schedule.step(), schedule.step();
  EXPECT_DOUBLE_EQ(schedule.get_last_lr()[0], 0.8);
}

TEST_F(AcceleratedSchedulerTest, OneCycleNeverPassesItsEnd) {
  const AcceleratedScheduler schedule(one_cycle(adamw, {.max_lr = {0.01}, .epochs = 1, .steps_per_epoch = 2}),
                                      {optimizer});
  for (int step = 0; step < 6; ++step) schedule.step();
  EXPECT_EQ(schedule.last_epoch(), 2);
}

TEST_F(AcceleratedSchedulerTest, PlateausSeeTheMetric) {
  const AcceleratedScheduler schedule(reduce_lr_on_plateau(adamw, {.factor = 0.5, .patience = 0}), {optimizer});
  for (const double metric : {3.0, 2.0, 2.5}) schedule.step(metric);
  EXPECT_DOUBLE_EQ(schedule.get_last_lr()[0], 0.5);
}

TEST_F(AcceleratedSchedulerTest, LinearScheduleEndsAtZeroUnderAccumulation) {
  for (int64_t num_steps : {1, 2, 4}) {
    GradientState::reset();
    GradientState gradients(GradientAccumulationPlugin{.num_steps = num_steps});
    torch::optim::SGD sgd(std::vector<at::Tensor>{weight}, torch::optim::SGDOptions(0.5));
    const AcceleratedScheduler schedule(linear_schedule_with_warmup(sgd, 0, 20), {AcceleratedOptimizer(sgd)});
    for (int64_t i = 0; i < 20 * num_steps; ++i) {
      if (i == 20 * num_steps - 1) {
        EXPECT_NE(schedule.get_last_lr()[0], 0.0);
      }
      gradients.set_sync_gradients((i + 1) % num_steps == 0);
      schedule.step();
    }
    EXPECT_EQ(schedule.get_last_lr()[0], 0.0) << num_steps;
  }
}

}  // namespace
