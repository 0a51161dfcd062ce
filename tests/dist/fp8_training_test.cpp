// Prepared models in fp8: when products are in 8 bits, over ranks, sharded, saved and resumed.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "both_stores.hpp"
#include "message_of.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/sharding/counts.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

namespace fp8_training {
namespace {

using namespace accelerate;
using support::message_of;
using support::reset_states;
using support::warnings_of;
using testing::HasSubstr;
namespace fs = std::filesystem;
namespace nn = torch::nn;

constexpr int64_t kWidth = 32, kRows = 16;

/// Three layers, of which torchao's rule leaves the middle one in fp8. Its forward knows nothing of fp8.
struct MlpImpl : nn::Module {
  MlpImpl() {
    torch::manual_seed(7);
    first = register_module("first", nn::Linear(kWidth, 2 * kWidth));
    middle = register_module("middle", nn::Linear(2 * kWidth, 2 * kWidth));
    last = register_module("last", nn::Linear(2 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(middle(torch::tanh(first(x))))); }
  nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(Mlp);

at::Tensor input_of(int64_t step, int64_t rank = 0) {
  return torch::sin(torch::arange(kRows * kWidth).view({kRows, kWidth}) * (0.37 + 0.01 * static_cast<double>(step)) +
                    static_cast<double>(rank)) *
         static_cast<double>(1 + rank);
}

/// Steps of a fresh run; `before` and `after` a step may look.
struct Job {
  explicit Job(AcceleratorOptions options) : accelerator(std::move(options)), optimizer(net->parameters(), 0.05) {}

  double step(int64_t number) {
    double loss_value = 0;
    const auto scope = accelerator.accumulate(model);
    const at::Tensor x = input_of(number, accelerator.process_index());
    const at::Tensor loss = (model(x) - x).square().mean();
    loss_value = loss.item<double>();
    accelerator.backward(loss);
    if (clip && accelerator.sync_gradients())
      norm = accelerator.clip_grad_norm_(net->parameters(), *clip).item<double>();
    prepared_optimizer.step();
    prepared_optimizer.zero_grad();
    return loss_value;
  }
  std::vector<double> steps(int64_t from, int64_t to) {
    std::vector<double> losses;
    for (int64_t i = from; i < to; ++i) losses.push_back(step(i));
    return losses;
  }
  FP8Training& fp8() { return *model.core()->fp8; }

  Accelerator accelerator;
  Mlp net{};
  torch::optim::SGD optimizer;
  Prepared<Mlp> model = accelerator.prepare(net);
  AcceleratedOptimizer prepared_optimizer = accelerator.prepare(optimizer);
  std::optional<double> clip;
  double norm = 0;
};

AcceleratorOptions with(std::vector<KwargsHandler> handlers, int64_t micro_steps = 1) {
  reset_states();
  return {.mixed_precision = "fp8",
          .gradient_accumulation_steps = micro_steps,
          .cpu = true,
          .kwargs_handlers = std::move(handlers)};
}

std::vector<double> losses_of(std::vector<KwargsHandler> handlers, int64_t steps = 3) {
  Job run(with(std::move(handlers)));
  return run.steps(0, steps);
}

class Fp8Model : public testing::Test {
 protected:
  void TearDown() override { reset_states(); }
};

TEST_F(Fp8Model, ComputesInEightBitsWhileItTrains) {
  reset_states();
  Job plain({.mixed_precision = "bf16", .cpu = true});
  const at::Tensor x = input_of(0);
  const at::Tensor in_bf16 = plain.model(x);
  for (const bool during_eval : {false, true}) {
    Job run(with({TERecipeKwargs{.use_autocast_during_eval = during_eval}}));
    const at::Tensor in_fp8 = run.model(x);
    EXPECT_EQ(in_fp8.scalar_type(), at::kFloat) << "results come back as without it";
    EXPECT_EQ(run.fp8().counts().fp8_products, 3);
    const double difference = (in_fp8 - in_bf16).abs().max().item<double>() / in_bf16.abs().max().item<double>();
    // Three products of numbers with 3 bits behind the point: a few percent; bf16 alone is off by a few thousandths.
    EXPECT_GT(difference, 1e-3);
    EXPECT_LT(difference, 0.2);
    run.net->eval();
    const at::NoGradGuard no_grad;
    const at::Tensor evaluated = run.model(x);
    EXPECT_EQ(run.fp8().counts().fp8_products, during_eval ? 6 : 3);
    EXPECT_EQ(torch::equal(evaluated, in_bf16), !during_eval);
    EXPECT_EQ(run.net->forward(x).scalar_type(), at::kFloat) << "the module by itself computes as ever";
    EXPECT_EQ(run.fp8().counts().fp8_products, during_eval ? 6 : 3);
  }
}

TEST_F(Fp8Model, EachSettingChangesTheRun) {
  const auto usual = losses_of({TERecipeKwargs{}}, 6);
  EXPECT_EQ(losses_of({TERecipeKwargs{}}, 6), usual);
  const std::vector<std::pair<const char*, TERecipeKwargs>> settings = {
      // A margin is a power of two: it shifts codes, and shows where small values become subnormal or zero.
      {"margin", {.margin = 9}},
      {"interval", {.interval = 3}},
      {"fp8_format", {.fp8_format = "E4M3"}},
      {"amax_compute_algo", {.amax_compute_algo = "max"}},
      {"override_linear_precision[0]", {.override_linear_precision = std::array{true, false, false}}},
      {"override_linear_precision[1]", {.override_linear_precision = std::array{false, true, false}}},
      {"override_linear_precision[2]", {.override_linear_precision = std::array{false, false, true}}},
      {"use_mxfp8_block_scaling", {.use_mxfp8_block_scaling = true}},
  };
  for (const auto& [name, kwargs] : settings) EXPECT_NE(losses_of({kwargs}, 6), usual) << name;
  const auto largest = losses_of({TERecipeKwargs{.amax_compute_algo = "max"}}, 6);
  EXPECT_NE(losses_of({TERecipeKwargs{.amax_history_len = 2, .amax_compute_algo = "max"}}, 6), largest)
      << "amax_history_len";

  const auto torchao = losses_of({AORecipeKwargs{}});
  EXPECT_NE(torchao, losses_of({TERecipeKwargs{}}));
  const AORecipeKwargs all{.module_filter_func = [](const std::string&, const at::Tensor&) { return true; }};
  const AORecipeKwargs rowwise{.config = Float8LinearConfig{.recipe = "rowwise"}};
  const AORecipeKwargs high{.config = Float8LinearConfig{.recipe = "rowwise_with_gw_hp"}};
  EXPECT_NE(losses_of({all}), torchao) << "module_filter_func";
  EXPECT_NE(losses_of({rowwise}), torchao) << "config";
  EXPECT_NE(losses_of({high}), losses_of({rowwise})) << "config";
}

TEST_F(Fp8Model, PadsWhereItMay) {
  // The gradient of a weight sums over rows: 5 of them are no multiple of 16.
  const auto train = [](bool pads) {
    Job run(with({AORecipeKwargs{.pad_inner_dim = pads}}));
    const at::Tensor x = input_of(0).slice(0, 0, 5);
    run.accelerator.backward(run.model(x).square().mean());
    return run.net->middle->weight.grad().abs().sum().item<double>();
  };
  EXPECT_GT(train(true), 0);
  EXPECT_THROW(train(false), std::exception);
}

TEST_F(Fp8Model, MicroStepsUseTheWeightsCodesAgain) {
  for (const bool delayed : {false, true}) {
    SCOPED_TRACE(delayed);
    Job run(with({delayed ? KwargsHandler(TERecipeKwargs{}) : KwargsHandler(AORecipeKwargs{})}, /*micro_steps=*/4));
    run.steps(0, 4);
    const auto group = run.fp8().counts();
    EXPECT_GE(group.weight_cache_hits, 2 * static_cast<int64_t>(run.fp8().weights().size()));
    run.steps(4, 8);
    EXPECT_GT(run.fp8().counts().weight_encodes, group.weight_encodes) << "after the optimizer's step they are others";
  }
}

/// Each forward takes another way.
struct BranchesImpl : nn::Module {
  BranchesImpl() {
    for (auto* branch : {&left, &right})
      *branch = register_module(branch == &left ? "left" : "right", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return (calls++ % 2 == 0 ? left : right)(x); }
  int64_t calls = 0;
  nn::Linear left{nullptr}, right{nullptr};
};
TORCH_MODULE(Branches);

TEST_F(Fp8Model, MicroStepsMayUseDifferentWeights) {
  Accelerator accelerator(with({TERecipeKwargs{}}, /*micro_steps=*/2));
  Branches net;
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  auto [model, opt] = accelerator.prepare(net, optimizer);
  for (int64_t step = 0; step < 4; ++step) {
    const auto scope = accelerator.accumulate(model);
    accelerator.backward(model(input_of(step)).square().mean());
    opt.step();
    opt.zero_grad();
  }
  EXPECT_EQ(model.core()->fp8->counts().weight_encodes, 4);
}

TEST_F(Fp8Model, OnesThatTakeTurnsHaveTheirOwnIntervals) {
  Accelerator accelerator(with({TERecipeKwargs{.interval = 2}}));
  Mlp first, second;
  std::vector<Prepared<Mlp>> models{accelerator.prepare(first), accelerator.prepare(second)};
  // Each computes twice; the first of the two is due, whoever comes first.
  for (int64_t step = 0; step < 4; ++step)
    accelerator.backward(models[static_cast<size_t>(step % 2)](input_of(step)).square().mean());
  for (const auto& model : models) {
    const auto state = model.core()->fp8->state_dict();
    for (const char* name : {"middle.weight.scale_fwd", "middle.weight.scale_bwd"})
      EXPECT_NE(state.at(name)[0].item<float>(), 1) << name;
    EXPECT_TRUE(torch::equal(state.at("updates"), torch::tensor({2, 2}, at::kLong)));
  }
}

TEST_F(Fp8Model, ClipsGradients) {
  Job run(with({TERecipeKwargs{}}));
  run.clip = 1e-3;
  run.step(0);
  EXPECT_GT(run.norm, 1e-3);
  const at::Tensor before = run.net->middle->weight.detach().clone();
  run.step(1);
  // The whole step is at most learning rate x norm.
  EXPECT_LE((run.net->middle->weight - before).norm().item<double>(), 0.05 * 1e-3 * 1.01);
}

TEST_F(Fp8Model, ResumesToTheBit) {
  int64_t number = 0;
  for (const auto& handler :
       std::vector<KwargsHandler>{TERecipeKwargs{.interval = 2, .amax_history_len = 4, .amax_compute_algo = "max"},
                                  TERecipeKwargs{}, AORecipeKwargs{}, MSAMPRecipeKwargs{}}) {
    SCOPED_TRACE(++number);
    const std::string folder = support::scratch_dir() + "/" + std::to_string(number);
    const auto whole = losses_of({handler}, 6);
    {
      Job run(with({handler}));
      run.steps(0, 3);
      run.accelerator.save_state(folder);
    }
    Job run(with({handler}));
    run.steps(0, 1);  // scales and weights of another run
    run.accelerator.load_state(folder);
    EXPECT_EQ(run.steps(3, 6), std::vector<double>(whole.begin() + 3, whole.end()));
  }
}

class Fp8Checkpoint : public Fp8Model {
 protected:
  void SetUp() override {
    Job run(with({TERecipeKwargs{.amax_history_len = 4}}));
    run.steps(0, 2);
    run.accelerator.save_state(folder);
    fs::remove(folder / "checkpoint.json");  // which says what the file was
    EXPECT_TRUE(fs::exists(file));
  }
  std::string refused(const TERecipeKwargs& kwargs) {
    Job run(with({kwargs}));
    run.step(0);
    const auto before = run.fp8().state_dict();
    const std::string message = message_of<CheckpointError>([&] { run.accelerator.load_state(folder); });
    const auto after = run.fp8().state_dict();
    for (const auto& [name, value] : before) EXPECT_TRUE(torch::equal(value, after.at(name))) << name;
    return message;
  }
  /// Changes the model's entry of the file.
  void change(const std::function<void(c10::impl::GenericDict&)>& f) {
    const auto saved = checkpointing::load_object(file).toGenericDict();
    auto state = saved.at("0").toGenericDict().at("state").toGenericDict();
    f(state);
    checkpointing::save_object(saved, file);
  }
  const fs::path folder = support::scratch_dir(), file = folder / "fp8_states.bin";
};

TEST_F(Fp8Checkpoint, OfAnotherRecipeIsRefused) {
  EXPECT_THAT(refused({.amax_history_len = 8}),
              HasSubstr("had amax_history_len = 4 when it was saved, and now it is 8"));
  EXPECT_THAT(refused({.margin = 1, .amax_history_len = 4}), HasSubstr("had margin = 0"));
  EXPECT_THAT(refused({.fp8_format = "E4M3", .amax_history_len = 4}),
              HasSubstr("had fp8_format = HYBRID when it was saved, and now it is E4M3"));
  EXPECT_THAT(refused({.amax_history_len = 4, .amax_compute_algo = "max"}),
              HasSubstr("had amax_compute_algo = most_recent when it was saved, and now it is max"));
}

// Nor does it stay for a later run with such scales.
TEST_F(Fp8Checkpoint, OfARunWithoutScalesHasNoneOfAnEarlierOne) {
  Job run(with({AORecipeKwargs{}}));
  run.step(0);
  run.accelerator.save_state(folder);
  EXPECT_FALSE(fs::exists(file));
  run.accelerator.load_state(folder);
}

TEST_F(Fp8Checkpoint, ThatIsDamagedIsRefused) {
  const TERecipeKwargs kwargs{.amax_history_len = 4};
  change([](auto& state) { state.at("middle.weight.scale_fwd").toTensor().zero_(); });
  EXPECT_THAT(refused(kwargs), HasSubstr("'middle.weight.scale_fwd' holds a scale that is zero"));
  change([](auto& state) { state.at("middle.weight.scale_fwd").toTensor().fill_(1e-40); });
  EXPECT_THAT(refused(kwargs), HasSubstr("'middle.weight.scale_fwd' holds a scale that is zero, negative, too small"));
  change([](auto& state) { state.at("middle.weight.scale_fwd").toTensor().fill_(1); });
  change([](auto& state) { state.at("middle.weight.amax_history_bwd").toTensor().fill_(-1); });
  EXPECT_THAT(refused(kwargs), HasSubstr("'middle.weight.amax_history_bwd' holds a negative number"));
  change([](auto& state) { state.at("middle.weight.amax_history_bwd").toTensor().fill_(NAN); });
  {  // a step has overflowed
    Job run(with({kwargs}));
    run.accelerator.load_state(folder);
    EXPECT_TRUE(run.fp8().state_dict().at("middle.weight.amax_history_bwd").isnan().all().item<bool>());
  }
  change([](auto& state) { state.at("middle.weight.amax_history_bwd").toTensor().fill_(1); });
  change([](auto& state) { EXPECT_EQ(state.erase("last.weight.amax_history_bwd"), 1u); });
  EXPECT_THAT(refused(kwargs), HasSubstr("last.weight.amax_history_bwd"));
  fs::resize_file(file, fs::file_size(file) / 2);
  EXPECT_NE(refused(kwargs), "");
  checkpointing::save_object(c10::IValue(std::vector<int64_t>{1, 2}), file);
  EXPECT_THAT(refused(kwargs), HasSubstr("it is damaged or not written by save_state"));
  c10::impl::GenericDict entry(c10::StringType::get(), c10::AnyType::get()), all(entry.copy());
  all.insert("0", entry);  // which lacks its recipe
  checkpointing::save_object(all, file);
  EXPECT_THAT(refused(kwargs), HasSubstr("fp8_states.bin': it is damaged or not written by save_state"));
}

TEST_F(Fp8Checkpoint, WithoutScalesWarnsAndBeginsAnew) {
  fs::remove(file);
  Job run(with({TERecipeKwargs{.amax_history_len = 4}}));
  EXPECT_THAT(warnings_of([&] { run.accelerator.load_state(folder); }), HasSubstr("has no scales of fp8"));
}

}  // namespace

/// The scales of all ranks, and whether they are the same.
void expect_equal_scales(FP8Training& training) {
  const auto state = training.state_dict();
  EXPECT_FALSE(state.empty());
  for (const auto& [name, value] : state) {
    const at::Tensor all = gather(value.to(at::kFloat).flatten()).view({PartialState().num_processes(), -1});
    EXPECT_TRUE(torch::equal(all[0], all[1])) << name;
  }
}

// Rank 1's inputs are twice as large: without the maximum over ranks its scales would be half of rank 0's.
RANKS_TEST(Fp8Ranks, HaveOneScale, 2) {
  Job run(with({TERecipeKwargs{.amax_history_len = 3}}));
  run.steps(0, 4);
  expect_equal_scales(run.fp8());
  // The largest value of the first layer's input was rank 1's.
  const double largest = input_of(3, 1).abs().max().item<double>();
  const double scale = run.fp8().state_dict().at("first.weight.scale_fwd")[0].item<double>();
  EXPECT_NEAR(scale, 448 / largest, 448 / largest * 0.01) << "up to bf16's rounding of the input";
  const at::Tensor weight = gather(run.net->middle->weight.detach().flatten()).view({2, -1});
  EXPECT_TRUE(torch::equal(weight[0], weight[1])) << "they train one model";
  EXPECT_THAT(message_of<ConfigError>([&] { run.accelerator.join_uneven_inputs(run.model, [] {}); }),
              HasSubstr("computes in fp8 with scales from the past"));
}

RANKS_TEST(Fp8Ranks, SendGradientsAsMsAmpDoes, 2) {
  counts::reset();
  Job run(with({MSAMPRecipeKwargs{}}));
  const at::Tensor x = input_of(0, run.accelerator.process_index());
  run.accelerator.backward((run.model(x) - x).square().mean());
  // Not a weight's, which the recipe has rounded to these numbers already.
  const at::Tensor mine = run.net->first->bias.grad().clone();
  const at::Tensor all = gather(mine.flatten()).view({2, -1});
  EXPECT_TRUE(torch::equal(all[0], all[1]));
  int64_t elements = 0;
  for (const auto& parameter : run.net->parameters()) elements += parameter.numel();
  EXPECT_EQ(counts::read(parallel::AveragingCount::bytes_saved), 3 * elements) << "of 4 bytes, one travels";
  // The same without the wire: of numbers with 3 bits behind the point, half a unit is a sixteenth.
  const auto no_sync = run.accelerator.no_sync(run.model);
  run.net->zero_grad();
  run.accelerator.backward((run.model(x) - x).square().mean());
  const at::Tensor exact = reduce(run.net->first->bias.grad(), "mean");
  EXPECT_LT((mine - exact).norm().item<double>() / exact.norm().item<double>(), 0.1);
  EXPECT_FALSE(torch::equal(mine, exact));
}

std::vector<double> sharded_losses(KwargsHandler handler, bool recompute = false,
                                   std::variant<bool, int64_t, ShardingStrategy> reshard = true) {
  AcceleratorOptions options = with({std::move(handler)});
  options.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2,
                                                       .reshard_after_forward = reshard,
                                                       .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                                                       .activation_checkpointing = recompute,
                                                       .min_num_params = 100};
  Job run(options);
  auto losses = run.steps(0, 4);
  if (!run.fp8().state_dict().empty()) expect_equal_scales(run.fp8());
  EXPECT_GT(run.fp8().counts().fp8_products, 0);
  return losses;
}

RANKS_TEST(Fp8Ranks, ShardModels, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto delayed = sharded_losses(TERecipeKwargs{});
    EXPECT_LT(delayed.back(), delayed.front());
    EXPECT_EQ(sharded_losses(TERecipeKwargs{}, /*recompute=*/true), delayed);
    // As in data parallelism, up to the order in which gradients are added.
    Job whole(with({TERecipeKwargs{}}));
    const auto replicated = whole.steps(0, 4);
    for (size_t i = 0; i < delayed.size(); ++i) EXPECT_NEAR(delayed[i], replicated[i], 0.02 * replicated[i]);
  });
}

RANKS_TEST(Fp8Ranks, GatherInFp8, 2) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  counts::reset();
  const auto plain = sharded_losses(AORecipeKwargs{.enable_fsdp_float8_all_gather = false});
  EXPECT_EQ(counts::read(parallel::ShardingCount::parts_as_fp8), 0);
  const auto gathered = sharded_losses(AORecipeKwargs{});
  EXPECT_EQ(counts::read(parallel::ShardingCount::parts_as_fp8), 1) << "the middle layer's weight";
  // The codes are those of the fp32 weights, instead of those rounded to bf16 before: they may differ by one here and
  // there.
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(gathered[i], plain[i], 0.02 * plain[i]);
  EXPECT_EQ(sharded_losses(AORecipeKwargs{}, /*recompute=*/true), gathered);
}

RANKS_TEST(Fp8Ranks, TwoWiresForWeightsAreRefused, 2) {
  AcceleratorOptions options = with({AORecipeKwargs{}});
  options.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2, .quantized_weights = true};
  EXPECT_THAT(message_of<ConfigError>([&] { Job run(options); }),
              HasSubstr("fsdp_plugin.quantized_weights and AORecipeKwargs::enable_fsdp_float8_all_gather"));
}

// Two of four ranks keep what they have gathered for backward, as codes: encoding what was decoded gives the same ones.
RANKS_TEST(Fp8Ranks, KeepCodesForBackward, 4) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  EXPECT_EQ(sharded_losses(AORecipeKwargs{}, /*recompute=*/false, int64_t{2}), sharded_losses(AORecipeKwargs{}));
}

/// The bytes of parameters that a rank of two receives in one forward.
int64_t gathered_bytes(bool as_fp8) {
  reset_states();
  const auto report = dry_run({.num_processes = 2}, [&](const DryRunMark& mark) {
    Accelerator accelerator({.mixed_precision = "fp8",
                             .fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2},
                             .kwargs_handlers = {AORecipeKwargs{.enable_fsdp_float8_all_gather = as_fp8}}});
    const auto model = accelerator.prepare(Mlp());
    mark("prepare");
    model(torch::zeros({kRows, kWidth}, accelerator.device()));
    mark("forward");
  });
  reset_states();
  return report.phase("forward").traffic.all_gather;
}

TEST_F(Fp8Model, HalfAsManyBytesTravel) {
  const int64_t in_bf16 = gathered_bytes(false), middle = (2 * kWidth) * (2 * kWidth);
  // A gather's bytes are those of all ranks: 2 for an element of the middle layer's weight, or one.
  EXPECT_EQ(in_bf16 - gathered_bytes(true), middle);
}

}  // namespace fp8_training
