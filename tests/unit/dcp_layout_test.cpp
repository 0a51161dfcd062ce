/// Distributed checkpoints with a layout: rules instead of a list of all parts, and an index at the end of each rank's
/// file.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <set>

#include "accelerate/utils/error.hpp"
#include "checkpoint/saved_state.hpp"
#include "dcp_test_support.hpp"
#include "formats/inspect/inspect.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"
#include "utils/file_checksums.hpp"

using namespace dcp_test;
using accelerate::CheckpointError;
using accelerate::InternalError;
using support::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

namespace {

using Sizes = std::vector<int64_t>;

int64_t numel_of(const Sizes& sizes) { return *checked_numel(sizes); }

struct Random {
  std::mt19937 engine{7};
  int64_t operator()(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(engine); }
  Sizes sizes(int64_t most = 5) {
    Sizes result;
    for (int64_t dims = (*this)(0, 4); dims > 0; --dims) result.push_back((*this)(1, most));
    return result;
  }
  /// A rule for a tensor of so many elements among others.
  DcpShards pieces(int64_t numel) {
    DcpShards pieces{.begin = (*this)(0, 30), .each = (*this)(1, 40)};
    pieces.members = (pieces.begin + numel + pieces.each - 1) / pieces.each + (*this)(0, 2);
    return pieces;
  }
  DcpBox box(const Sizes& sizes) {
    DcpBox box;
    for (const auto size : sizes) {
      box.offsets.push_back((*this)(0, size - 1));
      box.sizes.push_back((*this)(1, size - box.offsets.back()));
    }
    return box;
  }
};

/// The numbers of a box's elements, counted row by row through the tensor.
std::vector<int64_t> elements(const Sizes& sizes, const DcpBox& box) {
  const auto numbers = cut(torch::arange(numel_of(sizes)).view(sizes), box).contiguous().view(-1);
  return {numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel()};
}

std::vector<int64_t> members_under(const DcpShards& pieces, const Sizes& sizes, const DcpBox& box) {
  std::vector<int64_t> members;
  for_members_under(pieces, sizes, box, [&](int64_t member) { members.push_back(member); });
  return members;
}

/// Tensors that are cut together, as a unit's are: one after the other, in equal pieces.
struct Unit {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  int64_t members = 1, step = 1, first = 0;
  int64_t each() const {
    int64_t all = 0;
    for (const auto& [name, tensor] : tensors) all += tensor.numel();
    return (all + members - 1) / members;
  }
};

struct Saved {
  DcpLayout layout;
  std::map<std::string, torch::Tensor> tensors;
};

/// Saves as ranks would, one after the other; rank 0 has an object and a tensor that nobody cuts.
Saved save_layout(const fs::path& folder, const std::vector<Unit>& units, int64_t ranks) {
  Saved saved;
  std::vector<DcpEntry> entries;
  const auto whole_one = torch::arange(6, torch::kHalf).view({2, 3});
  entries.push_back({"step", DcpPath{"step"}, DcpLocation{dcp_data_file(0), 0, 0}});
  entries.push_back({"buffer", DcpPath{"buffer"},
                     DcpTensorInfo{.dtype = "float16", .sizes = {2, 3}, .chunks = {}, .shards = DcpShards{.each = 6}}});
  saved.tensors["buffer"] = whole_one;
  for (const auto& unit : units) {
    int64_t begin = 0;
    for (const auto& [name, tensor] : unit.tensors) {
      DcpTensorInfo info{.sizes = tensor.sizes().vec(), .chunks = {}};
      info.shards = DcpShards{begin, unit.each(), unit.members, unit.step, unit.first};
      entries.push_back({name, path_of(name), std::move(info)});
      begin += tensor.numel();
      saved.tensors[name] = tensor;
    }
  }
  saved.layout = make_dcp_layout(entries, ranks);
  prepare_dcp_folder(folder);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<DcpTensorItem> items;
    if (rank == 0) items.push_back({"buffer", {2, 3}, whole({2, 3}), whole_one});
    for (const auto& unit : units) {
      int64_t begin = 0;
      for (const auto& [name, tensor] : unit.tensors) {
        const DcpShards pieces{begin, unit.each(), unit.members, unit.step, unit.first};
        begin += tensor.numel();
        const auto member = pieces.member_of(rank);
        if (!member) continue;
        const auto [from, to] = pieces.range_of(*member, tensor.numel());
        for (const auto& part :
             accelerate::checkpointing::parts_of(tensor, from, tensor.reshape({-1}).slice(0, from, to)))
          items.push_back({name, tensor.sizes().vec(), part.box, part.values});
      }
    }
    write_dcp_items(folder, rank,
                    rank == 0 ? std::vector<DcpObjectItem>{{"step", int64_t{3}}} : std::vector<DcpObjectItem>{}, items,
                    &saved.layout);
  }
  write_dcp_layout(folder, saved.layout);
  return saved;
}

/// Units of all kinds on six ranks: over all of them, over the odd ones, over two.
std::vector<Unit> mixed_units() {
  return {{.tensors = {{"model.a", torch::randn({7, 5})},
                       {"model.b", torch::randn({3, 2, 5})},
                       {"model.c", torch::randn({})}},
           .members = 6},
          {.tensors = {{"model.d", torch::randn({11})}, {"model.e", torch::randn({1, 6})}},
           .members = 3,
           .step = 2,
           .first = 1},
          {.tensors = {{"model.f", torch::randn({4, 9})}}, .members = 2, .first = 3}};
}

void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

}  // namespace

// ---- rules

TEST(DcpShards, BoxesAreTheElementsInTheirOrder) {
  Random random;
  for (int round = 0; round < 2000; ++round) {
    const auto sizes = random.sizes();
    const auto numel = numel_of(sizes), from = random(0, numel), to = random(from, numel);
    const auto boxes = boxes_of_range(sizes, from, to);
    std::vector<int64_t> found, expected;
    for (const auto& box : boxes)
      for (const auto element : elements(sizes, box)) found.push_back(element);
    for (int64_t element = from; element < to; ++element) expected.push_back(element);
    ASSERT_EQ(found, expected) << testing::PrintToString(sizes);
    ASSERT_LE(boxes.size(), std::max<size_t>(1, 2 * sizes.size()));
    // As engines cut what they hold.
    const auto tensor = torch::empty(sizes);
    const auto parts = accelerate::checkpointing::parts_of(tensor, from, torch::empty({to - from}));
    ASSERT_EQ(parts.size(), boxes.size());
    for (size_t i = 0; i < parts.size(); ++i) ASSERT_EQ(parts[i].box, boxes[i]);
  }
  EXPECT_THAT(boxes_of_range({}, 0, 1), ElementsAre(DcpBox{}));
  EXPECT_THAT(boxes_of_range({3, 4}, 5, 5), IsEmpty());
}

TEST(DcpShards, MembersShareOutEachElementOnce) {
  Random random;
  for (int round = 0; round < 500; ++round) {
    const auto numel = random(1, 200);
    const auto pieces = random.pieces(numel);
    int64_t next = 0, holders = 0;
    for (int64_t member = 0; member < pieces.members; ++member) {
      const auto [from, to] = pieces.range_of(member, numel);
      if (from == to) continue;
      ASSERT_EQ(from, next);
      next = to, ++holders;
    }
    ASSERT_EQ(next, numel);
    ASSERT_EQ(pieces.holders(numel), holders);
  }
  const DcpShards odd{.begin = 0, .each = 5, .members = 3, .step = 2, .first = 1};
  EXPECT_EQ(odd.rank_of(2), 5);
  EXPECT_EQ(odd.member_of(5), 2);
  for (const int64_t rank : {0, 2, 4, 7, -1}) EXPECT_EQ(odd.member_of(rank), std::nullopt) << rank;
}

TEST(DcpShards, MembersUnderABoxAreThoseThatHaveSomeOfIt) {
  Random random;
  for (int round = 0; round < 3000; ++round) {
    const auto sizes = random.sizes(7);
    const auto pieces = random.pieces(numel_of(sizes));
    const auto box = random.box(sizes);
    std::set<int64_t> expected;
    for (const auto element : elements(sizes, box)) expected.insert((pieces.begin + element) / pieces.each);
    ASSERT_EQ(members_under(pieces, sizes, box), std::vector<int64_t>(expected.begin(), expected.end()))
        << testing::PrintToString(sizes) << " " << to_string(box);
  }
  EXPECT_THAT(members_under({.each = 4, .members = 3}, {3, 4}, {{1, 1}, {0, 2}}), IsEmpty());
}

/// A box of one row costs the same whether a few ranks share the tensor or a million.
TEST(DcpShards, ManyMembersAreNotLookedAtOneByOne) {
  const DcpShards pieces{.each = int64_t{1} << 20, .members = int64_t{1} << 40};
  const Sizes sizes{int64_t{1} << 40, int64_t{1} << 20};
  EXPECT_THAT(members_under(pieces, sizes, {{12345, 7}, {2, 3}}), ElementsAre(12345, 12346));
}

TEST(DcpShards, RulesThatCannotBeAreNamed) {
  const auto problem = [](const DcpShards& pieces, const Sizes& sizes = {3, 4}) {
    return problem_of(pieces, sizes, 8);
  };
  EXPECT_EQ(problem({.begin = 3, .each = 5, .members = 3, .step = 2, .first = 3}), "");
  for (const auto& wrong : {DcpShards{.begin = -1, .each = 100},
                            {.each = 0},
                            {.each = 12, .members = 0},
                            {.each = 12, .step = 0},
                            {.each = 12, .first = -1}})
    EXPECT_THAT(problem(wrong), HasSubstr("expected a beginning and a rank from 0, and the others from 1"));
  EXPECT_THAT(problem({.begin = 4, .each = 5, .members = 3}),
              HasSubstr("has 12 elements from 4 on, expected no more than the 3 pieces of 5 that ranks hold"));
  EXPECT_THAT(problem({.each = int64_t{1} << 40, .members = int64_t{1} << 40}), HasSubstr("expected no more than"));
  EXPECT_THAT(problem({.begin = std::numeric_limits<int64_t>::max(), .each = 100}), HasSubstr("expected no more than"));
  EXPECT_THAT(problem({.each = 12, .members = 3, .step = 3, .first = 2}), HasSubstr("expected ranks below 8"));
  EXPECT_THAT(problem({.each = 12, .members = 3, .step = int64_t{1} << 62, .first = 2}),
              HasSubstr("expected ranks below 8"));
  EXPECT_THAT(problem({.each = 12}, {3, -4}), HasSubstr("has the size [3, -4]"));
}

// ---- the layout

TEST(DcpLayout, ComesBackAsItWas) {
  const std::vector<DcpEntry> entries = {
      {"optimizer.param_groups.0.lr", DcpPath{"optimizer", "param_groups", int64_t{0}, "lr"},
       DcpLocation{"__5_0.distcp", 0, 0}},
      {"model.grüß", DcpPath{"model", "grüß"},
       DcpTensorInfo{.dtype = "bfloat16", .sizes = {3, 4}, .chunks = {}, .shards = DcpShards{3, 5, 3, 2, 1}}},
      {"model.scalar", DcpPath{"model", "scalar"},
       DcpTensorInfo{.sizes = {}, .chunks = {}, .shards = DcpShards{.first = 4}}},
      {"model.none", DcpPath{"model", "none"},
       DcpTensorInfo{.sizes = {0, 3}, .chunks = {}, .shards = DcpShards{.first = 2}}}};
  const auto layout = make_dcp_layout(entries, 6);
  const auto again = parse_dcp_layout(layout.text, "again");
  EXPECT_EQ(again.ranks, 6);
  EXPECT_EQ(again.checksum, accelerate::crc32c::of(layout.text));
  ASSERT_EQ(again.entries.size(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(again.entries[i].name, entries[i].name);
    EXPECT_EQ(again.entries[i].path, entries[i].path);
    ASSERT_EQ(again.entries[i].content.index(), entries[i].content.index());
    if (const auto* info = std::get_if<DcpTensorInfo>(&entries[i].content)) {
      const auto& found = std::get<DcpTensorInfo>(again.entries[i].content);
      EXPECT_EQ(found.dtype, info->dtype);
      EXPECT_EQ(found.sizes, info->sizes);
      EXPECT_EQ(found.shards, info->shards);
    } else {
      EXPECT_EQ(std::get<DcpLocation>(again.entries[i].content).file, "__5_0.distcp");
    }
  }
  EXPECT_EQ(make_dcp_layout(again.entries, 6).text, layout.text);
}

TEST(DcpLayout, DamageIsNamed) {
  const auto text = make_dcp_layout({{"model.w", DcpPath{"model", "w"},
                                      DcpTensorInfo{.sizes = {3, 4}, .chunks = {}, .shards = DcpShards{3, 5, 3, 2, 1}}},
                                     {"step", DcpPath{"step"}, DcpLocation{"__1_0.distcp", 0, 0}}},
                                    6)
                        .text;
  const auto message = [&](const std::string& from, const std::string& to) {
    return message_of<CheckpointError>([&] { parse_dcp_layout(replaced(text, from, to), "folder/layout"); });
  };
  EXPECT_THAT(message("{", ""),
              AllOf(HasSubstr("layout 'folder/layout': it is not valid JSON"), HasSubstr("copy the checkpoint again")));
  EXPECT_THAT(message("accelerate layout", "other"),
              HasSubstr("expected an object with the format 'accelerate layout'"));
  EXPECT_THAT(message("\"version\": 1", "\"version\": 2"),
              HasSubstr("is of version 2, and this program reads version 1"));
  EXPECT_THAT(message("\"ranks\": 6", "\"ranks\": 0"), HasSubstr("it is of 0 ranks"));
  EXPECT_THAT(message("\"ranks\": 6", "\"ranks\": 1e3"), HasSubstr("as 'ranks', expected a whole number"));
  EXPECT_THAT(message("\"ranks\": 6", "\"ranks\": 99999999999"), HasSubstr("it is of 99999999999 ranks"));
  EXPECT_THAT(message("\"ranks\": 6", "\"ranks\": 6, \"more\": 1"), HasSubstr("it has 5 members, expected 4"));
  EXPECT_THAT(message("\"entries\"", "\"others\""), HasSubstr("it has no 'entries'"));
  EXPECT_THAT(message("[\"step\"]", "[\"model\",\"w\"]"), HasSubstr("the name 'model.w' occurs twice"));
  EXPECT_THAT(message("[\"step\"]", "[]"), HasSubstr("entry 1 has the path []"));
  EXPECT_THAT(message("[\"step\"]", "[3]"), HasSubstr("entry 1 has the path [3]"));
  EXPECT_THAT(message("[\"step\"]", "[\"a\",null]"), HasSubstr("entry 1 has null in its path"));
  EXPECT_THAT(message("[\"step\"]", "[\"a\",9000000]"), HasSubstr("has the list index 9000000"));
  EXPECT_THAT(message("[\"step\"]", "[\"a\",-1]"), HasSubstr("has the list index -1"));
  EXPECT_THAT(message("\"rank\":1", "\"rank\":6"), HasSubstr("'step' is rank 6's, expected one of 6 ranks"));
  EXPECT_THAT(message("\"rank\":1", "\"rank\":-1"), HasSubstr("'step' is rank -1's"));
  EXPECT_THAT(message("\"rank\":1", "\"rank\":\"../x\""), HasSubstr("as 'rank', expected a whole number"));
  EXPECT_THAT(message("\"rank\":1", "\"rank\":1,\"codec\":2"), HasSubstr("'step' has 3 members, expected 2"));
  EXPECT_THAT(message("float32", "float33"), HasSubstr("'model.w' has the dtype \"float33\""));
  EXPECT_THAT(message("[3,4]", "[3,-4]"), HasSubstr("'model.w' has the size [3, -4]"));
  EXPECT_THAT(message("[3,4]", "[1000000000,1000000000]"), HasSubstr("fewer than 2^63 bytes"));
  EXPECT_THAT(message("[3,4]", "{}"), HasSubstr("expected a list of at most 64 numbers"));
  EXPECT_THAT(message("[3,4]", "[3,5]"),
              HasSubstr("'model.w' has 15 elements from 3 on, expected no more than the 3 pieces of 5"));
  EXPECT_THAT(message("\"step\":2", "\"step\":3"),
              HasSubstr("'model.w' has 3 members, each 3 ranks behind the one before"));
  EXPECT_THAT(message("\"each\":5", "\"each\":-5"), HasSubstr("expected a beginning and a rank from 0"));
  EXPECT_THAT(message("\"each\":5", "\"each\":5,\"x\":1"), HasSubstr("'model.w' has 6 members, expected 5"));
  EXPECT_THAT(message("\"each\":5,", ""), HasSubstr("'model.w' has 4 members, expected 5"));
  EXPECT_THAT(message("\"shards\":{", "\"shards\":3,\"x\":{"),
              HasSubstr("'model.w' has the shards 3, expected an object"));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                make_dcp_layout({{"\xff", DcpPath{"\xff"}, DcpLocation{"__0_0.distcp", 0, 0}}}, 1);
              }),
              HasSubstr("is not UTF-8"));
}

// ---- the index

TEST(DcpItemIndex, ComesBackAndItsDamageIsNamed) {
  const DcpItemIndex index{.rank = 5, .layout = 0x12345678, .items = {{0, 0, 40, 10}, {3, 0, 0, 40}, {3, 1, 50, 14}}};
  const std::string items(64, 'x'), bytes = items + format_item_index(index);
  const auto read = [](const std::string& file) { return read_item_index(InputFile("folder/__5_0.distcp", file)); };
  const auto again = read(bytes);
  EXPECT_EQ(again.rank, 5);
  EXPECT_EQ(again.layout, 0x12345678u);
  ASSERT_THAT(again.items, SizeIs(3));
  EXPECT_EQ(again.find(3, 1)->offset, 50);
  EXPECT_EQ(again.find(3, 0)->length, 40);
  EXPECT_EQ(again.find(3, 2), nullptr);
  EXPECT_EQ(again.find(1, 0), nullptr);

  const auto message = [&](const std::string& file) { return message_of<CheckpointError>([&] { read(file); }); };
  EXPECT_THAT(message("short"), HasSubstr("the index of 'folder/__5_0.distcp': found 5 bytes, expected at least 48"));
  for (size_t cut = 1; cut < bytes.size(); ++cut)
    EXPECT_FALSE(message(bytes.substr(0, bytes.size() - cut)).empty()) << cut;
  EXPECT_THAT(message(bytes.substr(0, bytes.size() - 3)),
              AllOf(HasSubstr("found none at the end"), HasSubstr("copy the checkpoint again")));
  for (size_t at = items.size(); at < bytes.size(); ++at) {
    auto flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    EXPECT_FALSE(message(flipped).empty()) << "a bit of byte " << at - items.size();
  }
  // With a checksum that is right.
  const auto built = [&](const DcpItemIndex& wrong) { return message(items + format_item_index(wrong)); };
  auto wrong = index;
  wrong.items[1].length = 70;
  EXPECT_THAT(built(wrong), HasSubstr("item 1 has offset 0 and length 70, expected a part of the 64 bytes before it"));
  wrong.items[1] = {3, 0, 64, 1};
  EXPECT_THAT(built(wrong), HasSubstr("item 1 has offset 64 and length 1"));
  wrong.items[1] = {3, 0, -1, 3};
  EXPECT_THAT(built(wrong), HasSubstr("item 1 has offset -1"));
  wrong.items[1] = {3, 0, 3, 0};
  EXPECT_THAT(built(wrong), HasSubstr("length 0"));
  wrong = index;
  std::swap(wrong.items[0], wrong.items[1]);
  EXPECT_THAT(built(wrong), HasSubstr("item 1 is box 0 of entry 0, expected one behind box 0 of entry 3"));
  wrong = index;
  wrong.items[2].box_number = 0;
  EXPECT_THAT(built(wrong), HasSubstr("item 2 is box 0 of entry 3, expected one behind"));
  wrong = index;
  wrong.rank = -1;
  EXPECT_THAT(built(wrong), HasSubstr("items of rank -1"));
}

// ---- folders

TEST(DcpFolderWithLayout, ReadsWhatRanksSaved) {
  Scratch scratch;
  const auto saved = save_layout(scratch.path, mixed_units(), 6);
  EXPECT_FALSE(fs::exists(scratch / ".metadata"));
  const DcpCheckpoint checkpoint(scratch.path);
  EXPECT_EQ(checkpoint.read_object("step").toInt(), 3);
  Random random;
  for (const auto& [name, tensor] : saved.tensors) {
    EXPECT_TRUE(same(checkpoint.read_full(name), tensor)) << name;
    for (int round = 0; round < 100; ++round) {
      const auto box = random.box(tensor.sizes().vec());
      ASSERT_TRUE(same(checkpoint.read_chunk(name, box), cut(tensor, box))) << name << " " << to_string(box);
      auto there = torch::empty(box.sizes, tensor.options());
      checkpoint.find_chunk(name, box).read(there);
      ASSERT_TRUE(same(there, cut(tensor, box)));
    }
  }
}

TEST(DcpFolderWithLayout, OnlyFilesOfRanksThatHaveAPartAreNeeded) {
  Scratch scratch;
  const auto tensor = torch::randn({12, 4});
  save_layout(scratch.path, {{.tensors = {{"model.w", tensor}}, .members = 6}}, 6);  // two rows each
  for (const int rank : {0, 1, 4, 5}) fs::remove(scratch / dcp_data_file(rank));
  const DcpCheckpoint checkpoint(scratch.path);
  const DcpBox there{{5, 1}, {3, 2}};
  EXPECT_TRUE(same(checkpoint.read_chunk("model.w", there), cut(tensor, there)));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                checkpoint.read_chunk("model.w", {{7, 0}, {2, 4}});
              }),
              HasSubstr("__4_0.distcp"));
}

TEST(DcpFolderWithLayout, FilesOfDifferentSavesAreRefused) {
  Scratch scratch, other;
  const auto saved = save_layout(scratch.path, mixed_units(), 6);
  auto units = mixed_units();
  std::swap(units[0].tensors[0], units[0].tensors[1]);
  save_layout(other.path, units, 6);
  const auto read = [&] {
    const DcpCheckpoint checkpoint(scratch.path);
    for (const auto& [name, tensor] : saved.tensors) checkpoint.read_full(name);
  };
  const auto read_all = [&] { return message_of<CheckpointError>(read); };
  const auto good = bytes_of(scratch / "__1_0.distcp");
  fs::copy_file(other / "__1_0.distcp", scratch / "__1_0.distcp", fs::copy_options::overwrite_existing);
  EXPECT_THAT(read_all(), AllOf(HasSubstr("__1_0.distcp"), HasSubstr("expected rank 1 and the layout"),
                                HasSubstr("of different saves")));
  fs::copy_file(scratch / "__2_0.distcp", scratch / "__1_0.distcp", fs::copy_options::overwrite_existing);
  EXPECT_THAT(read_all(), HasSubstr("its index is of rank 2"));
  // An index with the right names that lacks one, and one that has more.
  const auto write_with = [&](const std::function<void(DcpItemIndex&)>& change) {
    auto index = read_item_index(InputFile("x", good));
    const auto length = good.size() - format_item_index(index).size();
    change(index);
    write(scratch / "__1_0.distcp", good.substr(0, length) + format_item_index(index));
  };
  write_with([](DcpItemIndex& index) { index.items.erase(index.items.begin()); });
  EXPECT_THAT(read_all(),
              AllOf(HasSubstr("its index has no box 0 of 'model."), HasSubstr("which the layout says is there")));
  write_with([](DcpItemIndex& index) { index.items.push_back({1000, 0, 0, 10}); });
  EXPECT_NO_THROW(read()) << "nobody asks for it";
  EXPECT_THAT(message_of<CheckpointError>([&] { DcpFolder(scratch.path).parts_of_rank(1); }),
              HasSubstr("items, expected the"));
  // Places of one another: each item says what it is.
  write_with([](DcpItemIndex& index) {
    std::swap(index.items.front().offset, index.items.back().offset);
    std::swap(index.items.front().length, index.items.back().length);
  });
  EXPECT_THAT(read_all(), HasSubstr("found a tensor of size"));
  write(scratch / "__1_0.distcp", good);
  EXPECT_NO_THROW(read());
  write(scratch / ".metadata", "anything");
  EXPECT_THAT(read_all(), AllOf(HasSubstr("found both .metadata and .accelerate_layout"), HasSubstr("remove it")));
}

TEST(DcpFolderWithLayout, RanksWriteWhatTheLayoutSays) {
  Scratch scratch;
  const auto saved = save_layout(scratch.path, mixed_units(), 6);
  const auto message = [&](std::vector<DcpTensorItem> items) {
    return message_of<InternalError>([&] { write_dcp_items(scratch.path, 4, {}, items, &saved.layout); });
  };
  const DcpTensorItem half{"model.f", {4, 9}, {{2, 0}, {2, 9}}, torch::ones({2, 9})};
  EXPECT_THAT(message({half}), HasSubstr("rank 4 did not write 'model.b'"));
  const auto parts = [&] {
    std::vector<DcpTensorItem> items;
    for (const auto& item : held_by(saved.layout.metadata, 4)) {
      const auto& entry = saved.layout.metadata.entries[item.entry];
      items.push_back(
          {entry.name, std::get<DcpTensorInfo>(entry.content).sizes, item.box, torch::ones(item.box.sizes)});
    }
    return items;
  };
  EXPECT_NO_THROW(write_dcp_items(scratch.path, 4, {}, parts(), &saved.layout));
  auto more = parts();
  more.push_back({"model.x", {1}, whole({1}), torch::ones(1)});
  EXPECT_THAT(message(more), HasSubstr("items, its layout has"));
  auto other = parts();
  other.back().tensor = other.back().tensor.to(torch::kHalf);
  EXPECT_THAT(message(other), HasSubstr("rank 4 did not write 'model.f'"));
}

TEST(DcpFolderWithLayout, PreparingRemovesIt) {
  Scratch scratch;
  save_layout(scratch.path, mixed_units(), 6);
  EXPECT_TRUE(is_dcp_folder(scratch.path));
  prepare_dcp_folder(scratch.path);
  EXPECT_TRUE(fs::is_empty(scratch.path));
  EXPECT_FALSE(is_dcp_folder(scratch.path));
}

TEST(DcpFolderWithLayout, IsInspected) {
  Scratch scratch;
  const auto saved = save_layout(scratch.path, mixed_units(), 6);
  const auto found = inspect(scratch.path, {.verify = true});
  EXPECT_THAT(found.damage, IsEmpty());
  ASSERT_THAT(found.parts, SizeIs(1));
  EXPECT_EQ(found.parts[0].format, "distributed checkpoint");
  EXPECT_EQ(found.parts[0].files, 7);
  EXPECT_EQ(found.parts[0].others, 1);
  EXPECT_GT(found.checked_bytes, 0);
  ASSERT_EQ(found.parts[0].tensors.size(), saved.tensors.size());
  for (const auto& tensor : found.parts[0].tensors) {
    EXPECT_EQ(tensor.shape, saved.tensors.at(tensor.name).sizes().vec());
    int64_t pieces = 0;
    std::string file;
    for (int64_t rank = 0; rank < 6; ++rank)
      for (const auto& item : held_by(saved.layout.metadata, rank))
        if (saved.layout.metadata.entries[item.entry].name == tensor.name)
          file = ++pieces == 1 ? dcp_data_file(rank) : "";
    EXPECT_EQ(tensor.pieces, pieces) << tensor.name;
    EXPECT_EQ(tensor.file, file) << tensor.name;
  }
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(scratch.path)) bytes += static_cast<int64_t>(entry.file_size());
  EXPECT_EQ(found.bytes, bytes);

  // Bytes of an element, which only checksums know.
  auto damaged = bytes_of(scratch / "__4_0.distcp");
  const auto place = DcpFolder(scratch.path).parts_of_rank(4)[0].chunk.location;
  const TorchArchive archive(std::make_shared<InputFile>(scratch / "__4_0.distcp"), place.offset, place.length, "x",
                             PickledObjects::refused);
  const auto at = static_cast<size_t>(archive.tensor().begin);
  damaged[at] = static_cast<char>(damaged[at] ^ 1);
  const auto good = bytes_of(scratch / "__4_0.distcp");
  write(scratch / "__4_0.distcp", damaged);
  EXPECT_THAT(inspect(scratch.path, {.verify = true}).damage, SizeIs(1));
  write(scratch / "__4_0.distcp", good.substr(0, good.size() - 5));
  EXPECT_THAT(inspect(scratch.path).damage, ElementsAre(HasSubstr("__4_0.distcp': found none at the end")));
  fs::remove(scratch / "__4_0.distcp");
  EXPECT_THAT(inspect(scratch.path).damage, ElementsAre(HasSubstr("__4_0.distcp")))
      << "once, not for each of its items";
}
