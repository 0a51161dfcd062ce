#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace accelerate::bigmodel {

struct BuiltInModel {
  std::string_view name;     ///< on the Hugging Face Hub
  std::string_view aliases;  ///< further names, separated by spaces; the part of the name behind its '/' always is one
  std::string_view config;   ///< what its config.json says about sizes
};

/// By name or alias, without regard to case; null if there is none.
const BuiltInModel* find_built_in(std::string_view name);

}  // namespace accelerate::bigmodel
