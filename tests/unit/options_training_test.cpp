// Options around training that no other test hands over: what each changes.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "accelerate/accelerate.hpp"
#include "comm/dry_process_group.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "variable.hpp"

namespace options_training {
namespace {

using namespace accelerate;

/// A model whose weight has no values.
struct HollowImpl : torch::nn::Module {
  HollowImpl() { weight = register_parameter("weight", torch::empty({2}, torch::kMeta)); }
  torch::Tensor forward(const torch::Tensor& x) { return weight * x; }
  torch::Tensor weight;
};
TORCH_MODULE(Hollow);

struct OptionsOfTraining : testing::Test {
  OptionsOfTraining() { forget(); }
  ~OptionsOfTraining() override { forget(); }
  static void forget() {
    AcceleratorState::reset(true);
    GradientState::reset();
  }
};

TEST_F(OptionsOfTraining, GraphsAreKeptOrMadeForGradients) {
  Accelerator accelerator({.cpu = true});
  const auto x = torch::full({1}, 3.0, torch::requires_grad());
  const auto loss = x.pow(3).sum();
  accelerator.backward(loss, {.retain_graph = true});
  EXPECT_FALSE(x.grad().requires_grad());
  accelerator.backward(loss);
  EXPECT_EQ(x.grad().item<double>(), 2 * 27);
  EXPECT_ANY_THROW(accelerator.backward(loss)) << "its graph is gone";
  x.mutable_grad() = at::Tensor();
  accelerator.backward(x.pow(3).sum(), {.create_graph = true});
  ASSERT_TRUE(x.grad().requires_grad());
  EXPECT_EQ(torch::autograd::grad({x.grad().sum()}, {x})[0].item<double>(), 18) << "the second derivative";
  x.mutable_grad() = at::Tensor();  // it holds x by its graph
}

TEST_F(OptionsOfTraining, AStateMayPretendAndStayOnTheCpu) {
  {
    const PartialState pretended(
        {.pretence = PartialStateOptions::Pretence{
             .process_index = 2, .num_processes = 5, .traffic = std::make_shared<comm::TrafficCounter>()}});
    EXPECT_EQ(pretended.process_index(), 2);
    EXPECT_EQ(pretended.num_processes(), 5);
    EXPECT_TRUE(pretended.device().is_meta());
  }
  forget();
  const AcceleratorState state({.mixed_precision = "bf16", .partial = {.cpu = true}});
  EXPECT_TRUE(state.device().is_cpu());
  EXPECT_EQ(state.mixed_precision(), PrecisionType::BF16);
  EXPECT_THROW(PartialState({.cpu = false}), ConfigError) << "it has been told";
}

TEST_F(OptionsOfTraining, AnAcceleratorMayStayOnTheCpu) {
  const Accelerator accelerator({.cpu = true});
  EXPECT_TRUE(accelerator.device().is_cpu());
  EXPECT_THROW(PartialState({.cpu = false}), ConfigError) << "it has been told";
}

/// A backend that does not exist is an error before anybody is waited for.
TEST_F(OptionsOfTraining, TheProcessGroupIsTheOneThatWasAskedFor) {
  const support::Variable rank("RANK", "0"), local_rank("LOCAL_RANK", "0"), world_size("WORLD_SIZE", "2"),
      address("MASTER_ADDR", "127.0.0.1"), port("MASTER_PORT", std::to_string(support::free_port()));
  const InitProcessGroupKwargs pigeons{.backend = "pigeons", .timeout = std::chrono::seconds(1)};
  EXPECT_THAT(support::message_of<Error>([&] { Accelerator({.cpu = true, .kwargs_handlers = {pigeons}}); }),
              testing::HasSubstr("pigeons"));
}

TEST_F(OptionsOfTraining, LossesAreNotScaledWhereTheScalerIsOff) {
  for (const bool enabled : {true, false}) {
    forget();
    const GradScalerKwargs kwargs{.init_scale = 8, .enabled = enabled};
    const Accelerator accelerator({.mixed_precision = "fp16", .cpu = true, .kwargs_handlers = {kwargs}});
    EXPECT_EQ(accelerator.scaler()->get_scale(), enabled ? 8 : 1);
  }
}

/// A tensor without values can't come to the host.
TEST_F(OptionsOfTraining, ModelsStayWhereTheyAreWithoutDevicePlacement) {
  const auto prepare = [](bool device_placement) {
    Accelerator accelerator({.device_placement = device_placement, .cpu = true});
    return accelerator.prepare(Hollow())->weight.is_meta();
  };
  EXPECT_TRUE(prepare(false));
  EXPECT_ANY_THROW(prepare(true));
}

TEST_F(OptionsOfTraining, EachObjectIsPlacedOrLeft) {
  const data::DataLoader loader(std::vector<torch::Tensor>(4, torch::empty({2}, torch::kMeta)), {.batch_size = 2});
  Accelerator placing({.cpu = true}), leaving({.device_placement = false, .cpu = true});
  const auto batches_are_meta = [](auto loader) {
    for (auto& batch : loader) EXPECT_TRUE(batch.is_meta());
  };
  {
    auto [model, kept] = placing.prepare(DevicePlacement{false, false}, Hollow(), loader);
    EXPECT_TRUE(model->weight.is_meta());
    batches_are_meta(kept);
  }
  EXPECT_ANY_THROW(placing.prepare(DevicePlacement{true, false}, Hollow(), loader));
  auto placed = std::get<1>(leaving.prepare(DevicePlacement{false, true}, Hollow(), loader));
  EXPECT_ANY_THROW(for (auto& batch : placed)(void) batch);
  EXPECT_TRUE(placing.prepare_model(Hollow(), /*evaluation_mode=*/false, /*device_placement=*/false)->weight.is_meta());
  batches_are_meta(placing.prepare_data_loader(loader, /*device_placement=*/false));
  EXPECT_THAT(support::message_of<ConfigError>([&] { placing.prepare(DevicePlacement{true}, Hollow(), loader); }),
              testing::HasSubstr("1 values for 2 objects"));
}

TEST_F(OptionsOfTraining, AShardedModelCantStayWhereItIs) {
  Accelerator accelerator({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}});
  EXPECT_THAT(
      support::message_of<ConfigError>([&] { accelerator.prepare(DevicePlacement{false}, torch::nn::Linear(2, 2)); }),
      testing::HasSubstr("expected true because FSDP says where its shards lie"));
}

/// States that an optimizer has already are moved only where that is asked for.
TEST_F(OptionsOfTraining, StatesOfAnOptimizerArePlacedOrLeft) {
  for (const bool placed : {true, false}) {
    auto weight = torch::ones({2}, torch::requires_grad());
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1).momentum(0.5));
    weight.mutable_grad() = torch::ones({2});
    optimizer.step();
    auto& state = static_cast<torch::optim::SGDParamState&>(*optimizer.state().begin()->second);
    state.momentum_buffer(torch::empty({2}, torch::kMeta));
    Accelerator accelerator({.cpu = true});
    // A tensor without values can't come to the host.
    if (placed) EXPECT_ANY_THROW(accelerator.prepare_optimizer(optimizer, {}, placed));
    else EXPECT_NO_THROW(accelerator.prepare_optimizer(optimizer, {}, placed));
  }
}

/// A tensor without values can't come to the host.
TEST_F(OptionsOfTraining, BatchesArePutOnTheDeviceOrLeft) {
  const data::DataLoader loader(std::vector<torch::Tensor>(4, torch::empty({2}, torch::kMeta)), {.batch_size = 2});
  for (auto& batch : data::prepare_data_loader(loader, {.put_on_device = false, .device = torch::Device("cpu")}))
    EXPECT_TRUE(batch.is_meta());
  const auto placed = data::prepare_data_loader(loader, {.device = torch::Device("cpu")});
  EXPECT_ANY_THROW(for (auto& batch : placed)(void) batch);
}

/// Whether copies may overtake shows only on a GPU, so: what the operator that copies is told.
TEST_F(OptionsOfTraining, CopiesToTheDeviceWaitOrNot) {
  static std::vector<bool> told;
  const auto copies_with = [](bool non_blocking) {
    told.clear();
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          constexpr size_t kNonBlocking = 5;  // self, dtype, layout, device, pin_memory, non_blocking, memory_format
          if (std::string_view(function.name()) == "aten::_to_copy")
            told.push_back(function.inputs().at(kNonBlocking).toBool());
          return nullptr;
        }).needsInputs(true));
    const data::DataLoader loader(std::vector<torch::Tensor>(4, torch::zeros({2})), {.batch_size = 2});
    const data::PrepareDataLoaderOptions options{.config = {.non_blocking = non_blocking},
                                                 .device = torch::Device("meta")};
    for (auto& batch : data::prepare_data_loader(loader, options)) EXPECT_TRUE(batch.is_meta());
    at::removeCallback(handle);
    return told;
  };
  EXPECT_EQ(copies_with(true), (std::vector<bool>{true, true}));
  EXPECT_EQ(copies_with(false), (std::vector<bool>{false, false}));
}

TEST_F(OptionsOfTraining, CyclesHaveTheirFactorsAndMomentums) {
  const auto rate_and_momentum = [](const optim::Scheduler& schedule, int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) schedule.step();
    const auto& options =
        static_cast<const torch::optim::SGDOptions&>(schedule.optimizer().param_groups()[0].options());
    return std::pair(options.lr(), options.momentum());
  };
  const std::vector<torch::Tensor> weight = {torch::zeros({1}, torch::requires_grad())};
  torch::optim::SGD sgd(weight, torch::optim::SGDOptions(0.1).momentum(0.9));
  const optim::OneCycleOptions once{.max_lr = {1.0},
                                    .total_steps = 10,
                                    .base_momentum = 0.25,
                                    .max_momentum = 0.75,
                                    .div_factor = 8,
                                    .final_div_factor = 4};
  EXPECT_EQ(rate_and_momentum(optim::one_cycle(sgd, once), 0), std::pair(1.0 / 8, 0.75));
  EXPECT_EQ(rate_and_momentum(optim::one_cycle(sgd, once), 2), std::pair(1.0, 0.25)) << "the peak";
  EXPECT_NEAR(rate_and_momentum(optim::one_cycle(sgd, once), 9).first, 1.0 / 8 / 4, 1e-12);
  const optim::CyclicOptions cyclic{
      .base_lr = {0.125}, .max_lr = {1.0}, .step_size_up = 4, .base_momentum = {0.25}, .max_momentum = {0.75}};
  EXPECT_EQ(rate_and_momentum(optim::cyclic_lr(sgd, cyclic), 0), std::pair(0.125, 0.75));
  EXPECT_EQ(rate_and_momentum(optim::cyclic_lr(sgd, cyclic), 4), std::pair(1.0, 0.25));
}

TEST_F(OptionsOfTraining, PlateausHaveTheirBarAndTheirLeastStep) {
  const auto halved = [](optim::ReduceLROnPlateauOptions options, double first, double second) {
    const std::vector<torch::Tensor> weight = {torch::zeros({1}, torch::requires_grad())};
    torch::optim::SGD sgd(weight, torch::optim::SGDOptions(1.0));
    options.factor = 0.5, options.patience = 0;
    const auto schedule = optim::reduce_lr_on_plateau(sgd, options);
    schedule.step(first), schedule.step(second);
    return schedule.get_last_lr()[0] == 0.5;
  };
  EXPECT_FALSE(halved({}, 10, 9.5));
  EXPECT_TRUE(halved({.threshold = 0.1}, 10, 9.5)) << "a tenth less would be better";
  EXPECT_FALSE(halved({.threshold = 0.1, .absolute_threshold = true}, 10, 9.5));
  EXPECT_TRUE(halved({.maximize = true, .threshold = 0.1}, 10, 10.5));
  EXPECT_TRUE(halved({}, 10, 11));
  EXPECT_FALSE(halved({.eps = 0.6}, 10, 11)) << "the step is too small";
}

TEST_F(OptionsOfTraining, BarsAreDrawnAsOftenAsIsAskedForAndCountInTheirUnit) {
  const support::Variable terminal("ACCELERATE_LAUNCH_COLUMNS", "80");
  const auto drawn = [](std::chrono::milliseconds interval) {
    testing::internal::CaptureStderr();
    {
      ProgressBar bar({.total = 5, .unit = "page", .min_interval = interval, .enabled = true});
      for (int i = 0; i < 5; ++i) bar.update();
    }
    return testing::internal::GetCapturedStderr();
  };
  const auto often = drawn(std::chrono::milliseconds(0)), seldom = drawn(std::chrono::hours(1));
  EXPECT_EQ(std::count(often.begin(), often.end(), '\r'), 7) << "at the beginning, five times, and at the end";
  EXPECT_EQ(std::count(seldom.begin(), seldom.end(), '\r'), 2);
  EXPECT_THAT(often, testing::HasSubstr("page/s"));
}

}  // namespace
}  // namespace options_training
