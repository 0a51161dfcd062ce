#include "run_state/holdings.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace accelerate::run_state {

std::vector<HeldTensor> holdings_of(const detail::PreparedModel& model) {
  std::vector<HeldTensor> result;
  std::unordered_map<const at::TensorImpl*, size_t> known;
  if (model.engine)
    for (auto& piece : model.engine->pieces()) {
      known[piece.tensor.unsafeGetTensorImpl()] = result.size();
      result.push_back({std::move(piece), model.engine.get()});
    }
  for (const auto& [name, tensor] : model.model.state()) {
    const auto [found, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), result.size());
    if (fresh) result.push_back({{.names = {name}, .tensor = tensor}});
    else if (auto& names = result[found->second].names; std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  return result;
}

std::vector<checkpointing::StretchPart> boxes_of(const parallel::Holding& holding, const at::Tensor& values) {
  if (holding.place.corner.empty()) return checkpointing::parts_of(holding.tensor, holding.place.begin, values);
  if (values.numel() == 0) return {};
  return {{.box = {holding.place.corner, values.sizes().vec()}, .values = values}};
}

distributed_checkpoint::ShardedTensor sharded(const parallel::Holding& holding, const at::Tensor& values,
                                              std::shared_ptr<parallel::Engine> engine) {
  distributed_checkpoint::ShardedTensor result{.sizes = holding.tensor.sizes().vec(),
                                               .dtype = values.scalar_type(),
                                               .parts = {},
                                               .primary = holding.primary,
                                               .engine = std::move(engine)};
  for (auto& part : boxes_of(holding, values.detach()))
    result.parts.push_back({std::move(part.box.offsets), std::move(part.values)});
  return result;
}

at::Tensor read_piece(const checkpointing::StoredTensor& stored, const parallel::Holding& holding) {
  at::NoGradGuard no_grad;
  const at::Tensor piece = at::empty(holding.piece.sizes(), holding.piece.options().requires_grad(false));
  for (const auto& part : boxes_of(holding, piece)) stored.read(part.box, part.values);
  return piece;
}

}  // namespace accelerate::run_state
