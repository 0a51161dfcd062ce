#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace support {

/// What LibTorch's warnings say while f() runs, on all threads of the caller's handler; one after the other.
template <class F> std::string warnings_of(F&& f) {
  struct Collect : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
    std::string text;
  } collect;
  const c10::WarningUtils::WarningHandlerGuard guard(&collect);
  const c10::WarningUtils::WarnAlways always;
  f();
  return collect.text;
}

}  // namespace support
