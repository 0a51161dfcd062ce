#include <cstdlib>
#include <set>
#include <string>

#include "accelerate/utils/error.hpp"
#include "launch/job/hostfile.hpp"

// Any bytes are machines with different names and as many slots as are said, or a ConfigError. What follows an 0xFF is
// a filter.
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
    const auto hosts = launcher::parse_hostfile(text, "fuzz");
    check(hosts);
    for (const bool include : {true, false}) try {
        check(launcher::filter_hosts(hosts, include ? filter : "", include ? "" : filter));
      } catch (const ConfigError&) {
      }
  } catch (const ConfigError&) {
  }
  return 0;
}
