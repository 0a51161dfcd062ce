#include "trackers/json_lines.hpp"

#include <ATen/Functions.h>
#include <fcntl.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "input/base64.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "trackers/built_in.hpp"
#include "trackers/keyword_arguments.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kVersion = 1;
/// A line's bytes in memory before it is written without waiting for a flush.
constexpr size_t kMostPending = size_t{1} << 20;

/// `exact`: so that value_from_json gives the same back, else as other readers expect it.
Json converted(const TrackerValue& value, bool exact) {
  if (const auto* list = value.list()) {
    Json result = Json::array();
    for (const auto& one : *list) result.push_back(converted(one, exact));
    return result;
  }
  if (const auto* map = value.map()) {
    // Appended without the search for an equal name, of which a map has none: of n names it would take n * n steps.
    std::vector<std::pair<const std::string, Json>> members;
    members.reserve(map->size());
    for (const auto& [name, one] : *map)
      members.emplace_back(exact && name.starts_with('$') ? '$' + name : name, converted(one, exact));
    Json result = Json::object();
    result.get_ref<Json::object_t&>().swap(members);
    return result;
  }
  if (const auto* text = value.text()) return *text;
  if (const auto* truth = std::get_if<bool>(&value.value)) return *truth;
  if (const auto whole = value.whole()) return *whole;
  const auto number = value.number();
  if (!number) return nullptr;
  if (std::isfinite(*number) || !exact) return *number;
  return {{"$number", std::isnan(*number) ? "nan" : *number > 0 ? "inf" : "-inf"}};
}

[[noreturn]] void bad(const std::string& what, const Json& found) {
  throw CheckpointError(fmt::format("found {}, expected {}", show_json(found), what));
}

const Json& member(const Json& object, const char* name) {
  if (!object.is_object()) bad("an object", object);
  const auto found = object.find(name);
  if (found == object.end()) raise<CheckpointError>("there is no '{}' in it", name);
  return *found;
}

std::string text_member(const Json& object, const char* name) {
  const auto& text = member(object, name);
  if (!text.is_string()) bad(fmt::format("a text as '{}'", name), text);
  return text.get<std::string>();
}

TrackerValues map_from_json(const Json& json) {
  if (!json.is_object()) bad("an object", json);
  TrackerValues map;
  for (const auto& [name, one] : json.items())
    map.emplace(name.starts_with('$') ? name.substr(1) : name, value_from_json(one));
  return map;
}

struct KeptDtype {
  const char* name;
  at::ScalarType dtype;
};
constexpr KeptDtype kKept[] = {
    {"uint8", at::kByte}, {"int64", at::kLong}, {"float32", at::kFloat}, {"float64", at::kDouble}};

at::ScalarType kept_as(at::ScalarType dtype) {
  if (dtype == at::kByte || dtype == at::kBool) return at::kByte;
  if (dtype == at::kDouble) return dtype;
  return at::isFloatingType(dtype) ? at::kFloat : at::kLong;
}

Record record_of_line(const Json& line, const std::string& kind) {
  std::optional<int64_t> step;
  if (const auto found = line.find("step"); found != line.end()) {
    step = whole_number(*found);
    if (!step) bad("a whole number as 'step'", *found);
  }
  if (kind == "config") return record_of_configuration(map_from_json(member(line, "values")));
  if (kind == "log") return record_of_values(map_from_json(member(line, "values")), step);
  if (kind == "images") {
    std::map<std::string, at::Tensor> images;
    const auto& values = member(line, "values");
    if (!values.is_object()) bad("images by name", values);
    for (const auto& [name, image] : values.items()) images.emplace(name, tensor_from_json(image));
    return record_of_images(images, step);
  }
  if (kind == "histogram")
    return record_of_histogram(text_member(line, "name"), tensor_from_json(member(line, "values")), step);
  if (kind == "table") {
    const auto columns = value_from_json(member(line, "columns")), rows = value_from_json(member(line, "rows"));
    if (!columns.list() || !rows.list()) bad("lists as 'columns' and 'rows'", line);
    std::vector<std::string> names;
    for (const auto& column : *columns.list()) {
      if (!column.text()) bad("texts in 'columns'", line);
      names.push_back(*column.text());
    }
    std::vector<TrackerList> cells;
    for (const auto& row : *rows.list()) {
      if (!row.list()) bad("lists in 'rows'", line);
      cells.push_back(*row.list());
    }
    return record_of_table(text_member(line, "name"), std::move(names), std::move(cells), step);
  }
  raise<CheckpointError>(
      "found the kind '{}', expected start, config, log, images, table, histogram or finish; a newer version may have "
      "written it",
      kind);
}

JsonLine parsed(std::string_view text) {
  std::string problem;
  const auto line = parse_json<Json>(text, &problem);
  if (line.is_discarded()) raise<CheckpointError>("it {}", problem);
  JsonLine result{.project_name = text_member(line, "run"), .record = nullptr, .log_kwargs = {}};
  const auto kind = text_member(line, "kind");
  if (kind == "start") {
    if (const auto version = whole_number(member(line, "version")); version != kVersion)
      bad(fmt::format("the version {}", kVersion), member(line, "version"));
    return result;
  }
  if (kind == "finish") return result;
  auto record = *record_of_line(line, kind);
  const auto& time = member(line, "time");
  if (!time.is_number()) bad("seconds since 1970 as 'time'", time);
  record.time = time.get<double>();
  result.record = std::make_shared<TrackerRecord>(std::move(record));
  if (const auto kwargs = line.find("kwargs"); kwargs != line.end()) result.log_kwargs = map_from_json(*kwargs);
  return result;
}

}  // namespace

Json to_json(const TrackerValue& value) { return converted(value, true); }
Json to_plain_json(const TrackerValue& value) { return converted(value, false); }

TrackerValue value_from_json(const Json& json) {
  if (json.is_null()) return nullptr;
  if (json.is_boolean()) return json.get<bool>();
  if (const auto whole = whole_number(json)) return *whole;
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    TrackerList list;
    for (const auto& one : json) list.push_back(value_from_json(one));
    return list;
  }
  if (!json.is_object()) bad("a value", json);
  if (const auto number = json.find("$number"); number != json.end()) {
    if (*number == "nan") return std::nan("");
    if (*number == "inf") return HUGE_VAL;
    if (*number == "-inf") return -HUGE_VAL;
    bad("nan, inf or -inf as '$number'", json);
  }
  return map_from_json(json);
}

Json tensor_to_json(const at::Tensor& tensor) {
  const auto dtype = kept_as(tensor.scalar_type());
  const auto kept = tensor.to(at::kCPU, dtype).contiguous();
  const char* name = nullptr;
  for (const auto& one : kKept)
    if (one.dtype == dtype) name = one.name;
  return {{"shape", kept.sizes().vec()},
          {"dtype", name},
          {"data", base64_encode({static_cast<const char*>(kept.const_data_ptr()), kept.nbytes()})}};
}

at::Tensor tensor_from_json(const Json& json) {
  const auto name = text_member(json, "dtype");
  const auto* kept =
      std::find_if(std::begin(kKept), std::end(kKept), [&](const auto& one) { return name == one.name; });
  if (kept == std::end(kKept)) bad("uint8, int64, float32 or float64 as 'dtype'", json);
  const auto& shape = member(json, "shape");
  if (!shape.is_array()) bad("a list as 'shape'", shape);
  std::vector<int64_t> sizes;
  const auto bytes = base64_decode(text_member(json, "data"));
  if (!bytes) bad("base64 as 'data'", member(json, "data"));
  // Strides are products of sizes, too, also where one of them is 0.
  auto expected = static_cast<int64_t>(c10::elementSize(kept->dtype)), strides = expected;
  for (const auto& size : shape) {
    const auto n = whole_number(size);
    if (!n || *n < 0 || __builtin_mul_overflow(expected, *n, &expected) ||
        __builtin_mul_overflow(strides, std::max<int64_t>(*n, 1), &strides))
      bad("sizes as 'shape'", shape);
    sizes.push_back(*n);
  }
  if (expected != static_cast<int64_t>(bytes->size()))
    raise<CheckpointError>("'data' has {} bytes, expected {} for the shape {}", bytes->size(), expected,
                           show_json(shape));
  auto tensor = at::empty(sizes, at::TensorOptions().dtype(kept->dtype));
  if (!bytes->empty()) std::memcpy(tensor.mutable_data_ptr(), bytes->data(), bytes->size());
  return tensor;
}

TrackerClass json_lines_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            const KeywordArguments none("jsonl: init_kwargs", setup.init_kwargs, {});
            return std::make_shared<JsonLinesTracker>(JsonLinesTracker::Options{
                .project_name = setup.project_name, .path = setup.logging_dir / setup.project_name / "log.jsonl"});
          },
          .requires_logging_directory = true};
}

void JsonLinesTracker::start() {
  std::error_code failure;
  std::filesystem::create_directories(options_.path.parent_path(), failure);
  if (!failure) file_.reset(::open(options_.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file_)
    raise<CheckpointError>("jsonl: '{}' can't be written: {}; check project_dir, logging_dir and the rights",
                           options_.path.string(), failure ? failure.message() : std::strerror(errno));
  line("start", std::nullopt, {}, {{"format", "accelerate.tracking"}, {"version", kVersion}});
  flush();
}

void JsonLinesTracker::line(const char* kind, std::optional<int64_t> step, const TrackerValues& log_kwargs,
                            const Json& content) {
  Json line{{"kind", kind}, {"run", options_.project_name}, {"time", time()}};
  if (step) line["step"] = *step;
  line.update(content);
  if (!log_kwargs.empty()) line["kwargs"] = to_json(log_kwargs);
  pending_ += line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  if (pending_.size() > kMostPending) flush();
}

void JsonLinesTracker::store_init_configuration(const TrackerValues& config) {
  line("config", std::nullopt, {}, {{"values", to_json(config)}});
}

void JsonLinesTracker::log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  line("log", step, log_kwargs, {{"values", to_json(values)}});
}

void JsonLinesTracker::log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                                  const TrackerValues& log_kwargs) {
  Json values = Json::object();
  for (const auto& [name, image] : images) values[name] = tensor_to_json(image);
  line("images", step, log_kwargs, {{"values", std::move(values)}});
}

void JsonLinesTracker::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                                 const TrackerValues& log_kwargs) {
  Json lines = Json::array();
  for (const auto& row : rows) lines.push_back(to_json(row));
  line("table", step, log_kwargs, {{"name", table_name}, {"columns", columns}, {"rows", std::move(lines)}});
}

void JsonLinesTracker::log_histogram(const std::string& histogram_name, const at::Tensor& values,
                                     std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  line("histogram", step, log_kwargs, {{"name", histogram_name}, {"values", tensor_to_json(values)}});
}

void JsonLinesTracker::flush() {
  const std::string bytes = std::exchange(pending_, {});
  for (size_t written = 0; written < bytes.size();) {
    const auto n = ::write(file_.get(), bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      raise<ResourceError>("jsonl: writing '{}' failed: {}; check that the disk is not full", options_.path.string(),
                           std::strerror(errno));
    written += static_cast<size_t>(n);
  }
}

void JsonLinesTracker::finish() {
  line("finish", std::nullopt, {}, Json::object());
  flush();
  file_.reset();
}

bool read_json_lines(const std::filesystem::path& path, const std::function<void(JsonLine)>& take) {
  constexpr int64_t kMostBytes = int64_t{4} << 30;  // read whole: what a queue that spills has room for is far less
  const auto text = read_text<CheckpointError>("read_json_lines", path, kMostBytes);
  int64_t number = 1;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1, ++number) {
    end = std::min(text.find('\n', begin), text.size());
    const auto written = std::string_view(text).substr(begin, end - begin);
    // An object that is whole lacks its newline only, as other programs may leave it.
    if (end == text.size() && parse_json<Json>(written).is_discarded()) return false;
    JsonLine line;
    try {
      line = parsed(written);
    } catch (const Error& error) {
      raise<CheckpointError>("read_json_lines: line {} of '{}': {}", number, path.string(), error.what());
    }
    take(std::move(line));
  }
  return true;
}

}  // namespace accelerate
