#include <algorithm>
#include <cmath>
#include <iostream>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/estimate.hpp"
#include "command.hpp"
#include "utils/raise.hpp"

namespace {

/// Whole numbers without a point. int4 and bools leave fractions.
nlohmann::ordered_json bytes(double number) {
  constexpr double kMost = 9e18;  // what an integer holds
  return number == std::floor(number) && number < kMost ? nlohmann::ordered_json(static_cast<int64_t>(number))
                                                        : nlohmann::ordered_json(number);
}

/// The sizes that the figures count.
struct Counted {
  explicit Counted(const accelerate::ModuleTree& tree)
      : total_bytes(accelerate::compute_module_sizes(tree)[""]),
        buffer_bytes(accelerate::compute_module_sizes(tree, {.buffers_only = true})[""]) {
    add_buffers(tree);
  }
  void add_buffers(const accelerate::ModuleTree& tree) {
    for (const auto& buffer : tree.buffers)
      if (std::find(buffers.begin(), buffers.end(), buffer.name) == buffers.end()) buffers.push_back(buffer.name);
    for (const auto& child : tree.children) add_buffers(child);
  }
  double parameter_bytes() const { return total_bytes - buffer_bytes; }

  double total_bytes, buffer_bytes;
  std::vector<std::string> buffers;  ///< within their modules, each once
};

std::string sentence(const accelerate::ModelDescription& model, const Counted& counted) {
  const std::string whose = model.tree.class_name.empty() ? model.source : model.tree.class_name;
  std::string text = fmt::format("Counted: {} in float32, {} parameters ({})", whose, model.tree.numel(),
                                 accelerate::convert_bytes(counted.parameter_bytes()));
  text += counted.buffers.empty() ? ", no buffers"
                                  : fmt::format(", buffers {} ({})", fmt::join(counted.buffers, ", "),
                                                accelerate::convert_bytes(counted.buffer_bytes));
  if (model.no_split_module_classes.empty()) return text + ". A layer is a module without parts";
  return text +
         fmt::format(". A layer is a module without parts, or a {}", fmt::join(model.no_split_module_classes, ", a "));
}

nlohmann::ordered_json json_of(const accelerate::ModelDescription& model, const accelerate::MaximumSizes& sizes,
                               const std::vector<accelerate::MemoryEstimate>& estimates) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& row : estimates) {
    nlohmann::ordered_json training = nullptr;
    if (row.training.peak() >= 0)
      training = {{"model", bytes(row.training.model)},
                  {"gradients", bytes(row.training.gradients)},
                  {"optimizer", bytes(row.training.optimizer)},
                  {"step", bytes(row.training.step)},
                  {"peak", bytes(row.training.peak())}};
    rows.push_back({{"dtype", row.dtype},
                    {"largest_layer", bytes(row.largest_layer)},
                    {"total", bytes(row.total)},
                    {"training_adam", training}});
  }
  const Counted counted(model.tree);
  nlohmann::ordered_json stored = nullptr;
  if (model.stored)
    stored = {{"encoding", model.stored->encoding},
              {"largest_layer", bytes(model.stored->largest_layer)},
              {"total", bytes(model.stored->total)}};
  return {{"model", model.name},
          {"library", model.library.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(model.library)},
          {"class", model.tree.class_name},
          {"source", model.source},
          {"parameters", model.tree.numel()},
          {"counted",
           {{"parameters", bytes(counted.parameter_bytes())},
            {"buffers", bytes(counted.buffer_bytes)},
            {"buffer_names", counted.buffers},
            {"kept_whole", model.no_split_module_classes}}},
          {"largest_layer_names", sizes.largest_layer.names},
          {"unit", "bytes"},
          {"stored", stored},
          {"rows", rows}};
}

/// The reference's table; weights in few bits have a line of their own, as they lie.
std::string table(const std::string& name, const accelerate::ModelDescription& model,
                  std::vector<accelerate::MemoryEstimate> estimates) {
  if (model.stored)
    estimates.push_back(
        {model.stored->encoding + ", stored", model.stored->largest_layer, model.stored->total, /*training=*/{}});
  return accelerate::memory_table(name, estimates);
}

/// Needs LibTorch, and is a program of its own.
[[noreturn]] void run_dry(const cli::Arguments& arguments) {
  for (const char* option : {"dtypes", "library_name"})
    if (!arguments.all(option).empty())
      accelerate::raise<accelerate::ConfigError>(
          "--{} is for the table of weights and says nothing about training; leave it or --strategy out", option);
  std::vector<std::string> words{arguments.positional.front()};
  for (const char* option : {"strategy", "num_processes", "batch", "seq", "mixed_precision"})
    if (const auto text = arguments.text(option); !text.empty())
      words.insert(words.end(), {"--" + std::string(option), text});
  for (const char* option : {"offload", "json"})
    if (arguments.on(option)) words.push_back("--" + std::string(option));
  cli::become("accelerate-estimate-training", words);
}

int run_estimate_memory(const cli::Arguments& arguments) {
  if (!arguments.text("strategy").empty()) run_dry(arguments);
  for (const char* option : {"num_processes", "batch", "seq", "mixed_precision"})
    if (!arguments.text(option).empty())
      accelerate::raise<accelerate::ConfigError>(
          "--{} was given without --strategy, expected both; say how the job is split (ddp, fsdp, zero1, zero2 or "
          "zero3)",
          option);
  if (arguments.on("offload"))
    accelerate::raise<accelerate::ConfigError>(
        "--offload was given without --strategy, expected both; say how the job is split (fsdp, zero1, zero2 or "
        "zero3)");
  std::vector<std::string> dtypes = arguments.all("dtypes");
  if (dtypes.empty()) dtypes = {"float32", "float16", "int8", "int4"};
  const std::string& name = arguments.positional.front();
  const auto model = accelerate::find_model(name, arguments.text("library_name"));
  const auto sizes = accelerate::calculate_maximum_sizes(model.tree, model.no_split_module_classes);
  const auto estimates = accelerate::estimate_memory(sizes, dtypes);
  if (arguments.on("trust_remote_code"))
    std::cerr << "accelerate estimate-memory: no code of the model is run; the sizes are those of " << model.source
              << "\n";
  if (arguments.on("json")) std::cout << json_of(model, sizes, estimates).dump(2) << "\n";
  else std::cout << table(name, model, estimates) << "\n" << sentence(model, Counted(model.tree)) << "\n";
  return 0;
}

const cli::Registered kEstimateMemoryCommand("estimate-memory", run_estimate_memory);

}  // namespace
