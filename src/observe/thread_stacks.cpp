#include "observe/thread_stacks.hpp"

#include <execinfo.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

namespace accelerate::thread_stacks {
namespace {

constexpr int kMostFrames = 128;
constexpr pid_t kNobody = 0, kAtWork = -1;

/// One thread at a time is asked. Static, because a handler may run late.
struct Question {
  std::atomic<pid_t> thread{kNobody};
  void* frames[kMostFrames];
  int count = 0;
  const void* interrupted = nullptr;
  sem_t answered;
};
Question question;

const void* interrupted_at(const void* context) {
  [[maybe_unused]] const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void*>(registers.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const void*>(registers.pc);
#else
  return nullptr;
#endif
}

bool wait_for_answer() {
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += 1;
  while (::sem_clockwait(&question.answered, CLOCK_MONOTONIC, &until) != 0)
    if (errno != EINTR) return false;
  return true;
}

/// @return false: it has ended, or does not answer.
bool ask(pid_t thread, int signal) {
  siginfo_t info{};
  info.si_signo = signal;
  info.si_code = SI_QUEUE;
  info.si_pid = ::getpid();
  info.si_uid = ::getuid();
  info.si_value.sival_ptr = &question;
  question.thread = thread;
  if (::syscall(SYS_rt_tgsigqueueinfo, ::getpid(), thread, signal, &info) != 0) return question.thread = kNobody, false;
  if (wait_for_answer()) return true;
  pid_t expected = thread;
  // It may have begun at the last moment.
  return !question.thread.compare_exchange_strong(expected, kNobody) && wait_for_answer();
}

/// Whether a signal would wait now: the thread blocks it, or is stopped.
bool is_deaf(const ThreadStack& stack, int signal) {
  std::ifstream status("/proc/self/task/" + std::to_string(stack.thread) + "/status");
  uint64_t blocked = 0;
  for (std::string word; status >> word;)
    if (word == "SigBlk:" && status >> std::hex >> blocked) break;
  return (blocked >> (signal - 1) & 1) != 0 || stack.state == 'T' || stack.state == 't';
}

/// Name and state.
void describe(ThreadStack& stack) {
  const std::string folder = "/proc/self/task/" + std::to_string(stack.thread);
  std::getline(std::ifstream(folder + "/comm"), stack.name);
  std::string text;
  std::getline(std::ifstream(folder + "/stat"), text);
  const size_t name_end = text.rfind(')');  // a name may contain anything
  stack.state = name_end != std::string::npos && name_end + 2 < text.size() ? text[name_end + 2] : '?';
}

}  // namespace

void prepare() {
  void* frame[1];
  ::backtrace(frame, 1);  // loads the unwinder at the first time
  ::sem_init(&question.answered, 0, 0);
}

bool handle(const siginfo_t& info, const void* context) {
  if (info.si_code != SI_QUEUE || info.si_pid != ::getpid() || info.si_value.sival_ptr != &question) return false;
  auto expected = static_cast<pid_t>(::syscall(SYS_gettid));
  if (question.thread.compare_exchange_strong(expected, kAtWork)) {
    // glibc's unwinder finds frames without locks (_dl_find_object), and allocates nothing once it is loaded.
    question.count = ::backtrace(question.frames, kMostFrames);
    question.interrupted = interrupted_at(context);
    ::sem_post(&question.answered);
  }
  return true;
}

std::vector<ThreadStack> take(int signal) {
  std::vector<ThreadStack> stacks;
  const auto self = static_cast<pid_t>(::syscall(SYS_gettid));
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", ignored))
    if (const auto thread = static_cast<pid_t>(std::stol(entry.path().filename().string())); thread != self)
      stacks.push_back({.thread = thread, .name = {}, .state = '?', .frames = {}});
  const pid_t main_thread = ::getpid();
  std::sort(stacks.begin(), stacks.end(), [&](const auto& a, const auto& b) {
    return std::pair(a.thread != main_thread, a.thread) < std::pair(b.thread != main_thread, b.thread);
  });
  while (::sem_trywait(&question.answered) == 0) {
  }
  for (auto& stack : stacks) {
    describe(stack);  // before the question wakes it
    // The thread that got the question may still be on its way out of the handler, in which the signal is blocked.
    int patience_ms = 20;
    while (is_deaf(stack, signal) && patience_ms-- > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (patience_ms < 0 || !ask(stack.thread, signal)) continue;
    const auto end = question.frames + question.count;
    const auto begin = std::find(question.frames, end, question.interrupted);  // before it are the handler's own
    stack.frames.assign(begin == end ? question.frames : begin, end);
    question.thread = kNobody;
  }
  return stacks;
}

}  // namespace accelerate::thread_stacks
