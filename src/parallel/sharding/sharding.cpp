#include "parallel/sharding/sharding.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "comm/agreement.hpp"
#include "comm/group.hpp"
#include "parallel/backward_watch.hpp"
#include "parallel/captured_gradient.hpp"
#include "parallel/drift.hpp"
#include "parallel/replica_average.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/gradient_reducer.hpp"
#include "parallel/sharding/gradient_taker.hpp"
#include "parallel/sharding/shard_groups.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "parallel/sharding/sharded_part.hpp"
#include "parallel/sharding/whole_gradients.hpp"
#include "parallel/slice_of.hpp"
#include "parallel/verify_parameters.hpp"
#include "residency/deferred/materialize.hpp"
#include "residency/homes/wire.hpp"
#include "residency/member.hpp"
#include "residency/put_away.hpp"
#include "residency/residency.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

bool is_low_precision(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }
/// Whether ranks can average this dtype, however they are connected.
bool is_trainable(at::ScalarType type) { return is_low_precision(type) || type == at::kFloat || type == at::kDouble; }

/// As DeepSpeed calls it.
const char* name_of(OffloadStateTypeEnum state) {
  switch (state) {
    case OffloadStateTypeEnum::optim_states:
      return "optim_states";
    case OffloadStateTypeEnum::hp_params:
      return "hp_params";
    case OffloadStateTypeEnum::lp_params:
      return "lp_params";
    case OffloadStateTypeEnum::lp_grads:
      return "lp_grads";
    case OffloadStateTypeEnum::contiguous_grad_buffer:
      return "contiguous_grad_buffer";
  }
  return "";
}

/// The stand-ins that are sharded instead of parameters.
using Placed = std::vector<std::pair<std::shared_ptr<StandIn>, at::Tensor>>;

/// The properties that the members of one part have in common.
struct PartKind {
  at::ScalarType dtype;
  bool trained;
  bool fp8, int8;                                     ///< gathered in 8 bits
  bool int4;                                          ///< its gradients travel in 4 bits
  bool coded;                                         ///< kept in 8 bits
  bool stands_in;                                     ///< for parameters
  bool travels_low;                                   ///< its gradients do
  auto operator<=>(const PartKind&) const = default;  // NOLINT(modernize-use-nullptr): version 14 sees a 0 in it
};

}  // namespace

struct Sharding::Impl {
  ShardingSettings settings;
  std::shared_ptr<comm::Group> group;  ///< of all ranks that train this model; null alone
  ShardGroups groups;
  std::unique_ptr<residency::Residency> units;
  std::vector<ShardedPart> parts;
  Placed placed;  ///< members of `parts` that are no parameters of the model
  std::unique_ptr<ShardStore> store;
  std::unique_ptr<GradientReducer> reducer;
  std::function<void(const std::vector<at::Tensor>&)> step_ahead;  ///< null: steps are plain ones
  std::function<void(const std::vector<at::Tensor>&)> step_now;    ///< null: steps are taken by step()
  std::vector<char> stepped;   ///< by part: at once, in the backward that runs or ran last
  bool step_is_taken = false;  ///< in a backward that has ended, and step() has not been called; the same on all ranks
  bool ends_a_step = false;    ///< step() does, which has been taken
  std::unique_ptr<WholeGradients> gradients;                                  ///< what grad() of the parameters is
  std::unordered_map<const at::TensorImpl*, BeforeGradient> before_gradient;  ///< by the module's parameter
  std::unordered_map<const at::TensorImpl*, CapturedGradient> captured;       ///< by the module's parameter
  std::unordered_map<const at::TensorImpl*, ShardedMember*> member_of;        ///< by the module's parameter; of `parts`
  std::unordered_map<const at::TensorImpl*, ShardedMember*> member_of_piece;
  /// By the module's parameter: what layers before have cut, or put in its place.
  std::unordered_map<const at::TensorImpl*, Held> others;
  /// Paths of modules that compute in their own dtype (batch norms): their buffers do too.
  std::vector<std::string> full_precision;
  DriftCheck drift;  ///< of replicas
  bool sync = true;
  bool in_forward = false;
  std::unordered_set<const residency::Unit*> read;  ///< by the program's own operators, since all have met
  bool has_averaged = false;
  bool apart = false;            ///< gradients are averaged within this rank's replica only
  bool backward_is_due = false;  ///< peers wait for what this rank gives to the reduction, if only for nothing
  bool took_part = false;        ///< in the latest backward
  bool announced = false;        ///< somebody calls after_backward()
  BackwardWatch averaging;
  bool ends_itself = false;  ///< nobody does: the backward that runs has been told to do what that does
  /// Outside of forward and backward: shards have some, and no prepared optimizer has stepped on them.
  bool gradients_are_open = false;
  bool gradients_were_left = false;  ///< the same, from before a forward whose backward has not come yet
  /// Units that were read while pieces had gradients, with what their pieces were then.
  std::unordered_map<const residency::Unit*, std::vector<Digest>> read_beside_gradients;
  std::set<OffloadStateTypeEnum> offloaded;  ///< the same on all ranks
  residency::PutAway away;                   ///< what of them has left the device

  /// The part of a parameter that layers before have left. Null: it is the parameter as it was.
  const Held* other(const at::Tensor& parameter) const {
    const auto found = others.find(parameter.unsafeGetTensorImpl());
    return found == others.end() ? nullptr : &found->second;
  }
  bool has_stand_in(const at::Tensor& parameter) const {
    const Held* const held = other(parameter);
    return held && held->stand_in;
  }

  /// The unit's tensors in groups of one dtype that are all trained or all frozen, and travel alike.
  std::map<PartKind, NamedTensors> parts_of(const ShardedUnit& unit) {
    std::map<PartKind, NamedTensors> kinds;
    for (const auto& [name, tensor] : unit.parameters) {
      const bool stands_in = has_stand_in(tensor);
      if (stands_in) placed.emplace_back(other(tensor)->stand_in, other(tensor)->stand_in->bytes());
      const at::Tensor& sharded = stands_in ? placed.back().second : tensor;
      const bool is_matrix =
          !stands_in && sharded.dim() >= 2 && sharded.numel() > 0 && is_trainable(sharded.scalar_type());
      kinds[{.dtype = sharded.scalar_type(),
             .trained = sharded.requires_grad(),
             .fp8 = !stands_in && settings.fp8_weights.contains(name),
             .int8 = is_matrix && settings.quantized.weights && !unit.stays,
             .int4 = is_matrix && settings.quantized.gradients,
             .coded = is_matrix && settings.quantized.frozen && !sharded.requires_grad(),
             .stands_in = stands_in,
             .travels_low =
                 settings.travels_low && at::isFloatingType(sharded.scalar_type()) && settings.travels_low(tensor)}]
          .emplace_back(name, sharded);
    }
    return kinds;
  }

  /// Decides where everything will lie, before anything moves.
  std::vector<std::pair<ShardedUnit, std::vector<size_t>>> plan(const ModelRef& model, const at::Device& device) {
    std::vector<std::pair<ShardedUnit, std::vector<size_t>>> planned;
    for (auto& unit : settings.units(model)) {
      std::vector<size_t> indices;
      for (auto& [kind, parameters] : parts_of(unit)) {
        ShardedPart part;
        part.index = parts.size();
        part.trained = part.may_step = kind.trained;
        part.trainable = kind.trained || (!kind.stands_in && !kind.coded && is_trainable(kind.dtype));
        part.coded = kind.coded;
        part.fp8 = kind.fp8;
        part.int8 = kind.int8;
        part.int4 = kind.int4;
        part.stands_in = kind.stands_in;
        std::vector<at::Tensor> tensors;
        for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
        part.layout = residency::lay_out(tensors, groups.ranks(), device,
                                         part.int8 || part.int4 || part.coded ? residency::kWireBlock : 1);
        for (size_t m = 0; m < parameters.size(); ++m)
          part.members.push_back({.name = parameters[m].first,
                                  .tensor = parameters[m].second,
                                  .part = part.index,
                                  .index = m,
                                  .offset = part.layout.offsets[m],
                                  .shard = {}});
        const bool converts = settings.param_dtype && at::isFloatingType(kind.dtype) && !unit.full_precision;
        part.compute_dtype = converts ? *settings.param_dtype : kind.dtype;
        part.reduce_dtype = kind.travels_low ? std::optional(settings.their_reduce_dtype) : settings.reduce_dtype;
        // As the reference: in mixed precision the optimizer works on fp32, whatever the checkpoint was stored in.
        part.master_dtype = settings.masters_in_param_dtype && part.trained                        ? part.compute_dtype
                            : settings.param_dtype && part.trained && is_low_precision(kind.dtype) ? at::kFloat
                                                                                                   : kind.dtype;
        indices.push_back(parts.size());
        parts.push_back(std::move(part));
      }
      if (unit.full_precision) full_precision.push_back(unit.path);
      planned.emplace_back(std::move(unit), std::move(indices));
    }
    return planned;
  }

  /// Keeps this rank's shard of a whole value, which has the parameter's sizes.
  void place(const ShardedMember& member, const at::Tensor& value) {
    at::Tensor shard = member.shard.detach();
    if (shard.numel() == 0) return;
    const at::Tensor piece = slice_of(member.tensor, value, member.begin, shard.numel());
    shard.copy_(settings.first_values_in_param_dtype ? piece.to(parts[member.part].compute_dtype) : piece);
  }

  /// Values of parameters that are not initialised yet, one at a time.
  void place_deferred(const ModelRef& model, const at::Device& device,
                      const std::function<void(const ShardedMember&, const at::Tensor&)>& take) {
    residency::materialize_each(model, device,
                                [&](const std::string&, const at::Tensor& parameter, const at::Tensor& value) {
                                  if (const auto* member = find(parameter)) take(*member, value);
                                });
  }

  /// One tensor of rank 0's, for all; the others bring one like it. Collective.
  at::Tensor of_rank0(const at::Tensor& value) const {
    counts::add(ShardingCount::tensors_from_rank0);
    counts::add(ShardingCount::bytes_from_rank0, static_cast<int64_t>(value.nbytes()));
    return group->broadcast(value, 0);
  }

  /// Rank 0's values for everybody; the others need not have any. One parameter at a time is whole on the others.
  void place_from_rank0(const ModelRef& model, const at::Device& device) {
    const auto number = [&](int64_t part, int64_t member) {
      return at::tensor({part, member}, at::TensorOptions().dtype(at::kLong).device(group->device()));
    };
    constexpr int64_t kEnd = -1;
    if (group->rank() == 0) {
      const auto send = [&](const ShardedMember& member, const at::Tensor& value) {
        group->broadcast(number(static_cast<int64_t>(member.part), static_cast<int64_t>(member.index)), 0);
        of_rank0(value.detach().to(device));
        place(member, value);
      };
      place_deferred(model, device, send);
      for (const auto& part : parts)
        for (const auto& member : part.members)
          if (!is_deferred(member.tensor)) send(member, member.tensor);
      group->broadcast(number(kEnd, kEnd), 0);
      return;
    }
    const auto receive = [&](const ShardedMember& member) {
      const auto options = at::TensorOptions().dtype(member.tensor.scalar_type()).device(device);
      place(member, of_rank0(at::empty(member.tensor.sizes(), options)));
    };
    if (group->dry()) {  // no rank 0 tells the order, and any costs the same
      for (const auto& part : parts) std::for_each(part.members.begin(), part.members.end(), receive);
      return;
    }
    for (;;) {
      const at::Tensor which = group->broadcast(number(0, 0), 0).cpu();
      const auto p = which[0].item<int64_t>(), m = which[1].item<int64_t>();
      if (p == kEnd) return;
      receive(parts[static_cast<size_t>(p)].members[static_cast<size_t>(m)]);
    }
  }

  void take_over(const ModelRef& model, const at::Device& device) {
    units = std::make_unique<residency::Residency>(settings.forward);
    const auto planned = plan(model, device);
    store = make_shard_store(parts, groups, device, settings);
    at::NoGradGuard no_grad;
    for (auto& part : parts) {
      store->allocate(part);
      part.cut(groups.rank(), groups.ranks());
      for (auto& member : part.members) member_of[member.tensor.unsafeGetTensorImpl()] = &member;
    }
    const bool from_rank0 = group && settings.from_rank0;
    if (from_rank0) place_from_rank0(model, device);
    else
      place_deferred(model, device,
                     [&](const ShardedMember& member, const at::Tensor& value) { place(member, value); });
    units->write_together(true);  // until all have placed theirs
    for (const auto& [unit, indices] : planned) {
      std::vector<residency::PartSpec> specs;
      for (const size_t index : indices) {
        ShardedPart& part = parts[index];
        if (!from_rank0)
          for (const auto& member : part.members)
            if (!is_deferred(member.tensor)) place(member, member.tensor);
        residency::PartSpec spec;
        spec.members = part.named_tensors();
        spec.layout = part.layout;
        spec.dtype = part.compute_dtype;
        spec.device = device;
        spec.home = store->home(part, unit.path.empty() ? "(root)" : unit.path);
        if (store->pieces_in_unit(part)) {
          spec.members.emplace_back("(this rank's stretch)", part.master);
          spec.layout.offsets.push_back(groups.rank() * part.master.numel());
          spec.slice_is_last = true;
        }
        specs.push_back(std::move(spec));
      }
      // From here on the whole parameters of this unit are gone.
      residency::Unit& added = units->add(unit.path, std::move(specs), /*keep=*/unit.stays || unit.path.empty());
      const bool has_stand_ins =
          std::any_of(indices.begin(), indices.end(), [this](size_t index) { return parts[index].stands_in; });
      for (const size_t index : indices) {
        parts[index].unit = &added;
        parts[index].beside_stand_ins = has_stand_ins;
        if (store->pieces_in_unit(parts[index])) parts[index].cut(groups.rank(), groups.ranks());
      }
      counts::add(ShardingCount::units);
      if (unit.full_precision) counts::add(ShardingCount::full_precision_units);
    }
    for (const auto& [stand_in, bytes] : placed) {
      stand_in->placed(bytes, groups.ranks());
    }
    for (const auto& part : parts) {
      counts::add(ShardingCount::elements_sharded, part.numel());
      counts::add(ShardingCount::elements_held, part.numel() / groups.ranks());
      if (part.compute_dtype != part.master_dtype) counts::add(ShardingCount::elements_converted, part.numel());
    }
    // Ranks of one replica may bring different values and make one model of them; replicas must be equal.
    if (groups.replicate && !from_rank0)
      for (auto& part : parts) part.master.copy_(groups.replicate->broadcast(part.master.to(device), 0));
    units->write_together(false);
    store->reshard(/*kept=*/true);
    store->publish(*units);
    units->set_publisher([this] { store->refresh(*units); });
    if (group)
      units->set_scribe([this](const residency::Member& member, const at::Tensor& values) {
        const auto found = member_of.find(member.tensor().unsafeGetTensorImpl());
        if (apart || found == member_of.end()) return;
        // Before the first backward weights may be drawn anew, which each rank may do with numbers of its own. Where
        // values are kept more exactly than they are computed with, a rank knows small writes to its own shard only.
        const ShardedPart& part = parts[found->second->part];
        if (!part.int8 && (in_forward || (has_averaged && part.compute_dtype == part.master_dtype)))
          drift.note_write(member.name(), values);
      });
    units->set_watcher([this](const residency::Unit& unit) {
      expect_here({OffloadStateTypeEnum::lp_params}, "reading a parameter");
      const bool computes = in_forward || torch::autograd::get_current_graph_task_id() != -1;
      if (gradients_are_open || (!computes && gradients_were_left)) look_for_unseen_steps(&unit);
      else if (!computes) look_for_steps_since_read(unit);
      if (units->writes_together()) return;
      if (computes) return store->use(unit);
      if (read.insert(&unit).second) store->meet("reading a parameter");
    });
    if (settings.near_name && groups.near && groups.rank() == 0 && groups.replica() == 0 && nothing_goes())
      logs::warn(
          "accelerate.parallel",
          "{} has no effect: no parameters go between forward and backward, since they lie where all ranks of the "
          "machine see them",
          settings.near_name);
    if (settings.tells_changed_order && (!group || group->rank() == 0)) tell_of_orders();
    units->set_change({.begin = [this] { store->before_step(*units); }, .end = [this] { publish(); }});
    reducer = store->make_reducer();
    store->disk().groups();
    if (store->disk().has_states())
      reducer->set_coming(
          [this](const ShardedPart& part) { or_tell_peers([&] { store->disk().before_gradients(part); }); });
    reducer->set_given([this](const ShardedPart& part) { gradients_are_there(part); });
    gradients = std::make_unique<WholeGradients>(parts, groups, [this] { store->meet("reading a gradient"); });
    for (auto& part : parts)
      for (auto& member : part.members) member_of_piece[member.shard.unsafeGetTensorImpl()] = &member;
  }

  bool nothing_goes() const {
    return std::all_of(units->units().begin(), units->units().end(), [](const auto& unit) { return unit->fixed(); });
  }

  /// Tells of each change once. Units are fetched ahead in the order of the last pass.
  void tell_of_orders() {
    if (nothing_goes())
      return logs::warn("accelerate.parallel",
                        "DeepSpeed configuration: log_trace_cache_warnings has no effect: nothing is fetched, since "
                        "parameters lie where all ranks of the machine see them");
    units->set_surprise([told = std::set<std::array<int32_t, 3>>()](const auto& after, const auto& expected,
                                                                    const auto& found) mutable {
      if (!told.insert({after.index(), expected.index(), found.index()}).second) return;
      logs::warn("accelerate.parallel",
                 "DeepSpeed configuration: log_trace_cache_warnings: the recorded order of modules broke: after '{}' "
                 "came '{}', expected '{}'; the new order is recorded",
                 after.name(), found.name(), expected.name());
    });
  }

  /// Places all that is not sharded: buffers, and the parameters of ignored modules.
  void place_rest(const ModelRef& model, const at::Device& device) {
    materialize(model, {.device = device.is_meta() ? std::optional(device) : std::nullopt});
    at::NoGradGuard no_grad;
    const auto keep = [](const at::Tensor& tensor, const at::Tensor& value) {
      if (!value.is_same(tensor)) tensor.set_data(value);
    };
    // Ignored modules are left alone, but where only rank 0 has read the checkpoint, only it has their values.
    const bool only_rank0_has_values = group && settings.ignored_from_rank0;
    for (const auto& [name, parameter] : model.parameters()) {
      if (find(parameter) || has_stand_in(parameter)) continue;
      counts::add(ShardingCount::parameters_ignored);
      const at::Tensor value = parameter.to(device);
      keep(parameter, only_rank0_has_values ? of_rank0(value) : value);
    }
    const auto& buffer_dtype = settings.buffer_dtype;
    for (const auto& [name, buffer] : model.buffers()) {
      at::Tensor value = buffer.to(device);
      if (group && settings.from_rank0) value = of_rank0(value);
      const bool stays = std::any_of(full_precision.begin(), full_precision.end(),
                                     [&name = name](const auto& path) { return name.starts_with(path + "."); });
      const auto dtype = settings.fp32_buffers.contains(name) ? at::kFloat : buffer_dtype;
      if (dtype && value.is_floating_point() && !stays && value.scalar_type() != *dtype) {
        value = value.to(*dtype);
        counts::add(ShardingCount::buffers_converted);
      }
      keep(buffer, value);
    }
  }

  Held held(const ShardedMember& member) const {
    Held held{.names = {member.name},
              .tensor = member.tensor,
              .whole = member.tensor,
              .value = member.shard,
              .slice = Slice::range(member.tensor.sizes(), member.begin, member.shard.numel()),
              .cut = {comm::Axis::dp_shard},
              .mesh = &groups.mesh,
              .part = static_cast<int64_t>(member.part)};
    if (const Held* const box = other(member.tensor)) {
      held.whole = box->whole;
      held.slice.corner = box->slice.corner;
      held.cut = held.cut | box->cut;
      held.mesh = box->mesh;
    } else if (member.tensor.strides() == c10::contiguous_strides(member.tensor.sizes())) {
      held.equal = EqualShards{.begin = member.offset,
                               .each = parts[member.part].numel() / groups.ranks(),
                               .members = groups.ranks(),
                               .member_step = groups.mesh.step(comm::Axis::dp_shard),
                               .replica_step = groups.mesh.step(comm::Axis::dp_replicate)};
    }
    return held;
  }

  void take(const std::vector<Held>& given) {
    for (const auto& held : given) {
      if (held.cut.empty() && !held.stand_in) continue;
      if (!held.value.is_same(held.tensor) || held.slice.sizes != held.tensor.sizes())
        throw InternalError("sharding: a layer before it has left a piece of '" + held.names.front() +
                            "' that is not the module's tensor, expected boxes that modules compute with");
      others.emplace(held.tensor.unsafeGetTensorImpl(), held);
    }
  }

  ShardedMember* find(const at::Tensor& parameter) const {
    const auto found = member_of.find(parameter.unsafeGetTensorImpl());
    return found == member_of.end() ? nullptr : found->second;
  }
  /// The member of a parameter, or of a shard.
  ShardedMember* find_either(const at::Tensor& tensor) const {
    if (auto* const member = find(tensor)) return member;
    const auto found = member_of_piece.find(tensor.unsafeGetTensorImpl());
    return found == member_of_piece.end() ? nullptr : found->second;
  }

  /// Parameters may have been frozen or set free since the last forward.
  void see_what_is_trained() {
    for (auto& part : parts) {
      if (part.coded) refuse_to_train(part);
      if (!part.trainable) continue;
      bool any = false;
      for (auto& member : part.members) {
        const bool trained = member.tensor.requires_grad();
        if (trained) average_captured(member);
        // One that was frozen may have a gradient that waits to be averaged, of a checkpoint for example.
        any |= trained || (member.tensor.grad().defined() && !gradients->shows(member));
        if (member.shard.requires_grad() != trained) member.shard.requires_grad_(trained);
      }
      if (any || !backward_is_due) part.trained = any;
      part.may_step = part.trained || has_gradients(part);
    }
  }

  static void refuse_to_train(const ShardedPart& part) {
    for (const auto& member : part.members)
      if (member.tensor.requires_grad())
        raise<ConfigError>(
            "forward: '{}' requires a gradient, but it was frozen in prepare(), since when it is kept as 8-bit codes, "
            "expected it to stay frozen: its small steps would be lost. Set requires_grad before prepare(), or leave "
            "zero_quantized_nontrainable_weights (quantized_nontrainable_weights) out",
            member.name);
  }

  /// A gradient that is shown goes before the next backward adds to it.
  void make_way_before(ShardedMember& member) {
    if (member.tensor.requires_grad())
      before_gradient.try_emplace(member.tensor.unsafeGetTensorImpl(), member.tensor,
                                  [this, &member] { gradients->make_way(member); });
  }

  void average_captured(const ShardedMember& member) {
    if (!group) return;
    captured.try_emplace(member.tensor.unsafeGetTensorImpl(), member.tensor, [this, &member](const at::Tensor& found) {
      comm::Group* const all = apart ? groups.shard.get() : group.get();
      if (!all) return found;
      const at::Tensor average = average_of_captured(*all, member.name, found);
      return settings.sums_gradients ? average * all->world_size() : average;
    });
  }

  void take_gradient(ShardedMember& member) {
    expect_here(
        {OffloadStateTypeEnum::lp_params, OffloadStateTypeEnum::lp_grads, OffloadStateTypeEnum::contiguous_grad_buffer},
        "backward");
    if (member.tensor.grad().layout() != at::kStrided)
      raise<ConfigError>(
          "backward: found a sparse gradient of '{}', expected dense ones, which alone can be sharded; make the "
          "embedding with sparse(false)",
          member.name);
    if (step_is_taken) {
      member.tensor.mutable_grad().reset();  // all ranks throw before anything of this backward is averaged
      expect_no_step_taken("backward", "what a second one adds to gradients would be a step of its own");
    }
    took_part = true;
    make_way_before(member);
    backward_is_due = true;
    if (!sync) return gradients->note_local(member);
    if (torch::autograd::get_current_graph_task_id() != -1) averaging.begin();
    if (!announced && !std::exchange(ends_itself, true))
      torch::autograd::Engine::get_default_engine().queue_callback([this] {
        ends_itself = false;
        finish_backward();
      });
    if (reducer->came(member)) reducer->finish();  // of a backward before this one, after which nobody has called us
    ShardedPart& part = parts[member.part];
    part.trained = true;
    const at::Tensor gradient = gradients->take(member);
    if (!reducer->take(part, member, gradient)) return;
    const bool goes = settings.forward.evict_after_use || !settings.keep_until_step;
    if (goes && !part.unit->keep() && !part.beside_stand_ins) units->evict(*part.unit);
    if (settings.prefetch_after_unit) units->prefetch_next();
  }

  void finish_backward() {
    if (!backward_is_due || !sync) return;
    const auto finish = [&] {
      // Parts that accumulated without synchronisation and got nothing in this backward.
      for (auto& part : parts) {
        if (!part.trainable) continue;
        for (auto& member : part.members) {
          gradients->settle(member, /*left=*/true);
          if (member.tensor.grad().defined() && !gradients->shows(member)) take_gradient(member);
        }
      }
      reducer->finish();
    };
    const bool was_announced = std::exchange(announced, true);  // this is the end
    if (group) group->guard("backward", finish);
    else finish();
    announced = was_announced;
    backward_is_due = false;
    if (step_ahead)
      for (const size_t group : store->disk().left_open()) step_on_group_ahead(group);
    store->disk().settle_gradients();
    if (has_stepped()) {
      step_is_taken = true;
      store->before_step(*units);
      publish();
    } else {
      end_pass();
    }
    show_gradients();
    gradients_are_open = !step_is_taken;
    read.clear();
    has_averaged = true;
    if (!apart) drift.after_average([&] { return pieces_as_kept(); });
  }
  bool has_stepped() const { return std::find(stepped.begin(), stepped.end(), 1) != stepped.end(); }
  /// Between a backward that has taken a step and step().
  void expect_no_step_taken(const char* operation, const char* why) const {
    if (step_is_taken)
      raise<ConfigError>(
          "{}: found a backward whose step was taken at once (step_at_once), and no step() of the prepared optimizer "
          "since, expected step() first: {}. Or leave step_at_once out",
          operation, why);
  }
  /// All ranks have given their gradients of it, so nobody computes with it any more.
  void step_on_part(ShardedPart& part) {
    const auto gradients_of_part = [&] {
      return std::count_if(part.members.begin(), part.members.end(),
                           [](const auto& member) { return member.shard.grad().defined(); });
    };
    const auto coming = gradients_of_part();
    if (coming == 0) return;
    stepped.resize(parts.size());
    expect_here({OffloadStateTypeEnum::hp_params, OffloadStateTypeEnum::lp_params, OffloadStateTypeEnum::optim_states},
                "backward, which steps at once");
    units->share_again(*part.unit);
    step_now(shards_of({part.index}));
    if (gradients_of_part() == coming) return;  // they accumulate, or nobody trains it
    stepped[part.index] = 1;
    store->publish_part(part);
  }
  /// Of a part, all that this backward has for them.
  void gradients_are_there(const ShardedPart& part) {
    if (step_now && settings.step_at_once) return step_on_part(parts[part.index]);
    ShardsOnDisk& disk = store->disk();
    if (!disk.steps_in_groups()) {
      if (step_ahead) step_ahead(shards_of({part.index}));
    } else if (!step_ahead) {
      disk.after_gradients({part.index});
    } else if (const auto group = disk.completed_by(part)) {
      step_on_group_ahead(*group);
    }
  }
  void step_on_group_ahead(size_t group) {
    const auto& indices = store->disk().groups()[group];
    step_ahead(shards_of(indices));
    store->disk().after_gradients(indices);
  }
  std::vector<at::Tensor> shards_of(const std::vector<size_t>& indices) const {
    std::vector<at::Tensor> shards;
    for (const size_t index : indices)
      for (const auto& member : parts[index].members) shards.push_back(member.shard);
    return shards;
  }
  void show_gradients() {
    gradients->show();
    for (auto& part : parts)  // also where this rank has left its backward out
      for (auto& member : part.members)
        if (part.trained) make_way_before(member);
  }

  /// After a backward that threw: the averages that it has begun end, and all gradients go. Collective, of ranks to
  /// which that has happened alike; the others hear of it.
  void recover() {
    if (!averaging.threw()) return;
    ends_itself = false;
    const bool begun = std::any_of(parts.begin(), parts.end(), [&](const ShardedPart& part) {
      return std::any_of(part.members.begin(), part.members.end(),
                         [&](const ShardedMember& member) { return reducer->came(member); });
    });
    if (!begun) return;
    if (group)
      group->all_gather(at::zeros({1}, at::TensorOptions().device(group->device())),
                        "the end of a backward that threw");
    reducer->finish();
    store->disk().settle_gradients();
    for (auto& part : parts)
      for (auto& member : part.members)
        if (part.trainable) {
          member.tensor.mutable_grad().reset();
          member.shard.mutable_grad().reset();
        }
    gradients->start_anew();
    backward_is_due = false;
    release();
    stepped.clear();
    if (settings.step_at_once)
      throw ConfigError(
          "a backward has thrown after its step was begun (step_at_once), expected it to come to its end: on some "
          "ranks "
          "some parameters may have been stepped on. Load a checkpoint, or leave step_at_once out");
  }
  NamedTensors pieces_as_kept() const {
    NamedTensors pieces;
    for (const auto& part : parts)
      if (!part.stands_in)
        for (const auto& member : part.members) pieces.emplace_back(member.name, member.shard);
    return pieces;
  }

  /// LibTorch's SGD writes through data(), which no version of a tensor counts. Where it was not prepared, only
  /// gradients that are there say that it may have stepped on them.
  /// @param changed  by part: whether to look at all
  void look_for_unseen_steps(const residency::Unit* of = nullptr,
                             const std::optional<std::vector<char>>& changed = std::nullopt) {
    // Within a backward ranks may come by here unequally often, so they can't agree that nothing has changed.
    const bool together = torch::autograd::get_current_graph_task_id() == -1;
    for (const auto& part : parts)
      if (part.may_step && !store->pieces_in_unit(part) && (!of || part.unit == of) &&
          (!changed || (*changed)[part.index]) && (together || store->may_have_changed(part)))
        part.master.unsafeGetTensorImpl()->bump_version();
  }
  bool on_any_rank(bool here) const {
    if (!group || group->dry()) return here;
    at::Tensor flag = at::tensor({int64_t{here}}, at::TensorOptions().dtype(at::kLong).device(group->device()));
    group->all_reduce_(flag, Reduction::max);
    return flag.item<int64_t>() != 0;
  }
  /// Gradients stay behind a prepared step, too, and what was read since is not gathered anew. Collective, as reading
  /// is.
  void look_for_steps_since_read(const residency::Unit& unit) {
    const auto known = read_beside_gradients.find(&unit);
    if (known == read_beside_gradients.end() && !pieces_have_gradients()) return;
    std::vector<Digest> now;
    for (const auto& part : parts)
      if (part.unit == &unit && part.may_step && !store->pieces_in_unit(part) && !store->disk().has(part.master))
        now.push_back(digest_of(part.master));
    // A step may leave some ranks' pieces as they are: those without elements, or whose gradients are zero.
    if (known != read_beside_gradients.end() && on_any_rank(known->second != now)) look_for_unseen_steps(&unit);
    read_beside_gradients.insert_or_assign(&unit, std::move(now));
  }
  void release() {
    units->release();
    store->reshard(/*kept=*/true);
  }
  void end_pass() {
    if (!settings.keep_until_step) release();
  }
  void publish() {
    gradients_are_open = gradients_were_left = false;
    read_beside_gradients.clear();
    read.clear();
    release();
    store->publish(*units);
  }
  /// Peers wait for this rank in the middle of a step.
  template <class F> void or_tell_peers(F&& f) {
    try {
      f();
    } catch (const ResourceError& error) {
      if (group) group->announce_failure(error.what());
      throw;
    }
  }
  /// A disk that has failed a rank is an error of all.
  void settle_disk() {
    if (!store->disk().steps_in_groups()) return;
    if (const auto failed = comm::failed_elsewhere(group.get(), [this] { store->disk().settle(); }))
      raise<ResourceError>("on rank {}: {}", failed->rank, failed->reason);
  }
  static bool has_gradients(const ShardedPart& part) {
    return std::any_of(part.members.begin(), part.members.end(),
                       [](const auto& member) { return member.shard.grad().defined(); });
  }
  /// The same on all ranks: a member that any rank has used has one everywhere.
  void check_all_have_gradients(const std::vector<at::Tensor>& stepped_on) const {
    std::unordered_set<const at::TensorImpl*> stepped;
    for (const auto& tensor : stepped_on) stepped.insert(tensor.unsafeGetTensorImpl());
    std::string names;
    for (const auto& part : parts)
      for (const auto& member : part.members)
        if (member.tensor.requires_grad() && !member.shard.grad().defined() &&
            (stepped.contains(member.shard.unsafeGetTensorImpl()) ||
             stepped.contains(member.tensor.unsafeGetTensorImpl())))
          names += (names.empty() ? "" : ", ") + member.name;
    if (!names.empty())
      raise<ConfigError>(
          "step: no rank has a gradient of {}, which is trained, expected one of each parameter, as the settings say "
          "(ignore_unused_parameters is false); freeze it, or leave the setting out",
          names);
  }
  bool pieces_have_gradients() const {
    return std::any_of(parts.begin(), parts.end(),
                       [](const ShardedPart& part) { return part.may_step && has_gradients(part); });
  }

  void expect_here(std::initializer_list<OffloadStateTypeEnum> needed, const char* operation) const {
    for (const auto state : needed)
      if (offloaded.contains(state))
        raise<ConfigError>(
            "{}: '{}' of the model are offloaded (offload_states), expected them where the model computes; call "
            "reload_states() of the prepared model first",
            operation, name_of(state));
  }

  /// Puts away what `offloaded` says.
  void put_away(bool pin_memory, bool non_blocking) {
    const auto put = [&](const at::Tensor& tensor) { away.put(tensor, pin_memory, non_blocking); };
    const bool parameters = offloaded.contains(OffloadStateTypeEnum::lp_params);
    for (const auto& part : parts) {
      if (part.coded) {
        if (parameters) put(part.codes);
        continue;
      }
      const at::Tensor computed = store->computed(part);
      // A part that is not trained has no master besides the tensor that is computed with.
      const bool masters = part.trained ? offloaded.contains(OffloadStateTypeEnum::hp_params) : parameters;
      if (!computed.defined()) {  // units are gathered from the masters, wherever these lie
        if (masters || (parameters && part.master_dtype == part.compute_dtype)) put(part.master);
      } else if (computed.is_same(part.master)) {
        if (masters && parameters) put(part.master);
      } else {
        if (masters) put(part.master);
        if (parameters) put(computed);
      }
      for (const auto& member : part.members)
        if (offloaded.contains(OffloadStateTypeEnum::lp_grads)) put(member.shard.grad());
    }
    follow_moves();
  }
  /// Masters may have been moved, and with them what lies in them.
  void follow_moves() {
    const at::NoGradGuard no_grad;
    for (const auto& part : parts)
      for (const auto& member : part.members)
        if (member.shard.device() != part.master.device()) member.shard.set_data(member.piece_in(part.master.detach()));
    units->follow_moves([](const std::string& name) {
      return "parameter '" + name +
             "' is offloaded (offload_states): its bytes are on the host; call reload_states() of the prepared model";
    });
  }

  /// All that is to be averaged is, and what the program did to grad() is done to the shards.
  void settle() {
    recover();
    const bool synced = std::exchange(sync, true);  // a step within no_sync is a step of all ranks, too
    finish_backward();
    sync = synced;
    bool replaced = false;
    for (auto& part : parts) {
      if (!part.trainable) continue;
      for (auto& member : part.members) replaced |= gradients->settle(member, /*left=*/false);
    }
    if (replaced) show_gradients();
  }
};

Sharding::Sharding(const ModelRef& model, const at::Device& device, ShardingSettings settings,
                   const std::vector<Held>& given)
    : impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.take(given);
  self.settings = std::move(settings);
  self.group = comm::mesh().along(comm::kTokens);
  self.groups =
      make_shard_groups(self.settings.axes, self.settings.near, self.group, self.settings.quantized.gradients);
  self.drift = DriftCheck(self.groups.replicate, self.settings.compare_parameters_every);
  for (const auto& [name, parameter] : model.parameters())
    if (const auto* member = residency::Member::of(parameter); member && member->unit().owner().change().begin)
      raise<ConfigError>(
          "prepare: parameter '{}' belongs to a model that is sharded already, expected one that no other prepared "
          "model has: a shard has one owner. Prepare one module that holds both models, and call its parts",
          name);
  // Buffers travel only where rank 0's are taken.
  verify_parameters(self.settings.from_rank0 ? model.state() : model.parameters());
  if (self.settings.initialise)
    for (const auto& submodule : model.submodules())
      if (submodule.module && std::any_of(submodule.parameters.begin(), submodule.parameters.end(),
                                          [](const auto& item) { return is_deferred(item.second); }))
        counts::add(ShardingCount::modules_initialised), self.settings.initialise(*submodule.module);
  const auto build = [&] {
    for (const auto& [tensor, held] : self.others) {
      if (held.stand_in) held.stand_in->agree();
    }
    self.take_over(model, device);
    self.place_rest(model, device);
  };
  if (self.group) self.group->guard("prepare", build);
  else build();
  for (auto& part : self.parts) {
    if (!part.trainable) continue;
    for (auto& member : part.members) {
      GradientTaker::attach(member.tensor,
                            [impl = impl_.get(), &member](const at::Tensor&) { impl->take_gradient(member); });
      if (member.tensor.requires_grad()) self.average_captured(member);
    }
  }
}

Sharding::~Sharding() {
  for (const auto& part : impl_->parts)
    for (const auto& member : part.members) GradientTaker::detach(member.tensor);
}

void Sharding::before_forward() {
  Impl& self = *impl_;
  self.expect_no_step_taken("forward", "what it computes with is half a step ahead of the optimizer's schedule");
  if (const auto* member = self.units->replaced_member())
    throw ConfigError("forward: the bytes of parameter '" + member->name() +
                      "' were replaced after prepare(), probably by module->to(...) or set_data(); its gradients would "
                      "not be shared with the other ranks. Move and convert the module before prepare()");
  self.expect_here({OffloadStateTypeEnum::lp_params}, "forward");
  if (self.group) self.group->guard("forward", [&] { self.recover(); });
  else self.recover();
  residency::Policy policy = self.settings.forward;
  policy.keep_for_backward = self.groups.near && c10::GradMode::is_enabled();
  self.announced = self.ends_itself = false;
  self.gradients->release();
  if (self.gradients_are_open || self.gradients_were_left || self.pieces_have_gradients() ||
      !self.read_beside_gradients.empty())
    self.look_for_unseen_steps(nullptr, self.store->changed_parts());
  self.gradients_are_open = self.gradients_were_left = false;
  self.read_beside_gradients.clear();
  if (c10::GradMode::is_enabled()) self.see_what_is_trained();
  self.store->refresh(*self.units);
  self.read.clear();
  self.units->set_policy(policy);
  if (policy.evict_after_use) self.store->reshard(/*kept=*/false);
  self.in_forward = true;
  counts::add(ShardingCount::forwards_sharded);
}

void Sharding::after_forward(const std::vector<at::Tensor>&) {
  Impl& self = *impl_;
  leave_forward();
  if (c10::GradMode::is_enabled()) {
    self.backward_is_due = true;
    self.units->set_policy(self.settings.backward);
    if (self.settings.forward.evict_after_use) self.store->reshard(/*kept=*/false);
  } else {
    self.end_pass();
  }
}

void Sharding::leave_forward() noexcept {
  impl_->in_forward = false;
  (c10::GradMode::is_enabled() ? impl_->gradients_were_left : impl_->gradients_are_open) =
      impl_->pieces_have_gradients();
}

void Sharding::before_backward(const at::Tensor&) {
  impl_->took_part = false;
  impl_->announced = true;
}
// Not those of ignored modules, nor of layers that came later.
bool Sharding::averages(const at::Tensor& parameter) const { return impl_->find(parameter) != nullptr; }
bool Sharding::took_part() const { return impl_->took_part; }
void Sharding::after_backward() {
  impl_->finish_backward();
  impl_->announced = false;
}

const char* Sharding::always_reduces() const { return impl_->settings.always_reduces; }
bool Sharding::require_backward_grad_sync() const { return impl_->sync; }
void Sharding::set_require_backward_grad_sync(bool value) { impl_->sync = value; }
void Sharding::prepare_backward_sync() {
  impl_->sync = true;
  impl_->backward_is_due = true;
}

int64_t Sharding::replica() const { return impl_->groups.replica(); }

at::Tensor Sharding::local_shard(const at::Tensor& parameter) const {
  const auto* member = impl_->find(parameter);
  return member ? member->shard : at::Tensor();
}

std::optional<Held> Sharding::gradient(const at::Tensor& parameter) const {
  auto* const member = impl_->find_either(parameter);
  if (!member) return std::nullopt;
  impl_->expect_no_step_taken("gradients", "they are gone, and can't be looked at, clipped or scaled any more");
  const bool left = impl_->backward_is_due || !impl_->sync;
  if (impl_->parts[member->part].trainable && impl_->gradients->settle(*member, left)) {
    // Others may have been replaced, too, and what is shown anew would take their place.
    for (auto& part : impl_->parts)
      for (auto& other : part.members)
        if (part.trainable) impl_->gradients->settle(other, left);
    impl_->show_gradients();
  }
  Held gradient = impl_->held(*member);
  gradient.value = member->shard.grad();
  return gradient;
}

void Sharding::clear_gradient(const at::Tensor& held) {
  auto* const member = impl_->find_either(held);
  if (member) impl_->expect_no_step_taken("zero_grad", "their step was taken in backward, also where none was meant");
  if (member) impl_->gradients->clear(*member, /*by_whole=*/held.is_same(member->tensor));
}

std::optional<at::ScalarType> Sharding::input_dtype() const { return impl_->settings.input_dtype; }
std::optional<at::ScalarType> Sharding::output_dtype() const { return impl_->settings.output_dtype; }

void Sharding::set_apart(bool apart) {
  impl_->recover();  // averages that a backward has begun, and thrown out of, end among those who have begun them
  impl_->apart = apart;
  impl_->reducer->set_apart(apart);
}

std::optional<int64_t> Sharding::apart() const { return impl_->apart ? std::optional(replica()) : std::nullopt; }

comm::Group* Sharding::replicas() const { return impl_->groups.replicate.get(); }

void Sharding::resume_accumulation() {
  impl_->gradients->start_anew();
  impl_->backward_is_due = true;
}
// Settles gradients of forwards that no backward went through, too.
void Sharding::settle_gradients() {
  impl_->expect_here({OffloadStateTypeEnum::lp_grads}, "gradients");
  impl_->settle();
}

void Sharding::before_step() {
  expect_all_states_here("step");
  settle_gradients();
  impl_->ends_a_step = std::exchange(impl_->step_is_taken, false) && !impl_->pieces_have_gradients();
  impl_->stepped.clear();
  if (!impl_->ends_a_step) impl_->store->before_step(*impl_->units);
}

void Sharding::expect_gradients(const std::function<std::vector<at::Tensor>()>& stepped_on) {
  if (!impl_->settings.all_have_gradients) return;
  settle_gradients();
  impl_->check_all_have_gradients(stepped_on());
}

void Sharding::after_step() {
  if (std::exchange(impl_->ends_a_step, false)) return;
  impl_->publish();
  impl_->settle_disk();
}

std::vector<std::vector<at::Tensor>> Sharding::step_parts() const {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& indices : impl_->store->disk().groups()) groups.push_back(impl_->shards_of(indices));
  return groups;
}
void Sharding::place_state(const at::Tensor& parameter, const at::Tensor& state) {
  impl_->store->disk().place(parameter, state);
}
void Sharding::before_part(size_t group, const std::vector<at::Tensor>& states) {
  impl_->or_tell_peers([&] { impl_->store->disk().before_group(group, states); });
}
void Sharding::after_part(size_t group, const std::vector<at::Tensor>& states) {
  impl_->or_tell_peers([&] {
    for (const size_t index : impl_->store->disk().groups()[group]) impl_->store->publish_part(impl_->parts[index]);
  });
  impl_->store->disk().after_group(group, states);
}

bool Sharding::steps_at_once() const { return impl_->settings.step_at_once; }
void Sharding::set_step(std::function<void(const std::vector<at::Tensor>&)> step) { impl_->step_now = std::move(step); }
bool Sharding::steps_ahead() const { return impl_->settings.step_in_backward && !impl_->settings.step_at_once; }
void Sharding::set_step_ahead(std::function<void(const std::vector<at::Tensor>&)> step) {
  impl_->step_ahead = std::move(step);
}
bool Sharding::before_ahead(size_t group, const std::vector<at::Tensor>& states) {
  return impl_->store->disk().before_ahead(group, states);
}
void Sharding::after_ahead(size_t group, const std::vector<at::Tensor>& states) {
  ShardsOnDisk& disk = impl_->store->disk();
  for (const size_t index : disk.groups()[group])
    if (ShardedPart& part = impl_->parts[index]; disk.has(part.master))
      disk.postpone([&] { impl_->store->make_ahead(part); });
  disk.after_ahead(group, states);
}
bool Sharding::is_elsewhere(const at::Tensor& tensor) const { return impl_->store->disk().has(tensor); }
bool Sharding::take_ahead(size_t group, bool divides) {
  bool taken = false;
  impl_->or_tell_peers([&] { taken = impl_->store->disk().take_ahead(group, divides); });
  return taken;
}
void Sharding::after_take(size_t group) {
  impl_->or_tell_peers([&] {
    for (const size_t index : impl_->store->disk().groups()[group]) impl_->store->take_ahead(impl_->parts[index]);
  });
  impl_->store->disk().after_take(group);
}

void Sharding::gather_each(const Engine::ShardOf& piece_of, const std::function<void(const Engine::Whole&)>& take,
                           bool everywhere) const {
  const Impl& self = *impl_;
  if (!everywhere && replica() != 0) return;
  self.store->meet("gathering a state dict");
  at::NoGradGuard no_grad;
  for (const auto& part : self.parts) {
    if (part.stands_in) continue;
    at::Tensor range;
    std::vector<bool> defined;
    const int64_t length = part.numel() / self.groups.ranks();
    for (const auto& member : part.members) {
      const at::Tensor piece = piece_of(member.tensor, member.shard);
      defined.push_back(piece.defined());
      if (!piece.defined()) continue;
      if (!range.defined()) range = at::zeros({length}, piece.options().requires_grad(false));
      if (member.shard.numel() > 0) member.piece_in(range).copy_(piece);
    }
    at::Tensor flat = range;
    // Offloaded shards travel on the device that computes.
    if (self.groups.shard && range.defined()) {
      range = range.to(part.members.front().tensor.device());
      flat = everywhere ? self.groups.shard->all_gather(range) : self.groups.shard->gather(range);
    }
    if (!everywhere && self.groups.rank() != 0) continue;
    for (const auto& member : part.members)
      take({.name = member.name,
            .parameter = member.tensor,
            .value = defined[member.index] ? member.view_in(flat) : at::Tensor()});
  }
}

std::vector<Held> Sharding::held() const {
  std::vector<Held> all;
  for (const auto& part : impl_->parts) {
    if (part.stands_in) continue;
    for (const auto& member : part.members) all.push_back(impl_->held(member));
  }
  return all;
}

void Sharding::offload_states(const StatesToOffload& states) {
  Impl& self = *impl_;
  if (const char* const why = self.settings.states_stay)
    raise<ConfigError>("offload_states: {}; leave the call out", why);
  const auto is_new = [&](OffloadStateTypeEnum state) {
    return std::find(states.which.begin(), states.which.end(), state) != states.which.end() &&
           self.offloaded.insert(state).second;
  };
  self.store->meet("offloading states");
  is_new(OffloadStateTypeEnum::hp_params);
  if (is_new(OffloadStateTypeEnum::lp_grads))
    for (auto& part : self.parts)
      for (auto& member : part.members)
        if (part.trainable) self.gradients->make_way(member);  // alone what is shown is the shard itself
  if (is_new(OffloadStateTypeEnum::lp_params)) {
    self.release();
    self.units->trim();
  }
  if (is_new(OffloadStateTypeEnum::contiguous_grad_buffer)) self.reducer->trim();
  if (is_new(OffloadStateTypeEnum::optim_states))
    for (const auto& state : states.optimizer_states) self.away.put(state, states.pin_memory, states.non_blocking);
  self.put_away(states.pin_memory, states.non_blocking);
}

void Sharding::reload_states(bool non_blocking) {
  Impl& self = *impl_;
  const auto were = std::exchange(self.offloaded, {});
  if (were.empty()) return;
  self.store->meet("reloading states");
  self.away.bring_back(non_blocking);
  self.follow_moves();
  if (were.contains(OffloadStateTypeEnum::lp_grads)) self.show_gradients();
}

void Sharding::expect_all_states_here(const char* operation) const {
  using enum OffloadStateTypeEnum;
  impl_->expect_here({lp_params, hp_params, optim_states, lp_grads}, operation);
}

void Sharding::begin_join() {
  throw ConfigError(
      "join_uneven_inputs: found a model with sharded parameters, expected one trained by DistributedDataParallel: "
      "a rank without data would have to take part in every gather; "
      "let the loader give all ranks the same number of batches (even_batches)");
}

}  // namespace accelerate::parallel
