/// Each option of the plugin by what it changes in a run: values, dtypes, who holds what, how much is present at a
/// time.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/group.hpp"
#include "fsdp_of.hpp"
#include "message_of.hpp"
#include "parallel/fsdp/translate.hpp"
#include "parallel/sharding/gradient_reducer.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "ranks.hpp"

namespace fsdp_options {
namespace {

using namespace accelerate;
using support::on_both_stores;
using support::reset_states;
using testing::AllOf;
using testing::HasSubstr;
namespace nn = torch::nn;
using Plugin = FullyShardedDataParallelPlugin;

/// A module to be sharded, one to be ignored, buffers, and a record of what came in.
struct ProbeImpl : nn::Module {
  explicit ProbeImpl(int64_t seed = 5) {
    torch::manual_seed(seed);
    body = register_module("body", nn::Linear(5, 7));
    head = register_module("head", nn::Linear(7, 3));
    noise = register_buffer("noise", torch::randn({7}));
    count = register_buffer("count", torch::full({1}, seed, torch::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    input_dtype = x.scalar_type(), buffer_dtype = noise.scalar_type(), weight_dtype = body->weight.scalar_type();
    const auto y = torch::tanh(body(x.to(weight_dtype))) + noise.to(weight_dtype);
    return without_head ? y : head(y.to(head->weight.scalar_type()));
  }
  bool without_head = false;
  nn::Linear body{nullptr}, head{nullptr};
  at::Tensor noise, count;
  at::ScalarType input_dtype{}, buffer_dtype{}, weight_dtype{};
};
TORCH_MODULE(Probe);

at::Tensor rows(int64_t step) {
  return torch::randn({12, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(70 + step)));
}
at::Tensor mine(const at::Tensor& all) {
  const int64_t share = all.size(0) / support::world_size();
  return all.narrow(0, support::rank() * share, share);
}
at::Tensor loss_of(const at::Tensor& output) { return (output - 0.3).to(at::kFloat).pow(2).mean(); }

/// This rank's copy of all of the model: parameters whole, buffers as they are here.
std::map<std::string, at::Tensor> everything(const ModelRef& model) {
  const auto here = residency::summon(model);
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : model.state()) all[name] = tensor.detach().clone();
  return all;
}

// ---- rank 0's values

RANKS_TEST(FsdpOptions, RanksStartWithRankZerosParametersAndBuffers, 2, 3) {
  const std::vector<std::pair<std::string, Plugin>> plugins = {
      {"version 1, sync_module_states", {.fsdp_version = 1, .sync_module_states = true}},
      {"version 1, cpu_ram_efficient_loading", {.fsdp_version = 1, .cpu_ram_efficient_loading = true}},
      {"version 2, cpu_ram_efficient_loading", {.fsdp_version = 2, .cpu_ram_efficient_loading = true}},
      {"NO_SHARD", {.fsdp_version = 1, .sharding_strategy = ShardingStrategy::no_shard}}};
  on_both_stores([&](const std::string& store) {
    for (auto [name, plugin] : plugins)
      for (const bool without_memory : {false, true}) {
        SCOPED_TRACE(name + ", " + store + (without_memory ? ", the others without memory" : ""));
        reset_states();
        plugin.ignored_modules = "head";
        Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
        Probe expected(100), net{nullptr};
        if (without_memory && support::rank() > 0) {
          const auto empty = init_empty_weights();
          net = Probe(7);
        } else {
          net = Probe(100 + support::rank());
        }
        const bool ignored_too = plugin.cpu_ram_efficient_loading.value_or(false);
        const auto m = accelerator.prepare(net);
        const auto found = everything(m);
        for (const auto& [tensor, value] : everything(ModelRef(expected)))
          EXPECT_EQ(torch::equal(found.at(tensor), value),
                    support::rank() == 0 || ignored_too || !tensor.starts_with("head"))
              << tensor;
      }
  });
}

// ---- NO_SHARD

RANKS_TEST(FsdpOptions, NoShardObeysTheOtherOptions, 1, 2) {
  reset_states();
  int64_t initialised = 0;
  Plugin plugin{.sharding_strategy = ShardingStrategy::no_shard,
                .mixed_precision_policy = MixedPrecision{.param_dtype = at::kBFloat16},
                .ignored_modules = "head",
                .param_init_fn = [&](nn::Module& module) {
                  ++initialised;
                  materialize(ModelRef(module.shared_from_this()));
                  at::NoGradGuard no_grad;
                  for (auto& parameter : module.parameters(false)) parameter.fill_(0.25);
                }};
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
  Probe net{nullptr};
  {
    const auto empty = init_empty_weights();
    net = Probe();
  }
  auto m = accelerator.prepare(net);
  EXPECT_EQ(initialised, 2);
  const auto engine = support::fsdp_of(m);
  ASSERT_TRUE(engine);
  EXPECT_EQ(engine->local_shard(net->body->weight).numel(), net->body->weight.numel()) << "whole";
  EXPECT_FALSE(engine->local_shard(net->head->weight).defined()) << "ignored";
  EXPECT_TRUE(torch::equal(everything(m).at("body.weight").to(at::kFloat), torch::full({7, 5}, 0.25)));
  accelerator.backward(loss_of(m(mine(rows(0)))));
  EXPECT_EQ(net->weight_dtype, at::kBFloat16);
  const auto gradient = engine->local_shard(net->body->weight).grad();
  ASSERT_TRUE(gradient.defined());
  const auto everywhere = accelerator.gather(gradient.unsqueeze(0)), alone = accelerator.gather(net->head->bias.grad());
  for (int64_t rank = 1; rank < support::world_size(); ++rank) {
    EXPECT_TRUE(torch::equal(everywhere[0], everywhere[rank])) << "averaged";
    EXPECT_FALSE(torch::equal(alone.narrow(0, 0, 3), alone.narrow(0, 3 * rank, 3))) << "left alone";
  }
}

// ---- state dicts

RANKS_TEST(FsdpOptions, StateDictConfigsSayWhoGetsWholeStates, 2) {
  on_both_stores([](const std::string& store) {
    const StateDictConfig everyone{.offload_to_cpu = false, .rank0_only = false};
    struct Row {
      StateDictType type;
      std::optional<StateDictConfig> model, optimizer;
      bool model_everywhere, optimizer_everywhere;
    };
    const std::vector<Row> table = {{StateDictType::full_state_dict, {}, {}, false, false},
                                    {StateDictType::full_state_dict, everyone, {}, true, false},
                                    {StateDictType::full_state_dict, {}, everyone, false, true},
                                    {StateDictType::sharded_state_dict, {}, {}, false, false}};
    for (const auto& row : table) {
      SCOPED_TRACE(store + ", " + to_string(row.type));
      reset_states();
      Accelerator accelerator(
          {.cpu = true,
           .fsdp_plugin = Plugin{
               .state_dict_type = row.type, .state_dict_config = row.model, .optim_state_dict_config = row.optimizer}});
      Probe plain, net;
      torch::optim::AdamW reference(plain->parameters(), 1e-2), optimizer(net->parameters(), 1e-2);
      auto [m, opt] = accelerator.prepare(net, optimizer);
      loss_of(plain->forward(rows(0))).backward();
      reference.step();
      accelerator.backward(loss_of(m(mine(rows(0)))));
      opt.step();
      const auto weights = accelerator.get_state_dict(m);
      const auto state = accelerator.get_optimizer_state_dict(opt).toGenericDict();
      EXPECT_EQ(!weights.empty(), support::rank() == 0 || row.model_everywhere);
      EXPECT_EQ(!state.empty(), support::rank() == 0 || row.optimizer_everywhere);
      if (!weights.empty()) {
        EXPECT_LT((weights.at("body.weight") - plain->body->weight).abs().max().item<double>(), 1e-5);
      }
      if (state.empty()) continue;
      const auto moments = state.at("state").toGenericDict().at("body.weight").toGenericDict();
      const auto& expected = static_cast<const torch::optim::AdamWParamState&>(
          *reference.state().at(plain->body->weight.unsafeGetTensorImpl()));
      EXPECT_LT((moments.at("exp_avg").toTensor() - expected.exp_avg()).abs().max().item<double>(), 1e-6);
      EXPECT_EQ(moments.at("step").toTensor().item<double>(), 1);
      const auto group = state.at("param_groups").toListRef()[0].toGenericDict();
      EXPECT_EQ(group.at("params").toListRef().size(), 4u);
      EXPECT_EQ(group.at("params").toListRef()[0].toStringRef(), "body.weight");
      if (support::rank() > 0) continue;  // which has no piece of this one
      // A copy: what the program does with it changes no moment.
      moments.at("exp_avg").toTensor().fill_(7);
      EXPECT_NE(opt.state_dict()
                    .toGenericDict()
                    .at("state")
                    .toGenericDict()
                    .at(int64_t{0})
                    .toGenericDict()
                    .at("exp_avg")
                    .toTensor()
                    .max()
                    .item<double>(),
                7);
    }
  });
}

TEST(FsdpOptions, StatesThatAreNotOffloadedStayOnTheDevice) {
  for (const bool offload : {false, true})
    dry_run({.num_processes = 2}, [&](const DryRunMark&) {
      const StateDictConfig config{.offload_to_cpu = offload};
      Accelerator accelerator({.fsdp_plugin = Plugin{.state_dict_config = config}});
      auto m = accelerator.prepare(nn::Linear(5, 7));
      if (offload) {  // a device without bytes has none to bring to the host
        EXPECT_ANY_THROW(accelerator.get_state_dict(m));
      } else {
        EXPECT_TRUE(accelerator.get_state_dict(m).at("weight").is_meta());
      }
    });
}

// ---- mixed precision

struct Dtypes {
  at::ScalarType input, buffer, output;
};
Dtypes dtypes_with(int64_t version, const MixedPrecision& policy, const char* precision = "no") {
  reset_states();
  Accelerator accelerator({.mixed_precision = precision,
                           .cpu = true,
                           .fsdp_plugin = Plugin{.fsdp_version = version, .mixed_precision_policy = policy}});
  Probe net;
  auto m = accelerator.prepare(net);
  const auto output = m(rows(0));
  return {net->input_dtype, net->buffer_dtype, output.scalar_type()};
}

RANKS_TEST(FsdpOptions, MixedPrecisionPolicies, 1, 2) {
  on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    constexpr auto kBf16 = at::kBFloat16;
    EXPECT_EQ(dtypes_with(1, {.param_dtype = kBf16}).input, kBf16);
    EXPECT_EQ(dtypes_with(1, {.param_dtype = kBf16, .cast_root_forward_inputs = false}).input, at::kFloat);
    EXPECT_EQ(dtypes_with(2, {.param_dtype = kBf16}).input, kBf16);
    EXPECT_EQ(dtypes_with(2, {.param_dtype = kBf16, .cast_forward_inputs = false}).input, at::kFloat);
    EXPECT_EQ(dtypes_with(1, {.param_dtype = kBf16}).buffer, at::kFloat);
    EXPECT_EQ(dtypes_with(1, {.param_dtype = kBf16, .buffer_dtype = at::kHalf}).buffer, at::kHalf);
    EXPECT_EQ(dtypes_with(2, {.param_dtype = kBf16}).output, kBf16);
    EXPECT_EQ(dtypes_with(2, {.param_dtype = kBf16, .output_dtype = at::kDouble}).output, at::kDouble);
    EXPECT_EQ(dtypes_with(2, {.param_dtype = kBf16}, "bf16").output, at::kFloat) << "as the Accelerator has it";
    EXPECT_EQ(dtypes_with(2, {.preset = "bf16"}, "bf16").output, kBf16);
  });
  reset_states();
  Accelerator accelerator({.mixed_precision = "bf16", .cpu = true, .fsdp_plugin = Plugin{.fsdp_version = 2}});
  auto m = accelerator.prepare(Probe());
  EXPECT_EQ(m(rows(0)).scalar_type(), at::kFloat) << "the program asks for no other type";
}

RANKS_TEST(FsdpOptions, GradientsKeepTheLowPrecisionInWhichTheyTravelled, 1, 2) {
  on_both_stores([](const std::string& store) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard})
      for (const bool keep : {false, true}) {
        SCOPED_TRACE(store + (keep ? ", kept" : "") + ", " + to_string(strategy));
        reset_states();
        const MixedPrecision policy{.reduce_dtype = at::kBFloat16, .keep_low_precision_grads = keep};
        Accelerator accelerator(
            {.cpu = true, .fsdp_plugin = Plugin{.sharding_strategy = strategy, .mixed_precision_policy = policy}});
        Probe net;
        auto [m, opt] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-2));
        const auto before = everything(m).at("body.weight");
        accelerator.backward(loss_of(m(mine(rows(0)))));
        const auto shard = support::fsdp_of(m)->local_shard(net->body->weight);
        EXPECT_EQ(shard.scalar_type(), at::kFloat);
        EXPECT_EQ(shard.grad().scalar_type(), keep ? at::kBFloat16 : at::kFloat);
        opt.step();
        EXPECT_FALSE(torch::equal(before, everything(m).at("body.weight")));
      }
  });
}

// ---- how far ahead units are fetched

constexpr int64_t kUnits = 12, kWidth = 64;
constexpr int64_t kUnitBytes = (kWidth * kWidth + kWidth + 16 * 3) * 4;  ///< at most, with padding

/// The third step, when the order is known. Backward is seen from its middle on, when what forward left is gone.
struct Step {
  residency::Stats forward, backward;
};
Step step_with(Plugin plugin) {
  reset_states();
  plugin.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap;
  plugin.transformer_cls_names_to_wrap = {{"Linear"}};
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
  nn::Sequential net;
  for (int64_t i = 0; i < kUnits; ++i) {
    net->push_back(nn::Linear(kWidth, kWidth));
    if (i == kUnits / 2)
      net->push_back(nn::Functional([](const at::Tensor& x) {
        x.register_hook([](const at::Tensor&) { residency::reset_stats(); });
        return x;
      }));
  }
  auto [m, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
  Step step;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(residency::stats().resident_bytes, 0);
    residency::reset_stats();
    const auto loss = m(torch::randn({2, kWidth})).pow(2).mean();
    step.forward = residency::stats();
    accelerator.backward(loss);
    step.backward = residency::stats();
    opt.step(), opt.zero_grad();
  }
  return step;
}

RANKS_TEST(FsdpOptions, UnitsAreFetchedAheadAsFarAsIsAskedFor, 2) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  const auto pre = step_with({.backward_prefetch = BackwardPrefetch::backward_pre}),
             post = step_with({.backward_prefetch = BackwardPrefetch::backward_post}),
             none = step_with({.backward_prefetch = BackwardPrefetch::no_prefetch});
  EXPECT_GE(pre.backward.prefetch_hits, kUnits / 2 - 2);
  EXPECT_GT(pre.backward.peak_resident_bytes, kUnitBytes) << "the next one is there while this one computes";
  EXPECT_GE(post.backward.prefetch_hits, kUnits / 2 - 2);
  EXPECT_LE(post.backward.peak_resident_bytes, kUnitBytes) << "it is asked for when this one has gone";
  EXPECT_EQ(none.backward.prefetch_hits, 0);
  EXPECT_GE(none.backward.faults, kUnits / 2 - 2);

  const auto forward = step_with({.forward_prefetch = true});
  EXPECT_LE(none.forward.peak_resident_bytes, 2 * kUnitBytes);
  EXPECT_GT(forward.forward.peak_resident_bytes, 2 * kUnitBytes);
  EXPECT_LE(forward.forward.peak_resident_bytes, 3 * kUnitBytes);

  const auto free = step_with({.backward_prefetch = BackwardPrefetch::backward_pre, .limit_all_gathers = false});
  EXPECT_GT(free.forward.peak_resident_bytes, (kUnits - 2) * kUnitBytes);
  EXPECT_GT(free.backward.peak_resident_bytes, (kUnits / 2 - 2) * kUnitBytes);
  EXPECT_LE(free.forward.bytes_fetched + free.backward.bytes_fetched, 2 * kUnits * kUnitBytes)
      << "each unit once for forward and once for backward, nothing in vain";
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

// ---- where things are

/// Gradients travel on the device that computes, wherever their masters lie.
RANKS_TEST(FsdpOptions, AGradientThatOnlyPeersHaveIsReducedWhereItsUnitComputes, 2) {
  const PartialState state({.cpu = true});
  const std::vector<at::Tensor> weights = {torch::zeros({4, 4}).requires_grad_(), torch::zeros({4}).requires_grad_()};
  std::vector<parallel::ShardedPart> parts(1);
  auto& part = parts[0];
  part.trained = part.trainable = true;
  part.layout = residency::lay_out(weights, 2);
  for (size_t i = 0; i < weights.size(); ++i)
    part.members.push_back(
        {.name = "weight", .tensor = weights[i], .index = i, .offset = part.layout.offsets[i], .shard = {}});
  part.master = at::empty({part.numel() / 2}, at::kMeta);  // elsewhere
  part.cut(support::rank(), 2);
  const auto reducer = parallel::collective_reducer(parts, {.shard = comm::world_group()}, {}, nullptr);
  if (support::rank() == 0) reducer->take(part, part.members[0], torch::ones({4, 4}));
  reducer->finish();
  EXPECT_TRUE(part.members[0].shard.grad().is_meta());
}

/// A device that need not be there: nothing may be asked of it.
TEST(FsdpOptions, OffloadedShardsLieOnTheHost) {
  const at::Device gpu(at::kCUDA, 0);
  const auto weight = torch::zeros({4, 4});
  std::vector<parallel::ShardedPart> parts(1);
  auto& part = parts[0];
  part.layout = residency::lay_out({weight}, 2);
  part.members.push_back({.name = "weight", .tensor = weight, .shard = {}});
  for (const bool alone : {true, false}) {
    parallel::ShardGroups groups;
    if (!alone) groups.shard = comm::Group::join({.world_size = 2, .dry = std::make_shared<comm::TrafficCounter>()});
    const Plugin offloaded{.cpu_offload = CPUOffload(true, /*pin_memory=*/false)};
    parallel::make_shard_store(parts, groups, gpu, parallel::settings_of(parallel::resolve(offloaded), 1, 1))
        ->allocate(part);
    EXPECT_TRUE(part.master.is_cpu());
    EXPECT_EQ(part.master.numel(), part.numel() / (alone ? 1 : 2));
    const auto store = parallel::make_shard_store(parts, groups, gpu, {});
    if (!torch::cuda::is_available()) {
      EXPECT_ANY_THROW(store->allocate(part)) << "memory on the device was asked for";
    } else {
      store->allocate(part);
      EXPECT_TRUE(part.master.is_cuda());
    }
  }
}

/// Rank 0 needs all of one unit, the others a part: whatever each has gradients for, all reduce the same in one order.
RANKS_TEST(FsdpOptions, RanksThatUsePartsOfAUnitMeetThoseThatUseAll, 2, 3) {
  on_both_stores([](const std::string& store) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      reset_states();
      Accelerator accelerator({.cpu = true, .fsdp_plugin = Plugin{.sharding_strategy = strategy}});
      Probe plain, net;
      torch::optim::SGD reference(plain->parameters(), 0.1), optimizer(net->parameters(), 0.1);
      auto [m, opt] = accelerator.prepare(net, optimizer);
      const int64_t world = support::world_size(), share = 12 / world;
      for (int64_t step = 0; step < 3; ++step) {
        for (int64_t rank = 0; rank < world; ++rank) {
          plain->without_head = rank > 0;
          (loss_of(plain->forward(rows(step).narrow(0, rank * share, share))) / world).backward();
        }
        reference.step(), reference.zero_grad();
        net->without_head = support::rank() > 0;
        accelerator.backward(loss_of(m(mine(rows(step)))));
        opt.step(), opt.zero_grad();
      }
      const auto found = everything(m);
      for (const auto& [name, value] : everything(ModelRef(plain)))
        EXPECT_LT((found.at(name) - value).abs().max().item<double>(), 1e-5)
            << name << ", " << store << ", " << to_string(strategy);
    }
  });
}

// ---- settings of another engine

TEST(FsdpOptions, HandlersOfDataParallelismAreRefusedByField) {
  const auto refusal = [](const DistributedDataParallelKwargs& kwargs) {
    reset_states();
    return support::message_of<ConfigError>(
        [&] { Accelerator({.cpu = true, .fsdp_plugin = Plugin{}, .kwargs_handlers = {kwargs}}); });
  };
  EXPECT_THAT(refusal({.bucket_cap_mb = 10}), AllOf(HasSubstr("bucket_cap_mb is 10"), HasSubstr("auto_wrap_policy")));
  EXPECT_THAT(refusal({.static_graph = true}), HasSubstr("static_graph is true"));
  EXPECT_THAT(refusal({.comm_hook = DDPCommunicationHookType::bf16}),
              AllOf(HasSubstr("comm_hook is bf16"), HasSubstr("reduce_dtype")));
  reset_states();
  Accelerator({.cpu = true,
               .fsdp_plugin = Plugin{},
               .kwargs_handlers = {DistributedDataParallelKwargs{
                   .broadcast_buffers = false, .find_unused_parameters = true, .gradient_as_bucket_view = true}}});
}

}  // namespace
}  // namespace fsdp_options
