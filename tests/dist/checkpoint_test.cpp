// save_state and load_state: a resumed run is the uninterrupted one bit by bit; what does not fit changes nothing;
// Python reads and writes the same files.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::rank;
using support::world_size;
using testing::HasSubstr;
namespace fs = std::filesystem;

using support::message_of;

namespace {

struct CheckpointTest : testing::Test {
  void SetUp() override {
    if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
    reset();
    folder = fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void TearDown() override { reset(); }
  static void reset() {
    AcceleratorState::reset(true);
    GradientState::reset();
    torch::manual_seed(0);
  }
  fs::path folder;
};

struct Counter {  // a user's object with Python's protocol
  int64_t answer = 0;
  c10::IValue state_dict() const {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    dict.insert("answer", answer);
    return dict;
  }
  void load_state_dict(const c10::IValue& state) { answer = state.toGenericDict().at("answer").toInt(); }
};

struct Notes {  // one with fields only
  std::vector<std::string> lines;
  double best = 0;
  ACCELERATE_FIELDS(lines, best)
};

std::vector<torch::Tensor> rows(int64_t count) {
  std::vector<torch::Tensor> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(torch::full({4}, 0.01 * static_cast<double>(i)));
  return result;
}

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::Tanh(),
                               torch::nn::Dropout(0.2), torch::nn::Linear(8, 2));
}

std::vector<torch::Tensor> state_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& tensor : module.parameters()) all.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) all.push_back(tensor.clone());
  return all;
}

bool same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return a.size() == b.size();
}

struct End {
  std::vector<torch::Tensor> state;
  std::vector<double> losses;
  Counter counter;
  Notes notes;
  double scale = 0;
  double lr = 0;
};

/// Three epochs with dropout, shuffling, a schedule, accumulation and, as wanted, loss scaling. Saves after micro-step
/// `save_at`, or begins from that checkpoint.
End run(const fs::path& folder, int64_t save_at, bool resume, const std::string& precision, bool safe = true) {
  AcceleratorState::reset(false);
  GradientState::reset();
  torch::manual_seed(7 + (resume ? 100 : 0) + (support::is_rank() ? rank() : 0));
  Accelerator accelerator({.mixed_precision = precision,
                           .gradient_accumulation_steps = 3,
                           .dataloader_config = {.use_stateful_dataloader = true},
                           .kwargs_handlers = {GradScalerKwargs{.init_scale = 64, .growth_interval = 2}}});
  auto net = make_net();
  auto optimizer = torch::optim::AdamW(net->parameters(), 0.01);
  auto [model, opt, sched, loader] =
      accelerator.prepare(net, optimizer, optim::cosine_schedule_with_warmup(optimizer, 2, 60),
                          data::DataLoader(rows(44), {.batch_size = 4, .shuffle = true}));
  End end;
  accelerator.register_for_checkpointing(end.counter, end.notes);
  if (resume) accelerator.load_state(folder);
  while (loader.iteration() < 3)
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate(model);
      const auto loss = (model(batch) - batch.sum()).pow(2).mean();
      accelerator.backward(loss);
      opt.step();
      sched.step();
      opt.zero_grad();
      end.losses.push_back(loss.item<double>());
      ++end.counter.answer;
      end.notes.lines.push_back("step " + std::to_string(end.counter.answer));
      end.notes.best = loss.item<double>();
      if (!resume && end.counter.answer == save_at) accelerator.save_state(folder, safe);
    }
  end.state = state_of(*net);
  end.lr = sched.get_last_lr()[0];
  if (accelerator.scaler()) end.scale = accelerator.scaler()->get_scale();
  return end;
}

void expect_resumes(const fs::path& folder, int64_t save_at, const std::string& precision, bool safe = true) {
  SCOPED_TRACE("saved after micro-step " + std::to_string(save_at) + ", " + precision);
  const End whole = run(folder, save_at, false, precision, safe), resumed = run(folder, save_at, true, precision);
  ASSERT_GT(whole.losses.size(), static_cast<size_t>(save_at));
  ASSERT_EQ(resumed.losses.size(), whole.losses.size() - static_cast<size_t>(save_at));
  EXPECT_TRUE(std::equal(resumed.losses.begin(), resumed.losses.end(), whole.losses.begin() + save_at))
      << "the resumed run takes other steps";
  EXPECT_TRUE(same(resumed.state, whole.state)) << "the resumed run ends elsewhere";
  EXPECT_EQ(resumed.counter.answer, whole.counter.answer);
  EXPECT_EQ(resumed.notes.lines, whole.notes.lines);
  EXPECT_EQ(resumed.notes.best, whole.notes.best);
  EXPECT_EQ(resumed.lr, whole.lr);
  EXPECT_EQ(resumed.scale, whole.scale);
}

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

}  // namespace

TEST_F(CheckpointTest, ResumedRunIsTheUninterruptedOneBitByBit) {
  expect_resumes(folder / "mid-epoch", 17, "no");  // after an optimizer step
  expect_resumes(folder / "epoch", 11, "no");      // the last batch of an epoch
  expect_resumes(folder / "fp16", 17, "fp16");
  expect_resumes(folder / "bin", 17, "bf16", false);
  // In the middle of an accumulation group, whose gradients are kept.
  expect_resumes(folder / "group", 16, "no");
  expect_resumes(folder / "group fp16", 18, "fp16");
  EXPECT_TRUE(files_in(folder / "group").contains("gradients_0.bin"));
  EXPECT_EQ(files_in(folder / "fp16"),
            (std::set<std::string>{"model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt",
                                   "dl_state_dict.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl",
                                   "custom_checkpoint_1.pkl", "checkpoint.json"}));
  EXPECT_TRUE(files_in(folder / "bin").contains("pytorch_model.bin"));
}

RANKS_TEST(CheckpointRanks, ResumedRunIsTheUninterruptedOneBitByBit, 2) {
  const PartialState state;
  expect_resumes(fs::path(support::scratch_dir()) / "two", 6, "no");
  expect_resumes(fs::path(support::scratch_dir()) / "two fp16", 9, "fp16");
  expect_resumes(fs::path(support::scratch_dir()) / "two, group", 7, "no");
  EXPECT_TRUE(files_in(fs::path(support::scratch_dir()) / "two, group").contains("gradients_1.bin"));
  EXPECT_FALSE(files_in(fs::path(support::scratch_dir()) / "two").contains("gradients_0.bin"));
  EXPECT_TRUE(files_in(fs::path(support::scratch_dir()) / "two").contains("random_states_1.pkl"));
}

namespace {

/// Groups of two micro-steps: both layers get gradients in the first, in the one that synchronises `first` alone does.
struct HalfUsed {
  bool sharded, one_model, clips;
  fs::path load = {}, save = {};  ///< after the third of six micro-steps, in the middle of the second group
};

struct PairImpl : torch::nn::Module {
  PairImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(3, 1));
    second = register_module("second", torch::nn::Linear(3, 1));
  }
  at::Tensor forward(const at::Tensor& x, bool both) { return both ? first(x) + second(x) : first(x); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Pair);

constexpr double kNorm = 0.3;

at::Tensor rows_of(int64_t step) {
  return torch::randn({8, 3}, at::detail::createCPUGenerator(static_cast<uint64_t>(30 + step)));
}
at::Tensor loss_of(const at::Tensor& y) { return (y - 1).pow(2).mean(); }

/// The weights at the end, on rank 0 at least.
std::map<std::string, at::Tensor> train(const HalfUsed& how) {
  AcceleratorState::reset();
  GradientState::reset();
  std::optional<FullyShardedDataParallelPlugin> plugin;
  if (how.sharded) plugin.emplace();
  Accelerator accelerator({.gradient_accumulation_steps = 2,
                           .cpu = true,
                           .fsdp_plugin = plugin,
                           .kwargs_handlers = {DistributedDataParallelKwargs{.find_unused_parameters = true}}});
  Pair pair;
  torch::optim::SGD optimizer(pair->parameters(), 0.1);
  const auto steps = [&](auto& opt, const auto& forward, const auto&... models) {
    if (!how.load.empty()) accelerator.load_state(how.load);
    for (int64_t step = how.load.empty() ? 0 : 3; step < 6; ++step) {
      const auto scope = accelerator.accumulate(models...);
      const auto mine = rows_of(step).narrow(0, 8 / world_size() * rank(), 8 / world_size());
      accelerator.backward(loss_of(forward(mine, step % 2 == 0)));
      if (how.clips && accelerator.sync_gradients()) accelerator.clip_grad_norm_(pair->parameters(), kNorm);
      opt.step(), opt.zero_grad();
      if (step == 2 && !how.save.empty()) accelerator.save_state(how.save);
    }
  };
  if (how.one_model) {
    auto [m, opt] = accelerator.prepare(pair, optimizer);
    steps(opt, m, m);
    return accelerator.get_state_dict(m);
  }
  auto [a, b, opt] = accelerator.prepare(pair->first, pair->second, optimizer);
  steps(
      opt, [&a = a, &b = b](const at::Tensor& x, bool both) { return both ? a(x) + b(x) : a(x); }, a, b);
  auto weights = accelerator.get_state_dict(a);
  for (const auto& [name, value] : accelerator.get_state_dict(b)) weights["second." + name] = value;
  return weights;
}

std::map<std::string, at::Tensor> train_alone(const HalfUsed& how) {
  Pair pair;
  torch::optim::SGD optimizer(pair->parameters(), 0.1);
  for (int64_t step = 0; step < 6; ++step) {
    (loss_of(pair->forward(rows_of(step), step % 2 == 0)) / 2).backward();
    if (step % 2 == 0) continue;
    if (how.clips) torch::nn::utils::clip_grad_norm_(pair->parameters(), kNorm);
    optimizer.step(), optimizer.zero_grad();
  }
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : pair->named_parameters()) {
    auto name = item.key();
    if (!how.one_model && name.starts_with("first.")) name = name.substr(6);
    weights[name] = item.value().detach();
  }
  return weights;
}

}  // namespace

RANKS_TEST(CheckpointRanks, WhatTheLastMicroStepLeavesOutIsAveragedAlsoInAResumedRun, 2) {
  const PartialState state({.cpu = true});
  for (const bool sharded : {false, true})
    for (const bool one_model : {false, true})
      for (const bool clips : {false, true}) {
        SCOPED_TRACE(testing::Message() << (sharded ? "FSDP" : "DDP") << (one_model ? ", one model" : ", two models")
                                        << (clips ? ", clipped" : ""));
        HalfUsed how{.sharded = sharded, .one_model = one_model, .clips = clips};
        const auto folder =
            fs::path(support::scratch_dir()) / std::to_string(4 * int{sharded} + 2 * int{one_model} + int{clips});
        const auto plain = train_alone(how);
        how.save = folder;
        const auto whole = train(how);
        how.save.clear(), how.load = folder;
        const auto resumed = train(how);
        if (sharded && rank() > 0) continue;
        ASSERT_EQ(whole.size(), plain.size());
        for (const auto& [name, value] : whole) {
          // Sums in another order: a few roundings of fp32.
          EXPECT_TRUE(torch::allclose(value, plain.at(name), 1e-5, 1e-6)) << name << value << plain.at(name);
          EXPECT_TRUE(torch::equal(value, resumed.at(name))) << name << value << resumed.at(name);
        }
      }
}

// In fp16 gradients wait multiplied by the scale, which a run without one must not step on.
TEST_F(CheckpointTest, AGroupGoesOnWithoutTheScaleItWasSavedWith) {
  const auto begin = [&](const std::string& precision, GradientAverage average) {
    AcceleratorState::reset(false);
    GradientState::reset();
    return Accelerator({.mixed_precision = precision,
                        .cpu = true,
                        .gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = 2, .average = average},
                        .kwargs_handlers = {GradScalerKwargs{.init_scale = 64}}});
  };
  const auto net_of = [] {
    torch::manual_seed(3);
    return torch::nn::Linear(2, 1);
  };
  {
    auto accelerator = begin("fp16", GradientAverage::steps);
    auto net = net_of();
    auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    const auto scope = accelerator.accumulate(model);
    accelerator.backward(model(torch::tensor({{1.0F, 2.0F}})).sum());
    ASSERT_TRUE(net->weight.grad().equal(torch::tensor({{32.0F, 64.0F}}))) << net->weight.grad();
    accelerator.save_state(folder);
  }
  {
    auto accelerator = begin("no", GradientAverage::steps);
    auto net = net_of();
    auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    accelerator.load_state(folder);
    EXPECT_TRUE(net->weight.grad().equal(torch::tensor({{0.5F, 1.0F}}))) << net->weight.grad();
  }
  auto accelerator = begin("no", GradientAverage::tokens);
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
              HasSubstr("whose gradients are averaged by steps, expected tokens as here"));
}

/// States of its own under options of LibTorch's: nobody knows what they are.
struct Borrowed : torch::optim::Optimizer {
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    at::Tensor slow;
  };
  explicit Borrowed(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::AdamOptions>(0.1)) {}
  at::Tensor step(LossClosure = nullptr) override {
    for (auto& parameter : param_groups_[0].params()) {
      auto state = std::make_unique<State>();
      state->slow = parameter.detach().clone();
      state_[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
    return {};
  }
};

TEST_F(CheckpointTest, OptimizersWithStatesOfTheirOwnAreNamed) {
  Accelerator accelerator({.cpu = true});
  torch::nn::Linear net(2, 1);
  auto own = Borrowed(net->parameters());
  auto [model, optimizer] = accelerator.prepare(net, own);
  accelerator.backward(model(torch::ones({1, 2})).sum());
  optimizer.step();
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.save_state(folder); }),
              testing::AllOf(HasSubstr("Borrowed"), HasSubstr("OwnStateDict")));
}

namespace {

/// Computes with a running mean, which is each rank's own where nobody gives it rank 0's.
struct CentredImpl : torch::nn::Module {
  CentredImpl() {
    torch::manual_seed(12);
    linear = register_module("linear", torch::nn::Linear(4, 2));
    mean = register_buffer("mean", torch::zeros({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) mean.mul_(0.9).add_(x.detach().mean(0), 0.1);
    return linear(x - mean.clone());
  }
  torch::nn::Linear linear{nullptr};
  at::Tensor mean;
};
TORCH_MODULE(Centred);

/// The results of this rank's ten micro-steps, of which two are a group.
std::vector<at::Tensor> train_centred(const std::string& layout, const fs::path& folder, int64_t from,
                                      int64_t save_at = -1) {
  AcceleratorState::reset(false);
  GradientState::reset();
  AcceleratorOptions options{.gradient_accumulation_steps = 2, .cpu = true};
  if (layout == "FSDP") options.fsdp_plugin = FullyShardedDataParallelPlugin{};
  if (layout == "own buffers") options.kwargs_handlers = {DistributedDataParallelKwargs{.broadcast_buffers = false}};
  Accelerator accelerator(std::move(options));
  Centred net;
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  if (from > 0) accelerator.load_state(folder);
  std::vector<at::Tensor> seen;
  for (int64_t step = from; step < 10; ++step) {
    if (step == save_at) accelerator.save_state(folder);
    auto scope = accelerator.accumulate(model);
    const auto output = model(torch::full({3, 4}, 0.3 * static_cast<double>(step + 1) * (1.0 + rank())));
    accelerator.backward(output.pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
    seen.push_back(output.detach().clone());
    seen.push_back(net->mean.clone());
  }
  return seen;
}

}  // namespace

RANKS_TEST(CheckpointRanks, BuffersOfEachRankComeBack, 2, 3) {
  for (const std::string layout : {"DDP", "own buffers", "FSDP"})
    for (const int64_t at : {6, 7}) {  // between groups, and in the middle of one
      SCOPED_TRACE(testing::Message() << layout << ", saved after " << at);
      const auto folder = fs::path(support::scratch_dir()) / (layout + std::to_string(at));
      const auto whole = train_centred(layout, folder, 0, at), resumed = train_centred(layout, folder, at);
      ASSERT_EQ(resumed.size(), whole.size() - static_cast<size_t>(2 * at));
      for (size_t i = 0; i < resumed.size(); ++i)
        EXPECT_TRUE(resumed[i].equal(whole[i + static_cast<size_t>(2 * at)])) << i << resumed[i];
    }
}

RANKS_TEST(CheckpointRanks, BuffersOfRanksThatAreNotThereBecomeRank0s, 2) {
  const fs::path folder = support::scratch_dir();
  const auto own = folder / ("buffers_" + std::to_string(rank()) + ".bin");
  Accelerator accelerator({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}});
  Centred net;
  auto model = accelerator.prepare(net);
  net->mean.fill_(rank() + 1);
  accelerator.save_state(folder);
  fs::remove(folder / "checkpoint.json");  // which says what the file was
  auto file = checkpointing::load_object(own).toGenericDict();
  file.insert_or_assign("num_processes", 3);
  checkpointing::save_object(file, own);
  accelerator.load_state(folder);
  EXPECT_TRUE(net->mean.equal(torch::ones({4}))) << net->mean;

  file.insert_or_assign("num_processes", 2);
  checkpointing::save_object(file, own);
  accelerator.load_state(folder);
  EXPECT_TRUE(net->mean.equal(torch::full({4}, rank() + 1.0))) << net->mean;

  for (const auto& wrong :
       {c10::IValue(3), c10::IValue(c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()))}) {
    checkpointing::save_object(wrong, own);
    EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
                testing::AllOf(HasSubstr("buffers_"), HasSubstr("it is damaged or not written by save_state")));
  }
  checkpointing::save_object(file, own);
  accelerator.wait_for_everyone();
  if (rank() == 1) fs::remove(own);
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }), HasSubstr("buffers_1.bin"));
  EXPECT_TRUE(net->mean.equal(torch::full({4}, rank() + 1.0))) << "a refused load has changed it";
}

namespace {

/// The first momentum in an optimizer's file.
double momentum_in(const fs::path& file) {
  const auto states = checkpointing::load_object(file).toGenericDict().at("state").toGenericDict();
  return states.begin()->value().toGenericDict().at("momentum_buffer").toTensor().flatten()[0].item<double>();
}

}  // namespace

// Ranks keep states alike, so that each of them may write a file for all. Here they say who has.
RANKS_TEST(CheckpointRanks, RanksThatSeeOneDiskShareOutWhatTheyHaveAlike, 1, 2, 3) {
  for (const bool behind : {false, true}) {
    SCOPED_TRACE(behind);
    CheckpointTest::reset();
    const fs::path folder = fs::path(support::scratch_dir()) / (behind ? "behind" : "at once");
    Accelerator accelerator({.cpu = true});
    torch::nn::Linear net(4, 2), other(4, 2);
    const auto sgd = [](auto& of) {
      return torch::optim::SGD(of->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    };
    auto [model, second, opt, opt_of_second] = accelerator.prepare(net, other, sgd(net), sgd(other));
    accelerator.backward(model(torch::ones({2, 4})).sum() + second(torch::ones({2, 4})).sum());
    opt.step();
    opt_of_second.step();
    for (auto* one : {&opt, &opt_of_second})
      for (auto& [parameter, state] : one->optimizer().state())
        static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().fill_(rank());
    {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : net->parameters()) parameter.fill_(rank());
    }
    accelerator.save_state(folder, {.behind_training = behind});
    accelerator.wait_for_checkpoint();
    accelerator.wait_for_everyone();
    EXPECT_EQ(momentum_in(folder / "optimizer.bin"), static_cast<double>(1 % world_size()));
    EXPECT_EQ(momentum_in(folder / "optimizer_1.bin"), static_cast<double>(2 % world_size()));
    for (const auto& [name, tensor] : load_checkpoint_files(folder / "model.safetensors"))
      EXPECT_TRUE(tensor.eq(0).all().item<bool>()) << name << " is not rank 0's";
    accelerator.wait_for_everyone();
  }
}

// Two machines without a common file system: each rank is one, and has folders of its own.
RANKS_TEST(CheckpointRanks, EachMachineCanWriteItsOwnCopy, 2) {
  ::setenv("LOCAL_RANK", "0", 1);
  ::setenv("LOCAL_WORLD_SIZE", "1", 1);
  const auto disk = fs::path(support::scratch_dir()) / ("machine " + std::to_string(rank()));
  for (const bool each : {true, false}) {
    Accelerator accelerator(
        {.project_config = {.project_dir = disk, .automatic_checkpoint_naming = true, .save_on_each_node = each}});
    auto net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto [model, opt] = accelerator.prepare(net, optimizer);
    const bool writes = each || rank() == 0;
    const std::string own = "random_states_" + std::to_string(rank()) + ".pkl";
    if (!each) fs::remove_all(disk), fs::create_directories(disk);
    accelerator.wait_for_everyone();
    const auto folder = accelerator.save_state();
    EXPECT_EQ(files_in(folder),
              writes ? (std::set<std::string>{"checkpoint.json", "model.safetensors", "optimizer.bin", own})
                     : (std::set<std::string>{"checkpoint.json", own}));
    EXPECT_EQ(files_in(folder.parent_path()), std::set<std::string>{"checkpoint_0"}) << "something was left";
    accelerator.save(c10::IValue(3), disk / "object");
    accelerator.save_model(net, disk / "weights");
    EXPECT_EQ(fs::exists(disk / "object"), writes);
    EXPECT_EQ(fs::exists(disk / "weights" / "model.safetensors"), writes);
    if (each) accelerator.load_state();
    accelerator.free_memory();
  }
}

TEST_F(CheckpointTest, AutomaticNamesLimitAndNewest) {
  const ProjectConfiguration project{.project_dir = folder, .automatic_checkpoint_naming = true, .total_limit = 2};
  {
    Accelerator accelerator({.project_config = project});
    Counter counter;
    accelerator.register_for_checkpointing(counter);
    std::vector<fs::path> hooks;
    auto hook = accelerator.register_save_state_pre_hook([&](const fs::path& where) { hooks.push_back(where); });
    for (counter.answer = 0; counter.answer < 12; ++counter.answer)
      EXPECT_EQ(accelerator.save_state(), folder / "checkpoints" / ("checkpoint_" + std::to_string(counter.answer)));
    EXPECT_EQ(files_in(folder / "checkpoints"), (std::set<std::string>{"checkpoint_10", "checkpoint_11"}))
        << "10 is newer than 9";
    EXPECT_EQ(hooks.size(), 12u);
    hook = Scope();
    counter.answer = -1;
    auto load_hook = accelerator.register_load_state_pre_hook([&](const fs::path& where) { hooks.push_back(where); });
    accelerator.load_state();
    EXPECT_EQ(counter.answer, 11);
    EXPECT_EQ(hooks.back(), folder / "checkpoints" / "checkpoint_11");
    EXPECT_EQ(hooks.size(), 13u) << "a hook whose scope has ended is not called";
    EXPECT_EQ(accelerator.save_iteration(), 12);
  }
  Accelerator second({.project_config = {.project_dir = folder, .automatic_checkpoint_naming = true, .iteration = 11}});
  EXPECT_THAT(message_of<CheckpointError>([&] { second.save_state(); }), HasSubstr("exists already"));
  Accelerator third;
  EXPECT_THAT(message_of<ConfigError>([&] { third.save_state(); }), HasSubstr("automatic_checkpoint_naming"));
  EXPECT_THROW(third.load_state(), ConfigError);
  Accelerator fourth({.project_config = {.project_dir = folder / "none", .automatic_checkpoint_naming = true}});
  EXPECT_THAT(message_of<CheckpointError>([&] { fourth.load_state(); }), HasSubstr("found no checkpoint_<n>"));
}

TEST_F(CheckpointTest, NoCheckpointOfAnEarlierRunIsLost) {
  const auto all = folder / "checkpoints";
  ProjectConfiguration project{
      .project_dir = folder, .automatic_checkpoint_naming = true, .total_limit = 3, .iteration = 13};
  const auto three = [] { return std::set<std::string>{"checkpoint_13", "checkpoint_14", "checkpoint_15"}; };
  Counter counter;
  {
    Accelerator earlier({.project_config = project});
    earlier.register_for_checkpointing(counter);
    for (int i = 0; i < 3; ++i) earlier.save_state();
  }
  project.iteration = 0;
  Accelerator accelerator({.project_config = project});
  accelerator.register_for_checkpointing(counter);
  const auto text = message_of<CheckpointError>([&] { accelerator.save_state(); });
  for (const char* part : {"checkpoint_15' exists already", "number 0", "iteration to 16", "load_state()"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_EQ(files_in(all), three()) << "what was there was touched, or something was left";
  accelerator.load_state();
  EXPECT_EQ(accelerator.save_state(), all / "checkpoint_16");
  EXPECT_EQ(files_in(all), (std::set<std::string>{"checkpoint_14", "checkpoint_15", "checkpoint_16"}));
  project.total_limit = 0;
  Accelerator none({.project_config = project});
  EXPECT_THAT(message_of<ConfigError>([&] { none.save_state(); }), HasSubstr("total_limit is 0"));
}

TEST_F(CheckpointTest, ACheckpointThatLacksSomethingIsPassedOverByName) {
  ProjectConfiguration project{.project_dir = folder, .automatic_checkpoint_naming = true, .total_limit = 2};
  Accelerator accelerator({.project_config = project});
  auto net = make_net();
  accelerator.prepare(net);
  Counter counter;
  accelerator.register_for_checkpointing(counter);
  for (counter.answer = 0; counter.answer < 4; ++counter.answer) accelerator.save_state();
  const auto all = folder / "checkpoints";
  fs::remove(all / "checkpoint_3" / "model.safetensors");
  fs::create_directories(all / "checkpoint_7");
  testing::internal::CaptureStderr();
  accelerator.load_state();
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(counter.answer, 2);
  EXPECT_THAT(said, AllOf(HasSubstr("checkpoint_2', the newest checkpoint that is complete"),
                          HasSubstr("checkpoint_7', which has no model.safetensors"),
                          HasSubstr("checkpoint_3', which has no model.safetensors")));
  // The next one is the newest, and incomplete ones don't count when old ones go.
  EXPECT_EQ(accelerator.save_state(), all / "checkpoint_8");
  EXPECT_EQ(files_in(all), (std::set<std::string>{"checkpoint_2", "checkpoint_3", "checkpoint_7", "checkpoint_8"}));
  for (const char* name : {"checkpoint_2", "checkpoint_8"}) fs::remove(all / name / "custom_checkpoint_0.pkl");
  EXPECT_THAT(
      message_of<CheckpointError>([&] { accelerator.load_state(); }),
      AllOf(HasSubstr("found no checkpoint_<n>"), HasSubstr("checkpoint_8', which has no custom_checkpoint_0.pkl")));
}

TEST_F(CheckpointTest, AFolderAppearsWholeOrNotAtAll) {
  struct Failing : Counter {
    bool fails = false;
    c10::IValue state_dict() const {
      if (fails) throw std::runtime_error("no state today");
      return Counter::state_dict();
    }
  };
  Accelerator accelerator;
  auto net = make_net();
  accelerator.prepare(net);
  Failing counter;
  accelerator.register_for_checkpointing(counter);
  const auto where = folder / "new";
  auto hook = accelerator.register_save_state_pre_hook([&](const fs::path& unfinished) {
    EXPECT_FALSE(fs::exists(where / "model.safetensors"));
    std::ofstream(unfinished / "notes.txt") << counter.answer;
  });
  counter.fails = true;
  EXPECT_THROW(accelerator.save_state(where), std::runtime_error);
  EXPECT_EQ(files_in(folder), std::set<std::string>{}) << "a save that fails leaves nothing";
  counter.fails = false;
  counter.answer = 1;
  accelerator.save_state(where / "");
  const std::set<std::string> files{"checkpoint.json", "custom_checkpoint_0.pkl", "model.safetensors", "notes.txt",
                                    "random_states_0.pkl"};
  EXPECT_EQ(files_in(where), files);
  EXPECT_EQ(files_in(folder), std::set<std::string>{"new"});
  // Into a folder that has something in it: the older checkpoint goes, somebody's files stay.
  hook = Scope();
  std::ofstream(where / "log.txt") << "mine";
  fs::create_directories(where / "pytorch_model_fsdp_0");
  std::ofstream(where / "gradients_0.bin") << "of an unfinished group";
  counter.answer = 2;
  counter.fails = true;
  EXPECT_THROW(accelerator.save_state(where), std::runtime_error);
  EXPECT_TRUE(fs::exists(where / "pytorch_model_fsdp_0")) << "the older one is whole until the new one is";
  counter.fails = false;
  accelerator.save_state(where, /*safe_serialization=*/false);
  EXPECT_EQ(files_in(where), (std::set<std::string>{"checkpoint.json", "custom_checkpoint_0.pkl", "log.txt",
                                                    "notes.txt", "pytorch_model.bin", "random_states_0.pkl"}));
  accelerator.load_state(where);
  EXPECT_EQ(counter.answer, 2);
  // A crash while files of a complete checkpoint take the places of older ones: the next run goes on with that.
  counter.answer = 3;
  accelerator.save_state(folder / "next");
  fs::rename(folder / "next", where / ".finished");
  fs::rename(where / ".finished" / "random_states_0.pkl", where / "random_states_0.pkl");
  fs::create_directories(folder / "victim");
  std::ofstream(where / ".finished" / ".stale") << "pytorch_model.bin\n../victim\n"
                                                << (folder / "victim").string() << "\nlog.txt\n";
  accelerator.load_state(where);
  EXPECT_EQ(counter.answer, 3);
  EXPECT_EQ(files_in(where), (std::set<std::string>{"checkpoint.json", "custom_checkpoint_0.pkl", "log.txt",
                                                    "model.safetensors", "notes.txt", "random_states_0.pkl"}));
  EXPECT_TRUE(fs::exists(folder / "victim")) << "a stranger's list names what no checkpoint has";
}

namespace {

constexpr int64_t kRowsOfPart = 24;

/// A part of a run over kRowsOfPart samples in one pass: from its start, or from a checkpoint, to micro-step `save_at`,
/// or to its end.
struct Part {
  int64_t ranks = 1, batch_size = 1, num_steps = 1;
  bool shuffle = false;
  bool resume = false;
  int64_t save_at = 0;  ///< 0: at the end of the pass the weights are saved instead
  GradientAverage average = GradientAverage::steps;
  ACCELERATE_FIELDS(ranks, batch_size, num_steps, shuffle, resume, save_at, average)
};

void run_part(const Part& part, const fs::path& folder) {
  AcceleratorState::reset(false);
  GradientState::reset();
  torch::manual_seed(part.resume ? 1 : 2);
  Accelerator accelerator({.dataloader_config = {.use_stateful_dataloader = true},
                           .gradient_accumulation_plugin =
                               GradientAccumulationPlugin{.num_steps = part.num_steps, .average = part.average}});
  torch::nn::Linear net(4, 2);
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(0.5);
  }
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto [model, opt, loader] = accelerator.prepare(
      net, optimizer, data::DataLoader(rows(kRowsOfPart), {.batch_size = part.batch_size, .shuffle = part.shuffle}));
  if (part.resume) {
    const auto said = support::warnings_of([&] { accelerator.load_state(folder / "checkpoint"); });
    const bool new_rank =
        !fs::exists(folder / "checkpoint" / ("random_states_" + std::to_string(accelerator.process_index()) + ".pkl"));
    if (new_rank) EXPECT_THAT(said, HasSubstr("it was saved by fewer processes"));
    else EXPECT_THAT(said, testing::Not(HasSubstr("random generators")));
  }
  std::ofstream seen(folder / "seen", std::ios::app);
  int64_t step = 0;
  for (auto& batch : loader) {
    auto scope = accelerator.accumulate(model);
    const auto loss = (model(batch) - batch.sum(1, true)).pow(2).mean();
    if (part.average == GradientAverage::tokens) accelerator.backward(loss, batch.size(0));
    else accelerator.backward(loss);
    opt.step();
    opt.zero_grad();
    const auto all = accelerator.gather_for_metrics(batch.select(1, 0).contiguous());
    if (accelerator.is_main_process())
      for (int64_t i = 0; i < all.size(0); ++i) seen << std::lround(100 * all[i].item<double>()) << std::endl;
    if (++step == part.save_at) {
      accelerator.save_state(folder / "checkpoint");
      return;
    }
  }
  if (accelerator.is_main_process())
    save_safetensors(folder / "weights", {{"weight", net->weight.detach()}, {"bias", net->bias.detach()}}, {});
}

/// In this process or, for several, in ranks. @return what the first rank printed, if they failed
std::string run_part_in_ranks(const Part& part, const fs::path& folder, const std::string& test) {
  fs::create_directories(folder);
  if (part.ranks == 1) {
    const std::string what = message_of<CheckpointError>([&] {
      run_part(part, folder);
      throw CheckpointError("");
    });
    AcceleratorState::reset(true);
    return what;
  }
  checkpointing::save_object(checkpointing::bytes_as_object(to_bytes(part)), folder / "part");
  std::string failure;
  for (const auto& result :
       support::run_test_in_ranks(test, {.world_size = part.ranks, .env = {{"PART_FOLDER", folder.string()}}}))
    if (result.exit_code != 0) failure += result.output;
  return failure;
}

}  // namespace

// Not under 3 s: nine starts of ranks.
TEST(CheckpointRanks, ARunGoesOnWithAnotherNumberOfRanks) {
  const std::string name = "CheckpointRanks.ARunGoesOnWithAnotherNumberOfRanks";
  if (support::is_rank()) {
    const fs::path folder = std::getenv("PART_FOLDER");
    return run_part(from_bytes<Part>(checkpointing::object_as_bytes(checkpointing::load_object(folder / "part"))),
                    folder);
  }
  const fs::path folder = support::scratch_dir();
  int number = 0;
  const auto weights = [](const fs::path& of) { return load_safetensors(of / "weights"); };
  const auto expect_goes_on = [&](Part first, Part second, bool same_weights) {
    SCOPED_TRACE(testing::Message() << first.ranks << " ranks, batches of " << first.batch_size << ", micro-step "
                                    << first.save_at << " of " << first.num_steps << ", then " << second.ranks << ", "
                                    << second.batch_size << ", " << second.num_steps);
    const auto here = folder / std::to_string(number++);
    second.resume = true;
    ASSERT_EQ(run_part_in_ranks(first, here, name), "");
    ASSERT_EQ(run_part_in_ranks(second, here, name), "");
    std::vector<int64_t> seen;
    std::ifstream in(here / "seen");
    for (int64_t sample = 0; in >> sample;) seen.push_back(sample);
    std::sort(seen.begin(), seen.end());
    std::vector<int64_t> every(kRowsOfPart);
    std::iota(every.begin(), every.end(), 0);
    EXPECT_EQ(seen, every) << "not each sample once";
    if (!same_weights) return;
    const Part whole{
        .batch_size = first.batch_size * first.ranks, .num_steps = first.num_steps, .average = first.average};
    ASSERT_EQ(run_part_in_ranks(whole, here / "whole", name), "");
    for (const auto& [key, value] : weights(here / "whole"))
      EXPECT_TRUE(torch::allclose(weights(here).at(key), value, 1e-5, 1e-6)) << key;
  };
  // Global batches stay as large: in the middle of a group and at its end.
  expect_goes_on({.ranks = 1, .batch_size = 4, .num_steps = 3, .save_at = 2},
                 {.ranks = 2, .batch_size = 2, .num_steps = 3}, true);
  expect_goes_on({.ranks = 2, .batch_size = 2, .num_steps = 2, .save_at = 3},
                 {.ranks = 1, .batch_size = 4, .num_steps = 2}, true);
  expect_goes_on({.ranks = 3, .batch_size = 2, .num_steps = 2, .save_at = 1, .average = GradientAverage::tokens},
                 {.ranks = 2, .batch_size = 3, .num_steps = 2, .average = GradientAverage::tokens}, true);
  // Groups stay as large, of batches of one rank.
  expect_goes_on({.ranks = 1, .batch_size = 2, .num_steps = 4, .save_at = 6},
                 {.ranks = 2, .batch_size = 2, .num_steps = 2}, true);
  // Neither: every sample comes once all the same, and nobody waits for anybody.
  expect_goes_on({.ranks = 1, .batch_size = 2, .num_steps = 4, .shuffle = true, .save_at = 3},
                 {.ranks = 2, .batch_size = 2, .num_steps = 4, .shuffle = true}, false);
  expect_goes_on({.ranks = 2, .batch_size = 2, .num_steps = 4, .shuffle = true, .save_at = 3},
                 {.ranks = 3, .batch_size = 2, .num_steps = 4, .shuffle = true}, false);
  // Runs that can't go on the same are refused, on all ranks and with the numbers.
  const auto refused = folder / "refused";
  ASSERT_EQ(run_part_in_ranks({.ranks = 1, .batch_size = 2, .num_steps = 4, .save_at = 3}, refused, name), "");
  const auto text = run_part_in_ranks({.ranks = 2, .batch_size = 2, .num_steps = 2, .resume = true}, refused, name);
  EXPECT_THAT(text, HasSubstr("saved by 1 ranks after micro-step 3 of 4 of an accumulation group, and is loaded by 2 "
                              "ranks with groups of 2"));
  EXPECT_EQ(text.find("CommError"), std::string::npos);
}

TEST_F(CheckpointTest, HooksChangeWhatIsSavedAndLoaded) {
  Accelerator accelerator;
  auto first = make_net();
  torch::nn::Linear second(2, 2);
  accelerator.prepare(first, second);
  const auto before = state_of(*second);
  using Weights = Accelerator::ModelWeights;
  auto save_hook = accelerator.register_save_state_pre_hook(
      [&](const std::vector<ModelRef>& models, Weights& weights, const fs::path& unfinished) {
        ASSERT_EQ(models.size(), 2u);
        ASSERT_EQ(weights.size(), 2u);
        EXPECT_TRUE(weights[1].at("weight").equal(second->weight));
        weights[0].at("0.bias") = torch::full({8}, 7.0F);
        save_safetensors(unfinished / "my_linear.safetensors", weights[1], {});
        weights.pop_back();
      });
  accelerator.save_state(folder / "saved");
  EXPECT_EQ(files_in(folder / "saved"), (std::set<std::string>{"checkpoint.json", "model.safetensors",
                                                               "my_linear.safetensors", "random_states_0.pkl"}));
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder / "saved"); }),
              HasSubstr("model_1.safetensors"));
  {
    torch::NoGradGuard no_grad;
    second->weight.zero_();
  }
  auto load_hook = accelerator.register_load_state_pre_hook([&](std::vector<ModelRef>& models, const fs::path& from) {
    ASSERT_EQ(models.size(), 2u);
    checkpointing::load_state_dict(models.back(), load_safetensors(from / "my_linear.safetensors"));
    models.pop_back();
  });
  accelerator.load_state(folder / "saved");
  EXPECT_TRUE(first->named_parameters()["0.bias"].eq(7).all().item<bool>());
  EXPECT_TRUE(same(state_of(*second), before));
  save_hook = Scope();
  load_hook = Scope();
  accelerator.save_state(folder / "saved");
  EXPECT_TRUE(fs::exists(folder / "saved" / "model_1.safetensors"));
}

TEST_F(CheckpointTest, AHooksScopeMayOutliveTheAccelerator) {
  Scope save_hook, load_hook;
  {
    Accelerator accelerator;
    save_hook = accelerator.register_save_state_pre_hook([](const fs::path&) {});
    load_hook = accelerator.register_load_state_pre_hook([](const fs::path&) {});
  }
  save_hook = Scope();  // which would take it out of a list that is gone
  load_hook = Scope();
}

namespace {

torch::nn::Sequential layers(int64_t count, int64_t inputs, double value) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < count; ++i) net->push_back(torch::nn::Linear(i == 0 ? inputs : 3, 3));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(value);
  return net;
}

/// A checkpoint of `saved` layers of ones, loaded without strict into `here` layers of twos: what they have in common
/// is taken, and the rest stays.
void load_in_part(int64_t saved, int64_t here, const std::string& said, const AcceleratorOptions& options) {
  const fs::path folder = fs::path(support::scratch_dir()) / (std::to_string(saved) + "_" + std::to_string(here));
  {
    Accelerator accelerator(options);
    const auto model = accelerator.prepare(layers(saved, 4, 1));
    accelerator.save_state(folder);
  }
  Accelerator accelerator(options);
  const auto model = accelerator.prepare(layers(here, 4, 2));
  EXPECT_THROW(accelerator.load_state(folder), CheckpointError);
  const auto warned = support::warnings_of([&] { accelerator.load_state(folder, {.strict = false}); });
  EXPECT_THAT(warned, HasSubstr(rank() == 0 ? said : ""));
  EXPECT_EQ(warned.find("strict") != std::string::npos, rank() == 0) << warned;
  const auto state = accelerator.get_state_dict(model);
  for (const auto& [name, value] : state)
    EXPECT_TRUE(value.eq(name.starts_with("0.") ? 1 : 2).all().item<bool>()) << name << value;
  EXPECT_EQ(state.empty(), options.fsdp_plugin && rank() != 0);

  Accelerator third(options);
  const auto other = third.prepare(layers(1, 5, 2));
  EXPECT_THAT(message_of<CheckpointError>([&] { third.load_state(folder, {.strict = false}); }),
              HasSubstr("'0.weight': the file has [3, 4], the model [3, 5]"));
}

}  // namespace

RANKS_TEST(CheckpointRanks, NotStrictLoadsWhatBothHave, 1, 2) {
  load_in_part(1, 2, "the file does not have 2 ('1.bias', '1.weight'), the model does not have none", {});
  load_in_part(2, 1, "the file does not have none, the model does not have 2 ('1.bias', '1.weight')", {});
}

RANKS_TEST(CheckpointRanks, NotStrictLoadsWhatBothHaveInPieces, 2) {
  AcceleratorOptions options{.fsdp_plugin =
                                 FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict}};
  load_in_part(1, 2, "the file does not have 2 ('1.bias', '1.weight')", options);
}

TEST_F(CheckpointTest, WhatDoesNotFitChangesNothing) {
  const auto prepared = [&](Accelerator& accelerator, torch::nn::Sequential& net, torch::optim::Optimizer& optimizer,
                            Counter& counter) {
    accelerator.prepare(net, optimizer, optim::linear_schedule_with_warmup(optimizer, 1, 10));
    accelerator.register_for_checkpointing(counter);
    for (int i = 0; i < 2; ++i) {
      net->forward(torch::randn({4, 4})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  Accelerator accelerator;
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), 0.01);
  Counter counter{.answer = 5};
  prepared(accelerator, net, optimizer, counter);
  accelerator.save_state(folder / "good");
  fs::remove(folder / "good" / "checkpoint.json");  // with which nothing that was changed is read at all
  net->forward(torch::randn({4, 4})).sum().backward();
  optimizer.step();
  counter.answer = 6;
  const auto before = state_of(*net);
  static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).eps(1e-7);
  const auto moments = [&] {
    const auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
    std::vector<torch::Tensor> result{torch::tensor(options.eps())};
    for (auto& parameter : net->parameters()) {
      const auto& state =
          static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      result.push_back(state.exp_avg().clone());
      result.push_back(torch::tensor(state.step()));
    }
    return result;
  };
  const auto moments_before = moments();
  const auto refused = [&](const std::string& what, const std::function<void(const fs::path&)>& damage) {
    SCOPED_TRACE(what);
    const auto bad = folder / "bad";
    fs::remove_all(bad);
    fs::copy(folder / "good", bad);
    damage(bad);
    const auto text = message_of<CheckpointError>([&] { accelerator.load_state(bad); });
    EXPECT_TRUE(same(state_of(*net), before)) << "the model has changed";
    EXPECT_TRUE(same(moments(), moments_before)) << "the optimizer has changed";
    EXPECT_EQ(counter.answer, 6) << "the object has changed";
    return text;
  };
  const auto truncate = [](const char* name) {
    return [name](const fs::path& bad) { fs::resize_file(bad / name, fs::file_size(bad / name) / 2); };
  };
  for (const auto* name : {"optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"}) {
    EXPECT_THAT(refused(name, [&](const fs::path& bad) { fs::remove(bad / name); }), HasSubstr(name));
    EXPECT_THAT(refused(name, truncate(name)), HasSubstr(name));
    EXPECT_THAT(refused(name, [&](const fs::path& bad) { std::ofstream(bad / name) << "not an archive at all"; }),
                HasSubstr(name));
    EXPECT_THAT(refused(name, [&](const fs::path& bad) { std::ofstream(bad / name, std::ios::trunc); }),
                HasSubstr(name));
  }
  EXPECT_THAT(refused("model missing", [&](const fs::path& bad) { fs::remove(bad / "model.safetensors"); }),
              HasSubstr("model.safetensors"));
  EXPECT_THAT(refused("model cut", truncate("model.safetensors")), HasSubstr("model.safetensors"));
  // Files of another model: everything that differs is listed.
  const auto text = refused("another model", [&](const fs::path& bad) {
    save_safetensors(bad / "model.safetensors", {{"0.weight", torch::zeros({8, 5})}, {"other", torch::zeros({1})}}, {});
  });
  EXPECT_THAT(text, testing::AllOf(HasSubstr("'0.weight': the file has [8, 5], the model [8, 4]"),
                                   HasSubstr("'4.bias': missing"), HasSubstr("'other': not in the model")));
  EXPECT_FALSE(refused("another optimizer", [&](const fs::path& bad) {
                 torch::nn::Linear small(2, 1);
                 torch::optim::AdamW other(small->parameters(), 0.5);
                 small(torch::ones({1, 2})).sum().backward();
                 other.step();
                 checkpointing::save_object(AcceleratedOptimizer(other).state_dict(), bad / "optimizer.bin");
               }).empty());
  EXPECT_FALSE(refused("a scheduler that is a number", [&](const fs::path& bad) {
                 checkpointing::save_object(3, bad / "scheduler.bin");
               }).empty());
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder / "nowhere"); }),
              HasSubstr("not a folder"));
  std::ofstream(folder / "file") << "x";
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.save_state(folder / "file" / "below"); }),
              HasSubstr("can't be created"));
  // Generators that can't be read are no reason to refuse the rest; the good one still loads.
  fs::remove(folder / "good" / "random_states_0.pkl");
  accelerator.load_state(folder / "good");
  EXPECT_EQ(counter.answer, 5);
  EXPECT_FALSE(same(state_of(*net), before));
}

namespace {

/// checkpoint_peer.py's model, optimizer and step.
struct Peer {
  torch::nn::Sequential net{torch::nn::Linear(4, 3), torch::nn::Tanh(), torch::nn::Linear(3, 2)};
  torch::optim::AdamW optimizer{net->parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1)};
  Counter counter{.answer = 42};
  Accelerator accelerator;
  AcceleratedOptimizer opt = accelerator.prepare(optimizer);
  Prepared<torch::nn::Sequential> model = accelerator.prepare(net);
  AcceleratedScheduler sched =
      accelerator.prepare(optim::from_torch(optimizer, std::make_shared<torch::optim::StepLR>(optimizer, 100, 0.1)));

  Peer() { accelerator.register_for_checkpointing(counter); }
  void step(int64_t number) {
    accelerator.backward(model(torch::arange(8, torch::kFloat).view({2, 4}) / 10 + number).pow(2).mean());
    opt.step();
    opt.zero_grad();
  }
  /// Compares with the numbers that the script printed.
  void expect_weights(const std::string& output) {
    for (const auto& item : net->named_parameters()) {
      const auto at = output.find(item.key() + " ");
      ASSERT_NE(at, std::string::npos) << output;
      std::istringstream numbers(output.substr(at + item.key().size()));
      const auto flat = item.value().detach().flatten();
      for (int64_t i = 0; i < flat.numel(); ++i) {
        double value = 0;
        ASSERT_TRUE(numbers >> value);
        EXPECT_NEAR(flat[i].item<double>(), value, 2e-6) << item.key();
      }
    }
  }
};

}  // namespace

TEST_F(CheckpointTest, PythonReadsEveryFileAndGoesOn) {
  SKIP_WITHOUT_PYTHON();
  Peer peer;
  for (int64_t number : {0, 1}) {
    peer.step(number);
    peer.sched.step();
  }
  peer.accelerator.save_state(folder);
  const auto read = support::run_python("tests/dist/checkpoint_peer.py", {"read", folder.string()});
  ASSERT_EQ(read.exit_code, 0) << read.output;
  const auto draw = torch::randint(1000000000, {1}, torch::kLong).item<int64_t>();
  EXPECT_THAT(read.output, HasSubstr("lr 0.05 last_epoch 2 step 0 custom 42 draw " + std::to_string(draw)));
  for (int64_t number : {2, 3}) peer.step(number);
  peer.expect_weights(read.output);
}

TEST_F(CheckpointTest, WhatPythonWroteIsReadHere) {
  SKIP_WITHOUT_PYTHON();
  fs::create_directories(folder);
  const auto written = support::run_python("tests/dist/checkpoint_peer.py", {"write", folder.string()});
  ASSERT_EQ(written.exit_code, 0) << written.output;
  Peer peer;
  checkpointing::save_object(peer.counter.state_dict(), folder / "custom_checkpoint_0.pkl");
  peer.accelerator.load_state(folder);
  EXPECT_EQ(peer.sched.last_epoch(), 2);
  for (int64_t number : {2, 3}) peer.step(number);
  peer.expect_weights(written.output);
}

TEST_F(CheckpointTest, SaveModelHasTheReferencesLayout) {
  Accelerator accelerator;
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(10, 10), torch::nn::Linear(10, 10), torch::nn::Linear(10, 3));
  };
  auto model = accelerator.prepare(make());
  for (const bool safe : {true, false}) {
    const std::string stem = safe ? "model" : "pytorch_model", extension = safe ? ".safetensors" : ".bin";
    accelerator.save_model(model, folder / stem, "10GB", safe);
    EXPECT_EQ(files_in(folder / stem), (std::set<std::string>{stem + extension}));
    accelerator.save_model(model, folder / stem, "1KB", safe);
    const std::string first = stem + "-00001-of-00002" + extension, second = stem + "-00002-of-00002" + extension,
                      index = stem + extension + ".index.json";
    EXPECT_EQ(files_in(folder / stem), (std::set<std::string>{first, second, index}))
        << "the single file of before is gone";
    std::ifstream in(folder / stem / index);
    EXPECT_EQ(nlohmann::json::parse(in), (nlohmann::json{{"metadata", {{"total_size", 1012}}},
                                                         {"weight_map",
                                                          {{"0.bias", first},
                                                           {"0.weight", first},
                                                           {"1.bias", first},
                                                           {"1.weight", first},
                                                           {"2.bias", second},
                                                           {"2.weight", first}}}}));
  }
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.save_model(model, folder, "200B"); }), HasSubstr("200B"));

  // Tied weights are written once, and come back.
  struct Tied : torch::nn::Module {
    torch::nn::Linear a{nullptr};
    torch::Tensor b;
    Tied() {
      a = register_module("a", torch::nn::Linear(3, 3));
      b = register_parameter("b", a->weight);
    }
    torch::Tensor forward(const torch::Tensor& x) { return a(x); }
  };
  auto tied = std::make_shared<Tied>();
  accelerator.save_model(tied, folder / "tied");
  auto tensors = load_safetensors(folder / "tied" / "model.safetensors");
  EXPECT_EQ(tensors.size(), 2u);
  auto other = std::make_shared<Tied>();
  checkpointing::load_state_dict(ModelRef(other), tensors);
  EXPECT_TRUE(other->a->weight.equal(tied->a->weight));
  EXPECT_TRUE(other->b.is_same(other->a->weight));

  // Other values in its place: of tied weights one name does, and both are written once where they are one.
  const auto average = 2 * tied->a->weight.detach(), bias = 2 * tied->a->bias.detach();
  accelerator.save_model(tied, folder / "average", {{"a.weight", average}, {"a.bias", bias}, {"b", average}}, "0.02KB",
                         /*safe_serialization=*/false);
  EXPECT_EQ(files_in(folder / "average"),
            (std::set<std::string>{"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin",
                                   "pytorch_model.bin.index.json"}));
  load_checkpoint_in_model(ModelRef(other), folder / "average");
  EXPECT_TRUE(other->b.equal(average));
  accelerator.save_model(tied, folder / "average", {{"b", average}, {"a.bias", bias}});
  EXPECT_EQ(load_safetensors(folder / "average" / "model.safetensors").size(), 2u);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                accelerator.save_model(tied, folder / "never", {{"a.bias", average}, {"c", bias}});
              }),
              testing::AllOf(HasSubstr("'a.bias': the given state has [3, 3], the model [3]"),
                             HasSubstr("'a.weight': missing"), HasSubstr("'c': not in the model")));
  EXPECT_FALSE(fs::exists(folder / "never"));
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { accelerator.save_model(tied, folder / "never", std::map<std::string, torch::Tensor>()); }),
              HasSubstr("save on the main process"));
}
