#include "fsdp_effects.hpp"

#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/accelerator/dry_run.hpp"
#include "accelerate/model/no_split.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/residency/deferred.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/group.hpp"
#include "parallel/fsdp/translate.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "ranks.hpp"

namespace conformance::fsdp_plugin_cases {
namespace {

using namespace accelerate;

constexpr int64_t kWidth = 40, kRows = 64;
/// Parameters of a block, more than the 2000 of FSDP_MIN_NUM_PARAMS, which neither of its halves has.
constexpr int64_t kBlock = 2 * (kWidth * kWidth + kWidth);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const std::string& name) : Module(name) {
    up = register_module("up", torch::nn::Linear(kWidth, kWidth));
    down = register_module("down", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::sigmoid(torch::tanh(up(x)))).sigmoid().tanh(); }
  torch::nn::Linear up = nullptr, down = nullptr;
};
/// A layer by the model's own word.
struct LayerImpl : BlockImpl, NoSplit {
  using BlockImpl::BlockImpl;
};

/// Two each of classes A, B and C, and nothing else.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (const char* name : {"A", "B", "C", "A", "B", "C"}) {
      std::shared_ptr<BlockImpl> block;
      if (std::string(name) == "A") block = std::make_shared<LayerImpl>(name);
      else block = std::make_shared<BlockImpl>(name);
      blocks.push_back(register_module("block" + std::to_string(blocks.size()), block));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<BlockImpl>> blocks;
};

struct Run {
  DryRunReport report;
  residency::Stats forward, backward;
};

/// Three steps as one rank of four machines; the last one's counts, when the order of units is known.
Run take_steps(const FullyShardedDataParallelPlugin& plugin) {
  AcceleratorState::reset(/*reset_partial_state=*/true);
  Run result;
  result.report = dry_run({.num_processes = 4}, [&](const DryRunMark& mark) {
    Accelerator accelerator({.fsdp_plugin = plugin});
    std::shared_ptr<ModelImpl> model;
    {
      const auto empty = init_empty_weights();
      model = std::make_shared<ModelImpl>();
    }
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    mark("build");
    auto [m, opt] = accelerator.prepare(model, optimizer);
    mark("prepare");
    for (int step = 0; step < 3; ++step) {
      residency::reset_stats();
      auto loss = m(torch::zeros({kRows, kWidth}, accelerator.device())).mean();
      result.forward = residency::stats();
      mark("forward");
      residency::reset_stats();
      accelerator.backward(loss);
      loss.reset();
      result.backward = residency::stats();
      mark("backward");
      opt.step(), opt.zero_grad();
    }
  });
  return result;
}

int64_t fetches_of(const residency::Stats& stats) { return stats.faults + stats.prefetch_hits; }

/// Whether shards lie on the host where an accelerator computes, which need not be there.
bool offloads(const FullyShardedDataParallelPlugin& plugin) {
  auto resolved = parallel::resolve(plugin);
  resolved.cpu_offload->pin_memory = false;  // which only a machine with an accelerator can
  const auto weight = torch::zeros({4, 4});
  std::vector<parallel::ShardedPart> parts(1);
  parts[0].layout = residency::lay_out({weight}, 2);
  parts[0].members.push_back({.name = "weight", .tensor = weight, .shard = {}});
  parallel::ShardGroups groups;
  groups.shard = comm::Group::join({.world_size = 2, .dry = std::make_shared<comm::TrafficCounter>()});
  try {
    parallel::make_shard_store(parts, groups, at::Device(at::kCUDA, 0), parallel::settings_of(resolved, 1, 1))
        ->allocate(parts[0]);
    return parts[0].master.is_cpu();
  } catch (const std::exception&) {
    return false;  // memory on the accelerator was asked for
  }
}

/// The form in which a model is saved, by the name of its file.
std::string saved_as(FullyShardedDataParallelPlugin plugin) {
  AcceleratorState::reset(/*reset_partial_state=*/true);
  plugin.auto_wrap_policy = AutoWrapPolicy::no_wrap;  // there is one module
  plugin.activation_checkpointing = false;
  const std::filesystem::path folder = std::filesystem::path(support::scratch_dir()) / "fsdp_effects";
  {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
    auto m = accelerator.prepare(torch::nn::Linear(2, 2));
    accelerator.save_state(folder);
  }
  AcceleratorState::reset(/*reset_partial_state=*/true);
  for (const auto& [file, form] : {std::pair("pytorch_model_fsdp.bin", "FULL_STATE_DICT"),
                                   std::pair("pytorch_model_fsdp_rank0.bin", "LOCAL_STATE_DICT"),
                                   std::pair("pytorch_model_fsdp_0/.metadata", "SHARDED_STATE_DICT")})
    if (std::filesystem::exists(folder / file)) return form;
  return "in another form";
}

/// How many fetches a forward takes where units are the six blocks, two of them and the rest, or the whole model.
constexpr int64_t kAllBlocks = 6, kTwoAndTheRest = 3, kOne = 1;

}  // namespace

json effects_of(const FullyShardedDataParallelPlugin& plugin) {
  auto own = plugin, in_units = plugin;
  const auto policy = parallel::resolve(plugin).auto_wrap_policy;
  if (std::get<AutoWrapPolicy>(*policy) == AutoWrapPolicy::no_wrap) {
    // Without units hardly any other setting shows, and recomputing is refused.
    own.activation_checkpointing = false;
    in_units.auto_wrap_policy =
        lambda_auto_wrap_policy([](const Submodule& module) { return module.class_name.size() == 1; });
  }
  const Run found = take_steps(in_units);
  const auto& traffic = found.report.phase("backward").traffic;
  const int64_t unit_bytes = 4 * kBlock + kBlock / 4;  // with padding
  const bool again = fetches_of(found.backward) > 0;
  json effects{{"fetches", fetches_of(take_steps(own).forward)},
               {"gathers again for backward", again},
               {"averages over shards", traffic.reduce_scatter > 0},
               {"averages over replicas", traffic.all_reduce > 0},
               {"rank 0's values", found.report.phase("prepare").traffic.broadcast > 0},
               {"shards on the host", offloads(plugin)},
               {"saved as", saved_as(plugin)}};
  if (fetches_of(found.forward) != kAllBlocks) return effects;
  if (again) {
    effects["forward fetches two ahead"] = found.forward.peak_resident_bytes > 2 * unit_bytes;
    // Backward may begin with the units that forward asked for last.
    effects["backward fetches ahead"] = found.backward.prefetch_hits > kAllBlocks / 2;
  }
  // A block saves its input and four results, of which recomputing keeps the first.
  const int64_t activation = 4 * kRows * kWidth;
  effects["recomputes"] = found.report.phase("forward").at_end[MemoryUse::other] < 3 * kAllBlocks * activation;
  return effects;
}

json expected_effects(const json& fields) {
  const auto text = [&](const char* name) {
    return fields.at(name).is_string() ? fields.at(name).get<std::string>() : std::string();
  };
  const auto is_true = [&](const char* name) { return fields.at(name) == true; };
  const bool first = fields.at("fsdp_version") == 1;
  std::string strategy = is_true("reshard_after_forward") ? "FULL_SHARD" : "SHARD_GRAD_OP";
  if (first) {
    strategy = text(fields.at("reshard_after_forward").is_null() ? "sharding_strategy" : "reshard_after_forward");
    strategy = strategy.substr(strategy.rfind('.') + 1);
  }
  // A machine of a dry run has one rank. Replicas start equal.
  const bool whole = strategy == "NO_SHARD" || strategy.find("HYBRID") != std::string::npos;

  const auto policy = text("auto_wrap_policy");
  int64_t units = kAllBlocks;
  if (policy.empty() || (policy == "fn:size_based_auto_wrap_policy" && fields.at("min_num_params") == 0)) units = kOne;
  if (policy == "fn:transformer_auto_wrap_policy" && fields.at("transformer_cls_names_to_wrap").is_null())
    units = kTwoAndTheRest;
  const int64_t others_see = policy.empty() ? kAllBlocks : units;  // as in effects_of()
  const bool again = !whole && strategy == "FULL_SHARD" && others_see > kOne;
  const json& offload = fields.at("cpu_offload");
  std::string form = text("state_dict_type");
  json effects{
      {"fetches", whole ? 0 : units},
      {"gathers again for backward", again},
      {"averages over shards", !whole},
      {"averages over replicas", whole},
      {"rank 0's values", is_true("sync_module_states") || is_true("cpu_ram_efficient_loading") || whole},
      {"shards on the host", offload.at("__class__") == "CPUOffloadPolicy" || offload.value("offload_params", false)},
      {"saved as", form.substr(form.rfind('.') + 1)}};
  if (whole || others_see != kAllBlocks) return effects;
  if (again) {
    effects["forward fetches two ahead"] = is_true("forward_prefetch");
    effects["backward fetches ahead"] = !first || !text("backward_prefetch").empty();
  }
  effects["recomputes"] = is_true("activation_checkpointing");
  return effects;
}

}  // namespace conformance::fsdp_plugin_cases
