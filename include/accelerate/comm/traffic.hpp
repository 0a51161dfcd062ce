#pragma once

#include <cstdint>

namespace accelerate::comm {

/// Bytes that one rank's collectives move. A message is a gathered tensor, or one to be reduced, as a whole: the unit
/// in which the ZeRO paper counts.
struct Traffic {
  enum class Kind { all_gather, reduce_scatter, all_reduce, broadcast };
  int64_t all_gather = 0;      ///< bytes of messages, once each
  int64_t reduce_scatter = 0;  ///< once each
  int64_t all_reduce = 0;      ///< twice each: an all-reduce is a reduce-scatter and an all-gather
  int64_t broadcast = 0;       ///< once each
  int64_t sent = 0;  ///< of all these, what leaves one rank of n if the messages go around a ring: (n - 1) / n of them
                     ///< (a broadcast: all)
  int64_t control = 0;   ///< bytes in which ranks tell each other a few numbers about themselves; in none of the above
  int64_t messages = 0;  ///< how many, without control
  int64_t volume() const { return all_gather + reduce_scatter + all_reduce + broadcast; }
};

}  // namespace accelerate::comm
