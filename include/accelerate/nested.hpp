#pragma once

/// Walking through nested batches. Declares nothing itself.

#include "accelerate/utils/nested.hpp"
