#include "run_state/own_pieces.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

c10::IValue own_pieces(const std::vector<HeldTensor>& holdings, const c10::IValue& state) {
  c10::impl::GenericList begins(c10::AnyType::get());
  for (const auto& holding : holdings) begins.push_back(holding.place.begin);
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("world_size", comm::world_size());
  dict.insert("rank", comm::rank());
  dict.insert("begins", begins);
  dict.insert("state", state);
  return dict;
}

c10::IValue load_own_pieces(const std::vector<HeldTensor>& holdings, const std::filesystem::path& file) {
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>(
        "load '{}': {}. LOCAL_STATE_DICT is the pieces of one run as they are; save FULL_STATE_DICT or "
        "SHARDED_STATE_DICT to load in another way.",
        file.string(), what);
  };
  const auto object = checkpointing::load_object(file);
  if (!object.isGenericDict()) fail("found " + object.tagKind() + ", expected the pieces of a rank");
  const auto dict = object.toGenericDict();
  for (const char* key : {"world_size", "rank", "begins", "state"})
    if (!dict.contains(key))
      fail(fmt::format("found a dict without '{}', expected the pieces of a rank as they are written here", key));
  const auto world = dict.at("world_size"), begins = dict.at("begins");
  if (!world.isInt() || world.toInt() != comm::world_size() || !begins.isList())
    fail(fmt::format("found the pieces of {} ranks, expected those of {}",
                     world.isInt() ? std::to_string(world.toInt()) : world.tagKind(), comm::world_size()));
  const auto saved = begins.toListRef();
  bool same = saved.size() == holdings.size();
  for (size_t i = 0; same && i < holdings.size(); ++i)
    same = saved[i].isInt() && saved[i].toInt() == holdings[i].place.begin;
  if (!same)
    fail("found pieces that begin elsewhere than this model's; the model or the plugin's wrap policy has changed");
  return dict.at("state");
}

}  // namespace accelerate::run_state
