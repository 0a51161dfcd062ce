/// Distributed checkpoints whose parts follow rules: no rank tells of its parts, a layout takes the place of .metadata,
/// and everything else is as with it.

#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "accelerate/bigmodel/convert_files.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/comm/comms_log.hpp"
#include "comm/comms_log.hpp"
#include "formats/dcp.hpp"
#include "formats/inspect/inspect.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "run_state/counts.hpp"
#include "scratch.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
namespace dcp = accelerate::distributed_checkpoint;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using dcp::StateDict;
using support::message_of;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kListedParts = "ACCELERATE_DCP_LISTED_PARTS";

/// Tensors that are cut badly: one element, odd sizes, three dimensions, a tied and a frozen parameter, buffers.
struct NetImpl : nn::Module {
  explicit NetImpl(bool turned = false) {
    first = register_module("first", nn::Linear(5, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    head = register_module("head", nn::Linear(7, 5));
    scale = register_parameter("scale", torch::ones({1}));
    frozen = register_parameter("frozen", torch::randn({5}), /*requires_grad=*/false);
    cube = register_parameter("cube", torch::randn({3, 2, 5}));
    tied = register_parameter("tied", first->weight);
    if (turned) register_parameter("turned", torch::randn({3, 5}).t());
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::tanh(norm(first(x))) * scale;
    return torch::einsum("nc,abc->na", {head(y) * frozen + torch::linear(y, tied.t()), cube});
  }
  nn::Linear first{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
  at::Tensor scale, frozen, cube, tied;
};
TORCH_MODULE(Net);

/// A model with its optimizer: "plain", "sharded", "hybrid"; "turned" has a parameter that lies column by column.
struct Training {
  explicit Training(const std::string& form, int seed)
      : accelerator(begin(form, seed)),
        net(form == "turned"),
        parts(accelerator.prepare(net, torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(3e-3)))) {}
  static AcceleratorOptions begin(const std::string& form, int seed) {
    AcceleratorState::reset();
    GradientState::reset();
    torch::manual_seed(seed);
    AcceleratorOptions options{.cpu = true};
    if (form == "plain") return options;
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::full_shard,
                                                         .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                                                         .state_dict_type = StateDictType::sharded_state_dict,
                                                         .min_num_params = 40};
    if (form == "hybrid") {
      options.fsdp_plugin->sharding_strategy = ShardingStrategy::hybrid_shard;
      options.fsdp_plugin->dp_replicate_size = 2;
    }
    return options;
  }
  std::vector<double> train(int64_t from, int64_t to) {
    std::vector<double> losses;
    for (auto step = from; step < to; ++step) {
      const auto x = torch::randn({12, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step)));
      const auto loss = std::get<0>(parts)(x).pow(2).mean();
      accelerator.backward(loss);
      losses.push_back(loss.template item<double>());
      std::get<1>(parts).step();
      std::get<1>(parts).zero_grad();
    }
    return losses;
  }
  StateDict own() {
    auto [weights, state] = dcp::get_state_dict(std::get<0>(parts), std::get<1>(parts));
    return {{"model", weights}, {"optimizer", state}, {"step", 0}};
  }
  void set(StateDict& state) {
    dcp::set_state_dict(std::get<0>(parts), std::get<1>(parts), state["model"].as<StateDict>(),
                        state["optimizer"].as<StateDict>());
  }

  Accelerator accelerator;
  Net net;
  decltype(std::declval<Accelerator&>().prepare(std::declval<Net&>(), std::declval<torch::optim::AdamW>())) parts;
};

bool has_layout(const fs::path& folder) {
  const bool layout = fs::exists(folder / ".accelerate_layout"), listed = fs::exists(folder / ".metadata");
  EXPECT_NE(layout, listed) << folder;
  return layout;
}

std::map<std::string, at::Tensor> tensors_in(const fs::path& folder) {
  const formats::DcpCheckpoint checkpoint(folder);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& entry : checkpoint.entries())
    if (std::holds_alternative<formats::DcpTensorInfo>(entry.content))
      tensors[entry.name] = checkpoint.read_full(entry.name);
  return tensors;
}

void expect_equal(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, value] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_TRUE(value.scalar_type() == b.at(name).scalar_type() && torch::equal(value, b.at(name))) << name;
  }
}

std::map<std::string, std::string> bytes_in(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files[fs::relative(entry.path(), folder)] = support::text_of(entry.path());
  return files;
}

void meet() {
  AcceleratorState::reset();
  GradientState::reset();
  static_cast<void>(PartialState({.cpu = true}));
}
void wait_for_everyone() { PartialState().wait_for_everyone(); }

// ---- any number of ranks

TEST(DcpLayoutJob, DISABLED_Run) {
  const auto variable = [](const char* name) { return std::string(std::getenv(name)); };
  const fs::path from = variable("JOB_FROM"), to = variable("JOB_TO");
  Training run(variable("JOB_FORM"), from.empty() ? 5 : 99);
  if (from.empty()) run.train(0, 3);
  auto state = run.own();
  state["step"] = 3;
  if (!from.empty()) {
    dcp::load(state, from);
    EXPECT_EQ(state["step"].to<int64_t>(), 3);
    run.set(state);
    state = run.own();  // out of the model and the optimizer again
    state["step"] = 3;
  }
  dcp::save(state, to);
}

TEST(DcpLayout, FitsAnyNumberOfRanksBitByBit) {
  if (support::is_rank()) return;
  struct Job {
    int64_t ranks;
    std::string form, listed;
    int from;  ///< the job whose checkpoint it loads; -1: it trains
  };
  const std::vector<Job> jobs = {{3, "sharded", "1000000", -1}, {3, "sharded", "0", -1},
                                 {1, "sharded", "1000000", 1},  {2, "sharded", "0", 1},
                                 {5, "sharded", "0", 3},        {2, "plain", "0", 4},
                                 {4, "hybrid", "0", 4},         {2, "sharded", "1000000", 6}};
  std::vector<fs::path> folders;
  std::map<std::string, at::Tensor> first;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto& [ranks, form, listed, from] = jobs[i];
    SCOPED_TRACE(std::to_string(i) + ": " + std::to_string(ranks) + " " + form);
    folders.push_back(support::scratch(std::to_string(i)));
    support::expect_ranks_pass("DcpLayoutJob.DISABLED_Run",
                               {.world_size = ranks,
                                .env = {{"JOB_FORM", form},
                                        {"JOB_FROM", from < 0 ? "" : folders[static_cast<size_t>(from)].string()},
                                        {"JOB_TO", folders.back().string()},
                                        {kListedParts, listed}}});
    // A model that nobody cuts has nothing that a rule would say shorter.
    EXPECT_EQ(has_layout(folders.back()), listed == "0" && form != "plain");
    const auto now = tensors_in(folders.back());
    if (i == 0) first = now;
    expect_equal(first, now);
    EXPECT_TRUE(formats::DcpCheckpoint(folders.back()).find("step"));
    size_t files = 0;  // replicas share them out
    for (const auto& entry : fs::directory_iterator(folders.back())) files += entry.path().extension() == ".distcp";
    EXPECT_EQ(files, static_cast<size_t>(form == "plain" ? 1 : std::min<int64_t>(ranks, 4)))
        << "of five ranks the last one has nothing";
    EXPECT_THAT(formats::inspect(folders.back(), {.verify = true}).damage, IsEmpty());
  }
  const auto read = [](const fs::path& folder) { return formats::inspect(folder, {.verify = true}); };
  const auto layout = read(folders[1]), listed = read(folders[0]);
  std::map<std::string, formats::InspectedTensor> tensors;
  for (const auto& tensor : listed.parts.at(0).tensors) tensors[tensor.name] = tensor;
  ASSERT_EQ(layout.parts.at(0).tensors.size(), tensors.size());
  for (const auto& tensor : layout.parts.at(0).tensors) {
    const auto& other = tensors.at(tensor.name);
    EXPECT_EQ(tensor.shape, other.shape);
    EXPECT_EQ(std::tie(tensor.dtype, tensor.bytes, tensor.file, tensor.pieces),
              std::tie(other.dtype, other.bytes, other.file, other.pieces))
        << tensor.name;
  }
  EXPECT_EQ(layout.parts[0].others, listed.parts[0].others);
  EXPECT_EQ(layout.checked_bytes, listed.checked_bytes);

  // What Python reads.
  for (const int i : {0, 1}) {
    const auto name = std::to_string(i);
    merge_fsdp_weights(folders[static_cast<size_t>(i)], support::scratch("merged" + name));
    const auto made =
        convert_files(folders[static_cast<size_t>(i)], support::scratch("converted" + name), {.to = "dcp"});
    EXPECT_FALSE(has_layout(support::scratch("converted" + name)));
  }
  // In the place of one, too.
  fs::copy(folders[1], support::scratch("over"), fs::copy_options::recursive);
  convert_files(folders[0], support::scratch("over"), {.to = "dcp", .overwrite = true});
  EXPECT_FALSE(has_layout(support::scratch("over")));
  EXPECT_EQ(bytes_in(support::scratch("merged0")), bytes_in(support::scratch("merged1")));
  EXPECT_EQ(bytes_in(support::scratch("converted0")), bytes_in(support::scratch("converted1")));
}

// ---- save_state

RANKS_TEST(DcpLayout, RunsGoOnFromItAlsoWhenItWasSavedBehindTraining, 2, 4) {
  const support::Variable none(kListedParts, "0");
  const std::string form = support::world_size() == 4 ? "hybrid" : "sharded";
  const auto folder = support::scratch(form);
  Training run(form, 5);
  run.train(0, 3);
  run.accelerator.save_state(folder / "now");
  run.accelerator.save_state(folder / "behind", {.behind_training = true});
  const auto losses = run.train(3, 6);
  run.accelerator.wait_for_checkpoint();
  wait_for_everyone();
  for (const auto* part : {"pytorch_model_fsdp_0", "optimizer_0"}) {
    EXPECT_TRUE(has_layout(folder / "now" / part));
    EXPECT_TRUE(bytes_in(folder / "now" / part) == bytes_in(folder / "behind" / part)) << part;
  }
  for (const auto* name : {"now", "behind"}) {
    EXPECT_THAT(formats::inspect(folder / name, {.verify = true}).damage, IsEmpty());
    Training resumed(form, 99);
    resumed.accelerator.load_state(folder / name);
    EXPECT_EQ(resumed.train(3, 6), losses) << name;
  }
  // The list of files knows the layout.
  wait_for_everyone();
  if (support::rank() == 0) fs::remove(folder / "now" / "optimizer_0" / ".accelerate_layout");
  wait_for_everyone();
  Training resumed(form, 99);
  EXPECT_THAT(message_of<CheckpointError>([&] { resumed.accelerator.load_state(folder / "now"); }),
              HasSubstr("optimizer_0/.accelerate_layout"));
}

// ---- when

RANKS_TEST(DcpLayout, NoRankTellsOfItsParts, 2) {
  const auto gathered = [](const std::string& listed, int64_t layers, const char* name) {
    const support::Variable most(kListedParts, listed);
    AcceleratorState::reset();
    GradientState::reset();
    Accelerator accelerator({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}});
    nn::Sequential net;
    for (int64_t i = 0; i < layers; ++i) net->push_back(nn::Linear(8, 8));
    const auto model = accelerator.prepare(net);
    const StateDict state{{"model", dcp::get_model_state_dict(model)}};
    dcp::save(state, support::scratch(name));  // what only the first one says
    comm::start_comms_log({});
    dcp::save(state, support::scratch(name));
    int64_t bytes = 0;
    for (const auto& record : comm::comms_records()) bytes += record.bytes * record.count;
    comm::stop_comms_log();
    comm::reset_comms_log();
    return bytes;
  };
  const auto few = gathered("0", 2, "few"), many = gathered("0", 200, "many");
  EXPECT_LT(std::abs(few - many), 4000) << "a few hundred bytes at a time, whatever the model's size";
  EXPECT_GT(gathered("1000000", 200, "listed"), many + 15000) << "100 bytes for each of 200 parts and more";
}

/// Parts are counted up to the limit, which is rank 0's.
RANKS_TEST(DcpLayout, TakesTheMetadatasPlaceWhereItWouldListTooManyParts, 1, 3) {
  Training run("sharded", 5);
  const StateDict state{{"model", dcp::get_model_state_dict(std::get<0>(run.parts))}};
  int64_t parts = 0;
  const auto folder = support::scratch("limit");
  dcp::save(state, folder);
  EXPECT_FALSE(has_layout(folder)) << "a million parts are listed where nobody says otherwise";
  {
    // A part for each rank that has some: its boxes may be more.
    std::set<std::pair<std::string, std::string>> found;
    const formats::DcpCheckpoint checkpoint(folder);
    for (const auto& [name, value] : state.at("model").as<StateDict>())
      if (std::holds_alternative<dcp::ShardedTensor>(value.kind()))
        for (const auto& chunk : checkpoint.tensor("model." + name).chunks) found.emplace(name, chunk.location.file);
    parts = static_cast<int64_t>(found.size());
  }
  wait_for_everyone();
  for (const int64_t less : {0, 1}) {
    // What other ranks are told does not matter.
    const support::Variable most(kListedParts, std::to_string(support::rank() == 0 ? parts - less : 0));
    dcp::save(state, folder);
    EXPECT_EQ(has_layout(folder), less == 1);
    wait_for_everyone();
  }
  {
    const support::Variable wrong(kListedParts, "-1");
    EXPECT_THAT(message_of<ConfigError>([&] { dcp::save(state, folder); }),
                HasSubstr("ACCELERATE_DCP_LISTED_PARTS=-1, expected a number from 0"));
    EXPECT_TRUE(has_layout(folder));
  }
  // In the place of another, in both directions; where nobody knows a rule, parts are listed.
  wait_for_everyone();
  dcp::save(state, folder);
  EXPECT_FALSE(has_layout(folder));
  wait_for_everyone();
  const support::Variable none(kListedParts, "0");
  dcp::save(state, folder);
  EXPECT_TRUE(has_layout(folder));
  auto more = state;
  more["of rank " + std::to_string(support::rank())] = 1;
  dcp::save(more, support::scratch("own"));
  if (support::world_size() > 1) EXPECT_FALSE(has_layout(support::scratch("own")));
  Training turned("turned", 5);
  dcp::save({{"model", dcp::get_model_state_dict(std::get<0>(turned.parts))}}, support::scratch("turned"));
  EXPECT_FALSE(has_layout(support::scratch("turned")));
}

/// A crash while the files of a layout took the places of listed ones, and the other way round.
RANKS_TEST(DcpLayout, ReplacesMetadataWhenItIsComplete, 2) {
  Training run("sharded", 5);
  const StateDict state{{"model", dcp::get_model_state_dict(std::get<0>(run.parts))}};
  for (const std::string listed : {"0", "1000000"}) {
    const auto folder = support::scratch("replaced" + listed), other = support::scratch("other" + listed);
    {
      const support::Variable most(kListedParts, listed == "0" ? "1000000" : "0");
      dcp::save(state, folder);
    }
    const support::Variable most(kListedParts, listed);
    dcp::save(state, other);
    wait_for_everyone();
    if (support::rank() == 0) {
      fs::rename(other, folder / ".finished");
      std::ofstream(folder / ".finished" / ".stale").flush();
    }
    wait_for_everyone();
    auto loaded = state;
    dcp::load(loaded, folder);
    EXPECT_EQ(has_layout(folder), listed == "0");
    wait_for_everyone();
  }
}

// ---- state dicts of one's own

/// Rows of a [6, 4] tensor, two for each of three ranks, or as the rule would have it and yet others.
dcp::ShardedTensor rows(int64_t first, std::optional<parallel::EqualShards> rule) {
  const auto whole = torch::arange(24, torch::kDouble).view({6, 4});
  return {.sizes = {6, 4},
          .dtype = torch::kDouble,
          .parts = {{{first, 0}, whole.narrow(0, first, 2).clone()}},
          .equal = rule};
}

RANKS_TEST(DcpLayout, RulesOfOnesOwnAreCompared, 3) {
  meet();
  const support::Variable none(kListedParts, "0");
  const parallel::EqualShards rule{.each = 8, .members = 3};
  const auto folder = support::scratch("own");
  const auto save = [&](const dcp::ShardedTensor& tensor) { dcp::save({{"rows", tensor}}, folder); };
  save(rows(2 * support::rank(), rule));
  EXPECT_TRUE(has_layout(folder));
  StateDict whole{{"rows", torch::zeros({6, 4}, torch::kDouble)}};
  dcp::load(whole, folder);
  EXPECT_TRUE(torch::equal(whole["rows"].as<at::Tensor>(), torch::arange(24, torch::kDouble).view({6, 4})));
  wait_for_everyone();
  // What was planned is kept, for each form of a state dict.
  const int64_t made = counts::read(run_state::CheckpointCount::layouts_made);
  auto other = rows(2 * support::rank(), rule);
  other.sizes = {3, 8}, other.parts[0] = {{support::rank(), 0}, torch::full({1, 8}, 5.0, torch::kDouble)};
  for (int i = 0; i < 2; ++i) {
    save(rows(2 * support::rank(), rule));
    dcp::save({{"rows", other}}, support::scratch("other"));
  }
  EXPECT_EQ(counts::read(run_state::CheckpointCount::layouts_made), made + 1);
  StateDict others{{"rows", torch::zeros({3, 8}, torch::kDouble)}};
  dcp::load(others, support::scratch("other"));
  EXPECT_TRUE(others["rows"].as<at::Tensor>().eq(5).all().item<bool>());
  wait_for_everyone();
  // On ranks whose parts are right, too.
  const auto message = [&](const dcp::ShardedTensor& tensor) {
    try {
      save(tensor);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  // Ranks in the other order: all of them have some, and none of them what the rule says but the middle one.
  EXPECT_THAT(message(rows(4 - 2 * support::rank(), rule)),
              AllOf(HasSubstr("'rows' says that ranks hold equal pieces of it, and rank "),
                    AnyOf(HasSubstr("0 has offsets [4, 0] sizes [2, 4], expected offsets [0, 0] sizes [2, 4]"),
                          HasSubstr("2 has offsets [0, 0] sizes [2, 4], expected offsets [4, 0] sizes [2, 4]")),
                    HasSubstr("leave ShardedTensor::equal unset")));
  EXPECT_THAT(message(rows(2 * support::rank(), parallel::EqualShards{.each = 8, .members = 2})),
              HasSubstr("has 24 elements from 0 on, expected no more than the 2 pieces of 8"));
  EXPECT_THAT(message(rows(2 * support::rank(), parallel::EqualShards{.each = 8, .members = 3, .member_step = 2})),
              HasSubstr("expected ranks below 3"));
  EXPECT_THAT(message(rows(2 * support::rank(), parallel::EqualShards{.each = 8, .members = 3, .replica_step = 0})),
              HasSubstr("has the step 0 of replicas"));
  EXPECT_TRUE(has_layout(folder));
}

}  // namespace
