#include "command.hpp"

namespace {

int run_generate(const cli::Arguments& arguments) {
  std::vector<std::string> words{arguments.positional.front()};
  for (const auto& [name, text] : arguments.given) words.insert(words.end(), {"--" + name, text});
  cli::become("accelerate-generate", words);
}

const cli::Registered kGenerateCommand("generate", run_generate);

}  // namespace
