#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "accelerate/precision.hpp"
#include "accelerate/utils/error.hpp"

using namespace accelerate;

namespace {

at::ScalarType product_dtype() {
  const auto x = torch::ones({4, 4});
  return torch::mm(x, x).scalar_type();
}

TEST(Precision, AutocastRunsMatrixProductsInTheDtype) {
  EXPECT_EQ(product_dtype(), at::kFloat);
  {
    const auto region = autocast(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_dtype(), at::kBFloat16);
    {
      const auto inner = autocast(at::kCPU, at::kHalf);
      EXPECT_EQ(product_dtype(), at::kHalf);
      const auto off = autocast(at::kCPU, std::nullopt);
      EXPECT_EQ(product_dtype(), at::kFloat);
    }
    EXPECT_EQ(product_dtype(), at::kBFloat16);
    const auto disabled = autocast(at::kCPU, at::kBFloat16, {.enabled = false});
    EXPECT_EQ(product_dtype(), at::kFloat);
  }
  EXPECT_EQ(product_dtype(), at::kFloat);
}

TEST(Precision, RestoresTheStateThatItFound) {
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const bool cache = at::autocast::is_autocast_cache_enabled();
  try {
    const auto region = autocast(at::kCPU, at::kHalf, {.cache_enabled = !cache});
    EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), !cache);
    throw std::runtime_error("forward failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
  EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), cache);
  EXPECT_EQ(at::autocast::increment_nesting(), 1) << "nesting is balanced";
  at::autocast::decrement_nesting();
}

TEST(Precision, LeavingTheOutermostRegionDropsCastWeights) {
  const auto weight = torch::ones({4, 4}, torch::requires_grad());
  const auto product = [&] {
    const auto region = autocast(at::kCPU, at::kBFloat16);
    const auto inner = [&] {
      const auto nested = autocast(at::kCPU, at::kBFloat16);
      return torch::mm(torch::ones({1, 4}), weight);
    };
    inner();
    return inner()[0][0].item<float>();
  };
  EXPECT_EQ(product(), 4.0F);
  {
    torch::NoGradGuard no_grad;
    weight.fill_(2.0);
  }
  EXPECT_EQ(product(), 8.0F) << "a stale cast of the weight was used";
}

TEST(Precision, HoldsForOneThread) {
  const auto region = autocast(at::kCPU, at::kBFloat16);
  std::thread([] { EXPECT_EQ(product_dtype(), at::kFloat); }).join();
}

TEST(Precision, WrongDeviceAndDtypeAreNamed) {
  EXPECT_THROW(autocast(at::kMeta, at::kBFloat16), ConfigError);
  EXPECT_THROW(autocast(at::kCPU, at::kFloat), ConfigError);
  EXPECT_EQ(product_dtype(), at::kFloat);
  EXPECT_THROW(check_precision(PrecisionType::BF16, at::Device(at::kVulkan)), ConfigError);
  check_precision(PrecisionType::BF16,
                  at::Device(at::kMeta));  // dry runs: FSDP brings the precision there, without autocast
  check_precision(PrecisionType::NO, at::Device(at::kMeta));
  check_precision(PrecisionType::FP16, at::Device(at::kCPU));
}

TEST(Precision, DtypeOfAPrecision) {
  EXPECT_EQ(autocast_dtype(PrecisionType::FP16), at::kHalf);
  EXPECT_EQ(autocast_dtype(PrecisionType::BF16), at::kBFloat16);
  EXPECT_EQ(autocast_dtype(PrecisionType::FP8), at::kBFloat16) << "what is no product in 8 bits";
  EXPECT_EQ(autocast_dtype(PrecisionType::NO), std::nullopt);
}

TEST(Precision, OutputsComeBackInFp32) {
  using Outputs = std::map<std::string, std::vector<at::Tensor>>;
  const Outputs outputs{{"logits", {torch::ones(2, at::kBFloat16), torch::ones(2, at::kHalf)}},
                        {"ids", {torch::ones(2, at::kLong), torch::ones(2, at::kDouble)}}};
  const Outputs converted = convert_outputs_to_fp32(outputs);
  EXPECT_EQ(converted.at("logits")[0].scalar_type(), at::kFloat);
  EXPECT_EQ(converted.at("logits")[1].scalar_type(), at::kFloat);
  EXPECT_EQ(converted.at("ids")[0].scalar_type(), at::kLong);
  EXPECT_EQ(converted.at("ids")[1].scalar_type(), at::kDouble);
}

}  // namespace
