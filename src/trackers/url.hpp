#pragma once

#include <string>
#include <string_view>

namespace accelerate {

/// Every byte but letters, digits and `-._~` as %XX. @param keep  more bytes to leave as they are
std::string url_encoded(std::string_view text, std::string_view keep = "");

}  // namespace accelerate
