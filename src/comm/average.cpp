#include "comm/average.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "accelerate/utils/error.hpp"

namespace accelerate::comm {
namespace {

constexpr int64_t kBlock = 2048;  ///< elements: the running sum stays in the first-level cache

template <class T, class Sum>
void average_as(T* output, const std::vector<const void*>& inputs, int64_t count, Sum divisor) {
  Sum sum[kBlock];
  for (int64_t from = 0; from < count; from += kBlock) {
    const int64_t n = std::min(kBlock, count - from);
    const T* first = static_cast<const T*>(inputs.front()) + from;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<Sum>(first[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const T* next = static_cast<const T*>(inputs[k]) + from;
      for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<Sum>(next[i]);
    }
    for (int64_t i = 0; i < n; ++i) output[from + i] = static_cast<T>(sum[i] / divisor);
  }
}

}  // namespace

bool can_average(c10::ScalarType type) {
  return type == c10::kFloat || type == c10::kDouble || type == c10::kBFloat16 || type == c10::kHalf;
}

void average(c10::ScalarType type, void* output, const std::vector<const void*>& inputs, int64_t count,
             double divisor) {
  switch (type) {
    case c10::kFloat:
      return average_as(static_cast<float*>(output), inputs, count, static_cast<float>(divisor));
    case c10::kDouble:
      return average_as(static_cast<double*>(output), inputs, count, divisor);
    case c10::kBFloat16:
      return average_as(static_cast<c10::BFloat16*>(output), inputs, count, static_cast<float>(divisor));
    case c10::kHalf:
      return average_as(static_cast<c10::Half*>(output), inputs, count, static_cast<float>(divisor));
    default:
      throw InternalError("average: no kernel for the type");
  }
}

}  // namespace accelerate::comm
