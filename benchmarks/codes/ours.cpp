// Products on codes next to our fp32: a table over encodings and rows, and how near decoding comes to the memory's
// speed. Prints Markdown.
//
// usage: bench_codes [ROUNDS]      OMP_NUM_THREADS threads; ATEN_CPU_CAPABILITY=avx2 for that instruction set
//
// Answers first: a product on codes must be within 1 % of the one with decoded weights. Then all contestants take turns
// in every round, and the best round counts.
#include <accelerate/codes/codes.hpp>
#include <accelerate/codes/kernels.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "models/row_operators.hpp"
#include "utils/parallel.hpp"

namespace {

namespace codes = accelerate::codes;
using at::Tensor;
using codes::Codes;
using codes::Encoding;

constexpr Encoding kEncodings[] = {Encoding::int8_rowwise, Encoding::q8_0, Encoding::q6_k, Encoding::q5_k,
                                   Encoding::q5_1,         Encoding::q4_k, Encoding::q4_1, Encoding::q4_0,
                                   Encoding::nf4,          Encoding::fp4};

/// With one thread its processor time, which others on the machine change little; else the time on the wall.
double milliseconds(const std::function<void()>& work) {
  const auto now = [] {
    if (at::get_num_threads() > 1)
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
  };
  const double begin = now();
  work();
  return now() - begin;
}

volatile uint64_t sink = 0;

/// Reads all bytes once, on all threads: the memory's speed.
void add_up(const Tensor& bytes) {
  const auto* const numbers = static_cast<const uint64_t*>(bytes.const_data_ptr());
  accelerate::parallel_ranges(bytes.numel() / 8, 1 << 14, [&](int64_t begin, int64_t end) {
    uint64_t sums[8] = {};
    for (int64_t i = begin; i + 8 <= end; i += 8)
      for (int64_t j = 0; j < 8; ++j) sums[j] += numbers[i + j];
    for (const uint64_t sum : sums) sink = sink + sum;
  });
}

void check_answer(const Codes& w, const Tensor& x, const Tensor& y) {
  const auto expected = torch::matmul(x, codes::decode(w, at::kFloat).t());
  const double error = ((y - expected).norm() / expected.norm()).item<double>();
  if (error < 0.01) return;
  std::fprintf(stderr, "%s: the product is off by %.4f, so times mean nothing\n",
               std::string(codes::name(w.encoding)).c_str(), error);
  std::exit(1);
}

void rows_table(int rounds) {
  constexpr int64_t kN = 4096, kK = 4096;
  std::printf("| rows | fp32 |");
  std::vector<Codes> weights;
  for (const auto encoding : kEncodings) {
    weights.push_back(codes::encode(torch::randn({kN, kK}), {.encoding = encoding}));
    std::printf(" %s |", std::string(codes::name(encoding)).c_str());
  }
  std::printf("\n|---|---|");
  for (size_t i = 0; i < weights.size(); ++i) std::printf("---|");
  const auto dense = torch::randn({kN, kK});
  for (const auto& w : weights) {
    const auto x = torch::randn({3, kK});
    check_answer(w, x, codes::linear(x, w));
  }
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    const auto x = torch::randn({rows, kK});
    std::vector<double> best(weights.size() + 1, 1e9);
    for (int round = 0; round < rounds; ++round) {
      best[0] = std::min(best[0], milliseconds([&] { accelerate::models::detail::project(x, dense); }));
      for (size_t i = 0; i < weights.size(); ++i)
        best[i + 1] = std::min(best[i + 1], milliseconds([&] { codes::linear(x, weights[i]); }));
    }
    std::printf("\n| %ld | %.2f |", static_cast<long>(rows), best[0]);
    for (size_t i = 1; i < best.size(); ++i) std::printf(" %.2f (%.1fx) |", best[i], best[0] / best[i]);
    std::fflush(stdout);
  }
  std::printf("\n\n");
}

/// All products of a token of SmolLM2-135M, whose head is in 8 bits in its GGUF file, and a sum over the same bytes.
void token(int rounds) {
  struct Shape {
    int64_t n, k;
    Encoding encoding;
  };
  constexpr int64_t kLayers = 30, kHidden = 576, kKeys = 192, kInner = 1536, kWords = 49152;
  std::vector<Codes> weights;
  std::vector<Tensor> inputs;
  int64_t bytes = 0;
  const auto add = [&](int64_t n, int64_t k, Encoding encoding) {
    weights.push_back(codes::encode(torch::randn({n, k}), {.encoding = encoding}));
    inputs.push_back(torch::randn({1, k}));
    bytes += weights.back().bytes();
  };
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    for (const auto& [n, k] : {std::pair{kHidden, kHidden},
                               {kKeys, kHidden},
                               {kKeys, kHidden},
                               {kHidden, kHidden},
                               {kInner, kHidden},
                               {kInner, kHidden},
                               {kHidden, kInner}})
      add(n, k, Encoding::q4_1);
  }
  add(kWords, kHidden, Encoding::q8_0);
  for (size_t i = 0; i < weights.size(); ++i) check_answer(weights[i], inputs[i], codes::linear(inputs[i], weights[i]));
  double product = 1e9, sum = 1e9;
  for (int round = 0; round < rounds; ++round) {
    product = std::min(product, milliseconds([&] {
                         for (size_t i = 0; i < weights.size(); ++i) codes::linear(inputs[i], weights[i]);
                       }));
    sum = std::min(sum, milliseconds([&] {
                     // Where products read them, so that both have the same pages.
                     for (const auto& w : weights) add_up(codes::kernels::packed_of(w)->codes);
                   }));
  }
  std::printf(
      "All products of a token of SmolLM2-135M (Q4_1, head in Q8_0), %.1f MB: %.2f ms, %.1f GB/s; sums over the "
      "same bytes: %.2f ms, %.1f GB/s.\n",
      static_cast<double>(bytes) / 1e6, product, static_cast<double>(bytes) / product / 1e6, sum,
      static_cast<double>(bytes) / sum / 1e6);
}

}  // namespace

int main(int count, char** arguments) {
  const torch::InferenceMode inference;
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 20;
  std::printf(
      "%d threads, %s, best of %d rounds, milliseconds (and how many times faster than fp32), weight of 4096 by "
      "4096\n\n",
      at::get_num_threads(), accelerate::codes::kernels::instruction_set().name, rounds);
  rows_table(rounds);
  token(5 * rounds);
}
