// `accelerate ds-to-universal`, which starts this with both folders and pairs of an option and its text.
#include <cstdio>
#include <string>
#include <vector>

#include "accelerate/checkpoint/universal.hpp"
#include "command.hpp"

int main(int argc, char** argv) {
  return command::main_of("ds-to-universal", 2, argc, argv, [](const std::vector<std::string>& words) {
    const command::GivenOptions given(words, 2);
    accelerate::convert_zero_checkpoint_to_universal(
        words[0], words[1], {.tag = given.text("tag").value_or(""), .strict = !given.on("no_strict")});
    std::printf("The universal checkpoint is in %s\n", words[1].c_str());
    return 0;
  });
}
