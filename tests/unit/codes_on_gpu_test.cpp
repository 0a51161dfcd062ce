/// Kernels for GPUs, emulated on the CPU: numbers to the bit those of codes::decode, and products of these.
#include <accelerate/codes/codes.hpp>
#include <accelerate/codes/kernels.hpp>

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <vector>

#include "codes/cuda/codes_on_gpu.hpp"
#include "cuda_emulation.hpp"

namespace codes_on_gpu_test {
namespace {

using namespace accelerate;
using codes::Codes;
using codes::Encoding;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinite = std::numeric_limits<double>::infinity();

class CodesOnGpu : public testing::Test {
 protected:
  CodesOnGpu() { codes::cuda::exchange_launcher(&codes::cuda::emulate); }
  ~CodesOnGpu() override { codes::cuda::exchange_launcher(codes::cuda::kNvrtc); }
};

at::Tensor numbers(at::IntArrayRef sizes, int64_t seed) {
  torch::manual_seed(seed);
  return torch::randn(sizes);
}

Codes encoded(at::IntArrayRef sizes, const codes::EncodeOptions& options) {
  return codes::encode(numbers(sizes, 1), options);
}

constexpr auto kGguf = {Encoding::q4_0, Encoding::q4_1, Encoding::q5_0, Encoding::q5_1, Encoding::q8_0,
                        Encoding::q2_k, Encoding::q3_k, Encoding::q4_k, Encoding::q5_k, Encoding::q6_k};
constexpr auto kOthers = {Encoding::int8_rowwise, Encoding::nf4, Encoding::fp4};
constexpr auto kNumbers = {at::kFloat, at::kHalf, at::kBFloat16};

/// One of each kind, [rows, columns]; a multiple of 256 columns, and of blocks that go on from row to row.
std::vector<Codes> of_each_kind(int64_t rows, int64_t columns) {
  std::vector<Codes> all;
  for (const Encoding encoding : kGguf) all.push_back(encoded({rows, columns}, {.encoding = encoding}));
  for (const Encoding encoding : kOthers)
    all.push_back(encoded({rows, columns}, {.encoding = encoding, .block_size = 512}));
  all.push_back(encoded({rows, columns}, {.double_quantize = true}));
  all.push_back(all.back());
  all.back().nested->block_size = 3;  // of which no shift can be made
  all.back().nested->absmax = torch::rand({(all.back().scales.numel() + 2) / 3});
  return all;
}

/// NaN is NaN, whatever its bits are.
testing::AssertionResult same(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor nan = a.isnan();
  if (a.scalar_type() == b.scalar_type() && nan.equal(b.isnan())) {
    const auto kind = a.element_size() == 4 ? at::kInt : at::kShort;
    if (a.masked_fill(nan, 0).view(kind).equal(b.masked_fill(nan, 0).view(kind))) return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "largest difference " << (a - b).abs().max().item<double>();
}

at::Tensor by_kernel(const Codes& w, int64_t first, int64_t count, at::ScalarType dtype) {
  at::Tensor values = torch::full({count, w.columns()}, kNan, dtype);
  EXPECT_TRUE(codes::cuda::decode_rows(w, first, values));
  return values;
}

TEST_F(CodesOnGpu, AreDecodedToTheBit) {
  for (const Codes& w : of_each_kind(5, 256))
    for (const at::ScalarType dtype : kNumbers) {
      SCOPED_TRACE(std::string(codes::name(w.encoding)));
      EXPECT_TRUE(same(by_kernel(w, 0, 5, dtype), codes::decode(w, dtype)));
      EXPECT_TRUE(same(by_kernel(w, 2, 2, dtype), codes::decode_rows(w, 2, 2, dtype)));
      for (const auto kind : {at::kLong, at::kInt}) {
        const at::Tensor rows = torch::tensor({4, 0, 4}, kind), values = torch::empty({3, 256}, dtype);
        EXPECT_TRUE(codes::cuda::decode_rows(w, rows, values));
        EXPECT_TRUE(same(values, codes::embedding(rows, w, dtype)));
      }
    }
}

/// Bytes that no encoder makes: each pattern of codes, scales that are infinite, subnormal or NaN.
TEST_F(CodesOnGpu, OfAnyBytesAreDecodedToTheBit) {
  for (const Encoding encoding : kGguf) {
    SCOPED_TRACE(std::string(codes::name(encoding)));
    Codes w = encoded({64, 512}, {.encoding = encoding});
    torch::manual_seed(7);
    w.data.random_(0, 256);
    EXPECT_TRUE(same(by_kernel(w, 0, 64, at::kFloat), codes::decode(w)));
  }
  for (const Encoding encoding : kOthers) {
    SCOPED_TRACE(std::string(codes::name(encoding)));
    Codes w = encoded({6, 128}, {.encoding = encoding});
    w.data.copy_(torch::arange(w.data.numel()).view_as(w.data).to(w.data.scalar_type()));
    w.scales[0] = kNan, w.scales[1] = kInfinite, w.scales[2] = -0.0, w.scales[3] = 1e-45;
    EXPECT_TRUE(same(by_kernel(w, 0, 6, at::kFloat), codes::decode(w)));
  }
}

TEST_F(CodesOnGpu, OfAnyShapeAreDecodedToTheBit) {
  const std::vector<std::vector<int64_t>> shapes{{1},     {7},       {5, 7},  {33, 65}, {3, 16},
                                                 {9, 48}, {2, 3, 5}, {0, 16}, {4, 0}};
  for (const auto& shape : shapes)
    for (const Encoding encoding : kOthers)
      for (const bool nested : {false, true}) {
        if (nested && (encoding == Encoding::int8_rowwise || shape.front() * shape.back() == 0)) continue;
        SCOPED_TRACE(std::string(codes::name(encoding)) + testing::PrintToString(shape));
        const Codes w = encoded(shape, {.encoding = encoding, .block_size = 32, .double_quantize = nested});
        for (const at::ScalarType dtype : kNumbers)
          EXPECT_TRUE(same(by_kernel(w, 0, w.rows(), dtype), codes::decode(w, dtype).view({w.rows(), w.columns()})));
        if (w.rows() < 3) continue;
        EXPECT_TRUE(same(by_kernel(w, 1, 2, at::kFloat), codes::decode_rows(w, 1, 2, at::kFloat)));
      }
}

/// A part of a larger buffer, as those of shards are.
at::Tensor from_odd_address(const at::Tensor& tensor) {
  const at::Tensor buffer = torch::zeros({tensor.numel() + 1}, tensor.options());
  return buffer.narrow(0, 1, tensor.numel()).view(tensor.sizes()).copy_(tensor);
}

TEST_F(CodesOnGpu, MayBeginAnywhere) {
  for (Codes w : of_each_kind(4, 256)) {
    SCOPED_TRACE(std::string(codes::name(w.encoding)));
    w.data = from_odd_address(w.data);
    EXPECT_TRUE(same(by_kernel(w, 0, 4, at::kHalf), codes::decode(w, at::kHalf)));
    const at::Tensor x = from_odd_address(numbers({3, 256}, 2));
    EXPECT_TRUE(same(codes::cuda::linear(x, w, {}), codes::cuda::linear(x.clone(), w, {})));
  }
  // Results, too: rows of any length are for all that is not aligned. GGUF's blocks leave it to operators.
  const Codes nf4 = encoded({4, 64}, {}), q8 = encoded({4, 64}, {.encoding = Encoding::q8_0});
  const at::Tensor values = from_odd_address(torch::zeros({4, 64}));
  EXPECT_FALSE(codes::cuda::decode_rows(q8, 0, values));
  EXPECT_TRUE(codes::cuda::decode_rows(nf4, 0, values));
  EXPECT_TRUE(same(values, codes::decode(nf4)));
}

/// x w^T + bias in fp64. Sums of fp32 may differ from it by some roundings of 2^-24 of the numbers that are added.
void expect_product(const Codes& w, int64_t rows, at::ScalarType dtype, bool with_bias) {
  SCOPED_TRACE(std::string(codes::name(w.encoding)) + " " + c10::toString(dtype) + " " + std::to_string(rows));
  const at::Tensor x = numbers({rows, w.columns()}, 3).to(dtype),
                   bias = with_bias ? numbers({w.rows()}, 4).to(dtype) : at::Tensor();
  const at::Tensor y = codes::cuda::linear(x, w, bias);
  ASSERT_TRUE(y.defined());
  EXPECT_EQ(y.scalar_type(), dtype);
  const at::Tensor values = codes::decode(w, at::kFloat).to(at::kDouble), inputs = x.to(at::kDouble);
  at::Tensor expected = inputs.matmul(values.t());
  if (with_bias) expected = expected + bias.to(at::kDouble);
  const double rounding = dtype == at::kFloat ? 0 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
  const at::Tensor allowed = 2e-6 * inputs.abs().matmul(values.abs().t()) + 1.001 * rounding * expected.abs();
  EXPECT_TRUE((y.to(at::kDouble) - expected).abs().le(allowed).all().item<bool>())
      << (y.to(at::kDouble) - expected).abs().max();
}

TEST_F(CodesOnGpu, AreMultipliedWithoutBeingDecoded) {
  for (const Codes& w : of_each_kind(5, 256)) {
    expect_product(w, 1, at::kHalf, true);
    expect_product(w, 3, at::kBFloat16, false);
    expect_product(w, 8, at::kFloat, true);
  }
  for (const at::ScalarType dtype : kNumbers) expect_product(encoded({5, 64}, {}), 3, dtype, true);
}

/// More units than a block has threads; fewer than a warp has; one row.
TEST_F(CodesOnGpu, OfAnyNumberOfUnitsAreMultiplied) {
  for (const Codes& w : of_each_kind(3, 2304)) expect_product(w, 1, at::kHalf, true);
  for (const Encoding encoding : kOthers) {
    expect_product(encoded({6, 16}, {.encoding = encoding}), 3, at::kFloat, true);
    expect_product(encoded({1, 48}, {.encoding = encoding}), 8, at::kFloat, false);
    expect_product(encoded({9, 2064}, {.encoding = encoding}), 1, at::kFloat, false);
  }
}

TEST_F(CodesOnGpu, GiveNanForNan) {
  Codes w = encoded({4, 64}, {});
  w.scales[2] = kNan;
  const at::Tensor x = numbers({3, 64}, 5);
  x[1][7] = kNan;
  const at::Tensor found = codes::cuda::linear(x, w, {}).isnan();
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(found[i][j].item<bool>(), i == 1 || j == 2);
}

TEST_F(CodesOnGpu, KeepTheShapeOfX) {
  const Codes w = encoded({5, 64}, {});
  const at::Tensor x = numbers({3, 1, 64}, 5);
  EXPECT_EQ(codes::cuda::linear(x, w, {}).sizes(), (std::vector<int64_t>{3, 1, 5}));
  EXPECT_TRUE(same(codes::cuda::linear(x, w, {}).view({3, 5}), codes::cuda::linear(x.view({3, 64}), w, {})));
  EXPECT_EQ(codes::cuda::linear(x[0][0], w, {}).sizes(), (std::vector<int64_t>{5}));
}

TEST_F(CodesOnGpu, LeaveToOthersWhatTheyHaveNoKernelFor) {
  const Codes w = encoded({5, 64}, {}), odd = encoded({5, 40}, {});
  EXPECT_FALSE(codes::cuda::linear(numbers({9, 64}, 5), w, {}).defined());  // many rows
  EXPECT_FALSE(codes::cuda::linear(numbers({0, 64}, 5), w, {}).defined());
  EXPECT_FALSE(codes::cuda::linear(numbers({1, 40}, 5), odd, {}).defined());  // no whole units
  EXPECT_FALSE(codes::cuda::linear(numbers({1, 64}, 5).to(at::kDouble), w, {}).defined());
  codes::cuda::exchange_launcher([](const codes::cuda::Launch&, const c10::Device&) { return false; });
  EXPECT_FALSE(codes::cuda::linear(numbers({1, 64}, 5), w, {}).defined());
  EXPECT_FALSE(codes::cuda::decode_rows(w, 0, torch::empty({5, 64})));
  codes::cuda::exchange_launcher(nullptr);
  EXPECT_FALSE(codes::cuda::decode_rows(w, 0, torch::empty({5, 64})));
}

}  // namespace
}  // namespace codes_on_gpu_test
