#include "comm/backends/backend.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {

const BackendFactory& find_backend(const std::string& name) {
  for (const auto* factory : {&kGloo, &kNccl, &kMpi}) {
    if (name != factory->name) continue;
    if (!factory->available)
      raise<NotBuiltError>("process group: back end '{}' was asked for, but this build lacks it; {}", name,
                           factory->how_to_build);
    return *factory;
  }
  raise<ConfigError>("process group: back end '{}' was asked for, expected gloo, nccl or mpi", name);
}

}  // namespace accelerate::comm
