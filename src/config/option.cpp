#include "accelerate/config/option.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "config/value.hpp"

namespace accelerate::config {
namespace {

std::vector<std::string> split(const char* text, char separator) {
  std::vector<std::string> parts(1);
  for (const char* c = text; *c; ++c) {
    if (*c == separator) parts.emplace_back();
    else parts.back() += *c;
  }
  return parts;
}

}  // namespace

std::vector<std::string> Option::spellings() const {
  if (flags && !*flags) return {};
  std::vector<std::string> all = flags ? split(flags, ',') : std::vector<std::string>{"--" + std::string(name)};
  if (positional()) return all;
  for (size_t i = 0, n = all.size(); i < n; ++i) {
    std::string dashed = all[i];
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    if (dashed != all[i]) all.push_back(dashed);
  }
  return all;
}

std::string Option::default_text() const {
  const Value value = default_value(*this);
  if (value.is_null()) return "";
  if (!value.is_array()) return value.dump();
  std::vector<std::string> items;
  for (const auto& item : value) items.push_back(item.dump());
  return fmt::format("[{}]", fmt::join(items, ", "));
}

std::vector<std::string> Option::choice_list() const {
  return choices ? split(choices, '|') : std::vector<std::string>{};
}

const Option* CommandTable::find(std::string_view wanted) const {
  for (const auto& group : groups)
    for (const auto& option : group.options)
      if (wanted == option.name && option.kind != Kind::unset) return &option;
  return nullptr;
}

}  // namespace accelerate::config
