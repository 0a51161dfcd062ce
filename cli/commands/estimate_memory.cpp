#include <cmath>
#include <iostream>

#include <nlohmann/json.hpp>

#include "../command.hpp"
#include "../options.hpp"
#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/error.hpp"

namespace {

std::string usage() {
  std::string text =
      "Usage: accelerate estimate-memory MODEL [options]\n\n"
      "  accelerate estimate-memory bert-base-cased --dtypes float32 float16\n"
      "  accelerate estimate-memory ./folder_of_a_saved_model\n"
      "  accelerate estimate-memory config.json --json\n\n"
      "MODEL is a folder, a config.json, a .safetensors file (or the index of several), a .gguf file, or the name of a built-in config. Nothing is downloaded, and no weight is read.\n"
      "The largest layer is what has to be in one place at a time; training is with Adam and a batch of one. Activations come on top.\n\n"
      "Built-in:";
  for (const auto& name : accelerate::built_in_models()) text += " " + name;
  text += "\nArchitectures read from a config.json:";
  for (const auto& name : accelerate::known_architectures()) text += " " + name;
  return text;
}

/// Whole numbers without a point. int4 and bools leave fractions.
nlohmann::ordered_json bytes(double number) { return number == std::floor(number) ? nlohmann::ordered_json(static_cast<int64_t>(number)) : nlohmann::ordered_json(number); }

nlohmann::ordered_json json_of(const accelerate::ModelDescription& model, const accelerate::MaximumSizes& sizes, const std::vector<accelerate::MemoryEstimate>& estimates) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& row : estimates) {
    nlohmann::ordered_json training = nullptr;
    if (row.training.peak() >= 0)
      training = {{"model", bytes(row.training.model)}, {"gradients", bytes(row.training.gradients)}, {"optimizer", bytes(row.training.optimizer)}, {"step", bytes(row.training.step)},
                  {"peak", bytes(row.training.peak())}};
    rows.push_back({{"dtype", row.dtype}, {"largest_layer", bytes(row.largest_layer)}, {"total", bytes(row.total)}, {"training_adam", training}});
  }
  return {{"model", model.name}, {"library", model.library.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(model.library)}, {"class", model.tree.class_name},
          {"source", model.source}, {"parameters", model.tree.numel()}, {"largest_layer_names", sizes.largest_layer.names}, {"unit", "bytes"}, {"rows", rows}};
}

int run(std::vector<std::string> arguments) {
  std::vector<std::string> dtypes = {"float32", "float16", "int8", "int4"};
  std::string library;
  bool json = false, remote_code = false;
  cli::Parser parser("Say how much memory a model needs.", "accelerate estimate-memory", usage());
  parser.add_option("--dtypes", dtypes, "What the weights are loaded in; any of float32 float16 int8 int4 (default: all)")->type_name("DTYPE...")->expected(1, 4)->check(CLI::IsMember(dtypes));
  parser.add_option(cli::spelled("library_name"), library, "Refuse a model of another library: transformers or timm")->type_name("LIBRARY")->check(CLI::IsMember({"transformers", "timm"}));
  parser.add_flag(cli::spelled("trust_remote_code"), remote_code, "As elsewhere; here it only says that code of a model is never run, and sizes come from its files");
  parser.add_flag("--json", json, "Print numbers of bytes as JSON instead of a table");

  auto rest = parser.read(std::move(arguments));
  if (!rest) return 0;
  if (rest->empty()) throw accelerate::ConfigError("no model given: name a folder, a config.json, a .safetensors file or a built-in model. See `accelerate estimate-memory --help`");
  const std::string name = rest->front();
  rest->erase(rest->begin());
  if (!rest->empty()) {  // options may follow
    const auto more = parser.read(*rest);
    if (!more) return 0;
    if (!more->empty()) throw accelerate::ConfigError("one model at a time: found '" + name + "' and '" + more->front() + "'");
  }
  const auto model = accelerate::find_model(name, library);
  const auto sizes = accelerate::calculate_maximum_sizes(model.tree, model.no_split_module_classes);
  const auto estimates = accelerate::estimate_memory(sizes, dtypes);
  if (remote_code) std::cerr << "accelerate estimate-memory: no code of the model is run; the sizes are those of " << model.source << "\n";
  if (json) std::cout << json_of(model, sizes, estimates).dump(2) << "\n";
  else std::cout << accelerate::memory_table(name, estimates) << "\n";
  return 0;
}

const cli::Registered kRegistered({"estimate-memory", "Say how much memory a model needs", run});

}  // namespace
