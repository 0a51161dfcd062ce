#include "codes/kernels/exact.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "accelerate/codes/kernels.hpp"
#include "codes/cuda/codes_on_gpu.hpp"
#include "codes/decoder.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes::kernels {
namespace {

using Bias = std::optional<at::Tensor>;

bool has_bias(const Bias& bias) { return bias && bias->defined(); }

bool is_decoded_to(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

/// Operators here are nobody's business: threads of LibTorch know nothing of autograd's mode, nor of inference mode.
struct NoAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
};

int64_t up_to(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/// A product with the weight [N, K] sums over its columns, or, on the way back, over its rows. A panel is a slice of
/// what is not summed over.
struct Panels {
  bool back;
  int64_t outputs, sums;  ///< N and K, or K and N
  bool together;          ///< all threads multiply one panel: else each reads all of x, which may be much
  int64_t width, step;    ///< of outputs, and of the sum, at a time

  /// @param rows  of x
  Panels(const Codes& w, const Decoder& decoder, bool turned, bool is_fp32, int64_t rows)
      : back(turned),
        outputs(turned ? w.columns() : w.rows()),
        sums(turned ? w.rows() : w.columns()),
        together(rows >= 512) {
    const int64_t elements = together ? 1 << 21 : 1 << 18;  // eight megabytes of fp32, or one
    constexpr int64_t kLeastWidth = 64;                     // below, LibTorch's products are slow
    constexpr int64_t kWorthAThread = 1 << 14;
    const int64_t unit = up_to(kLeastWidth, back ? decoder.unit() : 1);
    const int64_t share =
        together ? outputs : up_to(std::max(outputs / at::get_num_threads(), kWorthAThread / sums + 1), unit);
    width = std::min(share, std::max(unit, elements / sums / unit * unit));
    // Numbers of 16 bits would be rounded between the parts of a sum.
    const bool fits = !is_fp32 || width * sums <= 2 * elements;
    step = fits ? sums : up_to(elements / width, back ? 1 : decoder.unit());
  }
};

/// On the CPU, of codes with data whose rows begin with a unit of the decoder.
at::Tensor by_panels(const at::Tensor& x, const Codes& w, const Decoder& decoder, const Bias& bias, bool back) {
  const NoAutograd no_autograd;
  const bool is_fp32 = x.scalar_type() == at::kFloat;
  const Panels panels(w, decoder, back, is_fp32, x.numel() / x.size(-1));
  const int64_t columns = w.columns();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = panels.outputs;
  const at::Tensor y = at::empty(sizes, x.options());
  const at::Tensor rows = x.detach().reshape({-1, panels.sums}), results = y.view({-1, panels.outputs});
  const auto work = [&](int64_t begin, int64_t end) {
    const NoAutograd here;
    const auto options = at::TensorOptions().dtype(at::kFloat);
    const at::Tensor numbers = at::empty({panels.width * panels.step}, options);
    const at::Tensor rounded = is_fp32 ? numbers : at::empty({panels.width * panels.step}, x.options());
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * panels.width, width = std::min(panels.width, panels.outputs - first);
      at::Tensor to = results.narrow(1, first, width);
      for (int64_t summed = 0; summed < panels.sums; summed += panels.step) {
        const int64_t step = std::min(panels.step, panels.sums - summed);
        const int64_t top = back ? summed : first, left = back ? first : summed;
        const int64_t height = back ? step : width, length = back ? width : step;
        parallel_ranges(height, 16, [&](int64_t row, int64_t last) {
          for (; row < last; ++row) {
            const int64_t element = (top + row) * columns + left;
            decoder(element, element + length, numbers.mutable_data_ptr<float>() + row * length);
          }
        });
        at::Tensor part = rounded.narrow(0, 0, height * length);
        if (!is_fp32) part.copy_(numbers.narrow(0, 0, height * length));
        part = part.view({height, length});
        const at::Tensor from = rows.narrow(1, summed, step), by = back ? part : part.t();
        if (summed > 0) to.addmm_(from, by);
        else if (has_bias(bias)) at::addmm_out(to, bias->detach().narrow(0, first, width), from, by);
        else at::mm_out(to, from, by);
      }
    }
  };
  const int64_t count = (panels.outputs + panels.width - 1) / panels.width;
  if (panels.together) work(0, count);
  else parallel_ranges(count, 1, work);
  return y;
}

/// On another device, which wants much work at once: rows of the weight, 32 MB of fp16, are decoded at a time.
at::Tensor by_rows(const at::Tensor& x, const Codes& w, const Bias& bias, bool back) {
  constexpr int64_t kElements = 1 << 24;
  const int64_t rows = w.rows(), step = std::max<int64_t>(16, kElements / w.columns());
  std::vector<at::Tensor> outputs;
  at::Tensor sum;
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = std::min(step, rows - first);
    const at::Tensor part = decode_rows(w, first, count, x.scalar_type());
    if (!back) {
      outputs.push_back(at::linear(x, part, has_bias(bias) ? Bias(bias->narrow(0, first, count)) : Bias()));
    } else {
      const at::Tensor product = at::matmul(x.narrow(-1, first, count), part);
      sum = sum.defined() ? sum + product : product;
    }
  }
  return back ? sum : outputs.size() == 1 ? outputs.front() : at::cat(outputs, -1);
}

at::Tensor product(const at::Tensor& x, const Codes& w, const Bias& bias, bool back) {
  if (!back)
    if (at::Tensor y = cuda::linear(x, w, bias); y.defined()) return y;
  const auto dtype = x.scalar_type();
  if (x.is_cpu() && is_decoded_to(dtype) && x.numel() > 0 && w.numel() > 0) {
    if (!back && !plain_of(w)) drop_packed(w);
    const Decoder decoder(unpacked(w));
    if (w.columns() % decoder.unit() == 0) return by_panels(x, w, decoder, bias, back);
  }
  if (!x.is_cpu() && is_decoded_to(dtype) && w.numel() > 0) return by_rows(x, w, bias, back);
  // A dtype that codes can't be decoded to (fp64) is converted to.
  const at::Tensor weight = decode(w, is_decoded_to(dtype) ? dtype : at::kFloat).to(dtype);
  return back ? at::matmul(x, weight) : at::linear(x, weight, bias);
}

}  // namespace

void check_product(const at::Tensor& x, const Codes& w, const Bias& bias) {
  if (x.dim() == 0 || x.size(-1) != w.columns())
    raise<ShapeError>("codes::linear: x has the shape {}, and the weight [{}, {}]; expected [.., {}].", x.sizes(),
                      w.rows(), w.columns(), w.columns());
  if (has_bias(bias) && (bias->dim() != 1 || bias->size(0) != w.rows()))
    raise<ShapeError>("codes::linear: the bias has the shape {}, expected [{}].", bias->sizes(), w.rows());
}

at::Tensor exact_linear(const at::Tensor& x, const Codes& w, const Bias& bias) {
  check_product(x, w, bias);
  return product(x, w, has_bias(bias) ? Bias(bias->to(x.scalar_type())) : Bias(), false);
}

at::Tensor exact_linear_back(const at::Tensor& g, const Codes& w) { return product(g, w, {}, true); }

}  // namespace accelerate::codes::kernels
