#pragma once

namespace accelerate {

/// What this process prints appears line by line, and is not lost when it is killed, where a launcher asks for that
/// (ACCELERATE_LAUNCH_LINES): its standard output is a pipe or a file there, for which the C library keeps lines back.
/// stdout is so from before main() on in whatever has this in it; this call does the rest, for a std::cout that the
/// program has taken apart from stdout.
void show_lines_at_once();

}  // namespace accelerate
