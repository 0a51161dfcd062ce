#include "run_state/zero_files.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/comm.hpp"
#include "accelerate/optim/scheduler.hpp"
#include "checkpoint/loss_scaler_object.hpp"
#include "comm/agreement.hpp"
#include "formats/torch_archive.hpp"
#include "optim/optimizer_state.hpp"
#include "parallel/deepspeed_files.hpp"
#include "run_state/optimizer_view.hpp"
#include "run_state/whole_stream.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using parallel::Held;

int64_t up_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// A trained parameter.
struct Item {
  std::string name;
  std::vector<int64_t> sizes;
  int64_t numel = 0;
  Held master;
  Held held;                                ///< as the optimizer has it, its states likewise
  std::map<std::string, at::Tensor> state;  ///< without steps
  std::optional<double> steps;
};

/// A slice of a parameter in this rank's part of a vector.
struct PlacedItem {
  const Item* item;
  int64_t from = 0, numel = 0;  ///< of the parameter
  int64_t at = 0;               ///< in the rank's vector
};

/// Parameters that are flat together: a group at stages 1 and 2, at stage 3 a part of one.
struct FlatGroup {
  std::vector<const Item*> items;
  size_t group = 0;              ///< the optimizer's
  std::set<std::string> kinds;   ///< of states
  std::vector<PlacedItem> here;  ///< in this rank's part
  int64_t length = 0, lean = 0;  ///< of that; without the padding at its end
  at::ScalarType dtype = at::kFloat;

  double steps() const {
    double most = 0;
    for (const auto* item : items) most = std::max(most, item->steps.value_or(0));
    return most;
  }
};

/// All that one model's files hold.
struct Contents {
  const detail::PreparedModel& model;
  const parallel::DeepSpeedFiles& how;
  std::vector<Held> holdings;
  std::vector<std::vector<Item>> groups = {};  ///< of all optimizers, one after the other
  std::vector<Dict> options = {};              ///< of these groups
  std::vector<FlatGroup> flats = {};
  std::optional<c10::IValue> scheduler = {};
  std::shared_ptr<optim::GradScaler> scaler = {};
  int64_t steps = 0, skipped = 0;

  std::unordered_set<const at::TensorImpl*> trained = {};

  bool trains(const at::Tensor& tensor) const { return trained.contains(tensor.unsafeGetTensorImpl()); }
};

std::unordered_set<const at::TensorImpl*> tensors_of(const detail::PreparedModel& model) {
  std::unordered_set<const at::TensorImpl*> tensors;
  for (const auto& held : holdings_of(model))
    tensors.insert({held.tensor.unsafeGetTensorImpl(), held.value.unsafeGetTensorImpl()});
  return tensors;
}

/// The groups of a model's optimizers. Collective.
void list_items(const RunState& run, Contents& contents) {
  std::unordered_map<const at::TensorImpl*, const Held*> by_tensor;
  for (const auto& held : contents.holdings) by_tensor.emplace(held.tensor.unsafeGetTensorImpl(), &held);
  for (const size_t index : optimizers_of(run, contents.model)) {
    const auto& optimizer = run.optimizers[index];
    const OptimizerView view(optimizer, run.models);
    const auto counts = optimizer.step_counts();
    contents.steps = std::max(contents.steps, counts.taken + counts.skipped);
    contents.skipped = std::max(contents.skipped, counts.skipped);
    size_t next = 0;
    for (const auto& group : optimizer.param_groups()) {
      auto& items = contents.groups.emplace_back();
      std::unordered_set<const at::TensorImpl*> seen;
      for (size_t i = 0; i < group.params().size(); ++i, ++next) {
        const Held& held = view.parameters[next];
        const Held& master = *by_tensor.at(held.tensor.unsafeGetTensorImpl());
        // Without elements, or tied and listed twice.
        if (held.whole.numel() == 0 || !seen.insert(held.tensor.unsafeGetTensorImpl()).second) continue;
        Item item{.name = master.names.front(),
                  .sizes = master.whole.sizes().vec(),
                  .numel = master.whole.numel(),
                  .master = master,
                  .held = held,
                  .state = view.state[next]};
        if (const auto found = item.state.find(kSteps); found != item.state.end())
          item.steps = found->second.item<double>(), item.state.erase(found);
        contents.trained.insert(master.tensor.unsafeGetTensorImpl());
        items.push_back(std::move(item));
      }
    }
    for (const auto& group : view.groups) {
      auto& options = contents.options.emplace_back(make_dict());
      for (const auto& option : group)
        if (option.key().toStringRef() != "params") options.insert(option.key(), option.value());
    }
  }
}

/// The order of DeepSpeed's round_robin_gradients: the first of each rank's turn, then the second ones, …
std::vector<const Item*> in_file_order(const std::vector<Item>& items, bool round_robin, int64_t ranks) {
  std::vector<const Item*> order;
  const auto turns = static_cast<size_t>(round_robin ? ranks : 1);
  for (size_t turn = 0; turn < turns; ++turn)
    for (size_t i = turn; i < items.size(); i += turns) order.push_back(&items[i]);
  return order;
}

void place_at_stages_1_and_2(FlatGroup& flat, int64_t ranks, int64_t rank) {
  int64_t all = 0;
  for (const auto* item : flat.items) all += item->numel;
  flat.length = up_to(all, 2 * ranks) / ranks;
  const int64_t begin = rank * flat.length, end = std::min(all, begin + flat.length);
  flat.lean = std::max<int64_t>(0, end - begin);
  int64_t offset = 0;
  for (const auto* item : flat.items) {
    const int64_t from = std::max(begin, offset), to = std::min(end, offset + item->numel);
    if (from < to) flat.here.push_back({item, from - offset, to - from, from - begin});
    offset += item->numel;
  }
}

void place_at_stage_3(FlatGroup& flat, int64_t ranks, int64_t rank) {
  for (const auto* item : flat.items) {
    const int64_t piece = (item->numel + ranks - 1) / ranks, from = rank * piece;
    if (from < item->numel) flat.here.push_back({item, from, std::min(piece, item->numel - from), flat.length});
    flat.length += piece;
  }
  flat.lean = flat.length;
}

void list_flat_groups(Contents& contents, int64_t ranks, int64_t rank) {
  const auto& how = contents.how;
  for (size_t group = 0; group < contents.groups.size(); ++group) {
    const auto order = in_file_order(contents.groups[group], how.round_robin && how.stage < 3, ranks);
    FlatGroup flat{.items = {}, .group = group};
    int64_t elements = 0;
    const auto close = [&] {
      contents.flats.push_back(std::move(flat));
      flat = {.items = {}, .group = group}, elements = 0;
    };
    for (const auto* item : order) {
      flat.items.push_back(item);
      elements += (item->numel + ranks - 1) / ranks;
      if (how.stage == 3 && elements >= how.sub_group_size) close();
    }
    if (!flat.items.empty()) close();
  }
  for (auto& flat : contents.flats) {
    for (const auto* item : flat.items)
      for (const auto& [kind, tensor] : item->state) flat.kinds.insert(kind);
    flat.dtype = flat.items.front()->master.value.scalar_type();
    for (const auto* item : flat.items) flat.dtype = c10::promoteTypes(flat.dtype, item->master.value.scalar_type());
    if (how.stage == 3) place_at_stage_3(flat, ranks, rank);
    else place_at_stages_1_and_2(flat, ranks, rank);
  }
}

const Held& held_of(const Item& item, const std::string& kind) { return kind.empty() ? item.master : item.held; }
/// This rank's shard of a master or a state; undefined: there is none of this kind.
at::Tensor piece_of(const Item& item, const std::string& kind) {
  if (kind.empty()) return item.master.value;
  const auto found = item.state.find(kind);
  return found == item.state.end() ? at::Tensor() : found->second;
}

/// The items that become whole for one vector: neighbours of one part together.
std::vector<const Item*> in_order_of_parts(const std::vector<const Item*>& items, const std::string& kind) {
  auto order = items;
  std::stable_sort(order.begin(), order.end(),
                   [&](const Item* a, const Item* b) { return held_of(*a, kind).part < held_of(*b, kind).part; });
  return order;
}
void add_stages(const std::vector<const Item*>& items, const std::string& kind,
                std::vector<WholeStream::Stage>& stages) {
  std::vector<WholeStream::Wanted> all;
  for (const auto* item : in_order_of_parts(items, kind))
    if (const auto piece = piece_of(*item, kind); piece.defined() && held_of(*item, kind).in_pieces())
      all.push_back(wanted(held_of(*item, kind), kind, piece));
  for (auto& stage : part_by_part(std::move(all))) stages.push_back(std::move(stage));
}

at::Tensor whole_of(const Item& item, const std::string& kind, WholeStream& stream) {
  const auto piece = piece_of(item, kind);
  const Held& held = held_of(item, kind);
  return piece.defined() && held.in_pieces() ? stream.get(held.tensor, kind) : piece;
}

/// This rank's part of one vector.
at::Tensor part_here(const FlatGroup& flat, const std::string& kind, at::ScalarType dtype, int64_t length,
                     WholeStream& stream) {
  const at::Tensor part = at::zeros({length}, at::TensorOptions().dtype(dtype));
  std::unordered_map<const Item*, std::vector<const PlacedItem*>> places;
  for (const auto& placed : flat.here) places[placed.item].push_back(&placed);
  for (const auto* item : in_order_of_parts(flat.items, kind)) {
    const at::Tensor whole = whole_of(*item, kind, stream);  // in step with the others, also for what is theirs
    if (!whole.defined()) continue;
    const auto found = places.find(item);
    if (found == places.end()) continue;
    const at::Tensor elements = whole.detach().contiguous().view(-1);
    for (const auto* placed : found->second)
      part.narrow(0, placed->at, placed->numel).copy_(elements.narrow(0, placed->from, placed->numel));
  }
  return part;
}

at::ScalarType dtype_of(const FlatGroup& flat, const std::string& kind) {
  std::optional<at::ScalarType> dtype;
  for (const auto* item : flat.items)
    if (const auto piece = piece_of(*item, kind); piece.defined())
      dtype = c10::promoteTypes(dtype.value_or(piece.scalar_type()), piece.scalar_type());
  return dtype.value_or(at::kFloat);
}

// ---- pickles

using formats::TorchPickle;

void write_key(TorchPickle& pickle, const char* key, const c10::IValue& value) {
  pickle.text(key), pickle.value(value);
}
void begin_ordered_dict(TorchPickle& pickle) {
  pickle.global("collections", "OrderedDict"), pickle.empty_tuple(), pickle.reduce(), pickle.mark();
}
void write_sizes(TorchPickle& pickle, const std::vector<int64_t>& sizes) {
  pickle.global("torch", "Size"), pickle.mark(), pickle.mark();
  for (const int64_t size : sizes) pickle.integer(size);
  pickle.tuple_of_mark(), pickle.tuple_of_mark(), pickle.reduce();
}
void write_integers(TorchPickle& pickle, const std::vector<int64_t>& values) {
  pickle.empty_list(), pickle.mark();
  for (const int64_t value : values) pickle.integer(value);
  pickle.append_to_mark();
}
void write_version_and_config(TorchPickle& pickle, const parallel::DeepSpeedFiles& how) {
  write_key(pickle, "ds_config", how.ds_config), write_key(pickle, "ds_version", how.ds_version);
}

/// The state dict that an optimizer stepping on flat vectors would write.
void write_flat_optimizer(TorchPickle& pickle, const Contents& contents, WholeStream& stream) {
  pickle.empty_dict(), pickle.mark();
  pickle.text("state"), pickle.empty_dict(), pickle.mark();
  for (size_t index = 0; index < contents.flats.size(); ++index) {
    const FlatGroup& flat = contents.flats[index];
    const bool stepped =
        std::any_of(flat.items.begin(), flat.items.end(), [](const Item* item) { return item->steps.has_value(); });
    if (!stepped && flat.kinds.empty()) continue;
    pickle.integer(static_cast<int64_t>(index)), pickle.empty_dict(), pickle.mark();
    if (stepped)
      pickle.text(kSteps), pickle.tensor(at::kFloat, {}, false, [count = flat.steps()] {
        return at::empty({}, at::TensorOptions().dtype(at::kFloat)).fill_(count);
      });
    for (const auto& kind : flat.kinds) {
      const auto dtype = dtype_of(flat, kind);
      pickle.text(kind), pickle.tensor(dtype, {flat.length}, false, [&flat, &stream, kind, dtype] {
        return part_here(flat, kind, dtype, flat.length, stream);
      });
    }
    pickle.set_items_to_mark();
  }
  pickle.set_items_to_mark();
  pickle.text("param_groups"), pickle.empty_list(), pickle.mark();
  for (size_t group = 0; group < contents.groups.size(); ++group) {
    pickle.empty_dict(), pickle.mark();
    for (const auto& option : contents.options[group])
      write_key(pickle, option.key().toStringRef().c_str(), option.value());
    std::vector<int64_t> numbers;
    for (size_t index = 0; index < contents.flats.size(); ++index)
      if (contents.flats[index].group == group) numbers.push_back(static_cast<int64_t>(index));
    pickle.text("params"), write_integers(pickle, numbers);
    pickle.set_items_to_mark();
  }
  pickle.append_to_mark();
  pickle.set_items_to_mark();
}

void write_masters(TorchPickle& pickle, const Contents& contents, WholeStream& stream) {
  pickle.empty_list(), pickle.mark();
  for (const auto& flat : contents.flats)
    pickle.tensor(flat.dtype, {flat.lean}, true,
                  [&flat, &stream] { return part_here(flat, "", flat.dtype, flat.lean, stream); });
  pickle.append_to_mark();
}

/// The places of parameters in this rank's vectors, for DeepSpeed's tool that makes universal checkpoints.
void write_slice_mappings(TorchPickle& pickle, const Contents& contents) {
  pickle.empty_list(), pickle.mark();
  for (const auto& flat : contents.flats) {
    begin_ordered_dict(pickle);
    for (const auto& placed : flat.here) {
      pickle.text(placed.item->name);
      pickle.global("deepspeed.utils.tensor_fragment", "fragment_address"), pickle.empty_tuple(), pickle.new_object();
      pickle.empty_dict(), pickle.mark();
      write_key(pickle, "numel", placed.numel), write_key(pickle, "start", placed.at);
      pickle.set_items_to_mark(), pickle.build();
    }
    pickle.set_items_to_mark();
  }
  pickle.append_to_mark();
}

/// DeepSpeed counts the steps of a group; where parameters have counts of their own, or no state yet, they are kept
/// beside, for a resume that is exact.
void write_own_steps(TorchPickle& pickle, const Contents& contents) {
  const auto differs = [](const FlatGroup& flat) {
    return std::any_of(flat.items.begin(), flat.items.end(), [&](const Item* item) {
      return item->steps != flat.items.front()->steps || item->state.size() != flat.kinds.size();
    });
  };
  if (std::none_of(contents.flats.begin(), contents.flats.end(), differs)) return;
  pickle.text("accelerate_steps"), pickle.empty_dict(), pickle.mark();
  for (const auto& flat : contents.flats)
    for (const auto* item : flat.items)
      if (item->steps || !item->state.empty())
        write_key(pickle, item->name.c_str(), item->steps ? c10::IValue(*item->steps) : c10::IValue());
  pickle.set_items_to_mark();
}

void write_optimizer_file(const Contents& contents, const fs::path& file, int64_t ranks, WholeStream& stream) {
  const auto& how = contents.how;
  TorchPickle pickle;
  pickle.empty_dict(), pickle.mark();
  pickle.text("optimizer_state_dict"), pickle.empty_dict(), pickle.mark();
  if (how.stage == 3) write_key(pickle, "zero_stage", how.stage);
  const c10::IValue scale = contents.scaler ? contents.scaler->state_dict() : c10::IValue();
  pickle.text("loss_scaler"),
      checkpointing::write_loss_scaler(pickle, scale, how.dynamic_loss_scale && scale.isGenericDict());
  write_key(pickle, "dynamic_loss_scale", how.dynamic_loss_scale), write_key(pickle, "overflow", false);
  if (how.stage == 3) {
    write_key(pickle, "partition_count", ranks);
    pickle.text("optimizer_state_dict"), write_flat_optimizer(pickle, contents, stream);
    pickle.text("fp32_flat_groups"), write_masters(pickle, contents, stream);
  } else {
    write_key(pickle, "clip_grad", how.clip_grad);
    pickle.text("base_optimizer_state"), write_flat_optimizer(pickle, contents, stream);
    pickle.text("single_partition_of_fp32_groups"), write_masters(pickle, contents, stream);
    write_key(pickle, "zero_stage", how.stage);
    std::vector<int64_t> paddings;
    for (const auto& flat : contents.flats) paddings.push_back(flat.length - flat.lean);
    pickle.text("group_paddings"), write_integers(pickle, paddings);
    pickle.text("param_alignment_paddings"), pickle.empty_list(), pickle.mark();
    for (const auto& flat : contents.flats) write_integers(pickle, std::vector<int64_t>(flat.items.size()));
    pickle.append_to_mark();
    pickle.text("partition_count"), write_integers(pickle, std::vector<int64_t>(contents.flats.size(), ranks));
    write_key(pickle, "ds_version", how.ds_version);
    pickle.text("param_slice_mappings"), write_slice_mappings(pickle, contents);
  }
  write_own_steps(pickle, contents);
  pickle.set_items_to_mark();
  write_version_and_config(pickle, how);
  pickle.set_items_to_mark();
  write_archive(file, std::move(pickle));
}

// ---- the model's file

/// A weight as modules compute with it; a buffer as it is.
at::ScalarType dtype_in_modules(const Contents& contents, const Held& held, bool is_parameter) {
  const auto dtype = held.value.scalar_type();
  return is_parameter && contents.how.param_dtype && at::isFloatingType(dtype) ? *contents.how.param_dtype : dtype;
}

std::unordered_set<const at::TensorImpl*> parameters_of(const detail::PreparedModel& model) {
  std::unordered_set<const at::TensorImpl*> tensors;
  for (const auto& [name, tensor] : model.model.parameters()) tensors.insert(tensor.unsafeGetTensorImpl());
  return tensors;
}

/// Names of the model's state in its order; the tensor that each means.
std::vector<std::pair<std::string, const Held*>> named_holdings(const Contents& contents) {
  std::unordered_map<const at::TensorImpl*, const Held*> by_tensor;
  for (const auto& held : contents.holdings) by_tensor.emplace(held.tensor.unsafeGetTensorImpl(), &held);
  std::vector<std::pair<std::string, const Held*>> result;
  for (const auto& [name, tensor] : contents.model.model.state())
    result.emplace_back(name, by_tensor.at(tensor.unsafeGetTensorImpl()));
  return result;
}

void write_param_shapes(TorchPickle& pickle, const Contents& contents) {
  pickle.empty_list(), pickle.mark();
  for (const auto& flat : contents.flats) {
    begin_ordered_dict(pickle);
    for (const auto* item : flat.items) pickle.text(item->name), write_sizes(pickle, item->sizes);
    pickle.set_items_to_mark();
  }
  pickle.append_to_mark();
}

/// Stage 0, in full precision: torch's own layout, whose parameters are numbers through all groups. In half precision
/// DeepSpeed wraps it, with the masters.
void write_whole_optimizer(TorchPickle& pickle, const Contents& contents, WholeStream& stream) {
  const auto write_torch = [&] {
    pickle.empty_dict(), pickle.mark();
    pickle.text("state"), pickle.empty_dict(), pickle.mark();
    int64_t number = 0;
    for (const auto& items : contents.groups)
      for (const auto& item : items) {
        const int64_t key = number++;
        if (!item.steps && item.state.empty()) continue;
        pickle.integer(key), pickle.empty_dict(), pickle.mark();
        if (item.steps)
          pickle.text(kSteps), pickle.value(at::empty({}, at::TensorOptions().dtype(at::kFloat)).fill_(*item.steps));
        for (const auto& [kind, piece] : item.state)
          pickle.text(kind), pickle.tensor(piece.scalar_type(), item.sizes, false,
                                           [&item, &stream, kind = kind] { return whole_of(item, kind, stream); });
        pickle.set_items_to_mark();
      }
    pickle.set_items_to_mark();
    pickle.text("param_groups"), pickle.empty_list(), pickle.mark();
    number = 0;
    for (size_t group = 0; group < contents.groups.size(); ++group) {
      pickle.empty_dict(), pickle.mark();
      for (const auto& option : contents.options[group])
        write_key(pickle, option.key().toStringRef().c_str(), option.value());
      std::vector<int64_t> numbers;
      for (size_t i = 0; i < contents.groups[group].size(); ++i) numbers.push_back(number++);
      pickle.text("params"), write_integers(pickle, numbers);
      pickle.set_items_to_mark();
    }
    pickle.append_to_mark(), pickle.set_items_to_mark();
  };
  if (!contents.how.param_dtype) return write_torch();
  pickle.empty_dict(), pickle.mark();
  const c10::IValue scale = contents.scaler ? contents.scaler->state_dict() : c10::IValue();
  const auto from_scale = [&](const char* key, const c10::IValue& otherwise) {
    if (!scale.isGenericDict()) return otherwise;
    const auto dict = scale.toGenericDict();
    const auto found = dict.find(key);
    return found == dict.end() ? otherwise : found->value();
  };
  write_key(pickle, "dynamic_loss_scale", contents.how.dynamic_loss_scale);
  for (const auto& [key, otherwise] :
       std::initializer_list<std::pair<const char*, c10::IValue>>{{"cur_scale", 1.0}, {"cur_iter", contents.steps}})
    write_key(pickle, key, from_scale(key, otherwise));
  if (contents.how.dynamic_loss_scale)
    for (const char* key : {"last_overflow_iter", "scale_factor", "scale_window"})
      write_key(pickle, key, from_scale(key, {}));
  if (scale.isGenericDict()) write_key(pickle, "loss_scaler", scale);  // DeepSpeed leaves out its hysteresis
  write_key(pickle, "clip_grad", contents.how.clip_grad);
  pickle.text("optimizer_state_dict"), write_torch();
  pickle.text("fp32_groups"), pickle.empty_list(), pickle.mark();
  for (const auto& items : contents.groups) {
    pickle.empty_list(), pickle.mark();
    for (const auto& item : items)
      pickle.tensor(item.master.value.scalar_type(), item.sizes, true,
                    [&item, &stream] { return whole_of(item, "", stream); });
    pickle.append_to_mark();
  }
  pickle.append_to_mark(), pickle.set_items_to_mark();
}

struct ModelFile {
  fs::path path;
  int64_t ranks, rank;
  const SaveZeroOptions& options;
};

void write_model_file(const Contents& contents, const ModelFile& file, WholeStream& stream) {
  const auto& how = contents.how;
  const auto named = named_holdings(contents);
  const bool frozen = how.stage >= 2 && !file.options.exclude_frozen_parameters;
  std::unordered_set<const Held*> parameters;
  for (const auto& tensors = parameters_of(contents.model); const auto& [name, held] : named)
    if (tensors.contains(held->tensor.unsafeGetTensorImpl())) parameters.insert(held);
  const auto left_out = [&](const Held* held) {
    return file.options.exclude_frozen_parameters && parameters.contains(held) && !contents.trains(held->tensor);
  };
  const auto write_whole = [&](TorchPickle& pickle, const Held& held) {
    const auto dtype = dtype_in_modules(contents, held, parameters.contains(&held));
    pickle.tensor(dtype, held.whole.sizes().vec(), false, [&held, &stream, dtype] {
      return (held.in_pieces() ? stream.get(held.tensor) : held.tensor.detach()).to(dtype);
    });
  };
  TorchPickle pickle;
  pickle.empty_dict(), pickle.mark();
  pickle.text("module");
  begin_ordered_dict(pickle);
  for (const auto& [name, held] : named) {
    if (left_out(held)) continue;
    pickle.text(name);
    if (how.stage == 3 && parameters.contains(held))
      pickle.value(at::empty({0}, at::TensorOptions().dtype(dtype_in_modules(contents, *held, true))));
    else write_whole(pickle, *held);
  }
  pickle.set_items_to_mark();
  pickle.text("buffer_names"), pickle.empty_list(), pickle.mark();
  for (const auto& [name, held] : named)
    if (!parameters.contains(held)) pickle.text(name);
  pickle.append_to_mark();
  pickle.text("optimizer");
  if (how.stage > 0 || contents.groups.empty()) pickle.none();
  else write_whole_optimizer(pickle, contents, stream);
  pickle.text("param_shapes");
  if (how.stage > 0) write_param_shapes(pickle, contents);
  else pickle.none();
  // Each once, under its first name.
  std::vector<std::pair<std::string, const Held*>> not_trained;
  std::unordered_set<const Held*> seen;
  for (const auto& [name, held] : named)
    if (parameters.contains(held) && !contents.trains(held->tensor) && seen.insert(held).second)
      not_trained.emplace_back(name, held);
  pickle.text("frozen_param_shapes");
  if (!frozen) pickle.none();
  else {
    begin_ordered_dict(pickle);
    for (const auto& [name, held] : not_trained) pickle.text(name), write_sizes(pickle, held->whole.sizes().vec());
    pickle.set_items_to_mark();
  }
  pickle.text("shared_params");
  if (how.stage == 0) pickle.none();
  else {
    pickle.empty_dict(), pickle.mark();
    std::unordered_map<const Held*, std::string> first;
    for (const auto& [name, held] : named)
      if (const auto [known, fresh] = first.emplace(held, name); !fresh && parameters.contains(held))
        pickle.text(name), pickle.text(known->second);
    pickle.set_items_to_mark();
  }
  pickle.text("frozen_param_fragments");
  if (!frozen) pickle.none();
  else {
    begin_ordered_dict(pickle);
    for (const auto& [name, held] : not_trained) {
      pickle.text(name);
      if (how.stage < 3) {
        write_whole(pickle, *held);
        continue;
      }
      const int64_t numel = held->whole.numel(), piece = (numel + file.ranks - 1) / file.ranks;
      const auto dtype = dtype_in_modules(contents, *held, true);
      pickle.tensor(dtype, {piece}, false, [held = held, &stream, &file, numel, piece, dtype] {
        const at::Tensor whole = held->in_pieces() ? stream.get(held->tensor) : held->tensor.detach();
        const at::Tensor part = at::zeros({piece}, at::TensorOptions().dtype(dtype));
        const int64_t from = std::min(numel, file.rank * piece), count = std::min(piece, numel - from);
        part.narrow(0, 0, count).copy_(whole.contiguous().view(-1).narrow(0, from, count));
        return part;
      });
    }
    pickle.set_items_to_mark();
  }
  write_key(pickle, "lr_scheduler", contents.scheduler.value_or(c10::IValue()));
  write_key(pickle, "data_sampler", {}), write_key(pickle, "random_ltd", {});
  write_key(pickle, "skipped_steps", contents.skipped), write_key(pickle, "global_steps", contents.steps);
  write_key(pickle, "global_samples", contents.steps * how.train_batch_size);
  write_key(pickle, "dp_world_size", file.ranks), write_key(pickle, "mp_world_size", int64_t{1});
  pickle.text("checkpoint_parallel_dimensions"), pickle.empty_dict(), pickle.mark();
  write_key(pickle, "pp_degree", int64_t{1}), write_key(pickle, "tp_degree", int64_t{1});
  pickle.set_items_to_mark();
  write_version_and_config(pickle, how);
  for (const auto& [key, value] : file.options.client_state) write_key(pickle, key.c_str(), value);
  pickle.set_items_to_mark();
  write_archive(file.path, std::move(pickle));
}

/// The tensors that become whole while the model's file is written, in the order in which they are asked for.
std::vector<WholeStream::Stage> stages_of_model_file(const Contents& contents, const SaveZeroOptions& options) {
  std::vector<WholeStream::Stage> stages;
  const auto add = [&](const std::vector<const Held*>& all) {
    std::vector<WholeStream::Wanted> weights;
    for (const auto* held : all)
      if (held->in_pieces()) weights.push_back(wanted(*held, "", held->value));
    for (auto& stage : part_by_part(std::move(weights))) stages.push_back(std::move(stage));
  };
  const auto named = named_holdings(contents);
  std::vector<const Held*> module, frozen;
  std::unordered_set<const Held*> seen;
  const auto parameters = parameters_of(contents.model);
  for (const auto& [name, held] : named) {
    const bool is_parameter = parameters.contains(held->tensor.unsafeGetTensorImpl());
    const bool trained = contents.trains(held->tensor);
    if (contents.how.stage < 3 && !(options.exclude_frozen_parameters && is_parameter && !trained))
      module.push_back(held);
    if (is_parameter && !trained && seen.insert(held).second) frozen.push_back(held);
  }
  add(module);
  if (contents.how.stage == 0) {
    for (const auto& items : contents.groups)
      for (const auto& item : items)
        for (const auto& [kind, piece] : item.state) add_stages({&item}, kind, stages);
    if (contents.how.param_dtype)
      for (const auto& items : contents.groups)
        for (const auto& item : items) add_stages({&item}, "", stages);
  }
  if (contents.how.stage >= 2 && !options.exclude_frozen_parameters) add(frozen);
  return stages;
}

}  // namespace

std::vector<size_t> optimizers_on(const RunState& run, const detail::PreparedModel& model) {
  std::vector<size_t> result;
  const auto tensors = tensors_of(model);
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    if (optim::has_own_state_dict(run.optimizers[i].optimizer())) continue;
    bool any = false, all = true;
    for (const auto& group : run.optimizers[i].param_groups())
      for (const auto& parameter : group.params()) {
        const bool here = tensors.contains(parameter.unsafeGetTensorImpl());
        any = any || here, all = all && here;
      }
    if (any && all) result.push_back(i);
  }
  return result;
}

std::vector<size_t> optimizers_of(const RunState& run, const detail::PreparedModel& model) {
  auto result = optimizers_on(run, model);
  if (!model.deepspeed || model.deepspeed->stage == 0) return result;
  // A group is one vector from stage 1 on: real numbers and complex ones don't go into one.
  std::erase_if(result, [&](size_t i) {
    const auto& groups = run.optimizers[i].param_groups();
    return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
      return std::any_of(group.params().begin(), group.params().end(), [&](const auto& parameter) {
        return parameter.is_complex() != group.params().front().is_complex();
      });
    });
  });
  return result;
}

std::optional<size_t> model_of(const RunState& run, size_t optimizer) {
  for (size_t i = 0; i < run.models.size(); ++i) {
    const auto all = optimizers_of(run, *run.models[i]);
    if (std::find(all.begin(), all.end(), optimizer) != all.end()) return i;
  }
  return std::nullopt;
}

std::optional<size_t> model_of_scheduler(const RunState& run, size_t scheduler) {
  if (!run.engine_schedulers.contains(scheduler)) return std::nullopt;
  for (size_t i = 0; i < run.optimizers.size(); ++i)
    if (&run.optimizers[i].optimizer() == &run.schedulers[scheduler].scheduler().optimizer()) return model_of(run, i);
  return std::nullopt;
}

bool writes_for_others(const detail::PreparedModel& model, bool first_on_its_disk) {
  return comm::rank() == 0 || (model.deepspeed->each_node_writes && first_on_its_disk);
}

void save_zero(const RunState& run, const detail::PreparedModel& model, const fs::path& folder,
               const SaveZeroOptions& options) {
  Contents contents{.model = model, .how = *model.deepspeed, .holdings = holdings_of(model), .scaler = run.scaler};
  const int64_t ranks = comm::world_size(), rank = comm::rank();
  list_items(run, contents);
  list_flat_groups(contents, ranks, rank);
  for (size_t i = 0; i < run.schedulers.size(); ++i)
    if (const auto of = model_of_scheduler(run, i); of && run.models[*of].get() == &model && !contents.scheduler)
      contents.scheduler = run.schedulers[i].state_dict();
  const int64_t stage = contents.how.stage;
  WholeStream weights(stages_of_model_file(contents, options),
                      {.everywhere = stage == 3 || contents.how.each_node_writes});
  const std::string prefix = fmt::format("zero_pp_rank_{}_", rank);
  const std::string name = fmt::format("{}mp_rank_00_model_states.pt", stage == 3 ? prefix : "");
  write_in_step(weights, stage == 3 || writes_for_others(model, options.first_on_its_disk), [&] {
    write_model_file(contents, {.path = folder / name, .ranks = ranks, .rank = rank, .options = options}, weights);
  });
  if (stage == 0) return;
  std::vector<WholeStream::Stage> stages;
  for (const auto& flat : contents.flats)
    for (const auto& kind : flat.kinds) add_stages(flat.items, kind, stages);
  for (const auto& flat : contents.flats) add_stages(flat.items, "", stages);
  WholeStream stream(std::move(stages), {.everywhere = true});
  const bool bf16 = contents.how.param_dtype == at::kBFloat16;
  write_in_step(stream, /*writes=*/true, [&] {
    write_optimizer_file(contents, folder / fmt::format("{}{}mp_rank_00_optim_states.pt", bf16 ? "bf16_" : "", prefix),
                         ranks, stream);
  });
}

void write_latest(const fs::path& folder, const std::string& tag) {
  AtomicFile file("save_checkpoint", folder / "latest");
  file.write(tag);
  file.finish();
}

void write_zero_to_fp32(const fs::path& folder) {
  static constexpr std::string_view kScript = R"(#!/usr/bin/env python3
"""Makes plain fp32 weights of this folder's checkpoint, by `accelerate merge-weights` of Accelerate for C++.

    python zero_to_fp32.py . output_dir [--tag TAG] [--max_shard_size 5GB] [--safe_serialization]

ACCELERATE_PROGRAM: the program, if it is not the first `accelerate` on the PATH. Python's program of the same name can't
read these files; DeepSpeed's own script of this name can."""
import argparse
import os
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint_dir", help="the folder with the file latest, such as .")
parser.add_argument("output_dir", help="where the weights go")
parser.add_argument("--max_shard_size", default="5GB", help="of a file")
parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pickles")
parser.add_argument("-t", "--tag", help="instead of the one that latest names")
parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
options = parser.parse_args()
command = [os.environ.get("ACCELERATE_PROGRAM", "accelerate"), "merge-weights", options.checkpoint_dir,
           options.output_dir, "--max_shard_size", options.max_shard_size]
if not options.safe_serialization:
    command.append("--unsafe_serialization")
if options.tag:
    command += ["--tag", options.tag]
if options.exclude_frozen_parameters:
    command.append("--exclude_frozen_parameters")
try:
    sys.exit(subprocess.run(command).returncode)
except FileNotFoundError:
    sys.exit(f"{command[0]} was not found: set ACCELERATE_PROGRAM to the program of Accelerate for C++")
)";
  const auto path = folder / "zero_to_fp32.py";
  AtomicFile file("save_checkpoint", path);
  file.write(kScript);
  file.finish();
  std::error_code rights;  // as it is where there are none to give
  fs::permissions(path, fs::perms::owner_exec, fs::perm_options::add, rights);
}

checkpointing::Sizes sizes_by_name(const detail::PreparedModel& model) {
  checkpointing::Sizes sizes;
  for (const auto& holding : holdings_of(model))
    for (const auto& name : holding.names) sizes.emplace(name, holding.whole.sizes().vec());
  return sizes;
}

checkpointing::StoredOptimizer optimizer_in(const RunState& run, const detail::PreparedModel& model,
                                            const checkpointing::ZeroCheckpoint& checkpoint, size_t optimizer,
                                            const std::vector<size_t>& together) {
  const auto sizes = sizes_by_name(model);
  auto stored = checkpoint.optimizer(&sizes);
  size_t before = 0, groups = 0;
  for (const size_t one : together) {
    if (one == optimizer) before = groups;
    groups += run.optimizers[one].param_groups().size();
  }
  if (stored.groups.size() != groups)
    raise<CheckpointError>("{}: found {} parameter groups, expected {}{}", stored.source, stored.groups.size(), groups,
                           together.size() > 1 ? fmt::format(", of {} optimizers", together.size()) : "");
  const auto parameters = parameters_of(run.optimizers[optimizer], run.models);
  checkpointing::StoredOptimizer own{.source = stored.source, .by_name = true, .groups = {}, .state = {}};
  size_t next = 0;
  for (size_t g = 0; g < run.optimizers[optimizer].param_groups().size(); ++g) {
    auto& group = stored.groups[before + g];
    // Each once; parameters without elements are not in files of stages 1 to 3.
    std::vector<std::string> names, filled;
    const auto has = [](const std::vector<std::string>& list, const std::string& name) {
      return std::find(list.begin(), list.end(), name) != list.end();
    };
    for (size_t i = 0; i < run.optimizers[optimizer].param_groups()[g].params().size(); ++i, ++next) {
      const auto& name = parameters[next].names.front();
      if (has(names, name)) continue;
      names.push_back(name);
      if (parameters[next].whole.numel() > 0) filled.push_back(name);
    }
    const auto& keys = group.parameters.size() == names.size() ? names : filled;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      if (!stored.by_name && keys.size() != group.parameters.size())
        raise<CheckpointError>("{}: found {} parameters in parameter group {}, expected {}", stored.source,
                               group.parameters.size(), g, names.size());
      const auto& name = stored.by_name ? group.parameters[i] : keys[i];
      if (const auto state = stored.state.find(group.parameters[i]); state != stored.state.end())
        own.state.emplace(name, state->second);
      group.parameters[i] = name;
    }
    for (const auto& name : names)
      if (!has(filled, name) && !has(group.parameters, name)) group.parameters.push_back(name);
    own.groups.push_back(std::move(group));
  }
  return own;
}

std::optional<c10::IValue> scaler_state_in(const checkpointing::ZeroCheckpoint& checkpoint,
                                           const optim::GradScaler& scaler) {
  const c10::IValue found = checkpoint.loss_scaler();
  const c10::IValue present = scaler.state_dict();
  if (!found.isGenericDict() || !present.isGenericDict()) return std::nullopt;
  const auto saved = found.toGenericDict();
  Dict result = make_dict();
  for (const auto& entry : present.toGenericDict()) {
    const auto& key = entry.key().toStringRef();
    // PyTorch's rule, or the wrapper of stage 0, has another name for it.
    const char* other = key == "scale" ? "cur_scale" : key == "dynamic" ? "dynamic_loss_scale" : nullptr;
    c10::IValue value = entry.value();
    for (const char* name : {key.c_str(), other})
      if (name)
        if (const auto known = saved.find(name); known != saved.end() && !known->value().isNone()) {
          value = known->value();
          if (entry.value().isDouble() && value.isInt()) value = static_cast<double>(value.toInt());
          break;
        }
    result.insert(entry.key(), value);
  }
  return result;
}

}  // namespace accelerate::run_state
