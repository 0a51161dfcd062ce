#pragma once

#include <string>
#include <string_view>
#include <vector>

/// The names under which files have the weights of transformers' models: with and without the name of the body, of
/// several versions, as they were before a conversion. All loading of weights goes by these.
namespace accelerate::formats {

struct WeightNames {
  const char* model_type;   ///< of config.json
  const char* classes;      ///< what the names of its classes begin with
  const char* base_prefix;  ///< "bert.": names with and without it are the same weight; empty: there is none
  std::string (*other_name)(const std::string& name) = nullptr;  ///< of another version; the same where it has none
};

/// Null where none are known. @param class_name  without a namespace, e.g. "GPT2LMHeadModel"
const WeightNames* weight_names_of_class(std::string_view class_name);
const WeightNames* weight_names_of_type(std::string_view model_type);

/// The names that files may have for the weight `name` of a model, that name first.
std::vector<std::string> names_in_files(const WeightNames& names, const std::string& name);

/// Whether every program works this tensor of old models' files out by itself: masks, frequencies, positions.
/// transformers ignores them, too.
bool is_worked_out(const std::string& name);

}  // namespace accelerate::formats
