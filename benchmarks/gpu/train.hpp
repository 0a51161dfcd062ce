#pragma once

// A training step of GPT-2 and the path to nccl, alone in a process group of one rank.

#include <accelerate/accelerate.hpp>
#include <accelerate/models/gpt2.hpp>

#include <memory>
#include <optional>
#include <stdexcept>

#include "comm/group.hpp"
#include "measure.hpp"
#include "parallel/averaging/averaging.hpp"

namespace bench {

struct TrainSize {
  int64_t width, layers, heads, vocabulary, batch, tokens;
};

inline TrainSize train_size(const std::string& name) {
  if (name == "124m") return {768, 12, 12, 50257, 8, 1024};
  if (name == "774m") return {1280, 36, 20, 50257, 8, 1024};
  if (name == "tiny") return {64, 2, 2, 512, 2, 32};
  throw std::invalid_argument("train: found size " + name + ", expected 124m, 774m or tiny");
}

/// Both languages draw the same numbers, on the device, in the order of the parameters' names.
inline accelerate::models::GPT2LMHeadModel make_gpt2(const TrainSize& size, const at::Device& device) {
  accelerate::models::GPT2Config config;
  config.n_embd = size.width, config.n_layer = size.layers, config.n_head = size.heads;
  config.vocab_size = size.vocabulary, config.n_positions = size.tokens;
  config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0;
  accelerate::models::GPT2LMHeadModel model(config, accelerate::models::Weights::uninitialized);
  model->to(device);
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> by_name;
  for (const auto& item : model->named_parameters()) by_name.emplace(item.key(), item.value());
  torch::manual_seed(0);
  for (auto& [name, parameter] : by_name) {
    parameter.copy_(torch::randn(parameter.sizes(), parameter.options()) * 0.02);
    if (name.find("ln_") != std::string::npos && name.ends_with("weight")) parameter.add_(1);
  }
  return model;
}

/// All ranks there are: this one. The library makes no group for it by itself.
inline std::shared_ptr<accelerate::comm::Group> lone_group(const at::Device& device) {
  const char* port = std::getenv("MASTER_PORT");
  return accelerate::comm::Group::join({.rank = 0,
                                        .world_size = 1,
                                        .backend = device.is_cuda() ? "nccl" : "gloo",
                                        .master_addr = "127.0.0.1",
                                        .master_port = static_cast<uint16_t>(port ? std::atoi(port) : 29511),
                                        .timeout = std::chrono::seconds(60),
                                        .device = device});
}

constexpr int64_t kBlocks = 5, kCallsPerBlock = 4;  // the device is waited for once per block, as a training loop would

/// Steps on one batch, so that the loss falls far where all works. `with_reducer`: gradients go through DDP's engine,
/// which prepare() leaves out for one rank.
inline Result train(const TrainSize& size, accelerate::AcceleratorOptions options, bool with_reducer) {
  accelerate::AcceleratorState::reset(true);
  accelerate::Accelerator accelerator(std::move(options));
  const at::Device device = accelerator.device();
  auto model = make_gpt2(size, device);
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [prepared, prepared_optimizer] = accelerator.prepare(model, optimizer);
  std::unique_ptr<accelerate::parallel::Averaging> reducer;
  if (with_reducer) {
    accelerate::comm::set_world_group(lone_group(device));
    const accelerate::ModelRef ref(model);
    reducer = std::make_unique<accelerate::parallel::Averaging>(ref.parameters(), ref.buffers(),
                                                                accelerate::DistributedDataParallelKwargs{},
                                                                std::vector<accelerate::parallel::Held>{});
  }
  torch::manual_seed(1);
  const auto ids = torch::randint(size.vocabulary, {size.batch, size.tokens}, torch::kLong).to(device);
  const auto targets = ids.slice(1, 1).reshape({-1});
  Result result;
  std::vector<torch::Tensor> losses;
  if (device.is_cuda()) at::accelerator::resetPeakStats(device.index());
  for (int64_t block = -1; block < kBlocks; ++block) {  // the one before the first warms up
    const double begin = now_ms();
    for (int64_t i = 0; i < kCallsPerBlock; ++i) {
      if (reducer) reducer->before_forward();
      const auto logits = prepared(ids);
      if (reducer) reducer->after_forward({logits});
      const auto loss = torch::cross_entropy_loss(logits.slice(1, 0, -1).reshape({-1, size.vocabulary}), targets);
      if (reducer) reducer->before_backward(loss);
      accelerator.backward(loss);
      if (reducer) reducer->after_backward();
      prepared_optimizer.step();
      prepared_optimizer.zero_grad();
      losses.push_back(loss.detach());
    }
    wait_for(device);
    if (block >= 0) result.ms.push_back((now_ms() - begin) / static_cast<double>(kCallsPerBlock));
  }
  if (device.is_cuda())
    result.facts["peak_mb"] =
        static_cast<double>(at::accelerator::getDeviceStats(device.index()).allocated_bytes[0].peak) / 1e6;
  for (const auto& loss : losses) result.answer.push_back(loss.item<double>());
  reducer.reset();
  if (with_reducer) accelerate::comm::set_world_group(nullptr);
  return result;
}

inline void train_all(const std::string& size_name) {
  const TrainSize size = train_size(size_name);
  measure("plain", [&] { return train(size, {.mixed_precision = "bf16"}, false); });
  accelerate::FullyShardedDataParallelPlugin sharded{
      .fsdp_version = 2,
      .mixed_precision_policy =
          accelerate::MixedPrecision{
              .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat},
      .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"GPT2Block"}}};
  measure("fsdp", [&] { return train(size, {.mixed_precision = "no", .fsdp_plugin = sharded}, false); });
  measure("ddp", [&] { return train(size, {.mixed_precision = "bf16"}, true); });
}

/// The cost of a collective where nothing has to move.
inline void all_reduces() {
  std::shared_ptr<accelerate::comm::Group> group;
  for (const int64_t bytes : {4, 65536, 4194304})
    measure(std::to_string(bytes), [&] {
      const at::Device here = device();
      if (!group) group = lone_group(here);
      auto tensor = torch::ones({bytes / 4}, torch::TensorOptions().device(here));
      Result result;
      constexpr int64_t kCalls = 200;
      for (int64_t block = -1; block < kBlocks; ++block) {
        const double begin = now_ms();
        for (int64_t i = 0; i < kCalls; ++i) group->all_reduce_(tensor, accelerate::Reduction::sum);
        wait_for(here);
        if (block >= 0) result.ms.push_back((now_ms() - begin) / static_cast<double>(kCalls));
      }
      result.answer = {tensor.sum().item<double>()};
      return result;
    });
}

/// From the launcher's start to the end of the first step; the runner times the whole process.
inline void first_step() {
  measure("first step", [] {
    accelerate::Accelerator accelerator;
    auto model = torch::nn::Linear(4, 1);
    torch::nn::init::constant_(model->weight, 1.0);
    torch::nn::init::constant_(model->bias, 0.0);
    auto optimizer = torch::optim::SGD(model->parameters(), 0.1);
    auto [prepared, prepared_optimizer] = accelerator.prepare(model, optimizer);
    const auto loss = prepared(torch::ones({2, 4}, accelerator.device())).mean();
    accelerator.backward(loss);
    prepared_optimizer.step();
    return Result{.answer = {loss.item<double>()}};
  });
}

}  // namespace bench
