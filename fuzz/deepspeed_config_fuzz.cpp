#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/utils/error.hpp"
#include "parallel/zero/auto_values.hpp"
#include "parallel/zero/hjson.hpp"
#include "parallel/zero/zero_settings.hpp"

namespace {

using namespace accelerate;

/// Reading takes the configuration as it is, and says the same twice.
void read_twice(const DeepSpeedConfig& config) {
  for (const bool later_is_error : {false, true}) {
    const zero::ReadOptions options{.ranks = 2, .later_is_error = later_is_error};
    try {
      const auto settings = zero::read_settings(config, options);
      if (zero::to_json(settings) != zero::to_json(zero::read_settings(config, options))) std::abort();
      if (settings.without_meaning().size() > settings.effective.size()) std::abort();
    } catch (const ConfigError&) {
    }
  }
}

/// As a file, whose outer braces may be missing.
void read_as_file(const std::string& text) {
  std::string problem;
  const auto value = zero::parse_hjson(text, problem, {.root_without_braces = true});
  if (value.is_discarded() == problem.empty()) std::abort();
}

}  // namespace

// Any bytes are a configuration that reads the same after it was written, or a ConfigError; a plugin with that
// configuration is filled, or a ConfigError; and settings are read of either, or a ConfigError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  // A path would read whatever lies there.
  if (std::error_code ignored; text.find('\0') == std::string::npos && std::filesystem::exists(text, ignored)) return 0;
  read_as_file(text);
  try {
    const DeepSpeedConfig config(text);
    const std::string written = config.to_json();
    if (DeepSpeedConfig(written).to_json() != written) std::abort();
    if (DeepSpeedConfig(config.to_json({}, 2)).to_json() != written) std::abort();
    read_twice(config);
    try {
      auto plugin = parallel::resolve({.hf_ds_config = config});
      for (const char* precision : {"no", "bf16"}) plugin.set_mixed_precision(precision);
      plugin.deepspeed_config_process({{"train_batch_size", int64_t{8}}, {"optimizer.params.lr", 0.1}},
                                      /*must_match=*/true);
      zero::AutoFacts facts{.ranks = 2, .hidden_size = 64, .loader_batch_sizes = {4}};
      if (config.contains("optimizer")) facts.optimizer = zero::DummyOptimizerFacts{};
      if (config.contains("scheduler")) facts.scheduler = zero::DummySchedulerFacts{.total_num_steps = 10};
      auto filled = parallel::resolve({.hf_ds_config = config});
      zero::fill_auto(filled, facts);
      read_twice(filled.deepspeed_config());
    } catch (const ConfigError&) {
    }
  } catch (const ConfigError&) {
  }
  return 0;
}
