#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "residency/chain.hpp"
#include "residency/deferred/draws.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency::deferred {

/// The handler of the chain's link *record*, while a scope is open or a deferred tensor exists in this process.
Handler& recorder();

/// The operators on deferred storages, in the order of the program, and how to run them.
///
/// A *node* is a storage, a *record* an operator that made one or wrote into one. Arguments are kept as node plus sizes
/// and strides, so that views need no records and a write through any view reaches its storage. The tape lives as long
/// as one of its storages does. Its records never change: a value is worked out by doing again what leads to
/// it, as often as asked for. Thread-safe.
class Tape : public std::enable_shared_from_this<Tape> {
 public:
  /// A storage that begins with the operator about to be recorded; marks it. `device`: where eager construction would
  /// put it.
  void begin_node(const at::Tensor& fresh, const at::Device& device);
  void forget(size_t node);

  /// Writes down an operator: `arguments` as it was called with, `results` as it gave them (deferred ones made since
  /// the last record belong to it).
  size_t record(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                c10::ArrayRef<c10::IValue> results);
  /// Carries out the last record, with the values its arguments have by now. It stays on the tape only if it changed
  /// nodes or drew numbers.
  std::vector<c10::IValue> carry_out_last();

  /// The node's bytes as of now, fresh, on `device` if given.
  at::Storage value(size_t node, const std::optional<at::Device>& device = {});
  /// The same, kept for all tensors of the node. Later calls return it.
  at::Storage materialize(size_t node, const std::optional<at::Device>& device = {});
  /// Kept from now on instead of what the tape says.
  void replace(size_t node, at::Storage real);
  /// The storage that materialize() or replace() kept; empty before.
  std::optional<at::Storage> kept(size_t node) const;
  /// Somebody else has the values and looks after them.
  void hand_over(size_t node);
  /// Storage for the node, not filled.
  at::Storage allocate(size_t node) const;
  at::Device device(size_t node) const;
  size_t bytes(size_t node) const;
  /// The order in which values are cheapest to ask for.
  size_t last_write(size_t node) const;

  /// Puts the generators where eager construction would have left them, where nothing drew meanwhile. With
  /// `all_of_them` first draws what nobody asked for, if no deferred storage is left.
  void advance_generators(bool all_of_them);

 private:
  struct Node {
    std::vector<size_t> writers;  ///< ascending; the first makes it
    size_t bytes = 0;             ///< the most that its storage ever had
    at::Device device = at::kCPU;
    at::Storage stub;  ///< stands for it in records
    at::Storage real;
    bool is_real = false, handed_over = false, alive = true;
  };
  /// How a record uses a node.
  struct Use {
    size_t node;
    bool reads = false;  ///< looks at what others left there
    bool writes = false;
    bool overwrites = false;  ///< with nothing left of what was there
  };
  struct External {
    at::Tensor tensor;
    uint32_t version;
  };
  struct Record {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< deferred tensors are stubs
    std::vector<External> externals;
    /// Place among the result's tensors, stub of the node that begins there.
    std::vector<std::pair<size_t, at::Tensor>> results;
    std::vector<Use> uses;
    at::ScalarType default_dtype;
    std::optional<Draw> draw;
  };
  using Values = std::unordered_map<size_t, at::Storage>;
  using Plan = std::map<size_t, bool>;  ///< records, true: only for the numbers it draws

  const Node* node_of_stub(const at::Tensor& tensor, size_t* index) const ACCELERATE_REQUIRES(mutex_);
  Use& use_of(Record& record, size_t node) const;
  at::Device device_of(const Record& record) const ACCELERATE_REQUIRES(mutex_);
  void plan_value(size_t node, size_t before, std::vector<std::pair<size_t, bool>>& todo) const
      ACCELERATE_REQUIRES(mutex_);
  Plan plan(std::vector<std::pair<size_t, bool>> todo) const ACCELERATE_REQUIRES(mutex_);
  std::vector<c10::IValue> run(const Plan& plan, Values& values, std::optional<size_t> goal)
      ACCELERATE_REQUIRES(mutex_);
  std::vector<c10::IValue> run(size_t index, bool for_numbers, Values& values) ACCELERATE_REQUIRES(mutex_);
  at::Storage fitting(const at::Tensor& result, const at::Tensor& stub, const Node& node,
                      c10::ArrayRef<c10::IValue> arguments) const;

  const ProcessHandler recorded_{Link::record, recorder()};
  /// Recursive: values that go away while one is worked out may belong to storages that end.
  mutable RecursiveMutex mutex_;
  std::vector<Node> nodes_ ACCELERATE_GUARDED_BY(mutex_);
  std::vector<Record> records_ ACCELERATE_GUARDED_BY(mutex_);
  std::vector<size_t> begun_ ACCELERATE_GUARDED_BY(mutex_);  ///< nodes that wait for their record
  std::unordered_map<const c10::StorageImpl*, size_t> stubs_ ACCELERATE_GUARDED_BY(mutex_);
  Draws draws_ ACCELERATE_GUARDED_BY(mutex_);
};

}  // namespace accelerate::residency::deferred
