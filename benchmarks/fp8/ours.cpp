// Training in emulated fp8 next to bf16 and fp32: a small GPT-2 on bytes of a text, from the same weights, with the
// same batches; again from other weights with other batches, for each start. usage:
//   bench_fp8 TEXT STEPS WIDTH LAYERS STARTS WARMUP [NAME...]
// WARMUP: steps in which the learning rate rises. Prints a line of JSON for each start of each contestant, then one for
// each contestant: mean and standard deviation over the starts of how far its losses are from bf16's. Losses are means
// of 20 steps; times are those of forward and backward and the scales' updates, taken in turns, a step of each at a
// time.
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
constexpr double kRate = 1e-3;

struct Recipe {
  const char* name;
  bool autocasts;
  std::optional<FP8Recipe> fp8;
  double moved = 0;  ///< weights of the start are, by so much of themselves, at random
};

std::vector<Recipe> recipes() {
  const auto ao = [](AORecipe config) { return FP8Recipe{.backend = FP8Backend::ao, .config = config}; };
  return {{"fp32", false, {}},
          {"bf16", true, {}},
          // How far apart two runs are that begin as far apart as rounding to E4M3 moves weights, and then do the same.
          {"bf16_moved", true, {}, 0.0265},
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
  Run(const Recipe& made, int64_t width, int64_t layers, uint64_t seed) : recipe(made) {
    torch::manual_seed(seed);
    model = models::GPT2LMHeadModel(models::GPT2Config{.vocab_size = 256,
                                                       .n_positions = kTokens,
                                                       .n_embd = width,
                                                       .n_layer = layers,
                                                       .n_head = 4,
                                                       .resid_pdrop = 0,
                                                       .embd_pdrop = 0,
                                                       .attn_pdrop = 0});
    if (recipe.moved > 0) {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : model->parameters()) parameter.mul_(1 + recipe.moved * torch::randn_like(parameter));
    }
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(kRate));
    if (recipe.fp8) training = std::make_unique<FP8Training>(*recipe.fp8, model);
  }

  void step(const at::Tensor& ids, double rate) {
    for (auto& group : optimizer->param_groups()) group.options().set_lr(rate);
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

/// The figures of one contestant.
struct Result {
  std::string name;
  std::vector<double> milliseconds;                 ///< of all steps
  std::vector<double> last_losses;                  ///< of each start
  std::vector<std::vector<double>> against_bf16{};  ///< of each start and window, in percent
};

std::string numbers(const std::vector<double>& values) {
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "[") << std::round(1e4 * values[i]) / 1e4;
  return text.str() + "]";
}

void print(Result& result) {
  const auto& all = result.against_bf16;
  const auto starts = static_cast<double>(all.size());
  std::vector<double> means, deviations;
  double furthest_mean = 0, furthest = 0;
  for (size_t window = 0; window < all.front().size(); ++window) {
    double sum = 0, squares = 0;
    for (const auto& start : all) sum += start[window], furthest = std::max(furthest, std::abs(start[window]));
    const double mean = sum / starts;
    for (const auto& start : all) squares += (start[window] - mean) * (start[window] - mean);
    means.push_back(mean);
    deviations.push_back(std::sqrt(squares / std::max(1.0, starts - 1)));
    furthest_mean = std::max(furthest_mean, std::abs(mean));
  }
  auto& times = result.milliseconds;
  const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  std::cout << "{\"name\": \"" << result.name << "\", \"starts\": " << all.size()
            << ", \"median_milliseconds\": " << *middle << ", \"last_losses\": " << numbers(result.last_losses)
            << ", \"furthest_mean_percent\": " << furthest_mean << ", \"furthest_percent\": " << furthest
            << ", \"mean_percent\": " << numbers(means) << ", \"deviation_percent\": " << numbers(deviations) << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::cerr << "usage: bench_fp8 TEXT STEPS WIDTH LAYERS STARTS WARMUP [NAME...]\n";
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
  const int steps = std::atoi(argv[2]), starts = std::atoi(argv[5]), warmup = std::atoi(argv[6]);
  const std::set<std::string> wanted(argv + 7, argv + argc);
  std::vector<Recipe> chosen;
  for (auto& recipe : recipes())
    if (wanted.empty() || wanted.contains(recipe.name) || std::string(recipe.name) == "bf16")
      chosen.push_back(std::move(recipe));
  std::vector<Result> results;
  for (const auto& recipe : chosen) results.push_back({.name = recipe.name});
  for (int start = 0; start < starts; ++start) {
    const auto seed = static_cast<uint64_t>(2 * start);
    std::vector<Run> runs;
    for (const auto& recipe : chosen) runs.emplace_back(recipe, std::atoi(argv[3]), std::atoi(argv[4]), seed);
    torch::manual_seed(seed + 1);
    for (int step = 0; step < steps; ++step) {
      const auto places = torch::randint(all.size(0) - kTokens - 1, {kBatch, 1}, at::kLong);
      const auto ids = all.index({places + torch::arange(kTokens + 1)}).to(at::kLong);
      for (auto& run : runs) run.step(ids, kRate * std::min(1.0, (step + 1.0) / std::max(1, warmup)));
    }
    const auto reference = std::find_if(runs.begin(), runs.end(), [](const Run& run) {
                             return std::string(run.recipe.name) == "bf16";
                           })->curve();
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto curve = runs[i].curve();
      std::vector<double> against;
      for (size_t window = 0; window < curve.size(); ++window)
        against.push_back(100 * (curve[window] / reference[window] - 1));
      auto& result = results[i];
      std::cout << "{\"name\": \"" << result.name << "\", \"start\": " << start
                << ", \"fp8_products\": " << (runs[i].training ? runs[i].training->counts().fp8_products : 0)
                << ", \"losses\": " << numbers(curve) << ", \"percent\": " << numbers(against) << "}" << std::endl;
      result.milliseconds.insert(result.milliseconds.end(), runs[i].times.begin(), runs[i].times.end());
      result.last_losses.push_back(curve.back());
      result.against_bf16.push_back(against);
    }
  }
  for (auto& result : results) print(result);
}
