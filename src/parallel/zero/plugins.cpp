#include "parallel/zero/plugins.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "accelerate/state.hpp"
#include "parallel/zero/document.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

/// The fields of a plugin as programs give them; the configuration as it is written.
auto fields_of(const DeepSpeedPlugin& plugin) {
  const auto& [config, steps, clipping, stage, smallest, optimizer, param, optimizer_path, param_path, init, save, moe,
               msamp, level, version, in_backward, at_once] = plugin;
  return std::make_pair(config ? config->document().json : nlohmann::ordered_json(),
                        std::tie(steps, clipping, stage, smallest, optimizer, param, optimizer_path, param_path, init,
                                 save, moe, msamp, level, version, in_backward, at_once));
}

bool are_same(const std::vector<std::pair<std::string, DeepSpeedPlugin>>& a,
              const std::vector<std::pair<std::string, DeepSpeedPlugin>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return one.first == other.first && fields_of(one.second) == fields_of(other.second);
  });
}

}  // namespace

std::shared_ptr<Plugins> Plugins::of(const parallel::EngineRequest& request) {
  if (request.deepspeed && !request.deepspeed_plugins.empty())
    throw ConfigError("Accelerator: found deepspeed_plugin beside deepspeed_plugins, expected one of them");
  std::vector<std::pair<std::string, DeepSpeedPlugin>> given;
  if (request.deepspeed) given.emplace_back("", *request.deepspeed);
  for (const auto& [name, plugin] : request.deepspeed_plugins)
    given.emplace_back(name, plugin.value_or(DeepSpeedPlugin{}));
  auto& shared = detail::deepspeed_plugins();
  const auto known = std::static_pointer_cast<Plugins>(shared);
  if (known && are_same(known->given_, given)) return known;
  const auto made = std::make_shared<Plugins>();
  made->given_ = given;
  for (const auto& [name, plugin] : request.deepspeed_plugins) {
    const auto& all = made->by_name_;
    if (name.empty() || std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.first == name; }))
      raise<ConfigError>("Accelerator: deepspeed_plugins has the name '{}' {}, expected a name for each", name,
                         name.empty() ? "of nothing" : "twice");
    made->by_name_.emplace_back(name, parallel::resolve(plugin.value_or(DeepSpeedPlugin{})));
  }
  if (request.deepspeed_plugins.empty())
    made->by_name_.emplace_back("", parallel::resolve(request.deepspeed.value_or(DeepSpeedPlugin{})));
  if (!known || !detail::shared_engine()) shared = made;  // or one that failed has left its own
  return made;
}

size_t Plugins::index_of(const std::string& name) const {
  const auto found = std::find_if(by_name_.begin(), by_name_.end(), [&](const auto& one) { return one.first == name; });
  if (found != by_name_.end()) return static_cast<size_t>(found - by_name_.begin());
  std::vector<std::string> names;
  for (const auto& [one, plugin] : by_name_)
    if (!one.empty()) names.push_back(one);
  raise<ConfigError>(
      "AcceleratorState: there is no DeepSpeedPlugin '{}', expected one of those in "
      "AcceleratorOptions::deepspeed_plugins: {}",
      name, names.empty() ? "there are none" : fmt::format("{}", fmt::join(names, ", ")));
}

const DeepSpeedPlugin& Plugins::get(const std::optional<std::string>& name) const {
  return by_name_[name ? index_of(*name) : active_].second;
}
void Plugins::select(const std::string& name) { active_ = index_of(name); }
std::string Plugins::text() const { return python_text(by_name_[active_].second.deepspeed_config()); }
bool Plugins::makes_models_empty() const { return by_name_[active_].second.zero3_init_flag.value_or(false); }

namespace {

std::string quoted(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string result(1, quote);
  for (const char c : text) {
    if (c == '\\' || c == quote) result += '\\';
    if (c == '\n') result += "\\n";
    else if (c == '\t') result += "\\t";
    else if (c == '\r') result += "\\r";
    else result += c;
  }
  return result + quote;
}

std::string python_text(const nlohmann::ordered_json& value) {
  if (value.is_object() || value.is_array()) {
    std::string all;
    for (const auto& [key, child] : value.items())
      all += (all.empty() ? "" : ", ") + (value.is_object() ? quoted(key) + ": " : std::string()) + python_text(child);
    return value.is_object() ? "{" + all + "}" : "[" + all + "]";
  }
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_string()) return quoted(value.get<std::string>());
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  // The fewest digits that give the number back; with an exponent below 1e-4 and from 1e16 on.
  const double size = std::fabs(number);
  if (size != 0 && (size < 1e-4 || size >= 1e16)) {
    std::string text = fmt::format("{:e}", number);
    for (int digits = 0; digits <= 17; ++digits)
      if (text = fmt::format("{:.{}e}", number, digits); std::stod(text) == number) break;
    return text;
  }
  const std::string text = fmt::format("{}", number);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

}  // namespace

std::string python_text(const DeepSpeedConfig& config) { return python_text(config.document().json); }

}  // namespace accelerate::zero
