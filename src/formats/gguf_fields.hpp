#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/gguf_header.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

/// Fields of the metadata below the architecture's prefix.
class GgufFields {
 public:
  GgufFields(const GgufHeader& header, const std::string& file) : header_(header), file_(file) {
    if (const auto* name = header.metadata.find_as<std::string>("general.architecture")) architecture_ = *name;
  }

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", file_, fmt::format(what, std::forward<Args>(args)...));
  }
  const std::string& architecture() const { return architecture_; }
  std::optional<int64_t> integer(const std::string& key) const {
    const auto full = architecture_ + "." + key;
    if (const auto* list = header_.metadata.find_as<std::vector<int64_t>>(full)) return same_in_all(full, *list);
    const auto found = header_.metadata.integer(full);
    if (!found && header_.metadata.contains(full)) fail("'{}' is no whole number, which it has to be.", full);
    return found;
  }
  std::optional<double> number(const std::string& key) const {
    const auto full = architecture_ + "." + key;
    if (const auto* list = header_.metadata.find_as<std::vector<double>>(full)) return same_in_all(full, *list);
    const auto found = header_.metadata.number(full);
    if (!found && header_.metadata.contains(full)) fail("'{}' is no number, which it has to be.", full);
    return found;
  }
  const std::string* text(const std::string& key) const {
    const auto full = architecture_ + "." + key;
    const auto* found = header_.metadata.find_as<std::string>(full);
    if (!found && header_.metadata.contains(full)) fail("'{}' is no text, which it has to be.", full);
    return found;
  }
  int64_t need_integer(const std::string& key) const {
    const auto value = integer(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  /// A number that others are divided by, or added to before that.
  std::optional<double> number_above_0(const std::string& key) const {
    const auto value = number(key);
    if (value && !(*value > 0 && std::isfinite(*value)))
      fail("'{}.{}' is {}, expected a number above 0: nothing but such numbers makes sense there. It is damaged.",
           architecture_, key, *value);
    return value;
  }
  double need_number_above_0(const std::string& key) const {
    const auto value = number_above_0(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  int64_t heads() const { return need_integer("attention.head_count"); }
  int64_t key_value_heads() const { return integer("attention.head_count_kv").value_or(heads()); }

  const GgufTensor* tensor(const std::string& name) const {
    const auto found = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                                    [&](const GgufTensor& t) { return t.name == name; });
    return found == header_.tensors.end() ? nullptr : &*found;
  }

 private:
  /// The common value of a list with a number for each layer.
  template <class T> T same_in_all(const std::string& key, const std::vector<T>& list) const {
    if (list.empty() || std::ranges::find_if(list, [&](T one) { return one != list[0]; }) != list.end())
      fail(
          "'{}' is a list of {} numbers, one for each layer, that are not all the same ({}{}). Expected one number: "
          "models whose layers differ are not supported, and one number for all would give wrong results.",
          key, list.size(), fmt::join(list.begin(), list.begin() + std::min<std::ptrdiff_t>(std::ssize(list), 8), ", "),
          list.size() > 8 ? ", ..." : "");
    return list[0];
  }

  const GgufHeader& header_;
  const std::string& file_;
  std::string architecture_;
};

}  // namespace accelerate::formats
