#include "accelerate/accelerator/record.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <fstream>

#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "utils/environment.hpp"
#include "utils/error_text.hpp"

namespace accelerate {
namespace {

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

int record(const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const Error& error) {
    return fail(error.what(), error.exit_code());
  } catch (const std::exception& error) {
    return fail(text_of(error), 1);
  } catch (...) {
    return fail("an exception that is not a std::exception", 1);
  }
}

}  // namespace accelerate
