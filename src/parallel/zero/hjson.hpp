#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

/// The form in which DeepSpeed reads its configurations: HJSON, of which JSON is a part. Needs no LibTorch.
namespace accelerate::zero {

struct HjsonRules {
  size_t deepest = 64;               ///< lists and objects in each other: reading and copying them is recursive
  bool root_without_braces = false;  ///< members may stand alone: for files, since a path looks like a member
};

/// Reads the whole of `text`. Beyond JSON there may be comments (#, //, /* */), commas that are missing at the ends of
/// lines or left over, names and texts without quotes (a text then goes to the end of its line), texts in ' or, over
/// several lines, in ''', and a byte order mark. Python's words NaN, Infinity and -Infinity are numbers. Valid JSON
/// means the same here, except that a name that an object has twice is an error.
/// @return a discarded value where it is not valid
/// @param problem  what is wrong, to come behind the name of the text: "is not valid JSON (line 2, column 5: ...)"
nlohmann::ordered_json parse_hjson(std::string_view text, std::string& problem, const HjsonRules& rules = {});

}  // namespace accelerate::zero
