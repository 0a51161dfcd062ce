#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "accelerate/trackers/tracker.hpp"
#include "trackers/record.hpp"
#include "utils/fd.hpp"

namespace accelerate {

/// Values as JSON, and back. What JSON has no numbers for is {"$number": "nan"}, "inf" or "-inf"; names in maps that
/// begin with a dollar get another one in front. docs/formats/json_lines.md.
nlohmann::ordered_json to_json(const TrackerValue& value);
/// With names as they are, and numbers that JSON can't write as numbers all the same.
nlohmann::ordered_json to_plain_json(const TrackerValue& value);
/// @throws CheckpointError for what to_json does not write
TrackerValue value_from_json(const nlohmann::ordered_json& json);
/// A tensor on the host as {"shape", "dtype", "data"}, and back.
nlohmann::ordered_json tensor_to_json(const at::Tensor& tensor);
at::Tensor tensor_from_json(const nlohmann::ordered_json& json);

/// Writes records as lines of JSON behind what is in the file. All that log() was called for is out of the process
/// after flush().
class JsonLinesTracker : public GeneralTracker {
 public:
  struct Options {
    std::string project_name;
    std::filesystem::path path;
  };
  explicit JsonLinesTracker(Options options) : options_(std::move(options)) {}

  std::string name() const override { return "jsonl"; }
  bool requires_logging_directory() const override { return true; }
  bool takes(TrackerData) const override { return true; }
  /// Makes the folders of the path. @throws CheckpointError
  void start() override;
  void store_init_configuration(const TrackerValues& config) override;
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) override;
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs = {}) override;
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs = {}) override;
  void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                     const TrackerValues& log_kwargs = {}) override;
  void flush() override;
  void finish() override;
  const std::filesystem::path& path() const { return options_.path; }

 private:
  void line(const char* kind, std::optional<int64_t> step, const TrackerValues& log_kwargs,
            const nlohmann::ordered_json& content);

  Options options_;
  Fd file_;
  std::string pending_;
};

/// One line that was read.
struct JsonLine {
  std::string project_name;
  Record record;  ///< null: the run began or ended there
  TrackerValues log_kwargs;
};
/// Gives the records of a file to `take`, in their order. A last line that breaks off is left out: whoever wrote it was
/// killed.
/// @return whether there was none such @throws CheckpointError naming the line that is damaged
bool read_json_lines(const std::filesystem::path& path, const std::function<void(JsonLine)>& take);

}  // namespace accelerate
