#pragma once

namespace accelerate {

/// Inside record(), on this thread: leaves it to record() to tell the other ranks that an exception ended the training,
/// because record() knows the exception's text and a destructor can't know it. @return false elsewhere
bool leave_announcement_to_record() noexcept;

}  // namespace accelerate
