#pragma once

/// A prepared model: the same module, whose forward fits training over several processes and in mixed precision.

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "accelerate/model/callable.hpp"
#include "accelerate/precision.hpp"

namespace accelerate {

class FP8Scope;    // accelerate/precision/fp8.hpp
struct LoadedTag;  // accelerate/accelerator/tagged_checkpoint.hpp, with the two options
struct LoadTagOptions;
struct SaveTagOptions;
struct OffloadStatesOptions;  // accelerate/parallel/offload_states.hpp
using ClientState = std::map<std::string, c10::IValue>;

namespace parallel {
class Engine;
using Engines = std::vector<std::shared_ptr<Engine>>;
}  // namespace parallel
namespace detail {
struct PreparedModel;  // accelerate/run_state/prepared_model.hpp

/// The engine of each; null where a model has none.
ACCELERATE_API parallel::Engines engines_of(const std::vector<std::shared_ptr<PreparedModel>>& models);
/// The prepared model keeps `owner`, which owns its weights.
ACCELERATE_API void keep_owner(PreparedModel& model, std::shared_ptr<const void> owner);

/// The forward of a prepared model, also when it throws.
class ACCELERATE_API ForwardScope {
 public:
  explicit ForwardScope(PreparedModel& model);
  ~ForwardScope();
  void begin_autocast();  ///< until finish(), if the model's precision is mixed
  void finish();  ///< of the module's forward, with its autocast and fp8; collective where scales are remembered
  bool has_engine() const { return engine_ != nullptr; }  ///< else after_forward() does nothing
  void after_forward(const std::vector<at::Tensor>& outputs);
  /// Dtypes that floating-point inputs and results become; unset: they stay, but results under autocast become fp32.
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;
  bool autocasts() const;

 private:
  PreparedModel& model_;
  parallel::Engine* engine_;
  std::optional<AutocastGuard> autocast_;
  std::unique_ptr<FP8Scope> fp8_;  ///< null: no product in 8 bits
};

/// The base of all handles on prepared models, whatever the type of the model.
class ACCELERATE_API PreparedHandle {
 public:
  /// Under DeepSpeed: the model, its optimizer and schedule in DeepSpeed's files, see tagged_checkpoint.hpp, which the
  /// caller includes. Collective. @return the folder of the tag
  std::filesystem::path save_checkpoint(const std::filesystem::path& save_dir, std::optional<std::string> tag = {},
                                        const ClientState& client_state = {}) const;
  std::filesystem::path save_checkpoint(const std::filesystem::path& save_dir, std::optional<std::string> tag,
                                        const ClientState& client_state, const SaveTagOptions& options) const;
  LoadedTag load_checkpoint(const std::filesystem::path& load_dir, std::optional<std::string> tag = {}) const;
  LoadedTag load_checkpoint(const std::filesystem::path& load_dir, std::optional<std::string> tag,
                            const LoadTagOptions& options) const;
  /// Under DeepSpeed, at stages 1 to 3: moves states of the model from the device to the host until reload_states().
  /// Until then a forward, a backward or a step that needs one of them is a ConfigError that names it. States on the
  /// host stay there; where the model computes on the host, only gathered ones and buffers are freed. Collective.
  /// Options are of parallel/offload_states.hpp, which the caller includes.
  /// @throws ConfigError for nvme, at stage 0, with offload_param, and where no prepared optimizer trains the model
  void offload_states() const;
  void offload_states(const OffloadStatesOptions& options) const;
  /// All of them are where they were, and training goes on exactly. Without offload_states(): nothing. Collective.
  void reload_states(bool non_blocking = false) const;
  const std::shared_ptr<PreparedModel>& core() const { return core_; }

 protected:
  explicit PreparedHandle(std::shared_ptr<PreparedModel> core) : core_(std::move(core)) {}

 private:
  std::shared_ptr<PreparedModel> core_;
};

}  // namespace detail

/// Cheap-to-copy handle; copies share the model. `m(...)` runs the module's forward: under autocast if mixed precision
/// is on (results come back as fp32, or as a sharded model's output_dtype says), with products in 8 bits if it is fp8
/// (in evaluation only where the recipe says so), and so that backward averages gradients over ranks; hooks of the
/// model (model/hooks.hpp) run around it. `m->...` is your own module; calling m->forward directly leaves out autocast
/// and hooks, while gradients are averaged (or sharded) all the same. With several processes a training forward is
/// collective when the module has buffers (they are broadcast).
template <ModelLike Model> class Prepared : public Callable<Prepared<Model>, Model>, public detail::PreparedHandle {
 public:
  Prepared(Model model, std::shared_ptr<detail::PreparedModel> core)
      : Callable<Prepared<Model>, Model>(std::move(model)), PreparedHandle(std::move(core)) {}

  template <class... Args> auto forward(Args&&... args) const {
    using Output = std::decay_t<decltype(run(std::forward<Args>(args)...))>;
    detail::ForwardScope scope(*core());
    scope.begin_autocast();
    if constexpr (std::is_void_v<Output>) {
      run_on(scope.input_dtype(), std::forward<Args>(args)...);
      scope.finish();
      scope.after_forward({});
    } else {
      Output output = run_on(scope.input_dtype(), std::forward<Args>(args)...);
      scope.finish();
      if (const auto dtype = scope.output_dtype()) output = cast_floating(output, *dtype);
      else if (scope.autocasts()) output = convert_outputs_to_fp32(output);
      std::vector<at::Tensor> tensors;
      if (scope.has_engine()) nested::for_each_tensor(output, [&](const at::Tensor& t) { tensors.push_back(t); });
      scope.after_forward(tensors);
      return output;
    }
  }

 private:
  template <class... Args> auto run(Args&&... args) const { return call(this->model(), std::forward<Args>(args)...); }
  template <class... Args> decltype(auto) run_on(std::optional<at::ScalarType> input_dtype, Args&&... args) const {
    if (input_dtype) return run(cast_input(args, *input_dtype)...);
    return run(std::forward<Args>(args)...);
  }
  template <class T> static T cast_input(const T& input, at::ScalarType dtype) {
    if constexpr (nested::all_tensors<T>) return cast_floating(input, dtype);
    else return input;
  }
  template <class T> static T cast_floating(const T& value, at::ScalarType dtype) {
    return nested::map_tensors(
        value, [dtype](const at::Tensor& t) { return t.defined() && t.is_floating_point() ? t.to(dtype) : t; });
  }
};

}  // namespace accelerate
