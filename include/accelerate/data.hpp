#pragma once

/// Data loading: which sample goes to which rank, and where did we stop?
#include "accelerate/data/collate.hpp"
#include "accelerate/data/dataset.hpp"
#include "accelerate/data/loader.hpp"
#include "accelerate/data/metrics.hpp"
#include "accelerate/data/prepared.hpp"
#include "accelerate/data/sampler.hpp"
