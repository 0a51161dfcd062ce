#include "accelerate/checkpoint/zero_to_fp32.hpp"

#include <set>
#include <utility>
#include <vector>

#include "accelerate/checkpoint.hpp"
#include "accelerate/utils/progress.hpp"
#include "checkpoint/weight_files.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredTensor;
using checkpointing::ZeroCheckpoint;

at::ScalarType dtype_of(const StoredTensor& stored) {
  return at::isFloatingType(stored.dtype) ? at::kFloat : stored.dtype;
}
at::Tensor read(const StoredTensor& stored) { return stored.read_whole().to(dtype_of(stored)); }

checkpointing::StoredTensors open(const fs::path& folder, const std::string& tag, bool exclude_frozen_parameters) {
  return ZeroCheckpoint(ZeroCheckpoint::find(folder, tag)).weights({.frozen = !exclude_frozen_parameters});
}

}  // namespace

bool is_zero_checkpoint(const fs::path& folder) {
  if (ZeroCheckpoint::is_one(folder)) return true;
  const auto tag = ZeroCheckpoint::latest(folder);
  return !tag.empty() && ZeroCheckpoint::is_one(folder / tag);
}

std::map<std::string, at::Tensor> get_fp32_state_dict_from_zero_checkpoint(const fs::path& checkpoint_dir,
                                                                           const std::string& tag,
                                                                           bool exclude_frozen_parameters) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, stored] : open(checkpoint_dir, tag, exclude_frozen_parameters))
    result.emplace(name, read(stored));
  return result;
}

void load_state_dict_from_zero_checkpoint(const ModelRef& model, const fs::path& checkpoint_dir,
                                          const std::string& tag) {
  checkpointing::load_state_dict(model, get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag));
}

void convert_zero_checkpoint_to_fp32_state_dict(const fs::path& checkpoint_dir, const fs::path& output_dir,
                                                const ZeroToFp32Options& options) {
  const int64_t most = checkpointing::parse_size(options.max_shard_size);
  const auto tensors = open(checkpoint_dir, options.tag, options.exclude_frozen_parameters);
  std::vector<checkpointing::WeightSize> weights;
  for (const auto& [name, stored] : tensors) {
    int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype_of(stored)));
    for (const int64_t size : stored.sizes) bytes *= size;
    weights.push_back({name, bytes});
  }
  ProgressBar bar({.total = static_cast<int64_t>(tensors.size()),
                   .description = "Merging " + ZeroCheckpoint::find(checkpoint_dir, options.tag).filename().string(),
                   .unit = "tensor",
                   .enabled = {}});
  const auto reader = [&](const StoredTensor& stored) {
    return [&bar, &stored] {
      bar.update();
      return read(stored);
    };
  };
  fs::create_directories(output_dir);
  checkpointing::write_weight_files(output_dir, weights, most, options.safe_serialization,
                                    [&](const fs::path& path, const std::vector<std::string>& names) {
                                      std::vector<formats::TensorSource> sources;
                                      for (const auto& name : names) {
                                        const auto& stored = tensors.at(name);
                                        sources.push_back({name, dtype_of(stored), stored.sizes, reader(stored)});
                                      }
                                      checkpointing::write_tensors("convert_zero_checkpoint_to_fp32_state_dict", path,
                                                                   std::move(sources), options.safe_serialization);
                                    });
}

}  // namespace accelerate
