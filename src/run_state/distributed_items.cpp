#include "run_state/distributed_items.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/dcp/box.hpp"
#include "run_state/holdings.hpp"
#include "snapshot/put_off.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

using distributed_checkpoint::Bytes;

bool is_main() { return comm::rank() == 0; }

/// The leaves of all ranks, by rank. Where all have the same, which is so of a model in shards, they are rank 0's:
/// ranks tell each other a few bytes then, however many leaves there are.
std::vector<SentLeaf> leaves_of_all(std::vector<SentLeaf> mine) {
  for (auto& leaf : mine) leaf.rank = 0;
  const auto bytes = to_bytes(mine);
  const auto digests = gather_object(
      std::vector<int64_t>{static_cast<int64_t>(std::hash<std::string>()(bytes)), static_cast<int64_t>(bytes.size())});
  bool alike = true;
  for (size_t i = 0; i < digests.size(); ++i) alike &= digests[i] == digests[i % 2];
  if (alike) return mine;
  for (auto& leaf : mine) leaf.rank = comm::rank();
  return gather_object(mine);
}

}  // namespace

DistributedItems::DistributedItems(const StateDict& state) {
  std::vector<Leaf> leaves;
  std::vector<SentLeaf> mine;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    leaves = leaves_of(state);
    std::transform(leaves.begin(), leaves.end(), std::back_inserter(mine), as_sent);
  });
  const auto all = leaves_of_all(std::move(mine));
  std::map<std::string, const SentLeaf*> first;  // of the ranks that have it
  for (const auto& leaf : all) {
    const auto [found, fresh] = first.try_emplace(leaf.name, &leaf);
    if (fresh) paths_[leaf.name] = path_of(leaf);
    else if (!leaf.is_like(*found->second))
      raise<CheckpointError>(
          "saving a distributed checkpoint: '{}' is {} on rank {} and {} on rank {}, expected the same on all ranks "
          "that have it; give what is each rank's own a name of its own",
          leaf.name, found->second->text(), found->second->rank, leaf.text(), leaf.rank);
  }
  // Tensors of which several ranks hold each part are shared out, the next one to who has least so far.
  std::vector<double> bytes(1);
  std::map<std::string, int64_t> writer;
  for (const auto& [name, leaf] : first) {
    if (!leaf->is_sharded) continue;
    bytes.resize(std::max(bytes.size(), static_cast<size_t>(leaf->replicas)));
    const auto least = std::min_element(bytes.begin(), bytes.begin() + leaf->replicas);
    writer[name] = least - bytes.begin();
    *least += static_cast<double>(formats::checked_numel(leaf->sizes).value_or(0)) *
              static_cast<double>(c10::elementSize(leaf->dtype));
  }
  for (const auto& leaf : leaves) {
    const auto shared = writer.find(leaf.name);
    add(leaf, first.at(leaf.name)->rank == comm::rank(), shared == writer.end() ? 0 : shared->second);
  }
}

void DistributedItems::add(const Leaf& leaf, bool first, int64_t writer) {
  if (const auto* sharded = std::get_if<ShardedTensor>(&leaf.value->kind())) {
    if (std::find(sharded->sizes.begin(), sharded->sizes.end(), 0) == sharded->sizes.end()) {
      if (sharded->replica != writer) return;
      for (const auto& part : sharded->parts)
        tensors_.push_back(
            {leaf.name, sharded->sizes, {part.offsets, part.values.sizes().vec()}, readable(part.values)});
    } else if (first) {  // nothing to share out
      const auto empty = at::empty(sharded->sizes, at::TensorOptions().dtype(sharded->dtype));
      tensors_.push_back({leaf.name, sharded->sizes, formats::whole(sharded->sizes), empty});
    }
    return;
  }
  if (!first) return;
  if (const auto* tensor = std::get_if<at::Tensor>(&leaf.value->kind())) {
    const auto sizes = tensor->sizes().vec();
    tensors_.push_back({leaf.name, sizes, formats::whole(sizes), tensor->detach()});
  } else if (const auto* bytes = std::get_if<Bytes>(&leaf.value->kind())) {
    objects_.push_back({leaf.name, bytes->bytes, /*is_bytes=*/true});
  } else {
    objects_.push_back({leaf.name, leaf.value->to_ivalue()});
  }
}

void DistributedItems::write_later(const std::filesystem::path& folder, snapshot::PutOff& later) const {
  auto tensors = tensors_;
  for (auto& item : tensors) item.tensor = later.hold(item.tensor, snapshot::Ledger::Order::row_major);
  auto objects = objects_;
  for (auto& item : objects) item.value = item.value.deepcopy();
  later.files().together.push_back(
      {[folder, rank = comm::rank(), objects = std::move(objects), tensors = std::move(tensors)] {
         return to_bytes(formats::write_dcp_items(folder, rank, objects, tensors));
       },
       [folder, paths = paths_](const std::vector<std::string>& of_ranks) {
         std::vector<formats::DcpRecord> records;
         for (const auto& bytes : of_ranks)
           for (auto& record : from_bytes<std::vector<formats::DcpRecord>>(bytes)) records.push_back(std::move(record));
         formats::write_dcp_metadata(folder, records, paths);
       }});
}

void DistributedItems::write_into(const std::filesystem::path& folder) const {
  if (auto* const later = snapshot::PutOff::here()) return write_later(folder, *later);
  std::vector<formats::DcpRecord> records;
  comm::on_all_ranks_or_throw<CheckpointError>(
      [&] { records = formats::write_dcp_items(folder, comm::rank(), objects_, tensors_); });
  records = gather_object(records);
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (is_main()) formats::write_dcp_metadata(folder, records, paths_);
  });
}

void DistributedItems::write(const std::filesystem::path& folder) const {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (is_main()) formats::prepare_dcp_folder(folder);
  });
  write_into(folder);
}

}  // namespace accelerate::run_state
