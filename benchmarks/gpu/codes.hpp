#pragma once

// Products with a square weight in few bits, and a step of training with adapters beside weights in nf4.

#include <accelerate/accelerate.hpp>
#include <accelerate/adapters.hpp>
#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/precision/fp8.hpp>

#include <functional>
#include <optional>

#include "measure.hpp"
#include "offload.hpp"

namespace bench {

inline torch::nn::Sequential square_layer(int64_t width, const at::Device& device) {
  torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  net[0]->as<torch::nn::LinearImpl>()->weight.copy_(torch::randn({width, width}) * 0.02);
  net->to(device, at::kBFloat16);
  return net;
}

/// A layer in bf16, nf4, int8 (LLM.int8()) and fp8 for 1 to `width` rows in bf16.
inline void products(int64_t width) {
  const at::Device here = device();
  const torch::InferenceMode inference;
  for (const std::string kind : {"bf16", "nf4", "int8", "fp8"}) {
    auto net = square_layer(width, here);
    std::optional<accelerate::DispatchedModel> quantized;
    std::optional<accelerate::FP8Training> fp8;
    accelerate::BnbQuantizationConfig config;
    config.skip_modules.emplace();
    config.torch_dtype = at::kBFloat16;
    if (kind == "nf4") config.load_in_4bit = true, config.bnb_4bit_quant_type = "nf4";
    if (kind == "nf4") config.bnb_4bit_compute_dtype = at::kBFloat16;
    if (kind == "int8") config.load_in_8bit = true, config.llm_int8_threshold = 0;
    if (kind == "nf4" || kind == "int8")
      quantized = accelerate::load_and_quantize_model(accelerate::ModelRef(net), config);
    if (kind == "fp8") fp8.emplace(accelerate::FP8Recipe{}, accelerate::ModelRef(net));
    for (const int64_t rows : {int64_t{1}, int64_t{16}, int64_t{256}, width}) {
      if (kind == "fp8" && rows % 16 != 0) continue;  // _scaled_mm has none
      measure(kind + ", " + std::to_string(rows) + " rows", [&] {
        torch::manual_seed(1);
        const auto x = torch::randn({rows, width}).to(here, at::kBFloat16);
        const auto product = [&] {
          std::optional<accelerate::FP8Scope> scope;
          if (fp8) scope.emplace(*fp8);
          return net->forward(x);
        };
        Result result;
        constexpr int64_t kCalls = 20;
        torch::Tensor y;
        for (int64_t block = -1; block < 5; ++block) {
          const double begin = now_ms();
          for (int64_t i = 0; i < kCalls; ++i) y = product();
          wait_for(here);
          if (block >= 0) result.ms.push_back((now_ms() - begin) / static_cast<double>(kCalls));
        }
        const auto some = y.flatten().slice(0, 0, 16).to(at::kCPU, at::kDouble).contiguous();
        result.answer.assign(some.const_data_ptr<double>(), some.const_data_ptr<double>() + some.numel());
        return result;
      });
    }
  }
}

/// Steps of LoRA on the query and value projections of the LLaMA that peer.py has written, its weights in nf4. The
/// answer is the first loss, which adapters have no part in yet.
inline void qlora(const std::filesystem::path& folder, int64_t tokens) {
  const at::Device here = device();
  measure("step", [&] {
    auto model = make_llama(folder);
    const accelerate::BnbQuantizationConfig config{.load_in_4bit = true,
                                                   .bnb_4bit_quant_type = "nf4",
                                                   .bnb_4bit_compute_dtype = at::kBFloat16,
                                                   .torch_dtype = at::kBFloat16};
    const accelerate::Place place = here.is_cpu() ? accelerate::Place("cpu") : accelerate::Place(here.index());
    const auto quantized = accelerate::load_and_quantize_model(
        accelerate::ModelRef(model), config, folder / "checkpoint", {.device_map = accelerate::DeviceMap{{"", place}}});
    const auto adapter =
        accelerate::add_adapter(model, {.r = 16, .lora_alpha = 32, .target_modules = {"q_proj", "v_proj"}});
    std::vector<torch::Tensor> trained;
    for (const auto& parameter : model->parameters())
      if (parameter.requires_grad()) trained.push_back(parameter);
    torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-4));
    model->train();
    torch::manual_seed(1);
    const auto ids = torch::randint(model->config().vocab_size, {1, tokens}, torch::kLong).to(here);
    const auto targets = ids.slice(1, 1).reshape({-1});
    Result result;
    if (here.is_cuda()) at::accelerator::resetPeakStats(here.index());
    for (int64_t step = 0; step < 6; ++step) {
      const double begin = now_ms();
      const auto logits = model->forward(ids);
      const auto loss =
          torch::cross_entropy_loss(logits.slice(1, 0, -1).reshape({-1, logits.size(-1)}).to(at::kFloat), targets);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      wait_for(here);
      if (step > 0) result.ms.push_back(now_ms() - begin);
      else result.answer = {loss.item<double>()};
    }
    if (here.is_cuda())
      result.facts["peak_mb"] =
          static_cast<double>(at::accelerator::getDeviceStats(here.index()).allocated_bytes[0].peak) / 1e6;
    return result;
  });
}

}  // namespace bench
