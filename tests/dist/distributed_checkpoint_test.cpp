/// Distributed checkpoints of the user's own dict: everything comes back, on any number of ranks and whatever holds the
/// model; what goes wrong is an error on all ranks that names the value, and leaves things as they were. Python
/// reads the files in fsdp_state_test.cpp.

#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <set>

#include "formats/dcp.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"

namespace {

using namespace accelerate;
namespace dcp = accelerate::distributed_checkpoint;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using dcp::List;
using dcp::StateDict;
using dcp::Value;
using support::message_of;
using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

StateDict& dict(Value& value) { return value.as<StateDict>(); }
at::Tensor tensor(const Value& value) { return value.as<at::Tensor>(); }

std::string every_byte() {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  return bytes;
}

/// Ranks hold columns of a [4, 7] tensor, the last of them fewer, or none.
dcp::ShardedTensor columns(double first) {
  const int64_t each = (7 + support::world_size() - 1) / support::world_size();
  const int64_t begin = std::min<int64_t>(7, each * support::rank()), end = std::min<int64_t>(7, begin + each);
  const auto whole = torch::arange(28, torch::kDouble).view({4, 7}) + first;
  dcp::ShardedTensor result{.sizes = {4, 7}, .dtype = torch::kDouble, .parts = {}};
  if (end > begin) result.parts.push_back({{0, begin}, whole.narrow(1, begin, end - begin).clone()});
  return result;
}

c10::IValue betas() { return c10::ivalue::Tuple::create(c10::IValue(0.9), c10::IValue(0.999)); }

/// A value of each kind. `empty`: others, of the same form.
StateDict every_kind(bool empty) {
  const double x = empty ? 0 : 1;
  StateDict state{
      {"nested", StateDict{{"a.b", StateDict{{"weight", torch::full({2, 3}, x)}, {"scalar", torch::tensor(2.5 * x)}}},
                           {"none at all", torch::zeros({0, 4})},
                           {"turned", (torch::arange(6).view({2, 3}) * static_cast<int64_t>(x)).t()}}},
      {"list", List{torch::full({2}, x), StateDict{{"lr", empty ? 0.0 : 0.125}}, List{torch::full({1}, 3 * x), 7}}},
      {"numbers", empty ? Value() : Value(List{1, -2.5, "three", true, Value(), List{4}})},
      {"betas", empty ? Value() : Value(betas())},
      {"text", empty ? "" : "grüß"},
      {"bytes", dcp::Bytes{empty ? "" : every_byte()}},
      {"step", empty ? 0 : int64_t{1} << 40},
      {"negative", empty ? 0 : -3},
      {"ratio", empty ? 0.0 : 0.1},
      {"flag", !empty},
      {"nothing", empty ? Value(5) : Value()},
      {"nobody", StateDict()},
      {"columns", columns(empty ? 100 : 0)},
      {"half", torch::full({3}, x).to(torch::kHalf)},
  };
  state["of rank " + std::to_string(support::rank())] = torch::full({support::rank() + 1}, x * 10);
  state["seen by rank " + std::to_string(support::rank())] = empty ? -1 : support::rank();
  return state;
}

/// Equal in kind and value.
void expect_equal(const Value& a, const Value& b, const std::string& where) {
  ASSERT_EQ(a.kind().index(), b.kind().index()) << where;
  if (const auto* dict = std::get_if<StateDict>(&a.kind())) {
    const auto& other = b.as<StateDict>();
    EXPECT_EQ(dict->size(), other.size()) << where;
    for (const auto& [key, value] : *dict) {
      ASSERT_TRUE(other.contains(key)) << where << "." << key;
      expect_equal(value, other.at(key), where + "." + key);
    }
  } else if (const auto* list = std::get_if<List>(&a.kind())) {
    ASSERT_EQ(list->size(), b.as<List>().size()) << where;
    for (size_t i = 0; i < list->size(); ++i) expect_equal((*list)[i], b.as<List>()[i], where + std::to_string(i));
  } else if (const auto* one = std::get_if<at::Tensor>(&a.kind())) {
    EXPECT_TRUE(one->scalar_type() == tensor(b).scalar_type() && torch::equal(*one, tensor(b))) << where;
  } else if (const auto* sharded = std::get_if<dcp::ShardedTensor>(&a.kind())) {
    const auto& other = b.as<dcp::ShardedTensor>();
    ASSERT_EQ(sharded->parts.size(), other.parts.size()) << where;
    for (size_t i = 0; i < sharded->parts.size(); ++i)
      EXPECT_TRUE(torch::equal(sharded->parts[i].values, other.parts[i].values)) << where;
  } else if (const auto* bytes = std::get_if<dcp::Bytes>(&a.kind())) {
    EXPECT_EQ(*bytes, b.as<dcp::Bytes>()) << where;
  } else {
    EXPECT_EQ(a.as<c10::IValue>(), b.as<c10::IValue>()) << where;
  }
}

void wait_for_everyone() { PartialState().wait_for_everyone(); }

/// A group without an Accelerator.
void meet() {
  AcceleratorState::reset();
  GradientState::reset();
  static_cast<void>(PartialState({.cpu = true}));
}

RANKS_TEST(DistributedCheckpoint, EveryKindOfValueComesBack, 1, 2, 3) {
  meet();
  const auto folder = support::scratch("checkpoint");
  dcp::save(every_kind(false), folder);
  auto state = every_kind(true);
  const auto place = tensor(dict(dict(state["nested"])["a.b"])["weight"]).data_ptr();
  const auto list_place = tensor(state["list"].as<List>()[0]).data_ptr();
  state["half"] = torch::zeros({3}, torch::kDouble);  // takes what is there in its own dtype
  dcp::load(state, folder);
  EXPECT_EQ(tensor(dict(dict(state["nested"])["a.b"])["weight"]).data_ptr(), place) << "in place";
  EXPECT_EQ(tensor(state["list"].as<List>()[0]).data_ptr(), list_place);
  auto expected = every_kind(false);
  expected["half"] = torch::ones({3}, torch::kDouble);
  expect_equal(expected, state, "state");
  EXPECT_EQ(state["step"].to<int64_t>(), int64_t{1} << 40);
  EXPECT_EQ(state["text"].to<std::string>(), "grüß");
  EXPECT_TRUE(state["flag"].to<bool>());
  EXPECT_EQ(state["negative"].to<double>(), -3);
  EXPECT_THAT(message_of<ConfigError>([&] { state["text"].to<int64_t>(); }),
              HasSubstr("found String, expected a whole number"));
  EXPECT_THAT(message_of<ConfigError>([&] { state["nested"].as<at::Tensor>(); }),
              HasSubstr("found a dict, expected a tensor"));

  // Columns as others hold them: by rows, and whole.
  StateDict rows{{"columns", torch::zeros({4, 7}, torch::kDouble)}};
  dcp::load(rows, folder);
  EXPECT_TRUE(torch::equal(tensor(rows["columns"]), torch::arange(28, torch::kDouble).view({4, 7})));
  const int64_t row = support::rank() % 4;
  dcp::ShardedTensor one{
      .sizes = {4, 7}, .dtype = torch::kDouble, .parts = {{{row, 2}, torch::zeros({1, 3}, torch::kDouble)}}};
  rows["columns"] = one;
  dcp::load(rows, folder);
  EXPECT_EQ(one.parts[0].values[0][0].item<double>(), row * 7 + 2);
}

// ---- models and optimizers

/// Tensors that are cut badly: one element, odd sizes, a tied, a frozen and a transposed parameter, buffers.
struct NetImpl : nn::Module {
  NetImpl() {
    first = register_module("first", nn::Linear(5, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    head = register_module("head", nn::Linear(7, 5));
    scale = register_parameter("scale", torch::ones({1}));
    frozen = register_parameter("frozen", torch::randn({5}), /*requires_grad=*/false);
    turned = register_parameter("turned", torch::randn({3, 5}).t());
    tied = register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::tanh(norm(first(x))) * scale;
    return torch::matmul(head(y) * frozen + torch::linear(y, tied.t()), turned);
  }
  nn::Linear first{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
  at::Tensor scale, frozen, turned, tied;
};
TORCH_MODULE(Net);

torch::optim::AdamW make_adamw(const Net& net) {
  std::vector<at::Tensor> matrices, rest;
  for (const auto& p : net->parameters())
    if (p.requires_grad()) (p.dim() > 1 ? matrices : rest).push_back(p);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0.1)));
  groups.emplace_back(rest, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2)));
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(3e-3));
}

/// A model with its optimizer: "plain" (data parallel with several ranks), "sharded", "hybrid".
struct Training {
  explicit Training(const std::string& form, int seed)
      : accelerator(begin(form, seed)), net(), parts(accelerator.prepare(net, make_adamw(net))) {}
  static AcceleratorOptions begin(const std::string& form, int seed) {
    AcceleratorState::reset();
    GradientState::reset();
    torch::manual_seed(seed);
    AcceleratorOptions options{.cpu = true};
    if (form == "plain") return options;
    if (form == "bf16") options.mixed_precision = form;  // computes with copies of the pieces
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::full_shard,
                                                         .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                                                         .min_num_params = 40};
    if (form == "hybrid") {
      options.fsdp_plugin->sharding_strategy = ShardingStrategy::hybrid_shard;
      options.fsdp_plugin->dp_replicate_size = 2;
    }
    return options;
  }

  auto& model() { return std::get<0>(parts); }
  auto& optimizer() { return std::get<1>(parts); }
  double loss(int64_t step) {
    const auto x = torch::randn({12, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step)));
    const auto loss = model()(x).pow(2).mean();
    accelerator.backward(loss);
    return loss.template item<double>();
  }
  std::vector<double> train(int64_t from, int64_t to) {
    std::vector<double> losses;
    for (auto step = from; step < to; ++step) {
      losses.push_back(loss(step));
      optimizer().step();
      optimizer().zero_grad();
    }
    return losses;
  }
  /// All of it, whole, on every rank.
  StateDict whole() {
    auto [weights, state] = dcp::get_state_dict(model(), optimizer(), {.full_state_dict = true});
    return {{"model", weights}, {"optimizer", state}};
  }
  StateDict own() {
    auto [weights, state] = dcp::get_state_dict(model(), optimizer());
    return {{"model", weights}, {"optimizer", state}, {"step", 0}};
  }
  dcp::IncompatibleKeys set(StateDict& state, const dcp::StateDictOptions& options = {}) {
    return dcp::set_state_dict(model(), optimizer(), dict(state["model"]), dict(state["optimizer"]), options);
  }

  Accelerator accelerator;
  Net net;
  decltype(std::declval<Accelerator&>().prepare(std::declval<Net&>(), std::declval<torch::optim::AdamW>())) parts;
};

RANKS_TEST(DistributedCheckpoint, RunsGoOnBitByBit, 1, 2, 4) {
  for (const std::string form : {"plain", "sharded", "hybrid"}) {
    if (form == "hybrid" && support::world_size() % 2 != 0) continue;
    SCOPED_TRACE(form);
    const auto folder = support::scratch(form);
    Training whole(form, 5);
    whole.train(0, 3);
    auto state = whole.own();
    state["step"] = 3;
    dcp::save(state, folder);
    const auto losses = whole.train(3, 6);
    const auto end = whole.whole();
    // Into a fresh optimizer, which has nothing to load into yet, of a model with other weights.
    Training resumed(form, 99);
    resumed.model()(torch::ones({12, 5}));  // what of it is kept whole must not outlive loading
    state = resumed.own();
    dcp::load(state, folder);
    EXPECT_EQ(state["step"].to<int64_t>(), 3);
    resumed.set(state);
    EXPECT_EQ(resumed.train(3, 6), losses);
    expect_equal(end, resumed.whole(), form);
  }
}

/// Loading alone is enough for the model: its tensors are those of the dict.
RANKS_TEST(DistributedCheckpoint, LoadedParametersAreTheModels, 1, 2) {
  for (const std::string form : {"plain", "sharded", "bf16"}) {
    const auto folder = support::scratch(form);
    Training first(form, 5);
    const auto x = torch::ones({12, 5});
    {
      torch::NoGradGuard no_grad;
      StateDict state{{"model", dcp::get_model_state_dict(first.model())}};
      dcp::save(state, folder);
      first.net->eval();
      const auto expected = first.model()(x);
      Training other(form, 99);
      other.net->eval();
      EXPECT_FALSE(torch::equal(other.model()(x), expected));
      state = {{"model", dcp::get_model_state_dict(other.model())}};
      dcp::load(state, folder);
      EXPECT_TRUE(torch::equal(other.model()(x), expected)) << form;
    }
  }
}

// ---- any number of ranks

TEST(DistributedCheckpointJob, DISABLED_Run) {
  const auto variable = [](const char* name) { return std::string(std::getenv(name)); };
  const fs::path from = variable("JOB_FROM"), to = variable("JOB_TO");
  Training run(variable("JOB_FORM"), from.empty() ? 5 : 99);
  auto state = run.own();
  if (from.empty()) {
    run.train(0, 3);
    state = run.own();
    state["step"] = 3;
  } else {
    dcp::load(state, from);
    EXPECT_EQ(state["step"].to<int64_t>(), 3);
    run.set(state);
    // Out of the model and the optimizer again.
    const auto step = state["step"];
    state = run.own();
    state["step"] = step;
  }
  dcp::save(state, to);
}

TEST(DistributedCheckpoint, FitsAnyNumberOfRanks) {
  if (support::is_rank()) return;
  const std::vector<std::pair<int64_t, std::string>> chain = {{3, "sharded"}, {2, "sharded"}, {1, "plain"},
                                                              {4, "hybrid"},  {2, "plain"},   {4, "sharded"}};
  fs::path previous;
  std::map<std::string, at::Tensor> first;
  for (size_t i = 0; i < chain.size(); ++i) {
    const auto& [ranks, form] = chain[i];
    SCOPED_TRACE(std::to_string(ranks) + " " + form);
    const auto folder = support::scratch(std::to_string(i));
    support::expect_ranks_pass(
        "DistributedCheckpointJob.DISABLED_Run",
        {.world_size = ranks,
         .env = {{"JOB_FORM", form}, {"JOB_FROM", previous.string()}, {"JOB_TO", folder.string()}}});
    const formats::DcpCheckpoint checkpoint(folder);
    std::map<std::string, at::Tensor> now;
    for (const auto& entry : checkpoint.entries())
      if (std::holds_alternative<formats::DcpTensorInfo>(entry.content))
        now[entry.name] = checkpoint.read_full(entry.name);
    if (i == 0) {
      first = now;
      EXPECT_EQ(first.at("model.tied").sizes(), (std::vector<int64_t>{7, 5}));
      EXPECT_EQ(first.at("optimizer.state.scale.step").item<double>(), 3);
      EXPECT_GT(first.at("optimizer.state.turned.exp_avg").abs().sum().item<double>(), 0);
      EXPECT_FALSE(first.contains("optimizer.state.frozen.step"));
    }
    ASSERT_EQ(first.size(), now.size());
    for (const auto& [name, value] : first) EXPECT_TRUE(torch::equal(value, now.at(name))) << name;
    previous = folder;
    // Each rank wrote its pieces; replicas share them out.
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(folder)) files += entry.path().extension() == ".distcp" ? 1 : 0;
    EXPECT_EQ(files, static_cast<size_t>(form == "plain" ? 1 : ranks));
  }
}

// ---- options

RANKS_TEST(DistributedCheckpoint, OptionsOfStateDicts, 1, 2) {
  Training run("sharded", 5);
  run.train(0, 2);
  const bool main = support::rank() == 0, alone = support::world_size() == 1;
  const auto here = dcp::get_model_state_dict(run.model());
  EXPECT_EQ(here.at("head.weight").as<dcp::ShardedTensor>().sizes, (std::vector<int64_t>{5, 7}));
  EXPECT_TRUE(std::holds_alternative<at::Tensor>(here.at("norm.running_mean").kind()));

  // Whole, on all ranks or on rank 0.
  const auto whole = run.whole();
  EXPECT_EQ(tensor(whole.at("model").as<StateDict>().at("head.weight")).sizes(), (std::vector<int64_t>{5, 7}));
  const dcp::StateDictOptions offloaded{.full_state_dict = true, .cpu_offload = true};
  StateDict weights, state;
  std::tie(weights, state) = dcp::get_state_dict(run.model(), run.optimizer(), offloaded);
  EXPECT_EQ(weights.empty(), !main);
  EXPECT_EQ(state.empty(), !main);
  if (main) expect_equal(whole, StateDict{{"model", weights}, {"optimizer", state}}, "offloaded");
  const auto on_host = dcp::get_model_state_dict(run.model(), {.cpu_offload = true});
  expect_equal(here, on_host, "on the host");
  for (const auto& [name, value] : on_host)
    if (const auto* sharded = std::get_if<dcp::ShardedTensor>(&value.kind())) {
      for (const auto& part : sharded->parts) EXPECT_TRUE(part.values.is_cpu());
    }

  // Rank 0's for everybody, into another model; each rank takes its pieces.
  Training other("sharded", 99);
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { dcp::set_model_state_dict(other.model(), weights, {.broadcast_from_rank0 = true}); }),
              HasSubstr("broadcast_from_rank0 is set and full_state_dict is not"));
  dcp::set_state_dict(other.model(), other.optimizer(), weights, state,
                      {.full_state_dict = true, .broadcast_from_rank0 = true});
  expect_equal(whole, other.whole(), "sent by rank 0");
  // Without sending, rank 0 alone has something to give.
  if (!alone) {
    EXPECT_THAT(message_of<CheckpointError>(
                    [&] { dcp::set_model_state_dict(other.model(), weights, {.full_state_dict = true}); }),
                HasSubstr("'head.weight': missing in the file"));
  }

  // Flat and back, between a sharded and a fresh optimizer.
  const dcp::StateDictOptions flat{.flatten_optimizer_state_dict = true};
  auto flattened = dcp::get_optimizer_state_dict(run.model(), run.optimizer(), flat);
  EXPECT_EQ(tensor(flattened.at("state.first.bias.step")).item<double>(), 2);
  EXPECT_EQ(flattened.at("param_groups.first.bias.lr").to<double>(), 1e-2);
  EXPECT_FALSE(flattened.contains("state"));
  const auto folder = support::scratch("flat");
  dcp::save({{"optimizer", flattened}}, folder);
  Training third("sharded", 99);
  StateDict loaded{{"optimizer", dcp::get_optimizer_state_dict(third.model(), third.optimizer(), flat)}};
  dcp::load(loaded, folder);
  dcp::set_optimizer_state_dict(third.model(), third.optimizer(), dict(loaded["optimizer"]), flat);
  expect_equal(whole.at("optimizer"), third.whole().at("optimizer"), "flat");

  // Frozen parameters left out on both sides.
  auto trained = dcp::get_model_state_dict(run.model(), {.ignore_frozen_params = true});
  EXPECT_FALSE(trained.contains("frozen"));
  EXPECT_TRUE(trained.contains("norm.running_mean"));
  const auto before = third.whole();
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::set_model_state_dict(third.model(), trained); }),
              HasSubstr("'frozen': missing in the file"));
  dcp::set_model_state_dict(third.model(), trained, {.ignore_frozen_params = true});
  auto expected = whole.at("model").as<StateDict>();
  expected["frozen"] = before.at("model").as<StateDict>().at("frozen");
  expect_equal(expected, third.whole().at("model"), "without the frozen one");

  // Missing and unexpected tensors are named, or let be.
  auto partial = here;
  partial.erase("head.bias");
  partial["surplus"] = torch::ones(2);
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::set_model_state_dict(other.model(), partial); }),
              AllOf(HasSubstr("'head.bias': missing"), HasSubstr("'surplus': not in the model")));
  const auto keys = dcp::set_model_state_dict(other.model(), partial, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("head.bias"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("surplus"));
  auto less = dcp::get_optimizer_state_dict(run.model(), run.optimizer());
  dict(less["state"]).erase("scale");
  dict(less["state"])["surplus"] = StateDict();
  EXPECT_THAT(
      message_of<CheckpointError>([&] { dcp::set_optimizer_state_dict(third.model(), third.optimizer(), less); }),
      AllOf(HasSubstr("'scale': no state"), HasSubstr("'surplus': of no optimizer's parameter")));
  dcp::set_optimizer_state_dict(third.model(), third.optimizer(), less, {.strict = false});

  // The module behind a sharded model has no bytes to save.
  EXPECT_THAT(message_of<ConfigError>([&] { dcp::get_model_state_dict(run.net); }),
              HasSubstr("give get_model_state_dict() what prepare() returned"));
  EXPECT_THAT(message_of<Error>([&] {
                dcp::save({{"mine", run.net->first->bias}}, folder);
              }),
              HasSubstr("'mine' is a parameter of a sharded or offloaded model"));
  EXPECT_THAT(message_of<Error>([&] { dcp::get_optimizer_state_dict(other.model(), run.optimizer()); }),
              HasSubstr("parameter 0 of group 0, of size"));
}

/// Optimizers of each class, not stepped yet and stepped, two for one model.
RANKS_TEST(DistributedCheckpoint, SeveralOptimizers, 1, 2) {
  using namespace torch::optim;
  AcceleratorState::reset();
  GradientState::reset();
  const auto make = [](Accelerator& accelerator, nn::Sequential& net) {
    const auto parameters = net->parameters();
    const auto one = [&](size_t i) { return std::vector<at::Tensor>{parameters[i]}; };
    return accelerator.prepare(net, SGD(one(0), SGDOptions(0.1).momentum(0.9)), SGD(one(1), SGDOptions(0.1)),
                               Adagrad(one(2), AdagradOptions(0.1).initial_accumulator_value(0.5)),
                               RMSprop(one(3), RMSpropOptions(0.1).momentum(0.5).centered(true)));
  };
  const auto train = [](Accelerator& accelerator, auto& all) {
    auto& [m, a, b, c, d] = all;
    const auto loss = m(torch::ones({4, 3})).pow(2).mean();
    accelerator.backward(loss);
    a.step(), b.step(), c.step(), d.step();
    a.zero_grad(), b.zero_grad(), c.zero_grad(), d.zero_grad();
    return loss.template item<double>();
  };
  const auto folder = support::scratch("several");
  torch::manual_seed(1);
  Accelerator accelerator({.cpu = true});
  nn::Sequential net(nn::Linear(3, 4), nn::Linear(4, 2)), other(nn::Linear(3, 4), nn::Linear(4, 2));
  auto all = make(accelerator, net);
  train(accelerator, all);
  const auto optimizers = [](auto& all) {
    return dcp::Optimizers({std::get<1>(all), std::get<2>(all), std::get<3>(all), std::get<4>(all)});
  };
  auto [weights, state] = dcp::get_state_dict(std::get<0>(all), optimizers(all));
  EXPECT_FALSE(dict(state["state"]).contains("0.bias")) << "without momentum there is nothing";
  EXPECT_EQ(state["param_groups"].as<List>().size(), 4U);
  dcp::save({{"model", weights}, {"optim", state}}, folder);
  const auto expected = std::vector<double>{train(accelerator, all), train(accelerator, all)};

  auto fresh = make(accelerator, other);
  auto [other_weights, other_state] = dcp::get_state_dict(std::get<0>(fresh), optimizers(fresh));
  StateDict loaded{{"model", other_weights}, {"optim", other_state}};
  dcp::load(loaded, folder);
  dcp::set_state_dict(std::get<0>(fresh), optimizers(fresh), dict(loaded["model"]), dict(loaded["optim"]));
  EXPECT_EQ((std::vector<double>{train(accelerator, fresh), train(accelerator, fresh)}), expected);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                dcp::set_optimizer_state_dict(std::get<0>(fresh), std::get<1>(fresh), dict(loaded["optim"]));
              }),
              HasSubstr("found 4 parameter groups, expected 1"));
}

// ---- failures

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

double saved_value(const fs::path& folder) {
  StateDict state{{"x", torch::zeros({64})}};
  dcp::load(state, folder);
  return tensor(state["x"])[0].item<double>();
}

RANKS_TEST(DistributedCheckpoint, ReplacesAnOlderOneWhenItIsComplete, 1, 2) {
  meet();
  const auto folder = support::scratch("replaced"), other = support::scratch("other");
  const auto with = [](double x) { return StateDict{{"x", torch::full({64}, x)}, {"columns", columns(x)}}; };
  dcp::save(with(1), folder);
  const auto files = files_in(folder);
  wait_for_everyone();
  if (support::rank() == 0) {
    std::ofstream(folder / "__7_0.distcp") << "of a run with more ranks";
    std::ofstream(folder / "notes.txt") << "mine";
    std::ofstream(folder / "model.safetensors") << "not of this checkpoint";
  }
  wait_for_everyone();
  dcp::save(with(2), folder.string() + "/");
  auto expected = files;
  expected.insert({"notes.txt", "model.safetensors"});
  EXPECT_EQ(files_in(folder), expected);
  EXPECT_EQ(saved_value(folder), 2);

  // A crash while files took their places: of what was written nothing was renamed yet, some, or all.
  for (const std::vector<std::string>& done :
       {std::vector<std::string>{}, {"__0_0.distcp"}, {"__0_0.distcp", ".metadata"}}) {
    dcp::save(with(3), folder);
    dcp::save(with(4), other);
    if (support::rank() == 0) {
      fs::rename(other, folder / ".finished");
      std::ofstream(folder / ".finished" / ".stale").flush();
      for (const auto& name : done) fs::rename(folder / ".finished" / name, folder / name);
      if (done.size() > 1 && fs::exists(folder / ".finished" / "__1_0.distcp"))
        fs::rename(folder / ".finished" / "__1_0.distcp", folder / "__1_0.distcp");
    }
    wait_for_everyone();
    EXPECT_EQ(saved_value(folder), 4) << done.size();
    EXPECT_EQ(files_in(folder), expected);
    wait_for_everyone();
  }
}

RANKS_TEST(DistributedCheckpoint, ARankThatFailsWhileSaving, 1, 2) {
  meet();
  const bool fails = support::rank() == support::world_size() - 1;
  const auto folder = support::scratch("kept"), never = support::scratch("never");
  dcp::save({{"x", torch::full({64}, 1.0)}}, folder);
  const auto files = files_in(folder);
  const auto refused = [&](const StateDict& state, const fs::path& where) {
    const auto message = message_of<Error>([&] { dcp::save(state, where); });
    wait_for_everyone();
    EXPECT_EQ(saved_value(folder), 1);
    EXPECT_EQ(files_in(folder), files) << message;
    EXPECT_FALSE(fs::exists(never)) << message;
    EXPECT_FALSE(fs::exists(never.parent_path() / ".never.unfinished")) << message;
    return message;
  };
  // A tensor that has no bytes, of one rank.
  StateDict sparse{{"x", torch::full({64}, 2.0)}};
  if (fails) sparse["of mine"] = torch::ones({2, 2}).to_sparse();
  for (const auto& where : {folder, never})
    EXPECT_THAT(refused(sparse, where), HasSubstr("'of mine' is sparse or on the meta device"));
  // A disk that is full, for one rank.
  StateDict large{{"x", torch::full({64}, 2.0)}};
  if (fails) large["of mine"] = torch::ones({100000});
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  for (const auto& where : {folder, never}) {
    if (fails) ::setrlimit(RLIMIT_FSIZE, &small);
    const auto message = message_of<Error>([&] { dcp::save(large, where); });
    ::setrlimit(RLIMIT_FSIZE, &before);
    wait_for_everyone();
    EXPECT_THAT(message, HasSubstr(".distcp"));
    EXPECT_EQ(files_in(folder), files);
    EXPECT_FALSE(fs::exists(never));
  }
  EXPECT_EQ(saved_value(folder), 1);
  // Some states can't be saved at all.
  EXPECT_THAT(refused({{"a.b", 1}, {"a", StateDict{{"b", 2}}}}, folder), HasSubstr("two values have the name 'a.b'"));
  EXPECT_THAT(refused({{"a", List{dcp::Bytes{"x"}}}}, folder), HasSubstr("'a' is a list with bytes in it"));
  EXPECT_THAT(refused({{"a", StateDict{{"device", c10::IValue(at::Device("cpu"))}}}}, folder),
              HasSubstr("'a.device' is or holds Device, expected tensors, numbers, text"));
  EXPECT_THAT(refused({{"x", dcp::ShardedTensor{.sizes = {4}, .parts = {{{1}, torch::ones({2})}}}}}, folder),
              AnyOf(HasSubstr("only 2 of 4 elements were written"), HasSubstr("ranks wrote overlapping parts")));
  if (support::world_size() == 1) return;
  EXPECT_THAT(refused({{"x", torch::ones({3 + support::rank()})}}, folder),
              HasSubstr("'x' is a tensor of size [3] and dtype Float on rank 0 and a tensor of size [4] and dtype "
                        "Float on rank 1"));
}

RANKS_TEST(DistributedCheckpoint, WhatDoesNotFitChangesNothing, 1, 2) {
  const auto folder = support::scratch("unfit");
  Training run("sharded", 5);
  run.train(0, 2);
  auto state = run.own();
  state["bytes"] = dcp::Bytes{"ab"};
  dcp::save(state, folder);
  Training other("sharded", 99);
  other.train(0, 1);
  const auto before = other.whole();
  const auto refused = [&](StateDict state, const fs::path& where) {
    const auto message = message_of<CheckpointError>([&] { dcp::load(state, where); });
    expect_equal(before, other.whole(), message);
    return message;
  };
  // Every difference in one error.
  auto wrong = other.own();
  wrong["missing"] = 1;
  dict(wrong["model"])["heads.weight"] = torch::ones({5, 7});
  dict(wrong["model"])["norm.running_mean"] = torch::ones({8});
  auto cut = dict(wrong["model"])["head.weight"].as<dcp::ShardedTensor>();
  cut.sizes = {5, 8};
  dict(wrong["model"])["head.weight"] = cut;
  wrong["step"] = torch::ones({1});
  dict(wrong["model"])["head.bias"] = "text";
  wrong["bytes"] = torch::ones({2});
  EXPECT_THAT(refused(wrong, folder),
              AllOf(HasSubstr("'missing': not in the checkpoint, expected Int"),
                    HasSubstr("'model.heads.weight': not in the checkpoint, expected a tensor of size [5, 7]"),
                    HasSubstr("'model.norm.running_mean': the checkpoint has a tensor of size [7], expected a tensor "
                              "of size [8]"),
                    HasSubstr("'model.head.weight': the checkpoint has a tensor of size [5, 7], expected a sharded "
                              "tensor of size [5, 8]"),
                    HasSubstr("'step': the checkpoint has no tensor, expected a tensor of size [1]"),
                    HasSubstr("'model.head.bias': the checkpoint has a tensor of size [5], expected String")));
  // One rank's dict is enough to refuse for all.
  auto mine = other.own();
  if (support::rank() == support::world_size() - 1) mine["only here"] = 1;
  EXPECT_THAT(refused(mine, folder), HasSubstr("'only here': not in the checkpoint"));
  dcp::load(mine, folder, {.allow_partial_load = true});
  if (mine.contains("only here")) {
    EXPECT_EQ(mine["only here"].to<int64_t>(), 1);
  }
  other.set(mine);
  expect_equal(run.whole(), other.whole(), "partial");

  // Damage, with other values in the model than in the files.
  other.train(2, 3);
  const auto after = other.whole();
  const auto last = "__" + std::to_string(support::world_size() - 1) + "_0.distcp";
  const auto size = fs::file_size(folder / last);
  other.accelerator.wait_for_everyone();
  if (support::rank() == 0) fs::resize_file(folder / last, size - 1);
  other.accelerator.wait_for_everyone();
  auto again = other.own();
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::load(again, folder); }),
              AllOf(HasSubstr(last), HasSubstr("reach beyond the file")));
  expect_equal(after, other.whole(), "after damage");
  if (support::rank() == 0) fs::remove(folder / ".metadata");
  other.accelerator.wait_for_everyone();
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::load(again, folder); }), HasSubstr("found no file .metadata"));
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::load(again, folder / "nowhere"); }),
              HasSubstr("The folder is not there"));
  // Pieces of a model that is cut in another way.
  auto weights = dict(again["model"]);
  weights["head.weight"] = dcp::ShardedTensor{.sizes = {5, 7}, .parts = {}};
  EXPECT_THAT(message_of<CheckpointError>([&] { dcp::set_model_state_dict(other.model(), weights); }),
              AllOf(HasSubstr("of 'head.weight' this rank needs the part with offsets ["), HasSubstr("found none")));
  expect_equal(after, other.whole(), "after pieces");
}

}  // namespace
