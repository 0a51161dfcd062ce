#include "launch/machines/coordinator.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <tuple>

namespace accelerate::launcher {
namespace {

const Node* find(const std::vector<Node>& nodes, int64_t id) {
  for (const auto& node : nodes)
    if (node.id == id) return &node;
  return nullptr;
}

bool ended(const Node& node) { return node.state == "failed" || node.state == "stopped" || node.state == "done"; }

std::string name_of(const Node& node, int64_t group_rank) {
  return fmt::format("machine {} ({}, {})", group_rank, node.host, node.address);
}

std::string in_seconds(std::chrono::milliseconds time) {
  return time.count() % 1000 ? fmt::format("{}.{}", time.count() / 1000, time.count() % 1000 / 100)
                             : fmt::format("{}", time.count() / 1000);
}

}  // namespace

bool Coordinator::step(const std::vector<Node>& nodes, Clock::time_point now) {
  const auto before = std::tuple(decision_.phase, decision_.round);
  for (const auto& node : nodes) lives(node, now);
  if (decision_.phase == "running") watch(nodes, now);
  if (decision_.phase == "ending") end(nodes, now);
  if (decision_.phase == "forming") form(nodes, now);
  return before != std::tuple(decision_.phase, decision_.round);
}

bool Coordinator::lives(const Node& node, Clock::time_point now) {
  Life& life = lives_[node.id];
  if (life.beat != node.beat) life = {node.beat, now};
  return node.state != "left" && now - life.at <= settings_.lost_after;
}

void Coordinator::close(int64_t code, const std::string& why) {
  if (decision_.phase == "closed") return;
  decision_.phase = "closed";
  decision_.code = code;
  decision_.why = why;
}

int64_t Coordinator::waiting(const std::vector<Node>& nodes, Clock::time_point now) {
  return std::count_if(nodes.begin(), nodes.end(), [&](const Node& node) { return lives(node, now); });
}

void Coordinator::form(const std::vector<Node>& nodes, Clock::time_point now) {
  std::vector<const Node*> candidates;
  bool all = true;
  for (const auto& node : nodes) {
    if (!lives(node, now)) continue;
    if (node.state != "joining") all = false;
    else if (!settings_.fixed_ranks || std::none_of(candidates.begin(), candidates.end(), [&](const Node* other) {
               return other->machine_rank == node.machine_rank;
             }))
      candidates.push_back(&node);
  }
  const auto count = static_cast<int64_t>(candidates.size());
  if (count < settings_.min_machines) {
    enough_ = false;
    if (now - forming_since_ > settings_.join_timeout)
      close(71, fmt::format("only {} of {} machines came within {} s{}. Was the command started on all of them, and do "
                            "their firewalls let them through?",
                            count, settings_.min_machines, in_seconds(settings_.join_timeout), missing(candidates)));
    return;
  }
  if (!enough_) enough_ = true, enough_since_ = now;
  // Later on a late machine makes a new round whenever it comes, so that nobody needs to wait for it.
  if (count < settings_.max_machines && !(decision_.round > 0 && all) && now - enough_since_ < settings_.last_call)
    return;
  candidates.resize(static_cast<size_t>(std::min(count, settings_.max_machines)));
  if (settings_.fixed_ranks)
    std::sort(candidates.begin(), candidates.end(),
              [](const Node* a, const Node* b) { return a->machine_rank < b->machine_rank; });
  start(candidates);
}

std::string Coordinator::missing(const std::vector<const Node*>& candidates) const {
  if (!settings_.fixed_ranks) return "";
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < settings_.max_machines; ++rank)
    if (std::none_of(candidates.begin(), candidates.end(),
                     [&](const Node* node) { return node->machine_rank == rank; }))
      ranks.push_back(rank);
  return ranks.empty() ? "" : fmt::format("; missing: machine rank {}", fmt::join(ranks, ", "));
}

void Coordinator::start(const std::vector<const Node*>& machines) {
  decision_.members.clear();
  decision_.world_size = 0;
  std::map<std::string, int64_t> roles;
  for (const Node* node : machines) {
    decision_.members.push_back({node->id, decision_.world_size, node->local_world_size, roles[node->role], 0});
    decision_.world_size += node->local_world_size;
    roles[node->role] += node->local_world_size;
  }
  for (size_t i = 0; i < machines.size(); ++i) decision_.members[i].role_world_size = roles[machines[i]->role];
  decision_.phase = "running";
  joined_ = false;
  ++decision_.round;
  decision_.why.clear();
  enough_ = false;
}

void Coordinator::watch(const std::vector<Node>& nodes, Clock::time_point now) {
  const auto end_because = [&](const std::string& why) { decision_.phase = "ending", decision_.why = why; };
  size_t done = 0;
  for (size_t i = 0; i < decision_.members.size(); ++i) {
    const Node& node = *find(nodes, decision_.members[i].id);
    if (!lives(node, now))
      return end_because(node.state == "left"
                             ? name_of(node, static_cast<int64_t>(i)) + " has left"
                             : fmt::format("{} is lost: nothing was heard of it for {} s",
                                           name_of(node, static_cast<int64_t>(i)), in_seconds(settings_.lost_after)));
    if (node.round != decision_.round) continue;  // has not seen yet that the round runs
    if (node.state == "failing" || node.state == "failed" || node.state == "stopped") {
      first_failing_ = node.id;
      return end_because("a rank failed on " + name_of(node, static_cast<int64_t>(i)));
    }
    done += node.state == "done";
  }
  if (done == decision_.members.size()) return close(0, "");
  if (settings_.fixed_ranks || done > 0 || static_cast<int64_t>(decision_.members.size()) >= settings_.max_machines)
    return;
  for (const auto& node : nodes)
    if (lives(node, now) && node.state == "joining" &&
        std::none_of(decision_.members.begin(), decision_.members.end(),
                     [&](const MachineMember& member) { return member.id == node.id; }))
      return joined_ = true, end_because(node.host + " (" + node.address + ") has joined");
}

void Coordinator::end(const std::vector<Node>& nodes, Clock::time_point now) {
  using Blame = std::tuple<int64_t, int64_t, std::string>;  // the least is the likeliest cause; exit code; text
  std::vector<Blame> failures;
  for (size_t i = 0; i < decision_.members.size(); ++i) {
    const Node& node = *find(nodes, decision_.members[i].id);
    const auto name = name_of(node, static_cast<int64_t>(i));
    if (!lives(node, now))
      failures.emplace_back(
          -1, node.state == "left" ? code_of_leaver(node) : kGoneCode,
          name + (node.state == "left" ? " left the job" + (node.text.empty() ? "" : ": " + node.text) : " was lost"));
    else if (node.round != decision_.round ? node.state != "joining" : !ended(node))
      return;  // is still stopping its ranks
    else if (node.round == decision_.round && node.state == "failed")
      failures.emplace_back(2 * node.kind + (node.id != first_failing_), node.code, name + ": " + node.text);
  }
  // Ranks that saved and ended have not failed. A machine that came, or one that had to go, is why.
  const bool saved = std::all_of(failures.begin(), failures.end(),
                                 [](const Blame& failure) { return std::get<1>(failure) == kSavedExitCode; });
  const bool enough = waiting(nodes, now) >= settings_.min_machines;
  const bool moved = joined_ || std::any_of(failures.begin(), failures.end(),
                                            [](const Blame& failure) { return std::get<0>(failure) < 0; });
  if (!failures.empty() && !(saved && moved && enough)) {
    const auto& [kind, code, text] =
        *std::min_element(failures.begin(), failures.end(),
                          [](const Blame& a, const Blame& b) { return std::get<0>(a) < std::get<0>(b); });
    if (decision_.restarts >= settings_.max_restarts)
      return close(code, settings_.max_restarts == 0
                             ? text
                             : fmt::format("{} (no restart is left of {})", text, settings_.max_restarts));
    ++decision_.restarts;
    decision_.why = text;
  }
  decision_.phase = "forming";
  forming_since_ = now;
}

}  // namespace accelerate::launcher
