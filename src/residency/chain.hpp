#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "residency/operator_call.hpp"
#include "residency/own_operators.hpp"

namespace accelerate::residency {

/// The questions that are asked about an operator before it runs, in this order. Each link has a short list of
/// handlers; a link without one costs nothing.
enum class Link : uint8_t {
  record,     ///< deferred initialisation: write it down instead (deferred/record.cpp)
  place,      ///< pipeline: run, work out sizes only, or receive first (parallel/pipeline/stages.cpp)
  recompute,  ///< activation checkpointing of units: run, and write down how to run again (activations/)
  adapt,      ///< adapters on frozen weights: add their part to what is computed (adapters/lora_handler.cpp)
  shard,      ///< tensor and sequence parallelism: run on this rank's share, or gather first
  codes,      ///< products in few bits: a kernel for the encoding. Without one: touch
  touch,      ///< residency: make units present and pin them (touch.cpp)
  devices,    ///< models across devices: bring operands together (devices.cpp)
};
inline constexpr size_t kLinks = 8;

class Handler;

/// A handler's place on the list of its link: the scopes of the thread, the innermost first, then the handlers of the
/// process, in the order of their registration.
struct ChainEntry {
  Handler* handler;
  ChainEntry* next;
  Link link;
  bool of_process;
};

/// The rest of the chain: the handlers that come later, then the operator.
class Next {
 public:
  Next(OperatorCall& call, const ChainEntry& asked) : call_(call), asked_(asked) {}
  /// Leaves results in place of the arguments.
  void operator()() const;

  /// Runs operators of the handler's own: compute(layers, [&] { return x.add(1); }). They meet `layers` above their
  /// kernels, and the later links only: so they never come back to the handler itself, nor to one that writes down or
  /// places what the program does. @param links  `none`: not the later links either
  template <class F> decltype(auto) compute(TorchLayers layers, OwnLinks links, F&& own) const {
    const OwnOperators scope(layers, links, static_cast<size_t>(asked_.link) + 1);
    return std::forward<F>(own)();
  }
  template <class F> decltype(auto) compute(TorchLayers layers, F&& own) const {
    return compute(layers, OwnLinks::later, std::forward<F>(own));
  }

 private:
  OperatorCall& call_;
  const ChainEntry& asked_;
};

class Handler {
 public:
  /// It is asked by the thread that calls the operator, with autograd, autocast and inference mode as the program has
  /// them; members among the arguments have bytes only after *touch*. It returns false to leave the call to the rest of
  /// the chain, with other arguments where it likes; or true once the results stand in their place, by calling `next`
  /// at most once or by `call.finish()`. Its own operators run within `next.compute()` and nowhere else, so that they
  /// meet the layers that it names and the later links only. Calls nest, and a handler of the process is asked by
  /// several threads at once; what it throws reaches the program. In backward the handlers of the process are asked on
  /// every thread, those of a scope on the scope's thread, and where operators run again, what for_replay() gave.
  virtual bool handle(OperatorCall& call, Next next) = 0;
  /// For a scope's handler, on any link: who handles the same operators when they run again for backward, on whichever
  /// thread, where the first run's scope may have ended. Null: nobody.
  virtual std::shared_ptr<Handler> for_replay() { return nullptr; }

 protected:
  ~Handler() = default;
};

/// While one exists, all operators of its thread come by the chain, and not only those on members. They may end in any
/// order.
class AllOperators {
 public:
  AllOperators();
  AllOperators(const AllOperators&) = delete;
  AllOperators& operator=(const AllOperators&) = delete;
  ~AllOperators();
};

/// Puts the handler in front of its link's list for this thread, from construction to destruction, on one thread; all
/// operators of the thread come by meanwhile. Scopes of a link nest: each is asked, the innermost first.
class HandlerScope {
 public:
  HandlerScope(Link link, Handler& handler);
  HandlerScope(const HandlerScope&) = delete;
  HandlerScope& operator=(const HandlerScope&) = delete;
  ~HandlerScope();

 private:
  ChainEntry entry_;
  const AllOperators all_;
};

/// While one exists, the handler is asked on all threads, after the scopes of its link and the handlers that were
/// registered before it. Several may hold one handler, which is asked once. It must outlive the operators that are
/// under way when the last one ends.
struct HeldHandler;
class ProcessHandler {
 public:
  ProcessHandler(Link link, Handler& handler);
  ProcessHandler(const ProcessHandler&) = delete;
  ProcessHandler& operator=(const ProcessHandler&) = delete;
  ~ProcessHandler();

 private:
  HeldHandler* const registered_;
};

/// The scopes of a thread, as operators that run again need them: what for_replay() gives of each.
class ScopesForReplay {
 public:
  /// The scopes that are open on this thread.
  ScopesForReplay();
  /// While it lives they are the scopes of this thread, and those that it has otherwise are not asked.
  class Here;

 private:
  std::vector<std::pair<Link, std::shared_ptr<Handler>>> scopes_;  ///< of each link, the outermost first
};

class ScopesForReplay::Here {
 public:
  explicit Here(const ScopesForReplay& scopes);
  Here(const Here&) = delete;
  Here& operator=(const Here&) = delete;
  ~Here();

 private:
  std::array<ChainEntry*, kLinks> before_;
  std::vector<std::unique_ptr<HandlerScope>> scopes_;
};

/// Whether this thread has an open scope, on the link or on any.
bool has_scope(Link link);
bool has_scope();
/// Whether the process has a handler on the link.
bool has_process_handler(Link link);
/// Whether nobody but *codes* and *touch* would be asked about an operator of this thread.
bool only_homes_are_asked();

/// From now on operators on tensors with the members' key come by the chain. Once per process; cheap to repeat.
void install_fallback();

}  // namespace accelerate::residency
