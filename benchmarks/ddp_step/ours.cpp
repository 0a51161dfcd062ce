// A DDP training step: `gpt` (33.7 M parameters, compute-bound) or `mlp` (1 M parameters in 64 layers, overhead-bound).
// Same model, seeds and data as accelerate_peer.py.
#include <accelerate/accelerate.hpp>

#include <chrono>
#include <iostream>

#include "../counts_switch.hpp"

namespace nn = torch::nn;
using torch::Tensor;

struct Block : nn::Module {
  int64_t heads;
  nn::LayerNorm l1, l2;
  nn::Linear qkv, proj, f1, f2;
  Block(int64_t d, int64_t h)
      : heads(h),
        l1(nn::LayerNormOptions({d})),
        l2(nn::LayerNormOptions({d})),
        qkv(d, 3 * d),
        proj(d, d),
        f1(d, 4 * d),
        f2(4 * d, d) {
    register_module("l1", l1), register_module("l2", l2), register_module("qkv", qkv), register_module("proj", proj),
        register_module("f1", f1), register_module("f2", f2);
  }
  Tensor forward(Tensor x) {
    const int64_t B = x.size(0), T = x.size(1), D = x.size(2);
    const auto parts = qkv(l1(x)).view({B, T, 3, heads, D / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attention = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + proj(attention.transpose(1, 2).reshape({B, T, D}));
    return x + f2(torch::gelu(f1(l2(x))));
  }
};

struct GPT : nn::Module {
  nn::Embedding wte, wpe;
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm ln;
  nn::Linear head;
  GPT(int64_t V, int64_t d, int64_t L, int64_t h, int64_t T)
      : wte(V, d), wpe(T, d), ln(nn::LayerNormOptions({d})), head(nn::LinearOptions(d, V).bias(false)) {
    register_module("wte", wte), register_module("wpe", wpe);
    for (int64_t i = 0; i < L; ++i)
      blocks.push_back(register_module("h" + std::to_string(i), std::make_shared<Block>(d, h)));
    register_module("ln", ln), register_module("head", head);
  }
  Tensor forward(const Tensor& ids) {
    auto x = wte(ids) + wpe(torch::arange(ids.size(1)));
    for (auto& block : blocks) x = block->forward(x);
    return head(ln(x));
  }
};

struct MLP : nn::Module {
  std::vector<nn::Linear> layers;
  MLP() {
    for (int i = 0; i < 64; ++i) layers.push_back(register_module("l" + std::to_string(i), nn::Linear(128, 128)));
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = x + torch::relu(layer(x));
    return x;
  }
};

template <class Model, class Step> void run(std::shared_ptr<Model> model, int64_t steps, Step step) {
  accelerate::Accelerator accelerator;
  torch::manual_seed(0);
  {
    torch::NoGradGuard no_grad;  // both languages draw the same numbers, in the order of the parameters' names
    for (auto& p : model->parameters()) p.copy_(torch::randn(p.sizes()) * 0.02);
  }
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [m, opt] = accelerator.prepare(model, optimizer);
  torch::manual_seed(100 + accelerator.process_index());
  std::string losses, times;
  CountsSwitch counts;
  for (int64_t i = 0; i < steps; ++i) {
    counts.next();
    const auto begin = std::chrono::steady_clock::now();
    auto loss = step(m);
    accelerator.backward(loss);
    opt.step();
    opt.zero_grad();
    const double value = loss.template item<double>();
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    counts.end();
    char text[64];
    std::snprintf(text, sizeof(text), "%.9g", value);
    losses += (i ? "," : "") + std::string(text);
    times += (i ? "," : "") + std::to_string(ms);
  }
  if (accelerator.is_main_process())
    std::cout << "{\"contestant\":\"ours\",\"answer\":[" << losses << "],\"ms\":[" << times << "]" << counts.json()
              << "}" << std::endl;
}

int main(int argc, char** argv) {
  const std::string task = argc > 1 ? argv[1] : "gpt";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 10;
  return accelerate::record([&] {
    if (task == "gpt") {
      run(std::make_shared<GPT>(8192, 512, 8, 8, 128), steps, [](auto& m) {
        const auto ids = torch::randint(0, 8192, {4, 129});
        return torch::cross_entropy_loss(m(ids.slice(1, 0, 128)).view({-1, 8192}), ids.slice(1, 1, 129).reshape({-1}));
      });
    } else {
      run(std::make_shared<MLP>(), steps, [](auto& m) { return m(torch::randn({8, 128})).square().mean(); });
    }
  });
}
