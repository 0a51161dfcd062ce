#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "accelerate/utils/archive.hpp"
#include "accelerate/utils/error.hpp"
#include "dcp_test_support.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"

using namespace dcp_test;
using accelerate::CheckpointError;
using accelerate::ShapeError;
using support::message_of;
using testing::HasSubstr;

namespace {

/// Shapes and types that shard evenly, unevenly, and into fewer parts than there are ranks.
std::vector<Shared> mixed_state() {
  std::vector<Shared> state{{"model.rows", torch::randn({7, 5})},
                            {"model.columns", torch::randn({4, 9}), 1},
                            {"model.middle", torch::randn({3, 8, 5}), 1},
                            {"model.one", torch::randn({1, 6})},
                            {"model.replica", torch::randn({3, 3}), -1},
                            {"model.turned", torch::randn({6, 4}).t()},
                            {"model.view", torch::randn({10, 10}).slice(0, 2, 9, 3)},
                            {"model.scalar", torch::tensor(2.5)},
                            {"model.nothing", torch::zeros({0, 3})},
                            {"model.none_wide", torch::zeros({5, 0})}};
  for (const auto type :
       {torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt, torch::kShort, torch::kChar,
        torch::kByte, torch::kBool, torch::kComplexFloat, torch::kUInt16, torch::kFloat8_e4m3fn})
    state.push_back({std::string("model.") + c10::toString(type), torch::arange(11).to(type)});
  return state;
}

}  // namespace

TEST(Dcp, RoundTripsBetweenAnyNumbersOfRanks) {
  const auto state = mixed_state();
  for (const int64_t writers : {1, 2, 3, 5, 8}) {
    Scratch scratch;
    save(scratch.path, state, writers);
    const DcpCheckpoint checkpoint(scratch.path);
    ASSERT_EQ(checkpoint.entries().size(), state.size());
    for (size_t i = 0; i < state.size(); ++i) {
      const auto& [name, tensor, dim] = state[i];
      EXPECT_EQ(checkpoint.entries()[i].name, name);
      EXPECT_EQ(checkpoint.tensor(name).sizes, tensor.sizes().vec());
      EXPECT_EQ(accelerate::formats::scalar_type(checkpoint.tensor(name)), tensor.scalar_type());
      EXPECT_TRUE(same(checkpoint.read_full(name), tensor)) << name << " from " << writers;
      for (const int64_t readers : {1, 2, 4, 7})
        for (int64_t along = 0; along < tensor.dim(); ++along)
          for (int64_t rank = 0; rank < readers; ++rank) {
            const auto box = part_of(tensor, along, rank, readers);
            ASSERT_TRUE(same(checkpoint.read_chunk(name, box), cut(tensor, box)))
                << name << " from " << writers << " to rank " << rank << " of " << readers << " along " << along;
          }
    }
  }
}

TEST(Dcp, PartsInSeveralDimensionsMeetAnyWantedBox) {
  Scratch scratch;
  const auto tensor = torch::randn({6, 7, 5});
  prepare_dcp_folder(scratch.path);
  std::vector<DcpRecord> records;
  int64_t rank = 0;
  for (const auto& [row, rows] : {std::pair{0, 4}, {4, 2}})
    for (const auto& [column, columns] : {std::pair{0, 3}, {3, 3}, {6, 1}}) {
      const DcpBox box{{row, column, 0}, {rows, columns, 5}};
      for (auto& record : write_dcp_items(scratch.path, rank++, {}, {{"t", {6, 7, 5}, box, cut(tensor, box)}}))
        records.push_back(std::move(record));
    }
  write_dcp_metadata(scratch.path, records, {{"t", {"t"}}});
  const DcpCheckpoint checkpoint(scratch.path);
  for (int64_t a = 0; a < 6; ++a)
    for (int64_t b = 0; b < 7; ++b)
      for (int64_t c = 0; c < 5; ++c)
        for (int64_t size = 1; size < 4; ++size) {
          const DcpBox box{{a, b, c}, {std::min(size, 6 - a), std::min(size + 1, 7 - b), std::min(size, 5 - c)}};
          ASSERT_TRUE(same(checkpoint.read_chunk("t", box), cut(tensor, box))) << to_string(box);
        }
}

TEST(Dcp, ReadsIntoAnyDestination) {
  Scratch scratch;
  const auto tensor = torch::randn({6, 4});
  save(scratch.path, {{"t", tensor}}, 3);
  const DcpCheckpoint checkpoint(scratch.path);
  auto strided = torch::zeros({4, 6}).t();
  checkpoint.read_chunk("t", whole({6, 4}), strided);
  EXPECT_TRUE(same(strided, tensor));
  auto converted = torch::zeros({2, 4}, torch::kBFloat16);
  checkpoint.read_chunk("t", {{3, 0}, {2, 4}}, converted);
  EXPECT_TRUE(same(converted, tensor.slice(0, 3, 5).to(torch::kBFloat16)));
  auto parameter = torch::zeros({6, 4}, torch::requires_grad());
  checkpoint.read_chunk("t", whole({6, 4}), parameter);
  EXPECT_TRUE(parameter.is_leaf() && same(parameter.detach(), tensor));
  EXPECT_THAT(message_of<ShapeError>([&] {
                checkpoint.read_chunk("t", whole({6, 4}), torch::zeros({6, 5}));
              }),
              HasSubstr("the destination has size [6, 5], expected that of the wanted part, [6, 4]"));
  EXPECT_THAT(message_of<ShapeError>([&] {
                checkpoint.read_chunk("t", {{5, 0}, {2, 4}});
              }),
              HasSubstr("offsets [5, 0] sizes [2, 4] does not lie within the saved tensor of size [6, 4]"));
}

TEST(Dcp, WideTensorsAreReadInSlabs) {
  // Columns of saved columns: 4 MB slabs of rows that are longer than a slab, and of rows that are not.
  for (const auto& sizes : {std::vector<int64_t>{3, 4'000'000}, std::vector<int64_t>{5000, 2000}}) {
    Scratch scratch;
    const auto tensor = torch::arange(sizes[0] * sizes[1], torch::kInt).reshape(sizes);
    save(scratch.path, {{"t", tensor, 1}}, 2);
    const DcpCheckpoint checkpoint(scratch.path);
    EXPECT_TRUE(same(checkpoint.read_full("t"), tensor));
    const auto box = part_of(tensor, 1, 1, 3);
    EXPECT_TRUE(same(checkpoint.read_chunk("t", box), cut(tensor, box)));
  }
}

TEST(Dcp, ObjectsComeBack) {
  Scratch scratch;
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.insert("lr", 1e-3), dict.insert(int64_t{3}, "x");
  c10::impl::GenericList list(c10::AnyType::get());
  for (const c10::IValue& item :
       {c10::IValue(1), c10::IValue(2.5), c10::IValue("grüß"), c10::IValue(), c10::IValue(true)})
    list.push_back(item);
  const auto tuple = c10::ivalue::Tuple::create({c10::IValue(0.9), c10::IValue(int64_t{1} << 40), c10::IValue(-7)});
  save(scratch.path, {{"t", torch::ones(3)}}, 2,
       {{"dict", dict}, {"list", list}, {"tuple", tuple}, {"tensor", torch::tensor({1, 2})}});
  const DcpCheckpoint checkpoint(scratch.path);
  const auto read = checkpoint.read_object("dict").toGenericDict();
  EXPECT_EQ(read.at("lr").toDouble(), 1e-3);
  EXPECT_EQ(read.at(int64_t{3}).toStringRef(), "x");
  const auto sequence = checkpoint.read_object("list");
  const auto items = sequence.toListRef();
  ASSERT_EQ(items.size(), 5u);
  EXPECT_EQ(items[0].toInt(), 1);
  EXPECT_EQ(items[1].toDouble(), 2.5);
  EXPECT_EQ(items[2].toStringRef(), "grüß");
  EXPECT_TRUE(items[3].isNone() && items[4].toBool());
  const auto value = checkpoint.read_object("tuple");
  EXPECT_EQ(value.toTupleRef().elements()[1].toInt(), int64_t{1} << 40);
  EXPECT_EQ(value.toTupleRef().elements()[2].toInt(), -7);
  EXPECT_TRUE(same(checkpoint.read_object("tensor").toTensor(), torch::tensor({1, 2})));
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoint.read_object("t"); }),
              HasSubstr("'t' is a tensor, expected an object"));
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoint.read_full("list"); }),
              HasSubstr("'list' is an object in bytes, expected a tensor"));
}

TEST(Dcp, ObjectsLieBeforeTensorsAndFilesAreReproducible) {
  Scratch a, b;
  for (const auto* scratch : {&a, &b}) save(scratch->path, {{"t", torch::arange(6)}}, 1, {{"step", int64_t{1}}});
  const DcpCheckpoint checkpoint(a.path);
  EXPECT_EQ(std::get<DcpLocation>(checkpoint.find("step")->content).offset, 0);
  EXPECT_GT(checkpoint.tensor("t").chunks[0].location.offset, 0);
  for (const auto& name : {".metadata", "__0_0.distcp"}) {
    const auto bytes = [&](const Scratch& scratch) {
      std::ifstream in(scratch / name, std::ios::binary);
      return std::string(std::istreambuf_iterator<char>(in), {});
    };
    EXPECT_EQ(bytes(a), bytes(b)) << name;
  }
}

TEST(Dcp, PartsWithoutElementsAreLeftOut) {
  Scratch scratch;
  save(scratch.path, {{"one", torch::ones({1, 4})}}, 3);
  EXPECT_EQ(DcpCheckpoint(scratch.path).tensor("one").chunks.size(), 1u);
  EXPECT_FALSE(fs::exists(scratch / "__1_0.distcp")) << "a rank without items writes no file";
}

TEST(Dcp, RecordsTravelBetweenRanks) {
  Scratch scratch;
  const auto records = write_dcp_items(scratch.path, 4, {{"step", int64_t{1}}},
                                       {{"t", {4, 3}, {{2, 0}, {2, 3}}, torch::ones({2, 3}, torch::kHalf)}});
  const auto copy = accelerate::from_bytes<std::vector<DcpRecord>>(accelerate::to_bytes(records));
  ASSERT_EQ(copy.size(), 2u);
  EXPECT_FALSE(copy[0].is_tensor);
  EXPECT_EQ(copy[1].name, "t");
  EXPECT_EQ(copy[1].dtype, torch::kHalf);
  EXPECT_EQ(copy[1].box, (DcpBox{{2, 0}, {2, 3}}));
  EXPECT_EQ(copy[1].location.file, "__4_0.distcp");
  EXPECT_EQ(copy[1].location.offset, copy[0].location.length);
}

TEST(Dcp, SeveralThreadsReadAtOnce) {
  Scratch scratch;
  const auto tensor = torch::randn({64, 33});
  save(scratch.path, {{"a", tensor}, {"b", tensor * 2}}, 4);
  const DcpCheckpoint checkpoint(scratch.path);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int k = 0; k < 20; ++k)
        if (!same(checkpoint.read_full(i % 2 ? "a" : "b"), i % 2 ? tensor : tensor * 2)) ++wrong;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Dcp, WritingRefusesWhatDoesNotFit) {
  Scratch scratch;
  const auto write = [&](const DcpTensorItem& item) {
    return message_of<ShapeError>([&] { write_dcp_items(scratch.path, 0, {}, {item}); });
  };
  EXPECT_THAT(
      write({"t", {4, 3}, {{3, 0}, {2, 3}}, torch::ones({2, 3})}),
      HasSubstr("'t' is the part with offsets [3, 0] sizes [2, 3], which does not lie within a tensor of size [4, 3]"));
  EXPECT_THAT(write({"t", {4, 3}, {{0, 0}, {2, 3}}, torch::ones({3, 3})}),
              HasSubstr("has size [3, 3], expected that of its part, [2, 3]"));
  EXPECT_THAT(write({"t", {4}, {{0}, {4}}, torch::ones({4}, torch::kMeta)}), HasSubstr("meta"));
  EXPECT_TRUE(fs::is_empty(scratch.path)) << "a refused save leaves nothing behind";
}

TEST(Dcp, MetadataRefusesGapsAndOverlaps) {
  Scratch scratch;
  const auto part = [&](int64_t rank, int64_t begin, int64_t size, torch::ScalarType type = torch::kFloat) {
    return write_dcp_items(scratch.path, rank, {},
                           {{"model.t", {6, 2}, {{begin, 0}, {size, 2}}, torch::ones({size, 2}, type)}})
        .front();
  };
  const auto refuse = [&](const std::vector<DcpRecord>& records) {
    const auto message = message_of<CheckpointError>([&] {
      write_dcp_metadata(scratch.path, records, {{"model.t", {"model", "t"}}});
    });
    EXPECT_FALSE(fs::exists(scratch / ".metadata"));
    return message;
  };
  EXPECT_THAT(refuse({part(0, 0, 3), part(1, 2, 4)}),
              HasSubstr("overlapping parts, __0_0.distcp offsets [0, 0] sizes [3, 2] and __1_0.distcp offsets [2, 0] "
                        "sizes [4, 2], of 'model.t'"));
  EXPECT_THAT(refuse({part(0, 0, 3), part(1, 4, 2)}), HasSubstr("only 10 of 12 elements were written"));
  EXPECT_THAT(refuse({part(0, 0, 3), part(1, 3, 3, torch::kHalf)}),
              HasSubstr("dtype Half, on another rank of size [6, 2] and dtype Float"));
  const auto good = part(0, 0, 6);
  EXPECT_THAT(message_of<CheckpointError>([&] { write_dcp_metadata(scratch.path, {good}, {}); }),
              HasSubstr("'model.t' in __0_0.distcp has no path"));
  const auto object = write_dcp_items(scratch.path, 1, {{"step", int64_t{1}}}, {}).front();
  EXPECT_THAT(message_of<CheckpointError>([&] {
                write_dcp_metadata(scratch.path, {object, object}, {{"step", {"step"}}});
              }),
              HasSubstr("An object is written by one rank"));
}

TEST(Dcp, PreparingRemovesAnEarlierCheckpointOnly) {
  Scratch scratch;
  save(scratch.path, {{"t", torch::ones(8)}}, 4);
  std::ofstream(scratch / "notes.txt") << "mine";
  prepare_dcp_folder(scratch.path);
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path), {}), 1);
  EXPECT_TRUE(fs::exists(scratch / "notes.txt"));
}

TEST(Dcp, NamesOfPaths) { EXPECT_EQ(dcp_name({"optim", "param_groups", int64_t{0}, "lr"}), "optim.param_groups.0.lr"); }
