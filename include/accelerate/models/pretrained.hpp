#pragma once

#include <string>
#include <vector>

namespace accelerate::models {

/// The values of a new model's parameters.
enum class Weights {
  fresh,          ///< Random numbers to train from, as the configuration's initializer_range says.
  uninitialized,  ///< Anything: the caller fills every parameter, and the time for random numbers is saved.
};

/// The tensors that from_pretrained did not find or did not use. Lists are sorted.
struct LoadReport {
  /// Parameters of the model that the files lack; they are freshly initialised.
  std::vector<std::string> missing_keys;
  /// Tensors of the files that the model has no place for; they are ignored.
  std::vector<std::string> unexpected_keys;
  /// Parameters whose shape differs, where that was allowed; they are freshly initialised.
  std::vector<std::string> mismatched_keys;
};

}  // namespace accelerate::models
