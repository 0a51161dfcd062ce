#include "command.hpp"

namespace {

int run_merge_weights(const cli::Arguments& arguments) {
  std::vector<std::string> words = arguments.positional;
  for (const char* option : {"unsafe_serialization", "remove_checkpoint_dir", "exclude_frozen_parameters"})
    if (arguments.on(option)) words.push_back("--" + std::string(option));
  for (const char* option : {"max_shard_size", "tag"})
    if (const auto given = arguments.text(option); !given.empty())
      words.push_back("--" + std::string(option) + "=" + given);
  cli::become("accelerate-merge-weights", words);
}

const cli::Registered kMergeWeightsCommand("merge-weights", run_merge_weights);

}  // namespace
