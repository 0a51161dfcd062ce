#pragma once

// A contestant prints one JSON line for each thing that it measures, at once, so that a failure costs what comes
// after it and nothing before. peer.py prints the same.

#include <torch/torch.h>

#include <ATen/DeviceAccelerator.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "accelerate/state.hpp"

namespace bench {

struct Result {
  std::vector<double> answer = {};   ///< compared within a tolerance before any time is
  std::vector<int64_t> tokens = {};  ///< compared exactly
  std::vector<double> ms = {};       ///< of one step, token or call; the runner takes the median
  std::map<std::string, double> facts = {};
};

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Where all contestants compute: the first accelerator, or the CPU with ACCELERATE_USE_CPU=true.
inline at::Device device() { return accelerate::PartialState().device(); }

/// Until the device has done all that it was given.
inline void wait_for(const at::Device& device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

inline std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}
inline std::string number(int64_t value) { return std::to_string(value); }

template <class T> std::string list(const std::vector<T>& values) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : ",") + number(value);
  return "[" + text + "]";
}

inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + "\"";
}

/// Runs `body`, which returns a Result, and prints it, or what it threw.
template <class Body> void measure(const std::string& name, Body&& body) {
  std::string line = "{\"measure\":" + quoted(name);
  try {
    const Result result = body();
    line += ",\"device\":" + quoted(device().str()) + ",\"answer\":" + list(result.answer) +
            ",\"tokens\":" + list(result.tokens) + ",\"ms\":" + list(result.ms);
    for (const auto& [fact, value] : result.facts) line += "," + quoted(fact) + ":" + number(value);
  } catch (const std::exception& error) {
    line += ",\"error\":" + quoted(error.what());
  }
  std::cout << line << "}" << std::endl;
}

}  // namespace bench
