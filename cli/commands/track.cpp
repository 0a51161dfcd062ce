#include "command.hpp"
#include "utils/raise.hpp"

namespace {

int run_track(const cli::Arguments&) {
  throw accelerate::ConfigError("found no action, expected `accelerate track replay FILE --to NAME`");
}

int run_track_replay(const cli::Arguments& arguments) {
  std::vector<std::string> words{arguments.positional.front()};
  for (const char* option : {"to", "project_name", "logging_dir", "init_kwargs"})
    if (const auto text = arguments.text(option); !text.empty())
      words.insert(words.end(), {"--" + std::string(option), text});
  cli::become("accelerate-track", words);
}

const cli::Registered kTrackCommand("track", run_track);
const cli::Registered kTrackReplayCommand("track replay", run_track_replay);

}  // namespace
