// DeepSpeed's schedules beyond its own cases (tests/conformance/cases/deepspeed_schedules.json): versions, errors, what
// they drive and hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "accelerate/optim.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "optim/ivalue_access.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::optim;
using support::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Two groups, with rates 0.1 and 0.3.
template <class Optimizer = torch::optim::Adam, class Options = torch::optim::AdamOptions>
std::unique_ptr<Optimizer> two_groups() {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : {0.1, 0.3})
    groups.emplace_back(std::vector<at::Tensor>{torch::zeros(2, torch::requires_grad())},
                        std::make_unique<Options>(Options(lr)));
  return std::make_unique<Optimizer>(groups, Options(1e-3));
}

std::vector<double> rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (const auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

/// The first group's rate at the beginning and after each of the steps.
std::vector<double> first_rates(const Scheduler& schedule, int steps) {
  std::vector<double> lrs{rates(schedule.optimizer())[0]};
  while (steps-- > 0) schedule.step(), lrs.push_back(rates(schedule.optimizer())[0]);
  return lrs;
}

c10::IValue state_of(int64_t last_batch_iteration) {
  Dict state = make_dict();
  state.insert("last_batch_iteration", last_batch_iteration);
  return state;
}

TEST(DeepSpeedSchedules, UnknownWarmupTypesAreRefusedWithTheNearest) {
  const auto adam = two_groups();
  EXPECT_THAT(message_of<ConfigError>([&] { warmup_lr(*adam, {.warmup_type = "liner"}); }),
              AllOf(HasSubstr("'liner'"), HasSubstr("did you mean linear?")));
  EXPECT_THAT(message_of<ConfigError>([&] { warmup_decay_lr(*adam, {.total_num_steps = 9, .warmup_type = "cosine"}); }),
              AllOf(HasSubstr("warmup_decay_lr"), HasSubstr("log, linear"), testing::Not(HasSubstr("did you mean"))));
  EXPECT_THAT(message_of<ConfigError>([&] { warmup_cosine_lr(*adam, {.total_num_steps = 9, .warmup_type = "Log "}); }),
              HasSubstr("did you mean log?"));
  EXPECT_THAT(rates(*adam), ElementsAre(0.1, 0.3)) << "what is refused changes nothing";
}

TEST(DeepSpeedSchedules, OlderVersionsActAsTheyDid) {
  // Without warmup_max_lr all groups had the first one's rate.
  for (const auto& [version, second] : std::vector<std::pair<std::string, double>>{
           {"", 0.3}, {"0.19.8", 0.3}, {"0.19.4", 0.3}, {"1.0.0", 0.3}, {"0.19.3", 0.1}, {"0.9.5", 0.1}}) {
    const auto adam = two_groups();
    const auto schedule = warmup_lr(*adam, {.warmup_num_steps = 2, .as_of_version = version});
    for (int i = 0; i < 4; ++i) schedule.step();
    EXPECT_THAT(rates(*adam), ElementsAre(0.1, second)) << version;
  }
  // No steps of warm-up counted as two.
  const auto after = [&](int64_t steps, const std::string& version) {
    const auto adam = two_groups();
    return first_rates(
        warmup_lr(*adam,
                  {.warmup_max_lr = 1.0, .warmup_num_steps = steps, .warmup_type = "linear", .as_of_version = version}),
        3);
  };
  EXPECT_THAT(after(-3, "0.19.5"), ElementsAre(0, 0, 0.5, 1));
  EXPECT_EQ(after(0, "0.19.5"), after(2, ""));
  EXPECT_THAT(message_of<ConfigError>([&] { after(0, "0.19.6"); }), HasSubstr("warmup_num_steps 0"));
  const auto adam = two_groups();
  EXPECT_NO_THROW(warmup_decay_lr(*adam, {.total_num_steps = 9, .warmup_num_steps = 0, .as_of_version = "0.19.5"}));
  EXPECT_THROW(warmup_decay_lr(*adam, {.total_num_steps = 9, .warmup_num_steps = 0}), ConfigError);
  // The cosine went on, up again.
  const auto cosine = [&](const std::string& version) {
    const auto fresh = two_groups();
    return first_rates(
               warmup_cosine_lr(
                   *fresh, {.total_num_steps = 4, .warmup_num_steps = 2, .cos_min_ratio = 0, .as_of_version = version}),
               6)
        .back();
  };
  EXPECT_EQ(cosine("0.19.4"), 0);
  EXPECT_NEAR(cosine("0.19.3"), 0.1, 1e-12);
  // Stairs had no effect, lists were refused.
  const auto middle = [&](const std::string& version) {
    const auto fresh = two_groups();
    return first_rates(deepspeed_one_cycle(*fresh, {.cycle_min_lr = 0,
                                                    .cycle_max_lr = 1,
                                                    .cycle_first_step_size = 4,
                                                    .cycle_first_stair_count = 2,
                                                    .as_of_version = version}),
                       3)
        .back();
  };
  EXPECT_EQ(middle("0.19.4"), 0.5);
  EXPECT_EQ(middle("0.19.3"), 0.75);
  const auto with_list = [&](const std::string& version) {
    const auto fresh = two_groups();
    deepspeed_one_cycle(*fresh, {.cycle_min_lr = {0.1, 0.2}, .cycle_max_lr = 1, .as_of_version = version});
  };
  EXPECT_NO_THROW(with_list("0.19.6"));
  EXPECT_THAT(message_of<ConfigError>([&] { with_list("0.19.5"); }), HasSubstr("a list in cycle_min_lr"));
  for (const char* const wrong : {"0.19", "new", "0.19.8rc1", "0.-1.2", "0.19.8.1"})
    EXPECT_THAT(message_of<ConfigError>([&] { warmup_lr(*adam, {.as_of_version = wrong}); }),
                HasSubstr(std::string("'") + wrong + "'"));
}

TEST(DeepSpeedSchedules, StatesAreAnIndexAndResumeAnywhere) {
  const std::vector<std::function<Scheduler(torch::optim::Optimizer&)>> makers{
      [](auto& o) {
        return warmup_lr(o, {.warmup_min_lr = {0.01, 0.02}, .warmup_num_steps = 4});
      },
      [](auto& o) { return warmup_decay_lr(o, {.total_num_steps = 9, .warmup_num_steps = 4}); },
      [](auto& o) {
        return warmup_cosine_lr(o, {.total_num_steps = 9, .warmup_min_ratio = 0.1, .warmup_num_steps = 4});
      },
      [](auto& o) {
        return deepspeed_one_cycle(o, {.cycle_min_lr = 0.1,
                                       .cycle_max_lr = 1,
                                       .decay_lr_rate = 1,
                                       .cycle_first_step_size = 3,
                                       .decay_step_size = 2});
      },
      [](auto& o) { return lr_range_test(o, {.lr_range_test_step_size = 3}); }};
  for (const auto& make : makers) {
    const auto all = two_groups();
    const auto whole = make(*all);
    for (int64_t step = 0; step < 10; ++step) {
      const auto state = whole.state_dict().toGenericDict();
      ASSERT_EQ(state.size(), 1U);
      EXPECT_EQ(state.at("last_batch_iteration").toInt(), step - 1);
      const auto part = two_groups();
      const auto resumed = make(*part);
      resumed.load_state_dict(state);
      EXPECT_EQ(resumed.get_last_lr(), whole.get_last_lr()) << step;
      EXPECT_EQ(resumed.last_epoch(), whole.last_epoch());
      EXPECT_EQ(resumed.step_count(), whole.step_count());
      resumed.step(), whole.step();
      EXPECT_EQ(rates(*part), rates(*all)) << step;
    }
  }
  const auto adam = two_groups();
  const auto schedule = makers[0](*adam);
  EXPECT_THAT(message_of<CheckpointError>([&] { schedule.load_state_dict(state_of(-2)); }), HasSubstr("-2"));
  EXPECT_THAT(message_of<CheckpointError>([&] { schedule.load_state_dict(make_dict()); }),
              HasSubstr("last_batch_iteration"));
  EXPECT_EQ(schedule.last_epoch(), 0) << "what is refused changes nothing";
}

TEST(DeepSpeedSchedules, GoOnAfterLastBatchIteration) {
  const auto adam = two_groups();
  const auto schedule = lr_range_test(*adam, {.lr_range_test_min_lr = 1,
                                              .lr_range_test_step_size = 2,
                                              .lr_range_test_step_rate = 3,
                                              .last_batch_iteration = 4});
  EXPECT_THAT(rates(*adam), ElementsAre(0.1, 0.3)) << "rates come with the optimizer";
  EXPECT_EQ(schedule.state_dict().toGenericDict().at("last_batch_iteration").toInt(), 4);
  schedule.step();
  EXPECT_THAT(rates(*adam), ElementsAre(10, 10));
  const auto cycle = deepspeed_one_cycle(
      *adam, {.cycle_min_lr = 0, .cycle_max_lr = 1, .cycle_first_step_size = 4, .last_batch_iteration = 2});
  EXPECT_THAT(rates(*adam), ElementsAre(10, 10));
  EXPECT_EQ(static_cast<torch::optim::AdamOptions&>(adam->param_groups()[0].options()).betas(), std::tuple(0.9, 0.999));
  cycle.step();
  EXPECT_THAT(rates(*adam), ElementsAre(1, 1));
  EXPECT_EQ(static_cast<torch::optim::AdamOptions&>(adam->param_groups()[0].options()).betas(), std::tuple(0.8, 0.99));
  EXPECT_THROW(warmup_lr(*adam, {.last_batch_iteration = -2}), ConfigError);
  EXPECT_THROW(warmup_decay_lr(*adam, {.total_num_steps = 9, .last_batch_iteration = -2}), ConfigError);
  EXPECT_THROW(warmup_cosine_lr(*adam, {.total_num_steps = 9, .last_batch_iteration = -2}), ConfigError);
}

TEST(DeepSpeedSchedules, MoveBetasOrLeaveThem) {
  const auto betas_after = [](auto& optimizer, bool cycle_momentum, int steps) {
    const auto schedule = deepspeed_one_cycle(optimizer, {.cycle_min_lr = 0,
                                                          .cycle_max_lr = 1,
                                                          .cycle_first_step_size = 2,
                                                          .decay_step_size = 1,
                                                          .cycle_momentum = cycle_momentum,
                                                          .cycle_min_mom = {0.5, 0.7},
                                                          .cycle_max_mom = 0.9,
                                                          .decay_mom_rate = 0.1});
    while (steps-- > 0) schedule.step();
    std::vector<std::tuple<double, double>> betas;
    for (auto& group : optimizer.param_groups())
      betas.push_back(static_cast<torch::optim::AdamOptions&>(group.options()).betas());
    return betas;
  };
  const auto after = [&](bool cycle_momentum, int steps) {
    const auto adam = two_groups();
    return betas_after(*adam, cycle_momentum, steps);
  };
  EXPECT_THAT(after(true, 0), ElementsAre(std::tuple(0.5, 0.99), std::tuple(0.7, 0.99)));
  EXPECT_THAT(after(true, 2), ElementsAre(std::tuple(0.5, 0.99), std::tuple(0.7, 0.99)));
  EXPECT_THAT(after(true, 4), ElementsAre(std::tuple(0.9, 0.99), std::tuple(0.9, 0.99)));
  EXPECT_NEAR(std::get<0>(after(true, 6)[0]), 0.9 * 1.2, 1e-12) << "after the cycle they grow";
  EXPECT_THAT(after(false, 2), ElementsAre(std::tuple(0.9, 0.999), std::tuple(0.9, 0.999)));
  // An optimizer without betas keeps its momentum.
  const auto sgd = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  for (auto& group : sgd->param_groups()) static_cast<torch::optim::SGDOptions&>(group.options()).momentum(0.6);
  const auto schedule = deepspeed_one_cycle(*sgd, {.cycle_min_lr = 0, .cycle_max_lr = 1, .cycle_first_step_size = 2});
  schedule.step();
  EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(sgd->param_groups()[0].options()).momentum(), 0.6);
  EXPECT_THAT(rates(*sgd), ElementsAre(0.5, 0.5));
}

/// Five of seven steps are a share that, in a double, lies a last bit below the top.
TEST(DeepSpeedSchedules, StairsReachTheTop) {
  const auto adam = two_groups();
  EXPECT_THAT(first_rates(deepspeed_one_cycle(*adam, {.cycle_min_lr = 0,
                                                      .cycle_max_lr = 1,
                                                      .cycle_first_step_size = 5,
                                                      .cycle_second_step_size = 2,
                                                      .cycle_first_stair_count = 2}),
                          7),
              ElementsAre(0, 0, 0, 0.5, 0.5, 1, 0.5, 0));
}

TEST(DeepSpeedSchedules, RefuseWhatCannotBe) {
  const auto adam = two_groups();
  EXPECT_THAT(message_of<ConfigError>([&] { warmup_decay_lr(*adam, {}); }), HasSubstr("total_num_steps"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                warmup_lr(*adam, {.warmup_min_lr = {0.1, 0.2, 0.3}});
              }),
              AllOf(HasSubstr("3 values in warmup_min_lr"), HasSubstr("a list of 2")));
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { deepspeed_one_cycle(*adam, {.cycle_min_lr = 0, .cycle_max_lr = 1, .cycle_max_mom = {0.9}}); }),
              HasSubstr("cycle_max_mom"));
  EXPECT_THROW(
      deepspeed_one_cycle(*adam, {.cycle_min_lr = 0, .cycle_max_lr = 1, .cycle_first_step_size = std::nan("")}),
      ConfigError);
  EXPECT_THROW(lr_range_test(*adam, {.lr_range_test_step_size = -1}), ConfigError);
}

TEST(DeepSpeedSchedules, StandInASequence) {
  const auto adam = two_groups();
  const auto first = constant_schedule(*adam);
  const auto second = warmup_lr(*adam, {.warmup_num_steps = 2, .warmup_type = "linear"});
  const auto both = sequential_lr(*adam, {first, second}, {3});
  for (int i = 0; i < 3; ++i) both.step();
  EXPECT_THAT(rates(*adam), ElementsAre(0, 0)) << "it begins anew";
  for (int i = 0; i < 3; ++i) both.step();
  EXPECT_THAT(rates(*adam), ElementsAre(0.1, 0.3)) << "for rates as they were before all schedules";
}

}  // namespace
