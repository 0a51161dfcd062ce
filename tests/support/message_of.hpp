#pragma once

#include <gtest/gtest.h>

#include <string>

namespace support {

/// The message of the Exception that f() throws; a failure of the test when it throws nothing.
template <class Exception, class F> std::string message_of(F&& f) {
  try {
    f();
  } catch (const Exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace support
