#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

#include "accelerate/bigmodel/offload.hpp"
#include "residency/homes/file.hpp"

namespace accelerate::bigmodel {

/// The place of a weight's bytes in an offload folder: in its own file or in a safetensors file. @throws
/// CheckpointError as OffloadedWeightsLoader.
residency::TensorInFile tensor_in_folder(const std::filesystem::path& folder, const std::string& name,
                                         const OffloadedWeight& weight);

/// The index's entry of a tensor that is written.
OffloadedWeight offloaded_weight_of(const at::Tensor& tensor);

}  // namespace accelerate::bigmodel
