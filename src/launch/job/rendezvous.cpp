#include "launch/job/rendezvous.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <vector>

#include "accelerate/config.hpp"
#include "config/value.hpp"
#include "input/read_file.hpp"
#include "launch/job/require.hpp"

namespace accelerate::launcher {
namespace {

using std::chrono::milliseconds;

double read_number(const std::string& key, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(
      error == std::errc() && end == text.data() + text.size() && std::isfinite(value) && value >= 0 && value <= 1e9,
      "--rdzv_conf has {}={}, expected a number that is not negative", key, text);
  return value;
}

milliseconds read_time(const std::string& key, const std::string& text) {
  const double seconds = read_number(key, text);
  require(seconds != 0, "--rdzv_conf has {}=0, expected a time in seconds", key);
  return milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
}

std::string read_token(const std::string& file) {
  using std::filesystem::perms;
  std::string token;
  const auto problem = read_file(file, kMostSettingsBytes, token);
  token = token.substr(0, token.find('\n'));
  if (!problem.empty() || token.empty())
    raise<ConfigError>(
        "--rdzv_conf token_file={} can't be read, or is empty. Write the shared secret in its first line, for example "
        "by `openssl rand -hex 32`",
        file);
  const auto mode = std::filesystem::status(file).permissions();
  require((mode & (perms::group_read | perms::others_read)) == perms::none,
          "--rdzv_conf token_file={} can be read by other users of this machine: chmod 600 {}", file, file);
  return token;
}

/// Why a key has no effect; "" when it has. torchrun takes any, and what belongs to other launchers or versions.
std::string remark_on(const std::string& key, bool is_static) {
  std::vector<std::string> known{"token",
                                 "token_file",
                                 "local_addr",
                                 "bind",
                                 "join_timeout",
                                 "close_timeout",
                                 "heartbeat_timeout",
                                 "keep_alive_interval",
                                 "keep_alive_max_attempt",
                                 "read_timeout",
                                 "timeout",
                                 kEndpointKey};
  for (const auto& [name, setting] : kTorchrunKeys) known.emplace_back(name);
  if (is_static) known.insert(known.end(), {"rank"});
  else known.insert(known.end(), {"last_call_timeout", "is_host", "store_type"});
  if (std::find(known.begin(), known.end(), key) != known.end()) return "";
  const auto nearest = nearest_name(key, known);
  return fmt::format("'{}' in --rdzv_conf has no effect{}: with --rdzv_backend {} the keys are {}", key,
                     nearest ? fmt::format(", did you mean '{}'?", *nearest) : "", is_static ? "static" : "c10d",
                     fmt::join(known, ", "));
}

bool is_setting(const std::string& key) {
  return key == kEndpointKey || std::any_of(std::begin(kTorchrunKeys), std::end(kTorchrunKeys),
                                            [&](const auto& pair) { return key == pair.first; });
}

void set(RendezvousConf& conf, const std::string& key, const std::string& value) {
  if (is_setting(key)) return;  // the settings have it
  if (key == "join_timeout" || key == "timeout") conf.join_timeout = read_time(key, value);
  else if (key == "last_call_timeout")
    conf.last_call_timeout = milliseconds(std::llround(read_number(key, value) * 1000));
  else if (key == "close_timeout") conf.close_timeout = read_time(key, value);
  else if (key == "heartbeat_timeout") conf.heartbeat_timeout = read_time(key, value);
  else if (key == "keep_alive_interval") conf.keep_alive_interval = read_time(key, value);
  else if (key == "keep_alive_max_attempt")
    conf.keep_alive_max_attempt = std::max<int64_t>(1, std::llround(read_number(key, value)));
  else if (key == "read_timeout") conf.read_timeout = read_time(key, value);
  else if (key == "is_host") conf.is_host = config::str_to_bool(value, "--rdzv_conf is_host");
  else if (key == "rank") conf.rank = std::llround(read_number(key, value));
  else if (key == "token") conf.token = value;
  else if (key == "token_file") conf.token = read_token(value);
  else if (key == "local_addr") conf.local_addr = value;
  else if (key == "bind") conf.bind = value;
  else
    require(value == "tcp",
            "--rdzv_conf has store_type={}, expected tcp: machines meet through a TCPStore here, not through a file",
            value);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> rendezvous_entries(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> result;
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t equals = entry.find('=');
    require(equals != std::string::npos && equals != 0 && equals + 1 != entry.size(),
            "--rdzv_conf has '{}', expected key=value", entry);
    result.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return result;
}

RendezvousConf parse_rendezvous_conf(const std::string& text, bool is_static) {
  RendezvousConf conf;
  if (is_static) conf.join_timeout = std::chrono::seconds(900);
  for (const auto& [key, value] : rendezvous_entries(text)) {
    if (auto remark = remark_on(key, is_static); remark.empty()) set(conf, key, value);
    else conf.unused.push_back(std::move(remark));
  }
  return conf;
}

}  // namespace accelerate::launcher
