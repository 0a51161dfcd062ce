#include "utils/parallel.hpp"

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace accelerate {

void parallel_ranges(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work) {
  if (count <= 0) return;
  // An operator over bytes that nobody looks at, one for each grain: their addresses are the numbers.
  const int64_t grains = (count - 1) / grain + 1;
  at::Tensor places = at::empty({grains}, at::TensorOptions().dtype(at::kByte));
  const auto* const zero = static_cast<const char*>(places.const_data_ptr());
  at::TensorIterator::nullary_op(places).for_each(
      [&](char** data, const int64_t* strides, int64_t inner, int64_t outer) {
        for (int64_t i = 0; i < outer; ++i) {
          const int64_t begin = data[0] + i * strides[1] - zero;
          work(begin * grain, std::min((begin + inner) * grain, count));
        }
      },
      /*grain_size=*/1);
}

}  // namespace accelerate
