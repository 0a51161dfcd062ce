#include "accelerate/model/cuda_graph.hpp"

#include <utility>

#include "model/graphed_call.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// The one that there is. Said before anything is computed.
Recorder recorder_for(const at::Tensor& first) {
  if (!kCudaRecorder)
    raise<NotBuiltError>(
        "CudaGraphModel: this build has no CUDA graphs, expected a LibTorch for NVIDIA's GPUs and CUDA's headers when "
        "it was configured (docs/gpu.md); call the model as it is, or let Python compile it and run it as a "
        "CompiledModel");
  if (!first.defined() || !first.is_cuda())
    raise<ConfigError>(
        "CudaGraphModel: the first input is {}, expected a tensor on one of NVIDIA's GPUs; call the model as it is, "
        "there are graphs on no other device",
        first.defined() ? "on " + first.device().str() : "undefined");
  return kCudaRecorder;
}

}  // namespace

CudaGraphModelImpl::CudaGraphModelImpl(const ModelRef& model, Forward forward, const std::vector<at::Tensor>& inputs)
    : torch::nn::Module("CudaGraphModel"),
      graph_(std::make_unique<GraphedCall>(model, std::move(forward), inputs, recorder_for(inputs.front()))) {
  eval();
}

CudaGraphModelImpl::~CudaGraphModelImpl() = default;

std::vector<at::Tensor> CudaGraphModelImpl::forward(const std::vector<at::Tensor>& inputs) { return (*graph_)(inputs); }

at::Tensor CudaGraphModelImpl::only(const std::vector<at::Tensor>& outputs) const {
  if (outputs.size() != 1)
    raise<ShapeError>(
        "CudaGraphModel: the result has {} tensors, expected one; call it with a std::vector of tensors, which gives "
        "all",
        outputs.size());
  return outputs.front();
}

}  // namespace accelerate
