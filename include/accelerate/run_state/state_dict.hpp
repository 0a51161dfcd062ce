#pragma once

/// State dicts of your own, as distributed_checkpoint.hpp saves and loads them: nested dicts and lists of tensors,
/// tensors of which each rank holds parts, and plain data.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/held.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::distributed_checkpoint {

/// Python's `bytes`. A std::string is its `str`, which is UTF-8.
struct Bytes {
  std::string bytes;
  friend bool operator==(const Bytes&, const Bytes&) = default;
};

/// A tensor as this rank holds it, in the place of a DTensor: any number of rectangles of it, also none. The rectangles
/// of all ranks together are the whole, without overlap, but for copies.
struct ShardedTensor {
  struct Part {
    std::vector<int64_t> offsets;  ///< indices of its first element in the whole tensor
    at::Tensor values;             ///< of the part's sizes, any device and strides; shared with whoever owns it
  };
  std::vector<int64_t> sizes;  ///< of the whole tensor
  at::ScalarType dtype = at::kFloat;
  std::vector<Part> parts;
  /// So many ranks hold copies of these very parts (hybrid sharding's replicas), of which this is number `replica`:
  /// tensors are shared out among them when they are saved. `replicas` of 1: number 0 saves them.
  int64_t replica = 0, replicas = 1;
  /// The engine of the model whose parameters the parts are: told when they are loaded. Null: nobody needs to be.
  std::shared_ptr<parallel::Engine> engine = nullptr;
  /// The parts are those that this rule gives each rank: then no rank needs to hear of another's to save the tensor.
  /// get_model_state_dict() sets it where it holds. Unset: parts of any form.
  std::optional<parallel::EqualShards> equal = std::nullopt;
};

class Value;
using List = std::vector<Value>;
/// Keys are text, as in Python's files.
using StateDict = std::map<std::string, Value>;

/// One value of a state dict. Copies share tensors.
class ACCELERATE_API Value {
 public:
  /// Plain data (an IValue) is None, bool, int64_t, double, text, or tuples of such.
  using Kind = std::variant<c10::IValue, at::Tensor, ShardedTensor, Bytes, List, StateDict>;

  Value() = default;  ///< None
  Value(at::Tensor tensor) : kind_(std::move(tensor)) {}
  Value(ShardedTensor tensor) : kind_(std::move(tensor)) {}
  Value(Bytes bytes) : kind_(std::move(bytes)) {}
  Value(List list) : kind_(std::move(list)) {}
  Value(StateDict dict) : kind_(std::move(dict)) {}
  Value(std::string text) : kind_(c10::IValue(std::move(text))) {}
  Value(const char* text) : Value(std::string(text)) {}
  template <class T>
  requires std::is_arithmetic_v<T> Value(T number) {
    if constexpr (std::same_as<T, bool>) kind_ = c10::IValue(number);
    else if constexpr (std::integral<T>) kind_ = c10::IValue(static_cast<int64_t>(number));
    else kind_ = c10::IValue(static_cast<double>(number));
  }
  template <class T> Value(const std::vector<T>& list) : kind_(List(list.begin(), list.end())) {}
  template <class T> Value(const std::map<std::string, T>& dict) : kind_(StateDict(dict.begin(), dict.end())) {}
  /// The result of state_dict() of an optimizer, a schedule or a loader. Dicts, lists and tensors in it become those of
  /// this class, and keys that are numbers become their text. @throws ConfigError for other keys.
  Value(const c10::IValue& value);

  const Kind& kind() const { return kind_; }
  /// `as<StateDict>()`. @throws ConfigError, naming what it is instead.
  template <class T> T& as() {
    if (auto* found = std::get_if<T>(&kind_)) return *found;
    throw_is_not(Kind(T{}).index());
  }
  template <class T> const T& as() const { return const_cast<Value*>(this)->as<T>(); }
  /// bool, int64_t, double (also of a whole number) or std::string. @throws ConfigError, naming what it is instead.
  template <class T> T to() const;

  /// Dicts and lists become an IValue's, for load_state_dict() of optimizers, schedules and loaders. @throws
  /// ConfigError for sharded tensors.
  c10::IValue to_ivalue() const;

 private:
  [[noreturn]] void throw_is_not(size_t kind) const;
  Kind kind_;
};

template <> ACCELERATE_API bool Value::to<bool>() const;
template <> ACCELERATE_API int64_t Value::to<int64_t>() const;
template <> ACCELERATE_API double Value::to<double>() const;
template <> ACCELERATE_API std::string Value::to<std::string>() const;

}  // namespace accelerate::distributed_checkpoint
