#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "input/regular_expression.hpp"
#include "parallel/sharding/settings.hpp"

namespace accelerate::parallel {

/// Stages 0 to 2: parameters in the order of registration, of at most so many elements together. One that is larger is
/// alone. A unit's gradients are reduced together, and its parameters gathered together after a step.
std::vector<ShardedUnit> units_by_size(const ModelRef& model, int64_t most_elements);

/// The facts that decide about the units of stage 3.
struct ModuleUnits {
  int64_t stays_up_to = 0;       ///< parameters of at most so many elements stay whole …
  int64_t all_that_stays = 0;    ///< … of at most so many together, in the order of registration
  int64_t smallest_average = 0;  ///< modules with fewer elements a module, below and including it, come as a whole
  int64_t largest_whole = 0;     ///< as do those with at most so many elements, below and including it
  /// Modules that come as a whole: classes, by the last part of their names, dotted names, and ends of these.
  std::vector<std::string> classes = {}, names = {}, name_suffixes = {};
};
/// Stage 3: the parameters of one module, as DeepSpeed fetches them, each once, in the module that registers it first;
/// before them those that stay. @param unmatched  is told which of the lists' entries no module is
std::vector<ShardedUnit> units_by_module(const ModelRef& model, const ModuleUnits& how,
                                         const std::function<void(const std::string& entry)>& unmatched);

/// Parameters that modules of these classes register, classes by the last part of their names.
/// @throws ConfigError for a class that is neither LibTorch's nor the model's
std::set<const at::TensorImpl*> parameters_of_classes(const ModelRef& model, const std::vector<std::string>& classes);

/// The expression in an entry of data_types.keep_in_fp32_modules, where * stands for any characters.
/// It may stand anywhere in the text. @throws ConfigError
RegularExpression expression_of_buffers(const std::string& pattern);
/// Full names of the buffers that a pattern matches anywhere. @param unmatched  is told which patterns match none
std::set<std::string> buffers_like(const ModelRef& model, const std::vector<std::string>& patterns,
                                   const std::function<void(const std::string& pattern)>& unmatched);

}  // namespace accelerate::parallel
