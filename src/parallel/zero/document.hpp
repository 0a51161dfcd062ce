#pragma once

#include <nlohmann/json.hpp>

#include "accelerate/parallel/deepspeed_plugin.hpp"

namespace accelerate {

/// Ordered, because the first "auto" without a value is the one that an error names.
struct DeepSpeedConfig::Document {
  nlohmann::ordered_json json;
  bool of_fields = false;             ///< made of the plugin's fields: no file gave any of it
  bool gave_steps_per_print = false;  ///< the plugin has overwritten the file's own
  bool asked_for_init = false;        ///< zero3_init_flag was given, and acts at this stage
};

}  // namespace accelerate
