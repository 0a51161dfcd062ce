#include <set>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/utils/error.hpp"
#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {

struct Summon::Impl {
  bool writeback = false;
  std::vector<Unit*> units;  ///< pinned
};

Summon::Summon(const ModelRef& model, const SummonOptions& options) : impl_(std::make_unique<Impl>()) {
  if (options.rank0_only && options.writeback)
    throw ConfigError(
        "summon: found rank0_only together with writeback, expected at most one: what rank 0 alone changes can't "
        "become the value of shards on other ranks; set writeback = false");
  impl_->writeback = options.writeback;
  std::set<Unit*> found;
  const bool keeps = !options.rank0_only || comm::rank() == 0;
  for (const auto& [name, tensor] : model.parameters()) {  // in order of registration: the same on every rank
    Member* member = Member::of(tensor);
    if (!member || !found.insert(&member->unit()).second) continue;
    Unit& unit = member->unit();
    unit.owner().pin(unit, false);
    if (keeps) {
      impl_->units.push_back(&unit);
    } else {
      unit.owner().unpin(unit);
      unit.owner().evict(unit);
    }
  }
}

Summon::Summon(Summon&&) noexcept = default;
Summon& Summon::operator=(Summon&&) noexcept = default;

Summon::~Summon() {
  if (!impl_) return;
  for (Unit* unit : impl_->units) {
    // Raw pointers leave no trace, so with writeback everything counts as changed. Storing never communicates.
    unit->owner().settle(*unit, impl_->writeback);
  }
}

Summon summon(const ModelRef& model, const SummonOptions& options) { return Summon(model, options); }

}  // namespace accelerate::residency
