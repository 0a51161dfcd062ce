#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "parallel/engines.hpp"
#include "state/deepspeed_plugins.hpp"

namespace accelerate::zero {

/// The plugins of a process, by name, with every field decided; one holds for what is prepared next. All Accelerators
/// that were not given others share them.
class Plugins final : public detail::DeepSpeedPlugins {
 public:
  /// The plugins of the request: several by name, one, or that of the environment, whose names are empty.
  static std::shared_ptr<Plugins> of(const parallel::EngineRequest& request);

  const DeepSpeedPlugin& get(const std::optional<std::string>& name) const override;
  void select(const std::string& name) override;
  std::string text() const override;
  bool makes_models_empty() const override;

  size_t active() const { return active_; }
  size_t size() const { return by_name_.size(); }
  DeepSpeedPlugin& operator[](size_t index) { return by_name_[index].second; }
  const std::string& name(size_t index) const { return by_name_[index].first; }

 private:
  size_t index_of(const std::string& name) const;
  std::vector<std::pair<std::string, DeepSpeedPlugin>> by_name_;
  /// The request, with names: the same request again means these plugins.
  std::vector<std::pair<std::string, DeepSpeedPlugin>> given_;
  size_t active_ = 0;
};

/// A configuration as Python prints a dict.
std::string python_text(const DeepSpeedConfig& config);

}  // namespace accelerate::zero
