#pragma once

/// Rows of a batch: dimension 0 of its tensors, and the items of its lists that hold no tensors and are as long (texts,
/// ids).

#include <cstdint>
#include <type_traits>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate::data::detail {

template <class T> struct Tuple {  // the members of a struct with fields, without references
  using type = T;
};
template <class... T> struct Tuple<std::tuple<T&...>> { using type = std::tuple<T...>; };

/// T may hold a tensor somewhere.
template <class T> struct HoldsTensor : std::bool_constant<nested::TensorLike<T> || nested::IValueLike<T>> {};
template <nested::HasFields T>
struct HoldsTensor<T> : HoldsTensor<typename Tuple<decltype(std::declval<T&>().accelerate_fields())>::type> {};
template <template <class...> class Container, class... T>
requires(nested::is_container<Container<T...>> &&
         !nested::HasFields<Container<T...>>) struct HoldsTensor<Container<T...>>
    : std::bool_constant<(HoldsTensor<T>::value || ...)> {
};
template <class T, size_t N> struct HoldsTensor<std::array<T, N>> : HoldsTensor<T> {};

template <class T> inline constexpr bool is_row_list = false;
template <class T> inline constexpr bool is_row_list<std::vector<T>> = !HoldsTensor<T>::value;

/// Can be sent to other ranks (see archive.hpp).
template <class T>
struct Archivable : std::bool_constant<std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                                       nested::TensorLike<T> || nested::IValueLike<T>> {};
template <nested::HasFields T>
struct Archivable<T> : Archivable<typename Tuple<decltype(std::declval<T&>().accelerate_fields())>::type> {};
template <template <class...> class Container, class... T>
requires(nested::is_container<Container<T...>> && !nested::HasFields<Container<T...>> &&
         !nested::Mapping<Container<T...>> && !nested::Sequence<Container<T...>>) struct Archivable<Container<T...>>
    : std::bool_constant<((std::is_void_v<T> || Archivable<T>::value) && ...)> {
};
template <class T> struct Archivable<std::vector<T>> : Archivable<T> {};
template <class T, size_t N> struct Archivable<std::array<T, N>> : Archivable<T> {};
template <class K, class V>
struct Archivable<std::map<K, V>> : std::bool_constant<Archivable<K>::value && Archivable<V>::value> {};
template <class K, class V>
struct Archivable<std::unordered_map<K, V>> : std::bool_constant<Archivable<K>::value && Archivable<V>::value> {};

/// The first row list's length, or -1.
template <class T> int64_t first_list_length(const T& value) {
  if constexpr (is_row_list<T>) {
    return static_cast<int64_t>(value.size());
  } else if constexpr (nested::is_container<T>) {
    int64_t length = -1;
    nested::for_each_child(value, [&](const auto& child) {
      if (length < 0) length = first_list_length(child);
    });
    return length;
  } else {
    return -1;
  }
}

/// Rows of a batch: of its first tensor that has dimensions, else of its first list. 1 when there is neither.
template <class T> int64_t rows_of(const T& batch) {
  int64_t rows = -1;
  nested::for_each_tensor(batch, [&](const at::Tensor& t) {
    if (rows < 0 && t.dim() > 0) rows = t.size(0);
  });
  if (rows < 0) rows = first_list_length(batch);
  return rows < 0 ? 1 : rows;
}

template <class T> void slice_lists(T& value, int64_t begin, int64_t end, int64_t rows) {
  if constexpr (is_row_list<T>) {
    if (static_cast<int64_t>(value.size()) == rows) value = T(value.begin() + begin, value.begin() + end);
  } else if constexpr (nested::is_container<T>) {
    nested::for_each_child(value, [&](auto& child) { slice_lists(child, begin, end, rows); });
  }
}

/// Rows [begin, end) of a batch of `rows` rows; tensors as views.
template <class T> T slice_rows(const T& batch, int64_t begin, int64_t end, int64_t rows) {
  T part =
      nested::map_tensors(batch, [&](const at::Tensor& t) { return t.dim() == 0 ? t : ops::slice(t, begin, end); });
  slice_lists(part, begin, end, rows);
  return part;
}

template <class T> void append_lists(T& to, const T& from, int64_t to_rows, int64_t from_rows) {
  const auto both = [&](auto& a, const auto& b) { append_lists(a, b, to_rows, from_rows); };
  if constexpr (is_row_list<T>) {
    if (static_cast<int64_t>(to.size()) == to_rows && static_cast<int64_t>(from.size()) == from_rows)
      to.insert(to.end(), from.begin(), from.end());
  } else if constexpr (nested::Sequence<T>) {
    for (size_t i = 0; i < to.size() && i < from.size(); ++i) both(to[i], from[i]);
  } else if constexpr (nested::Mapping<T>) {
    for (auto& [key, child] : to)
      if (const auto other = from.find(key); other != from.end()) both(child, other->second);
  } else if constexpr (nested::TupleLike<T>) {
    [&]<size_t... I>(std::index_sequence<I...>) { (both(std::get<I>(to), std::get<I>(from)), ...); }
    (std::make_index_sequence<std::tuple_size_v<T>>{});
  } else if constexpr (nested::detail::is_example_without_target<T>) {
    both(to.data, from.data);
  } else if constexpr (nested::ExampleLike<T>) {
    both(to.data, from.data);
    both(to.target, from.target);
  } else if constexpr (nested::OptionalLike<T>) {
    if (to && from) both(*to, *from);
  } else if constexpr (nested::HasFields<T>) {
    auto a = to.accelerate_fields();
    const auto b = from.accelerate_fields();
    [&]<size_t... I>(std::index_sequence<I...>) { (both(std::get<I>(a), std::get<I>(b)), ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(a)>>{});
  }
}

/// One batch with the rows of all. @throws ShapeError when they differ in structure or in other dimensions than the
/// first.
template <class T> T concat_rows(const std::vector<T>& batches) {
  if (batches.size() == 1) return batches[0];
  std::vector<std::vector<at::Tensor>> columns;
  for (const T& batch : batches) {
    size_t place = 0;
    nested::for_each_tensor(batch, [&](const at::Tensor& t) {
      if (&batch == batches.data()) columns.emplace_back();
      if (place < columns.size()) columns[place].push_back(t);
      ++place;
    });
    if (place != columns.size())
      throw ShapeError("DataLoader: found batches of " + std::to_string(columns.size()) + " and of " +
                       std::to_string(place) + " tensors, expected one structure in all batches to join them");
  }
  size_t place = 0;
  T joined = nested::map_tensors(batches[0], [&](const at::Tensor& t) {
    const auto& column = columns[place++];
    return t.dim() == 0 ? t : ops::concatenate(column, 0);
  });
  int64_t rows = rows_of(batches[0]);
  for (size_t i = 1; i < batches.size(); ++i) {
    const int64_t more = rows_of(batches[i]);
    append_lists(joined, batches[i], rows, more);
    rows += more;
  }
  return joined;
}

/// `batch` with rows of `from` (from its start, again and again) appended until it has `rows` rows.
template <class T> T complete_rows(const T& batch, const T& from, int64_t rows) {
  std::vector<T> parts{batch};
  int64_t missing = rows - rows_of(batch);
  const int64_t available = rows_of(from);
  while (missing > 0 && available > 0) {
    const int64_t take = std::min(missing, available);
    parts.push_back(slice_rows(from, 0, take, available));
    missing -= take;
  }
  return concat_rows(parts);
}

}  // namespace accelerate::data::detail
