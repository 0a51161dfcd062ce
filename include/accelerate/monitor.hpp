#pragma once

/// Telling `accelerate launch --monitor` about what Accelerator does not see. Declares nothing itself.

#include "accelerate/utils/monitor.hpp"
