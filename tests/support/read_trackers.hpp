#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

/// Logged values as the real packages of trackers find them. Those are in a virtual environment of their own, since
/// they don't go together with the packages of the other tests.
namespace support {

/// The interpreter that has them; scripts/test.sh sets the variable.
inline std::string trackers_python() {
  const char* const path = std::getenv("ACCELERATE_TEST_TRACKERS_PYTHON");
  return path ? path : "";
}

/// Runs a program of that environment in the current folder. @return its output
inline std::string in_trackers_venv(const std::string& command) {
  const std::string folder = std::filesystem::path(trackers_python()).parent_path().string();
  std::FILE* const pipe = ::popen(("PATH=" + folder + ":$PATH " + command + " 2>&1").c_str(), "r");
  std::string output;
  char bytes[4096];
  for (size_t got; (got = std::fread(bytes, 1, sizeof(bytes), pipe)) > 0;) output.append(bytes, got);
  EXPECT_EQ(::pclose(pipe), 0) << command << "\n" << output;
  return output;
}

/// By tests/dist/read_trackers.py, which says what there is.
inline nlohmann::json read_trackers(const std::string& name, const std::string& where) {
  const std::string output = in_trackers_venv("'" + trackers_python() + "' " + ACCELERATE_SOURCE_DIR +
                                              "/tests/dist/read_trackers.py " + name + " '" + where + "'");
  const size_t place = output.find("FOUND ");
  if (place == std::string::npos) {
    ADD_FAILURE() << output;
    return nlohmann::json::object();
  }
  return nlohmann::json::parse(output.substr(place + 6));
}

}  // namespace support

#define SKIP_WITHOUT_TRACKERS_PYTHON()                                                                               \
  if (support::trackers_python().empty())                                                                            \
  GTEST_SKIP() << "ACCELERATE_TEST_TRACKERS_PYTHON is not set: no Python with the packages of the trackers to read " \
                  "with (scripts/test.sh sets it)"
