#include "command.hpp"

namespace {

int run_convert(const cli::Arguments& arguments) {
  std::vector<std::string> words = arguments.positional;
  for (const auto& [name, text] : arguments.given) words.insert(words.end(), {"--" + name, text});
  cli::become("accelerate-convert", words);
}

const cli::Registered kConvertCommand("convert", run_convert);

}  // namespace
