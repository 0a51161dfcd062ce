#pragma once

#include <string>
#include <vector>

namespace accelerate::launcher {

/// A word in single quotes, as a POSIX shell takes it.
std::string quoted(const std::string& word);

/// A command line as a shell takes it; words are quoted where they must be.
std::string shell_text(const std::vector<std::string>& words);

}  // namespace accelerate::launcher
