#include "launch/hostfile.hpp"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate::launcher {
namespace {

bool read_number(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

const RemoteHost& find(const std::vector<RemoteHost>& hosts, const std::string& name, const std::string& flag) {
  std::vector<std::string> names;
  for (const auto& host : hosts) {
    if (host.name == name) return host;
    names.push_back(host.name);
  }
  const auto nearest = nearest_name(name, names);
  throw ConfigError(flag + " names '" + name + "', which is not in the hostfile" +
                    (nearest ? ". Did you mean '" + *nearest + "'?" : ""));
}

/// What a filter names: whole machines have no slots.
std::vector<RemoteHost> parse_filter(const std::vector<RemoteHost>& hosts, const std::string& text,
                                     const std::string& flag) {
  std::vector<RemoteHost> named;
  for (const auto& part : split(text, '@')) {
    const size_t colon = part.find(':');
    const RemoteHost& host = find(hosts, part.substr(0, colon), flag);
    RemoteHost entry{host.name, {}, colon != std::string::npos};
    if (entry.chosen_slots)
      for (const auto& number : split(part.substr(colon + 1), ',')) {
        int64_t slot = 0;
        if (!read_number(number, slot) || std::find(host.slots.begin(), host.slots.end(), slot) == host.slots.end())
          throw ConfigError(flag + " names slot '" + number + "' of " + host.name + ", which has slots 0 to " +
                            std::to_string(host.slots.size() - 1));
        entry.slots.push_back(slot);
      }
    if (std::any_of(named.begin(), named.end(), [&](const auto& other) { return other.name == entry.name; }))
      throw ConfigError(flag + " names '" + entry.name + "' twice");
    named.push_back(entry);
  }
  return named;
}

}  // namespace

std::vector<RemoteHost> parse_hostfile(const std::string& text, const std::string& file) {
  std::vector<RemoteHost> hosts;
  std::istringstream in(text);
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name, slots, more;
    if (!(words >> name)) continue;
    int64_t count = 0;
    words >> slots;
    if (!slots.starts_with("slots=") || !read_number(std::string_view(slots).substr(6), count) || count < 1 ||
        count > 4096 || (words >> more) || name.starts_with("-"))
      throw ConfigError("the hostfile " + file + ", line " + std::to_string(number) + " is '" + line +
                        "', expected NAME slots=N");
    if (std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host.name == name; }))
      throw ConfigError("the hostfile " + file + ", line " + std::to_string(number) + " names " + name + " again");
    RemoteHost host{name, {}, false};
    for (int64_t slot = 0; slot < count; ++slot) host.slots.push_back(slot);
    hosts.push_back(host);
  }
  if (hosts.empty()) throw ConfigError("the hostfile " + file + " names no machine, expected lines of NAME slots=N");
  return hosts;
}

std::vector<RemoteHost> filter_hosts(const std::vector<RemoteHost>& hosts, const std::string& include,
                                     const std::string& exclude) {
  if (!include.empty() && !exclude.empty())
    throw ConfigError("--include and --exclude exclude each other: give one of them");
  if (!include.empty()) {
    auto chosen = parse_filter(hosts, include, "--include");
    for (auto& host : chosen)
      if (!host.chosen_slots) host.slots = find(hosts, host.name, "--include").slots;
    return chosen;
  }
  auto left = hosts;
  for (const auto& entry : parse_filter(hosts, exclude, "--exclude"))
    for (auto& host : left) {
      if (host.name != entry.name) continue;
      if (!entry.chosen_slots) host.slots.clear();
      std::erase_if(host.slots, [&](int64_t slot) {
        return std::find(entry.slots.begin(), entry.slots.end(), slot) != entry.slots.end();
      });
      host.chosen_slots = true;
    }
  std::erase_if(left, [](const auto& host) { return host.slots.empty(); });
  if (left.empty()) throw ConfigError("--exclude " + exclude + " leaves no machine of the hostfile");
  return left;
}

}  // namespace accelerate::launcher
