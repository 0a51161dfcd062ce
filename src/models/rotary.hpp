#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace accelerate::models {
struct LlamaRopeScaling;
}

namespace accelerate::models::detail {

/// Rotary positions: pairs of a head's dimensions are turned by angles that grow with the position. Source:
/// arXiv:2104.09864. Worked out once per forward for all layers.
class Rotary {
 public:
  enum class Pairs {
    halves,      ///< Dimension i belongs to i + n / 2.
    neighbours,  ///< Dimension 2 i belongs to 2 i + 1.
  };

  struct Frequencies {
    at::Tensor radians;  ///< [n / 2] in fp32: per position, of each pair
    double scale = 1;    ///< of what is turned
  };

  /// @param positions  [B or 1, T], of any integer dtype
  /// @param dtype      of what will be turned
  Rotary(const at::Tensor& positions, const Frequencies& frequencies, at::ScalarType dtype,
         Pairs pairs = Pairs::halves);

  /// Turns the first n of d dimensions. @param x  [B, H, T, d]
  at::Tensor rotate(const at::Tensor& x) const;

  /// One position of one sequence, in fp32 on the CPU: the factors of numbers, and those of their partners (which are
  /// half of the turned dimensions further). None otherwise.
  struct Row {
    const float *cosines, *sines;
    int64_t turned;
  };
  std::optional<Row> row() const;

 private:
  Pairs pairs_;
  at::Tensor cos_, sin_;  ///< [B or 1, 1, T, n]; the sine of each pair's first dimension is negated
};

/// base ^ (-2 i / n) for 0 <= i < n / 2, one more where n is odd: the frequencies of the source.
at::Tensor rotary_frequencies(int64_t n, double base, const at::Device& device);

struct RotaryOptions {
  int64_t dimensions;  ///< of a head that are turned
  double base;
  int64_t max_positions;  ///< max_position_embeddings
};

/// The angles that a model with stretched frequencies turns by.
/// @param position_ids  [B or 1, T]; past, past + 1, … where it is undefined
/// @param hidden        [B, T, D], whose device and dtype the result is for
Rotary stretched_rotary(const RotaryOptions& options, const LlamaRopeScaling& scaling, const at::Tensor& position_ids,
                        int64_t past, const at::Tensor& hidden);

/// S, S + 1, … for T tokens: [1, T] int64.
at::Tensor positions_from(int64_t past, int64_t tokens, const at::Device& device);

}  // namespace accelerate::models::detail
