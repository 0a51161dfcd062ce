// The facade: what prepare makes of its arguments, mixed precision, clipping, metrics, triggers, state shared by
// several Accelerators, trackers.
#include <accelerate/accelerate.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::rank;
using support::world_size;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

using support::message_of;

namespace {

/// Alone, with fresh state.
struct AcceleratorTest : testing::Test {
  void SetUp() override {
    if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
    AcceleratorState::reset(true);
    GradientState::reset();
    torch::manual_seed(0);
  }
  void TearDown() override {
    AcceleratorState::reset(true);
    GradientState::reset();
  }
};

using Samples = std::vector<torch::data::Example<>>;
Samples samples(int64_t count) {
  Samples result;
  for (int64_t i = 0; i < count; ++i)
    result.emplace_back(torch::full({4}, 0.1 * static_cast<double>(i)), torch::tensor(i));
  return result;
}

}  // namespace

// accelerate.hpp has all of the library: these come from its last corners.
static_assert(std::is_class_v<LaunchOptions> && std::is_class_v<ModelHook>);

TEST_F(AcceleratorTest, AloneIsMainAndLast) {
  Accelerator accelerator;
  EXPECT_EQ(accelerator.num_processes(), 1);
  EXPECT_TRUE(accelerator.is_main_process() && accelerator.is_local_main_process() && accelerator.is_last_process());
  EXPECT_FALSE(accelerator.use_distributed());
  EXPECT_EQ(accelerator.distributed_type(), DistributedType::NO);
  EXPECT_EQ(accelerator.mixed_precision(), "no");
  int calls = 0;
  accelerator.on_main_process([&] { ++calls; });
  accelerator.on_last_process([&] { ++calls; });
  accelerator.on_process([&] { ++calls; }, 0);
  accelerator.on_process([&] { ++calls; }, 1);
  accelerator.on_local_process([&] { ++calls; }, 0);
  EXPECT_EQ(calls, 4);
  accelerator.wait_for_everyone();
  { auto first = accelerator.main_process_first(); }
  testing::internal::CaptureStdout();
  accelerator.print("loss", 0.5, "step", 3);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "loss 0.5 step 3\n");
}

TEST_F(AcceleratorTest, PrepareKeepsTheOrderAndWhatItDoesNotKnow) {
  Accelerator accelerator;
  torch::nn::Linear net(4, 2);
  auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
  auto schedule = optim::lambda_lr(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
  // The schedule stands before the optimizer that it follows.
  auto [sched, loader, number, model, text, opt] = accelerator.prepare(
      schedule, data::DataLoader(samples(6), {.batch_size = 2}), 7, net, std::string("as it is"), optimizer);
  static_assert(std::is_same_v<decltype(number), int> && std::is_same_v<decltype(text), std::string>);
  static_assert(std::is_same_v<decltype(opt), AcceleratedOptimizer> &&
                std::is_same_v<decltype(sched), AcceleratedScheduler>);
  EXPECT_EQ(number, 7);
  EXPECT_EQ(text, "as it is");
  EXPECT_EQ(model->weight.unsafeGetTensorImpl(), net->weight.unsafeGetTensorImpl());
  EXPECT_EQ(&opt.optimizer(), &optimizer);
  for (auto& batch : loader) {
    accelerator.backward(model(batch.data).mean());
    opt.step();
    sched.step();
    opt.zero_grad();
  }
  EXPECT_EQ(sched.last_epoch(), 3);

  // Prepared objects come back as they are; one argument comes back bare.
  auto [again, opt_again] = accelerator.prepare(model, opt);
  EXPECT_TRUE(again.core() == model.core());
  EXPECT_TRUE(opt_again == opt);
  auto same_module = accelerator.prepare(net);
  EXPECT_TRUE(same_module.core() == model.core()) << "the same module is prepared once";
  // Shared pointers, unique pointers and temporaries.
  auto pointer = std::make_shared<torch::nn::LinearImpl>(4, 1);
  auto [by_pointer, owned] = accelerator.prepare(pointer, std::make_unique<torch::optim::Adam>(pointer->parameters()));
  accelerator.backward(by_pointer(torch::ones({1, 4})).sum());
  owned.step();
  EXPECT_TRUE(accelerator.unwrap_model(by_pointer) == pointer);
  accelerator.free_memory();
  EXPECT_FALSE(accelerator.prepare(net).core() == model.core()) << "what was prepared is forgotten";
}

TEST_F(AcceleratorTest, ReferenceAccumulationExampleEndsAt204) {
  Accelerator accelerator({.gradient_accumulation_steps = 4});
  Samples points;
  for (int i = 1; i <= 8; ++i) points.emplace_back(torch::full({1}, 1.0 * i), torch::full({1}, 2.0 * i));
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false)), plain(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::zeros_(net->weight);
  torch::nn::init::zeros_(plain->weight);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.02), data::DataLoader(points, {.batch_size = 2}));
  std::vector<bool> synced;
  for (auto& batch : loader) {
    auto scope = accelerator.accumulate(model);
    accelerator.backward(torch::mse_loss(model(batch.data), batch.target));
    optimizer.step();
    optimizer.zero_grad();
    synced.push_back(accelerator.sync_gradients());
  }
  EXPECT_EQ(synced, (std::vector<bool>{false, false, false, true}));
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.02);
  const auto all = data::default_collate(points);
  torch::mse_loss(plain(all.data), all.target).backward();
  plain_optimizer.step();
  char with[16], without[16];
  std::snprintf(with, sizeof(with), "%.5f", net->weight.item<double>());
  std::snprintf(without, sizeof(without), "%.5f", plain->weight.item<double>());
  EXPECT_STREQ(with, "2.04000");
  EXPECT_STREQ(without, "2.04000");
}

TEST_F(AcceleratorTest, Bf16RunsLinearLayersInBf16AndGivesFp32) {
  Accelerator accelerator({.mixed_precision = "bf16"});
  EXPECT_EQ(accelerator.mixed_precision(), "bf16");
  EXPECT_FALSE(accelerator.scaler());
  torch::nn::Linear net(64, 64);
  auto model = accelerator.prepare(net);
  const auto x = torch::randn({8, 64});
  const auto output = model(x);
  EXPECT_EQ(output.scalar_type(), torch::kFloat);
  EXPECT_FALSE(output.equal(net(x))) << "autocast was off";
  EXPECT_TRUE(torch::allclose(output, net(x), 2e-2, 2e-2));
  EXPECT_EQ(net(x).scalar_type(), torch::kFloat) << "autocast is left again";
  {
    auto region = accelerator.autocast();
    EXPECT_EQ(net(x).scalar_type(), torch::kBFloat16);
  }
  accelerator.backward(output.sum());
  EXPECT_EQ(net->weight.grad().scalar_type(), torch::kFloat);
}

TEST_F(AcceleratorTest, ClippingEqualsLibTorch) {
  Accelerator accelerator;
  for (const double norm_type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.05, 1e6}) {
      torch::nn::Linear a(8, 4), b(8, 4);
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 2; ++i) {
        a->parameters()[i].mutable_grad() = torch::randn_like(a->parameters()[i]);
        b->parameters()[i].mutable_grad() = a->parameters()[i].grad().clone();
      }
      const auto total = accelerator.clip_grad_norm_(a->parameters(), max_norm, norm_type);
      const double expected = torch::nn::utils::clip_grad_norm_(b->parameters(), max_norm, norm_type);
      EXPECT_NEAR(total.item<double>(), expected, 1e-5 * expected);
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(torch::allclose(a->parameters()[i].grad(), b->parameters()[i].grad(), 1e-5, 1e-8));
    }
  }
  torch::nn::Linear net(2, 1);
  net->weight.mutable_grad() = torch::tensor({{-3.0f, 0.25f}});
  accelerator.clip_grad_value_(net->parameters(), 0.5);
  EXPECT_TRUE(net->weight.grad().equal(torch::tensor({{-0.5f, 0.25f}})));
  EXPECT_EQ(accelerator.clip_grad_norm_({}, 1.0).item<double>(), 0);
  EXPECT_THROW(accelerator.clip_grad_norm_(net->parameters(), -1), ConfigError);
}

// In fp16 gradients are scaled until they are unscaled: clipping must not see them before.
TEST_F(AcceleratorTest, ClippingSeesUnscaledGradients) {
  Accelerator accelerator({.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}}});
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 1.0));
  const auto before = net->weight.detach().clone();
  accelerator.backward(model(torch::tensor({{-3.0f, 0.25f}})).sum());
  accelerator.clip_grad_value_(net->parameters(), 0.5);
  EXPECT_TRUE(net->weight.grad().equal(torch::tensor({{-0.5f, 0.25f}}))) << net->weight.grad();
  optimizer.step();
  EXPECT_TRUE(net->weight.equal(before + torch::tensor({{0.5f, -0.25f}})));
  optimizer.zero_grad();
  accelerator.backward(model(torch::tensor({{-3.0f, 4.0f}})).sum());
  EXPECT_EQ(accelerator.clip_grad_norm_(net->parameters(), 0.5).item<double>(), 5);
}

// LibTorch lists a tied weight under each of its names.
TEST_F(AcceleratorTest, TiedWeightsAreClippedOnce) {
  Accelerator accelerator;
  torch::nn::Linear a(torch::nn::LinearOptions(2, 2).bias(false)), b(torch::nn::LinearOptions(2, 2).bias(false));
  tie(a, "weight", b, "weight");
  torch::nn::Sequential net(a, b);
  ASSERT_EQ(net->parameters().size(), 2);
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 1.0));
  a->weight.mutable_grad() = torch::full({2, 2}, 2.0);
  EXPECT_EQ(accelerator.clip_grad_norm_(net->parameters(), 1.0).item<double>(), 4);
  EXPECT_NEAR(a->weight.grad()[0][0].item<double>(), 0.5, 1e-6);
}

// A program that never unscales would end in NaN.
TEST_F(AcceleratorTest, Fp16WithoutAPreparedOptimizerIsNamed) {
  Accelerator accelerator({.mixed_precision = "fp16"});
  torch::nn::Linear net(2, 1);
  auto model = accelerator.prepare(net);
  torch::optim::SGD plain(net->parameters(), 0.1);
  const auto step = [&] { accelerator.backward(model(torch::ones({1, 2})).sum()); };
  step();
  EXPECT_THAT(message_of<ConfigError>(step), HasSubstr("no prepared optimizer holds a parameter of a prepared model"));
  // The program may use the scaler by itself.
  Accelerator another({.mixed_precision = "fp16"});
  auto prepared = another.prepare(torch::nn::Linear(2, 1));
  torch::optim::SGD own(prepared->parameters(), 0.1);
  for (int i = 0; i < 3; ++i) {
    another.backward(prepared(torch::ones({1, 2})).sum());
    another.scaler()->step(own), another.scaler()->update(), own.zero_grad();
  }
}

// Steps of one optimizer are skipped: its schedule waits, and the other's does not.
TEST_F(AcceleratorTest, SchedulesFollowTheOptimizerThatTheyDrive) {
  Accelerator accelerator({.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 8}}});
  torch::nn::Linear fine(2, 1), broken(2, 1);
  torch::optim::SGD first(fine->parameters(), 0.1), second(broken->parameters(), 0.1);
  const auto constant = [](int64_t) { return 1.0; };
  auto [a, b, opt_a, opt_b, sched_a, sched_b] = accelerator.prepare(
      fine, broken, first, second, optim::lambda_lr(first, constant), optim::lambda_lr(second, constant));
  const auto x = torch::ones({1, 2});
  accelerator.backward(a(x).sum() + (b(x) * std::numeric_limits<double>::infinity()).sum());
  opt_a.step(), opt_b.step();
  sched_a.step(), sched_b.step();
  EXPECT_EQ(sched_a.last_epoch(), 1);
  EXPECT_EQ(sched_b.last_epoch(), 0);
}

TEST_F(AcceleratorTest, AutocastKwargsReachForwardsAndRegions) {
  torch::nn::Linear net(64, 64);
  const auto x = torch::randn({8, 64});
  Accelerator on({.mixed_precision = "bf16", .kwargs_handlers = {AutocastKwargs{.cache_enabled = false}}});
  {
    const auto region = on.autocast();
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    EXPECT_EQ(net(x).scalar_type(), torch::kBFloat16);
    const auto within = on.autocast(AutocastKwargs{.enabled = false});
    EXPECT_EQ(net(x).scalar_type(), torch::kFloat);
  }
  {
    const auto region = on.autocast(AutocastKwargs{});
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_FALSE(on.prepare(net)(x).equal(net(x)));
  Accelerator off({.kwargs_handlers = {AutocastKwargs{.enabled = false}}});
  EXPECT_EQ(off.mixed_precision(), "bf16");
  EXPECT_TRUE(off.prepare(net)(x).equal(net(x))) << "autocast was switched off";
  const auto region = off.autocast();
  EXPECT_EQ(net(x).scalar_type(), torch::kFloat);
}

TEST_F(AcceleratorTest, StepsThatAreAlwaysSkippedAreSpokenOf) {
  Accelerator accelerator({.mixed_precision = "fp16"});
  torch::nn::Linear net(4, 1);
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  const auto steps = [&](int64_t count, double factor) {
    return support::warnings_of([&] {
      for (int64_t i = 0; i < count; ++i) {
        accelerator.backward(model(torch::ones({1, 4})).sum() * factor);
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(steps(9, nan), "") << "some skipped steps are how the scale is found";
  EXPECT_THAT(steps(1, nan),
              AllOf(HasSubstr("the last 10 steps were skipped"), HasSubstr("The loss itself is inf or NaN")));
  EXPECT_EQ(steps(20, nan), "") << "not each time";
  EXPECT_EQ(steps(1, 1), "");
  EXPECT_EQ(steps(9, nan), "") << "a good step begins a new count";
  accelerator.scaler()->update(65536.0);
  EXPECT_THAT(steps(1, 1e38), HasSubstr("The loss of this rank is a number"));
}

TEST_F(AcceleratorTest, LaterOnesSplitModelsAsTheFirst) {
  FullyShardedDataParallelPlugin plugin{.fsdp_version = 2, .min_num_params = 7};
  Accelerator first({.cpu = true, .fsdp_plugin = plugin, .parallelism_config = ParallelismConfig{}});
  Accelerator second;
  ASSERT_TRUE(second.options().fsdp_plugin);
  EXPECT_EQ(second.options().fsdp_plugin->min_num_params, 7);
  EXPECT_EQ(second.distributed_type(), first.distributed_type());
  EXPECT_TRUE(second.parallelism_config());
  AcceleratorState::reset();
  EXPECT_FALSE(Accelerator().options().fsdp_plugin);
}

TEST_F(AcceleratorTest, OptionsThatContradictAreRefused) {
  const auto refused = [](AcceleratorOptions options) {
    return message_of<ConfigError>([&] { Accelerator accelerator(std::move(options)); });
  };
  EXPECT_THAT(refused({.mixed_precision = "fp9"}), HasSubstr("expected no, fp16, bf16 or fp8"));
  AcceleratorState::reset(true);
  EXPECT_THAT(refused({.gradient_accumulation_steps = 2, .gradient_accumulation_plugin = GradientAccumulationPlugin{}}),
              HasSubstr("num_steps"));
  EXPECT_THAT(refused({.gradient_accumulation_steps = 0}), HasSubstr("at least 1"));
  EXPECT_THAT(refused({.log_with = {"pigeons"}}), HasSubstr("tensorboard"));
  EXPECT_THAT(refused({.log_with = {"tensorboard"}}), HasSubstr("project_dir"));
  EXPECT_THAT(refused({.kwargs_handlers = {AutocastKwargs{}, AutocastKwargs{}}}), HasSubstr("two handlers"));
}

TEST_F(AcceleratorTest, SeveralShareOneState) {
  Accelerator first({.mixed_precision = "bf16", .gradient_accumulation_steps = 3});
  Accelerator second;
  EXPECT_EQ(second.mixed_precision(), "bf16");
  EXPECT_THAT(message_of<ConfigError>([] { Accelerator({.mixed_precision = "no"}); }),
              HasSubstr("already runs with 'bf16'"));
  first.set_gradient_accumulation_steps(5);
  EXPECT_EQ(second.gradient_accumulation_steps(), 5);
  first.set_sync_gradients(false);
  EXPECT_FALSE(second.sync_gradients());
  second.set_sync_gradients(true);
  ::setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", 1);
  EXPECT_EQ(Accelerator({.gradient_accumulation_steps = 2}).gradient_accumulation_steps(), 7);
  ::unsetenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
}

TEST_F(AcceleratorTest, TokensNeedTheirCountAndStepsDont) {
  Accelerator accelerator;
  const auto loss = torch::ones({}, torch::requires_grad());
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.backward(loss, 3); }), HasSubstr("GradientAverage::tokens"));
  accelerator.backward(loss);
}

TEST_F(AcceleratorTest, RecordsSayWhatWentWrongWithoutABacktrace) {
  int exit_code = 0;
  testing::internal::CaptureStderr();
  exit_code = record([] { torch::ones({2, 3}).matmul(torch::ones({2, 3})); });
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(exit_code, 1);
  EXPECT_THAT(text, HasSubstr("shapes cannot be multiplied"));
  EXPECT_THAT(text, Not(HasSubstr("frame #")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST_F(AcceleratorTest, LogsGoToTheFolderForLogs) {
  const std::filesystem::path folder = support::scratch_dir();
  Accelerator accelerator({.log_with = {"tensorboard"},
                           .project_config = {.project_dir = folder / "project", .logging_dir = folder / "logs"}});
  EXPECT_EQ(accelerator.logging_dir(), folder / "logs");
  accelerator.init_trackers("run");
  accelerator.log({{"loss", 1.0}}, 0);
  accelerator.end_training();
  EXPECT_FALSE(std::filesystem::is_empty(folder / "logs" / "run"));
  EXPECT_FALSE(std::filesystem::exists(folder / "project"));
}

TEST_F(AcceleratorTest, TensorBoardReadsOurEvents) {
  SKIP_WITHOUT_PYTHON();
  const std::filesystem::path folder = support::scratch_dir() + "/events";
  Accelerator accelerator({.log_with = {"tensorboard"}, .project_dir = folder});
  EXPECT_EQ(accelerator.logging_dir(), folder);
  accelerator.init_trackers("run", {{"lr", "0.1"}, {"note", "it's"}});
  for (int64_t step = 0; step < 3; ++step)
    accelerator.log({{"loss", 1.0 / static_cast<double>(step + 1)}, {"lr/group 0", 0.5}}, step * 1000000007);
  accelerator.end_training();
  const auto read = support::run_python("tests/dist/read_events.py", {(folder / "run").string()});
  EXPECT_EQ(read.exit_code, 0) << read.output;
  for (const auto& line :
       {"loss 0 1.0\n", "loss 1000000007 0.5\n", "loss 2000000014 0.3333333", "lr/group 0 2000000014 0.5\n"})
    EXPECT_THAT(read.output, HasSubstr(line));
  std::stringstream parameters;
  parameters << std::ifstream(folder / "run" / "hparams.yml").rdbuf();
  EXPECT_EQ(parameters.str(), "lr: '0.1'\nnote: it's\n");
  EXPECT_THROW(Accelerator().init_trackers("x"), ConfigError);
}

RANKS_TEST(AcceleratorRanks, WhoAmIAndWhoGoesFirst, 3) {
  const InitProcessGroupKwargs pigeons{.backend = "pigeons"};
  EXPECT_THAT(message_of<Error>([&] { Accelerator({.kwargs_handlers = {pigeons}}); }), HasSubstr("pigeons"));
  Accelerator accelerator;
  EXPECT_EQ(accelerator.distributed_type(), DistributedType::MULTI_CPU);
  EXPECT_EQ(accelerator.process_index(), rank());
  EXPECT_EQ(accelerator.is_last_process(), rank() == 2);
  std::vector<int64_t> ran;
  accelerator.on_main_process([&] { ran.push_back(0); });
  accelerator.on_process([&] { ran.push_back(1); }, 1);
  accelerator.on_last_process([&] { ran.push_back(2); });
  EXPECT_EQ(gather_object(ran), (std::vector<int64_t>{0, 1, 2}));
  const auto mark = std::filesystem::path(support::scratch_dir()) / "first";
  {
    const auto first = accelerator.main_process_first();
    if (accelerator.is_main_process()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      std::ofstream(mark) << "done";
    }
    EXPECT_TRUE(std::filesystem::exists(mark)) << "a rank went before the main process";
  }
  accelerator.wait_for_everyone();
  accelerator.on_main_process([&] { std::filesystem::remove(mark); });

  EXPECT_FALSE(accelerator.check_trigger());
  if (rank() == 1) accelerator.set_trigger();
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger()) << "checking resets it";
}

namespace {

/// This rank is one of two machines of so many ranks each. Before anything asks who it is.
void pretend_machines_of(int64_t ranks) {
  ::setenv("LOCAL_RANK", std::to_string(rank() % ranks).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(ranks).c_str(), 1);
}

}  // namespace

RANKS_TEST(AcceleratorRanks, EachMachineHasAMainProcessThatGoesFirst, 4) {
  pretend_machines_of(2);
  const Accelerator accelerator;
  const int64_t machine = rank() / 2;
  EXPECT_EQ(accelerator.local_process_index(), rank() % 2);
  EXPECT_EQ(accelerator.is_local_main_process(), rank() == 0 || rank() == 2);
  const auto mark = [](int64_t of) {
    return std::filesystem::path(support::scratch_dir()) / ("machine " + std::to_string(of));
  };
  {
    const auto first = accelerator.local_main_process_first();
    if (accelerator.is_local_main_process()) {
      EXPECT_FALSE(std::filesystem::exists(mark(machine))) << "the main process of a machine came after another";
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      std::ofstream(mark(machine)) << "done";
    }
    EXPECT_TRUE(std::filesystem::exists(mark(machine))) << "a rank went before the main process of its machine";
  }
  std::vector<int64_t> ran;
  accelerator.on_local_main_process([&] { ran.push_back(rank()); });
  EXPECT_EQ(gather_object(ran), (std::vector<int64_t>{0, 2}));
}

TEST_F(AcceleratorTest, BatchesStayWhereTheyAreWithoutDevicePlacement) {
  // Tensors without values can't come to the CPU.
  const data::DataLoader loader(std::vector<torch::Tensor>(4, torch::empty({2}, torch::kMeta)), {.batch_size = 2});
  Accelerator accelerator({.device_placement = false});
  auto kept = accelerator.prepare(loader);
  for (auto& batch : kept) EXPECT_TRUE(batch.is_meta());
  Accelerator placing;
  auto placed = placing.prepare(loader);
  EXPECT_ANY_THROW(for (auto& batch : placed)(void) batch);
}

RANKS_TEST(AcceleratorRanks, LoadersSynchroniseTheGeneratorsThatWereAskedFor, 2) {
  const auto after_begin = [](std::vector<RNGType> types, bool shuffle) {
    torch::manual_seed(100 + rank());
    Accelerator accelerator({.rng_types = std::move(types)});
    auto loader = accelerator.prepare(data::DataLoader(samples(8), {.batch_size = 2, .shuffle = shuffle}));
    auto batch = loader.begin();
    const auto draws = accelerator.gather(torch::rand({1}));
    const auto orders = accelerator.gather(loader.state_dict().sampler_rng_state.unsqueeze(0));
    return std::pair(draws[0].equal(draws[1]), orders[0].equal(orders[1]));
  };
  EXPECT_EQ(after_begin({RNGType::generator}, true), std::pair(false, true)) << "the sampler's, which is the default";
  EXPECT_EQ(after_begin({RNGType::torch, RNGType::generator}, true), std::pair(true, true));
  EXPECT_TRUE(after_begin({RNGType::torch}, false).first) << "LibTorch's";
  EXPECT_FALSE(after_begin({}, false).first);
  // Nobody has given ranks with seeds of their own one order to share out.
  EXPECT_THROW(after_begin({RNGType::torch}, true), ConfigError);
  EXPECT_THROW(after_begin({}, true), ConfigError);
}

namespace {

/// An accelerator that has nothing but a default generator.
struct GeneratorOnly final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator; }
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + rank()));
};

}  // namespace

RANKS_TEST(AcceleratorRanks, LoadersSynchroniseTheAcceleratorsGenerator, 2) {
  const PartialState state({.cpu = true});  // which must not compute on what comes now
  static GeneratorOnly hooks;
  static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> guard;
  const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, &guard);
  c10::register_privateuse1_backend("stand_in");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  const auto draws_alike = [](std::vector<RNGType> types) {
    Accelerator accelerator({.cpu = true, .rng_types = std::move(types)});
    auto loader = accelerator.prepare(data::DataLoader(samples(8), {.batch_size = 2, .shuffle = true}));
    auto batch = loader.begin();
    const auto draws = accelerator.gather(at::rand({1}, hooks.generator));
    return draws[0].equal(draws[1]);
  };
  EXPECT_FALSE(draws_alike({RNGType::generator, RNGType::torch}));
  EXPECT_TRUE(draws_alike({RNGType::device}));
}

TEST_F(AcceleratorTest, BatchesAreCopiedWithoutWaitingWhereThatIsAskedFor) {
  // Each copy says how it was asked for before it fails, as tensors without values can't come to the CPU.
  static std::vector<bool> copies;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        constexpr size_t kNonBlocking = 5;
        if (call.name() == std::string_view("aten::_to_copy")) copies.push_back(call.inputs()[kNonBlocking].toBool());
        return nullptr;
      }).needsInputs(true));
  const data::DataLoader loader(std::vector<torch::Tensor>(4, torch::empty({2}, torch::kMeta)), {.batch_size = 2});
  for (const bool asked : {false, true}) {
    Accelerator accelerator({.dataloader_config = {.non_blocking = asked}});
    auto placed = accelerator.prepare(loader);
    copies.clear();
    EXPECT_ANY_THROW(for (auto& batch : placed)(void) batch);
    EXPECT_EQ(copies, std::vector<bool>{asked});
  }
  at::removeCallback(handle);
}

RANKS_TEST(AcceleratorRanks, SplitBatchesHasAShorthand, 2) {
  for (const bool split : {true, false}) {
    Accelerator accelerator({.split_batches = split});
    EXPECT_EQ(accelerator.split_batches(), split);
    auto loader = accelerator.prepare(data::DataLoader(samples(8), {.batch_size = 4}));
    EXPECT_EQ(loader.total_batch_size(), split ? 4 : 8);
    for (auto& batch : loader) EXPECT_EQ(batch.target.size(0), split ? 2 : 4);
  }
}

RANKS_TEST(AcceleratorRanks, EvenBatchesAreSetForLoadersToCome, 2) {
  Accelerator accelerator;
  const data::DataLoader loader(samples(3), {.batch_size = 1});
  auto before = accelerator.prepare(loader);
  accelerator.set_even_batches(false);
  EXPECT_FALSE(accelerator.even_batches());
  auto after = accelerator.prepare(loader);
  EXPECT_EQ(before.size(), 2);
  EXPECT_EQ(after.size(), 2 - rank());
}

namespace {

struct Countdown {
  std::optional<torch::Tensor> next() { return left-- > 0 ? std::optional(torch::tensor(left)) : std::nullopt; }
  void reset() { left = 4; }
  int64_t left = 4;
};

}  // namespace

RANKS_TEST(AcceleratorRanks, LoadersThatKeepTheirEvenBatchesAreSpokenOf, 2) {
  Accelerator accelerator;
  const data::DataLoader map(samples(4), {.batch_size = 1});
  auto [model, even] = accelerator.prepare(torch::nn::Linear(4, 1), map);
  const auto warnings = [&, &model = model] {
    return support::warnings_of([&] {
      accelerator.join_uneven_inputs(
          model, [] {}, /*even_batches=*/false);
    });
  };
  EXPECT_EQ(warnings(), "");
  auto stream = accelerator.prepare(data::DataLoader(std::make_shared<Countdown>(), {.batch_size = 1}));
  EXPECT_THAT(warnings(), rank() == 0 ? HasSubstr("1 of 2 prepared loaders keep what they have") : HasSubstr(""));
}

RANKS_TEST(AcceleratorRanks, ALaterProcessGroupIsSpokenOf, 1, 2) {
  const InitProcessGroupKwargs first{.timeout = std::chrono::seconds(100)}, other{.timeout = std::chrono::seconds(50)};
  const Accelerator accelerator({.kwargs_handlers = {first}});
  const auto said = [](const InitProcessGroupKwargs& kwargs) {
    return support::warnings_of([&] { const Accelerator later({.kwargs_handlers = {kwargs}}); });
  };
  EXPECT_EQ(said(first), "");
  EXPECT_EQ(said({}), "");
  EXPECT_EQ(said({.backend = "gloo"}), "") << "which it has";
  const auto is_said = [](const std::string& what) {
    return world_size() > 1 ? HasSubstr("this " + what + " has no effect") : HasSubstr("");
  };
  EXPECT_THAT(said(other), is_said("timeout"));
  EXPECT_THAT(said({.backend = "mpi"}), is_said("backend"));
  EXPECT_THAT(said({.init_method = "tcp://localhost:1"}), is_said("init_method"));
}

// Files of a checkpoint, and what is clipped and stepped, are counted by modules and optimizers, not by calls.
RANKS_TEST(AcceleratorRanks, WhatIsPreparedTwiceIsOneOfTheRun, 1, 2) {
  Accelerator accelerator;
  torch::nn::Linear net(4, 1);
  auto looked_at = accelerator.prepare_model(net, /*evaluation_mode=*/true);
  auto trained = accelerator.prepare(net);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto once = accelerator.prepare(sgd), twice = accelerator.prepare(sgd);
  accelerator.backward(trained(torch::full({1, 4}, 1.0 + static_cast<double>(rank()))).sum());
  twice.step();
  EXPECT_TRUE(looked_at(torch::ones({1, 4})).equal(trained(torch::ones({1, 4}))));
  const std::filesystem::path folder = support::scratch_dir() + "/twice";
  accelerator.save_state(folder);
  EXPECT_TRUE(std::filesystem::exists(folder / "model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "model_1.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder / "optimizer.bin"));
  EXPECT_FALSE(std::filesystem::exists(folder / "optimizer_1.bin"));
  const auto weights = accelerator.gather(net->weight.detach());
  EXPECT_TRUE(weights.eq(weights[0]).all().item<bool>()) << "gradients are averaged: " << weights;
}

RANKS_TEST(AcceleratorRanks, DispatchedBatchesAreCutAsTheProgramSays, 2) {
  const auto every_other = [](const torch::Tensor& batch, int64_t, int64_t, int64_t rank, int64_t ranks) {
    return batch.slice(0, rank, std::nullopt, ranks);
  };
  std::vector<torch::Tensor> numbers;
  for (int64_t i = 0; i < 4; ++i) numbers.push_back(torch::tensor(i));
  const data::DataLoader loader(numbers, {.batch_size = 2});
  Accelerator accelerator({.dataloader_config = {.dispatch_batches = true}});
  int64_t batches = 0;
  for (auto& batch : accelerator.prepare_data_loader(loader, std::nullopt, every_other)) {
    EXPECT_TRUE(batch.equal(torch::tensor({rank(), rank() + 2}))) << batch;
    ++batches;
  }
  EXPECT_EQ(batches, 1);
  // Nobody would call it.
  EXPECT_THAT(message_of<ConfigError>([&] { Accelerator().prepare_data_loader(loader, std::nullopt, every_other); }),
              HasSubstr("dispatch_batches = true"));
}

RANKS_TEST(AcceleratorRanks, GatherForMetricsDropsTheRepeatedTail, 2, 3) {
  Accelerator accelerator;
  const int64_t count = 17;
  auto loader = accelerator.prepare(data::DataLoader(samples(count), {.batch_size = 4}));
  std::vector<int64_t> seen, objects;
  std::vector<std::string> words;
  for (auto& batch : loader) {
    const auto [targets, rows] = accelerator.gather_for_metrics(std::make_tuple(batch.target, batch.data));
    EXPECT_EQ(rows.size(0), targets.size(0));
    for (int64_t i = 0; i < targets.size(0); ++i) seen.push_back(targets[i].item<int64_t>());
    std::vector<std::string> mine;
    for (int64_t i = 0; i < batch.target.size(0); ++i)
      mine.push_back("sample " + std::to_string(batch.target[i].item<int64_t>()));
    for (auto& word : accelerator.gather_for_metrics(mine)) words.push_back(word);
    for (const auto& tensor : accelerator.gather_for_metrics(std::vector<torch::Tensor>{batch.target[0]}, true))
      objects.push_back(tensor.item<int64_t>());
  }
  ASSERT_EQ(seen.size(), static_cast<size_t>(count));
  ASSERT_EQ(words.size(), static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_EQ(seen[static_cast<size_t>(i)], i);
    EXPECT_EQ(words[static_cast<size_t>(i)], "sample " + std::to_string(i));
  }
  EXPECT_EQ(objects.size(), world_size() == 2 ? 5u : 6u)
      << "one object per rank; the last batch of two ranks has one sample only";
  EXPECT_EQ(accelerator.gather_for_metrics(torch::ones({2})).size(0), 2 * world_size())
      << "outside of a loop nothing is dropped";
}

RANKS_TEST(AcceleratorRanks, RaggedResultsGoAsObjects, 2, 3) {
  Accelerator accelerator;
  const int64_t n = world_size(), all = n * (n + 1) / 2;
  const auto mine = torch::full({rank() + 1, 2}, rank());  // rank r has r + 1 rows
  EXPECT_THAT(message_of<CommError>([&] { accelerator.gather_for_metrics(mine); }),
              testing::HasSubstr("Process 1: gather of [2, 2] Long cpu"));
  const auto rows = accelerator.gather_for_metrics(mine, true);
  ASSERT_EQ(rows.sizes(), (std::vector<int64_t>{all, 2}));
  const std::map<std::string, std::tuple<torch::Tensor, torch::Tensor>> nested{{"a", {mine, torch::tensor(rank())}}};
  const auto [first, numbers] = accelerator.gather_for_metrics(nested, true).at("a");
  EXPECT_TRUE(first.equal(rows));
  EXPECT_TRUE(numbers.equal(torch::arange(n)));
  for (int64_t r = 0, at = 0; r < n; at += ++r)
    EXPECT_TRUE(rows.slice(0, at, at + r + 1).eq(r).all().item<bool>()) << "rank " << r;
  const auto list = accelerator.gather_for_metrics(std::vector<torch::Tensor>{torch::ones({rank()}), mine}, true);
  ASSERT_EQ(list.size(), static_cast<size_t>(2 * n));
  EXPECT_EQ(list[2].size(0), 1);
  EXPECT_THAT(message_of<ShapeError>([&] {
                accelerator.gather_for_metrics(torch::ones({1, rank() + 1}), true);
              }),
              testing::HasSubstr("[1, 1], [1, 2]"));
  // The repeated tail goes here, too.
  auto loader = accelerator.prepare(data::DataLoader(samples(4 * n + 1), {.batch_size = 4}));
  int64_t seen = 0;
  for (auto& batch : loader) seen += accelerator.gather_for_metrics(batch.target, true).size(0);
  EXPECT_EQ(seen, 4 * n + 1);
}

// Two ranks: a schedule that follows the optimizer counts both ranks' batches, one that does not counts its own calls.
RANKS_TEST(AcceleratorRanks, SchedulesFollowTheOptimizerOrNot, 2) {
  for (const bool follow : {true, false}) {
    Accelerator accelerator({.gradient_accumulation_steps = 2, .step_scheduler_with_optimizer = follow});
    torch::nn::Linear net(2, 1);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    auto schedule = optim::lambda_lr(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
    auto [model, opt, sched] = accelerator.prepare(net, optimizer, schedule);
    for (int64_t step = 0; step < 4; ++step) {
      const auto scope = accelerator.accumulate(model);
      accelerator.backward(model(torch::ones({1, 2})).sum());
      opt.step();
      sched.step();
      opt.zero_grad();
    }
    EXPECT_EQ(sched.last_epoch(), 4) << "2 steps of 2 ranks, or 4 calls";
    EXPECT_EQ(sched.scheduler().step_count(), follow ? 7 : 5) << "micro-steps count where it follows";
    sched.step();
    EXPECT_EQ(sched.last_epoch(), follow ? 6 : 5);
  }
}

// Prepared before its optimizer, it is held back by a step that an overflow skips all the same.
TEST_F(AcceleratorTest, ASchedulePreparedBeforeItsOptimizerFollowsIt) {
  for (const bool schedule_first : {true, false}) {
    Accelerator accelerator({.mixed_precision = "fp16", .cpu = true});
    torch::nn::Linear net(2, 1);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    auto schedule = optim::lambda_lr(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
    std::optional<AcceleratedScheduler> sched;
    if (schedule_first) sched = accelerator.prepare(schedule);
    auto [model, opt] = accelerator.prepare(net, optimizer);
    if (!schedule_first) sched = accelerator.prepare(schedule);
    accelerator.backward(model(torch::full({1, 2}, 1e30)).sum());
    opt.step();
    ASSERT_TRUE(accelerator.optimizer_step_was_skipped());
    sched->step();
    EXPECT_EQ(sched->last_epoch(), 0) << schedule_first;
  }
}

TEST_F(AcceleratorTest, ALoopThatWasLeftWithinAGroupLeavesNothing) {
  const auto trains = [](Accelerator& accelerator) {
    torch::nn::Linear net(2, 1);
    auto [model, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    const auto before = net->weight.detach().clone();
    accelerator.backward(model(torch::ones({1, 2})).sum());
    opt.step();
    opt.zero_grad();
    return !net->weight.equal(before) && !net->weight.grad().defined();
  };
  const auto leave = [](Accelerator& accelerator) {
    torch::nn::Linear net(2, 1);
    auto [model, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    const auto scope = accelerator.accumulate(model);
    accelerator.backward(model(torch::ones({1, 2})).sum());
    EXPECT_FALSE(accelerator.sync_gradients());
  };
  Accelerator first({.gradient_accumulation_steps = 4, .cpu = true});
  leave(first);
  first.free_memory();
  EXPECT_TRUE(trains(first));
  leave(first);
  Accelerator second({.gradient_accumulation_steps = 1});
  EXPECT_TRUE(trains(second));
}

// A rank that failed has not written what the others would read.
RANKS_TEST(AcceleratorRanks, TheOthersAreNotLetInWhereTheMainProcessFails, 2) {
  Accelerator accelerator({.cpu = true});
  if (rank() == 0) {
    const auto write = [&] {
      const auto first = accelerator.main_process_first();
      throw std::runtime_error("the disk is full");
    };
    EXPECT_THROW(write(), std::runtime_error);
    EXPECT_ANY_THROW(accelerator.gather(torch::ones({1})));  // another collective than the one in which they wait
  } else {
    bool in = false;
    EXPECT_ANY_THROW({
      const auto first = accelerator.main_process_first();
      in = true;
    });
    EXPECT_FALSE(in);
  }
}

RANKS_TEST(AcceleratorRanks, ALaterAcceleratorShardsAsTheFirst, 2) {
  Accelerator first({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2}});
  Accelerator second;
  EXPECT_EQ(second.distributed_type(), DistributedType::FSDP);
  torch::nn::Linear net(4, 4);
  auto [model, optimizer] = second.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  EXPECT_TRUE(model.core()->engine->holds_pieces());
  second.backward(model(torch::ones({1, 4})).sum());  // the optimizer's pieces are known as the model's
  optimizer.step(), optimizer.zero_grad();
  // A model that one has sharded is sharded for all: prepared again, and clipped by another.
  EXPECT_EQ(first.prepare(net).core()->engine, model.core()->engine);
  second.backward(model(torch::ones({1, 4})).sum());
  EXPECT_NEAR(first.clip_grad_norm_(net->parameters(), 0.5).item<double>(), std::sqrt(20.0), 1e-5);
  EXPECT_NEAR(second.clip_grad_norm_(net->parameters(), 1.0).item<double>(), 0.5, 1e-5);
}

RANKS_TEST(AcceleratorRanks, StatesAsText, 1, 2) {
  Accelerator accelerator({.mixed_precision = "bf16", .cpu = true});
  const bool alone = accelerate::PartialState().num_processes() == 1;
  std::ostringstream partial, whole;
  partial << PartialState();
  whole << AcceleratorState();
  // As Python 3.11 and accelerate 1.15 print them.
  EXPECT_EQ(partial.str(), std::string("Distributed environment: DistributedType.") +
                               (alone ? "NO\nNum processes: 1\n" : "MULTI_CPU  Backend: gloo\nNum processes: 2\n") +
                               "Process index: " + std::to_string(rank()) +
                               "\nLocal process index: " + std::to_string(rank()) + "\nDevice: cpu\n");
  EXPECT_EQ(whole.str(), partial.str() + "\nMixed precision type: bf16\n");
}

RANKS_TEST(AcceleratorRanks, SplitBetweenProcesses, 3) {
  Accelerator accelerator;
  const std::vector<int> seven{0, 1, 2, 3, 4, 5, 6};
  const std::vector<std::vector<int>> parts{{0, 1, 2}, {3, 4}, {5, 6}}, padded{{0, 1, 2}, {3, 4, 6}, {5, 6, 6}};
  const auto r = static_cast<size_t>(rank());
  EXPECT_EQ(accelerator.split_between_processes(seven), parts[r]);
  EXPECT_EQ(accelerator.split_between_processes(seven, true), padded[r]);
  EXPECT_EQ(PartialState().split_between_processes(seven), parts[r]);
  EXPECT_TRUE(accelerator.split_between_processes(torch::arange(7))
                  .equal(torch::arange(7).slice(0, parts[r].front(), parts[r].back() + 1)));
  EXPECT_TRUE(accelerator.gather(accelerator.split_between_processes(torch::arange(7), true))
                  .equal(torch::tensor({0, 1, 2, 3, 4, 6, 5, 6, 6})));
  const auto map =
      accelerator.split_between_processes(std::map<std::string, std::vector<int>>{{"a", seven}, {"b", seven}});
  EXPECT_EQ(map.at("b"), parts[r]);
  EXPECT_THROW(accelerator.split_between_processes(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", seven}}),
               ShapeError);
  EXPECT_TRUE(accelerator.split_between_processes(std::vector<int>{}).empty());
  EXPECT_EQ(accelerator.split_between_processes(std::vector<int>{9}, true), (std::vector<int>{9}));
}

// One rank's gradient overflows: no rank steps, all halve the scale, the schedule waits.
RANKS_TEST(AcceleratorRanks, Fp16OverflowOnOneRankSkipsTheStepOnAll, 2) {
  Accelerator accelerator(
      {.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024, .growth_interval = 3}}});
  torch::manual_seed(0);
  torch::nn::Linear net(16, 16);
  auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
  auto schedule = optim::lambda_lr(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
  auto [model, opt, sched] = accelerator.prepare(net, optimizer, schedule);
  const auto step = [&](double factor) {
    const auto before = net->weight.detach().clone();
    const auto output = model(torch::randn({8, 16}));
    EXPECT_EQ(output.scalar_type(), torch::kFloat);
    accelerator.backward(output.pow(2).mean());
    // After averaging, before the step: as if this rank alone had met an overflow.
    if (factor != 1) net->weight.mutable_grad().mul_(factor);
    accelerator.clip_grad_norm_(net->parameters(), 1.0);
    opt.step();
    sched.step();
    opt.zero_grad();
    return !before.equal(net->weight);
  };
  EXPECT_TRUE(step(1));
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
  EXPECT_FALSE(step(rank() == 1 ? std::numeric_limits<double>::infinity() : 1));
  EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
  EXPECT_EQ(accelerator.scaler()->get_scale(), 512);
  EXPECT_EQ(sched.last_epoch(), 2) << "one step, two processes";
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(step(1));
  EXPECT_EQ(accelerator.scaler()->get_scale(), 1024) << "three good steps";
  EXPECT_TRUE(gather(net->weight.detach().unsqueeze(0))[0].equal(gather(net->weight.detach().unsqueeze(0))[1]));
}
