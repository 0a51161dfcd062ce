#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "accelerate/trackers/value.hpp"

/// TensorBoard's summaries, as torch.utils.tensorboard writes them: protocol buffers `Summary`, for EventFile::add.
/// Source: tensorboard/compat/proto/summary.proto, tensorboard/plugins/*/plugin_data.proto
namespace accelerate::summaries {

enum class ScalarForm {
  simple,           ///< a float
  tensor,           ///< a float, in the form that TensorBoard 2 writes
  double_precision  ///< a double in that form
};
std::string scalar(const std::string& tag, double value, ScalarForm form);
/// Markdown; TensorBoard shows it as `tag`/text_summary.
std::string text(const std::string& tag, const std::string& markdown);
/// @param hwc  [H, W, C] of uint8
std::string image(const std::string& tag, const at::Tensor& hwc);
/// With bins that grow by a tenth from 1e-12 to 1e20, and below zero. Values that are not finite are left out.
/// @param max_bins  joins neighbouring ones. @throws ShapeError when nothing finite is there
std::string histogram(const std::string& tag, const at::Tensor& values, std::optional<int64_t> max_bins);
/// The three that make a run a session in the HParams plugin: what there is, the values, and how it ended.
/// @param hparams  numbers, texts and truth values
std::string hparams_experiment(const TrackerValues& hparams, double time);
std::string hparams_start(const TrackerValues& hparams, double time);
std::string hparams_end(double time);

}  // namespace accelerate::summaries
