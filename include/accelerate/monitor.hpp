#pragma once

/// Telling `accelerate launch --monitor` about steps that Accelerator does not see. Declares nothing itself.

#include "accelerate/utils/monitor.hpp"
