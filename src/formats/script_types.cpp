#include "formats/script_types.hpp"

#include <algorithm>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>

namespace accelerate::formats {
namespace {

/// Whether it is written as types are, which is all that LibTorch's parser of expressions is to see: its recursion goes
/// as deep as brackets and operators tell it to.
bool looks_like_type(std::string_view text) {
  constexpr size_t kMostBytes = 10'000;  // tuples list all of their types
  constexpr int kMostLevels = 100;
  int level = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool in_name = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    if (!in_name && c != '.' && c != ',' && c != '[' && c != ']' && !(c == ' ' && i > 0 && text[i - 1] == ','))
      return false;
    level += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (level < 0 || level > kMostLevels) return false;
  }
  return text.size() <= kMostBytes;
}

c10::TypePtr parse(std::string_view text) {
  if (!looks_like_type(text)) return nullptr;
  try {
    return torch::jit::ScriptTypeParser().parseType(std::string(text));
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool is_of(const c10::IValue& value, const c10::TypePtr& type) {
  return type->kind() == c10::AnyType::Kind || value.type()->isSubtypeOf(*type);
}

}  // namespace

bool set_script_type(c10::IValue& value, std::string_view text) {
  const auto type = parse(text);
  if (!type) return false;
  if (const auto list = type->cast<c10::ListType>(); list && value.isList()) {
    const auto& element = list->getElementType();
    const auto items = value.toListRef();
    if (!std::all_of(items.begin(), items.end(), [&](const auto& item) { return is_of(item, element); })) return false;
    value.toList().unsafeSetElementType(element);
    return true;
  }
  if (const auto dict = type->cast<c10::DictType>(); dict && value.isGenericDict()) {
    auto entries = value.toGenericDict();
    for (const auto& entry : entries)
      if (!is_of(entry.key(), dict->getKeyType()) || !is_of(entry.value(), dict->getValueType())) return false;
    entries.unsafeSetKeyType(dict->getKeyType());
    entries.unsafeSetValueType(dict->getValueType());
    return true;
  }
  return false;
}

std::optional<c10::Device> parse_device(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::formats
