#include "run_state/distributed_load.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <tuple>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/dcp.hpp"
#include "formats/similar_names.hpp"
#include "run_state/holdings.hpp"
#include "snapshot/ledger.hpp"
#include "utils/raise.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::run_state {
namespace {

using distributed_checkpoint::Bytes;
using formats::DcpBox;

/// The plan of what is to be read, when all of it has been found to fit.
struct DistributedLoadPlan {
  struct LoadedSlice {
    formats::FoundPart found;
    at::Tensor destination;
  };
  std::vector<LoadedSlice> pieces;
  std::vector<std::pair<formats::DcpPath, Value>> objects;
  /// In the dict's order, which all ranks of a model have.
  std::vector<std::shared_ptr<parallel::Engine>> engines;

  DistributedLoadPlan(const StateDict& state, const formats::DcpCheckpoint& checkpoint,
                      const DistributedLoadOptions& options) {
    std::string differences;
    for (const auto& leaf : leaves_of(state)) {
      const auto* entry = checkpoint.find(leaf.name);
      if (!entry) {
        if (!options.allow_partial)
          differences += fmt::format(
              "\n  '{}': not in the checkpoint, expected {}.{}", leaf.name, describe(*leaf.value),
              formats::similar_names(leaf.name, strings_of(checkpoint.entries(), &formats::DcpEntry::name)));
        continue;
      }
      if (const auto wrong = add(leaf, *entry, checkpoint); !wrong.empty())
        differences +=
            fmt::format("\n  '{}': the checkpoint has {}, expected {}", leaf.name, wrong, describe(*leaf.value));
    }
    if (!differences.empty())
      raise<CheckpointError>(
          "loading '{}': it does not fit the state dict; nothing was loaded. Load into a state dict of the same keys "
          "and sizes, or pass allow_partial_load for keys that may be missing. Differences:{}",
          checkpoint.folder().string(), differences);
    for (const auto& [name, box, destination] : wanted)
      pieces.push_back({checkpoint.find_chunk(name, box), destination});
  }

 private:
  std::vector<std::tuple<std::string, DcpBox, at::Tensor>> wanted;

  /// @return what the checkpoint has, if it does not fit
  std::string add(const Leaf& leaf, const formats::DcpEntry& entry, const formats::DcpCheckpoint& checkpoint) {
    const auto* saved = std::get_if<formats::DcpTensorInfo>(&entry.content);
    const auto* tensor = std::get_if<at::Tensor>(&leaf.value->kind());
    const auto* sharded = std::get_if<ShardedTensor>(&leaf.value->kind());
    if (!tensor && !sharded) {
      if (saved) return fmt::format("a tensor of size {}", saved->sizes);
      const auto object = checkpoint.read_object(leaf.name);
      const bool bytes = std::holds_alternative<Bytes>(leaf.value->kind());
      if (bytes && !object.isString()) return object.tagKind();
      objects.emplace_back(leaf.path, bytes ? Value(Bytes{object.toStringRef()}) : Value(object));
      return {};
    }
    if (!saved) return "no tensor";
    const auto sizes = tensor ? tensor->sizes().vec() : sharded->sizes;
    if (saved->sizes != sizes) return fmt::format("a tensor of size {}", saved->sizes);
    if (tensor) {
      wanted.emplace_back(leaf.name, formats::whole(sizes), *tensor);
      return {};
    }
    for (const auto& part : sharded->parts)
      if (part.values.numel() > 0)
        wanted.emplace_back(leaf.name, DcpBox{part.offsets, part.values.sizes().vec()}, part.values);
    if (sharded->engine && std::find(engines.begin(), engines.end(), sharded->engine) == engines.end())
      engines.push_back(sharded->engine);
    return {};
  }
};

}  // namespace

void load_distributed(StateDict& state, const std::filesystem::path& folder, const DistributedLoadOptions& options) {
  std::optional<formats::DcpCheckpoint> checkpoint;
  std::optional<DistributedLoadPlan> plan;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    checkpoint.emplace(folder);
    plan.emplace(state, *checkpoint, options);
  });
  for (const auto& engine : plan->engines) engine->before_step();
  snapshot::keep_all();
  std::exception_ptr failure;
  try {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      at::NoGradGuard no_grad;
      for (const auto& piece : plan->pieces) {
        const at::Tensor to = piece.destination.detach();
        const at::Tensor read = comes_and_goes(to) ? at::empty(to.sizes(), to.options()) : to;
        piece.found.read(read);
        to.copy_(read);  // of itself nothing, but who hears of writes, or compares versions, learns of this one
      }
    });
  } catch (const CommError&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
  for (const auto& engine : plan->engines) engine->after_step();
  if (failure) std::rethrow_exception(failure);
  for (auto& [path, value] : plan->objects) value_at(state, path) = std::move(value);
}

namespace {

void insert(StateDict& state, const formats::DcpPath& path, Value value) {
  auto* at = &state[std::get<std::string>(path.front())];
  const auto make = [&](Value container) {
    if (at->kind().index() == Value().kind().index()) *at = std::move(container);
  };
  for (size_t i = 1; i < path.size(); ++i) {
    if (const auto* key = std::get_if<std::string>(&path[i])) {
      make(StateDict());
      at = &at->as<StateDict>()[*key];
    } else {
      make(distributed_checkpoint::List());
      auto& list = at->as<distributed_checkpoint::List>();
      const auto index = static_cast<size_t>(std::get<int64_t>(path[i]));
      if (list.size() <= index) list.resize(index + 1);
      at = &list[index];
    }
  }
  *at = std::move(value);
}

}  // namespace

StateDict broadcast_state(const StateDict& state, const at::Device& device,
                          const std::function<Value(const formats::DcpPath& path, const at::Tensor& whole)>& take) {
  std::vector<Leaf> leaves;
  std::vector<std::vector<SentLeaf>> sent(1);
  std::vector<std::vector<c10::IValue>> objects(1);
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() != 0) return;
    leaves = leaves_of(state);
    std::transform(leaves.begin(), leaves.end(), std::back_inserter(sent[0]), as_sent);
    for (const auto& leaf : leaves)
      if (!std::holds_alternative<at::Tensor>(leaf.value->kind())) objects[0].push_back(leaf.value->to_ivalue());
  });
  broadcast_object_list(sent);
  broadcast_object_list(objects);
  StateDict result;
  auto object = objects[0].begin();
  for (size_t i = 0; i < sent[0].size(); ++i) {
    const auto& leaf = sent[0][i];
    const auto path = path_of(leaf);
    if (!leaf.is_tensor) {
      insert(result, path, *object++);
      continue;
    }
    const auto whole = comm::rank() == 0 ? std::get<at::Tensor>(leaves[i].value->kind()).detach().to(device)
                                         : at::empty(leaf.sizes, at::TensorOptions().dtype(leaf.dtype).device(device));
    insert(result, path, take(path, comm::world_size() == 1 ? whole : comm::agreed::broadcast(whole, 0)));
  }
  return result;
}

}  // namespace accelerate::run_state
