#include <ATen/ops/empty.h>

#include "formats/dcp.hpp"
#include "formats/similar_names.hpp"
#include "formats/torch_archive.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/read_file.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::formats {

namespace fs = std::filesystem;

at::ScalarType scalar_type(const DcpTensorInfo& info) { return find_torch_dtype("torch." + info.dtype)->type; }

DcpCheckpoint::DcpCheckpoint(const fs::path& folder) : places_(folder) {
  for (size_t i = 0; i < entries().size(); ++i) by_name_.emplace(entries()[i].name, i);
}

const DcpEntry* DcpCheckpoint::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries()[found->second];
}

const DcpEntry& DcpCheckpoint::entry(const std::string& name) const {
  if (const auto* found = find(name)) return *found;
  raise<CheckpointError>("checkpoint '{}' has no '{}'; it has {} others.{}", folder().string(), name, entries().size(),
                         similar_names(name, strings_of(entries(), &DcpEntry::name)));
}

const DcpTensorInfo& DcpCheckpoint::tensor(const std::string& name) const {
  if (const auto* info = std::get_if<DcpTensorInfo>(&entry(name).content)) return *info;
  raise<CheckpointError>("checkpoint '{}': '{}' is an object in bytes, expected a tensor.", folder().string(), name);
}

std::string DcpCheckpoint::describe(const std::string& name, const DcpLocation& place) const {
  return fmt::format("item '{}' in '{}'", name, (folder() / place.file).string());
}

struct DcpCheckpoint::SavedRegion {
  DcpChunk chunk;
  DcpBox common;  ///< with the wanted part, in the coordinates of the whole tensor
  std::shared_ptr<const InputFile> file;
  SavedTensor saved;
};

/// The saved parts that make up `box`, their places checked, nothing read of their elements yet.
std::vector<DcpCheckpoint::SavedRegion> DcpCheckpoint::find_regions(const std::string& name, const DcpBox& box) const {
  const auto& info = tensor(name);
  const auto of = fmt::format("loading '{}' from '{}': ", name, folder().string());
  if (!lies_within(box, info.sizes))
    raise<ShapeError>("{}the wanted part with {} does not lie within the saved tensor of size {}.", of, to_string(box),
                      info.sizes);

  std::vector<SavedRegion> regions;
  int64_t covered = 0;
  for (auto& part : places_.parts_under(entry(name), box)) {
    auto common = *intersect(part.box, box);
    covered += *checked_numel(common.sizes);
    regions.push_back({std::move(part), std::move(common), nullptr, {}});
  }
  // Parts don't overlap, so a box is covered when the numbers of elements agree.
  if (const auto wanted = *checked_numel(box.sizes); covered != wanted) {
    const auto saved = strings_of(info.chunks, [](const auto& chunk) { return to_string(chunk.box); });
    raise<CheckpointError>(
        "{}the wanted part with {} has {} elements, of which only {} were saved ({}). The save was incomplete: not all "
        "ranks took part.",
        of, to_string(box), wanted, covered, fmt::format("{}", fmt::join(saved, "; ")).substr(0, 500));
  }
  for (auto& region : regions) {
    const auto& place = region.chunk.location;
    region.file = places_.file(place.file);
    region.saved = TorchArchive(region.file, place.offset, place.length, describe(name, place), PickledObjects::refused,
                                /*peeks=*/true)
                       .tensor();
    if (region.saved.sizes != region.chunk.box.sizes || region.saved.dtype != scalar_type(info))
      raise<CheckpointError>(
          "{}: found a tensor of size {} and dtype {}, expected size {} and dtype {} as the metadata says. The files "
          "are of different saves, or offsets are wrong.",
          describe(name, place), region.saved.sizes, c10::toString(region.saved.dtype), region.chunk.box.sizes,
          c10::toString(scalar_type(info)));
  }
  return regions;
}

void DcpCheckpoint::copy_regions(const std::vector<SavedRegion>& regions, const DcpBox& box,
                                 const at::Tensor& destination) {
  for (const auto& region : regions) {
    auto to = destination.detach();
    auto offsets = region.common.offsets;
    for (size_t dim = 0; dim < offsets.size(); ++dim) {
      to = to.narrow(static_cast<int64_t>(dim), offsets[dim] - box.offsets[dim], region.common.sizes[dim]);
      offsets[dim] -= region.chunk.box.offsets[dim];
    }
    // Before and behind the elements lies what has led to them.
    const auto& [_, offset, length] = region.chunk.location;
    const int64_t end = region.saved.storage_begin + region.saved.storage_bytes;
    region.file->check(offset, region.saved.storage_begin - offset);
    read_part(*region.file, region.saved, offsets, to);
    region.file->check(end, offset + length - end);
  }
}

void DcpCheckpoint::read_chunk(const std::string& name, const DcpBox& box, const at::Tensor& destination) const {
  if (destination.sizes() != box.sizes)
    raise<ShapeError>("loading '{}' from '{}': the destination has size {}, expected that of the wanted part, {}.",
                      name, folder().string(), destination.sizes(), box.sizes);
  copy_regions(find_regions(name, box), box, destination);
}

FoundPart DcpCheckpoint::find_chunk(const std::string& name, const DcpBox& box) const {
  auto regions = find_regions(name, box);
  FoundPart found;
  if (!regions.empty()) {
    found.file = regions.front().file->path();
    found.begin = regions.front().chunk.location.offset;
  }
  found.read = [regions = std::move(regions), box](const at::Tensor& destination) {
    copy_regions(regions, box, destination);
  };
  return found;
}

at::Tensor DcpCheckpoint::read_chunk(const std::string& name, const DcpBox& box) const {
  const auto regions = find_regions(name, box);  // before memory is taken: damaged metadata may claim any size
  auto result = at::empty(box.sizes, at::TensorOptions().dtype(scalar_type(tensor(name))));
  copy_regions(regions, box, result);
  return result;
}

at::Tensor DcpCheckpoint::read_full(const std::string& name) const {
  return read_chunk(name, whole(tensor(name).sizes));
}

c10::IValue DcpCheckpoint::read_object(const std::string& name) const {
  if (!std::holds_alternative<DcpLocation>(entry(name).content))
    raise<CheckpointError>("checkpoint '{}': '{}' is a tensor, expected an object in bytes.", folder().string(), name);
  const auto place = places_.place_of(entry(name));
  return TorchArchive(places_.file(place.file), place.offset, place.length, describe(name, place)).value();
}

}  // namespace accelerate::formats
