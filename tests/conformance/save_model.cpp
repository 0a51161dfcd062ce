// How weights are split over files, and the files that save_model writes.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>

#include "accelerate/accelerator.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "checkpoint/weight_files.hpp"
#include "environment.hpp"
#include "folders.hpp"

namespace conformance::save_model_cases {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

/// The index of a folder with several files of weights, else null.
json index_in(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().string().ends_with(".index.json")) return json::parse(std::ifstream(entry.path()));
  return nullptr;
}

// ---- shard_split ----

void run_split(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    std::set<std::string> tied;  // the second name of a tensor: written once here, under the first one
    for (const json& tie : row[2]) tied.insert(tie[0].get<std::string>());
    std::vector<accelerate::checkpointing::WeightSize> weights;
    int64_t total = 0;
    for (const json& tensor : row[0]) {
      const auto name = tensor[0].get<std::string>();
      if (tied.contains(name)) continue;
      int64_t bytes = tensor[2] == "float32" ? 4 : tensor[2] == "int64" ? 8 : 2;
      for (const json& size : tensor[1]) bytes *= size.get<int64_t>();
      weights.push_back({name, bytes});
      total += bytes;
    }
    const auto files = accelerate::checkpointing::split_weights(
        weights, row[1].is_string() ? accelerate::checkpointing::parse_size(row[1]) : row[1].get<int64_t>());
    json found{{"is_sharded", files.size() > 1},
               {"metadata", {{"total_size", total}}},
               {"tensor_to_filename", json::object()},
               {"filename_to_tensors", json::object()}};
    for (size_t i = 0; i < files.size(); ++i) {
      char name[64] = "model.safetensors";
      if (files.size() > 1) std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
      found["filename_to_tensors"][name] = files[i];
      for (const auto& tensor : files[i]) found["tensor_to_filename"][tensor] = name;
    }
    json expected = row[3];
    for (const auto& name : tied) {
      auto& names = expected["filename_to_tensors"][expected["tensor_to_filename"][name].get<std::string>()];
      names.erase(std::find(names.begin(), names.end(), name));
      expected["tensor_to_filename"].erase(name);
    }
    report.check(found == expected, [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

// ---- save_model ----

/// A layer that shares its weight with another one.
struct SharingImpl : nn::Module {
  explicit SharingImpl(const at::Tensor& shared)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", torch::zeros({4}))) {}
  at::Tensor weight, bias;
};
TORCH_MODULE(Sharing);
struct TiedImpl : nn::Module {
  TiedImpl() : a(register_module("a", nn::Linear(4, 4))), b(register_module("b", Sharing(a->weight))) {}
  nn::Linear a;
  Sharing b;
};
TORCH_MODULE(Tied);

json saved(const accelerate::Accelerator& accelerator, const json& what) {
  const auto folder = fresh_folder("save_model", "weights");
  if (what.is_string()) {
    accelerator.save_model(Tied(), folder);
    const accelerate::SafetensorsFile file(folder / "model.safetensors");
    auto names = file.names();
    std::sort(names.begin(), names.end());
    return {{"files", files_in(folder)}, {"keys", names}, {"metadata", file.metadata()}};
  }
  accelerator.save_model(nn::Sequential(nn::Linear(10, 10), nn::Linear(10, 10), nn::Linear(10, 3)), folder,
                         what.value("max_shard_size", "10GB"), what.value("safe_serialization", true));
  return {{"files", files_in(folder)}, {"index", index_in(folder)}};
}

void run(const json& file, Report& report) {
  const accelerate::Accelerator accelerator({.cpu = true});
  for (const json& row : file.at("cases")) {
    const json found = outcome([&] { return saved(accelerator, row[0]); });
    report.check(row[1].contains("error") ? found.is_null() : found == row[1],
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration split_registration("shard_split", {run_split}), registration("save_model", {run});

}  // namespace
}  // namespace conformance::save_model_cases
