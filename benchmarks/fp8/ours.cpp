// Training in emulated fp8 next to bf16 and fp32: a small GPT-2 on bytes of a text, from the same weights, with the
// same batches. usage: bench_fp8 TEXT STEPS WIDTH LAYERS [NAME...]; prints a line of JSON for each contestant. Losses
// are means of 20 steps; times are those of forward and backward and the scales' updates, taken in turns, a step of
// each at a time.
#include <torch/torch.h>
#include <accelerate/models/gpt2.hpp>
#include <accelerate/precision.hpp>
#include <accelerate/precision/fp8.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>

using namespace accelerate;

namespace {

constexpr int64_t kBatch = 8, kTokens = 64, kWindow = 20;

struct Recipe {
  const char* name;
  bool autocasts;
  std::optional<FP8Recipe> fp8;
};

std::vector<Recipe> recipes() {
  const auto ao = [](AORecipe config) { return FP8Recipe{.backend = FP8Backend::ao, .config = config}; };
  return {{"fp32", false, {}},
          {"bf16", true, {}},
          {"te", true, FP8Recipe{}},
          {"te_max_16", true, FP8Recipe{.amax_history_len = 16, .amax_compute_algo = AmaxComputeAlgo::max}},
          {"te_current", true, FP8Recipe{.use_current_scaling = true}},
          {"te_mxfp8", true, FP8Recipe{.use_mxfp8_block_scaling = true}},
          {"ao_tensorwise", true, ao(AORecipe::tensorwise)},
          {"ao_rowwise", true, ao(AORecipe::rowwise)},
          {"ao_rowwise_with_gw_hp", true, ao(AORecipe::rowwise_with_gw_hp)},
          {"msamp", true, FP8Recipe{.backend = FP8Backend::msamp}}};
}

struct Run {
  Run(Recipe made, int64_t width, int64_t layers) : recipe(std::move(made)) {
    torch::manual_seed(0);
    model = models::GPT2LMHeadModel(models::GPT2Config{.vocab_size = 256,
                                                       .n_positions = kTokens,
                                                       .n_embd = width,
                                                       .n_layer = layers,
                                                       .n_head = 4,
                                                       .resid_pdrop = 0,
                                                       .embd_pdrop = 0,
                                                       .attn_pdrop = 0});
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
    if (recipe.fp8) training = std::make_unique<FP8Training>(*recipe.fp8, model);
  }

  void step(const at::Tensor& ids) {
    optimizer->zero_grad();
    const auto begin = std::chrono::steady_clock::now();
    at::Tensor loss;
    {
      const auto region = autocast(at::kCPU, recipe.autocasts ? std::optional(at::kBFloat16) : std::nullopt);
      std::optional<FP8Scope> scope;
      if (training) scope.emplace(*training);
      const auto logits = model(ids.slice(1, 0, kTokens)).to(at::kFloat);
      if (scope) scope->finish();
      loss = torch::nn::functional::cross_entropy(logits.reshape({-1, 256}), ids.slice(1, 1).reshape({-1}));
    }
    loss.backward();
    if (training) training->after_backward();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    optimizer->step();
    losses.push_back(loss.item<double>());
  }

  std::vector<double> curve() const {
    std::vector<double> means;
    for (size_t i = 0; i + kWindow <= losses.size(); i += kWindow) {
      double sum = 0;
      for (size_t j = i; j < i + kWindow; ++j) sum += losses[j];
      means.push_back(sum / kWindow);
    }
    return means;
  }

  Recipe recipe;
  models::GPT2LMHeadModel model{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer;
  std::unique_ptr<FP8Training> training;
  std::vector<double> losses, times;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: bench_fp8 TEXT STEPS WIDTH LAYERS [NAME...]\n";
    return 2;
  }
  std::ostringstream text;
  text << std::ifstream(argv[1], std::ios::binary).rdbuf();
  const std::string bytes = text.str();
  if (bytes.size() < 2 * kTokens) {
    std::cerr << argv[1] << " has " << bytes.size() << " bytes, expected some thousands\n";
    return 2;
  }
  auto all = torch::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), all.data_ptr<uint8_t>());
  const std::set<std::string> wanted(argv + 5, argv + argc);
  std::vector<Run> runs;
  for (const auto& recipe : recipes())
    if (wanted.empty() || wanted.contains(recipe.name) || std::string(recipe.name) == "bf16")
      runs.emplace_back(recipe, std::atoi(argv[3]), std::atoi(argv[4]));
  torch::manual_seed(1);
  for (int step = 0; step < std::atoi(argv[2]); ++step) {
    const auto starts = torch::randint(all.size(0) - kTokens - 1, {kBatch, 1}, at::kLong);
    const auto ids = all.index({starts + torch::arange(kTokens + 1)}).to(at::kLong);
    for (auto& run : runs) run.step(ids);
  }
  const auto reference = std::find_if(runs.begin(), runs.end(), [](const Run& run) {
                           return std::string(run.recipe.name) == "bf16";
                         })->curve();
  for (auto& run : runs) {
    const auto curve = run.curve();
    double furthest = 0;
    for (size_t i = 0; i < curve.size(); ++i)
      furthest = std::max(furthest, std::abs(curve[i] - reference[i]) / reference[i]);
    std::nth_element(run.times.begin(), run.times.begin() + static_cast<ptrdiff_t>(run.times.size() / 2),
                     run.times.end());
    std::cout << "{\"name\": \"" << run.recipe.name << "\", \"milliseconds\": " << run.times[run.times.size() / 2]
              << ", \"last_loss\": " << curve.back()
              << ", \"last_against_bf16_percent\": " << 100 * (curve.back() / reference.back() - 1)
              << ", \"furthest_from_bf16_percent\": " << 100 * furthest
              << ", \"fp8_products\": " << (run.training ? run.training->counts().fp8_products : 0)
              << ", \"against_bf16_percent\": [";
    for (size_t i = 0; i < curve.size(); ++i)
      std::cout << (i ? ", " : "") << std::round(1e4 * (curve[i] / reference[i] - 1)) / 100;
    std::cout << "]}\n";
  }
}
