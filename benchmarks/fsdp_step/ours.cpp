// An FSDP training step of `gpt` (33.7 M parameters), `bert` (BERT-base's shape, 110 M) or `narrow` (100 units of 1 k
// parameters, where the cost per unit rules). Same models, seeds and data as torch_fsdp.py and deepspeed_peer.py.
// usage: bench_fsdp_step gpt|bert|narrow STEPS KIND
//   KIND: 1, 2 (fsdp_version: 1 prefetches in backward, 2 always), ddp, zero1, zero2, zero3 (DeepSpeed's stages)
#include <accelerate/accelerate.hpp>
#include <accelerate/residency.hpp>

#include <chrono>
#include <fstream>
#include <iostream>

#include "../counts_switch.hpp"

namespace nn = torch::nn;
using torch::Tensor;

struct Block : nn::Module {
  int64_t heads;
  bool causal;
  nn::LayerNorm l1, l2;
  nn::Linear qkv, proj, f1, f2;
  Block(int64_t d, int64_t h, bool causal)
      : heads(h),
        causal(causal),
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
    const auto attention = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, causal);
    x = x + proj(attention.transpose(1, 2).reshape({B, T, D}));
    return x + f2(torch::gelu(f1(l2(x))));
  }
};

/// Causal with a head over the vocabulary (GPT), or looking both ways with two classes (BERT).
struct Transformer : nn::Module {
  bool causal;
  nn::Embedding wte, wpe;
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm ln;
  nn::Linear pooler{nullptr}, head{nullptr};
  Transformer(int64_t V, int64_t d, int64_t L, int64_t h, int64_t T, bool causal)
      : causal(causal), wte(V, d), wpe(T, d), ln(nn::LayerNormOptions({d})) {
    register_module("wte", wte), register_module("wpe", wpe);
    for (int64_t i = 0; i < L; ++i)
      blocks.push_back(register_module("h" + std::to_string(i), std::make_shared<Block>(d, h, causal)));
    register_module("ln", ln);
    if (!causal) pooler = register_module("pooler", nn::Linear(d, d));
    head = register_module("head", nn::Linear(nn::LinearOptions(d, causal ? V : 2).bias(false)));
  }
  Tensor forward(const Tensor& ids) {
    auto x = wte(ids) + wpe(torch::arange(ids.size(1)));
    for (auto& block : blocks) x = block->forward(x);
    x = ln(x);
    return head(causal ? x : torch::tanh(pooler(x.select(1, 0))));
  }
};

struct Narrow : nn::Module {
  struct Unit : nn::Module {
    nn::Linear linear{nn::LinearOptions(32, 32)};
    nn::LayerNorm norm{nn::LayerNormOptions({32})};
    Unit() { register_module("linear", linear), register_module("norm", norm); }
    Tensor forward(const Tensor& x) { return x + torch::gelu(norm(linear(x))); }
  };
  std::vector<std::shared_ptr<Unit>> units;
  nn::Linear head{nn::LinearOptions(32, 32)};
  Narrow() {
    for (int i = 0; i < 100; ++i) units.push_back(register_module("u" + std::to_string(i), std::make_shared<Unit>()));
    register_module("head", head);
  }
  Tensor forward(Tensor x) {
    for (auto& unit : units) x = unit->forward(x);
    return head(x);
  }
};

/// A line of /proc/self/<file> in MB.
double memory(const std::string& file, const std::string& key) {
  std::ifstream in("/proc/self/" + file);
  for (std::string word; in >> word;)
    if (double kilobytes = 0; word == key + ":" && in >> kilobytes) return kilobytes / 1024;
  return 0;
}

constexpr int64_t kWarmUp = 2;  // both contestants learn the order of units and fill their pools

accelerate::AcceleratorOptions options_of(const std::string& kind, const std::string& unit) {
  accelerate::AcceleratorOptions options{.cpu = true};
  if (kind.starts_with("zero")) {
    options.deepspeed_plugin = accelerate::DeepSpeedPlugin{
        .hf_ds_config =
            R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {"stage": )" +
            kind.substr(4) + "}}"};
  } else if (kind != "ddp") {
    accelerate::FullyShardedDataParallelPlugin plugin{
        .fsdp_version = std::stoll(kind),
        .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
        .transformer_cls_names_to_wrap = {{unit}}};
    if (kind == "1") plugin.backward_prefetch = accelerate::BackwardPrefetch::backward_pre;
    options.fsdp_plugin = plugin;
  }
  return options;
}

template <class Model, class Loss>
void run(std::shared_ptr<Model> model, const std::string& unit, int64_t steps, const std::string& kind, Loss loss_of) {
  accelerate::Accelerator accelerator(options_of(kind, unit));
  torch::manual_seed(0);
  int64_t parameters = 0, root = 0, largest = 0;
  {
    torch::NoGradGuard no_grad;  // both languages draw the same numbers, in the order of the parameters' names
    for (auto& p : model->parameters()) p.copy_(torch::randn(p.sizes()) * 0.02);
    for (auto& p : model->parameters()) parameters += p.numel();
    root = parameters;
    for (auto& child : model->children()) {
      if (child->parameters().empty() || accelerate::ModelRef(child).submodules().front().class_name != unit) continue;
      int64_t numel = 0;
      for (auto& p : child->parameters()) numel += p.numel();
      root -= numel, largest = std::max(largest, numel);
    }
  }
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [m, opt] = accelerator.prepare(model, optimizer);
  torch::manual_seed(100 + accelerator.process_index());
  std::string losses, times;
  CountsSwitch counts;
  double pss = 0;
  for (int64_t i = 0; i < steps + 1; ++i) {
    const bool timed = i < steps;  // one more step looks at what the ranks share
    if (i == kWarmUp) {
      accelerate::residency::reset_stats();
      std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts here
    }
    counts.next();
    const auto begin = std::chrono::steady_clock::now();
    auto loss = loss_of(m);
    if (!timed) pss = std::max(pss, memory("smaps_rollup", "Pss"));
    accelerator.backward(loss);
    if (!timed) pss = std::max(pss, memory("smaps_rollup", "Pss"));
    opt.step();
    opt.zero_grad();
    const double value = loss.template item<double>();
    if (!timed) break;
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    counts.end();
    char text[64];
    std::snprintf(text, sizeof(text), "%.9g", value);
    losses += (i ? "," : "") + std::string(text);
    times += (i ? "," : "") + std::to_string(ms);
  }
  const auto stats = accelerate::residency::stats();
  // A rank's part of the parameters: its shards always, whole units for a while.
  const double shard = static_cast<double>(parameters * 4 / accelerator.num_processes()) / 1e6,
               bound = shard + static_cast<double>((2 * largest + root) * 4) / 1e6;
  // Without a fault everything is where the shards are, in memory that the ranks share; then they are among what is
  // resident.
  const double parameters_mb = (stats.faults == 0 ? 0 : shard) + static_cast<double>(stats.peak_resident_bytes) / 1e6;
  const auto ranks =
      accelerator.gather(torch::tensor({memory("status", "VmHWM"), pss, parameters_mb}, torch::kDouble).view({1, 3}));
  if (!accelerator.is_main_process()) return;
  const auto worst = std::get<0>(ranks.max(0));
  std::cout << "{\"contestant\":\"ours\",\"answer\":[" << losses << "],\"ms\":[" << times
            << "],\"rss_mb\":" << worst[0].template item<double>() << ",\"pss_mb\":" << worst[1].template item<double>()
            << ",\"parameters_mb\":" << worst[2].template item<double>() << ",\"parameters_bound_mb\":" << bound
            << ",\"faults\":" << stats.faults << ",\"prefetch_hits\":" << stats.prefetch_hits << counts.json() << "}"
            << std::endl;
}

int main(int argc, char** argv) {
  const std::string task = argc > 1 ? argv[1] : "gpt";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 10;
  const std::string kind = argc > 3 ? argv[3] : "1";
  return accelerate::record([&] {
    if (task == "gpt")
      run(std::make_shared<Transformer>(8192, 512, 8, 8, 128, true), "Block", steps, kind, [](auto& m) {
        const auto ids = torch::randint(0, 8192, {4, 129});
        return torch::cross_entropy_loss(m(ids.slice(1, 0, 128)).view({-1, 8192}), ids.slice(1, 1, 129).reshape({-1}));
      });
    else if (task == "bert")
      run(std::make_shared<Transformer>(30522, 768, 12, 12, 512, false), "Block", steps, kind, [](auto& m) {
        const auto ids = torch::randint(0, 30522, {4, 128});
        return torch::cross_entropy_loss(m(ids), torch::randint(0, 2, {4}));
      });
    else
      run(std::make_shared<Narrow>(), "Unit", steps, kind, [](auto& m) {
        return m(torch::randn({16, 32})).square().mean();
      });
  });
}
