#include "models/direct_rows.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "codes/kernels/multiply.hpp"
#include "models/row_loops.hpp"
#include "residency/chain.hpp"
#include "residency/encoded.hpp"
#include "residency/member.hpp"
#include "utils/parallel.hpp"

namespace accelerate::models::detail {

namespace kernels = codes::kernels;

bool rows_go_directly() {
  static const bool supported = is_supported();
  return supported && !c10::GradMode::is_enabled() && !at::autocast::is_autocast_enabled(at::kCPU) &&
         !at::hasCallbacks() && residency::only_homes_are_asked();
}

const float* direct_numbers(const at::Tensor& vector) {
  const bool lies_here = vector.defined() && vector.is_cpu() && vector.scalar_type() == at::kFloat &&
                         vector.is_contiguous() && !residency::has_key(vector) && !residency::Member::of(vector);
  return lies_here ? vector.const_data_ptr<float>() : nullptr;
}

std::optional<DirectWeight> direct_weight(const at::Tensor& weight, const at::Tensor& bias) {
  DirectWeight found{.n = weight.size(0), .k = weight.size(1)};
  found.numbers = direct_numbers(weight);
  if (!found.numbers) found.packed = residency::packed_for_rows(weight);
  if (bias.defined()) found.bias = direct_numbers(bias);
  if ((!found.numbers && !found.packed) || (bias.defined() && !found.bias)) return std::nullopt;
  return found;
}

void multiply_row(const float* x, std::initializer_list<DirectProduct> products) {
  const auto& instructions = kernels::instruction_set();
  std::vector<kernels::RoundedRow> rounded;
  struct Task {
    const DirectProduct* product;
    const kernels::RoundedRow* row;
    int64_t first, end;  ///< of the groups of all weights
  };
  constexpr size_t kMost = 4;
  rounded.reserve(kMost);
  std::array<Task, kMost> tasks{};
  size_t count = 0;
  int64_t groups = 0, elements = 0;
  for (const auto& product : products) {
    Task task{&product, nullptr, groups, groups + (product.weight.n + kernels::kGroup - 1) / kernels::kGroup};
    if (const auto* packed = product.weight.packed.get()) {
      const auto suits = [&](const kernels::RoundedRow& row) { return row.suits(*packed); };
      auto found = std::find_if(rounded.begin(), rounded.end(), suits);
      if (found == rounded.end()) rounded.emplace_back(instructions, x, *packed), found = rounded.end() - 1;
      task.row = &*found;
    }
    groups = task.end;
    elements += product.weight.n * product.weight.k;
    tasks.at(count++) = task;
  }
  constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread
  parallel_ranges(groups, std::max<int64_t>(1, kGrain * groups / std::max<int64_t>(1, elements)),
                  [&](int64_t begin, int64_t end) {
                    std::vector<float> sums;
                    for (const auto& task : c10::ArrayRef<Task>(tasks.data(), count)) {
                      const auto& weight = task.product->weight;
                      const int64_t first = std::max(begin, task.first), last = std::min(end, task.end);
                      if (first >= last) continue;
                      const int64_t row = (first - task.first) * kernels::kGroup,
                                    until = std::min((last - task.first) * kernels::kGroup, weight.n);
                      float* y = task.product->y;
                      if (task.product->adds) {
                        sums.resize(static_cast<size_t>(weight.n));
                        y = sums.data();
                      }
                      if (task.row) task.row->multiply(*weight.packed, first - task.first, last - task.first, y);
                      for (int64_t i = row; !task.row && i < until; ++i)
                        y[i] = dot(weight.numbers + i * weight.k, x, weight.k);
                      for (int64_t i = row; weight.bias && i < until; ++i) y[i] += weight.bias[i];
                      for (int64_t i = row; task.product->adds && i < until; ++i) task.product->y[i] += y[i];
                    }
                  });
}

void norm_row(const float* x, const float* weight, double eps, int64_t count, float* y) {
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(dot(x, x, count)) / static_cast<double>(count) + eps));
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * scale * weight[i];
}

void gate_row(float* gate, const float* factor, int64_t count) { silu_times(gate, factor, count); }

void turn_row(float* heads, int64_t count, int64_t size, const float* cosines, const float* sines, int64_t turned) {
  const int64_t half = turned / 2;
  for (int64_t head = 0; head < count; ++head) {
    float* const x = heads + head * size;
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosines[i] + b * sines[i];
      x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
  }
}

void attend_row(const float* query, const DirectAttention& a, float* y) {
  constexpr int64_t kGrain = 1 << 15;  // products that are worth a thread
  parallel_ranges(a.heads, std::max<int64_t>(1, kGrain / (a.tokens * a.size)), [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(a.tokens));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t offset = head / (a.heads / a.groups) * a.capacity * a.size;
      const float *const keys = a.keys + offset, *const values = a.values + offset;
      float* const out = y + head * a.size;
      for (int64_t t = 0; t < a.tokens; ++t)
        scores[static_cast<size_t>(t)] = a.scale * dot(query + head * a.size, keys + t * a.size, a.size);
      const float factor = exponentials(scores.data(), a.tokens);
      std::fill_n(out, a.size, 0.0F);
      for (int64_t t = 0; t < a.tokens; ++t)
        add_scaled(out, values + t * a.size, scores[static_cast<size_t>(t)] * factor, a.size);
    }
  });
}

}  // namespace accelerate::models::detail
