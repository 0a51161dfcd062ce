#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

/// Tests against the real Python packages and on the real data; scripts/test.sh sets both variables.
namespace support {

/// The interpreter that has torch, safetensors, tokenizers and transformers.
inline std::optional<std::string> python() {
  const char* path = std::getenv("ACCELERATE_TEST_PYTHON");
  return path && *path ? std::optional<std::string>(path) : std::nullopt;
}

/// The folder that scripts/fetch_data.sh filled.
inline std::optional<std::filesystem::path> data_dir() {
  const char* path = std::getenv("ACCELERATE_TEST_DATA");
  return path && *path ? std::optional<std::filesystem::path>(path) : std::nullopt;
}

struct PythonResult {
  int exit_code = -1;
  std::string output;  ///< stdout and stderr together
};

/// Runs a script of the source tree (a path below its root) with arguments and waits for it. Scripts of one test
/// program share what they import (python_server.py).
PythonResult run_python(const std::string& script, const std::vector<std::string>& arguments);

}  // namespace support

/// Skips, with the reason, where the variable is not set.
#define SKIP_WITHOUT_PYTHON()                                                                                 \
  if (!support::python())                                                                                     \
  GTEST_SKIP() << "ACCELERATE_TEST_PYTHON is not set: no Python with the reference packages to compare with " \
                  "(scripts/test.sh sets it)"
#define SKIP_WITHOUT_DATA()                                                                                 \
  if (!support::data_dir())                                                                                 \
  GTEST_SKIP() << "ACCELERATE_TEST_DATA is not set: no weights and data (scripts/fetch_data.sh gets them, " \
                  "scripts/test.sh sets it)"
