#include "run_state/distributed_items.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/dcp/box.hpp"
#include "formats/torch_dtypes.hpp"
#include "run_state/counts.hpp"
#include "run_state/holdings.hpp"
#include "snapshot/put_off.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::run_state {
namespace {

using distributed_checkpoint::Bytes;

bool is_main() { return comm::rank() == 0; }

struct LeavesOfAll {
  std::vector<SentLeaf> leaves;  ///< by rank
  bool alike = false;            ///< all ranks have the same, which are rank 0's here
  std::string bytes;             ///< of all that the leaves say, where they are alike
  int64_t listed_parts = 0;      ///< as most_listed_parts(), of rank 0
};

/// Where all have the same leaves, which is so of a model in shards, ranks tell each other a few bytes, however many
/// leaves there are.
LeavesOfAll leaves_of_all(std::vector<SentLeaf> mine, int64_t listed_parts) {
  for (auto& leaf : mine) leaf.rank = 0;
  const auto bytes = to_bytes(mine);
  const auto digests = gather_object(std::vector<int64_t>{static_cast<int64_t>(std::hash<std::string>()(bytes)),
                                                          static_cast<int64_t>(bytes.size()), listed_parts});
  bool alike = true;
  for (size_t i = 0; i < digests.size(); ++i) alike &= i % 3 == 2 || digests[i] == digests[i % 3];
  if (alike) return {std::move(mine), true, bytes, digests[2]};
  for (auto& leaf : mine) leaf.rank = comm::rank();
  return {gather_object(mine), false, {}, digests[2]};
}

/// `.metadata` lists parts of sharded tensors up to so many, a part for each rank that has some of one.
int64_t most_listed_parts() {
  constexpr const char* kVariable = "ACCELERATE_DCP_LISTED_PARTS";
  const auto most = environment::integer({kVariable}).value_or(1'000'000);
  if (most < 0) raise<ConfigError>("{}={}, expected a number from 0", kVariable, most);
  return most;
}

/// How many parts `.metadata` would list of sharded tensors; -1 where some follow no rule, so that it has to.
int64_t listed_parts_of(const std::vector<SentLeaf>& leaves) {
  int64_t parts = 0;
  for (const auto& leaf : leaves) {
    const int64_t numel = formats::checked_numel(leaf.sizes).value_or(0);
    if (!leaf.is_sharded || numel == 0) continue;
    if (!leaf.follows_rule) return -1;
    parts += rule_of(leaf, 0).holders(numel);
  }
  return parts;
}

/// Who has what of these leaves. @param writer  the replica that writes a tensor, by name
formats::DcpLayout layout_of(const std::vector<SentLeaf>& leaves, const std::map<std::string, int64_t>& writer) {
  std::vector<formats::DcpEntry> entries;
  for (const auto& leaf : leaves) {
    formats::DcpEntry entry{.name = leaf.name, .path = path_of(leaf), .content = {}};
    if (!leaf.is_tensor) {
      entry.content = formats::DcpLocation{formats::dcp_data_file(leaf.rank), 0, 0};
    } else {
      const int64_t numel = formats::checked_numel(leaf.sizes).value_or(0);
      formats::DcpTensorInfo info{.dtype = formats::python_name(leaf.dtype), .sizes = leaf.sizes, .chunks = {}};
      info.shards = leaf.is_sharded && numel > 0
                        ? rule_of(leaf, writer.at(leaf.name))
                        : formats::DcpShards{.each = std::max<int64_t>(numel, 1), .first = leaf.rank};
      entry.content = std::move(info);
    }
    entries.push_back(std::move(entry));
  }
  counts::add(CheckpointCount::layouts_made);
  return formats::make_dcp_layout(entries, comm::world_size());
}

/// The same of an earlier save, where its leaves said the same: a run saves a few state dicts again and again. What it
/// is follows from the leaves alone, so that a rank may have it and another one make it.
std::shared_ptr<const formats::DcpLayout> kept_layout(const std::string& bytes, const std::vector<SentLeaf>& leaves,
                                                      const std::map<std::string, int64_t>& writer) {
  struct Kept {
    std::string bytes;
    int64_t ranks;
    std::shared_ptr<const formats::DcpLayout> layout;
  };
  constexpr size_t kMostKept = 8;
  static Mutex mutex;
  static std::deque<Kept> kept;
  const MutexLock lock(mutex);
  for (const auto& one : kept)
    if (one.bytes == bytes && one.ranks == comm::world_size()) return one.layout;
  auto layout = std::make_shared<const formats::DcpLayout>(layout_of(leaves, writer));
  kept.push_back({bytes, comm::world_size(), layout});
  if (kept.size() > kMostKept) kept.pop_front();
  return layout;
}

void say_once_that_python_reads_no_layouts() {
  static std::atomic<bool> said{false};
  if (is_main() && !said.exchange(true))
    logs::warn("accelerate.run_state",
               "saving a distributed checkpoint: its ranks hold more parts of tensors than "
               "ACCELERATE_DCP_LISTED_PARTS allows to list, so it gets a layout in the place of .metadata. This "
               "library reads it; Python's torch.distributed.checkpoint reads what `accelerate convert` or "
               "`accelerate merge-weights` makes of it");
}

}  // namespace

DistributedItems::DistributedItems(const StateDict& state) {
  std::vector<Leaf> leaves;
  std::vector<SentLeaf> mine;
  int64_t listed_parts = 0;
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    listed_parts = most_listed_parts();
    leaves = leaves_of(state);
    std::transform(leaves.begin(), leaves.end(), std::back_inserter(mine), as_sent);
  });
  const auto of_all = leaves_of_all(std::move(mine), listed_parts);
  const auto& all = of_all.leaves;
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
  if (of_all.alike && listed_parts_of(all) > of_all.listed_parts) {
    comm::on_all_ranks_or_throw<CheckpointError>([&] { layout_ = kept_layout(of_all.bytes, all, writer); });
    say_once_that_python_reads_no_layouts();
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
      {[folder, rank = comm::rank(), objects = std::move(objects), tensors = std::move(tensors), layout = layout_] {
         const auto records = formats::write_dcp_items(folder, rank, objects, tensors, layout.get());
         return layout ? std::string() : to_bytes(records);
       },
       [folder, paths = paths_, layout = layout_](const std::vector<std::string>& of_ranks) {
         if (layout) return formats::write_dcp_layout(folder, *layout);
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
      [&] { records = formats::write_dcp_items(folder, comm::rank(), objects_, tensors_, layout_.get()); });
  if (!layout_) records = gather_object(records);
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (!is_main()) return;
    if (layout_) formats::write_dcp_layout(folder, *layout_);
    else formats::write_dcp_metadata(folder, records, paths_);
  });
}

void DistributedItems::write(const std::filesystem::path& folder) const {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (is_main()) formats::prepare_dcp_folder(folder);
  });
  write_into(folder);
}

}  // namespace accelerate::run_state
