#pragma once

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace support {

/// An environment variable for a scope.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

/// LibTorch's warnings of a scope.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace support
