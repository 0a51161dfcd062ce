#include "command.hpp"

namespace {

int run_merge_weights(const cli::Arguments& arguments) {
  std::vector<std::string> words = arguments.positional;
  for (const char* option : {"unsafe_serialization", "remove_checkpoint_dir"})
    if (arguments.on(option)) words.push_back("--" + std::string(option));
  cli::become("accelerate-merge-weights", words);
}

const cli::Registered kMergeWeightsCommand("merge-weights", run_merge_weights);

}  // namespace
