#include "comm/agreement.hpp"

#include <algorithm>
#include <exception>
#include <vector>

#include "utils/error_text.hpp"

namespace accelerate::comm {

std::optional<FailedRank> failed_elsewhere(Group* group, const std::function<void()>& f) {
  std::string reason;
  std::exception_ptr own;
  try {
    f();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    own = std::current_exception();
    reason = text_of(error);
  }
  if (!group) {
    if (own) std::rethrow_exception(own);
    return std::nullopt;
  }
  const auto reasons = all_gather_bytes(*group, reason);
  const auto failed = std::find_if(reasons.begin(), reasons.end(), [](const auto& one) { return !one.empty(); });
  if (failed == reasons.end()) return std::nullopt;
  // A rank that knows may end at once, and cut off those that are about to hear.
  try {
    all_gather_bytes(*group, "all ranks know who failed");
  } catch (const CommError&) {
    // Somebody has ended: after all had heard.
  }
  if (own) std::rethrow_exception(own);
  return FailedRank{failed - reasons.begin(), *failed};
}

}  // namespace accelerate::comm
