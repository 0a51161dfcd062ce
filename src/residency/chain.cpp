/// The one boxed fallback on the members' key, and who is on its chain.

#include "residency/chain.hpp"

#include <c10/core/AutogradState.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <list>
#include <map>
#include <tuple>

#include "residency/touch.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {
namespace {

constexpr uint32_t kAllLinks = (1u << kLinks) - 1;

size_t slot(Link link) { return static_cast<size_t>(link); }
uint32_t bit(Link link) { return 1u << slot(link); }

/// Lists by link. Bit i of `active` says that link i has one, so that an operator passes all idle links at once.
struct OfThread {
  std::array<ChainEntry*, kLinks> lists{};
  uint32_t active = 0;
  uint32_t asked = kAllLinks;  ///< the links that operators of this thread come by
  int32_t all_operators = 0;   ///< AllOperators that exist
  bool included = false;       ///< the members' key, before the first of them
};
struct OfProcess {
  std::array<std::atomic<ChainEntry*>, kLinks> lists{};
  std::atomic<uint32_t> active{0};
};
constinit thread_local OfThread of_thread;
constinit OfProcess of_process;

}  // namespace

/// A handler of the process, and how many hold it.
struct HeldHandler {
  Link link;
  Handler* handler;
  int64_t holders;
};

namespace {

/// The registered handlers, and the lists that have been published. Those stay, because an operator of another thread
/// may be walking along one; there are as many as there are sequences of handlers.
class ProcessLists {
 public:
  HeldHandler* hold(Link link, Handler& handler) {
    const MutexLock lock(mutex_);
    auto& all = registered_[slot(link)];
    const auto known = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.handler == &handler; });
    if (known != all.end()) return ++known->holders, &*known;
    all.push_back({.link = link, .handler = &handler, .holders = 1});
    publish(link);
    return &all.back();
  }
  void let_go(HeldHandler* one) {
    const MutexLock lock(mutex_);
    if (--one->holders > 0) return;
    const Link link = one->link;
    registered_[slot(link)].remove_if([&](const auto& other) { return &other == one; });
    publish(link);
  }

 private:
  void publish(Link link) ACCELERATE_REQUIRES(mutex_) {
    ChainEntry* list = nullptr;
    const auto& all = registered_[slot(link)];
    for (auto one = all.rbegin(); one != all.rend(); ++one) {
      const ChainEntry entry{.handler = one->handler, .next = list, .link = link, .of_process = true};
      list = &published_.try_emplace({link, one->handler, list}, entry).first->second;
    }
    of_process.lists[slot(link)].store(list, std::memory_order_release);
    if (list) of_process.active.fetch_or(bit(link), std::memory_order_release);
    else of_process.active.fetch_and(~bit(link), std::memory_order_release);
  }

  Mutex mutex_;
  std::array<std::list<HeldHandler>, kLinks> registered_ ACCELERATE_GUARDED_BY(mutex_);
  std::map<std::tuple<Link, Handler*, ChainEntry*>, ChainEntry> published_ ACCELERATE_GUARDED_BY(mutex_);
};

ProcessLists& process_lists() {
  static ProcessLists& instance = *new ProcessLists;  // not destroyed: a program's own static models may end after it
  return instance;
}

/// Asks `entry` and those after it on its list, the list `others`, then the links from `first` on; then runs the
/// operator. In line, as operators nest deeply: where there are more calls than the processor predicts returns for,
/// each costs some nanoseconds.
[[gnu::always_inline]] inline void ask(OperatorCall& call, ChainEntry* entry, ChainEntry* others, size_t first) {
  uint32_t links =
      ((of_thread.active | of_process.active.load(std::memory_order_acquire)) & of_thread.asked) >> first << first;
  for (;;) {
    if (!entry) entry = std::exchange(others, nullptr);
    if (entry) {
      ChainEntry* const rest = entry->next;  // now, as a handler may end its own scope
      if (entry->handler->handle(call, Next(call, *entry))) return;
      entry = rest;
      continue;
    }
    if (links == 0) break;
    const auto link = static_cast<size_t>(std::countr_zero(links));
    links &= links - 1;
    entry = of_thread.lists[link];
    others = of_process.lists[link].load(std::memory_order_acquire);
  }
  call.run();
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  OperatorCall call(op, keys, *stack);
  ask(call, nullptr, nullptr, 0);
}

uint32_t active_of(const std::array<ChainEntry*, kLinks>& lists) {
  uint32_t active = 0;
  for (size_t link = 0; link < kLinks; ++link) active |= static_cast<uint32_t>(lists[link] != nullptr) << link;
  return active;
}

}  // namespace

void Next::operator()() const {
  const size_t link = slot(asked_.link);
  ChainEntry* const others = asked_.of_process ? nullptr : of_process.lists[link].load(std::memory_order_acquire);
  ask(call_, asked_.next, others, link + 1);
}

// ---- Own operators

OwnOperators::OwnOperators(TorchLayers layers, OwnLinks links) : OwnOperators(layers, links, slot(Link::codes)) {}

OwnOperators::OwnOperators(TorchLayers layers, OwnLinks links, size_t first_link)
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      links_(of_thread.asked),
      sets_modes_(layers == TorchLayers::no_gradients) {
  c10::impl::LocalDispatchKeySet keys = keys_;
  if (links == OwnLinks::none || first_link >= kLinks) keys.excluded_ = keys.excluded_.add(kKey);
  if (links == OwnLinks::homes) {
    first_link = slot(Link::codes);
    keys.included_ = keys.included_.remove(kKey);
  }
  of_thread.asked &= kAllLinks >> first_link << first_link;
  switch (layers) {
    case TorchLayers::program:
      break;
    case TorchLayers::gradients:
      keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
      break;
    case TorchLayers::no_autocast:
      keys.excluded_ = keys.excluded_ | c10::autocast_dispatch_keyset;
      break;
    case TorchLayers::no_gradients: {
      // The keys of c10::InferenceMode(false), which would switch gradients on.
      keys.included_ = keys.included_.add(c10::DispatchKey::ADInplaceOrView);
      keys.excluded_ = (keys.excluded_ - c10::autograd_dispatch_keyset) | c10::autocast_dispatch_keyset;
      auto& modes = c10::AutogradState::get_tls_state();
      grad_ = modes.get_grad_mode(), inference_ = modes.get_inference_mode();
      modes.set_grad_mode(false), modes.set_inference_mode(false);
      break;
    }
    case TorchLayers::kernels:
      keys.excluded_ =
          keys.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
      break;
  }
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

OwnOperators::~OwnOperators() {
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
  of_thread.asked = links_;
  if (!sets_modes_) return;
  auto& modes = c10::AutogradState::get_tls_state();
  modes.set_grad_mode(grad_), modes.set_inference_mode(inference_);
}

// ---- Scopes of a thread

AllOperators::AllOperators() {
  if (of_thread.all_operators++ == 0) of_thread.included = c10::impl::tls_is_dispatch_key_included(kKey);
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

AllOperators::~AllOperators() {
  const bool last = --of_thread.all_operators == 0;
  c10::impl::tls_set_dispatch_key_included(kKey, !last || of_thread.included);
}

HandlerScope::HandlerScope(Link link, Handler& handler)
    : entry_{.handler = &handler, .next = of_thread.lists[slot(link)], .link = link, .of_process = false} {
  install_fallback();
  of_thread.lists[slot(link)] = &entry_;
  of_thread.active |= bit(link);
}

HandlerScope::~HandlerScope() {
  for (ChainEntry** at = &of_thread.lists[slot(entry_.link)]; *at; at = &(*at)->next)
    if (*at == &entry_) {
      *at = entry_.next;
      break;
    }
  of_thread.active = active_of(of_thread.lists);
}

ScopesForReplay::ScopesForReplay() {
  for (size_t link = 0; of_thread.active != 0 && link < kLinks; ++link) {
    const size_t begin = scopes_.size();
    for (const ChainEntry* entry = of_thread.lists[link]; entry; entry = entry->next)
      if (auto again = entry->handler->for_replay()) scopes_.emplace_back(entry->link, std::move(again));
    std::reverse(scopes_.begin() + static_cast<std::ptrdiff_t>(begin), scopes_.end());
  }
}

ScopesForReplay::Here::Here(const ScopesForReplay& scopes)
    : before_(std::exchange(of_thread.lists, std::array<ChainEntry*, kLinks>{})) {
  of_thread.active = active_of(of_thread.lists);
  for (const auto& [link, handler] : scopes.scopes_) scopes_.push_back(std::make_unique<HandlerScope>(link, *handler));
}

ScopesForReplay::Here::~Here() {
  scopes_.clear();
  of_thread.lists = before_;
  of_thread.active = active_of(before_);
}

bool has_scope(Link link) { return of_thread.lists[slot(link)] != nullptr; }
bool has_scope() { return of_thread.active != 0; }

// ---- Handlers of the process

ProcessHandler::ProcessHandler(Link link, Handler& handler)
    : registered_((install_fallback(), process_lists().hold(link, handler))) {}

ProcessHandler::~ProcessHandler() { process_lists().let_go(registered_); }

bool has_process_handler(Link link) { return of_process.lists[slot(link)].load(std::memory_order_acquire) != nullptr; }

bool only_homes_are_asked() {
  const uint32_t active = of_thread.active | of_process.active.load(std::memory_order_acquire);
  return (active & ~(bit(Link::codes) | bit(Link::touch))) == 0;
}

void install_fallback() {
  // Not by TORCH_LIBRARY_IMPL: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    process_lists().hold(Link::touch, touch_handler());
    torch::Library registration(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    registration.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return registration;
  }();
}

}  // namespace accelerate::residency
