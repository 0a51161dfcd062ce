// Device maps, balanced memory, and the small functions around them.
#include "accelerate/bigmodel/device_map.hpp"

#include <algorithm>
#include <set>

#include "accelerate/utils/error.hpp"
#include "module_tree_json.hpp"

namespace conformance::device_map_cases {
namespace {

using accelerate::DeviceMap;
using accelerate::MaxMemory;
using accelerate::ModuleTree;
using accelerate::Place;

Place place_of_json(const json& value) {
  return value.is_string() ? Place(value.get<std::string>()) : Place(value.get<int64_t>());
}
json json_of(const Place& place) { return place.is_gpu() ? json(place.gpu()) : json(place.str()); }

MaxMemory memory_of(const json& pairs) {
  MaxMemory memory;
  for (const json& pair : pairs) memory.insert_or_assign(place_of_json(pair[0]), pair[1].get<double>());
  return memory;
}

DeviceMap map_of(const json& pairs) {
  DeviceMap map;
  for (const json& pair : pairs) map.insert_or_assign(pair[0].get<std::string>(), place_of_json(pair[1]));
  return map;
}

json json_of(const DeviceMap& map) {
  json result = json::object();
  for (const auto& [name, place] : map) result[name] = json_of(place);
  return result;
}

json json_of(const MaxMemory& memory) {
  json result = json::array();
  for (const auto& [place, size] : memory) result.push_back({json_of(place), size.bytes});
  return result;
}

accelerate::DeviceMapOptions options_of(const json& memory, const json& no_split, const json& dtype,
                                        const json& extra) {
  accelerate::DeviceMapOptions options{.max_memory = memory_of(memory), .no_split_module_classes = no_split};
  if (!dtype.is_null()) options.dtype = dtype.get<std::string>();
  for (const auto& [name, value] : extra.items()) {
    if (name == "clean_result") options.clean_result = value;
    else if (name == "offload_buffers") options.offload_buffers = value;
    else if (name == "fallback_allocation") options.fallback_allocation = value;
    else if (name == "no_split_module_classes") options.no_split_module_classes = value;
    else if (name == "special_dtypes") options.special_dtypes = value.get<std::map<std::string, std::string>>();
    else throw std::runtime_error("no such argument in the runner: " + name);
  }
  return options;
}

using Models = std::map<std::string, ModuleTree>;

void check_maps(const json& rows, const Models& trees, Report& report) {
  for (const json& row : rows) {
    const auto found = accelerate::infer_auto_device_map(trees.at(row[0].get<std::string>()),
                                                         options_of(row[1], row[2], row[3], row[4]));
    report.check(found == map_of(row[5]), [&] { return row.dump() + "\n    found " + json_of(found).dump(); });
  }
}

void infer(const json& file, Report& report) { check_maps(file.at("cases"), models(), report); }

/// The fault of a device map; empty when there is none. Every parameter has a place, tied ones the same, and no
/// place holds more than it may.
std::string fault_of(const ModuleTree& tree, const accelerate::DeviceMapOptions& options, const DeviceMap& map) {
  const auto sizes =
      accelerate::compute_module_sizes(tree, {.dtype = options.dtype, .special_dtypes = options.special_dtypes});
  std::map<Place, double> used;
  std::string fault;
  const auto walk = [&](const auto& self, const ModuleTree& module, const std::string& prefix) -> void {
    for (const auto* tensors : {&module.parameters, &module.buffers})
      for (const auto& tensor : *tensors) {
        const auto name = prefix + tensor.name;
        const auto place = accelerate::place_of(map, name);
        if (place) used[*place] += sizes[name];
        else if (tensors == &module.parameters) fault += " no place for " + name;
      }
    if (const auto place = accelerate::place_of(map, prefix.substr(0, prefix.size() - !prefix.empty()));
        !place &&
        std::count(options.no_split_module_classes.begin(), options.no_split_module_classes.end(), module.class_name))
      fault += " split " + prefix;
    for (const auto& child : module.children) self(self, child, prefix + child.name + ".");
  };
  walk(walk, tree, "");
  for (const auto& group : accelerate::find_tied_parameters(tree))
    for (const auto& name : group)
      if (accelerate::place_of(map, name) != accelerate::place_of(map, group.front()))
        fault += " " + name + " is away from " + group.front();
  for (const auto& [place, bytes] : used)
    if (!place.is_disk() && bytes > options.max_memory->at(place).bytes)
      fault += " " + std::to_string(bytes) + " bytes on " + place.str();
  return fault;
}

/// The reference crashes on these. Any map without a fault is an answer.
void infer_where_the_reference_fails(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    const auto& tree = models().at(row[0].get<std::string>());
    const auto options = options_of(row[1], row[2], row[3], row[4]);
    const auto found = accelerate::infer_auto_device_map(tree, options);
    const auto fault = fault_of(tree, options, found);
    report.check(fault.empty(), [&] { return row.dump() + "\n    found " + json_of(found).dump() + ":" + fault; });
  }
}

void upstream(const json& file, Report& report) {
  for (const json& row : file.at("infer_auto_device_map")) {
    auto options = options_of(row.at("max_memory"), json::array(), nullptr, row.at("kwargs"));
    accelerate::DeviceMapReport what;
    options.report = &what;
    const auto found = accelerate::infer_auto_device_map(tree_of_model(row), options);
    report.check(
        found == map_of(row.at("expected")) && what.offloaded_buffers_fit != row.at("buffer_warning").get<bool>(), [&] {
          return row.dump() + "\n    found " + json_of(found).dump() +
                 " buffers fit: " + std::to_string(what.offloaded_buffers_fit);
        });
  }
  const auto& model = models().at("model_for_test");
  for (const json& row : file.at("get_balanced_memory")) {
    const json found = json_of(accelerate::get_balanced_memory(model, {.max_memory = memory_of(row[0])}));
    report.check(found == row[1], [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

void check_balanced(const json& rows, const Models& trees, Report& report) {
  for (const json& row : rows) {
    accelerate::BalancedMemoryOptions options{
        .max_memory = memory_of(row[1]), .no_split_module_classes = row[2], .low_zero = row[4]};
    if (!row[3].is_null()) options.dtype = row[3].get<std::string>();
    if (row.size() > 6 && !row[6].is_null()) options.special_dtypes = row[6].get<std::map<std::string, std::string>>();
    const json found = json_of(accelerate::get_balanced_memory(trees.at(row[0].get<std::string>()), options));
    report.check(found == row[5], [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

void balanced(const json& file, Report& report) { check_balanced(file.at("cases"), models(), report); }

/// Both, on models that the file brings along.
void more(const json& file, Report& report) {
  Models trees;
  for (const auto& [name, model] : file.at("models").items()) trees.emplace(name, tree_of_model(model));
  check_maps(file.at("infer_auto_device_map"), trees, report);
  check_balanced(file.at("get_balanced_memory"), trees, report);
}

/// The names that an error of the reference lists behind its colon.
std::string names_in(const std::string& message) {
  constexpr std::string_view kBefore = "following parameters: ";
  const auto at = message.find(kBefore);
  if (at == std::string::npos) return message;
  const auto begin = at + kBefore.size();
  return message.substr(begin, message.find(". ", begin) - begin);
}

void misc(const json& file, Report& report) {
  const auto expect = [&](const json& row, const json& found, const json& expected) {
    report.check(found == expected, [&] { return row.dump() + "\n    found " + found.dump(); });
  };
  for (const json& row : file.at("clean_device_map")) {
    DeviceMap map;
    for (const auto& [name, place] : row[0].items()) map.insert_or_assign(name, place_of_json(place));
    expect(row, json_of(accelerate::clean_device_map(map)), row[1]);
  }
  // The texts of errors are Python's: informative, but for the names in them.
  for (const json& row : file.at("convert_file_size_to_int")) {
    json found;
    const bool failed = throws_error([&] {
      found =
          row[0].is_string() ? accelerate::convert_file_size_to_int(row[0].get<std::string>()) : row[0].get<int64_t>();
    });
    report.check(row[1].is_object() ? failed : found == row[1],
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  }
  for (const json& row : file.at("dtype_byte_size")) {
    std::string name = row[0].get<std::string>();
    if (constexpr std::string_view kCustom = "CustomDtype.";
        name.starts_with(kCustom)) {  // Python's enum of what is no tensor type
      name.erase(0, kCustom.size());
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    }
    expect(row, accelerate::dtype_byte_size(name), row[1]);
  }
  for (const json& row : file.at("convert_bytes")) expect(row, accelerate::convert_bytes(row[0].get<double>()), row[1]);
  for (const json& row : file.at("check_device_map")) {
    DeviceMap map;
    for (const auto& [name, place] : row[0].items()) map.insert_or_assign(name, place_of_json(place));
    std::string what;
    const bool failed = throws_error([&] { accelerate::check_device_map(models().at("model_for_test"), map); }, &what);
    report.check(failed == row[1].is_object() && (!failed || names_in(what) == names_in(row[1].at("error"))),
                 [&] { return row.dump() + "\n    found " + what; });
  }
}

const Registration infer_cases("infer_auto_device_map", {infer});
const Registration error_cases("infer_auto_device_map_upstream_errors", {infer_where_the_reference_fails});
const Registration upstream_cases("upstream_device_map_tests", {upstream});
const Registration balanced_cases("balanced_memory", {balanced});
const Registration more_cases("device_map_more", {more});
const Registration misc_cases("device_map_misc", {misc});

}  // namespace
}  // namespace conformance::device_map_cases
