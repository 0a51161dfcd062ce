#pragma once

/// Walking through batches of any type.
///
/// A batch is a tensor, a number, a string, or any combination of std::vector, array, pair, tuple, optional, map,
/// unordered_map, torch::data::Example<>, c10::IValue (what TorchScript models return) and user structs that declare
/// ACCELERATE_FIELDS(a, b, c). `send_to_device`, `gather`, `pad`, collate functions and checkpoints all recurse through
/// these few templates, so a type that works in one place works everywhere.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "accelerate/utils/error.hpp"

namespace c10 {
struct IValue;
}
namespace torch::data {
template <typename Data, typename Target> struct Example;
}

/// Inside a struct: makes its listed members visible to every operation over batches.
///     struct Batch { torch::Tensor ids, mask; std::vector<std::string> text; ACCELERATE_FIELDS(ids, mask, text) };
#define ACCELERATE_FIELDS(...)                                     \
  auto accelerate_fields() { return std::tie(__VA_ARGS__); }       \
  auto accelerate_fields() const { return std::tie(__VA_ARGS__); } \
  static constexpr const char* accelerate_field_names() { return #__VA_ARGS__; }

namespace accelerate::nested {

template <class T> concept HasFields = requires(T& t) { t.accelerate_fields(); };

namespace detail {
template <class T, template <class...> class Template> inline constexpr bool is_instance = false;
template <template <class...> class Template, class... Args>
inline constexpr bool is_instance<Template<Args...>, Template> = true;
template <class T> inline constexpr bool is_std_array = false;
template <class T, size_t N> inline constexpr bool is_std_array<std::array<T, N>> = true;
template <class T> inline constexpr bool is_example_without_target = false;
template <class D> inline constexpr bool is_example_without_target<torch::data::Example<D, void>> = true;
}  // namespace detail

template <class T> concept TensorLike = std::is_same_v<T, at::Tensor>;
template <class T> concept Sequence = detail::is_instance<T, std::vector> || detail::is_std_array<T>;
template <class T> concept Mapping = detail::is_instance<T, std::map> || detail::is_instance<T, std::unordered_map>;
template <class T> concept TupleLike = detail::is_instance<T, std::tuple> || detail::is_instance<T, std::pair>;
template <class T> concept ExampleLike = detail::is_instance<T, torch::data::Example>;
template <class T> concept OptionalLike = detail::is_instance<T, std::optional>;
template <class T> concept IValueLike = std::is_same_v<T, c10::IValue>;

/// c10::IValue is walked in a source file so that this header stays light.
ACCELERATE_API void visit_ivalue(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f);
ACCELERATE_API c10::IValue map_ivalue(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);
ACCELERATE_API c10::IValue combine_ivalues(const std::vector<const c10::IValue*>& values,
                                           const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f);

template <class T>
inline constexpr bool is_container =
    Sequence<T> || Mapping<T> || TupleLike<T> || ExampleLike<T> || OptionalLike<T> || HasFields<T>;

namespace detail {
/// How many children every value of a type has: members of tuples, pairs, Examples and structs with fields.
template <class T> constexpr size_t count_members() {
  if constexpr (TupleLike<T>) return std::tuple_size_v<T>;
  else if constexpr (is_example_without_target<T>) return 1;
  else if constexpr (ExampleLike<T>) return 2;
  else if constexpr (HasFields<T>) return std::tuple_size_v<decltype(std::declval<T&>().accelerate_fields())>;
  else return 0;
}
template <size_t I, class T> auto& member(T& value) {
  if constexpr (TupleLike<std::remove_const_t<T>>) return std::get<I>(value);
  else if constexpr (!ExampleLike<std::remove_const_t<T>>) return std::get<I>(value.accelerate_fields());
  else if constexpr (I == 0) return value.data;
  else return value.target;
}

template <class Map> auto sorted_keys(const Map& map) {
  std::vector<const typename Map::key_type*> keys;
  for (const auto& entry : map) keys.push_back(&entry.first);
  if constexpr (is_instance<Map, std::unordered_map>)  // hash order differs between processes
    std::sort(keys.begin(), keys.end(), [](const auto* a, const auto* b) { return *a < *b; });
  return keys;
}
/// The types of a container's direct children, those of a mapping's keys only on request.
template <class T, bool with_keys> constexpr auto child_types() {
  if constexpr (Mapping<T> && with_keys)
    return std::type_identity<std::tuple<typename T::key_type, typename T::mapped_type>>{};
  else if constexpr (Mapping<T>) return std::type_identity<std::tuple<typename T::mapped_type>>{};
  else if constexpr (Sequence<T> || OptionalLike<T>) return std::type_identity<std::tuple<typename T::value_type>>{};
  else return []<size_t... I>(std::index_sequence<I...>) {
      return std::type_identity<std::tuple<std::remove_cvref_t<decltype(member<I>(std::declval<T&>()))>...>>{};
    }
  (std::make_index_sequence<count_members<T>()>{});
}
template <class T, template <class> class Leaf, bool with_keys> constexpr bool check_leaves() {
  if constexpr (is_container<T>)
    return []<class... Child>(std::type_identity<std::tuple<Child...>>) {
      return (check_leaves<Child, Leaf, with_keys>() && ...);
    }(child_types<T, with_keys>());
  else return Leaf<T>::value;
}

[[noreturn]] ACCELERATE_API void throw_nothing_to_combine();
[[noreturn]] ACCELERATE_API void throw_lengths_differ(size_t first, size_t other);
[[noreturn]] ACCELERATE_API void throw_key_missing();
[[noreturn]] ACCELERATE_API void throw_only_one_is_set();

template <class T> struct IsTensors : std::bool_constant<TensorLike<T> || IValueLike<T>> {};
}  // namespace detail

/// Whether `Leaf`, a type trait, is true of every type in T that is no container; `with_keys`: also of mappings' keys.
template <class T, template <class> class Leaf, bool with_keys = false>
inline constexpr bool all_leaves = detail::check_leaves<T, Leaf, with_keys>();
/// Whether values of this type hold tensors and nothing else.
template <class T> inline constexpr bool all_tensors = all_leaves<T, detail::IsTensors>;

/// Calls f(place) for each direct child of a container, in declaration order; containers of one kind agree on the order
/// on every rank. `place(other)` points to the child there in any container of the same form, null where it has none.
/// f may change children, but not how many there are.
template <class T, class F> void for_each_place(const T& value, F&& f) {
  if constexpr (Sequence<T>)
    for (size_t i = 0; i < value.size(); ++i) f([i](auto& other) { return i < other.size() ? &other[i] : nullptr; });
  else if constexpr (Mapping<T>) {
    for (const auto* key : detail::sorted_keys(value))
      f([key](auto& other) {
        const auto found = other.find(*key);
        return found == other.end() ? nullptr : &found->second;
      });
  } else if constexpr (OptionalLike<T>) {
    if (value) f([](auto& other) { return other ? &*other : nullptr; });
  } else {
    [&]<size_t... I>(std::index_sequence<I...>) {
      (f([](auto& other) { return &detail::member<I>(other); }), ...);
    }
    (std::make_index_sequence<detail::count_members<T>()>{});
  }
}

/// Calls f(child) for each direct child, in the order of for_each_place.
template <class T, class F> void for_each_child(T& value, F&& f) {
  for_each_place(std::as_const(value), [&](const auto& place) { f(*place(value)); });
}

/// Calls f(child, child of `other`) for each place that both have.
template <class T, class Other, class F> void zip_children(T& value, Other& other, F&& f) {
  for_each_place(std::as_const(value), [&](const auto& place) {
    if (auto* there = place(other)) f(*place(value), *there);
  });
}

/// Calls f(tensor) for every tensor in `value`, depth first.
template <class T, class F> void for_each_tensor(const T& value, F&& f) {
  if constexpr (TensorLike<T>) f(value);
  else if constexpr (IValueLike<T>) visit_ivalue(value, f);
  else if constexpr (is_container<T>) for_each_child(value, [&](const auto& child) { for_each_tensor(child, f); });
}

/// Puts f(t) in the place of every tensor t in `value`, depth first.
template <class T, class F> void update_tensors(T& value, F&& f) {
  if constexpr (TensorLike<T>) value = f(std::as_const(value));
  else if constexpr (IValueLike<T>) value = map_ivalue(value, f);
  else if constexpr (is_container<T>) for_each_child(value, [&](auto& child) { update_tensors(child, f); });
}

/// A copy of `value` in which every tensor t is f(t); everything else is copied.
template <class T, class F> T map_tensors(const T& value, F&& f) {
  T copy = value;
  update_tensors(copy, f);
  return copy;
}

/// Joins values of equal structure: every tensor of the result is f(the tensors at that place in all values). Anything
/// else is taken from the first. @throws ShapeError when structures differ or there are no values.
template <class T, class F> T combine_tensors(std::span<const T* const> values, F&& f) {
  if (values.empty()) detail::throw_nothing_to_combine();
  const T& first = *values[0];
  if constexpr (TensorLike<T>) {
    std::vector<at::Tensor> tensors;
    for (const T* value : values) tensors.push_back(*value);
    return f(tensors);
  } else if constexpr (IValueLike<T>) {
    return combine_ivalues({values.begin(), values.end()}, f);
  } else if constexpr (!is_container<T>) {
    return first;
  } else {
    for (const T* value : values) {
      if constexpr (Sequence<T>)
        if (value->size() != first.size()) detail::throw_lengths_differ(first.size(), value->size());
      if constexpr (Mapping<T>)
        if (value->size() != first.size()) detail::throw_key_missing();
      if constexpr (OptionalLike<T>)
        if (value->has_value() != first.has_value()) detail::throw_only_one_is_set();
    }
    T result = first;
    for_each_place(first, [&](const auto& place) {
      using Child = std::remove_cvref_t<decltype(*place(first))>;
      std::vector<const Child*> children;
      for (const T* value : values) {
        children.push_back(place(*value));
        if (!children.back()) detail::throw_key_missing();
      }
      *place(result) = combine_tensors<Child>(std::span<const Child* const>(children), f);
    });
    return result;
  }
}

}  // namespace accelerate::nested
