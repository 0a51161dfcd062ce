#include "residency/activations/unit_checkpoints.hpp"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

#include "accelerate/residency/recompute.hpp"
#include "residency/activations/operator_tape.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "residency/counters.hpp"
#include "residency/member.hpp"
#include "residency/residency.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

/// This thread's innermost one. It alone writes down: it runs again as a whole. Null: none is at work.
constinit thread_local UnitCheckpoints* innermost_checkpoints = nullptr;

/// A tensor that is saved while no operator runs will not be saved by operators that run again.
class OnlyOperatorsSave final : public SavedTensorHooks {
 public:
  OnlyOperatorsSave(std::shared_ptr<SavedTensorHooks> hooks, std::string unit)
      : hooks_(std::move(hooks)), unit_(std::move(unit)) {}
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    if (!running)
      raise<NotBuiltError>(
          "activation checkpointing of '{}': found a tensor saved for backward by something that is no operator, "
          "probably a torch::autograd::Function, which can't be run again from outside. Call "
          "accelerate::checkpoint([&] {{ … }}) in the model's forward instead, and leave activation_checkpointing off",
          unit_);
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

void UnitCheckpoints::begin() {
  end();
  outer_ = std::exchange(innermost_checkpoints, this);
  scope_.emplace(Link::recompute, *this);
}

void UnitCheckpoints::end() {
  if (!scope_) return;
  close();
  innermost_checkpoints = outer_;
  scope_.reset();
}

void UnitCheckpoints::open(const Unit& unit, const OperatorCall& call) {
  auto span = std::make_shared<Span>();
  span->unit = &unit;
  span->tape = std::make_shared<OperatorTape>(unit.name());
  opening_ = true;
  try {
    std::optional<ActivationOffload> offload;
    if (options_.offload) offload.emplace();
    // The inputs of the unit go by the hooks, as operators' inputs do.
    std::vector<at::Tensor> inputs;
    if (options_.offload)
      inputs = span->tape->take_out(
          call, [](const at::Tensor& tensor) { return Member::of(tensor) != nullptr || !tensor.is_floating_point(); });
    counts::add(ResidencyCount::inputs_offloaded, static_cast<int64_t>(inputs.size()));
    const auto again = [tape = span->tape](const std::vector<at::Tensor>& given) {
      counts::add(ResidencyCount::units_recomputed);
      tape->replay(given);
    };
    span->first_run.emplace(again, inputs, CheckpointOptions{}, /*own_generators=*/false);
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

bool UnitCheckpoints::handle(OperatorCall& call, Next next) {
  if (innermost_checkpoints != this) return false;
  const Unit* touched = nullptr;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t) {
    const Member* member = Member::of(tensor);
    if (member && &member->unit().owner() == &units_ && (!touched || touched->keep())) touched = &member->unit();
  });
  if (touched && (!span_ || touched != span_->unit)) {
    close();
    if (!touched->keep() && at::GradMode::is_enabled() && call.facts.needs_bytes) open(*touched, call);
  }
  if (!span_) return false;
  const auto span = span_;
  const bool before = std::exchange(span->guard->running, true);
  struct Restore {
    bool& running;
    bool before;
    ~Restore() { running = before; }
  } const restore{span->guard->running, before};
  span->tape->record(call, next);
  return true;
}

UnitCheckpoints::Pause::Pause() : paused_(innermost_checkpoints) {
  if (paused_ && paused_->opening_) paused_ = nullptr;
  if (!paused_) return;
  paused_->close();
  innermost_checkpoints = nullptr;
}

UnitCheckpoints::Pause::~Pause() {
  if (paused_) innermost_checkpoints = paused_;
}

}  // namespace accelerate::residency
