#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {

const BackendFactory kGloo{"gloo", false, nullptr, nullptr, "install libgloo-dev and configure again"};

}  // namespace accelerate::comm
