#include "parallel/engines.hpp"

#include <c10/util/Type.h>

#include <algorithm>
#include <set>
#include <typeindex>
#include <utility>

#include "accelerate/parallel/prepare_facts.hpp"
#include "comm/group.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

// All that there are, in the order of the stack: a layer's folder defines choose_NAME().
#define ACCELERATE_LAYERS(X)   \
  X(codes)                     \
  X(megatron_lm) /* refused */ \
  X(zero)                      \
  X(fsdp)                      \
  X(averaging)                 \
  X(recompute)

#define ACCELERATE_DECLARE(name) std::unique_ptr<ChosenLayer> choose_##name(const EngineRequest& request);
ACCELERATE_LAYERS(ACCELERATE_DECLARE)
#undef ACCELERATE_DECLARE

std::vector<LayerKind>& layer_kinds() {
#define ACCELERATE_ROW(name) {#name, choose_##name},
  static std::vector<LayerKind> kinds = {ACCELERATE_LAYERS(ACCELERATE_ROW)};
#undef ACCELERATE_ROW
  return kinds;
}

std::optional<ParallelismConfig> requested_parallelism(const std::optional<ParallelismConfig>& given) {
  if (!given && !parallelism_config_requested()) return std::nullopt;
  return resolve(given.value_or(ParallelismConfig{}));
}

namespace {

void check_axes(const ParallelismConfig& config, const ChosenEngine& engine) {
  const auto check = [&](bool used, const char* axis, int64_t size, const char* what) {
    if (used && !engine.splits(axis))
      raise<ConfigError>(
          "Accelerator: the parallelism configuration has {}_size {}, but {} parallelism is not in this version, "
          "expected 1; dp_replicate_size and dp_shard_size are here, and dp_shard_size also makes room for a model "
          "that is too large for one rank",
          axis, size, what);
  };
  check(config.tp_enabled(), "tp", *config.tp_size, "tensor");
  check(config.cp_enabled(), "cp", *config.cp_size, "context");
  check(config.sp_enabled(), "sp", *config.sp_size, "sequence");
}

}  // namespace

std::vector<comm::AxisSize> axes_of(const std::optional<ParallelismConfig>& config, int64_t ranks) {
  using comm::Axis;
  const auto sizes = config.value_or(ParallelismConfig{});
  const int64_t rest = ranks / sizes.total_size();
  return {{Axis::dp_replicate, sizes.dp_replicate_size.value_or(1) * rest},
          {Axis::dp_shard, sizes.dp_shard_size.value_or(1)},
          {Axis::cp, sizes.cp_size.value_or(1)},
          {Axis::sp, sizes.sp_size.value_or(1)},
          {Axis::tp, sizes.tp_size.value_or(1)}};
}

namespace {

[[noreturn]] void nothing_to_stand_for(const char* what) {
  raise<ConfigError>(
      "prepare: found a {}, which stands for what a DeepSpeed configuration names, and there is none, expected an "
      "object of the program's own, or AcceleratorOptions::deepspeed_plugin (`accelerate launch --use_deepspeed`)",
      what);
}

}  // namespace

std::optional<RunRules> ChosenLayer::hear(const PrepareFacts&, int64_t) { return std::nullopt; }
std::shared_ptr<torch::optim::Optimizer> ChosenLayer::make_optimizer(const DummyOptim&) const {
  nothing_to_stand_for("DummyOptim");
}
optim::Scheduler ChosenLayer::make_scheduler(const DummyScheduler&, torch::optim::Optimizer&) const {
  nothing_to_stand_for("DummyScheduler");
}

ChosenEngine::ChosenEngine(std::vector<std::unique_ptr<ChosenLayer>> layers) : layers_(std::move(layers)) {
  const auto joins =
      std::find_if(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->joins_data(); });
  if (joins == layers_.end())
    throw InternalError("Accelerator: no layer joins the data of the ranks, expected one of layer_kinds() to");
  data_ = joins->get();
}
std::optional<DistributedType> ChosenEngine::distributed_type() const {
  for (const auto& layer : layers_)
    if (const auto type = layer->distributed_type()) return type;
  return std::nullopt;
}
std::optional<StateDictType> ChosenEngine::state_dict_type() const {
  for (const auto& layer : layers_)
    if (const auto type = layer->state_dict_type()) return type;
  return std::nullopt;
}
bool ChosenEngine::splits(const std::string& axis) const {
  return std::any_of(layers_.begin(), layers_.end(), [&](const auto& layer) { return layer->splits(axis); });
}
optim::Scheduler ChosenEngine::make_scheduler(const DummyScheduler& dummy, torch::optim::Optimizer& optimizer) const {
  return data_->make_scheduler(dummy, optimizer);
}
std::vector<comm::AxisSize> ChosenEngine::axes(const std::optional<ParallelismConfig>& config,
                                               const comm::Group& all) const {
  for (const auto& layer : layers_)
    if (auto axes = layer->axes(all); !axes.empty()) return axes;
  return axes_of(config, all.world_size());
}
void ChosenEngine::set_precision(PrecisionType mixed_precision) {
  for (const auto& layer : layers_) layer->set_precision(mixed_precision);
}
void ChosenEngine::gather_in_fp8(const std::vector<std::string>& weights) {
  for (const auto& layer : layers_) layer->gather_in_fp8(weights);
}
std::vector<Receipt> ChosenEngine::receipts() const {
  std::vector<Receipt> all;
  for (const auto& layer : layers_)
    for (auto& receipt : layer->receipts()) all.push_back(std::move(receipt));
  return all;
}
bool ChosenEngine::places_models() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->places_models(); });
}

namespace {

/// The layer that joins the data averages every gradient over all ranks that read other samples.
void check_all_hold_alike(const std::vector<Held>& given) {
  for (const Held& held : given) {
    const auto& mesh = held.mesh ? *held.mesh : comm::mesh();
    const int64_t alike = mesh.size(comm::kTokens - held.cut), all = comm::mesh().size(comm::kTokens);
    if (held.whole.is_same(held.tensor) || alike == all) continue;
    raise<ConfigError>(
        "prepare: of the {} ranks that read other samples, {} have the same elements of parameter '{}', expected all: "
        "averages of gradients over some of them are not in this version",
        all, alike, held.names.front());
  }
}

}  // namespace

std::shared_ptr<Engine> ChosenEngine::make(const ModelRef& model, const at::Device& device,
                                           bool evaluation_mode) const {
  std::vector<std::unique_ptr<Layer>> layers;
  auto given = whole_tensors(model.parameters());
  for (const auto& chosen : layers_) {
    chosen->hand_on(given);
    if (chosen.get() == data_) check_all_hold_alike(given);
    if (auto layer = chosen->make(model, device, evaluation_mode, given)) {
      if (layer->cuts()) given = layer->held();
      layers.push_back(std::move(layer));
    }
  }
  return layers.empty() ? nullptr : std::make_shared<Engine>(std::move(layers));
}

namespace {

void check_plugins(const EngineRequest& request) {
  std::set<std::type_index> seen;
  for (size_t i = 0; i < request.plugins.size(); ++i) {
    const auto& type = request.plugins[i].type();
    if (!seen.insert(type).second)
      raise<ConfigError>("Accelerator: layer_plugins has two of {}, expected one of each type",
                         c10::demangle(type.name()));
    if (!request.taken.contains(i))
      raise<ConfigError>(
          "Accelerator: layer_plugins has a {}, which no layer of this run takes, expected plugins of layers that are "
          "here and go together; leave it out",
          c10::demangle(type.name()));
  }
}

}  // namespace

std::unique_ptr<ChosenEngine> choose_engine(const EngineRequest& request) {
  std::vector<std::unique_ptr<ChosenLayer>> layers;
  bool joined = false;
  for (const auto& kind : layer_kinds()) {
    auto chosen = kind.choose(request);
    if (!chosen || (joined && chosen->joins_data())) continue;
    joined = joined || chosen->joins_data();
    layers.push_back(std::move(chosen));
  }
  check_plugins(request);
  auto engine = std::make_unique<ChosenEngine>(std::move(layers));
  if (request.parallelism) check_axes(*request.parallelism, *engine);
  return engine;
}

}  // namespace accelerate::parallel
