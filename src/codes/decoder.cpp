#include "codes/decoder.hpp"

#include <algorithm>
#include <utility>

#include "codes/kernels/multiply.hpp"

namespace accelerate::codes {

Decoder::Decoder(Codes codes)
    : codes_(std::move(codes)), instructions_(kernels::instruction_set()), columns_(codes_.columns()) {
  if (is_gguf(codes_.encoding)) {
    gguf_ = &gguf_encoding(codes_.encoding);
  } else {
    scales_ = plain_scales(codes_);
    if (is_four_bit(codes_.encoding)) table_ = table(codes_.encoding);
  }
}

void Decoder::operator()(int64_t begin, int64_t end, float* to) const {
  if (gguf_) {
    const auto* bytes = codes_.data.const_data_ptr<uint8_t>();
    gguf_->decode(bytes + begin / gguf_->block * gguf_->block_bytes, (end - begin) / gguf_->block, to);
  } else if (codes_.encoding == Encoding::int8_rowwise) {
    rowwise(begin, end, to);
  } else {
    four_bits(begin, end, to);
  }
}

void Decoder::rowwise(int64_t begin, int64_t end, float* __restrict to) const {
  constexpr float kInverse = 7.874015718698502e-3F;  // 1 / 127, as bitsandbytes writes it
  const auto* from = codes_.data.const_data_ptr<int8_t>();
  const auto* scales = scales_.const_data_ptr<float>();
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / columns_, until = std::min(end, (row + 1) * columns_);
    const float scale = scales[row];
    for (; i < until; ++i) to[i - begin] = static_cast<float>(from[i]) * scale * kInverse;
  }
}

void Decoder::four_bits(int64_t begin, int64_t end, float* to) const {
  const auto* from = codes_.data.const_data_ptr<uint8_t>();
  const auto* scales = scales_.const_data_ptr<float>();
  for (int64_t i = begin; i < end;) {
    const int64_t block = i / codes_.block_size, until = std::min(end, (block + 1) * codes_.block_size);
    const int64_t pairs = (until - i) / 2;
    instructions_.four_bits(from + i / 2, pairs, table_.data(), scales[block], to + (i - begin));
    i += 2 * pairs;
    if (i < until) to[i - begin] = table_[from[i / 2] >> 4] * scales[block], ++i;  // of an odd tensor the last one
  }
}

}  // namespace accelerate::codes
