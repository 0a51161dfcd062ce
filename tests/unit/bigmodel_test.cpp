// Descriptions of real modules, and device maps of them. Rules and numbers are checked by the conformance cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <sstream>

#include "accelerate/bigmodel.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel_support.hpp"

namespace {

using accelerate::DeviceMap;
using accelerate::MaxMemory;
using accelerate::Place;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Two layers with a norm between them; 236 bytes.
struct SmallImpl : torch::nn::Module {
  SmallImpl() : linear1(3, 4), batchnorm(4), linear2(4, 5) {
    register_module("linear1", linear1);
    register_module("batchnorm", batchnorm);
    register_module("linear2", linear2);
  }
  torch::nn::Linear linear1;
  torch::nn::BatchNorm1d batchnorm;
  torch::nn::Linear linear2;
};
TORCH_MODULE(Small);

/// A head whose weight is the embedding's.
struct TiedImpl : torch::nn::Module {
  TiedImpl() : words(10, 4), body(4, 4), head(std::make_shared<torch::nn::Module>("HeadImpl")) {
    register_module("words", words);
    register_module("body", body);
    register_module("head", head);
    head->register_parameter("weight", words->weight);
  }
  torch::nn::Embedding words;
  torch::nn::Linear body;
  std::shared_ptr<torch::nn::Module> head;
};
TORCH_MODULE(Tied);

TEST(Describe, HasNamesClassesShapesAndDtypesOfAModule) {
  Small model;
  model->linear2->to(torch::kHalf);
  const auto tree = accelerate::describe(model);
  EXPECT_EQ(tree.class_name, "Small");
  ASSERT_EQ(tree.children.size(), 3U);
  EXPECT_EQ(tree.children[1].class_name, "BatchNorm1d");
  EXPECT_EQ(tree.children[2].name, "linear2");
  EXPECT_EQ(tree.children[2].parameters[0].dtype, "float16");
  EXPECT_THAT(tree.children[0].parameters[0].shape, ElementsAre(4, 3));
  const auto sizes = accelerate::compute_module_sizes(model);
  EXPECT_EQ(sizes[""], 236 - 50);
  EXPECT_EQ(sizes["batchnorm"], 72);  // two parameters, two statistics, and the count of batches in 8 bytes
  EXPECT_EQ(accelerate::compute_module_sizes(model, {.dtype = "int8"})[""], 12 + 4 + 4 * 4 + 8 + 20 + 5);
  EXPECT_EQ(accelerate::compute_module_sizes(model, {.special_dtypes = {{"linear1.weight", "float64"}}})["linear1"],
            96 + 16);
}

TEST(Describe, AModelWithoutMemoryIsDescribedAlike) {
  const auto empty = [] {
    const auto scope = accelerate::init_empty_weights();
    return Small();
  }();
  EXPECT_TRUE(empty->linear1->weight.is_meta());
  const auto entries = [](const Small& model) { return accelerate::compute_module_sizes(model).entries(); };
  EXPECT_EQ(entries(empty), entries(Small()));
  const DeviceMap expected{{"linear1", 0}, {"batchnorm", 1}, {"linear2", 1}};
  EXPECT_EQ(accelerate::infer_auto_device_map(empty, {.max_memory = MaxMemory{{0, 200}, {1, 200}}}), expected);
}

TEST(Describe, TiedWeightsAreOneTensorAndStayTogether) {
  Tied model;
  EXPECT_THAT(accelerate::find_tied_parameters(model), ElementsAre(ElementsAre("head.weight", "words.weight")));
  EXPECT_EQ(accelerate::compute_module_sizes(model)[""], 160 + 80);
  const auto map = accelerate::infer_auto_device_map(
      model, {.max_memory = MaxMemory{{0, 200}, {1, 200}, {"cpu", 1000}}});  // on GPU 0 are 80 in reserve
  EXPECT_EQ(map, (DeviceMap{{"words", 1}, {"head", 1}, {"body", "cpu"}}));
}

TEST(DeviceMaps, EachDecisionIsExplainedOnRequest) {
  std::ostringstream text;
  accelerate::DeviceMapReport report;
  accelerate::infer_auto_device_map(
      Small(), {.max_memory = MaxMemory{{0, 100}, {"cpu", 1000}}, .verbose = &text, .report = &report});
  EXPECT_THAT(text.str(), AllOf(HasSubstr("No room for linear1 on 0: it needs 64 bytes, 0 are left"),
                                HasSubstr("Putting linear1 (64 bytes of 900) on cpu")));
  EXPECT_EQ(report.minimum_memory.at(0), 164);  // itself, and room for the largest
  EXPECT_EQ(report.offloaded_buffer_bytes, 40);
  EXPECT_FALSE(report.offloaded_buffers_fit);  // all of GPU 0 is in reserve
}

TEST(DeviceMaps, StrategiesByName) {
  Small model;
  const accelerate::DeviceMapOptions options{.max_memory = MaxMemory{{0, 400}, {1, 400}}};
  EXPECT_EQ(accelerate::make_device_map(model, "sequential", options), (DeviceMap{{"", 0}}));
  EXPECT_EQ(accelerate::make_device_map(model, "auto", options),
            accelerate::make_device_map(model, "balanced", options));
  EXPECT_EQ(accelerate::make_device_map(model, "balanced", options),
            (DeviceMap{{"linear1", 0}, {"batchnorm", 1}, {"linear2", 1}}));
  EXPECT_EQ(accelerate::make_device_map(model, "balanced_low_0", options), (DeviceMap{{"", 1}}));
  EXPECT_THAT(message_of([&] { accelerate::make_device_map(model, "balance", options); }),
              AllOf(HasSubstr("'balance'"), HasSubstr("Did you mean 'balanced'")));
}

TEST(DeviceMaps, WithoutMaxMemoryTheyUseWhatIsFree) {
  const auto memory = accelerate::get_max_memory();
  ASSERT_TRUE(memory.contains("cpu"));
  EXPECT_GT(memory.at("cpu").bytes, 1e6);
  EXPECT_EQ(accelerate::infer_auto_device_map(Small()).size(), 1U);  // all of 236 bytes in the first place
}

TEST(DeviceMaps, CheckingNamesWhatHasNoPlaceAndWhatIsUnknown) {
  Small model;
  EXPECT_THAT(accelerate::check_device_map(
                  model, {{"linear1", 0}, {"batchnorm", "cpu"}, {"linear2.weight", 1}, {"linear2.bias", 1}}),
              IsEmpty());
  EXPECT_THAT(accelerate::check_device_map(model, {{"", 0}, {"linear3", "disk"}}), ElementsAre("linear3"));
  EXPECT_THAT(message_of([&] {
                accelerate::check_device_map(model, {{"linear1", 0}, {"linear", 0}, {"batchnorm", 0}});
              }),
              HasSubstr("parameters: linear2.weight, linear2.bias."));
}

TEST(Places, AreReadAndOrderedAsTheyAreFilled) {
  const std::set<Place> places{"disk", "cpu", 1, "mps", 0, 10};
  std::vector<std::string> names;
  for (const auto& place : places) names.push_back(place.str());
  EXPECT_THAT(names, ElementsAre("0", "1", "10", "mps", "cpu", "disk"));
  EXPECT_EQ(Place("cuda:3"), Place(3));
  EXPECT_EQ(Place("cuda"), Place(0));
  for (const char* name : {"gpu", "cuda:", "-1", "1x", ""})
    EXPECT_THAT(message_of([&] { Place place(name); }), HasSubstr("there is no device '" + std::string(name) + "'"));
  EXPECT_THAT(message_of([] { Place place(-1); }), HasSubstr("0 or more"));
}

TEST(Sizes, UnitsAreReadStrictly) {
  EXPECT_EQ(accelerate::convert_file_size_to_int(" 2 KiB"), 2048);
  EXPECT_EQ(accelerate::convert_file_size_to_int("+1_000KB"), 1'000'000) << "a number as Python's float() reads it";
  for (const char* text :
       {"1e400GB", "nanGB", "GB", "1 2GB", "1__0GB", "_1GB", "1_GB", "+-1GB", "1GBB", "99999999999GB"})
    EXPECT_THAT(message_of([&] { accelerate::convert_file_size_to_int(text); }), HasSubstr("is no size")) << text;
  EXPECT_THAT(message_of([] { accelerate::dtype_byte_size("float23"); }), HasSubstr("Did you mean 'float32'"));
}

}  // namespace
