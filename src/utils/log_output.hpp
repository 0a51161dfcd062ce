#pragma once

#include "accelerate/utils/log_sink.hpp"

namespace accelerate::logs {

struct OutputForm {
  bool json = false;
  bool rank = false;  ///< in the prefix of the form for people; JSON has it always
};

/// The default sink: see set_log_sink().
void write_to_stderr(const LogRecord& record, OutputForm form);

}  // namespace accelerate::logs
