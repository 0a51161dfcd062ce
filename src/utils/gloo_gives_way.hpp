#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <cerrno>
#include <string_view>

/// For the source with a program's main(), where more ranks run than the machine has cores. Gloo's thread asks epoll at
/// once again where a connection that has news is locked, which it is while another thread writes to it; where that one
/// has been put off its core in the middle, gloo's thread burns the rest of its time slice with millions of such
/// questions: half of the processor time of small cases through sockets (Pair::handleEvents of
/// gloo/transport/tcp/pair.cc; its issue 246 is about another such loop). Here it sleeps for a moment after each lock
/// that it did not get. A program's function goes before the C library's also for LibTorch's libraries.
/// Nothing changes with sanitizers, which have a function of their own there.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" __attribute__((visibility("default"))) int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static const auto c_librarys =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(::dlsym(RTLD_NEXT, "pthread_mutex_trylock"));
  const int result = c_librarys(mutex);
  if (result != EBUSY) return result;
  thread_local const bool is_gloos = [] {
    char name[16] = {};
    return ::pthread_getname_np(::pthread_self(), name, sizeof(name)) == 0 && std::string_view(name) == "gloo_tcp_loop";
  }();
  constexpr timespec kMoment{.tv_sec = 0, .tv_nsec = 10'000};
  if (is_gloos) ::nanosleep(&kMoment, nullptr);
  return result;
}
#endif
