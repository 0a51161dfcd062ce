#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace accelerate::data {

/// One 64-bit seed from `generator`, or from LibTorch's default one.
int64_t draw_seed(const std::optional<at::Generator>& generator);
/// A CPU generator of its own.
at::Generator seeded_generator(int64_t seed);

}  // namespace accelerate::data
