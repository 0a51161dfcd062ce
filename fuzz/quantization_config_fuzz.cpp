#include <cstdlib>
#include <string>

#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/utils/error.hpp"

// Any bytes are a config.json whose quantization can be written and reads the same, or a ConfigError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using accelerate::BnbQuantizationConfig;
  try {
    const auto config = BnbQuantizationConfig::from_json({reinterpret_cast<const char*>(data), size});
    config.validate();
    const auto text = config.to_json();
    if (BnbQuantizationConfig::from_json(text).to_json() != text) std::abort();
  } catch (const accelerate::ConfigError&) {
  }
  return 0;
}
