#include "run_state/accumulation.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "accelerate/comm.hpp"
#include "formats/dcp/box.hpp"
#include "residency/member.hpp"
#include "run_state/own_pieces.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using Dict = c10::impl::GenericDict;

fs::path gradients_file(const fs::path& folder, int64_t rank) { return folder / fmt::format("gradients_{}.bin", rank); }

/// The tensors that may hold gradients, by names that all ranks know: whole parameters, which accumulate without
/// communication, and the shards of sharded ones, where every micro-step communicates.
struct Holders {
  std::map<std::string, at::Tensor> whole, pieces;
  std::map<std::string, at::Tensor> slices;  ///< where the pieces lie: numbers_of()
};

Holders holders_of(const RunState& run) {
  Holders all;
  for (size_t i = 0; i < run.models.size(); ++i) {
    const auto name_in = [i](const std::string& name) { return fmt::format("{}.{}", i, name); };
    for (const auto& [name, parameter] : run.models[i]->model.parameters()) all.whole.emplace(name_in(name), parameter);
    if (const auto& engine = run.models[i]->engine)
      for (const auto& holding : engine->pieces()) {
        engine->gradient(holding.tensor);  // what was cleared or replaced in one of the two is in both from here on
        all.pieces.emplace(name_in(holding.names.front()), holding.value);
        all.slices.emplace(name_in(holding.names.front()), at::tensor(numbers_of(holding.slice)));
      }
  }
  return all;
}

/// Whether the gradient that a parameter shows is its shard's.
bool is_of_piece(const at::Tensor& gradient, const std::map<std::string, at::Tensor>& pieces, const std::string& name) {
  if (residency::Member::of(gradient)) return true;
  const auto piece = pieces.find(name);
  return piece != pieces.end() && piece->second.grad().defined() && gradient.is_alias_of(piece->second.grad());
}

c10::IValue whole_gradients_of(const Holders& holders) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& [name, holder] : holders.whole)
    if (holder.grad().defined() && !is_of_piece(holder.grad(), holders.pieces, name))
      gradients.emplace(name, holder.grad().detach().cpu());
  return checkpointing::to_dict(gradients);
}

c10::IValue piece_gradients_of(const Holders& holders) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& [name, piece] : holders.pieces)
    if (const at::Tensor& gradient = piece.grad(); gradient.defined()) gradients.emplace(name, gradient.detach().cpu());
  return checkpointing::to_dict(gradients);
}

/// As zero_grad(set_to_none = false) leaves them: where all ranks have them they fit every layout.
bool is_zeros(const at::Tensor& saved) { return !saved.any().item<bool>(); }

/// One rank's file.
struct SavedGroup {
  GroupPosition position;
  double num_items = 0;
  double scale = 1;                    ///< of the loss
  std::optional<bool> by_tokens = {};  ///< GradientAverage::tokens; unset: written before it was noted
  std::map<std::string, at::Tensor> whole, pieces;
  std::map<std::string, at::Tensor> slices = {};  ///< of `pieces`; none: written before they were noted
};

SavedGroup read_group(const fs::path& file) {
  const auto state = checkpointing::load_object(file);
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>("load '{}': {}; the file is damaged or not written by save_state", file.string(), what);
  };
  if (!state.isGenericDict()) fail("found " + state.tagKind() + ", expected a dict");
  const auto dict = state.toGenericDict();
  const auto field = [&](const char* name) {
    if (!dict.contains(name)) fail(fmt::format("found no '{}'", name));
    return dict.at(name);
  };
  const auto count = [&](const char* name) {
    const auto value = field(name);
    if (!value.isInt() || value.toInt() < 1) fail(fmt::format("found no count at '{}'", name));
    return value.toInt();
  };
  const auto tensors = [&](const char* name) {
    const auto value = field(name);
    std::map<std::string, at::Tensor> result;
    if (!value.isGenericDict()) fail(fmt::format("found no dict at '{}'", name));
    for (const auto& item : value.toGenericDict()) {
      if (!item.key().isString() || !item.value().isTensor()) fail(fmt::format("found no tensors at '{}'", name));
      result.emplace(item.key().toStringRef(), item.value().toTensor());
    }
    return result;
  };
  if (!field("num_items").isDouble()) fail("found no number at 'num_items'");
  const auto scale = dict.contains("scale") ? dict.at("scale") : c10::IValue(1.0);
  if (!scale.isDouble() || !(scale.toDouble() > 0)) fail("found no scale at 'scale'");
  std::optional<bool> by_tokens;
  if (dict.contains("by_tokens")) {
    if (!dict.at("by_tokens").isBool()) fail("found no truth value at 'by_tokens'");
    by_tokens = dict.at("by_tokens").toBool();
  }
  return {.position = {count("step"), count("num_steps"), count("num_processes")},
          .num_items = field("num_items").toDouble(),
          .scale = scale.toDouble(),
          .by_tokens = by_tokens,
          .whole = tensors("gradients"),
          .pieces = tensors("piece_gradients"),
          .slices = dict.contains("piece_slices") ? tensors("piece_slices") : std::map<std::string, at::Tensor>()};
}

/// Micro-steps of this run's group that are done.
int64_t step_here(const GroupPosition& saved, int64_t num_steps, int64_t ranks) {
  // A micro-step is a batch on every rank, however many ranks there are ...
  if (saved.num_steps == num_steps) return saved.step;
  // ... unless the group as a whole stays as large as it was, and the batch of one rank counts.
  const int64_t done = saved.step * saved.num_processes;
  if (saved.num_steps * saved.num_processes == num_steps * ranks && done % ranks == 0) return done / ranks;
  raise<CheckpointError>(
      "load_state: the checkpoint was saved by {} ranks after micro-step {} of {} of an accumulation group, and is "
      "loaded by {} ranks with groups of {}, expected {}, or a number with which the batches of the whole group come "
      "out "
      "even; set gradient_accumulation_steps so, or take a checkpoint that was saved where sync_gradients() is true",
      saved.num_processes, saved.step, saved.num_steps, ranks, num_steps, saved.num_steps);
}

}  // namespace

void save_accumulation(const RunState& run, const fs::path& folder, const SaveOptions& options) {
  const int64_t step = run.step % options.num_steps;
  if (step == 0) return;
  const auto holders = holders_of(run);
  Dict state(c10::StringType::get(), c10::AnyType::get());
  state.insert("step", step);
  state.insert("num_steps", options.num_steps);
  state.insert("scale", run.scaler ? run.scaler->get_scale() : 1.0);
  state.insert("by_tokens", options.average == GradientAverage::tokens);
  state.insert("num_processes", comm::world_size());
  state.insert("num_items", run.num_items);
  state.insert("gradients", whole_gradients_of(holders));
  state.insert("piece_gradients", piece_gradients_of(holders));
  state.insert("piece_slices", checkpointing::to_dict(holders.slices));
  checkpointing::save_object(state, gradients_file(folder, comm::rank()));
}

StagedAccumulation::StagedAccumulation(const RunState& run, const fs::path& folder, const RunLoadOptions& options) {
  const int64_t rank = comm::rank(), ranks = comm::world_size();
  const auto holders = holders_of(run);
  std::map<std::string, at::Tensor> whole, pieces, slices;
  double scale = 1;
  const auto fail_with_pieces = [&] {
    raise<CheckpointError>(
        "load_state: the checkpoint was saved by {} ranks after micro-step {} of {} of an accumulation group, with "
        "gradients in the pieces of its layout (sync_each_batch), expected the same layout and as many ranks; take one "
        "that was saved where sync_gradients() is true",
        position_.num_processes, position_.step, position_.num_steps);
  };
  const auto own = gradients_file(folder, rank), first = gradients_file(folder, 0);
  if (fs::exists(own) || fs::exists(first)) {
    SavedGroup saved = read_group(fs::exists(own) ? own : first);
    position_ = saved.position;
    if (const bool by_tokens = options.average == GradientAverage::tokens;
        saved.by_tokens.value_or(by_tokens) != by_tokens)
      raise<CheckpointError>(
          "load_state: the checkpoint was saved after micro-step {} of {} of an accumulation group whose gradients are "
          "averaged by {}, expected {} as here; load it with the same GradientAverage, or take one that was saved "
          "where sync_gradients() is true",
          position_.step, position_.num_steps, by_tokens ? "steps" : "tokens", by_tokens ? "tokens" : "steps");
    scale = run.scaler ? 1 : saved.scale;  // a scaler goes on with the one that these gradients have
    step_ = step_here(position_, options.num_steps, ranks);
    if (position_.num_processes == ranks) {
      if (!fs::exists(own)) saved = read_group(own);  // says what is missing
      num_items_ = saved.num_items;
      whole = std::move(saved.whole), pieces = std::move(saved.pieces), slices = std::move(saved.slices);
    } else {
      // Each rank takes its part of sums over items, and the average of averages over ranks.
      const auto parts =
          static_cast<double>(options.average == GradientAverage::tokens ? ranks : position_.num_processes);
      for (int64_t r = 0; r < position_.num_processes; ++r) {
        saved = read_group(gradients_file(folder, r));
        pieces.insert(saved.pieces.begin(), saved.pieces.end());
        if (rank == 0) num_items_ += saved.num_items;
        for (const auto& [name, gradient] : saved.whole) {
          const at::Tensor part = gradient.to(at::promote_types(gradient.scalar_type(), at::kFloat)) / parts;
          if (const auto [sum, fresh] = whole.try_emplace(name, part); !fresh) sum->second.add_(part);
        }
      }
    }
  }
  // Pieces stay where they lie, or are zeros on all ranks: a piece without elements says nothing of the others'.
  std::set<std::string> zeros;
  for (const auto& [name, gradient] : pieces) {
    const auto here = holders.slices.find(name);
    const auto there = slices.find(name);
    if (here != holders.slices.end() && there != slices.end() && here->second.equal(there->second)) continue;
    if (!is_zeros(gradient)) fail_with_pieces();
    zeros.insert(name);
  }
  for (int64_t r = 0; r < position_.num_processes && !zeros.empty(); ++r)
    for (const auto& [name, gradient] : read_group(gradients_file(folder, r)).pieces)
      if (zeros.contains(name) && !is_zeros(gradient)) fail_with_pieces();
  for (const auto& name : zeros) {
    const auto piece = holders.pieces.find(name), holder = holders.whole.find(name);
    at::Tensor& gradient = pieces.at(name);
    if (piece != holders.pieces.end()) {
      gradient = at::zeros(piece->second.sizes(), gradient.options());
    } else if (holder != holders.whole.end()) {
      whole.try_emplace(name, at::zeros(holder->second.sizes(), gradient.options()));
      pieces.erase(name);
    }
  }
  const auto stage = [&](const std::map<std::string, at::Tensor>& holders, std::map<std::string, at::Tensor>& found) {
    for (const auto& [name, holder] : holders) {
      at::Tensor gradient;
      if (const auto item = found.find(name); item != found.end()) {
        if (item->second.sizes() != holder.sizes())
          raise<CheckpointError>("load '{}': found a gradient of '{}' of size {}, expected {}; the model has changed",
                                 first.string(), name, formats::to_string(item->second.sizes().vec()),
                                 formats::to_string(holder.sizes().vec()));
        gradient = scale == 1 ? item->second
                              : item->second.to(at::promote_types(item->second.scalar_type(), at::kFloat)) / scale;
        gradient = gradient.to(holder.device(), holder.scalar_type());
        found.erase(item);
      }
      gradients_.emplace_back(holder, gradient);
    }
    if (!found.empty())
      raise<CheckpointError>("load '{}': found a gradient of '{}', which no prepared model has; the model has changed",
                             first.string(), found.begin()->first);
  };
  stage(holders.whole, whole);
  stage(holders.pieces, pieces);
}

void StagedAccumulation::agree() const {
  const auto all = gather_object(std::vector<GroupPosition>{position_});
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!(all[rank] == all[0]))
      raise<CheckpointError>(
          "load_state: rank 0 finds an accumulation group after micro-step {} of {} of {} ranks, rank {} one after {} "
          "of {} of {}, expected the same; every rank needs the files gradients_<rank>.bin that it wrote, and for "
          "another number of ranks all of them",
          all[0].step, all[0].num_steps, all[0].num_processes, rank, all[rank].step, all[rank].num_steps,
          all[rank].num_processes);
}

void StagedAccumulation::apply(RunState& run, int64_t step) const {
  run.num_items = num_items_;
  run.step = position_.step > 0 ? step_ : step;
  if (position_.step == 0 && step != 0 && comm::rank() == 0)
    logs::warn("accelerate.run_state",
               "load_state: the checkpoint was saved after micro-step {} of an accumulation group, without the "
               "gradients of those before; the next optimizer step has a part of them only",
               step);
  for (const auto& [holder, gradient] : gradients_) at::Tensor(holder).mutable_grad() = gradient;
  if (position_.step > 0)
    for (const auto& engine : run.engines()) engine->resume_accumulation();
}

}  // namespace accelerate::run_state
