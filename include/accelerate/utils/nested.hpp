#pragma once

/// Walking through batches of any type.
///
/// A batch is a tensor, a number, a string, or any combination of std::vector, array, pair, tuple, optional, map,
/// unordered_map, torch::data::Example<>, c10::IValue (what TorchScript models return) and user structs that declare
/// ACCELERATE_FIELDS(a, b, c). `send_to_device`, `gather`, `pad`, collate functions and checkpoints all recurse through
/// these few templates, so a type that works in one place works everywhere.

#include <ATen/core/Tensor.h>

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
#include "accelerate/utils/export.hpp"

namespace c10 {
struct IValue;
}
namespace torch::data {
template <typename Data, typename Target> struct Example;
}  // namespace torch::data

/// Inside a struct: makes its listed members visible to every operation over batches.
///     struct Batch { torch::Tensor ids, mask; std::vector<std::string> text; ACCELERATE_FIELDS(ids, mask, text) };
#define ACCELERATE_FIELDS(...)                                     \
  auto accelerate_fields() { return std::tie(__VA_ARGS__); }       \
  auto accelerate_fields() const { return std::tie(__VA_ARGS__); } \
  static constexpr const char* accelerate_field_names() { return #__VA_ARGS__; }

namespace accelerate::nested {

template <class T>
concept HasFields = requires(T& t) {
  t.accelerate_fields();
};

namespace detail {
template <class T, template <class...> class Template> inline constexpr bool is_instance = false;
template <template <class...> class Template, class... Args>
inline constexpr bool is_instance<Template<Args...>, Template> = true;
template <class T> inline constexpr bool is_std_array = false;
template <class T, size_t N> inline constexpr bool is_std_array<std::array<T, N>> = true;
template <class T> inline constexpr bool is_example_without_target = false;
template <class D> inline constexpr bool is_example_without_target<torch::data::Example<D, void>> = true;
}  // namespace detail

template <class T>
concept TensorLike = std::is_same_v<T, at::Tensor>;
template <class T>
concept Sequence = detail::is_instance<T, std::vector> || detail::is_std_array<T>;
template <class T>
concept Mapping = detail::is_instance<T, std::map> || detail::is_instance<T, std::unordered_map>;
template <class T>
concept TupleLike = detail::is_instance<T, std::tuple> || detail::is_instance<T, std::pair>;
template <class T>
concept ExampleLike = detail::is_instance<T, torch::data::Example>;
template <class T>
concept OptionalLike = detail::is_instance<T, std::optional>;
template <class T>
concept IValueLike = std::is_same_v<T, c10::IValue>;

/// c10::IValue is walked in a source file so that this header stays light.
ACCELERATE_API void visit_ivalue(const c10::IValue& value, const std::function<void(const at::Tensor&)>& f);
ACCELERATE_API c10::IValue map_ivalue(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f);
ACCELERATE_API c10::IValue combine_ivalues(const std::vector<const c10::IValue*>& values,
                                           const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f);

/// Calls f(child) for each direct child of a container, in declaration order; containers of one kind agree on the order
/// on every rank.
template <class T, class F> void for_each_child(T& value, F&& f) {
  using U = std::remove_cv_t<T>;
  if constexpr (Sequence<U>) {
    for (auto& child : value) f(child);
  } else if constexpr (detail::is_instance<U, std::map>) {
    for (auto& [key, child] : value) f(child);
  } else if constexpr (detail::is_instance<U, std::unordered_map>) {
    std::map<typename U::key_type, decltype(&value.begin()->second)> sorted;  // hash order differs between processes
    for (auto& [key, child] : value) sorted.emplace(key, &child);
    for (auto& [key, child] : sorted) f(*child);
  } else if constexpr (TupleLike<U>) {
    std::apply([&](auto&... children) { (f(children), ...); }, value);
  } else if constexpr (detail::is_example_without_target<U>) {
    f(value.data);
  } else if constexpr (ExampleLike<U>) {
    f(value.data);
    f(value.target);
  } else if constexpr (OptionalLike<U>) {
    if (value) f(*value);
  } else if constexpr (HasFields<T>) {
    std::apply([&](auto&... children) { (f(children), ...); }, value.accelerate_fields());
  }
}

template <class T>
inline constexpr bool is_container =
    Sequence<T> || Mapping<T> || TupleLike<T> || ExampleLike<T> || OptionalLike<T> || HasFields<T>;

namespace detail {
template <class T> struct AllTensors : std::bool_constant<TensorLike<T> || IValueLike<T>> {};
template <class... Args>
struct AllTensors<std::tuple<Args...>> : std::bool_constant<(AllTensors<std::remove_cvref_t<Args>>::value && ...)> {};
template <class A, class B>
struct AllTensors<std::pair<A, B>> : std::bool_constant<AllTensors<A>::value && AllTensors<B>::value> {};
template <class D, class T>
struct AllTensors<torch::data::Example<D, T>>
    : std::bool_constant<AllTensors<D>::value && (std::is_void_v<T> || AllTensors<T>::value)> {};
template <class T>
requires(Sequence<T> || OptionalLike<T>) struct AllTensors<T> : AllTensors<typename T::value_type> {
};
template <Mapping T> struct AllTensors<T> : AllTensors<typename T::mapped_type> {};
template <HasFields T> struct AllTensors<T> : AllTensors<decltype(std::declval<T&>().accelerate_fields())> {};
}  // namespace detail

/// Whether values of this type hold tensors and nothing else.
template <class T> inline constexpr bool all_tensors = detail::AllTensors<T>::value;

/// Calls f(tensor) for every tensor in `value`, depth first.
template <class T, class F> void for_each_tensor(const T& value, F&& f) {
  if constexpr (TensorLike<T>) {
    f(value);
  } else if constexpr (IValueLike<T>) {
    visit_ivalue(value, f);
  } else if constexpr (is_container<T>) {
    for_each_child(value, [&](const auto& child) { for_each_tensor(child, f); });
  }
}

/// A copy of `value` in which every tensor t is f(t); everything else is copied.
template <class T, class F> T map_tensors(const T& value, F&& f) {
  if constexpr (TensorLike<T>) {
    return f(value);
  } else if constexpr (IValueLike<T>) {
    return map_ivalue(value, f);
  } else if constexpr (is_container<T>) {
    T copy = value;
    for_each_child(copy, [&](auto& child) { child = map_tensors(std::as_const(child), f); });
    return copy;
  } else {
    return value;
  }
}

/// Joins values of equal structure: every tensor of the result is f(the tensors at that place in all values). Anything
/// else is taken from the first.
template <class T, class F> T combine_tensors(std::span<const T* const> values, F&& f) {
  if (values.empty()) throw ShapeError("combine_tensors: got no values, expected at least one");
  const auto list_of_children = [&](auto&& pick) {
    using Child = std::remove_cvref_t<decltype(pick(*values[0]))>;
    std::vector<const Child*> children;
    for (const T* value : values) children.push_back(&pick(*value));
    return children;
  };
  const auto join = [&](auto&& pick) {
    using Child = std::remove_cvref_t<decltype(pick(*values[0]))>;
    const auto children = list_of_children(pick);
    return combine_tensors<Child>(std::span<const Child* const>(children), f);
  };
  if constexpr (TensorLike<T>) {
    std::vector<at::Tensor> tensors;
    for (const T* value : values) tensors.push_back(*value);
    return f(tensors);
  } else if constexpr (IValueLike<T>) {
    return combine_ivalues({values.begin(), values.end()}, f);
  } else if constexpr (Sequence<T>) {
    T result = *values[0];
    for (const T* value : values)
      if (value->size() != result.size())
        throw ShapeError("combine_tensors: found sequences of " + std::to_string(result.size()) + " and " +
                         std::to_string(value->size()) +
                         " items at the same place, expected equal structure in every value");
    for (size_t i = 0; i < result.size(); ++i)
      result[i] = join([i](const T& value) -> const auto& { return value[i]; });
    return result;
  } else if constexpr (Mapping<T>) {
    T result = *values[0];
    for (auto& [key, child] : result)
      child = join([&key = key](const T& value) -> const auto& {
        const auto found = value.find(key);
        if (found == value.end())
          throw ShapeError(
              "combine_tensors: a key of the first mapping is missing in another, expected equal keys in every value");
        return found->second;
      });
    return result;
  } else if constexpr (TupleLike<T>) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return T{join([](const T& value) -> const auto& { return std::get<I>(value); })...};
    }
    (std::make_index_sequence<std::tuple_size_v<T>>{});
  } else if constexpr (detail::is_example_without_target<T>) {
    T result = *values[0];
    result.data = join([](const T& value) -> const auto& { return value.data; });
    return result;
  } else if constexpr (ExampleLike<T>) {
    return T{join([](const T& value) -> const auto& { return value.data; }),
             join([](const T& value) -> const auto& { return value.target; })};
  } else if constexpr (OptionalLike<T>) {
    for (const T* value : values)
      if (value->has_value() != values[0]->has_value())
        throw ShapeError("combine_tensors: an optional is set in one value and empty in another");
    if (!values[0]->has_value()) return std::nullopt;
    return T{join([](const T& value) -> const auto& { return *value; })};
  } else if constexpr (HasFields<T>) {
    T result = *values[0];
    auto fields = result.accelerate_fields();
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((std::get<I>(fields) =
            join([](const T& value) -> const auto& { return std::get<I>(value.accelerate_fields()); })),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(fields)>>{});
    return result;
  } else {
    return *values[0];
  }
}

}  // namespace accelerate::nested
