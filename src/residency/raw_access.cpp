#include "residency/raw_access.hpp"

#include <algorithm>
#include <functional>
#include <string_view>

#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {
namespace {

size_t hash_of_bytes(const at::Tensor& tensor) {
  return std::hash<std::string_view>{}({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()});
}

}  // namespace

void RawAccess::add(const Member& member) {
  Unit& unit = member.unit();
  const bool compares = writes_ == Writes::found && !unit.fixed();
  const bool readable = member.tensor().is_cpu();
  if (std::find(units_.begin(), units_.end(), &unit) == units_.end()) {
    if (writes_ == Writes::found) unit.owner().pin(unit, /*writes=*/compares && !readable);
    else unit.owner().begin_raw_access(unit, writes_ != Writes::lost);
    if (writes_ == Writes::alone) unit.note_alone(1);
    units_.push_back(&unit);
  }
  if (compares && readable) watched_.emplace_back(&member, hash_of_bytes(member.tensor()));
}

RawAccess::~RawAccess() {
  for (const auto& [member, before] : watched_) {
    if (hash_of_bytes(member->tensor()) == before) continue;
    Unit& unit = member->unit();
    unit.owner().pin(unit, /*writes=*/true);  // it is here: this only says that it was written
    unit.owner().unpin(unit);
  }
  for (Unit* unit : units_) {
    if (writes_ == Writes::alone) unit->note_alone(-1);
    if (writes_ == Writes::found) unit->owner().unpin(*unit);
    else unit->owner().end_raw_access(*unit, writes_ != Writes::lost);
  }
}

}  // namespace accelerate::residency
