/// Products on codes against products with decoded weights, for every encoding and instruction set.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "accelerate/codes/codes.hpp"
#include "accelerate/codes/kernels.hpp"
#include "accelerate/utils/error.hpp"
#include "codes/kernels/exact.hpp"
#include "codes/kernels/multiply.hpp"
#include "codes/llm_int8.hpp"
#include "message_of.hpp"

namespace {

namespace codes = accelerate::codes;
namespace kernels = accelerate::codes::kernels;
using accelerate::ConfigError;
using accelerate::ShapeError;
using at::Tensor;
using codes::Codes;
using codes::Encoding;
using ::testing::HasSubstr;

constexpr Encoding kAll[] = {Encoding::int8_rowwise, Encoding::nf4,  Encoding::fp4,  Encoding::q4_0, Encoding::q4_1,
                             Encoding::q5_0,         Encoding::q5_1, Encoding::q8_0, Encoding::q2_k, Encoding::q3_k,
                             Encoding::q4_k,         Encoding::q5_k, Encoding::q6_k};

std::vector<Encoding> with_products() {
  std::vector<Encoding> found;
  for (const auto encoding : kAll)
    if (kernels::form_of(encoding)) found.push_back(encoding);
  return found;
}

/// Blocks of any bits, but for their fp16 scales, which lie at these bytes.
struct RandomBlocks {
  int64_t columns, bytes;
  std::vector<int64_t> scales;
};
RandomBlocks blocks_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::q2_k:
      return {256, 84, {80, 82}};
    case Encoding::q3_k:
      return {256, 110, {108}};
    case Encoding::q4_k:
      return {256, 144, {0, 2}};
    case Encoding::q5_k:
      return {256, 176, {0, 2}};
    case Encoding::q6_k:
      return {256, 210, {208}};
    default:
      return {};
  }
}

/// The least unit in which an encoding has columns, here.
int64_t unit_of(Encoding encoding) {
  if (encoding == Encoding::int8_rowwise) return 1;
  if (codes::is_four_bit(encoding)) return 64;
  return encoding >= Encoding::q2_k ? 256 : 32;
}

Codes random_codes(Encoding encoding, int64_t rows, int64_t columns) {
  if (encoding < Encoding::q2_k) {
    // Rows of very different sizes, and none with a mean of zero.
    const auto values = (torch::randn({rows, columns}) + 0.3) * torch::exp(torch::randn({rows, 1}));
    return codes::encode(values, {.encoding = encoding});
  }
  const auto blocks = blocks_of(encoding);
  auto data = torch::randint(256, {rows, columns / blocks.columns, blocks.bytes}, at::kByte);
  for (const auto at : blocks.scales) {
    const auto scales = (torch::rand({rows, columns / blocks.columns, 1}) * 0.1 - 0.02).to(at::kHalf);
    data.narrow(2, at, 2).copy_(scales.view(at::kByte));
  }
  return {.encoding = encoding, .shape = {rows, columns}, .data = data.view({rows, -1})};
}

/// As products see x: in parts of 32, each rounded to 127 steps of its largest magnitude.
Tensor rounded(const Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1), parts = (columns + 31) / 32;
  const auto whole = torch::constant_pad_nd(x, {0, parts * 32 - columns}).view({rows, parts, 32});
  const auto largest = whole.abs().amax(-1, true);
  const auto codes = torch::where(largest > 0, torch::round(whole * (127 / largest)), torch::zeros_like(whole));
  return (codes * (largest / 127)).view({rows, parts * 32}).narrow(1, 0, columns);
}

double relative_error(const Tensor& found, const Tensor& expected) {
  const auto e = expected.to(at::kDouble);
  return ((found.to(at::kDouble) - e).norm() / (e.norm() + 1e-30)).item<double>();
}

TEST(CodesKernels, HaveTheInstructionsOfThisProcessor) {
  ASSERT_FALSE(kernels::instruction_sets().empty());
  EXPECT_STREQ(kernels::instruction_sets().back()->name, "plain");
#if defined(__x86_64__)
  EXPECT_EQ(kernels::avx2_instructions() != nullptr, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(kernels::avx512_instructions() != nullptr,
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"));
#endif
}

/// The kernels do no rounding of their own but that of inputs: against that, they err by fp32's roundings only, and by
/// the 14 bits of nf4's table.
TEST(CodesKernels, EqualProductsOfRoundedInputs) {
  torch::manual_seed(1);
  for (const auto* instructions : kernels::instruction_sets()) {
    for (const auto encoding : with_products()) {
      const int64_t unit = unit_of(encoding);
      std::vector<int64_t> columns = {unit, 3 * unit};
      if (unit == 1) columns = {1, 31, 32, 33, 100, 257};
      if (codes::is_four_bit(encoding)) columns.push_back(10 * unit);
      for (const int64_t k : columns) {
        for (const int64_t n : {1, 15, 16, 17, 40}) {
          const auto w = random_codes(encoding, n, k);
          const auto packed = kernels::pack(w);
          ASSERT_TRUE(packed);
          const auto decoded = codes::decode(w, at::kFloat).to(at::kDouble);
          for (const int64_t rows : {0, 1, 2, 3, 5, 8, 15, 23}) {
            const auto x = torch::randn({rows, k}) * 3 + 1;
            const auto inputs = rounded(x).to(at::kDouble);
            const auto expected = torch::matmul(inputs, decoded.t()),
                       sizes = torch::matmul(inputs.abs(), decoded.abs().t());
            const auto found = kernels::multiply(*instructions, x, *packed);
            ASSERT_EQ(found.sizes(), expected.sizes());
            // To the sum of magnitudes: a product may be next to nothing.
            const auto error = ((found - expected).abs() - (encoding == Encoding::nf4 ? 1e-4 : 2e-6) * sizes);
            EXPECT_TRUE(rows == 0 || error.max().item<double>() <= 0)
                << instructions->name << " " << codes::name(encoding) << " " << n << "x" << k << ", " << rows;
          }
        }
      }
    }
  }
}

/// Codes at the ends of their ranges with inputs at theirs: nothing overflows on the way.
TEST(CodesKernels, SurviveTheLargestNumbers) {
  for (const auto* instructions : kernels::instruction_sets()) {
    for (const auto encoding : {Encoding::int8_rowwise, Encoding::q8_0, Encoding::q5_1, Encoding::nf4, Encoding::fp4}) {
      const auto signs = torch::where(torch::arange(256) % 3 == 0, torch::tensor(-1.0F), torch::tensor(1.0F));
      auto w = codes::encode(torch::stack({torch::ones({256}), -torch::ones({256}), signs}), {.encoding = encoding});
      if (encoding == Encoding::q8_0) w.data.view(at::kByte).view({3, -1, 34}).narrow(2, 2, 32).select(0, 1).fill_(128);
      const auto packed = kernels::pack(w);
      const auto decoded = codes::decode(w, at::kFloat);
      for (const auto& x : {torch::ones({1, 256}), -torch::ones({1, 256}), signs.unsqueeze(0)})
        EXPECT_LT(relative_error(kernels::multiply(*instructions, x, *packed), torch::matmul(x, decoded.t())), 1e-4)
            << instructions->name << " " << codes::name(encoding);
    }
  }
}

TEST(CodesKernels, ErrByLessThanAHundredthOfTheProduct) {
  torch::manual_seed(2);
  for (const auto encoding : with_products()) {
    const auto w = random_codes(encoding, 300, 512);
    const auto x = torch::randn({7, 512});
    const auto expected = torch::matmul(x, codes::decode(w, at::kFloat).t());
    const double error = relative_error(codes::linear(x, w), expected);
    EXPECT_LT(error, 0.01) << codes::name(encoding);
    EXPECT_GT(error, 1e-4) << codes::name(encoding) << ": was it computed on codes at all?";
  }
}

TEST(CodesKernels, TakeAnyShapeAndDtypeOfInputs) {
  torch::manual_seed(3);
  const auto w = random_codes(Encoding::q4_1, 50, 64);
  const auto bias = torch::randn({50});
  const auto x = torch::randn({2, 3, 64});
  const auto expected = torch::nn::functional::linear(x, codes::decode(w, at::kFloat), bias);
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const bool exact : {false, true}) {
      const auto found = codes::linear(x.to(dtype), w, bias.to(dtype), {.exact = exact});
      EXPECT_EQ(found.scalar_type(), dtype);
      EXPECT_EQ(found.sizes(), expected.sizes());
      EXPECT_LT(relative_error(found, expected), dtype == at::kBFloat16 ? 0.02 : 0.01) << dtype << exact;
    }
  }
  const auto turned = torch::randn({64, 5}).t();  // not contiguous
  EXPECT_TRUE(codes::linear(turned, w).equal(codes::linear(turned.contiguous(), w)));
  EXPECT_EQ(codes::linear(torch::randn({64}), w).sizes(), (std::vector<int64_t>{50}));
  EXPECT_EQ(codes::linear(torch::randn({0, 64}), w).sizes(), (std::vector<int64_t>{0, 50}));
  for (const auto encoding : {Encoding::int8_rowwise, Encoding::nf4, Encoding::q8_0}) {
    EXPECT_EQ(
        codes::linear(torch::randn({2, 64}), codes::encode(torch::empty({0, 64}), {.encoding = encoding})).sizes(),
        (std::vector<int64_t>{2, 0}));
    EXPECT_TRUE(codes::linear(torch::empty({2, 0}), codes::encode(torch::empty({5, 0}), {.encoding = encoding}))
                    .equal(torch::zeros({2, 5})));
  }
}

TEST(CodesKernels, ExactIsTheProductWithDecodedWeights) {
  torch::manual_seed(4);
  for (const auto encoding : kAll) {
    const auto w = random_codes(encoding, 40, 256);
    const auto x = torch::randn({3, 256});
    EXPECT_LT(
        relative_error(codes::linear(x, w, {}, {.exact = true}), torch::matmul(x, codes::decode(w, at::kFloat).t())),
        1e-6)
        << codes::name(encoding);
  }
  // More rows than are decoded at a time.
  const auto w = random_codes(Encoding::q8_0, 4100, 1024);
  const auto x = torch::randn({2, 1024}), bias = torch::randn({4100});
  EXPECT_LT(relative_error(codes::linear(x, w, bias, {.exact = true}),
                           torch::nn::functional::linear(x, codes::decode(w, at::kFloat), bias)),
            1e-6);
}

TEST(CodesKernels, ExactProductsComeInPanelsBothWays) {
  torch::manual_seed(15);
  const auto expect_exact = [](const Codes& w, const Tensor& x, double most) {
    const auto what =
        fmt::format("{} [{}, {}] {}", codes::name(w.encoding), w.rows(), w.columns(), c10::toString(x.scalar_type()));
    const auto weight = codes::decode(w, at::kFloat).to(at::kDouble);
    const auto bias = torch::randn({w.rows()}).to(x.scalar_type()),
               g = torch::randn({x.numel() / w.columns(), w.rows()}).to(x.scalar_type());
    const auto y = kernels::exact_linear(x, w, bias), back = kernels::exact_linear_back(g, w);
    EXPECT_EQ(y.scalar_type(), x.scalar_type());
    EXPECT_LT(relative_error(y, torch::matmul(x.to(at::kDouble), weight.t()) + bias), most) << what;
    EXPECT_LT(relative_error(back, torch::matmul(g.to(at::kDouble), weight)), most) << what;
  };
  for (const auto encoding : kAll) {
    const auto w = random_codes(encoding, 300, 512);  // a panel, and a narrow one, or one for each thread
    expect_exact(w, torch::randn({5, 512}), 1e-6);
    expect_exact(w, torch::randn({5, 512}).to(at::kBFloat16), 0.01);
    expect_exact(w, torch::randn({2, 260, 512}), 1e-6);  // all threads on one panel
  }
  // Sums in parts: so many are more than a panel has room for, and fp32 errs by a little more.
  for (const auto encoding : {Encoding::int8_rowwise, Encoding::nf4, Encoding::q8_0})
    expect_exact(random_codes(encoding, 16384, 64), torch::randn({64}), 5e-6);
  for (const auto encoding : {Encoding::fp4, Encoding::q6_k})
    expect_exact(random_codes(encoding, 80, 16384), torch::randn({1, 16384}), 5e-6);
  expect_exact(random_codes(Encoding::q6_k, 6000, 256), torch::randn({1, 256}), 5e-6);
  for (const auto& [n, k] : {std::pair(70, 96), {10, 33}, {1, 1}})  // blocks, and bytes, that go on in the next row
    for (const auto dtype : {at::kFloat, at::kDouble})
      expect_exact(codes::encode(torch::randn({n, k}), {.encoding = Encoding::fp4}), torch::randn({2, k}).to(dtype),
                   1e-6);
  auto once = random_codes(Encoding::nf4, 40, 128);
  ASSERT_TRUE(codes::keep_once(once));
  codes::linear(torch::randn({1, 128}), once);
  EXPECT_GT(codes::packed_bytes(once), 0);
  expect_exact(once, torch::randn({1, 128}), 1e-6);
  EXPECT_EQ(codes::packed_bytes(once), 0) << "every product of a training step would put them back";
}

TEST(CodesKernels, AllInstructionsDecodeTheSame) {
  torch::manual_seed(16);
  const auto bytes = torch::randint(256, {200}, at::kByte);
  const auto* const from = bytes.const_data_ptr<uint8_t>();
  for (const auto encoding : {Encoding::nf4, Encoding::fp4}) {
    const auto table = codes::table(encoding);
    for (const auto* instructions : kernels::instruction_sets()) {
      for (const int64_t count : {0, 1, 7, 8, 16, 33, 200}) {
        std::vector<float> numbers(static_cast<size_t>(2 * count) + 1, 77);
        instructions->four_bits(from, count, table.data(), 0.37F, numbers.data());
        for (int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(numbers[2 * i], table[from[i] >> 4] * 0.37F) << instructions->name << i;
          ASSERT_EQ(numbers[2 * i + 1], table[from[i] & 15] * 0.37F) << instructions->name << i;
        }
        EXPECT_EQ(numbers.back(), 77) << instructions->name << ": wrote further than it was to";
      }
    }
  }
}

TEST(CodesKernels, BlocksThatGoOnInTheNextRowAreDecoded) {
  const auto w = codes::encode(torch::randn({10, 96}), {.encoding = Encoding::nf4, .block_size = 64});
  const auto x = torch::randn({3, 96});
  EXPECT_FALSE(kernels::pack(w));
  EXPECT_LT(relative_error(codes::linear(x, w), torch::matmul(x, codes::decode(w, at::kFloat).t())), 1e-6);
  EXPECT_FALSE(codes::kernels_of(Encoding::nf4).linear(x, w, {}).defined());
}

TEST(CodesKernels, ScalesMayBeCodesToo) {
  torch::manual_seed(5);
  for (const int64_t block_size : {32, 64, 256}) {
    const auto w = codes::encode(torch::randn({40, 512}),
                                 {.encoding = Encoding::nf4, .block_size = block_size, .double_quantize = true});
    const auto x = torch::randn({9, 512});
    EXPECT_LT(relative_error(codes::linear(x, w), torch::matmul(rounded(x), codes::decode(w, at::kFloat).t())), 1e-4);
  }
}

TEST(CodesKernels, UndefinedInputsStayUndefined) {
  for (const auto* instructions : kernels::instruction_sets()) {
    for (const auto bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const auto packed = kernels::pack(random_codes(Encoding::q4_1, 20, 64));
      auto x = torch::randn({3, 64});
      x[1][40] = bad;
      const auto y = kernels::multiply(*instructions, x, *packed);
      EXPECT_TRUE(y[1].isnan().all().item<bool>()) << instructions->name << bad;
      EXPECT_TRUE(y[0].isfinite().all().item<bool>() && y[2].isfinite().all().item<bool>());
    }
    const auto zeros =
        kernels::multiply(*instructions, torch::zeros({1, 64}), *kernels::pack(random_codes(Encoding::q8_0, 20, 64)));
    EXPECT_EQ(zeros.abs().max().item<float>(), 0);
    const auto tiny = kernels::multiply(*instructions, torch::full({1, 64}, 1e-42F),
                                        *kernels::pack(random_codes(Encoding::q8_0, 20, 64)));
    EXPECT_LT(tiny.abs().max().item<float>(), 1e-35);
  }
}

TEST(CodesKernels, OutliersKeepTheirNumbers) {
  torch::manual_seed(6);
  const auto w = random_codes(Encoding::int8_rowwise, 64, 256);
  auto x = torch::randn({4, 256});
  x.select(1, 7).fill_(300), x[2][100] = -80;
  const auto expected = torch::matmul(x, codes::decode(w, at::kFloat).t());
  // The part of each outlier has a coarse scale otherwise.
  auto others = x.clone();
  others.select(1, 7).zero_(), others.select(1, 100).zero_();
  auto kept = rounded(others);
  kept.select(1, 7).copy_(x.select(1, 7)), kept.select(1, 100).copy_(x.select(1, 100));
  const auto found = codes::linear(x, w, {}, {.outlier_threshold = 6});
  EXPECT_LT(relative_error(found, torch::matmul(kept, codes::decode(w, at::kFloat).t())), 1e-5);
  EXPECT_LT((found - expected).norm().item<double>(), (codes::linear(x, w) - expected).norm().item<double>() / 2);
  EXPECT_TRUE(codes::linear(x, w, {}, {.outlier_threshold = 1000}).equal(codes::linear(x, w)));
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                codes::linear(torch::randn({1, 64}), random_codes(Encoding::q8_0, 4, 64), {}, {.outlier_threshold = 6});
              }),
              HasSubstr("q8_0"));
}

TEST(CodesKernels, GradientsAreThoseOfDecodedWeights) {
  torch::manual_seed(7);
  for (const auto encoding : {Encoding::nf4, Encoding::int8_rowwise, Encoding::q4_k}) {
    const auto w = random_codes(encoding, 40, 256);
    const auto decoded = codes::decode(w, at::kFloat);
    const auto x = torch::randn({2, 3, 256}).requires_grad_(), bias = torch::randn({40}).requires_grad_();
    const auto y = torch::nn::functional::linear(x, decoded, bias);
    const auto expected = torch::autograd::grad({(y * y).sum()}, {x, bias});
    const auto z = codes::linear(x, w, bias);
    const auto found = torch::autograd::grad({(z * z).sum()}, {x, bias});
    EXPECT_LT(relative_error(found[0], expected[0]), 1e-5) << codes::name(encoding);
    EXPECT_LT(relative_error(found[1], expected[1]), 1e-5) << codes::name(encoding);
    // Gradients of gradients, too: that of one is a product with the weight again.
    const auto twice = [&](const Tensor& result) {
      const auto g = torch::autograd::grad({result.pow(3).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      return torch::autograd::grad({g.square().sum()}, {x, bias});
    };
    const auto expected_twice = twice(torch::nn::functional::linear(x, decoded, bias));
    const auto found_twice = twice(codes::linear(x, w, bias));
    for (const size_t i : {0, 1})
      EXPECT_LT(relative_error(found_twice[i], expected_twice[i]), 1e-5) << codes::name(encoding) << i;
  }
}

TEST(CodesKernels, EmbeddingsAreDecodedRowsToTheBit) {
  torch::manual_seed(8);
  const auto indices = torch::tensor({{3, 0, 19}, {3, 7, 1}});
  for (const auto encoding : kAll) {
    for (const bool nested : {false, true}) {
      if (nested && !codes::is_four_bit(encoding)) continue;
      const auto w = nested ? codes::encode(torch::randn({20, 256}), {.encoding = encoding, .double_quantize = true})
                            : random_codes(encoding, 20, 256);
      for (const auto dtype : {at::kFloat, at::kBFloat16})
        EXPECT_TRUE(codes::embedding(indices, w, dtype).equal(torch::embedding(codes::decode(w, dtype), indices)))
            << codes::name(encoding) << nested;
      EXPECT_TRUE(codes::embedding(indices.to(at::kInt), w).equal(torch::embedding(codes::decode(w), indices)));
    }
  }
  for (const int64_t columns : {33, 40}) {
    const auto across = codes::encode(torch::randn({20, columns}), {.encoding = Encoding::fp4, .block_size = 64});
    EXPECT_TRUE(codes::embedding(indices, across).equal(torch::embedding(codes::decode(across), indices))) << columns;
  }
  const auto odd = codes::encode(torch::randn({20, 40}), {.encoding = Encoding::fp4, .block_size = 64});
  EXPECT_EQ(codes::embedding(torch::empty({2, 0}, at::kLong), odd).sizes(), (std::vector<int64_t>{2, 0, 40}));
  for (const int64_t bad : {-1, 20})
    EXPECT_THAT(support::message_of<ShapeError>([&] { codes::embedding(torch::tensor({bad}), odd); }),
                HasSubstr("of a table of 20 rows"));
}

TEST(CodesKernels, ThePackedFormIsACacheOfTheCodes) {
  torch::manual_seed(9);
  auto w = random_codes(Encoding::q4_1, 32, 64);
  const auto copy = w;
  const auto x = torch::randn({1, 64});
  EXPECT_EQ(codes::packed_bytes(w), 0);
  const auto y = codes::linear(x, w);
  EXPECT_EQ(codes::packed_bytes(w), w.data.numel());
  EXPECT_EQ(codes::packed_bytes(copy), w.data.numel()) << "copies share it";
  codes::drop_packed(w);
  EXPECT_EQ(codes::packed_bytes(copy), 0);
  EXPECT_TRUE(codes::linear(x, w).equal(y));
  w.data.copy_(random_codes(Encoding::q4_1, 32, 64).data);  // written in place, as loading does
  const auto changed = torch::matmul(rounded(x), codes::decode(w, at::kFloat).t());
  EXPECT_LT(relative_error(codes::linear(x, w), changed), 1e-4);
  w.data = random_codes(Encoding::q4_1, 32, 64).data;
  EXPECT_LT(relative_error(codes::linear(x, w), torch::matmul(rounded(x), codes::decode(w, at::kFloat).t())), 1e-4);
  EXPECT_LT(relative_error(codes::linear(x, copy), changed), 1e-4);
}

/// Codes of every kind that can be packed, with their scales in every form.
std::vector<Codes> packable(int64_t rows) {
  std::vector<Codes> all;
  for (const auto encoding : with_products()) all.push_back(random_codes(encoding, rows, 256));
  all.push_back(random_codes(Encoding::int8_rowwise, rows, 45));  // no whole number of parts
  all.push_back(codes::encode(torch::randn({rows, 256}), {.encoding = Encoding::fp4, .double_quantize = true}));
  return all;
}

bool same(const Codes& a, const Codes& b) {
  const auto equal = [](const Tensor& x, const Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || (x.sizes() == y.sizes() && x.equal(y)));
  };
  return a.encoding == b.encoding && a.shape == b.shape && a.dtype == b.dtype && a.block_size == b.block_size &&
         equal(a.data, b.data) && equal(a.scales, b.scales) && a.nested.has_value() == b.nested.has_value();
}

TEST(CodesKernels, PackingMovesBitsAndLosesNone) {
  torch::manual_seed(11);
  for (const int64_t rows : {1, 16, 45}) {
    for (const auto& w : packable(rows)) {
      const auto packed = kernels::pack(w);
      ASSERT_TRUE(packed);
      auto data = torch::empty_like(w.data);
      kernels::unpack(*packed, 0, rows, data.mutable_data_ptr());
      EXPECT_TRUE(data.equal(w.data)) << codes::name(w.encoding) << rows;
      if (packed->scales.defined()) {
        EXPECT_TRUE(kernels::unpacked_scales(*packed, 0, rows).equal(codes::plain_scales(w)))
            << codes::name(w.encoding);
      }
      if (rows < 45) continue;
      const auto plain = w.data.view({rows, -1});
      for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {15, 2}, {7, 30}, {44, 1}, {20, 0}}) {
        auto some = torch::empty({count, plain.size(1)}, w.data.options());
        kernels::unpack(*packed, first, count, some.mutable_data_ptr());
        EXPECT_TRUE(some.equal(plain.narrow(0, first, count))) << codes::name(w.encoding) << first;
      }
    }
  }
}

TEST(CodesKernels, CodesThatAreKeptOnceAreTheSameInEitherOrder) {
  torch::manual_seed(12);
  const auto x = torch::randn({3, 256}), indices = torch::tensor({44, 0, 17});
  for (const auto& w : packable(45)) {
    auto once = w;
    once.data = w.data.clone();
    const auto storage = c10::weak_intrusive_ptr<c10::StorageImpl>(once.data.storage().getWeakStorageImpl());
    ASSERT_TRUE(codes::keep_once(once));
    ASSERT_TRUE(once.data.is_meta());
    EXPECT_EQ(once.bytes(), w.bytes());
    const auto copy = once;
    const auto input = x.narrow(1, 0, w.columns());
    const auto y = codes::linear(input, w);
    const auto expect_same = [&](const char* when) {
      for (const Codes* one : {static_cast<const Codes*>(&once), &copy}) {
        codes::check(*one);
        EXPECT_TRUE(same(codes::unpacked(*one), w)) << codes::name(w.encoding) << when;
        EXPECT_TRUE(codes::decode(*one).equal(codes::decode(w))) << codes::name(w.encoding) << when;
        EXPECT_TRUE(codes::decode_rows(*one, 15, 20).equal(codes::decode_rows(w, 15, 20))) << when;
        EXPECT_TRUE(codes::embedding(indices, *one).equal(codes::embedding(indices, w))) << when;
        EXPECT_TRUE(codes::is_gguf(w.encoding) || codes::plain_scales(*one).equal(codes::plain_scales(w))) << when;
      }
    };
    expect_same("before");
    EXPECT_EQ(codes::packed_bytes(once), 0);
    EXPECT_FALSE(storage.expired());
    EXPECT_TRUE(codes::linear(input, once).equal(y));
    EXPECT_GT(codes::packed_bytes(once), 0);
    EXPECT_TRUE(storage.expired()) << codes::name(w.encoding) << ": the memory went with the first product";
    expect_same("packed");
    EXPECT_TRUE(codes::linear(input, copy, {}, {.exact = true}).equal(codes::linear(input, w, {}, {.exact = true})));
    codes::drop_packed(copy);
    EXPECT_EQ(codes::packed_bytes(once), 0);
    expect_same("dropped");
    EXPECT_TRUE(codes::linear(input, once).equal(y));
    auto other = once;  // a copy that is given data of its own does not disturb the others
    other.data = torch::zeros_like(w.data);
    if (codes::is_four_bit(w.encoding) && !w.nested) other.scales = w.scales;
    EXPECT_FALSE(codes::linear(input, other).equal(y));
    EXPECT_TRUE(codes::linear(input, once).equal(y));
  }
  auto across = codes::encode(torch::randn({10, 96}), {.encoding = Encoding::nf4, .block_size = 64});
  EXPECT_FALSE(codes::keep_once(across));
  EXPECT_TRUE(across.data.is_cpu());
  auto stray = random_codes(Encoding::q8_0, 4, 64);
  stray.data = stray.data.to(at::kMeta);
  EXPECT_THAT(support::message_of<ShapeError>([&] { codes::decode(stray); }), HasSubstr("expected Byte"));
}

/// Bytes of a mapping that are in this process.
int64_t resident_bytes(const void* begin) {
  std::ifstream maps("/proc/self/smaps");
  const auto address = fmt::format("{:x}-", reinterpret_cast<uintptr_t>(begin));
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(address)) inside = true;
    else if (inside && line.starts_with("Rss:")) return std::stoll(line.substr(4)) * 1024;
  }
  return -1;
}

#if defined(__linux__)
TEST(CodesKernels, PagesOfAFileGoWhenItsCodesArePacked) {
  torch::manual_seed(13);
  const auto w = random_codes(Encoding::q8_0, 512, 4096);
  const auto bytes = static_cast<size_t>(w.data.nbytes());
  const auto path = std::filesystem::path(::testing::TempDir()) / fmt::format("codes_{}", ::getpid());
  std::ofstream(path, std::ios::binary).write(static_cast<const char*>(w.data.const_data_ptr()), w.data.nbytes());
  const int file = ::open(path.c_str(), O_RDONLY);
  void* const begin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  ASSERT_NE(begin, MAP_FAILED);
  ::close(file);
  std::filesystem::remove(path);
  {
    auto mapped = w;
    mapped.data = torch::from_blob(begin, w.data.sizes(), at::kByte);
    ASSERT_TRUE(codes::keep_once(mapped, /*in_file=*/true));
    EXPECT_TRUE(mapped.data.is_cpu());
    EXPECT_TRUE(mapped.data.equal(w.data));
    EXPECT_GE(resident_bytes(begin), static_cast<int64_t>(bytes));
    const auto x = torch::randn({1, 4096});
    EXPECT_TRUE(codes::linear(x, mapped).equal(codes::linear(x, w)));
    EXPECT_LT(resident_bytes(begin), 1 << 16);
    EXPECT_TRUE(codes::decode(mapped).equal(codes::decode(w)));
    EXPECT_LT(resident_bytes(begin), 1 << 16) << "what is packed is not read from the file again";
    codes::drop_packed(mapped);
    EXPECT_TRUE(codes::decode(mapped).equal(codes::decode(w))) << "the file has them";
    EXPECT_GE(resident_bytes(begin), static_cast<int64_t>(bytes));
  }
  ::munmap(begin, bytes);
}
#endif

TEST(CodesKernels, WholeNumbersAreMultipliedExactly) {
  torch::manual_seed(14);
  for (const auto* instructions : kernels::instruction_sets()) {
    for (const int64_t k : {1, 31, 64, 257}) {
      for (const int64_t n : {1, 16, 37}) {
        const auto w = random_codes(Encoding::int8_rowwise, n, k);
        for (const int64_t rows : {0, 1, 5, 9}) {
          const auto x = torch::randint(-127, 128, {rows, k}, at::kChar);
          const auto expected = torch::matmul(x.to(at::kDouble), w.data.to(at::kDouble).t());
          EXPECT_TRUE(kernels::multiply_whole(*instructions, x, *kernels::pack(w)).to(at::kDouble).equal(expected))
              << instructions->name << " " << n << "x" << k << ", " << rows;
        }
      }
    }
  }
}

TEST(CodesKernels, SeveralThreadsComputeTheSame) {
  torch::manual_seed(10);
  const auto w = random_codes(Encoding::q6_k, 700, 256);
  const auto x = torch::randn({70, 256});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto alone = codes::linear(x, w);
  codes::drop_packed(w);
  at::set_num_threads(3);
  EXPECT_TRUE(codes::linear(x, w).equal(alone));
  at::set_num_threads(before);
  codes::drop_packed(w);
  std::vector<Tensor> found(4);
  std::vector<std::thread> threads;
  for (auto& y : found) threads.emplace_back([&] { y = codes::linear(x, w); });
  for (auto& thread : threads) thread.join();
  for (const auto& y : found) EXPECT_TRUE(y.equal(alone));
}

TEST(CodesKernels, TakeBiasesOfOtherTypes) {
  torch::manual_seed(15);
  const auto w = random_codes(Encoding::nf4, 48, 64);
  const auto x = torch::randn({3, 64}, at::kHalf), bias = torch::randn({48});
  const auto expected = torch::linear(x.to(at::kFloat), codes::decode(w, at::kFloat), bias);
  for (const bool exact : {false, true})
    for (const bool trains : {false, true}) {
      const auto b = bias.clone().set_requires_grad(trains);
      const auto y = codes::linear(x, w, b, {.exact = exact});
      EXPECT_EQ(y.scalar_type(), at::kHalf);
      EXPECT_LT(relative_error(y.detach().to(at::kFloat), expected), 0.03) << exact << trains;
      if (!trains) continue;
      y.sum().backward();
      EXPECT_TRUE(torch::equal(b.grad(), torch::full({48}, 3.0)));
    }
}

TEST(CodesKernels, SumsOfNothingAreZero) {
  const auto w = codes::encode(torch::empty({8, 0}), {.encoding = Encoding::int8_rowwise});
  const auto bias = torch::randn({8});
  EXPECT_TRUE(torch::equal(codes::llm_int8_linear(torch::empty({4, 0}), w, {}, 6), torch::zeros({4, 8})));
  EXPECT_TRUE(torch::equal(codes::llm_int8_linear(torch::empty({4, 0}), w, bias, 6), bias.expand({4, 8})));
}

TEST(CodesKernels, SayWhatDoesNotFit) {
  const auto w = random_codes(Encoding::q8_0, 5, 64);
  const auto message = [&](const Tensor& x, const std::optional<Tensor>& bias = {}) {
    return support::message_of<ShapeError>([&] { codes::linear(x, w, bias); });
  };
  EXPECT_THAT(message(torch::randn({2, 65})), HasSubstr("expected [.., 64]"));
  EXPECT_THAT(message(torch::randn({})), HasSubstr("expected [.., 64]"));
  EXPECT_THAT(message(torch::randn({2, 64}), torch::randn({4})), HasSubstr("expected [5]"));
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                codes::linear(torch::randn({2, 64}, at::kDouble), w);
              }),
              HasSubstr("expected fp32, fp16 or bf16"));
  EXPECT_FALSE(codes::kernels_of(Encoding::q8_0).linear(torch::randn({2, 64}, at::kDouble), w, {}).defined());
  EXPECT_THAT(support::message_of<ConfigError>([&] { codes::embedding(torch::randn({2}), w); }),
              HasSubstr("expected int64 or int32"));
}

}  // namespace
