/// DeepSpeed's checkpoints: those that it wrote load here and training goes on as there; ours have its names and keys,
/// resume to the bit, and load with any number of ranks and any stage. The files of deepspeed_checkpoints/ are
/// DeepSpeed 0.19.8's (CPU accelerator, gloo), of the peer's GPT after three steps; expected.json says what it did with
/// them next.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "accelerate/accelerate.hpp"
#include "accelerate/checkpoint/zero_to_fp32.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/zero_handles.hpp"
#include "both_stores.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"
#include "peer_gpt.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "warnings_of.hpp"
#include "zero_training.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using support::config_of;
using support::expect_same;
using support::kTheirs;
using support::kTokens;
using support::PeerGpt;
using support::plugin_of;
using support::read_json;
using support::Training;
using support::tree_of;
using testing::AllOf;
using testing::HasSubstr;

namespace fs = std::filesystem;

std::vector<std::string> names_of_theirs(int64_t ranks) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kTheirs))
    if (read_json(entry.path() / "expected.json")["ranks"] == ranks) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

// Training goes on from their files as theirs did.
RANKS_TEST(ZeroCheckpoint, TheirsGoesOnHere, 1, 2, 3) {
  size_t seen = 0;
  for (const auto& name : names_of_theirs(support::world_size()))
    support::on_both_stores([&](const std::string& store) {
      SCOPED_TRACE(name + ", " + store);
      const json expected = read_json(kTheirs / name / "expected.json");
      Training training(expected["config"], expected["args"]);
      const auto loaded = training.prepared->load_checkpoint(kTheirs / name);
      EXPECT_EQ(loaded.load_path, kTheirs / name / "global_step3");
      EXPECT_TRUE(loaded.client_state.empty());
      const auto counts = training.optimizer->step_counts();
      EXPECT_EQ(counts.taken + counts.skipped, 3);
      const auto curves = training.steps(3);
      const bool half = expected["config"].contains("bf16") || expected["config"].contains("fp16");
      for (size_t i = 0; i < 3; ++i) {
        // In half precision their sums are in 16 bits, ours in 32: a few of its roundings.
        const double loss = expected["losses"][i], allowed = half ? 4e-3 : 1e-5;
        if (training.accelerator.is_main_process())  // whose they are
          EXPECT_NEAR(curves.losses[i], loss, allowed * loss) << "step " << i;
        EXPECT_NEAR(curves.rates[i], expected["lrs"][i].get<double>(), 1e-9) << "step " << i;
        if (expected["config"]["zero_optimization"]["stage"] != 0) {  // which has a scaler of its own there
          EXPECT_EQ(curves.scales[i], expected["scales"][i].get<double>()) << "step " << i;
          EXPECT_EQ(curves.skipped[i], expected["skipped"][i].get<int64_t>()) << "step " << i;
        }
      }
      // And it is the state that does it: a training from the beginning has other losses.
      if (training.accelerator.is_main_process())
        EXPECT_GT(std::abs(curves.losses[0] - expected["first"][0].get<double>()), 1e-3);
      ++seen;
    });
  EXPECT_GT(seen, 0U);
}

// Whole weights and states of their files, on whatever number of ranks, in whatever stage.
RANKS_TEST(ZeroCheckpoint, TheirsLoadsOnAnyNumberOfRanks, 1, 3, 5) {
  for (const char* name : {"z1bf", "z2", "z3", "z3fp16"}) {
    const json expected = read_json(kTheirs / name / "expected.json");
    const auto weights = get_fp32_state_dict_from_zero_checkpoint(kTheirs / name);
    const auto theirs = checkpointing::load_object(kTheirs / name / "fp32.pt").toGenericDict();
    ASSERT_EQ(weights.size(), theirs.size()) << name;
    for (const auto& entry : theirs)
      EXPECT_TRUE(at::equal(weights.at(entry.key().toStringRef()), entry.value().toTensor().to(at::kFloat)))
          << name << ": " << entry.key();
    for (const int64_t stage : {0, 3}) {  // whole, and in pieces; other stages cut as the last one does
      SCOPED_TRACE(std::string(name) + ", into stage " + std::to_string(stage));
      support::reset_states();
      json config = expected["config"];
      config["zero_optimization"]["stage"] = stage;
      Training training(config, expected["args"]);
      training.accelerator.load_state(kTheirs / name);  // by `latest`
      expect_same(training.weights(), weights);
      const auto moments = training.moments();
      for (const auto& [parameter, moment] : moments) {
        ASSERT_TRUE(moment.defined()) << parameter;
        EXPECT_GT(moment.abs().max().item<double>(), 0) << parameter;
      }
      EXPECT_EQ(training.optimizer->step_counts().taken + training.optimizer->step_counts().skipped, 3);
    }
  }
}

// A checkpoint of save_state() resumes to the bit; also where parameters are frozen, tied, or have no state.
RANKS_TEST(ZeroCheckpoint, ResumesToTheBit, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t stage = 0; stage <= 3; ++stage)
      for (const std::string precision : {"", "bf16", "fp16"}) {
        SCOPED_TRACE(fmt::format("{}, stage {}, {}", store, stage, precision));
        if (store.back() == '0' && precision != "fp16") continue;  // by sockets pieces are cut in the same way
        const auto folder =
            support::scratch(fmt::format("resume_{}_{}_{}_{}", support::world_size(), stage, precision, store.back()));
        const json arguments = {"--tie", "--freeze", "wpe"};
        Training::Curves expected;
        std::map<std::string, at::Tensor> weights, moments;
        {
          support::reset_states();
          Training training(config_of(stage, precision), arguments);
          training.steps(3);
          training.accelerator.save_state(folder);
          expected = training.steps(3, 77);
          weights = training.weights(), moments = training.moments();
        }
        support::reset_states();
        Training again(config_of(stage, precision), arguments);
        again.steps(1, 5);  // other values than those that are loaded
        again.accelerator.load_state(folder);
        const auto curves = again.steps(3, 77);
        EXPECT_EQ(curves.losses, expected.losses);
        EXPECT_EQ(curves.rates, expected.rates);
        EXPECT_EQ(curves.scales, expected.scales);
        EXPECT_EQ(curves.skipped, expected.skipped);
        expect_same(again.weights(), weights);
        expect_same(again.moments(), moments);
        EXPECT_FALSE(fs::exists(folder / "scaler.pt")) << "the scale is in DeepSpeed's files";
        EXPECT_FALSE(fs::exists(folder / "scheduler.bin")) << "so is the schedule";
        EXPECT_FALSE(fs::exists(folder / "optimizer.bin"));
      }
  });
}

// Names, keys, kinds and sizes are those of the files that DeepSpeed wrote of the same training.
RANKS_TEST(ZeroCheckpoint, OursHasTheKeysOfTheirs, 1, 2, 3) {
  size_t seen = 0;
  for (const auto& name : names_of_theirs(support::world_size())) {
    SCOPED_TRACE(name);
    support::reset_states();
    const json expected = read_json(kTheirs / name / "expected.json");
    const auto folder = support::scratch("keys_" + name);
    Training training(expected["config"], expected["args"]);
    training.steps(3);
    const auto written = training.prepared->save_checkpoint(folder);
    EXPECT_EQ(written, folder / "global_step3");
    training.accelerator.wait_for_everyone();
    for (const auto& entry : fs::directory_iterator(kTheirs / name / "global_step3")) {
      const auto file = entry.path().filename();
      SCOPED_TRACE(file.string());
      ASSERT_TRUE(fs::exists(written / file));
      const auto ours = tree_of(written / file);
      for (const auto& [key, what] : tree_of(entry.path())) {
        if (key.starts_with("/ds_config")) continue;
        // Theirs says where parameters would lie without round_robin_gradients, also with it.
        if (name == "z1rr" && key.find("param_slice_mappings") != std::string::npos) continue;
        // How an optimizer of their own is made, which torch's does not have here, and an enum, which is a number here.
        if (key.ends_with("/decoupled_weight_decay") || key.find("zero_stage") != std::string::npos) continue;
        const auto found = ours.find(key);
        if (found == ours.end()) ADD_FAILURE() << "theirs has " << key << " (" << what << "), ours has not";
        else if (what != "None" && found->second != "None" && !(what == "Int" && found->second == "Double")) {
          EXPECT_EQ(found->second, what) << key;
        }
      }
      ++seen;
    }
    std::ifstream latest(folder / "latest");
    std::string tag;
    latest >> tag;
    EXPECT_EQ(tag, "global_step3");
  }
  EXPECT_GT(seen, 0U);
}

RANKS_TEST(ZeroCheckpoint, TagsAndClientState, 1, 2) {
  const auto folder = support::scratch(fmt::format("tags_{}", support::world_size()));
  Training training(config_of(2));
  auto& m = *training.prepared;
  training.steps(2);
  c10::impl::GenericDict nested(c10::StringType::get(), c10::AnyType::get());
  nested.insert("seen", at::arange(3));
  m.save_checkpoint(folder, "first", {{"epoch", 7}, {"best", 0.5}, {"more", nested}});
  const auto weights = training.weights();
  training.steps(2);
  m.save_checkpoint(folder, "second", {{"epoch", 8}});
  m.save_checkpoint(folder, "aside", {}, {.save_latest = false});
  EXPECT_EQ(m.load_checkpoint(folder).client_state.at("epoch").toInt(), 8) << "the latest";
  const auto loaded = m.load_checkpoint(folder, "first");
  EXPECT_EQ(loaded.client_state.at("epoch").toInt(), 7);
  EXPECT_EQ(loaded.client_state.at("best").toDouble(), 0.5);
  EXPECT_TRUE(at::equal(loaded.client_state.at("more").toGenericDict().at("seen").toTensor(), at::arange(3)));
  expect_same(training.weights(), weights);
  EXPECT_EQ(training.optimizer->step_counts().taken, 2);
  // Weights alone: states and counts stay.
  training.steps(1);
  const auto moments = training.moments();
  m.load_checkpoint(folder, "first", {.load_module_only = true});
  expect_same(training.weights(), weights);
  expect_same(training.moments(), moments);
  EXPECT_EQ(training.optimizer->step_counts().taken, 3);
  // Without states: masters begin as the weights, which are whole in the file; with the schedule, or without.
  const double rate = training.optimizer->param_groups()[0].options().get_lr();
  m.load_checkpoint(folder, "first", {.load_optimizer_states = false, .load_lr_scheduler_states = false});
  expect_same(training.weights(), weights);
  expect_same(training.moments(), moments);
  training.steps(1);
  const double later = training.optimizer->param_groups()[0].options().get_lr();
  EXPECT_GT(later, rate) << "the schedule went on from where it was";
  m.load_checkpoint(folder, "first");
  training.steps(1);
  EXPECT_LT(training.optimizer->param_groups()[0].options().get_lr(), later) << "and now from where it was then";
  // A folder without `latest`: nothing is loaded, as theirs.
  const auto none = support::scratch(fmt::format("none_{}", support::world_size()));
  fs::create_directories(none);
  EXPECT_TRUE(m.load_checkpoint(none).load_path.empty());
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                m.save_checkpoint(folder, "x", {{"optimizer", 1}});
              }),
              HasSubstr("optimizer"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { m.load_checkpoint(folder, "third"); }), HasSubstr("third"));
  EXPECT_THAT(support::message_of<ConfigError>([&] { m.save_checkpoint(folder, "../out"); }), HasSubstr("../out"));
}

// Frozen parameters may be left out; then a strict load misses them.
RANKS_TEST(ZeroCheckpoint, FrozenParametersMayBeLeftOut, 1, 2) {
  for (int64_t stage = 2; stage <= 3; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    support::reset_states();
    const auto folder = support::scratch(fmt::format("frozen_{}_{}", support::world_size(), stage));
    Training training(config_of(stage), {"--freeze", "wpe"});
    auto& m = *training.prepared;
    training.steps(1);
    m.save_checkpoint(folder, "whole");
    m.save_checkpoint(folder, "trained", {}, {.exclude_frozen_parameters = true});
    const auto whole = get_fp32_state_dict_from_zero_checkpoint(folder, "whole");
    EXPECT_TRUE(whole.contains("wpe.weight"));
    EXPECT_FALSE(get_fp32_state_dict_from_zero_checkpoint(folder, "trained").contains("wpe.weight"));
    EXPECT_FALSE(get_fp32_state_dict_from_zero_checkpoint(folder, "whole", /*exclude_frozen_parameters=*/true)
                     .contains("wpe.weight"));
    EXPECT_THAT(support::message_of<CheckpointError>([&] { m.load_checkpoint(folder, "trained"); }),
                HasSubstr("wpe.weight"));
    m.load_checkpoint(folder, "trained", {.load_module_strict = false});
    // Into files: by tag, in shards, as safetensors, without what was frozen.
    if (training.accelerator.is_main_process()) {
      const auto out = folder / "merged";
      convert_zero_checkpoint_to_fp32_state_dict(
          folder, out,
          {.max_shard_size = "2KB", .safe_serialization = true, .tag = "whole", .exclude_frozen_parameters = true});
      EXPECT_TRUE(fs::exists(out / "model.safetensors.index.json")) << "several files";
      const auto merged = load_checkpoint_files(out);
      EXPECT_EQ(merged.size(), whole.size() - 1);
      for (const auto& [name, value] : merged) EXPECT_TRUE(at::equal(value, whole.at(name))) << name;
      convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "latest_one");
      EXPECT_TRUE(fs::exists(folder / "latest_one" / "pytorch_model.bin"));
      EXPECT_EQ(load_checkpoint_files(folder / "latest_one").size(), whole.size() - 1) << "of the latest tag";
      PeerGpt fresh(support::PeerSizes{}, false);
      torch::NoGradGuard no_grad;
      for (auto& parameter : fresh->parameters()) parameter.zero_();
      load_state_dict_from_zero_checkpoint(fresh, folder, "whole");
      EXPECT_TRUE(at::equal(fresh->head->weight, whole.at("head.weight")));
    }
    training.accelerator.wait_for_everyone();
  }
}

// Files that are missing, or of two saves, are named, and nothing is changed.
RANKS_TEST(ZeroCheckpoint, BrokenFoldersAreNamed, 2) {
  const auto folder = support::scratch("broken");
  Training training(config_of(3));
  training.steps(1);
  training.prepared->save_checkpoint(folder, "good");
  training.steps(1);
  training.prepared->save_checkpoint(folder, "later");
  const auto weights = training.weights();
  const auto broken = [&](const std::string& name, const std::function<void(const fs::path&)>& change) {
    const auto message = support::refusal_of_changed(training, folder, "good", name, change);
    expect_same(training.weights(), weights);
    return message;
  };
  EXPECT_THAT(
      broken("no_rank", [](const fs::path& at) { fs::remove(at / "zero_pp_rank_1_mp_rank_00_optim_states.pt"); }),
      HasSubstr("missing: rank 1"));
  EXPECT_THAT(
      broken("no_model", [](const fs::path& at) { fs::remove(at / "zero_pp_rank_0_mp_rank_00_model_states.pt"); }),
      HasSubstr("model_states"));
  EXPECT_THAT(broken("two_saves",
                     [&](const fs::path& at) {
                       const auto file = "zero_pp_rank_1_mp_rank_00_model_states.pt";
                       fs::copy_file(folder / "later" / file, at / file, fs::copy_options::overwrite_existing);
                     }),
              AllOf(HasSubstr("global_steps"), HasSubstr("one save")));
  EXPECT_THAT(
      broken("cut", [](const fs::path& at) { fs::resize_file(at / "zero_pp_rank_0_mp_rank_00_optim_states.pt", 700); }),
      HasSubstr("zero_pp_rank_0_mp_rank_00_optim_states.pt"));
  EXPECT_THAT(
      broken("tensor_parallel", [](const fs::path& at) { std::ofstream(at / "mp_rank_01_model_states.pt") << "x"; }),
      HasSubstr("tensor parallelism"));
}

namespace {

c10::impl::GenericDict dict_of(std::initializer_list<std::pair<const char*, c10::IValue>> items) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : items) dict.insert(key, value);
  return dict;
}
c10::impl::GenericList list_of(const std::vector<c10::IValue>& items) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& item : items) list.push_back(item);
  return list;
}

/// Stage 2's files of one weight [ranks], of which each rank has an element: its number.
void write_checkpoint_of(int64_t ranks, const fs::path& folder) {
  fs::create_directories(folder);
  checkpointing::save_object(dict_of({{"module", dict_of({{"weight", torch::zeros({ranks})}})},
                                      {"buffer_names", list_of({})},
                                      {"param_shapes", list_of({dict_of({{"weight", list_of({c10::IValue(ranks)})}})})},
                                      {"dp_world_size", ranks},
                                      {"global_steps", 1}}),
                             folder / "mp_rank_00_model_states.pt");
  for (int64_t rank = 0; rank < ranks; ++rank) {
    c10::impl::GenericDict states(c10::IntType::get(), c10::AnyType::get());
    states.insert(0, dict_of({{"step", 1}}));
    checkpointing::save_object(
        dict_of({{"optimizer_state_dict",
                  dict_of({{"zero_stage", 2},
                           {"partition_count", ranks},
                           {"single_partition_of_fp32_groups", list_of({torch::full({1}, static_cast<double>(rank))})},
                           {"base_optimizer_state", dict_of({{"state", states}, {"param_groups", list_of({})}})}})}}),
        folder / fmt::format("zero_pp_rank_{}_mp_rank_00_optim_states.pt", rank));
  }
}

/// A limit of this process, while it lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t most) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const struct rlimit few { most, before_.rlim_max };
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;

 private:
  struct rlimit before_ {};
};

int64_t files_opened() { return formats::InputFile::times_opened(); }

}  // namespace

// A process may have fewer files open than ranks have saved.
RANKS_TEST(ZeroCheckpoint, ManyRanksFilesNeedFewDescriptors, 1) {
  constexpr int64_t kRanks = 200;
  const auto folder = support::scratch("many");
  write_checkpoint_of(kRanks, folder);
  const auto expected = torch::arange(kRanks, at::kFloat);
  {
    const DescriptorLimit few(96);
    EXPECT_TRUE(get_fp32_state_dict_from_zero_checkpoint(folder).at("weight").equal(expected));
  }
  const DescriptorLimit enough(1024);
  const int64_t before = files_opened();
  EXPECT_TRUE(get_fp32_state_dict_from_zero_checkpoint(folder).at("weight").equal(expected));
  EXPECT_EQ(files_opened() - before, kRanks + 1) << "each once, where they may stay open";
}

// A file that is opened again must be the one that it was.
RANKS_TEST(ZeroCheckpoint, FilesThatAreReplacedWhileTheyAreReadAreNamed, 1) {
  const auto folder = support::scratch("replaced");
  fs::create_directories(folder);
  std::vector<std::unique_ptr<formats::InputFile>> files;
  const DescriptorLimit few(96);
  for (int i = 0; i < 100; ++i) {
    const auto file = folder / std::to_string(i);
    support::write(file, "text");
    files.push_back(std::make_unique<formats::InputFile>(file));
  }
  char first = 0;
  files[1]->read(0, &first, 1);
  EXPECT_EQ(first, 't') << "closed, and opened again";
  support::write(folder / "new", "TEXT");
  fs::rename(folder / "new", folder / "0");
  EXPECT_THAT(support::message_of<CheckpointError>([&] { files[0]->read(0, &first, 1); }),
              AllOf(HasSubstr((folder / "0").string()), HasSubstr("another file")));
}

// Loading from a folder asks for its files several times.
RANKS_TEST(ZeroCheckpoint, LoadingOpensEachFileOnce, 2) {
  const auto folder = support::scratch("once");
  for (const int64_t stage : {2, 3}) {
    support::reset_states();
    Training training(config_of(stage, "fp16"));
    training.steps(1);
    const auto tags = folder / std::to_string(stage);
    training.prepared->save_checkpoint(tags, "tag");
    training.accelerator.save_state(tags / "state");
    int64_t before = files_opened();
    training.prepared->load_checkpoint(tags, "tag");
    EXPECT_EQ(files_opened() - before, stage == 3 ? 4 : 3);
    before = files_opened();
    training.accelerator.load_state(tags / "state");
    int64_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(tags / "state")) files += entry.is_regular_file();
    EXPECT_LE(files_opened() - before, files);
  }
}

// Two ranks' state beside a file of one that ran alone.
RANKS_TEST(ZeroCheckpoint, FilesOfAnotherNumberOfRanksAreNamed, 1) {
  const auto folder = support::scratch("other_ranks");
  fs::create_directories(folder);
  fs::copy(kTheirs / "z2" / "global_step3", folder / "tag", fs::copy_options::recursive);
  Training training(config_of(2), {"--tie", "--freeze", "wpe"});
  training.prepared->save_checkpoint(folder, "alone");
  fs::copy_file(folder / "alone" / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                folder / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", fs::copy_options::overwrite_existing);
  EXPECT_THAT(support::message_of<CheckpointError>([&] { training.prepared->load_checkpoint(folder, "tag"); }),
              HasSubstr("found the state of one of 1 ranks, expected of one of 2"));
}

// Whatever a file says: weights, or an error that names it.
TEST(ZeroCheckpoint, DamagedFilesAreNamed) {
  if (support::is_rank()) return;
  support::ReadDamaged files_of_theirs;
  for (const char* name : {"z2", "z3", "z0bf"})
    for (int trial = 0; trial < 150; ++trial) {
      const auto folder = support::scratch("damaged");
      fs::remove_all(folder);
      fs::copy(kTheirs / name / "global_step3", folder, fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
      std::sort(files.begin(), files.end());
      const auto& file = files[files_of_theirs.draw() % files.size()];
      support::write(file, files_of_theirs.damaged(support::text_of(file), 4000));
      files_of_theirs.look(folder);
    }
  EXPECT_GT(files_of_theirs.refused, 50U);
  EXPECT_GT(files_of_theirs.read, 10U) << "of bytes that say nothing";
}

// `latest` leads to no other folder.
RANKS_TEST(ZeroCheckpoint, LatestStaysInItsFolder, 1) {
  const auto folder = support::scratch("inside");
  fs::create_directories(folder / "checkpoints");
  fs::copy(kTheirs / "z2" / "global_step3", folder / "outside", fs::copy_options::recursive);
  std::ofstream(folder / "checkpoints" / "latest") << "../outside";
  Training training(config_of(2), {"--tie", "--freeze", "wpe"});
  for (const auto& load : std::vector<std::function<void()>>{
           [&] { training.prepared->load_checkpoint(folder / "checkpoints"); },
           [&] { training.prepared->load_checkpoint(folder / "checkpoints", "../outside"); },
           [&] { training.accelerator.load_state(folder / "checkpoints"); }})
    EXPECT_THAT(support::message_of<CheckpointError>(load), HasSubstr("outside"));
}

// The handles are not ZeRO's alone.
RANKS_TEST(ZeroHandles, WorkWithOtherEngines, 1, 2, 3) {
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded ? "FSDP" : "plain");
    support::reset_states();
    AcceleratorOptions options{.cpu = true};
    if (sharded) options.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2};
    Accelerator accelerator(options);
    PeerGpt model(support::PeerSizes{}, false);
    auto [m, opt] =
        accelerator.prepare(model, torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)));
    const auto ids = torch::ones({2, kTokens}, at::kLong);
    accelerator.backward(m(ids).square().mean());
    const auto gradient = safe_get_full_grad(model->head->weight);
    ASSERT_TRUE(gradient.defined());
    opt.step();
    EXPECT_TRUE(torch::allclose(safe_get_full_optimizer_state(model->head->weight, "momentum_buffer"), gradient));
    const auto value = at::arange(128, at::kFloat).view({16, 8});
    safe_set_full_fp32_param(model->head->weight, value);
    EXPECT_TRUE(at::equal(safe_get_full_fp32_param(model->head->weight), value));
    {
      GatheredParameters whole(model, /*modifier_rank=*/0);
      torch::NoGradGuard no_grad;
      if (accelerator.is_main_process()) model->head->weight.fill_(3);
    }
    EXPECT_TRUE(at::equal(safe_get_full_fp32_param(model->head->weight), torch::full({16, 8}, 3.0)));
  }
}

RANKS_TEST(ZeroHandles, GetAndSetWholeValues, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(store + ", stage " + std::to_string(stage));
      support::reset_states();
      Training training(config_of(stage, "bf16"));
      auto& weight = training.model->head->weight;
      EXPECT_FALSE(safe_get_full_optimizer_state(weight, "exp_avg").defined()) << "before the first step";
      EXPECT_FALSE(safe_get_full_grad(weight).defined());
      EXPECT_THAT(support::message_of<ConfigError>([&] {
                    safe_set_full_grad(weight, torch::ones({16, 8}));
                  }),
                  HasSubstr("head.weight"));
      training.steps(1);
      const auto value = at::arange(128, at::kFloat).view({16, 8}) / 1000;
      safe_set_full_fp32_param(weight, value);
      EXPECT_TRUE(at::equal(safe_get_full_fp32_param(weight), value)) << "more digits than bf16 has";
      safe_set_full_optimizer_state(weight, value * 2, "exp_avg_sq");
      EXPECT_TRUE(at::equal(safe_get_full_optimizer_state(weight, "exp_avg_sq"), value * 2));
      const auto ids = torch::ones({2, 4}, at::kLong);
      training.accelerator.backward((*training.prepared)(ids).to(at::kFloat).square().mean());
      const auto gradient = safe_get_full_grad(weight);
      EXPECT_GT(gradient.abs().sum().item<double>(), 0);
      safe_set_full_grad(weight, torch::zeros({16, 8}));
      EXPECT_EQ(safe_get_full_grad(weight).abs().sum().item<double>(), 0);
      EXPECT_THAT(support::message_of<ShapeError>([&] {
                    safe_set_full_fp32_param(weight, torch::ones({8, 16}));
                  }),
                  HasSubstr("[16, 8]"));
      EXPECT_THAT(support::message_of<ConfigError>([&] { safe_get_full_fp32_param(torch::ones({3})); }),
                  HasSubstr("no parameter"));
      training.optimizer->zero_grad();
      // One rank writes, all have it; without a modifier nothing stays.
      const int64_t modifier = support::world_size() - 1;
      {
        GatheredParameters whole({weight}, modifier);
        ASSERT_EQ(weight.sizes(), (std::vector<int64_t>{16, 8}));
        torch::NoGradGuard no_grad;
        if (training.accelerator.process_index() == modifier) weight.fill_(0.25);
      }
      EXPECT_TRUE(at::equal(safe_get_full_fp32_param(weight), torch::full({16, 8}, 0.25)));
    }
  });
}

// Student and teacher: settings by name, an Accelerator for each.
RANKS_TEST(ZeroPlugins, SeveralByName, 1, 2) {
  const auto plugin = [](int64_t stage, double rate) {
    json config = config_of(stage);
    config["optimizer"]["params"]["lr"] = rate;
    config.erase("scheduler");
    return plugin_of(config);
  };
  Accelerator student({.cpu = true, .deepspeed_plugins = {{"student", plugin(2, 0.25)}, {"teacher", plugin(3, 0.5)}}});
  EXPECT_EQ(std::get<int64_t>(*student.state().deepspeed_plugin().get_value("zero_optimization.stage")), 2);
  EXPECT_EQ(std::get<int64_t>(*get_active_deepspeed_plugin(student.state()).get_value("zero_optimization.stage")), 2);
  EXPECT_THAT(student.state().text(),
              HasSubstr("ds_config: {'gradient_clipping': 0.0, 'optimizer': {'params': {'lr': 0.25"));
  PeerGpt one(support::PeerSizes{}, false), two(support::PeerSizes{}, false);
  auto [m, opt] = student.prepare(one, DummyOptim(one->parameters()));
  Accelerator teacher;
  EXPECT_THAT(support::message_of<ConfigError>([&] { student.state().select_deepspeed_plugin("parent"); }),
              AllOf(HasSubstr("parent"), HasSubstr("student, teacher")));
  student.state().select_deepspeed_plugin("teacher");
  EXPECT_EQ(std::get<int64_t>(*teacher.state().deepspeed_plugin().get_value("zero_optimization.stage")), 3);
  EXPECT_EQ(std::get<int64_t>(*teacher.state().get_deepspeed_plugin("student").get_value("zero_optimization.stage")),
            2);
  auto [m2, opt2] = teacher.prepare(two, DummyOptim(two->parameters()));
  EXPECT_EQ(opt.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(opt2.param_groups()[0].options().get_lr(), 0.5);
  for (auto* pair : {&m, &m2}) {
    const bool is_teacher = pair == &m2;
    auto& accelerator = is_teacher ? teacher : student;
    accelerator.backward((*pair)(torch::ones({2, 4}, at::kLong)).square().mean());
    (is_teacher ? opt2 : opt).step();
  }
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                PeerGpt three(support::PeerSizes{}, false);
                student.prepare(three, DummyOptim(three->parameters()));
              }),
              HasSubstr("an Accelerator for each"));
}

// Ranks are laid out once; asked again, it is refused again.
RANKS_TEST(ZeroPlugins, StageZeroInAllOrInNone, 2) {
  json whole = config_of(0), split = config_of(3);
  Accelerator accelerator(
      {.cpu = true, .deepspeed_plugins = {{"whole", plugin_of(whole)}, {"split", plugin_of(split)}}});
  accelerator.state().select_deepspeed_plugin("split");
  PeerGpt model(support::PeerSizes{}, false);
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THAT(support::message_of<ConfigError>([&] { accelerator.prepare(model); }),
                AllOf(HasSubstr("'split' has stage 3"), HasSubstr("stage 0")));
  accelerator.state().select_deepspeed_plugin("whole");
  accelerator.prepare(model);
}

// Two machines without a common file system, of two ranks and of one.
RANKS_TEST(ZeroCheckpoint, EachMachineCanHaveWhatOneRankWritesForAll, 3) {
  const bool second = support::rank() == 2;
  ::setenv("LOCAL_RANK", second ? "0" : std::to_string(support::rank()).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", second ? "1" : "2", 1);
  const auto disks = fs::path(support::scratch_dir());
  for (const bool each : {true, false})
    for (const int64_t stage : {1, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + (each ? ", each" : ""));
      support::reset_states();
      Training training({{"zero_optimization", {{"stage", stage}}},
                         {"optimizer", {{"type", "Adam"}}},
                         {"checkpoint", {{"use_node_local_storage", each}}}});
      training.steps(2);
      const auto folder = std::to_string(stage) + (each ? " each" : " one");
      const auto disk = disks / (second ? "second" : "first") / folder;
      training.prepared->save_checkpoint(disk, "tag");
      training.accelerator.save_state(disk / "state");
      const auto here = [&](const fs::path& file) { return fs::exists(disk / file); };
      const bool has_alike = each || !second;
      for (const auto& at : {fs::path("."), fs::path("state")}) {
        EXPECT_EQ(here(at / "latest"), has_alike) << at;
        EXPECT_EQ(here(at / "zero_to_fp32.py"), has_alike) << at;
      }
      for (const auto& at : {fs::path("tag"), fs::path("state/pytorch_model")}) {
        const std::string own = "zero_pp_rank_" + std::to_string(support::rank()) + "_mp_rank_00_";
        EXPECT_TRUE(here(at / (own + "optim_states.pt"))) << at;
        EXPECT_EQ(here(at / "mp_rank_00_model_states.pt"), has_alike && stage == 1) << at;
        EXPECT_EQ(here(at / (own + "model_states.pt")), stage == 3) << at;
      }
      EXPECT_THAT(support::message_of<CheckpointError>([&] { training.prepared->load_checkpoint(disk, "tag"); }),
                  HasSubstr("_states.pt"))
          << "of the other machine";
      // All machines' files in one folder are a checkpoint.
      const auto together = disks / "together" / folder;
      if (support::rank() == 0) {
        fs::create_directories(together);
        for (const auto* machine : {"second", "first"})
          fs::copy(disks / machine / folder / "tag", together / "tag",
                   fs::copy_options::recursive | fs::copy_options::overwrite_existing);
      }
      training.accelerator.wait_for_everyone();
      const auto before = training.weights();
      training.steps(1);
      training.prepared->load_checkpoint(together, "tag");
      expect_same(training.weights(), before);
    }
}

// Files that the first save had, and the second has not, are none of the checkpoint.
RANKS_TEST(ZeroCheckpoint, ATagMayBeSavedAgainAtAnotherStage, 2) {
  const auto folder = support::scratch_dir();
  for (const int64_t stage : {1, 3, 0, 2}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    support::reset_states();
    const json config{{"zero_optimization", {{"stage", stage}}}, {"optimizer", {{"type", "Adam"}}}};
    Training training(config);
    training.steps(1);
    training.prepared->save_checkpoint(folder, "tag");
    const auto saved = training.weights();
    training.steps(1);
    training.prepared->load_checkpoint(folder, "tag");
    expect_same(training.weights(), saved);
  }
}
