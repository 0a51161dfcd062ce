// Two epochs of y = w * x with gradient accumulation: what happens in each micro-step.
#include <torch/torch.h>

#include <cmath>

#include "accelerate/accelerator.hpp"
#include "accelerate/data.hpp"
#include "accelerate/optim.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::grad_accumulation_cases {
namespace {

using namespace accelerate;

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

json trace(const json& row) {
  AcceleratorState::reset(false);
  GradientState::reset();
  Accelerator accelerator({.cpu = true,
                           .dataloader_config = {.split_batches = row[5]},
                           .gradient_accumulation_plugin = GradientAccumulationPlugin{.num_steps = row[1],
                                                                                      .adjust_scheduler = row[4],
                                                                                      .sync_with_dataloader = row[2],
                                                                                      .sync_each_batch = row[3]}});
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::constant_(model->weight, 1.0);
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  auto schedule = optim::lambda_lr(optimizer, [](int64_t epoch) { return 1.0 - static_cast<double>(epoch) / 1000; });
  const int64_t global = accelerator.num_processes() * 2;
  std::vector<torch::Tensor> samples;
  for (int64_t i = 0; i < row[0].get<int64_t>() * global; ++i)
    samples.push_back(torch::tensor({static_cast<float>(i)}));
  data::DataLoader plain(samples, {.batch_size = row[5].get<bool>() ? global : 2});
  auto [m, opt, sched, loader] = accelerator.prepare(model, optimizer, schedule, plain);
  json sync = json::array(), stepped = json::array(), lr = json::array(), last_epoch = json::array(),
       weights = json::array();
  for (int epoch = 0; epoch < 2; ++epoch)
    for (auto& batch : loader) {
      const auto step = accelerator.accumulate(m);
      const auto before = model->weight.detach().clone();
      accelerator.backward(m(batch).mean() * 1e-3);
      opt.step();
      sched.step();
      opt.zero_grad();
      sync.push_back(accelerator.sync_gradients());
      stepped.push_back(!torch::equal(before, model->weight.detach()));
      lr.push_back(rounded(sched.get_last_lr()[0], 6));
      last_epoch.push_back(sched.last_epoch());
      weights.push_back(rounded(model->weight.item<double>(), 7));
    }
  return {{"sync", sync}, {"stepped", stepped}, {"lr", lr}, {"last_epoch", last_epoch}, {"weight", weights}};
}

json rank(const json& file) {
  const PartialState state;
  json found = json::array();
  for (const json& row : file.at("by_world_size").at(std::to_string(state.num_processes())))
    found.push_back(trace(row));
  return found;
}

void run(const json& file, Report& report) {
  for (const auto& [world_size, rows] : file.at("by_world_size").items()) {
    const auto found = in_ranks("grad_accumulation", file, std::stoll(world_size));
    for (size_t i = 0; i < rows.size(); ++i)
      for (size_t r = 0; r < found.size(); ++r)
        if (const json& mine = found[r][i];
            r == 0 || mine != found[0][i])  // one check a row, and one for each rank that disagrees
          report.check(r == 0 && close(mine, rows[i][6], 1.5e-7), [&, &world_size = world_size, &rows = rows] {
            return world_size + " ranks, " + rows[i].dump() + "\n    found on rank " + std::to_string(r) + " " +
                   mine.dump();
          });
  }
}

const Registration registration("grad_accumulation", {run, rank});

}  // namespace
}  // namespace conformance::grad_accumulation_cases
