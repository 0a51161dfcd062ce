#pragma once

#include <cstdint>
#include <string>

#include "accelerate/model/model_ref.hpp"

namespace accelerate {

/// A place in a model's tree of modules. A module that is registered at several places appears at each of them.
struct Submodule {
  std::string path;  ///< dotted name from the root, which is ""
  /// The class's own name, without namespaces, template arguments and the `Impl` of LibTorch's module holders:
  /// "BertLayer".
  std::string class_name;
  /// The C++ type ("mymodels::BertLayerImpl") or the script type ("__torch__.mymodels.BertLayer").
  std::string qualified_class_name;
  /// Its own, without its children's; names are relative to it.
  NamedTensors parameters;
  int64_t parent = -1;  ///< index in the list of the module that it is registered in; -1 for the root
  /// Equal at all places of one module; ModelRef::identity() of a reference to it.
  const void* identity = nullptr;
  /// Null for script modules. Valid as long as the model is.
  torch::nn::Module* module = nullptr;
};

}  // namespace accelerate
