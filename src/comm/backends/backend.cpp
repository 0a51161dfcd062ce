#include "comm/backends/backend.hpp"

#include "accelerate/utils/error.hpp"

namespace accelerate::comm {

const BackendFactory& find_backend(const std::string& name) {
  for (const auto* factory : {&kGloo, &kNccl, &kMpi}) {
    if (name != factory->name) continue;
    if (!factory->available)
      throw NotBuiltError("process group: back end '" + name + "' was asked for, but this build lacks it; " +
                          factory->how_to_build);
    return *factory;
  }
  throw ConfigError("process group: back end '" + name + "' was asked for, expected gloo, nccl or mpi");
}

}  // namespace accelerate::comm
