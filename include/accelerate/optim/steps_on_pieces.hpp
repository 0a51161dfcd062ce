#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "accelerate/optim/element_wise.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Parameters of which each rank holds a piece, for an optimizer whose step needs more of them than that. All functions
/// but the last are collective: ranks call them for the same parameters in the same order.
class ACCELERATE_API Pieces {
 public:
  virtual ~Pieces() = default;
  /// Whether a tensor that the optimizer steps on is a piece of a larger one.
  virtual bool has(const at::Tensor& parameter) const = 0;
  /// The whole tensor, of the parameter's own sizes, of values that each rank has for its piece.
  virtual at::Tensor whole(const at::Tensor& piece, const at::Tensor& values) const = 0;
  /// Sums over all elements of the parameter, of each rank's sums over its piece. @return of the sizes of `sums`
  virtual at::Tensor summed(const at::Tensor& piece, const at::Tensor& sums) const = 0;
  /// This rank's piece of a whole tensor: a copy. Not collective.
  virtual at::Tensor piece_of(const at::Tensor& piece, const at::Tensor& whole) const = 0;
};

/// Says of an optimizer's class that it steps on pieces, too, and asks for what it needs of the whole: a norm, a
/// matrix. With sharded models it has states of this rank's pieces, as one that is ElementWise.
class ACCELERATE_API StepsOnPieces : public ElementWise {
 public:
  /// From prepare(), where a model is sharded.
  void set_pieces(std::shared_ptr<const Pieces> pieces) { pieces_ = std::move(pieces); }

 protected:
  /// Null for a parameter that is whole.
  const Pieces* pieces_of(const at::Tensor& parameter) const {
    return pieces_ && pieces_->has(parameter) ? pieces_.get() : nullptr;
  }

 private:
  std::shared_ptr<const Pieces> pieces_;
};

}  // namespace accelerate::optim
