#include "accelerate/accelerator/record.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <fstream>

#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/memory.hpp"
#include "accelerator/recording.hpp"
#include "utils/environment.hpp"
#include "utils/error_text.hpp"

namespace accelerate {
namespace {

/// One call of record(), the innermost of its thread.
struct RecordCall {
  RecordCall() { innermost = this; }
  ~RecordCall() { innermost = outer; }
  RecordCall(const RecordCall&) = delete;

  RecordCall* const outer = innermost;
  bool unannounced = false;  ///< an exception has ended a training, and the other ranks have not been told
  static thread_local RecordCall* innermost;
};
thread_local RecordCall* RecordCall::innermost = nullptr;

int fail(const std::string& what, int exit_code) {
  if (PartialState::initialized()) PartialState().abort(what);
  std::fprintf(stderr, "error: %s\n", what.c_str());
  std::fflush(stderr);
  if (const auto file = environment::text("TORCHELASTIC_ERROR_FILE")) {
    const auto now =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    std::ofstream(*file)
        << nlohmann::json{{"message", {{"message", what}, {"extraInfo", {{"timestamp", std::to_string(now)}}}}}}.dump(
               -1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  return exit_code;
}

}  // namespace

bool leave_announcement_to_record() noexcept {
  if (RecordCall::innermost) RecordCall::innermost->unannounced = true;
  return RecordCall::innermost != nullptr;
}

int record(const std::function<void()>& body) {
  const RecordCall recording;
  try {
    body();
    // The body may have caught it, and gone on alone.
    if (recording.unannounced && PartialState::initialized()) PartialState().abort("an exception ended its training");
    return 0;
  } catch (const Error& error) {
    return fail(error.what(), error.exit_code());
  } catch (const std::exception& error) {
    // The kind decides what a scheduler may try again with.
    return fail(text_of(error), should_reduce_batch_size(error) ? ResourceError("").exit_code() : 1);
  } catch (...) {
    return fail("an exception that is not a std::exception", 1);
  }
}

}  // namespace accelerate
