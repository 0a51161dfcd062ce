#include "accelerate/utils/kwargs_dict.hpp"

#include <algorithm>
#include <array>
#include <cctype>

#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

template <class T> KwargsValue or_null(const std::optional<T>& field) {
  return field ? KwargsValue(*field) : KwargsValue(nullptr);
}

}  // namespace

TorchDynamoPlugin resolve(TorchDynamoPlugin plugin) {
  constexpr std::array kBackends = {
      "no",          "eager",  "aot_eager", "inductor", "aot_ts_nvfuser",          "nvprims_nvfuser",     "cudagraphs",
      "ofi",         "fx2trt", "onnxrt",    "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm",
      "hpu_backend", "neuron"};
  if (!plugin.backend) plugin.backend = environment::text("ACCELERATE_DYNAMO_BACKEND").value_or("no");
  const std::string given = *plugin.backend;
  std::transform(plugin.backend->begin(), plugin.backend->end(), plugin.backend->begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (std::find(kBackends.begin(), kBackends.end(), *plugin.backend) == kBackends.end())
    raise<ConfigError>("TorchDynamoPlugin: backend is '{}', expected one of {}; see ACCELERATE_DYNAMO_BACKEND", given,
                       fmt::join(kBackends, ", "));
  if (!plugin.mode) plugin.mode = environment::text("ACCELERATE_DYNAMO_MODE").value_or("default");
  if (!plugin.fullgraph) plugin.fullgraph = environment::flag("ACCELERATE_DYNAMO_USE_FULLGRAPH").value_or(false);
  if (!plugin.use_regional_compilation)
    plugin.use_regional_compilation = environment::flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION").value_or(false);
  if (!plugin.dynamic) plugin.dynamic = environment::flag("ACCELERATE_DYNAMO_USE_DYNAMIC");
  return plugin;
}

KwargsDict to_dict(const DistributedDataParallelKwargs& kwargs) {
  return {{"dim", kwargs.dim},
          {"broadcast_buffers", kwargs.broadcast_buffers},
          {"bucket_cap_mb", kwargs.bucket_cap_mb},
          {"find_unused_parameters", kwargs.find_unused_parameters},
          {"check_reduction", kwargs.check_reduction},
          {"gradient_as_bucket_view", kwargs.gradient_as_bucket_view},
          {"static_graph", kwargs.static_graph}};
}

KwargsDict to_dict(const GradScalerKwargs& kwargs) {
  return {{"init_scale", kwargs.init_scale},
          {"growth_factor", kwargs.growth_factor},
          {"backoff_factor", kwargs.backoff_factor},
          {"growth_interval", kwargs.growth_interval},
          {"enabled", kwargs.enabled}};
}

// The same default as PartialState's.
KwargsDict to_dict(const InitProcessGroupKwargs& kwargs) {
  const std::chrono::duration<double> timeout =
      kwargs.timeout.value_or(std::chrono::seconds(kwargs.backend == "nccl" ? 600 : 1800));
  return {{"backend", kwargs.backend},
          {"init_method", kwargs.init_method.empty() ? KwargsValue(nullptr) : KwargsValue(kwargs.init_method)},
          {"timeout", timeout.count()}};
}

KwargsDict to_dict(const AutocastKwargs& kwargs) {
  return {{"enabled", kwargs.enabled}, {"cache_enabled", or_null(kwargs.cache_enabled)}};
}

KwargsDict to_dict(const ProfileKwargs& kwargs) {
  return {{"activities", or_null(kwargs.activities)}, {"schedule_option", or_null(kwargs.schedule_option)},
          {"record_shapes", kwargs.record_shapes},    {"profile_memory", kwargs.profile_memory},
          {"with_stack", kwargs.with_stack},          {"with_flops", kwargs.with_flops},
          {"with_modules", kwargs.with_modules},      {"output_trace_dir", or_null(kwargs.output_trace_dir)}};
}

KwargsDict to_dict(const TorchDynamoPlugin& plugin) {
  return {{"backend", or_null(plugin.backend)},
          {"mode", or_null(plugin.mode)},
          {"fullgraph", or_null(plugin.fullgraph)},
          {"dynamic", or_null(plugin.dynamic)},
          {"disable", plugin.disable},
          {"use_regional_compilation", or_null(plugin.use_regional_compilation)}};
}

KwargsDict to_kwargs(const TorchDynamoPlugin& plugin) {
  KwargsDict changed = to_dict(plugin);
  const TorchDynamoPlugin defaults{
      .backend = "no", .mode = "default", .fullgraph = false, .use_regional_compilation = false};
  for (const auto& [name, value] : to_dict(defaults))
    if (changed.at(name) == value) changed.erase(name);
  changed.erase("use_regional_compilation");
  return changed;
}

}  // namespace accelerate
