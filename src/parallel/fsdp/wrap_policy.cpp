#include "parallel/fsdp/wrap_policy.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string_view>

#include "accelerate/config.hpp"
#include "accelerate/model/no_split.hpp"
#include "accelerate/model/submodule.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

using Modules = std::set<const void*>;
using Parameters = std::set<const at::TensorImpl*>;

bool is_one_of(const Submodule& module, const std::vector<std::string>& classes) {
  return std::find(classes.begin(), classes.end(), module.class_name) != classes.end();
}

/// PyTorch's lists. A list of modules is never called, so that a hook on it would never fire; attention reads its
/// projection's weight without calling it.
bool is_container(const Submodule& module) { return is_one_of(module, {"ModuleList", "ModuleDict"}); }
bool is_forced_leaf(const Submodule& module) { return is_one_of(module, {"MultiheadAttention"}); }

/// A module matches by its class's own name, or by as much of the qualified name as was given.
bool has_class(const Submodule& module, const std::string& name) {
  const auto ends_in_name = [&](std::string_view whole) {
    if (!whole.ends_with(name)) return false;
    whole.remove_suffix(name.size());
    return whole.empty() || whole.ends_with("::") || whole.ends_with('.');
  };
  std::string_view whole = module.qualified_class_name;
  if (module.class_name == name || ends_in_name(whole)) return true;
  if (!whole.ends_with("Impl")) return false;
  whole.remove_suffix(4);
  return ends_in_name(whole);
}

/// A layer by the model's own word.
bool is_no_split(const Submodule& module) { return dynamic_cast<const NoSplit*>(module.module) != nullptr; }

/// The tree with what the policies ask about it.
class WrapTree {
 public:
  WrapTree(const ModelRef& model, const FullyShardedDataParallelPlugin& plugin)
      : plugin_(plugin), modules_(model.submodules()), children_(modules_.size()) {
    for (size_t i = 1; i < modules_.size(); ++i) children_[static_cast<size_t>(modules_[i].parent)].push_back(i);
    find_ignored();
    find_wrapped();
  }

  std::vector<std::string> wrapped() const {
    std::vector<std::string> paths;
    Modules seen;
    for (size_t i = 1; i < modules_.size(); ++i)
      if (wrapped_.contains(modules_[i].identity) && seen.insert(modules_[i].identity).second)
        paths.push_back(modules_[i].path);
    return paths;
  }

  std::vector<ShardedUnit> units() const {
    std::map<const at::TensorImpl*, std::vector<size_t>> places;  // where each parameter is registered
    std::vector<std::pair<std::string, at::Tensor>> parameters;   // each once, under its first name
    for (size_t i = 0; i < modules_.size(); ++i)
      for (const auto& [name, tensor] : modules_[i].parameters) {
        auto& at = places[tensor.unsafeGetTensorImpl()];
        if (at.empty())
          parameters.emplace_back(modules_[i].path.empty() ? name : modules_[i].path + "." + name, tensor);
        at.push_back(i);
      }
    std::map<size_t, ShardedUnit> by_module;  // a module's index is its place in the order of registration
    for (const auto& [name, tensor] : parameters) {
      const auto* key = tensor.unsafeGetTensorImpl();
      if (ignored_parameters_.contains(key)) continue;
      by_module[owner_of(places[key])].parameters.emplace_back(name, tensor);
    }
    std::vector<ShardedUnit> result;
    for (auto& [index, unit] : by_module) {
      unit.path = modules_[index].path;
      unit.full_precision = index != 0 && is_one_of(modules_[index], full_precision_classes());
      result.push_back(std::move(unit));
    }
    return result;
  }

 private:
  void find_ignored() {
    if (!plugin_.ignored_modules) return;
    std::vector<size_t> roots;
    if (const auto* pattern = std::get_if<std::string>(&*plugin_.ignored_modules)) {
      std::regex regex;
      try {
        regex = std::regex(*pattern);
      } catch (const std::regex_error& error) {
        raise<ConfigError>(
            "FSDP: ignored_modules is '{}', expected a regular expression (ECMAScript) that matches whole module "
            "names: {}",
            *pattern, error.what());
      }
      for (size_t i = 0; i < modules_.size(); ++i)
        if (std::regex_match(modules_[i].path, regex)) roots.push_back(i);
      if (roots.empty())
        logs::warn("accelerate.parallel",
                   "FSDP: ignored_modules '{}' matches no module of this model. It has to match a whole dotted name; "
                   "'.*' stands for any letters.",
                   *pattern);
    } else {
      Modules given;
      for (const auto& module : std::get<std::vector<ModelRef>>(*plugin_.ignored_modules))
        given.insert(module.identity());
      for (size_t i = 0; i < modules_.size(); ++i)
        if (given.contains(modules_[i].identity)) roots.push_back(i);
    }
    for (const size_t root : roots) ignore(root);
  }

  void ignore(size_t index) {
    ignored_.insert(modules_[index].identity);
    for (const auto& [name, tensor] : modules_[index].parameters)
      ignored_parameters_.insert(tensor.unsafeGetTensorImpl());
    for (const size_t child : children_[index]) ignore(child);
  }

  void find_wrapped() {
    const auto& policy = plugin_.auto_wrap_policy.value();
    if (const auto* function = std::get_if<WrapFunction>(&policy)) {
      wrap_recursively(*function);
      return;
    }
    switch (std::get<AutoWrapPolicy>(policy)) {
      case AutoWrapPolicy::transformer_based_wrap: {
        const auto names = plugin_.transformer_cls_names_to_wrap.value_or(std::vector<std::string>{});
        check_classes(names);
        return wrap_recursively([&](const Submodule& module, bool recurse, int64_t) {
          const auto is_named = [&](const auto& name) { return has_class(module, name); };
          return recurse || (names.empty() ? is_no_split(module) : std::any_of(names.begin(), names.end(), is_named));
        });
      }
      case AutoWrapPolicy::size_based_wrap: {
        const int64_t least = plugin_.min_num_params.value_or(0);
        if (least == 0) break;  // the reference's way to switch it off
        if (plugin_.fsdp_version == 2) return wrap_all_above(least);
        return wrap_recursively([&](const Submodule& module, bool recurse, int64_t numel) {
          return numel >= least && !(recurse ? is_forced_leaf(module) : is_container(module));
        });
      }
      case AutoWrapPolicy::no_wrap:
        break;
    }
    wrap_recursively([](const Submodule&, bool, int64_t) { return false; });  // leaves modules that need full precision
  }

  void check_classes(const std::vector<std::string>& names) const {
    std::set<std::string> present;
    for (const auto& module : modules_) present.insert(module.class_name);
    const std::vector<std::string> classes(present.begin(), present.end());
    const auto list = fmt::format("{}", fmt::join(classes, ", "));
    if (names.empty() && std::none_of(modules_.begin(), modules_.end(), is_no_split))
      raise<ConfigError>(
          "FSDP: the auto wrap policy is TRANSFORMER_BASED_WRAP, but no class is named and the model has none that "
          "derives from accelerate::NoSplit, so that nothing would be wrapped. Set transformer_cls_names_to_wrap "
          "(FSDP_TRANSFORMER_CLS_TO_WRAP) to the model's repeated block, or the policy to NO_WRAP. The model's classes "
          "are {}",
          list);
    for (const auto& name : names) {
      if (std::any_of(modules_.begin(), modules_.end(), [&](const auto& module) { return has_class(module, name); }))
        continue;
      const auto nearest = nearest_name(name, classes);
      raise<ConfigError>("FSDP: could not find the transformer layer class {} in the model, whose classes are {}{}",
                         name, list, nearest ? fmt::format("; did you mean {}?", *nearest) : "");
    }
  }

  std::vector<std::string> full_precision_classes() const {
    const auto& precision = plugin_.mixed_precision_policy;
    if (!precision) return {};
    // Version 2 leaves it to us: its own in PyTorch fails in the first batch norm whose input is of another dtype.
    return precision->module_classes_to_ignore.value_or(precision->param_dtype ? batch_norm_classes()
                                                                               : std::vector<std::string>{});
  }

  /// PyTorch's recursion, from the leaves up. Classes that keep full precision are wrapped whatever the policy says,
  /// and looking for them leads everywhere.
  void wrap_recursively(const WrapFunction& policy) {
    const auto exempt = full_precision_classes();
    if (exempt.empty()) wrap_below(0, policy, true);
    else
      wrap_below(
          0,
          [&](const Submodule& module, bool recurse, int64_t numel) {
            return recurse || is_one_of(module, exempt) || policy(module, recurse, numel);
          },
          true);
  }

  /// @return how many elements became part of units
  int64_t wrap_below(size_t index, const WrapFunction& policy, bool is_root) {
    const Submodule& module = modules_[index];
    const int64_t numel = numel_of(index);
    if (!policy(module, true, numel)) return 0;
    int64_t wrapped = 0;
    Modules seen;  // a child that is registered twice in one module is one child
    for (const size_t child : children_[index])
      if (!ignored_.contains(modules_[child].identity) && seen.insert(modules_[child].identity).second)
        wrapped += wrap_below(child, policy, false);
    if (is_root || !policy(module, false, numel - wrapped)) return wrapped;
    wrapped_.insert(module.identity);
    return numel;
  }

  /// The reference's rule for version 2.
  void wrap_all_above(int64_t least) {
    const auto exempt = full_precision_classes();
    for (size_t i = 1; i < modules_.size(); ++i)
      if (!ignored_.contains(modules_[i].identity) && !is_container(modules_[i]) &&
          (numel_of(i) > least || is_one_of(modules_[i], exempt)))
        wrapped_.insert(modules_[i].identity);
  }

  /// Elements of all parameters in and below a module, tied ones once, ignored ones not.
  int64_t numel_of(size_t index) const {
    int64_t numel = 0;
    Parameters seen;
    const auto add = [&](const auto& self, size_t i) -> void {
      for (const auto& [name, tensor] : modules_[i].parameters)
        if (const auto* key = tensor.unsafeGetTensorImpl();
            !ignored_parameters_.contains(key) && seen.insert(key).second)
          numel += tensor.numel();
      for (const size_t child : children_[i]) self(self, child);
    };
    add(add, index);
    return numel;
  }

  size_t nearest_wrapped(size_t index) const {
    while (index != 0 && !wrapped_.contains(modules_[index].identity))
      index = static_cast<size_t>(modules_[index].parent);
    return index;
  }

  /// The unit for a parameter that is registered at these places, in ascending order.
  size_t owner_of(const std::vector<size_t>& places) const {
    const size_t first = nearest_wrapped(places.front());
    // Places of one shared module are in one unit although the paths to it differ.
    if (std::all_of(places.begin(), places.end(), [&](size_t place) {
          return modules_[nearest_wrapped(place)].identity == modules_[first].identity;
        }))
      return first;
    size_t common = places.front();
    for (size_t other : places)
      while (common != other)  // the larger index is deeper or further right: its parent is nearer to what both share
        (common > other ? common : other) = static_cast<size_t>(modules_[std::max(common, other)].parent);
    return nearest_wrapped(common);
  }

  const FullyShardedDataParallelPlugin& plugin_;
  std::vector<Submodule> modules_;
  std::vector<std::vector<size_t>> children_;
  Modules ignored_, wrapped_;
  Parameters ignored_parameters_;
};

}  // namespace

std::vector<std::string> wrapped_modules(const ModelRef& model, const FullyShardedDataParallelPlugin& plugin) {
  return WrapTree(model, plugin).wrapped();
}

std::vector<ShardedUnit> wrap_units(const ModelRef& model, const FullyShardedDataParallelPlugin& plugin) {
  return WrapTree(model, plugin).units();
}

}  // namespace accelerate::parallel
