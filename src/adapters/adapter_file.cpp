#include "adapters/adapter_file.hpp"

#include <ATen/ops/equal.h>

#include <string_view>

#include "accelerate/formats/safetensors.hpp"
#include "formats/torch_archive.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {

AdapterFile read_adapter(const std::filesystem::path& folder) {
  const auto loaded = read_config(folder / "adapter_config.json");
  AdapterFile adapter{.config = loaded.config, .whole_names = loaded.whole_names};
  // As PEFT looks for them; until 2024 it wrote the latter.
  adapter.file = folder / "adapter_model.safetensors";
  const auto old = folder / "adapter_model.bin";
  const bool is_old = !is_there(adapter.file) && is_there(old);
  if (is_old) adapter.file = old;
  const auto where = "load_adapter: '" + adapter.file.string() + "'";
  for (const auto& [name, tensor] : is_old ? formats::load_archive(old) : load_safetensors(adapter.file)) {
    std::string_view path = name;
    const auto take = [&](std::string_view end) {
      if (!path.ends_with(end)) return false;
      path.remove_suffix(end.size());
      return true;
    };
    if (path.starts_with(kPrefix)) path.remove_prefix(std::string_view(kPrefix).size());
    else path = {};
    const bool is_a = take(".lora_A.weight"), is_b = !is_a && take(".lora_B.weight");
    if (!is_a && !is_b && take(kRows)) {
      adapter.rows[std::string(path)] = tensor;
    } else if (path.empty() || (!is_a && !is_b && path.find("lora_") != path.npos)) {
      raise<CheckpointError>(
          "{}: found '{}', expected {}<module>.lora_A.weight and .lora_B.weight, and tensors of the model itself",
          where, name, kPrefix);
    } else if (!is_a && !is_b) {
      std::string own(path);
      const auto cut = [&own](std::string_view part) {
        const auto at = own.find(part);
        if (at != own.npos) own.erase(at, part.size());
      };
      // The weights with which the wrapped module computes while the adapter is off are the model's.
      if (own.find(".original_module.") != own.npos) continue;
      cut(kBaseLayer);
      cut(".modules_to_save");  // with biases, PEFT writes values of such a module a second time
      const auto [there, added] = adapter.whole.emplace(own, tensor);
      if (!added && !at::equal(there->second, tensor))
        raise<CheckpointError>("{}: found two different values of '{}', expected one", where, own);
    } else {
      auto& pair = adapter.pairs[std::string(path)];
      (is_a ? pair.first : pair.second) = tensor;
    }
  }
  std::erase_if(adapter.pairs, [&](const auto& item) { return loaded.leaves_out(item.first); });
  if (adapter.pairs.empty())
    raise<CheckpointError>("{}: found no tensors{}, expected an adapter's", where,
                           loaded.layers ? " of the layers that layers_to_transform names" : "");
  for (const auto& [path, pair] : adapter.pairs) {
    const auto& [a, b] = pair;
    if (!a.defined() || !b.defined())
      raise<CheckpointError>("{}: found no {} of '{}', expected both lora_A and lora_B", where,
                             a.defined() ? "lora_B" : "lora_A", path);
    if (!a.is_floating_point() || !b.is_floating_point())
      raise<CheckpointError>("{}: found {} in '{}', expected floating point", where,
                             c10::toString((a.is_floating_point() ? b : a).scalar_type()), path);
    int64_t rank = 0;
    try {
      rank = rank_of(adapter.config, path);
      alpha_of(adapter.config, path);  // whose patterns may take too many steps, too
    } catch (const ConfigError& error) {
      raise<CheckpointError>("{}: {}", where, error.what());
    }
    if (a.dim() != 2 || b.dim() != 2 || a.size(0) != rank || b.size(1) != rank)
      raise<CheckpointError>(
          "{}: found lora_A {} and lora_B {} of '{}', expected [{}, inputs] and [outputs, {}], as adapter_config.json "
          "has that rank for it",
          where, a.sizes(), b.sizes(), path, rank, rank);
  }
  return adapter;
}

}  // namespace accelerate::detail
