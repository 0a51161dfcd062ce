#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "model/cuda_graphs/recorder.hpp"

namespace accelerate {

/// A model's forward, recorded with inputs of its own, and repeated for those of each call. Any recorder will do, which
/// is how tests get by without a GPU.
class GraphedCall {
 public:
  using Forward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

  /// The inputs, of which there is one at least, say the device and what calls will bring.
  GraphedCall(ModelRef model, Forward forward, const std::vector<at::Tensor>& inputs, Recorder record);
  GraphedCall(const GraphedCall&) = delete;
  GraphedCall& operator=(const GraphedCall&) = delete;
  /// Waits for the last call: the memory that it reads goes to others now.
  ~GraphedCall();

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs);

 private:
  struct Weight {
    std::string name;
    at::Tensor tensor;
    const void* data;  ///< where the recording reads it
  };

  void find_weights();
  void record_with(Recorder record);
  void check_inputs(const std::vector<at::Tensor>& inputs) const;
  void check_model(const std::vector<at::Tensor>& inputs) const;

  ModelRef model_;
  Forward forward_;
  at::Device device_;
  std::vector<Weight> weights_;
  std::mutex mutex_;  ///< for what follows
  std::vector<at::Tensor> inputs_, outputs_;
  std::unique_ptr<GraphRecording> recording_;
  std::optional<c10::Event> done_;  ///< the last call, which may have been on another stream; none on the CPU
};

}  // namespace accelerate
