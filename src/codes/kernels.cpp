#include "accelerate/codes/kernels.hpp"

#include <array>
#include <cstddef>
#include <utility>

#include "codes/kernels/linear.hpp"

namespace accelerate::codes {
namespace {

constexpr Kernels kProducts{kernels::try_linear}, kNone{nullptr};

/// By Encoding's order. A kernel is a line here.
std::array<Kernels, kEncodings> registry{{
    kProducts,  // int8_rowwise
    kProducts,  // nf4
    kProducts,  // fp4
    kProducts,  // q4_0
    kProducts,  // q4_1
    kProducts,  // q5_0
    kProducts,  // q5_1
    kProducts,  // q8_0
    kNone,      // q2_k
    kNone,      // q3_k
    kProducts,  // q4_k
    kProducts,  // q5_k
    kProducts,  // q6_k
}};

}  // namespace

Kernels kernels_of(Encoding encoding) { return registry[static_cast<size_t>(encoding)]; }
Kernels exchange_kernels(Encoding encoding, const Kernels& kernels) {
  return std::exchange(registry[static_cast<size_t>(encoding)], kernels);
}

}  // namespace accelerate::codes
