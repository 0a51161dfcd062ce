#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "accelerate/trackers/value.hpp"

namespace accelerate {

/// Images of GeneralTracker::log_images as [N, H, W, C] of uint8, C = 1, 3 or 4, contiguous on the host. Floating ones
/// are multiplied by 255, and cut where they are out of range. `log_kwargs["dataformats"]` says what the dimensions
/// are; without, C is where the size 1, 3 or 4 is, and before H and W if there are two such places.
/// @throws ShapeError naming `name`
at::Tensor images_as_nhwc(const std::string& name, const at::Tensor& images, const TrackerValues& log_kwargs);
/// All of them as one image [H, W, C], eight in a row.
at::Tensor image_grid(const at::Tensor& nhwc);
/// An image [H, W, C] of uint8 as a PNG file. Not compressed, which needs no library and takes no time.
std::string encode_png(const at::Tensor& hwc);

}  // namespace accelerate
