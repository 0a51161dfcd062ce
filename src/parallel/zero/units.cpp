#include "parallel/zero/units.hpp"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "accelerate/config.hpp"
#include "accelerate/model/submodule.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

std::vector<ShardedUnit> units_by_size(const ModelRef& model, int64_t most_elements) {
  std::vector<ShardedUnit> units;
  int64_t elements = 0;
  for (const auto& [name, tensor] : model.parameters()) {
    if (units.empty() || (elements > 0 && tensor.numel() > most_elements - elements)) {
      units.push_back({.path = fmt::format("(bucket {})", units.size()), .parameters = {}});
      elements = 0;
    }
    units.back().parameters.emplace_back(name, tensor);
    elements += tensor.numel();
  }
  return units;
}

namespace {

std::string_view last_part(std::string_view name) {
  const size_t at = name.find_last_of(".:");
  return at == std::string_view::npos ? name : name.substr(at + 1);
}

/// Modules of a tree that come as a whole, each with all below it.
class WholeModules {
 public:
  WholeModules(const std::vector<Submodule>& modules, const ModuleUnits& how) : modules_(modules) {
    const std::vector<int64_t> below = modules_below(), elements = elements_below();
    for (size_t i = 0; i < modules.size(); ++i) {
      const auto& parent = modules[i].parent;
      root_.push_back(parent >= 0 && is_whole(static_cast<size_t>(parent)) ? root_[static_cast<size_t>(parent)] : i);
      const bool listed = is_listed(modules[i], how);  // which also notes that the entry is right
      whole_.push_back(root_[i] != i || listed ||
                       (how.smallest_average > 0 && elements[i] > 0 && elements[i] / below[i] < how.smallest_average) ||
                       elements[i] <= how.largest_whole);
    }
  }
  /// The module whose unit a module's parameters are in.
  size_t unit_of(size_t module) const { return root_[module]; }
  const std::set<std::string>& matched() const { return matched_; }

 private:
  bool is_whole(size_t module) const { return whole_[module]; }
  bool is_listed(const Submodule& module, const ModuleUnits& how) {
    bool found = false;
    const auto look = [&](const std::vector<std::string>& entries, const auto& matches) {
      for (const auto& entry : entries)
        if (matches(entry)) matched_.insert(entry), found = true;
    };
    look(how.classes, [&](const std::string& name) { return module.class_name == last_part(name); });
    look(how.names, [&](const std::string& name) { return module.path == name; });
    look(how.name_suffixes, [&](const std::string& name) { return module.path.ends_with(name); });
    return found;
  }
  template <class Own> std::vector<int64_t> sums(const Own& own) const {
    std::vector<int64_t> all;
    for (const auto& module : modules_) all.push_back(own(module));
    for (size_t i = modules_.size(); i-- > 1;) all[static_cast<size_t>(modules_[i].parent)] += all[i];
    return all;
  }
  std::vector<int64_t> modules_below() const {
    return sums([](const Submodule&) -> int64_t { return 1; });
  }
  std::vector<int64_t> elements_below() const {
    return sums([](const Submodule& module) {
      int64_t elements = 0;
      for (const auto& [name, tensor] : module.parameters) elements += tensor.numel();
      return elements;
    });
  }

  const std::vector<Submodule>& modules_;
  std::vector<size_t> root_;  ///< by module
  std::vector<bool> whole_;
  std::set<std::string> matched_;
};

}  // namespace

std::vector<ShardedUnit> units_by_module(const ModelRef& model, const ModuleUnits& how,
                                         const std::function<void(const std::string& entry)>& unmatched) {
  const auto modules = model.submodules();
  const WholeModules whole(modules, how);
  ShardedUnit stays{.path = "(persistent)", .parameters = {}, .stays = true};
  std::map<size_t, ShardedUnit> by_module;  // a module's index is its place in the order of registration
  std::set<const at::TensorImpl*> seen;
  int64_t staying = 0;
  for (size_t i = 0; i < modules.size(); ++i)
    for (const auto& [own_name, tensor] : modules[i].parameters) {
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const std::string name = modules[i].path.empty() ? own_name : modules[i].path + "." + own_name;
      const int64_t elements = tensor.numel();
      if (elements <= how.stays_up_to && elements <= how.all_that_stays - staying) {
        staying += elements;
        stays.parameters.emplace_back(name, tensor);
        continue;
      }
      const size_t unit = whole.unit_of(i);
      by_module[unit].parameters.emplace_back(name, tensor);
      by_module[unit].path = modules[unit].path.empty() ? "(model)" : modules[unit].path;
    }
  for (const auto* entries : {&how.classes, &how.names, &how.name_suffixes})
    for (const auto& entry : *entries)
      if (!whole.matched().contains(entry)) unmatched(entry);
  std::vector<ShardedUnit> units;
  if (!stays.parameters.empty()) units.push_back(std::move(stays));
  for (auto& [index, unit] : by_module) units.push_back(std::move(unit));
  return units;
}

std::set<const at::TensorImpl*> parameters_of_classes(const ModelRef& model, const std::vector<std::string>& classes) {
  std::set<std::string, std::less<>> known{"Linear",
                                           "Bilinear",
                                           "Conv1d",
                                           "Conv2d",
                                           "Conv3d",
                                           "ConvTranspose1d",
                                           "ConvTranspose2d",
                                           "ConvTranspose3d",
                                           "Embedding",
                                           "EmbeddingBag",
                                           "LayerNorm",
                                           "GroupNorm",
                                           "BatchNorm1d",
                                           "BatchNorm2d",
                                           "BatchNorm3d",
                                           "RNN",
                                           "LSTM",
                                           "GRU",
                                           "MultiheadAttention"};
  std::set<const at::TensorImpl*> found;
  for (const auto& module : model.submodules()) {
    known.insert(module.class_name);
    const bool listed = std::any_of(classes.begin(), classes.end(),
                                    [&](const std::string& name) { return last_part(name) == module.class_name; });
    if (listed)
      for (const auto& [name, tensor] : module.parameters) found.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& name : classes) {
    if (known.contains(last_part(name))) continue;
    const auto nearest = nearest_name(std::string(last_part(name)), {known.begin(), known.end()});
    raise<ConfigError>(
        "DeepSpeed configuration: 'torch_autocast.lower_precision_safe_modules' has '{}', expected a class of "
        "LibTorch's or of the model's modules{}",
        name, nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }
  return found;
}

RegularExpression expression_of_buffers(const std::string& pattern) {
  std::string expression;
  for (const char c : pattern) expression += c == '*' ? std::string(".*") : std::string(1, c);
  static_cast<void>(RegularExpression(expression));  // by itself: brackets must not close those around it
  return RegularExpression("(?s:.*)(?:" + expression + ")(?s:.*)");
}

std::set<std::string> buffers_like(const ModelRef& model, const std::vector<std::string>& patterns,
                                   const std::function<void(const std::string& pattern)>& unmatched) {
  std::set<std::string> found;
  for (const auto& pattern : patterns) {
    const RegularExpression expression = expression_of_buffers(pattern);
    bool any = false;
    for (const auto& [name, buffer] : model.buffers())
      if (buffer.is_floating_point() && expression.matches(name)) any = true, found.insert(name);
    if (!any) unmatched(pattern);
  }
  return found;
}

}  // namespace accelerate::parallel
