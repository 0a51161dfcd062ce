#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "config/value.hpp"

namespace accelerate {

/// The files that `dvclive` writes, for `dvc metrics`, `dvc plots`, `dvc params` and what shows them. They are small
/// and change with every step; each is whole at any time.
class DvcliveFiles {
 public:
  /// The init_kwargs of dvclive.Live as far as they concern files: dir, resume, dvcyaml. Removes an earlier run's files
  /// from the folder, unless it goes on with that. @throws ConfigError for others; CheckpointError when the folder
  /// can't be written to.
  explicit DvcliveFiles(const config::Value& options);

  /// Adds to params.yaml. @throws CheckpointError
  void params(const config::Value& values);
  struct Mark {
    std::optional<int64_t> step;  ///< nothing: the one after the last
    double time = 0;              ///< seconds since 1970
  };
  /// A step: adds a row to each value's plots/metrics/NAME.tsv and the values to
  /// metrics.json. @param values  an object of numbers and texts. @param options  timestamp, plot. @return the names of
  /// what is neither number nor text, and left out. @throws ConfigError, CheckpointError
  std::vector<std::string> log(const config::Value& values, const Mark& mark, const config::Value& options);
  /// The file of an image of this name, plots/images/NAME; its folder exists then. @throws ConfigError when that leads
  /// out of the folder.
  std::filesystem::path image(const std::string& name);
  /// The step that is next without being named, or the last one that was.
  int64_t step() const { return step_.value_or(0); }

 private:
  std::filesystem::path place(const char* kind, const std::string& name) const;
  void write_summary();
  void write_dvcyaml();

  std::filesystem::path folder_, dvcyaml_;
  config::Value params_ = config::Value::object(), summary_ = config::Value::object();
  std::optional<int64_t> step_;
  bool has_plots_ = false, has_images_ = false;
  std::string written_dvcyaml_;
};

}  // namespace accelerate
