#pragma once

/// Marks what a shared build of the library exports; everything else is hidden.
#define ACCELERATE_API __attribute__((visibility("default")))
