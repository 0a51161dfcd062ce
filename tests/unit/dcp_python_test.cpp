#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "dcp_test_support.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

using namespace dcp_test;
using accelerate::CheckpointError;
using accelerate::ConfigError;
using accelerate::load_safetensors;
using accelerate::merge_fsdp_weights;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

namespace {

constexpr const char* kPeer = "tests/unit/dcp_peer.py";

void run_peer(const std::vector<std::string>& arguments) {
  const auto result = support::run_python(kPeer, arguments);
  ASSERT_EQ(result.exit_code, 0) << result.output;
}

/// The checkpoint that two ranks of Python saved; once for all tests of this program, because it takes a while.
const fs::path& python_folder() {
  static const Scratch scratch;
  static const bool done = [] {
    const auto result = support::run_python(kPeer, {"save", scratch.path});
    if (result.exit_code != 0) throw std::runtime_error(result.output);
    return true;
  }();
  (void)done;
  return scratch.path;
}

nlohmann::json to_json(const c10::IValue& value) {
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  auto items = nlohmann::json::array();
  if (value.isList())
    for (const c10::IValue& item : value.toListRef()) items.push_back(to_json(item));
  else
    for (const c10::IValue& item : value.toTupleRef().elements()) items.push_back(to_json(item));
  return items;
}

/// Keys in quotes, list indices without.
std::string shown(const DcpPath& path) {
  std::string text;
  for (const auto& step : path) {
    const auto* key = std::get_if<std::string>(&step);
    text += key ? "'" + *key + "' " : std::to_string(std::get<int64_t>(step)) + " ";
  }
  return text;
}

/// Python reads everything in the folder, whole and in parts, with the same values.
void expect_as_python_reads(const fs::path& folder) {
  const auto wanted = load_safetensors(folder.string() + ".safetensors");
  const auto objects = nlohmann::json::parse(std::ifstream(folder.string() + ".json"));
  const DcpCheckpoint checkpoint(folder);
  EXPECT_EQ(checkpoint.entries().size(), wanted.size() + objects.size());
  for (const auto& [name, tensor] : wanted) {
    EXPECT_TRUE(same(checkpoint.read_full(name), tensor)) << name;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      for (int64_t rank = 0; rank < 3; ++rank) {
        const auto box = part_of(tensor, dim, rank, 3);
        EXPECT_TRUE(same(checkpoint.read_chunk(name, box), cut(tensor, box))) << name << " " << to_string(box);
      }
  }
  for (const auto& [name, value] : objects.items()) EXPECT_EQ(to_json(checkpoint.read_object(name)), value) << name;
}

std::vector<Shared> state_for_python() {
  std::vector<Shared> state{{"model.rows", torch::randn({7, 5})}, {"model.columns", torch::randn({4, 9}), 1},
                            {"model.one", torch::randn({1, 6})},  {"model.replica", torch::randn({3, 3}), -1},
                            {"model.scalar", torch::tensor(2.5)}, {"model.nothing", torch::zeros({0, 3})}};
  for (const auto type : {torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt, torch::kShort,
                          torch::kChar, torch::kByte, torch::kBool, torch::kComplexFloat, torch::kUInt16,
                          torch::kUInt32, torch::kUInt64, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2})
    state.push_back({std::string("model.") + c10::toString(type), torch::arange(11).to(type)});
  return state;
}

void save_wanted(const fs::path& stem, const std::vector<Shared>& state, const nlohmann::json& objects) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor, dim] : state) tensors.emplace(name, tensor);
  accelerate::save_safetensors(stem.string() + ".safetensors", tensors);
  std::ofstream(stem.string() + ".json") << objects;
}

}  // namespace

// One test for all cases: each test is a process of its own under ctest, and saving them takes Python a quarter of a
// minute.
TEST(DcpWithPython, EveryCaseOfPythonIsReadBitForBit) {
  SKIP_WITHOUT_PYTHON();
  for (const std::string name : {"pytorch_model_fsdp_0", "optimizer_0", "everything", "fsdp1", "fsdp1_mesh", "layouts",
                                 "threads", "file_per_item"}) {
    SCOPED_TRACE(name);
    expect_as_python_reads(python_folder() / name);
  }
  const DcpCheckpoint checkpoint(python_folder() / "everything");
  EXPECT_EQ(shown(checkpoint.find("optim.param_groups.0.lr")->path.value()), "'optim' 'param_groups' 0 'lr' ");
  EXPECT_EQ(shown(checkpoint.find("names.a.b.c.1.d")->path.value()), "'names' 'a.b' 'c' 1 'd' ");

  const Scratch scratch;
  const auto source = python_folder() / "everything" / ".metadata";
  const auto wanted = format_dcp_metadata(parse_dcp_metadata(bytes_of(source), "python's"));
  for (const std::string form : {"new", "old", "by_name"}) {
    run_peer({"metadata", source, scratch / form, form});
    EXPECT_EQ(format_dcp_metadata(parse_dcp_metadata(bytes_of(scratch / form), form)), wanted) << form;
  }
}

TEST(DcpWithPython, PythonReadsOurs) {
  SKIP_WITHOUT_PYTHON();
  const Scratch scratch;
  const auto state = state_for_python();
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& item :
       {c10::IValue(1), c10::IValue(2.5), c10::IValue("grüß"), c10::IValue(), c10::IValue(false)})
    list.push_back(item);
  const std::vector<DcpObjectItem> objects{{"step", int64_t{7}},     {"lr", 1e-3},         {"large", int64_t{1} << 40},
                                           {"negative", -3},         {"text", "grüß"},     {"nothing", c10::IValue()},
                                           {"list", list},           {"groups.0.lr", 0.5}, {"groups.1.lr", 0.25},
                                           {"groups.1.params", list}};
  save(scratch / "ours", state, 3, objects);
  save_wanted(scratch / "want", state,
              {{"step", 7},
               {"lr", 1e-3},
               {"large", int64_t{1} << 40},
               {"negative", -3},
               {"text", "grüß"},
               {"nothing", nullptr},
               {"list", {1, 2.5, "grüß", nullptr, false}},
               {"groups.0.lr", 0.5},
               {"groups.1.lr", 0.25},
               {"groups.1.params", {1, 2.5, "grüß", nullptr, false}}});
  run_peer({"check", scratch / "ours", scratch / "want"});
  save(scratch / "model", state, 4);
  save_wanted(scratch / "model_want", state, nlohmann::json::object());
  run_peer({"check", scratch / "model", scratch / "model_want"});
}

TEST(MergeFsdpWeights, WritesWhatTheReferenceDoes) {
  SKIP_WITHOUT_PYTHON();
  const Scratch scratch;
  const auto model = python_folder() / "pytorch_model_fsdp_0", optimizer = python_folder() / "optimizer_0";
  merge_fsdp_weights(model, scratch / "ours");
  run_peer({"merge", model, scratch / "theirs"});
  EXPECT_EQ(bytes_of(scratch / "ours" / "model.safetensors"), bytes_of(scratch / "theirs" / "model.safetensors"));
  merge_fsdp_weights(model, scratch / "ours", {.safe_serialization = false});
  EXPECT_FALSE(fs::exists(scratch / "ours" / "model.safetensors")) << "weights of an earlier save are replaced";
  run_peer({"load_bin", model, scratch / "ours" / "pytorch_model.bin"});

  merge_fsdp_weights(optimizer, scratch / "state", {.safe_serialization = false});
  run_peer({"load_bin", optimizer, scratch / "state" / "pytorch_model.bin"});
  EXPECT_THAT(message_of<ConfigError>([&] { merge_fsdp_weights(optimizer, scratch / "state"); }),
              AllOf(HasSubstr("lies in nested dicts or lists"), HasSubstr("pass safe_serialization = false")));
  EXPECT_THAT(message_of<ConfigError>([&] {
                merge_fsdp_weights(optimizer, scratch / "state",
                                   {.safe_serialization = false, .max_shard_size = "1MB"});
              }),
              HasSubstr("Leave max_shard_size unset"));
}

TEST(MergeFsdpWeights, ShardsHaveAnIndex) {
  const Scratch scratch;
  std::vector<Shared> state;
  for (int i = 0; i < 6; ++i)
    state.push_back({"model.layer" + std::to_string(i), torch::randn({25, 10})});  // 1,000 bytes each
  save(scratch / "dcp", state, 3);
  for (const bool safe : {true, false}) {
    merge_fsdp_weights(scratch / "dcp", scratch / "out", {.safe_serialization = safe, .max_shard_size = "2.5KB"});
    const std::string stem = safe ? "model" : "pytorch_model", extension = safe ? ".safetensors" : ".bin";
    EXPECT_TRUE(fs::exists(scratch / "out" / (stem + "-00003-of-00003" + extension)));
    const auto index = nlohmann::json::parse(std::ifstream(scratch / "out" / (stem + extension + ".index.json")));
    EXPECT_EQ(index["metadata"]["total_size"], 6000);
    EXPECT_EQ(index["weight_map"]["layer3"], stem + "-00002-of-00003" + extension);
  }
  merge_fsdp_weights(scratch / "dcp", scratch / "out", {.max_shard_size = "2.5KB"});
  const auto loaded = accelerate::load_checkpoint_files(scratch / "out");
  ASSERT_EQ(loaded.size(), 6u);
  for (const auto& [name, tensor, dim] : state) EXPECT_TRUE(same(loaded.at(name.substr(6)), tensor)) << name;
}

TEST(MergeFsdpWeights, FindsTheModelAndSaysWhatIsThere) {
  const Scratch scratch;
  const std::vector<Shared> weights{{"model.w", torch::randn({4, 2})}};
  EXPECT_THAT(message_of<CheckpointError>([&] { merge_fsdp_weights(scratch / "nowhere", scratch / "out"); }),
              HasSubstr("does not exist, expected the folder of a distributed checkpoint"));
  EXPECT_THAT(message_of<CheckpointError>([&] { merge_fsdp_weights(scratch.path, scratch / "out"); }),
              HasSubstr("holds no file .metadata"));
  save(scratch / "optimizer_0", {{"optimizer.w", torch::ones(2)}}, 2);
  EXPECT_THAT(message_of<CheckpointError>([&] { merge_fsdp_weights(scratch.path, scratch / "out"); }),
              HasSubstr("It contains some: pass one of '" + (scratch / "optimizer_0").string() + "'"));
  save(scratch / "pytorch_model_fsdp_0", weights, 2);
  merge_fsdp_weights(scratch.path, scratch / "out");
  EXPECT_TRUE(same(load_safetensors(scratch / "out" / "model.safetensors").at("w"), weights[0].tensor));
  save(scratch / "pytorch_model_fsdp_1", weights, 2);
  EXPECT_THAT(message_of<CheckpointError>([&] { merge_fsdp_weights(scratch.path, scratch / "out"); }),
              HasSubstr("pytorch_model_fsdp_1"));
}

/// The base is in few bits, and checkpoints leave it out.
TEST(MergeFsdpWeights, SaysThatAdaptersAloneAreNoModel) {
  const Scratch scratch;
  std::vector<Shared> weights{{"model.norm.weight", torch::ones(2)},
                              {"model.q.lora_A.weight", torch::randn({4, 2})},
                              {"model.q.lora_B.weight", torch::randn({2, 4})},
                              {"model.v.lora_A.weight", torch::randn({4, 2})},
                              {"model.v.lora_B.weight", torch::randn({2, 4})}};
  const auto warnings = [&](const char* name) {
    save(scratch / name, weights, 2);
    return support::warnings_of([&] { merge_fsdp_weights(scratch / name, scratch / "out"); });
  };
  EXPECT_THAT(warnings("few_bits"), AllOf(HasSubstr("adapters of 2 weights and not these themselves ('q.weight', …)"),
                                          HasSubstr("no whole model")));
  weights.push_back({"model.q.weight", torch::randn({2, 2})});
  weights.push_back({"model.v.base_layer.weight", torch::randn({2, 2})});
  EXPECT_EQ(warnings("whole"), "");
}

TEST(MergeFsdpWeights, RemovesTheCheckpointOnlyAfterSuccess) {
  const Scratch scratch;
  save(scratch / "pytorch_model_fsdp_0", {{"model.w", torch::randn({4, 2})}}, 2);
  const auto folder = scratch / "pytorch_model_fsdp_0";
  EXPECT_THAT(
      message_of<ConfigError>([&] { merge_fsdp_weights(folder, folder / "out", {.remove_checkpoint_dir = true}); }),
      HasSubstr("lies in the checkpoint that remove_checkpoint_dir removes"));
  fs::rename(folder / "__1_0.distcp", scratch / "kept");
  EXPECT_THROW(merge_fsdp_weights(folder, scratch / "out", {.remove_checkpoint_dir = true}), CheckpointError);
  EXPECT_TRUE(fs::exists(folder / ".metadata"));
  EXPECT_FALSE(fs::exists(scratch / "out" / "model.safetensors"));
  fs::rename(scratch / "kept", folder / "__1_0.distcp");
  merge_fsdp_weights(folder, scratch / "out", {.remove_checkpoint_dir = true});
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_TRUE(fs::exists(scratch / "out" / "model.safetensors"));
}

TEST(MergeFsdpWeights, TakesTheModelOutOfAWholeState) {
  const Scratch scratch;
  save(scratch / "dcp", {{"model.w", torch::ones({4, 2})}, {"optim.w", torch::ones({4, 2})}}, 2,
       {{"step", int64_t{1}}});
  merge_fsdp_weights(scratch / "dcp", scratch / "out");
  EXPECT_EQ(load_safetensors(scratch / "out" / "model.safetensors").size(), 1u);
  save(scratch / "flat", {{"a", torch::ones(2)}, {"b", torch::ones(2)}}, 2);
  merge_fsdp_weights(scratch / "flat", scratch / "out");
  EXPECT_EQ(load_safetensors(scratch / "out" / "model.safetensors").size(), 2u);
}

RANKS_TEST(MergeFsdpWeights, OneOfSeveralRanksWorks, 2) {
  const fs::path folder = support::scratch_dir();
  if (support::rank() == 0) save(folder / "dcp", {{"model.w", torch::ones({4, 2})}}, 2);
  while (!fs::exists(folder / "dcp" / ".metadata")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  merge_fsdp_weights(folder / "dcp", folder / ("out" + std::to_string(support::rank())));
  EXPECT_TRUE(fs::exists(folder / "out0" / "model.safetensors"))
      << "all are there when the call returns, on every rank";
  EXPECT_FALSE(fs::exists(folder / "out1"));
}
