#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/codes/codes.hpp"

/// Weights in few bits as bitsandbytes' modules save them: several tensors beside each other, whose names begin with
/// the weight's.
///
/// - int8_rowwise: `M.weight` (the codes), `M.SCB` (the scales), `M.weight_format` (the number 0: by rows).
/// - nf4, fp4: `M.weight` (the codes, possibly seen as another dtype), and below that `.absmax`, `.quant_map`, with
///   double quantization `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or `__fp4`):
///   a JSON text in bytes, with the shape, the dtype and sizes of blocks.
namespace accelerate::codes {

/// The tensors to save. @param weight  its full name, which ends with ".weight" for int8_rowwise
/// @param storage  dtype as which the codes of nf4 and fp4 are seen. @throws ConfigError for GGUF's blocks and for
/// names and sizes that the form can't have
std::map<std::string, at::Tensor> bitsandbytes_tensors(const std::string& weight, const Codes& codes,
                                                       at::ScalarType storage = at::kByte);

/// One weight among the tensors of a checkpoint.
struct BitsandbytesWeight {
  std::string weight;  ///< its full name
  Encoding encoding = Encoding::nf4;
  std::vector<std::string> parts;  ///< names of the other tensors that belong to it
};

/// The weights in few bits among tensors of these names.
std::vector<BitsandbytesWeight> find_bitsandbytes_weights(const std::vector<std::string>& names);

/// @param read  gives a tensor by name. @param dtype  of int8 weights, which don't say what they were
/// @throws CheckpointError for parts that are missing, don't fit, or have another meaning than ours
Codes read_bitsandbytes(const BitsandbytesWeight& weight, const std::function<at::Tensor(const std::string&)>& read,
                        at::ScalarType dtype);

}  // namespace accelerate::codes
