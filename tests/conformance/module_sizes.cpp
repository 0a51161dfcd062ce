// Sizes of modules, the largest layer, tied parameters, on described models.
#include "module_tree_json.hpp"

namespace conformance::module_sizes_cases {
namespace {

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    const auto& tree = models().at(row.at("model").get<std::string>());
    const auto sizes = accelerate::compute_module_sizes(tree);
    const auto largest = accelerate::calculate_maximum_sizes(tree);
    json found{{"model", row.at("model")},
               {"sizes", json::object()},
               {"total", largest.total},
               {"largest_layer", largest.largest_layer.bytes},
               {"largest_layer_names", largest.largest_layer.names}};
    for (const auto& [name, bytes] : sizes.entries()) found["sizes"][name] = bytes;
    found["tied"] = accelerate::find_tied_parameters(tree);
    found["buffers_total"] = accelerate::compute_module_sizes(tree, {.buffers_only = true})[""];
    for (const auto& [dtype, bytes] : row.at("sizes_as").items())
      found["sizes_as"][dtype] = accelerate::compute_module_sizes(tree, {.dtype = dtype})[""];
    for (const auto& [key, value] : row.items())
      if (constexpr std::string_view kWithout = "largest_layer_nosplit_"; key.starts_with(kWithout)) {
        const auto whole = accelerate::calculate_maximum_sizes(tree, {key.substr(kWithout.size())}).largest_layer;
        found[key] = {whole.bytes, whole.names};
      }
    report.check(found == row, [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

/// The trees are input of the other files; here they have to be readable, and their ties to lead to tensors.
void run_trees(const json& file, Report& report) {
  for (const auto& [name, model] : file.at("models").items()) {
    const auto tree = tree_of_model(model);
    size_t tied = 0;
    for (const auto& group : accelerate::find_tied_parameters(tree)) tied += group.size() - 1;
    report.check(tied == model.value("ties", json::array()).size() && tree.numel() >= 0, [&] { return name; });
  }
}

const Registration sizes("module_sizes", {run});
const Registration trees("module_trees", {run_trees});

}  // namespace
}  // namespace conformance::module_sizes_cases
