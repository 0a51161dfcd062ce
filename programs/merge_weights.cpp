// `accelerate merge-weights`, which starts this with FOLDER OUTPUT and words for its options.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "accelerate/checkpoint.hpp"
#include "accelerate/checkpoint/zero_to_fp32.hpp"
#include "accelerate/utils/error.hpp"
#include "input/plain_text.hpp"
#include "utils/error_text.hpp"
#include "utils/leave_libtorch.hpp"
#include "utils/program_help.hpp"

namespace {

struct MergeRequest {
  std::vector<std::string> folders;
  accelerate::MergeFsdpWeightsOptions fsdp;
  std::string tag;
  bool exclude_frozen_parameters = false;
};

void merge(const MergeRequest& asked) {
  const std::filesystem::path from = asked.folders[0], to = asked.folders[1];
  if (accelerate::is_zero_checkpoint(from) || !asked.tag.empty()) {
    if (asked.fsdp.remove_checkpoint_dir)
      throw accelerate::ConfigError(
          "--remove_checkpoint_dir was given for a checkpoint of DeepSpeed's, whose folder holds other tags, too; "
          "remove it by hand");
    accelerate::ZeroToFp32Options options{.safe_serialization = asked.fsdp.safe_serialization,
                                          .tag = asked.tag,
                                          .exclude_frozen_parameters = asked.exclude_frozen_parameters};
    if (asked.fsdp.max_shard_size) options.max_shard_size = *asked.fsdp.max_shard_size;
    return accelerate::convert_zero_checkpoint_to_fp32_state_dict(from, to, options);
  }
  if (asked.exclude_frozen_parameters)
    throw accelerate::ConfigError(
        "--exclude_frozen_parameters was given, expected the folder of a checkpoint of DeepSpeed's, which alone says "
        "which weights were trained");
  accelerate::merge_fsdp_weights(from, to, asked.fsdp);
}

}  // namespace

int main(int argc, char** argv) {
  command::show_help_if_asked(argc, argv, "merge-weights");
  MergeRequest asked;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (!word.starts_with("--")) {
      asked.folders.push_back(word);
      continue;
    }
    std::string value;
    if (const size_t at = word.find('='); at != std::string::npos) value = word.substr(at + 1), word.resize(at);
    for (char& c : word)
      if (c == '_') c = '-';
    if (word == "--unsafe-serialization") asked.fsdp.safe_serialization = false;
    else if (word == "--remove-checkpoint-dir") asked.fsdp.remove_checkpoint_dir = true;
    else if (word == "--exclude-frozen-parameters") asked.exclude_frozen_parameters = true;
    else if (word == "--max-shard-size" && !value.empty()) asked.fsdp.max_shard_size = value;
    else if (word == "--tag" && !value.empty()) asked.tag = value;
    else
      return std::fprintf(stderr,
                          "accelerate-merge-weights: there is no option '%s'. See `accelerate merge-weights --help`\n",
                          argv[i]),
             64;
  }
  if (asked.folders.size() != 2)
    return std::fprintf(stderr, "usage: accelerate merge-weights [options] FOLDER OUTPUT\n"), 64;
  try {
    merge(asked);
    std::printf("The weights of the checkpoint are in %s\n", asked.folders[1].c_str());
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
