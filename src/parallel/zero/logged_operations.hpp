#pragma once

#include <optional>
#include <string_view>

#include "comm/comms_log.hpp"

namespace accelerate::zero {

/// A name under which DeepSpeed logs a collective (comms_logger.prof_ops).
struct LoggedOperation {
  std::string_view name;
  std::optional<comm::Collective> here;  ///< nothing: no part of ZeRO does that here
};
/// Null: DeepSpeed has none of that name. Source: deepspeed/comm/comm.py, the defaults of log_name.
const LoggedOperation* logged_operation(std::string_view name);

}  // namespace accelerate::zero
