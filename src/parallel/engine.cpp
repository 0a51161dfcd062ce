#include "accelerate/parallel/engine.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/utils/error.hpp"
#include "parallel/layer.hpp"

namespace accelerate::parallel {

Engine::Engine(std::vector<std::unique_ptr<Layer>> layers) : layers_(std::move(layers)) {
  if (layers_.empty()) throw InternalError("Engine: found no layers, expected at least one");
}
// The last layer first: it stands on the others.
Engine::~Engine() {
  while (!layers_.empty()) layers_.pop_back();
}

const Layer* Engine::cutting() const {
  const auto last = std::find_if(layers_.rbegin(), layers_.rend(), [](const auto& layer) { return layer->cuts(); });
  return last == layers_.rend() ? nullptr : last->get();
}

void Engine::before_forward() {
  for (const auto& layer : layers_) layer->before_forward();
}
void Engine::after_forward(const std::vector<at::Tensor>& outputs) {
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) (*layer)->after_forward(outputs);
}
void Engine::leave_forward() noexcept {
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) (*layer)->leave_forward();
}
void Engine::backward(const std::function<void()>& run) {
  std::function<void()> next = run;
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer)
    next = [&one = **layer, next = std::move(next)] { one.backward(next); };
  next();
}
void Engine::before_backward(const at::Tensor& loss) {
  for (const auto& layer : layers_) layer->before_backward(loss);
}
bool Engine::averages(const at::Tensor& parameter) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const auto& layer) { return layer->averages(parameter); });
}
bool Engine::took_part() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->took_part(); });
}
void Engine::after_backward() {
  for (const auto& layer : layers_) layer->after_backward();
}
void Engine::expect_gradients(const std::function<std::vector<at::Tensor>()>& stepped_on) {
  for (const auto& layer : layers_) layer->expect_gradients(stepped_on);
}
void Engine::before_step() {
  for (const auto& layer : layers_) layer->before_step();
}
void Engine::after_step() {
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) (*layer)->after_step();
}

std::optional<at::ScalarType> Engine::input_dtype() const {
  for (const auto& layer : layers_)
    if (const auto dtype = layer->input_dtype()) return dtype;
  return std::nullopt;
}
std::optional<at::ScalarType> Engine::output_dtype() const {
  for (const auto& layer : layers_)
    if (const auto dtype = layer->output_dtype()) return dtype;
  return std::nullopt;
}
bool Engine::keeps_parameters() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->keeps_parameters(); });
}

const char* Engine::always_reduces() const {
  for (const auto& layer : layers_)
    if (const char* const reason = layer->always_reduces()) return reason;
  return nullptr;
}
bool Engine::require_backward_grad_sync() const {
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const auto& layer) { return layer->require_backward_grad_sync(); });
}
void Engine::set_require_backward_grad_sync(bool value) {
  for (const auto& layer : layers_) layer->set_require_backward_grad_sync(value);
}
void Engine::prepare_backward_sync() {
  for (const auto& layer : layers_) layer->prepare_backward_sync();
}
void Engine::resume_accumulation() {
  for (const auto& layer : layers_) layer->resume_accumulation();
}
void Engine::settle_gradients() {
  for (const auto& layer : layers_) layer->settle_gradients();
}

Layer* Engine::stepping() const {
  const auto found =
      std::find_if(layers_.begin(), layers_.end(), [](const auto& layer) { return !layer->step_parts().empty(); });
  return found == layers_.end() ? nullptr : found->get();
}
std::vector<std::vector<at::Tensor>> Engine::step_parts() const {
  const Layer* const layer = stepping();
  return layer ? layer->step_parts() : std::vector<std::vector<at::Tensor>>{};
}
void Engine::place_state(const at::Tensor& parameter, const at::Tensor& state) {
  for (const auto& layer : layers_) layer->place_state(parameter, state);
}
void Engine::before_part(size_t part, const std::vector<at::Tensor>& states) { stepping()->before_part(part, states); }
void Engine::after_part(size_t part, const std::vector<at::Tensor>& states) { stepping()->after_part(part, states); }
bool Engine::steps_at_once() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->steps_at_once(); });
}
void Engine::set_step(const std::function<void(const std::vector<at::Tensor>&)>& step) {
  for (const auto& layer : layers_) layer->set_step(step);
}
bool Engine::steps_ahead() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->steps_ahead(); });
}
void Engine::set_step_ahead(const std::function<void(const std::vector<at::Tensor>&)>& step) {
  for (const auto& layer : layers_)
    if (layer->steps_ahead()) layer->set_step_ahead(step);
}

void Engine::set_apart(bool apart) {
  bool any = false;
  for (const auto& layer : layers_)
    if (layer->replicas()) layer->set_apart(apart), any = true;
  if (!any)
    throw ConfigError(
        "LocalSGD: the ranks hold one replica of the model together, expected several that can train apart: data "
        "parallelism, or FSDP with HYBRID_SHARD (dp_replicate_size)");
}
std::optional<int64_t> Engine::apart() const {
  for (const auto& layer : layers_)
    if (const auto replica = layer->apart()) return replica;
  return std::nullopt;
}
comm::Group* Engine::replicas() const {
  for (const auto& layer : layers_)
    if (auto* const group = layer->replicas()) return group;
  return nullptr;
}

bool Engine::shares_buffers() const {
  return std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) { return layer->shares_buffers(); });
}
void Engine::set_shares_buffers(bool value) {
  for (const auto& layer : layers_) layer->set_shares_buffers(value);
}

std::vector<Held> Engine::pieces() const {
  const Layer* const layer = cutting();
  if (!layer) return {};
  auto pieces = layer->held();
  for (Held& piece : pieces) piece.engine = this;
  return pieces;
}
std::optional<Held> Engine::gradient(const at::Tensor& parameter) const {
  const Layer* const layer = cutting();
  auto gradient = layer ? layer->gradient(parameter) : std::nullopt;
  if (gradient) gradient->engine = this;
  return gradient;
}
void Engine::clear_gradient(const at::Tensor& held) {
  for (const auto& layer : layers_) layer->clear_gradient(held);
}
bool Engine::holds_pieces() const { return cutting() != nullptr; }

void Engine::gather_each(const ShardOf& piece_of, const std::function<void(const Whole&)>& take,
                         bool everywhere) const {
  const Layer* const innermost = cutting();
  if (!innermost) return;
  // The layers with the tensors that each leaves, by the module's tensor; from the innermost outwards.
  std::vector<std::pair<const Layer*, std::unordered_map<const at::TensorImpl*, Held>>> outer;
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    if (!(*layer)->cuts() || layer->get() == innermost) continue;
    auto& held = outer.emplace_back(layer->get(), std::unordered_map<const at::TensorImpl*, Held>{}).second;
    for (Held& one : (*layer)->held()) held.emplace(one.tensor.unsafeGetTensorImpl(), std::move(one));
  }
  if (outer.empty()) return innermost->gather_each(piece_of, take, everywhere);
  innermost->gather_each(
      piece_of,
      [&](Whole whole) {
        for (const auto& [layer, held] : outer)
          if (whole.value.defined())
            whole.value = layer->widen(held.at(whole.parameter.unsafeGetTensorImpl()), whole.value);
        if (everywhere || comm::rank() == 0) take(whole);
      },
      /*everywhere=*/true);
}

void Engine::begin_join() {
  try {
    for (const auto& layer : layers_) layer->begin_join();
  } catch (...) {
    end_join();  // of those that have begun
    throw;
  }
}
void Engine::end_join() noexcept {
  for (const auto& layer : layers_) layer->end_join();
}
std::optional<bool> Engine::shadow_step() {
  for (const auto& layer : layers_)
    if (const auto averaged = layer->shadow_step()) return averaged;
  return std::nullopt;
}
void Engine::finish_join(int64_t source) {
  for (const auto& layer : layers_) layer->finish_join(source);
}

}  // namespace accelerate::parallel
