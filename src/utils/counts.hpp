#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

/// Events of this process, counted where they happen; receipts (observe/receipt_rows.hpp) say from them what each
/// setting did. Each module lists its own events, an enum that ends with `number_of_counts`: DataCount in data, and so
/// on. A count is one relaxed add.
namespace accelerate::counts {

template <class T> concept Event = std::is_enum_v<T> && requires { T::number_of_counts; };

using Values = std::span<std::atomic<int64_t>>;

/// The counts of all modules that count something here.
const std::vector<Values>& all();

namespace detail {
/// Before main(). @return true
bool enter(Values values);
template <Event E> inline constinit std::array<std::atomic<int64_t>, static_cast<size_t>(E::number_of_counts)> values{};
template <Event E> inline const bool entered = enter(values<E>);
}  // namespace detail

/// Zero at the start of the process.
template <Event E> std::atomic<int64_t>& of(E what) {
  static_cast<void>(detail::entered<E>);  // whoever counts has it entered
  return detail::values<E>[static_cast<size_t>(what)];
}
/// Any thread.
void add(Event auto what, int64_t n = 1) { of(what).fetch_add(n, std::memory_order_relaxed); }
/// Keeps the largest.
void most(Event auto what, int64_t n) {
  auto& count = of(what);
  int64_t before = count.load(std::memory_order_relaxed);
  while (n > before && !count.compare_exchange_weak(before, n, std::memory_order_relaxed)) {
  }
}
int64_t read(Event auto what) { return of(what).load(std::memory_order_relaxed); }
/// All to zero. For tests.
void reset();

}  // namespace accelerate::counts
