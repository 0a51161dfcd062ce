// Models of any kind as one type, handles that are called in their place, and hooks around calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include "accelerate/accelerate.hpp"
#include "message_of.hpp"

namespace {

using accelerate::ModelRef;
using support::message_of;
using testing::ElementsAre;
using testing::HasSubstr;

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(3, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

torch::jit::Module script() {
  torch::jit::Module module("Doubling");
  module.register_parameter("scale", torch::full({1}, 2.0), /*is_buffer=*/false);
  module.define("def forward(self, x):\n    return x * self.scale\n");
  return module;
}

const void* identity(const ModelRef& model) { return model.identity(); }

TEST(ModelRef, IsMadeOfEveryKindOfModel) {
  const Block block;
  const std::shared_ptr<BlockImpl> pointer = block.ptr();
  const std::shared_ptr<torch::nn::Module> base = pointer;
  const void* const module = pointer.get();
  EXPECT_EQ(identity(block), module);
  EXPECT_EQ(identity(pointer), module);
  EXPECT_EQ(identity(base), module);
  EXPECT_EQ(identity(accelerate::Hooked(block)), module);
  EXPECT_EQ(identity(accelerate::dispatch_model(block, {{"", "cpu"}})), module);
  EXPECT_EQ(identity(accelerate::Prepared<Block>(block, nullptr)), module);
  EXPECT_EQ(identity(accelerate::PipelinedModel<std::shared_ptr<BlockImpl>>(pointer, nullptr)), module);
  EXPECT_EQ(ModelRef(block).module(), base);

  const auto doubling = script();
  EXPECT_EQ(identity(doubling), identity(accelerate::Hooked(doubling)));
  EXPECT_EQ(ModelRef(doubling).module(), nullptr);
  EXPECT_EQ(ModelRef(doubling).parameters().front().first, "scale");
}

static_assert(!std::is_convertible_v<at::Tensor, ModelRef> && !std::is_convertible_v<std::nullptr_t, ModelRef> &&
              !std::is_convertible_v<std::shared_ptr<int>, ModelRef>);

TEST(Callable, LeadsToTheModule) {
  Block block;
  const accelerate::Hooked hooked(block);
  const auto x = torch::randn({2, 3});
  EXPECT_TRUE(torch::equal(hooked(x), block(x)));
  EXPECT_EQ(&*hooked, block.get());
  EXPECT_EQ(hooked.unwrap().get(), block.get());
  hooked->eval();
  EXPECT_FALSE(block->is_training());

  const accelerate::Hooked doubling(script());
  EXPECT_TRUE(torch::equal(doubling(x).toTensor(), x * 2));
  EXPECT_TRUE(torch::equal(doubling(std::vector<c10::IValue>{x}).toTensor(), x * 2));
  EXPECT_EQ(identity(doubling), identity(*doubling));
}

struct AddOne : accelerate::ModelHook {
  explicit AddOne(std::vector<std::string>& log) : log(log) {}
  void init_hook(const ModelRef&) override { log.emplace_back("init"); }
  void pre_forward(const ModelRef&, std::vector<at::Tensor>& inputs) override { inputs.front() = inputs.front() + 1; }
  void detach_hook(const ModelRef&) override { log.emplace_back("detach"); }
  std::vector<std::string>& log;
};

struct Pair : torch::nn::Module {
  Pair() : first(register_module("first", Block())), second(register_module("second", Block())) {}
  at::Tensor forward(const at::Tensor& x) { return accelerate::call(second, first(x)); }
  Block first, second;
};

TEST(Tie, MakesTwoNamesOneWeight) {
  torch::nn::Embedding embedding(7, 3);
  torch::nn::Linear head(torch::nn::LinearOptions(3, 7));
  const auto fresh = head->weight;
  head->weight = embedding->weight;  // LibTorch's trap
  EXPECT_TRUE(head->named_parameters()["weight"].is_same(fresh));
  accelerate::tie(embedding, "weight", head, "weight");
  EXPECT_TRUE(head->named_parameters()["weight"].is_same(embedding->weight));
  EXPECT_TRUE(head->weight.is_same(embedding->weight));
  torch::nn::Sequential both(embedding, head);
  EXPECT_EQ(accelerate::ModelRef(both).parameters().size(), 2U) << "the weight once, and the bias";
  both->forward(torch::tensor({1, 2})).sum().backward();
  EXPECT_EQ(embedding->weight.grad().count_nonzero(at::IntArrayRef{1}).ne(0).sum().item<int64_t>(), 7)
      << "the head's gradient has come to the embedding's rows";

  torch::nn::Linear bare(torch::nn::LinearOptions(3, 7).bias(false)), wide(4, 7);
  const auto kept = bare->weight;
  using accelerate::ConfigError;
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerate::tie(embedding, "weights", bare, "weight"); }),
              HasSubstr("has no parameter 'weights' of its own, expected one of weight"));
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerate::tie(head, "bias", bare, "bias"); }),
              HasSubstr("has no parameter 'bias'"));
  EXPECT_THAT(
      support::message_of<accelerate::ShapeError>([&] { accelerate::tie(embedding, "weight", wide, "weight"); }),
      HasSubstr("'weight' is Float [7, 3]"));
  bare->weight = torch::zeros({7, 3});
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerate::tie(embedding, "weight", bare, "weight"); }),
              HasSubstr("another tensor than the registered one"));
  EXPECT_TRUE(bare->named_parameters()["weight"].is_same(kept)) << "nothing is changed";
  torch::nn::GRU gru(3, 3), other(3, 3);
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerate::tie(gru, "weight_ih_l0", other, "weight_ih_l0"); }),
              HasSubstr("out of reach"));
}

TEST(Hooks, OfSubmodulesRunThroughCallAndEndWithTheModule) {
  std::vector<std::string> log;
  const auto pair = std::make_shared<Pair>();
  const auto x = torch::randn({2, 3});
  accelerate::add_hook_to_module(pair->first, std::make_shared<AddOne>(log));
  accelerate::add_hook_to_module(pair->second, std::make_shared<AddOne>(log));
  const auto hidden = pair->first->forward(x);
  EXPECT_TRUE(torch::equal(pair->forward(x), pair->second->forward(hidden + 1))) << "a plain call can't be seen";
  accelerate::remove_hook_from_submodules(pair);
  EXPECT_TRUE(torch::equal(pair->forward(x), pair->second->forward(hidden)));
  EXPECT_THAT(log, ElementsAre("init", "init", "detach", "detach"));
  {
    const Block gone;
    accelerate::add_hook_to_module(gone, std::make_shared<AddOne>(log));
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(accelerate::hook_of(Block()), nullptr) << "a new module at an old address";
}

TEST(Hooks, OfScriptModules) {
  std::vector<std::string> log;
  const accelerate::Hooked doubling(script());
  accelerate::add_hook_to_module(doubling, std::make_shared<AddOne>(log));
  EXPECT_TRUE(torch::equal(doubling(torch::ones({2})).toTensor(), torch::full({2}, 4.0)));
  accelerate::remove_hook_from_module(doubling);
  EXPECT_TRUE(torch::equal(doubling(torch::ones({2})).toTensor(), torch::full({2}, 2.0)));
}

struct Dropping : accelerate::ModelHook {
  bool no_grad() const override { return true; }
  void post_forward(const ModelRef&, std::vector<at::Tensor>& outputs) override { outputs.clear(); }
};

TEST(Hooks, KeepTheNumberOfTensors) {
  Block block;
  const auto x = torch::randn({2, 3});
  accelerate::add_hook_to_module(block, std::make_shared<Dropping>());
  EXPECT_THAT(message_of<accelerate::ConfigError>([&] { accelerate::call(block, x); }),
              HasSubstr("post_forward changed the number of tensors from 1 to 0"));
  accelerate::remove_hook_from_module(block);
  EXPECT_TRUE(accelerate::call(block, x).requires_grad());
}

}  // namespace
