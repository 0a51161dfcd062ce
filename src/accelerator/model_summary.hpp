#pragma once

#include "accelerate/accelerator/model_summary.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/engine.hpp"

namespace accelerate {

/// Accelerator::summary(). @param engine  that has the model, or null. Collective.
ModelSummary summarize(const ModelRef& model, const parallel::Engine* engine);

}  // namespace accelerate
