#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace accelerate::residency {

/// The layers of LibTorch that an operator of our own meets above its kernel.
enum class TorchLayers {
  program,       ///< as the program has them: autograd records the operator, autocast chooses its types
  gradients,     ///< the same, and autograd also within an operator that runs below it
  no_autocast,   ///< autograd records the operator; we choose its types
  no_gradients,  ///< plain tensors in any mode of the program: no graph, no inference mode, no autocast
  kernels,       ///< neither autograd nor autocast: within a torch::autograd::Function of ours
};

/// The links of the chain (chain.hpp) that an operator of our own comes by.
enum class OwnLinks {
  none,   ///< its tensors have their bytes already
  homes,  ///< *codes*, *touch* and *devices*, where it has members among its arguments: absent ones are fetched
  later,  ///< of a handler's own operators: those that come after its link, see Next::compute()
};

/// While it lives, this thread's operators are ours and not the program's. Handlers write `next.compute()`; this class
/// is for code that runs without a call: in backward, in a home, on a tape.
class OwnOperators {
 public:
  /// @param links  `none` or `homes`
  explicit OwnOperators(TorchLayers layers, OwnLinks links = OwnLinks::none);
  OwnOperators(const OwnOperators&) = delete;
  OwnOperators& operator=(const OwnOperators&) = delete;
  ~OwnOperators();

 private:
  friend class Next;
  OwnOperators(TorchLayers layers, OwnLinks links, size_t first_link);

  const c10::impl::LocalDispatchKeySet keys_;
  const uint32_t links_;
  const bool sets_modes_;
  bool grad_ = false, inference_ = false;  ///< autograd's modes, where this sets them
};

}  // namespace accelerate::residency
