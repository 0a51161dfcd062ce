#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "accelerate/codes/codes.hpp"
#include "residency/home.hpp"
#include "residency/pins.hpp"

namespace accelerate::residency {

/// A weight in few bits, and how products with it are made. Changed by engines only, while nobody computes.
struct EncodedWeight {
  codes::Codes codes;
  /// The tensor is the transpose of the matrix that the codes are of: layers that store [inputs, outputs].
  bool transposed = false;
  /// Activations are converted to it, and results back. None: products are in the activations' dtype.
  std::optional<at::ScalarType> compute_dtype;
  /// int8_rowwise: from this magnitude on a column of activations is multiplied apart (LLM.int8()).
  double outlier_threshold = 0;
  /// Products with the decoded weight, even if there is a kernel for its codes that rounds activations.
  bool exact = false;
  /// Codes that are those of a mapped file, of which memory holds nothing longer than it is computed with: there is a
  /// limit, and no room. See CodesInUse.
  bool comes_and_goes = false;
  int64_t bytes_elsewhere = 0;  ///< of codes that were given up
  int64_t sharers = 1;          ///< processes that keep the bytes together

  bool is_here() const { return codes.data.defined(); }
  /// The size of the codes, wherever they are.
  int64_t bytes() const { return is_here() ? codes.bytes() : bytes_elsewhere; }
};

/// Codes in host memory (or in a mapped file) as the home of one member that fills its part: what fetches it decodes.
/// Most products never do, see encoded.hpp. The weight is frozen: nothing is stored.
std::unique_ptr<Home> encoded_home(std::shared_ptr<EncodedWeight> weight);

/// The weight that `tensor`, a parameter, stands for; null for those that are no codes.
EncodedWeight* encoded_weight(const at::Tensor& tensor);

/// All that the codes consist of, one after the other: uint8 [n], memory of its own. The same on every process that
/// has the same codes.
at::Tensor bytes_of(const codes::Codes& codes);
/// From now on the codes lie in `bytes`, as bytes_of() laid them out, and products keep nothing beside them.
/// Where `bytes` is a member of a unit (an engine that shards them), pin() brings them.
void lay_codes_in(EncodedWeight& weight, const at::Tensor& bytes, int64_t sharers = 1);
/// This process does without the codes: products with them are those of another stage of a pipeline.
void give_up(EncodedWeight& weight);
/// Codes that lie in a unit are there while `pins` lives: may block, and is collective if fetching that unit is.
/// @throws ConfigError for codes that were given up
void pin_codes(const EncodedWeight& weight, Pins& pins);

/// Codes that are there while this lives, as pin_codes() says it. Its end takes back what products have made meanwhile
/// of codes that come and go, and gives the file's pages back.
class CodesInUse {
 public:
  explicit CodesInUse(const EncodedWeight& weight) : weight_(weight) { pin_codes(weight, pins_); }
  CodesInUse(const CodesInUse&) = delete;
  CodesInUse& operator=(const CodesInUse&) = delete;
  ~CodesInUse() {
    if (weight_.comes_and_goes) let_go();
  }

 private:
  void let_go() const;

  const EncodedWeight& weight_;
  Pins pins_;
};

}  // namespace accelerate::residency
