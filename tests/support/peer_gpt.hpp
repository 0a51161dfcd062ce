#pragma once

#include "accelerate/accelerate.hpp"

/// The model of the peer that DeepSpeed trains (conformance: deepspeed_losses.json): modules are made in its order, so
/// that they draw the same values.
namespace support {

struct PeerSizes {
  int64_t vocabulary = 16, width = 8, layers = 1, heads = 2, tokens = 4;
};

struct PeerBlockImpl : torch::nn::Module {
  PeerBlockImpl(int64_t width, int64_t heads) : heads_(heads) {
    namespace nn = torch::nn;
    ln_1 = register_module("ln_1", nn::LayerNorm(nn::LayerNormOptions({width})));
    ln_2 = register_module("ln_2", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    proj = register_module("proj", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto parts = qkv(ln_1(x)).view({x.size(0), x.size(1), 3, heads_, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attention = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + proj(attention.transpose(1, 2).reshape(x.sizes()));
    return x + down(torch::gelu(up(ln_2(x))));
  }
  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};

 private:
  int64_t heads_;
};
TORCH_MODULE(PeerBlock);

struct PeerGptImpl : torch::nn::Module {
  PeerGptImpl(const PeerSizes& sizes, bool tied) {
    namespace nn = torch::nn;
    wte = register_module("wte", nn::Embedding(sizes.vocabulary, sizes.width));
    wpe = register_module("wpe", nn::Embedding(sizes.tokens, sizes.width));
    blocks = register_module("blocks", nn::ModuleList());
    for (int64_t i = 0; i < sizes.layers; ++i) blocks->push_back(PeerBlock(sizes.width, sizes.heads));
    ln_f = register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({sizes.width})));
    head = register_module("head", nn::Linear(nn::LinearOptions(sizes.width, sizes.vocabulary).bias(false)));
    if (tied) accelerate::tie(wte, "weight", head, "weight");
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = wte(ids) + wpe(torch::arange(ids.size(1)));
    for (const auto& block : *blocks) x = block->as<PeerBlockImpl>()->forward(x);
    return head(ln_f(x));
  }
  torch::nn::Embedding wte{nullptr}, wpe{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(PeerGpt);

}  // namespace support
