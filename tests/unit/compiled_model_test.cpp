// Packages that Python's AOTInductor compiled, run and prepared as models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>

#include "accelerate/accelerator.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/compiled_model.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

/// The peer compiles once for all tests: 20 s or so.
class CompiledModelTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!support::python()) return;
    folder = std::filesystem::path(testing::TempDir()) / ("compiled_model_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const auto made = support::run_python("tests/unit/compiled_model_peer.py", {folder.string()});
    ASSERT_EQ(made.exit_code, 0) << made.output;
    expected = load_safetensors(folder / "expected.safetensors");
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(folder); }
  void SetUp() override { SKIP_WITHOUT_PYTHON(); }
  static const at::Tensor& tensor(const std::string& name) { return expected.at(name); }

  static inline std::filesystem::path folder;
  static inline std::map<std::string, at::Tensor> expected;
};

// One thread or several, the same operators in another order of additions: differences of rounding only.
constexpr double kRounding = 1e-6;

TEST_F(CompiledModelTest, GivesWhatEagerGivesAlsoPreparedAndForOtherBatches) {
  CompiledModel model(folder / "one.pt2");
  EXPECT_LE(support::largest_difference(model->forward(tensor("x")), tensor("one")), kRounding);
  EXPECT_TRUE(model(tensor("x")).equal(model->forward(tensor("x"))));
  EXPECT_EQ(model->metadata().at("AOTI_DEVICE_KEY"), "cpu");

  Accelerator accelerator({.mixed_precision = "bf16", .cpu = true});
  const auto prepared = accelerator.prepare(model);
  const at::Tensor y = prepared(tensor("x"));
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_LE(support::largest_difference(y, tensor("one")), kRounding) << "autocast changes nothing in compiled code";
  const at::Tensor twice = prepared(at::cat({tensor("x"), tensor("x")}));
  EXPECT_LE(support::largest_difference(twice, at::cat({tensor("one"), tensor("one")})), kRounding);
}

TEST_F(CompiledModelTest, SeveralInputsAndResults) {
  CompiledModel model(folder / "two.pt2");
  const auto results = model->forward(std::vector<at::Tensor>{tensor("x"), tensor("y")});
  ASSERT_EQ(results.size(), 2);
  EXPECT_TRUE(at::equal(results[0], tensor("sum")));
  EXPECT_TRUE(at::equal(results[1], tensor("product")));
  EXPECT_THAT(message_of<ShapeError>([&] { model->forward(tensor("x"), tensor("y")); }),
              AllOf(HasSubstr("has 2 results"), HasSubstr("std::vector")));
}

TEST_F(CompiledModelTest, InputsOfAnotherKindAreRefusedNotMisread) {
  CompiledModel model(folder / "one.pt2");
  const auto refusal = [&](const std::vector<at::Tensor>& inputs) {
    return message_of<ShapeError>([&] { model->forward(inputs); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("refused its inputs"));
  EXPECT_THAT(refusal({tensor("x"), tensor("x")}), HasSubstr("refused its inputs"));
  EXPECT_THAT(refusal({tensor("x").to(at::kDouble)}), HasSubstr("dtype"));
  EXPECT_THAT(refusal({at::zeros({3, 9})}), HasSubstr("unmatched dim value"));
  EXPECT_THAT(refusal({at::zeros({65, 8})}), HasSubstr("dim value"));
  EXPECT_THAT(refusal({at::zeros({8, 3}).t()}), HasSubstr("stride"));
  // The exception says it, and nobody beside it; what others write is there.
  testing::internal::CaptureStderr();
  EXPECT_THAT(refusal({at::zeros({3, 9})}), HasSubstr("unmatched dim value"));
  std::cerr << "what the program says" << std::endl;
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "what the program says\n");
  const at::Tensor wants_gradient = tensor("x").clone().requires_grad_();
  EXPECT_THAT(message_of<ConfigError>([&] { model->forward(wants_gradient); }), HasSubstr("no backward"));
  const at::NoGradGuard no_grad;
  EXPECT_LE(support::largest_difference(model->forward(wants_gradient), tensor("one")), kRounding);
}

TEST_F(CompiledModelTest, FilesThatAreNoneAreNamed) {
  const auto refusal = [](const std::filesystem::path& file, const std::string& name) {
    return message_of<CheckpointError>([&] { CompiledModel(file, name); });
  };
  EXPECT_THAT(refusal(folder / "none.pt2", "model"), AllOf(HasSubstr("found no file"), HasSubstr("none.pt2")));
  EXPECT_THAT(refusal(folder / "one.pt2", "other"), HasSubstr("as model 'other'"));
  std::ofstream(folder / "text.pt2") << "hello";
  EXPECT_THAT(refusal(folder / "text.pt2", "model"), HasSubstr("can't be opened"));
  std::filesystem::copy_file(folder / "one.pt2", folder / "half.pt2");
  std::filesystem::resize_file(folder / "half.pt2", std::filesystem::file_size(folder / "half.pt2") / 2);
  EXPECT_THAT(refusal(folder / "half.pt2", "model"), HasSubstr("can't be opened"));
}

}  // namespace
