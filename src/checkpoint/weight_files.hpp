#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace accelerate::checkpointing {

struct WeightSize {
  std::string name;
  int64_t bytes = 0;
  std::vector<std::string> parts = {};  ///< what it is called in the file, where that is several tensors; empty: `name`
};

/// The names that share a file, as huggingface_hub splits: filled in the order of `weights` up to `max_shard_bytes`. A
/// tensor above that gets a file of its own, before the one that is being filled, which goes on after it. Without
/// weights: one file without names. Conformance: shard_split.json.
std::vector<std::vector<std::string>> split_weights(const std::vector<WeightSize>& weights, int64_t max_shard_bytes);

/// Writes one file with these tensors.
using WriteWeights = std::function<void(const std::filesystem::path& file, const std::vector<std::string>& names)>;

/// The Hugging Face layout: model.safetensors (pytorch_model.bin without `safe_serialization`), or the files of
/// split_weights() with their index, written in that order. They appear when all are complete; when one can't be
/// written, those of an earlier save stay. Files of an earlier save that this one does not replace are removed then.
void write_weight_files(const std::filesystem::path& folder, const std::vector<WeightSize>& weights,
                        int64_t max_shard_bytes, bool safe_serialization, const WriteWeights& write);

}  // namespace accelerate::checkpointing
