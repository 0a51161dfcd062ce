#include "observe/hang_report.hpp"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "observe/symbols.hpp"
#include "observe/thread_stacks.hpp"
#include "utils/log.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::hang_report {
namespace {

constexpr int kSignal = SIGUSR2;
constexpr const char* kLogger = "accelerate.hang_report";

sem_t asked;  ///< by somebody; what the handler may touch is static

struct HangSpeaker {
  Mutex mutex;
  pid_t process ACCELERATE_GUARDED_BY(mutex) = 0;  ///< that this has been installed in
  int64_t rank ACCELERATE_GUARDED_BY(mutex) = 0;
  std::function<std::string()> activity ACCELERATE_GUARDED_BY(mutex);
};

HangSpeaker& speaker() {
  static auto& only = *new HangSpeaker;  // its thread lives to the end of the process
  return only;
}

void on_signal(int, siginfo_t* info, void* context) {
  const int error = errno;
  if (!thread_stacks::handle(*info, context)) ::sem_post(&asked);
  errno = error;
}

/// Each line bears the rank, since those of several ranks may come out mixed.
void say(int64_t rank, const std::string& text) {
  const std::string prefix = "rank " + std::to_string(rank) + ": ";
  std::string marked = prefix;
  for (const char letter : text) {
    marked += letter;
    if (letter == '\n') marked += prefix;
  }
  logs::emit(LogLevel::info, kLogger, marked);
}

std::string text_of(const thread_stacks::ThreadStack& stack, Symbols& symbols) {
  if (stack.frames.empty()) return "\n  it does not answer: it blocks the signal, or is stopped";
  std::string text;
  for (size_t i = 0; i < stack.frames.size(); ++i)
    text += "\n  #" + std::to_string(i) + " " + symbols.describe(stack.frames[i], /*returns_to=*/i > 0);
  return text;
}

/// Functions in which threads of services wait until there is something to do: of libtorch, gloo and this library.
constexpr std::array kWaitForWork = {"c10::ThreadPool::main_loop",
                                     "torch::autograd::ReadyQueue::pop",
                                     "c10d::ProcessGroupGloo::runLoop",
                                     "gloo::transport::tcp::Loop",
                                     "uv__io_poll",
                                     "c10d::TCPStore",
                                     "c10d::detail::TCPStore",
                                     "c10d::ProcessGroupNCCL::Watchdog",
                                     "c10d::ProcessGroupNCCL::HeartbeatMonitor",
                                     "accelerate::Relay::Relay",
                                     "accelerate::comm::Watchdog::Watchdog",
                                     "accelerate::SaveOnSignal::Asked::serve",
                                     "accelerate::TrackerQueue::run"};

/// Whether it sleeps in one of these functions itself. One that works, or waits for something in a task of its own, has
/// other functions of the library or of the program within.
bool waits_for_work(const thread_stacks::ThreadStack& stack, Symbols& symbols) {
  if (stack.state != 'S' || stack.thread == ::getpid()) return false;
  for (size_t i = 0; i < stack.frames.size(); ++i) {
    const auto place = symbols.find(stack.frames[i], /*returns_to=*/i > 0);
    if (!place) return false;
    const auto is_in = [&](const char* library) { return place->file.starts_with(library); };
    if (is_in("libc.so") || is_in("libc-") || is_in("libpthread") || is_in("libstdc++")) continue;
    if (is_in("libgomp") || is_in("libiomp")) return true;
    const std::string function = symbols.describe(stack.frames[i], /*returns_to=*/i > 0);
    return std::any_of(kWaitForWork.begin(), kWaitForWork.end(),
                       [&](const char* known) { return function.find(known) != std::string::npos; });
  }
  return false;
}

void report() {
  int64_t rank = 0;
  std::function<std::string()> activity;
  {
    const MutexLock lock(speaker().mutex);
    rank = speaker().rank, activity = speaker().activity;
  }
  const std::string process = "process " + std::to_string(::getpid());
  const std::string does = activity ? activity() : "";
  say(rank, "asked what it does, " + process + (does.empty() ? "" : ":\n" + does));
  // Apart from it: finding names takes the dynamic loader's lock, which a thread that hangs may hold.
  Symbols symbols;
  std::vector<std::pair<std::string, std::string>> by_stack;  // threads of a pool hang alike
  std::string idle;
  for (const auto& stack : thread_stacks::take(kSignal)) {
    if (waits_for_work(stack, symbols)) {
      idle += (idle.empty() ? "" : ", ") + std::to_string(stack.thread) + " (" + stack.name + ")";
      continue;
    }
    const std::string text = text_of(stack, symbols);
    const std::string thread = std::to_string(stack.thread) + " (" + stack.name + ", " + stack.state +
                               (stack.thread == ::getpid() ? ", the main thread)" : ")");
    auto same = by_stack.begin();
    while (same != by_stack.end() && same->second != text) ++same;
    if (same == by_stack.end()) by_stack.emplace_back(thread, text);
    else same->first += ", " + thread;
  }
  std::string text = "stacks of " + process;
  for (const auto& [threads, stack] : by_stack) text += "\nthread " + threads + stack;
  if (!idle.empty()) text += "\nleft out, since they wait for work: " + idle;
  // Once more: on a terminal the stacks have moved it out of sight.
  if (!does.empty()) text += "\nwhat " + process + " does:\n" + does;
  say(rank, text);
}

void serve() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  ::pthread_setname_np(::pthread_self(), "hang-report");
  for (;;) {
    while (::sem_wait(&asked) != 0) {
    }
    while (::sem_trywait(&asked) == 0) {  // several requests get one answer
    }
    try {
      report();
    } catch (const std::exception& error) {
      logs::emit(LogLevel::warning, kLogger, error.what());
    }
  }
}

/// Nothing when the signal is taken.
void install() {
  struct sigaction present {};
  ::sigaction(kSignal, nullptr, &present);
  const bool ours = (present.sa_flags & SA_SIGINFO) != 0 && present.sa_sigaction == on_signal;  // a fork's parent's
  if (!ours && ((present.sa_flags & SA_SIGINFO) != 0 || present.sa_handler != SIG_DFL)) return;
  thread_stacks::prepare();
  ::sem_init(&asked, 0, 0);
  std::thread(serve).detach();
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(kSignal, &action, nullptr);
}

}  // namespace

void answer(int64_t rank, std::function<std::string()> activity) {
  auto& all = speaker();
  const MutexLock lock(all.mutex);
  all.rank = rank, all.activity = std::move(activity);
  if (std::exchange(all.process, ::getpid()) != ::getpid()) install();
}

void forget_activity() {
  const MutexLock lock(speaker().mutex);
  speaker().activity = nullptr;
}

}  // namespace accelerate::hang_report
