#include <algorithm>
#include <limits>
#include <map>
#include <unordered_map>

#include "formats/dcp/layout.hpp"
#include "formats/dcp/metadata.hpp"
#include "formats/dcp/path_limits.hpp"
#include "formats/input_file.hpp"
#include "formats/pickle.hpp"
#include "formats/torch_container.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

using Kind = PickleNode::Kind;

constexpr std::string_view kTensorMetadata = "torch.distributed.checkpoint.metadata.TensorStorageMetadata";
constexpr std::string_view kBytesMetadata = "torch.distributed.checkpoint.metadata.BytesStorageMetadata";
constexpr std::string_view kProperties = "torch.distributed.checkpoint.metadata.TensorProperties";
constexpr std::string_view kOldProperties =
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties";  // torch < 2.3
constexpr std::string_view kChunk = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata";
constexpr std::string_view kIndex = "torch.distributed.checkpoint.metadata.MetadataIndex";
constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata.Metadata";
constexpr std::string_view kStorageInfo = "torch.distributed.checkpoint.filesystem._StorageInfo";

/// "torch.float32" -> "float32"
const std::map<std::string, std::string, std::less<>>& dtypes_of_metadata() {
  static const auto dtypes = [] {
    std::map<std::string, std::string, std::less<>> names;
    for_each_torch_storage(
        [&](const TorchStorage& row) { names.emplace(fmt::format("torch.{}", row.dtype), row.dtype); });
    return names;
  }();
  return dtypes;
}

const std::vector<std::string_view>& globals_of_metadata() {
  static const auto globals = [] {
    std::vector<std::string_view> names{
        kTensorMetadata, kBytesMetadata, kProperties, kOldProperties, kChunk, kIndex, kMetadata, kStorageInfo,
        kTorchSize, "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING", "torch.serialization._get_layout",
        kPickleOrderedDict,
        // By which Python 3.11 before 3.11.4 (Debian 12's) names a memory format: getattr(class, name). Nobody reads
        // it.
        "builtins.getattr", "__builtin__.getattr",
        // The folder's name, which says nothing about the contents and may be that of another machine. (Python 3.13
        // moved the classes.)
        "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath", "pathlib._local.WindowsPath"};
    for (const auto& [global, dtype] : dtypes_of_metadata()) names.push_back(global);
    return names;
  }();
  return globals;
}

class MetadataReader {
 public:
  MetadataReader(std::string_view bytes, const std::string& file)
      : pickle_(bytes, globals_of_metadata(), "DCP metadata '" + file + "'") {}

  DcpMetadata read() {
    const auto& root = pickle_.state_of(pickle_.root(), kMetadata);
    const auto& values = pickle_.expect(pickle_.get(root, "state_dict_metadata"), Kind::dict, "state_dict_metadata");
    for (size_t i = 0; i < values.items.size(); i += 2) {
      const auto& key = pickle_[values.items[i]];
      const auto name = pickle_.text(key, "the name of a value");
      if (!by_name_.emplace(name, metadata_.entries.size()).second)
        pickle_.fail(key.at, "the name '{}' occurs twice.", name);
      const auto& value = pickle_[values.items[i + 1]];
      const bool is_tensor = value.kind == Kind::object && Pickle::is_global(pickle_[value.items[0]], kTensorMetadata);
      if (is_tensor) metadata_.entries.push_back({name, std::nullopt, tensor(value, name)});
      else if (value.kind == Kind::object && Pickle::is_global(pickle_[value.items[0]], kBytesMetadata))
        metadata_.entries.push_back({name, std::nullopt, DcpLocation{}});
      else
        pickle_.fail(value.at, "the description of '{}' is neither that of a tensor nor that of an object in bytes.",
                     name);
    }
    read_paths(root);
    read_places(root);
    for (const auto& entry : metadata_.entries) check(entry);
    return std::move(metadata_);
  }

 private:
  std::vector<int64_t> size(const PickleNode& node, const std::string& what) {
    // A torch.Size, which pickles as a call on a tuple; other writers give the tuple or list itself.
    const auto* arguments = pickle_.call_of(node, kTorchSize);
    if (arguments && arguments->size() != 1)
      pickle_.fail(node.at, "{}: torch.Size of {} arguments, expected one.", what, arguments->size());
    const auto& items = arguments ? pickle_[arguments->front()] : node;
    if (items.kind != Kind::tuple && items.kind != Kind::list)
      pickle_.fail(node.at, "{} is {}, expected a torch.Size.", what, to_string(node.kind));
    if (items.items.size() > kMaxDims)
      pickle_.fail(node.at, "{} has {} dimensions, expected at most {}.", what, items.items.size(), kMaxDims);
    std::vector<int64_t> result;
    for (const auto item : items.items) result.push_back(pickle_.integer(pickle_[item], what));
    return result;
  }

  DcpTensorInfo tensor(const PickleNode& node, const std::string& name) {
    const auto of = " of '" + name + "'";
    const auto& state = pickle_.state_of(node, kTensorMetadata);
    DcpTensorInfo info;
    info.sizes = size(pickle_.get(state, "size"), "the size" + of);
    if (const auto numel = checked_numel(info.sizes);
        !numel || *numel > std::numeric_limits<int64_t>::max() / kMaxElementBytes)
      pickle_.fail(node.at, "the size{} is {}, expected sizes from 0 and fewer than 2^63 bytes in all.", of,
                   info.sizes);

    const auto& properties = pickle_.get(state, "properties");
    const bool old = properties.kind == Kind::object && Pickle::is_global(pickle_[properties.items[0]], kOldProperties);
    const auto& fields = pickle_.expect(pickle_.state_of(properties, old ? kOldProperties : kProperties), Kind::tuple,
                                        "the properties" + of);
    if (fields.items.size() != 5)
      pickle_.fail(fields.at, "the properties{} have {} fields, expected 5.", of, fields.items.size());
    const auto& dtype = pickle_.expect(pickle_[fields.items[0]], Kind::global, "the dtype" + of);
    const auto row = dtypes_of_metadata().find(dtype.text);
    if (row == dtypes_of_metadata().end())
      pickle_.fail(dtype.at, "the dtype{} is {}, expected an element type of torch.", of, dtype.text);
    info.dtype = row->second;
    info.requires_grad = pickle_.boolean(pickle_[fields.items[2]], "requires_grad" + of);

    const auto& chunks = pickle_.expect(pickle_.get(state, "chunks"), Kind::list, "the chunks" + of);
    for (const auto item : chunks.items) {
      const auto& chunk = pickle_.state_of(pickle_[item], kChunk);
      info.chunks.push_back({{size(pickle_.get(chunk, "offsets"), "the offsets" + of),
                              size(pickle_.get(chunk, "sizes"), "the sizes" + of)},
                             {}});
      if (!lies_within(info.chunks.back().box, info.sizes))
        pickle_.fail(pickle_[item].at, "a chunk{} with {} does not lie within the tensor of size {}.", of,
                     to_string(info.chunks.back().box), info.sizes);
    }
    return info;
  }

  /// planner_data: flat name -> path. Absent in files of planners that don't flatten.
  void read_paths(const PickleNode& root) {
    const auto* paths = pickle_.find(root, "planner_data");
    if (!paths || paths->kind == Kind::none) return;
    pickle_.expect(*paths, Kind::dict, "planner_data");
    DcpPathLimits limits(static_cast<int64_t>(pickle_.size()) / 4);
    for (size_t i = 0; i < paths->items.size(); i += 2) {
      const auto name = pickle_.text(pickle_[paths->items[i]], "a name in planner_data");
      const auto& steps = pickle_.expect(pickle_[paths->items[i + 1]], Kind::tuple, "the path of '" + name + "'");
      if (steps.items.empty() || steps.items.size() > DcpPathLimits::kMostSteps)
        pickle_.fail(steps.at, "the path of '{}' has {} steps, expected 1 to {}.", name, steps.items.size(),
                     DcpPathLimits::kMostSteps);
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) continue;
      DcpPath path;
      for (const auto item : steps.items) {
        const auto& step = pickle_[item];
        if (step.kind == Kind::integer) path.emplace_back(step.integer);
        else path.emplace_back(pickle_.text(step, "a step of the path of '" + name + "'"));
      }
      if (const auto wrong = limits.add(path); !wrong.empty())
        pickle_.fail(steps.at, "the path of '{}' {}", name, wrong);
      metadata_.entries[found->second].path = std::move(path);
    }
  }

  /// storage_data: (name, offsets) -> place.
  void read_places(const PickleNode& root) {
    std::vector<std::map<std::vector<int64_t>, size_t>> chunks(metadata_.entries.size());
    for (size_t i = 0; i < chunks.size(); ++i)
      if (const auto* info = std::get_if<DcpTensorInfo>(&metadata_.entries[i].content)) {
        // Several empty parts may begin at one place, and one that has elements too: it is the one that was stored.
        for (size_t k = 0; k < info->chunks.size(); ++k) {
          const auto [at, fresh] = chunks[i].try_emplace(info->chunks[k].box.offsets, k);
          if (!fresh && *checked_numel(info->chunks[k].box.sizes) > 0) at->second = k;
        }
      }
    const auto& places = pickle_.expect(pickle_.get(root, "storage_data"), Kind::dict, "storage_data");
    for (size_t i = 0; i < places.items.size(); i += 2) {
      const auto& key = pickle_[places.items[i]];
      const auto& index = pickle_.state_of(key, kIndex);
      const auto name = pickle_.text(pickle_.get(index, "fqn"), "the name of an item");
      const auto found = by_name_.find(name);
      if (found == by_name_.end())
        pickle_.fail(key.at, "an item of '{}' is stored, but no value of that name is described.", name);
      auto place = location(pickle_[places.items[i + 1]], name);
      auto& content = metadata_.entries[found->second].content;
      if (auto* bytes = std::get_if<DcpLocation>(&content)) {
        *bytes = std::move(place);
        continue;
      }
      auto& info = std::get<DcpTensorInfo>(content);
      const auto* offset = pickle_.find(index, "offset");
      const auto offsets = offset && offset->kind != Kind::none
                               ? size(*offset, "the offset of an item of '" + name + "'")
                               : std::vector<int64_t>(info.sizes.size(), 0);
      const auto chunk = chunks[found->second].find(offsets);
      if (chunk == chunks[found->second].end())
        pickle_.fail(key.at, "an item of '{}' is stored at {}, where no chunk begins.", name, offsets);
      info.chunks[chunk->second].location = std::move(place);
    }
  }

  DcpLocation location(const PickleNode& node, const std::string& name) {
    const auto& state = pickle_.state_of(node, kStorageInfo);
    DcpLocation place{pickle_.text(pickle_.get(state, "relative_path"), "the file of '" + name + "'"),
                      pickle_.integer(pickle_.get(state, "offset"), "the offset of '" + name + "'"),
                      pickle_.integer(pickle_.get(state, "length"), "the length of '" + name + "'")};
    int64_t end = 0;
    if (place.offset < 0 || place.length <= 0 || __builtin_add_overflow(place.offset, place.length, &end))
      pickle_.fail(node.at,
                   "an item of '{}' has offset {} and length {}, expected an offset from 0 and a positive length.",
                   name, place.offset, place.length);
    const std::filesystem::path path = place.file;
    if (place.file.empty() || place.file.find('\0') != std::string::npos || path.is_absolute() ||
        std::find(path.begin(), path.end(), "..") != path.end())
      pickle_.fail(node.at, "an item of '{}' is in '{}', expected the name of a file in the folder of the checkpoint.",
                   name, place.file);
    if (const auto* transforms = pickle_.find(state, "transform_descriptors");
        transforms && transforms->kind != Kind::none && !transforms->items.empty()) {
      const auto& first = pickle_[transforms->items[0]];
      pickle_.fail(node.at,
                   "an item of '{}' was transformed while it was written{}, which can't be undone here. Save without "
                   "extensions of the writer.",
                   name, first.kind == Kind::text ? fmt::format(" ({})", first.text) : "");
    }
    return place;
  }

  void check(const DcpEntry& entry) {
    const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
    const auto stored_nowhere = [&](const std::string& what) {
      pickle_.fail(pickle_.root().at,
                   "{} of '{}' is described, but stored nowhere. The metadata is of an unfinished save.", what,
                   entry.name);
    };
    if (!info) {
      if (std::get<DcpLocation>(entry.content).file.empty()) stored_nowhere("the object");
      return;
    }
    std::vector<const DcpBox*> boxes;
    for (const auto& chunk : info->chunks) {
      if (*checked_numel(chunk.box.sizes) == 0) continue;
      if (chunk.location.file.empty()) stored_nowhere("the chunk with " + to_string(chunk.box));
      boxes.push_back(&chunk.box);
    }
    if (const auto pair = find_overlap(boxes))
      pickle_.fail(pickle_.root().at, "two chunks of '{}' overlap: {} and {}. Every element must be stored once.",
                   entry.name, to_string(*boxes[pair->first]), to_string(*boxes[pair->second]));
  }

  static constexpr int64_t kMaxElementBytes = 16;
  static constexpr size_t kMaxDims = 64;  // LibTorch's own limit for most operators

  Pickle pickle_;
  DcpMetadata metadata_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace

DcpMetadata parse_dcp_metadata(std::string_view bytes, const std::string& file) {
  return MetadataReader(bytes, file).read();
}

bool is_dcp_folder(const std::filesystem::path& folder) {
  return is_there(folder / kDcpMetadataFile) || is_there(folder / kDcpLayoutFile);
}

DcpMetadata read_dcp_metadata(const std::filesystem::path& folder) {
  const auto path = folder / kDcpMetadataFile;
  if (is_there(folder / kDcpLayoutFile)) {
    if (is_there(path))
      raise<CheckpointError>(
          "loading '{}': found both {} and {}, of which a checkpoint has one. One of them is of another save: remove "
          "it, or copy the checkpoint again.",
          folder.string(), kDcpMetadataFile, kDcpLayoutFile);
    const auto file = (folder / kDcpLayoutFile).string();
    return parse_dcp_layout(read_text<CheckpointError>("layout", file, kMostListBytes), file);
  }
  if (!is_there(path)) {
    std::string why = is_folder(folder)
                          ? " Is it the folder of a distributed checkpoint? Its parent or a folder in it may be."
                          : " The folder is not there: check the path.";
    if (is_there(folder / "__0.metadata"))
      why =
          " It was saved without collectives, each rank for itself (__0.metadata is there), which can only be loaded "
          "by the same ranks of Python's DCP. Save with use_collectives=True.";
    else if (is_there(folder / "__0_0.distcp"))
      why =
          " Data files are there: the save did not finish, or .metadata, a hidden file, was not copied with the rest "
          "(or "
          ".accelerate_layout, where the save has written that in its place).";
    raise<CheckpointError>("loading '{}': found no file .metadata, which every distributed checkpoint has.{}",
                           folder.string(), why);
  }
  const InputFile file(path);
  if (file.size() > static_cast<int64_t>(Pickle::kMaxBytes))
    raise<CheckpointError>("'{}' has {} bytes, expected at most {} of metadata.", path.string(), file.size(),
                           Pickle::kMaxBytes);
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(0, bytes.data(), file.size());
  return parse_dcp_metadata(bytes, path.string());
}

}  // namespace accelerate::formats
