// JSON texts and files from outside, as all readers of the library and its programs open and parse them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "deadline.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::CheckpointError;
using accelerate::parse_json;
using accelerate::show_json;
using nlohmann::json;
using nlohmann::ordered_json;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

std::string repeated(size_t times, const std::string& text) {
  std::string all;
  for (size_t i = 0; i < times; ++i) all += text;
  return all;
}

std::string problem_of(const std::string& text, const accelerate::JsonRules& rules = {}) {
  std::string problem;
  const auto plain = parse_json<json>(text, &problem, rules);
  EXPECT_EQ(plain.is_discarded(), !problem.empty());
  std::string ordered_problem;
  EXPECT_EQ(parse_json<ordered_json>(text, &ordered_problem, rules).is_discarded(), !problem.empty());
  return problem == ordered_problem ? problem : "not the same as: " + ordered_problem;
}

TEST(ParseJson, ReadsWhatTheLibraryReads) {
  for (const char* text :
       {R"({"a": [1, -2, 3.5, 1e30, true, false, null, "é😀\n"], "b": {"c": {}, "d": []}, "": ""})", "[]", "{}", "3",
        "\"x\"", "null", " [ [ ] , { } ] ", R"({"z": 1, "a": {"y": [{}, {"b": 1, "a": 2}]}})"}) {
    EXPECT_EQ(parse_json<json>(text), json::parse(text)) << text;
    EXPECT_EQ(parse_json<ordered_json>(text).dump(), ordered_json::parse(text).dump()) << text;
  }
}

TEST(ParseJson, OfEqualKeysTheLastCountsWhereTheFirstStood) {
  const std::string text = R"({"a": 1, "b": 2, "a": {"x": 1, "x": 2}, "c": 3, "b": 4})";
  EXPECT_EQ(parse_json<ordered_json>(text).dump(), R"({"a":{"x":2},"b":4,"c":3})") << "as Python's dict";
  EXPECT_EQ(parse_json<json>(text), json::parse(text));
  EXPECT_THAT(problem_of(R"({"b": {"x": 1, "x": 2}})", {.unique_keys = true}),
              HasSubstr("has the key \"x\" twice in one object"));
}

TEST(ParseJson, SaysWhatIsWrong) {
  EXPECT_THAT(problem_of(""), HasSubstr("is not valid JSON"));
  EXPECT_THAT(problem_of("[1, 2"), HasSubstr("is not valid JSON"));
  EXPECT_THAT(problem_of("{'a': 1}"), HasSubstr("is not valid JSON"));
  EXPECT_THAT(problem_of("[1] x"), HasSubstr("is not valid JSON"));
  EXPECT_THAT(problem_of("[1e999]"), HasSubstr("is not valid JSON")) << "a number that no double holds";
  EXPECT_THAT(problem_of("[\"\xff\"]"), HasSubstr("is not valid UTF-8"));
  EXPECT_THAT(problem_of(std::string("[1]\0garbage", 11)), HasSubstr("a NUL byte")) << "which would end the text";
}

TEST(ParseJson, RefusesDeepNestingBeforeAnythingRecurses) {
  for (const auto& [begin, end] :
       {std::pair("[", "]"), std::pair("{\"a\":", "}"), std::pair("[{\"a\":", "}]"), std::pair("[", "")}) {
    const size_t levels = std::string(begin).size() == 6 ? 32 : 64;
    if (*end) {
      EXPECT_THAT(problem_of(repeated(levels, begin) + "1" + repeated(levels, end)), IsEmpty()) << begin;
    }
    EXPECT_EQ(problem_of(repeated(levels + 1, begin) + "1" + repeated(levels + 1, end)),
              "is nested deeper than 64 levels");
    EXPECT_EQ(problem_of(repeated(1'000'000, begin) + "1" + repeated(1'000'000, end)),
              "is nested deeper than 64 levels");
  }
  EXPECT_EQ(problem_of("[[[1]]]", {.deepest = 2}), "is nested deeper than 2 levels");
}

TEST(ParseJson, RefusesMoreValuesThanTextOfItsLengthCanMean) {
  for (const char* value : {"1,", "{},", "[],", "\"\","}) {
    const auto few = repeated(400'000, value), many = repeated(3'000'000, value);
    EXPECT_THAT(problem_of("[" + few + "1]"), IsEmpty()) << value;
    EXPECT_THAT(problem_of("[" + many + "1]"), HasSubstr("more values than text of its length can mean")) << value;
  }
  std::string words;  // as vocabularies and indexes have them
  for (int i = 0; i < 500'000; ++i) words += fmt::format("\"word{}\":{},", i, i);
  EXPECT_THAT(problem_of("{" + words + "\"\":[]}"), IsEmpty());
}

TEST(ParseJson, TakesTimeInProportion) {
  std::string text = "{";
  for (int i = 0; i < 500'000; ++i) text += fmt::format("\"a{}\":1,", i);
  text += "\"\":0}";
  const support::Deadline deadline;  // a search for each key takes longer
  EXPECT_EQ(parse_json<ordered_json>(text).size(), 500'001u);
}

TEST(ShowJson, IsShortWhateverTheValueHolds) {
  EXPECT_EQ(show_json(json::parse(R"({"a": [1, 2.5, "x", null]})")), R"({"a":[1,2.5,"x",null]})");
  EXPECT_EQ(show_json(json(std::string(1000, 'x'))), "\"" + std::string(56, 'x') + "...");
  EXPECT_EQ(show_json(json("x" + repeated(100, "é"))).size(), 60u - 1) << "no half of a character";
  const json many(std::vector<std::string>(100'000, std::string(100, 'y')));
  EXPECT_LE(show_json(many, 200).size(), 200u);
  EXPECT_EQ(show_json(json("\xff")), "\"\xef\xbf\xbd\"");
}

TEST(WholeNumber, DoesNotWrapAround) {
  EXPECT_EQ(accelerate::whole_number(json(-3)), -3);
  EXPECT_EQ(accelerate::whole_number(json(INT64_MAX)), INT64_MAX);
  EXPECT_EQ(accelerate::whole_number(json::parse("9223372036854775808")), std::nullopt);
  EXPECT_EQ(accelerate::whole_number(json(1.0)), std::nullopt);
}

TEST(ReadFile, TakesRegularFilesOnlyAndDoesNotWait) {
  const auto dir = fs::path(support::scratch_dir()) / "read_file";
  fs::create_directories(dir);
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", dir / "zero");
  std::ofstream(dir / "file") << "text";
  std::string text;
  EXPECT_THAT(accelerate::read_file(dir / "file", 4, text), IsEmpty());
  EXPECT_EQ(text, "text");
  EXPECT_THAT(accelerate::read_file(dir / "file", 3, text), HasSubstr("expected at most 3"));
  for (const char* name : {"fifo", "zero"})
    EXPECT_THAT(accelerate::read_file(dir / name, 100, text), HasSubstr("not a regular file")) << name;
  EXPECT_THAT(accelerate::read_file(dir, 100, text), HasSubstr("it is a folder"));
  EXPECT_THAT(accelerate::read_file(dir / "absent", 100, text), HasSubstr("No such file"));
  EXPECT_THAT(accelerate::read_file(dir / std::string("file\0.json", 10), 100, text), HasSubstr("NUL"));
  EXPECT_THAT(accelerate::read_file("/proc/self/status", 100'000, text), IsEmpty()) << "its size is said to be 0";
  EXPECT_THAT(text, HasSubstr("VmPeak"));
  std::ofstream(dir / "sparse").close();
  fs::resize_file(dir / "sparse", uintmax_t{1} << 40);
  EXPECT_THAT(accelerate::read_file(dir / "sparse", 1 << 20, text), HasSubstr("expected at most 1048576"));
  EXPECT_THAT(support::message_of<CheckpointError>(
                  [&] { accelerate::read_text<CheckpointError>("list", dir / "fifo", 9, "Give a file."); }),
              testing::AllOf(HasSubstr("list '"), HasSubstr("not a regular file. Give a file.")));
  EXPECT_EQ(accelerate::read_folder<CheckpointError>("folder", dir).size(), 4U);
  EXPECT_THAT(
      support::message_of<CheckpointError>([&] { accelerate::read_folder<CheckpointError>("folder", dir / "file"); }),
      HasSubstr("file': can't read the folder: Not a directory."));
}

TEST(FileInside, IsNamedPlainlyAndMayBeALink) {
  const auto dir = fs::path(support::scratch_dir()) / "file_inside", cache = dir / "models--m";
  const auto snapshot = cache / "snapshots" / "0123";
  fs::create_directories(snapshot);
  fs::create_directories(cache / "blobs");
  for (const auto& file : {dir / "outside", cache / "blobs" / "abc", snapshot / "plain"}) std::ofstream(file) << "x";
  fs::create_symlink("../../blobs/abc", snapshot / "cached");
  fs::create_symlink("plain", snapshot / "near");
  fs::create_symlink(dir / "outside", snapshot / "out");
  fs::create_symlink("../../../outside", snapshot / "relative");
  fs::create_symlink(snapshot, dir / "linked_folder");
  const auto refused = [&](const fs::path& folder, const std::string& name) {
    try {
      EXPECT_EQ(accelerate::file_inside("index", folder, name), folder / name);
      return std::string();
    } catch (const CheckpointError& error) {
      return std::string(error.what());
    }
  };
  for (const char* name : {"plain", "cached", "near", "absent"}) {
    EXPECT_THAT(refused(snapshot, name), IsEmpty());
    EXPECT_THAT(refused(dir / "linked_folder", name), IsEmpty()) << "the folder itself may be a link";
  }
  EXPECT_EQ(accelerate::file_inside("index", "", "absent"), "absent") << "in the working folder";
  for (const char* name : {"out", "relative"}) {
    EXPECT_THAT(refused(snapshot, name), IsEmpty()) << "a link of the user's own";
    EXPECT_THAT(
        support::message_of<CheckpointError>([&] { accelerate::check_inside("copy", snapshot, snapshot / name); }),
        HasSubstr("which is neither in the folder"));
  }
  for (const char* name : {"", ".", "..", "../plain", "/etc/passwd", "a/b"})
    EXPECT_THAT(refused(snapshot, name), HasSubstr("not the plain name of a file")) << name;
  EXPECT_THAT(refused(snapshot, std::string("plain\0x", 7)), HasSubstr("not the plain name of a file"));
}

}  // namespace
