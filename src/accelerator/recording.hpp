#pragma once

namespace accelerate {

/// Where this thread is inside record(): leaves it to record() to tell the other ranks that an exception ended the
/// training, since that knows the exception's text, which a destructor can't know. False elsewhere.
bool leave_announcement_to_record() noexcept;

}  // namespace accelerate
