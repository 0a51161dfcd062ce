#include <algorithm>

#include "accelerate/state.hpp"
#include "accelerate/state/loader_status.hpp"
#include "utils/raise.hpp"

namespace accelerate {

struct GradientState::Shared {
  GradientAccumulationPlugin plugin;
  bool sync_gradients = true;
  std::vector<LoaderStatus*> loaders;  ///< innermost last; loaders remove themselves
};

std::shared_ptr<GradientState::Shared>& GradientState::shared() {
  static auto state = std::make_shared<Shared>();
  return state;
}

GradientState::GradientState() : shared_(shared()) {}

GradientState::GradientState(const GradientAccumulationPlugin& plugin) : shared_(shared()) {
  if (plugin.num_steps < 1)
    raise<ConfigError>("gradient accumulation: num_steps is {}, expected at least 1", plugin.num_steps);
  shared_->plugin = plugin;
}

bool GradientState::sync_gradients() const { return shared_->sync_gradients; }
void GradientState::set_sync_gradients(bool value) const { shared_->sync_gradients = value; }
int64_t GradientState::num_steps() const { return shared_->plugin.num_steps; }
void GradientState::set_num_steps(int64_t value) const {
  if (value < 1) raise<ConfigError>("gradient accumulation: num_steps is {}, expected at least 1", value);
  shared_->plugin.num_steps = value;
}
bool GradientState::adjust_scheduler() const { return shared_->plugin.adjust_scheduler; }
bool GradientState::sync_with_dataloader() const { return shared_->plugin.sync_with_dataloader; }
bool GradientState::sync_each_batch() const { return shared_->plugin.sync_each_batch; }
GradientAverage GradientState::average() const { return shared_->plugin.average; }

LoaderStatus* GradientState::active_dataloader() const {
  return shared_->loaders.empty() ? nullptr : shared_->loaders.back();
}
bool GradientState::end_of_dataloader() const { return in_dataloader() && active_dataloader()->end_of_dataloader(); }
int64_t GradientState::remainder() const { return in_dataloader() ? active_dataloader()->remainder() : -1; }
int64_t GradientState::own_rows() const { return in_dataloader() ? active_dataloader()->own_rows() : 0; }
void GradientState::add_dataloader(LoaderStatus* loader) const { shared_->loaders.push_back(loader); }
void GradientState::remove_dataloader(LoaderStatus* loader) const { std::erase(shared_->loaders, loader); }

void GradientState::reset() { shared() = std::make_shared<Shared>(); }

}  // namespace accelerate
