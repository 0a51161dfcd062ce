#include "accelerator/sharded_checkpoint.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/dcp.hpp"
#include "formats/torch_archive.hpp"
#include "utils/atomic_file.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredOptimizer;
using checkpointing::StoredTensor;
using checkpointing::StoredTensors;
using formats::DcpObjectItem;
using formats::DcpPath;
using formats::DcpTensorItem;
using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;
using parallel::FullyShardedDataParallel;

Dict make_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }
template <class Range> List make_list(const Range& values) {
  List list(c10::AnyType::get());
  for (const auto& value : values) list.push_back(value);
  return list;
}
bool is_main() { return comm::rank() == 0; }

std::string size_text(at::IntArrayRef sizes) { return formats::to_string(sizes.vec()); }

// ---- gathering in the order of writing
// -----------------------------------------------------------------------------------------------------------------------------

/// Makes tensors whole, part by part, as the writer on rank 0 asks for them; the other ranks follow. Memory: the
/// tensors of one part.
class WholeStream {
 public:
  struct Wanted {
    FullyShardedDataParallel* fsdp;
    int64_t part;
    at::Tensor parameter;
    std::string kind;  ///< "" for the parameter itself
    at::Tensor piece;
  };

  explicit WholeStream(std::vector<Wanted> wanted) {
    for (auto& item : wanted) {
      if (stages_.empty() || stages_.back().fsdp != item.fsdp || stages_.back().part != item.part)
        stages_.push_back({item.fsdp, item.part, {}});
      stages_.back().kinds[item.kind][item.parameter.unsafeGetTensorImpl()] = item.piece;
    }
  }

  /// Rank 0, in the order of `wanted` as far as parts go.
  at::Tensor get(const at::Tensor& parameter, const std::string& kind) {
    const std::pair key(static_cast<const at::TensorImpl*>(parameter.unsafeGetTensorImpl()), kind);
    while (!whole_.contains(key)) {
      if (next_ == stages_.size()) throw InternalError("saving sharded state: a tensor is asked for out of order");
      advance();
    }
    return whole_.at(key);
  }
  /// Gathers what is left, so that all ranks come out in step.
  void finish() {
    while (next_ < stages_.size()) advance();
    whole_.clear();
  }

 private:
  struct Stage {
    FullyShardedDataParallel* fsdp;
    int64_t part;
    std::map<std::string, std::unordered_map<const at::TensorImpl*, at::Tensor>> kinds;
  };

  void advance() {
    const auto& stage = stages_[next_++];
    whole_.clear();
    for (const auto& [kind, pieces] : stage.kinds) {
      stage.fsdp->gather_each(
          [&, &pieces = pieces](const at::Tensor& parameter, const at::Tensor&) {
            const auto found = pieces.find(parameter.unsafeGetTensorImpl());
            return found == pieces.end() ? at::Tensor() : found->second;
          },
          [&, &kind = kind](const FullyShardedDataParallel::Whole& tensor) {
            if (tensor.value.defined()) whole_[{tensor.parameter.unsafeGetTensorImpl(), kind}] = tensor.value;
          },
          /*everywhere=*/false);
    }
  }

  std::vector<Stage> stages_;
  size_t next_ = 0;
  std::map<std::pair<const at::TensorImpl*, std::string>, at::Tensor> whole_;
};

/// Rank 0 writes an archive whose tensors come from the stream. What goes wrong there is thrown on all ranks.
void write_archive(const fs::path& file, WholeStream& stream, const std::function<void(formats::TorchPickle&)>& fill) {
  together([&] {
    std::exception_ptr failure;
    if (is_main()) {
      try {
        formats::TorchPickle pickle;
        fill(pickle);
        AtomicFile out("save_state", file);
        formats::write_torch_archive(std::move(pickle), [&](std::string_view bytes) { out.write(bytes); });
        out.finish();
      } catch (const CommError&) {
        throw;
      } catch (...) {
        failure = std::current_exception();
      }
    }
    stream.finish();
    if (failure) std::rethrow_exception(failure);
  });
}

// ---- distributed checkpoints
// --------------------------------------------------------------------------------------------------------------------------------------

/// What one rank writes into a distributed checkpoint; names and paths on all ranks alike.
struct Items {
  std::vector<DcpObjectItem> objects;
  std::vector<DcpTensorItem> tensors;
  std::map<std::string, DcpPath> paths;

  std::string name(const DcpPath& path) {
    auto text = formats::dcp_name(path);
    paths[text] = path;
    return text;
  }
  void object(const DcpPath& path, const c10::IValue& value) {
    const auto text = name(path);
    if (is_main()) objects.push_back({text, value});
  }
  /// The same on all ranks.
  void whole(const DcpPath& path, const at::Tensor& tensor) {
    const auto text = name(path);
    const auto sizes = tensor.sizes().vec();
    if (is_main()) tensors.push_back({text, sizes, formats::whole(sizes), tensor.detach()});
  }
  void piece(const DcpPath& path, const Holding& holding, const at::Tensor& values) {
    if (holding.tensor.numel() == 0)
      return whole(path, at::empty(holding.tensor.sizes(), values.options().requires_grad(false)));
    const auto text = name(path);
    if (holding.fsdp->replica() != 0) return;  // the first replica writes
    for (auto& part : checkpointing::parts_of(holding.tensor, holding.begin, values.detach()))
      tensors.push_back({text, holding.tensor.sizes().vec(), part.box, part.values});
  }
};

/// The folder appears when it is complete; one that was there is replaced then.
void write_distributed(const fs::path& folder, const Items& items) {
  const fs::path unfinished = folder.parent_path() / ("." + folder.filename().string() + ".unfinished"),
                 replaced = folder.parent_path() / ("." + folder.filename().string() + ".replaced");
  std::vector<formats::DcpRecord> records;
  together([&] {
    if (is_main()) formats::prepare_dcp_folder(unfinished);
  });
  together([&] { records = formats::write_dcp_items(unfinished, comm::rank(), items.objects, items.tensors); });
  records = gather_object(records);
  together([&] {
    if (!is_main()) return;
    formats::write_dcp_metadata(unfinished, records, items.paths);
    fs::remove_all(replaced);
    if (fs::exists(folder)) fs::rename(folder, replaced);
    fs::rename(unfinished, folder);
    fs::remove_all(replaced);
  });
}

// ---- each rank's own
// ----------------------------------------------------------------------------------------------------------------------------------------------

/// Pieces as they are make sense only to the same rank of as many, of a model that is cut in the same way.
c10::IValue own_pieces(const std::vector<Holding>& holdings, const c10::IValue& state) {
  std::vector<c10::IValue> begins;
  for (const auto& holding : holdings) begins.emplace_back(holding.begin);
  Dict dict = make_dict();
  dict.insert("world_size", comm::world_size());
  dict.insert("rank", comm::rank());
  dict.insert("begins", make_list(begins));
  dict.insert("state", state);
  return dict;
}

c10::IValue load_own_pieces(const std::vector<Holding>& holdings, const fs::path& file) {
  const auto fail = [&](const std::string& what) {
    throw CheckpointError("load '" + file.string() + "': " + what +
                          ". LOCAL_STATE_DICT is the pieces of one run as they are; save FULL_STATE_DICT or "
                          "SHARDED_STATE_DICT to load in another way.");
  };
  const auto object = checkpointing::load_object(file);
  if (!object.isGenericDict()) fail("found " + object.tagKind() + ", expected the pieces of a rank");
  const auto dict = object.toGenericDict();
  for (const char* key : {"world_size", "rank", "begins", "state"})
    if (!dict.contains(key))
      fail(std::string("found a dict without '") + key + "', expected the pieces of a rank as they are written here");
  const auto world = dict.at("world_size"), begins = dict.at("begins");
  if (!world.isInt() || world.toInt() != comm::world_size() || !begins.isList())
    fail("found the pieces of " + (world.isInt() ? std::to_string(world.toInt()) : world.tagKind()) +
         " ranks, expected those of " + std::to_string(comm::world_size()));
  const auto saved = begins.toListRef();
  bool same = saved.size() == holdings.size();
  for (size_t i = 0; same && i < holdings.size(); ++i) same = saved[i].isInt() && saved[i].toInt() == holdings[i].begin;
  if (!same)
    fail("found pieces that begin elsewhere than this model's; the model or the plugin's wrap policy has changed");
  return dict.at("state");
}

// ---- optimizers
// ---------------------------------------------------------------------------------------------------------------------------------------------------

constexpr const char* kSteps = "step";  ///< the one state that is no tensor like its parameter

/// An optimizer's parameters in the order of its groups.
std::vector<Holding> parameters_of(const AcceleratedOptimizer& optimizer, const PreparedModels& models) {
  std::unordered_map<const at::TensorImpl*, std::pair<size_t, Holding>> known;
  for (size_t i = 0; i < models.size(); ++i)
    for (auto& holding : holdings_of(*models[i])) {
      const auto& held = holding.sharded() ? holding.piece : holding.tensor;
      known.try_emplace(held.unsafeGetTensorImpl(), i, std::move(holding));
    }
  std::vector<Holding> result;
  std::vector<std::optional<size_t>> model_of;
  std::set<size_t> owners;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      if (found == known.end()) {
        result.push_back({.names = {"parameter_" + std::to_string(result.size())}, .tensor = parameter, .piece = {}});
        model_of.emplace_back();
      } else {
        result.push_back(found->second.second);
        owners.insert(model_of.emplace_back(found->second.first).value());
      }
    }
  // Several models may use the same names.
  if (owners.size() > 1)
    for (size_t i = 0; i < result.size(); ++i)
      if (model_of[i])
        for (auto& name : result[i].names) name = std::to_string(*model_of[i]) + "." + name;
  return result;
}

/// One field of one parameter's state.
struct Field {
  int64_t parameter = 0;
  std::string kind;
  double steps = 0;  ///< of kSteps
  ACCELERATE_FIELDS(parameter, kind, steps)
};

/// An optimizer as all ranks see it: a rank that has no element of a parameter may have no state for it.
struct OptimizerView {
  std::vector<Holding> parameters;
  std::vector<std::map<std::string, at::Tensor>> state;  ///< per parameter; this rank's pieces
  std::vector<Dict> groups;                              ///< with the names as `params`

  OptimizerView(const AcceleratedOptimizer& optimizer, const PreparedModels& models)
      : parameters(parameters_of(optimizer, models)), state(parameters.size()) {
    const auto dict = optimizer.state_dict().toGenericDict();
    std::vector<Field> fields;
    for (const auto& entry : dict.at("state").toGenericDict())
      for (const auto& field : entry.value().toGenericDict()) {
        const auto index = entry.key().toInt();
        const auto& kind = field.key().toStringRef();
        const auto tensor = field.value().toTensor();
        state[static_cast<size_t>(index)][kind] = tensor.detach();
        fields.push_back({index, kind, kind == kSteps ? tensor.item<double>() : 0});
      }
    for (const auto& field : gather_object(fields)) {
      auto& mine = state[static_cast<size_t>(field.parameter)];
      if (mine.contains(field.kind)) continue;
      const auto& holding = parameters[static_cast<size_t>(field.parameter)];
      const auto& held = holding.sharded() ? holding.piece : holding.tensor;
      mine[field.kind] = field.kind == kSteps ? at::scalar_tensor(field.steps, at::kFloat)
                                              : at::zeros(held.sizes(), held.options().requires_grad(false));
    }
    size_t next = 0;
    for (const c10::IValue& item : dict.at("param_groups").toListRef()) {
      Dict group = make_dict();
      for (const auto& option : item.toGenericDict())
        if (option.key().toStringRef() != "params") group.insert(option.key(), option.value());
      std::vector<std::string> names;
      for (size_t i = 0, count = item.toGenericDict().at("params").toListRef().size(); i < count; ++i, ++next) {
        const auto& name = parameters[next].names.front();
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        else state[next].clear();  // tied, and listed twice: one state
      }
      group.insert("params", make_list(names));
      groups.push_back(std::move(group));
    }
  }
};

void save_full_optimizer(const OptimizerView& view, const fs::path& file) {
  // Parameters in the order of gathering, which need not be that of the groups.
  std::vector<size_t> order;
  for (size_t i = 0; i < view.parameters.size(); ++i) order.push_back(i);
  std::map<FullyShardedDataParallel*, size_t> first;
  for (const size_t i : order) first.try_emplace(view.parameters[i].fsdp, i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto &x = view.parameters[a], &y = view.parameters[b];
    return std::pair(first[x.fsdp], x.part) <
           std::pair(first[y.fsdp], y.part);  // by first appearance: pointers differ from rank to rank
  });
  std::vector<WholeStream::Wanted> wanted;
  for (const size_t i : order)
    if (const auto& holding = view.parameters[i]; holding.sharded())
      for (const auto& [kind, piece] : view.state[i])
        if (kind != kSteps) wanted.push_back({holding.fsdp, holding.part, holding.tensor, kind, piece});
  WholeStream stream(std::move(wanted));
  write_archive(file, stream, [&](formats::TorchPickle& pickle) {
    pickle.empty_dict(), pickle.mark(), pickle.text("state");
    pickle.empty_dict(), pickle.mark();
    for (const size_t i : order) {
      const auto& holding = view.parameters[i];
      if (view.state[i].empty()) continue;
      pickle.text(holding.names.front()), pickle.empty_dict(), pickle.mark();
      for (const auto& [kind, value] : view.state[i]) {
        pickle.text(kind);
        if (kind == kSteps || !holding.sharded()) pickle.value(value);
        else
          pickle.tensor(value.scalar_type(), holding.tensor.sizes().vec(), false,
                        [&stream, &holding, kind = kind] { return stream.get(holding.tensor, kind); });
      }
      pickle.set_items_to_mark();
    }
    pickle.set_items_to_mark();
    pickle.text("param_groups"), pickle.empty_list(), pickle.mark();
    for (const auto& group : view.groups) pickle.value(group);
    pickle.append_to_mark();
    pickle.set_items_to_mark();
  });
}

void save_distributed_optimizer(const OptimizerView& view, const fs::path& folder) {
  Items items;
  bool empty = true;
  for (size_t i = 0; i < view.parameters.size(); ++i) {
    const auto& holding = view.parameters[i];
    for (const auto& [kind, value] : view.state[i]) {
      const DcpPath path{std::string("optimizer"), std::string("state"), holding.names.front(), kind};
      if (kind == kSteps || !holding.sharded()) items.whole(path, value);
      else items.piece(path, holding, value);
      empty = false;
    }
  }
  if (empty) items.object({std::string("optimizer"), std::string("state")}, make_dict());
  for (size_t g = 0; g < view.groups.size(); ++g)
    for (const auto& option : view.groups[g])
      items.object(
          {std::string("optimizer"), std::string("param_groups"), static_cast<int64_t>(g), option.key().toStringRef()},
          option.value());
  write_distributed(folder, items);
}

/// Our parameter for each key of the file's state.
std::map<std::string, size_t> match(const StoredOptimizer& stored, const std::vector<Holding>& parameters,
                                    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  const auto fail = [&](const std::string& what) {
    throw CheckpointError(stored.source + ": " + what +
                          "; build the optimizer with the groups that it had when the state was saved");
  };
  if (stored.groups.size() != groups.size())
    fail("found " + std::to_string(stored.groups.size()) + " parameter groups, expected " +
         std::to_string(groups.size()));
  std::map<std::string, size_t> result;
  size_t base = 0;
  for (size_t g = 0; g < groups.size(); base += groups[g].params().size(), ++g) {
    const auto& keys = stored.groups[g].parameters;
    const auto where = " in parameter group " + std::to_string(g);
    std::map<std::string, size_t> ours;
    for (size_t i = base; i < base + groups[g].params().size(); ++i)
      for (const auto& name : parameters[i].names)
        ours.try_emplace(name, i);  // a group may list a tied parameter twice
    std::set<size_t> seen;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (stored.by_name && !ours.contains(keys[i]))
        fail("found '" + keys[i] + "'" + where + ", which the optimizer's group does not have");
      const size_t index = stored.by_name ? ours.at(keys[i]) : base + i;
      result[keys[i]] = index;
      seen.insert(index);
    }
    for (const auto& [name, i] : ours)
      if (stored.by_name && !seen.contains(i))
        fail("found no '" + parameters[i].names.front() + "'" + where + ", which the optimizer's group has");
    if (!stored.by_name && keys.size() != groups[g].params().size())
      fail("found " + std::to_string(keys.size()) + " parameters" + where + ", expected " +
           std::to_string(groups[g].params().size()));
  }
  return result;
}

}  // namespace

std::vector<Holding> holdings_of(const detail::PreparedModel& model) {
  std::vector<Holding> result;
  std::unordered_map<const at::TensorImpl*, size_t> known;
  if (model.fsdp)
    for (auto& piece : model.fsdp->pieces()) {
      known[piece.parameter.unsafeGetTensorImpl()] = result.size();
      result.push_back({.names = {piece.name},
                        .tensor = piece.parameter,
                        .fsdp = model.fsdp.get(),
                        .piece = piece.shard,
                        .begin = piece.begin,
                        .part = piece.part});
    }
  for (const auto& [name, tensor] : model.model.state()) {
    const auto [found, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), result.size());
    if (fresh) result.push_back({.names = {name}, .tensor = tensor, .piece = {}});
    else if (auto& names = result[found->second].names; std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  return result;
}

void save_sharded_model(const detail::PreparedModel& model, const StateFile& file) {
  const auto holdings = holdings_of(model);
  if (file.form == StateForm::sharded) {
    Items items;
    for (const auto& holding : holdings)
      for (const auto& name : holding.names) {
        const DcpPath path{std::string("model"), name};
        if (holding.sharded()) items.piece(path, holding, holding.piece);
        else items.whole(path, holding.tensor);
      }
    return write_distributed(file.path, items);
  }
  if (file.form == StateForm::local) {
    std::map<std::string, at::Tensor> own;
    for (const auto& holding : holdings)
      own[holding.names.front()] = (holding.sharded() ? holding.piece : holding.tensor).detach();
    return together([&] { checkpointing::save_object(own_pieces(holdings, checkpointing::to_dict(own)), file.path); });
  }
  std::vector<WholeStream::Wanted> wanted;
  for (const auto& holding : holdings)
    if (holding.sharded()) wanted.push_back({holding.fsdp, holding.part, holding.tensor, "", holding.piece.detach()});
  WholeStream stream(std::move(wanted));
  write_archive(file.path, stream, [&](formats::TorchPickle& pickle) {
    pickle.empty_dict(), pickle.mark();
    for (const auto& holding : holdings)
      for (const auto& name : holding.names) {
        pickle.text(name);
        if (!holding.sharded()) pickle.value(holding.tensor.detach());
        else
          pickle.tensor(holding.piece.scalar_type(), holding.tensor.sizes().vec(), false,
                        [&stream, &holding] { return stream.get(holding.tensor, ""); });
      }
    pickle.set_items_to_mark();
  });
}

void save_sharded_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                            const StateFile& file) {
  if (file.form == StateForm::local)
    return together([&] {
      checkpointing::save_object(own_pieces(parameters_of(optimizer, models), optimizer.state_dict()), file.path);
    });
  const OptimizerView view(optimizer, models);
  if (file.form == StateForm::sharded) save_distributed_optimizer(view, file.path);
  else save_full_optimizer(view, file.path);
}

StagedModel::StagedModel(const detail::PreparedModel& model, const StateFile& file) : fsdp_(model.fsdp.get()) {
  const auto holdings = holdings_of(model);
  if (file.form == StateForm::local) {
    const auto state = load_own_pieces(holdings, file.path);
    const auto fail = [&](const std::string& what) {
      throw CheckpointError("load '" + file.path.string() + "': " + what +
                            "; the model has changed since it was saved");
    };
    if (!state.isGenericDict()) fail("found " + state.tagKind() + " at 'state', expected a dict of tensors");
    const auto pieces = state.toGenericDict();
    for (const auto& holding : holdings) {
      const auto& name = holding.names.front();
      const auto target = (holding.sharded() ? holding.piece : holding.tensor).detach();
      const auto found = pieces.find(name);
      if (found == pieces.end() || !found->value().isTensor()) fail("found no tensor '" + name + "'");
      const auto value = found->value().toTensor();
      if (value.sizes() != target.sizes())
        fail("found '" + name + "' of size " + size_text(value.sizes()) + ", expected " + size_text(target.sizes()));
      copies_.emplace_back(target, value);
    }
    if (pieces.size() != holdings.size())
      fail("found " + std::to_string(pieces.size()) + " tensors, expected " + std::to_string(holdings.size()));
    return;
  }
  const StoredTensors stored = file.form == StateForm::safetensors ? checkpointing::open_safetensors(file.path)
                               : file.form == StateForm::sharded   ? checkpointing::open_distributed(file.path)
                                                                   : checkpointing::open_archive(file.path);
  std::map<std::string, at::Tensor> sizes;
  for (const auto& [name, tensor] : stored)
    sizes[name] = at::empty(tensor.sizes, at::TensorOptions().dtype(tensor.dtype).device(at::kMeta));
  checkpointing::check_state_dict(model.model, sizes);
  for (const auto& holding : holdings) {
    for (const auto& name : holding.names) {
      const auto found = stored.find(name);
      if (found == stored.end()) continue;
      if (holding.sharded())
        copies_.emplace_back(holding.piece.detach(),
                             checkpointing::read_stretch(found->second, holding.tensor, holding.begin,
                                                         holding.piece.numel(), holding.piece.options()));
      else copies_.emplace_back(holding.tensor.detach(), found->second.read_whole());
      break;
    }
  }
}

void StagedModel::apply() const {
  at::NoGradGuard no_grad;
  if (fsdp_) fsdp_->before_step();
  for (const auto& [target, value] : copies_) at::Tensor(target).copy_(value);
  if (fsdp_) fsdp_->after_step();
}

c10::IValue read_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file) {
  const auto parameters = parameters_of(optimizer, models);
  if (file.form == StateForm::local) return load_own_pieces(parameters, file.path);
  const auto stored = file.form == StateForm::sharded ? checkpointing::open_distributed_optimizer(file.path)
                                                      : checkpointing::open_optimizer_archive(file.path);
  const auto& groups = optimizer.param_groups();
  const auto index_of = match(stored, parameters, groups);
  Dict states(c10::IntType::get(), c10::AnyType::get());
  for (const auto& [key, fields] : stored.state) {
    const auto found = index_of.find(key);
    if (found == index_of.end())
      throw CheckpointError(stored.source + ": found state of '" + key +
                            "', which no parameter group lists; the file is damaged or was edited");
    const auto& holding = parameters[found->second];
    Dict state = make_dict();
    for (const auto& [kind, field] : fields) {
      if (kind != kSteps && field.sizes != holding.tensor.sizes().vec())
        throw CheckpointError(
            stored.source + ": found '" + kind + "' of '" + key + "' of size " + formats::to_string(field.sizes) +
            ", expected " + size_text(holding.tensor.sizes()) +
            " like its parameter; the state may belong to another model or to parameters in another order");
      if (kind != kSteps && holding.sharded())
        state.insert(kind, checkpointing::read_stretch(field, holding.tensor, holding.begin, holding.piece.numel(),
                                                       holding.piece.options()));
      else state.insert(kind, field.read_whole());
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

}  // namespace accelerate
