#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace accelerate {
struct AcceleratorOptions;
}

namespace equivalence {

/// One way in which ranks train a model together. The first half is what its documentation promises, which the
/// reference computes; the second is how a program asks for it.
struct Layout {
  std::string name;
  std::vector<int64_t> ranks;       ///< numbers of ranks that it can have
  bool sharded = false;             ///< get_state_dict() gives rank 0 alone the tensors; precision converts parameters
  bool buffers_from_rank0 = false;  ///< before a forward whose gradients are averaged; else buffers are each rank's
  bool starts_from_rank0 = false;   ///< ranks may begin with other values
  int64_t shard_ranks = 0;          ///< 0: all; else those that hold one replica, negative: so many replicas
  bool finds_unused = true;         ///< a backward may leave parameters out
  bool keeps = false;               ///< what a forward has gathered, for the backward: which a rank may leave out
  bool converts_buffers = false;    ///< to mixed precision's dtype, but for those of batch norms
  /// What a sharded model's parameters are computed in, and gradients are averaged in: "bf16", "fp16", or as mixed
  /// precision says, else as they are. `wire_dtype`: the same for whole gradients on their way.
  /// Gradients are clipped by their norm before each step, to so much (0: not), whatever the program's clipping says.
  std::optional<double> own_limit = {};
  bool always_reduces = false;  ///< each backward averages: no_sync is refused
  bool own_precision = false;   ///< mixed precision is not drawn
  std::string param_dtype = "", reduce_dtype = "", wire_dtype = "";
  std::function<void(accelerate::AcceleratorOptions&)> choose;

  /// How many ranks train one replica together, of those of a job.
  int64_t ranks_of_replica(int64_t all) const {
    if (!sharded) return 1;
    return shard_ranks > 0 ? shard_ranks : shard_ranks < 0 ? all / -shard_ranks : all;
  }
};

/// An engine, or an option of one, joins the fuzzer by a line here.
const std::vector<Layout>& layouts();
/// @throws std::runtime_error for another name.
const Layout& layout_named(const std::string& name);

}  // namespace equivalence
