#include "run_state/state_dict.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>

#include "accelerate/comm.hpp"
#include "utils/raise.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::distributed_checkpoint {
namespace {

template <class... Fs> struct Overloaded : Fs... { using Fs::operator()...; };
template <class... Fs> Overloaded(Fs...) -> Overloaded<Fs...>;

constexpr const char* kName[] = {"plain data", "a tensor", "a sharded tensor", "bytes", "a list", "a dict"};

[[noreturn]] void throw_other_type(const c10::IValue& value, const char* expected) {
  raise<ConfigError>("state dict: found {}, expected {}", value.tagKind(), expected);
}

}  // namespace

Value::Value(const c10::IValue& value) : kind_(value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) kind_ = value.toTensor();
    else kind_ = c10::IValue();
  } else if (value.isList()) {
    List list;
    for (const c10::IValue& item : value.toListRef()) list.emplace_back(item);
    kind_ = std::move(list);
  } else if (value.isGenericDict()) {
    StateDict dict;
    for (const auto& entry : value.toGenericDict()) {
      if (!entry.key().isString() && !entry.key().isInt()) throw_other_type(entry.key(), "keys that are text or int");
      dict.emplace(entry.key().isInt() ? std::to_string(entry.key().toInt()) : entry.key().toStringRef(),
                   entry.value());
    }
    kind_ = std::move(dict);
  }
}

template <> bool Value::to<bool>() const {
  const auto& value = as<c10::IValue>();
  if (!value.isBool()) throw_other_type(value, "a bool");
  return value.toBool();
}
template <> int64_t Value::to<int64_t>() const {
  const auto& value = as<c10::IValue>();
  if (!value.isInt()) throw_other_type(value, "a whole number");
  return value.toInt();
}
template <> double Value::to<double>() const {
  const auto& value = as<c10::IValue>();
  if (!value.isInt() && !value.isDouble()) throw_other_type(value, "a number");
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}
template <> std::string Value::to<std::string>() const {
  const auto& value = as<c10::IValue>();
  if (!value.isString()) throw_other_type(value, "text");
  return value.toStringRef();
}

c10::IValue Value::to_ivalue() const {
  return std::visit(
      Overloaded{[](const c10::IValue& value) { return value; },
                 [](const at::Tensor& tensor) { return c10::IValue(tensor); },
                 [](const Bytes& bytes) { return c10::IValue(bytes.bytes); },
                 [](const List& list) {
                   c10::impl::GenericList result(c10::AnyType::get());
                   for (const auto& item : list) result.push_back(item.to_ivalue());
                   return c10::IValue(result);
                 },
                 [](const StateDict& dict) {
                   c10::impl::GenericDict result(c10::StringType::get(), c10::AnyType::get());
                   for (const auto& [key, value] : dict) result.insert(key, value.to_ivalue());
                   return c10::IValue(result);
                 },
                 [](const ShardedTensor& tensor) -> c10::IValue {
                   raise<ConfigError>(
                       "state dict: found a sharded tensor of size {}, expected whole ones; get the state with "
                       "full_state_dict = true",
                       tensor.sizes);
                 }},
      kind_);
}

void Value::throw_is_not(size_t kind) const {
  raise<ConfigError>("state dict: found {}, expected {}", run_state::describe(*this), kName[kind]);
}

}  // namespace accelerate::distributed_checkpoint

namespace accelerate::run_state {

using distributed_checkpoint::Bytes;
using ValueList = distributed_checkpoint::List;
using formats::DcpPath;

std::string describe(const Value& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value.kind()))
    return fmt::format("a tensor of size {}", tensor->sizes());
  if (const auto* tensor = std::get_if<ShardedTensor>(&value.kind()))
    return fmt::format("a sharded tensor of size {}", tensor->sizes);
  if (const auto* plain = std::get_if<c10::IValue>(&value.kind())) return plain->tagKind();
  return distributed_checkpoint::kName[value.kind().index()];
}

namespace {

/// Whether a list is saved item by item.
bool is_walked(const ValueList& list) {
  return std::any_of(list.begin(), list.end(), [](const Value& item) {
    if (const auto* inner = std::get_if<ValueList>(&item.kind())) return is_walked(*inner);
    return !std::holds_alternative<c10::IValue>(item.kind()) && !std::holds_alternative<Bytes>(item.kind());
  });
}

bool is_plain(const c10::IValue& value) {
  const auto all = [](const auto& items) { return std::all_of(items.begin(), items.end(), is_plain); };
  return value.isNone() || value.isBool() || value.isInt() || value.isDouble() || value.isString() ||
         (value.isTuple() && all(value.toTupleRef().elements()));
}

void check_plain(const std::string& name, const Value& value) {
  if (const auto* list = std::get_if<ValueList>(&value.kind())) {
    for (const auto& item : *list) {
      if (std::holds_alternative<Bytes>(item.kind()))
        raise<ConfigError>(
            "state dict: '{}' is a list with bytes in it, expected lists of numbers and text; put the bytes into a "
            "dict, or into uint8 tensors",
            name);
      check_plain(name, item);
    }
  } else if (const auto* plain = std::get_if<c10::IValue>(&value.kind()); plain && !is_plain(*plain)) {
    raise<ConfigError>(
        "state dict: '{}' is or holds {}, expected tensors, numbers, text, bytes, None, and dicts, lists and tuples "
        "(these without tensors) of them",
        name, plain->tagKind());
  }
}

void collect(DcpPath& path, const Value& value, std::vector<Leaf>& leaves) {
  const auto walk = [&](auto step, const Value& child) {
    path.emplace_back(std::move(step));
    collect(path, child, leaves);
    path.pop_back();
  };
  if (const auto* dict = std::get_if<StateDict>(&value.kind())) {
    for (const auto& [key, child] : *dict) walk(key, child);
  } else if (const auto* list = std::get_if<ValueList>(&value.kind()); list && is_walked(*list)) {
    for (size_t i = 0; i < list->size(); ++i) walk(static_cast<int64_t>(i), (*list)[i]);
  } else {
    auto name = formats::dcp_name(path);
    check_plain(name, value);
    leaves.push_back({path, std::move(name), &value});
  }
}

}  // namespace

std::vector<Leaf> leaves_of(const StateDict& state) {
  std::vector<Leaf> leaves;
  DcpPath path;
  for (const auto& [key, value] : state) {
    path = {key};
    collect(path, value, leaves);
  }
  std::set<std::string> names;
  for (const auto& leaf : leaves)
    if (!names.insert(leaf.name).second)
      raise<ConfigError>(
          "state dict: two values have the name '{}' when the keys that lead to them are joined by dots, expected one; "
          "rename a key",
          leaf.name);
  return leaves;
}

Value& value_at(StateDict& state, const DcpPath& path) {
  auto* value = &state.at(std::get<std::string>(path.front()));
  for (size_t i = 1; i < path.size(); ++i) {
    if (const auto* key = std::get_if<std::string>(&path[i])) value = &value->as<StateDict>().at(*key);
    else value = &value->as<ValueList>().at(static_cast<size_t>(std::get<int64_t>(path[i])));
  }
  return *value;
}

formats::DcpShards rule_of(const SentLeaf& leaf, int64_t replica) {
  return {.begin = leaf.equal.begin,
          .each = leaf.equal.each,
          .members = leaf.equal.members,
          .step = leaf.equal.member_step,
          .first = replica * leaf.equal.replica_step};
}

namespace {

/// Others will go by the rule alone, and never hear of the parts.
void check_rule(const SentLeaf& sent, const ShardedTensor& tensor) {
  const auto fail = [&](const std::string& what) {
    raise<ConfigError>(
        "saving a distributed checkpoint: '{}' says that ranks hold equal pieces of it, and {}; leave "
        "ShardedTensor::equal unset where parts follow no such rule",
        sent.name, what);
  };
  const auto numel = formats::checked_numel(sent.sizes);
  if (numel == 0) return;  // there is nothing to share out
  // All replicas' ranks, since each may be the one that saves it.
  if (sent.equal.replica_step < 1) fail(fmt::format("has the step {} of replicas", sent.equal.replica_step));
  for (const int64_t replica : {int64_t{0}, sent.replicas - 1})
    if (const auto wrong = problem_of(rule_of(sent, replica), sent.sizes, comm::world_size()); !wrong.empty())
      fail("it " + wrong);
  const auto rule = rule_of(sent, tensor.replica);
  const auto member = rule.member_of(comm::rank());
  std::vector<formats::DcpBox> expected, found;
  if (member) {
    const auto [from, to] = rule.range_of(*member, *numel);
    expected = formats::boxes_of_range(sent.sizes, from, to);
  }
  for (const auto& part : tensor.parts)
    if (part.values.numel() > 0) found.push_back({part.offsets, part.values.sizes().vec()});
  std::sort(expected.begin(), expected.end()), std::sort(found.begin(), found.end());
  if (expected == found) return;
  const auto text = [](const std::vector<formats::DcpBox>& boxes) {
    const auto texts = strings_of(boxes, [](const formats::DcpBox& box) { return to_string(box); });
    return boxes.empty() ? "nothing" : fmt::format("{}", fmt::join(texts, "; ")).substr(0, 500);
  };
  fail(fmt::format("rank {} has {}, expected {}", comm::rank(), text(found), text(expected)));
}

}  // namespace

SentLeaf as_sent(const Leaf& leaf) {
  SentLeaf sent{.name = leaf.name, .path = {}, .rank = comm::rank(), .sizes = {}};
  for (const auto& step : leaf.path) {
    if (const auto* key = std::get_if<std::string>(&step)) sent.path.push_back({.key = *key});
    else sent.path.push_back({.key = {}, .index = std::get<int64_t>(step)});
  }
  if (const auto* tensor = std::get_if<at::Tensor>(&leaf.value->kind())) {
    sent.is_tensor = true;
    sent.sizes = tensor->sizes().vec();
    sent.dtype = tensor->scalar_type();
  } else if (const auto* sharded = std::get_if<ShardedTensor>(&leaf.value->kind())) {
    sent.is_tensor = sent.is_sharded = true;
    sent.sizes = sharded->sizes;
    sent.dtype = sharded->dtype;
    sent.replicas = sharded->replicas;
    if (sharded->replicas < 1 || sharded->replicas > comm::world_size() || sharded->replica < 0)
      raise<ConfigError>(
          "saving a distributed checkpoint: '{}' says that it is replica {} of {}, expected a number from 0 on, and at "
          "most as many as there are processes, {}",
          leaf.name, sharded->replica, sharded->replicas, comm::world_size());
    if (sharded->equal) {
      sent.follows_rule = true;
      sent.equal = *sharded->equal;
      check_rule(sent, *sharded);
    }
  }
  return sent;
}

DcpPath path_of(const SentLeaf& leaf) {
  DcpPath path;
  for (const auto& step : leaf.path) {
    if (step.index < 0) path.emplace_back(step.key);
    else path.emplace_back(step.index);
  }
  return path;
}

bool SentLeaf::is_like(const SentLeaf& other) const {
  return is_tensor == other.is_tensor && is_sharded == other.is_sharded && sizes == other.sizes && dtype == other.dtype;
}

std::string SentLeaf::text() const {
  if (!is_tensor) return "no tensor";
  return fmt::format("a {}tensor of size {} and dtype {}", is_sharded ? "sharded " : "", sizes, c10::toString(dtype));
}

namespace {

at::Tensor cut(at::Tensor tensor, const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes) {
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    tensor = tensor.narrow(static_cast<int64_t>(dim), offsets[dim], sizes[dim]);
  return tensor;
}

/// `a` from `b`'s first element on.
std::vector<int64_t> relative(std::vector<int64_t> a, const std::vector<int64_t>& b) {
  std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::minus<>());
  return a;
}

void copy_parts(const std::string& name, const ShardedTensor& tensor, const formats::DcpBox& box,
                const at::Tensor& destination) {
  at::NoGradGuard no_grad;
  int64_t missing = destination.numel();
  for (const auto& part : tensor.parts) {
    const auto common = formats::intersect(formats::DcpBox{part.offsets, part.values.sizes().vec()}, box);
    if (!common) continue;
    const auto from = cut(part.values.detach(), relative(common->offsets, part.offsets), common->sizes);
    cut(destination.detach(), relative(common->offsets, box.offsets), common->sizes).copy_(from);
    missing -= from.numel();
  }
  if (missing == 0) return;
  const auto held = strings_of(tensor.parts, [](const auto& part) {
    return to_string(formats::DcpBox{part.offsets, part.values.sizes().vec()});
  });
  raise<CheckpointError>(
      "state dict: of '{}' this rank needs the part with {}, found {}; the state is another model's, or of a model "
      "that is cut in another way. Get the state from this model and load() into it",
      name, to_string(box), held.empty() ? "none" : fmt::format("{}", fmt::join(held, "; ")).substr(0, 500));
}

}  // namespace

checkpointing::StoredTensor stored_in_memory(const std::string& name, const Value& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value.kind()))
    return {.dtype = tensor->scalar_type(),
            .sizes = tensor->sizes().vec(),
            .bytes = std::nullopt,
            .read =
                [tensor = *tensor](const formats::DcpBox& box, const at::Tensor& destination) {
                  destination.copy_(cut(tensor.detach(), box.offsets, box.sizes));
                },
            .read_whole = [tensor = *tensor] { return tensor.detach(); }};
  const auto* sharded = std::get_if<ShardedTensor>(&value.kind());
  if (!sharded) raise<ConfigError>("state dict: found {} at '{}', expected a tensor", describe(value), name);
  return {.dtype = sharded->dtype,
          .sizes = sharded->sizes,
          .bytes = std::nullopt,
          .read = [name, sharded = *sharded](
                      const formats::DcpBox& box,
                      const at::Tensor& destination) { copy_parts(name, sharded, box, destination); },
          .read_whole =
              [name, sharded = *sharded] {
                const at::Tensor whole = at::empty(sharded.sizes, at::TensorOptions().dtype(sharded.dtype));
                copy_parts(name, sharded, formats::whole(sharded.sizes), whole);
                return whole;
              },
          // Copied at once: whether all of it is there shows then, and it may be of the tensors that it goes to.
          .find =
              [name, sharded = *sharded](const formats::DcpBox& box) {
                const at::Tensor part = at::empty(box.sizes, at::TensorOptions().dtype(sharded.dtype));
                copy_parts(name, sharded, box, part);
                return formats::FoundPart{.read = [part](const at::Tensor& to) { to.copy_(part); }};
              }};
}

}  // namespace accelerate::run_state
