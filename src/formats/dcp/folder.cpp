#include "formats/dcp/folder.hpp"

#include <utility>

#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

/// Items of indexes that stay in memory: some 100 MB.
constexpr size_t kMostIndexedItems = size_t{4} << 20;

}  // namespace

DcpFolder::DcpFolder(const std::filesystem::path& folder) : folder_(folder), metadata_(read_dcp_metadata(folder)) {}

std::shared_ptr<const InputFile> DcpFolder::file(const std::string& name) const {
  std::lock_guard lock(mutex_);
  auto& file = files_[name];
  if (!file) {
    check_inside("distributed checkpoint '" + folder_.string() + "'", folder_, folder_ / name);
    file = std::make_shared<InputFile>(folder_ / name);
  }
  return file;
}

std::shared_ptr<const DcpItemIndex> DcpFolder::index_of(int64_t rank) const {
  {
    std::lock_guard lock(mutex_);
    if (const auto known = indexes_.find(rank); known != indexes_.end()) return known->second;
  }
  const auto name = dcp_data_file(rank);
  auto index = std::make_shared<const DcpItemIndex>(read_item_index(*file(name)));
  if (index->rank != rank || index->layout != metadata_.checksum)
    raise<CheckpointError>(
        "'{}': its index is of rank {} and of the layout {:08x}, expected rank {} and the layout {:08x}. The files are "
        "of different saves: copy the checkpoint again.",
        (folder_ / name).string(), index->rank, index->layout, rank, metadata_.checksum);
  std::lock_guard lock(mutex_);
  if (indexed_items_ > kMostIndexedItems) indexes_.clear(), indexed_items_ = 0;
  if (indexes_.emplace(rank, index).second) indexed_items_ += index->items.size();
  return index;
}

DcpLocation DcpFolder::place(const DcpEntry& entry, int64_t rank, int64_t box_number) const {
  const auto name = dcp_data_file(rank);
  const auto index = index_of(rank);
  if (const auto* item = index->find(number_of(entry), box_number)) return {name, item->offset, item->length};
  raise<CheckpointError>(
      "'{}': its index has no box {} of '{}', which the layout says is there. The files are of different saves: copy "
      "the checkpoint again.",
      (folder_ / name).string(), box_number, entry.name);
}

std::vector<DcpChunk> DcpFolder::parts_under(const DcpEntry& entry, const DcpBox& box) const {
  const auto& info = std::get<DcpTensorInfo>(entry.content);
  std::vector<DcpChunk> parts;
  if (!info.shards) {
    for (const auto& chunk : info.chunks)
      if (*checked_numel(chunk.box.sizes) > 0 && intersect(chunk.box, box)) parts.push_back(chunk);
    return parts;
  }
  const int64_t numel = *checked_numel(info.sizes);
  // A file that is missing ends this at once, whatever numbers a layout claims.
  for_members_under(*info.shards, info.sizes, box, [&](int64_t member) {
    const auto [from, to] = info.shards->range_of(member, numel);
    int64_t number = 0;
    for (auto& part : boxes_of_range(info.sizes, from, to)) {
      if (intersect(part, box)) parts.push_back({std::move(part), place(entry, info.shards->rank_of(member), number)});
      ++number;
    }
  });
  return parts;
}

DcpLocation DcpFolder::place_of(const DcpEntry& entry) const {
  const auto& known = std::get<DcpLocation>(entry.content);
  if (!metadata_.is_layout()) return known;
  return place(entry, rank_of_data_file(known.file), 0);
}

std::vector<DcpFolder::HeldPart> DcpFolder::parts_of_rank(int64_t rank) const {
  std::vector<HeldPart> parts;
  const auto items = held_by(metadata_, rank);
  if (items.empty()) return parts;
  const auto index = index_of(rank);
  for (const auto& item : items) {
    const auto& entry = metadata_.entries[item.entry];
    parts.push_back({&entry, {item.box, place(entry, rank, item.box_number)}});
  }
  if (index->items.size() != items.size())
    raise<CheckpointError>(
        "'{}': its index has {} items, expected the {} that the layout says are there. The files are of different "
        "saves: copy the checkpoint again.",
        (folder_ / dcp_data_file(rank)).string(), index->items.size(), items.size());
  return parts;
}

}  // namespace accelerate::formats
