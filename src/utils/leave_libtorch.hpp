#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

/// For the source with a program's main(): the process ends without taking LibTorch apart. Its thousands of operators
/// are unregistered one by one where a process ends, which takes half as long as loading them (0.13 of 0.33 s), and
/// in a fork more, since each touches pages that were shared.
///
/// Objects, exit handlers and buffers of the program and of this library end as in any other program: the system runs
/// handlers in reverse, and this one is there before the first object of the program, after LibTorch's.
/// Nothing is left out with sanitizers, which report behind it, and where this library is a shared one, which begins
/// before it.
/// With ACCELERATE_LEAVES_LIBTORCH_IF, the name of a variable, it happens where that is in the environment.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(ACCELERATE_SHARED)
namespace accelerate {
namespace {
__attribute__((constructor(101))) void leave_libtorch_as_it_is() {
#ifdef ACCELERATE_LEAVES_LIBTORCH_IF
  if (!std::getenv(ACCELERATE_LEAVES_LIBTORCH_IF)) return;
#endif
  ::on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        ::_exit(status);
      },
      nullptr);
}
}  // namespace
}  // namespace accelerate
#endif
