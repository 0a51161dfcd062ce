#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include <sys/resource.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tensors = std::map<std::string, at::Tensor>;
using support::scratch;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

template <class Call> std::string error_of(Call&& call) {
  try {
    call();
  } catch (const accelerate::CheckpointError& error) {
    return error.what();
  }
  return "no CheckpointError";
}

/// The tensors of safetensors_interop.py.
Tensors every_dtype() {
  Tensors tensors;
  const auto values = torch::arange(6).reshape({2, 3});
  const std::pair<const char*, at::ScalarType> dtypes[] = {{"bool", at::kBool},
                                                           {"uint8", at::kByte},
                                                           {"int8", at::kChar},
                                                           {"int16", at::kShort},
                                                           {"uint16", at::kUInt16},
                                                           {"int32", at::kInt},
                                                           {"uint32", at::kUInt32},
                                                           {"int64", at::kLong},
                                                           {"uint64", at::kUInt64},
                                                           {"float16", at::kHalf},
                                                           {"bfloat16", at::kBFloat16},
                                                           {"float32", at::kFloat},
                                                           {"float64", at::kDouble},
                                                           {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                           {"float8_e5m2", at::kFloat8_e5m2},
                                                           {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
                                                           {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
                                                           {"complex64", at::kComplexFloat}};
  for (const auto& [name, dtype] : dtypes) tensors[name] = values.to(dtype);
  tensors["f8_e8m0"] = values.to(at::kByte).view(at::kFloat8_e8m0fnu);
  tensors["f4"] = values.to(at::kByte).view(at::kFloat4_e2m1fn_x2);
  tensors["scalar"] = torch::tensor(7.5F);
  tensors["empty"] = torch::zeros({0, 4}, at::kHalf);
  tensors["na\"me \n\u00e9\u4e2d"] = torch::tensor({1, 2}, at::kShort);
  return tensors;
}

/// Compares bytes, since not every dtype has an equality kernel.
void expect_same(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, want] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    const auto& got = found.at(name);
    EXPECT_EQ(got.scalar_type(), want.scalar_type()) << name;
    EXPECT_EQ(got.sizes(), want.sizes()) << name;
    const auto packed = want.contiguous();
    if (packed.nbytes() == 0) continue;  // no address to compare at
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), packed.const_data_ptr(), packed.nbytes()), 0) << name;
  }
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const auto path = scratch("round.safetensors");
  accelerate::save_safetensors(path, every_dtype(), {{"format", "pt"}});
  expect_same(accelerate::load_safetensors(path), every_dtype());
  EXPECT_EQ(accelerate::SafetensorsFile(path).metadata().at("format"), "pt");
}

TEST(Safetensors, PythonReadsOurFile) {
  SKIP_WITHOUT_PYTHON();
  const auto path = scratch("ours.safetensors");
  accelerate::save_safetensors(path, every_dtype(), {{"format", "pt"}, {"note", "grüß"}});
  const auto result = support::run_python("tests/unit/safetensors_interop.py", {"check", path.string()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(Safetensors, WeReadPythonsFileAndWriteTheSameBytes) {
  SKIP_WITHOUT_PYTHON();
  const auto theirs = scratch("theirs.safetensors");
  const auto result = support::run_python("tests/unit/safetensors_interop.py", {"write", theirs.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  expect_same(accelerate::load_safetensors(theirs), every_dtype());
  const auto ours = scratch("same.safetensors");
  accelerate::save_safetensors(ours, every_dtype(), {{"format", "pt"}});
  EXPECT_EQ(read(ours), read(theirs));
}

TEST(Safetensors, LargeElementsComeFirstThenNames) {
  const auto path = scratch("order.safetensors");
  accelerate::save_safetensors(path, {{"z", torch::zeros(1, at::kDouble)},
                                      {"a", torch::zeros(3, at::kByte)},
                                      {"c", torch::zeros(2)},
                                      {"b", torch::zeros(2)}});
  const accelerate::SafetensorsFile file(path);
  EXPECT_THAT(file.names(), ElementsAre("z", "b", "c", "a"));
  EXPECT_EQ(file.info("c").dtype, "F32");
  EXPECT_THAT(file.info("c").shape, ElementsAre(2));
  EXPECT_EQ(file.info("c").begin, 16);
  EXPECT_EQ(file.info("c").end, 24);
}

TEST(Safetensors, TensorsPointIntoTheMappingAndOutliveTheFileObject) {
  const auto path = scratch("alive.safetensors");
  accelerate::save_safetensors(path, {{"a", torch::arange(4)}, {"b", torch::arange(4)}});
  at::Tensor a;
  {
    const accelerate::SafetensorsFile file(path);
    a = file.tensor("a");
    const auto b = file.tensor("b");
    EXPECT_EQ(static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr()), 32);
    EXPECT_EQ(file.tensor("a").const_data_ptr(), a.const_data_ptr());
  }
  fs::remove(path);
  EXPECT_TRUE(a.equal(torch::arange(4)));
}

TEST(Safetensors, WritingToATensorLeavesTheFileAlone) {
  const auto path = scratch("cow.safetensors");
  accelerate::save_safetensors(path, {{"a", torch::zeros(5000)}});
  const auto before = read(path);
  accelerate::SafetensorsFile(path).tensor("a").fill_(3);
  EXPECT_EQ(read(path), before);
}

TEST(Safetensors, AFileThatIsLargerThanMemoryIsOpenedAndTouchedInPlaces) {
  // A sparse file: 64 GiB in size, a few KiB on the disk. Only a page of each end of the tensor is read.
  const auto path = scratch("huge.safetensors");
  constexpr int64_t kElements = int64_t{1} << 34;
  auto header = "{\"big\":{\"dtype\":\"F32\",\"shape\":[" + std::to_string(kElements) + "],\"data_offsets\":[0," +
                std::to_string(kElements * 4) + "]}}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const auto length = static_cast<uint64_t>(header.size());
  write(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + header);
  fs::resize_file(path, 8 + header.size() + static_cast<uint64_t>(kElements) * 4);
  auto big = accelerate::SafetensorsFile(path).tensor("big");
  EXPECT_EQ(big[0].item<float>() + big[kElements - 1].item<float>(), 0.0F);
  big[kElements - 1] = 2.0F;
  EXPECT_EQ(big[kElements - 1].item<float>(), 2.0F);
  fs::remove(path);
}

TEST(Safetensors, MisalignedTensorsAreCopied) {
  const auto path = scratch("misaligned.safetensors");
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";  // the data starts at an odd byte
  const auto length = static_cast<uint64_t>(header.size());
  ASSERT_EQ(length % 4, 3U);
  const float value = 1.5F;
  write(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + header +
                  std::string(reinterpret_cast<const char*>(&value), sizeof value));
  EXPECT_EQ(accelerate::SafetensorsFile(path).tensor("a").item<float>(), 1.5F);
}

TEST(Safetensors, StridedAndConjugateViewsAreWrittenAsTheyRead) {
  const auto path = scratch("views.safetensors");
  const auto base = torch::arange(6, at::kFloat).reshape({2, 3});
  const auto complex = torch::complex(base, base + 1);
  accelerate::save_safetensors(path, {{"t", base.t()}, {"c", complex.conj()}});
  const auto found = accelerate::load_safetensors(path);
  EXPECT_TRUE(found.at("t").equal(base.t()));
  EXPECT_TRUE(found.at("c").equal(complex.conj()));
}

TEST(Safetensors, SharedMemoryIsRefusedByName) {
  const auto base = torch::zeros(8);
  const auto path = scratch("shared.safetensors");
  const auto save = [&](const Tensors& tensors) {
    return error_of([&] { accelerate::save_safetensors(path, tensors); });
  };
  EXPECT_THAT(save({{"tied.a", base}, {"tied.b", base}}),
              AllOf(HasSubstr("share memory"), HasSubstr("'tied.a' with 'tied.b'")));
  EXPECT_THAT(save({{"all", base}, {"inner", base.slice(0, 2, 3)}, {"last", base.slice(0, 6, 8)}}),
              AllOf(HasSubstr("'all' with 'inner'"), HasSubstr("'all' with 'last'")));
  EXPECT_FALSE(fs::exists(path)) << "a refused save must leave no file";
  // Halves of one storage do not overlap.
  accelerate::save_safetensors(path, {{"front", base.slice(0, 0, 4)}, {"back", base.slice(0, 4, 8)}});
  EXPECT_EQ(accelerate::load_safetensors(path).size(), 2U);
}

TEST(Safetensors, WhatTheFormatCannotHoldIsRefused) {
  const auto path = scratch("refused.safetensors");
  const auto save = [&](const std::string& name, const at::Tensor& tensor) {
    return error_of([&] { accelerate::save_safetensors(path, {{name, tensor}}); });
  };
  EXPECT_THAT(save("x", torch::zeros(2, at::kComplexDouble)), HasSubstr("the format has no name for"));
  EXPECT_THAT(save("x", torch::zeros(2, at::TensorOptions(at::kMeta))), HasSubstr("meta device"));
  EXPECT_THAT(save("x", torch::eye(2).to_sparse()), HasSubstr("sparse"));
  EXPECT_THAT(save("x", {}), HasSubstr("undefined"));
  EXPECT_THAT(save("__metadata__", torch::zeros(2)), HasSubstr("reserves for metadata"));
  EXPECT_THAT(save("\xff", torch::zeros(2)), HasSubstr("not valid UTF-8"));
  EXPECT_FALSE(fs::exists(path));
}

TEST(Safetensors, AFailedWriteLeavesTheOldFileAndNoTemporaryOne) {
  const auto folder = scratch("atomic");
  fs::create_directory(folder);
  const auto path = folder / "model.safetensors";
  accelerate::save_safetensors(path, {{"a", torch::ones(2)}});
  const auto before = read(path);
  // A folder of that name makes the rename, the last step, fail.
  const auto blocked = folder / "blocked.safetensors";
  fs::create_directories(blocked / "x");
  EXPECT_THAT(error_of([&] {
                accelerate::save_safetensors(blocked, {{"a", torch::zeros(2)}});
              }),
              HasSubstr("can't rename"));
  EXPECT_THAT(error_of([&] { accelerate::save_safetensors(folder / "nowhere" / "x.safetensors", {}); }),
              HasSubstr("can't create it"));
  EXPECT_EQ(read(path), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);
}

/// A limit on the size of files, which stands in for a full disk.
template <class F> void with_files_of_4096_bytes(F&& f) {
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  f();
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);
}

TEST(Safetensors, RunningOutOfSpaceMidWriteIsAResourceErrorAndKeepsTheOldFile) {
  const auto folder = scratch("full");
  fs::create_directory(folder);
  const auto path = folder / "model.safetensors";
  accelerate::save_safetensors(path, {{"a", torch::ones(2)}});
  const auto before = read(path);
  with_files_of_4096_bytes([&] {
    EXPECT_THROW(accelerate::save_safetensors(path, {{"a", torch::ones(5000)}}), accelerate::ResourceError);
  });
  EXPECT_EQ(read(path), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1) << "the temporary file must be gone";
}

/// The second file does not fit: the first one must not stand among those of the earlier save.
TEST(Safetensors, AModelInSeveralFilesThatDoesNotFitKeepsAllOldOnes) {
  const auto folder = scratch("shards");
  for (const bool safe : {true, false}) {
    fs::remove_all(folder);
    torch::nn::Sequential model(torch::nn::Linear(10, 30), torch::nn::Linear(10, 400));
    const auto save = [&] { accelerate::checkpointing::save_model(model.ptr(), folder, 17'000, safe); };
    const auto files = [&] {
      std::map<std::string, std::string> bytes;
      for (const auto& entry : fs::directory_iterator(folder)) bytes[entry.path().filename()] = read(entry.path());
      return bytes;
    };
    save();
    const auto before = files();
    ASSERT_EQ(before.size(), 4u);
    torch::nn::init::ones_(model->at<torch::nn::LinearImpl>(0).weight);
    with_files_of_4096_bytes([&] {
      EXPECT_THAT(support::message_of<accelerate::ResourceError>(save),
                  AllOf(HasSubstr("00002-of-00003"), HasSubstr("Free some space")));
    });
    EXPECT_TRUE(files() == before);
    save();
    const auto after = files();
    EXPECT_EQ(after.size(), before.size());
    EXPECT_FALSE(after == before);
    EXPECT_TRUE(accelerate::load_checkpoint_files(folder).at("0.weight").equal(torch::ones({30, 10})));
  }
}

TEST(Safetensors, AMissingTensorShowsTheNearestNames) {
  const auto path = scratch("names.safetensors");
  accelerate::save_safetensors(path, {{"bert.pooler.weight", torch::zeros(1)}});
  EXPECT_THAT(error_of([&] { accelerate::SafetensorsFile(path).tensor("pooler.weight"); }),
              AllOf(HasSubstr("no tensor 'pooler.weight'"), HasSubstr("Did you mean 'bert.pooler.weight'?")));
}

TEST(CheckpointFiles, OneFileOrShardsBehindAnIndex) {
  const auto folder = scratch("sharded");
  fs::create_directory(folder);
  const auto a = torch::arange(3);
  const auto b = torch::ones({2, 2});
  accelerate::save_safetensors(folder / "model-00001-of-00002.safetensors", {{"a", a}});
  accelerate::save_safetensors(folder / "model-00002-of-00002.safetensors", {{"b", b}});
  write(folder / "model.safetensors.index.json",
        R"({"metadata":{"total_size":40},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
        R"("b":"model-00002-of-00002.safetensors"}})");
  expect_same(accelerate::load_checkpoint_files(folder), {{"a", a}, {"b", b}});
  expect_same(accelerate::load_checkpoint_files(folder / "model.safetensors.index.json"), {{"a", a}, {"b", b}});
  write(folder / "index.json", R"({"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"})");
  expect_same(accelerate::load_checkpoint_files(folder / "index.json"), {{"a", a}, {"b", b}});
  accelerate::save_safetensors(folder / "model.safetensors", {{"whole", a}});
  expect_same(accelerate::load_checkpoint_files(folder), {{"whole", a}});
  expect_same(accelerate::load_checkpoint_files(folder / "model.safetensors"), {{"whole", a}});
}

TEST(CheckpointFiles, EachDamageOfAnIndexHasItsMessage) {
  const auto folder = scratch("bad_index");
  fs::create_directory(folder);
  accelerate::save_safetensors(folder / "shard.safetensors", {{"a", torch::zeros(1)}});
  const auto load = [&](const std::string& index) {
    write(folder / "model.safetensors.index.json", index);
    return error_of([&] { accelerate::load_checkpoint_files(folder); });
  };
  EXPECT_THAT(error_of([&] { accelerate::load_checkpoint_files(folder); }),
              HasSubstr("holds neither model.safetensors nor"));
  EXPECT_THAT(load("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(load("[]"), HasSubstr("no object \"weight_map\""));
  EXPECT_THAT(load(R"({"a":{"dtype":"float32"}})"), HasSubstr("is no such object itself"));
  EXPECT_THAT(load(R"({"weight_map":{"a":1}})"), HasSubstr("maps to 1, expected a file name"));
  EXPECT_THAT(load(R"({"weight_map":{"a":"../shard.safetensors"}})"), HasSubstr("not the plain name of a file"));
  EXPECT_THAT(load(R"({"weight_map":{"a":"other.safetensors"}})"),
              HasSubstr("the shard 'other.safetensors' is not there"));
  EXPECT_THAT(load(R"({"weight_map":{"b":"shard.safetensors"}})"),
              HasSubstr("should be in 'shard.safetensors', which lacks it"));
  fs::remove(folder / "model.safetensors.index.json");
  write(folder / "pytorch_model.bin", "x");
  EXPECT_THAT(error_of([&] { accelerate::open_checkpoint_files(folder); }),
              HasSubstr("pytorch_model.bin, which can't be mapped"));
  EXPECT_THAT(error_of([&] { accelerate::load_checkpoint_files(folder); }),
              HasSubstr("not an intact archive of torch.save"));
}

}  // namespace
