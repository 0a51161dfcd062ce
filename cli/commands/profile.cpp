#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "command.hpp"
#include "foreground.hpp"
#include "input/read_file.hpp"
#include "timeline/report.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::CheckpointError;
using accelerate::ConfigError;
using accelerate::raise;
using namespace accelerate::timeline;

constexpr const char* kMerged = "merged.json";
constexpr const char* kPage = "report.html";

/// An option, and the variable by which a program that knows nothing of it is told.
struct Told {
  const char* option;
  const char* variable;
  int64_t least = -1;  ///< of a number; -1: a flag
};
constexpr Told kTold[] = {
    {"skip_first", "ACCELERATE_PROFILE_SKIP_FIRST", 0}, {"wait", "ACCELERATE_PROFILE_WAIT", 0},
    {"warmup", "ACCELERATE_PROFILE_WARMUP", 0},         {"active", "ACCELERATE_PROFILE_ACTIVE", 1},
    {"repeat", "ACCELERATE_PROFILE_REPEAT", 0},         {"record_shapes", "ACCELERATE_PROFILE_RECORD_SHAPES"},
    {"profile_memory", "ACCELERATE_PROFILE_MEMORY"},    {"with_stack", "ACCELERATE_PROFILE_STACK"},
    {"with_flops", "ACCELERATE_PROFILE_FLOPS"},         {"with_modules", "ACCELERATE_PROFILE_MODULES"}};

int64_t number(const std::string& option, const std::string& text, int64_t least) {
  int64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end.ec != std::errc() || end.ptr != text.data() + text.size() || value < least)
    raise<ConfigError>("--{} is '{}', expected a whole number, {} or more", option, text, least);
  return value;
}

void write(const fs::path& file, const std::string& text) {
  accelerate::AtomicFile out("profile", file);
  out.write(text);
  out.finish(/*flush=*/false);
}

std::string title_of(const fs::path& folder) {
  const auto name = fs::absolute(folder).lexically_normal();
  return "Profile " + (name.has_filename() ? name.filename() : name.parent_path().filename()).string();
}

/// The folder of `accelerate profile`, whose program may be run again and again.
/// @param rank  of a launcher above; null: there is none. A rank minds its own trace, as the others do theirs
void prepare_folder(const fs::path& folder, bool overwrite, const char* rank) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<ConfigError>("--out '{}': can't make the folder: {}", folder.string(), error.message());
  std::vector<fs::path> earlier;
  for (const auto& entry : accelerate::read_folder<ConfigError>("--out", folder)) {
    const auto name = entry.path().filename().string();
    const bool of_all = (name.starts_with("profile_") && name.ends_with(".json")) || name == kMerged || name == kPage;
    if (rank ? name == fmt::format("profile_{}.json", rank) : of_all) earlier.push_back(entry.path());
  }
  if (earlier.empty()) return;
  if (!overwrite)
    raise<ConfigError>(
        "--out '{}': found {} file(s) of an earlier profile there ({}), expected none: ranks of two runs would be "
        "taken for one job. Give another folder, or --overwrite.",
        folder.string(), earlier.size(), earlier.front().filename().string());
  for (const auto& path : earlier) fs::remove(path, error);
}

/// The command to run: a program, or this one's `launch`. A program that is called "launch" is ./launch.
std::vector<std::string> command_of(const cli::Arguments& arguments) {
  auto words = arguments.positional;
  const auto processes = arguments.text("num_processes");
  const bool by_launch = words.front() == "launch";
  if (by_launch) words.erase(words.begin());
  if (by_launch && !processes.empty())
    throw ConfigError("found --num_processes before `launch`, expected it among the launch's own options, behind it");
  std::vector<std::string> command;
  if (by_launch || !processes.empty()) command = {cli::program_folder() + "/accelerate", "launch"};
  if (!processes.empty())
    command.insert(command.end(), {"--num_processes", std::to_string(number("num_processes", processes, 1))});
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

/// Merges what the ranks have written. @return false where they have written nothing
bool sum_up(const fs::path& folder) {
  std::vector<fs::path> traces;
  try {
    traces = traces_in(folder);
  } catch (const CheckpointError&) {
    return false;
  }
  const auto report = analyse(traces);
  merge(report, folder / kMerged);
  write(folder / kPage, to_html(report, title_of(folder)));
  std::fprintf(stderr,
               "\n%s\nTraces of %zu rank(s) are in %s; %s there has all on one timeline (ui.perfetto.dev opens "
               "it), %s the numbers with plots.\n",
               to_text(report).c_str(), report.ranks.size(), folder.c_str(), kMerged, kPage);
  return true;
}

int run_profile(const cli::Arguments& arguments) {
  if (arguments.positional.empty())
    throw ConfigError("found no program, expected `accelerate profile PROGRAM …` or `accelerate profile merge FOLDER`");
  const auto command = command_of(arguments);
  if (arguments.text("active").empty())
    for (const char* option : {"skip_first", "wait", "warmup", "repeat"})
      if (!arguments.text(option).empty())
        raise<ConfigError>("--{} was given without --active, expected both: a schedule says how many steps to record",
                           option);
  // Programs may change their folder.
  const fs::path folder = fs::absolute(arguments.text("out", "profile")).lexically_normal();
  // Below a launcher each rank has this process above it, and none of them knows when the others are done.
  const char* const rank = std::getenv("RANK");
  prepare_folder(folder, arguments.on("overwrite"), rank);
  ::setenv("ACCELERATE_PROFILE_DIR", folder.c_str(), 1);
  for (const auto& told : kTold) {
    const auto text = arguments.text(told.option);
    if (text.empty()) ::unsetenv(told.variable);
    else
      ::setenv(told.variable, told.least < 0 ? "1" : std::to_string(number(told.option, text, told.least)).c_str(), 1);
  }

  const int code = cli::run_in_foreground(command);
  const bool says_more = !rank || std::string_view(rank) == "0";
  if (rank || arguments.on("no_merge")) {
    if (says_more)
      std::fprintf(stderr, "accelerate profile: `accelerate profile merge %s` joins the ranks' traces\n",
                   folder.c_str());
    return code;
  }
  try {
    if (sum_up(folder) || code != 0) return code;
  } catch (const accelerate::Error& error) {
    if (code == 0) throw;
    std::fprintf(stderr, "accelerate profile: %s\n", error.what());
    return code;
  }
  raise<CheckpointError>(
      "found no trace in '{}', expected profile_<rank>.json of each rank. The program ended well but made no "
      "accelerate::Accelerator, or did not reach the first step that --skip_first, --wait and --warmup leave.",
      folder.string());
}

int run_profile_merge(const cli::Arguments& arguments) {
  const fs::path folder = arguments.positional.front();
  const auto report = analyse(traces_in(folder));
  const fs::path merged = arguments.text("out", (folder / kMerged).string());
  const fs::path page = arguments.text("html");
  merge(report, merged);
  if (!page.empty()) write(page, to_html(report, title_of(folder)));
  const auto text = arguments.on("json")
                        ? to_json(report).dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n"
                        : to_text(report);
  std::fputs(text.c_str(), stdout);
  std::fprintf(stderr, "wrote %s%s%s\n", merged.c_str(), page.empty() ? "" : " and ", page.c_str());
  return 0;
}

const cli::Registered kProfileCommand("profile", run_profile);
const cli::Registered kProfileMergeCommand("profile merge", run_profile_merge);

}  // namespace
