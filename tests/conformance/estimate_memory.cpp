// Sizes of models that are built from a config, and what the command prints of them.
#include "accelerate/bigmodel/estimate.hpp"

#include <algorithm>

#include "runner.hpp"

namespace conformance::estimate_memory_cases {
namespace {

json json_of(const accelerate::TrainingUsage& usage) {
  return {{"model", usage.model}, {"optimizer", usage.optimizer}, {"gradients", usage.gradients}, {"step", usage.step}};
}

/// "bert default BertModel": the model type and the class.
accelerate::ModelDescription model_of(const std::string& label) {
  return accelerate::describe_architecture(json{{"model_type", label.substr(0, label.find(' '))}}.dump(),
                                           label.substr(label.rfind(' ') + 1));
}

void run(const json& file, Report& report) {
  const auto expect = [&](const std::string& what, const json& found, const json& expected) {
    report.check(found == expected,
                 [&] { return what + ": expected " + expected.dump() + "\n    found " + found.dump(); });
  };
  for (const auto& [name, facts] : file.at("upstream_test_facts").items()) {
    const auto model = accelerate::find_model(name);
    const auto sizes = accelerate::calculate_maximum_sizes(model.tree, model.no_split_module_classes);
    for (const auto& [what, expected] : facts.items()) {
      if (what == "largest_layer" || what == "largest_layer_with_no_split")
        expect(name + " " + what, sizes.largest_layer.bytes, expected);
      else if (what == "largest_layer_without_no_split")
        expect(name + " " + what, accelerate::calculate_maximum_sizes(model.tree).largest_layer.bytes, expected);
      else if (what == "total") expect(name + " " + what, sizes.total, expected);
      else if (what == "training=total*4")
        expect(name + " " + what, accelerate::estimate_training_usage(sizes.total, "float32").peak(), expected);
      else throw std::runtime_error("no such fact in the runner: " + what);
    }
  }
  for (const auto& [label, expected] :
       file.at("estimate_training_usage").items())  // "float16/float16": the dtype twice, of 1000 bytes
    expect(label, json_of(accelerate::estimate_training_usage(1000, label.substr(0, label.find('/')))), expected);
  for (const json& row : file.at("cases")) {
    const std::string label = row.at("model");
    const auto model = model_of(label);
    // The case says what may not be split; the reference's set has no order.
    auto no_split = model.no_split_module_classes;
    std::sort(no_split.begin(), no_split.end());
    expect(label + " no_split", no_split, row.at("no_split"));
    const auto sizes = accelerate::calculate_maximum_sizes(model.tree, model.no_split_module_classes);
    expect(label,
           {{"n_params", model.tree.numel()},
            {"total", sizes.total},
            {"largest_layer", sizes.largest_layer.bytes},
            {"names", sizes.largest_layer.names}},
           {{"n_params", row.at("n_params")},
            {"total", row.at("total")},
            {"largest_layer", row.at("largest_layer")},
            {"names", row.at("largest_layer_names")}});
    for (const json& line : row.at("rows")) {
      const auto estimate = accelerate::estimate_memory(sizes, {line[0].get<std::string>()}).front();
      expect(label,
             {estimate.dtype, estimate.largest_layer, estimate.total, accelerate::convert_bytes(estimate.largest_layer),
              accelerate::convert_bytes(estimate.total), json_of(estimate.training)},
             line);
    }
  }
}

const Registration registration("estimate_memory", {run});

}  // namespace
}  // namespace conformance::estimate_memory_cases
