#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>

#include "model/cuda_graphs/recorder.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Libraries choose kernels, allocate workspaces and load code when they first run, which can't be recorded. PyTorch's
/// make_graphed_callables takes as many.
constexpr int kRunsBefore = 3;

class CudaRecording : public GraphRecording {
 public:
  /// On the current stream, which must not be the default one.
  explicit CudaRecording(const std::function<void()>& work) {
    // Loaders and watchdogs may ask the device what they like meanwhile: only this thread is held to the rules.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      give_up();
      throw;
    }
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  /// The stream leaves its recording; that the recording is no good is known already.
  void give_up() noexcept {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    }
  }

  at::cuda::CUDAGraph graph_;
};

std::unique_ptr<GraphRecording> record(const c10::Device& device, const std::function<void()>& work) {
  const c10::impl::VirtualGuardImpl cuda(device.type());
  cuda.synchronizeDevice(device.index());  // inputs and weights have their last values
  const c10::StreamGuard side(cuda.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  for (int i = 0; i < kRunsBefore; ++i) work();
  cuda.synchronizeStream(side.current_stream());
  try {
    return std::make_unique<CudaRecording>(work);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    raise<ConfigError>(
        "CudaGraphModel: the model runs, but the device can't record it: {}; expected operators of the device alone. "
        "Forwards that wait for the device (item(), nonzero, masks as indices, copies to the host) can't be repeated; "
        "call the model as it is",
        text_of(error));
  }
}

}  // namespace

const Recorder kCudaRecorder = record;

}  // namespace accelerate
