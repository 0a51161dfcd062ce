#pragma once

/// The parts of `prepare_pippy` (accelerate/accelerator/inference.hpp): stages of a model on the ranks, and one call of
/// its forward over them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The measure that "auto" split points make equal over the stages, as far as whole layers allow.
enum class PipelineBalance {
  bytes,  ///< of parameters
  time,   ///< of a forward with the example inputs, measured on rank 0, which needs all weights for that
};

/// "auto", or names of modules, each of which begins a stage: one name less than there are processes, in the order in
/// which the forward comes to them.
struct SplitPoints : std::vector<std::string> {
  using vector::vector;
  SplitPoints(const char* name)
      : vector{name} {}  // NOLINT(google-explicit-constructor): `.split_points = "auto"`, as in the reference
  SplitPoints(std::vector<std::string> names) : vector(std::move(names)) {}  // NOLINT(google-explicit-constructor)
};

struct PippyOptions {
  SplitPoints split_points = "auto";
  /// Classes of modules that "auto" leaves in one piece, by their own name ("BertLayer"). Empty: the members of module
  /// lists that have modules of their own.
  std::vector<std::string> no_split_module_classes = {};
  PipelineBalance balance = PipelineBalance::bytes;
  /// Parts of a batch that are under way at the same time; 0: as many as processes. A batch with fewer rows has fewer
  /// parts.
  int64_t num_chunks = 0;
  /// Every rank gets the result; else the last rank has it, and the others tensors of the same sizes on the meta
  /// device.
  bool gather_output = false;
};

struct PipelineStage {
  std::vector<std::string> modules;  ///< in the order of the forward
  int64_t parameter_bytes = 0;
  double milliseconds = 0;  ///< of the measured forward; 0 when balanced by bytes
};

struct PipelineReport {
  std::vector<PipelineStage> stages;  ///< by rank
  int64_t held_bytes = 0;   ///< parameters and buffers that this rank has in memory, tied ones of other stages included
  int64_t model_bytes = 0;  ///< of the whole model
  // Of the last call, on this rank:
  int64_t operators = 0;   ///< that ran here for this stage
  int64_t skipped = 0;     ///< that belong to other stages and gave sizes only
  int64_t everywhere = 0;  ///< on inputs and constants, which all ranks have
  int64_t tensors_sent = 0, tensors_received = 0, bytes_sent = 0, bytes_received = 0;
};

namespace parallel {

class ACCELERATE_API Pipeline {
 public:
  /// Collective. Plans the stages, and gives parameters of other stages back to the system. `example` runs the model's
  /// forward once, or is null.
  /// @throws ConfigError for split points that don't fit, and for a forward that can't be split (naming the operator);
  /// ShapeError when ranks hold different models; CommError.
  Pipeline(const ModelRef& model, const PippyOptions& options, const std::function<void()>& example);
  ~Pipeline();

  PipelineReport report() const;
  const std::vector<std::string>& split_points() const;  ///< module names, also where they were found automatically
  int64_t num_stages() const;

 private:
  friend class PipelineCall;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One forward over all stages. Collective; leaving it early by an exception tells the other ranks.
class ACCELERATE_API PipelineCall {
 public:
  /// @param inputs  all tensors of the arguments in their order; rank 0's values and sizes are everyone's.
  PipelineCall(Pipeline& pipeline, const std::vector<at::Tensor>& inputs);
  PipelineCall(const PipelineCall&) = delete;
  PipelineCall& operator=(const PipelineCall&) = delete;
  ~PipelineCall();

  int64_t num_chunks() const;
  /// The tensors of a part, one after the other.
  at::Tensor next_input();
  /// Runs the model on the part whose inputs were taken.
  void run(const std::function<void()>& forward);
  /// A tensor of a part's result on its way to the last rank; what this rank has of it.
  at::Tensor take(const at::Tensor& result);
  /// The whole of all parts' results at one place.
  at::Tensor join(const std::vector<at::Tensor>& parts);
  /// All parts are through; waits until everything has left this rank.
  void finish();
  /// A joined result as the caller gets it.
  at::Tensor deliver(const at::Tensor& joined);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace parallel
}  // namespace accelerate
