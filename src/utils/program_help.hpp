#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace command {

/// For programs that `accelerate <command>` starts with words that it has checked: --help to one of them shows the
/// command's.
inline void show_help_if_asked(int argc, char** argv, const char* command) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view word = argv[i]; word != "--help" && word != "-h") continue;
    std::error_code ignored;
    const auto launcher = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "accelerate";
    std::string words = command;  // one or two
    const size_t blank = words.find(' ');
    const std::string first = words.substr(0, blank),
                      second = blank == std::string::npos ? "" : words.substr(blank + 1);
    if (second.empty()) ::execl(launcher.c_str(), "accelerate", first.c_str(), "--help", nullptr);
    else ::execl(launcher.c_str(), "accelerate", first.c_str(), second.c_str(), "--help", nullptr);
    std::printf("This is a part of `accelerate %s`, which is not beside it.\n", command);
    std::exit(0);
  }
}

/// For programs that only `accelerate` itself can use.
inline void say_part_of_if_asked(int argc, char** argv, const char* what) {
  for (int i = 1; i < argc; ++i)
    if (std::string_view word = argv[i]; word == "--help" || word == "-h") {
      std::printf("%s It is started by `accelerate launch`; see `accelerate launch --help`.\n", what);
      std::exit(0);
    }
}

}  // namespace command
