#include "residency/activations/unit_checkpoints.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

#include "accelerate/residency/recompute.hpp"
#include "accelerate/utils/error.hpp"
#include "residency/activations/operator_tape.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "residency/deferred/tape.hpp"
#include "residency/member.hpp"
#include "residency/operator_facts.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {
namespace {

thread_local UnitCheckpoints* innermost_checkpoints = nullptr;

/// What is saved while no operator runs will not be saved by operators that run again.
class OnlyOperatorsSave final : public SavedTensorHooks {
 public:
  OnlyOperatorsSave(std::shared_ptr<SavedTensorHooks> hooks, std::string unit)
      : hooks_(std::move(hooks)), unit_(std::move(unit)) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    if (!running)
      throw NotBuiltError("activation checkpointing of '" + unit_ +
                          "': found a tensor saved for backward by something that is no operator, probably a "
                          "torch::autograd::Function, which can't be run again from outside. Call "
                          "accelerate::checkpoint([&] { … }) in the "
                          "model's forward instead, and leave activation_checkpointing off");
    return hooks_->pack(tensor);
  }
  bool running = false;

 private:
  std::shared_ptr<SavedTensorHooks> hooks_;
  std::string unit_;
};

}  // namespace

struct UnitCheckpoints::Span {
  const Unit* unit;
  std::shared_ptr<OperatorTape> tape;
  std::optional<detail::CheckpointedCall> first_run;
  std::shared_ptr<OnlyOperatorsSave> guard;
  std::optional<SavedTensorHooksScope> guarded;
};

UnitCheckpoints* UnitCheckpoints::current() { return innermost_checkpoints; }

void UnitCheckpoints::begin() {
  end();
  active_ = true;
  outer_ = std::exchange(innermost_checkpoints, this);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void UnitCheckpoints::end() {
  if (!std::exchange(active_, false)) return;
  close();
  innermost_checkpoints = outer_;
  if (!innermost_checkpoints) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

void UnitCheckpoints::open(const Unit& unit, const torch::jit::Stack& arguments) {
  auto span = std::make_shared<Span>();
  span->unit = &unit;
  span->tape = std::make_shared<OperatorTape>(unit.name());
  opening_ = true;
  try {
    std::optional<ActivationOffload> offload;
    if (options_.offload) offload.emplace();
    // What the unit begins with goes by the hooks, as operators' inputs do.
    std::vector<at::Tensor> inputs;
    if (options_.offload)
      inputs = span->tape->take_out(arguments, [](const at::Tensor& tensor) {
        return Member::of(tensor) != nullptr || !tensor.is_floating_point();
      });
    span->first_run.emplace([tape = span->tape](std::vector<at::Tensor> given) { tape->replay(given); }, inputs,
                            CheckpointOptions{});
  } catch (...) {
    opening_ = false;
    throw;
  }
  opening_ = false;
  span->guard = std::make_shared<OnlyOperatorsSave>(current_saved_tensor_hooks(), unit.name());
  span->guarded.emplace(span->guard);
  span_ = std::move(span);
}

void UnitCheckpoints::close() {
  const auto span = std::move(span_);
  if (!span) return;
  span->guarded.reset();
  span->first_run.reset();
  span->tape->close();
}

void UnitCheckpoints::run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::function<void()>& call) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const Unit* touched = nullptr;
  for (const auto& argument : arguments)
    deferred::for_each_tensor(argument, [&](const at::Tensor& tensor) {
      const Member* member = Member::of(tensor);
      if (member && &member->unit().owner() == &units_ && (!touched || touched->keep())) touched = &member->unit();
    });
  if (touched && (!span_ || touched != span_->unit)) {
    close();
    if (!touched->keep() && at::GradMode::is_enabled() && facts_of(op.schema()).needs_bytes)
      open(*touched, torch::jit::Stack(arguments.begin(), arguments.end()));
  }
  if (!span_) return call();
  const auto span = span_;
  const bool before = std::exchange(span->guard->running, true);
  struct Restore {
    bool& running;
    bool before;
    ~Restore() { running = before; }
  } const restore{span->guard->running, before};
  span->tape->record(op, stack, call);
}

UnitCheckpoints::Pause::Pause()
    : paused_(innermost_checkpoints && !innermost_checkpoints->opening_ ? innermost_checkpoints : nullptr) {
  if (!paused_) return;
  paused_->close();
  innermost_checkpoints = nullptr;
}

UnitCheckpoints::Pause::~Pause() {
  if (paused_) innermost_checkpoints = paused_;
}

}  // namespace accelerate::residency
