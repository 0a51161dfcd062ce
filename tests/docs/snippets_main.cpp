/// Runs the code of the manual's pages, each block in an empty folder and with fresh state. As one rank of several it
/// runs those that are for several ranks.
///
/// usage: docs_snippets [TEXT]                   only those whose page:line contains it
///        docs_snippets --save_sharded FOLDER    a sharded checkpoint, for the pages that read one

#include <stdlib.h>

#include "snippets.hpp"

namespace {

namespace fs = std::filesystem;

template <class E> bool is(const std::exception& error) { return dynamic_cast<const E*>(&error) != nullptr; }

bool is_named(const std::exception& error, const std::string& name) {
  return (name == "ConfigError" && is<accelerate::ConfigError>(error)) ||
         (name == "ShapeError" && is<accelerate::ShapeError>(error)) ||
         (name == "CheckpointError" && is<accelerate::CheckpointError>(error)) ||
         (name == "CommError" && is<accelerate::CommError>(error)) ||
         (name == "ResourceError" && is<accelerate::ResourceError>(error)) ||
         (name == "c10::Error" && is<c10::Error>(error));
}

/// The error of a snippet; empty: there is none.
std::string outcome(const Snippet& snippet) {
  try {
    torch::manual_seed(0);
    snippet.run();
  } catch (const std::exception& error) {
    if (!snippet.throws.empty() && is_named(error, snippet.throws)) return {};
    return std::string("threw ") + error.what();
  }
  return snippet.throws.empty() ? "" : "ended well, expected a " + snippet.throws;
}

void save_sharded(const fs::path& folder) {
  accelerate::Accelerator accelerator({.fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{.fsdp_version = 2}});
  auto model = accelerator.prepare(torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::Linear(64, 2)));
  accelerator.save_state(folder);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (only == "--save_sharded" && argc > 2) {
    save_sharded(argv[2]);
    return 0;
  }
  const char* world = ::getenv("WORLD_SIZE");
  const int ranks = world ? std::stoi(world) : 1;
  const bool first = !::getenv("RANK") || std::string(::getenv("RANK")) == "0";
  // All ranks work in one folder, as those of one machine do; their port is theirs alone.
  const fs::path scratch =
      fs::temp_directory_path() /
      ("accelerate_docs_" + (ranks > 1 ? std::string(::getenv("MASTER_PORT")) : std::to_string(::getpid())));
  fs::create_directories(scratch);
  int failed = 0, ran = 0;
  for (const auto& snippet : all_snippets()) {
    if (snippet.only_compiled || snippet.place.find(only) == std::string::npos || (ranks > 1 && snippet.ranks != ranks))
      continue;
    const auto folder = scratch / std::to_string(ran++);
    fs::create_directories(folder);
    fs::current_path(folder);
    const auto problem = outcome(snippet);
    accelerate::AcceleratorState::reset(/*reset_partial_state=*/true);
    accelerate::GradientState::reset();
    if (!problem.empty()) ++failed, std::cout << snippet.place << ": " << problem << std::endl;
  }
  fs::current_path("/");
  if (first) {
    std::error_code ignored;
    fs::remove_all(scratch, ignored);
    std::cout << "C++: " << ran << " blocks ran on " << ranks << " rank(s), " << failed << " failed" << std::endl;
  }
  return failed ? 1 : 0;
}
