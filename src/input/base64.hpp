#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace accelerate {

/// RFC 4648, with padding, without line ends.
std::string base64_encode(std::string_view bytes);
/// @return nothing for what base64_encode does not write
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace accelerate
