#include "launch/job/streams.hpp"

#include <charconv>
#include <sstream>
#include <string_view>

#include "utils/raise.hpp"

namespace accelerate::launcher {

std::vector<int> parse_streams(const std::string& flag, const std::string& text, int64_t local_world_size) {
  const auto fail = [&] {
    raise<ConfigError>(
        "{} is '{}', expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number for each local rank as in "
        "0:1,1:3",
        flag, text);
  };
  const auto number = [&](std::string_view digits, int64_t highest) {
    int64_t value = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || value > highest) fail();
    return value;
  };
  if (text.find(':') == std::string::npos)
    return std::vector<int>(static_cast<size_t>(local_world_size), static_cast<int>(number(text, 3)));
  std::vector<int> result(static_cast<size_t>(local_world_size), kNoStream);
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t colon = entry.find(':');
    if (colon == std::string::npos) fail();
    const int64_t local_rank = number(std::string_view(entry).substr(0, colon), INT32_MAX);
    const auto streams = static_cast<int>(number(std::string_view(entry).substr(colon + 1), 3));
    if (local_rank >= local_world_size)
      raise<ConfigError>("{} names local rank {}, but this machine has local ranks 0 to {}", flag, local_rank,
                         local_world_size - 1);
    result[static_cast<size_t>(local_rank)] = streams;
  }
  return result;
}

}  // namespace accelerate::launcher
