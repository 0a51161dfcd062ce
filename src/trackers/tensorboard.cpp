#include <fstream>

#include "accelerate/trackers/tracker.hpp"
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
  explicit TensorBoardTracker(const std::filesystem::path& folder) : folder_(created(folder)), events_(folder_) {}
  std::string name() const override { return "tensorboard"; }

  void store_init_configuration(const std::map<std::string, std::string>& config) override {
    std::ofstream out(folder_ / "hparams.yml");
    for (const auto& [key, value] : config) {
      out << key << ": '";
      for (const char c : value) out << c << (c == '\'' ? "'" : "");  // YAML doubles a quote inside quotes
      out << "'\n";
    }
    if (!out.flush()) raise<CheckpointError>("tensorboard: '{}' can't be written", (folder_ / "hparams.yml").string());
  }

  void log(const std::map<std::string, double>& values, std::optional<int64_t> step) override {
    for (const auto& [tag, value] : values) events_.scalar(tag, value, step.value_or(0));
    events_.flush();
  }

  void finish() override { events_.flush(); }

 private:
  std::filesystem::path folder_;
  EventFile events_;
};

}  // namespace

std::unique_ptr<GeneralTracker> make_tensorboard_tracker(const std::string& run_name,
                                                         const std::filesystem::path& logging_dir) {
  return std::make_unique<TensorBoardTracker>(logging_dir / run_name);
}

}  // namespace accelerate
