#pragma once

/// The only place where the version is written; CMake reads it from here.
#define ACCELERATE_VERSION "0.1.0"
