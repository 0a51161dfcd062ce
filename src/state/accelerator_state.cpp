#include <ostream>

#include "accelerate/state.hpp"
#include "state/deepspeed_plugins.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::optional<PrecisionType>& shared_precision() {
  static std::optional<PrecisionType> precision;
  return precision;
}

}  // namespace

const char* to_string(PrecisionType type) {
  switch (type) {
    case PrecisionType::NO:
      return "no";
    case PrecisionType::FP16:
      return "fp16";
    case PrecisionType::BF16:
      return "bf16";
    case PrecisionType::FP8:
      return "fp8";
  }
  return "?";
}

PrecisionType precision_from_string(const std::string& text) {
  for (const auto type : {PrecisionType::NO, PrecisionType::FP16, PrecisionType::BF16, PrecisionType::FP8})
    if (text == to_string(type)) return type;
  raise<ConfigError>(
      "mixed_precision is '{}', expected no, fp16, bf16 or fp8; check the argument, --mixed_precision or "
      "ACCELERATE_MIXED_PRECISION",
      text);
}

AcceleratorState::AcceleratorState(const AcceleratorStateOptions& options) : PartialState(options.partial) {
  auto& precision = shared_precision();
  if (!precision) {
    // The launch's is read where the program says another one, too: a wrong name must not go by without a word.
    const auto launched = precision_from_string(environment::text("ACCELERATE_MIXED_PRECISION").value_or("no"));
    precision = options.mixed_precision ? precision_from_string(*options.mixed_precision) : launched;
  } else if (options.mixed_precision && precision_from_string(*options.mixed_precision) != *precision) {
    raise<ConfigError>(
        "AcceleratorState: mixed_precision is '{}', but an Accelerator of this process already runs with '{}' and all "
        "of them share it; pass it to the first one only, or call AcceleratorState::reset() before",
        *options.mixed_precision, to_string(*precision));
  }
}

PrecisionType AcceleratorState::mixed_precision() const { return *shared_precision(); }
std::string AcceleratorState::text() const {
  const auto& plugins = detail::deepspeed_plugins();
  return fmt::format("{}\nMixed precision type: {}\n{}", PartialState::text(), to_string(mixed_precision()),
                     plugins ? fmt::format("ds_config: {}\n", plugins->text()) : "");
}
std::ostream& operator<<(std::ostream& out, const AcceleratorState& state) { return out << state.text(); }

std::shared_ptr<detail::DeepSpeedPlugins>& detail::deepspeed_plugins() {
  static std::shared_ptr<DeepSpeedPlugins> plugins;
  return plugins;
}
std::shared_ptr<void>& detail::shared_engine() {
  static std::shared_ptr<void> engine;
  return engine;
}

namespace {

detail::DeepSpeedPlugins& plugins_or_throw(const char* asked) {
  const auto& plugins = detail::deepspeed_plugins();
  if (!plugins)
    raise<ConfigError>(
        "{}: no DeepSpeedPlugin is there, expected an Accelerator that was made with deepspeed_plugin or "
        "deepspeed_plugins, or by accelerate launch --use_deepspeed",
        asked);
  return *plugins;
}

}  // namespace

const DeepSpeedPlugin& AcceleratorState::deepspeed_plugin() const {
  return plugins_or_throw("deepspeed_plugin").get(std::nullopt);
}
const DeepSpeedPlugin& AcceleratorState::get_deepspeed_plugin(const std::string& name) const {
  return plugins_or_throw("get_deepspeed_plugin").get(name);
}
void AcceleratorState::select_deepspeed_plugin(const std::string& name) const {
  plugins_or_throw("select_deepspeed_plugin").select(name);
}
const DeepSpeedPlugin& get_active_deepspeed_plugin(const AcceleratorState& state) { return state.deepspeed_plugin(); }

bool AcceleratorState::initialized() { return shared_precision().has_value(); }

void AcceleratorState::reset(bool reset_partial_state) {
  shared_precision().reset();
  detail::shared_engine().reset();
  detail::deepspeed_plugins().reset();
  if (reset_partial_state) PartialState::reset();
}

}  // namespace accelerate
