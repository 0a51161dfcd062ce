#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace accelerate {

/// The work of a device that was done once, to be done again.
class GraphRecording {
 public:
  GraphRecording() = default;
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;
  virtual ~GraphRecording() = default;
  /// On the current stream of its device; does not wait for it.
  virtual void replay() = 0;
};

/// Calls `work` some times, and then once more while the device records it. Errors of the former calls are passed on;
/// the recorded one's are a ConfigError. The device has done all that when it returns.
using Recorder = std::unique_ptr<GraphRecording> (*)(const c10::Device& device, const std::function<void()>& work);

/// Null in builds without CUDA.
extern const Recorder kCudaRecorder;

}  // namespace accelerate
