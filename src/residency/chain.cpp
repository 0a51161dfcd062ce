/// The one boxed fallback on the members' key, and who is on its chain.

#include "residency/chain.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <utility>

#include "residency/touch.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {
namespace {

/// Handlers by link. Bit i of `active` says that link i has one, so that an operator passes all idle links at once.
struct OfThread {
  std::array<Handler*, kLinks> handlers{};
  uint32_t active = 0;
};
struct OfProcess {
  std::array<std::atomic<Handler*>, kLinks> handlers{};
  std::atomic<uint32_t> active{0};

  void set(size_t link, Handler* handler) {
    handlers[link].store(handler, std::memory_order_release);
    if (handler) active.fetch_or(1u << link, std::memory_order_release);
    else active.fetch_and(~(1u << link), std::memory_order_release);
  }
};
constinit thread_local OfThread of_thread;
constinit OfProcess of_process;

Mutex holders_mutex;
std::array<int64_t, kLinks> holders ACCELERATE_GUARDED_BY(holders_mutex){};

size_t slot(Link link) { return static_cast<size_t>(link); }

/// Asks the handlers from link `first` on, then runs the operator. In line, as operators nest deeply: where there are
/// more calls than the processor predicts returns for, each costs some nanoseconds.
[[gnu::always_inline]] inline void ask(OperatorCall& call, size_t first) {
  uint32_t active = (of_thread.active | of_process.active.load(std::memory_order_acquire)) >> first << first;
  for (; active != 0; active &= active - 1) {
    const auto link = static_cast<size_t>(std::countr_zero(active));
    Handler* handler = of_thread.handlers[link];
    if (!handler) handler = of_process.handlers[link].load(std::memory_order_acquire);
    if (handler && handler->handle(call, Next(call, link + 1))) return;
  }
  call.run();
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  OperatorCall call(op, keys, *stack);
  ask(call, 0);
}

}  // namespace

void Next::operator()() const { ask(call_, link_); }

bool only_homes_are_asked() {
  const uint32_t active = of_thread.active | of_process.active.load(std::memory_order_acquire);
  return (active & ~(1u << slot(Link::codes) | 1u << slot(Link::touch))) == 0;
}

Handler* thread_handler(Link link) { return of_thread.handlers[slot(link)]; }
Handler* exchange_thread_handler(Link link, Handler* handler) {
  if (handler) of_thread.active |= 1u << slot(link);
  else of_thread.active &= ~(1u << slot(link));
  return std::exchange(of_thread.handlers[slot(link)], handler);
}
Handler* process_handler(Link link) { return of_process.handlers[slot(link)].load(std::memory_order_acquire); }

HandlerScope::HandlerScope(Link link, Handler& handler)
    : link_(link),
      outer_(exchange_thread_handler(link, &handler)),
      included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  install_fallback();
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

HandlerScope::~HandlerScope() {
  exchange_thread_handler(link_, outer_);
  c10::impl::tls_set_dispatch_key_included(kKey, included_);
}

ProcessHandler::ProcessHandler(Link link, Handler& handler) : link_(link) {
  install_fallback();
  const MutexLock lock(holders_mutex);
  Handler* present = process_handler(link);
  if (present && present != &handler)
    raise<InternalError>("residency: link {} of the chain has a handler already, expected none or the same one",
                         slot(link));
  of_process.set(slot(link), &handler);
  ++holders[slot(link)];
}

ProcessHandler::~ProcessHandler() {
  const MutexLock lock(holders_mutex);
  if (--holders[slot(link_)] == 0) of_process.set(slot(link_), nullptr);
}

void install_fallback() {
  // Not by TORCH_LIBRARY_IMPL: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    of_process.set(slot(Link::touch), &touch_handler());
    torch::Library registration(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    registration.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return registration;
  }();
}

}  // namespace accelerate::residency
