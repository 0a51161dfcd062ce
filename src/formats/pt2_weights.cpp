#include "formats/pt2_weights.hpp"

#include <string_view>
#include <utility>

#include "formats/torch_container.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats {
namespace {

using nlohmann::json;

constexpr std::string_view kFolder = "data/weights/", kConfigEnd = "_weights_config.json";
/// Where older versions have a state_dict of torch.save: torch 2.6 to 2.8, and before.
constexpr const char* kStateDicts[] = {"data/weights/model.pt", "serialized_state_dict.pt"};

/// The numbers of element types in these files.
constexpr std::pair<int64_t, std::string_view> kPt2Dtypes[] = {{1, "uint8"},
                                                               {2, "int8"},
                                                               {3, "int16"},
                                                               {4, "int32"},
                                                               {5, "int64"},
                                                               {6, "float16"},
                                                               {7, "float32"},
                                                               {8, "float64"},
                                                               {9, "complex32"},
                                                               {10, "complex64"},
                                                               {11, "complex128"},
                                                               {12, "bool"},
                                                               {13, "bfloat16"},
                                                               {28, "uint16"},
                                                               {29, "float8_e4m3fn"},
                                                               {30, "float8_e5m2"},
                                                               {31, "float8_e4m3fnuz"},
                                                               {32, "float8_e5m2fnuz"},
                                                               {33, "float8_e8m0fnu"},
                                                               {34, "uint32"},
                                                               {35, "uint64"}};

class Pt2Reader {
 public:
  Pt2Reader(const ZipArchive& archive, const std::string& source) : archive_(archive), source_(source) {}

  Pt2Weights read() {
    std::vector<std::string> models;
    for (const auto& [name, entry] : archive_.entries())
      if (name.starts_with(kFolder) && name.ends_with(kConfigEnd) && name.size() > kFolder.size() + kConfigEnd.size())
        models.push_back(name.substr(kFolder.size(), name.size() - kFolder.size() - kConfigEnd.size()));
    Pt2Weights result;
    for (const auto& model : models) {
      const auto record = std::string(kFolder) + model + std::string(kConfigEnd);
      std::string problem;
      const auto root = parse_json<json>(archive_.text(record, kMostListBytes), &problem, {.unique_keys = true});
      if (root.is_discarded()) fail("its '{}' {}", record, problem);
      if (!root.is_object() || !root.contains("config") || !root["config"].is_object())
        fail("its '{}' is {}, expected an object with an object \"config\"", record, show_json(root));
      for (const auto& [name, weight] : root["config"].items())
        result.weights.push_back(weight_of(models.size() > 1 ? model + "." + name : name, weight));
    }
    if (models.empty())
      for (const char* name : kStateDicts)
        if (result.state_dict.empty() && archive_.contains(name)) result.state_dict = name;
    return result;
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("{}: {}. The file is damaged, or of a version of PyTorch that is not known.", source_,
                           fmt::format(what, std::forward<Args>(args)...));
  }

  static const json& field(const json& of, const char* key) {
    static const json none;
    return of.is_object() && of.contains(key) ? of[key] : none;
  }
  int64_t count(const std::string& name, const json& value) const {
    const auto number = whole_number(field(value, "as_int"));
    if (!number || *number < 0)
      fail("the weight '{}' has a size, a stride or an offset {}, expected a number", name, show_json(value));
    return *number;
  }
  std::vector<int64_t> counts(const std::string& name, const json& list) const {
    constexpr size_t kMostDimensions = 64;  // PyTorch's limit
    if (!list.is_array() || list.size() > kMostDimensions)
      fail("the weight '{}' has the sizes or strides {}, expected a list of at most {}", name, show_json(list),
           kMostDimensions);
    std::vector<int64_t> result;
    for (const auto& item : list) result.push_back(count(name, item));
    return result;
  }

  Pt2Weight weight_of(const std::string& name, const json& entry) const {
    const auto& meta = field(entry, "tensor_meta");
    const auto& path = field(entry, "path_name");
    if (field(entry, "use_pickle") == true)
      raise<CheckpointError>(
          "{}: the weight '{}' is an object of a Python class, of which the file has a pickle, expected plain tensors. "
          "Export the model with plain tensors, or save its state_dict().",
          source_, name);
    if (!path.is_string() || !meta.is_object()) fail("the weight '{}' is {}", name, show_json(entry));
    Pt2Weight weight{.name = name,
                     .sizes = counts(name, field(meta, "sizes")),
                     .strides = counts(name, field(meta, "strides")),
                     .first = count(name, field(meta, "storage_offset")),
                     .numel = 1};
    const auto type = whole_number(field(meta, "dtype"));
    for (const auto& [number, dtype] : kPt2Dtypes)
      if (type == number) weight.dtype = dtype;
    if (weight.dtype.empty()) fail("the weight '{}' has the element type {}", name, show_json(field(meta, "dtype")));
    if (const auto layout = whole_number(field(meta, "layout")); layout != 7)  // strided
      fail("the weight '{}' is sparse, or of another layout without strides", name);
    weight.bytes = archive_.record(std::string(kFolder) + path.get<std::string>());
    bool fits = weight.sizes.size() == weight.strides.size(), empty = false;
    int64_t last = weight.first;
    for (size_t dim = 0; fits && dim < weight.sizes.size(); ++dim) {
      int64_t reach = 0;
      empty = empty || weight.sizes[dim] == 0;
      if (!empty)
        fits = !__builtin_mul_overflow(weight.numel, weight.sizes[dim], &weight.numel) &&
               !__builtin_mul_overflow(weight.sizes[dim] - 1, weight.strides[dim], &reach) &&
               !__builtin_add_overflow(last, reach, &last);
    }
    if (empty) weight.numel = 0;
    else weight.last = last;
    const int64_t width = torch_element_bytes(weight.dtype);
    if (!fits || weight.last >= weight.bytes.size / width || weight.numel > weight.bytes.size / width)
      fail("the weight '{}' of size {} and stride {} from element {} does not fit into the {} bytes of its record",
           name, weight.sizes, weight.strides, weight.first, weight.bytes.size);
    return weight;
  }

  const ZipArchive& archive_;
  const std::string& source_;
};

}  // namespace

bool is_pt2(const ZipArchive& archive) {
  constexpr uint64_t kLongest = 64;
  if (archive.contains("archive_format")) return archive.text("archive_format", kLongest) == "pt2";
  return archive.contains("serialized_exported_program.json");
}

Pt2Weights read_pt2_weights(const ZipArchive& archive, const std::string& source) {
  return Pt2Reader(archive, source).read();
}

}  // namespace accelerate::formats
