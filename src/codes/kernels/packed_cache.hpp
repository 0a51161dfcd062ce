#pragma once

#include <memory>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes::kernels {

struct Packed;

/// The codes in the order of products, made when they are first asked for and kept until drop_packed(), or until the
/// last copy of the codes ends. Safe to call from several threads. Null as pack() says none.
std::shared_ptr<const Packed> packed_of(const Codes& codes);

}  // namespace accelerate::codes::kernels
