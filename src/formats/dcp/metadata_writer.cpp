#include "formats/dcp/metadata.hpp"
#include "formats/pickle.hpp"

namespace accelerate::formats {
namespace {

constexpr const char* kModule = "torch.distributed.checkpoint.metadata";

/// Writes the objects that Python's `pickle.dump(Metadata(...))` would.
class MetadataWriter : PickleWriter {
 public:
  std::string write(const DcpMetadata& metadata) {
    object(kModule, "Metadata", [&] {
      field("state_dict_metadata"), dict([&] {
        for (const auto& entry : metadata.entries) {
          text(entry.name);
          if (const auto* info = std::get_if<DcpTensorInfo>(&entry.content)) tensor(*info);
          else bare_object(kModule, "BytesStorageMetadata"), empty_dict(), build();
        }
      });
      field("planner_data"), dict([&] {
        for (const auto& entry : metadata.entries)
          if (entry.path) text(entry.name), path(*entry.path);
      });
      field("storage_data"), dict([&] {
        for (const auto& entry : metadata.entries) {
          if (const auto* bytes = std::get_if<DcpLocation>(&entry.content)) {
            index(entry.name, nullptr, 0), location(*bytes);
            continue;
          }
          const auto& chunks = std::get<DcpTensorInfo>(entry.content).chunks;
          for (size_t i = 0; i < chunks.size(); ++i)
            if (!chunks[i].location.file.empty())
              index(entry.name, &chunks[i].box.offsets, static_cast<int64_t>(i)), location(chunks[i].location);
        }
      });
      // The place and time of saving are left open, so that equal states give equal files.
      field("storage_meta"), object(kModule, "StorageMeta", [&] {
        field("checkpoint_id"), none();
        field("save_id"), none();
        field("load_id"), none();
        field("modules"), empty_list();
      });
      field("version"), text(kDcpVersion);
    });
    return finish();
  }

 private:
  void field(const char* name) { text(name); }

  template <class F> void dict(F&& items) { empty_dict(), mark(), items(), set_items_to_mark(); }

  void bare_object(const char* module, const char* name) { global(module, name), empty_tuple(), new_object(); }

  template <class F> void object(const char* module, const char* name, F&& fields) {
    bare_object(module, name), dict(fields), build();
  }

  void size(const std::vector<int64_t>& sizes) {
    global("torch", "Size"), mark(), mark();
    for (const auto size : sizes) integer(size);
    tuple_of_mark(), tuple_of_mark(), reduce();
  }

  void call(const char* module, const char* name, auto&& argument) {
    global(module, name), mark(), argument(), tuple_of_mark(), reduce();
  }

  void tensor(const DcpTensorInfo& info) {
    object(kModule, "TensorStorageMetadata", [&] {
      field("properties"), bare_object(kModule, "TensorProperties"), mark();
      global("torch", info.dtype);
      call("torch.serialization", "_get_layout", [&] { text("torch.strided"); });
      boolean(info.requires_grad);
      call(kModule, "_MEM_FORMAT_ENCODING", [&] { integer(0); });  // contiguous
      boolean(false);                                              // not pinned
      tuple_of_mark(), build();
      field("size"), size(info.sizes);
      field("chunks"), empty_list(), mark();
      for (const auto& chunk : info.chunks)
        object(kModule, "ChunkStorageMetadata", [&] {
          field("offsets"), size(chunk.box.offsets);
          field("sizes"), size(chunk.box.sizes);
        });
      append_to_mark();
    });
  }

  void path(const DcpPath& path) {
    mark();
    for (const auto& step : path) {
      if (const auto* key = std::get_if<std::string>(&step)) text(*key);
      else integer(std::get<int64_t>(step));
    }
    tuple_of_mark();
  }

  void index(const std::string& name, const std::vector<int64_t>* offsets, int64_t number) {
    object(kModule, "MetadataIndex", [&] {
      field("fqn"), text(name);
      if (offsets) field("offset"), size(*offsets);
      field("index");
      if (offsets) integer(number);
      else none();
    });
  }

  void location(const DcpLocation& place) {
    object("torch.distributed.checkpoint.filesystem", "_StorageInfo", [&] {
      field("relative_path"), text(place.file);
      field("offset"), integer(place.offset);
      field("length"), integer(place.length);
    });
  }
};

}  // namespace

std::string format_dcp_metadata(const DcpMetadata& metadata) { return MetadataWriter().write(metadata); }

}  // namespace accelerate::formats
