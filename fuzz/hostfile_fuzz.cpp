#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include "accelerate/utils/error.hpp"
#include "launch/job/hostfile.hpp"

// Any bytes are machines with different names and as many slots as are said, or a ConfigError. The bytes after an 0xFF
// are a filter: what it includes and what it excludes are all slots together, in the file's order. The same bytes as
// variables for other machines have names, and lines that read the same again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  const std::string input(reinterpret_cast<const char*>(data), size);
  const auto text = input.substr(0, input.find('\xFF'));
  const auto filter = text.size() < size ? input.substr(text.size() + 1) : "";
  const auto check = [](const std::vector<launcher::RemoteHost>& hosts) {
    std::set<std::string> names;
    if (hosts.empty()) std::abort();
    for (const auto& host : hosts) {
      const std::set<int64_t> slots(host.slots.begin(), host.slots.end());
      if (host.name.empty() || slots.empty() || slots.size() != host.slots.size() || !names.insert(host.name).second)
        std::abort();
    }
  };
  try {
    const auto variables = launcher::parse_deepspeed_env(input, "fuzz");
    std::string again;
    for (const auto& [name, value] : variables) {
      if (name.empty() || (name + value).find_first_of(std::string_view("\n\0", 2)) != std::string::npos) std::abort();
      again += name + "=" + value + "\n";
    }
    if (launcher::parse_deepspeed_env(again, "again") != variables) std::abort();
  } catch (const ConfigError&) {
  }
  try {
    const auto hosts = launcher::parse_hostfile(text, "fuzz");
    check(hosts);
    std::vector<launcher::RemoteHost> included;
    for (const bool include : {true, false}) try {
        const auto left = launcher::filter_hosts(hosts, include ? filter : "", include ? "" : filter);
        check(left);
        auto from = hosts.begin();
        for (const auto& host : left) {
          from = std::find_if(from, hosts.end(), [&](const auto& one) { return one.name == host.name; });
          if (from == hosts.end() || !std::is_sorted(host.slots.begin(), host.slots.end()) ||
              !std::includes(from->slots.begin(), from->slots.end(), host.slots.begin(), host.slots.end()))
            std::abort();
        }
        if (include) included = left;
        else if (!filter.empty() &&
                 launcher::all_slots(included) + launcher::all_slots(left) != launcher::all_slots(hosts))
          std::abort();
      } catch (const ConfigError&) {
      }
  } catch (const ConfigError&) {
  }
  return 0;
}
