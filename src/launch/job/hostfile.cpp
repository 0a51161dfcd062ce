#include "launch/job/hostfile.hpp"

#include <algorithm>
#include <charconv>
#include <set>
#include <sstream>

#include "accelerate/config.hpp"
#include "launch/job/require.hpp"

namespace accelerate::launcher {
namespace {

bool read_number(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0;
}

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

bool is_among(const std::vector<RemoteHost>& hosts, const std::string& name) {
  return std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host.name == name; });
}

const RemoteHost& host_called(const std::vector<RemoteHost>& hosts, const std::string& name, const std::string& flag) {
  std::vector<std::string> names;
  for (const auto& host : hosts) {
    if (host.name == name) return host;
    names.push_back(host.name);
  }
  const auto nearest = nearest_name(name, names);
  raise<ConfigError>("{} names '{}', which is not in the hostfile{}", flag, name,
                     nearest ? fmt::format(". Did you mean '{}'?", *nearest) : "");
}

/// The machines that a filter names; whole ones have no slots.
std::vector<RemoteHost> parse_filter(const std::vector<RemoteHost>& hosts, const std::string& text,
                                     const std::string& flag) {
  std::vector<RemoteHost> named;
  for (const auto& part : parts_of(text, '@')) {
    const size_t colon = part.find(':');
    const RemoteHost& host = host_called(hosts, part.substr(0, colon), flag);
    RemoteHost entry{host.name, {}, colon != std::string::npos};
    if (entry.chosen_slots)
      for (const auto& number : parts_of(part.substr(colon + 1), ',')) {
        int64_t slot = 0;
        if (!read_number(number, slot) || std::find(host.slots.begin(), host.slots.end(), slot) == host.slots.end())
          raise<ConfigError>("{} names slot '{}' of {}, which has slots 0 to {}", flag, number, host.name,
                             host.slots.size() - 1);
        if (std::find(entry.slots.begin(), entry.slots.end(), slot) == entry.slots.end()) entry.slots.push_back(slot);
      }
    require(!entry.chosen_slots || !entry.slots.empty(), "{} names no slot in '{}', expected numbers after the colon",
            flag, part);
    require(!is_among(named, entry.name), "{} names '{}' twice", flag, entry.name);
    named.push_back(entry);
  }
  return named;
}

}  // namespace

std::vector<RemoteHost> parse_hostfile(const std::string& text, const std::string& file) {
  std::vector<RemoteHost> hosts;
  std::set<std::string> names;
  std::istringstream in(text);
  int64_t number = 0, all = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name, slots, more;
    if (!(words >> name)) continue;
    int64_t count = 0;
    words >> slots;
    if (!slots.starts_with("slots=") || !read_number(std::string_view(slots).substr(6), count) || count < 1 ||
        count > 4096 || (words >> more) || name.starts_with("-") || name.find('\0') != std::string::npos)
      raise<ConfigError>("the hostfile {}, line {} is '{}', expected NAME slots=N", file, number, line.substr(0, 200));
    require(names.insert(name).second, "the hostfile {}, line {} names {} again", file, number, name);
    constexpr int64_t kMostSlots = 1'000'000;
    require((all += count) <= kMostSlots, "the hostfile {} has more than {} slots", file, kMostSlots);
    RemoteHost host{name, {}, false};
    for (int64_t slot = 0; slot < count; ++slot) host.slots.push_back(slot);
    hosts.push_back(host);
  }
  require(!hosts.empty(), "the hostfile {} names no machine, expected lines of NAME slots=N", file);
  return hosts;
}

std::vector<RemoteHost> filter_hosts(const std::vector<RemoteHost>& hosts, const std::string& include,
                                     const std::string& exclude) {
  require(include.empty() || exclude.empty(), "--include and --exclude exclude each other: give one of them");
  if (!include.empty()) {
    auto chosen = parse_filter(hosts, include, "--include");
    for (auto& host : chosen)
      if (!host.chosen_slots) host.slots = host_called(hosts, host.name, "--include").slots;
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
  require(!left.empty(), "--exclude {} leaves no machine of the hostfile", exclude);
  return left;
}

}  // namespace accelerate::launcher
