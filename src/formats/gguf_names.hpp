#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "formats/gguf_header.hpp"

namespace accelerate::formats {

/// The place of a Hugging Face checkpoint's tensor in a GGUF file.
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

/// The properties of a model that decide how its tensors are stored.
struct GgufForm {
  std::string architecture;  ///< llama.cpp's name: "llama", "qwen2" or "gpt2"
  int64_t layers = 0, heads = 0, key_value_heads = 0;
  int64_t experts = 0;  ///< 0: one MLP in each layer
  bool tied = false;    ///< the embeddings are the head
};

/// A tensor of a GGUF file, and what of a Hugging Face checkpoint it is made of: the reverse of GgufSource.
struct GgufTarget {
  std::string name;
  std::vector<int64_t> shape;      ///< PyTorch's order of dimensions
  std::vector<std::string> parts;  ///< names in the checkpoint: one, or those of the experts that are joined
  int64_t rotary_heads = 0;
  bool transposed = false;
};

/// All that a file of this model has, in an order of its own. @param shapes  the checkpoint's. Tensors of old
/// models' files that every program works out by itself are left out, and so is the head of tied embeddings.
/// @param source  begins messages. @throws CheckpointError for a tensor without a place, and for one that is missing
std::vector<GgufTarget> gguf_tensors(const GgufForm& form, const std::map<std::string, std::vector<int64_t>>& shapes,
                                     const std::string& source);

}  // namespace accelerate::formats
