#include "run_state/optimizers.hpp"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/expected_files.hpp"
#include "formats/torch_archive.hpp"
#include "optim/optimizer_state.hpp"
#include "run_state/distributed_items.hpp"
#include "run_state/optimizer_view.hpp"
#include "run_state/whole_stream.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredOptimizer;
using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

/// An archive that is written as parts become whole.
void save_full_optimizer(const OptimizerView& view, const fs::path& file) {
  const auto order = in_order_of_parts(view);
  WholeStream stream(part_by_part(states_in_pieces(view, order)));
  write_in_step(stream, comm::rank() == 0, [&] {
    formats::TorchPickle pickle;
    pickle.empty_dict(), pickle.mark(), pickle.text("state");
    pickle.empty_dict(), pickle.mark();
    for (const size_t i : order) {
      const auto& holding = view.parameters[i];
      if (view.state[i].empty()) continue;
      pickle.text(holding.names.front()), pickle.empty_dict(), pickle.mark();
      for (const auto& [kind, value] : view.state[i]) {
        pickle.text(kind);
        if (kind == kSteps || !holding.in_pieces()) pickle.value(value);
        else
          pickle.tensor(value.scalar_type(), holding.whole.sizes().vec(), false,
                        [&stream, &holding, kind = kind] { return stream.get(holding.tensor, kind); });
      }
      pickle.set_items_to_mark();
    }
    pickle.set_items_to_mark();
    pickle.text("param_groups"), pickle.empty_list(), pickle.mark();
    for (const auto& group : view.groups) pickle.value(group);
    pickle.append_to_mark();
    pickle.set_items_to_mark();
    write_archive(file, std::move(pickle));
  });
}

/// Whether all that it steps on belongs to models that ranks keep alike: then any rank's states are everybody's.
bool are_trained_alike(const AcceleratedOptimizer& optimizer, const PreparedModels& models) {
  std::unordered_set<const at::TensorImpl*> alike;
  for (const auto& model : models)
    if (model->engine && !model->engine->apart())
      for (const auto& holding : holdings_of(*model)) alike.insert(holding.tensor.unsafeGetTensorImpl());
  const auto& groups = optimizer.param_groups();
  return std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::all_of(group.params().begin(), group.params().end(),
                       [&](const at::Tensor& parameter) { return alike.contains(parameter.unsafeGetTensorImpl()); });
  });
}

/// The file of plain training, which is written at once: parameters are numbers. Nothing in shards needs nobody's help.
void save_plain_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const fs::path& file,
                          const Writers& writers, size_t number) {
  const auto parameters = parameters_of(optimizer, models);
  std::optional<OptimizerView> view;
  WholeStream::Stage states;
  if (std::any_of(parameters.begin(), parameters.end(), [](const auto& holding) { return holding.in_pieces(); })) {
    view.emplace(optimizer, models);
    states = states_in_pieces(*view, in_order_of_parts(*view));
  }
  const bool alike = !view && are_trained_alike(optimizer, models);
  std::vector<WholeStream::Stage> stages;
  if (!states.empty()) stages.push_back(std::move(states));
  WholeStream stream(std::move(stages), {.everywhere = writers.several, .copies = true});
  write_in_step(stream, alike ? writers.writes(1 + number, comm::rank()) : writers.here, [&] {
    const auto dict = optimizer.state_dict();
    if (view) {
      Dict whole(c10::IntType::get(), c10::AnyType::get());
      for (size_t i = 0; i < view->parameters.size(); ++i) {
        if (view->state[i].empty()) continue;
        const auto& holding = view->parameters[i];
        Dict state = make_dict();
        for (const auto& [kind, value] : view->state[i])
          state.insert(kind, kind == kSteps || !holding.in_pieces() ? value : stream.get(holding.tensor, kind));
        whole.insert(static_cast<int64_t>(i), state);
      }
      dict.toGenericDict().insert_or_assign("state", whole);
    }
    checkpointing::save_object(dict, file);
  });
}

StateDict to_state_dict(const OptimizerView& view) {
  StateDict states;
  for (size_t i = 0; i < view.parameters.size(); ++i) {
    if (view.state[i].empty()) continue;
    const auto& holding = view.parameters[i];
    StateDict fields;
    for (const auto& [kind, value] : view.state[i])
      fields.emplace(kind, kind == kSteps || !holding.in_pieces() ? Value(value) : Value(sharded(holding, value)));
    states.emplace(holding.names.front(), std::move(fields));
  }
  return {{"state", std::move(states)}, {"param_groups", Value(c10::IValue(make_list(view.groups)))}};
}

/// Our parameter for each key of the file's state.
std::map<std::string, size_t> match(const StoredOptimizer& stored, const std::vector<parallel::Held>& parameters,
                                    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>("{}: {}; build the optimizer with the groups that it had when the state was saved",
                           stored.source, what);
  };
  if (stored.groups.size() != groups.size())
    fail(fmt::format("found {} parameter groups, expected {}", stored.groups.size(), groups.size()));
  std::map<std::string, size_t> result;
  size_t base = 0;
  for (size_t g = 0; g < groups.size(); base += groups[g].params().size(), ++g) {
    const auto& keys = stored.groups[g].parameters;
    const auto where = fmt::format(" in parameter group {}", g);
    std::map<std::string, size_t> ours;
    for (size_t i = base; i < base + groups[g].params().size(); ++i)
      for (const auto& name : parameters[i].names)
        ours.try_emplace(name, i);  // a group may list a tied parameter twice
    std::set<size_t> seen;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (stored.by_name && !ours.contains(keys[i]))
        fail(fmt::format("found '{}'{}, which the optimizer's group does not have", keys[i], where));
      const size_t index = stored.by_name ? ours.at(keys[i]) : base + i;
      result[keys[i]] = index;
      seen.insert(index);
    }
    for (const auto& [name, i] : ours)
      if (stored.by_name && !seen.contains(i))
        fail(fmt::format("found no '{}'{}, which the optimizer's group has", parameters[i].names.front(), where));
    if (!stored.by_name && keys.size() != groups[g].params().size())
      fail(fmt::format("found {} parameters{}, expected {}", keys.size(), where, groups[g].params().size()));
  }
  return result;
}

}  // namespace

void save_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file,
                    const Writers& writers, size_t number, const std::vector<double>& initial_rates) {
  const auto by_name = [&] {
    OptimizerView view(optimizer, models);
    for (size_t i = 0; i < std::min(initial_rates.size(), view.groups.size()); ++i)
      view.groups[i].insert_or_assign("initial_lr", initial_rates[i]);
    return view;
  };
  switch (file.form) {
    case StateForm::safetensors:
    case StateForm::archive:
      return save_plain_optimizer(optimizer, models, file.path, writers, number);
    case StateForm::full:
      return save_full_optimizer(by_name(), file.path);
    case StateForm::sharded:
      return DistributedItems(StateDict{{"optimizer", to_state_dict(by_name())}}).write(file.path);
    case StateForm::deepspeed:
      throw InternalError("saving an optimizer: DeepSpeed's files were asked for, which are not of an optimizer alone");
    case StateForm::local:
      return comm::on_all_ranks_or_throw<CheckpointError>([&] {
        checkpointing::save_object(own_pieces(parameters_of(optimizer, models), optimizer.state_dict()), file.path);
      });
  }
}

StateDict distributed_state(const AcceleratedOptimizer& optimizer, const PreparedModels& models, Untouched untouched) {
  return to_state_dict(OptimizerView(optimizer, models, untouched));
}

std::vector<std::vector<parallel::Held>> parameters_by_group(const AcceleratedOptimizer& optimizer,
                                                             const PreparedModels& models) {
  const auto parameters = parameters_of(optimizer, models);
  std::unordered_set<const at::TensorImpl*> of_models;
  for (const auto& model : models)
    for (const auto& holding : holdings_of(*model))
      of_models.insert({holding.tensor.unsafeGetTensorImpl(), holding.value.unsafeGetTensorImpl()});
  std::vector<std::vector<parallel::Held>> result;
  auto next = parameters.begin();
  for (const auto& group : optimizer.param_groups()) {
    const auto end = next + static_cast<int64_t>(group.params().size());
    const auto stranger = std::find_if(
        next, end, [&](const auto& holding) { return !of_models.contains(holding.value.unsafeGetTensorImpl()); });
    if (stranger != end)
      raise<ConfigError>(
          "optimizer state: parameter {} of group {}, of size {}, is none of the model's, expected an optimizer of the "
          "parameters of the model that is given with it, both as prepare() returned them",
          stranger - next, result.size(), stranger->whole.sizes());
    result.emplace_back(next, end);
    next = end;
  }
  return result;
}

c10::IValue whole_state(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                        const StateDictConfig& config, Untouched untouched) {
  const OptimizerView view(optimizer, models, untouched);
  auto in_pieces = states_in_pieces(view, in_order_of_parts(view));
  const bool everywhere = in_pieces.empty() || !config.rank0_only.value_or(true);
  std::vector<WholeStream::Stage> stages;
  if (!in_pieces.empty()) stages.push_back(std::move(in_pieces));
  WholeStream stream(std::move(stages), {.everywhere = everywhere, .copies = true, .on_host = config.offload_to_cpu});
  Dict result = make_dict();
  if (everywhere || comm::rank() == 0) {
    Dict states = make_dict();
    for (size_t i = 0; i < view.parameters.size(); ++i) {
      if (view.state[i].empty()) continue;
      const auto& holding = view.parameters[i];
      const auto device = config.offload_to_cpu ? at::Device(at::kCPU) : holding.tensor.device();
      Dict state = make_dict();
      for (const auto& [kind, value] : view.state[i])
        state.insert(kind, kind == kSteps        ? value.clone()
                           : holding.in_pieces() ? stream.get(holding.tensor, kind)
                                                 : value.to(device, /*non_blocking=*/false, /*copy=*/true));
      states.insert(holding.names.front(), state);
    }
    result.insert("state", states);
    result.insert("param_groups", make_list(view.groups));
  }
  stream.finish();
  return result;
}

namespace {

/// In the place of a tensor that is like its parameter.
using StateValue =
    std::function<at::Tensor(const std::string& what, const checkpointing::StoredTensor&, const parallel::Held&)>;

/// A state in the order of our parameters.
c10::IValue in_our_order(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                         const StoredOptimizer& stored, const StateValue& value) {
  const auto parameters = parameters_of(optimizer, models);
  const auto& groups = optimizer.param_groups();
  const auto index_of = match(stored, parameters, groups);
  Dict states(c10::IntType::get(), c10::AnyType::get());
  for (const auto& [key, fields] : stored.state) {
    const auto found = index_of.find(key);
    if (found == index_of.end())
      raise<CheckpointError>(
          "{}: found state of '{}', which no parameter group lists; the file is damaged or was edited", stored.source,
          key);
    const auto& holding = parameters[found->second];
    Dict state = make_dict();
    for (const auto& [kind, field] : fields) {
      if (kind != kSteps && field.sizes != holding.whole.sizes().vec())
        raise<CheckpointError>(
            "{}: found '{}' of '{}' of size {}, expected {} like its parameter; the state may belong to another model "
            "or to parameters in another order",
            stored.source, kind, key, formats::to_string(field.sizes), formats::to_string(holding.whole.sizes().vec()));
      const auto what = fmt::format("'{}' of parameter '{}'", kind, key);
      state.insert(kind, kind == kSteps ? formats::naming_damage(what, field.read_whole) : value(what, field, holding));
    }
    states.insert(static_cast<int64_t>(found->second), state);
  }
  std::vector<c10::IValue> own_groups;
  int64_t next = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    Dict group = stored.groups[g].options;
    std::vector<int64_t> indices;
    for (size_t i = 0; i < groups[g].params().size(); ++i) indices.push_back(next++);
    group.insert_or_assign("params", make_list(indices));
    own_groups.emplace_back(group);
  }
  Dict result = make_dict();
  result.insert("state", states);
  result.insert("param_groups", make_list(own_groups));
  return result;
}

}  // namespace

StagedOptimizer::StagedOptimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                                 const StoredOptimizer& stored, std::string name)
    : optimizer_(optimizer), models_(models), filling_(std::move(name)) {
  const bool takes_values = optim::has_own_state_dict(optimizer.optimizer());
  state_ = in_our_order(optimizer, models, stored,
                        [&](const std::string& what, const auto& field, const parallel::Held& holding) {
                          if (takes_values)
                            return holding.in_pieces() ? read_piece(field, holding, field.dtype) : field.read_whole();
                          return stand_in({what, field, holding},
                                          holding.in_pieces() ? holding.value.sizes() : at::IntArrayRef(field.sizes));
                        });
}

StagedOptimizer::StagedOptimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                                 const StateFile& file)
    : optimizer_(optimizer), models_(models), filling_(file.path.filename().string()) {
  if (optim::has_own_state_dict(optimizer.optimizer())) {
    if (file.form != StateForm::safetensors && file.form != StateForm::archive) refuse_pieces(optimizer, "load_state");
    state_ = checkpointing::load_object(file.path);
  } else if (file.form == StateForm::local) {
    const OwnShards own(parameters_of(optimizer, models), file.path);
    state_ = own.with_numbers(own.state());
    note(own, state_, "");
  } else {
    const auto stored = file.form == StateForm::sharded ? checkpointing::open_distributed_optimizer(file.path)
                                                        : checkpointing::open_optimizer_archive(file.path);
    *this = StagedOptimizer(optimizer, models, stored, file.path.filename().string());
  }
}

at::Tensor StagedOptimizer::stand_in(Source source, at::IntArrayRef sizes) {
  const auto tensor = at::empty(sizes, at::TensorOptions().dtype(source.stored.dtype).device(at::kMeta));
  sources_.emplace(tensor.unsafeGetTensorImpl(), std::move(source));
  return tensor;
}

void StagedOptimizer::note(const OwnShards& own, const c10::IValue& value, const std::string& where) {
  if (value.isGenericDict())
    for (const auto& entry : value.toGenericDict()) {
      const auto& key = entry.key();
      note(own, entry.value(),
           where + "." +
               (key.isString() ? key.toStringRef()
                : key.isInt()  ? std::to_string(key.toInt())
                               : key.tagKind()));
    }
  if (!value.isTensor() || !value.toTensor().is_meta()) return;
  const auto& tensor = value.toTensor();
  sources_.emplace(tensor.unsafeGetTensorImpl(),
                   Source{"'" + where.substr(1) + "'", own.stored(tensor), whole_on_all_ranks({}, tensor)});
}

void StagedOptimizer::fill() const {
  if (!optim::has_own_state_dict(optimizer_.optimizer())) filling_.run();
}

std::function<void()> StagedOptimizer::take(bool in_place) {
  auto& optimizer = optimizer_.optimizer();
  if (optim::has_own_state_dict(optimizer)) {
    auto undo = [to = optimizer_, before = optimizer_.state_dict()] { to.load_state_dict(before); };
    optimizer_.load_state_dict(state_);
    return undo;
  }
  return optim::take_optimizer_state_dict(
      optimizer, state_, in_place, [this](const at::Tensor& parameter, const at::Tensor& to, const at::Tensor& saved) {
        for (const auto& model : models_)
          if (model->engine) model->engine->place_state(parameter, to);
        if (const auto found = sources_.find(saved.unsafeGetTensorImpl()); found != sources_.end())
          filling_.add(found->second.what, found->second.stored, found->second.holding, to);
        else  // of a parameter of one element, which came as a number
          filling_.add("a number", stored_in_memory("a number", Value(saved)), whole_on_all_ranks({}, to), to);
      });
}

}  // namespace accelerate::run_state
