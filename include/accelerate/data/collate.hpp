#pragma once

/// From samples to a batch.
///
/// | sample                          | batch                                                                     |
/// |---------------------------------|---------------------------------------------------------------------------|
/// | tensor [...]                    | tensor [n, ...]                                                           |
/// | integer, bool, float, double    | tensor [n] of int64, bool, float32, float64                               |
/// | vector or array of numbers      | tensor [n, length]; all of one length                                     |
/// | std::string                     | std::vector<std::string>                                                  |
/// | vector or array of others       | the same container, collated place by place; all of one length            |
/// | pair, tuple, map, Example       | the same, member by member                                                |
/// | struct with ACCELERATE_FIELDS   | the same struct where every member collates to its own type; else its     |
/// |                                 | `Collated` type if it declares one (a struct with as many fields); else a |
/// |                                 | std::tuple                                                                |
/// | other struct with public members| std::vector of it; a loader refuses to compile without a collate function |
/// | anything else                   | std::vector of it                                                         |

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate::data {
namespace detail {

/// [n, ...] from n equal shapes. @throws ShapeError naming the first sample that differs.
ACCELERATE_API at::Tensor stack_samples(const std::vector<at::Tensor>& tensors);
/// A CPU tensor with a copy of the numbers at `data`.
ACCELERATE_API at::Tensor tensor_of(const void* data, const std::vector<int64_t>& sizes, at::ScalarType type);
[[noreturn]] ACCELERATE_API void throw_lengths_differ(size_t sample, size_t found, size_t expected);
[[noreturn]] ACCELERATE_API void throw_keys_differ(size_t sample);

/// Integers of all widths become int64, as in the reference.
template <class T>
using Stored =
    std::conditional_t<std::is_same_v<T, bool>, bool,
                       std::conditional_t<std::is_floating_point_v<T>,
                                          std::conditional_t<std::is_same_v<T, float>, float, double>, int64_t>>;
template <class T>
inline constexpr at::ScalarType kStoredType = std::is_same_v<Stored<T>, bool>     ? at::kBool
                                              : std::is_same_v<Stored<T>, float>  ? at::kFloat
                                              : std::is_same_v<Stored<T>, double> ? at::kDouble
                                                                                  : at::kLong;

template <class T> concept NumberList = nested::Sequence<T> && std::is_arithmetic_v<typename T::value_type>;

template <class T> struct Collated { using type = std::vector<T>; };
template <class T> using collated_t = typename Collated<T>::type;

template <> struct Collated<at::Tensor> { using type = at::Tensor; };
template <class T>
requires std::is_arithmetic_v<T>
struct Collated<T> {
  using type = at::Tensor;
};
template <NumberList T> struct Collated<T> { using type = at::Tensor; };
template <class T>
requires(!std::is_arithmetic_v<T>) struct Collated<std::vector<T>> {
  using type = std::vector<collated_t<T>>;
};
template <class T, size_t N>
requires(!std::is_arithmetic_v<T>) struct Collated<std::array<T, N>> {
  using type = std::array<collated_t<T>, N>;
};
template <class... T> struct Collated<std::tuple<T...>> { using type = std::tuple<collated_t<T>...>; };
template <class A, class B> struct Collated<std::pair<A, B>> { using type = std::pair<collated_t<A>, collated_t<B>>; };
template <class K, class V> struct Collated<std::map<K, V>> { using type = std::map<K, collated_t<V>>; };
template <class K, class V> struct Collated<std::unordered_map<K, V>> {
  using type = std::unordered_map<K, collated_t<V>>;
};
template <class D> struct Collated<torch::data::Example<D, void>> {
  using type = torch::data::Example<collated_t<D>, void>;
};
template <class D, class T>
requires(!std::is_void_v<T>) struct Collated<torch::data::Example<D, T>> {
  using type = torch::data::Example<collated_t<D>, collated_t<T>>;
};

template <class Fields> struct CollatedFields;
template <class... T> struct CollatedFields<std::tuple<T&...>> {
  using type = std::tuple<collated_t<T>...>;
  static constexpr bool same = (std::is_same_v<T, collated_t<T>> && ...);
};
template <nested::HasFields T> struct Collated<T> {
  using fields = CollatedFields<decltype(std::declval<T&>().accelerate_fields())>;
  static auto choose() {
    if constexpr (fields::same) return std::type_identity<T>{};
    else if constexpr (requires { typename T::Collated; }) return std::type_identity<typename T::Collated>{};
    else return std::type_identity<typename fields::type>{};
  }
  using type = typename decltype(choose())::type;
};

template <class T> collated_t<T> collate(std::vector<T>& samples);

/// Collates the members that `pick` refers to.
template <class T, class Pick> auto collate_member(std::vector<T>& samples, Pick&& pick) {
  using Member = std::remove_cvref_t<decltype(pick(samples[0]))>;
  std::vector<Member> column;
  column.reserve(samples.size());
  for (T& sample : samples) column.push_back(std::move(pick(sample)));
  return collate(column);
}

template <class T> at::Tensor collate_numbers(const std::vector<T>& numbers) {
  if constexpr (std::is_same_v<T, Stored<T>> && !std::is_same_v<T, bool>) {
    return tensor_of(numbers.data(), {static_cast<int64_t>(numbers.size())}, kStoredType<T>);
  } else {
    const auto stored = std::make_unique<Stored<T>[]>(numbers.size());  // std::vector<bool> has no data()
    for (size_t i = 0; i < numbers.size(); ++i) stored[i] = static_cast<Stored<T>>(numbers[i]);
    return tensor_of(stored.get(), {static_cast<int64_t>(numbers.size())}, kStoredType<T>);
  }
}

template <class T> at::Tensor collate_number_lists(const std::vector<T>& lists) {
  using Number = Stored<typename T::value_type>;
  const size_t rows = lists.size(), columns = rows == 0 ? 0 : lists[0].size();
  const auto stored = std::make_unique<Number[]>(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    if (lists[i].size() != columns) throw_lengths_differ(i, lists[i].size(), columns);
    for (size_t j = 0; j < columns; ++j) stored[i * columns + j] = static_cast<Number>(lists[i][j]);
  }
  return tensor_of(stored.get(), {static_cast<int64_t>(rows), static_cast<int64_t>(columns)},
                   kStoredType<typename T::value_type>);
}

template <class T> collated_t<T> collate(std::vector<T>& samples) {
  if constexpr (nested::TensorLike<T>) {
    return stack_samples(samples);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return collate_numbers(samples);
  } else if constexpr (NumberList<T>) {
    return collate_number_lists(samples);
  } else if constexpr (nested::Sequence<T>) {
    collated_t<T> batch;
    const size_t places = samples.empty() ? 0 : samples[0].size();
    for (size_t i = 0; i < samples.size(); ++i)
      if (samples[i].size() != places) throw_lengths_differ(i, samples[i].size(), places);
    if constexpr (nested::detail::is_instance<T, std::vector>) batch.resize(places);
    for (size_t place = 0; place < places; ++place)
      batch[place] = collate_member(
          samples, [place](T & s) -> auto& { return s[place]; });
    return batch;
  } else if constexpr (nested::detail::is_instance<T, std::tuple>) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return collated_t<T>{collate_member(
          samples, [](T & s) -> auto& { return std::get<I>(s); })...};
    }
    (std::make_index_sequence<std::tuple_size_v<T>>{});
  } else if constexpr (nested::detail::is_instance<T, std::pair>) {
    return {collate_member(
                samples, [](T & s) -> auto& { return s.first; }),
            collate_member(
                samples, [](T & s) -> auto& { return s.second; })};
  } else if constexpr (nested::Mapping<T>) {
    collated_t<T> batch;
    if (samples.empty()) return batch;
    std::vector<typename T::key_type> keys;
    for (const auto& [key, value] : samples[0]) keys.push_back(key);
    for (size_t i = 0; i < samples.size(); ++i)
      for (const auto& key : keys)
        if (samples[i].size() != keys.size() || !samples[i].contains(key)) throw_keys_differ(i);
    for (const auto& key : keys)
      batch.emplace(key, collate_member(
                             samples, [&key](T & s) -> auto& { return s.at(key); }));
    return batch;
  } else if constexpr (nested::detail::is_example_without_target<T>) {
    return {collate_member(
        samples, [](T & s) -> auto& { return s.data; })};
  } else if constexpr (nested::ExampleLike<T>) {
    return {collate_member(
                samples, [](T & s) -> auto& { return s.data; }),
            collate_member(
                samples, [](T & s) -> auto& { return s.target; })};
  } else if constexpr (nested::HasFields<T>) {
    constexpr size_t kFields = std::tuple_size_v<decltype(std::declval<T&>().accelerate_fields())>;
    collated_t<T> batch{};
    const auto fill = [&](auto&& fields) {
      static_assert(std::tuple_size_v<std::remove_cvref_t<decltype(fields)>> == kFields,
                    "the `Collated` type of a sample needs as many fields as the sample");
      [&]<size_t... I>(std::index_sequence<I...>) {
        ((std::get<I>(fields) = collate_member(
              samples, [](T & s) -> auto& { return std::get<I>(s.accelerate_fields()); })),
         ...);
      }
      (std::make_index_sequence<kFields>{});
    };
    if constexpr (nested::HasFields<collated_t<T>>) fill(batch.accelerate_fields());
    else fill(batch);
    return batch;
  } else {
    return std::move(samples);
  }
}

}  // namespace detail

/// The type of a batch of samples of type T.
template <class T> using collated_t = detail::collated_t<T>;

/// A batch of the samples, by the table above. @throws ShapeError when samples differ in shape, length or keys; the
/// message names the sample.
template <class T> collated_t<T> default_collate(std::vector<T> samples) { return detail::collate(samples); }

}  // namespace accelerate::data
