#pragma once

#include <memory>
#include <optional>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes::kernels {

struct Packed;

/// The codes in the order of products, made when they are first asked for and kept until drop_packed(), or until the
/// last copy of the codes ends. Safe to call from several threads. Null as pack() says none.
std::shared_ptr<const Packed> packed_of(const Codes& codes);

/// Whether keep_once() has taken the data.
bool is_kept_once(const Codes& codes);
/// The same codes with data, where they are in their own order.
std::optional<Codes> plain_of(const Codes& codes);
/// The codes that can be decoded: the same ones with data, as long as they are in their own order; else rows [first,
/// first + count) of them, put back into it.
struct Rows {
  Codes codes;
  int64_t first;  ///< of them within `codes`
};
Rows rows_of(const Codes& codes, int64_t first, int64_t count);

}  // namespace accelerate::codes::kernels
