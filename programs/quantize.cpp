// `accelerate quantize`, which starts this with IN, OUT and pairs of an option and its text, checked against the table
// of options.
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel.hpp>
#include <accelerate/bigmodel/quantize_files.hpp>
#include <accelerate/models/auto_model.hpp>
#include <accelerate/models/perplexity.hpp>
#include <accelerate/models/tokenizer.hpp>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>

#include "bigmodel/hub_cache.hpp"
#include "command.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

namespace {

namespace fs = std::filesystem;
namespace models = accelerate::models;

using command::GivenOptions;

void stop_if_interrupted() {
  if (command::interrupted) throw command::Interrupted();
}

double perplexity_of(const fs::path& checkpoint, const at::Tensor& ids, const char* description, bool exact) {
  const auto model =
      models::AutoModelForCausalLM::from_pretrained(checkpoint, {.keep_codes = true, .exact_products = exact});
  command::Bar bar(description, "token");
  models::PerplexityOptions options;
  options.on_window = [&](int64_t done) {
    stop_if_interrupted();
    bar.show(done, ids.numel());
  };
  if (const auto positions = model.max_positions()) options.window = std::min(options.window, *positions);
  const double value = models::perplexity(model, ids, options, model.dispatched()->main_device()).value;
  bar.finish(ids.numel());
  return value;
}

struct QuantizeReport {
  accelerate::QuantizedFiles files;
  std::optional<double> before, after;
  int64_t tokens = 0;
};

at::Tensor tokens_of(const fs::path& model, const fs::path& text, int64_t most) {
  const auto tokenizer = models::Tokenizer::from_pretrained(model);
  auto ids =
      tokenizer.encode(accelerate::read_text<accelerate::ConfigError>("--text", text, accelerate::kMostListBytes));
  if (static_cast<int64_t>(ids.size()) > most) ids.resize(static_cast<size_t>(most));
  if (ids.size() < 2)
    accelerate::raise<accelerate::ConfigError>("--text: '{}' has {} tokens, expected 2 or more", text.string(),
                                               ids.size());
  return torch::tensor(ids, at::kLong);
}

QuantizeReport quantize(const fs::path& in, const fs::path& out, const GivenOptions& given) {
  accelerate::QuantizeFilesOptions options;
  options.to = *given.text("to");
  options.block_size = given.whole("block_size");
  options.double_quantize = given.on("double_quantize");
  options.skip_modules = given.all("skip_modules");
  if (const auto text = given.text("compute_dtype"))
    options.compute_dtype = *text == "float16" ? at::kHalf : *text == "bfloat16" ? at::kBFloat16 : at::kFloat;
  options.threshold = given.real("threshold");
  options.max_shard_size = given.text("max_shard_size");
  options.measure_errors = given.on("report");
  options.overwrite = given.on("overwrite");

  accelerate::check_quantize_files(in, out, options);
  QuantizeReport report;
  const auto text = given.text("text");
  const bool exact = given.on("exact_products");
  at::Tensor ids;
  if (text) {
    ids = tokens_of(in, *text, given.whole("max_tokens", 2).value_or(2048));
    report.tokens = ids.numel();
    report.before = perplexity_of(in, ids, "before", exact);
  }
  command::Bar bar("quantizing", "tensor");
  int64_t all_tensors = 0;
  options.on_progress = [&](int64_t done, int64_t all) {
    stop_if_interrupted();
    bar.show(done, all_tensors = all);
  };
  report.files = accelerate::quantize_files(in, out, options);
  bar.finish(all_tensors);
  if (!text) return report;
  try {
    report.after = perplexity_of(out, ids, "after", exact);
  } catch (const command::Interrupted&) {
    throw command::Interrupted{fmt::format("'{}' is whole; its perplexity was not measured", out.string())};
  }
  return report;
}

/// How many tensors are in which encoding or dtype.
std::map<std::string, int64_t> encodings_of(const accelerate::QuantizedFiles& files) {
  std::map<std::string, int64_t> counts;
  for (const auto& tensor : files.tensors) ++counts[tensor.to];
  return counts;
}

nlohmann::ordered_json json_of(const QuantizeReport& report, bool wants_report, const fs::path& out,
                               const std::string& to) {
  const auto number = [](const std::optional<double>& value) {
    return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
  };
  nlohmann::ordered_json json{{"out", out.string()},
                              {"to", to},
                              {"bytes_before", report.files.bytes_before},
                              {"bytes_after", report.files.bytes_after},
                              {"encodings", encodings_of(report.files)},
                              {"notes", report.files.notes}};
  if (!wants_report) return json;
  auto tensors = nlohmann::ordered_json::array();
  for (const auto& tensor : report.files.tensors)
    tensors.push_back({{"name", tensor.name},
                       {"from", tensor.from},
                       {"to", tensor.to},
                       {"kept", tensor.kept.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(tensor.kept)},
                       {"bytes_before", tensor.bytes_before},
                       {"bytes_after", tensor.bytes_after},
                       {"error", number(tensor.error)}});
  json["tensors"] = std::move(tensors);
  json["perplexity"] =
      report.before
          ? nlohmann::ordered_json{{"tokens", report.tokens}, {"before", *report.before}, {"after", *report.after}}
          : nlohmann::ordered_json();
  return json;
}

void print(const QuantizeReport& report, bool wants_report, const fs::path& out) {
  const auto& files = report.files;
  if (wants_report) std::printf("%10s  %12s  %12s  tensor\n", "error", "bytes before", "after");
  for (const auto& tensor : files.tensors) {
    if (!wants_report) continue;
    std::printf("%10s  %12lld  %12lld  %s%s\n", tensor.error ? fmt::format("{:.5f}", *tensor.error).c_str() : "-",
                static_cast<long long>(tensor.bytes_before), static_cast<long long>(tensor.bytes_after),
                accelerate::plain_text(tensor.name).c_str(),
                tensor.kept.empty() ? "" : fmt::format(" ({}: {})", tensor.to, tensor.kept).c_str());
  }
  std::string counts;
  for (const auto& [name, count] : encodings_of(files)) counts += fmt::format(", {} in {}", count, name);
  std::printf("%zu tensors%s: %s before, %s after\n", files.tensors.size(), counts.c_str(),
              accelerate::convert_bytes(static_cast<double>(files.bytes_before)).c_str(),
              accelerate::convert_bytes(static_cast<double>(files.bytes_after)).c_str());
  if (report.before)
    std::printf("Perplexity on %lld tokens: %.4f before, %.4f after (%+.2f %%)\n",
                static_cast<long long>(report.tokens), *report.before, *report.after,
                (*report.after / *report.before - 1) * 100);
  else if (wants_report) std::printf("Perplexity was not measured: --text FILE names a text for it\n");
  for (const auto& note : files.notes) std::printf("%s\n", accelerate::plain_lines(note).c_str());
  std::printf("The model is in %s\n", out.c_str());
}

int run(const std::vector<std::string>& words) {
  const fs::path out = words[1];
  const GivenOptions given(words, 2);
  if (const auto threads = given.threads()) at::set_num_threads(*threads);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) command::listen_for(signal);
  const bool wants_report = given.on("report");
  const auto needs = [&](const char* option, const char* other, bool has_other) {
    if (given.text(option) && !has_other)
      accelerate::raise<accelerate::ConfigError>("--{} was given without --{}, expected both", option, other);
  };
  for (const char* option : {"text", "max_tokens", "exact_products"}) needs(option, "report", wants_report);
  for (const char* option : {"max_tokens", "exact_products"}) needs(option, "text", given.text("text").has_value());
  const auto report = quantize(accelerate::bigmodel::local_model(words[0]), out, given);
  if (given.on("json")) std::cout << json_of(report, wants_report, out, *given.text("to")).dump(2) << std::endl;
  else print(report, wants_report, out);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return command::main_of("quantize", 2, argc, argv, run); }
