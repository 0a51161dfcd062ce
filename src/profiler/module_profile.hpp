#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace accelerate::profiler {

/// A place in a model's tree, the root first and each module before its children.
struct ProfiledModule {
  std::string name;        ///< within its parent
  std::string class_name;  ///< "Linear"
  std::string settings;    ///< "in_features=5, out_features=8"; empty: it says nothing
  int64_t parent = -1;
  std::vector<const at::TensorImpl*> parameters = {};  ///< its own
  int64_t num_parameters = 0;                          ///< elements, with those of all modules below
};

struct ModuleCost {
  int64_t flops = 0, macs = 0;
  double seconds = 0;  ///< of its operators; on an accelerator until their kernels had ended
};

/// Operations of one forward by module. LibTorch's modules have no hooks, and an operator does not know whose it is.
/// One that is given a module's own parameter is that module's. One that comes between two such is of a module without
/// parameters whose class is the operator's name and that is registered between theirs (an aten::relu between two
/// layers is their ReLU's), and else of the innermost module that has both of theirs in it. Operators before the first
/// and after the last are the root's.
class ModuleProfile {
 public:
  /// @param device  where it computes
  ModuleProfile(std::vector<ProfiledModule> modules, const at::Device& device);
  ~ModuleProfile();
  ModuleProfile(const ModuleProfile&) = delete;
  ModuleProfile& operator=(const ModuleProfile&) = delete;

  /// Records the operators of this thread until stop(). One at a time.
  void start();
  void stop();

  const std::vector<ProfiledModule>& modules() const;
  /// With those of all modules below, by their places in modules(). After stop().
  std::vector<ModuleCost> costs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct ModuleProfileReport {
  int64_t step = 0;  ///< that was profiled
  int64_t ranks = 1;
  int64_t batch_size = 1;      ///< samples of one rank's forward
  int64_t samples = 1;         ///< of all ranks in the step
  int64_t micro_steps = 1;     ///< of the step
  double forward_seconds = 0;  ///< of one micro-step, as backward's
  double backward_seconds = 0;
  double step_seconds = 0;
  double recompute_fwd_factor = 0;  ///< what backward computes again of the forward, as a part of it
  int64_t module_depth = -1;        ///< down to which sums by class are listed; -1: all
  int64_t top_modules = 1;          ///< classes listed of each depth
  bool detailed = true;             ///< with the tree of modules
};
/// As DeepSpeed's FlopsProfiler.print_model_profile() writes it.
std::string text_of(const ModuleProfile& profile, const ModuleProfileReport& report);

}  // namespace accelerate::profiler
