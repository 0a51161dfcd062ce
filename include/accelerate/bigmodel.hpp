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

// The same functions for models themselves.

inline ModuleSizes compute_module_sizes(const ModelRef& model, const SizeOptions& options = {}) {
  return compute_module_sizes(describe(model), options);
}
inline std::vector<std::vector<std::string>> find_tied_parameters(const ModelRef& model) {
  return find_tied_parameters(describe(model));
}
inline MaximumSizes calculate_maximum_sizes(const ModelRef& model,
                                            const std::vector<std::string>& no_split_module_classes = {}) {
  return calculate_maximum_sizes(describe(model), no_split_module_classes);
}
inline DeviceMap infer_auto_device_map(const ModelRef& model, const DeviceMapOptions& options = {}) {
  return infer_auto_device_map(describe(model), options);
}
inline MaxMemory get_balanced_memory(const ModelRef& model, const BalancedMemoryOptions& options = {}) {
  return get_balanced_memory(describe(model), options);
}
inline DeviceMap make_device_map(const ModelRef& model, const std::string& strategy,
                                 const DeviceMapOptions& options = {}) {
  return make_device_map(describe(model), strategy, options);
}
inline std::vector<std::string> check_device_map(const ModelRef& model, const DeviceMap& device_map) {
  return check_device_map(describe(model), device_map);
}

}  // namespace accelerate
