#pragma once

#include <memory>
#include <unordered_map>

#include "accelerate/optim/steps_on_pieces.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/held.hpp"

namespace accelerate::run_state {

/// The pieces that engines hold, for optimizers that ask for more of a parameter than that. Does not keep the engines.
class PiecesForSteps final : public optim::Pieces {
 public:
  explicit PiecesForSteps(const parallel::Engines& engines);

  bool has(const at::Tensor& parameter) const override;
  at::Tensor whole(const at::Tensor& piece, const at::Tensor& values) const override;
  at::Tensor summed(const at::Tensor& piece, const at::Tensor& sums) const override;
  at::Tensor piece_of(const at::Tensor& piece, const at::Tensor& whole) const override;

 private:
  struct Piece {
    parallel::Held held;
    std::weak_ptr<parallel::Engine> engine;
  };
  /// @throws ConfigError where the model is gone
  const parallel::Held& held(const at::Tensor& piece) const;

  std::unordered_map<const at::TensorImpl*, Piece> pieces_;
};

}  // namespace accelerate::run_state
