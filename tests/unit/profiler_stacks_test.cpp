#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "accelerate/profiler.hpp"
#include "profiler/native_stacks.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace stacks_test {

// With external linkage and never inlined, so that their frames are there; what follows the last call keeps it from
// being a jump.
int64_t calls_done = 0;

[[gnu::noinline]] at::Tensor product_of(const at::Tensor& x) {
  auto y = torch::matmul(x, x);
  ++calls_done;
  return y;
}
[[gnu::noinline]] at::Tensor from_here(const at::Tensor& x) {
  auto y = product_of(x);
  ++calls_done;
  return y;
}
[[gnu::noinline]] at::Tensor from_there(const at::Tensor& x) {
  auto y = product_of(x);
  --calls_done;
  return y;
}

struct InnerImpl : torch::nn::Module {
  InnerImpl() : linear(register_module("linear", torch::nn::Linear(4, 4))) {}
  [[gnu::noinline]] at::Tensor forward(const at::Tensor& x) {
    auto y = linear->forward(x).relu();
    ++calls_done;
    return y;
  }
  torch::nn::Linear linear;
};
struct OuterImpl : torch::nn::Module {
  OuterImpl() : inner(register_module("inner", std::make_shared<InnerImpl>())) {}
  [[gnu::noinline]] at::Tensor forward(const at::Tensor& x) {
    auto y = inner->forward(x).sum();
    ++calls_done;
    return y;
  }
  std::shared_ptr<InnerImpl> inner;
};

struct Twice : torch::autograd::Function<Twice> {
  [[gnu::noinline]] static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    auto y = x.mul(2);
    ++calls_done;
    return y;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               torch::autograd::tensor_list gradients) {
    return gradients;
  }
};

}  // namespace stacks_test

namespace {

using nlohmann::json;
using support::scratch;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

template <class F> Profile profiled(ProfileKwargs kwargs, const F& work) {
  kwargs.activities = {{"cpu"}};
  Profile profile(std::move(kwargs));
  work();
  profile.stop();
  return profile;
}

std::vector<ProfileEvent> called(const Profile& profile, const std::string& name) {
  std::vector<ProfileEvent> found;
  for (const auto& event : profile.events().events)
    if (event.name == name) found.push_back(event);
  EXPECT_FALSE(found.empty()) << name;
  return found;
}

std::string text_of(const std::filesystem::path& file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

TEST(ProfileStacks, OperatorsSayWhichFunctionsCalledThem) {
  const auto x = torch::ones({64, 64});
  const auto profile = profiled({.with_stack = true}, [&] {
    for (int i = 0; i < 3; ++i) stacks_test::from_here(x);
    stacks_test::from_there(x);
  });
  // aten::mm is called by aten::matmul: LibTorch's frames between are left out.
  for (const char* const name : {"aten::matmul", "aten::mm"}) {
    const auto events = called(profile, name);
    ASSERT_EQ(events.size(), 4);
    for (size_t i = 0; i < 4; ++i) {
      ASSERT_GE(events[i].stack.size(), 3);
      EXPECT_THAT(events[i].stack[0], MatchesRegex("[^ ]+\\(0x[0-9a-f]+\\): .*stacks_test::product_of"));
      EXPECT_THAT(events[i].stack[1], EndsWith(i < 3 ? "stacks_test::from_here" : "stacks_test::from_there"));
      EXPECT_THAT(events[i].stack, Contains(HasSubstr("_Test::TestBody")));
      EXPECT_THAT(events[i].stack, Each(AllOf(Not(HasSubstr("libtorch")), Not(HasSubstr("libc.so")),
                                              Not(HasSubstr(": at::")), Not(HasSubstr("take_stack")))));
      EXPECT_THAT(events[i].module_hierarchy, IsEmpty());
    }
  }
  // The first line is the same for all four, the second is not.
  const auto rows_of = [&](int64_t lines) {
    std::vector<int64_t> counts;
    for (const auto& row : profile.key_averages(false, lines))
      if (row.key == "aten::mm") counts.push_back(row.count);
    return counts;
  };
  EXPECT_THAT(rows_of(1), ElementsAre(4));
  EXPECT_THAT(rows_of(2), ElementsAre(3, 1));
  EXPECT_THAT(profile.key_averages(false, 2).table(), AllOf(HasSubstr("Source Location"), HasSubstr("product_of")));

  profile.export_stacks(scratch("stacks.txt"));
  EXPECT_THAT(text_of(scratch("stacks.txt")),
              ::testing::ContainsRegex("from_here;[^ ;]*product_of [0-9]+\n"));  // the outermost first
}

TEST(ProfileStacks, BackwardsStandWhereTheirForwardsWereCalled) {
  const auto x = torch::ones({8, 8}, torch::requires_grad());
  const auto profile = profiled({.with_stack = true}, [&] { stacks_test::from_here(x).sum().backward(); });
  for (const auto& event : called(profile, "MmBackward0"))
    EXPECT_THAT(event.stack, Contains(EndsWith("stacks_test::from_here")));
}

TEST(ProfileStacks, ModulesAreTheClassesWhoseForwardCalled) {
  stacks_test::OuterImpl model;
  const auto profile = profiled({.with_modules = true}, [&] {
    model.forward(torch::ones({2, 4})).backward();
    stacks_test::Twice::apply(torch::ones(2));
  });
  EXPECT_THAT(called(profile, "aten::addmm")[0].module_hierarchy, ElementsAre("Outer", "Inner", "Linear"));
  EXPECT_THAT(called(profile, "aten::relu")[0].module_hierarchy, ElementsAre("Outer", "Inner"));
  EXPECT_THAT(called(profile, "aten::sum")[0].module_hierarchy, ElementsAre("Outer"));
  EXPECT_THAT(called(profile, "AddmmBackward0")[0].module_hierarchy, ElementsAre("Outer", "Inner", "Linear"));
  EXPECT_THAT(called(profile, "aten::mul")[0].module_hierarchy, IsEmpty());  // autograd's functions are no modules
  EXPECT_THAT(profile.events().events, Each(Field(&ProfileEvent::stack, IsEmpty())));
}

TEST(ProfileStacks, TracesHaveThem) {
  stacks_test::OuterImpl model;
  const auto profile = profiled({.with_stack = true, .with_modules = true}, [&] {
    for (int i = 0; i < 2; ++i) model.forward(torch::ones({2, 4}));
  });
  profile.export_chrome_trace(scratch("stacks.json"));
  const auto trace = json::parse(std::ifstream(scratch("stacks.json")));
  int found = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event.value("name", "") != "aten::addmm") continue;
    ++found;
    EXPECT_THAT(event["args"].value("Call stack", ""),
                ::testing::ContainsRegex("InnerImpl::forward;.*OuterImpl::forward;"));
    EXPECT_EQ(event["args"].value("Module Hierarchy", ""), "Outer.Inner.Linear");
  }
  EXPECT_EQ(found, 2);
  profiled({}, [&] { model.forward(torch::ones({2, 4})); }).export_chrome_trace(scratch("plain.json"));
  EXPECT_THAT(text_of(scratch("plain.json")), AllOf(Not(HasSubstr("Call stack")), Not(HasSubstr("Module Hierarchy"))));
}

TEST(ProfileStacks, EachRecordingHasItsOwn) {
  const auto x = torch::ones({4, 4});
  std::vector<std::string> callers;
  Profile profile(
      {.activities = {{"cpu"}},
       .schedule_option = {{{"wait", 1}, {"warmup", 1}, {"active", 1}, {"repeat", 2}}},
       .on_trace_ready = [&](Profile& ready) { callers.push_back(called(ready, "aten::mm").at(0).stack.at(1)); },
       .with_stack = true});
  constexpr int kCalls = 10;  // more than may be missing where a recording begins
  for (int i = 0; i < 6; ++i) {
    for (int call = 0; call < kCalls; ++call) {
      if (i < 3) stacks_test::from_here(x);
      else stacks_test::from_there(x);
    }
    profile.step();
  }
  profile.stop();
  EXPECT_THAT(callers, ElementsAre(EndsWith("from_here"), EndsWith("from_there")));
}

TEST(ProfileStacks, ClassesByTheNamesOfFunctions) {
  const auto class_of = &profiler::module_class;
  EXPECT_EQ(class_of("accelerate::models::BertLayerImpl::forward(at::Tensor const&)"), "BertLayer");
  EXPECT_EQ(class_of("(anonymous namespace)::Net::forward(at::Tensor) const"), "Net");
  EXPECT_EQ(class_of("at::Tensor torch::nn::SequentialImpl::forward<at::Tensor, at::Tensor&>(at::Tensor&)"),
            "Sequential");
  EXPECT_EQ(class_of("at::Tensor NetImpl::forward<float>(std::vector<float, std::allocator<float> >) [clone .cold]"),
            "Net");
  EXPECT_EQ(class_of("a::BlockImpl<2ul, a::X>::forward(at::Tensor const&)"), "Block");
  EXPECT_EQ(class_of("Impl::forward(int)"), "Impl");
  EXPECT_EQ(class_of("forward(int)"), "");
  EXPECT_EQ(class_of("Net::forward_features(at::Tensor)"), "");
  EXPECT_EQ(class_of("Net::forward(at::Tensor)::{lambda()#1}::operator()() const"), "");
  EXPECT_EQ(class_of("Twice::forward(torch::autograd::AutogradContext*, at::Tensor)"), "");
  EXPECT_EQ(class_of("main"), "");
  EXPECT_EQ(class_of(""), "");
}

}  // namespace
