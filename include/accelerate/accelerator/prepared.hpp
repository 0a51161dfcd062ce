#pragma once

/// A model behind `Accelerator::prepare`: the same module, with what training over several processes and in mixed
/// precision needs around its forward.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/accelerator/offload_states.hpp"
#include "accelerate/accelerator/tagged_checkpoint.hpp"
#include "accelerate/model/callable.hpp"
#include "accelerate/precision.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

class FP8Scope;  // accelerate/precision/fp8.hpp

namespace detail {

/// The forward of a prepared model, also when it throws.
class ACCELERATE_API ForwardScope {
 public:
  explicit ForwardScope(PreparedModel& model);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  /// The module's forward has run; what follows computes as without fp8. Collective where scales are remembered.
  void finish();

 private:
  parallel::Engine* engine_;
  std::unique_ptr<FP8Scope> fp8_;  ///< null: no product in 8 bits
};

}  // namespace detail

/// Cheap-to-copy handle; copies share the model. `m(...)` runs the module's forward: under autocast if mixed precision
/// is on (results come back as fp32, or as a sharded model's output_dtype says), with products in 8 bits if it is fp8
/// (in evaluation only where the recipe says so), and so that backward averages
/// gradients over ranks; hooks of the model (model/hooks.hpp) run around it. `m->...` is your own module; calling
/// m->forward directly leaves out autocast and hooks, while gradients are averaged (or sharded) all the same.
///
/// With several processes a training forward is collective when the module has buffers (they are broadcast).
template <ModelLike Model> class Prepared : public Callable<Prepared<Model>, Model> {
 public:
  Prepared(Model model, std::shared_ptr<detail::PreparedModel> core)
      : Callable<Prepared<Model>, Model>(std::move(model)), core_(std::move(core)) {}

  template <class... Args> auto forward(Args&&... args) const {
    using Output = std::decay_t<decltype(run(std::forward<Args>(args)...))>;
    detail::ForwardScope scope(*core_);
    if constexpr (std::is_void_v<Output>) {
      call_in_precision(std::forward<Args>(args)...);
      scope.finish();
      after_forward({});
    } else {
      Output output = call_in_precision(std::forward<Args>(args)...);
      scope.finish();
      if (core_->output_dtype) output = cast_floating(output, *core_->output_dtype);
      else if (core_->autocast_dtype) output = convert_outputs_to_fp32(output);
      std::vector<at::Tensor> tensors;
      if (core_->engine) nested::for_each_tensor(output, [&](const at::Tensor& t) { tensors.push_back(t); });
      after_forward(tensors);
      return output;
    }
  }

  /// Under DeepSpeed: the model, its optimizer and schedule in DeepSpeed's files, see tagged_checkpoint.hpp.
  /// Collective.
  /// @return the folder of the tag
  std::filesystem::path save_checkpoint(const std::filesystem::path& save_dir, std::optional<std::string> tag = {},
                                        const ClientState& client_state = {},
                                        const SaveTagOptions& options = {}) const {
    return detail::save_tag(*core_, save_dir, std::move(tag), client_state, options);
  }
  LoadedTag load_checkpoint(const std::filesystem::path& load_dir, std::optional<std::string> tag = {},
                            const LoadTagOptions& options = {}) const {
    return detail::load_tag(*core_, load_dir, std::move(tag), options);
  }

  /// Under DeepSpeed, at stages 1 to 3: moves states of the model from the device to the host until reload_states().
  /// Until then a forward, a backward or a step that needs one of them is a ConfigError that names it. What lies on the
  /// host already stays there; where the model computes on the host, only what is gathered and buffers are freed.
  /// Collective.
  /// @throws ConfigError for nvme, at stage 0, with offload_param, and where no prepared optimizer trains the model
  void offload_states(const OffloadStatesOptions& options = {}) const { detail::offload_states(*core_, options); }
  /// All of them are where they were, and training goes on exactly. Without offload_states(): nothing. Collective.
  void reload_states(bool non_blocking = false) const { detail::reload_states(*core_, non_blocking); }

  const std::shared_ptr<detail::PreparedModel>& core() const { return core_; }

 private:
  /// The module's forward with its hooks.
  template <class... Args> auto run(Args&&... args) const {
    return accelerate::call(this->model(), std::forward<Args>(args)...);
  }
  template <class... Args> decltype(auto) call_in_precision(Args&&... args) const {
    std::optional<AutocastGuard> region;
    if (core_->autocast_dtype) region.emplace(core_->device_type, core_->autocast_dtype, core_->autocast);
    if (core_->input_dtype) return run(cast_input(args)...);
    return run(std::forward<Args>(args)...);
  }
  template <class T> T cast_input(const T& input) const {
    if constexpr (nested::all_tensors<T>) return cast_floating(input, *core_->input_dtype);
    else return input;
  }
  template <class T> static T cast_floating(const T& value, at::ScalarType dtype) {
    return nested::map_tensors(
        value, [dtype](const at::Tensor& t) { return t.defined() && t.is_floating_point() ? t.to(dtype) : t; });
  }
  void after_forward(const std::vector<at::Tensor>& outputs) const {
    if (core_->engine) core_->engine->after_forward(outputs);
  }

  std::shared_ptr<detail::PreparedModel> core_;
};

}  // namespace accelerate
