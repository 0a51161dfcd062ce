#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "accelerate/trackers/value.hpp"

namespace accelerate {

/// Arguments by name, of kinds that are checked. Refers to what it is made of.
class KeywordArguments {
 public:
  KeywordArguments() : values_(nothing()) {}
  /// `whose` begins the messages: "tensorboard: log_kwargs". @throws ConfigError for names that are not among `known`
  KeywordArguments(const char* whose, const TrackerValues& values, std::initializer_list<const char*> known);

  // @throws ConfigError for a value of another kind
  bool truth(const char* name, bool otherwise) const;
  std::optional<int64_t> whole(const char* name) const;
  std::optional<double> number(const char* name) const;
  /// Empty where there is none.
  std::string text(const char* name) const;

 private:
  static const TrackerValues& nothing();
  const TrackerValue* find(const char* name) const;
  [[noreturn]] void refuse(const char* name, const char* expected) const;

  const char* whose_ = "";
  const TrackerValues& values_;
};

}  // namespace accelerate
