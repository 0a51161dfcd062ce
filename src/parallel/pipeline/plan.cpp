#include "parallel/pipeline/plan.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "accelerate/config.hpp"
#include "accelerate/model/submodule.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel::pipeline {
namespace {

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

std::string last_of(const std::string& path) { return path.substr(path.rfind('.') + 1); }

/// A member of a list of modules that is made of modules itself: a layer of a transformer, a block of a residual net.
bool is_list_member(const std::vector<Submodule>& modules, size_t i) {
  if (!is_number(last_of(modules[i].path))) return false;
  return std::any_of(modules.begin(), modules.end(),
                     [&](const Submodule& other) { return other.parent == static_cast<int64_t>(i); });
}

std::vector<StageLayer> collect(const ModelRef& model, const std::vector<Submodule>& modules,
                                const std::vector<bool>& whole) {
  std::map<const at::TensorImpl*, size_t> index;
  const auto parameters = model.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) index[parameters[i].second.unsafeGetTensorImpl()] = i;
  std::vector<StageLayer> layers;
  std::map<size_t, size_t> layer_of_module;
  std::set<size_t> seen;
  for (size_t i = 0; i < modules.size(); ++i) {
    size_t owner = i;  // the outermost module that is not to be split, else the module itself
    for (auto up = static_cast<int64_t>(i); up >= 0; up = modules[static_cast<size_t>(up)].parent)
      if (whole[static_cast<size_t>(up)]) owner = static_cast<size_t>(up);
    for (const auto& [name, tensor] : modules[i].parameters) {
      const size_t parameter = index.at(tensor.unsafeGetTensorImpl());
      if (!seen.insert(parameter).second) continue;  // tied: it belongs to its first place
      const auto [entry, is_new] = layer_of_module.try_emplace(owner, layers.size());
      if (is_new) layers.push_back({.path = modules[owner].path, .parameters = {}, .bytes = 0, .milliseconds = 0});
      StageLayer& layer = layers[entry->second];
      layer.parameters.push_back(parameter);
      layer.bytes += tensor.numel() * static_cast<int64_t>(tensor.element_size());
    }
  }
  return layers;
}

std::string list_of(const std::vector<StageLayer>& layers) {
  constexpr size_t kMost = 24;
  std::string text;
  for (size_t i = 0; i < layers.size() && i < kMost; ++i) text += (i ? ", " : "") + layers[i].path;
  return layers.size() > kMost ? text + ", … (" + std::to_string(layers.size()) + " in all)" : text;
}

double cost_of(const StageLayer& layer, PipelineBalance balance) {
  return balance == PipelineBalance::time ? layer.milliseconds : static_cast<double>(layer.bytes);
}

}  // namespace

std::vector<StageLayer> layers_of(const ModelRef& model, const PippyOptions& options, int64_t stages) {
  const auto modules = model.submodules();
  std::vector<bool> whole(modules.size());
  const std::vector<bool> single = whole;
  if (options.split_points != std::vector<std::string>{"auto"}) return collect(model, modules, single);
  const auto& classes = options.no_split_module_classes;
  std::set<std::string> present;
  for (const auto& module : modules) present.insert(module.class_name);
  for (const auto& name : classes) {
    if (present.contains(name)) continue;
    const auto nearest = nearest_name(name, {present.begin(), present.end()});
    raise<ConfigError>(
        "prepare_pippy: no_split_module_classes names '{}', which is no class of a module of this model, expected some "
        "of {}{}",
        name, fmt::join(present, ", "), nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }
  for (size_t i = 0; i < modules.size(); ++i)
    whole[i] = classes.empty() ? is_list_member(modules, i)
                               : std::find(classes.begin(), classes.end(), modules[i].class_name) != classes.end();
  auto layers = collect(model, modules, whole);
  return classes.empty() && static_cast<int64_t>(layers.size()) < stages ? collect(model, modules, single) : layers;
}

void sort_by_use(std::vector<StageLayer>& layers, const std::vector<size_t>& touched) {
  if (touched.empty()) return;
  std::vector<std::pair<size_t, StageLayer>> keyed;
  size_t before = 0;
  for (StageLayer& layer : layers) {
    size_t first = touched.size();
    for (const size_t parameter : layer.parameters)
      first =
          std::min(first, static_cast<size_t>(std::find(touched.begin(), touched.end(), parameter) - touched.begin()));
    if (first == touched.size()) first = before;
    before = first;
    keyed.emplace_back(first, std::move(layer));
  }
  std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < layers.size(); ++i) layers[i] = std::move(keyed[i].second);
}

std::vector<size_t> begins_at(const std::vector<StageLayer>& layers, const std::vector<std::string>& split_points,
                              int64_t stages) {
  if (static_cast<int64_t>(split_points.size()) != stages - 1)
    raise<ConfigError>(
        "prepare_pippy: found {} split points, expected {} for {} processes; each names the module that "
        "begins the next process's stage",
        split_points.size(), stages - 1, stages);
  std::vector<size_t> begins;
  for (const std::string& name : split_points) {
    const auto found = std::find_if(layers.begin(), layers.end(), [&](const StageLayer& layer) {
      return layer.path == name || layer.path.starts_with(name + ".");
    });
    if (found == layers.end())
      raise<ConfigError>(
          "prepare_pippy: split point '{}' names no module with parameters, expected one of (or a module that "
          "contains some of) {}",
          name, list_of(layers));
    const auto at = static_cast<size_t>(found - layers.begin());
    if (at <= (begins.empty() ? 0 : begins.back()))
      raise<ConfigError>(
          "prepare_pippy: split point '{}' leaves the stage before it empty, expected names in the order in "
          "which the forward comes to them, and not the first module: {}",
          name, list_of(layers));
    begins.push_back(at);
  }
  return begins;
}

std::vector<size_t> balanced(const std::vector<StageLayer>& layers, PipelineBalance balance, int64_t stages) {
  const size_t n = layers.size(), k = static_cast<size_t>(stages);
  if (n < k)
    raise<ConfigError>(
        "prepare_pippy: the model has {} parts that can be a stage ({}), expected at least as many as "
        "processes, which are {}; start fewer, or name fewer classes in no_split_module_classes",
        n, list_of(layers), stages);
  std::vector<double> sum(n + 1);
  for (size_t i = 0; i < n; ++i) sum[i + 1] = sum[i] + cost_of(layers[i], balance);
  // best[s][i]: the heaviest of s stages over the first i layers, at its least; from[s][i]: where the last of them
  // begins.
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(k + 1, std::vector<double>(n + 1, kNone));
  std::vector<std::vector<size_t>> from(k + 1, std::vector<size_t>(n + 1));
  best[0][0] = 0;
  for (size_t s = 1; s <= k; ++s)
    for (size_t i = s; i <= n; ++i)
      for (size_t j = s - 1; j < i; ++j)
        if (const double heaviest = std::max(best[s - 1][j], sum[i] - sum[j]); heaviest < best[s][i])
          best[s][i] = heaviest, from[s][i] = j;
  std::vector<size_t> begins;
  for (size_t s = k, i = n; s > 1; --s) begins.insert(begins.begin(), i = from[s][i]);
  return begins;
}

}  // namespace accelerate::parallel::pipeline
