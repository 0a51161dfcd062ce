#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "accelerate/utils/export.hpp"

namespace accelerate::models {

/// The keys and values of the tokens of earlier forwards, by attention layer, so that a forward works on new tokens
/// only. Shapes: B batch, H heads of keys and values (fewer than those of queries where these are grouped), S tokens so
/// far, T new tokens, d size of a head.
///
/// One object belongs to one batch of sequences; for the next ones clear() it or take a new one. Memory is reserved
/// ahead by doubling, so that a token costs one small copy per layer. Not for training: what is stored takes no part in
/// gradients. Not safe to use from several threads at once.
class ACCELERATE_API KeyValueCache {
 public:
  /// Appends a layer's keys and values, both [B, H, T, d], and returns all of that layer's, [B, H, S + T, d]: views,
  /// which later updates do not write to unless truncate() was called.
  /// @param layer  0, 1, 2, …; attention layers call this once each per forward.
  /// @throws ShapeError if B, H or d are not those of before.
  std::pair<at::Tensor, at::Tensor> update(int64_t layer, const at::Tensor& key, const at::Tensor& value);

  /// A layer's memory, of one sequence in fp32 on the CPU. Valid until the next call of this object.
  struct Rows {
    float *keys, *values;              ///< [H][capacity][d]
    int64_t capacity = 0, tokens = 0;  ///< S + 1
  };
  /// As update() for one token of one sequence, whose keys and values the caller writes to [h][tokens - 1], for layers
  /// that have had a token. None, and nothing appended, where the layer holds anything else than [1, heads, S, size] of
  /// fp32 on the CPU.
  std::optional<Rows> append_row(int64_t layer, int64_t heads, int64_t size);

  /// Calls `listener` at the beginning of each update(), to show how far a long forward is. Empty: nobody.
  void on_update(std::function<void(int64_t layer)> listener) { listener_ = std::move(listener); }

  /// S: tokens that all layers hold, 0 while there are none. So between forwards; within one the last layer has not
  /// seen the new tokens yet.
  int64_t length() const;
  /// Row i becomes what row `rows[i]` was. @param rows  int64 [B'], of any length; beam search chooses, repeats and
  /// drops rows with it.
  void reorder(const at::Tensor& rows);
  /// Forgets what is behind the first `tokens` tokens. @throws ShapeError unless 0 <= tokens <= length()
  void truncate(int64_t tokens);
  /// Forgets all and frees the memory.
  void clear() { layers_.clear(); }

 private:
  struct Layer {
    at::Tensor keys, values;  ///< [B, H, capacity, d]
    int64_t length = 0;
  };
  std::vector<Layer> layers_;
  std::function<void(int64_t)> listener_;
};

}  // namespace accelerate::models
