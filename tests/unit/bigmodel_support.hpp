#pragma once

#include <string>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"

/// The message of the library's error that f() throws.
template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }
