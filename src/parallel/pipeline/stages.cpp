#include "parallel/pipeline/stages.hpp"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "parallel/pipeline/sizes_only.hpp"
#include "residency/deferred/storage.hpp"
#include "residency/member.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel::pipeline {
namespace {

using residency::OperatorCall;

bool contains(const std::vector<int64_t>& list, int64_t item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
             : nullptr;
}

at::Tensor over(const at::Storage& storage, const at::Tensor& like) {
  return at::empty({0}, like.options().device(storage.device()))
      .set_(storage, like.storage_offset(), like.sizes(), like.strides());
}

at::Tensor bytes_of(const at::Storage& storage) {
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()))
      .set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

/// Sizes and strides of the first argument are all that it looks at, and of which it makes another view.
bool is_view(const OperatorCall& call) {
  if (call.facts.needs_bytes) return false;
  for (const auto& result : call.schema.returns())
    if (call.facts.makes_tensors && !result.alias_info()) return false;
  return true;
}

/// Whether the program's next operator, or the size of the result, depends on values that only one rank has.
bool depends_on_values(const OperatorCall& call, const std::function<bool(const at::Tensor&)>& is_staged) {
  if (call.op.hasTag(at::Tag::data_dependent_output) || call.name() == "aten::is_nonzero") return true;
  if (!call.op.hasTag(at::Tag::dynamic_output_shape) && call.name() != "aten::index") return false;
  if (call.name() != "aten::index") return true;
  bool mask = false;
  residency::for_each_tensor(call.arguments()[1],
                             [&](const at::Tensor& index) { mask |= is_mask(index) && is_staged(index); });
  return mask;
}

/// The call names a device, and that is the one of tensors that have no values here.
bool names_meta_device(const OperatorCall& call) {
  return call.facts.device && call.arguments()[*call.facts.device].isDevice() && !call.real_device();
}

}  // namespace

/// A tensor as another stage has got it.
struct Copy {
  int64_t version, stage, offset;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  at::Tensor values;  ///< on the stage's rank

  bool is_of(const at::Tensor& tensor, int64_t current_version, int64_t to) const {
    return version == current_version && stage == to && offset == tensor.storage_offset() &&
           dtype == tensor.scalar_type() && tensor.sizes() == sizes && tensor.strides() == strides;
  }
};

struct Stages::Value {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the address from being used again
  int64_t stage = 0;
  std::vector<int64_t> holders;
  std::optional<size_t> parameter;
  int64_t version = 0;  ///< how often it was written to
  std::vector<Copy> copies;
  at::Storage moved;  ///< the bytes here, where the program's tensors have none
};

Stages::Stages(const std::vector<StagedParameter>& parameters, Options options) : options_(std::move(options)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* storage = storage_of(parameters[i].tensor);
    if (!storage || values_.contains(storage)) continue;
    begin_value(parameters[i].tensor, parameters[i].stage, parameters[i].holders);
    values_[storage]->parameter = i;
  }
}

Stages::~Stages() = default;

Stages::Value* Stages::find(const at::Tensor& tensor) const {
  const auto found = values_.find(storage_of(tensor));
  return found == values_.end() ? nullptr : found->second.get();
}

void Stages::begin_value(const at::Tensor& tensor, int64_t stage, const std::vector<int64_t>& holders) {
  if (values_.size() >= prune_at_) {
    prune();
    prune_at_ = 2 * values_.size() + 4096;
  }
  auto value = std::make_shared<Value>(Value{.storage = tensor.storage().getWeakStorageImpl(),
                                             .stage = stage,
                                             .holders = holders,
                                             .parameter = {},
                                             .version = 0,
                                             .copies = {},
                                             .moved = {}});
  values_[storage_of(tensor)] = std::move(value);
}

void Stages::prune() {
  std::erase_if(values_, [](const auto& entry) { return entry.second->storage.expired(); });
}

int64_t Stages::stage_of(const at::Tensor& tensor) const {
  const Value* value = find(tensor);
  return value ? value->stage : -1;
}

at::Tensor Stages::here(const at::Tensor& tensor, const Value& value) const {
  return value.moved && tensor.is_meta() ? over(value.moved, tensor) : tensor;
}

at::Tensor Stages::bring(const at::Tensor& tensor, int64_t to, const std::string& label) {
  Value* value = find(tensor);
  if (!value) return tensor;
  if (!contains(value->holders, to)) return cross(tensor, *value, to, label);
  return options_.own == to ? here(tensor, *value) : at::Tensor();
}

at::Tensor Stages::cross(const at::Tensor& tensor, Value& value, int64_t to, const std::string& label) {
  for (const Copy& copy : value.copies)
    if (copy.is_of(tensor, value.version, to)) return copy.values;
  std::erase_if(value.copies, [&](const Copy& copy) { return copy.version != value.version; });
  if (value.parameter && options_.on_lack) options_.on_lack(*value.parameter, to);
  Copy copy{.version = value.version,
            .stage = to,
            .offset = tensor.storage_offset(),
            .sizes = tensor.sizes().vec(),
            .strides = tensor.strides().vec(),
            .dtype = tensor.scalar_type(),
            .values = {}};
  if (options_.carrier) {
    if (options_.own == value.stage) {
      options_.carrier->send(here(tensor, value), to, label);
    } else if (options_.own == to) {
      prune();  // the memory of copies that are not needed any more
      copy.values = options_.carrier->receive(tensor, value.stage, label);
    } else {
      options_.carrier->skip();
    }
  }
  value.copies.push_back(copy);
  return copy.values;
}

/// All views of a storage change when one is written to, so all of it goes where that happens.
void Stages::move(const at::Tensor& tensor, Value& value, int64_t to, const std::string& label) {
  if (options_.carrier) {
    if (options_.own == value.stage) {
      options_.carrier->send(bytes_of(tensor.is_meta() ? value.moved : tensor.storage()), to, label);
    } else if (options_.own == to) {
      const at::Tensor bytes = options_.carrier->receive(bytes_of(tensor.storage()), value.stage, label);
      if (tensor.is_meta()) value.moved = bytes.storage();
      else bytes_of(tensor.storage()).copy_(bytes);
    } else {
      options_.carrier->skip();
    }
  }
  value.stage = to;
  value.copies.clear();
}

bool Stages::handle(OperatorCall& call, residency::Next next) {
  if (is_view(call)) return false;  // the value goes on, wherever its bytes are
  // A tensor that is made like another one looks at that one's sizes only.
  bool first = true;
  int64_t stage = -1;
  std::vector<int64_t> holders;  // where all arguments are
  call.for_each_tensor([&](const at::Tensor& tensor, size_t) {
    const Value* value = find(tensor);
    if (!value || (!call.facts.needs_bytes && !first)) return;
    first = false;
    if (value->parameter && options_.on_touch) options_.on_touch(*value->parameter);
    if (stage < 0) holders = value->holders;
    else std::erase_if(holders, [&](int64_t holder) { return !contains(value->holders, holder); });
    stage = std::max(stage, value->stage);
  });
  if (stage < 0) {
    ++everywhere_;
    // Made on the device of a tensor that has no values here, it has its own all the same.
    if (names_meta_device(call)) call.set_argument(*call.facts.device, options_.device);
    return false;
  }
  // The call itself, too: what later handlers run for it is no other stage's business.
  next.compute(residency::TorchLayers::program, residency::OwnLinks::none,
               [&] { run_in(stage, std::move(holders), call, next); });
  return true;
}

void Stages::run_in(int64_t stage, std::vector<int64_t> holders, OperatorCall& call, residency::Next next) {
  const std::string label = call.full_name();
  if (depends_on_values(call, [&](const at::Tensor& tensor) { return find(tensor) != nullptr; }))
    raise<AgreedError>(
        "pipeline: operator {} asks for values of a tensor that stage {} computes, expected only operators whose "
        "results have known sizes there; all ranks run the whole forward, and only one of them has these values, so "
        "the program can't depend on them (item(), a comparison in an if, nonzero(), a mask as an index). Compute it "
        "from the inputs, which all ranks have, or leave it out of the forward",
        label, stage);
  if (!contains(holders, stage)) holders = {stage};
  const bool mine = contains(holders, options_.own);

  // A mask that everybody has is positions that everybody has; without its values nobody could tell how many.
  if (call.name() == "aten::index") {
    c10::List<std::optional<at::Tensor>> indices;
    for (const auto& item : call.arguments()[1].toListRef()) {
      if (!item.isTensor() || !is_mask(item.toTensor()))
        indices.push_back(item.isTensor() ? std::optional(item.toTensor()) : std::nullopt);
      else
        for (const at::Tensor& along : item.toTensor().nonzero().unbind(1)) indices.push_back(along);
    }
    call.set_argument(1, indices);
  }

  const std::vector<c10::IValue> originals = call.arguments().vec();
  for (size_t i = 0; i < originals.size(); ++i) {
    call.map_tensors(i, [&](const at::Tensor& tensor) {
      Value* value = find(tensor);
      if (!value || !call.facts.needs_bytes) return tensor;
      if (contains(value->holders, stage)) return mine ? here(tensor, *value) : tensor;
      if (!call.writes(i)) {
        const at::Tensor copy = cross(tensor, *value, stage, label);
        return mine && copy.defined() ? copy : tensor;
      }
      move(tensor, *value, stage, label);
      value->holders = holders;
      return mine ? here(tensor, *value) : tensor;
    });
    if (!call.writes(i)) continue;
    residency::for_each_tensor(originals[i], [&](const at::Tensor& tensor) {
      if (!find(tensor)) begin_value(tensor, stage, holders);
      Value& value = *find(tensor);
      ++value.version;
      value.holders = holders;
      if (mine && options_.carrier) options_.carrier->before_write(*storage_of(tensor));
    });
  }

  if (mine) {
    ++operators_;
    const bool like_moved = !call.facts.needs_bytes && call.facts.device && originals[*call.facts.device].isNone();
    if (names_meta_device(call) || like_moved) call.set_argument(*call.facts.device, options_.device);
    next();
  } else {
    ++skipped_;
    run_on_sizes(call, stage, next);
  }

  call.put_back(originals);
  for (size_t i = 0; i < call.schema.returns().size(); ++i) {
    if (call.argument_of(i)) continue;
    residency::for_each_tensor(call.results()[i], [&](const at::Tensor& tensor) {
      if (!tensor.has_storage())
        raise<ConfigError>(
            "pipeline: operator {} gives a tensor of layout {}, expected a strided one; a pipeline can't send others. "
            "Convert it with to_dense()",
            label, c10::str(tensor.layout()));
      if (!find(tensor)) begin_value(tensor, stage, holders);
    });
  }
}

void Stages::run_on_sizes(OperatorCall& call, int64_t stage, residency::Next next) {
  for (size_t i = 0; i < call.arguments().size(); ++i) {
    if (i == call.facts.device && !call.arguments()[i].isNone()) call.set_argument(i, at::Device(at::kMeta));
    else if (call.schema.arguments()[i].name() == "pin_memory") call.set_argument(i, c10::IValue());
    else
      call.map_tensors(i, [](const at::Tensor& tensor) {
        return tensor.is_meta() && !residency::deferred::owner_of(tensor) ? tensor : sizes_of(tensor);
      });
  }
  if (auto known = sizes_only_result(call.name(), call.arguments())) {
    call.finish({*std::move(known)});
    return;
  }
  try {
    next();
  } catch (const c10::NotImplementedError&) {
    if (call.schema.returns().empty() || !call.only_returns_arguments())
      raise<ConfigError>(
          "pipeline: operator {} has no kernel that works out sizes without values (the Meta key), which ranks of "
          "other stages than {} need, expected one; LibTorch has some of them only in Python. Register one with "
          "TORCH_LIBRARY_IMPL(aten, Meta, m), or write the forward without the operator",
          call.full_name(), stage);
    // An operator that gives back its arguments has no sizes to work out; the caller puts the arguments there.
    call.finish(std::vector<c10::IValue>(call.schema.returns().size()));
  } catch (c10::Error& error) {
    error.add_context("in operator " + call.full_name() + " of stage " + std::to_string(stage) +
                      ", of which this rank works out sizes only (on the meta device)");
    throw;
  }
}

}  // namespace accelerate::parallel::pipeline
