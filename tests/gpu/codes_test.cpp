/// Weights in few bits on the device: decoded, multiplied and trained through where they lie.
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/codes/codes.hpp>
#include <accelerate/codes/kernels.hpp>

#include <gmock/gmock.h>

#include <string>

#include "codes/cuda/launch.hpp"
#include "gpu.hpp"
#include "message_of.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;
using codes::Encoding;
using support::message_of;
using testing::HasSubstr;

namespace cuda = codes::cuda;

/// Counts what kernels of our own are asked for.
class GpuCodes : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    kernels.clear();
    before = cuda::exchange_launcher(nullptr);
    if (before)
      cuda::exchange_launcher([](const cuda::Launch& launch, const c10::Device& where) {
        if (!where.is_cuda()) return false;
        kernels.push_back(launch.kernel);
        return before(launch, where);
      });
  }
  void TearDown() override { cuda::exchange_launcher(before); }

  static inline std::vector<std::string> kernels;
  static inline cuda::Launcher before = nullptr;
};

/// Asks for products as GPUs compute them without being asked.
codes::LinearOptions exact() { return {.exact = !on_cuda()}; }

std::vector<codes::Codes> codes_of_each_kind() {
  std::vector<codes::Codes> all;
  for (const auto encoding :
       {Encoding::int8_rowwise, Encoding::nf4, Encoding::fp4, Encoding::q4_0, Encoding::q4_1, Encoding::q5_0,
        Encoding::q5_1, Encoding::q8_0, Encoding::q2_k, Encoding::q3_k, Encoding::q4_k, Encoding::q5_k, Encoding::q6_k})
    all.push_back(codes::encode(numbers({40, 256}, 1, at::kCPU), {.encoding = encoding}));
  all.push_back(codes::encode(numbers({40, 256}, 2, at::kCPU), {.double_quantize = true}));
  all.push_back(codes::encode(numbers({40, 256}, 2, at::kCPU), {.block_size = 1024, .double_quantize = true}));
  return all;
}

TEST_F(GpuCodes, GiveTheNumbersThatTheyGiveOnTheHost) {
  for (const auto& there : codes_of_each_kind()) {
    SCOPED_TRACE(std::string(codes::name(there.encoding)));
    const auto here = codes::to(there, device());
    EXPECT_EQ(here.data.device(), device());
    codes::check(here);
    EXPECT_TRUE(same_bits(codes::decode(here), codes::decode(there)));
    EXPECT_TRUE(same_bits(codes::decode_rows(here, 3, 30, at::kHalf), codes::decode_rows(there, 3, 30, at::kHalf)));
    const auto rows = torch::tensor({39, 0, 7});
    EXPECT_TRUE(same_bits(codes::embedding(rows.to(device()), here), codes::embedding(rows, there)));
    const auto bias = numbers({40}, 8, at::kCPU);
    for (const int64_t count : {1, 3, 8, 20}) {  // few by kernels of our own, more by LibTorch's
      const auto x = numbers({count, 256}, 3, at::kCPU);
      // Sums of 256 products in another order: some ten roundings of 6e-8.
      EXPECT_TRUE(close(codes::linear(x.to(device()), here, bias.to(device()), exact()),
                        codes::linear(x, there, bias, {.exact = true}), 1e-5));
    }
    EXPECT_TRUE(same_bits(codes::decode(codes::to(here, at::kCPU)), codes::decode(there)));
  }
}

/// Sizes that no kernel takes 16 elements at a time of.
TEST_F(GpuCodes, OfAnySizeGiveTheNumbersThatTheyGiveOnTheHost) {
  for (const auto encoding : {Encoding::int8_rowwise, Encoding::nf4, Encoding::fp4})
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1}, {5, 7}, {33, 65}, {9, 48}, {0, 16}}) {
      const auto there = codes::encode(numbers(sizes, 1, at::kCPU), {.encoding = encoding});
      const auto here = codes::to(there, device());
      EXPECT_TRUE(same_bits(codes::decode(here), codes::decode(there)));
      EXPECT_TRUE(same_bits(codes::decode(here, at::kBFloat16), codes::decode(there, at::kBFloat16)));
      if (sizes.size() != 2 || sizes[0] == 0) continue;
      const auto x = numbers({3, sizes[1]}, 3, at::kCPU);
      EXPECT_TRUE(
          close(codes::linear(x.to(device()), here, {}, exact()), codes::linear(x, there, {}, {.exact = true}), 1e-5));
    }
}

TEST_F(GpuCodes, AreDecodedAndMultipliedByKernelsOfOurOwn) {
  NEEDS_DEVICE("there are no kernels for CPUs");
  const auto asked = [](const auto& work) {
    kernels.clear();
    work();
    return kernels;
  };
  using testing::ElementsAre;
  const auto w = codes::to(codes::encode(numbers({40, 64}, 1, at::kCPU), {}), device());
  const auto x = numbers({20, 64}, 2).to(at::kHalf);
  EXPECT_THAT(asked([&] { codes::decode(w); }), ElementsAre("decode<FourBit,Float>"));
  EXPECT_THAT(asked([&] { codes::decode_rows(w, 1, 2, at::kHalf); }), ElementsAre("decode<FourBit,Half>"));
  EXPECT_THAT(asked([&] { codes::embedding(torch::tensor({3}).to(device()), w, at::kBFloat16); }),
              ElementsAre("decode<FourBit,BFloat16>"));
  EXPECT_THAT(asked([&] { codes::linear(x.narrow(0, 0, 8), w); }), ElementsAre("product<FourBit,Half,8>"));
  EXPECT_THAT(asked([&] { codes::linear(x, w); }), ElementsAre("decode<FourBit,Half>"));
  const auto trained = x.narrow(0, 0, 3).clone().requires_grad_();
  EXPECT_THAT(asked([&] { codes::linear(trained, w).sum().backward(); }),
              ElementsAre("product<FourBit,Half,3>", "decode<FourBit,Half>"));
}

TEST_F(GpuCodes, AreNotMixedWithInputsOfTheHost) {
  NEEDS_DEVICE("there is one device");
  const auto here = codes::to(codes::encode(numbers({40, 128}, 1, at::kCPU), {}), device());
  EXPECT_THAT(message_of<ConfigError>([&] {
                codes::linear(numbers({6, 128}, 3), here, numbers({40}, 3, at::kCPU));
              }),
              HasSubstr("the bias is on cpu"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                codes::linear(numbers({6, 128}, 3, at::kCPU), here);
              }),
              HasSubstr("where the weight is"));
}

/// The same layers, quantized in host memory and on the device.
TEST_F(GpuCodes, OfAModelComputeAndPassGradientsOnTheDevice) {
  BnbQuantizationConfig int8{.load_in_8bit = true}, nf4{.load_in_4bit = true, .bnb_4bit_quant_type = "nf4"};
  for (auto* config : {&int8, &nf4}) {
    config->skip_modules = std::vector<std::string>{};
    config->torch_dtype = at::kFloat;
    config->bnb_4bit_compute_dtype = at::kFloat;
    config->exact_products = true;
    Mlp on_host(64, 3), on_device(64, 3);
    const auto host = load_and_quantize_model(on_host, *config, {}, {.device_map = DeviceMap{{"", Place("cpu")}}});
    const auto there = load_and_quantize_model(on_device, *config);
    const auto x = numbers({3, 64}, 4, at::kCPU);
    const auto x_here = x.to(device()).requires_grad_(), x_there = x.detach().clone().requires_grad_();
    kernels.clear();
    const auto y = on_device(x_here), expected = on_host(x_there);
    EXPECT_EQ(y.device(), device());
    EXPECT_TRUE(close(y, expected, 1e-5));
    EXPECT_THAT(kernels, testing::Each(HasSubstr("product<")));
    EXPECT_EQ(kernels.size(), on_cuda() ? 3 : 0);
    y.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(close(x_here.grad(), x_there.grad(), 1e-5));
    EXPECT_EQ(there.code_bytes(), host.code_bytes());
  }
}

/// Speed, for whoever reads the log of a real GPU; LibTorch's own product of the same numbers in bf16 beside it.
TEST_F(GpuCodes, TellHowFastTheirProductsAre) {
  NEEDS_CUDA("times of a GPU");
  const at::NoGradGuard no_grad;
  const auto weight = numbers({4096, 4096}, 5).to(at::kBFloat16);
  for (const auto encoding : {Encoding::int8_rowwise, Encoding::nf4, Encoding::q8_0, Encoding::q4_k})
    for (const int64_t rows : {1, 8, 16, 4096}) {
      const auto here = codes::to(codes::encode(weight.cpu(), {.encoding = encoding}), device());
      const auto x = numbers({rows, 4096}, 6).to(at::kBFloat16);
      const auto milliseconds = [](const auto& work) {
        for (int i = 0; i < 3; ++i) work();
        synchronize();
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < 20; ++i) work();
        synchronize();
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() / 20;
      };
      const double ours = milliseconds([&] { codes::linear(x, here); });
      const double theirs = milliseconds([&] { torch::linear(x, weight); });
      std::printf("%s, %ld rows: %.3f ms, bf16 %.3f ms\n", std::string(codes::name(encoding)).c_str(),
                  static_cast<long>(rows), ours, theirs);
      EXPECT_TRUE(close(codes::linear(x, here), torch::linear(x, codes::decode(here, at::kBFloat16)), 0.02));
    }
}

}  // namespace
}  // namespace gpu_test
