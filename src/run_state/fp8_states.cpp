#include "run_state/fp8_states.hpp"

#include <ATen/core/Dict.h>
#include <ATen/ops/isfinite.h>

#include <exception>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/precision/fp8.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using Dict = c10::impl::GenericDict;

Dict empty_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }

fs::path file_of(const fs::path& folder) { return folder / "fp8_states.bin"; }

/// The recipe that scales depend on: a run that goes on with another one has no scales.
std::map<std::string, int64_t> recipe_of(const FP8Training& training) {
  const FP8Recipe& recipe = training.recipe();
  return {{"backend", static_cast<int64_t>(recipe.backend)},
          {"fp8_format", static_cast<int64_t>(recipe.fp8_format)},
          {"amax_history_len", recipe.amax_history_len},
          {"amax_compute_algo", static_cast<int64_t>(recipe.amax_compute_algo)},
          {"margin", recipe.margin},
          {"interval", recipe.interval}};
}

/// The user's name for it.
std::string shown(const std::string& field, int64_t value) {
  using Names = std::vector<const char*>;
  static const std::map<std::string, Names> all{{"backend", {"TE", "AO", "MSAMP"}},
                                                {"fp8_format", {"HYBRID", "E4M3", "E5M2"}},
                                                {"amax_compute_algo", {"most_recent", "max"}}};
  const auto names = all.find(field);
  if (names == all.end()) return std::to_string(value);
  const bool known = value >= 0 && value < static_cast<int64_t>(names->second.size());
  return known ? names->second[static_cast<size_t>(value)] : fmt::format("unknown ({})", value);
}

void check_recipe(const std::string& file, size_t model, const FP8Training& training, const Dict& saved) {
  for (const auto& [field, value] : recipe_of(training))
    if (const int64_t before = saved.at(field).toInt(); before != value)
      raise<CheckpointError>(
          "load '{}': the fp8 recipe of prepared model {} had {} = {} when it was saved, and now it is {}, so that the "
          "scales in it are not this recipe's, expected the same; set the recipe as it was, or delete the file to "
          "begin with new scales",
          file, model, field, shown(field, before), shown(field, value));
}

/// Numbers are multiplied by it, and codes by its inverse.
bool is_scale(const at::Tensor& value) {
  return at::isfinite(value).all().item<bool>() && value.gt(0).all().item<bool>() &&
         at::isfinite(value.reciprocal()).all().item<bool>();
}

std::map<std::string, at::Tensor> tensors_of(const std::string& file, const Dict& saved) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : saved) {
    const std::string name = item.key().toStringRef();
    const at::Tensor value = item.value().toTensor();
    if (name.find(".scale") != std::string::npos && !is_scale(value))
      raise<CheckpointError>(
          "load '{}': '{}' holds a scale that is zero, negative, too small to divide by or no number, expected finite "
          "scales above 0; the file is damaged. Take another checkpoint, or delete the file to begin with new scales",
          file, name);
    // After a step that overflowed it is infinite or NaN, and passed over when the next scale is made.
    if (name.find(".amax_history") != std::string::npos && value.lt(0).any().item<bool>())
      raise<CheckpointError>(
          "load '{}': '{}' holds a negative number, expected the largest absolute values of passes; the file is "
          "damaged. Take another checkpoint, or delete the file to begin with new scales",
          file, name);
    state.emplace(name, value);
  }
  return state;
}

}  // namespace

void save_fp8_states(const RunState& run, const fs::path& folder) {
  Dict file = empty_dict();
  for (size_t i = 0; i < run.models.size(); ++i) {
    const auto& training = run.models[i]->fp8;
    if (!training) continue;
    const auto state = training->state_dict();
    if (state.empty()) continue;
    Dict recipe = empty_dict(), one = empty_dict();
    for (const auto& [field, value] : recipe_of(*training)) recipe.insert(field, value);
    one.insert("recipe", recipe);
    one.insert("state", checkpointing::to_dict(state));
    file.insert(std::to_string(i), one);
  }
  if (!file.empty()) checkpointing::save_object(file, file_of(folder));
}

std::vector<std::pair<FP8Training*, std::map<std::string, at::Tensor>>> read_fp8_states(const RunState& run,
                                                                                        const fs::path& folder) {
  std::vector<std::pair<FP8Training*, std::map<std::string, at::Tensor>>> states;
  const fs::path path = file_of(folder);
  const std::string file = path.string();
  std::optional<c10::IValue> saved;
  if (fs::exists(path)) saved = checkpointing::load_object(path);
  std::set<std::string> left;
  try {
    if (saved)
      for (const auto& item : saved->toGenericDict()) left.insert(item.key().toStringRef());
    for (size_t i = 0; i < run.models.size(); ++i) {
      const auto& training = run.models[i]->fp8;
      if (!training) continue;
      const std::string key = std::to_string(i);
      if (left.erase(key) == 0) {
        if (comm::rank() == 0 && !training->state_dict().empty())
          logs::warn("accelerate.run_state",
                     "load_state: the checkpoint has no scales of fp8 for prepared model {}, which begin anew: the run "
                     "does not go on exactly as the one that was saved",
                     i);
        continue;
      }
      const auto one = saved->toGenericDict().at(key).toGenericDict();
      check_recipe(file, i, *training, one.at("recipe").toGenericDict());
      states.emplace_back(training.get(), tensors_of(file, one.at("state").toGenericDict()));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {  // LibTorch's: a value of another type, a key that is not there
    raise<CheckpointError>("load '{}': it is damaged or not written by save_state", file);
  }
  if (!left.empty() && comm::rank() == 0)
    logs::warn("accelerate.run_state",
               "load_state: the checkpoint has scales of fp8 for prepared model {}, which computes without them here",
               *left.begin());
  return states;
}

}  // namespace accelerate::run_state
