#include "launch/job/hostfile.hpp"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <sstream>

#include "accelerate/config.hpp"
#include "input/read_file.hpp"
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

/// The slots that a filter names for each machine; a whole one has none.
std::map<std::string, std::set<int64_t>> parse_filter(const std::vector<RemoteHost>& hosts, const std::string& text,
                                                      const std::string& flag) {
  std::map<std::string, std::set<int64_t>> named;
  for (const auto& part : parts_of(text, '@')) {
    const size_t colon = part.find(':');
    const RemoteHost& host = host_called(hosts, part.substr(0, colon), flag);
    std::set<int64_t> slots;
    if (colon != std::string::npos) {
      for (const auto& number : parts_of(part.substr(colon + 1), ',')) {
        int64_t slot = 0;
        if (!read_number(number, slot) || slot >= static_cast<int64_t>(host.slots.size()))
          raise<ConfigError>("{} names slot '{}' of {}, which has slots 0 to {}", flag, number, host.name,
                             host.slots.size() - 1);
        slots.insert(slot);
      }
      require(!slots.empty(), "{} names no slot in '{}', expected numbers after the colon", flag, part);
    }
    const auto [place, is_new] = named.try_emplace(host.name, slots);
    require(is_new || (!slots.empty() && !place->second.empty()), "{} names '{}' twice, as a whole", flag, host.name);
    place->second.merge(slots);
  }
  return named;
}

std::string without_blanks_around(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\v\f";
  const size_t begin = text.find_first_not_of(kBlanks);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

bool is_name_of_variable(const std::string& name) {
  constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
  return !name.empty() && name.find_first_not_of(kLetters) == std::string::npos && (name[0] < '0' || name[0] > '9');
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

std::vector<RemoteHost> read_hostfile(const std::string& flag, const std::string& file) {
  std::string text;
  const auto problem = read_file(file, kMostSettingsBytes, text);
  require(problem.empty(), "{} {} can't be read: {}", flag, file, problem);
  return parse_hostfile(text, file);
}

std::vector<RemoteHost> filter_hosts(const std::vector<RemoteHost>& hosts, const std::string& include,
                                     const std::string& exclude, const FilterFlags& flags) {
  require(include.empty() || exclude.empty(), "{} and {} exclude each other: give one of them", flags.include,
          flags.exclude);
  if (include.empty() && exclude.empty()) return hosts;
  const auto named =
      include.empty() ? parse_filter(hosts, exclude, flags.exclude) : parse_filter(hosts, include, flags.include);
  std::vector<RemoteHost> left;
  for (RemoteHost host : hosts) {
    const auto found = named.find(host.name);
    const bool is_named = found != named.end(), whole = is_named && found->second.empty();
    std::erase_if(host.slots, [&](int64_t slot) {
      return (is_named && (whole || found->second.contains(slot))) == include.empty();
    });
    host.chosen_slots = is_named && !whole;
    if (!host.slots.empty()) left.push_back(std::move(host));
  }
  require(!left.empty(), "{} {} leaves no machine of the hostfile", flags.exclude, exclude);
  return left;
}

int64_t all_slots(const std::vector<RemoteHost>& hosts) {
  int64_t count = 0;
  for (const auto& host : hosts) count += static_cast<int64_t>(host.slots.size());
  return count;
}

std::map<std::string, std::string> parse_deepspeed_env(const std::string& text, const std::string& file) {
  require(text.find('\0') == std::string::npos, "{} holds a NUL byte, which no variable can have", file);
  std::map<std::string, std::string> variables;
  std::istringstream in(text);
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    line = without_blanks_around(line);
    if (line.empty() || line.front() == '#') continue;
    const size_t equals = std::min(line.find('='), line.size());
    const std::string name = without_blanks_around(line.substr(0, equals));
    require(equals < line.size() && is_name_of_variable(name), "{}, line {} is '{}', expected NAME=VALUE", file, number,
            line.substr(0, 200));
    variables[name] = without_blanks_around(line.substr(equals + 1));
  }
  return variables;
}

}  // namespace accelerate::launcher
