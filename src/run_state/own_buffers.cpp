#include "run_state/own_buffers.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/dcp/box.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;
using Buffers = std::map<std::string, at::Tensor>;

fs::path buffers_file(const fs::path& folder, int64_t rank) { return folder / fmt::format("buffers_{}.bin", rank); }

at::Tensor bytes_of(const at::Tensor& buffer) { return buffer.contiguous().view({-1}).view(at::kByte); }

bool same(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() &&
         at::equal(bytes_of(one), bytes_of(other));
}

/// The entry of one model in a file.
struct Saved {
  Buffers buffers;      ///< that are not as rank 0's
  bool shared = false;  ///< its engine would have replaced them before the next forward
};

}  // namespace

void save_own_buffers(const RunState& run, const fs::path& folder) {
  if (comm::world_size() == 1) return;
  std::vector<Buffers> own;
  for (const auto& model : run.models) {
    own.emplace_back();
    if (model->engine && model->engine->apart()) continue;  // its own state has them
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
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    c10::List<c10::IValue> models(c10::AnyType::get());
    for (size_t i = 0; i < own.size(); ++i) {
      const auto& engine = run.models[i]->engine;
      c10::impl::GenericDict model(c10::StringType::get(), c10::AnyType::get());
      model.insert("buffers", checkpointing::to_dict(own[i]));
      model.insert("shared", engine && engine->shares_buffers());
      models.push_back(model);
    }
    c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
    file.insert("num_processes", comm::world_size());
    file.insert("models", models);
    checkpointing::save_object(file, buffers_file(folder, comm::rank()));
  });
}

std::vector<std::function<void()>> stage_own_buffers(const RunState& run, const std::vector<ModelRef>& models,
                                                     const fs::path& folder, bool strict) {
  const auto own = buffers_file(folder, comm::rank()), first = buffers_file(folder, 0);
  if (!fs::exists(own) && !fs::exists(first)) return {};
  const auto& found = fs::exists(own) ? own : first;
  int64_t ranks = 0;
  std::vector<Saved> saved;
  try {
    const auto dict = checkpointing::load_object(found).toGenericDict();
    ranks = dict.at("num_processes").toInt();
    for (const c10::IValue& one : dict.at("models").toListRef()) {
      const auto model = one.toGenericDict();
      saved.push_back({.buffers = {}, .shared = model.at("shared").toBool()});
      for (const auto& item : model.at("buffers").toGenericDict())
        saved.back().buffers.emplace(item.key().toStringRef(), item.value().toTensor());
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {  // LibTorch's: a value of another type, a key that is not there
    raise<CheckpointError>("load '{}': it is damaged or not written by save_state", found.string());
  }
  if (ranks != comm::world_size()) {
    if (comm::rank() == 0 && std::any_of(saved.begin(), saved.end(), [](const Saved& one) { return !one.shared; }))
      logs::warn("accelerate.run_state",
                 "load_state: each of the {} ranks that saved the checkpoint had buffers of its own; the {} here all "
                 "go on with those of rank 0",
                 ranks, comm::world_size());
    return {};
  }
  if (!fs::exists(own)) checkpointing::load_object(own);  // says what is missing

  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<std::pair<std::shared_ptr<parallel::Engine>, bool>> shared;
  for (size_t i = 0; i < saved.size() && i < models.size(); ++i) {  // in the order of the models' files
    const auto prepared = run.find(models[i]);
    if (!prepared) continue;
    if (prepared->engine) shared.emplace_back(prepared->engine, saved[i].shared);
    Buffers here;
    for (const auto& [name, buffer] : prepared->model.buffers()) here.emplace(name, buffer.detach());
    for (const auto& [name, value] : saved[i].buffers) {
      const auto buffer = here.find(name);
      if (buffer != here.end() && buffer->second.sizes() == value.sizes()) {
        copies.emplace_back(buffer->second, value);
        continue;
      }
      if (strict)
        raise<CheckpointError>("load '{}': found a buffer '{}' of size {}, which the model has {}; it has changed",
                               own.string(), name, formats::to_string(value.sizes().vec()),
                               buffer == here.end() ? "not" : "in " + formats::to_string(buffer->second.sizes().vec()));
    }
  }
  std::vector<std::function<void()>> take;
  take.push_back([shared = std::move(shared), copies = std::move(copies)] {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, value] : copies) at::Tensor(buffer).copy_(value);
    for (const auto& [engine, value] : shared) engine->set_shares_buffers(value);
  });
  return take;
}

}  // namespace accelerate::run_state
