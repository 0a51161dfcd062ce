// `accelerate merge-weights`, which starts this with FOLDER OUTPUT and words for its options.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "accelerate/checkpoint.hpp"
#include "accelerate/utils/error.hpp"
#include "utils/error_text.hpp"
#include "utils/plain_text.hpp"
#include "utils/program_help.hpp"

int main(int argc, char** argv) {
  command::show_help_if_asked(argc, argv, "merge-weights");
  const std::vector<std::string> words(argv + 1, argv + argc);
  accelerate::MergeFsdpWeightsOptions options;
  std::vector<std::string> folders;
  for (const auto& word : words) {
    if (word == "--unsafe_serialization" || word == "--unsafe-serialization") options.safe_serialization = false;
    else if (word == "--remove_checkpoint_dir" || word == "--remove-checkpoint-dir")
      options.remove_checkpoint_dir = true;
    else if (word.starts_with("--"))
      return std::fprintf(stderr,
                          "accelerate-merge-weights: there is no option '%s'. See `accelerate merge-weights --help`\n",
                          word.c_str()),
             64;
    else folders.push_back(word);
  }
  if (folders.size() != 2)
    return std::fprintf(
               stderr,
               "usage: accelerate merge-weights [--unsafe_serialization] [--remove_checkpoint_dir] FOLDER OUTPUT\n"),
           64;
  try {
    accelerate::merge_fsdp_weights(folders[0], folders[1], options);
    std::printf("The weights of the checkpoint are in %s\n", folders[1].c_str());
    return 0;
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate merge-weights: %s\n", accelerate::plain_lines(error.what()).c_str());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate merge-weights: unexpected error: %s\n",
                 accelerate::plain_lines(accelerate::text_of(error)).c_str());
    return 70;
  }
}
