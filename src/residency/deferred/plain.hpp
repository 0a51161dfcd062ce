#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "residency/member.hpp"

namespace accelerate::residency::deferred {

/// For our own tensors: no recording, no autograd, no autocast, whatever the user's code has switched on around them.
/// Members of a residency still fault in.
class Plain {
 public:
  Plain() : recording_(c10::impl::tls_is_dispatch_key_included(kKey)) {
    c10::impl::tls_set_dispatch_key_included(kKey, false);
  }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;
  ~Plain() { c10::impl::tls_set_dispatch_key_included(kKey, recording_); }

 private:
  bool recording_;
  c10::AutoGradMode no_grad_{false};
  c10::InferenceMode no_inference_{false};
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{
      c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA})};
};

}  // namespace accelerate::residency::deferred
