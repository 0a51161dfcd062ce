#pragma once

/// Rows of a batch: dimension 0 of its tensors, and the items of its lists that hold no tensors and are as long (texts,
/// ids).

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate::data::detail {

template <class T> struct IsNoTensor : std::bool_constant<!nested::TensorLike<T> && !nested::IValueLike<T>> {};
template <class T> inline constexpr bool is_row_list = false;
template <class T> inline constexpr bool is_row_list<std::vector<T>> = nested::all_leaves<T, IsNoTensor>;

[[noreturn]] ACCELERATE_API void throw_structures_differ(size_t first_tensors, size_t other_tensors);

/// The first row list's length, or -1.
template <class T> int64_t first_list_length(const T& value) {
  int64_t length = -1;
  if constexpr (is_row_list<T>) {
    length = static_cast<int64_t>(value.size());
  } else if constexpr (nested::is_container<T>) {
    nested::for_each_child(value, [&](const auto& child) {
      if (length < 0) length = first_list_length(child);
    });
  }
  return length;
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
  if constexpr (is_row_list<T>) {
    if (static_cast<int64_t>(to.size()) == to_rows && static_cast<int64_t>(from.size()) == from_rows)
      to.insert(to.end(), from.begin(), from.end());
  } else if constexpr (nested::is_container<T>) {
    nested::zip_children(to, from, [&](auto& a, const auto& b) { append_lists(a, b, to_rows, from_rows); });
  }
}

/// @throws ShapeError where one has keys, or something optional, that the other has not. Row lists may differ in
/// length.
template <class T> void check_same_places(const T& first, const T& other) {
  if constexpr (nested::OptionalLike<T>) {
    if (first.has_value() != other.has_value()) nested::detail::throw_only_one_is_set();
  } else if constexpr (nested::Mapping<T>) {
    if (first.size() != other.size()) nested::detail::throw_key_missing();
  }
  if constexpr (nested::is_container<T> && !is_row_list<T>)
    nested::for_each_place(first, [&](const auto& place) {
      if (const auto* there = place(other)) check_same_places(*place(first), *there);
      else nested::detail::throw_key_missing();
    });
}

/// One batch with the rows of all. @throws ShapeError when they differ in structure or in other dimensions than the
/// first.
template <class T> T concat_rows(std::span<const T* const> batches) {
  const T& first = *batches[0];
  if (batches.size() == 1) return first;
  std::vector<std::vector<at::Tensor>> columns;
  for (const T* batch : batches) {
    check_same_places(first, *batch);
    size_t place = 0;
    nested::for_each_tensor(*batch, [&](const at::Tensor& t) {
      if (batch == &first) columns.emplace_back();
      if (place < columns.size()) columns[place].push_back(t);
      ++place;
    });
    if (place != columns.size()) throw_structures_differ(columns.size(), place);
  }
  size_t place = 0;
  T joined = nested::map_tensors(first, [&](const at::Tensor& t) {
    const auto& column = columns[place++];
    return t.dim() == 0 ? t : ops::concatenate(column, 0);
  });
  int64_t rows = rows_of(first);
  for (const T* batch : batches.subspan(1)) {
    const int64_t more = rows_of(*batch);
    append_lists(joined, *batch, rows, more);
    rows += more;
  }
  return joined;
}

}  // namespace accelerate::data::detail
