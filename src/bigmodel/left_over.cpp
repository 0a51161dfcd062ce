#include "bigmodel/left_over.hpp"

#include <ATen/ops/equal.h>

#include <algorithm>

#include "accelerate/bigmodel/loading.hpp"
#include "bigmodel/loading_plan.hpp"
#include "formats/weight_names.hpp"

namespace accelerate::bigmodel {
namespace {

bool is_tied_head(const std::string& name, const checkpointing::StoredTensors& tensors) {
  if (name != "lm_head.weight" && name != "embed_out.weight") return false;
  const auto& head = tensors.at(name);
  return std::ranges::any_of(tensors, [&](const auto& item) {
    const auto& [path, words] = item;
    return (path.ends_with("embed_tokens.weight") || path.ends_with("wte.weight") ||
            path.ends_with("embed_in.weight") || path.ends_with("shared.weight")) &&
           words.sizes == head.sizes && at::equal(head.read_whole(), words.read_whole().to(head.dtype));
  });
}

}  // namespace

bool has_left_over_only(const ModelRef& model, const std::filesystem::path& checkpoint) {
  const auto check = check_state_dict(model, checkpoint);
  if (check.unexpected.empty() || !check.missing.empty() || !check.mismatched.empty()) return false;
  const auto tensors = open_checkpoint(checkpoint).tensors;
  return std::ranges::all_of(check.unexpected, [&](const std::string& name) {
    return formats::is_worked_out(name) || is_tied_head(name, tensors);
  });
}

}  // namespace accelerate::bigmodel
