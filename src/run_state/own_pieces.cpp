#include "run_state/own_pieces.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <algorithm>

#include "accelerate/comm.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

bool are(at::ArrayRef<c10::IValue> found, const std::vector<int64_t>& numbers) {
  return std::equal(found.begin(), found.end(), numbers.begin(), numbers.end(),
                    [](const c10::IValue& one, int64_t number) { return one.isInt() && one.toInt() == number; });
}

}  // namespace

std::vector<int64_t> numbers_of(const parallel::Slice& slice) {
  std::vector<int64_t> numbers{slice.begin, slice.numel};
  numbers.insert(numbers.end(), slice.corner.begin(), slice.corner.end());
  numbers.insert(numbers.end(), slice.sizes.begin(), slice.sizes.end());
  return numbers;
}

c10::IValue own_pieces(const std::vector<parallel::Held>& holdings, const c10::IValue& state) {
  c10::impl::GenericList slices(c10::AnyType::get());
  for (const auto& holding : holdings) slices.push_back(numbers_of(holding.slice));
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("world_size", comm::world_size());
  dict.insert("rank", comm::rank());
  dict.insert("slices", slices);
  dict.insert("state", state);
  return dict;
}

OwnShards::OwnShards(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file) : archive_(file) {
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>(
        "load '{}': {}. LOCAL_STATE_DICT is the pieces of one run as they are; save FULL_STATE_DICT or "
        "SHARDED_STATE_DICT to load in another way.",
        file.string(), what);
  };
  const auto& object = archive_.value;
  if (!object.isGenericDict()) fail("found " + object.tagKind() + ", expected the pieces of a rank");
  const auto dict = object.toGenericDict();
  const char* const slices_key = dict.contains("begins") ? "begins" : "slices";  // of slices only, once
  for (const char* key : {"world_size", "rank", slices_key, "state"})
    if (!dict.contains(key))
      fail(fmt::format("found a dict without '{}', expected the pieces of a rank as they are written here", key));
  const auto world = dict.at("world_size"), slices = dict.at(slices_key);
  if (!world.isInt() || world.toInt() != comm::world_size() || !slices.isList())
    fail(fmt::format("found the pieces of {} ranks, expected those of {}",
                     world.isInt() ? std::to_string(world.toInt()) : world.tagKind(), comm::world_size()));
  const auto saved = slices.toListRef();
  bool same = saved.size() == holdings.size();
  for (size_t i = 0; same && i < holdings.size(); ++i)
    same = saved[i].isInt() ? saved[i].toInt() == holdings[i].slice.begin
                            : saved[i].isList() && are(saved[i].toListRef(), numbers_of(holdings[i].slice));
  if (!same)
    fail("found pieces that lie elsewhere than this model's; the model or the plugin's wrap policy has changed");
  state_ = dict.at("state");
}

c10::IValue OwnShards::with_numbers(const c10::IValue& value) const {
  if (value.isTensor()) return value.toTensor().dim() == 0 ? archive_.read(value) : value;
  if (!value.isGenericDict()) return value;
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& entry : value.toGenericDict()) dict.insert(entry.key(), with_numbers(entry.value()));
  return dict;
}

}  // namespace accelerate::run_state
