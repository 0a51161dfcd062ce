// Which modules become units, against PyTorch's policies on the same trees, and which parameters they get.
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "accelerate/model/no_split.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "parallel/fsdp/wrap_policy.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace gpt {

/// Holders, namespaces, lists, dictionaries, attention (a forced leaf), a batch norm, parameters beside children, an
/// output tied to the input.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    scale = register_parameter("scale", torch::ones({width}));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attention", torch::nn::MultiheadAttention(width, 2));
    mlp = register_module("mlp", torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                                       torch::nn::Linear(4 * width, width)));
  }
  torch::Tensor scale;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::MultiheadAttention attention = nullptr;
  torch::nn::Sequential mlp = nullptr;
};
TORCH_MODULE(Block);

template <class Number> struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(torch::Tensor shared) { weight = register_parameter("weight", std::move(shared)); }
  torch::Tensor weight;
};

struct GroupImpl : torch::nn::Module {};

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t width = 8, int64_t words = 30, bool tied = true) {
    wte = register_module("wte", torch::nn::Embedding(words, width));
    h = register_module("h", torch::nn::ModuleList());
    extras = register_module("extras", torch::nn::ModuleDict());
    for (int i = 0; i < 3; ++i) h->push_back(Block(width));
    extras->update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
        {"bn", torch::nn::BatchNorm1d(width).ptr()}, {"gate", torch::nn::Linear(width, width).ptr()}});
    ln_f = register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    head =
        register_module("head", std::make_shared<HeadImpl<int64_t>>(tied ? wte->weight : torch::zeros({words, width})));
  }
  torch::nn::Embedding wte = nullptr;
  torch::nn::ModuleList h = nullptr;
  torch::nn::ModuleDict extras = nullptr;
  torch::nn::LayerNorm ln_f = nullptr;
  std::shared_ptr<HeadImpl<int64_t>> head;
};

}  // namespace gpt

namespace {

using namespace accelerate;
using namespace accelerate::parallel;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Plugin = FullyShardedDataParallelPlugin;

std::string scratch(const std::string& name) { return support::scratch_dir() + "/" + name; }

ModelRef bert() {
  models::BertConfig config;
  config.vocab_size = 50;
  config.hidden_size = 8;
  config.num_hidden_layers = 3;
  config.num_attention_heads = 2;
  config.intermediate_size = 16;
  config.max_position_embeddings = 12;
  return ModelRef(models::BertForSequenceClassification(config).ptr());
}

Plugin transformer(std::vector<std::string> classes) {
  return resolve({.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                  .transformer_cls_names_to_wrap = std::move(classes)});
}
Plugin sized(int64_t least, int64_t version = 1) {
  return resolve(
      {.fsdp_version = version, .auto_wrap_policy = AutoWrapPolicy::size_based_wrap, .min_num_params = least});
}

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& item : tensors) names.push_back(item.first);
  return names;
}

std::map<std::string, std::vector<std::string>> by_path(const std::vector<ShardedUnit>& units) {
  std::map<std::string, std::vector<std::string>> result;
  for (const auto& unit : units)
    EXPECT_TRUE(result.emplace(unit.path, names_of(unit.parameters)).second) << unit.path << " is there twice";
  return result;
}

/// A description from which the peer builds the same tree.
json described(const ModelRef& model) {
  json result = json::array();
  for (const auto& module : model.submodules()) {
    json own = json::array();
    for (const auto& [name, tensor] : module.parameters)
      own.push_back({name, reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()), tensor.sizes().vec()});
    result.push_back({module.path, reinterpret_cast<uintptr_t>(module.identity), module.class_name, own});
  }
  return result;
}

Plugin plugin_of(const json& query) {
  const int64_t version = query["version"];
  Plugin plugin{.fsdp_version = version,
                .auto_wrap_policy = parse_auto_wrap_policy(query["policy"].get<std::string>())};
  if (query.contains("min_num_params")) plugin.min_num_params = query["min_num_params"].get<int64_t>();
  if (query.contains("classes"))
    plugin.transformer_cls_names_to_wrap = query["classes"].get<std::vector<std::string>>();
  if (query.contains("ignored")) plugin.ignored_modules = query["ignored"].get<std::string>();
  if (query.value("mixed", false)) plugin.mixed_precision_policy = MixedPrecision{.preset = "bf16"};
  return resolve(std::move(plugin));
}

json ask(const std::vector<std::string>& arguments) {
  const auto result = support::run_python("tests/unit/fsdp_wrap_peer.py", arguments);
  const auto end = result.output.find_last_not_of('\n');
  const auto begin = end == std::string::npos ? 0 : result.output.find_last_of('\n', end) + 1;  // npos + 1 is 0
  if (result.exit_code != 0) throw std::runtime_error("the peer failed: " + result.output);
  return json::parse(result.output.substr(begin));
}

/// @return how many modules were wrapped over all queries, so that a test can tell that they were not all empty.
size_t compare(const ModelRef& model, const json& reply) {
  size_t wrapped = 0;
  for (size_t i = 0; i < reply["queries"].size(); ++i) {
    const auto found = wrapped_modules(model, plugin_of(reply["queries"][i]));
    EXPECT_EQ(json(found), reply["answers"][i]) << reply["queries"][i];
    wrapped += found.size();
  }
  return wrapped;
}

/// All parameters are in exactly one unit, and each in the order of the model.
void expect_partition(const ModelRef& model, const std::vector<ShardedUnit>& units) {
  std::map<std::string, size_t> position;
  for (const auto& [name, tensor] : model.parameters()) position.emplace(name, position.size());
  std::set<std::string> seen;
  for (const auto& unit : units) {
    size_t next = 0;
    for (const auto& [name, tensor] : unit.parameters) {
      EXPECT_TRUE(seen.insert(name).second) << name;
      ASSERT_TRUE(position.contains(name)) << name;
      EXPECT_GE(position[name], next) << name;
      next = position[name];
    }
  }
  EXPECT_EQ(seen.size(), position.size());
}

json queries(const std::vector<std::vector<std::string>>& classes) {
  json result = json::array();
  for (int64_t version : {1, 2}) {
    for (int64_t least : {1, 8, 9, 64, 72, 144, 200, 280, 350, 500, 700, 1000, 5000, 100000})
      result.push_back({{"version", version}, {"policy", "SIZE_BASED_WRAP"}, {"min_num_params", least}});
    for (const auto& names : classes)
      result.push_back({{"version", version}, {"policy", "TRANSFORMER_BASED_WRAP"}, {"classes", names}});
  }
  return result;
}

TEST(FsdpWrap, BertIsWrappedAsPyTorchAndTheReferenceDo) {
  SKIP_WITHOUT_PYTHON();
  const auto model = bert();
  json request{
      {"modules", described(model)},
      {"queries",
       queries({{"BertLayer"}, {"BertAttention", "BertLayer"}, {"ModuleList"}, {"BertForSequenceClassification"}})}};
  for (const char* ignored : {"bert.embeddings", ".*\\.layer\\.1", ".*LayerNorm", "bert\\.encoder.*"})
    for (int64_t least : {64, 280, 700})
      request["queries"].push_back(
          {{"version", 1}, {"policy", "SIZE_BASED_WRAP"}, {"min_num_params", least}, {"ignored", ignored}});
  std::ofstream(scratch("request.json")) << request;
  EXPECT_GT(compare(model, ask({"tree", scratch("request.json")})), 100);
}

TEST(FsdpWrap, GptIsWrappedAsPyTorchAndTheReferenceDo) {
  SKIP_WITHOUT_PYTHON();
  for (const bool tied : {false, true}) {
    const ModelRef model(std::make_shared<gpt::ModelImpl>(8, 30, tied));
    json request{{"modules", described(model)},
                 {"queries", queries({{"Block"}, {"Block", "Head"}, {"Linear", "Block"}, {"MultiheadAttention"}})}};
    for (int64_t least : {1, 64, 280, 1000, 100000})
      request["queries"].push_back(
          {{"version", 1}, {"policy", "SIZE_BASED_WRAP"}, {"min_num_params", least}, {"mixed", true}});
    request["queries"].push_back(
        {{"version", 1}, {"policy", "TRANSFORMER_BASED_WRAP"}, {"classes", {"Block"}}, {"mixed", true}});
    std::ofstream(scratch("request.json")) << request;
    EXPECT_GT(compare(model, ask({"tree", scratch("request.json")})), 50);
  }
}

TEST(FsdpWrap, ScriptModulesAreWrappedByTheirClasses) {
  SKIP_WITHOUT_PYTHON();
  const json reply = ask({"script", scratch("net.pt")});
  const ModelRef model(torch::jit::load(scratch("net.pt")));
  EXPECT_GT(compare(model, reply), 10);
  const auto units = wrap_units(model, transformer({"Block"}));
  expect_partition(model, units);
  EXPECT_THAT(by_path(units)["blocks.1"],
              ElementsAre("blocks.1.bias", "blocks.1.inner.0.weight", "blocks.1.inner.0.bias",
                          "blocks.1.inner.1.weight", "blocks.1.inner.1.bias"));
}

TEST(FsdpWrap, SubmodulesAreNamedByClass) {
  const ModelRef model(std::make_shared<gpt::ModelImpl>());
  std::map<std::string, std::string> classes;
  for (const auto& module : model.submodules()) {
    classes[module.path] = module.class_name;
    ASSERT_TRUE(module.module);
    EXPECT_EQ(module.qualified_class_name, module.module->name());
  }
  EXPECT_EQ(classes[""], "Model");
  EXPECT_EQ(classes["h"], "ModuleList");
  EXPECT_EQ(classes["h.2"], "Block");
  EXPECT_EQ(classes["head"], "Head");  // a template
  EXPECT_EQ(classes["h.0.mlp.2"], "Linear");
  EXPECT_EQ(model.submodules().front().identity, model.identity());
}

TEST(FsdpWrap, EachParameterIsInItsInnermostUnit) {
  const auto model = bert();
  for (const auto& plugin : {transformer({"BertLayer", "BertAttention"}), sized(280), sized(280, 2), sized(1),
                             resolve(FullyShardedDataParallelPlugin{})})
    expect_partition(model, wrap_units(model, plugin));
  const auto units = by_path(wrap_units(model, transformer({"BertLayer", "BertAttention"})));
  EXPECT_EQ(units.size(), 7u);  // the root, and 3 x (layer, attention)
  EXPECT_THAT(
      units.at("bert.encoder.layer.1"),
      ElementsAre("bert.encoder.layer.1.intermediate.dense.weight", "bert.encoder.layer.1.intermediate.dense.bias",
                  "bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense.bias",
                  "bert.encoder.layer.1.output.LayerNorm.weight", "bert.encoder.layer.1.output.LayerNorm.bias"));
  EXPECT_EQ(units.at("bert.encoder.layer.2.attention").size(), 10u);
  EXPECT_EQ(units.at("").front(), "bert.embeddings.word_embeddings.weight");
  EXPECT_EQ(wrap_units(model, resolve(FullyShardedDataParallelPlugin{})).size(), 1u);
  EXPECT_EQ(wrap_units(model, sized(0)).size(), 1u);  // the reference's way to say no_wrap
}

TEST(FsdpWrap, ClassesMayBeGivenWithNamespaces) {
  const ModelRef model(std::make_shared<gpt::ModelImpl>());
  for (const char* name : {"Block", "BlockImpl", "gpt::Block", "gpt::BlockImpl"})
    EXPECT_THAT(wrapped_modules(model, transformer({name})), ElementsAre("h.0", "h.1", "h.2")) << name;
  for (const char* name : {"lock", "t::Block", "other::Block", "Impl"})
    EXPECT_THROW(wrapped_modules(model, transformer({name})), ConfigError) << name;
}

TEST(FsdpWrap, TiedParametersGoWhereAllTheirModulesAre) {
  const auto tied = std::make_shared<gpt::ModelImpl>();
  const auto units = by_path(wrap_units(ModelRef(tied), transformer({"Embedding", "Head", "Block"})));
  EXPECT_EQ(units.at("").front(), "wte.weight");  // by its first name, and once
  EXPECT_FALSE(units.contains("wte"));
  EXPECT_FALSE(units.contains("head"));
  const auto apart = by_path(wrap_units(ModelRef(std::make_shared<gpt::ModelImpl>(8, 30, false)),
                                        transformer({"Embedding", "Head", "Block"})));
  EXPECT_THAT(apart.at("wte"), ElementsAre("wte.weight"));
  EXPECT_THAT(apart.at("head"), ElementsAre("head.weight"));

  // Shared inside of a unit: it stays there, whichever inner unit was first.
  auto pair = std::make_shared<gpt::GroupImpl>();
  const auto linear = pair->register_module("linear", torch::nn::Linear(3, 3));
  pair->register_module("head", std::make_shared<gpt::HeadImpl<int64_t>>(linear->weight));
  const auto outer = std::make_shared<gpt::GroupImpl>();
  outer->register_module("other", torch::nn::Linear(2, 2));
  outer->register_module("pair", pair);
  const auto inside = by_path(wrap_units(ModelRef(outer), transformer({"Group", "Linear", "Head"})));
  EXPECT_THAT(inside.at("pair"), ElementsAre("pair.linear.weight"));
  EXPECT_THAT(inside.at("pair.linear"), ElementsAre("pair.linear.bias"));
  // A module that is registered twice is one unit, under its first name.
  const auto twice = std::make_shared<gpt::GroupImpl>();
  twice->register_module("a", pair);
  twice->register_module("b", pair);
  const auto shared = by_path(wrap_units(ModelRef(twice), transformer({"Group"})));
  ASSERT_EQ(shared.size(), 1u);
  EXPECT_THAT(shared.at("a"), ElementsAre("a.linear.weight", "a.linear.bias"));
}

TEST(FsdpWrap, IgnoredModulesAreInNoUnit) {
  const auto network = std::make_shared<gpt::ModelImpl>();
  const ModelRef model(network);
  Plugin plugin{.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                .ignored_modules = "h\\.1|extras\\..*",
                .transformer_cls_names_to_wrap = {{"Block"}}};
  auto units = wrap_units(model, resolve(plugin));
  EXPECT_THAT(wrapped_modules(model, resolve(plugin)), ElementsAre("h.0", "h.2"));
  EXPECT_EQ(by_path(units).at(""), (std::vector<std::string>{"wte.weight", "ln_f.weight", "ln_f.bias"}));
  plugin.ignored_modules = std::vector{ModelRef(network->h[1]), ModelRef(network->extras.ptr())};
  EXPECT_EQ(by_path(wrap_units(model, resolve(plugin))), by_path(units));
  plugin.ignored_modules = "head";  // and with it the embedding, whose weight it shares
  units = wrap_units(model, resolve(plugin));
  EXPECT_EQ(by_path(units).at("").front(), "extras.bn.weight");
  plugin.ignored_modules = "(h";
  EXPECT_THAT(support::message_of<ConfigError>([&] { wrap_units(model, resolve(plugin)); }),
              AllOf(HasSubstr("'(h'"), HasSubstr("regular expression")));
}

TEST(FsdpWrap, AFunctionMayDecide) {
  const ModelRef model(std::make_shared<gpt::ModelImpl>());
  for (int64_t version : {1, 2}) {
    const auto lambda =
        resolve({.fsdp_version = version, .auto_wrap_policy = lambda_auto_wrap_policy([](const Submodule& module) {
                                            return module.path.ends_with("mlp");
                                          })});
    EXPECT_THAT(wrapped_modules(model, lambda), ElementsAre("h.0.mlp", "h.1.mlp", "h.2.mlp")) << version;
  }
  const auto shallow = resolve({.auto_wrap_policy = WrapFunction([](const Submodule& module, bool recurse, int64_t) {
                                  return recurse ? module.path.empty() : true;
                                })});
  EXPECT_THAT(wrapped_modules(model, shallow), IsEmpty());  // who is not recursed into is not asked again
}

TEST(FsdpWrap, BatchNormsComputeInFullPrecisionOfTheirOwn) {
  const ModelRef model(std::make_shared<gpt::ModelImpl>());
  for (const int64_t version : {1, 2}) {
    const auto units = wrap_units(
        model, resolve({.fsdp_version = version, .mixed_precision_policy = MixedPrecision{.preset = "bf16"}}));
    ASSERT_EQ(units.size(), 2u) << version;
    EXPECT_FALSE(units[0].full_precision);
    EXPECT_EQ(units[1].path, "extras.bn");
    EXPECT_TRUE(units[1].full_precision);
  }
}

TEST(FsdpWrap, AClassThatIsNotThereIsNamedWithTheNearest) {
  EXPECT_THAT(support::message_of<ConfigError>([] {
                wrap_units(bert(), transformer({"BertLayer", "BertAtention"}));
              }),
              AllOf(HasSubstr("could not find the transformer layer class BertAtention"),
                    HasSubstr("BertEncoder, BertForSequenceClassification"), HasSubstr("did you mean BertAttention?")));
}

TEST(FsdpWrap, WithoutNamesModelsSayWhichLayersStayWhole) {
  EXPECT_THAT(wrapped_modules(bert(), transformer({})),
              ElementsAre("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.encoder.layer.2"));
  const auto unnamed = resolve({.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap});
  struct LayerImpl : torch::nn::Module, NoSplit {
    LayerImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
    at::Tensor forward(const at::Tensor& x) { return linear->forward(x); }
    torch::nn::Linear linear = nullptr;
  };
  const ModelRef own(torch::nn::Sequential(std::make_shared<LayerImpl>(), torch::nn::Linear(2, 2)).ptr());
  EXPECT_THAT(wrapped_modules(own, unnamed), ElementsAre("0"));
  EXPECT_THAT(
      support::message_of<ConfigError>([&] { wrap_units(ModelRef(std::make_shared<gpt::ModelImpl>()), unnamed); }),
      AllOf(HasSubstr("no class is named"), HasSubstr("accelerate::NoSplit")));
}

}  // namespace
