#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace accelerate::residency::deferred {

/// One use of a generator by a recorded operator.
struct Draw {
  size_t generator;
  size_t index;  ///< among the uses of that generator
};

/// The states that generators would have had, had all been done at once. A state follows from the one before by
/// carrying out the operator between them; when the program itself moved the generator in between (manual_seed, a draw
/// outside), it starts anew from there.
class Draws {
 public:
  /// The next use, by record `record`.
  Draw add(const at::Generator& generator, size_t record);
  /// The state before it is known.
  bool ready(const Draw& draw) const { return chains_[draw.generator].states[draw.index].defined(); }
  /// The record that must draw before this one can.
  size_t previous(const Draw& draw) const { return chains_[draw.generator].records[draw.index - 1]; }
  /// Runs `operation` with the state that belongs to it and puts the generator back afterwards.
  void at(const Draw& draw, const std::function<void()>& operation);
  /// Records after which a generator's last state is not known.
  std::vector<size_t> open_ends() const;
  /// Moves generators that nobody else has used to their last state, where that is known.
  void advance_generators();

 private:
  struct Chain {
    at::Generator generator;
    std::vector<size_t> records;
    std::vector<at::Tensor> states;  ///< before each record; undefined while not known
    at::Tensor last;                 ///< after the last record
    at::Tensor seen;                 ///< what the generator really was at the last record
  };
  std::vector<Chain> chains_;
};

}  // namespace accelerate::residency::deferred
