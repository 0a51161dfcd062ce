#pragma once

#include <cstddef>
#include <memory>

#include "residency/operator_call.hpp"

namespace accelerate::residency {

/// Who has something to say about an operator before it runs, in the order in which they are asked. Each is a handler
/// with a file and tables of its own; a link without a handler costs a null check.
enum class Link : size_t {
  record,     ///< deferred initialisation: write it down instead (deferred/record.cpp)
  place,      ///< pipeline: run, work out sizes only, or receive first (parallel/pipeline/stages.cpp)
  recompute,  ///< activation checkpointing of units: run, and write down how to run again (activations/)
  adapt,      ///< adapters on frozen weights: add their part to what is computed (adapters/lora_handler.cpp)
  shard,      ///< tensor and sequence parallelism: run on this rank's share, or gather first
  codes,      ///< quantized members: a kernel for the encoding. Who has none leaves it to touch, whose fetch decodes
  touch,      ///< residency: make units present and pin them (touch.cpp)
  devices,    ///< models across devices: bring operands together (devices.cpp)
};
inline constexpr size_t kLinks = 8;

/// The rest of the chain: the handlers that come later, then the operator.
class Next {
 public:
  Next(OperatorCall& call, size_t link) : call_(call), link_(link) {}
  /// Leaves results in place of the arguments.
  void operator()() const;

 private:
  OperatorCall& call_;
  size_t link_;
};

class Handler {
 public:
  /// Says its word about the call. It may change arguments and leave the rest to others (false); or see to it that the
  /// results are there (true): by calling `next` at most once, with something before and after it, or by doing
  /// without.
  virtual bool handle(OperatorCall& call, Next next) = 0;
  /// Of Link::codes on a thread: who handles the same operators when they run again for backward, where the first run's
  /// scope may have ended. Null: nobody.
  virtual std::shared_ptr<Handler> for_replay() { return nullptr; }

 protected:
  ~Handler() = default;
};

/// The handler for operators of this thread, from construction to destruction; scopes of a link nest, and the innermost
/// counts. Meanwhile all operators of the thread come by, with members or without.
class HandlerScope {
 public:
  HandlerScope(Link link, Handler& handler);
  HandlerScope(const HandlerScope&) = delete;
  HandlerScope& operator=(const HandlerScope&) = delete;
  ~HandlerScope();

 private:
  const Link link_;
  Handler* const outer_;
  const bool included_;
};

/// While one exists, the handler is asked on all threads about operators that come by and have none of their own on its
/// link. Several may hold one handler. It must outlive the operators that are under way when the last one ends.
class ProcessHandler {
 public:
  /// @throws InternalError when the link has another handler already
  ProcessHandler(Link link, Handler& handler);
  ProcessHandler(const ProcessHandler&) = delete;
  ProcessHandler& operator=(const ProcessHandler&) = delete;
  ~ProcessHandler();

 private:
  const Link link_;
};

/// This thread's own handler of a link, or null.
Handler* thread_handler(Link link);
/// For regions that are no scopes of C++. @return the one before
Handler* exchange_thread_handler(Link link, Handler* handler);
/// Whether nobody but *codes* and *touch* would be asked about an operator of this thread.
bool only_homes_are_asked();
/// The handler of all threads, or null.
Handler* process_handler(Link link);

/// From now on operators on tensors with the members' key come by the chain. Once per process; cheap to repeat.
void install_fallback();

}  // namespace accelerate::residency
