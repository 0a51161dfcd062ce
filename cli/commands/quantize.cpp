#include "command.hpp"

namespace {

int run_quantize(const cli::Arguments& arguments) {
  std::vector<std::string> words = arguments.positional;
  for (const auto& [name, text] : arguments.given) words.insert(words.end(), {"--" + name, text});
  cli::become("accelerate-quantize", words);
}

const cli::Registered kQuantizeCommand("quantize", run_quantize);

}  // namespace
