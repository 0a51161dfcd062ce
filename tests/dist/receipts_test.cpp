// Receipts: each setting in a job in which it acts, and in one without it. The two jobs differ in what they did, and
// the receipt says so.

#include <accelerate/accelerate.hpp>

#include <ATen/autocast_mode.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "accelerator/receipts.hpp"
#include "both_stores.hpp"
#include "data/counts.hpp"
#include "message_of.hpp"
#include "optim/counts.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/fsdp/receipts.hpp"
#include "parallel/fsdp/translate.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "program.hpp"
#include "ranks.hpp"
#include "residency/counters.hpp"
#include "variable.hpp"

namespace receipts_test {
namespace {

using namespace accelerate;
using data::DataCount;
using parallel::AveragingCount;
using parallel::ShardingCount;
using residency::ResidencyCount;
using support::reset_states;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using Ddp = DistributedDataParallelKwargs;
using Fsdp = FullyShardedDataParallelPlugin;

constexpr int64_t kWidth = 4;

/// Layers, a norm with buffers, one that may stay unused; and what its forward met.
struct NetImpl : nn::Module {
  NetImpl(int64_t seed, int64_t hidden) {
    torch::manual_seed(seed);
    first = register_module("first", nn::Linear(kWidth, hidden));
    norm = register_module("norm", nn::BatchNorm1d(hidden));
    second = register_module("second", nn::Linear(hidden, hidden));
    third = register_module("third", nn::Linear(hidden, hidden));
    last = register_module("last", nn::Linear(hidden, 1));
    spare = register_module("spare", nn::Linear(1, 1));
    offset = register_buffer("offset", torch::full({hidden}, 0.1));
  }
  at::Tensor forward(const at::Tensor& x) {
    input = c10::toString(x.scalar_type());
    cache = at::autocast::is_autocast_cache_enabled();
    auto y = first(at::autocast::is_autocast_enabled(at::kCPU) ? x : x.to(first->weight.scalar_type()));
    computed = c10::toString(y.scalar_type());
    norm_type = c10::toString(norm->weight.scalar_type());
    buffer_type = c10::toString(offset.scalar_type());
    // A batch norm of another type than its statistics' can't run.
    const auto normal = norm_type == "Float" ? norm(y.to(at::kFloat)) : (y - y.mean(0)) * norm->weight + norm->bias;
    y = third(torch::tanh(second((normal + offset).to(y.scalar_type()))));
    inner = y.detach();
    y = last(torch::tanh(y));
    return leaves_out_spare ? y : spare(y);
  }
  bool leaves_out_spare = false, cache = true;
  std::string input, computed, norm_type, buffer_type;
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr}, spare{nullptr};
  at::Tensor offset, inner;
  nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

using Sample = torch::data::Example<>;

/// Counts what is read here.
struct Samples {
  int64_t n;
  std::shared_ptr<int64_t> reads = std::make_shared<int64_t>(0);
  int64_t size() const { return n; }
  Sample get(size_t index) const {
    ++*reads;
    return {torch::sin(torch::arange(kWidth).to(torch::kFloat) + static_cast<double>(index)),
            torch::tensor(static_cast<float>(index))};
  }
};

/// The job.
struct Job {
  AcceleratorOptions options = {};
  int64_t hidden = 6, samples = 11, epochs = 2;
  bool different_seeds = false, leaves_out_spare = false, tokens = false, overflows = false, tracks = false,
       empty = false, evaluates = false, freezes = false, loads_damaged = false;
  int64_t saves = 0;
  fs::path save_to = {};  ///< empty: by itself
};

/// The part of it that can be seen from outside of the library.
struct Seen {
  std::string order, reads, draws, parameters, buffers, gradients, lr, counted, scale, files, computed, cache, input,
      output, norm_type, buffer_type, shards, middle, states, optimizer_states, error, numbers, evaluated;
  Receipts receipts;
};

std::string digits(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("{:.9g}", tensor.detach().to(at::kDouble).abs().sum().item<double>()) : "none";
}

std::string files_in(const fs::path& folder) {
  std::set<std::string> names;
  if (fs::exists(folder))
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      names.insert(fs::relative(entry.path(), folder).string().substr(0, 40));
  std::string all;
  for (const auto& name : names)
    if (name.find("tfevents") == std::string::npos) all += name + " ";
    else all += name.substr(0, name.find("events")) + "events ";
  return all;
}

Seen run(const Job& job) {
  reset_states();
  counts::reset();
  residency::reset_stats();
  Seen seen;
  Accelerator accelerator(job.options);
  const int64_t rank = accelerator.process_index();
  const auto make = [&] { return Net(job.different_seeds ? 10 + rank : 10, job.hidden); };
  const auto make_empty = [&] {
    const auto empty = init_empty_weights();
    return make();
  };
  Net net = job.empty ? make_empty() : make();
  net->leaves_out_spare = job.leaves_out_spare;
  if (job.freezes) net->second->weight.requires_grad_(false);
  torch::manual_seed(100 + rank);
  const Samples samples{job.samples};
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
  auto schedule = optim::lambda_lr(optimizer, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
  auto [m, opt, sched, loader] =
      accelerator.prepare(net, optimizer, schedule, data::DataLoader(samples, {.batch_size = 4, .shuffle = true}));
  if (job.tracks) accelerator.init_trackers("run");
  int64_t step = 0;
  try {
    for (int64_t epoch = 0; epoch < job.epochs; ++epoch)
      for (auto& batch : loader) {
        if (step == 0) seen.draws = digits(torch::rand({3}));
        seen.order += fmt::format(
            "{} ", fmt::join(std::vector<float>(batch.target.template data_ptr<float>(),
                                                batch.target.template data_ptr<float>() + batch.target.numel()),
                             ","));
        const auto scope = accelerator.accumulate(m);
        const auto output = m(batch.data);
        seen.output = c10::toString(output.scalar_type());
        auto loss = (output.to(at::kFloat).squeeze(1) - 0.1 * batch.target).pow(2).mean();
        if (job.overflows && step == 0) loss = loss * INFINITY;
        if (job.tokens) accelerator.backward(loss, batch.target.numel());
        else accelerator.backward(loss);
        if (!accelerator.sync_gradients()) seen.middle = digits(net->last->bias.grad());
        seen.gradients.clear();
        for (const auto& group : opt.optimizer().param_groups())
          for (const auto& parameter : group.params())
            if (const auto& gradient = parameter.grad(); gradient.defined())
              seen.gradients += fmt::format("{}{} ", c10::toString(gradient.scalar_type()),
                                            gradient.storage().nbytes() > gradient.nbytes() ? " in a bucket" : "");
        opt.step();
        sched.step();
        opt.zero_grad();
        ++step;
      }
  } catch (const ConfigError& error) {
    seen.error = "an error";
  }
  if (job.evaluates) {
    net->eval();
    m(torch::linspace(-3, 3, 64 * kWidth).view({64, kWidth}));
    seen.evaluated = digits(net->inner);
    net->train();
  }
  seen.reads = fmt::format("{}", *samples.reads);
  for (int64_t i = 0; i < job.saves; ++i) accelerator.save_state(job.save_to);
  accelerator.wait_for_everyone();
  if (job.loads_damaged) {
    const auto weights = job.save_to / "model.safetensors";
    if (rank == 0) {
      std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(static_cast<int64_t>(fs::file_size(weights)) - 4);
      file.put('\x55');  // of the last number
    }
    accelerator.wait_for_everyone();
    try {
      accelerator.load_state(job.save_to);
    } catch (const CheckpointError&) {
      seen.error = "an error";
    }
  }
  seen.files = files_in(support::scratch_dir());
  accelerator.wait_for_everyone();
  const auto weights = accelerator.get_state_dict(m);
  seen.states = weights.empty() ? "here not" : "here";
  seen.optimizer_states = accelerator.get_optimizer_state_dict(opt).toGenericDict().empty() ? "here not" : "here";
  {
    const auto here = residency::summon(ModelRef(net));
    for (const auto& parameter : net->parameters()) seen.parameters += digits(parameter) + " ";
    for (const auto& buffer : net->buffers()) seen.buffers += digits(buffer) + " ";
  }
  for (const auto& group : opt.optimizer().param_groups())
    for (const auto& parameter : group.params()) seen.shards += fmt::format("{} ", parameter.numel());
  seen.lr = fmt::format("{}", sched.get_last_lr()[0]);
  seen.counted = fmt::format("{}", sched.step_count());
  seen.scale = accelerator.scaler() && accelerator.scaler()->is_enabled()
                   ? fmt::format("{}", accelerator.scaler()->get_scale())
                   : "none";
  seen.computed = net->computed, seen.cache = fmt::format("{}", net->cache), seen.input = net->input;
  seen.norm_type = net->norm_type, seen.buffer_type = net->buffer_type;
  const auto moved = residency::stats();
  seen.numbers = fmt::format(
      "{} buckets, {} searches, {} comparisons, {} graphs, {} of {} fetches ahead, {} given back, {} at a time, {} "
      "units, {} steps taken over, {} at once",
      counts::read(AveragingCount::gradient_buckets), counts::read(AveragingCount::unused_searches),
      counts::read(AveragingCount::parameter_comparisons), counts::read(AveragingCount::static_graphs),
      moved.prefetch_hits, moved.prefetch_hits + moved.faults, moved.evictions,
      counts::read(ResidencyCount::fetches_most), counts::read(ShardingCount::units),
      counts::read(optim::OptimCount::steps_taken_over), counts::read(optim::OptimCount::steps_at_once));
  seen.receipts = accelerator.receipts();
  return seen;
}

/// A setting, the job with it and the job without, what of them differs, and words of the receipt.
struct Row {
  std::string setting;
  Job with, without;
  std::string Seen::*differs;
  std::string says;
};

/// An empty folder for the next job.
void clear() {
  const PartialState state({.cpu = true});
  state.wait_for_everyone();
  if (state.is_main_process()) fs::remove_all(fs::path(support::scratch_dir()) / "p");
  state.wait_for_everyone();
}

/// Runs both jobs of each row. Differences may show on one rank only.
void check(const std::vector<Row>& rows) {
  for (const auto& row : rows) {
    SCOPED_TRACE(row.setting);
    clear();
    const Seen without = run(row.without);
    clear();
    const Seen with = run(row.with);
    bool anywhere = false;
    for (const bool one : gather_object(std::vector<bool>{with.*row.differs != without.*row.differs})) anywhere |= one;
    EXPECT_TRUE(anywhere) << "with:    " << with.*row.differs << "\nwithout: " << without.*row.differs;
    const Receipt& receipt = with.receipts[row.setting];
    EXPECT_EQ(receipt.source, "call");
    std::vector<std::string> states{std::string(to_string(receipt.state)) + ": " + receipt.effect};
    states = gather_object(states);
    EXPECT_THAT(states, testing::Contains(AllOf(testing::StartsWith("acted"), HasSubstr(row.says))));
    EXPECT_EQ(without.receipts[row.setting].source, "default");
    if (receipt.state == ReceiptState::acted) {
      EXPECT_NE(without.receipts[row.setting].effect, receipt.effect) << "the receipt tells them apart";
    }
    EXPECT_THAT(with.receipts.text(), HasSubstr(row.setting));
    EXPECT_THAT(without.receipts.text(), Not(HasSubstr("  " + row.setting + " ")));
  }
}

AcceleratorOptions ddp(const Ddp& kwargs) { return {.cpu = true, .kwargs_handlers = {kwargs}}; }
AcceleratorOptions loading(const DataLoaderConfiguration& config) { return {.cpu = true, .dataloader_config = config}; }
AcceleratorOptions accumulating(const GradientAccumulationPlugin& plugin) {
  return {.cpu = true, .gradient_accumulation_plugin = plugin};
}
AcceleratorOptions fsdp(const Fsdp& plugin) { return {.cpu = true, .fsdp_plugin = plugin}; }

RANKS_TEST(Receipts, LoadersAndAccumulation, 2) {
  const Job plain{.options = {.cpu = true}};
  const Job accumulates{.options = accumulating({.num_steps = 3})};
  check({
      {"split_batches", {.options = {.split_batches = true, .cpu = true}}, plain, &Seen::order, "cut in 2"},
      {"dataloader_config.split_batches",
       {.options = loading({.split_batches = true})},
       plain,
       &Seen::order,
       "cut in 2"},
      {"dataloader_config.dispatch_batches",
       {.options = loading({.dispatch_batches = true})},
       plain,
       &Seen::reads,
       "4 batches came from rank 0, in "},
      {"dataloader_config.even_batches",
       {.options = loading({.even_batches = false}), .samples = 14},
       {.options = {.cpu = true}, .samples = 14},
       &Seen::order,
       "2 passes ended with what was left"},
      {"dataloader_config.use_seedable_sampler",
       {.options = loading({.use_seedable_sampler = true})},
       plain,
       &Seen::order,
       "1 loader shuffle"},
      {"dataloader_config.data_seed",
       {.options = loading({.use_seedable_sampler = true, .data_seed = 7})},
       {.options = loading({.use_seedable_sampler = true})},
       &Seen::order,
       "from seed 7"},
      {"rng_types",
       {.options = {.cpu = true, .rng_types = {RNGType::generator, RNGType::torch}}},
       plain,
       &Seen::draws,
       "2 of the default one"},
      {"gradient_accumulation_steps",
       {.options = {.gradient_accumulation_steps = 2, .cpu = true}},
       plain,
       &Seen::parameters,
       "4 micro-steps in groups of 2: gradients were synchronised in 2 of them"},
      {"gradient_accumulation_plugin.num_steps", accumulates, plain, &Seen::parameters, "in groups of 3"},
      {"gradient_accumulation_plugin.adjust_scheduler",
       {.options = accumulating({.num_steps = 3, .adjust_scheduler = false})},
       accumulates,
       &Seen::counted,
       "did not count the 2"},
      {"gradient_accumulation_plugin.sync_with_dataloader",
       {.options = accumulating({.num_steps = 3, .sync_with_dataloader = false})},
       accumulates,
       &Seen::parameters,
       "which went on in the next one"},
      {"gradient_accumulation_plugin.sync_each_batch",
       {.options = accumulating({.num_steps = 3, .sync_each_batch = true})},
       accumulates,
       &Seen::middle,
       "averaged in 2 micro-steps"},
      {"gradient_accumulation_plugin.average",
       {.options = accumulating({.num_steps = 3, .average = GradientAverage::tokens}), .tokens = true},
       accumulates,
       &Seen::parameters,
       "16 items"},
      {"step_scheduler_with_optimizer",
       {.options = {.cpu = true, .step_scheduler_with_optimizer = false}},
       plain,
       &Seen::lr,
       "4 steps of their own"},
  });
}

RANKS_TEST(Receipts, SavingAndTracking, 2) {
  const fs::path p = fs::path(support::scratch_dir()) / "p";
  const auto saving = [&](const ProjectConfiguration& project) {
    return Job{.options = {.cpu = true, .project_config = project}, .saves = 3};
  };
  const Job plain{.options = {.cpu = true}, .saves = 1, .save_to = p / "one"};
  const ProjectConfiguration named{.project_dir = p, .automatic_checkpoint_naming = true};
  auto stateful = plain;
  stateful.options.dataloader_config.use_stateful_dataloader = true;
  auto limited = named, numbered = named;
  limited.total_limit = 2, numbered.iteration = 5;
  Job tracked{.options = {.cpu = true, .log_with = {"tensorboard"}, .project_dir = p}, .tracks = true};
  auto damaged = plain, unchecked = plain;
  damaged.loads_damaged = unchecked.loads_damaged = true;
  unchecked.options.project_config.verify_checkpoints = false;
  Job elsewhere = tracked;
  elsewhere.options.project_config.logging_dir = p / "logs";
  check({
      {"dataloader_config.use_stateful_dataloader", stateful, plain, &Seen::files, "1 checkpoint with positions"},
      {"project_config.project_dir", saving(named), plain, &Seen::files, "3 checkpoints and"},
      {"project_config.automatic_checkpoint_naming", saving(named), plain, &Seen::files, "up to checkpoint_2"},
      {"project_config.total_limit", saving(limited), saving(named), &Seen::files, "1 older checkpoint was removed"},
      {"project_config.iteration", saving(numbered), saving(named), &Seen::files, "number 7"},
      {"project_config.verify_checkpoints", unchecked, damaged, &Seen::error,
       "1 checkpoint was loaded without a look at checksums"},
      {"log_with", tracked, plain, &Seen::files, "1 tracker opened"},
      {"project_dir", tracked, plain, &Seen::files, "1 tracker"},
      {"project_config.logging_dir", elsewhere, tracked, &Seen::files, "1 tracker wrote to"},
  });
}

RANKS_TEST(Receipts, DataParallelismAndPrecision, 2) {
  const Job plain{.options = {.cpu = true}}, large{.options = {.cpu = true}, .hidden = 800, .epochs = 1};
  const Job lacking{.options = {.cpu = true}, .leaves_out_spare = true};
  const auto with = [](Job job, const Ddp& kwargs) { return job.options.kwargs_handlers = {kwargs}, job; };
  const auto power = DDPCommunicationHookType::power_sgd;
  const parallel::CommunicationHook doubled = [](parallel::GradientBucket& bucket, parallel::HookGroup& group) {
    return group.all_reduce(bucket.buffer);  // the sum
  };
  const Job bf16{.options = {.mixed_precision = "bf16", .cpu = true}},
      fp16{.options = {.mixed_precision = "fp16", .cpu = true}};
  const auto and_handler = [](Job job, const KwargsHandler& handler) {
    return job.options.kwargs_handlers.push_back(handler), job;
  };
  // With the default scale the first gradients overflow.
  const auto scaled = [&](GradScalerKwargs kwargs) { return kwargs.init_scale = 64, and_handler(fp16, kwargs); };
  const auto overflowing = [](Job job) { return job.overflows = true, job; };
  check({
      {"DistributedDataParallelKwargs.broadcast_buffers", with(plain, {.broadcast_buffers = false}), plain,
       &Seen::buffers, "kept its own buffers in 4 forwards"},
      {"DistributedDataParallelKwargs.bucket_cap_mb", with(large, {.bucket_cap_mb = 1}), large, &Seen::numbers,
       "buckets were averaged"},
      {"DistributedDataParallelKwargs.find_unused_parameters", with(lacking, {.find_unused_parameters = true}), lacking,
       &Seen::error, "looked 4 times, 8 finds"},
      {"DistributedDataParallelKwargs.gradient_as_bucket_view", with(plain, {.gradient_as_bucket_view = true}), plain,
       &Seen::gradients, "averaged where they lay"},
      {"DistributedDataParallelKwargs.static_graph", with(plain, {.static_graph = true}), plain, &Seen::numbers,
       "1 model's graph was learnt"},
      {"DistributedDataParallelKwargs.comm_hook", with(plain, {.comm_hook = DDPCommunicationHookType::bf16}), plain,
       &Seen::parameters, "of gradients travelled as"},
      {"DistributedDataParallelKwargs.comm_wrapper",
       with(plain, {.comm_hook = DDPCommunicationHookType::bf16, .comm_wrapper = DDPCommunicationHookType::fp16}),
       with(plain, {.comm_hook = DDPCommunicationHookType::bf16}), &Seen::parameters, "converted to fp16"},
      {"DistributedDataParallelKwargs.comm_state_option",
       with(plain, {.comm_hook = power, .comm_state_option = {.start_powerSGD_iter = 2, .min_compression_rate = 0.1}}),
       with(plain, {.comm_hook = power}), &Seen::parameters, "compressed"},
      {"DistributedDataParallelKwargs.communication_hook", with(plain, {.communication_hook = doubled}), plain,
       &Seen::parameters, "it was called"},
      {"DistributedDataParallelKwargs.compare_parameters_every", with(plain, {.compare_parameters_every = 3}), plain,
       &Seen::numbers, "parameters were compared 4 times"},
      {"mixed_precision", bf16, plain, &Seen::computed, "4 regions ran under autocast"},
      {"AutocastKwargs.enabled", and_handler(bf16, AutocastKwargs{.enabled = false}), bf16, &Seen::computed,
       "without autocast"},
      {"AutocastKwargs.cache_enabled", and_handler(bf16, AutocastKwargs{.cache_enabled = false}), bf16, &Seen::cache,
       "made anew each time"},
      {"GradScalerKwargs.init_scale", and_handler(fp16, GradScalerKwargs{.init_scale = 64}), fp16, &Seen::scale,
       "4 losses were scaled, first by 64"},
      {"GradScalerKwargs.growth_interval", scaled({.growth_interval = 2}), scaled({}), &Seen::scale,
       "the scale grew 2 times, to 256"},
      {"GradScalerKwargs.growth_factor", scaled({.growth_factor = 4, .growth_interval = 2}),
       scaled({.growth_interval = 2}), &Seen::scale, "the scale grew 2 times, to 1024"},
      {"GradScalerKwargs.backoff_factor", overflowing(scaled({.backoff_factor = 0.25})), overflowing(scaled({})),
       &Seen::scale, "1 step was skipped"},
      {"GradScalerKwargs.enabled", and_handler(fp16, GradScalerKwargs{.enabled = false}), fp16, &Seen::scale,
       "4 losses were not scaled"},
  });
}

// Products are in fp8 from 16 columns on.
RANKS_TEST(Receipts, Recipes, 2) {
  const auto fp8 = [](const KwargsHandler& handler) {
    return Job{.options = {.mixed_precision = "fp8", .cpu = true, .kwargs_handlers = {handler}}, .hidden = 16};
  };
  const Job plain{.options = {.cpu = true}, .hidden = 16};
  const auto te = [&](const TERecipeKwargs& kwargs) { return fp8(kwargs); };
  const auto ao = [&](const AORecipeKwargs& kwargs) { return fp8(kwargs); };
  const auto evaluating = [](Job job) { return job.evaluates = true, job; };
  const auto sharded = [](Job job) { return job.options.fsdp_plugin = Fsdp{.fsdp_version = 2}, job; };
  check({
      {"mixed_precision", te({}), plain, &Seen::parameters, "products were computed in fp8, all else in bf16"},
      {"TERecipeKwargs.use_autocast_during_eval", evaluating(te({.use_autocast_during_eval = true})),
       evaluating(te({})), &Seen::evaluated, "1 forward of evaluated models"},
      {"TERecipeKwargs.margin", te({.margin = 9}), te({}), &Seen::parameters, "left out a factor of 2^9"},
      {"TERecipeKwargs.interval", te({.interval = 3}), te({}), &Seen::parameters, "each 3th"},
      {"TERecipeKwargs.fp8_format", te({.fp8_format = "E4M3"}), te({}), &Seen::parameters, "of E4M3 numbers"},
      {"TERecipeKwargs.amax_history_len", te({.amax_history_len = 1, .amax_compute_algo = "max"}),
       te({.amax_compute_algo = "max"}), &Seen::parameters, "from up to 1 steps"},
      {"TERecipeKwargs.amax_compute_algo", te({.amax_compute_algo = "max"}), te({}), &Seen::parameters,
       "by the max value"},
      {"TERecipeKwargs.override_linear_precision", te({.override_linear_precision = std::array{false, false, true}}),
       te({}), &Seen::parameters, "in high precision: gradients of weights"},
      {"TERecipeKwargs.use_mxfp8_block_scaling", te({.use_mxfp8_block_scaling = true}), te({}), &Seen::parameters,
       "blocks of 32"},
      {"AORecipeKwargs.config", ao({.config = Float8LinearConfig{.recipe = "rowwise", .pad_inner_dim = true}}), ao({}),
       &Seen::parameters, "by the recipe rowwise"},
      {"AORecipeKwargs.module_filter_func",
       ao({.module_filter_func = [](const std::string& name, const at::Tensor&) { return name == "second"; }}), ao({}),
       &Seen::parameters, "1 weight takes part"},
  });
  // Batches of 4 rows are no multiple of 16.
  const Seen unpadded = run(ao({.pad_inner_dim = false}));
  EXPECT_EQ(unpadded.error, "an error");
  EXPECT_EQ(unpadded.receipts["AORecipeKwargs.pad_inner_dim"].effect, "not yet: no product was computed in fp8");
  const auto msamp = run(fp8(MSAMPRecipeKwargs{.opt_level = "O1"})).receipts["MSAMPRecipeKwargs.opt_level"];
  EXPECT_EQ(msamp.state, ReceiptState::acted);
  EXPECT_THAT(msamp.effect, HasSubstr("of gradients did not travel"));
  const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
  check({
      {"AORecipeKwargs.enable_fsdp_float8_all_gather", sharded(ao({.enable_fsdp_float8_all_gather = false})),
       sharded(ao({})), &Seen::parameters, "travelled in bf16"},
  });
}

RANKS_TEST(Receipts, Sharding, 2) {
  const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
  const auto by_size = AutoWrapPolicy::size_based_wrap;
  const Fsdp one{.fsdp_version = 1, .auto_wrap_policy = by_size, .min_num_params = 20},
      two{.fsdp_version = 2, .auto_wrap_policy = by_size, .min_num_params = 20};
  // Running statistics move twice where a unit with a norm is recomputed.
  const Fsdp norms{.fsdp_version = 2,
                   .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                   .transformer_cls_names_to_wrap = std::vector<std::string>{"BatchNorm1d", "Linear"}};
  const auto with = [](Fsdp plugin, auto change) { return change(plugin), Job{.options = fsdp(plugin)}; };
  const auto policy = [&](const Fsdp& base, const MixedPrecision& precision) {
    return with(base, [&](Fsdp& p) { p.mixed_precision_policy = precision; });
  };
  const Job v1{.options = fsdp(one)}, v2{.options = fsdp(two)};
  const auto seeds = [](Job job) { return job.different_seeds = true, job; };
  const auto saving = [](Job job) {
    return job.saves = 1, job.save_to = fs::path(support::scratch_dir()) / "p" / "one", job;
  };
  const auto empty = [](Job job) { return job.empty = true, job; };
  const auto freezing = [](Job job) { return job.freezes = true, job; };
  const auto fills = [](Fsdp& p) {
    p.param_init_fn = [](nn::Module& module) {
      materialize(ModelRef(module.shared_from_this()));
      at::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(false)) parameter.fill_(0.25);
    };
  };
  const auto half = at::kBFloat16;
  const MixedPrecision computing{.param_dtype = half}, reducing{.param_dtype = half, .reduce_dtype = half};
  check({
      {"fsdp_plugin.fsdp_version", v2, {.options = {.cpu = true}}, &Seen::shards, "version 2"},
      {"fsdp_plugin.sharding_strategy", with(one, [](Fsdp& p) { p.sharding_strategy = ShardingStrategy::no_shard; }),
       v1, &Seen::shards, "NO_SHARD: this rank holds"},
      {"fsdp_plugin.reshard_after_forward", with(two, [](Fsdp& p) { p.reshard_after_forward = false; }), v2,
       &Seen::numbers, "units were gathered"},
      {"fsdp_plugin.dp_replicate_size", with(two, [](Fsdp& p) { p.dp_replicate_size = 2; }), v2, &Seen::shards,
       "averaged over replicas"},
      {"fsdp_plugin.dp_shard_size", with(two, [](Fsdp& p) { p.dp_shard_size = 1; }), v2, &Seen::shards,
       "averaged over replicas"},
      {"fsdp_plugin.backward_prefetch",
       with(one, [](Fsdp& p) { p.backward_prefetch = BackwardPrefetch::backward_pre; }), v1, &Seen::numbers,
       "gathers were under way before"},
      {"fsdp_plugin.forward_prefetch", with(one, [](Fsdp& p) { p.forward_prefetch = true; }), v1, &Seen::numbers,
       "gathers were under way before"},
      {"fsdp_plugin.limit_all_gathers", with(two, [](Fsdp& p) { p.limit_all_gathers = false; }), v2, &Seen::numbers,
       "at a time"},
      {"fsdp_plugin.quantized_weights", with(two, [](Fsdp& p) { p.quantized_weights = true; }), v2, &Seen::parameters,
       "gathered as 8-bit codes"},
      {"fsdp_plugin.quantized_gradients", with(two, [](Fsdp& p) { p.quantized_gradients = true; }), v2,
       &Seen::parameters, "elements of gradients travelled in"},
      {"fsdp_plugin.quantized_nontrainable_weights",
       freezing(with(two, [](Fsdp& p) { p.quantized_nontrainable_weights = true; })), freezing(v2), &Seen::parameters,
       "kept as 8-bit codes"},
      {"fsdp_plugin.auto_wrap_policy", v2, with(two, [](Fsdp& p) { p.auto_wrap_policy = {}, p.min_num_params = {}; }),
       &Seen::numbers, "units"},
      {"fsdp_plugin.min_num_params", v2, with(two, [](Fsdp& p) { p.min_num_params = {}; }), &Seen::numbers, "units"},
      {"fsdp_plugin.transformer_cls_names_to_wrap",
       with(two,
            [](Fsdp& p) {
              p.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, p.min_num_params = {};
              p.transformer_cls_names_to_wrap = std::vector<std::string>{"Linear"};
            }),
       v2, &Seen::numbers, "6 units"},
      {"fsdp_plugin.ignored_modules", with(two, [](Fsdp& p) { p.ignored_modules = "last"; }), v2, &Seen::shards,
       "2 parameters were left alone"},
      {"fsdp_plugin.state_dict_type",
       saving(with(one, [](Fsdp& p) { p.state_dict_type = StateDictType::sharded_state_dict; })), saving(v1),
       &Seen::files, "SHARDED_STATE_DICT"},
      {"fsdp_plugin.state_dict_config.rank0_only",
       with(one, [](Fsdp& p) { p.state_dict_config = StateDictConfig{.rank0_only = false}; }), v1, &Seen::states,
       "all ranks"},
      {"fsdp_plugin.optim_state_dict_config.rank0_only",
       with(one, [](Fsdp& p) { p.optim_state_dict_config = StateDictConfig{.rank0_only = false}; }), v1,
       &Seen::optimizer_states, "all ranks"},
      {"fsdp_plugin.param_init_fn", empty(with(two, fills)), empty(v2), &Seen::parameters, "called for 6 modules"},
      {"parallelism_config.dp_replicate_size",
       {.options = {.cpu = true, .parallelism_config = ParallelismConfig{.dp_replicate_size = 2}}},
       v2,
       &Seen::shards,
       "2 ranks hold a whole model each"},
      {"parallelism_config.dp_shard_size",
       {.options = {.cpu = true, .parallelism_config = ParallelismConfig{.dp_shard_size = 2}}},
       {.options = {.cpu = true}},
       &Seen::shards,
       "this rank holds"},
      {"fsdp_plugin.sync_module_states", seeds(with(one, [](Fsdp& p) { p.sync_module_states = true; })), seeds(v1),
       &Seen::parameters, "16 tensors"},
      {"fsdp_plugin.cpu_ram_efficient_loading", seeds(with(two, [](Fsdp& p) { p.cpu_ram_efficient_loading = true; })),
       seeds(v2), &Seen::parameters, "16 tensors"},
      {"fsdp_plugin.activation_checkpointing",
       with(norms, [](Fsdp& p) { p.activation_checkpointing = true; }),
       {.options = fsdp(norms)},
       &Seen::buffers,
       "units were recomputed"},
      {"fsdp_plugin.step_in_backward", with(two, [](Fsdp& p) { p.step_in_backward = true; }), v2, &Seen::numbers,
       "new values were computed within backward"},
      {"fsdp_plugin.step_at_once", with(two, [](Fsdp& p) { p.step_at_once = true; }), v2, &Seen::numbers,
       "were stepped on within backward"},
      {"fsdp_plugin.mixed_precision_policy.preset", policy(two, {.preset = "bf16"}), v2, &Seen::computed, "BFloat16"},
      {"fsdp_plugin.mixed_precision_policy.param_dtype", policy(two, computing), v2, &Seen::computed, "BFloat16"},
      {"fsdp_plugin.mixed_precision_policy.reduce_dtype", policy(two, {.reduce_dtype = half}), v2, &Seen::parameters,
       "as BFloat16"},
      {"fsdp_plugin.mixed_precision_policy.buffer_dtype", policy(one, {.buffer_dtype = half}), v1, &Seen::buffer_type,
       "1 buffer was converted"},
      {"fsdp_plugin.mixed_precision_policy.output_dtype", policy(two, {.output_dtype = at::kDouble}), v2, &Seen::output,
       "results of 4 forwards came as Double"},
      {"fsdp_plugin.mixed_precision_policy.keep_low_precision_grads",
       policy(one, {.param_dtype = half, .reduce_dtype = half, .keep_low_precision_grads = true}),
       policy(one, reducing), &Seen::gradients, "as they were reduced"},
      {"fsdp_plugin.mixed_precision_policy.cast_forward_inputs",
       policy(two, {.param_dtype = half, .cast_forward_inputs = false}), policy(two, computing), &Seen::input,
       "came as they were"},
      {"fsdp_plugin.mixed_precision_policy.cast_root_forward_inputs",
       policy(one, {.param_dtype = half, .cast_root_forward_inputs = false}), policy(one, computing), &Seen::input,
       "came as they were"},
      {"fsdp_plugin.mixed_precision_policy.module_classes_to_ignore",
       policy(one, {.param_dtype = half, .module_classes_to_ignore = std::vector<std::string>{}}),
       policy(one, computing), &Seen::norm_type, "no module computes in full precision"},
  });
}

/// Each rank is the first of a machine.
RANKS_TEST(Receipts, SavingOnEachNode, 2) {
  const support::Variable local("LOCAL_RANK", "0"), ranks("LOCAL_WORLD_SIZE", "1");
  const fs::path folder = fs::path(support::scratch_dir()) / "p" / "one";
  Job job{.options = {.cpu = true, .kwargs_handlers = {InitProcessGroupKwargs{.timeout = std::chrono::minutes(2)}}},
          .saves = 1,
          .save_to = folder};
  const Seen without = run(job);
  clear();
  job.options.project_config.save_on_each_node = true;
  const Seen with = run(job);
  const auto& receipt = with.receipts["project_config.save_on_each_node"];
  if (support::rank() == 1) {
    EXPECT_EQ(receipt.state, ReceiptState::acted);
    EXPECT_EQ(receipt.effect, "1 checkpoint was written here besides rank 0's");
  } else {
    EXPECT_EQ(receipt.state, ReceiptState::not_due);
  }
  EXPECT_EQ(without.receipts["project_config.save_on_each_node"].source, "default");
  EXPECT_EQ(with.receipts["InitProcessGroupKwargs.timeout"].state, ReceiptState::acted);
  EXPECT_EQ(with.receipts["InitProcessGroupKwargs.timeout"].value, "120000 ms");
  EXPECT_EQ(with.receipts["InitProcessGroupKwargs.init_method"].state, ReceiptState::not_due);
  EXPECT_THAT(with.receipts["InitProcessGroupKwargs.backend"].effect, HasSubstr("2 ranks talk through gloo"));
}

/// On a device that is not the CPU, if one without bytes.
TEST(Receipts, DevicesGetTheirBatches) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  AcceleratorState::reset(true);
  const support::Variable device("ACCELERATE_TORCH_DEVICE", "meta");
  for (const bool placed : {true, false}) {
    reset_states();
    counts::reset();
    Accelerator accelerator({.device_placement = placed, .dataloader_config = {.non_blocking = true}});
    const auto loader = accelerator.prepare(data::DataLoader(Samples{8}, {.batch_size = 4}));
    for (auto& batch : loader) EXPECT_EQ(batch.data.is_meta(), placed);
    const Receipts receipts = accelerator.receipts();
    EXPECT_EQ(receipts["device_placement"].state, ReceiptState::acted);
    EXPECT_THAT(receipts["device_placement"].effect,
                HasSubstr(placed ? "4 tensors of batches moved to meta" : "stayed where they were"));
    EXPECT_EQ(receipts["dataloader_config.non_blocking"].state,
              placed ? ReceiptState::acted : ReceiptState::without_effect);
    EXPECT_THAT(receipts["dataloader_config.non_blocking"].effect,
                HasSubstr(placed ? "4 of 4 copies were started" : "device_placement is off"));
  }
  AcceleratorState::reset(true);
}

/// Settings that need an accelerator, without one: the store of shards puts them on the host for a GPU that needn't be
/// there; a sharded job on the CPU counts inputs and states that would leave a device; entries say it of a GPU.
TEST(Receipts, WhatNeedsAnAcceleratorSaysWhatItWouldDo) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  AcceleratorState::reset(true);
  const at::Device gpu(at::kCUDA, 0);
  const auto expect = [&](const auto& table, const auto& with, const auto& without, const std::string& setting,
                          const std::string& words, const std::string& otherwise) {
    SCOPED_TRACE(setting);
    const Receipt on = Receipts{table(with)}[setting], off = Receipts{table(without)}[setting];
    EXPECT_EQ(on.source, "call");
    EXPECT_EQ(on.state, ReceiptState::acted);
    EXPECT_EQ(on.effect, words);
    EXPECT_EQ(off.source, "default");
    EXPECT_EQ(off.effect, otherwise);
  };

  receipts::OwnFacts launched, elsewhere{.run = {.device = gpu}};
  launched.given.cpu = true, launched.accelerator = gpu.type();
  expect(receipts::of_launch, launched, elsewhere, "cpu", "the cuda devices of this machine are left alone",
         "the device is cuda:0");
  launched.accelerator.reset();
  EXPECT_EQ(Receipts{receipts::of_launch(launched)}["cpu"].state, ReceiptState::not_due) << "there is none";

  counts::reset();
  const auto sharded = [&](const Fsdp& plugin) {
    return receipts::ShardedFacts{.run = {.device = gpu},
                                  .given = plugin,
                                  .sharding = parallel::resolve(plugin),
                                  .whole_states = 1,
                                  .whole_optimizer_states = 1};
  };
  const auto expect_of = [&](const Fsdp& with, const Fsdp& without, const std::string& setting,
                             const std::string& words, const std::string& otherwise) {
    expect(receipts::of_sharding, sharded(with), sharded(without), setting, words, otherwise);
  };
  const auto weight = torch::zeros({4, 4});
  const auto place = [&](const Fsdp& plugin) {
    std::vector<parallel::ShardedPart> parts(1);
    parts[0].layout = residency::lay_out({weight});
    parts[0].members.push_back({.name = "weight", .tensor = weight, .shard = {}});
    parallel::make_shard_store(parts, {}, gpu, parallel::settings_of(parallel::resolve(plugin), 1, 1))
        ->allocate(parts[0]);
    return parts[0].master;
  };
  const Fsdp offloads{.cpu_offload = CPUOffload(true, /*pin_memory=*/false)};
  counts::add(ShardingCount::units);
  EXPECT_TRUE(place(offloads).is_cpu());
  expect_of(offloads, {}, "fsdp_plugin.cpu_offload.offload_params", "1 part of units live on the host", "off");
  expect_of(offloads, {}, "fsdp_plugin.cpu_offload.pin_memory", "in page-locked memory: 0 of 1 part",
            "offload_params is off");
  counts::add(ShardingCount::parts_pinned);  // only a GPU's driver can lock pages
  EXPECT_EQ(Receipts{receipts::of_sharding(sharded(offloads))}["fsdp_plugin.cpu_offload.pin_memory"].effect,
            "in page-locked memory: 1 of 1 part");

  const auto wrapped = [](std::optional<bool> offload) {
    return Fsdp{.fsdp_version = 2,
                .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                .activation_checkpointing = true,
                .activation_checkpointing_offload = offload,
                .min_num_params = 20};
  };
  const Fsdp recomputes = wrapped(true);
  Receipts here = run({.options = fsdp(recomputes), .epochs = 1}).receipts;
  EXPECT_EQ(here["fsdp_plugin.activation_checkpointing_offload"].effect,
            "the device is the CPU, so inputs of units are on the host already");
  const int64_t inputs = counts::read(ResidencyCount::inputs_offloaded);
  EXPECT_GE(inputs, 3) << "a batch for each of three steps at least";
  expect_of(recomputes, wrapped({}), "fsdp_plugin.activation_checkpointing_offload",
            fmt::format("{} inputs of units waited on the host", inputs), "off");

  const StateDictConfig stays{.offload_to_cpu = false};
  const Fsdp keeps{.fsdp_version = 1, .state_dict_config = stays, .optim_state_dict_config = stays};
  here = run({.options = fsdp(keeps), .epochs = 1}).receipts;
  for (const std::string config : {"fsdp_plugin.state_dict_config", "fsdp_plugin.optim_state_dict_config"}) {
    EXPECT_EQ(here[config + ".offload_to_cpu"].effect, "the device is the CPU, so states are on the host already");
    expect_of(keeps, {.fsdp_version = 1}, config + ".offload_to_cpu",
              "1 whole state was given to rank 0, on their device", "1 whole state was given to rank 0, on the host");
  }
  AcceleratorState::reset(true);
}

/// A setting that can't act says why; strict counts it.
TEST(Receipts, WithoutEffectHasAReason) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  AcceleratorState::reset(true);
  const auto reason = [](const AcceleratorOptions& options, const std::string& setting) {
    const Receipts receipts = run({.options = options, .epochs = 1}).receipts;
    EXPECT_EQ(receipts[setting].state, ReceiptState::without_effect) << setting;
    EXPECT_EQ(receipts.without_effect().size(), 1u) << receipts.text();
    EXPECT_THAT(receipts.text(), HasSubstr("NO EFFECT"));
    return receipts[setting].effect;
  };
  EXPECT_EQ(reason(loading({.non_blocking = true}), "dataloader_config.non_blocking"),
            "0 of 6 copies, batches are on the cpu already");
  EXPECT_THAT(reason(loading({.split_batches = true}), "dataloader_config.split_batches"), HasSubstr("one process"));
  EXPECT_THAT(reason(loading({.data_seed = 1}), "dataloader_config.data_seed"),
              HasSubstr("use_seedable_sampler is off"));
  EXPECT_THAT(reason(ddp({.bucket_cap_mb = 1}), "DistributedDataParallelKwargs.bucket_cap_mb"),
              HasSubstr("one process"));
  EXPECT_THAT(reason(accumulating({.sync_each_batch = true}), "gradient_accumulation_plugin.sync_each_batch"),
              HasSubstr("one process"));
  EXPECT_THAT(
      reason({.cpu = true, .kwargs_handlers = {GradScalerKwargs{.init_scale = 2}}}, "GradScalerKwargs.init_scale"),
      HasSubstr("mixed_precision is no"));
  EXPECT_THAT(reason({.cpu = true, .log_with = {"tensorboard"}, .project_dir = support::scratch_dir()}, "log_with"),
              HasSubstr("init_trackers() was not called"));
  EXPECT_THAT(reason(fsdp({.cpu_offload = true}), "fsdp_plugin.cpu_offload.offload_params"),
              HasSubstr("on the host already"));
  EXPECT_THAT(reason(fsdp({.ignored_modules = "nobody"}), "fsdp_plugin.ignored_modules"), HasSubstr("no module"));
  EXPECT_THAT(reason(fsdp({.state_dict_config = StateDictConfig{.offload_to_cpu = false}}),
                     "fsdp_plugin.state_dict_config.offload_to_cpu"),
              HasSubstr("the device is the CPU"));
  EXPECT_THAT(reason(fsdp({.optim_state_dict_config = StateDictConfig{.offload_to_cpu = false}}),
                     "fsdp_plugin.optim_state_dict_config.offload_to_cpu"),
              HasSubstr("the device is the CPU"));
  EXPECT_THAT(reason(fsdp({.use_orig_params = false}), "fsdp_plugin.use_orig_params"), HasSubstr("always"));
  AcceleratorState::reset(true);
}

TEST(Receipts, VariablesSayWhereTheyCameFrom) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  AcceleratorState::reset(true);
  const support::Variable steps("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2"), version("FSDP_VERSION", "2"),
      type("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT");
  {
    const Receipts alone = run({.options = {.gradient_accumulation_steps = 3, .cpu = true}, .epochs = 1}).receipts;
    EXPECT_EQ(alone["gradient_accumulation_steps"].source, "variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        << "it wins";
    EXPECT_EQ(alone["gradient_accumulation_steps"].value, "2");
  }
  const support::Variable sources(
      "ACCELERATE_RECEIPTS_SOURCES",
      R"({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "file a.yaml", "FSDP_VERSION": "default",)"
      R"( "FSDP_STATE_DICT_TYPE": "flag --fsdp_state_dict_type"})");
  const Receipts launched = run({.options = fsdp({.fsdp_version = 2}), .epochs = 1}).receipts;
  EXPECT_EQ(launched["gradient_accumulation_steps"].source, "file a.yaml");
  EXPECT_EQ(launched["fsdp_plugin.fsdp_version"].source, "call") << "the call wins";
  EXPECT_EQ(launched["fsdp_plugin.state_dict_type"].source, "flag --fsdp_state_dict_type");
  EXPECT_EQ(launched["fsdp_plugin.state_dict_type"].value, "SHARDED_STATE_DICT");
  EXPECT_EQ(launched["fsdp_plugin.backward_prefetch"].source, "default");
  AcceleratorState::reset(true);
}

TEST(Receipts, JsonGoesBothWays) {
  Receipts receipts;
  receipts.entries = {{"a", "1", "call", "always", ReceiptState::without_effect, "no \"reason\""},
                      {"b", "\xff", "default", "never", ReceiptState::not_due, "off"}};
  const Receipts back = Receipts::from_json(receipts.json());
  ASSERT_EQ(back.entries.size(), 2u);
  EXPECT_EQ(back["a"].effect, "no \"reason\"");
  EXPECT_EQ(back.without_effect().size(), 1u);
  EXPECT_EQ(back["b"].state, ReceiptState::not_due);
  EXPECT_THAT(support::message_of<ConfigError>([&] { receipts["c"]; }), HasSubstr("no setting 'c'"));
  EXPECT_THAT(support::message_of<ConfigError>([] { Receipts::from_json("{"); }), HasSubstr("no JSON of receipts"));
}

/// A count costs next to nothing, since it is one add without a lock; and none is lost.
TEST(Receipts, ThreadsCountWithoutALock) {
  static_assert(std::decay_t<decltype(counts::of(DataCount::batches))>::is_always_lock_free);
  constexpr int64_t kTimes = 100'000;
  counts::reset();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int64_t k = 0; k < kTimes; ++k) counts::add(DataCount::batches);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(counts::read(DataCount::batches), 4 * kTimes);
  counts::reset();
}

// ---- under the launcher

/// The launcher starts this in the next tests.
TEST(ReceiptsJob, Trains) {
  const char* how = std::getenv("RECEIPTS_TEST_JOB");
  if (!how) return;  // other cases start it
  AcceleratorOptions options{.dataloader_config = {.split_batches = true}};
  const int64_t rows = std::string_view(how) == "sharded" ? 8 : 4;  // a norm needs two of each of four ranks
  if (std::string_view(how) != "sharded") options.kwargs_handlers = {Ddp{.comm_hook = DDPCommunicationHookType::bf16}};
  if (std::string_view(how) == "idle") options.dataloader_config.non_blocking = true;
  cpu_set_t cores;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  const auto accelerator = std::make_unique<Accelerator>(options);
  Net net(3, std::string_view(how) == "fp8" ? 16 : 6);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  auto [m, opt, loader] =
      accelerator->prepare(net, optimizer, data::DataLoader(Samples{4 * rows}, {.batch_size = rows, .shuffle = true}));
  for (auto& batch : loader) {
    const auto scope = accelerator->accumulate(m);
    accelerator->backward(m(batch.data).mean());
    opt.step();
    opt.zero_grad();
  }
  int64_t held = 0;
  for (const auto& group : opt.optimizer().param_groups())
    for (const auto& parameter : group.params()) held += parameter.numel();
  std::cout << fmt::format("{} cores, {} elements\n", CPU_COUNT(&cores), held) << std::flush;
  if (std::string_view(how) == "exit") std::exit(0);
  if (std::string_view(how) != "destructor") accelerator->end_training();
}

cli_test::Result launch_job(const std::string& how, std::vector<std::string> options, const std::string& ranks = "2") {
  options.insert(options.begin(), {"-q", "--num_processes", ranks, "--gradient_accumulation_steps", "2"});
  options.insert(options.end(), {fs::read_symlink("/proc/self/exe"), "--gtest_filter=ReceiptsJob.Trains"});
  return cli_test::launch(options, {.env = {"RECEIPTS_TEST_JOB=" + how, "OMP_NUM_THREADS=1"}});
}

TEST(ReceiptsLaunch, PrintsATableAtTheEnd) {
  const auto result = launch_job("", {"--receipts"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  const auto table = result.out.find("Receipts: what");
  ASSERT_NE(table, std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("[  PASSED  ]", table), std::string::npos) << "the table is last";
  const std::string text = result.out.substr(table);
  EXPECT_THAT(text, AllOf(HasSubstr("dataloader_config.split_batches "), HasSubstr("  the program "),
                          HasSubstr("4 batches were cut in 2, a piece for each process"),
                          HasSubstr("flag --gradient_accumulation_steps"),
                          HasSubstr("4 micro-steps in groups of 2: gradients were synchronised in 2 of them"),
                          HasSubstr("DistributedDataParallelKwargs.comm_hook"), HasSubstr("flag --num_processes")));
  EXPECT_THAT(text, HasSubstr("\nOf 4 asked for, 4 acted. "));
  EXPECT_THAT(text, Not(HasSubstr("mixed_precision")));
}

TEST(ReceiptsLaunch, StrictEndsWith65WhereASettingHadNoEffect) {
  for (const std::string how : {"idle", "destructor", "exit"}) {
    SCOPED_TRACE(how);
    const auto result = launch_job(how, {"--receipts=strict", "--json"});
    EXPECT_EQ(result.exit_code, how == "idle" ? 65 : 0) << result.out << result.err;
    const auto begin = result.out.find("{\n \"receipts\"");
    ASSERT_NE(begin, std::string::npos) << "whatever the program's end: " << result.out;
    const Receipts receipts = Receipts::from_json(result.out.substr(begin));
    EXPECT_EQ(receipts.without_effect().size(), how == "idle" ? 1u : 0u) << receipts.text();
    EXPECT_EQ(receipts["dataloader_config.split_batches"].state, ReceiptState::acted);
    EXPECT_EQ(receipts["cpu"].source, "default");
  }
}

TEST(ReceiptsLaunch, FlagsHaveReceipts) {
  const std::vector<std::string> flags{"--receipts=strict",
                                       "--json",
                                       "--use_fsdp",
                                       "--fsdp_version",
                                       "2",
                                       "--fsdp_auto_wrap_policy",
                                       "SIZE_BASED_WRAP",
                                       "--fsdp_min_num_params",
                                       "20",
                                       "--mixed_precision",
                                       "bf16",
                                       "--num_cpu_threads_per_process",
                                       "1",
                                       "--debug"};
  const auto result = launch_job("sharded", flags);
  const auto begin = result.out.find("{\n \"receipts\"");
  ASSERT_NE(begin, std::string::npos) << result.out << result.err;
  const Receipts receipts = Receipts::from_json(result.out.substr(begin));
  EXPECT_EQ(result.exit_code, 0) << receipts.text();
  for (const char* setting :
       {"launch.num_processes", "launch.num_cpu_threads_per_process", "launch.debug", "launch.use_fsdp",
        "fsdp_plugin.fsdp_version", "fsdp_plugin.auto_wrap_policy", "fsdp_plugin.min_num_params", "mixed_precision"}) {
    EXPECT_EQ(receipts[setting].state, ReceiptState::acted) << setting << ": " << receipts[setting].effect;
    EXPECT_THAT(receipts[setting].source, testing::StartsWith("flag --")) << setting;
  }
  EXPECT_EQ(receipts["fsdp_plugin.sharding_strategy"].source, "default") << "what the launcher sets by default";

  // Others: ranks share the cores out; two of four hold the model, which all four would share without them; nothing is
  // compiled, so how does not matter.
  const auto laid_out =
      launch_job("sharded",
                 {"--receipts=strict", "--json", "--use_fsdp", "--fsdp_version", "2", "--enable_cpu_affinity",
                  "--use_parallelism_config", "--parallelism_config_dp_replicate_size", "2",
                  "--parallelism_config_dp_shard_size", "2", "--dynamo_backend", "no", "--dynamo_mode", "max-autotune",
                  "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation"},
                 "4");
  ASSERT_NE(laid_out.out.find("{\n \"receipts\""), std::string::npos) << laid_out.out << laid_out.err;
  const Receipts changed = Receipts::from_json(laid_out.out.substr(laid_out.out.find("{\n \"receipts\"")));
  EXPECT_EQ(laid_out.exit_code, 65);
  std::vector<std::string> idle;
  for (const auto& receipt : changed.without_effect()) idle.push_back(receipt.setting);
  EXPECT_THAT(idle, testing::ElementsAre("launch.dynamo_mode", "launch.dynamo_use_fullgraph",
                                         "launch.dynamo_use_dynamic", "launch.dynamo_use_regional_compilation"));
  EXPECT_EQ(changed["launch.dynamo_backend"].effect, "models run as they are");
  for (const auto& setting : idle) {
    EXPECT_EQ(changed[setting].source, "flag --" + setting.substr(7));
    EXPECT_EQ(changed[setting].effect, "nothing is compiled");
    EXPECT_EQ(receipts[setting].source, "default");
  }
  EXPECT_EQ(changed["launch.dynamo_mode"].value, "max-autotune");
  EXPECT_EQ(changed["launch.use_parallelism_config"].effect, "ranks are laid out as 2 x 2 (dp_replicate x dp_shard)");
  EXPECT_EQ(receipts["launch.use_parallelism_config"].effect, "off");
  EXPECT_THAT(changed["parallelism_config.dp_shard_size"].effect, HasSubstr("this rank holds 144 of 288 elements"));
  EXPECT_EQ(changed["parallelism_config.dp_shard_size"].source, "flag --parallelism_config_dp_shard_size");
  EXPECT_THAT(laid_out.out, AllOf(HasSubstr(" cores, 84 elements\n"), HasSubstr(" cores, 51 elements\n")))
      << "two ranks hold all 135";
  cpu_set_t cores;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  if (const int all = CPU_COUNT(&cores); all > 1) {
    EXPECT_THAT(result.out, HasSubstr(fmt::format("{} cores, ", all)));
    EXPECT_THAT(laid_out.out, Not(HasSubstr(fmt::format("{} cores, ", all))));
    EXPECT_THAT(changed["launch.enable_cpu_affinity"].effect, testing::StartsWith("this process is bound to "));
    EXPECT_EQ(receipts["launch.enable_cpu_affinity"].effect, "off");
  }
}

TEST(ReceiptsLaunch, RecipesReachThePrograms) {
  const auto result = launch_job("fp8", {"--receipts=strict", "--json", "--mixed_precision", "fp8", "--fp8_backend",
                                         "te", "--fp8_margin", "1", "--fp8_format", "E4M3"});
  const auto begin = result.out.find("{\n \"receipts\"");
  ASSERT_NE(begin, std::string::npos) << result.out << result.err;
  const Receipts receipts = Receipts::from_json(result.out.substr(begin));
  EXPECT_EQ(result.exit_code, 0) << receipts.text();
  for (const char* setting : {"mixed_precision", "TERecipeKwargs.margin", "TERecipeKwargs.fp8_format"}) {
    EXPECT_EQ(receipts[setting].state, ReceiptState::acted) << setting << ": " << receipts[setting].effect;
    EXPECT_THAT(receipts[setting].source, testing::StartsWith("flag --")) << setting;
  }
  EXPECT_THAT(receipts["TERecipeKwargs.fp8_format"].effect, HasSubstr("of E4M3 numbers"));
}

/// Two machines that are launchers on this one: the one with rank 0 has the table, and strict is its exit code.
TEST(ReceiptsLaunch, OfSeveralMachinesTheFirstPrintsThem) {
  const auto job = [](const std::vector<std::string>& program) {
    const auto port = std::to_string(support::free_port());
    const auto machine = [&](const std::string& rank) {
      std::vector<std::string> words{cli_test::accelerate_path(),
                                     "launch",
                                     "--num_machines",
                                     "2",
                                     "--num_processes",
                                     "2",
                                     "--machine_rank",
                                     rank,
                                     "--main_process_ip",
                                     "127.0.0.1",
                                     "--main_process_port",
                                     port,
                                     "--rdzv_conf",
                                     "join_timeout=60,close_timeout=8,local_addr=127.0.0." + rank + "1",
                                     "--receipts=strict"};
      words.insert(words.end(), program.begin(), program.end());
      return std::make_unique<cli_test::Program>(
          words, cli_test::Program::Options{.env = {"RECEIPTS_TEST_JOB=idle", "OMP_NUM_THREADS=1"}});
    };
    const auto second = machine("1"), first = machine("0");
    return std::pair(first->wait(), second->wait());
  };
  const auto [first, second] = job({fs::read_symlink("/proc/self/exe"), "--gtest_filter=ReceiptsJob.Trains"});
  EXPECT_EQ(first.exit_code, 65) << first.out << first.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("NO EFFECT: 0 of 8 copies"), HasSubstr(", 1 had NO EFFECT"),
                               HasSubstr("the 2 processes are on 2 machines, 1 of them on this one"),
                               HasSubstr("launch.num_machines "), HasSubstr("  flag --num_machines ")));
  EXPECT_EQ(second.exit_code, 0) << second.out << second.err;
  EXPECT_THAT(second.out, Not(HasSubstr("Receipts: what")));
  EXPECT_THAT(second.err, HasSubstr("receipts: rank 0 is on machine 0 of 2"));

  const auto [silent, other] = job({"/bin/true"});
  EXPECT_EQ(silent.exit_code, 65) << silent.err;
  EXPECT_THAT(silent.err, HasSubstr("no receipts: the main process made no Accelerator"));
  EXPECT_EQ(other.exit_code, 0) << other.err;
}

TEST(ReceiptsLaunch, SaysWhenThereAreNone) {
  const auto shell = [](const char* how, const char* script) {
    return cli_test::launch({how, "--num_processes", "2", "/bin/sh", "-c", script});
  };
  const auto none = shell("--receipts", "true"), strict = shell("--receipts=strict", "true"),
             failed = shell("--receipts=strict", "exit 3");
  EXPECT_EQ(none.exit_code, 0);
  EXPECT_THAT(none.err, HasSubstr("no receipts: the main process made no Accelerator"));
  EXPECT_EQ(strict.exit_code, 65);
  EXPECT_EQ(failed.exit_code, 3);
  EXPECT_THAT(failed.err, Not(HasSubstr("no receipts")));
  EXPECT_THAT(cli_test::launch({"--json", "/bin/true"}).err, HasSubstr("give --receipts, too"));
  EXPECT_THAT(cli_test::launch({"--receipts=all", "/bin/true"}).err, HasSubstr("expected one of: on, strict"));
  EXPECT_THAT(cli_test::launch({"--receipts", "--use_deepspeed", "/bin/true"}).err,
              HasSubstr("this job's are started by another program"));
}

TEST(ReceiptsLaunch, WithoutTheLauncherTheProcessPrintsThem) {
  cli_test::Program program({fs::read_symlink("/proc/self/exe"), "--gtest_filter=ReceiptsJob.Trains"},
                            {.env = {"RECEIPTS_TEST_JOB=idle", "ACCELERATE_RECEIPTS=1"}});
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("Receipts: what"), HasSubstr("NO EFFECT: 0 of 8 copies, batches are on the cpu")));
  EXPECT_EQ(result.out.find("Receipts: what"), result.out.rfind("Receipts: what")) << "once";
}

}  // namespace
}  // namespace receipts_test
