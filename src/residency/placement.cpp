#include "residency/placement.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "residency/fallback.hpp"
#include "residency/member.hpp"

namespace accelerate::residency {
namespace {

thread_local Placement* innermost_placement = nullptr;

}  // namespace

Placement* Placement::current() { return innermost_placement; }

Placement::Scope::Scope(Placement& placement)
    : outer_(std::exchange(innermost_placement, &placement)), included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  install_fallback();
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

Placement::Scope::~Scope() {
  innermost_placement = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, included_);
}

}  // namespace accelerate::residency
