#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "case.hpp"

namespace accelerate {
struct AcceleratorOptions;
}

namespace equivalence {

/// DeepSpeed's bf16 and fp16, which differ from PyTorch's: the model has that dtype throughout, buffers aside, and
/// nothing is cast around it; what optimizers step on begins with the rounded values; and there is no GradScaler.
struct WholeIn16Bits {
  // The loss scale in fp16, which starts at 1024 here. In bf16 it is 1.
  int64_t window = 2, hysteresis = 2;
  bool consecutive_hysteresis = false;
  int64_t smallest_scale = 1;
  bool looks_in_bf16 = true;  ///< for overflows, to skip the step
  bool masters = true;        ///< in fp32; else optimizers step on 16 bits
  std::string sums = "";      ///< of several backwards' averages: "bf16", "fp16", or as what is stepped on
  bool casts_inputs = false;  ///< in fp16; else the program does
  bool operator==(const WholeIn16Bits&) const = default;
};

/// One way in which ranks train a model together. The first half is the promise of its documentation, which the
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
  /// Gradients are clipped by their norm before each step, to so much (0: not), whatever the program's clipping says.
  std::optional<double> own_limit = {};
  bool always_reduces = false;  ///< each backward averages: no_sync is refused
  /// The dtype that a sharded model computes in, and averages gradients in: "bf16", "fp16", or as mixed
  /// precision says, else as they are. `wire_dtype`: the same for whole gradients on their way.
  std::string param_dtype = "", reduce_dtype = "", wire_dtype = "";
  /// ZeRO++, for the parameters of as_codes(): they are gathered in 8 bits, their gradients travel in 4, and those that
  /// are frozen from the start are kept in 8.
  bool weights_as_codes = false, gradients_as_codes = false, frozen_as_codes = false;
  std::optional<WholeIn16Bits> whole_in_16_bits = {};                  ///< else autocast and GradScaler
  std::vector<std::string> precisions = {"no", "no", "bf16", "fp16"};  ///< that are drawn
  std::string optimizer = "";                                          ///< that alone it takes; else any
  std::function<void(accelerate::AcceleratorOptions&)> choose;

  bool has_codes() const { return weights_as_codes || gradients_as_codes || frozen_as_codes; }
  /// How many ranks train one replica together, of those of a job.
  int64_t ranks_of_replica(int64_t all) const {
    if (!sharded) return 1;
    return shard_ranks > 0 ? shard_ranks : shard_ranks < 0 ? all / -shard_ranks : all;
  }
  /// Whether losses are scaled, if only by 1, and steps skipped whose gradients overflow.
  bool has_scaler(const std::string& precision) const {
    return precision == "fp16" || (precision == "bf16" && whole_in_16_bits && whole_in_16_bits->looks_in_bf16);
  }
  /// `backward burst=1`: what that rank's loss is multiplied by, so that gradients overflow: in the dtype that they
  /// travel in, where that alone can't hold them. (bf16 reaches as far as fp32.)
  double burst(const std::string& precision) const {
    return precision == "fp16" ? 1e30 : reduce_dtype == "fp16" ? 1e9 : 1e39;
  }
  /// Whether optimizers can step within backward, in place.
  bool can_step_at_once(const std::string& precision) const {
    return sharded && own_limit.value_or(0) == 0 && !has_scaler(precision) && name.find("disk") == std::string::npos;
  }
  /// Whether the program converts inputs.
  bool wants_low_inputs(const std::string& precision) const {
    return whole_in_16_bits && precision != "no" && !(whole_in_16_bits->casts_inputs && precision == "fp16");
  }
};

/// Whether the case has optimizers step within backward where it has that layout.
inline bool steps_at_once(const Case& what, const Layout& layout) {
  return what["ahead"] == "2" && layout.can_step_at_once(what["precision"]);
}

/// An engine, or an option of one, joins the fuzzer by a line here.
const std::vector<Layout>& layouts();
/// @throws std::runtime_error for another name.
const Layout& layout_named(const std::string& name);

}  // namespace equivalence
