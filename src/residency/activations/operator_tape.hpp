#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "residency/activations/replay_state.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "residency/chain.hpp"

namespace accelerate::residency {

/// A slice of a forward as a list of operators that can run again. Tensors that it makes are numbers in it and not
/// kept; tensors that come from outside are. Values that are written through a pointer and custom autograd functions
/// can't be run again: operators don't show them.
class OperatorTape {
 public:
  /// @param name  for errors
  explicit OperatorTape(std::string name) : name_(std::move(name)) {}

  /// Runs the operator by `next` and writes it down.
  void record(OperatorCall& call, Next next);
  /// Nothing more comes.
  void close();
  /// Runs everything again, with the given tensors in place of those that take_out() took. @throws ShapeError when a
  /// tensor from outside was written to since.
  void replay(const std::vector<at::Tensor>& inputs) const;

  /// Hands over what came from outside so far, but for what `stays` says: replay() gets it back.
  std::vector<at::Tensor> take_out(const OperatorCall& call, const std::function<bool(const at::Tensor&)>& stays);

 private:
  struct Argument {
    c10::IValue value;                   ///< with stand-ins for tensors
    c10::SmallVector<int32_t, 2> slots;  ///< tensor by tensor
  };
  struct Record {
    c10::OperatorHandle op;
    c10::SmallVector<Argument, 4> arguments;
    c10::SmallVector<int32_t, 2> results;  ///< slots, tensor by tensor
    c10::impl::LocalDispatchKeySet keys;   ///< of the thread: autocast, no-grad kernels
    bool grad_mode;
    std::optional<GeneratorState> random;    ///< before the first run, of a generator among the arguments
    c10::SmallVector<int32_t, 2> last_uses;  ///< slots that nobody asks for afterwards
  };
  /// A tensor from outside.
  struct Input {
    int32_t slot;
    at::Tensor tensor;
    std::optional<VersionStamp> stamp;
    bool written = false;         ///< by the tape: `tensor` has the values from before
    std::optional<size_t> given;  ///< replay() gets it
  };
  struct Known {
    /// Keeps the address from being used again.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> alive;
    int32_t slot;
  };

  int32_t slot_of(const at::Tensor& tensor);
  int32_t remember(const at::Tensor& tensor);
  void keep_before_write(const OperatorCall& call, const Next& next, const at::Tensor& tensor);

  std::string name_;
  std::vector<Record> records_;
  std::vector<Input> inputs_;
  std::unordered_map<const c10::TensorImpl*, Known> known_;
  int32_t slots_ = 0;
};

}  // namespace accelerate::residency
