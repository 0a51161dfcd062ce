#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "accelerate/model/submodule.hpp"
#include "accelerate/parallel/zero_memory.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

template <class Options> void check(const char* function, const Options& o, int64_t largest_layer) {
  constexpr int64_t kMost = int64_t{1} << 50;  // parameters, whose bytes times 18 can be counted
  for (const auto& [name, value, least, most] :
       {std::tuple("total_params", o.total_params, int64_t{0}, kMost),
        std::tuple("largest_layer_params", largest_layer, int64_t{0}, kMost),
        std::tuple("num_gpus_per_node", o.num_gpus_per_node, int64_t{1}, int64_t{1} << 20),
        std::tuple("num_nodes", o.num_nodes, int64_t{1}, int64_t{1} << 20)})
    if (value < least || value > most)
      raise<ConfigError>("{}: {} is {}, expected {} to {}", function, name, value, least, most);
  if (!(o.additional_buffer_factor >= 0 && o.additional_buffer_factor < 1000))
    raise<ConfigError>("{}: additional_buffer_factor is {}, expected 0 to 1000", function, o.additional_buffer_factor);
}

double number(int64_t count) { return static_cast<double>(count); }
/// Bytes, of which a rank has its share.
int64_t shared(int64_t bytes, int64_t ranks) { return static_cast<int64_t>(number(bytes) / number(ranks)); }
int64_t on_host(double bytes_per_param, int64_t params, double factor) {
  constexpr double kMost = 9e18;
  const double bytes = number(params) * bytes_per_param * factor;
  if (bytes > kMost)
    raise<ConfigError>(
        "estimate_zero_model_states_mem_needs: {:g} bytes on one host are more than can be counted, expected fewer "
        "parameters, processes, or a smaller additional_buffer_factor",
        bytes);
  return static_cast<int64_t>(bytes);
}

std::string row(const ZeroMemoryNeeds& needs, const std::string& options) {
  constexpr double kGiB = 1 << 30;
  return fmt::format(" {:7.2f}GB | {:6.2f}GB | {}\n", number(needs.cpu) / kGiB, number(needs.gpu) / kGiB, options);
}
const char* place(bool on_cpu) { return on_cpu ? "OffloadDeviceEnum.cpu" : "none"; }

template <class Options> std::string head(const Options& o, const std::string& more) {
  const auto several = [](int64_t count) { return count > 1 ? "s" : ""; };
  return fmt::format(
      "Estimated memory needed for params, optim states and gradients for a:\n"
      "HW: Setup with {} node{}, {} GPU{} per node.\n"
      "SW: Model with {}M total params{}.\n"
      "  per CPU  |  per GPU |   Options\n",
      o.num_nodes, several(o.num_nodes), o.num_gpus_per_node, several(o.num_gpus_per_node), o.total_params / 1'000'000,
      more);
}

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

struct Sizes {
  int64_t total = 0, largest_layer = 0;
};
Sizes sizes_of(const ModelRef& model) {
  Sizes sizes;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& module : model.submodules()) {
    int64_t own = 0;
    for (const auto& [name, tensor] : module.parameters) {
      own += tensor.numel();
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) sizes.total += tensor.numel();
    }
    sizes.largest_layer = std::max(sizes.largest_layer, own);
  }
  return sizes;
}

}  // namespace

ZeroMemoryNeeds estimate_zero2_model_states_mem_needs(const Zero2MemoryOptions& o) {
  check("estimate_zero2_model_states_mem_needs", o, 0);
  const int64_t ranks = o.num_gpus_per_node * o.num_nodes;
  if (o.cpu_offload)
    return {.cpu = on_host(number(std::max<int64_t>(4 * ranks, 16)), o.total_params, o.additional_buffer_factor),
            .gpu = 2 * o.total_params};
  return {.cpu = on_host(4 * number(o.num_gpus_per_node), o.total_params, o.additional_buffer_factor),
          .gpu = 2 * o.total_params + shared(18 * o.total_params, ranks)};
}

ZeroMemoryNeeds estimate_zero3_model_states_mem_needs(const Zero3MemoryOptions& o) {
  check("estimate_zero3_model_states_mem_needs", o, o.largest_layer_params);
  const int64_t ranks = o.num_gpus_per_node * o.num_nodes, layer = 4 * o.largest_layer_params;
  const double of_host = 1 / number(o.num_nodes), copies = 4 * number(o.num_gpus_per_node);
  // The bytes that lie on the host for good, or those that are there while each process of it makes the whole model.
  const auto cpu = [&](double kept) {
    return on_host(o.zero_init ? kept : std::max(copies, kept), o.total_params, o.additional_buffer_factor);
  };
  if (o.cpu_offload && o.cpu_offload_params) return {.cpu = cpu(18 * of_host), .gpu = layer, .largest_layer = layer};
  if (o.cpu_offload)
    return {.cpu = cpu(16 * of_host), .gpu = layer + shared(2 * o.total_params, ranks), .largest_layer = layer};
  return {.cpu = on_host(copies, o.zero_init ? o.largest_layer_params : o.total_params, o.additional_buffer_factor),
          .gpu = layer + shared(18 * o.total_params, ranks),
          .largest_layer = layer};
}

std::string zero2_memory_table(const Zero2MemoryOptions& options) {
  std::string text = head(options, "");
  for (const bool offload : {true, false}) {
    Zero2MemoryOptions one = options;
    one.cpu_offload = offload;
    text += row(estimate_zero2_model_states_mem_needs(one), fmt::format("offload_optimizer={}", place(offload)));
  }
  return text;
}

std::string zero3_memory_table(const Zero3MemoryOptions& options) {
  std::string text = head(options, fmt::format(", {}M largest layer params", options.largest_layer_params / 1'000'000));
  for (const auto& [params, optimizer] : {std::pair(true, true), std::pair(false, true), std::pair(false, false)})
    for (const bool zero_init : {true, false}) {
      Zero3MemoryOptions one = options;
      one.cpu_offload_params = params, one.cpu_offload = optimizer, one.zero_init = zero_init;
      text += row(estimate_zero3_model_states_mem_needs(one),
                  fmt::format("offload_param={}, offload_optimizer={}, zero_init={}", place(params), place(optimizer),
                              static_cast<int>(zero_init)));
    }
  return text;
}

void estimate_zero2_model_states_mem_needs_all_cold(int64_t total_params, int64_t num_gpus_per_node, int64_t num_nodes,
                                                    double additional_buffer_factor) {
  print(zero2_memory_table({.total_params = total_params,
                            .num_gpus_per_node = num_gpus_per_node,
                            .num_nodes = num_nodes,
                            .additional_buffer_factor = additional_buffer_factor}));
}
void estimate_zero3_model_states_mem_needs_all_cold(int64_t total_params, int64_t largest_layer_params,
                                                    int64_t num_gpus_per_node, int64_t num_nodes,
                                                    double additional_buffer_factor) {
  print(zero3_memory_table({.total_params = total_params,
                            .largest_layer_params = largest_layer_params,
                            .num_gpus_per_node = num_gpus_per_node,
                            .num_nodes = num_nodes,
                            .additional_buffer_factor = additional_buffer_factor}));
}
void estimate_zero2_model_states_mem_needs_all_live(const ModelRef& model, int64_t num_gpus_per_node, int64_t num_nodes,
                                                    double additional_buffer_factor) {
  estimate_zero2_model_states_mem_needs_all_cold(sizes_of(model).total, num_gpus_per_node, num_nodes,
                                                 additional_buffer_factor);
}
void estimate_zero3_model_states_mem_needs_all_live(const ModelRef& model, int64_t num_gpus_per_node, int64_t num_nodes,
                                                    double additional_buffer_factor) {
  const Sizes sizes = sizes_of(model);
  estimate_zero3_model_states_mem_needs_all_cold(sizes.total, sizes.largest_layer, num_gpus_per_node, num_nodes,
                                                 additional_buffer_factor);
}

}  // namespace accelerate
