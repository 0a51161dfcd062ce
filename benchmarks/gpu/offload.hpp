#pragma once

// A LLaMA in fp16 whose weights are in the GPU's memory, in the host's, or in files. peer.py writes it into a folder:
// checkpoint/ is the model, index.json makes the folder itself one of disk_offload(), with the checkpoint's files.

#include <accelerate/bigmodel.hpp>
#include <accelerate/models/llama.hpp>
#include <accelerate/residency.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>

#include "measure.hpp"

namespace bench {

using accelerate::models::LlamaForCausalLM;

inline LlamaForCausalLM make_llama(const std::filesystem::path& folder) {
  const auto empty = accelerate::init_empty_weights();
  LlamaForCausalLM model(accelerate::models::LlamaConfig::from_pretrained(folder / "checkpoint"),
                         accelerate::models::Weights::uninitialized);
  model->to(at::kHalf);
  model->eval();
  return model;
}

/// Forwards of one token each. All but the first, which may fetch all that stays, are measured.
inline Result decode(LlamaForCausalLM& model, const at::Device& device, int64_t count) {
  const torch::InferenceMode inference;
  Result result;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 1) accelerate::residency::reset_stats();
    const auto ids = torch::full({1, 1}, (17 + 31 * i) % model->config().vocab_size,
                                 torch::TensorOptions().dtype(torch::kLong).device(device));
    const double begin = now_ms();
    const auto logits = model->forward(ids).flatten();
    wait_for(device);
    const double ms = now_ms() - begin;
    if (i == 0) result.facts["first_ms"] = ms;
    else result.ms.push_back(ms);
    const auto some = logits.slice(0, 0, 8).to(at::kCPU, at::kDouble).contiguous();
    result.answer.insert(result.answer.end(), some.const_data_ptr<double>(), some.const_data_ptr<double>() + 8);
    result.tokens.push_back(logits.argmax().item<int64_t>());
  }
  result.facts["gb_per_token"] = static_cast<double>(accelerate::residency::stats().bytes_fetched) / 1e9 /
                                 static_cast<double>(std::max<int64_t>(count - 1, 1));
  return result;
}

inline void load(const std::filesystem::path& folder, int64_t count) {
  const at::Device here = device();
  auto model = make_llama(folder);
  std::optional<accelerate::DispatchedModel> dispatched;
  measure("load", [&] {
    const double begin = now_ms();
    const accelerate::Place place = here.is_cpu() ? accelerate::Place("cpu") : accelerate::Place(here.index());
    dispatched = accelerate::load_checkpoint_and_dispatch(
        accelerate::ModelRef(model), folder / "checkpoint",
        {.device_map = accelerate::DeviceMap{{"", place}}, .dtype = at::kHalf});
    wait_for(here);
    return Result{.ms = {now_ms() - begin}};
  });
  measure("token", [&] { return decode(model, here, count); });
}

/// GB/s of large copies from page-locked memory, which no offloading can be faster than.
inline void bandwidth() {
  measure("bandwidth", [] {
    const at::Device here = device();
    constexpr int64_t kBytes = 256 << 20, kCopies = 8;
    const auto from = torch::ones({kBytes}, torch::TensorOptions().dtype(torch::kByte).pinned_memory(!here.is_cpu()));
    auto to = torch::empty({kBytes}, torch::TensorOptions().dtype(torch::kByte).device(here));
    double best = 0;
    for (int64_t round = 0; round < 3; ++round) {
      wait_for(here);
      const double begin = now_ms();
      for (int64_t i = 0; i < kCopies; ++i) to.copy_(from, /*non_blocking=*/true);
      wait_for(here);
      best = std::max(best, static_cast<double>(kCopies * kBytes) / 1e6 / (now_ms() - begin));
    }
    return Result{.answer = {to.select(0, kBytes - 1).item<double>()}, .facts = {{"gb_per_s", best}}};
  });
}

/// Once with what the library decides (on a large GPU weights stay after the first token), once with little room on
/// the device, so that nearly all of them come anew for each token, as the peer has it.
inline void offloaded(const std::filesystem::path& folder, int64_t count, bool disk) {
  const at::Device here = device();
  if (!disk) bandwidth();
  for (const bool streamed : {true, false})
    measure(streamed ? "streamed" : "default", [&] {
      const double begin = now_ms();
      auto model = make_llama(folder);
      accelerate::OffloadAllOptions options{.execution_device = here};
      if (streamed) {
        int64_t bytes = 0;
        for (const auto& parameter : model->parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
        options.offload = {.budget_bytes = std::min<int64_t>(bytes / 2, 2'000'000'000), .always_read = true};
      }
      if (!disk)
        accelerate::load_checkpoint_in_model(accelerate::ModelRef(model), folder / "checkpoint", {.dtype = at::kHalf});
      const auto dispatched = disk ? accelerate::disk_offload(accelerate::ModelRef(model), folder, options)
                                   : accelerate::cpu_offload(accelerate::ModelRef(model), options);
      const double setup = now_ms() - begin;
      Result result = decode(model, here, count);
      result.facts["setup_ms"] = setup;
      return result;
    });
}

}  // namespace bench
