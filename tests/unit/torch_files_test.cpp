// Files that Python's torch.save and TorchScript wrote: what is in them, their weights, and what is said of damaged
// ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "stored_zip.hpp"

namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// The peer's model.
struct WordNetImpl : torch::nn::Module {
  WordNetImpl() : words(10, 4), norm(4), head(std::make_shared<torch::nn::Module>("HeadImpl")) {
    register_module("words", words);
    for (int i = 0; i < 2; ++i) body->push_back(torch::nn::Linear(4, 4));
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
    head->register_parameter("weight", words->weight);
  }
  torch::nn::Embedding words;
  torch::nn::ModuleList body;
  torch::nn::BatchNorm1d norm;
  std::shared_ptr<torch::nn::Module> head;
};
TORCH_MODULE(WordNet);

class TorchFiles : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_PYTHON();
    folder = fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder);
    const auto peer = support::run_python("tests/unit/torch_files_peer.py", {folder.string()});
    ASSERT_EQ(peer.exit_code, 0) << peer.output;
  }
  fs::path folder;
};

TEST_F(TorchFiles, OfBothFormsLoadAndAreUsedWhereTheyLie) {
  const auto expected = accelerate::load_safetensors(folder / "model.safetensors");
  for (const char* name : {"zip.bin", "stream.bin", "half.bin"})
    for (const bool on_disk : {false, true}) {
      SCOPED_TRACE(std::string(name) + (on_disk ? " on disk" : ""));
      auto net = [] {
        const auto empty = accelerate::init_empty_weights();
        return WordNet();
      }();
      std::optional<accelerate::Dispatched<WordNet>> dispatched;
      if (on_disk)
        dispatched = accelerate::load_checkpoint_and_dispatch(
            net, folder / name, {.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload = {.always_read = true}});
      else accelerate::load_checkpoint_in_model(net, folder / name);
      for (const auto& [key, tensor] : accelerate::ModelRef(net.ptr()).state()) {
        const at::Tensor& saved = expected.at(key == "head.weight" ? "words.weight" : key);
        EXPECT_TRUE(torch::equal(
            std::string(name) == "half.bin" && tensor.is_floating_point() ? saved.to(at::kHalf).to(at::kFloat) : saved,
            tensor.clone()))
            << key;
      }
    }
  const auto views = std::make_shared<accelerate::formats::InputFile>(folder / "views.bin");
  const auto value = accelerate::formats::TorchArchive(views, 0, views->size(), "views").value().toGenericDict();
  EXPECT_TRUE(torch::equal(value.at("part").toTensor(), torch::arange(12.0).reshape({3, 4}).slice(1, 1, 3)));
  EXPECT_EQ(value.at("whole").toTensor().numel(), 0);
}

/// Without LibTorch, from the pickle alone: what loading the module and describing it gives.
TEST_F(TorchFiles, AreDescribedWithoutLoadingThem) {
  for (const char* name : {"script.pt", "trace.pt"}) {
    SCOPED_TRACE(name);
    const auto found = accelerate::find_model((folder / name).string());
    const auto module = torch::jit::load((folder / name).string());
    const auto tree = accelerate::describe(module);
    EXPECT_EQ(found.tree.class_name, tree.class_name);
    std::map<std::string, double> ours, theirs;
    for (const auto& [key, bytes] : accelerate::compute_module_sizes(found.tree).entries()) ours[key] = bytes;
    for (const auto& [key, bytes] : accelerate::compute_module_sizes(module).entries()) theirs[key] = bytes;
    EXPECT_EQ(ours, theirs);
    EXPECT_THAT(accelerate::find_tied_parameters(found.tree), ElementsAre(ElementsAre("head.weight", "words.weight")));
    EXPECT_EQ(accelerate::calculate_maximum_sizes(found.tree).largest_layer.names,
              accelerate::calculate_maximum_sizes(module).largest_layer.names);
  }

  // Tensors by name.
  const auto expected =
      accelerate::compute_module_sizes(accelerate::find_model((folder / "model.safetensors").string()).tree)[""];
  for (const char* name : {"zip.bin", "stream.bin"})
    EXPECT_EQ(accelerate::compute_module_sizes(accelerate::find_model((folder / name).string()).tree)[""], expected)
        << name;
  EXPECT_EQ(accelerate::compute_module_sizes(accelerate::find_model((folder / "half.bin").string()).tree)[""],
            expected + 10 * 4 * 4)
      << "in fp32, and converting has untied the head";
  // Shards, in each of which storages are counted from 0.
  for (const char* shard : {"a.bin", "b.bin"}) fs::copy_file(folder / "zip.bin", folder / shard);
  std::ofstream(folder / "pytorch_model.bin.index.json")
      << R"({"weight_map": {"words.weight": "a.bin", "norm.weight": "b.bin"}})";
  EXPECT_EQ(accelerate::compute_module_sizes(
                accelerate::find_model((folder / "pytorch_model.bin.index.json").string()).tree)[""],
            2 * expected);
  const auto error = [&](const char* name) {
    return support::message_of<accelerate::CheckpointError>([&] { accelerate::find_model((folder / name).string()); });
  };
  EXPECT_THAT(error("nested.bin"), HasSubstr("under 'model' is a dict, expected a tensor"));
  EXPECT_THAT(error("module.bin"),
              HasSubstr("it holds an object, expected tensors by their names or a TorchScript module"));
  WordNet net;
  const auto loading = [&](const char* name) {
    return support::message_of<accelerate::CheckpointError>(
        [&] { accelerate::load_checkpoint_in_model(net, folder / name); });
  };
  EXPECT_THAT(loading("script.pt"),
              AllOf(HasSubstr("it is a TorchScript module"), HasSubstr("by torch::load(model, path), before prepare()"),
                    HasSubstr("torch::jit::load()")));
  EXPECT_THAT(loading("module.bin"), HasSubstr("Python code in files is never executed here"));
}

/// The tensors of one file, as a folder has it.
std::map<std::string, at::Tensor> tensors_of(const fs::path& file) {
  const auto folder = file.parent_path() / "folder";
  fs::create_directories(folder);
  fs::copy_file(file, folder / "pytorch_model.bin", fs::copy_options::overwrite_existing);
  return accelerate::load_checkpoint_files(folder);
}

TEST_F(TorchFiles, ExpandedTensorsAndThoseOfOldVersionsLoad) {
  const auto expected = accelerate::load_safetensors(folder / "expanded.safetensors");
  ASSERT_EQ(expected.size(), 3u);
  struct Net : torch::nn::Module {
    explicit Net(const std::map<std::string, at::Tensor>& like) {
      for (const auto& [name, tensor] : like) register_parameter(name, torch::zeros_like(tensor));
    }
  };
  for (const char* name : {"expanded.bin", "expanded-stream.bin"}) {
    for (const auto& [tensor, value] : tensors_of(folder / name))
      EXPECT_TRUE(value.equal(expected.at(tensor))) << tensor;
    const auto net = std::make_shared<Net>(expected);
    accelerate::load_checkpoint_in_model(net, folder / name);
    for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().equal(expected.at(item.key()))) << name;
    EXPECT_EQ(accelerate::find_model((folder / name).string()).tree.numel(), 6 + 6 + 12) << name;
  }
  for (const char* name : {"old.bin", "python2.bin"}) {
    const auto of_old = tensors_of(folder / name);
    ASSERT_EQ(of_old.size(), 2u) << name;
    for (const auto& key : {std::string("weight"), std::string(300, 'w')})
      EXPECT_TRUE(of_old.at(key).equal(torch::arange(6.0).view({2, 3}))) << name;
  }
}

// As torch.save({0: tensor, 11: tensor}) has them: a dict by place.
TEST_F(TorchFiles, WholeNumbersAreNames) {
  struct Net : torch::nn::Module {
    Net() : first(register_parameter("0", torch::zeros({2}))), last(register_parameter("11", torch::ones({3}))) {}
    torch::Tensor first, last;
  };
  const auto net = std::make_shared<Net>();
  accelerate::load_checkpoint_in_model(net, folder / "numbered.bin");
  EXPECT_TRUE(net->first.equal(torch::ones({2})));
  EXPECT_TRUE(net->last.equal(torch::zeros({3})));
  const auto tensors = tensors_of(folder / "numbered.bin");
  EXPECT_EQ(tensors.size(), 2u);
  EXPECT_TRUE(tensors.at("11").equal(torch::zeros({3})));
  EXPECT_EQ(accelerate::find_model((folder / "numbered.bin").string()).tree.numel(), 5);
}

TEST_F(TorchFiles, WhatTheyDoNotHoldIsNamed) {
  const auto error = [&](const char* name) {
    return support::message_of<accelerate::CheckpointError>([&] { tensors_of(folder / name); });
  };
  EXPECT_THAT(error("too-much.bin"),
              AllOf(HasSubstr("an expanded tensor of size [16384, 4096]"), HasSubstr("contiguous()")));
  const auto error_of_loading = [&](const char* name) {
    return support::message_of<accelerate::CheckpointError>(
        [&] { accelerate::load_checkpoint_in_model(torch::nn::Linear(2, 2), folder / name); });
  };
  for (const auto& text : {error("fractions.bin"), error_of_loading("fractions.bin")})
    EXPECT_THAT(text, HasSubstr("a dict whose keys are of the kind Double, not names"));
  for (const auto& text :
       {error("twice.bin"), error_of_loading("twice.bin"), support::message_of<accelerate::CheckpointError>([&] {
          accelerate::find_model((folder / "twice.bin").string());
        })})
    EXPECT_THAT(text, HasSubstr("the key 0 as a number and as the text '0'"));
  for (const char* name : {"conjugated.bin", "conjugated-stream.bin", "negated.bin"})
    for (const auto& text : {error(name), error_of_loading(name)})
      EXPECT_THAT(text, HasSubstr("a negated or conjugated view")) << name;
}

/// `git clone` leaves these where Git LFS is not installed.
TEST(GitLfs, PointersInThePlaceOfFilesAreNamed) {
  const auto folder = fs::path(support::scratch_dir());
  const auto pointer = [&](const char* name) {
    std::ofstream(folder / name) << "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n";
    return folder / name;
  };
  const auto error = [](const auto& read) { return support::message_of<accelerate::CheckpointError>(read); };
  const auto named = AllOf(HasSubstr("it is a pointer of Git LFS"), HasSubstr("git lfs pull"));
  const auto bin = pointer("pytorch_model.bin");
  EXPECT_THAT(error([&] { accelerate::load_checkpoint_files(folder); }), named);
  EXPECT_THAT(error([&] { accelerate::find_model(bin.string()); }), named);
  const auto safetensors = pointer("model.safetensors");
  EXPECT_THAT(error([&] { accelerate::load_safetensors(safetensors); }), named);
  EXPECT_THAT(error([&] { accelerate::SafetensorsFile file(safetensors); }), named);
  EXPECT_THAT(error([&] { accelerate::find_model(safetensors.string()); }), named);
  EXPECT_THAT(error([&] { accelerate::load_checkpoint_in_model(torch::nn::Linear(2, 2), safetensors); }), named);
  EXPECT_THAT(error([&] { accelerate::GgufFile file(pointer("model.gguf")); }), named);
  EXPECT_THAT(error([&] { accelerate::find_model(pointer("config.json").string()); }), named);
}

/// Each file cut at many places, and with single bytes changed: an error that names it, or other numbers; nothing is
/// loaded then, and nothing crashes.
TEST_F(TorchFiles, DamageIsFound) {
  for (const char* name : {"zip.bin", "stream.bin", "model.safetensors"}) {
    std::ifstream stream(folder / name, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    const auto damaged = folder / (std::string("damaged-") + name);
    const auto try_it = [&](const std::string& content) -> std::string {
      std::ofstream(damaged, std::ios::binary) << content;
      auto net = [] {
        const auto empty = accelerate::init_empty_weights();
        return WordNet();
      }();
      try {
        accelerate::load_checkpoint_in_model(net, damaged);
      } catch (const accelerate::CheckpointError& error) {
        EXPECT_TRUE(accelerate::is_deferred(net->words->weight)) << error.what();
        return error.what();
      }
      return "";
    };
    ASSERT_EQ(try_it(bytes), "") << name;
    for (size_t i = 0; i < 60; ++i) {
      const size_t size = bytes.size() * i / 60;
      EXPECT_THAT(try_it(bytes.substr(0, size)), HasSubstr("damaged-"))
          << name << " cut to " << size << " of " << bytes.size() << " bytes";
    }
    EXPECT_THAT(
        try_it(bytes.substr(0, bytes.size() - 1)),
        AllOf(HasSubstr("damaged-"), testing::AnyOf(HasSubstr("truncated"), HasSubstr("damaged or of another save"))));
    for (size_t i = 0; i < bytes.size(); i += 13) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ (i % 2 ? 0x80 : 0xff));
      try_it(changed);
    }
  }
}

std::string text(const std::string& value) {
  std::string bytes = "X";
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value.size() >> (8 * i) & 255);
  return bytes + value;
}

std::string number(int64_t value) {
  std::string bytes = "\x8a\x08";
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i) & 255);
  return bytes;
}

/// So many elements of a storage, from one on, under a name.
std::string view(const std::string& name, const std::string& storage, int64_t first, int64_t count) {
  return text(name) + "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nFloatStorage\n" +
         text(storage) + text("cpu") + number(4) + "tQ" + number(first) + number(count) + "\x85" + number(1) + "\x85" +
         "\x89" + "ccollections\nOrderedDict\n)RtR";
}

TEST(TorchArchives, TensorsShareTheirStorageAsInPython) {
  constexpr int64_t kElements = 1 << 18;
  std::string pickle = "\x80\x02}(", bytes(kElements * 4, '\0');
  const float values[] = {1, 2, 3};
  std::memcpy(bytes.data(), values, sizeof values);
  for (int i = 0; i < 1000; ++i) pickle += view("w" + std::to_string(i), "0", i, kElements - i);
  const auto path = fs::path(support::scratch_dir()) / "pytorch_model.bin";
  std::ofstream(path, std::ios::binary) << support::stored_zip({{"m/data.pkl", pickle + "u."}, {"m/data/0", bytes}});
  const auto weights = accelerate::load_checkpoint_files(path.parent_path());
  ASSERT_EQ(weights.size(), 1000u);
  EXPECT_EQ(weights.at("w0").numel(), kElements);
  for (const auto& [name, tensor] : weights)
    EXPECT_EQ(tensor.storage().data(), weights.at("w0").storage().data()) << "else a file of 1 MB takes 1 GB";
  EXPECT_EQ(weights.at("w2")[0].item<float>(), 3);
  const auto dict = accelerate::checkpointing::load_object(path).toGenericDict();
  EXPECT_EQ(dict.at("w1").toTensor()[0].item<float>(), 2);

  // Names of storages that are one place of the file: its bytes are read once, and no more than there are.
  std::string other = "\x80\x02}(" + view("a", "0", 0, kElements) + view("b", "1", 0, kElements) + "u.";
  auto file = support::stored_zip({{"m/data.pkl", other}, {"m/data/0", bytes}, {"m/data/1", "xxxx"}});
  const auto entry = file.rfind("PK\1\2"), before = file.rfind("PK\1\2", entry - 1);
  file.replace(entry + 20, 8, file.substr(before + 20, 8)).replace(entry + 42, 4, file.substr(before + 42, 4));
  std::ofstream(path, std::ios::binary) << file;
  const auto same = accelerate::load_checkpoint_files(path.parent_path());
  EXPECT_EQ(same.at("a").data_ptr(), same.at("b").data_ptr());
}

/// torch's own reader recursed as deep as the file said.
TEST(TorchArchives, ObjectsAreReadByTheSameReader) {
  const auto error = [](const std::vector<std::pair<std::string, std::string>>& records) {
    const auto path = fs::path(support::scratch_dir()) / "object.pkl";
    std::ofstream(path, std::ios::binary) << support::stored_zip(records);
    return support::message_of<accelerate::CheckpointError>([&] { accelerate::checkpointing::load_object(path); });
  };
  std::string deep, closing;
  for (int i = 0; i < 100'000; ++i) deep += "]", closing += "a";
  EXPECT_THAT(error({{"m/data.pkl", "\x80\x02" + deep + "N" + closing + "."}}),
              AllOf(HasSubstr("object.pkl"), HasSubstr("nested deeper than 100 levels")));
  EXPECT_THAT(error({{"m/data.pkl", "\x80\x02N."}, {"m/byteorder", "big"}}), HasSubstr("'big'-endian"));
  EXPECT_THAT(error({{"m/data.pkl",
                      "\x80\x02"
                      "cos\nsystem\n" +
                          text("true") + "\x85R."}}),
              HasSubstr("never executed here"));
  EXPECT_THAT(error({{"m/data.pkl", "\x80\x02](" + std::string(30 << 20, 'N') + "e."}}),
              HasSubstr("more values than a file of its length can mean"));
  EXPECT_THAT(error({{"m/data.pkl", "\x80\x02](" + std::string(3 << 20, ']') + "e."}}),
              HasSubstr("which is more than a file of its length can mean"));
}

/// A few bytes whose values use each other again and again: an error, whether they are many or long.
/// All that a value of TorchScript says of itself.
std::string words(const c10::IValue& value) {
  std::ostringstream text;
  text << *value.type() << " = " << value;
  return text.str();
}

TEST(RegisteredObjects, ValuesOfTorchScriptComeBackWithTheirTypes) {
  using Object = std::pair<std::vector<int>, std::vector<c10::IValue>>;
  const auto numbers = torch::arange(6, torch::kFloat).view({2, 3});
  c10::Dict<std::string, c10::List<int64_t>> dict;
  dict.insert("a", c10::List<int64_t>({1, 300, 70000, -1, int64_t{1} << 40}));
  dict.insert("b", c10::List<int64_t>());
  c10::List<c10::optional<int64_t>> optional;
  optional.push_back(3), optional.push_back(c10::nullopt);
  c10::impl::GenericDict any(c10::IntType::get(), c10::AnyType::get());
  any.insert(3, "x"), any.insert(4, c10::IValue(dict)), any.insert(5, numbers);
  Object object{{1, 2},
                {c10::IValue(), true, int64_t{-7}, 0.5, "text", c10::complex<double>(1, -2), c10::Device("cuda:1"),
                 c10::List<double>({0.25}), c10::List<bool>({true, false}), c10::List<at::Tensor>({numbers, numbers}),
                 c10::List<std::string>({"a", "b", "a"}), dict, any, optional,
                 c10::ivalue::Tuple::create({1, "x", numbers.t(), numbers.select(0, 1), c10::IValue(dict)})}};
  for (const auto dtype : {torch::kBool, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kComplexDouble,
                           torch::kComplexHalf, torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kFloat8_e4m3fn,
                           torch::kFloat8_e5m2, torch::kFloat8_e4m3fnuz, torch::kFloat8_e5m2fnuz})
    object.second.emplace_back(numbers.to(dtype));
  const auto path = fs::path(support::scratch_dir()) / "object";
  accelerate::checkpointing::save_object(accelerate::checkpointing::custom_object(object).state_dict(), path);
  Object read;
  accelerate::checkpointing::custom_object(read).load_state_dict(accelerate::checkpointing::load_object(path));
  EXPECT_EQ(read.first, object.first);
  ASSERT_EQ(read.second.size(), object.second.size());
  for (size_t i = 0; i < read.second.size(); ++i) {
    const auto &value = read.second[i], &expected = object.second[i];
    EXPECT_EQ(*value.type(), *expected.type()) << i;
    if (!value.isTensor()) EXPECT_EQ(words(value), words(expected)) << i;
    else EXPECT_EQ(words(value.toTensor().view(torch::kByte)), words(expected.toTensor().view(torch::kByte))) << i;
  }
  EXPECT_EQ(read.second[11].toGenericDict().at("a").toIntVector().back(), int64_t{1} << 40);
}

TEST(RegisteredObjects, SayWhyTheyCanNotBeSavedOrLoaded) {
  using accelerate::CheckpointError;
  std::vector<c10::IValue> object{torch::eye(2).to_sparse()};
  const auto custom = accelerate::checkpointing::custom_object(object);
  EXPECT_THAT(support::message_of<CheckpointError>([&] { custom.state_dict(); }),
              AllOf(HasSubstr("sparse"), HasSubstr("to_dense()")));
  object = {3};
  EXPECT_THAT(support::message_of<CheckpointError>([&] {
                custom.load_state_dict(accelerate::checkpointing::bytes_as_object(accelerate::to_bytes(true)));
              }),
              HasSubstr("not what this program registers"));
  EXPECT_EQ(object[0].toInt(), 3) << "a load that failed leaves the object as it was";
  // LibTorch believes what a pickle says of the types in a list.
  const auto loading = [&](const std::string& pickle) {
    const auto archive = support::stored_zip({{"m/data.pkl", "\x80\x02" + pickle + "."}});
    const auto bytes = accelerate::to_bytes(int64_t{1}) + accelerate::to_bytes(archive);
    return support::message_of<CheckpointError>(
        [&] { custom.load_state_dict(accelerate::checkpointing::bytes_as_object(bytes)); });
  };
  const auto call = [](const std::string& name, const std::string& arguments) {
    return "ctorch.jit._pickle\n" + name + "\n(" + arguments + "tR";
  };
  EXPECT_THAT(loading(call("build_intlist", "](" + text("x") + "e")), HasSubstr("said to be 'List[int]', which it is"));
  EXPECT_THAT(loading(call("restore_type_tag", "}" + text("k") + "K\1s" + text("Dict[str, Tensor]"))),
              HasSubstr("said to be 'Dict[str, Tensor]', which it is not"));
  EXPECT_THAT(loading(call("restore_type_tag", "]" + text("List[__torch__.A]"))), HasSubstr("which it is not"));
  EXPECT_THAT(loading("N" + std::string(50'000, '\x85')), HasSubstr("nested deeper than 100 levels"));
}

TEST(TorchArchives, DoNotGrowWithoutLimit) {
  const auto error = [](const std::string& pickle) {
    const auto path = fs::path(support::scratch_dir()) / "values.pt";
    std::ofstream(path, std::ios::binary) << support::stored_zip({{"m/data.pkl", "\x80\x02" + pickle + "."}});
    const auto file = std::make_shared<accelerate::formats::InputFile>(path);
    return support::message_of<accelerate::CheckpointError>(
        [&] { accelerate::formats::TorchArchive(file, 0, file->size(), "values").value(); });
  };
  std::string doubling = "]q\1";
  doubling[2] = 0;
  for (char i = 1; i < 60; ++i)
    doubling += std::string("0]") + "h" + std::string(1, i - 1) + "a" + "h" + std::string(1, i - 1) + "a" + "q" + i;
  EXPECT_THAT(error(doubling), HasSubstr("describes more values than a file of its length can mean"));
  std::string long_texts = "](X" + std::string("\0\0\x40\0", 4) + std::string(4 << 20, 't') + std::string("q\0", 2);
  for (int i = 0; i < 100'000; ++i) long_texts += std::string("h\0", 2);
  EXPECT_THAT(error(long_texts + "e"), HasSubstr("describes more values than a file of its length can mean"));
  std::string deep, closing;
  for (int i = 0; i < 100'000; ++i) deep += "]", closing += "a";
  EXPECT_THAT(error(deep + "N" + closing), HasSubstr("nested deeper than 100 levels"));
}

}  // namespace
