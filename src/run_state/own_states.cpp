#include "run_state/own_states.hpp"

#include <ATen/core/Dict.h>

#include <exception>
#include <map>

#include "accelerate/comm.hpp"
#include "parallel/layer.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

namespace fs = std::filesystem;

fs::path file_of(const fs::path& folder, int64_t rank) { return folder / fmt::format("own_states_{}.bin", rank); }

std::vector<OwnState> all_of(const RunState& run) {
  std::vector<OwnState> all(run.own_states.begin(), run.own_states.end());
  for (size_t i = 0; i < run.models.size(); ++i) {
    const auto& engine = run.models[i]->engine;
    if (!engine) continue;
    for (const auto& layer : engine->layers())
      all.push_back(
          {.name = fmt::format("{} of model {}", layer->state_name(), i),
           .save = [engine, &layer = *layer] { return layer.own_state(); },
           .stage = [engine, &layer = *layer](const c10::IValue& state) { return layer.stage_own_state(state); }});
  }
  return all;
}

}  // namespace

void save_own_states(const RunState& run, const fs::path& folder) {
  c10::impl::GenericDict states(c10::StringType::get(), c10::AnyType::get());
  for (const auto& own : all_of(run))
    if (auto state = own.save(); !state.isNone()) states.insert(own.name, std::move(state));
  if (states.empty()) return;
  c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
  file.insert("num_processes", comm::world_size());
  file.insert("states", states);
  checkpointing::save_object(file, file_of(folder, comm::rank()));
}

std::vector<std::function<void()>> stage_own_states(const RunState& run, const fs::path& folder) {
  const auto own = file_of(folder, comm::rank()), first = file_of(folder, 0);
  std::map<std::string, c10::IValue> saved;
  if (fs::exists(own) || fs::exists(first)) {
    const auto& found = fs::exists(own) ? own : first;
    const auto file = checkpointing::load_object(found);
    try {
      const auto dict = file.toGenericDict();
      if (const int64_t ranks = dict.at("num_processes").toInt(); ranks != comm::world_size())
        raise<CheckpointError>(
            "load '{}': it was saved by {} ranks, each with a state of its own (what compression of gradients has "
            "lost, or a model that trains apart), expected as many and not {}; delete the files own_states_*.bin, and "
            "checkpoint.json, which lists them, to begin without these states",
            found.string(), ranks, comm::world_size());
      for (const auto& item : dict.at("states").toGenericDict()) saved.emplace(item.key().toStringRef(), item.value());
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {  // LibTorch's: a value of another type, a key that is not there
      raise<CheckpointError>("load '{}': it is damaged or not written by save_state", found.string());
    }
    if (!fs::exists(own)) checkpointing::load_object(own);  // says what is missing
  }
  std::vector<std::function<void()>> take;
  for (const auto& state : all_of(run)) {
    const auto item = saved.find(state.name);
    if (item == saved.end()) {
      if (comm::rank() == 0 && !state.save().isNone())
        logs::warn("accelerate.run_state",
                   "load_state: the checkpoint has no state of {} that this run keeps beside it; it stays as it is, so "
                   "that the run does not go on exactly as the one that was saved",
                   state.name);
      continue;
    }
    take.push_back(state.stage(item->second));
    saved.erase(item);
  }
  if (!saved.empty() && comm::rank() == 0)
    logs::warn("accelerate.run_state",
               "load_state: the checkpoint has a state of {}, which nothing here takes up. A LocalSGD must be there "
               "when load_state() is called.",
               saved.begin()->first);
  return take;
}

}  // namespace accelerate::run_state
