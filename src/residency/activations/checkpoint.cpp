#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <exception>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <variant>

#include "accelerate/residency/recompute.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "residency/activations/replay_state.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "residency/activations/unit_checkpoints.hpp"
#include "residency/counters.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

// How it works. In its first run a checkpointed closure has a Frame on the stack of hooks. The Frame gives each tensor
// that an operator saves a numbered slot and keeps of it only what the determinism check needs. In backward, the first
// saved variable that is unpacked makes the Frame run its Recipe again with a Rerun on the stack, which counts along
// and fills the slots. Autograd then collects each slot's tensor, which is forgotten at once. Filled slots belong to
// one backward pass (graph task).
//
// A checkpoint within another one's first run takes a slot of the outer Frame for its Recipe and drops its own: what
// its closure captured is an intermediate tensor of the outer one. When it needs the recipe it asks the outer Frame for
// that slot, so that depth is no special case.

namespace accelerate {
namespace residency {
namespace {

/// Leaves a closure whose remaining operators nobody needs. A std::exception, because autograd's engine, which a
/// closure may call, passes on nothing else.
class StopRerun final : public std::exception {
 public:
  explicit StopRerun(const void* rerun) : rerun(rerun) {}
  const char* what() const noexcept override {
    return "accelerate::checkpoint: early stop; a closure that catches it must rethrow it";
  }
  const void* rerun;
};

/// Everything needed to run a closure again.
struct Recipe {
  std::function<void(std::vector<at::Tensor>)> closure;
  std::vector<torch::autograd::SavedVariable> inputs;
  ReplayState state;

  void run() const {
    std::vector<at::Tensor> tensors;
    for (const auto& input : inputs) tensors.push_back(input.unpack());
    const ReplayState::Scope scope(state);
    const at::AutoGradMode grad(true);
    closure(std::move(tensors));
  }
};

/// The content that a slot gets in the second run; monostate while it is empty.
using Content = std::variant<std::monostate, at::Tensor, std::shared_ptr<const Recipe>>;

/// The facts that must be the same in both runs.
struct Expectation {
  at::DimVector sizes;
  at::ScalarType dtype;
  at::Device device;
  bool recipe;  ///< the slot is for a nested checkpoint

  static Expectation of(const Content& content) {
    const auto* tensor = std::get_if<at::Tensor>(&content);
    if (!tensor) return {{}, at::ScalarType::Undefined, at::kCPU, true};
    return {at::DimVector(tensor->sizes()), tensor->scalar_type(), tensor->device(), false};
  }
  bool operator==(const Expectation&) const = default;
  std::string text() const {
    if (recipe) return "a nested checkpoint";
    std::ostringstream out;
    out << "a tensor " << at::IntArrayRef(sizes) << ' ' << dtype << " on " << device;
    return out.str();
  }
};

class Rerun;

class Frame final : public SavedTensorHooks, public std::enable_shared_from_this<Frame> {
 public:
  /// Holds a slot: alive as long as autograd, or the Frame of a nested checkpoint, may ask for its content.
  class Claim {
   public:
    Claim(std::shared_ptr<Frame> frame, size_t slot) : frame_(std::move(frame)), slot_(slot) {}
    Claim(Claim&&) = default;
    ~Claim() {
      if (frame_) frame_->abandon(slot_);
    }
    Content take() const { return frame_->take(slot_); }

   private:
    std::shared_ptr<Frame> frame_;
    size_t slot_;
  };

  /// @param outer  the slot of an enclosing Frame that will give the recipe again
  Frame(const CheckpointOptions& options, std::shared_ptr<Recipe> recipe, std::optional<Claim> outer)
      : early_stop_(options.early_stop),
        compare_(options.determinism_check == "default"),
        outer_(std::move(outer)),
        recipe_(std::move(recipe)) {}

  void end_of_first_run() noexcept {
    std::shared_ptr<Recipe> dropped;
    recipe()->state.forget_unused_generators();
    const MutexLock lock(mutex_);
    first_run_over_ = true;
    if (outer_) dropped = std::move(recipe_);
  }

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    struct Packed final : PackedTensor {
      Packed(Claim claim, const at::Tensor& tensor) : claim(std::move(claim)), stamp(tensor) {}
      at::Tensor unpack() override {
        stamp.check("checkpoint");
        auto tensor = std::get<at::Tensor>(claim.take());
        stamp.check("checkpoint, after its closure ran again");
        return tensor;
      }
      Claim claim;
      VersionStamp stamp;
    };
    return std::make_unique<Packed>(claim(tensor), tensor);
  }

  /// A new slot for what the second run will offer at this place.
  Claim claim(const Content& first) {
    const MutexLock lock(mutex_);
    slots_.push_back({Expectation::of(first), true});
    return {shared_from_this(), slots_.size() - 1};
  }

 private:
  friend class Rerun;
  struct Slot {
    Expectation expectation;
    bool claimed;
  };
  /// The contents of the slots in one backward pass.
  struct Pass {
    std::vector<Content> contents;
    std::vector<bool> taken;
  };

  Content take(size_t slot) {
    // -1: somebody looks at a saved variable outside a backward pass.
    const int pass = torch::autograd::get_current_graph_task_id();
    if (runner_ == std::this_thread::get_id())
      throw ConfigError(
          "checkpoint: the closure, running again in backward, differentiates its own result of the first run, which "
          "waits for this run. Expected that it uses only what it computes or captured before; a result was probably "
          "stored in a captured object. Store it outside of the closure.");
    const MutexLock running(running_);
    auto content = collect(pass, slot);
    if (std::holds_alternative<std::monostate>(content)) {
      run_again(pass, slot);
      content = collect(pass, slot);
    }
    if (pass == -1) forget(pass);
    return content;
  }

  Content collect(int pass, size_t slot) {
    const MutexLock lock(mutex_);
    const auto found = passes_.find(pass);
    if (found == passes_.end() || slot >= found->second.contents.size()) return {};
    found->second.taken[slot] = true;
    return std::exchange(found->second.contents[slot], {});
  }

  void abandon(size_t slot) {
    std::vector<Content> dropped;  // destroyed after the lock is released: other things may go with a tensor
    const MutexLock lock(mutex_);
    slots_[slot].claimed = false;
    for (auto& [id, pass] : passes_)
      if (slot < pass.contents.size()) dropped.push_back(std::exchange(pass.contents[slot], {}));
  }

  void forget(int pass) {
    Pass dropped;
    const MutexLock lock(mutex_);
    if (const auto found = passes_.find(pass); found != passes_.end()) {
      dropped = std::move(found->second);
      passes_.erase(found);
    }
  }

  void run_again(int pass, size_t asked) ACCELERATE_REQUIRES(running_);
  std::shared_ptr<Recipe> recipe() {
    const MutexLock lock(mutex_);
    return recipe_;
  }

  const bool early_stop_, compare_;
  const std::optional<Claim> outer_;
  Mutex running_;  ///< held while the closure runs again
  std::atomic<std::thread::id> runner_;
  Mutex mutex_;  ///< never held while other code runs
  std::shared_ptr<Recipe> recipe_ ACCELERATE_GUARDED_BY(mutex_);
  bool first_run_over_ ACCELERATE_GUARDED_BY(mutex_) = false;
  std::vector<Slot> slots_ ACCELERATE_GUARDED_BY(mutex_);
  std::map<int, Pass> passes_ ACCELERATE_GUARDED_BY(mutex_);
};

/// The hooks of a second run.
class Rerun final : public SavedTensorHooks {
 public:
  Rerun(Frame& frame, int pass, size_t asked) : frame_(frame), pass_(pass) {
    const MutexLock lock(frame.mutex_);
    first_run_over_ = frame.first_run_over_;
    auto& [contents, taken] = frame.passes_[pass];
    contents.resize(frame.slots_.size());
    taken.resize(frame.slots_.size());
    wanted_.resize(frame.slots_.size());
    // Only operators that unpack twice ask twice for a tensor that this pass has taken; then it is computed again.
    for (size_t i = 0; i < wanted_.size(); ++i) {
      wanted_[i] =
          i == asked || (frame.slots_[i].claimed && !taken[i] && std::holds_alternative<std::monostate>(contents[i]));
      if (wanted_[i]) last_wanted_ = i;
    }
  }

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    offer(without_graph(tensor));
    return keep_in_place(tensor);  // the second run's graph serves a closure that differentiates within itself
  }

  /// The second run has come to the next slot.
  void offer(Content content) {
    const size_t slot = next_++;
    if (slot < wanted_.size()) {
      const MutexLock lock(frame_.mutex_);
      const auto& expected = frame_.slots_[slot].expectation;
      const auto found = Expectation::of(content);
      if (frame_.compare_ ? found != expected : found.recipe != expected.recipe) throw_different(slot, found, expected);
      if (wanted_[slot] && frame_.slots_[slot].claimed) frame_.passes_[pass_].contents[slot] = std::move(content);
    }
    if (frame_.early_stop_ && slot >= last_wanted_) throw StopRerun(this);
  }

  /// After a second run that reached its end.
  void check_count() const {
    const auto saved = wanted_.size();
    // A closure that differentiates within itself is run again before its first run is over.
    const bool more_is_to_come = !first_run_over_ && next_ > saved;
    if (frame_.early_stop_ ? next_ <= last_wanted_ : next_ != saved && !more_is_to_come)
      raise<ShapeError>(
          "checkpoint: the closure saved {} tensors when it ran again in backward, expected {} as in its first run. {}",
          next_, saved, kWhy);
  }

 private:
  static constexpr const char* kWhy =
      "It did something else the second time: it depends on a value that has changed since (a captured reference, a "
      "counter, a training flag), or on random numbers with preserve_rng_state=false. Capture such values by copy.";

  [[noreturn]] void throw_different(size_t slot, const Expectation& found, const Expectation& expected) const {
    raise<ShapeError>(
        "checkpoint: what the closure saved at place {} of {} when it ran again in backward is {}, expected "
        "{} as in its first run. {}{}",
        slot, wanted_.size(), found.text(), expected.text(), kWhy,
        found.recipe == expected.recipe ? " Pass determinism_check=\"none\" if the difference is meant." : "");
  }

  Frame& frame_;
  const int pass_;
  bool first_run_over_ = false;
  std::vector<bool> wanted_;
  size_t last_wanted_ = 0;
  size_t next_ = 0;
};

void Frame::run_again(int pass, size_t asked) {
  struct Runner {
    explicit Runner(std::atomic<std::thread::id>& id) : id(id) { id = std::this_thread::get_id(); }
    ~Runner() { id = std::thread::id(); }
    std::atomic<std::thread::id>& id;
  } const runner(runner_);
  std::shared_ptr<const Recipe> recipe;
  bool first_in_pass = false;
  {
    const MutexLock lock(mutex_);
    recipe = recipe_;
    first_in_pass = !passes_.contains(pass);
  }
  if (first_in_pass && pass != -1) {
    torch::autograd::Engine::get_default_engine().queue_callback([frame = weak_from_this(), pass] {
      if (const auto alive = frame.lock())
        alive->forget(pass);  // a pass that wants only some gradients leaves slots filled
    });
  }
  if (!recipe) recipe = std::get<std::shared_ptr<const Recipe>>(outer_->take());
  const auto rerun = std::make_shared<Rerun>(*this, pass, asked);
  const CheckpointRun timed(/*again=*/true);
  try {
    const SavedTensorHooksScope scope(rerun);
    recipe->run();
    rerun->check_count();
  } catch (const StopRerun& stop) {
    if (stop.rerun != rerun.get()) throw;
  } catch (...) {
    forget(pass);
    throw;
  }
}

}  // namespace
}  // namespace residency

namespace detail {

struct CheckpointedCall::State {
  State(std::shared_ptr<residency::Frame> frame, std::unique_ptr<residency::UnitCheckpoints::Pause> pause,
        std::shared_ptr<residency::Recipe> recipe)
      : pause(std::move(pause)), recipe(std::move(recipe)), frame(frame), scope(std::move(frame)) {}
  std::unique_ptr<residency::UnitCheckpoints::Pause> pause;
  std::shared_ptr<residency::Recipe> recipe;  ///< while `listening` writes into it
  std::optional<residency::ReplayState::Listening> listening;
  std::shared_ptr<residency::Frame> frame;
  residency::SavedTensorHooksScope scope;
  residency::CheckpointRun run{/*again=*/false};
};

CheckpointedCall::CheckpointedCall(std::function<void(std::vector<at::Tensor>)> run_again,
                                   const std::vector<at::Tensor>& inputs, const CheckpointOptions& options,
                                   bool own_generators) {
  using namespace residency;
  if (options.determinism_check != "default" && options.determinism_check != "none")
    raise<ConfigError>("checkpoint: found determinism_check \"{}\", expected \"default\" or \"none\".",
                       options.determinism_check);
  auto pause = std::make_unique<UnitCheckpoints::Pause>();
  auto recipe = std::make_shared<Recipe>(Recipe{std::move(run_again), {}, ReplayState(options.preserve_rng_state)});
  const auto around = current_saved_tensor_hooks();
  auto* const frame = dynamic_cast<Frame*>(around.get());
  auto* const rerun = dynamic_cast<Rerun*>(around.get());
  {
    // A checkpoint within another one keeps nothing that could go anywhere.
    std::optional<ActivationOffload> to_host;
    if (const auto rules = checkpoint_rules(); rules && rules->inputs_on_host && !frame && !rerun)
      to_host.emplace(ActivationOffloadOptions{.min_bytes = 0});
    for (const auto& input : inputs) recipe->inputs.emplace_back(input, /*is_output=*/false);
    if (to_host) counts::add(residency::ResidencyCount::inputs_offloaded, to_host->stats().moved);
  }
  std::optional<Frame::Claim> outer;
  if (frame) outer.emplace(frame->claim(recipe));
  else if (rerun) rerun->offer(recipe);
  state_ =
      std::make_unique<State>(std::make_shared<Frame>(options, recipe, std::move(outer)), std::move(pause), recipe);
  if (own_generators) state_->listening.emplace(recipe->state);
}

CheckpointedCall::~CheckpointedCall() {
  state_->listening.reset();
  state_->recipe.reset();
  state_->frame->end_of_first_run();
}

}  // namespace detail
}  // namespace accelerate
