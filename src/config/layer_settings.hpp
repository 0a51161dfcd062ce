#pragma once

#include <vector>

#include "accelerate/config/option.hpp"

namespace accelerate::config {

/// A group for each layer that has settings, from src/parallel/NAME/settings.cpp: that file alone of a layer's folder
/// is compiled into the launcher, and knows no LibTorch. It defines `OptionGroup settings_of_NAME()`.
std::vector<OptionGroup> layer_settings();

}  // namespace accelerate::config
