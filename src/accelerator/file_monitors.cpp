#include "accelerator/file_monitors.hpp"

#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <utility>

#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

/// A file of comma-separated values for each name, as DeepSpeed's.
class CsvMonitor final : public GeneralTracker {
 public:
  explicit CsvMonitor(fs::path folder) : folder_(std::move(folder)) {}
  std::string name() const override { return "csv_monitor"; }
  void start() override {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) raise<CheckpointError>("csv_monitor: can't make the folder {}: {}", folder_.string(), error.message());
  }
  void store_init_configuration(const TrackerValues&) override {}
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues&) override {
    for (const auto& [name, value] : values) {
      std::string file_name = name;
      std::replace_if(
          file_name.begin(), file_name.end(), [](char c) { return c == '/' || c == ' '; }, '_');
      const fs::path path = folder_ / (file_name + ".csv");
      std::ofstream file(path, std::ios::app | std::ios::binary);
      if (begun_.insert(file_name).second) file << "step," << name.substr(name.rfind('/') + 1) << "\r\n";
      file << step.value_or(0) << "," << fmt::format("{}", std::get<double>(value.value)) << "\r\n" << std::flush;
      if (!file) raise<CheckpointError>("csv_monitor: can't write to {}. Is the disk full?", path.string());
    }
  }

 private:
  fs::path folder_;
  std::set<std::string> begun_;
};

/// Where DeepSpeed writes that is not told where.
fs::path home_folder(const char* name) {
  const char* home = std::getenv("HOME");
  return fs::path(home ? home : ".") / name;
}

}  // namespace

void FileMonitors::open(const std::vector<parallel::FileMonitor>& monitors) {
  if (is_open()) return;
  for (const auto& settings : monitors) {
    Open& one = open_.emplace_back();
    one.settings = settings;
    const bool csv = settings.tracker == "csv_monitor";
    const fs::path folder = settings.folder.empty() ? home_folder(settings.tracker.c_str()) : fs::path(settings.folder);
    TrackerValues arguments;
    for (const auto& [name, value] : settings.arguments)
      std::visit([&, &name = name](const auto& given) { arguments.emplace(name, given); }, value);
    if (csv) one.tracker.choose({TrackerChoice(std::make_shared<CsvMonitor>(folder / settings.project_name))}, folder);
    else one.tracker.choose({TrackerChoice(settings.tracker)}, folder);
    one.tracker.open(
        {.project_name = settings.project_name,
         .config = {},
         .init_kwargs = csv || arguments.empty() ? TrackerKwargs() : TrackerKwargs{{settings.tracker, arguments}},
         .process_index = 0});
  }
}

void FileMonitors::note_loss(const at::Tensor& loss) {
  if (!is_open() || loss.is_meta()) return;
  losses_ = losses_.defined() ? losses_ + loss.detach() : loss.detach().clone();
  ++num_losses_;
}

void FileMonitors::after_step(const Step& step) {
  if (!is_open()) return;
  TrackerValues values{{"Train/Samples/lr", step.lr}};
  if (step.loss_scale) values.emplace("Train/Samples/loss_scale", *step.loss_scale);
  if (num_losses_ > 0)
    values.emplace("Train/Samples/train_loss", losses_.sum().item<double>() / static_cast<double>(num_losses_));
  losses_.reset(), num_losses_ = 0, latest_ = step.samples;
  for (auto& one : open_) {
    if (step.samples - one.last < one.settings.every) continue;
    one.last = step.samples;
    one.tracker.log({"log", {}}, [&] { return record_of_values(values, step.samples); });
  }
}

void FileMonitors::record(const TrackerValues& values) {
  for (auto& one : open_)
    if (one.last == latest_) one.tracker.log({"log", {}}, [&] { return record_of_values(values, latest_); });
}

void FileMonitors::finish() {
  for (auto& one : open_) one.tracker.finish();
}

}  // namespace accelerate
