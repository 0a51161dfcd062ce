#pragma once

#include <memory>
#include <optional>

#include "residency/chain.hpp"

namespace accelerate::residency {

class Residency;
class Unit;

struct UnitCheckpointOptions {
  bool offload = false;  ///< what a unit begins with goes to host memory until backward
};

/// Activation checkpointing of units, without a word in the model. LibTorch's modules have no hooks, but every operator
/// of a forward comes by the chain: from the first operator that touches a unit until one that touches another unit,
/// operators are written down, what they save is not kept, and in backward they run again. Operators outside of
/// units (with the root's parameters) are not checkpointed; where the program itself calls checkpoint(), that counts.
class UnitCheckpoints final : public Handler {
 public:
  UnitCheckpoints(const Residency& units, const UnitCheckpointOptions& options) : units_(units), options_(options) {}
  ~UnitCheckpoints() { end(); }
  UnitCheckpoints(const UnitCheckpoints&) = delete;
  UnitCheckpoints& operator=(const UnitCheckpoints&) = delete;

  /// Around a forward on this thread; forwards of other models may lie within. end() may come twice.
  void begin();
  void end();

  bool handle(OperatorCall& call, Next next) override;

  /// While it lives, the program's own checkpoint() is at work on this thread.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    UnitCheckpoints* paused_;
  };

 private:
  struct Span;
  void open(const Unit& unit, const OperatorCall& call);
  void close();

  const Residency& units_;
  const UnitCheckpointOptions options_;
  std::optional<HandlerScope> scope_;  ///< while it is at work
  bool opening_ = false;
  UnitCheckpoints* outer_ = nullptr;
  std::shared_ptr<Span> span_;
};

}  // namespace accelerate::residency
