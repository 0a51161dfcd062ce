#include "models/images.hpp"
#include "utils/raise.hpp"

#include <c10/core/GradMode.h>

#include <cmath>

namespace accelerate::models {

int64_t count_labels(const JsonFile& config) {
  const auto names = config.root().find("id2label");
  const bool named = names != config.root().end() && names->is_object() && !names->empty();
  return config.size("num_labels", named ? static_cast<int64_t>(names->size()) : 2);
}

void check_images(const std::string& model, const at::Tensor& pixel_values, int64_t channels) {
  if (pixel_values.dim() == 4 && pixel_values.size(1) == channels) return;
  raise<ShapeError>("{}::forward: pixel_values has shape {}, expected [B, {}, height, width].", model,
                    pixel_values.sizes(), channels);
}

void initialize_convolutional(const std::string& name, const at::Tensor& parameter) {
  const c10::NoGradGuard no_grad;
  if (parameter.dim() < 2) {
    parameter.fill_(name.ends_with("weight") ? 1 : 0);
  } else {
    const int64_t fan_out = parameter.numel() / parameter.size(1);
    parameter.normal_(0, std::sqrt(2.0 / static_cast<double>(fan_out)));
  }
}

}  // namespace accelerate::models
