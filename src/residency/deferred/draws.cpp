#include "residency/deferred/draws.hpp"

#include <c10/util/Exception.h>

#include <cstring>
#include <mutex>

#include "residency/deferred/plain.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency::deferred {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// The default generator belongs to all threads: none of them may find the state of another one's replay in it.
Mutex one_at_a_time;

/// States are bytes in host memory, whatever device the numbers are for.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

Draw Draws::add(const at::Generator& generator, size_t record) {
  Plain plain;
  const MutexLock lock(one_at_a_time);
  size_t number = 0;
  while (number < chains_.size() && chains_[number].generator != generator) ++number;
  if (number == chains_.size())
    chains_.push_back({.generator = generator, .records = {}, .states = {}, .last = {}, .seen = {}});
  Chain& chain = chains_[number];
  const at::Tensor now = state_of(generator);
  const bool moved = !chain.seen.defined() || !same(now, chain.seen);
  chain.records.push_back(record);
  chain.states.push_back(moved ? now : chain.last);
  if (moved) chain.seen = now;
  chain.last = at::Tensor();
  return {number, chain.records.size() - 1};
}

void Draws::at(const Draw& draw, const std::function<void()>& operation) {
  const MutexLock lock(one_at_a_time);
  const at::Generator generator = chains_[draw.generator].generator;
  const at::Tensor before = state_of(generator);
  struct PutBack {
    const at::Generator& generator;
    const at::Tensor& state;
    ~PutBack() { set_state(generator, state); }
  } put_back{generator, before};
  set_state(generator, chains_[draw.generator].states[draw.index]);
  operation();
  Chain& chain = chains_[draw.generator];
  if (draw.index + 1 == chain.states.size()) {
    if (!chain.last.defined()) chain.last = state_of(generator);
  } else if (!chain.states[draw.index + 1].defined()) {
    chain.states[draw.index + 1] = state_of(generator);
  }
}

std::vector<size_t> Draws::open_ends() const {
  std::vector<size_t> result;
  for (const auto& chain : chains_)
    if (!chain.records.empty() && !chain.last.defined()) result.push_back(chain.records.back());
  return result;
}

void Draws::advance_generators() {
  Plain plain;
  const MutexLock lock(one_at_a_time);
  for (auto& chain : chains_) {
    if (!chain.last.defined() || !same(state_of(chain.generator), chain.seen)) continue;
    set_state(chain.generator, chain.last);
    chain.seen = chain.last;
  }
}

}  // namespace accelerate::residency::deferred
