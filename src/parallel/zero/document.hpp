#pragma once

#include <nlohmann/json.hpp>

#include "accelerate/parallel/deepspeed_plugin.hpp"

namespace accelerate {

/// Ordered, because the first "auto" without a value is the one that an error names.
struct DeepSpeedConfig::Document {
  nlohmann::ordered_json json;
};

}  // namespace accelerate
