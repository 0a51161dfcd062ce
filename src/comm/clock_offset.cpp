#include "comm/clock_offset.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ApproximateClock.h>

#include <limits>

#include "comm/group.hpp"

namespace accelerate::comm {
namespace {

constexpr int kRounds = 16;  // the first ones make connections

int64_t system_time() { return c10::getTime(); }

}  // namespace

ClockOffset clock_offset(Group& group, const std::function<int64_t()>& clock) {
  // Ranks that one launcher started share its machine's clock.
  if (group.dry() || (!clock && group.local_world_size() == group.world_size())) return {};
  const auto now = clock ? clock : system_time;
  const auto options = at::TensorOptions().dtype(at::kLong).device(group.device());
  const auto send = [&](int64_t value, int64_t to) { group.wait(*group.send(at::full({1}, value, options), to)); };
  const auto receive = [&](int64_t from) {
    at::Tensor value = at::zeros({1}, options);
    group.receive_(value, from);
    return value.cpu().item<int64_t>();
  };
  if (group.rank() == 0) {
    for (int64_t rank = 1; rank < group.world_size(); ++rank)
      for (int round = 0; round < kRounds; ++round) {
        receive(rank);
        send(now(), rank);
      }
    return {};
  }
  ClockOffset best{.error_ns = std::numeric_limits<int64_t>::max()};
  for (int round = 0; round < kRounds; ++round) {
    const int64_t asked = now();
    send(round, 0);
    const int64_t theirs = receive(0), answered = now();
    const int64_t half = (answered - asked) / 2;
    if (half < best.error_ns) best = {.offset_ns = theirs - (asked + half), .error_ns = half};
  }
  return best;
}

}  // namespace accelerate::comm
