#include <algorithm>

#include "comm/group_impl.hpp"
#include "comm/rank_list.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

std::string seconds(std::chrono::milliseconds time) {
  return fmt::format("{:.1f} s", static_cast<double>(time.count()) / 1000.0);
}

/// The whereabouts of a peer that did not come to our collective of group `key`. @param here  its status in this group
std::string whereabouts(const RankStatus& peer, const std::string& key, const GroupStatus& here) {
  for (const auto& [other, status] : peer.groups)
    if (other != key && status.inside)
      return fmt::format("is in collective {} ({}) of the {} since {}", status.sequence, status.operation(),
                         status.name, seconds(std::chrono::milliseconds(status.age_ms)));
  return fmt::format("{} collective {} ({}) {} ago{}", here.inside ? "is in" : "came out of", here.sequence,
                     here.operation(), seconds(std::chrono::milliseconds(here.age_ms)),
                     here.inside ? "" : " and is outside of collectives");
}

}  // namespace

const Begun* GroupStatus::begun(int64_t number) const {
  const int64_t back = sequence - number, known = static_cast<int64_t>(recent.size());
  return back < 0 || back >= known ? nullptr : &recent[static_cast<size_t>(known - 1 - back)];
}

std::string disagreement(const std::string& key, const GroupStatus& mine, int64_t rank, const RankStatus& theirs) {
  const auto found = theirs.groups.find(key);
  const GroupStatus here = found == theirs.groups.end() ? GroupStatus{} : found->second;
  // The first one that differs: those after it differ because of it.
  const int64_t common = std::min(mine.sequence, here.sequence);
  for (int64_t number = common - 64; number <= common; ++number) {
    const Begun *my = mine.begun(number), *its = here.begun(number);
    if (!my || !its || my->history == its->history) continue;
    if (my->operation != its->operation)
      return fmt::format("rank {} is elsewhere: its collective {} is {}, here it is {}", rank, number, its->operation,
                         my->operation);
    return fmt::format(
        "rank {} is elsewhere: its collective {} is {} too, but of another size or of another part of the model", rank,
        number, its->operation);
  }
  if (theirs.note == "left" && here.sequence < mine.sequence)
    return fmt::format("rank {} has left: it ended normally after collective {} ({})", rank, here.sequence,
                       here.operation());
  return {};
}

void Group::Impl::check_usable(const char* operation) const {
  if (const std::string failure = progress->failure(); !failure.empty())
    raise<CommError>("{} on rank {}: the process group is not usable any more: {}", operation, own(), failure);
}

void Group::Impl::fail(const std::string& what, const std::string& key, const std::vector<int64_t>& ranks) {
  const GroupStatus mine = progress->status().groups.at(key);
  const auto where = fmt::format("{} (collective {} of the {}, {}) on rank {}", mine.operation(), mine.sequence,
                                 mine.name, options.backend, own());
  if (const std::string failure = progress->failure(); !failure.empty()) raise<CommError>("{}: {}", where, failure);
  StoreState store_state = StoreState::answers;
  const auto peers = watchdog->ask_peers(std::chrono::milliseconds(1500), store_state);
  std::string late, cause;
  std::vector<int64_t> arrived;
  for (int64_t rank = 0; rank < static_cast<int64_t>(peers.size()); ++rank) {
    if (rank == own()) continue;
    const auto& peer = peers[static_cast<size_t>(rank)];
    const bool member = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    const auto line = fmt::format("\n  rank {}{}", rank, member ? "" : " (of another group)");
    if (!peer) {
      if (rank == 0 && store_state == StoreState::gone)
        late += line + " has gone: its process ended (it served the store)";
      else if (rank > 0 && store_state != StoreState::answers) continue;  // nobody can be asked any more
      else late += line + " has gone or is stopped: its process does not answer";
      continue;
    }
    if (peer->note.starts_with("failed: ")) {
      late += line + " " + peer->note;
      cause = fmt::format("rank {} {}", rank, peer->note);
      continue;
    }
    if (!member) continue;
    const auto found = peer->groups.find(key);
    const GroupStatus here = found == peer->groups.end() ? GroupStatus{} : found->second;
    if (const std::string why = disagreement(key, mine, rank, *peer); !why.empty()) {
      late += "\n  " + why;
    } else if (here.sequence < mine.sequence) {
      late += line + " has not arrived: it " + whereabouts(*peer, key, here);
    } else {
      arrived.push_back(rank);
    }
  }
  const auto why = mine.operation() + ": " + (!cause.empty() ? cause : late.empty() ? what : "missing:" + late);
  progress->broken("an earlier collective failed: " + why);
  // Peers that hear of this before they find out themselves should learn who was missing, not just that this rank gave
  // up.
  watchdog->announce_failure(why);
  raise<CommError>(
      "{}: no result after {} (limit {}){}{} All ranks must call the same collectives in the same order; look first at "
      "the output of the ranks named above. ({})",
      where, seconds(std::chrono::milliseconds(mine.age_ms)), seconds(options.timeout),
      late.empty() ? "" : fmt::format(". Missing:{}\n ", late),
      arrived.empty() ? "" : fmt::format(" Arrived: rank {}.", list_of(arrived)), what);
}

std::function<std::string()> Group::activity() const {
  return [progress = impl_->progress] {
    std::string text;
    for (const auto& [key, group] : progress->status().groups)
      text += fmt::format("{}{}: collective {} ({}), {} {}", text.empty() ? "" : "\n", group.name, group.sequence,
                          group.operation(), group.inside ? "inside since" : "ended, and outside of collectives since",
                          seconds(std::chrono::milliseconds(group.age_ms)));
    if (const std::string failure = progress->failure(); !failure.empty()) text += "\nfailed: " + failure;
    return text;
  };
}

void Group::announce_failure(const std::string& reason) noexcept {
  if (impl_->watchdog) impl_->watchdog->announce_failure(reason);
}

}  // namespace accelerate::comm
