#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <caffe2/serialize/inline_container.h>

#include <fstream>

#include "accelerate/utils/error.hpp"
#include "dcp_test_support.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"

using namespace dcp_test;
using accelerate::CheckpointError;
using accelerate::Error;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

namespace {

void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

struct DcpDamage : testing::Test {
  Scratch scratch;
  torch::Tensor tensor = torch::randn({6, 4});
  void SetUp() override {
    save(scratch.path, {{"model.w", tensor}, {"model.b", torch::randn(5)}}, 2, {{"step", int64_t{3}}});
  }

  /// Everything is read, so that no damage can hide.
  void read_all() const {
    const DcpCheckpoint checkpoint(scratch.path);
    for (const auto& entry : checkpoint.entries()) {
      if (std::holds_alternative<DcpTensorInfo>(entry.content)) checkpoint.read_full(entry.name);
      else checkpoint.read_object(entry.name);
    }
  }
  std::string message() const {
    return message_of<CheckpointError>([&] { read_all(); });
  }
  /// Rewrites the metadata with a change.
  void change(const std::function<void(DcpMetadata&)>& edit) const {
    auto metadata = parse_dcp_metadata(bytes_of(scratch / ".metadata"), "x");
    edit(metadata);
    write(scratch / ".metadata", format_dcp_metadata(metadata));
  }
  static DcpChunk& chunk(DcpMetadata& metadata, size_t index) {
    return std::get<DcpTensorInfo>(metadata.entries[0].content).chunks[index];
  }
};

std::string pickle_message(const std::string& bytes) {
  return message_of<CheckpointError>([&] { parse_dcp_metadata(bytes, "m"); });
}
std::string pickle_message(const char* bytes, size_t size) { return pickle_message(std::string(bytes, size)); }
#define PICKLE_MESSAGE(literal) pickle_message(literal, sizeof(literal) - 1)

}  // namespace

TEST_F(DcpDamage, MissingFiles) {
  EXPECT_THAT(message_of<CheckpointError>([&] { DcpCheckpoint(scratch / "nowhere"); }),
              HasSubstr("found no file .metadata, which every distributed checkpoint has. The folder is not there"));
  fs::rename(scratch / "__1_0.distcp", scratch / "moved");
  EXPECT_THAT(message(), HasSubstr("__1_0.distcp': can't open it: No such file"));
  fs::remove(scratch / ".metadata");
  EXPECT_THAT(message(),
              HasSubstr("Data files are there: the save did not finish, or .metadata, a hidden file, was not copied"));
  write(scratch / "__0.metadata", "");
  EXPECT_THAT(message(), HasSubstr("saved without collectives"));
}

TEST_F(DcpDamage, EveryTruncationOfTheMetadataIsNoticed) {
  const auto bytes = bytes_of(scratch / ".metadata");
  for (size_t size = 0; size < bytes.size(); ++size) {
    try {
      parse_dcp_metadata(bytes.substr(0, size), "m");
      ADD_FAILURE() << size << " of " << bytes.size() << " bytes were accepted";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("DCP metadata 'm', byte "));
    }
  }
}

TEST_F(DcpDamage, TruncatedDataFiles) {
  const auto bytes = bytes_of(scratch / "__0_0.distcp");
  write(scratch / "__0_0.distcp", bytes.substr(0, bytes.size() - 1));
  EXPECT_THAT(message(), AllOf(HasSubstr("item 'model."),
                               HasSubstr("reach beyond the file, which has " + std::to_string(bytes.size() - 1)),
                               HasSubstr("truncated or of another save")));
  write(scratch / "__0_0.distcp", "");
  EXPECT_THAT(message(), HasSubstr("reach beyond the file, which has 0"));
}

TEST_F(DcpDamage, WrongPlaces) {
  change([](DcpMetadata& m) {
    chunk(m, 0).location.offset += 64;
    chunk(m, 0).location.length -= 64;
  });
  EXPECT_THAT(message(), AllOf(HasSubstr("item 'model.w'"), HasSubstr("not an intact archive of torch.save")));
  SetUp();
  change([](DcpMetadata& m) {
    std::swap(chunk(m, 0).location, std::get<DcpTensorInfo>(m.entries[1].content).chunks[0].location);
  });
  EXPECT_THAT(
      message(),
      AllOf(
          HasSubstr(
              "found a tensor of size [3] and dtype Float, expected size [3, 4] and dtype Float as the metadata says"),
          HasSubstr("offsets are wrong")));
  SetUp();
  change([](DcpMetadata& m) { chunk(m, 0).location.length = int64_t{1} << 60; });
  EXPECT_THAT(message(), HasSubstr("its 1152921504606846976 bytes from byte "));
  SetUp();
  change([](DcpMetadata& m) { chunk(m, 0).location = std::get<DcpLocation>(m.entries[2].content); });
  EXPECT_THAT(message(), HasSubstr("it holds an integer, expected a tensor"));
  SetUp();
  change([](DcpMetadata& m) { m.entries[2].content = chunk(m, 0).location; });
  EXPECT_NO_THROW(read_all()) << "a tensor is an object too";
}

/// A list is as long as its largest index: a few bytes must not make many GB of it, nor paths without end.
TEST_F(DcpDamage, ListsAndPathsLongerThanTheFileCanMean) {
  const auto with = [&](accelerate::formats::DcpPath path) {
    SetUp();
    change([&](DcpMetadata& m) { m.entries[0].path = std::move(path); });
  };
  with({"model", int64_t{90'000}, "w"});
  EXPECT_NO_THROW(read_all());
  with({"model", int64_t{9'000'000}, "w"});
  EXPECT_THAT(message(), AllOf(HasSubstr("the list index 9000000"), HasSubstr("too many for a file of its length")));
  with({"model", int64_t{60'000}, int64_t{60'000}, "w"});
  EXPECT_THAT(message(), HasSubstr("too many for a file of its length")) << "of all lists together";
  with(accelerate::formats::DcpPath(101, "k"));
  EXPECT_THAT(message(), HasSubstr("has 101 steps, expected 1 to 100"));
}

TEST_F(DcpDamage, MetadataThatContradictsItself) {
  const auto refuse = [&](const std::function<void(DcpMetadata&)>& edit) {
    SetUp();
    change(edit);
    return message();
  };
  EXPECT_THAT(
      refuse([](DcpMetadata& m) {
        chunk(m, 1).box = {{2, 0}, {3, 4}};
      }),
      HasSubstr("two chunks of 'model.w' overlap: offsets [0, 0] sizes [3, 4] and offsets [2, 0] sizes [3, 4]"));
  EXPECT_THAT(refuse([](DcpMetadata& m) {
                chunk(m, 1).box = {{4, 0}, {3, 4}};
              }),
              HasSubstr("offsets [4, 0] sizes [3, 4] does not lie within the tensor of size [6, 4]"));
  EXPECT_THAT(refuse([](DcpMetadata& m) { chunk(m, 1).box = {{3}, {3}}; }), HasSubstr("does not lie within"));
  EXPECT_THAT(refuse([](DcpMetadata& m) { chunk(m, 1).box.offsets[0] = -1; }), HasSubstr("does not lie within"));
  EXPECT_THAT(refuse([](DcpMetadata& m) { chunk(m, 1).location = {}; }),
              HasSubstr("offsets [3, 0] sizes [3, 4] of 'model.w' is described, but stored nowhere"));
  EXPECT_THAT(refuse([](DcpMetadata& m) {
                m.entries[2].content = DcpLocation{"__0_0.distcp", 0, 0};
              }),
              HasSubstr("offset 0 and length 0, expected an offset from 0 and a positive length"));
  EXPECT_THAT(refuse([](DcpMetadata& m) { chunk(m, 1).location.file = "../../etc/passwd"; }),
              HasSubstr("'../../etc/passwd', expected the name of a file in the folder"));
  EXPECT_THAT(refuse([](DcpMetadata& m) { chunk(m, 1).location.file = "/etc/passwd"; }),
              HasSubstr("expected the name of a file in the folder"));
  EXPECT_THAT(refuse([](DcpMetadata& m) {
                std::get<DcpTensorInfo>(m.entries[0].content).sizes = {int64_t{1} << 62, 4};
              }),
              HasSubstr("fewer than 2^63 bytes"));
  EXPECT_THAT(refuse([](DcpMetadata& m) {
                std::get<DcpTensorInfo>(m.entries[0].content).sizes = {int64_t{1} << 50, 4};
              }),
              AllOf(HasSubstr("of which only 24 were saved"), HasSubstr("'model.w'")));
  EXPECT_THAT(refuse([](DcpMetadata& m) {
                auto& info = std::get<DcpTensorInfo>(m.entries[0].content);
                info.sizes = {int64_t{1} << 50, 4}, info.chunks.resize(1), info.chunks[0].box = whole(info.sizes);
              }),
              HasSubstr("expected size [1125899906842624, 4]"))
      << "found before memory is asked for";
  EXPECT_THAT(refuse([](DcpMetadata& m) { std::get<DcpTensorInfo>(m.entries[0].content).chunks.pop_back(); }),
              HasSubstr("the wanted part with offsets [0, 0] sizes [6, 4] has 24 elements, of which only 12 were saved "
                        "(offsets [0, 0] sizes [3, 4])"));
}

TEST_F(DcpDamage, PicklesThatAreNoMetadata) {
  EXPECT_THAT(pickle_message(""), HasSubstr("byte 0: needs 1 more bytes where 0 are left"));
  EXPECT_THAT(PICKLE_MESSAGE("{\"a\": 1}"), HasSubstr("byte 0: it does not start with the opcode 0x80 of a pickle"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x09N."), HasSubstr("its protocol is 9, expected 2 to 5"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02N."),
              HasSubstr("byte 2: found None, expected an object of torch.distributed.checkpoint.metadata.Metadata"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02."), HasSubstr("byte 2: takes a value from an empty stack"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02(N."), HasSubstr("ends with 1 values on its stack, expected one"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02NN."), HasSubstr("ends with 2 values"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02N(0."), HasSubstr("byte 4: takes a value from an empty stack"))
      << "values before a mark are out of reach";
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02t."), HasSubstr("byte 2: takes the values behind a mark, but no mark was set"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02Nh\x05."), HasSubstr("byte 3: reads memo slot 5, but only 0 were filled"));
  std::string again =
      "\x80\x02"
      "ccollections\nOrderedDict\nq\x01]q\x02(";
  for (int i = 0; i < 20; ++i) again += "](NNe";
  again += "e";
  for (int i = 0; i < 10; ++i) again += "0h\x01h\x02\x85R";
  EXPECT_THAT(pickle_message(again + "."), HasSubstr("makes more of its lists than it has"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02"
                             "ccollections\nOrderedDict\n](](Nee\x85R."),
              HasSubstr("makes an OrderedDict of a list, expected nothing or a list of pairs"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02Nq\x01h\x00."), HasSubstr("reads memo slot 0, but only 1 were filled"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02Nr\xff\xff\xff\xff."),
              HasSubstr("byte 3: memoises in slot 4294967295, expected at most 0"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02X\xff\xff\xff\x7f"
                             "ab"),
              HasSubstr("byte 2: needs 2147483647 more bytes where 2 are left"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
                             "ab"),
              HasSubstr("needs 18446744073709551615 more bytes where 2 are left"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff"
                             "N."),
              HasSubstr("announces a frame of 18446744073709551615 bytes where 2 are left"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02\x8a\x09"
                             "123456789."),
              HasSubstr("holds an integer of 9 bytes"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02X\x01\x00\x00\x00\xff."), HasSubstr("a string is not UTF-8"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02}K\x01u."), HasSubstr("no mark was set"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02}(K\x01u."), HasSubstr("a key without a value"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02]K\x01K\x02s."), HasSubstr("found a list on the stack, expected a dict"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02K\x01)R."),
              HasSubstr("found an integer on the stack, expected a class or function"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02i"), HasSubstr("has the opcode 0x69, which such a file never needs"));
}

TEST_F(DcpDamage, CodeIsNeverExecuted) {
  // An attacker would write os.system("..."), by both ways of naming a function.
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02"
                             "cos\nsystem\nX\x02\x00\x00\x00id\x85R."),
              AllOf(HasSubstr("byte 2: names 'os.system'"), HasSubstr("never executed")));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."),
              HasSubstr("byte 17: names 'posix.system'"));
  EXPECT_THAT(PICKLE_MESSAGE("\x80\x02"
                             "c__builtin__\neval\n."),
              HasSubstr("names '__builtin__.eval'"));
  // And in an item.
  const auto step = std::get<DcpLocation>(DcpCheckpoint(scratch.path).find("step")->content);
  auto bytes = bytes_of(scratch / step.file);
  const auto at = bytes.find("\x80\x02K\x03.");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 5,
                std::string("\x80\x02"
                            "ca\n",
                            5));
  write(scratch / step.file, bytes);
  EXPECT_THAT(message(), HasSubstr("item 'step'"));
}

TEST_F(DcpDamage, HugeValuesInSmallItems) {
  const auto read = [&](const std::string& pickle) {
    write(scratch / "item", "");
    caffe2::serialize::PyTorchStreamWriter archive((scratch / "item").string());
    archive.writeRecord("data.pkl", pickle.data(), pickle.size());
    archive.writeEndOfFile();
    const auto file = std::make_shared<InputFile>(scratch / "item");
    return message_of<CheckpointError>([&] { TorchArchive(file, 0, file->size(), "item").value(); });
  };
  // A list that holds twice a list that holds twice a list ...: 2^40 values in 400 bytes; and a list that holds itself.
  std::string bomb("\x80\x02]q\0", 5);
  for (char i = 0; i < 40; ++i) bomb += std::string("0](h") + i + "h" + i + "eq" + static_cast<char>(i + 1);
  EXPECT_THAT(read(bomb + "."), HasSubstr("it describes more values than a file of its length can mean"));
  EXPECT_THAT(read(std::string("\x80\x02]q\0h\0a.", 9)), HasSubstr("values are nested deeper than 100 levels"));
}

/// Any byte of the files may be wrong: an error or other values, never a crash.
TEST_F(DcpDamage, EveryByteMayBeWrong) {
  for (const auto* name : {".metadata", "__0_0.distcp", "__1_0.distcp"}) {
    const auto bytes = bytes_of(scratch / name);
    int64_t errors = 0;
    constexpr unsigned char kFlips[] = {0x01, 0x80, 0xff};
    for (size_t i = 0; i < bytes.size(); i += name[0] == '.' ? 1 : 5) {
      auto damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ kFlips[i % 3]);
      write(scratch / name, damaged);
      try {
        read_all();
      } catch (const Error&) {
        ++errors;
      }
    }
    write(scratch / name, bytes);
    EXPECT_GT(errors, 100) << name;
  }
  EXPECT_NO_THROW(read_all());
}
