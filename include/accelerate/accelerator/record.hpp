#pragma once

#include <functional>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Runs a program's body and turns what it throws into what a launcher understands: the text goes to stderr and into
/// $TORCHELASTIC_ERROR_FILE, the other ranks are told at once, and the result is the exit status (0,
/// Error::exit_code(), 73 where memory is exhausted, or 1 for other exceptions).
///
///     int main() { return accelerate::record([] { … }); }
///
/// Source: the contract of torch.distributed.elastic's `record`.
ACCELERATE_API int record(const std::function<void()>& body);

}  // namespace accelerate
