#include "state/lines_at_once.hpp"

#include <cstdio>
#include <cstdlib>
#include <iostream>

#ifdef __GLIBCXX__
#include <ext/stdio_sync_filebuf.h>
#endif

namespace accelerate {
namespace {

bool lines_are_wanted() { return std::getenv("ACCELERATE_LAUNCH_LINES") != nullptr; }

[[gnu::constructor]] void buffer_lines_only() {
  if (lines_are_wanted()) std::setvbuf(stdout, nullptr, _IOLBF, 0);
}

}  // namespace

void show_lines_at_once() {
#ifdef __GLIBCXX__  // others have no buffer of std::cout's own
  if (lines_are_wanted() && !dynamic_cast<__gnu_cxx::stdio_sync_filebuf<char>*>(std::cout.rdbuf()))
    std::cout << std::unitbuf;
#endif
}

}  // namespace accelerate
