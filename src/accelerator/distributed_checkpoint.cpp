#include "accelerate/accelerator/distributed_checkpoint.hpp"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "accelerate/comm.hpp"
#include "accelerate/state.hpp"
#include "comm/agreement.hpp"
#include "optim/optimizer_state.hpp"
#include "residency/member.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/distributed_items.hpp"
#include "run_state/distributed_load.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/state_dict.hpp"
#include "utils/raise.hpp"

namespace accelerate::distributed_checkpoint {
namespace {

namespace fs = std::filesystem;
using detail::PreparedModel;
using parallel::Held;

/// Bytes that come and go are not there to be written or read as a whole.
void refuse_absent(const std::string& name, const at::Tensor& tensor) {
  if (tensor.has_storage() && residency::Member::of(tensor))
    raise<ConfigError>(
        "state dict: '{}' is a parameter of a sharded or offloaded model, whose bytes are elsewhere, expected a tensor "
        "with bytes of its own; give get_model_state_dict() what prepare() returned, not the module",
        name);
}

void refuse_absent(const StateDict& state) {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    for (const auto& leaf : run_state::leaves_of(state))
      if (const auto* tensor = std::get_if<at::Tensor>(&leaf.value->kind())) refuse_absent(leaf.name, *tensor);
  });
}

}  // namespace

void save(const StateDict& state, const fs::path& folder) {
  const PartialState here;
  refuse_absent(state);
  const run_state::DistributedItems items(state);
  run_state::UnfinishedCheckpoint checkpoint(folder, here.is_local_main_process(),
                                             run_state::CheckpointKind::distributed);
  items.write_into(checkpoint.where());
  checkpoint.publish();
}

void load(StateDict& state, const fs::path& folder, const LoadOptions& options) {
  const PartialState here;
  refuse_absent(state);
  run_state::finish_checkpoint(folder, here.is_local_main_process());
  run_state::load_distributed(state, folder, {.allow_partial = options.allow_partial_load});
}

std::shared_ptr<PreparedModel> AnyModel::whole(const ModelRef& model) {
  for (const auto& [name, tensor] : model.state()) refuse_absent(name, tensor);
  return std::make_shared<PreparedModel>(PreparedModel{.model = model, .autocast = {}});
}

// ---- getting

namespace {

Value on_host(const Value& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value.kind())) return tensor->cpu();
  if (const auto* dict = std::get_if<StateDict>(&value.kind())) {
    StateDict result;
    for (const auto& [key, child] : *dict) result.emplace(key, on_host(child));
    return result;
  }
  if (const auto* sharded = std::get_if<ShardedTensor>(&value.kind())) {
    ShardedTensor result = *sharded;
    for (auto& part : result.parts) {
      if (!part.values.is_cpu()) result.engine = nullptr;  // copies are nobody's
      part.values = part.values.cpu();
    }
    return result;
  }
  return value;
}

std::set<std::string> frozen_names(const PreparedModel& model) {
  std::set<const at::TensorImpl*> frozen;
  for (const auto& [name, parameter] : model.model.parameters())
    if (!parameter.requires_grad()) frozen.insert(parameter.unsafeGetTensorImpl());
  std::set<std::string> names;
  for (const auto& [name, tensor] : model.model.state())
    if (frozen.contains(tensor.unsafeGetTensorImpl())) names.insert(name);
  return names;
}

/// The ranks that get whole tensors, and the tensors' place.
StateDictConfig config_of(const StateDictOptions& options) {
  return {.offload_to_cpu = options.cpu_offload, .rank0_only = options.cpu_offload};
}

const StateDict kNone;

const StateDict& dict_at(const StateDict& state, const std::string& key) {
  const auto found = state.find(key);
  return found == state.end() ? kNone : found->second.as<StateDict>();
}

std::vector<std::string> texts(const Value& list) {
  std::vector<std::string> result;
  for (const auto& item : list.as<List>()) result.push_back(item.to<std::string>());
  return result;
}

StateDict flattened(const StateDict& state) {
  StateDict flat;
  for (const auto& [name, fields] : dict_at(state, "state"))
    for (const auto& [kind, value] : fields.as<StateDict>()) flat.emplace("state." + name + "." + kind, value);
  for (const auto& group : state.at("param_groups").as<List>())
    for (const auto& name : texts(group.as<StateDict>().at("params")))
      for (const auto& [option, value] : group.as<StateDict>())
        if (option != "params") flat.emplace("param_groups." + name + "." + option, value);
  return flat;
}

}  // namespace

StateDict get_model_state_dict(const AnyModel& model, const StateDictOptions& options) {
  const auto& core = *model.core();
  StateDict state;
  if (!options.full_state_dict) state = run_state::distributed_state(core);
  else state = Value(run_state::whole_state(core, config_of(options))).as<StateDict>();
  if (options.ignore_frozen_params)
    for (const auto& name : frozen_names(core)) state.erase(name);
  return options.cpu_offload ? on_host(state).as<StateDict>() : state;
}

StateDict get_optimizer_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                   const StateDictOptions& options) {
  const run_state::PreparedModels models{model.core()};
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    for (const auto& optimizer : optimizers.all()) run_state::parameters_by_group(optimizer, models);
  });
  StateDict states;
  List groups;
  for (const auto& optimizer : optimizers.all()) {
    constexpr auto kUntouched = run_state::Untouched::at_start;
    StateDict one =
        options.full_state_dict
            ? Value(run_state::whole_state(optimizer, models, config_of(options), kUntouched)).as<StateDict>()
            : run_state::distributed_state(optimizer, models, kUntouched);
    if (one.empty()) continue;  // rank 0 has it
    states.merge(one.at("state").as<StateDict>());
    auto& more = one.at("param_groups").as<List>();
    std::move(more.begin(), more.end(), std::back_inserter(groups));
  }
  if (options.full_state_dict && options.cpu_offload && comm::rank() != 0) return {};
  StateDict state{{"state", std::move(states)}, {"param_groups", std::move(groups)}};
  if (options.flatten_optimizer_state_dict) state = flattened(state);
  return options.cpu_offload ? on_host(state).as<StateDict>() : state;
}

std::pair<StateDict, StateDict> get_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                               const StateDictOptions& options) {
  return {get_model_state_dict(model, options), get_optimizer_state_dict(model, optimizers, options)};
}

// ---- setting

namespace {

/// Parameters of several optimizers, one behind the other, by group.
using Groups = std::vector<std::vector<Held>>;

/// The nested form of a flat dict. The names decide where a key's parameter ends, which may have dots in it.
StateDict nested(const StateDict& flat, const Groups& groups) {
  const auto fields_under = [&](const std::string& prefix) {
    StateDict fields;
    for (auto entry = flat.lower_bound(prefix); entry != flat.end() && entry->first.starts_with(prefix); ++entry)
      if (const auto field = entry->first.substr(prefix.size()); field.find('.') == std::string::npos)
        fields.emplace(field, entry->second);
    return fields;
  };
  StateDict states;
  List result;
  for (const auto& group : groups) {
    StateDict options;
    List names;
    for (const auto& parameter : group)
      for (const auto& name : parameter.names) {
        auto of_group = fields_under("param_groups." + name + ".");
        if (of_group.empty()) continue;
        if (names.empty()) options = std::move(of_group);
        names.emplace_back(name);
        if (auto fields = fields_under("state." + name + "."); !fields.empty()) states.emplace(name, std::move(fields));
      }
    options.emplace("params", std::move(names));
    result.emplace_back(std::move(options));
  }
  return {{"state", std::move(states)}, {"param_groups", std::move(result)}};
}

run_state::StagedModel stage_model(const PreparedModel& model, const StateDict& state, const StateDictOptions& options,
                                   IncompatibleKeys& keys) {
  checkpointing::StoredTensors stored;
  for (const auto& [name, value] : state) stored.emplace(name, run_state::stored_in_memory(name, value));
  auto may_miss = options.ignore_frozen_params ? frozen_names(model) : std::set<std::string>();
  if (!options.strict) {
    std::set<std::string> own;
    for (const auto& [name, tensor] : model.model.state()) own.insert(name);
    for (const auto& name : own)
      if (!stored.contains(name) && may_miss.insert(name).second) keys.missing_keys.push_back(name);
    for (const auto& [name, value] : state)
      if (!own.contains(name)) keys.unexpected_keys.push_back(name), stored.erase(name);
  }
  return {model, stored, may_miss};
}

/// The state of a parameter in the form of a file's.
checkpointing::StoredTensors stored_state(const std::string& parameter, const StateDict& fields) {
  checkpointing::StoredTensors result;
  for (const auto& [kind, value] : fields) {
    const auto* plain = std::get_if<c10::IValue>(&value.kind());
    if (plain && plain->isNone()) continue;
    // The number of steps may be one.
    const Value tensor = plain ? Value(at::scalar_tensor(value.to<double>(), at::kFloat)) : value;
    result.emplace(kind, run_state::stored_in_memory(parameter + "." + kind, tensor));
  }
  return result;
}

[[noreturn]] void misfit(const std::string& what) { raise<CheckpointError>("set_optimizer_state_dict: {}", what); }

/// For each optimizer. Nothing is changed yet.
std::vector<run_state::StagedOptimizer> stage_optimizers(const run_state::PreparedModels& models,
                                                         const Optimizers& optimizers, const StateDict& state,
                                                         const StateDictOptions& options) {
  const auto& states = dict_at(state, "state");
  const auto& groups = state.at("param_groups").as<List>();
  size_t count = 0;
  for (const auto& optimizer : optimizers.all()) count += optimizer.param_groups().size();
  if (groups.size() != count)
    misfit(fmt::format("found {} parameter groups, expected {}; build the optimizers with the groups that they had",
                       groups.size(), count));
  std::set<std::string> known;
  std::string differences;
  std::vector<run_state::StagedOptimizer> result;
  auto next = groups.begin();
  for (const auto& optimizer : optimizers.all()) {
    checkpointing::StoredOptimizer stored{
        .source = "set_optimizer_state_dict", .by_name = true, .groups = {}, .state = {}};
    const auto parameters = run_state::parameters_by_group(optimizer, models);
    for (size_t g = 0; g < parameters.size(); ++g, ++next) {
      StateDict group = next->as<StateDict>();
      const auto names = texts(group.at("params"));
      group.erase("params");
      stored.groups.push_back({.options = Value(group).to_ivalue().toGenericDict(), .parameters = names});
      for (const auto& name : names)
        if (const auto found = states.find(name); found != states.end())
          stored.state.emplace(name, stored_state(name, found->second.as<StateDict>()));
      const auto& own = optimizer.param_groups()[g];
      for (size_t i = 0; i < parameters[g].size(); ++i) {
        const auto& held = parameters[g][i];
        known.insert(held.names.begin(), held.names.end());
        const bool there = std::any_of(held.names.begin(), held.names.end(),
                                       [&](const auto& name) { return stored.state.contains(name); });
        if (options.strict && !there && own.params()[i].requires_grad() &&
            !optim::initial_state(optimizer.optimizer(), own, own.params()[i]).empty())
          differences += fmt::format("\n  '{}': no state, which a trained parameter has", held.names.front());
      }
    }
    if (differences.empty()) result.emplace_back(optimizer, models, stored, "a state dict");
  }
  for (const auto& [name, fields] : states)
    if (options.strict && !known.contains(name))
      differences += fmt::format("\n  '{}': of no optimizer's parameter", name);
  if (!differences.empty())
    misfit(
        "the state does not fit, expected that of the same parameters; pass strict = false to take what fits. "
        "Differences:" +
        differences);
  return result;
}

/// A rank's part of rank 0's tensors: its shards of those that lie in shards. `name_at`: which step of a value's path
/// is the parameter's name.
StateDict from_rank0(const StateDict& state, const std::vector<Held>& holdings, size_t name_at) {
  std::map<std::string, const Held*> by_name;
  for (const auto& holding : holdings)
    for (const auto& name : holding.names) by_name.emplace(name, &holding);
  const auto take = [&](const formats::DcpPath& path, const at::Tensor& whole) -> Value {
    const auto* name = path.size() > name_at ? std::get_if<std::string>(&path[name_at]) : nullptr;
    const auto found = name ? by_name.find(*name) : by_name.end();
    if (found == by_name.end() || !found->second->in_pieces() || found->second->whole.sizes() != whole.sizes())
      return whole;
    return run_state::sharded(*found->second, parallel::slice_of(*found->second, whole));
  };
  return run_state::broadcast_state(state, PartialState().device(), take);
}

/// Either dict may be null.
IncompatibleKeys set(const AnyModel& model, const Optimizers& optimizers, const StateDict* model_state,
                     const StateDict* optim_state, const StateDictOptions& options) {
  if (options.broadcast_from_rank0 && !options.full_state_dict)
    throw ConfigError(
        "state dict: broadcast_from_rank0 is set and full_state_dict is not, expected both: what rank 0 sends are "
        "whole tensors");
  const auto& core = *model.core();
  const run_state::PreparedModels models{model.core()};
  StateDict model_share, optim_share;
  Groups groups;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    for (const auto& optimizer : optimizers.all())
      for (auto& group : run_state::parameters_by_group(optimizer, models)) groups.push_back(std::move(group));
    const bool counts = !options.broadcast_from_rank0 || comm::rank() == 0;
    if (optim_state && counts && !optim_state->contains("param_groups"))
      optim_state = &(optim_share = nested(*optim_state, groups));
  });
  if (options.broadcast_from_rank0) {
    if (model_state) model_state = &(model_share = from_rank0(*model_state, run_state::holdings_of(core), 0));
    std::vector<Held> all;
    for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
    if (optim_state) optim_state = &(optim_share = from_rank0(*optim_state, all, 1));
  }

  IncompatibleKeys keys;
  std::optional<run_state::StagedModel> staged;
  std::vector<run_state::StagedOptimizer> states;
  std::vector<std::function<void()>> undo;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (model_state) staged.emplace(stage_model(core, *model_state, options, keys));
    if (optim_state) states = stage_optimizers(models, optimizers, *optim_state, options);
  });
  if (staged) staged->agree();
  try {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      for (auto& state : states) undo.push_back(state.take(/*in_place=*/false));
      for (const auto& state : states) state.fill();
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  if (staged) staged->apply();
  return keys;
}

}  // namespace

IncompatibleKeys set_model_state_dict(const AnyModel& model, const StateDict& model_state_dict,
                                      const StateDictOptions& options) {
  return set(model, std::vector<AcceleratedOptimizer>(), &model_state_dict, nullptr, options);
}

void set_optimizer_state_dict(const AnyModel& model, const Optimizers& optimizers, const StateDict& optim_state_dict,
                              const StateDictOptions& options) {
  set(model, optimizers, nullptr, &optim_state_dict, options);
}

IncompatibleKeys set_state_dict(const AnyModel& model, const Optimizers& optimizers, const StateDict& model_state_dict,
                                const StateDict& optim_state_dict, const StateDictOptions& options) {
  return set(model, optimizers, &model_state_dict, &optim_state_dict, options);
}

}  // namespace accelerate::distributed_checkpoint
