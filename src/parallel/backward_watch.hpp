#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <utility>

namespace accelerate::parallel {

/// Whether the last backward that an engine was asked in has thrown: autograd calls back at the end of those that have
/// not.
class BackwardWatch {
 public:
  /// Within a backward, with each gradient. @return whether it is this backward's first
  bool begin() {
    if (std::exchange(*runs_, true)) return false;
    torch::autograd::Engine::get_default_engine().queue_callback([runs = runs_] { *runs = false; });
    return true;
  }
  /// Outside of backwards, once for each that has.
  bool threw() { return torch::autograd::get_current_graph_task_id() == -1 && std::exchange(*runs_, false); }

 private:
  std::shared_ptr<bool> runs_ = std::make_shared<bool>(false);
};

}  // namespace accelerate::parallel
