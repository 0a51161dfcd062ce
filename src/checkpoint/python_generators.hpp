#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>

/// Generators of Python beside LibTorch's. A C++ program draws from neither, but Python's load_state wants their states
/// in random_states_N.pkl, and takes no other generator's from there without them.
namespace accelerate::checkpointing {

struct PythonGenerators {
  c10::IValue random;  ///< random.getstate()
  c10::IValue numpy;   ///< numpy.random.get_state(), its array as a tuple
};

/// As Python's set_seed(seed) leaves them. Source: CPython's random_seed() (init_by_array of Matsumoto and Nishimura's
/// mt19937ar), numpy's mt19937_seed().
PythonGenerators seeded_generators(uint64_t seed);

/// Those of a random_states_N.pkl; unset where it has none, or others than Mersenne twisters.
std::optional<PythonGenerators> python_generators(const c10::IValue& states);
/// random_states() with them, by Python's keys.
void add_python_generators(const c10::IValue& states, const PythonGenerators& generators);

}  // namespace accelerate::checkpointing
