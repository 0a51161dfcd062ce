#include <algorithm>
#include <map>
#include <utility>

#include "formats/dcp/folder.hpp"
#include "formats/index_file.hpp"
#include "formats/inspect/readers.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats::inspecting {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// The data files of a distributed checkpoint.
class DataFiles {
 public:
  explicit DataFiles(const DcpFolder& places) : places_(places) {}

  /// @throws CheckpointError if the place lies beyond its file. The first time that a file is asked for says whether it
  /// is there.
  std::shared_ptr<const InputFile> at(const std::string& what, const DcpLocation& place) {
    auto file = places_.file(place.file);
    if (seen_.insert(place.file).second) bytes_ += file->size();
    if (place.offset > file->size() || place.length > file->size() - place.offset)
      raise<CheckpointError>(
          "{} takes bytes {} to {} of '{}', which has {}. It is truncated, or of another save: copy the checkpoint "
          "again.",
          what, place.offset, place.offset + place.length, place.file, file->size());
    return file;
  }
  int64_t count() const { return static_cast<int64_t>(seen_.size()); }
  int64_t bytes() const { return bytes_; }

 private:
  const DcpFolder& places_;
  std::set<std::string> seen_;
  int64_t bytes_ = 0;
};

/// Checks the archive of an item. @param expected  null: an object @return bytes with checksums
int64_t check_item(const std::string& what, const DcpLocation& place, const std::shared_ptr<const InputFile>& file,
                   const DcpTensorInfo* expected, const DcpBox* box) {
  const TorchContainer archive(file, place.offset, place.length, fmt::format("{} in '{}'", what, place.file), {"*"});
  if (expected) {
    const auto tensor = archive.tensor_of(archive.pickle().root());
    if (!tensor) archive.fail("it is no tensor, expected one, as the metadata says");
    if (tensor->sizes != box->sizes || tensor->dtype != expected->dtype)
      archive.fail("found a tensor of size {} and dtype {}, expected size {} and dtype {} as the metadata says",
                   tensor->sizes, tensor->dtype, box->sizes, expected->dtype);
  }
  return archive.zip() ? check_records(*archive.zip()) : 0;
}

/// What offload folders have in their index.
bool is_offload_index(const json& root) {
  return root.is_object() && !root.empty() && root.begin()->is_object() &&
         (root.begin()->contains("shape") || root.begin()->contains("safetensors_file"));
}

}  // namespace

void read_distributed(const fs::path& folder, bool verify, InspectedPart& part, const Complain& complain) {
  part.format = "distributed checkpoint";
  const DcpFolder places(folder);
  const auto& metadata = places.metadata();
  DataFiles files(places);
  std::set<std::string> lost;  // files that were complained of
  const auto look = [&](const std::string& what, const DcpLocation& place, const DcpTensorInfo* tensor,
                        const DcpBox* box) {
    if (lost.contains(place.file)) return;
    try {
      const auto file = files.at(what, place);
      if (verify) part.checked_bytes += check_item(what, place, file, tensor, box);
    } catch (const CheckpointError& error) {
      if (!is_there(folder / place.file)) lost.insert(place.file);
      complain(error.what());
    }
  };
  struct Saved {
    int64_t elements = 0, pieces = 0;
    std::string file;  ///< of the only piece
  };
  std::vector<Saved> saved(metadata.entries.size());
  const auto count = [&](const DcpEntry& entry, const DcpBox& box, const std::string& file) {
    const int64_t elements = *checked_numel(box.sizes);
    auto& sum = saved[static_cast<size_t>(&entry - metadata.entries.data())];
    sum.elements += elements;
    if (elements > 0) sum.file = ++sum.pieces == 1 ? file : "";
    return elements > 0;
  };
  const auto take = [&](const DcpEntry& entry, const DcpChunk& chunk) {
    const auto what = fmt::format("item '{}'", entry.name);
    const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
    if (!info) look(what, chunk.location, nullptr, nullptr);
    else if (count(entry, chunk.box, chunk.location.file)) look(what, chunk.location, info, &chunk.box);
  };
  for (const auto& entry : metadata.entries) {
    if (metadata.is_layout()) break;
    const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
    if (!info) take(entry, {{}, std::get<DcpLocation>(entry.content)});
    else
      for (const auto& chunk : info->chunks) take(entry, chunk);
  }
  // By rank, so that each file and its index are looked at once.
  constexpr int64_t kMostComplaints = 100;
  int64_t complaints = 0;
  for (int64_t rank = 0; rank < metadata.ranks; ++rank) {
    if (complaints == kMostComplaints) {
      complain(fmt::format("files of ranks from {} on were not looked at", rank));
      break;
    }
    try {
      for (const auto& held : places.parts_of_rank(rank)) take(*held.entry, held.chunk);
    } catch (const CheckpointError& error) {
      ++complaints;
      complain(error.what());  // once for the file
      for (const auto& item : held_by(metadata, rank))
        count(metadata.entries[item.entry], item.box, dcp_data_file(rank));
    }
  }
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto& entry = metadata.entries[i];
    const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
    if (!info) {
      ++part.others;
      continue;
    }
    const int64_t numel = *checked_numel(info->sizes);
    if (saved[i].elements != numel && complaints < kMostComplaints)
      complain(fmt::format("'{}' has {} elements, of which {} were saved: not all ranks took part in the save",
                           entry.name, numel, saved[i].elements));
    part.tensors.push_back({.name = entry.name,
                            .dtype = info->dtype,
                            .shape = info->sizes,
                            .bytes = numel * torch_element_bytes(info->dtype),
                            .file = saved[i].file,
                            .pieces = std::max<int64_t>(saved[i].pieces, 1)});
  }
  part.files = files.count() + 1;
  part.bytes = files.bytes() + InputFile(folder / (metadata.is_layout() ? kDcpLayoutFile : kDcpMetadataFile)).size();
}

bool read_offload_folder(const fs::path& index, InspectedPart& part, const Complain& complain) {
  std::string problem;
  const auto root = parse_json<json>(read_text<CheckpointError>("offload index", index, kMostListBytes), &problem,
                                     {.unique_keys = true});
  if (!is_offload_index(root)) return false;
  part.format = "offload folder";
  part.bytes = InputFile(index).size();
  for (const auto& [name, entry] : root.items()) {
    const auto text = [&, &entry = entry](const char* key) {
      return entry.is_object() && entry.contains(key) && entry[key].is_string() ? entry[key].get<std::string>() : "";
    };
    InspectedTensor tensor{.name = name, .dtype = text("dtype"), .shape = {}, .file = text("safetensors_file")};
    try {
      if (!tensor.file.empty()) {  // a tensor of another file, under a name of its own
        const auto weight = text("weight_name").empty() ? name : text("weight_name");
        check_inside("offload index '" + index.string() + "'", index.parent_path(), tensor.file);
        InspectedPart other;
        read_file_part(tensor.file, "safetensors", /*verify=*/false, other);
        const auto found = std::ranges::find(other.tensors, weight, &InspectedTensor::name);
        if (found == other.tensors.end())
          raise<CheckpointError>("'{}' should be '{}' in '{}', which lacks it", name, weight, tensor.file);
        tensor.shape = found->shape, tensor.bytes = found->bytes, tensor.dtype = found->dtype;
      } else {
        int64_t bytes = torch_element_bytes(tensor.dtype);
        if (bytes == 0 || !entry.contains("shape") || !entry["shape"].is_array())
          raise<CheckpointError>("'{}' is {}, expected a dtype of PyTorch and a shape", name, show_json(entry));
        for (const auto& size : entry["shape"]) {
          tensor.shape.push_back(whole_number(size).value_or(-1));
          if (tensor.shape.back() < 0 || __builtin_mul_overflow(bytes, tensor.shape.back(), &bytes))
            raise<CheckpointError>("'{}' has the shape {}, which no tensor has", name, show_json(entry["shape"]));
        }
        tensor.bytes = bytes;
        tensor.file = name + ".dat";
        const InputFile file(file_inside("offload index '" + index.string() + "'", index.parent_path(), tensor.file));
        ++part.files, part.bytes += file.size();
        if (file.size() < bytes)
          raise<CheckpointError>("'{}' has {} bytes, expected {}. It is truncated: offload the weights again.",
                                 tensor.file, file.size(), bytes);
      }
    } catch (const CheckpointError& error) {
      complain(error.what());
    }
    part.tensors.push_back(std::move(tensor));
  }
  return true;
}

void read_index_part(const fs::path& index, bool verify, InspectedPart& part, std::set<std::string>& shards,
                     const Complain& complain) {
  std::map<std::string, std::set<std::string>> names_in;
  for (const auto& [name, file] : read_index(index)) names_in[file].insert(name), shards.insert(file);
  part.bytes = InputFile(index).size();
  for (const auto& [file, names] : names_in) {
    try {
      const auto path = index.parent_path() / file;
      const InputFile opened(path);
      ++part.files, part.bytes += opened.size();
      InspectedPart shard;
      read_file_part(path, format_of(path), verify, shard);
      part.format = shard.format + ", several files";
      part.checked_bytes += shard.checked_bytes;
      if (!shard.unread.empty()) part.unread = shard.unread;
      size_t found = 0;
      for (auto& tensor : shard.tensors) {
        if (!names.contains(tensor.name)) continue;
        ++found;
        tensor.file = file;
        part.tensors.push_back(std::move(tensor));
      }
      if (found < names.size())
        complain(fmt::format("'{}' lacks {} of the tensors that the index says are in it", file, names.size() - found));
    } catch (const CheckpointError& error) {
      complain(error.what());
    }
  }
  if (part.format.empty()) part.format = "index of several files";
}

}  // namespace accelerate::formats::inspecting
