#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "accelerate/utils/export.hpp"

namespace accelerate::models {

/// What attention layers remember of the tokens of earlier forwards, so that a forward works on new tokens only.
/// Shapes: B batch, H heads of keys and values (fewer than those of queries where these are grouped), S tokens so far,
/// T new tokens, d size of a head.
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
