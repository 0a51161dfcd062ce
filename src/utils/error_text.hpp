#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace accelerate {

/// The text of an exception, without the backtrace that LibTorch puts behind its own.
inline std::string text_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  return text.empty() ? "an exception without a text" : text;
}

}  // namespace accelerate
