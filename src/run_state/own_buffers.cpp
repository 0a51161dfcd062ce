#include "run_state/own_buffers.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "accelerate/comm.hpp"
#include "formats/dcp/box.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using Buffers = std::map<std::string, at::Tensor>;

fs::path buffers_file(const fs::path& folder, int64_t rank) { return folder / fmt::format("buffers_{}.bin", rank); }

/// Not those of a model whose next forward replaces them, nor of replicas that train apart, whose own states have them.
bool keeps_buffers(const detail::PreparedModel& model) {
  return !model.engine || !(model.engine->shares_buffers() || model.engine->apart());
}

bool same(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && at::equal(one, other);
}

}  // namespace

void save_own_buffers(const RunState& run, const fs::path& folder) {
  if (comm::world_size() == 1) return;
  std::vector<Buffers> own;
  for (const auto& model : run.models) {
    own.emplace_back();
    if (!keeps_buffers(*model)) continue;
    for (const auto& [name, buffer] : model->model.buffers()) own.back().emplace(name, buffer.detach().cpu());
  }
  auto first = own;
  broadcast_object_list(first);
  for (size_t i = 0; i < own.size(); ++i)
    std::erase_if(own[i], [&](const auto& item) {
      const auto found = first[i].find(item.first);
      return found != first[i].end() && same(found->second, item.second);
    });
  // All write a file where any of them has something to say, so that one that is lost is missed.
  const bool differs = std::any_of(own.begin(), own.end(), [](const Buffers& one) { return !one.empty(); });
  const auto of_ranks = gather_object(std::vector<int64_t>{differs});
  if (std::find(of_ranks.begin(), of_ranks.end(), 1) == of_ranks.end()) return;
  on_all_ranks_or_throw([&] {
    c10::List<c10::IValue> models(c10::AnyType::get());
    for (size_t i = 0; i < own.size(); ++i)
      models.push_back(keeps_buffers(*run.models[i]) ? checkpointing::to_dict(own[i]) : c10::IValue());
    c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
    file.insert("num_processes", comm::world_size());
    file.insert("buffers", models);
    checkpointing::save_object(file, buffers_file(folder, comm::rank()));
  });
}

std::vector<std::function<void()>> stage_own_buffers(const RunState& run, const std::vector<ModelRef>& models,
                                                     const fs::path& folder) {
  const auto own = buffers_file(folder, comm::rank()), first = buffers_file(folder, 0);
  if (!fs::exists(own) && !fs::exists(first)) return {};
  const auto& found = fs::exists(own) ? own : first;
  int64_t ranks = 0;
  std::vector<std::optional<Buffers>> saved;
  try {
    const auto dict = checkpointing::load_object(found).toGenericDict();
    ranks = dict.at("num_processes").toInt();
    for (const c10::IValue& model : dict.at("buffers").toListRef()) {
      saved.emplace_back();
      if (model.isNone()) continue;
      saved.back().emplace();
      for (const auto& item : model.toGenericDict())
        saved.back()->emplace(item.key().toStringRef(), item.value().toTensor());
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {  // LibTorch's: a value of another type, a key that is not there
    raise<CheckpointError>("load '{}': it is damaged or not written by save_state", found.string());
  }
  if (ranks != comm::world_size()) {
    if (comm::rank() == 0)
      logs::warn("accelerate.run_state",
                 "load_state: each of the {} ranks that saved the checkpoint had buffers of its own; the {} here all "
                 "go on with those of rank 0",
                 ranks, comm::world_size());
    return {};
  }
  if (!fs::exists(own)) checkpointing::load_object(own);  // says what is missing

  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  parallel::Engines keep;
  for (size_t i = 0; i < saved.size() && i < run.models.size(); ++i) {
    const auto& model = run.models[i]->model;
    if (!saved[i] ||
        std::none_of(models.begin(), models.end(), [&](const auto& one) { return one.identity() == model.identity(); }))
      continue;
    if (const auto& engine = run.models[i]->engine) keep.push_back(engine);
    Buffers here;
    for (const auto& [name, buffer] : model.buffers()) here.emplace(name, buffer.detach());
    for (const auto& [name, value] : *saved[i]) {
      const auto buffer = here.find(name);
      if (buffer == here.end() || buffer->second.sizes() != value.sizes())
        raise<CheckpointError>("load '{}': found a buffer '{}' of size {}, which the model has {}; it has changed",
                               own.string(), name, formats::to_string(value.sizes().vec()),
                               buffer == here.end() ? "not" : "in " + formats::to_string(buffer->second.sizes().vec()));
      copies.emplace_back(buffer->second, value);
    }
  }
  std::vector<std::function<void()>> take;
  take.push_back([keep = std::move(keep), copies = std::move(copies)] {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, value] : copies) at::Tensor(buffer).copy_(value);
    for (const auto& engine : keep) engine->keep_own_buffers();
  });
  return take;
}

}  // namespace accelerate::run_state
