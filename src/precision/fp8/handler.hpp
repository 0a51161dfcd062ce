#pragma once

#include "precision/fp8/linear.hpp"
#include "residency/chain.hpp"

namespace accelerate::fp8 {

/// On Link::codes while a scope is open: products with weights that take part are computed from fp8 codes. The others
/// are left to whoever comes later on the link, as the handler of weights in few bits.
class Products final : public residency::Handler {
 public:
  explicit Products(ProductPass pass) : pass_(std::move(pass)) {}
  bool handle(residency::OperatorCall& call, residency::Next next) override;
  std::shared_ptr<residency::Handler> for_replay() override;

 private:
  ProductPass pass_;
};

}  // namespace accelerate::fp8
