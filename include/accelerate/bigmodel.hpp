#pragma once

/// Big models: how large they are, which part goes where, and how parts are kept on disk.
///
///     auto model = [] { auto empty = accelerate::init_empty_weights(); return BigModel(options); }();
///     auto map = accelerate::infer_auto_device_map(
///         model, {.max_memory = {{{0, "10GiB"}, {"cpu", "30GiB"}}}, .no_split_module_classes = {"Block"}});

#include <string>
#include <vector>

#include "accelerate/bigmodel/align.hpp"
#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/bigmodel/hooks.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The structure of a LibTorch or script module: what the functions on descriptions take. The tensors may be of any
/// kind, also without memory. Class names are those of Submodule.
ACCELERATE_API ModuleTree describe(const ModelRef& model);

namespace bigmodel {
/// describe(), for `caller`. @throws ConfigError naming a class that no module of the model has, and the nearest one.
ACCELERATE_API ModuleTree describe_for(const char* caller, const ModelRef& model,
                                       const std::vector<std::string>& no_split_module_classes);
}  // namespace bigmodel

// The same functions for models themselves. @throws ConfigError for names in no_split_module_classes that the model
// does not have; descriptions, as in the reference, may lack them.

inline ModuleSizes compute_module_sizes(const ModelRef& model, const SizeOptions& options = {}) {
  return compute_module_sizes(describe(model), options);
}
inline std::vector<std::vector<std::string>> find_tied_parameters(const ModelRef& model) {
  return find_tied_parameters(describe(model));
}
inline MaximumSizes calculate_maximum_sizes(const ModelRef& model,
                                            const std::vector<std::string>& no_split_module_classes = {}) {
  return calculate_maximum_sizes(bigmodel::describe_for("calculate_maximum_sizes", model, no_split_module_classes),
                                 no_split_module_classes);
}
inline DeviceMap infer_auto_device_map(const ModelRef& model, const DeviceMapOptions& options = {}) {
  return infer_auto_device_map(bigmodel::describe_for("infer_auto_device_map", model, options.no_split_module_classes),
                               options);
}
inline MaxMemory get_balanced_memory(const ModelRef& model, const BalancedMemoryOptions& options = {}) {
  return get_balanced_memory(bigmodel::describe_for("get_balanced_memory", model, options.no_split_module_classes),
                             options);
}
inline DeviceMap make_device_map(const ModelRef& model, const std::string& strategy,
                                 const DeviceMapOptions& options = {}) {
  return make_device_map(bigmodel::describe_for("make_device_map", model, options.no_split_module_classes), strategy,
                         options);
}
inline std::vector<std::string> check_device_map(const ModelRef& model, const DeviceMap& device_map) {
  return check_device_map(describe(model), device_map);
}

}  // namespace accelerate
