#pragma once

#include <string>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"

/// What f() throws as an error of the library.
template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }
