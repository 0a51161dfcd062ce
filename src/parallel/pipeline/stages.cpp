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
#include "residency/deferred/tape.hpp"
#include "residency/operator_call.hpp"

namespace accelerate::parallel::pipeline {
namespace {

using residency::deferred::for_each_tensor;
using residency::deferred::map_tensors;

bool contains(const std::vector<int64_t>& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
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

struct Stages::Piece {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the address from being used again
  int64_t stage = 0;
  std::vector<int64_t> holders;
  std::optional<size_t> parameter;
  int64_t version = 0;  ///< how often it was written to
  std::vector<Copy> copies;
  at::Storage moved;  ///< the bytes here, where the program's tensors have none
};

/// One operator call, as the schema and the pieces describe it.
struct Stages::Call : residency::OperatorCall {
  int64_t stage = -1;
  std::vector<int64_t> holders;  ///< where all arguments are

  using OperatorCall::OperatorCall;

  std::string full_name() const {
    return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  }

  /// Sizes and strides of the first argument are all that it looks at, and of which it makes another view.
  bool is_view() const {
    if (facts.needs_bytes) return false;
    for (const auto& result : schema.returns())
      if (facts.makes_tensors && !result.alias_info()) return false;
    return true;
  }
  /// What the program does next, or the size of the result, depends on values that only one rank has.
  bool depends_on_values(const std::function<bool(const at::Tensor&)>& is_staged) const {
    if (op.hasTag(at::Tag::data_dependent_output) || name() == "aten::is_nonzero") return true;
    if (!op.hasTag(at::Tag::dynamic_output_shape) && name() != "aten::index") return false;
    if (name() != "aten::index") return true;
    bool mask = false;
    for_each_tensor(arguments[1], [&](const at::Tensor& index) { mask |= is_mask(index) && is_staged(index); });
    return mask;
  }
  void put_back(torch::jit::Stack* stack) const {
    std::copy(arguments.begin(), arguments.end(), stack->end() - static_cast<std::ptrdiff_t>(arguments.size()));
  }
};

Stages::Stages(const std::vector<StagedParameter>& parameters, Options options) : options_(std::move(options)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* storage = storage_of(parameters[i].tensor);
    if (!storage || pieces_.contains(storage)) continue;
    begin_piece(parameters[i].tensor, parameters[i].stage, parameters[i].holders);
    pieces_[storage]->parameter = i;
  }
}

Stages::~Stages() = default;

Stages::Piece* Stages::find(const at::Tensor& tensor) const {
  const auto found = pieces_.find(storage_of(tensor));
  return found == pieces_.end() ? nullptr : found->second.get();
}

void Stages::begin_piece(const at::Tensor& tensor, int64_t stage, const std::vector<int64_t>& holders) {
  if (pieces_.size() >= prune_at_) {
    prune();
    prune_at_ = 2 * pieces_.size() + 4096;
  }
  auto piece = std::make_shared<Piece>(Piece{.storage = tensor.storage().getWeakStorageImpl(),
                                             .stage = stage,
                                             .holders = holders,
                                             .parameter = {},
                                             .version = 0,
                                             .copies = {},
                                             .moved = {}});
  pieces_[storage_of(tensor)] = std::move(piece);
}

void Stages::prune() {
  std::erase_if(pieces_, [](const auto& entry) { return entry.second->storage.expired(); });
}

int64_t Stages::stage_of(const at::Tensor& tensor) const {
  const Piece* piece = find(tensor);
  return piece ? piece->stage : -1;
}

at::Tensor Stages::here(const at::Tensor& tensor, const Piece& piece) const {
  return piece.moved && tensor.is_meta() ? over(piece.moved, tensor) : tensor;
}

at::Tensor Stages::bring(const at::Tensor& tensor, int64_t to, const std::string& label) {
  Piece* piece = find(tensor);
  if (!piece) return tensor;
  if (!contains(piece->holders, to)) return cross(tensor, *piece, to, label);
  return options_.own == to ? here(tensor, *piece) : at::Tensor();
}

at::Tensor Stages::cross(const at::Tensor& tensor, Piece& piece, int64_t to, const std::string& label) {
  for (const Copy& copy : piece.copies)
    if (copy.is_of(tensor, piece.version, to)) return copy.values;
  std::erase_if(piece.copies, [&](const Copy& copy) { return copy.version != piece.version; });
  if (piece.parameter && options_.on_lack) options_.on_lack(*piece.parameter, to);
  Copy copy{.version = piece.version,
            .stage = to,
            .offset = tensor.storage_offset(),
            .sizes = tensor.sizes().vec(),
            .strides = tensor.strides().vec(),
            .dtype = tensor.scalar_type(),
            .values = {}};
  if (options_.carrier) {
    if (options_.own == piece.stage) {
      options_.carrier->send(here(tensor, piece), to, label);
    } else if (options_.own == to) {
      prune();  // the memory of copies that are not needed any more
      copy.values = options_.carrier->receive(tensor, piece.stage, label);
    } else {
      options_.carrier->skip();
    }
  }
  piece.copies.push_back(copy);
  return copy.values;
}

/// All views of a storage change when one is written to, so all of it goes where that happens.
void Stages::move(const at::Tensor& tensor, Piece& piece, int64_t to, const std::string& label) {
  if (options_.carrier) {
    if (options_.own == piece.stage) {
      options_.carrier->send(bytes_of(tensor.is_meta() ? piece.moved : tensor.storage()), to, label);
    } else if (options_.own == to) {
      const at::Tensor bytes = options_.carrier->receive(bytes_of(tensor.storage()), piece.stage, label);
      if (tensor.is_meta()) piece.moved = bytes.storage();
      else bytes_of(tensor.storage()).copy_(bytes);
    } else {
      options_.carrier->skip();
    }
  }
  piece.stage = to;
  piece.copies.clear();
}

void Stages::run(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::function_ref<void()> carry_out) {
  Call call(op, *stack);
  if (call.is_view()) return carry_out();  // the piece goes on, wherever its bytes are
  // A tensor that is made like another one looks at that one's sizes only.
  bool first = true, any_writes = false;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    any_writes |= call.writes(i);
    for_each_tensor(call.arguments[i], [&](const at::Tensor& tensor) {
      const Piece* piece = find(tensor);
      if (!piece || (!call.facts.needs_bytes && !first)) return;
      first = false;
      if (piece->parameter && options_.on_touch) options_.on_touch(*piece->parameter);
      if (call.stage < 0) call.holders = piece->holders;
      else std::erase_if(call.holders, [&](int64_t holder) { return !contains(piece->holders, holder); });
      call.stage = std::max(call.stage, piece->stage);
    });
  }
  if (call.stage < 0) {
    ++everywhere_;
    // Made on the device of a tensor that has no values here, it has its own all the same.
    if (call.device && call.arguments[*call.device].isDevice() && call.arguments[*call.device].toDevice().is_meta()) {
      call.arguments[*call.device] = options_.device;
      call.put_back(stack);
    }
    return carry_out();
  }
  if (call.depends_on_values([&](const at::Tensor& tensor) { return find(tensor) != nullptr; }))
    throw AgreedError("pipeline: operator " + call.full_name() + " asks for values of a tensor that stage " +
                      std::to_string(call.stage) +
                      " computes, expected only operators whose results have known sizes there; all ranks run the "
                      "whole forward, and only one of them has these values, so the program can't depend on "
                      "them (item(), a comparison in an if, nonzero(), a mask as an index). Compute it from the "
                      "inputs, which all ranks have, or leave it out of the forward");
  if (!contains(call.holders, call.stage)) call.holders = {call.stage};
  const bool mine = contains(call.holders, options_.own);

  // A mask that everybody has is positions that everybody has; without its values nobody could tell how many.
  if (call.name() == "aten::index") {
    c10::List<std::optional<at::Tensor>> indices;
    for (const auto& item : call.arguments[1].toListRef()) {
      if (!item.isTensor() || !is_mask(item.toTensor()))
        indices.push_back(item.isTensor() ? std::optional(item.toTensor()) : std::nullopt);
      else
        for (const at::Tensor& along : item.toTensor().nonzero().unbind(1)) indices.push_back(along);
    }
    call.arguments[1] = indices;
  }

  const std::string label = call.full_name();
  const std::vector<c10::IValue> originals = call.arguments;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    call.arguments[i] = map_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
      Piece* piece = find(tensor);
      if (!piece || !call.facts.needs_bytes) return tensor;
      if (contains(piece->holders, call.stage)) return mine ? here(tensor, *piece) : tensor;
      if (!call.writes(i)) {
        const at::Tensor copy = cross(tensor, *piece, call.stage, label);
        return mine && copy.defined() ? copy : tensor;
      }
      move(tensor, *piece, call.stage, label);
      piece->holders = call.holders;
      return mine ? here(tensor, *piece) : tensor;
    });
    if (!call.writes(i)) continue;
    for_each_tensor(originals[i], [&](const at::Tensor& tensor) {
      if (!find(tensor)) begin_piece(tensor, call.stage, call.holders);
      Piece& piece = *find(tensor);
      ++piece.version;
      piece.holders = call.holders;
      if (mine && options_.carrier) options_.carrier->before_write(*storage_of(tensor));
    });
  }

  if (mine) {
    ++operators_;
    if (call.device && call.arguments[*call.device].isDevice() && call.arguments[*call.device].toDevice().is_meta())
      call.arguments[*call.device] = options_.device;
    if (!call.facts.needs_bytes && call.device && call.arguments[*call.device].isNone())
      call.arguments[*call.device] = options_.device;  // "like" a tensor whose values have moved
    call.put_back(stack);
    carry_out();
  } else {
    ++skipped_;
    run_on_sizes(call, stack, carry_out);
  }

  const size_t results = call.schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& result = *(stack->end() - static_cast<std::ptrdiff_t>(results - i));
    if (const auto argument = call.argument_of(i)) {
      result = originals[*argument];
      continue;
    }
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!tensor.has_storage())
        throw ConfigError("pipeline: operator " + label + " gives a tensor of layout " + c10::str(tensor.layout()) +
                          ", expected a strided one; a pipeline can't send others. Convert it with to_dense()");
      if (!find(tensor)) begin_piece(tensor, call.stage, call.holders);
    });
  }
}

void Stages::run_on_sizes(Call& call, torch::jit::Stack* stack, c10::function_ref<void()> carry_out) {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (i == call.device && !call.arguments[i].isNone()) call.arguments[i] = at::Device(at::kMeta);
    else if (call.schema.arguments()[i].name() == "pin_memory") call.arguments[i] = c10::IValue();
    else
      call.arguments[i] = map_tensors(call.arguments[i], [](const at::Tensor& tensor) {
        return !tensor.defined() || (tensor.is_meta() && !residency::deferred::owner_of(tensor)) ? tensor
                                                                                                 : sizes_of(tensor);
      });
  }
  if (auto known = sizes_only_result(call.name(), call.arguments)) {
    torch::jit::drop(*stack, call.arguments.size());
    stack->emplace_back(*std::move(known));
    return;
  }
  call.put_back(stack);
  try {
    carry_out();
  } catch (const c10::NotImplementedError&) {
    if (call.schema.returns().empty() || !call.only_returns_arguments())
      throw ConfigError(
          "pipeline: operator " + call.full_name() +
          " has no kernel that works out sizes without values (the Meta key), which ranks of other stages than " +
          std::to_string(call.stage) +
          " need, expected one; LibTorch has some of them only in Python. Register one with TORCH_LIBRARY_IMPL(aten, "
          "Meta, m), or write the forward without the operator");
    torch::jit::drop(*stack, call.arguments.size());  // what gives back its argument has no sizes to work out
    for (size_t i = 0; i < call.schema.returns().size(); ++i) stack->push_back(call.arguments[*call.argument_of(i)]);
  } catch (c10::Error& error) {
    error.add_context("in operator " + call.full_name() + " of stage " + std::to_string(call.stage) +
                      ", of which this rank works out sizes only (on the meta device)");
    throw;
  }
}

}  // namespace accelerate::parallel::pipeline
