#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/utils/error.hpp"

// Any bytes are a configuration that reads the same after it was written, or a ConfigError; and a plugin with that
// configuration is filled, or a ConfigError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  const std::string text(reinterpret_cast<const char*>(data), size);
  // A path would read whatever lies there.
  if (std::error_code ignored; text.find('\0') == std::string::npos && std::filesystem::exists(text, ignored)) return 0;
  try {
    const DeepSpeedConfig config(text);
    const std::string written = config.to_json();
    if (DeepSpeedConfig(written).to_json() != written) std::abort();
    if (DeepSpeedConfig(config.to_json({}, 2)).to_json() != written) std::abort();
    try {
      auto plugin = parallel::resolve({.hf_ds_config = config});
      for (const char* precision : {"no", "bf16"}) plugin.set_mixed_precision(precision);
      plugin.deepspeed_config_process({{"train_batch_size", int64_t{8}}, {"optimizer.params.lr", 0.1}},
                                      /*must_match=*/true);
    } catch (const ConfigError&) {
    }
  } catch (const ConfigError&) {
  }
  return 0;
}
