#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends/backend.hpp"
#include "comm/store.hpp"
#include "utils/environment.hpp"

namespace accelerate::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::vector<std::shared_ptr<gloo::transport::Device>> devices(const BackendOptions& options) {
  if (const auto names = environment::text("GLOO_SOCKET_IFNAME")) {
    std::vector<std::shared_ptr<gloo::transport::Device>> found;
    for (size_t begin = 0; begin <= names->size();) {
      const size_t end = std::min(names->find(',', begin), names->size());
      found.push_back(Gloo::createDeviceForInterface(names->substr(begin, end - begin)));
      begin = end + 1;
    }
    return found;
  }
  // On one machine nothing needs to leave it; and resolving the host's own name is a frequent cause of failures there.
  if (is_loopback(options.master_addr)) return {Gloo::createDeviceForHostname("127.0.0.1")};
  return {Gloo::createDefaultDevice()};
}

c10::intrusive_ptr<c10d::Backend> create_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                              const BackendOptions& options) {
  auto gloo = Gloo::Options::create(options.timeout);
  gloo->devices = devices(options);
  return c10::make_intrusive<Gloo>(store, static_cast<int>(options.rank), static_cast<int>(options.world_size), gloo);
}

/// A connection that failed or timed out, or a message of another length than was expected.
bool gloo_has_thrown(const std::exception& error) {
  return dynamic_cast<const gloo::Exception*>(&error) || dynamic_cast<const gloo::EnforceNotMet*>(&error);
}

}  // namespace

const BackendFactory kGloo{"gloo", true, create_gloo, gloo_has_thrown, ""};

}  // namespace accelerate::comm
