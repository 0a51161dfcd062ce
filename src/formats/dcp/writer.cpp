#include <map>
#include <regex>
#include <set>

#include <c10/core/GradMode.h>

#include "formats/dcp.hpp"
#include "formats/torch_archive.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/read_file.hpp"
#include "observe/trace.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;

void check(const DcpTensorItem& item) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<ShapeError>("writing a distributed checkpoint: '{}' {}", item.name,
                      fmt::format(what, std::forward<Args>(args)...));
  };
  if (!item.tensor.defined()) fail("has no tensor.");
  if (item.tensor.layout() != at::kStrided || item.tensor.is_meta())
    fail("is sparse or on the meta device, so it has no elements to write. Call to_dense() on it, or materialise it.");
  if (!checked_numel(item.sizes) || !lies_within(item.box, item.sizes))
    fail("is the part with {}, which does not lie within a tensor of size {}.", to_string(item.box), item.sizes);
  if (item.tensor.sizes() != item.box.sizes)
    fail("has size {}, expected that of its part, {}.", item.tensor.sizes(), item.box.sizes);
}

/// Every element must be there once, else loading would fail or depend on the order of reading.
void check_cover(const DcpEntry& entry, const DcpTensorInfo& info) {
  std::vector<const DcpBox*> boxes;
  int64_t covered = 0;  // can't overflow: parts that don't overlap are within the tensor
  for (const auto& chunk : info.chunks) boxes.push_back(&chunk.box);
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("writing DCP metadata: {} of '{}', a tensor of size {}.",
                           fmt::format(what, std::forward<Args>(args)...), entry.name, info.sizes);
  };
  if (const auto pair = find_overlap(boxes)) {
    const auto &first = info.chunks[pair->first], &second = info.chunks[pair->second];
    fail("ranks wrote overlapping parts, {} {} and {} {},", first.location.file, to_string(first.box),
         second.location.file, to_string(second.box));
  }
  for (const auto* box : boxes) covered += *checked_numel(box->sizes);
  if (covered != *checked_numel(info.sizes)) {
    const auto parts = strings_of(boxes, [](const DcpBox* box) { return to_string(*box); });
    fail("only {} of {} elements were written ({})", covered, *checked_numel(info.sizes),
         fmt::format("{}", fmt::join(parts, "; ")).substr(0, 1000));
  }
}

/// Numbers the items as the layout does, in which it must have all of them: readers go by its rules alone.
DcpItemIndex index_of_items(const std::vector<DcpRecord>& records, int64_t rank, const DcpLayout& layout) {
  std::map<std::pair<std::string, DcpBox>, const DcpRecord*> written;
  for (const auto& record : records) written.emplace(std::pair(record.name, record.box), &record);
  DcpItemIndex index{.rank = rank, .layout = layout.metadata.checksum, .items = {}};
  for (const auto& item : held_by(layout.metadata, rank)) {
    const auto& entry = layout.metadata.entries[item.entry];
    const auto found = written.find({entry.name, item.box});
    const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
    if (found == written.end() || found->second->is_tensor != (info != nullptr) ||
        (info && (found->second->sizes != info->sizes || found->second->dtype != scalar_type(*info))))
      throw InternalError(
          fmt::format("writing a distributed checkpoint: rank {} did not write '{}', {}, as its layout says", rank,
                      entry.name, to_string(item.box)));
    index.items.push_back({static_cast<uint32_t>(item.entry), static_cast<uint32_t>(item.box_number),
                           found->second->location.offset, found->second->location.length});
  }
  if (index.items.size() != records.size())
    throw InternalError(fmt::format("writing a distributed checkpoint: rank {} wrote {} items, its layout has {}", rank,
                                    records.size(), index.items.size()));
  return index;
}

}  // namespace

void prepare_dcp_folder(const fs::path& folder) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (!fs::is_directory(folder))
    raise<CheckpointError>(
        "saving to '{}': it can't be created as a folder ({}). A file of this name may be in the way, or the rights "
        "are missing.",
        folder.string(), failure.message());
  for (const auto* last : {kDcpMetadataFile, kDcpLayoutFile}) fs::remove(folder / last);
  const std::regex data("__\\d+_\\d+\\.distcp");
  std::vector<fs::path> old;
  for (const auto& entry : read_folder<CheckpointError>("saving to", folder))
    if (std::regex_match(entry.path().filename().string(), data)) old.push_back(entry.path());
  for (const auto& path : old) fs::remove(path);
}

std::vector<DcpRecord> write_dcp_items(const fs::path& folder, int64_t rank, const std::vector<DcpObjectItem>& objects,
                                       const std::vector<DcpTensorItem>& tensors, const DcpLayout* layout) {
  for (const auto& item : tensors) check(item);
  std::vector<DcpRecord> records;
  if (objects.empty() && tensors.empty()) return records;

  const auto name = dcp_data_file(rank);
  trace::Span span(trace::SpanKind::checkpoint_write, name);
  AtomicFile file("writing a distributed checkpoint", folder / name);
  int64_t position = 0;
  const auto write = [&](DcpRecord record, TorchPickle&& pickle) {
    record.location = {name, position, 0};
    write_torch_archive(std::move(pickle), [&](std::string_view bytes) {
      file.write(bytes);
      position += static_cast<int64_t>(bytes.size());
    });
    record.location.length = position - record.location.offset;
    records.push_back(std::move(record));
  };
  for (const auto& item : objects) {
    TorchPickle pickle;
    if (item.is_bytes) pickle.bytes(item.value.toStringRef());
    else pickle.value(item.value);
    write({.name = item.name}, std::move(pickle));
  }
  for (const auto& item : tensors) {
    if (item.tensor.numel() == 0 && *checked_numel(item.sizes) > 0) continue;
    TorchPickle pickle;
    pickle.tensor(item.tensor.scalar_type(), item.box.sizes, false, [&] { return item.tensor; });
    write({.name = item.name,
           .is_tensor = true,
           .dtype = item.tensor.scalar_type(),
           .sizes = item.sizes,
           .box = item.box},
          std::move(pickle));
  }
  if (records.empty()) return records;
  if (layout) file.write(format_item_index(index_of_items(records, rank, *layout)));
  file.finish();
  span.set_bytes(position);
  return records;
}

void write_dcp_layout(const fs::path& folder, const DcpLayout& layout) {
  AtomicFile file("writing a layout", folder / kDcpLayoutFile);
  file.write(layout.text);
  file.finish();
}

void write_dcp_metadata(const fs::path& folder, const std::vector<DcpRecord>& records,
                        const std::map<std::string, DcpPath>& paths) {
  DcpMetadata metadata;
  std::map<std::string, size_t> by_name;
  for (const auto& record : records) {
    const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
      raise<CheckpointError>("writing DCP metadata: '{}' in {} {}", record.name, record.location.file,
                             fmt::format(what, std::forward<Args>(args)...));
    };
    const auto* dtype = find_torch_dtype(record.dtype);
    if (!dtype) fail("has dtype {}, which has no name in Python's files. Convert it.", c10::toString(record.dtype));
    const auto [found, fresh] = by_name.try_emplace(record.name, metadata.entries.size());
    if (fresh) {
      const auto path = paths.find(record.name);
      if (path == paths.end() || path->second.empty()) fail("has no path into the saved object. Every name needs one.");
      metadata.entries.push_back({record.name, path->second, {}});
      auto& content = metadata.entries.back().content;
      if (record.is_tensor) content = DcpTensorInfo{python_name(record.dtype), record.requires_grad, record.sizes, {}};
      else content = record.location;
    } else if (!record.is_tensor || !std::holds_alternative<DcpTensorInfo>(metadata.entries[found->second].content)) {
      fail("is an object, or elsewhere one, that another rank wrote too. An object is written by one rank.");
    }
    if (!record.is_tensor) continue;
    auto& info = std::get<DcpTensorInfo>(metadata.entries[found->second].content);
    if (scalar_type(info) != record.dtype || info.sizes != record.sizes)
      fail("is part of a tensor of size {} and dtype {}, on another rank of size {} and dtype {}.", record.sizes,
           c10::toString(record.dtype), info.sizes, c10::toString(scalar_type(info)));
    if (!lies_within(record.box, info.sizes))
      fail("has the part {}, which does not lie within the tensor of size {}.", to_string(record.box), info.sizes);
    // A tensor without elements is written by every rank that has it; one entry is enough.
    if (*checked_numel(record.box.sizes) == 0 && !info.chunks.empty()) continue;
    info.chunks.push_back({record.box, record.location});
  }
  for (const auto& entry : metadata.entries)
    if (const auto* info = std::get_if<DcpTensorInfo>(&entry.content)) check_cover(entry, *info);

  AtomicFile file("writing DCP metadata", folder / kDcpMetadataFile);
  file.write(format_dcp_metadata(metadata));
  file.finish();
}

}  // namespace accelerate::formats
