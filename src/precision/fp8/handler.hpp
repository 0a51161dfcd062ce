#pragma once

#include "precision/fp8/linear.hpp"
#include "residency/chain.hpp"

namespace accelerate::fp8 {

/// On Link::codes while a scope is open: products with weights that take part are computed from fp8 codes. What it
/// leaves alone is offered to the handler of weights in few bits.
class Products final : public residency::Handler {
 public:
  explicit Products(Pass pass) : pass_(std::move(pass)) {}
  bool handle(residency::OperatorCall& call, residency::Next next) override;
  std::shared_ptr<residency::Handler> for_replay() override;

 private:
  Pass pass_;
};

}  // namespace accelerate::fp8
