#include "accelerate/adapters.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/residency/deferred.hpp"
#include "adapters/adapter_file.hpp"
#include "adapters/lora_config.hpp"
#include "adapters/lora_layer.hpp"
#include "adapters/own_values.hpp"
#include "residency/unit.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::LoraLayer;
using detail::OwnValues;
using residency::Member;

using detail::kPrefix;
constexpr const char* kA = "lora_A";
constexpr const char* kB = "lora_B";

/// A or B in the tree of modules. The children of a target make its parameters those of the model: for optimizers,
/// engines and checkpoints.
struct LoraWeightImpl : torch::nn::Module {
  explicit LoraWeightImpl(const at::Tensor& value) : torch::nn::Module("LoraWeight") {
    weight = register_parameter("weight", value, value.requires_grad());
  }
  // A module moves its children before its own parameters: so the adapted weight is moved already, and watched where it
  // lies by then, when its own module comes to it.
  void to(at::Device device, at::ScalarType dtype, bool non_blocking) override {
    move_with_weight(device, dtype, non_blocking);
  }
  void to(at::ScalarType dtype, bool non_blocking) override { move_with_weight(dtype, non_blocking); }
  void to(at::Device device, bool non_blocking) override { move_with_weight(device, non_blocking); }

  at::Tensor weight;
  std::shared_ptr<LoraLayer> layer;  ///< lora_A keeps it alive

 private:
  template <class... Where> void move_with_weight(Where... where) {
    torch::nn::Module::to(where...);
    if (!layer || !layer->watched || Member::of(layer->weight)) return;
    const at::NoGradGuard no_grad;
    layer->weight.set_data(layer->weight.to(where...));
    detail::watch(*layer);
  }
};

struct LoraTarget {
  Submodule place;
  at::Tensor weight;
  bool transposed = false;

  int64_t inputs() const { return weight.size(transposed ? 0 : 1); }
  int64_t outputs() const { return weight.size(transposed ? 1 : 0); }
};

bool moves_between_ranks(const at::Tensor& tensor) {
  const Member* member = Member::of(tensor);
  if (!member) return false;
  const auto& parts = member->unit().parts();
  return std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.home->collective(); });
}

/// The zoo's Dense is its Linear. Both have weights [outputs, inputs], whatever a config says, as in PEFT.
bool is_linear(const Submodule& place) { return place.class_name == "Linear" || place.class_name == "Dense"; }

template <class E> LoraTarget target_at(const Submodule& place, const LoraConfig& config, const char* operation) {
  const auto found = std::find_if(place.parameters.begin(), place.parameters.end(),
                                  [](const auto& item) { return item.first == "weight"; });
  const bool is_table = place.class_name.find("Embedding") != std::string::npos;
  if (found == place.parameters.end() || found->second.dim() != 2 || is_table)
    raise<E>(
        "{}: found {} '{}' ({}), expected a module with a weight of two dimensions that linear, addmm, mm or matmul "
        "multiply by{}; name such modules in target_modules",
        operation, place.class_name, place.path,
        found == place.parameters.end() ? std::string("no parameter \"weight\" of its own")
                                        : fmt::format("weight {}", found->second.sizes()),
        is_table ? " (tables that are looked up are not offered)" : "");
  const auto& weight = found->second;
  if (is_deferred(weight))
    raise<E>("{}: the weight of '{}' is deferred, expected one with values; materialize the model first", operation,
             place.path);
  if (moves_between_ranks(weight))
    raise<E>(
        "{}: the weight of '{}' is sharded over ranks, expected a model that is not prepared; add the adapter first",
        operation, place.path);
  return {place, weight, !is_linear(place) && (config.fan_in_fan_out || place.class_name == "Conv1D")};
}

bool is_of_an_adapter(const Submodule& place) {
  return place.module && dynamic_cast<const LoraWeightImpl*>(place.module);
}

std::vector<Submodule> modules_of(const ModelRef& model, const char* operation) {
  if (!model.module())
    raise<ConfigError>(
        "{}: found a script module, to which no parameters can be added, expected one of torch::nn; apply PEFT in "
        "Python before it is scripted",
        operation);
  const auto all = model.submodules();
  for (const auto& place : all)
    if (is_of_an_adapter(place))
      raise<ConfigError>(
          "{}: '{}' belongs to an adapter, expected a model without one; remove() it, or merge() and remove()",
          operation, place.path);
  return all;
}

/// Each weight once. @throws E when two of the targets share one
template <class E> void keep_each_once(std::vector<LoraTarget>& targets, const char* operation) {
  std::set<const void*> modules;
  std::erase_if(targets, [&](const LoraTarget& target) { return !modules.insert(target.place.identity).second; });
  for (size_t i = 0; i < targets.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (targets[i].weight.is_same(targets[j].weight))
        raise<E>(
            "{}: '{}' and '{}' share their weight, expected one of them as a target: an adapter belongs to a weight",
            operation, targets[j].place.path, targets[i].place.path);
}

// transformers 5 calls GPT-NeoX's head lm_head; models here have the name of its files.
constexpr std::string_view kTheirHead = "lm_head", kOurHead = "embed_out";

std::string renamed(const std::string& name, std::string_view from, std::string_view to) {
  const bool is_it = name == from || name.starts_with(std::string(from) + ".");
  return is_it ? std::string(to) + name.substr(from.size()) : name;
}
LoraConfig renamed(LoraConfig config, std::string_view from, std::string_view to) {
  for (auto* names : {&config.target_modules, &config.modules_to_save, &config.exclude_modules})
    for (auto& name : *names) name = renamed(name, from, to);
  for (auto& [pattern, rank] : config.rank_pattern) pattern = renamed(pattern, from, to);
  for (auto& [pattern, alpha] : config.alpha_pattern) pattern = renamed(pattern, from, to);
  return config;
}
std::string name_for_peft(const ModelRef& model, const std::string& name) {
  const bool is_neox = model.submodules().front().class_name.starts_with("GPTNeoX");
  return is_neox ? renamed(name, kOurHead, kTheirHead) : name;
}

std::shared_ptr<LoraLayer> attach(const ModelRef& model, const LoraTarget& target, const LoraConfig& config,
                                  const at::Tensor& a, const at::Tensor& b) {
  const auto first = std::make_shared<LoraWeightImpl>(a), second = std::make_shared<LoraWeightImpl>(b);
  auto layer = std::make_shared<LoraLayer>();
  layer->path = target.place.path;
  layer->in_file = name_for_peft(model, layer->path);
  layer->module = target.place.module->shared_from_this();
  layer->weight = target.weight;
  layer->a = first->weight;
  layer->b = second->weight;
  layer->transposed = target.transposed;
  const auto rank = static_cast<double>(a.size(0));
  layer->scaling = detail::alpha_of(config, layer->path) / (config.use_rslora ? std::sqrt(rank) : rank);
  layer->dropout = config.lora_dropout;
  first->layer = layer;
  first->train(target.place.module->is_training());
  second->train(target.place.module->is_training());
  target.place.module->register_module(kA, first);
  target.place.module->register_module(kB, second);
  detail::watch(*layer);
  return layer;
}

void freeze(const ModelRef& model) {
  for (const auto& [name, parameter] : model.parameters()) at::Tensor(parameter).set_requires_grad(false);
}

at::TensorOptions options_like(const at::Tensor& weight) {
  return weight.options().requires_grad(false).dtype(weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

void require_own_bytes(const LoraLayer& layer, const char* operation) {
  if (Member::of(layer.weight))
    raise<ConfigError>(
        "LoraAdapter::{}: the bytes of '{}' are kept by a residency (sharded, offloaded or quantized), expected a "
        "whole model in memory; save the adapter and load it into one",
        operation, layer.path);
}

void write(const LoraConfig& config, bool transposed, const fs::path& folder,
           const std::map<std::string, at::Tensor>& tensors) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<CheckpointError>("LoraAdapter::save: can't make '{}': {}", folder.string(), error.message());
  AtomicFiles files("LoraAdapter::save", folder);
  save_safetensors(files.place("adapter_model.safetensors"), tensors, {{"format", "pt"}});
  AtomicFile text("LoraAdapter::save", files.place("adapter_config.json"));
  text.write(detail::to_json(config, transposed));
  text.finish();
  files.finish();
}

}  // namespace

bool detail::has_adapter(const ModelRef& model) { return std::ranges::any_of(model.submodules(), is_of_an_adapter); }

NamedTensors LoraAdapter::parameters() const {
  NamedTensors result;
  for (const auto& layer : layers_) {
    result.emplace_back(layer->path + "." + kA + ".weight", layer->a);
    result.emplace_back(layer->path + "." + kB + ".weight", layer->b);
  }
  for (const auto& own : own_)
    if (own->rows.empty()) result.emplace_back(own->name, own->value());
  return result;
}

void LoraAdapter::set_enabled(bool enabled) const {
  for (const auto& own : own_)
    if (own->enabled != enabled) own->require_own_bytes("LoraAdapter::set_enabled");
  for (const auto& own : own_) own->set_enabled(enabled);
  for (const auto& layer : layers_) layer->enabled = enabled;
}

void LoraAdapter::merge() const {
  const at::NoGradGuard no_grad;
  for (const auto& layer : layers_) require_own_bytes(*layer, "merge");
  for (const auto& layer : layers_)
    if (!std::exchange(layer->merged, true)) layer->weight.add_(layer->difference());
}

void LoraAdapter::unmerge() const {
  const at::NoGradGuard no_grad;
  for (const auto& layer : layers_) require_own_bytes(*layer, "unmerge");
  for (const auto& layer : layers_)
    if (std::exchange(layer->merged, false)) layer->weight.sub_(layer->difference());
}

bool LoraAdapter::merged() const { return !layers_.empty() && layers_.front()->merged; }

void LoraAdapter::remove() const {
  for (const auto& layer : layers_) {
    detail::stop_watching(*layer);
    const auto module = layer->module.lock();
    if (!module || !module->named_children().contains(kA)) continue;
    module->unregister_module(kA);
    module->unregister_module(kB);
  }
}

namespace {

using Layers = std::vector<std::shared_ptr<LoraLayer>>;

/// PEFT's name for a value: an adapted module's own tensors are those of its "base_layer".
std::string name_in_file(const OwnValues& own, const Layers& layers) {
  const auto dot = own.in_file.rfind('.');
  const auto path = own.in_file.substr(0, dot == std::string::npos ? 0 : dot);
  if (!own.rows.empty()) return detail::kPrefix + path + detail::kRows;
  const bool is_adapted =
      std::any_of(layers.begin(), layers.end(), [&](const auto& layer) { return layer->in_file == path; });
  return kPrefix + (is_adapted ? path + detail::kBaseLayer + own.in_file.substr(dot) : own.in_file);
}

LoraConfig config_for_peft(const LoraConfig& config, const Layers& layers,
                           const std::vector<std::shared_ptr<OwnValues>>& own) {
  const bool is_other =
      std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer->path != layer->in_file; }) ||
      std::any_of(own.begin(), own.end(), [](const auto& one) { return one->name != one->in_file; });
  return is_other ? renamed(config, kOurHead, kTheirHead) : config;
}

bool is_transposed(const Layers& layers) {
  return std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer->transposed; });
}

}  // namespace

void LoraAdapter::save(const fs::path& folder) const {
  const auto whole = [](const std::string& name, const at::Tensor& tensor) {
    if (moves_between_ranks(tensor))
      raise<ConfigError>(
          "LoraAdapter::save: '{}' is sharded over ranks, expected whole tensors; pass "
          "Accelerator::get_state_dict(model) as the second argument on the main process",
          name);
    return tensor.detach();
  };
  std::map<std::string, at::Tensor> tensors;
  for (const auto& layer : layers_)
    for (const auto& [name, tensor] : {std::pair(kA, layer->a), {kB, layer->b}}) {
      const auto path = layer->path + "." + name + ".weight";
      tensors.emplace(kPrefix + layer->in_file + "." + name + ".weight", whole(path, tensor));
    }
  for (const auto& own : own_) {
    whole(own->name, own->parameter);
    tensors.emplace(name_in_file(*own, layers_), own->value().detach());
  }
  write(config_for_peft(*config_, layers_, own_), is_transposed(layers_), folder, tensors);
}

void LoraAdapter::save(const fs::path& folder, const std::map<std::string, at::Tensor>& state) const {
  const auto find = [&](const std::string& name, const at::Tensor& tensor) {
    const auto found = state.find(name);
    if (found == state.end() || found->second.sizes() != tensor.sizes())
      raise<CheckpointError>(
          "LoraAdapter::save: found {} for '{}' in the state, expected {}: that of the model with its adapter, on a "
          "rank that has it",
          found == state.end() ? std::string("nothing") : fmt::format("{}", found->second.sizes()), name,
          tensor.sizes());
    return found->second.detach();
  };
  std::map<std::string, at::Tensor> tensors;
  for (const auto& layer : layers_)
    for (const auto& [name, tensor] : {std::pair(kA, layer->a), {kB, layer->b}}) {
      const auto path = layer->path + "." + name + ".weight";
      tensors.emplace(kPrefix + layer->in_file + "." + name + ".weight", find(path, tensor));
    }
  for (const auto& own : own_)
    tensors.emplace(name_in_file(*own, layers_),
                    own->enabled ? own->part_of(find(own->name, own->parameter)) : own->other);
  write(config_for_peft(*config_, layers_, own_), is_transposed(layers_), folder, tensors);
}

namespace {

/// The head that PEFT leaves out of "all-linear", if the model has one: that for tokens, by the names that models of
/// transformers have for it, else, when the task is to classify sequences, that for classes.
std::string head_of(const std::vector<Submodule>& modules, const LoraConfig& config) {
  std::vector<std::string> names{"lm_head", "embed_out"};
  if (config.task_type == "SEQ_CLS") names.insert(names.end(), {"score", "classifier"});
  for (const auto& name : names)
    if (std::any_of(modules.begin(), modules.end(), [&](const auto& place) { return place.path == name; })) return name;
  return {};
}

}  // namespace

namespace {

std::string module_of(const std::string& name) {
  return name.substr(0, name.rfind('.') == name.npos ? 0 : name.rfind('.'));
}

/// A parameter of the model that is trained beside A and B.
bool is_trained(const std::string& name, const LoraConfig& config, const std::vector<std::string>& saved,
                const std::vector<LoraTarget>& targets) {
  const auto path = module_of(name);
  if (detail::is_saved(saved, path)) return true;
  if (config.bias == "none" || (name != "bias" && !name.ends_with(".bias"))) return false;
  return config.bias == "all" || std::any_of(targets.begin(), targets.end(),
                                             [&](const LoraTarget& target) { return target.place.path == path; });
}

/// Whether the model's head multiplies by its embeddings. A head of its own would be a module.
bool has_tied_head(const ModelRef& model) {
  bool predicts_tokens = false;
  for (const auto& place : model.submodules()) {
    if (place.path == "lm_head" || place.path == "embed_out") return false;
    for (const char* kind : {"ForCausalLM", "LMHead", "ForConditionalGeneration"})
      predicts_tokens = predicts_tokens || (place.path.empty() && place.class_name.find(kind) != std::string::npos);
  }
  return predicts_tokens;
}

/// Whether other modules compute with this parameter, too. PEFT gives the one that modules_to_save names a copy.
bool is_shared(const ModelRef& model, const at::Tensor& parameter) {
  int64_t users = 0;
  for (const auto& place : model.submodules()) {
    if (std::none_of(place.parameters.begin(), place.parameters.end(),
                     [&](const auto& item) { return item.second.is_same(parameter); }))
      continue;
    const bool of_tokens =
        std::ranges::any_of(std::initializer_list<std::string_view>{"wte", "embed_tokens", "embed_in", "shared"},
                            [&](std::string_view end) { return place.path.ends_with(end); });
    users += of_tokens && has_tied_head(model) ? 2 : 1;
  }
  return users > 1;
}

template <class E> [[noreturn]] void refuse_shared(const std::string& where, const std::string& name) {
  raise<E>(
      "{}: '{}' is in modules_to_save, and the head multiplies by the same weight, which would change with it; PEFT "
      "gives the named module a copy, and the head keeps the old one. Untie them before (tie_word_embeddings = false, "
      "and a head of its own)",
      where, name);
}

/// The values that a file has of the model itself, compared with the model. Nothing is written yet.
std::vector<std::pair<std::shared_ptr<OwnValues>, at::Tensor>> own_values_of(const ModelRef& model,
                                                                             const detail::AdapterFile& file,
                                                                             const std::vector<LoraTarget>& targets,
                                                                             const std::string& where) {
  std::map<std::string, at::Tensor> state;
  for (const auto& [name, tensor] : model.state()) state.emplace(name, tensor);
  const auto saved = detail::saved_modules(file.config);
  std::vector<std::pair<std::shared_ptr<OwnValues>, at::Tensor>> values;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& rows, const at::Tensor& value) {
    const auto found = state.find(name);
    if (found == state.end())
      raise<CheckpointError>(
          "{}: found values of '{}', which the model does not have; {}", where, name,
          (name.starts_with("lm_head.") || name.starts_with("embed_out.")) && has_tied_head(model)
              ? "its head multiplies by its embeddings. Load a model whose head has a weight of its own "
                "(tie_word_embeddings = false)"
              : "it may belong to another model");
    const OwnValues own{name, found->second, rows, {}, true, name_for_peft(model, name)};
    if (is_deferred(own.parameter))
      raise<CheckpointError>("{}: '{}' is deferred, expected a model with values; materialize it first", where, name);
    for (const auto row : rows)
      if (own.parameter.dim() != 2 || row < 0 || row >= own.parameter.size(0))
        raise<CheckpointError>("{}: found row {} of '{}', whose shape is {}", where, row, name, own.parameter.sizes());
    auto sizes = own.parameter.sizes().vec();
    if (!rows.empty()) sizes[0] = static_cast<int64_t>(rows.size());
    if (value.sizes() != sizes)
      raise<CheckpointError>(
          "{}: found {} for '{}', expected {}. The adapter may belong to another model, or to one whose vocabulary or "
          "number of classes was changed",
          where, value.sizes(), name, sizes);
    // Embeddings lie beside adapters of heads as they were.
    if (rows.empty() && !is_trained(name, file.config, saved, targets) &&
        at::equal(own.parameter, value.to(own.parameter.options().requires_grad(false))))
      return;
    if (rows.empty() && detail::is_saved(file.config.modules_to_save, module_of(name)) &&
        is_shared(model, own.parameter))
      refuse_shared<CheckpointError>(where, name);
    try {
      own.require_own_bytes("load_adapter");
    } catch (const ConfigError& error) {
      raise<CheckpointError>("{}", error.what());
    }
    values.emplace_back(std::make_shared<OwnValues>(own), value);
  };
  for (const auto& [name, value] : file.whole) add(name, {}, value);
  for (const auto& [name, parameter] : model.parameters())
    if (detail::is_saved(file.config.modules_to_save, module_of(name)) && !file.whole.contains(name))
      raise<CheckpointError>("{}: found no '{}', which modules_to_save asks for. The file is not whole", where, name);
  for (const auto& [path, value] : file.rows) {
    const auto& tokens = file.config.trainable_token_indices;
    const auto found = std::find_if(tokens.begin(), tokens.end(),
                                    [&, path = path](const auto& entry) { return path.ends_with(entry.first); });
    if (found == tokens.end())
      raise<CheckpointError>("{}: found rows of '{}', and none in trainable_token_indices of adapter_config.json",
                             where, path);
    add(path + ".weight", found->second, value);
  }
  return values;
}

}  // namespace

LoraAdapter add_adapter(const ModelRef& model, const LoraConfig& config) {
  constexpr const char* kName = "add_adapter";
  detail::check(config);
  const bool all = config.target_modules == std::vector<std::string>{"all-linear"};
  const auto modules = modules_of(model, kName);
  const auto head = head_of(modules, config);
  const auto saved = detail::saved_modules(config);
  if (!config.trainable_token_indices.empty())
    raise<ConfigError>(
        "add_adapter: found trainable_token_indices, expected none: rows of embeddings are taken from files, and not "
        "trained");
  for (const auto& name : config.modules_to_save)
    if (std::none_of(modules.begin(), modules.end(), [&](const auto& place) { return place.path.ends_with(name); }))
      raise<ConfigError>("add_adapter: found no module of the name '{}' in modules_to_save, expected one", name);
  std::vector<LoraTarget> targets;
  for (const auto& place : modules) {
    if (place.path.empty() || detail::is_listed(config.exclude_modules, place.path) ||
        detail::is_saved(saved, place.path))
      continue;
    if (all) {
      if ((!is_linear(place) && place.class_name != "Conv1D") || place.path == head) continue;
    } else if (!detail::is_listed(config.target_modules, place.path)) {
      continue;
    }
    targets.push_back(target_at<ConfigError>(place, config, kName));
  }
  keep_each_once<ConfigError>(targets, kName);
  if (targets.empty())
    raise<ConfigError>(
        "add_adapter: found no module of the names [{}], expected some; names are those of model.named_modules(), or "
        "their ends: \"query\", \"q_proj\"",
        fmt::join(config.target_modules, ", "));
  for (const auto& target : targets)
    if (detail::rank_of(config, target.place.path) <= 0)
      raise<ConfigError>("add_adapter: found a rank of 0 for '{}'", target.place.path);
  NamedTensors own;
  for (const auto& [name, parameter] : model.parameters()) {
    if (!is_trained(name, config, saved, targets)) continue;
    if (detail::is_saved(config.modules_to_save, module_of(name)) && is_shared(model, parameter))
      refuse_shared<ConfigError>("add_adapter", name);
    if (is_deferred(parameter) || moves_between_ranks(parameter))
      raise<ConfigError>("add_adapter: '{}' is {}, expected a model that is not prepared", name,
                         is_deferred(parameter) ? "deferred" : "sharded over ranks");
    own.emplace_back(name, parameter);
  }

  const at::NoGradGuard no_grad;
  freeze(model);
  LoraAdapter adapter;
  adapter.config_ = std::make_shared<const LoraConfig>(config);
  for (const auto& target : targets) {
    const int64_t rank = detail::rank_of(config, target.place.path);
    const auto options = options_like(target.weight);
    auto a = at::empty({rank, target.inputs()}, options), b = at::zeros({target.outputs(), rank}, options);
    const auto spread = [](int64_t inputs) { return 1 / std::sqrt(static_cast<double>(inputs)); };
    if (config.init_lora_weights == LoraInit::gaussian) a.normal_(0, 1.0 / static_cast<double>(rank));
    else a.uniform_(-spread(target.inputs()), spread(target.inputs()));
    if (config.init_lora_weights == LoraInit::random) b.uniform_(-spread(rank), spread(rank));
    adapter.layers_.push_back(attach(model, target, config, a.set_requires_grad(true), b.set_requires_grad(true)));
  }
  for (const auto& [name, parameter] : own) {
    const auto& value = adapter.own_.emplace_back(
        std::make_shared<OwnValues>(OwnValues{name, parameter, {}, {}, true, name_for_peft(model, name)}));
    value->other = parameter.detach().clone();
    value->parameter.set_requires_grad(true);
  }
  return adapter;
}

namespace {

void take_name_of_head(detail::AdapterFile& file, const std::vector<Submodule>& modules) {
  const auto has = [&](std::string_view path) {
    return std::any_of(modules.begin(), modules.end(), [&](const auto& place) { return place.path == path; });
  };
  if (has(kTheirHead) || !has(kOurHead)) return;
  const auto rename = [&](auto& by_name) {
    auto all = std::exchange(by_name, {});
    for (auto& [name, value] : all) by_name.emplace(renamed(name, kTheirHead, kOurHead), std::move(value));
  };
  rename(file.pairs), rename(file.whole);
  file.config = renamed(std::move(file.config), kTheirHead, kOurHead);
}

}  // namespace

LoraAdapter load_adapter(const ModelRef& model, const fs::path& folder, bool is_trainable) {
  constexpr const char* kName = "load_adapter";
  auto file = detail::read_adapter(folder);
  const auto modules = modules_of(model, kName);
  take_name_of_head(file, modules);
  auto config = file.config;
  const auto& pairs = file.pairs;
  const auto where = fmt::format("load_adapter: '{}'", file.file.string());
  if (is_trainable && !file.rows.empty())
    raise<CheckpointError>(
        "{}: found rows of '{}' (trainable_token_indices) that are to be trained, which is not offered here; load it "
        "without is_trainable, or train on in PEFT",
        where, file.rows.begin()->first);
  std::vector<LoraTarget> targets;
  for (const auto& [name, pair] : pairs) {
    const auto& path = name;  // which a lambda may capture
    const auto& [a, b] = pair;
    const auto place =
        std::find_if(modules.begin(), modules.end(), [&](const auto& item) { return item.path == path; });
    if (place == modules.end())
      raise<CheckpointError>(
          "{}: found an adapter for '{}', which the model does not have; it may belong to another model", where, path);
    targets.push_back(target_at<CheckpointError>(*place, config, kName));
    const auto& target = targets.back();
    const int64_t rank = detail::rank_of(config, path);
    if (a.size(1) != target.inputs() || b.size(0) != target.outputs())
      raise<CheckpointError>(
          "{}: found lora_A {} and lora_B {} of '{}', expected [{}, {}] and [{}, {}]: the weight is {}", where,
          a.sizes(), b.sizes(), path, rank, target.inputs(), target.outputs(), rank, target.weight.sizes());
  }
  keep_each_once<CheckpointError>(targets, kName);
  if (file.whole_names)
    for (const auto& [path, pair] : pairs) config.target_modules.push_back(path);
  const auto own = own_values_of(model, file, targets, where);

  const at::NoGradGuard no_grad;
  freeze(model);
  LoraAdapter adapter;
  const auto saved = detail::saved_modules(config);
  for (const auto& [values, value] : own) {
    detail::put(*values, value);
    values->parameter.set_requires_grad(is_trainable && is_trained(values->name, config, saved, targets));
    adapter.own_.push_back(values);
  }
  adapter.config_ = std::make_shared<const LoraConfig>(config);
  for (const auto& target : targets) {
    const auto& [a, b] = pairs.at(target.place.path);
    const auto copy = [&](const at::Tensor& stored) {
      return stored.to(options_like(target.weight), /*non_blocking=*/false, /*copy=*/true)
          .set_requires_grad(is_trainable);
    };
    adapter.layers_.push_back(attach(model, target, config, copy(a), copy(b)));
  }
  return adapter;
}

}  // namespace accelerate
