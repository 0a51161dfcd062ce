#include "trackers/url.hpp"

namespace accelerate {

std::string url_encoded(std::string_view text, std::string_view keep) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  static constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";
  std::string result;
  for (const char byte : text) {
    if (kPlain.find(byte) != std::string_view::npos || keep.find(byte) != std::string_view::npos) {
      result += byte;
    } else {
      const auto bits = static_cast<unsigned char>(byte);
      (result += '%') += kDigits[bits >> 4];
      result += kDigits[bits & 15];
    }
  }
  return result;
}

}  // namespace accelerate
