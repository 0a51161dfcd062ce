#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>

namespace accelerate::data::detail {

/// While it lives, what this thread draws from LibTorch's default CPU generator (torch::rand({1}) in a data set's
/// get(), dropout in a transform) comes from a generator of its own instead, seeded by the pass and the step that are
/// read. So a step has the same numbers whichever thread reads it and when, and nobody else's numbers move. Other
/// threads, generators that the caller passes, and numbers on other devices are as ever. May nest: the innermost
/// counts.
///
/// LibTorch has one default CPU generator for all threads, so it can't be swapped while workers read. But all operators
/// that draw take an optional generator: a kernel before the back end's fills it in, on threads that include its key.
class OwnNumbers {
 public:
  /// @param pass_seed  of the pass, another one for each rank
  OwnNumbers(int64_t pass_seed, int64_t step);
  ~OwnNumbers();
  OwnNumbers(const OwnNumbers&) = delete;
  OwnNumbers& operator=(const OwnNumbers&) = delete;
  /// Goes on with the numbers of another step.
  void select(int64_t step);
  /// Seeded when the first number is drawn.
  const at::Generator& generator();

  /// Puts the kernels in place. Before threads read.
  static void install();

 private:
  int64_t pass_seed_, step_;
  std::optional<at::Generator> generator_;
  OwnNumbers* before_;
  c10::impl::IncludeDispatchKeyGuard included_;
};

/// A seed of one rank's reads from that of all ranks' pass.
int64_t seed_of_rank(int64_t pass_seed, int64_t rank);

}  // namespace accelerate::data::detail
