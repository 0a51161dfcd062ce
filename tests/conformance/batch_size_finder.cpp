// find_executable_batch_size with a function that fits up to a size, and which errors count as "out of memory".
#include <stdexcept>

#include "accelerate/utils/error.hpp"
#include "accelerate/utils/memory.hpp"
#include "runner.hpp"

namespace conformance::batch_size_finder_cases {
namespace {

json try_sizes(int64_t start, int64_t fits, json& tried, const std::function<int64_t(int64_t)>& reduce = nullptr) {
  json result;
  std::string what;
  const bool thrown = throws_error(
      [&] {
        result = accelerate::find_executable_batch_size(
            [&](int64_t size) {
              tried.push_back(size);
              if (size > fits) throw std::runtime_error("CUDA out of memory. Tried to allocate more than there is");
              return size;
            },
            {.starting_batch_size = start, .reduce_batch_size_fn = reduce});
      },
      &what);
  return thrown ? json{{"error", what}} : result;
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("find_executable_batch_size")) {
    json tried = json::array();
    const json result = try_sizes(row[0], row[1], tried);
    // Python's text starts with the name of its error type.
    const bool right =
        row[3].is_object()
            ? result.is_object() && result["error"].get<std::string>().find(
                                        "No executable batch size found, reached zero.") != std::string::npos
            : result == row[3];
    report.check(tried == row[2] && right,
                 [&] { return row.dump() + "\n    found " + tried.dump() + " " + result.dump(); });
  }
  if (file.contains("custom_halving")) {
    const json& sizes = file["custom_halving"];
    json tried = json::array();
    try_sizes(sizes.front(), sizes.back(), tried, [](int64_t size) { return size / 2; });
    report.check(tried == sizes, [&] { return "custom_halving " + sizes.dump() + "\n    found " + tried.dump(); });
  }
  for (const json& row : file.at("should_reduce_batch_size")) {
    const std::string text = row[0];
    // The reference looks at RuntimeErrors only: a case whose text names another type was raised as that type.
    const bool reduce = text.starts_with("ValueError: ")
                            ? accelerate::should_reduce_batch_size(std::invalid_argument(text.substr(12)))
                            : accelerate::should_reduce_batch_size(std::runtime_error(text));
    report.check(reduce == row[1], [&] { return row.dump() + "\n    found " + (reduce ? "true" : "false"); });
  }
}

const Registration registration("batch_size_finder", {run});

}  // namespace
}  // namespace conformance::batch_size_finder_cases
