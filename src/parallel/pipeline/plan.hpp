#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/pipeline.hpp"

namespace accelerate::parallel::pipeline {

/// The parts of stages: the parameters of one module and, if it is not to be split, of all below it.
struct StageLayer {
  std::string path;
  std::vector<size_t> parameters;  ///< indices in ModelRef::parameters()
  int64_t bytes = 0;
  double milliseconds = 0;
};

/// Whole layers if the options name classes or the model has lists of them (and enough for `stages`), else single
/// modules; in the order of registration. With split points given, single modules.
std::vector<StageLayer> layers_of(const ModelRef& model, const PippyOptions& options, int64_t stages);

/// Puts layers in the order in which the forward comes to them. @param touched  parameters by their first use; a layer
/// that was not used stays behind the one registered before it.
void sort_by_use(std::vector<StageLayer>& layers, const std::vector<size_t>& touched);

/// First layer of each stage but the first. @throws ConfigError for names that don't fit.
std::vector<size_t> begins_at(const std::vector<StageLayer>& layers, const std::vector<std::string>& split_points,
                              int64_t stages);
/// The same, so that the heaviest stage is as light as it can be. @throws ConfigError when there are fewer layers than
/// stages.
std::vector<size_t> balanced(const std::vector<StageLayer>& layers, PipelineBalance balance, int64_t stages);

}  // namespace accelerate::parallel::pipeline
