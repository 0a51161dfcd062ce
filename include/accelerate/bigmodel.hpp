#pragma once

/// Big models: how large they are, which part goes where, and how parts are kept on disk.
///
///     auto model = [] { auto empty = accelerate::init_empty_weights(); return BigModel(options); }();
///     auto map = accelerate::infer_auto_device_map(model, {.max_memory = {{{0, "10GiB"}, {"cpu", "30GiB"}}},
///     .no_split_module_classes = {"Block"}});

#include <string>
#include <vector>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/bigmodel/hooks.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/model/model_like.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The structure of a LibTorch or script module: what the functions on descriptions take. The tensors may be of any
/// kind, also without memory. Class names are those of Submodule.
ACCELERATE_API ModuleTree describe(const ModelRef& model);
template <ModelLike Model> ModuleTree describe(const Model& model) { return describe(model_ref(model)); }

template <class Model>
concept Describable = requires(const Model& model) {
  describe(model);
};

// The same functions for models themselves.

template <Describable Model> ModuleSizes compute_module_sizes(const Model& model, const SizeOptions& options = {}) {
  return compute_module_sizes(describe(model), options);
}
template <Describable Model> std::vector<std::vector<std::string>> find_tied_parameters(const Model& model) {
  return find_tied_parameters(describe(model));
}
template <Describable Model>
MaximumSizes calculate_maximum_sizes(const Model& model, const std::vector<std::string>& no_split_module_classes = {}) {
  return calculate_maximum_sizes(describe(model), no_split_module_classes);
}
template <Describable Model> DeviceMap infer_auto_device_map(const Model& model, const DeviceMapOptions& options = {}) {
  return infer_auto_device_map(describe(model), options);
}
template <Describable Model>
MaxMemory get_balanced_memory(const Model& model, const BalancedMemoryOptions& options = {}) {
  return get_balanced_memory(describe(model), options);
}
template <Describable Model>
DeviceMap make_device_map(const Model& model, const std::string& strategy, const DeviceMapOptions& options = {}) {
  return make_device_map(describe(model), strategy, options);
}
template <Describable Model>
std::vector<std::string> check_device_map(const Model& model, const DeviceMap& device_map) {
  return check_device_map(describe(model), device_map);
}

}  // namespace accelerate
