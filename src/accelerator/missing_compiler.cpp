#include "accelerator/accelerator_impl.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::string source_of_backend(const AcceleratorOptions& options, const std::string& backend) {
  if (options.dynamo_backend) return fmt::format("AcceleratorOptions::dynamo_backend is {}", backend);
  if (options.dynamo_plugin && options.dynamo_plugin->backend)
    return fmt::format("AcceleratorOptions::dynamo_plugin has backend {}", backend);
  return fmt::format("ACCELERATE_DYNAMO_BACKEND is {}", backend);
}

}  // namespace

TorchDynamoPlugin without_compiler(const AcceleratorOptions& options) {
  if (options.dynamo_backend && options.dynamo_plugin)
    raise<ConfigError>(
        "Accelerator: found dynamo_backend = {} beside a dynamo_plugin, expected one of them; set the plugin's backend",
        *options.dynamo_backend);
  TorchDynamoPlugin plugin = resolve(options.dynamo_plugin.value_or({.backend = options.dynamo_backend}));
  if (*plugin.backend == "no" || plugin.disable) return plugin;
  raise<ConfigError>(
      "Accelerator: {}, but torch.compile is Python's and LibTorch has no compiler for graphs, expected no. Leave it "
      "out (`accelerate launch --dynamo_backend no`): models run as they are. For compiled inference let Python write "
      "a package with torch._inductor.aoti_compile_and_package, and run it as an accelerate::CompiledModel; on an "
      "NVIDIA GPU, an accelerate::CudaGraphModel launches the kernels of a model's forward all at once",
      source_of_backend(options, *plugin.backend));
}

}  // namespace accelerate
