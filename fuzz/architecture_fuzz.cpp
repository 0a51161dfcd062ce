#include <cmath>
#include <cstdlib>
#include <string>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/utils/error.hpp"

namespace {

/// @return how many modules there are
int64_t check(const accelerate::ModuleTree& tree) {
  for (const auto* tensors : {&tree.parameters, &tree.buffers})
    for (const auto& tensor : *tensors)
      for (const auto size : tensor.shape)
        if (size < 0) std::abort();
  int64_t modules = 1;
  for (const auto& child : tree.children) modules += check(child);
  return modules;
}

}  // namespace

// Any bytes are a config.json of a model whose size can be said, or an error of ours. Few bytes make no endless model.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  try {
    const auto model = describe_architecture(std::string(reinterpret_cast<const char*>(data), size));
    if (check(model.tree) > 1'000'000) std::abort();
    const auto sizes = calculate_maximum_sizes(model.tree, model.no_split_module_classes);
    if (!(sizes.total >= 0) || !(sizes.largest_layer.bytes <= sizes.total)) std::abort();
    if (model.tree.numel() < 0) std::abort();
  } catch (const ConfigError&) {
  } catch (const CheckpointError&) {
  }
  return 0;
}
