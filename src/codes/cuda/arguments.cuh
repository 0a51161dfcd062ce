#pragma once

// The arguments that the host hands to kernels. NVRTC compiles this text and a host's compiler as well, so it includes
// nothing.

namespace accelerate::codes::cuda {

/// A weight in few bits [rows, columns], in the device's memory.
struct Weight {
  const unsigned char* data;  ///< aligned to 16 bytes
  const void* scales;         ///< fp32; with `absmax` a byte each, places in `map`. Null: they are within the blocks
  const float* absmax;        ///< null: scales are no codes
  float offset;
  int block_shift;   ///< 1 << block_shift elements to a scale
  int nested_shift;  ///< 1 << nested_shift scales to an element of absmax
  long long columns;
  float table[16];  ///< what 4 bits stand for
  float map[256];   ///< what codes of scales stand for
};

/// The arguments of all kernels; each uses some of them.
struct Arguments {
  Weight w;
  // Decoding: `count` rows from row `first` on, or those that `rows` lists, to `to`, contiguous.
  const long long* rows;
  long long first;
  long long count;
  // Products: to = x w^T + bias, `outputs` numbers for each row of x. Without a bias it is null.
  const void* x;
  const void* bias;
  long long outputs;
  void* to;  ///< aligned to 16 bytes, as `x` is
};

static_assert(sizeof(Arguments) == 1192, "host and device must see the same bytes");

inline constexpr int kThreads = 128;  ///< of a block, at most; a multiple of a warp's 32
inline constexpr int kUnit = 16;      ///< elements of a row that a thread takes at a time
/// Rows of a weight whose products a block makes: each number that is read of x serves so many.
constexpr int outputs_of_block(int rows_of_x) { return rows_of_x <= 2 ? 4 : 2; }

}  // namespace accelerate::codes::cuda
