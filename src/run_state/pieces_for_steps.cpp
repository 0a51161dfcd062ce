#include "run_state/pieces_for_steps.hpp"

#include <ATen/ops/empty_strided.h>

#include <utility>

#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

/// Over the ranks that hold the other elements. Zeros and values add up to the values, to the bit.
at::Tensor added_up(const parallel::Held& held, const at::Tensor& values) {
  const auto group = (held.mesh ? *held.mesh : comm::mesh()).along(held.cut);
  if (!group) return values;
  at::Tensor sum = values.to(group->device());
  group->all_reduce_(sum, Reduction::sum);
  return sum.to(values.device());
}

}  // namespace

PiecesForSteps::PiecesForSteps(const parallel::Engines& engines) {
  for (const auto& engine : engines) {
    if (!engine->holds_pieces()) continue;
    for (auto& held : engine->pieces()) {
      if (!held.in_pieces()) continue;
      const auto* key = held.value.unsafeGetTensorImpl();
      // Of what is whole only the sizes, and in which order its elements lie. A dry run counts what is made on meta.
      if (!held.whole.is_meta())
        held.whole =
            at::empty_strided(held.whole.sizes(), held.whole.strides(), held.whole.options().device(at::kMeta));
      held.tensor = at::Tensor();
      pieces_.emplace(key, Piece{std::move(held), engine});
    }
  }
}

bool PiecesForSteps::has(const at::Tensor& parameter) const {
  return pieces_.contains(parameter.unsafeGetTensorImpl());
}

const parallel::Held& PiecesForSteps::held(const at::Tensor& piece) const {
  const auto& found = pieces_.at(piece.unsafeGetTensorImpl());
  if (found.engine.expired())
    raise<ConfigError>(
        "step: the prepared model of a parameter {} is gone, but the optimizer needs all of the parameter, of which "
        "this rank has a piece, expected the model to live as long as its optimizer steps",
        found.held.whole.sizes());
  return found.held;
}

at::Tensor PiecesForSteps::whole(const at::Tensor& piece, const at::Tensor& values) const {
  const auto& known = held(piece);
  return added_up(known, parallel::among_zeros(known, values));
}

at::Tensor PiecesForSteps::summed(const at::Tensor& piece, const at::Tensor& sums) const {
  return added_up(held(piece), sums);
}

at::Tensor PiecesForSteps::piece_of(const at::Tensor& piece, const at::Tensor& whole) const {
  return parallel::slice_of(held(piece), whole);
}

}  // namespace accelerate::run_state
