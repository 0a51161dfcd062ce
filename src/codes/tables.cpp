#include <array>

#include "accelerate/codes/codes.hpp"
#include "codes/blockwise.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

constexpr std::array<float, 16> kNf4{-1.0F,
                                     -0.6961928009986877F,
                                     -0.5250730514526367F,
                                     -0.39491748809814453F,
                                     -0.28444138169288635F,
                                     -0.18477343022823334F,
                                     -0.09105003625154495F,
                                     0.0F,
                                     0.07958029955625534F,
                                     0.16093020141124725F,
                                     0.24611230194568634F,
                                     0.33791524171829224F,
                                     0.44070982933044434F,
                                     0.5626170039176941F,
                                     0.7229568362236023F,
                                     1.0F};
/// Twelfths, by sign and bit pattern. The negative zero decodes to zero.
constexpr std::array<float, 16> kFp4{0.0F, 0.0625F / 12,  8.0F / 12,  1.0F,  4.0F / 12,  0.5F,  2.0F / 12,  0.25F,
                                     0.0F, -0.0625F / 12, -8.0F / 12, -1.0F, -4.0F / 12, -0.5F, -2.0F / 12, -0.25F};

}  // namespace

c10::ArrayRef<float> table(Encoding encoding) {
  if (!is_four_bit(encoding)) raise<InternalError>("codes: {} has no table of values", name(encoding));
  return encoding == Encoding::nf4 ? c10::ArrayRef<float>(kNf4) : c10::ArrayRef<float>(kFp4);
}

c10::ArrayRef<float> dynamic_map() {
  const at::Tensor& values = values_of(Map::dynamic);
  return {values.const_data_ptr<float>(), static_cast<size_t>(values.numel())};
}

}  // namespace accelerate::codes
