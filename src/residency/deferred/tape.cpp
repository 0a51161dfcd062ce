#include "residency/deferred/tape.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "residency/deferred/plain.hpp"
#include "residency/deferred/storage.hpp"
#include "residency/operator_facts.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency::deferred {
namespace {

/// They leave nothing of what was in their first argument. So what an initialiser replaces need not be worked out, only
/// its numbers drawn.
const std::unordered_set<std::string_view> kOverwrite = {
    "aten::normal_",    "aten::uniform_",     "aten::zero_",       "aten::fill_",   "aten::copy_",     "aten::random_",
    "aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_"};

/// External tensors up to this size are copied when they are recorded: index tensors of loops, which change before the
/// tape is replayed.
constexpr size_t kCopyBytes = 4096;

at::Storage byte_storage(size_t bytes, const at::Device& device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

at::Storage copy_to(const at::Storage& storage, const at::Device& device) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  const auto view = [&](const at::Storage& of) {
    return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(of.device())).set_(of, 0, {bytes}, {1});
  };
  const at::Storage result = byte_storage(storage.nbytes(), device);
  view(result).copy_(view(storage));
  return result;
}

class DefaultDtype {
 public:
  explicit DefaultDtype(at::ScalarType dtype) : before_(c10::get_default_dtype()) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;
  ~DefaultDtype() { c10::set_default_dtype(before_); }

 private:
  caffe2::TypeMeta before_;
};

at::Generator default_generator(const at::Device& device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator() : at::globalContext().defaultGenerator(device);
}

}  // namespace

// ---- Writing down

void Tape::begin_node(const at::Tensor& fresh, const at::Device& device) {
  const RecursiveMutexLock lock(mutex_);
  const size_t bytes = fresh.storage().nbytes();
  Node node;
  node.bytes = bytes;
  node.device = device;
  node.stub = at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes), at::DataPtr(nullptr, at::Device(at::kMeta)),
      /*allocator=*/nullptr, /*resizable=*/false));
  stubs_.emplace(node.stub.unsafeGetStorageImpl(), nodes_.size());
  begun_.push_back(nodes_.size());
  mark(fresh, shared_from_this(), nodes_.size());
  nodes_.push_back(std::move(node));
}

void Tape::forget(size_t node) {
  at::Storage real;  // freed outside of the lock
  const RecursiveMutexLock lock(mutex_);
  nodes_[node].alive = false;
  real = std::move(nodes_[node].real);
  nodes_[node].real = {};
}

Tape::Use& Tape::use_of(Record& record, size_t node) const {
  for (Use& use : record.uses)
    if (use.node == node) return use;
  return record.uses.emplace_back(Use{.node = node});
}

const Tape::Node* Tape::node_of_stub(const at::Tensor& tensor, size_t* index) const {
  if (!tensor.has_storage()) return nullptr;
  const auto found = stubs_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == stubs_.end()) return nullptr;
  *index = found->second;
  return &nodes_[found->second];
}

at::Device Tape::device_of(const Record& record) const {
  return record.uses.empty() ? at::Device(at::kCPU) : nodes_[record.uses.front().node].device;
}

size_t Tape::record(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                    c10::ArrayRef<c10::IValue> results) {
  const RecursiveMutexLock lock(mutex_);
  Plain plain;
  const auto& schema = op.schema();
  const OperatorFacts& facts = facts_of(schema);
  const size_t index = records_.size();
  Record record{.op = op,
                .arguments = {},
                .externals = {},
                .results = {},
                .uses = {},
                .default_dtype = c10::get_default_dtype_as_scalartype(),
                .draw = {}};
  at::Generator generator;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = facts.writes_to(i);
    if (arguments[i].isGenerator()) generator = arguments[i].toGenerator();
    record.arguments.push_back(arguments[i]);
    map_tensors(record.arguments.back(), [&](const at::Tensor& tensor) {
      mutex_.assert_held();
      if (const Owner* owner = owner_of(tensor)) {
        Node& node = nodes_[owner->node];
        node.bytes = std::max(node.bytes, tensor.storage().nbytes());
        Use& use = use_of(record, owner->node);
        const bool all = tensor.is_non_overlapping_and_dense() && tensor.storage_offset() == 0 &&
                         static_cast<size_t>(tensor.numel()) * tensor.element_size() == node.bytes;
        if (!written) use.reads = true;
        else if (i == 0 && all && kOverwrite.contains(schema.name())) use.writes = use.overwrites = true;
        else use.writes = true;
        return with_storage(tensor, node.stub);
      }
      const bool small =
          !written && tensor.layout() == at::kStrided && tensor.nbytes() <= kCopyBytes && !tensor.is_meta();
      at::Tensor external = small ? tensor.detach().clone() : tensor.detach();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) external.unsafeGetTensorImpl()->set_wrapped_number(true);
      record.externals.push_back({external, external.is_inference() ? 0 : static_cast<uint32_t>(external._version())});
      return external;
    });
  }
  size_t place = 0;
  for (const auto& result : results) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      mutex_.assert_held();
      const Owner* owner = owner_of(tensor);
      if (owner && std::find(begun_.begin(), begun_.end(), owner->node) != begun_.end())
        record.results.emplace_back(place, with_storage(tensor, nodes_[owner->node].stub));
      ++place;
    });
  }
  for (const size_t node : begun_) nodes_[node].writers.push_back(index);
  for (const Use& use : record.uses)
    if (use.writes) nodes_[use.node].writers.push_back(index);
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Device device = device_of(record);
    if (facts.device && arguments[*facts.device].isDevice() && !arguments[*facts.device].toDevice().is_meta())
      device = arguments[*facts.device].toDevice();
    for (const External& external : record.externals)
      if (record.uses.empty() && !external.tensor.is_meta()) device = external.tensor.device();
    record.draw = draws_.add(generator.defined() ? generator : default_generator(device), index);
  }
  begun_.clear();
  records_.push_back(std::move(record));
  return index;
}

// ---- Doing it

/// Asks for what the node was before record `before`: the last one that wrote there; that one asks further.
void Tape::plan_value(size_t node, size_t before, std::vector<std::pair<size_t, bool>>& todo) const {
  const auto& writers = nodes_[node].writers;
  const auto after = std::lower_bound(writers.begin(), writers.end(), before);
  if (after != writers.begin()) todo.emplace_back(*std::prev(after), false);
}

Tape::Plan Tape::plan(std::vector<std::pair<size_t, bool>> todo) const {
  Plan plan;
  while (!todo.empty()) {
    const auto [index, for_numbers] = todo.back();
    todo.pop_back();
    const auto [known, added] = plan.emplace(index, for_numbers);
    if (!added && (for_numbers || !known->second)) continue;
    known->second = for_numbers;
    const Record& record = records_[index];
    for (const Use& use : record.uses)
      if (use.reads || (!for_numbers && use.writes && !use.overwrites)) plan_value(use.node, index, todo);
    if (record.draw && !draws_.ready(*record.draw)) todo.emplace_back(draws_.previous(*record.draw), true);
  }
  return plan;
}

std::vector<c10::IValue> Tape::run(const Plan& plan, Values& values, std::optional<size_t> goal) {
  std::unordered_map<size_t, size_t> last_use;
  for (const auto& [index, for_numbers] : plan) {
    for (const Use& use : records_[index].uses) last_use[use.node] = index;
    for (const auto& [place, stub] : records_[index].results) {
      size_t node = 0;
      if (node_of_stub(stub, &node)) last_use[node] = index;
    }
  }
  std::vector<c10::IValue> results;
  for (const auto& [index, for_numbers] : plan) {
    results = run(index, for_numbers, values);
    for (auto value = values.begin(); value != values.end();) {
      if (value->first != goal && last_use[value->first] <= index) value = values.erase(value);
      else ++value;
    }
  }
  return results;
}

std::vector<c10::IValue> Tape::run(size_t index, bool for_numbers, Values& values) {
  const Record& record = records_[index];
  for (const auto& [tensor, version] : record.externals) {
    if (!tensor.is_inference() && static_cast<uint32_t>(tensor._version()) != version)
      raise<ConfigError>(
          "materialize: found a tensor {} changed that the recorded operator '{}' reads, expected what it was then; it "
          "was written to after init_empty_weights() had recorded its use. Give the initialiser a clone()",
          c10::str(tensor.sizes()), record.op.schema().name());
  }
  Values scratch;
  for (const Use& use : record.uses) {
    if (!use.writes) continue;
    if (for_numbers)
      scratch[use.node] = use.reads ? copy_to(values.at(use.node), nodes_[use.node].device) : allocate(use.node);
    else if (use.overwrites && !use.reads) values.try_emplace(use.node, allocate(use.node));
  }
  const OperatorFacts& facts = facts_of(record.op.schema());
  torch::jit::Stack stack;
  for (size_t i = 0; i < record.arguments.size(); ++i) {
    c10::IValue argument = record.arguments[i];
    map_tensors(argument, [&](const at::Tensor& tensor) {
      mutex_.assert_held();
      size_t node = 0;
      if (!node_of_stub(tensor, &node)) return tensor;
      const auto own = scratch.find(node);
      return with_storage(tensor, own != scratch.end() ? own->second : values.at(node));
    });
    // A module that takes the options of a deferred tensor asks for the meta device.
    if (i == facts.device && argument.isDevice() && argument.toDevice().is_meta()) argument = device_of(record);
    stack.push_back(std::move(argument));
  }
  const std::vector<c10::IValue> arguments = stack;
  const auto call = [&] {
    const DefaultDtype dtype(record.default_dtype);
    record.op.callBoxed(stack);
  };
  if (record.draw) draws_.at(*record.draw, call);
  else call();
  if (for_numbers || record.results.empty()) return stack;
  std::vector<at::Tensor> results;
  for (const auto& item : stack) for_each_tensor(item, [&](const at::Tensor& tensor) { results.push_back(tensor); });
  for (const auto& [place, stub] : record.results) {
    size_t node = 0;
    if (const Node* begun = node_of_stub(stub, &node))
      values[node] = fitting(results.at(place), stub, *begun, arguments);
  }
  return stack;
}

/// The storage of a result, as the recorded meta tensor has laid it out.
at::Storage Tape::fitting(const at::Tensor& result, const at::Tensor& stub, const Node& node,
                          c10::ArrayRef<c10::IValue> arguments) const {
  if (result.layout() != at::kStrided || result.sizes() != stub.sizes() || result.scalar_type() != stub.scalar_type())
    raise<InternalError>("materialize: found a result {}, expected {} as its operator said for meta tensors",
                         c10::str(result.sizes(), " ", result.dtype()), c10::str(stub.sizes(), " ", stub.dtype()));
  bool shared = false;
  for (const auto& argument : arguments)
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      shared |= tensor.has_storage() && tensor.storage().is_alias_of(result.storage());
    });
  if (!shared && result.strides() == stub.strides() && result.storage_offset() == stub.storage_offset() &&
      result.storage().nbytes() >= node.bytes && result.is_conj() == stub.is_conj() && result.is_neg() == stub.is_neg())
    return result.storage();
  const at::Storage storage = byte_storage(node.bytes, result.device());
  with_storage(stub, storage).copy_(result);
  return storage;
}

std::vector<c10::IValue> Tape::carry_out_last() {
  const RecursiveMutexLock lock(mutex_);
  Plain plain;
  const size_t index = records_.size() - 1;
  Values values;
  const auto drop_if_useless = [&] {
    mutex_.assert_held();
    const bool writes = std::any_of(records_[index].uses.begin(), records_[index].uses.end(),
                                    [](const Use& use) { return use.writes; });
    if (!writes && !records_[index].draw) records_.pop_back();
  };
  try {
    auto results = run(plan({{index, false}}), values, {});
    drop_if_useless();
    return results;
  } catch (...) {
    drop_if_useless();
    throw;
  }
}

at::Storage Tape::allocate(size_t node) const {
  const RecursiveMutexLock lock(mutex_);
  return byte_storage(nodes_[node].bytes, nodes_[node].device);
}

at::Storage Tape::value(size_t node, const std::optional<at::Device>& device) {
  const RecursiveMutexLock lock(mutex_);
  Plain plain;
  std::vector<std::pair<size_t, bool>> todo;
  plan_value(node, records_.size(), todo);
  Values values;
  run(plan(std::move(todo)), values, node);
  at::Storage result = std::move(values.at(node));
  values.clear();
  return device && *device != result.device() ? copy_to(result, *device) : result;
}

at::Storage Tape::materialize(size_t node, const std::optional<at::Device>& device) {
  const RecursiveMutexLock lock(mutex_);
  if (!nodes_[node].is_real) replace(node, value(node, device));
  return nodes_[node].real;
}

void Tape::replace(size_t node, at::Storage real) {
  const RecursiveMutexLock lock(mutex_);
  nodes_[node].real = std::move(real);
  nodes_[node].is_real = true;
}

std::optional<at::Storage> Tape::kept(size_t node) const {
  const RecursiveMutexLock lock(mutex_);
  return nodes_[node].is_real ? std::optional(nodes_[node].real) : std::nullopt;
}

void Tape::hand_over(size_t node) {
  const RecursiveMutexLock lock(mutex_);
  nodes_[node].handed_over = true;
}

at::Device Tape::device(size_t node) const {
  const RecursiveMutexLock lock(mutex_);
  return nodes_[node].device;
}

size_t Tape::bytes(size_t node) const {
  const RecursiveMutexLock lock(mutex_);
  return nodes_[node].bytes;
}

size_t Tape::last_write(size_t node) const {
  const RecursiveMutexLock lock(mutex_);
  return nodes_[node].writers.back();
}

void Tape::advance_generators(bool all_of_them) {
  const RecursiveMutexLock lock(mutex_);
  Plain plain;
  if (all_of_them && std::none_of(nodes_.begin(), nodes_.end(),
                                  [](const Node& node) { return node.alive && !node.is_real && !node.handed_over; })) {
    std::vector<std::pair<size_t, bool>> todo;
    for (const size_t index : draws_.open_ends()) todo.emplace_back(index, true);
    Values values;
    run(plan(std::move(todo)), values, {});
  }
  draws_.advance_generators();
}

}  // namespace accelerate::residency::deferred
