#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace accelerate::bigmodel {

struct BuiltInModel {
  std::string_view name;     ///< on the Hugging Face Hub
  std::string_view aliases;  ///< further names, separated by spaces; the part of the name behind its '/' always is one
  std::string_view config;   ///< what its config.json says about sizes
};

/// By name or alias, without regard to case; null if there is none.
const BuiltInModel* find_built_in(std::string_view name);

/// All names and aliases, in full and behind their '/'.
std::vector<std::string> built_in_names();

}  // namespace accelerate::bigmodel
