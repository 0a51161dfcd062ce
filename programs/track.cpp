// `accelerate track replay`, which starts this with FILE and options, each with its value.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "accelerate/trackers/tracker.hpp"
#include "accelerate/utils/error.hpp"
#include "input/json.hpp"
#include "input/plain_text.hpp"
#include "trackers/json_lines.hpp"
#include "utils/error_text.hpp"
#include "utils/leave_libtorch.hpp"
#include "utils/program_help.hpp"
#include "utils/raise.hpp"

namespace {

using accelerate::ConfigError;

/// How long a run may collect what it sends in one go.
constexpr int64_t kRecordsBetweenFlushes = 1000;

/// Records of a file on their way to one tracker, a run after the other.
class Replay {
 public:
  explicit Replay(std::map<std::string, std::string> options) : options_(std::move(options)) {
    if (const auto& text = options_["init_kwargs"]; !text.empty()) {
      std::string problem;
      const auto json = accelerate::parse_json<nlohmann::ordered_json>(text, &problem);
      if (!json.is_object())
        accelerate::raise<ConfigError>("--init_kwargs is '{}', expected an object of JSON{}", text,
                                       problem.empty() ? "" : ": it " + problem);
      init_kwargs_ = *accelerate::value_from_json(json).map();
    }
    (void)accelerate::tracker_class(options_["to"]);  // throws for a name that there is not
  }

  void take(const accelerate::JsonLine& line) {
    if (!line.record) return;
    if (!tracker_ || line.project_name != project_) open(line.project_name);
    if (line.record->kind && !tracker_->takes(*line.record->kind)) {
      ++left_out;
      return;
    }
    tracker_->set_time(line.record->time);
    line.record->write(*tracker_, line.log_kwargs);
    if (++unflushed_ == kRecordsBetweenFlushes) flush();
  }

  void close() {
    if (!tracker_) return;
    flush();
    tracker_->finish();
    tracker_.reset();
  }

  int64_t sent = 0, left_out = 0;

 private:
  void open(const std::string& project) {
    close();
    if (options_["project_name"].empty()) check_name(project);
    project_ = project;
    const std::string& name = options_["project_name"].empty() ? project : options_["project_name"];
    const std::string& folder = options_["logging_dir"];
    tracker_ =
        accelerate::tracker_class(options_["to"])
            .make({.project_name = name, .logging_dir = folder.empty() ? "." : folder, .init_kwargs = init_kwargs_});
    tracker_->start();
    tracker_->connect();
  }
  /// Trackers make a folder of it.
  static void check_name(const std::string& project) {
    const std::filesystem::path path(project);
    const bool leads_out = std::find(path.begin(), path.end(), "..") != path.end();
    if (path.is_absolute() || leads_out)
      accelerate::raise<ConfigError>(
          "the file names its run '{}', which as a folder is not below --logging_dir; give it a name by --project_name",
          project);
  }
  void flush() {
    tracker_->flush();
    sent += std::exchange(unflushed_, 0);
  }

  std::map<std::string, std::string> options_;
  accelerate::TrackerValues init_kwargs_;
  std::shared_ptr<accelerate::GeneralTracker> tracker_;
  std::string project_;
  int64_t unflushed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  command::show_help_if_asked(argc, argv, "track replay");
  std::map<std::string, std::string> options;
  for (int place = 2; place + 1 < argc; place += 2) options[std::string(argv[place]).substr(2)] = argv[place + 1];
  if (argc < 2 || options["to"].empty())
    return std::fprintf(stderr, "usage: accelerate track replay FILE --to NAME [options]\n"), 64;
  std::unique_ptr<Replay> replay;
  const auto told = [&](const char* why, int status) {
    std::fprintf(stderr, "accelerate track replay: %s\n", accelerate::plain_lines(why).c_str());
    if (replay && replay->sent)
      std::fprintf(stderr, "%lld records were sent before; called again, it sends them again.\n",
                   static_cast<long long>(replay->sent));
    return status;
  };
  try {
    replay = std::make_unique<Replay>(options);
    const bool is_whole =
        accelerate::read_json_lines(argv[1], [&](const accelerate::JsonLine& line) { replay->take(line); });
    replay->close();
    std::printf("%lld records went to %s\n", static_cast<long long>(replay->sent), options["to"].c_str());
    if (replay->left_out)
      std::printf("%lld were left out: it has no place for such things\n", static_cast<long long>(replay->left_out));
    if (!is_whole)
      std::printf("The last line of the file breaks off and was left out: whoever wrote it was ended meanwhile\n");
    return 0;
  } catch (const accelerate::Error& error) {
    return told(error.what(), error.exit_code());
  } catch (const std::exception& error) {
    return told(accelerate::text_of(error).c_str(), 70);
  }
}
