#pragma once

#include <torch/torch.h>

/// A GPT that is small and awkward, for tests of sharding. fsdp_parity.py has the same.
namespace support {

namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    l1 = register_module("l1", nn::LayerNorm(nn::LayerNormOptions({width})));
    l2 = register_module("l2", nn::LayerNorm(nn::LayerNormOptions({width})));
    // No bias: a key's has no effect and a gradient of pure rounding noise, which AdamW would scale up to full steps.
    qkv = register_module("qkv", nn::Linear(nn::LinearOptions(width, 3 * width).bias(false)));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    auto q = qkv(l1(x)).view({b, t, 3, heads, d / heads}).permute({2, 0, 3, 1, 4});
    x = x + out(at::scaled_dot_product_attention(q[0], q[1], q[2], {}, 0.0, true).transpose(1, 2).reshape({b, t, d}));
    return x + down(torch::gelu(up(l2(x))));
  }
  nn::LayerNorm l1{nullptr}, l2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  int64_t heads;
};
TORCH_MODULE(Block);

/// Head tied to the embedding; one parameter of a single element; odd sizes.
struct GptImpl : nn::Module {
  explicit GptImpl(int64_t vocabulary = 61, int64_t width = 24, int64_t layers = 3) {
    wte = register_module("wte", nn::Embedding(vocabulary, width));
    for (int64_t i = 0; i < layers; ++i) blocks.push_back(register_module("h" + std::to_string(i), Block(width, 4)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    scale = register_parameter("scale", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = wte(ids);
    for (auto& block : blocks) x = block->forward(x);
    return torch::linear(norm(x) * scale, wte->weight);
  }
  nn::Embedding wte{nullptr};
  std::vector<Block> blocks;
  nn::LayerNorm norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Gpt);

/// Two groups with their own settings, as everybody trains transformers.
inline torch::optim::AdamW make_adamw(Gpt& model) {
  std::vector<at::Tensor> decay, rest;
  for (const auto& p : model->parameters()) (p.dim() > 1 ? decay : rest).push_back(p);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decay,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0.1)));
  groups.emplace_back(rest,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2).weight_decay(0.0)));
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(3e-3));
}

}  // namespace support
