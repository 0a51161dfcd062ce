#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The kind of failure, which says how a caller can go on.
enum class ErrorKind {
  config,      ///< A setting or a combination of settings is not valid. Nothing was started; correct it and call again.
  shape,       ///< A tensor has another shape, dtype or structure than required. The state is as before the call.
  checkpoint,  ///< A file is missing, damaged or does not fit the model. Nothing was loaded.
  comm,        ///< A peer is late, gone or out of step. The process group can't be used any more; end the process.
  launch,      ///< A process could not be started or failed.
  resource,    ///< Memory or disk is exhausted.
  not_built,   ///< The feature exists but this build lacks it; the message names the build option.
  internal,    ///< A defect of this library; please report it.
};

/// Base of all exceptions that the library throws on purpose. The text follows one recipe: *operation: what was
/// found, what was expected, why probably, what to do*.
class ACCELERATE_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }
  /// Exit status for a program that ends because of this error (sysexits-like, never 0).
  int exit_code() const noexcept {
    constexpr int kCodes[] = {64, 65, 65, 69, 71, 73, 78, 70};  // in ErrorKind's order
    return kCodes[static_cast<int>(kind_)];
  }

 private:
  ErrorKind kind_;
};

namespace detail {
template <ErrorKind Kind> class ErrorOf : public Error {
 public:
  explicit ErrorOf(const std::string& message) : Error(Kind, message) {}
};
}  // namespace detail

struct ACCELERATE_API ConfigError : detail::ErrorOf<ErrorKind::config> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API ShapeError : detail::ErrorOf<ErrorKind::shape> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API CheckpointError : detail::ErrorOf<ErrorKind::checkpoint> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API CommError : detail::ErrorOf<ErrorKind::comm> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API LaunchError : detail::ErrorOf<ErrorKind::launch> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API ResourceError : detail::ErrorOf<ErrorKind::resource> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API NotBuiltError : detail::ErrorOf<ErrorKind::not_built> {
  using ErrorOf::ErrorOf;
};
struct ACCELERATE_API InternalError : detail::ErrorOf<ErrorKind::internal> {
  using ErrorOf::ErrorOf;
};

/// Raised on all ranks when they call different collectives, or one with different shapes, dtypes or devices, before
/// any data moves: the group is as good as before. The reference's name, which raises it in debug mode only.
struct ACCELERATE_API DistributedOperationException : CommError {
  using CommError::CommError;
};

}  // namespace accelerate
