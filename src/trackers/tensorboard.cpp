#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "config/yaml.hpp"
#include "trackers/built_in.hpp"
#include "trackers/event_file.hpp"
#include "trackers/images.hpp"
#include "trackers/json_lines.hpp"
#include "trackers/keyword_arguments.hpp"
#include "trackers/summaries.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using Steady = std::chrono::steady_clock;

/// Nested maps as names with slashes, lists as texts; without nulls, which the HParams plugin does not know.
void flatten_hparams(const TrackerValues& values, const std::string& prefix, TrackerValues& flat) {
  for (const auto& [name, value] : values) {
    if (const auto* map = value.map()) flatten_hparams(*map, prefix + name + "/", flat);
    else if (value.list()) flat.emplace(prefix + name, to_plain_json(value).dump());
    else if (!std::holds_alternative<std::nullptr_t>(value.value)) flat.emplace(prefix + name, value);
  }
}

/// A cell of a Markdown table.
std::string cell_of(const TrackerValue& value) {
  std::string text = value.text() ? *value.text() : to_plain_json(value).dump();
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

class TensorBoardTracker : public GeneralTracker {
 public:
  struct Options {
    std::filesystem::path folder;
    EventFile::Options file;
    std::chrono::duration<double> flush_secs;
  };
  explicit TensorBoardTracker(Options options) : options_(std::move(options)) {}
  std::string name() const override { return "tensorboard"; }
  bool requires_logging_directory() const override { return true; }
  bool takes(TrackerData) const override { return true; }
  void start() override { events_.emplace(options_.folder, time(), options_.file); }

  void store_init_configuration(const TrackerValues& config) override {
    const auto path = options_.folder / "hparams.yml";
    std::ofstream out(path);
    out << config::write_yaml(to_plain_json(config));
    if (!out.flush()) raise<CheckpointError>("tensorboard: '{}' can't be written", path.string());
    TrackerValues flat;
    flatten_hparams(config, "", flat);
    if (flat.empty()) return;
    add(summaries::hparams_experiment(flat, time()), {}, {});
    add(summaries::hparams_start(flat, time()), {}, {});
    has_hparams_ = true;
  }

  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) override {
    const KeywordArguments kwargs("tensorboard: log_kwargs", log_kwargs, {"walltime", "new_style", "double_precision"});
    const bool new_style = kwargs.truth("new_style", false);
    const auto form = !new_style                                ? summaries::ScalarForm::simple
                      : kwargs.truth("double_precision", false) ? summaries::ScalarForm::double_precision
                                                                : summaries::ScalarForm::tensor;
    std::string not_taken;
    for (const auto& [tag, value] : values) {
      if (const auto number = value.number()) add(summaries::scalar(tag, *number, form), step, kwargs);
      else if (const auto* text = value.text()) add(summaries::text(tag, *text), step, kwargs);
      else if (!value.map() || !log_together(tag, *value.map(), step, kwargs)) not_taken = tag;
    }
    if (!not_taken.empty())
      raise<ConfigError>("tensorboard: '{}' is {}, expected a number, a text, or a map of numbers", not_taken,
                         to_plain_json(values.at(not_taken)).dump());
  }

  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs) override {
    const KeywordArguments kwargs("tensorboard: log_kwargs", log_kwargs, {"walltime", "dataformats"});
    for (const auto& [tag, image] : images) {
      const auto grid = image_grid(images_as_nhwc(tag, image, log_kwargs));
      add(summaries::image(tag, grid.size(2) == 1 ? grid.expand({-1, -1, 3}) : grid), step, kwargs);
    }
  }

  /// TensorBoard has no tables, but texts with tables in them.
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs) override {
    const KeywordArguments kwargs("tensorboard: log_kwargs", log_kwargs, {"walltime"});
    std::string markdown = "|", rule = "|";
    for (const auto& column : columns) markdown += ' ' + cell_of(column) + " |", rule += " --- |";
    markdown += '\n' + rule + '\n';
    for (const auto& row : rows) {
      markdown += '|';
      for (const auto& cell : row) markdown += ' ' + cell_of(cell) + " |";
      markdown += '\n';
    }
    add(summaries::text(table_name, markdown), step, kwargs);
  }

  void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                     const TrackerValues& log_kwargs) override {
    const KeywordArguments kwargs("tensorboard: log_kwargs", log_kwargs, {"walltime", "max_bins"});
    const auto most = kwargs.whole("max_bins");
    if (most && *most < 1) raise<ConfigError>("tensorboard: log_kwargs has max_bins {}, expected 1 or more", *most);
    add(summaries::histogram(histogram_name, values, most), step, kwargs);
  }

  void flush() override {
    if (Steady::now() - last_flush_ < options_.flush_secs) return;
    last_flush_ = Steady::now();
    events_->flush();
    for (auto& [folder, file] : beside_) file.flush();
  }

  void finish() override {
    if (has_hparams_) add(summaries::hparams_end(time()), {}, {});
    events_->flush();
    for (auto& [folder, file] : beside_) file.flush();
    events_.reset();
    beside_.clear();
  }

 private:
  void add(const std::string& summary, std::optional<int64_t> step, const KeywordArguments& kwargs) {
    events_->add(summary, step.value_or(0), time_of(kwargs));
  }
  double time_of(const KeywordArguments& kwargs) const { return kwargs.number("walltime").value_or(time()); }

  /// Curves in one diagram: by TensorBoard's rules each is a run of its own, in a folder below. @return whether they
  /// are numbers
  bool log_together(const std::string& tag, const TrackerValues& values, std::optional<int64_t> step,
                    const KeywordArguments& kwargs) {
    for (const auto& [name, value] : values)
      if (!value.number()) return false;
    std::string beginning = tag;
    std::replace(beginning.begin(), beginning.end(), '/', '_');
    for (const auto& [name, value] : values) {
      const auto folder = options_.folder / (beginning + "_" + name);
      auto file = beside_.find(folder);
      if (file == beside_.end())
        file = beside_.try_emplace(folder, folder, time(), EventFile::Options{options_.file.filename_suffix, {}}).first;
      file->second.add(summaries::scalar(tag, *value.number(), summaries::ScalarForm::simple), step.value_or(0),
                       time_of(kwargs));
    }
    return true;
  }

  Options options_;
  std::optional<EventFile> events_;
  std::map<std::filesystem::path, EventFile> beside_;
  bool has_hparams_ = false;
  Steady::time_point last_flush_{};
};

}  // namespace

TrackerClass tensorboard_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            const KeywordArguments kwargs("tensorboard: init_kwargs", setup.init_kwargs,
                                          {"purge_step", "filename_suffix", "flush_secs"});
            return std::make_shared<TensorBoardTracker>(TensorBoardTracker::Options{
                .folder = setup.logging_dir / setup.project_name,
                .file = {.filename_suffix = kwargs.text("filename_suffix"), .purge_step = kwargs.whole("purge_step")},
                .flush_secs = std::chrono::duration<double>(kwargs.number("flush_secs").value_or(0))});
          },
          .requires_logging_directory = true};
}

}  // namespace accelerate
