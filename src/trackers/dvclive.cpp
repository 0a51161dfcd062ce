#include "trackers/built_in.hpp"
#include "trackers/dvclive_files.hpp"
#include "trackers/images.hpp"
#include "trackers/json_lines.hpp"
#include "trackers/said_once.hpp"
#include "utils/atomic_file.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// As the reference's tracker of that name; the files are DVCLive's (dvclive_files.hpp).
class DvcliveTracker : public GeneralTracker {
 public:
  explicit DvcliveTracker(const TrackerSetup& setup) : options_(to_plain_json(setup.init_kwargs)) {}
  std::string name() const override { return "dvclive"; }
  bool takes(TrackerData kind) const override { return kind == TrackerData::images; }
  void start() override { files_.emplace(options_); }
  void store_init_configuration(const TrackerValues& config) override { files_->params(to_plain_json(config)); }

  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) override {
    for (const auto& name : files_->log(to_plain_json(values), {step, time()}, to_plain_json(log_kwargs)))
      if (said_.is_first(name))
        logs::warn("accelerate.trackers", "dvclive: '{}' is neither a number nor a text. Left out; this is said once.",
                   name);
  }

  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs) override {
    for (const auto& [name, image] : images) {
      const at::Tensor batch = images_as_nhwc(name, image, log_kwargs);
      // DVC's pages show a folder with an image per step as one image that moves.
      const std::string stem = name + "/" + std::to_string(step.value_or(files_->step()));
      for (int64_t place = 0; place < batch.size(0); ++place) {
        AtomicFile file("dvclive",
                        files_->image(stem + (batch.size(0) == 1 ? "" : "_" + std::to_string(place)) + ".png"));
        file.write(encode_png(batch[place]));
        file.finish(false);
      }
    }
  }

 private:
  config::Value options_;
  std::optional<DvcliveFiles> files_;
  SaidOnce said_;
};

/// Whether the current folder belongs to a project of DVC: there somebody reads the files.
bool is_inside_dvc() {
  std::error_code ignored;
  for (auto folder = std::filesystem::current_path(ignored); !folder.empty(); folder = folder.parent_path()) {
    if (std::filesystem::is_directory(folder / ".dvc", ignored)) return true;
    if (folder == folder.root_path()) break;
  }
  return false;
}

}  // namespace

TrackerClass dvclive_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            return std::make_shared<DvcliveTracker>(setup);
          },
          .available = is_inside_dvc};
}

}  // namespace accelerate
