#include "residency/activations/saved_tensor_hooks.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

using torch::autograd::Engine;
using NodePtr = decltype(torch::autograd::Edge::function);  // a shared_ptr up to LibTorch 2.12, then an intrusive_ptr

struct HooksEntry {
  const SavedTensorHooksScope* owner;
  std::shared_ptr<SavedTensorHooks> hooks;
};

std::vector<HooksEntry>& stack() {
  thread_local std::vector<HooksEntry> entries;
  return entries;
}

/// One saved variable's link from autograd to our hooks.
class Adapter final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Adapter(std::shared_ptr<SavedTensorHooks> hooks) : hooks_(std::move(hooks)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = std::exchange(hooks_, nullptr)->pack(tensor); }
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }

 private:
  std::shared_ptr<SavedTensorHooks> hooks_;
  std::unique_ptr<PackedTensor> packed_;
};

/// Everything is the next engine's business except the default hooks, and those too when the calling thread has none of
/// ours.
class HooksEngine final : public Engine {
 public:
  explicit HooksEngine(Engine& next) : next_(next) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return next_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePtr root,
      torch::autograd::InputBuffer&& input) override {
    return next_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return next_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& entries = stack();
    if (entries.empty()) return next_.get_default_saved_variable_hooks();
    return entries.back().hooks ? std::make_unique<Adapter>(entries.back().hooks) : nullptr;
  }

 private:
  Engine& next_;
};

std::atomic<HooksEngine*> installed{nullptr};

/// Puts our engine in front of the present one: LibTorch's own, or what somebody else (Python) has installed, before or
/// since. Engines live until the process ends, because autograd's threads do, so none is ever deleted; one that
/// somebody else has wrapped goes on working below.
void install() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Engine& present = Engine::get_default_engine();
  if (&present == installed.load()) return;
  installed = new HooksEngine(present);
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *installed.load(); });
}

class KeptTensor final : public PackedTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor) : stamp_(tensor), tensor_(without_graph(tensor)) {}
  at::Tensor unpack() override {
    stamp_.check("backward");
    return tensor_;
  }

 private:
  VersionStamp stamp_;
  at::Tensor tensor_;
};

}  // namespace

SavedTensorHooksScope::SavedTensorHooksScope(std::shared_ptr<SavedTensorHooks> hooks) {
  install();
  stack().push_back({this, std::move(hooks)});
}

SavedTensorHooksScope::~SavedTensorHooksScope() {
  // The last one nearly always; but a unit's checkpoint may begin in a scope of the program and end behind it.
  std::erase_if(stack(), [this](const HooksEntry& entry) { return entry.owner == this; });
}

const std::shared_ptr<SavedTensorHooks>& current_saved_tensor_hooks() {
  static const std::shared_ptr<SavedTensorHooks> none;
  return stack().empty() ? none : stack().back().hooks;
}

int64_t saved_tensor_hooks_depth() { return static_cast<int64_t>(stack().size()); }

VersionStamp::VersionStamp(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()), version_(counter_.current_version()) {}

void VersionStamp::check(const std::string& what) const {
  const auto now = counter_.current_version();
  if (now == version_) return;
  raise<ShapeError>(
      "{}: found a tensor saved for backward at version {}, expected version {}. It, or a view of it, was "
      "modified in place after an operator saved it (an optimizer step between forward and backward does "
      "that too), so gradients would be wrong. Use the out-of-place operator, or modify a clone.",
      what, now, version_);
}

at::Tensor without_graph(const at::Tensor& tensor) { return tensor.requires_grad() ? tensor.detach() : tensor; }

std::unique_ptr<PackedTensor> keep_in_place(const at::Tensor& tensor) { return std::make_unique<KeptTensor>(tensor); }

}  // namespace accelerate::residency
