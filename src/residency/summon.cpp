#include <set>

#include "accelerate/comm.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/utils/error.hpp"
#include "residency/member.hpp"
#include "residency/raw_access.hpp"
#include "residency/residency.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {

struct Summon::Impl {
  RawAccess access;
};

Summon::Summon(const ModelRef& model, const SummonOptions& options)
    : impl_(new Impl{.access = RawAccess(options.writeback ? RawAccess::Writes::stored : RawAccess::Writes::lost)}) {
  if (options.rank0_only && options.writeback)
    throw ConfigError(
        "summon: found rank0_only together with writeback, expected at most one: what rank 0 alone changes can't "
        "become the value of shards on other ranks; set writeback = false");
  const bool keeps = !options.rank0_only || comm::rank() == 0;
  std::set<Unit*> fetched;
  for (const auto& [name, tensor] : model.parameters()) {  // in order of registration: the same on every rank
    const Member* member = Member::of(tensor);
    if (!member || !fetched.insert(&member->unit()).second) continue;
    if (member->encoded() && options.writeback)
      raise<ConfigError>(
          "summon: found writeback with '{}', which is kept in few bits and frozen, expected writeback = false", name);
    if (keeps) {
      impl_->access.add(*member);
    } else {
      Unit& unit = member->unit();
      unit.owner().look_at_homes(unit);  // as rank 0 does
      unit.owner().pin(unit, /*writes=*/false, /*foretells=*/false);
      unit.owner().unpin(unit);
      unit.owner().evict(unit);
    }
  }
}

Summon::Summon(Summon&&) noexcept = default;
Summon& Summon::operator=(Summon&&) noexcept = default;

Summon::~Summon() = default;

Summon summon(const ModelRef& model, const SummonOptions& options) { return Summon(model, options); }

}  // namespace accelerate::residency
