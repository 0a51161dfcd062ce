#include "run_state/holdings.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/mesh.hpp"
#include "parallel/slice_of.hpp"
#include "residency/member.hpp"
#include "residency/unit.hpp"

namespace accelerate::run_state {

std::vector<parallel::Held> holdings_of(const detail::PreparedModel& model) {
  std::vector<parallel::Held> result;
  std::unordered_map<const at::TensorImpl*, size_t> known;
  if (model.engine)
    for (auto& piece : model.engine->pieces()) {
      known[piece.tensor.unsafeGetTensorImpl()] = result.size();
      result.push_back(std::move(piece));
    }
  for (const auto& [name, tensor] : model.model.state()) {
    const auto [found, fresh] = known.try_emplace(tensor.unsafeGetTensorImpl(), result.size());
    if (fresh) result.push_back(whole_on_all_ranks({name}, tensor));
    else if (auto& names = result[found->second].names; std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  return result;
}

parallel::Held whole_on_all_ranks(std::vector<std::string> names, const at::Tensor& tensor) {
  return {.names = std::move(names),
          .tensor = tensor,
          .whole = tensor,
          .value = tensor,
          .slice = parallel::Slice::all_of(tensor.sizes())};
}

std::vector<checkpointing::SliceBox> boxes_of(const parallel::Held& holding, const at::Tensor& values) {
  const parallel::Slice& slice = holding.slice;
  if (values.numel() == 0) return {};
  if (values.sizes() == slice.sizes) return {{.box = {slice.corner, slice.sizes}, .values = values}};
  auto parts = checkpointing::parts_of(parallel::box_like(holding.whole, slice), slice.begin, values);
  for (auto& part : parts)
    for (size_t dim = 0; dim < slice.corner.size(); ++dim) part.box.offsets[dim] += slice.corner[dim];
  return parts;
}

distributed_checkpoint::ShardedTensor sharded(const parallel::Held& holding, const at::Tensor& values,
                                              std::shared_ptr<parallel::Engine> engine) {
  const auto& mesh = holding.mesh ? *holding.mesh : comm::mesh();
  const auto alike = comm::kAllAxes - holding.cut;
  // Replicas that train apart have values of their own: the first one's count.
  const bool apart = holding.engine && holding.engine->apart();
  distributed_checkpoint::ShardedTensor result{.sizes = holding.whole.sizes().vec(),
                                               .dtype = values.scalar_type(),
                                               .parts = {},
                                               .replica = mesh.place(alike),
                                               .replicas = apart ? 1 : mesh.size(alike),
                                               .engine = std::move(engine)};
  // The rule counts the ranks of the mesh, which are the job's where they are as many.
  if (mesh.size(comm::kAllAxes) == comm::world_size()) result.equal = holding.equal;
  for (auto& part : boxes_of(holding, values.detach()))
    result.parts.push_back({std::move(part.box.offsets), std::move(part.values)});
  return result;
}

bool comes_and_goes(const at::Tensor& values) {
  const auto* const member = residency::Member::of(values);
  return member && !member->unit().fixed();
}

at::Tensor readable(const at::Tensor& values) {
  return comes_and_goes(values) ? values.detach().clone() : values.detach();
}

at::Tensor read_piece(const checkpointing::StoredTensor& stored, const parallel::Held& holding,
                      std::optional<at::ScalarType> dtype) {
  at::NoGradGuard no_grad;
  const auto options = holding.value.options().requires_grad(false);
  const at::Tensor piece = at::empty(holding.value.sizes(), options.dtype(dtype.value_or(holding.value.scalar_type())));
  for (const auto& part : boxes_of(holding, piece)) stored.read(part.box, part.values);
  return piece;
}

}  // namespace accelerate::run_state
