#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "checkpoint/universal_folder.hpp"
#include "formats/tensor_source.hpp"

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

/// "model-00001-of-00003.safetensors"; of one alone "model.safetensors".
std::string shard_name(const std::string& stem, const std::string& extension, size_t index, size_t count);
/// The text of an index. @param files  in which each tensor lies @param total  bytes of all tensors
std::string weight_index(const std::map<std::string, std::string>& files, int64_t total);

/// Writes a file of safetensors or, without `safe_serialization`, of torch.save: a dict by name. Tensors are read one
/// after the other. @param operation  begins the messages
void write_tensors(const std::string& operation, const std::filesystem::path& file,
                   std::vector<formats::TensorSource> tensors, bool safe_serialization);

/// Writes one file with these tensors.
using WriteWeights = std::function<void(const std::filesystem::path& file, const std::vector<std::string>& names)>;

/// The Hugging Face layout: model.safetensors (pytorch_model.bin without `safe_serialization`), or the files of
/// split_weights() with their index, written in that order. They appear when all are complete; when one can't be
/// written, those of an earlier save stay. Files of an earlier save that this one does not replace are removed then.
void write_weight_files(const std::filesystem::path& folder, const std::vector<WeightSize>& weights,
                        int64_t max_shard_bytes, bool safe_serialization, const WriteWeights& write);

/// save_model() of other values than the model's own, which has their names. Each memory is written once.
/// @param sizes  of whole tensors by name, where modules compute with parts of them; null: the modules'
/// @throws CheckpointError as check_weights(), before anything is written
void save_model(const ModelRef& model, const std::map<std::string, at::Tensor>& weights, const Sizes* sizes,
                const std::filesystem::path& folder, int64_t max_shard_bytes, bool safe_serialization);

}  // namespace accelerate::checkpointing
