#pragma once

/// Building and reading the dicts that stand for Python's state_dicts. Lists are generic ones on purpose: LibTorch
/// pickles lists of a fixed element type through a helper that Python's weights-only loader refuses.

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate::optim {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

inline Dict make_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }

template <class T> List make_list(const std::vector<T>& values) {
  List list(c10::AnyType::get());
  for (const T& value : values) list.emplace_back(value);
  return list;
}

/// Reads one dict and names it in errors. All functions throw CheckpointError.
class DictReader {
 public:
  DictReader(const c10::IValue& value, std::string where) : where_(std::move(where)) {
    if (!value.isGenericDict()) fail("found {}, expected a dict", value.tagKind());
    dict_.emplace(value.toGenericDict());
  }

  /// Null when missing.
  const c10::IValue* find(const c10::IValue& key) {
    const auto entry = dict_->find(key);
    if (entry == dict_->end()) return nullptr;
    return &held_.emplace_back(entry->value());
  }
  const c10::IValue& at(const std::string& key) {
    if (const auto* value = find(key)) return *value;
    fail(
        "found no key '{}', expected one; the file may belong to another class or an older version. Load a "
        "state written for this class",
        key);
  }
  double number(const std::string& key) { return to_number(at(key), key); }
  int64_t integer(const std::string& key) {
    const double value = number(key);
    if (value != static_cast<double>(static_cast<int64_t>(value)))
      fail("found {} at '{}', expected a whole number", value, key);
    return static_cast<int64_t>(value);
  }
  bool boolean(const std::string& key) {
    const auto& value = at(key);
    if (!value.isBool()) fail("found {} at '{}', expected a bool", value.tagKind(), key);
    return value.toBool();
  }
  std::vector<c10::IValue> items(const std::string& key) {
    const auto& value = at(key);
    if (value.isTuple()) return value.toTupleRef().elements().vec();
    if (!value.isList()) fail("found {} at '{}', expected a list", value.tagKind(), key);
    return value.toListRef().vec();
  }
  std::vector<double> numbers(const std::string& key) {
    std::vector<double> result;
    for (const auto& item : items(key)) result.push_back(to_number(item, key));
    return result;
  }
  /// One number per parameter group.
  std::vector<double> numbers(const std::string& key, size_t count) {
    auto result = numbers(key);
    if (result.size() != count)
      fail(
          "found {} values at '{}', expected {} (one per parameter group); build the optimizer with the "
          "groups it had when the state was saved",
          result.size(), key, count);
    return result;
  }
  size_t size() const { return dict_->size(); }
  const Dict& dict() const { return *dict_; }

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("{}: {}.", where_, fmt::format(what, std::forward<Args>(args)...));
  }

 private:
  double to_number(const c10::IValue& value, const std::string& key) const {
    if (value.isDouble()) return value.toDouble();
    if (value.isInt()) return static_cast<double>(value.toInt());
    if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item<double>();
    fail("found {} at '{}', expected a number", value.tagKind(), key);
  }

  std::string where_;
  std::optional<Dict> dict_;  // set by the constructor
  std::deque<c10::IValue> held_;
};

}  // namespace accelerate::optim
