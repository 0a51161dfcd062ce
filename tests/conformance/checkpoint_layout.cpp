// Names of the files that save_state writes, with automatic naming and a limit.
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>

#include "accelerate/accelerator.hpp"
#include "accelerate/data.hpp"
#include "accelerate/optim.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::checkpoint_layout_cases {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

struct Zeros : torch::data::datasets::Dataset<Zeros, at::Tensor> {
  at::Tensor get(size_t) override { return torch::zeros({2}); }
  torch::optional<size_t> size() const override { return 8; }
};

json folders(const fs::path& base) {
  json result = json::object();
  for (const auto& folder : fs::directory_iterator(base)) {
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder))
      if (const auto name = file.path().filename().string(); name != "checkpoint.json")  // the reference has none
        names.push_back(name);
    std::sort(names.begin(), names.end());
    result[folder.path().filename().string()] = names;
  }
  return result;
}

/// The generator's objects: two models and optimizers, a schedule, a shuffling loader, two objects of the user's.
json rank(const json& file) {
  const fs::path base = fs::path(support::scratch_dir()) / ("layout_" + std::to_string(support::world_size()));
  accelerate::Accelerator accelerator(
      {.cpu = true, .project_config = {.project_dir = base, .automatic_checkpoint_naming = true, .total_limit = 2}});
  nn::Linear first(2, 2), second(2, 3);
  torch::optim::AdamW adamw(first->parameters());
  torch::optim::SGD sgd(second->parameters(), 0.1);
  const auto schedule = accelerate::optim::lambda_lr(adamw, [](int64_t) { return 1.0; });
  const accelerate::data::DataLoader loader(Zeros(), {.batch_size = 2, .shuffle = true});
  const auto prepared = accelerator.prepare(first, second, adamw, sgd, schedule, loader);
  int64_t mine = support::rank(), other = 0;
  accelerator.register_for_checkpointing(mine, other);
  json found = json::array();
  for (size_t i = 0; i < file.at("by_world_size").at(std::to_string(support::world_size())).size(); ++i) {
    accelerator.save_state();
    accelerator.wait_for_everyone();
    found.push_back(folders(base / "checkpoints"));
    accelerator.wait_for_everyone();
  }
  return found;
}

void run(const json& file, Report& report) {
  for (const auto& [world_size, listings] : file.at("by_world_size").items()) {
    const auto found = in_ranks("checkpoint_layout", file, std::stoll(world_size));
    for (size_t i = 0; i < listings.size(); ++i)
      for (const json& rank : found)
        report.check(rank[i] == listings[i],
                     [&, &listings = listings] { return listings[i].dump() + "\n    found " + rank[i].dump(); });
  }
}

const Registration registration("checkpoint_layout", {run, rank});

}  // namespace
}  // namespace conformance::checkpoint_layout_cases
