/// Parameters that live in safetensors files: one test per arrow of the state table, training bit-equal to plain, and
/// what happens when the disk goes wrong.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "no_io_uring.hpp"
#include "ranks.hpp"
#include "residency/counters.hpp"
#include "residency/homes/file.hpp"
#include "residency_support.hpp"

namespace {

using namespace residency_test;
namespace counts = accelerate::counts;
using residency::FileOptions;
using residency::FileTensors;
using residency::Policy;
using residency::Residency;
using residency::ResidencyCount;
using residency::State;
using residency::Unit;
using testing::HasSubstr;
namespace fs = std::filesystem;
namespace nn = torch::nn;

enum class Way { read, mapped };

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class FileHome : public testing::Test {
 protected:
  FileHome() {
    fs::create_directories(folder);
    fs::create_directories(folder / "scratch");
  }
  ~FileHome() override { residency::set_paranoid(false); }

  /// Sizes that fill no block of the disk, so that begins and ends are crooked.
  std::map<std::string, at::Tensor> three() {
    torch::manual_seed(0);
    return {{"a", torch::randn({1001})}, {"b", torch::randn({3, 700})}, {"c", torch::randn({7})}};
  }
  FileTensors files(const FileOptions& options = {}) {
    FileOptions with_scratch = options;
    if (with_scratch.scratch.empty()) with_scratch.scratch = folder / "scratch";
    return FileTensors(folder / "model.safetensors", worker, with_scratch);
  }
  const fs::path folder =
      fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
  std::shared_ptr<residency::Worker> worker = std::make_shared<residency::Worker>();
};

/// Units a, b, c of one parameter each, whose values at first are not those of the file.
struct FromFile {
  FromFile(const FileTensors& files, const std::map<std::string, at::Tensor>& values, const Policy& policy,
           Way way = Way::read)
      : engine(policy), expected(values) {
    for (const auto& [name, value] : values) {
      tensors[name] = torch::zeros_like(value).requires_grad_();
      const NamedTensors members = {{name, tensors[name]}};
      units[name] = &engine.add(name, way == Way::mapped ? files.mapped(members) : files.read(members));
    }
  }
  bool right(const std::string& name) { return torch::equal(tensors[name], expected.at(name)); }
  Residency engine;
  std::map<std::string, at::Tensor> expected, tensors;
  std::map<std::string, Unit*> units;
};

TEST_F(FileHome, AnAbsentUnitIsReadByATouch) {
  for (const bool direct : {true, false}) {
    accelerate::save_safetensors(folder / "model.safetensors", three());
    FromFile t(files({.direct = direct}), three(), {.prefetch = 0});
    for (const char* name : {"c", "a", "b"}) {
      EXPECT_EQ(t.units[name]->state(), State::absent);
      EXPECT_TRUE(t.right(name)) << name;
      EXPECT_EQ(t.units[name]->state(), State::resident);
    }
  }
}

/// Bytes that the system has read from disks for this process, pages of its program among them.
int64_t read_from_disks() {
  std::ifstream in("/proc/self/io");
  for (std::string word; in >> word;)
    if (int64_t bytes = 0; word == "read_bytes:" && in >> bytes) return bytes;
  return 0;
}

TEST_F(FileHome, WhatTheSystemHoldsIsReadFromThereAndNothingElseIsAddedToIt) {
  constexpr int64_t kBytes = 9 << 20;  // more than one direct read
  const std::map<std::string, at::Tensor> values{{"a", torch::randn({kBytes / 4})}};
  const auto path = folder / "model.safetensors";
  accelerate::save_safetensors(path, values);
  FromFile t(files({.direct = true}), values, {.prefetch = 0});
  const auto disk_reads = [&] {
    t.engine.evict(*t.units["a"]);
    const int64_t before = read_from_disks();
    EXPECT_TRUE(t.right("a"));
    return read_from_disks() - before;
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(file);  // what is not on the disk yet can't be dropped
  EXPECT_EQ(bytes_of(path).size(), fs::file_size(path));
  EXPECT_LT(disk_reads(), kBytes / 2) << "it has just been read";
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  const int64_t cold = disk_reads();
  if (cold > 0) {
    EXPECT_GE(cold, kBytes);
    EXPECT_GE(disk_reads(), kBytes) << "the first read has not filled the cache";
    const auto held = bytes_of(path);
    EXPECT_LT(disk_reads(), kBytes / 2) << "another program has read it";
  }
  ::close(file);
  if (cold == 0) GTEST_SKIP() << "the scratch folder is in memory: no disk to read from";
}

// Past the system's cache a disk is asked for several requests of whole blocks at a time.
TEST_F(FileHome, ColdBytesComeByTheRingAndByPlainCallsWhereTheKernelForbidsIt) {
  constexpr int64_t kNumel = (9 << 20) / 4 + 3;  // begins and ends within blocks
  const std::map<std::string, at::Tensor> values{{"a", torch::randn({7})}, {"b", torch::randn({kNumel})}};
  const auto path = folder / "model.safetensors";
  accelerate::save_safetensors(path, values);
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(file);
  const auto by_ring = [&] {
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    worker = std::make_shared<residency::Worker>();
    FromFile t(files({.direct = true}), values, {.prefetch = 0});
    counts::reset();
    EXPECT_TRUE(t.right("b"));
    EXPECT_TRUE(t.right("a"));
    return counts::read(ResidencyCount::disk_bytes_by_ring);
  };
  const int64_t before = read_from_disks(), read = by_ring();
  const bool has_disk = read_from_disks() > before;
  support::without_io_uring([&] { EXPECT_EQ(by_ring(), 0); });
  ::close(file);
  if (!has_disk) GTEST_SKIP() << "the scratch folder is in memory: no disk to read from";
  EXPECT_GE(read, kNumel * 4 - 2 * 4096);
}

TEST_F(FileHome, APrefetchedUnitIsFetchingUntilItIsTouched) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  FromFile t(files(), three(), {.prefetch = 1, .evict_after_use = true, .reuse_distance = 0});
  for (int round = 0; round < 2; ++round)
    for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(t.right(name));
  EXPECT_TRUE(t.right("a"));
  EXPECT_EQ(t.units["b"]->state(), State::fetching);
  EXPECT_TRUE(t.right("b"));
  EXPECT_EQ(t.units["b"]->state(), State::resident);
}

TEST_F(FileHome, APinnedUnitStays) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  FromFile t(files(), three(), {.prefetch = 0});
  {
    residency::Pins pins;
    pins.add(*t.units["a"], false);
    t.engine.evict(*t.units["a"]);
    EXPECT_EQ(t.units["a"]->state(), State::resident);
  }
  t.engine.evict(*t.units["a"]);
  EXPECT_EQ(t.units["a"]->state(), State::absent);
}

TEST_F(FileHome, AChangedUnitGoesToTheScratchFileAndNeverToTheCheckpoint) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  const auto before = bytes_of(folder / "model.safetensors");
  FromFile t(files(), three(), {.prefetch = 0});
  residency::reset_stats();
  for (int change = 1; change <= 3; ++change) {
    {
      torch::NoGradGuard no_grad;
      t.tensors["b"].add_(1);
    }
    t.right("a");
    t.engine.release();
    EXPECT_EQ(t.units["b"]->state(), State::absent);
    EXPECT_TRUE(torch::allclose(t.tensors["b"], t.expected["b"] + change));
  }
  EXPECT_EQ(residency::stats().bytes_stored, 3 * t.units["b"]->bytes()) << "and nothing that was not changed";
  EXPECT_TRUE(t.right("a"));
  EXPECT_EQ(bytes_of(folder / "model.safetensors"), before);
  EXPECT_TRUE(fs::is_empty(folder / "scratch")) << "the scratch file has no name that could stay behind";
}

TEST_F(FileHome, DataOfAnAbsentParameterIsANamedError) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  FromFile t(files(), three(), {.prefetch = 0});
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors["b"].data_ptr(); }),
              HasSubstr("parameter 'b' is not resident"));
}

TEST_F(FileHome, MappedMembersPointIntoTheFileAndWritesStayPrivate) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  const auto before = bytes_of(folder / "model.safetensors");
  residency::reset_stats();
  FromFile t(files(), three(), {.prefetch = 0}, Way::mapped);
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(t.right(name));
  const auto distance = [&](const char* name) {
    return static_cast<const char*>(t.tensors[name].const_data_ptr()) -
           static_cast<const char*>(t.tensors["a"].const_data_ptr());
  };
  EXPECT_EQ(distance("b"), 1001 * 4) << "as in the file";
  EXPECT_EQ(distance("c"), (1001 + 2100) * 4);
  {
    torch::NoGradGuard no_grad;
    t.tensors["b"].zero_();
  }
  t.engine.release();
  EXPECT_EQ(torch::count_nonzero(t.tensors["b"]).item<int64_t>(), 0);
  EXPECT_EQ(residency::stats().bytes_fetched, 0);
  EXPECT_EQ(bytes_of(folder / "model.safetensors"), before);
}

TEST_F(FileHome, OtherDtypesAreConvertedOnTheWay) {
  std::map<std::string, at::Tensor> halves;
  for (const auto& [name, value] : three()) halves[name] = value.to(at::kBFloat16);
  accelerate::save_safetensors(folder / "model.safetensors", halves);
  auto expected = halves;
  for (auto& [name, value] : expected) value = value.to(at::kFloat);
  FromFile t(files(), expected, {.prefetch = 0});
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(t.right(name)) << name;
  const NamedTensors members = {{"a", torch::zeros({1001})}};
  EXPECT_FALSE(files().mappable(members, at::kCPU));
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { (void)files().mapped(members); }),
              HasSubstr("of another dtype than in the checkpoint"));
}

TEST_F(FileHome, AHostHomeOverAMappedTensorIsBoth) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  const accelerate::SafetensorsFile file(folder / "model.safetensors");
  Residency engine({.prefetch = 0});
  auto member = torch::zeros({1001}, at::kDouble);  // converted while it is copied out of the file
  residency::PartSpec part;
  part.members = {{"a", member}};
  part.layout = {.offsets = {0}, .numel = 1001};
  part.dtype = at::kDouble;
  part.home = residency::host_home(file.tensor("a"), worker);
  std::vector<residency::PartSpec> parts;
  parts.push_back(std::move(part));
  engine.add("a", std::move(parts));
  EXPECT_TRUE(torch::equal(member, three().at("a").to(at::kDouble)));
}

TEST_F(FileHome, WhatIsMissingOrOfAnotherShapeIsNamed) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  const auto error = [&](const NamedTensors& members) {
    return support::message_of<accelerate::CheckpointError>([&] { (void)files().read(members); });
  };
  EXPECT_THAT(error({{"d", torch::zeros({2})}}), HasSubstr("the checkpoint has no tensor 'd'"));
  EXPECT_THAT(error({{"b", torch::zeros({700, 3})}}), HasSubstr("is of shape [3, 700], expected [700, 3]"));
  EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { FileTensors(folder / "absent", worker); }),
              HasSubstr("absent"));
  EXPECT_EQ(files().bytes({{"a", torch::zeros({1001})}, {"c", torch::zeros({7})}}), 4 * 1008);
}

TEST_F(FileHome, AShortenedFileIsAnErrorOfTheTouchAndTheUnitStaysAbsent) {
  for (const bool direct : {true, false}) {
    const auto path = folder / "model.safetensors";
    accelerate::save_safetensors(path, three());
    const auto whole = bytes_of(path);
    FromFile t(files({.direct = direct}), three(), {.prefetch = 0});
    EXPECT_TRUE(t.right("a"));
    const auto before = residency::stats().resident_bytes;
    fs::resize_file(path, whole.size() - 3000);
    const auto message = support::message_of<accelerate::CheckpointError>([&] { t.right("b"); });
    EXPECT_THAT(message, testing::AllOf(HasSubstr("reading 'b' from '" + path.string() + "'"),
                                        HasSubstr("the file ends at byte"), HasSubstr("has been shortened")));
    EXPECT_EQ(t.units["b"]->state(), State::absent);
    EXPECT_EQ(residency::stats().resident_bytes, before);
    EXPECT_TRUE(t.right("a"));
    fs::resize_file(path, whole.size());
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out)
        .write(whole.data(), static_cast<std::streamsize>(whole.size()));
    EXPECT_TRUE(t.right("b")) << "the touch can be repeated";
  }
}

TEST_F(FileHome, ARemovedFileIsStillOpen) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  FromFile t(files(), three(), {.prefetch = 0});
  fs::remove(folder / "model.safetensors");
  for (const char* name : {"a", "b", "c"}) EXPECT_TRUE(t.right(name));
}

/// The limit on file sizes stands for a full disk: both fail where room is reserved.
TEST_F(FileHome, AFullDiskKeepsWhatWasChanged) {
  accelerate::save_safetensors(folder / "model.safetensors", three());
  FromFile t(files(), three(), {.prefetch = 0});
  {
    torch::NoGradGuard no_grad;
    t.tensors["b"].add_(1);
  }
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto message = support::message_of<accelerate::ResourceError>([&] { t.engine.evict(*t.units["b"]); });
  const auto state = t.units["b"]->state();
  residency::set_paranoid(true);  // where units leave at the end of an operator, in a destructor
  const bool still_right = torch::allclose(t.tensors["b"], t.expected["b"] + 1);
  residency::set_paranoid(false);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, testing::AllOf(HasSubstr("file home: reserving room in '" + (folder / "scratch").string() + "'"),
                                      HasSubstr("has no room for the changed parameters")));
  EXPECT_EQ(state, State::resident);
  EXPECT_TRUE(still_right);
  t.engine.evict(*t.units["b"]);
  EXPECT_EQ(t.units["b"]->state(), State::absent);
  EXPECT_TRUE(torch::allclose(t.tensors["b"], t.expected["b"] + 1));
}

TEST_F(FileHome, ShardsWithAnIndexAreOneCheckpoint) {
  const auto values = three();
  accelerate::save_safetensors(folder / "one.safetensors", {{"a", values.at("a")}, {"c", values.at("c")}});
  accelerate::save_safetensors(folder / "two.safetensors", {{"b", values.at("b")}});
  std::ofstream(folder / "model.safetensors.index.json")
      << R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}})";
  const FileTensors files(folder, worker, {.scratch = folder / "scratch"});
  NamedTensors members;
  for (const auto& [name, value] : values) members.emplace_back(name, torch::zeros_like(value));
  Residency engine({.prefetch = 0});
  engine.add("all", files.read(members));
  for (const auto& [name, member] : members) EXPECT_TRUE(torch::equal(member, values.at(name))) << name;
}

nn::Sequential make_net() {
  torch::manual_seed(1);
  nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(nn::Linear(33, 33));
    net->push_back(nn::Tanh());
  }
  return net;
}

/// Plain SGD in place on the parameters, wherever they are.
std::vector<double> train(nn::Sequential& net) {
  torch::manual_seed(2);
  const auto x = torch::randn({16, 33});
  std::vector<double> losses;
  for (int step = 0; step < 6; ++step) {
    auto loss = (net->forward(x) - x).pow(2).mean();
    loss.backward();
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad().reset();
    }
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// Memory for less than the model, and after every single operator everything goes: the same losses and weights, bit
/// for bit.
TEST_F(FileHome, TrainingIsBitEqualWithLessMemoryThanTheModelHas) {
  torch::set_num_threads(1);  // many tiny operators
  auto plain = make_net();
  std::map<std::string, at::Tensor> start;
  for (const auto& item : plain->named_parameters()) start[item.key()] = item.value().detach().clone();
  accelerate::save_safetensors(folder / "model.safetensors", start);
  const auto expected = train(plain);
  for (const Way way : {Way::read, Way::mapped}) {
    for (const bool paranoid : {false, true}) {
      SCOPED_TRACE(testing::Message() << (way == Way::read ? "read" : "mapped") << (paranoid ? ", paranoid" : ""));
      nn::Sequential net = nullptr;
      {
        auto empty = accelerate::init_empty_weights();  // its values are in the file only
        net = make_net();
      }
      residency::set_paranoid(paranoid);
      const auto files = this->files();
      int64_t all = 0, largest = 0;
      Residency engine({.prefetch = 1, .budget_bytes = 2 * 34 * 33 * 4 + 1024});
      for (const auto& child : net->named_children()) {
        NamedTensors members;
        for (const auto& item : child.value()->named_parameters())
          members.emplace_back(child.key() + "." + item.key(), item.value());
        if (members.empty()) continue;
        const auto& unit = engine.add(child.key(), way == Way::mapped ? files.mapped(members) : files.read(members));
        all += unit.bytes(), largest = std::max(largest, unit.bytes());
      }
      ASSERT_LT(*engine.policy().budget_bytes, all);
      residency::reset_stats();
      const auto base = residency::stats().resident_bytes;
      EXPECT_EQ(train(net), expected);
      if (way == Way::read) {
        EXPECT_LE(residency::stats().peak_resident_bytes - base, *engine.policy().budget_bytes);
        EXPECT_GT(residency::stats().bytes_stored, all);
      }
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(torch::equal(item.value(), net->named_parameters()[item.key()])) << item.key();
      residency::set_paranoid(false);
    }
  }
}

}  // namespace
