#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "formats/gguf_header.hpp"

namespace accelerate::formats {

/// Where a tensor of a Hugging Face checkpoint lies in a GGUF file.
struct GgufSource {
  size_t tensor = 0;           ///< Index of GgufHeader::tensors.
  int64_t first_row = 0;       ///< The tensor begins at this row of the stored one (an expert among those joined).
  std::vector<int64_t> shape;  ///< Hugging Face's.
  int64_t rotary_heads = 0;    ///< Rows of each of so many heads alternate between the halves that Hugging Face keeps
                               ///< apart; 0: rows are in the same order.
  bool transposed = false;
};

/// Every tensor of the file under Hugging Face's name, in the file's order; under its own where the architecture or the
/// name is not known.
/// @throws CheckpointError if the metadata lacks what the mapping needs, or a tensor does not fit it.
std::vector<std::pair<std::string, GgufSource>> hugging_face_tensors(const GgufHeader& header, const std::string& file);

/// The text of config.json. @param rope_factors  The decoded numbers of the tensor rope_freqs.weight; null where there
/// is none. @throws CheckpointError as GgufFile::config_json
std::string gguf_config_json(const GgufHeader& header, const std::string& file, const float* rope_factors);

}  // namespace accelerate::formats
