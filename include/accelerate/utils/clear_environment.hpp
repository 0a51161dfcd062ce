#pragma once

#include <map>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The process has no environment variables as long as this lives, but those that are set meanwhile; afterwards they
/// are as they were, whatever was set or unset. See also patch_environment() in accelerate/launch.hpp.
///
/// The environment belongs to the whole process and the C library guards it by nothing: no other thread may read or
/// write variables at the moments when this begins and ends.
class ACCELERATE_API ClearedEnvironment {
 public:
  ClearedEnvironment();
  ~ClearedEnvironment();
  ClearedEnvironment(const ClearedEnvironment&) = delete;
  ClearedEnvironment& operator=(const ClearedEnvironment&) = delete;

 private:
  const std::map<std::string, std::string> before_;
};
/// `const auto scope = clear_environment();`
[[nodiscard]] inline ClearedEnvironment clear_environment() { return {}; }

}  // namespace accelerate
