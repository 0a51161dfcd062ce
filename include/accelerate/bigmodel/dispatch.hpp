#pragma once

/// Models of any size in any memory: each part on a GPU, in host memory or on disk, and brought to where it computes by
/// the operators that touch it (residency.hpp).
///
///     auto net = [] { auto empty = accelerate::init_empty_weights(); return BigModel(options); }();
///     auto model = accelerate::load_checkpoint_and_dispatch(
///         net, "checkpoint", {.device_map = "auto", .max_memory = {{{"cpu", "2GiB"}}}});
///     auto out = model(input);  // or net->forward(input): weights come either way
///     model.hf_device_map();
///
/// - Results are those of the model in memory, bit for bit. Tensors keep their identity, tied weights stay tied.
/// - **"cpu"**: in host memory; copied to the main device for use where that is a GPU (from pinned memory, on a stream
/// of its own, ahead of time).
/// - **"disk"**: the file that has the weights is their home, none is copied unless it must be. On the host they are
/// mapped where they fit into memory, with a thread that reads ahead; else, and for GPUs, they are read by threads of
/// their own into recycled buffers, past the system's cache, but for what it holds already. Weights that were read stay
/// as long as the budget allows. Those that are needed last go first, so a decode loop finds a part of the model
/// present. Until the order of use is known, it is taken to be the order of the modules in the model.
/// - A weight that is written to (training, in-place changes) is kept: in memory, or in a scratch file without a name.
/// The checkpoint never changes.
/// - The result owns all of it: destroy it and touching an offloaded weight is an error that says so.
/// - `module->to(...)` on a dispatched model can't be intercepted: LibTorch would move what it finds. The next call of
/// the result throws a ConfigError that names the first weight that was moved.
/// - With several devices in one process activations go to the device of the weights that they meet; results come back
/// to the device of the inputs. The reference's `offload_state_dict` has no counterpart: loading never holds more than
/// one weight besides what stays.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/model/callable.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate {

/// How offloaded weights travel. The defaults suit most; results don't depend on them.
struct OffloadOptions {
  /// Offloaded weights on each device that computes, bytes at a time; more only where one operator needs more. Default:
  /// what max_memory leaves, or mapped files if the weights fit into free memory, or half of what is free.
  std::optional<int64_t> budget_bytes;
  /// Units fetched ahead of their use. Default: as many as a quarter of the budget holds, 1 to 8.
  std::optional<int64_t> prefetch;
  /// Threads that read from disk.
  int64_t readers = 2;
  /// Never map files, even if they would fit: read them.
  bool always_read = false;
  /// Folder for the values of weights on disk that were changed; nothing stays behind. Empty: the system's for
  /// temporary files.
  std::filesystem::path scratch;
};

struct DispatchOptions {
  /// The device on which parts on "cpu" and "disk" compute. Default: the first GPU of the map, or the host.
  std::optional<at::Device> main_device;
  /// Values by name for parts on "cpu" and "disk", instead of the model's, which may be on the meta device.
  std::map<std::string, at::Tensor> state_dict;
  /// For parts on "disk": a folder in the reference's format. With an index.json it is read; else the weights are
  /// written there, and it is made.
  std::filesystem::path offload_dir;
  /// Instead of the folder's index.json.
  std::optional<OffloadIndex> offload_index;
  /// Buffers of parts on "cpu" and "disk" are offloaded too. Otherwise they stay on the main device.
  bool offload_buffers = false;
  /// Inputs that stay where they are: keys of maps and names of ACCELERATE_FIELDS at the top level of an argument.
  std::vector<std::string> skip_keys;
  /// Classes of modules whose weights are fetched together: those that use their sub-modules' weights without calling
  /// them.
  std::vector<std::string> preload_module_classes;
  /// Operands are brought to the weights' device even if the map has one device.
  bool force_hooks = false;
  OffloadOptions offload;
};

/// A handle on a dispatched model, without the model's type. It is cheap to copy, and the last copy ends the dispatch:
/// keep one as long as the model is used.
class ACCELERATE_API DispatchedModel {
 public:
  /// The device of each module.
  const DeviceMap& hf_device_map() const;
  /// The device that inputs and offloaded weights go to.
  at::Device main_device() const;
  /// Bytes of weights that come and go; 0 when all are in memory or mapped.
  int64_t streamed_bytes() const;
  /// Number of units in which they travel.
  int64_t units() const;
  /// Bytes of weights in few bits, in memory or mapped.
  int64_t code_bytes() const;
  /// @throws ConfigError naming the first weight that was moved or replaced since, by module->to(...) for example.
  void check_intact() const;

  /// For the call path.
  bool moves_inputs() const;
  bool skips(const std::string& key) const;

  struct Impl;
  explicit DispatchedModel(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// A dispatched model of type Model: call it like the model. Runs the hooks of the model (model/hooks.hpp), brings
/// inputs to the main device and results back to where the first input was.
template <ModelLike Model> class Dispatched : public DispatchedModel, public Callable<Dispatched<Model>, Model> {
 public:
  Dispatched(Model model, DispatchedModel core)
      : DispatchedModel(std::move(core)), Callable<Dispatched<Model>, Model>(std::move(model)) {}

  template <class... Args> auto forward(Args&&... args) const {
    check_intact();
    return detail::call_with_hooks(
        this->unwrap(),
        [this](auto&&... inputs) -> decltype(auto) { return run(std::forward<decltype(inputs)>(inputs)...); },
        std::forward<Args>(args)...);
  }

 private:
  template <class... Args> auto run(Args&&... args) const {
    using Output = std::decay_t<decltype(call_forward(this->model(), std::forward<Args>(args)...))>;
    if (!moves_inputs()) return static_cast<Output>(call_forward(this->model(), std::forward<Args>(args)...));
    std::vector<at::Tensor> tensors;
    (detail::collect_tensors(std::as_const(args), tensors), ...);
    std::optional<at::Device> origin;
    for (const auto& tensor : tensors)
      if (!origin && tensor.defined()) origin = tensor.device();
    if constexpr (std::is_void_v<Output>) {
      call_forward(this->model(), sent<Args>(args)...);
    } else {
      Output output = call_forward(this->model(), sent<Args>(args)...);
      if constexpr (detail::may_hold_tensors<Output>) {
        if (origin) return send_to_device(output, *origin);
      }
      return output;
    }
  }
  /// An argument on the main device, but for what skip_keys names.
  template <class T> decltype(auto) sent(std::remove_reference_t<T>& argument) const {
    using U = std::remove_cvref_t<T>;
    if constexpr (nested::detail::is_instance<U, std::map> || nested::detail::is_instance<U, std::unordered_map>) {
      U moved = argument;
      for (auto& [key, value] : moved) {
        if constexpr (std::is_convertible_v<decltype(key), std::string>) {
          if (skips(key)) continue;
        }
        value = send_to_device(value, main_device());
      }
      return moved;
    } else if constexpr (nested::HasFields<U>) {
      U moved = argument;
      std::string names = U::accelerate_field_names();
      size_t at = 0;
      const auto next_name = [&] {
        const size_t begin = names.find_first_not_of(" ,", at), end = names.find_first_of(" ,", begin);
        at = end;
        return names.substr(begin, end == std::string::npos ? end : end - begin);
      };
      std::apply(
          [&](auto&... fields) {
            ((skips(next_name()) ? void() : void(fields = send_to_device(fields, main_device()))), ...);
          },
          moved.accelerate_fields());
      return moved;
    } else if constexpr (detail::may_hold_tensors<U>) {
      return send_to_device(static_cast<const U&>(argument), main_device());
    } else {
      return static_cast<T&&>(argument);
    }
  }
};

/// Spreads a model that has its weights (or whose weights are in `state_dict` or `offload_dir`) over the places of the
/// map. Everything is checked before anything moves.
/// @param device_map  names of modules or tensors, "" for the rest: {{"", 0}}, {{"embed", "cpu"}, {"layers", "disk"}};
/// see make_device_map() for maps that are worked out.
/// @throws ConfigError for keys that name nothing, weights without a place, a GPU that isn't there, parts on disk
/// without offload_dir, a budget below the largest unit (it says how much is needed at least);
///   CheckpointError when the offload folder lacks a weight or has it in another shape.
ACCELERATE_API DispatchedModel dispatch_model(const ModelRef& model, const DeviceMap& device_map,
                                              const DispatchOptions& options = {});

struct LoadAndDispatchOptions {
  /// A map, or a strategy of make_device_map(): "auto", "balanced", "balanced_low_0", "sequential". Empty: the
  /// checkpoint is loaded into the model as load_checkpoint_in_model() does, and stays.
  std::optional<std::variant<std::string, DeviceMap>> device_map;
  /// With a strategy: how much each place may hold. With parts on disk its entry for the main device is the limit for
  /// all weights there, offloaded ones included.
  std::optional<MaxMemory> max_memory;
  std::vector<std::string> no_split_module_classes;
  /// For weights on disk that are converted to another dtype: they are written there once in the reference's format,
  /// instead of being converted at each use.
  std::filesystem::path offload_folder;
  bool offload_buffers = false;
  std::optional<at::ScalarType> dtype;  ///< as LoadCheckpointOptions, like the following
  std::vector<std::string> keep_in_fp32_modules;
  std::vector<std::string> skip_keys;  ///< as DispatchOptions, like the following
  std::vector<std::string> preload_module_classes;
  bool force_hooks = false;
  /// Weights that the checkpoint has in few bits (GGUF's blocks, bitsandbytes' int8, nf4 and fp4) stay so, in the
  /// mapped file, and are computed with as they are (accelerate/codes/codes.hpp); they are frozen. Otherwise they are
  /// decoded when they are loaded or fetched.
  bool keep_codes = false;
  /// With keep_codes: products with the decoded weights, also where a kernel computes on the codes and rounds
  /// activations for that.
  bool exact_products = false;
  bool strict = true;  ///< unlike the reference's: a weight that the checkpoint lacks is an error
  /// Must stay true: a checkpoint of shards by rank is read by Accelerator::load_state().
  bool full_state_dict = true;
  /// Must stay false: every process reads the checkpoint by itself; those of one machine share its pages.
  bool broadcast_from_rank0 = false;
  OffloadOptions offload;
};

/// Loads a checkpoint into a model that may have no memory yet (init_empty_weights) and dispatches it; weights on disk
/// are used where they lie in the checkpoint.
/// @param checkpoint  as check_state_dict(): safetensors, torch.save's, with or without an index; or a .gguf file,
/// whose weights are decoded when they are fetched
/// @throws as load_checkpoint_in_model(), make_device_map() and dispatch_model(); nothing is loaded then.
ACCELERATE_API DispatchedModel load_checkpoint_and_dispatch(const ModelRef& model,
                                                            const std::filesystem::path& checkpoint,
                                                            const LoadAndDispatchOptions& options = {});

/// For cpu_offload() and disk_offload(), which put a whole model in one place.
struct OffloadAllOptions {
  std::optional<at::Device> execution_device;  ///< default: the accelerator, or the host where there is none
  bool offload_buffers = false;
  std::map<std::string, at::Tensor> state_dict;  ///< as DispatchOptions, like the following
  std::vector<std::string> preload_module_classes;
  OffloadOptions offload;
};

/// All weights in host memory, copied to the execution device for use.
ACCELERATE_API DispatchedModel cpu_offload(const ModelRef& model, const OffloadAllOptions& options = {});

/// All weights in the files of `offload_dir`, a folder in the reference's format: read if it has an index.json, else
/// written.
ACCELERATE_API DispatchedModel disk_offload(const ModelRef& model, const std::filesystem::path& offload_dir,
                                            const OffloadAllOptions& options = {});

// The same for the model's own type.

template <ModelLike Model>
[[nodiscard]] Dispatched<Model> dispatch_model(const Model& model, const DeviceMap& device_map,
                                               const DispatchOptions& options = {}) {
  return {model, dispatch_model(ModelRef(model), device_map, options)};
}
template <ModelLike Model>
[[nodiscard]] Dispatched<Model> load_checkpoint_and_dispatch(const Model& model,
                                                             const std::filesystem::path& checkpoint,
                                                             const LoadAndDispatchOptions& options = {}) {
  return {model, load_checkpoint_and_dispatch(ModelRef(model), checkpoint, options)};
}
template <ModelLike Model>
[[nodiscard]] Dispatched<Model> cpu_offload(const Model& model, const OffloadAllOptions& options = {}) {
  return {model, cpu_offload(ModelRef(model), options)};
}
template <ModelLike Model>
[[nodiscard]] Dispatched<Model> disk_offload(const Model& model, const std::filesystem::path& offload_dir,
                                             const OffloadAllOptions& options = {}) {
  return {model, disk_offload(ModelRef(model), offload_dir, options)};
}

}  // namespace accelerate
