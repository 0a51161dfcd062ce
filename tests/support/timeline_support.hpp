#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ranks.hpp"

/// Traces of a few events, whose numbers can be counted by hand. Times are microseconds.
namespace timeline_test {

using nlohmann::json;

struct Trace {
  json events = json::array();
  json head = json::object();
  int64_t pid = 4711;

  Trace& add(const std::string& category, const std::string& name, double begin, double end, int64_t thread = 1) {
    events.push_back({{"ph", "X"},
                      {"cat", category},
                      {"name", name},
                      {"pid", pid},
                      {"tid", thread},
                      {"ts", begin},
                      {"dur", end - begin}});
    return *this;
  }
  Trace& op(const std::string& name, double begin, double end, int64_t thread = 1) {
    return add("cpu_op", "aten::" + name, begin, end, thread);
  }
  Trace& ours(const std::string& kind, double begin, double end, int64_t bytes = 0, const std::string& subject = "x",
              int64_t thread = 1) {
    return add("user_annotation", "accelerate::" + kind + " " + subject + " bytes=" + std::to_string(bytes), begin, end,
               thread);
  }
  Trace& profiler_step(int64_t number, double begin, double end) {
    return add("user_annotation", "ProfilerStep#" + std::to_string(number), begin, end);
  }
  Trace& of(int64_t rank, int64_t world_size) {
    head["distributedInfo"] = {{"rank", rank}, {"world_size", world_size}, {"backend", "gloo"}};
    return *this;
  }
  std::string text() const {
    json all = head;
    all["traceEvents"] = events;
    return all.dump(1);
  }
};

/// An empty folder of this name in the test's own.
inline std::filesystem::path folder(const std::string& name) {
  const auto path = std::filesystem::path(support::scratch_dir()) / name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

inline std::filesystem::path write(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
  return file;
}

inline json read(const std::filesystem::path& file) {
  std::ifstream in(file);
  return json::parse(in);
}

}  // namespace timeline_test
