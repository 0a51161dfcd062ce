#pragma once

namespace accelerate {

/// Makes the output of this process appear line by line, and survive when the process is killed, if a launcher asks for
/// that (ACCELERATE_LAUNCH_LINES): standard output is then a pipe or a file, for which the C library keeps lines back.
/// stdout is set so before main() in every program that has this in it. This call does the rest, for a std::cout that
/// the program has taken apart from stdout.
void show_lines_at_once();

}  // namespace accelerate
