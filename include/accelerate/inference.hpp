#pragma once

/// Inference over several processes: pipelines of a model's stages. Declares nothing itself.

#include "accelerate/accelerator/inference.hpp"
