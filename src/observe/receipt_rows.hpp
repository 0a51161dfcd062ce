#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/utils/receipts.hpp"
#include "utils/counts.hpp"

/// How modules write their part of Accelerator::receipts(): receipts.cpp in the folder of those settings has a row for
/// each that changes what a run does, and says what it did from the module's counts. The facade joins the tables.
/// scripts/check_receipts.py checks that every field of the option structs has a row, or is listed with the reason.
namespace accelerate::receipts {

using counts::read;

/// The facts that all tables are made from, beside those of each. By default those of a run that asked for nothing.
struct RunFacts {
  int64_t ranks = 1, models = 0;
  at::Device device = at::kCPU;
};

/// The effect of a setting, in words.
struct Deed {
  ReceiptState state;
  std::string text;
};
template <class... Args> Deed acted(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::acted, fmt::format(text, std::forward<Args>(args)...)};
}
/// Its occasion has not come.
template <class... Args> Deed not_due(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::not_due, "not yet: " + fmt::format(text, std::forward<Args>(args)...)};
}
/// Its value asks for nothing, or for what is so without it.
template <class... Args> Deed off(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::not_due, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args> Deed nothing(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::without_effect, fmt::format(text, std::forward<Args>(args)...)};
}

/// "1 batch", "40 batches".
inline std::string counted(int64_t n, const char* one, const char* many) {
  return fmt::format("{} {}", n, n == 1 ? one : many);
}
inline std::string bytes(int64_t n) {
  return n < 10'000 ? fmt::format("{} bytes", n) : fmt::format("{:.2f} MB", static_cast<double>(n) / 1e6);
}

// Values as texts. Types of a module have a text_of() of their own, in the namespace that they are in.

inline std::string text_of(bool value) { return value ? "true" : "false"; }
inline std::string text_of(const std::string& value) { return value; }
inline std::string text_of(const std::filesystem::path& value) { return value.string(); }
inline std::string text_of(std::chrono::milliseconds value) { return fmt::format("{} ms", value.count()); }
inline std::string text_of(const std::array<bool, 3>& value) {
  return fmt::format("{},{},{}", value[0], value[1], value[2]);
}
inline std::string text_of(at::ScalarType value) { return c10::toString(value); }
template <class T>
requires std::is_arithmetic_v<T> std::string text_of(T value) { return fmt::format("{}", value); }
template <class T>
requires requires(T value) { to_string(value); }
std::string text_of(T value) { return to_string(value); }
template <class T> std::string text_of(const std::vector<T>& values) {
  std::vector<std::string> texts;
  for (const auto& value : values) texts.push_back(text_of(value));
  return fmt::format("{}", fmt::join(texts, ","));
}
template <class... T> std::string text_of(const std::variant<T...>& value) {
  return std::visit([](const auto& one) { return text_of(one); }, value);
}
template <class T> std::string text_of(const std::optional<T>& value) { return value ? text_of(*value) : "unset"; }

/// A value, and whether the program gave it: whether it is another one than by default.
struct Asked {
  bool by_call;
  std::string value;
};
namespace detail {
template <class Facts, class T> Facts facts_of(T Facts::*);
}
/// The setting at facts.*First.*….
template <auto First, auto... Rest> Asked asked(const decltype(detail::facts_of(First))& facts) {
  static const std::decay_t<decltype(facts)> defaults{};
  const auto& value = ((facts.*First).*....*Rest);
  return {value != ((defaults.*First).*....*Rest), text_of(value)};
}
/// Whether the program gives this function.
template <class Function> Asked asked_for(const Function& function, const char* text = "set") {
  return {function != nullptr, function ? text : "unset"};
}

template <class Facts> struct ReceiptRow {
  const char* setting;
  const char* variable;  ///< by which the launcher, or a user, sets it too; null: there is none
  const char* expected;
  Asked (*asked)(const Facts&);
  Deed (*did)(const Facts&);
  bool variable_wins = false;  ///< over the call
};

inline constexpr const char* kSaving = "when save_state() is called";

namespace detail {
Receipt make_one(const char* variable, bool variable_wins, Asked asked, Deed did);
}
/// The receipts of a table.
template <class Facts, size_t n> std::vector<Receipt> made(const ReceiptRow<Facts> (&rows)[n], const Facts& facts) {
  std::vector<Receipt> all;
  for (const auto& row : rows) {
    auto& one = all.emplace_back(detail::make_one(row.variable, row.variable_wins, row.asked(facts), row.did(facts)));
    one.setting = row.setting;
    one.expected = row.expected;
  }
  return all;
}

}  // namespace accelerate::receipts
