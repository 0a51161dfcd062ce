// Collectives on the inputs of the reference's generator (rank r of P), the trigger, and the order of shuffled loaders.
#include <torch/torch.h>

#include <filesystem>

#include "accelerate/accelerator.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/data.hpp"
#include "accelerate/state.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::collective_ops_cases {
namespace {

using namespace accelerate;

json listed(const torch::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.is_floating_point() ? json(tensor.item<double>()) : json(tensor.item<int64_t>());
  json list = json::array();
  for (int64_t i = 0; i < tensor.size(0); ++i) list.push_back(listed(tensor[i]));
  return list;
}

torch::Tensor numbers(std::vector<float> values) { return torch::tensor(std::move(values)); }

struct Batch {
  torch::Tensor a;
  std::tuple<torch::Tensor, std::vector<torch::Tensor>> b;
  ACCELERATE_FIELDS(a, b)
};

void fresh_state() {
  AcceleratorState::reset(false);
  GradientState::reset();
}

json shuffled(bool seedable) {
  fresh_state();
  set_seed(42);
  Accelerator accelerator({.cpu = true,
                           .dataloader_config = {.use_seedable_sampler = seedable,
                                                 .data_seed = seedable ? std::optional<int64_t>(42) : std::nullopt}});
  std::vector<torch::Tensor> samples;
  for (int i = 0; i < 12; ++i) samples.push_back(torch::scalar_tensor(i));
  auto loader = accelerator.prepare(data::DataLoader(samples, {.batch_size = 2, .shuffle = true}));
  json epochs = json::array();
  for (int epoch = 0; epoch < 2; ++epoch) {
    json batches = json::array();
    for (auto& batch : loader) batches.push_back(listed(batch.to(torch::kLong)));
    epochs.push_back(batches);
  }
  return {seedable, epochs};
}

/// The outcome of load_state() after states were saved under automatic names.
json load_newest() {
  fresh_state();
  const auto folder =
      std::filesystem::path(support::scratch_dir()) / ("states_" + std::to_string(support::world_size()));
  Accelerator accelerator(
      {.cpu = true, .project_config = {.project_dir = folder, .automatic_checkpoint_naming = true}});
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto [m, o] = accelerator.prepare(model, optimizer);
  accelerator.save_state();
  accelerator.wait_for_everyone();
  accelerator.load_state();
  return "ok";
}

json rank(const json&) {
  const PartialState state;
  const float r = static_cast<float>(state.process_index());
  json found;
  found["gather"] = listed(gather(numbers({r, r + 0.5F})));
  found["gather_scalar"] = listed(gather(torch::scalar_tensor(r)));
  const Batch nested = gather(Batch{numbers({r}), {torch::full({1, 2}, r), {numbers({10 + r})}}});
  found["gather_nested"] = {
      {"a", listed(nested.a)},
      {"b", json::array({listed(std::get<0>(nested.b)), json::array({listed(std::get<1>(nested.b)[0])})})}};
  found["gather_object"] =
      gather_object(std::vector<std::map<std::string, int64_t>>{{{"rank", state.process_index()}}});
  found["gather_object_multi"] = gather_object(std::vector<int64_t>(static_cast<size_t>(r) + 1, state.process_index()));
  found["broadcast_from0"] = listed(broadcast(numbers({r, r * 10})));
  found["broadcast_from1"] = {
      {"x", listed(broadcast(std::map<std::string, torch::Tensor>{{"x", numbers({r, r * 10})}}, 1).at("x"))}};
  std::vector<std::pair<int64_t, std::map<std::string, int64_t>>> objects{
      {state.process_index(), {{"k", state.process_index()}}}};
  broadcast_object_list(objects);
  found["broadcast_object_list"] = {objects[0].first, objects[0].second};
  for (const char* reduction : {"mean", "sum", "max", "none"})
    found[std::string("reduce_") + reduction] = listed(reduce(numbers({r, r + 1, -r}), reduction));
  found["reduce_sum_int"] = listed(reduce(torch::tensor({state.process_index(), int64_t{1}}), "sum"));
  const auto row = torch::arange(1.0, r + 3.0, torch::kFloat);
  found["pad_default"] = listed(pad_across_processes(row));
  found["pad_first"] = listed(pad_across_processes(row, {.pad_first = true}));
  found["pad_-100"] = listed(pad_across_processes(row, {.pad_index = -100}));
  const auto table = torch::arange(2 * (r + 1)).view({2, -1}).to(torch::kFloat);
  found["pad_dim1"] = listed(pad_across_processes(table, {.dim = 1}));
  found["pad_dim-1"] = listed(pad_across_processes(table, {.dim = -1}));
  found["pad_dim_oob"] = listed(pad_across_processes(table.slice(1, 0, 1), {.dim = 5}));
  {
    fresh_state();
    Accelerator accelerator({.cpu = true});
    if (accelerator.is_last_process()) accelerator.set_trigger();
    const bool first = accelerator.check_trigger();
    found["trigger"] = {first, accelerator.check_trigger()};
  }
  found["shuffled"] = {shuffled(true), shuffled(false)};
  found["load_state_none"] = load_newest();
  return found;
}

void run(const json& file, Report& report) {
  for (const auto& [world_size, results] : file.at("by_world_size").items()) {
    const auto found = in_ranks("collective_ops", file, std::stoll(world_size));
    for (const auto& [name, expected] : results.items()) {
      bool same = true;
      for (size_t r = 0; r < found.size(); ++r)
        same = same && found[r].contains(name) && close(found[r][name], expected[r], 1e-6);
      report.check(same, [&, &name = name, &expected = expected, &world_size = world_size] {
        json all = json::array();
        for (const json& rank : found) all.push_back(rank.value(name, json("not run")));
        return world_size + " ranks, " + name + ": expected " + expected.dump() + "\n    found " + all.dump();
      });
    }
  }
}

const Registration registration("collective_ops", {run, rank});

}  // namespace
}  // namespace conformance::collective_ops_cases
