#include <fstream>

#include "trackers/built_in.hpp"
#include "trackers/event_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::filesystem::path created(const std::filesystem::path& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure)
    raise<CheckpointError>("tensorboard: the folder '{}' can't be created: {}; check project_dir and logging_dir",
                           folder.string(), failure.message());
  return folder;
}

class TensorBoardTracker : public GeneralTracker {
 public:
  explicit TensorBoardTracker(std::filesystem::path folder) : folder_(std::move(folder)) {}
  std::string name() const override { return "tensorboard"; }
  bool requires_logging_directory() const override { return true; }
  void start() override { events_.emplace(created(folder_)); }

  void store_init_configuration(const TrackerValues& config) override {
    std::ofstream out(folder_ / "hparams.yml");
    for (const auto& [key, value] : config) {
      out << key << ": '";
      for (const char c : value.text() ? *value.text() : "?")
        out << c << (c == '\'' ? "'" : "");  // YAML doubles a quote inside quotes
      out << "'\n";
    }
    if (!out.flush()) raise<CheckpointError>("tensorboard: '{}' can't be written", (folder_ / "hparams.yml").string());
  }

  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues&) override {
    for (const auto& [tag, value] : values)
      if (const auto number = value.number()) events_->scalar(tag, *number, step.value_or(0));
  }
  void flush() override { events_->flush(); }
  void finish() override { events_.reset(); }

 private:
  std::filesystem::path folder_;
  std::optional<EventFile> events_;
};

}  // namespace

TrackerClass tensorboard_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            check_init_kwargs("tensorboard", setup, {});
            return std::make_shared<TensorBoardTracker>(setup.logging_dir / setup.project_name);
          },
          .requires_logging_directory = true};
}

}  // namespace accelerate
