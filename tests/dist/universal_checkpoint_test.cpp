/// Universal checkpoints: those of DeepSpeed's tool load here, and ours have the files of theirs; of whatever number of
/// ranks and stage they are made, training goes on with any other as if it had not been interrupted.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>

#include "accelerate/accelerate.hpp"
#include "accelerate/checkpoint/universal.hpp"
#include "accelerate/checkpoint/zero_to_fp32.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "zero_training.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using support::config_of;
using support::expect_same;
using support::kTheirs;
using support::text_of;
using support::Training;
using support::tree_of;
using support::write;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

namespace fs = std::filesystem;
using Tensors = std::map<std::string, at::Tensor>;

const json kTiedAndFrozen = {"--tie", "--freeze", "wpe"};

json universal_config(int64_t stage, const std::string& precision = "") {
  json config = config_of(stage, precision);
  config["checkpoint"]["load_universal"] = true;
  if (precision == "fp16") config["fp16"]["initial_scale_power"] = 8;  // another than that of what is loaded
  return config;
}

void run_shell(const std::string& command) { ASSERT_EQ(std::system(command.c_str()), 0) << command; }

/// The result of DeepSpeed's tool for one of its checkpoints, with `latest_universal`.
fs::path theirs_converted(const std::string& name) {
  const auto folder = support::scratch("theirs_" + name);
  if (support::is_rank() && support::rank() > 0) return folder;
  fs::create_directories(folder);
  run_shell("tar -xJf '" + (kTheirs / name / "universal.tar.xz").string() + "' -C '" + folder.string() + "'");
  return folder;
}

std::set<std::string> files_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) names.insert(entry.path().lexically_relative(folder).string());
  return names;
}

/// All that a step depends on.
struct State {
  Tensors weights, first, second;
  double scale = 1;
  Training::Curves next;
};
State state_of(Training& training) {
  const auto scaler = training.accelerator.scaler();
  return {training.weights(), training.moments(), training.moments("exp_avg_sq"), scaler ? scaler->get_scale() : 1, {}};
}
void save(const State& state, const fs::path& file) {
  const auto dict_of = [] { return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get()); };
  auto all = dict_of();
  for (const auto& [kind, tensors] :
       {std::pair{"weights", &state.weights}, {"first", &state.first}, {"second", &state.second}}) {
    auto dict = dict_of();
    for (const auto& [name, tensor] : *tensors)
      if (tensor.defined()) dict.insert(name, tensor);  // all steps may have been skipped
    all.insert(kind, dict);
  }
  all.insert("scale", torch::tensor(state.scale, at::kDouble));
  const auto& next = state.next;
  for (const auto& [kind, values] :
       {std::pair{"losses", &next.losses}, {"rates", &next.rates}, {"scales", &next.scales}})
    all.insert(kind, torch::tensor(*values, at::kDouble));
  checkpointing::save_object(all, file);
}
State load(const fs::path& file) {
  const auto all = checkpointing::load_object(file).toGenericDict();
  const auto tensors = [&](const char* key) {
    Tensors result;
    for (const auto& entry : all.at(key).toGenericDict()) result[entry.key().toStringRef()] = entry.value().toTensor();
    return result;
  };
  const auto numbers = [&](const char* key) {
    const auto values = all.at(key).toTensor();
    return std::vector<double>(values.data_ptr<double>(), values.data_ptr<double>() + values.numel());
  };
  auto weights = tensors("weights"), first = tensors("first"), second = tensors("second");
  for (const auto& [name, tensor] : weights) first.try_emplace(name), second.try_emplace(name);
  return {std::move(weights),
          std::move(first),
          std::move(second),
          all.at("scale").toTensor().item<double>(),
          {.losses = numbers("losses"), .rates = numbers("rates"), .scales = numbers("scales"), .skipped = {}}};
}

/// The live peer, where its Python is named: all of its stages load what was made here.
void deepspeed_loads(const fs::path& folder, const std::string& precision) {
  const char* const python = std::getenv("ACCELERATE_TEST_DEEPSPEED_PYTHON");
  if (!python) return;
  for (const int64_t stage : {1, 2, 3}) {
    SCOPED_TRACE(fmt::format("DeepSpeed's stage {}", stage));
    run_shell(fmt::format(
        "DS_ACCELERATOR=cpu PATH='{}':$PATH '{}' -m torch.distributed.run --nproc-per-node 3 --master-port {} "
        "'{}/tests/dist/universal_peer.py' '{}' '{}' {} {} > '{}' 2>&1 || {{ cat '{}'; exit 1; }}",
        fs::path(python).parent_path().string(), python, support::free_port(), ACCELERATE_SOURCE_DIR, folder.string(),
        (folder / "state.pt").string(), stage, precision, (folder / "log").string(), (folder / "log").string()));
  }
}

}  // namespace

// Saved by two ranks, converted, and loaded by others at other stages: masters, moments, rates and scales to the bit;
// and then the very steps that follow without the interruption.
TEST(Universal, TrainingGoesOnOnAnyNumberOfRanksAtAnyStage) {
  const std::string part = std::getenv("UNIVERSAL_PART") ? std::getenv("UNIVERSAL_PART") : "";
  const auto folder_of = [](int64_t stage, const std::string& precision) {
    return support::scratch(fmt::format("saved_{}_{}", stage, precision));
  };
  if (support::is_rank()) {
    for (const int64_t saved : {1, 2, 3})
      for (const std::string precision : {"", "bf16", "fp16"}) {
        if (saved == 1 && precision != "bf16") continue;
        SCOPED_TRACE(fmt::format("of stage {}, {}, {}", saved, precision, part));
        support::reset_states();
        const auto folder = folder_of(saved, precision);
        if (part == "save") {
          auto config = config_of(saved, precision);
          if (precision == "fp16") config["fp16"]["initial_scale_power"] = 10;  // with which no step is skipped
          Training training(config, kTiedAndFrozen);
          training.steps(3, 5, /*alike=*/true);
          training.prepared->save_checkpoint(folder, "tag", {{"epoch", 7}});
          auto state = state_of(training);
          state.next = training.steps(3, 77, /*alike=*/true);
          if (training.accelerator.is_main_process()) save(state, folder / "state.pt");
          continue;
        }
        const auto expected = load(folder / "state.pt");
        Training again(universal_config(std::stoll(part), precision), kTiedAndFrozen);
        again.steps(1, 9);  // other values than those that are loaded
        const auto loaded = again.prepared->load_checkpoint(folder);
        EXPECT_EQ(loaded.load_path, folder / "tag_universal");
        EXPECT_EQ(loaded.client_state.at("epoch").toInt(), 7);
        const auto state = state_of(again);
        expect_same(state.weights, expected.weights);
        expect_same(state.first, expected.first);
        expect_same(state.second, expected.second);
        EXPECT_TRUE(state.first.at("head.weight").defined());
        EXPECT_EQ(state.scale, expected.scale);
        const auto counts = again.optimizer->step_counts();
        EXPECT_EQ(counts.taken + counts.skipped, 3);
        const auto next = again.steps(3, 77, /*alike=*/true);
        EXPECT_EQ(next.rates, expected.next.rates);
        EXPECT_EQ(next.scales, expected.next.scales);
        for (size_t i = 0; i < next.losses.size(); ++i) {
          // Sums over another number of ranks round elsewhere.
          const bool same_sums = support::world_size() == 2 && std::to_string(saved) == part;
          if (same_sums) EXPECT_EQ(next.losses[i], expected.next.losses[i]) << i;
          else
            EXPECT_NEAR(next.losses[i], expected.next.losses[i],
                        (precision.empty() ? 1e-5 : 1e-2) * expected.next.losses[i])
                << i;
        }
      }
    return;
  }
  const auto ranks = [](int64_t count, const std::string& what) {
    support::expect_ranks_pass("Universal.TrainingGoesOnOnAnyNumberOfRanksAtAnyStage",
                               {.world_size = count, .env = {{"UNIVERSAL_PART", what}}});
  };
  ranks(2, "save");
  for (const int64_t stage : {1, 2, 3})
    for (const std::string precision : {"", "bf16", "fp16"})
      if (const auto folder = folder_of(stage, precision); fs::exists(folder / "tag")) {
        convert_zero_checkpoint_to_universal(folder / "tag", folder / "tag_universal");
        EXPECT_EQ(text_of(folder / "latest_universal"), "tag_universal");
        fs::remove_all(folder / "tag");  // so that it is the other one that is read
        deepspeed_loads(folder, precision.empty() ? "fp32" : precision);
      }
  ranks(3, "3");
  ranks(1, "1");
  ranks(1, "0");
  ranks(2, "2");
  ranks(2, "3");
}

// A result of DeepSpeed's tool, of stages 2 and 3, gives what its source gives, and training goes on as theirs did.
RANKS_TEST(Universal, TheirsLoadsHere, 1, 2, 3) {
  for (const std::string name : {"z2", "z3", "z3fp16"})
    for (const int64_t stage : {0, 2, 3}) {
      SCOPED_TRACE(fmt::format("{} into stage {}", name, stage));
      support::reset_states();
      const json expected = support::read_json(kTheirs / name / "expected.json");
      json config = expected["config"];
      config["zero_optimization"]["stage"] = stage;
      Training plain(config, expected["args"]);
      plain.prepared->load_checkpoint(kTheirs / name);
      const auto state = state_of(plain);
      const auto next = plain.steps(2, 5, true);
      support::reset_states();
      config["checkpoint"]["load_universal"] = true;
      Training training(config, expected["args"]);
      const auto folder = theirs_converted(name);
      // As of two ranks of tensor parallelism: the parameters are whole.
      if (const auto file = folder / "global_step3_universal" / "mp_rank_00_model_states.pt";
          training.accelerator.is_main_process() && fs::exists(file))
        fs::copy_file(file, file.parent_path() / "mp_rank_01_model_states.pt", fs::copy_options::skip_existing);
      training.accelerator.wait_for_everyone();
      training.prepared->load_checkpoint(folder);
      const auto own = state_of(training);
      expect_same(own.weights, state.weights);
      expect_same(own.first, state.first);
      expect_same(own.second, state.second);
      const auto curves = training.steps(2, 5, true);
      EXPECT_EQ(curves.losses, next.losses);
      EXPECT_EQ(curves.rates, next.rates);
      EXPECT_EQ(curves.scales, next.scales);
      EXPECT_EQ(curves.skipped, next.skipped);
    }
}

// save_state's folder, converted beside its model; without load_universal the one that was saved counts while it is
// there.
RANKS_TEST(Universal, LoadStateFindsThem, 1, 2) {
  const auto folder = support::scratch(fmt::format("state_{}", support::world_size()));
  State state;
  {
    Training training(config_of(2), kTiedAndFrozen);
    training.steps(2);
    training.accelerator.save_state(folder);
    state = state_of(training);
    state.next = training.steps(2, 77);
    training.accelerator.wait_for_everyone();
    if (training.accelerator.is_main_process())
      convert_zero_checkpoint_to_universal(folder, folder / "pytorch_model_universal");
    training.accelerator.wait_for_everyone();
  }
  for (const bool asked : {true, false}) {
    SCOPED_TRACE(asked);
    support::reset_states();
    Training training(asked ? universal_config(3) : config_of(3), kTiedAndFrozen);
    if (!asked) {  // found by itself, where there is no other
      if (training.accelerator.is_main_process())
        for (const char* name : {"pytorch_model", "latest", "checkpoint.json"}) fs::remove_all(folder / name);
      training.accelerator.wait_for_everyone();
    }
    training.accelerator.load_state(folder);
    const auto own = state_of(training);
    expect_same(own.weights, state.weights);
    expect_same(own.first, state.first);
    const auto next = training.steps(2, 77);
    EXPECT_EQ(next.rates, state.next.rates);
    for (size_t i = 0; i < next.losses.size(); ++i) EXPECT_NEAR(next.losses[i], state.next.losses[i], 1e-4) << i;
  }
}

// A folder that is not of this kind is an error where the configuration asks for one, and says what to do.
RANKS_TEST(Universal, OthersAreRefusedWhereOneIsAskedFor, 1, 2) {
  const auto folder = support::scratch(fmt::format("plain_{}", support::world_size()));
  Training training(universal_config(2), kTiedAndFrozen);
  training.steps(1);
  training.prepared->save_checkpoint(folder, "tag");
  training.accelerator.save_state(folder / "state");
  const auto weights = training.weights();
  const auto says = AllOf(HasSubstr("load_universal"), HasSubstr("accelerate ds-to-universal"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { training.prepared->load_checkpoint(folder, "tag"); }), says);
  EXPECT_THAT(support::message_of<CheckpointError>([&] { training.accelerator.load_state(folder / "state"); }), says);
  EXPECT_THAT(support::message_of<CheckpointError>([&] { training.prepared->load_checkpoint(folder); }),
              AllOf(HasSubstr("latest_universal"), HasSubstr("accelerate ds-to-universal")));
  expect_same(training.weights(), weights);
}

// Files that are missing or damaged are named, and nothing is changed.
RANKS_TEST(Universal, BrokenFoldersAreNamed, 2) {
  const auto folder = theirs_converted("z2");
  Training training(universal_config(2), kTiedAndFrozen);
  training.steps(1);
  const auto state = state_of(training);
  const auto broken = [&](const std::string& name, const std::function<void(const fs::path&)>& change) {
    const auto message = support::refusal_of_changed(training, folder, "global_step3_universal", name, change);
    expect_same(training.weights(), state.weights);
    expect_same(training.moments(), state.first);
    return message;
  };
  const auto parameter = fs::path("zero") / "ln_f.weight";
  for (const char* file : {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}) {
    EXPECT_THAT(broken(std::string("no_") + file, [&](const fs::path& at) { fs::remove(at / parameter / file); }),
                HasSubstr((parameter / file).string()));
    EXPECT_THAT(
        broken(std::string("cut_") + file, [&](const fs::path& at) { fs::resize_file(at / parameter / file, 700); }),
        HasSubstr((parameter / file).string()));
    EXPECT_THAT(broken(std::string("other_") + file,
                       [&](const fs::path& at) {
                         fs::copy_file(at / "zero" / "head.weight" / "fp32.pt", at / parameter / file,
                                       fs::copy_options::overwrite_existing);
                       }),
                AllOf(HasSubstr("ln_f.weight"), HasSubstr("[16, 8]")));
  }
  EXPECT_THAT(broken("no_folder", [&](const fs::path& at) { fs::remove_all(at / parameter); }),
              HasSubstr(parameter.string()));
  EXPECT_THAT(broken("no_common", [](const fs::path& at) { fs::remove(at / "zero" / "optimizer_state.pt"); }),
              HasSubstr("optimizer_state.pt"));
  EXPECT_THAT(broken("no_model", [](const fs::path& at) { fs::remove(at / "mp_rank_00_model_states.pt"); }),
              HasSubstr("model_states"));
  EXPECT_THAT(broken("no_tensor",
                     [&](const fs::path& at) {
                       fs::copy_file(at / parameter / "step.pt", at / parameter / "fp32.pt",
                                     fs::copy_options::overwrite_existing);
                     }),
              AllOf(HasSubstr("ln_f.weight"), HasSubstr("expected")));
}

// Whatever a file says: weights, or an error that names it.
TEST(Universal, DamagedFilesAreNamed) {
  if (support::is_rank()) return;
  support::ReadDamaged files_of_theirs;
  for (const std::string name : {"z2", "z3"}) {
    const auto folder = theirs_converted(name) / "global_step3_universal";
    std::vector<fs::path> files;
    for (const auto& file : files_in(folder)) files.push_back(folder / file);
    for (int trial = 0; trial < 100; ++trial) {
      const auto& file = files[files_of_theirs.draw() % files.size()];
      const auto before = text_of(file);
      write(file, files_of_theirs.damaged(before, 400));
      files_of_theirs.look(folder);
      write(file, before);
    }
  }
  EXPECT_GT(files_of_theirs.refused, 25U);
  EXPECT_GT(files_of_theirs.read, 25U) << "of bytes that say nothing";
}

// Our conversion of their checkpoint has the files, keys, kinds and values of their own.
TEST(Universal, OursHasTheFilesOfTheirs) {
  if (support::is_rank()) return;
  for (const std::string name : {"z2", "z3", "z3fp16"}) {
    SCOPED_TRACE(name);
    const auto theirs = theirs_converted(name) / "global_step3_universal";
    const auto ours = support::scratch("ours_" + name) / "global_step3_universal";
    convert_zero_checkpoint_to_universal(kTheirs / name, ours);
    const auto files = files_in(ours);
    for (const auto& file : files_in(theirs)) {
      SCOPED_TRACE(file);
      ASSERT_TRUE(files.contains(file));
      if (file.ends_with("model_states.pt")) {
        EXPECT_EQ(text_of(ours / file), text_of(theirs / file));
        continue;
      }
      const auto expected = tree_of(theirs / file), found = tree_of(ours / file);
      if (file.ends_with("optimizer_state.pt")) {
        for (const auto& [key, what] : expected)
          if (!key.starts_with("/optimizer_state_dict") && !key.starts_with("/fp32_flat_groups") &&
              key.find("zero_stage") == std::string::npos && !key.starts_with("/param_alignment_paddings")) {
            ASSERT_TRUE(found.contains(key)) << key;
            EXPECT_EQ(found.at(key), what) << key;
          }
        continue;
      }
      const auto tensor_in = [](const fs::path& path) {
        const auto value = checkpointing::load_object(path);
        return value.isTensor() ? value.toTensor() : value.toGenericDict().at("param").toTensor();
      };
      const auto one = tensor_in(ours / file), other = tensor_in(theirs / file);
      EXPECT_EQ(one.scalar_type(), other.scalar_type());
      // Theirs are flat at stage 3, and load there only.
      EXPECT_TRUE(at::equal(name == "z2" ? one : one.reshape(-1), other));
      if (name == "z2") EXPECT_EQ(found, expected);
    }
    for (const char* file : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"})
      EXPECT_TRUE(files.contains(file)) << "for DeepSpeed's stages below 3 and 3";
    const auto weights = get_fp32_state_dict_from_zero_checkpoint(kTheirs / name);
    expect_same(get_fp32_state_dict_from_zero_checkpoint(ours.parent_path()), weights);  // by latest_universal
    expect_same(get_fp32_state_dict_from_zero_checkpoint(theirs), weights);
    expect_same(get_fp32_state_dict_from_zero_checkpoint(theirs.parent_path(), "global_step3_universal"), weights);
    EXPECT_TRUE(is_zero_checkpoint(ours.parent_path()));
    EXPECT_EQ(get_fp32_state_dict_from_zero_checkpoint(theirs, "", /*exclude_frozen_parameters=*/true).size(),
              weights.size() - (name == "z3fp16" ? 0 : 1));  // wpe.weight, which is not trained in the others
  }
}

// It appears whole or not at all; what can't be converted is named.
TEST(Universal, AConversionIsWholeOrNotThere) {
  if (support::is_rank()) return;
  const auto folder = support::scratch("whole");
  fs::create_directories(folder);
  fs::copy(kTheirs / "z2", folder / "source", fs::copy_options::recursive);
  const auto out = folder / "out";
  const auto failure = [&](const fs::path& from, const fs::path& to) {
    return support::message_of<CheckpointError>([&] { convert_zero_checkpoint_to_universal(from, to); });
  };
  const auto nothing_written = [&] { return !fs::exists(out) && !fs::exists(folder / "latest_universal"); };
  EXPECT_THAT(failure(kTheirs / "z0", out), AllOf(HasSubstr("stage 0"), HasSubstr("stages 1 to 3")));
  EXPECT_TRUE(nothing_written());
  const auto file = folder / "source" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt";
  const auto bytes = text_of(file);
  fs::resize_file(file, fs::file_size(file) - 3000);
  EXPECT_THAT(failure(folder / "source", out), HasSubstr("zero_pp_rank_1_mp_rank_00_optim_states.pt"));
  EXPECT_TRUE(nothing_written());
  write(file, bytes);
  // A folder in the place of a file: what has been written by then goes.
  fs::create_directories(folder / "taken" / "file");
  EXPECT_THAT(failure(folder / "source", folder / "taken"), HasSubstr("expected a new or an empty folder"));
  fs::create_directories(out);
  convert_zero_checkpoint_to_universal(folder / "source" / "global_step3", out.string() + "/");
  EXPECT_EQ(text_of(folder / "latest_universal"), "out");
  EXPECT_FALSE(fs::exists(folder / ".out.unfinished"));
  EXPECT_THAT(failure(out, folder / "again"), HasSubstr("universal checkpoint already"));
  EXPECT_THAT(failure(folder / "source", out), HasSubstr("expected a new or an empty folder"));
  EXPECT_THAT(failure(folder, folder / "again"), HasSubstr("universal checkpoint already")) << "by latest_universal";
  write(folder / "source" / "latest", "another");
  convert_zero_checkpoint_to_universal(folder / "source", folder / "by_tag", {.tag = "global_step3"});
  EXPECT_EQ(files_in(folder / "by_tag"), files_in(out));
}

// A program's patterns of parameters for tensor parallelism are written beside them, as DeepSpeed's tool does.
RANKS_TEST(Universal, PatternsMarkParameters, 2) {
  const auto folder = support::scratch("patterns");
  const auto list = [](std::vector<std::string> items) {
    c10::impl::GenericList result(c10::AnyType::get());
    for (auto& item : items) result.push_back(std::move(item));
    return c10::IValue(result);
  };
  const auto info_of = [&](const std::vector<std::pair<std::string, c10::IValue>>& entries) {
    c10::impl::GenericDict info(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [key, value] : entries) info.insert(key, value);
    return c10::IValue(info);
  };
  Training training(config_of(1));
  training.steps(1);
  const std::vector<std::pair<std::string, c10::IValue>> patterns{
      {"tp_replicated_parameter_patterns", list({R"(blocks\.\d+\.ln_1)", R"(ln_f\.weight)"})},
      {"parameter_with_row_parallelism_patterns", list({R"(blocks\.\d+\.(proj|down)\.weight)"})},
      {"parameter_with_2_sub_params_cat_dim_0", list({R"(blocks\.0\.up)"})},
      {"vocabulary_parameter_patterns", list({R"(wte)", R"(head\.weight)"})},
      {"original_vocab_size", int64_t{13}}};
  training.prepared->save_checkpoint(folder, "tag", {{"universal_checkpoint_info", info_of(patterns)}});
  auto more = patterns;
  more.emplace_back("parameter_to_average_patterns", list({"nothing"}));
  training.prepared->save_checkpoint(folder, "unused", {{"universal_checkpoint_info", info_of(more)}});
  training.prepared->save_checkpoint(
      folder, "pieces",
      {{"universal_checkpoint_info", info_of({{"parameter_with_sub_params", list({"some description"})}})}});
  training.accelerator.wait_for_everyone();
  const auto weights = training.weights();
  if (training.accelerator.is_main_process()) {
    convert_zero_checkpoint_to_universal(folder / "tag", folder / "tag_universal");
    const auto keys = [&](const std::string& parameter, const char* file = "fp32.pt") {
      std::map<std::string, std::string> result;
      for (const auto& entry :
           checkpointing::load_object(folder / "tag_universal" / "zero" / parameter / file).toGenericDict())
        result[entry.key().toStringRef()] = entry.value().isTensor()
                                                ? fmt::format("{}", entry.value().toTensor().sizes())
                                            : entry.value().isBool() ? (entry.value().toBool() ? "True" : "False")
                                                                     : std::to_string(entry.value().toInt());
      return result;
    };
    using Keys = std::map<std::string, std::string>;
    EXPECT_EQ(keys("blocks.0.ln_1.weight"), (Keys{{"param", "[8]"}}));
    EXPECT_EQ(keys("blocks.0.proj.weight", "exp_avg.pt"), (Keys{{"param", "[8, 8]"}, {"cat_dim", "1"}}));
    EXPECT_EQ(keys("blocks.0.up.bias"), (Keys{{"param", "[32]"}, {"cat_dim", "0"}, {"param_n_sub_params", "2"}}));
    EXPECT_EQ(keys("wte.weight", "exp_avg_sq.pt"),
              (Keys{{"param", "[13, 8]"}, {"cat_dim", "0"}, {"vocab_tensor", "True"}}));
    EXPECT_EQ(keys("ln_f.bias"), (Keys{{"param", "[8]"}, {"cat_dim", "0"}}));
    EXPECT_THAT(support::message_of<CheckpointError>(
                    [&] { convert_zero_checkpoint_to_universal(folder / "unused", folder / "unused_universal"); }),
                AllOf(HasSubstr("'nothing'"), HasSubstr("--no_strict")));
    for (const char* name : {"unused_universal", ".unused_universal.unfinished"})
      EXPECT_FALSE(fs::exists(folder / name)) << name;
    convert_zero_checkpoint_to_universal(folder / "unused", folder / "unused_universal", {.strict = false});
    EXPECT_THAT(support::message_of<CheckpointError>(
                    [&] { convert_zero_checkpoint_to_universal(folder / "pieces", folder / "pieces_universal"); }),
                HasSubstr("parameter_with_sub_params"));
  }
  training.accelerator.wait_for_everyone();
  // The rows of the vocabulary that were left out come back as zeros, in weights and moments.
  training.steps(1);
  training.prepared->load_checkpoint(folder, "tag_universal");
  auto expected = weights;
  for (const char* name : {"wte.weight", "head.weight"})
    expected[name] = torch::cat({weights.at(name).narrow(0, 0, 13), torch::zeros({3, 8})});
  expect_same(training.weights(), expected);
  EXPECT_EQ(training.moments().at("head.weight").narrow(0, 13, 3).abs().max().item<double>(), 0);
}

// `accelerate ds-to-universal`, by the options that scripts for DeepSpeed's tool have.
RANKS_TEST(Universal, TheCommandTakesTheToolsOptions, 1) {
  const auto folder = support::scratch("command");
  Training training(config_of(1));
  training.steps(1);
  c10::impl::GenericDict info(c10::StringType::get(), c10::AnyType::get());
  c10::impl::GenericList unused(c10::AnyType::get());
  unused.push_back("nothing");
  info.insert("tp_replicated_parameter_patterns", unused);
  training.prepared->save_checkpoint(folder, "one", {{"universal_checkpoint_info", info}});
  training.prepared->save_checkpoint(folder, "two");
  const auto program = fs::read_symlink("/proc/self/exe").parent_path() / "accelerate";
  const auto log = folder / "log";
  const auto run = [&](const std::string& words) {
    const int status = std::system(fmt::format("cd '{}' && '{}' ds-to-universal {} > '{}' 2>&1", folder.string(),
                                               program.string(), words, log.string())
                                       .c_str());
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(run("--input_folder one --output_folder one_universal --num_extract_workers 4 --num_merge_workers=2 "
                "--keep_temp_folder --inject_missing_state"),
            65);
  EXPECT_THAT(text_of(log),
              AllOf(HasSubstr("--num_extract_workers: there is one pass"), HasSubstr("--num_merge_workers: "),
                    HasSubstr("--keep_temp_folder: "), HasSubstr("--inject_missing_state: "), HasSubstr("'nothing'")));
  EXPECT_FALSE(fs::exists(folder / "one_universal"));
  EXPECT_EQ(run("--input_folder one --output_folder one_universal --no_strict"), 0) << text_of(log);
  EXPECT_THAT(text_of(log), AllOf(HasSubstr("one_universal"), Not(HasSubstr("pass"))));
  EXPECT_EQ(text_of(folder / "latest_universal"), "one_universal");
  EXPECT_EQ(run(". two_universal"), 0) << text_of(log);  // by `latest`
  EXPECT_EQ(run(". again --tag one"), 65) << "whose patterns match nothing";
  EXPECT_EQ(run(". again --tag one --no_strict"), 0) << text_of(log);
  expect_same(get_fp32_state_dict_from_zero_checkpoint(folder, "again"), training.weights());
  EXPECT_EQ(run("two"), 64);
  EXPECT_THAT(text_of(log), HasSubstr("the output folder is missing"));
  EXPECT_EQ(run("two out --input_folder one"), 64);
  EXPECT_THAT(text_of(log), HasSubstr("expected the folder once"));
  EXPECT_EQ(run("two two_universal"), 65);
  EXPECT_THAT(text_of(log), HasSubstr("expected a new or an empty folder"));
  EXPECT_EQ(run("--help"), 0);
  EXPECT_THAT(text_of(log), AllOf(HasSubstr("INPUT_FOLDER OUTPUT_FOLDER"), HasSubstr("--num_extract_workers N")));
}

// Where some parameters had gradients and others none, each keeps its own count.
RANKS_TEST(Universal, ParametersWithoutStateStaySo, 1, 2) {
  const auto folder = support::scratch(fmt::format("some_{}", support::world_size()));
  const auto train = [](Training& training) {
    torch::manual_seed(3);
    const auto ids = torch::randint(0, 16, {2, 4}, at::kLong);
    training.accelerator.backward(training.model->wte(ids).square().mean());
    training.optimizer->step();
    training.optimizer->zero_grad();
  };
  std::map<std::string, at::Tensor> weights, moments;
  {
    json config = config_of(1);
    config.erase("scheduler");
    Training training(config);
    train(training);
    training.prepared->save_checkpoint(folder, "tag");
    weights = training.weights(), moments = training.moments();
    training.accelerator.wait_for_everyone();
    if (training.accelerator.is_main_process())
      convert_zero_checkpoint_to_universal(folder / "tag", folder / "tag_universal");
    training.accelerator.wait_for_everyone();
  }
  support::reset_states();
  json config = universal_config(1);
  config.erase("scheduler");
  Training again(config);
  again.prepared->load_checkpoint(folder);
  expect_same(again.weights(), weights);
  expect_same(again.moments(), moments);
}
