#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "case.hpp"

/// Two machines run programs: the reference, all ranks in one process, and ours, one rank of a job.
namespace equivalence {

/// One value that was seen after the operation of that number (the program's size: at the end).
struct Observation {
  int64_t operation = 0;
  std::string name;
  at::Tensor value;  ///< on the host, of doubles, complex doubles or longs
};

using Observe = std::function<void(int64_t rank, Observation)>;

class Machine {
 public:
  virtual ~Machine() = default;
  /// Does it. Only what Flow admits comes here.
  virtual void run(const Operation& operation) = 0;
  /// No backward goes through the forwards so far any more.
  virtual void forget_graphs() = 0;
  /// Where the program stands, for what is observed from here on.
  int64_t at = 0;
};

/// Runs the program; at the end parameters, states and one more loss are looked at.
void interpret(const Case& what, Machine& machine);

/// As both machines keep and compare it.
at::Tensor observable(const at::Tensor& tensor);

/// `join steps=312`: a digit for each rank, over and over.
inline int64_t steps_in_join(const Operation& operation, int64_t rank) {
  const std::string digits = operation.word("steps", "21");
  return digits[static_cast<size_t>(rank) % digits.size()] - '0';
}

/// `forward part=1 spread=1`: the branch that a rank uses, see Net::part, another one on each; with `replicas=1` on
/// each replica of a model, which `of_replica` ranks hold together. Without either all use the same.
inline int64_t part_of(const Operation& operation, int64_t rank, int64_t of_replica) {
  return (operation.integer("part") + rank * operation.integer("spread") +
          rank / of_replica * operation.integer("replicas")) %
         3;
}

/// The seed of the batch that a rank reads.
inline uint64_t batch_seed(int64_t data, int64_t rank) {
  return static_cast<uint64_t>(data) * 1000 + static_cast<uint64_t>(rank);
}

}  // namespace equivalence
