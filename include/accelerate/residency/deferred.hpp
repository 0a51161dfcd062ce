#pragma once

/// Models without memory: build first, decide where the weights live later.
///
///     // Parameters on the meta device:
///     auto model = [] { auto empty = accelerate::init_empty_weights(); return BigModel(options); }();
///     accelerate::materialize(model);  // as if it had been built without the guard
///
/// The scope writes initialisation down instead of doing it: factory functions give meta tensors, and operators on
/// those go on a tape. No module has to know.
/// - **Parameters** stay on the meta device until materialize(), until `Accelerator::prepare` gives them a home, or
/// until weights are loaded into them (set_data(), or
///   `copy_()` of a whole tensor). Initialisers called after the scope are recorded too; anything else that needs
///   values throws a ConfigError.
/// - **Buffers** are real when the scope ends, unless include_buffers. A scope can't see modules; it takes what does
/// not require a gradient and still exists for a
///   buffer. So a parameter that is registered frozen is real as well; freeze it afterwards, or set include_buffers. A
///   buffer made of random numbers has to wait for all numbers drawn before it, which costs the time (not the memory)
///   of initialising what precedes it.
/// - **Values asked for in the scope** (item(), comparisons, a mask's nonzero()) are worked out there, together with
/// what they depend on and nothing else.
/// - **Values that the program already has** (torch::tensor({...}), from_blob, a 1-D torch::empty with the device CPU
/// given explicitly, which is how LibTorch builds the
///   former) are real at once.
/// - **Random numbers** are drawn when they are needed, each from the state that its generator would have had. Nothing
/// is drawn in the scope itself: code that draws
///   between the scope and materialize() sees other numbers than after eager construction. Once all recorded numbers
///   have been drawn, at the latest when all is materialised, the generator stands where eager construction would have
///   left it; but if something drew meanwhile, it stays where the program has brought it.
/// - **Memory**: about 7 KB per parameter, its module included, and 5 KB for a generator state with each random
/// initialiser, kept from the first replay on.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

struct InitEmptyWeightsOptions {
  /// Buffers stay on the meta device too.
  bool include_buffers = false;
};

/// Ends the scope of init_empty_weights() or init_on_device(). Belongs to the thread that made it, and scopes end in
/// the reverse order of their beginning.
class ACCELERATE_API InitScope {
 public:
  InitScope(const InitScope&) = delete;
  InitScope& operator=(const InitScope&) = delete;
  /// Makes buffers real, except while an exception unwinds. Buffers for which memory is lacking stay deferred;
  /// materialize() throws the reason.
  ~InitScope();

 private:
  struct Impl;
  explicit InitScope(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  friend InitScope init_empty_weights(const InitEmptyWeightsOptions& options);
  friend InitScope init_on_device(const at::Device& device);
};

/// Until the returned object ends, this thread's modules are built without memory. Scopes nest; the innermost decides.
[[nodiscard]] ACCELERATE_API InitScope init_empty_weights(const InitEmptyWeightsOptions& options = {});

/// Until the returned object ends, factory functions of this thread that are not told a device use this one:
/// parameters, buffers and all else. With the meta device nothing is recorded and there is no way back.
[[nodiscard]] ACCELERATE_API InitScope init_on_device(const at::Device& device);

/// A tensor without values of its own yet. False for plain meta tensors.
ACCELERATE_API bool is_deferred(const at::Tensor& tensor);

struct MaterializeOptions {
  /// The device of the module, the tensors that were never deferred included. Default: the device on which eager
  /// construction would have put each tensor. Values are computed there in any case and then moved, so that they don't
  /// depend on this choice. The meta device: sizes without values, all initialisers forgotten, generators as they are.
  std::optional<at::Device> device;
};

/// Gives every deferred parameter and buffer its values, the same bits as eager construction. Tensors keep their
/// identity: optimizers, tied weights, hooks and requires_grad stay. May be called for parts of a model in any order,
/// and again, from any thread; but not while other threads draw from the generators that initialisers use.
/// @throws ConfigError naming a tensor that an initialiser reads and that was changed since; ResourceError or
/// c10::Error when memory runs out: what is real stays real.
ACCELERATE_API void materialize(const ModelRef& model, const MaterializeOptions& options = {});

}  // namespace accelerate
