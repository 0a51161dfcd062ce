#include "comm/backends/backend.hpp"

#include <algorithm>
#include <array>

#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

constexpr std::array kBackends{&kGloo, &kNccl, &kMpi};

}  // namespace

const BackendFactory& find_backend(const std::string& name) {
  for (const auto* factory : kBackends) {
    if (name != factory->name) continue;
    if (!factory->available)
      raise<NotBuiltError>("process group: back end '{}' was asked for, but this build lacks it; {}", name,
                           factory->how_to_build);
    return *factory;
  }
  raise<ConfigError>("process group: back end '{}' was asked for, expected gloo, nccl or mpi", name);
}

bool is_transport_error(const std::exception& error) {
  return std::any_of(kBackends.begin(), kBackends.end(),
                     [&](const BackendFactory* factory) { return factory->has_thrown && factory->has_thrown(error); });
}

}  // namespace accelerate::comm
