#include <fstream>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/models/wordpiece.hpp"
#include "accelerate/utils/error.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::models::EncodeOptions;
using accelerate::models::Padding;
using accelerate::models::WordPieceOptions;
using accelerate::models::WordPieceTokenizer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::string> kVocabulary = {"[PAD]",  "[UNK]",     "[CLS]", "[SEP]",  "[MASK]", "un", "##believ",
                                              "##able", "the",       "a",     "##a",    ",",      ".",  "\u4e2d",
                                              "cafe",   "caf\u00e9", "The",   "\u03c3", "##ve"};

WordPieceTokenizer small(const WordPieceOptions& options = {}) { return WordPieceTokenizer(kVocabulary, options); }

fs::path folder_with(const std::string& name, const std::string& vocabulary, const std::string& config = "") {
  const auto folder = fs::path(support::scratch_dir()) / name;
  fs::create_directories(folder);
  std::ofstream(folder / "vocab.txt", std::ios::binary) << vocabulary;
  if (!config.empty()) std::ofstream(folder / "tokenizer_config.json") << config;
  return folder;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const accelerate::CheckpointError& error) {
    return error.what();
  }
  return "no CheckpointError";
}

TEST(WordPiece, WordsAndPieces) {
  EXPECT_THAT(small().tokenize("Unbelievable, the THE."),
              ElementsAre("un", "##believ", "##able", ",", "the", "the", "."));
  EXPECT_THAT(small().tokenize("unbelievably"), ElementsAre("[UNK]"))
      << "a word with one unknown piece is unknown as a whole";
  EXPECT_THAT(small().tokenize("the\u4e2dthe \u4e2d"), ElementsAre("the", "\u4e2d", "the", "\u4e2d"));
  EXPECT_THAT(small().tokenize("CAF\u00c9 cafe\u0301"), ElementsAre("cafe", "cafe"));
  EXPECT_THAT(small().tokenize("\u03a3"), ElementsAre("\u03c3"));
  EXPECT_THAT(small().tokenize("t\u200bh\xff"
                               "e\x01 \xc3"),
              ElementsAre("the"))
      << "controls and ill-formed UTF-8 vanish";
  EXPECT_THAT(small().tokenize("the [SEP]the"), ElementsAre("the", "[SEP]", "the"));
  EXPECT_TRUE(small().tokenize(" \t\n").empty());
  EXPECT_THAT(small().tokenize(std::string(100, 'a')).size(), 100);
  EXPECT_THAT(small().tokenize(std::string(101, 'a')), ElementsAre("[UNK]"));
}

TEST(WordPiece, CasedModelsKeepCaseAndAccents) {
  const auto cased = small({.do_lower_case = false});
  EXPECT_THAT(cased.tokenize("The caf\u00e9"), ElementsAre("The", "caf\u00e9"));
  EXPECT_THAT(small({.do_lower_case = false, .strip_accents = true}).tokenize("The caf\u00e9"),
              ElementsAre("The", "cafe"));
  EXPECT_THAT(small({.strip_accents = false}).tokenize("CAF\u00c9"), ElementsAre("caf\u00e9"));
}

TEST(WordPiece, TemplatesTruncationAndPadding) {
  const auto single = small().encode("the a", EncodeOptions{.padding = Padding::none});
  EXPECT_THAT(single.input_ids, ElementsAre(2, 8, 9, 3));
  EXPECT_THAT(single.token_type_ids, ElementsAre(0, 0, 0, 0));
  const auto pair = small().encode("the the the the", "a a", {.truncation = true, .max_length = 8});
  EXPECT_THAT(pair.input_ids, ElementsAre(2, 8, 8, 8, 3, 9, 9, 3)) << "the longer text is cut first";
  EXPECT_THAT(pair.token_type_ids, ElementsAre(0, 0, 0, 0, 0, 1, 1, 1));
  EXPECT_THAT(small({.model_max_length = 4}).encode("the a the a", {.truncation = true}).input_ids,
              ElementsAre(2, 8, 9, 3));
  const auto padded = small().encode("the", {.truncation = true, .max_length = 5, .padding = Padding::max_length});
  EXPECT_THAT(padded.input_ids, ElementsAre(2, 8, 3, 0, 0));
  EXPECT_THAT(padded.attention_mask, ElementsAre(1, 1, 1, 0, 0));
  EXPECT_THAT(small().encode("the", {.add_special_tokens = false}).input_ids, ElementsAre(8));
  EXPECT_THROW(small().encode("the", "a", {.truncation = true, .max_length = 2}), accelerate::ConfigError);
}

TEST(WordPiece, BatchesAreRectangularTensors) {
  const auto batch = small().encode_batch({"the the", "a"}, {"a", "the"}, {.padding = Padding::longest});
  EXPECT_EQ(batch.input_ids.sizes(), (std::vector<int64_t>{2, 6}));
  EXPECT_TRUE(batch.input_ids.equal(torch::tensor({{2, 8, 8, 3, 9, 3}, {2, 9, 3, 8, 3, 0}}, at::kLong)));
  EXPECT_TRUE(batch.token_type_ids.equal(torch::tensor({{0, 0, 0, 0, 1, 1}, {0, 0, 0, 1, 1, 0}}, at::kLong)));
  EXPECT_TRUE(batch.attention_mask.equal(torch::tensor({{1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 0}}, at::kLong)));
  EXPECT_THROW(small().encode_batch({"the the", "a"}, EncodeOptions{}), accelerate::ShapeError);
  EXPECT_THROW(small().encode_batch({"the"}, {"a", "a"}, {}), accelerate::ShapeError);
  EXPECT_THROW(small().encode_batch({}, EncodeOptions{}), accelerate::ShapeError);
}

TEST(WordPiece, DecodeJoinsPiecesAndClosesPunctuation) {
  EXPECT_EQ(small().decode({2, 5, 6, 7, 11, 8, 12, 3, 0}), "unbelievable, the.");
  EXPECT_EQ(small().decode({2, 8}, /*skip_special_tokens=*/false), "[CLS] the");
  EXPECT_THROW(small().decode({19}), accelerate::ShapeError);
  EXPECT_THROW(small().decode({-1}), accelerate::ShapeError);
}

TEST(WordPiece, ABadVocabularyIsRefusedWithItsReason) {
  const auto load = [](const std::string& vocabulary, const std::string& config = "") {
    return error_of([&] {
      WordPieceTokenizer::from_pretrained(
          folder_with("bad" + std::to_string(std::hash<std::string>()(vocabulary + config)), vocabulary, config));
    });
  };
  const std::string good = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n";
  EXPECT_EQ(load(good), "no CheckpointError");
  EXPECT_EQ(load("[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]"), "no CheckpointError")
      << "line ends of Windows, and a last line without one";
  EXPECT_THAT(load(""), HasSubstr("it is empty"));
  EXPECT_THAT(load(good + "the\n"), HasSubstr("the token 'the' is on line 6 and on line 7"));
  EXPECT_THAT(load(good + "\na\n"), HasSubstr("line 7 is empty"));
  EXPECT_THAT(load("the\na\n[CLS]\n[SEP]\n"), HasSubstr("lacks '[UNK]', '[PAD]', '[MASK]'"));
  EXPECT_THAT(load("the\n"), HasSubstr("vocab.txt")) << "a message must name the file";
  EXPECT_THAT(load(good, R"({"unk_token":"<unk>"})"), HasSubstr("lacks '<unk>'"));
  EXPECT_THAT(load(good, "{"), HasSubstr("not a JSON object"));
  EXPECT_THAT(load(good, R"({"do_lower_case":"yes"})"), HasSubstr("do_lower_case is \"yes\", expected true or false"));
  EXPECT_THAT(error_of([] { WordPieceTokenizer::from_pretrained(fs::path(support::scratch_dir()) / "nowhere"); }),
              HasSubstr("can't open"));
}

using Files = std::map<std::string, std::string>;
constexpr const char* kFive = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";

fs::path folder_of(const std::string& name, const Files& files) {
  const auto folder = fs::path(support::scratch_dir()) / name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  for (const auto& [file, text] : files) std::ofstream(folder / file, std::ios::binary) << text;
  return folder;
}

TEST(WordPiece, FilesBesideTheVocabularyNameAndAddTokens) {
  const auto load = [](Files files) {
    files.try_emplace("vocab.txt", std::string(kFive) + "<s>\n</s>\n[E1]\nthe\n");
    return WordPieceTokenizer::from_pretrained(folder_of("beside", files));
  };
  const auto map = load({{"special_tokens_map.json", R"({"cls_token":"<s>","sep_token":{"content":"</s>"}})"},
                         {"tokenizer_config.json", R"({"cls_token":"[CLS]"})"}});
  EXPECT_THAT(map.encode("the").input_ids, ElementsAre(5, 8, 6));
  const auto listed = load({{"tokenizer_config.json", R"({"additional_special_tokens":["[E1]","[E2]"]})"}});
  EXPECT_THAT(listed.tokenize("the [E1]the[E2]"), ElementsAre("the", "[E1]", "the", "[E2]"));
  EXPECT_EQ(listed.token_to_id("[E2]"), 9);
  EXPECT_EQ(listed.decode({7, 8, 9}), "the");
  listed.save_pretrained(fs::path(support::scratch_dir()) / "beside_saved");
  const auto again = WordPieceTokenizer::from_pretrained(fs::path(support::scratch_dir()) / "beside_saved");
  EXPECT_THAT(again.encode("[E1] [E2]").input_ids, ElementsAre(2, 7, 9, 3));
  const auto added = load(
      {{"added_tokens.json", R"({"[E2]":9})"}, {"special_tokens_map.json", R"({"extra_special_tokens":["[E2]"]})"}});
  EXPECT_THAT(added.encode("[E2]").input_ids, ElementsAre(2, 9, 3));
  const auto json =
      load({{"tokenizer.json",
             R"({"model":{"type":"WordPiece","vocab":{"[PAD]":0,"[UNK]":1,"[CLS]":2,"[SEP]":3,"[MASK]":4,"zebra":5},)"
             R"("max_input_chars_per_word":6},)"
             R"("added_tokens":[{"id":6,"content":"[E3]","special":true,"normalized":false}]})"}});
  EXPECT_THAT(json.encode("zebra the [E3] zebraze").input_ids, ElementsAre(2, 5, 1, 6, 1, 3));
  EXPECT_EQ(json.options().max_input_chars_per_word, 6);
}

TEST(WordPiece, WhatWouldGiveOtherIdsIsRefusedByName) {
  const auto said = [](const Files& changed) {
    Files files = {{"vocab.txt", std::string(kFive) + "the\n"}};
    for (const auto& [file, text] : changed) files[file] = text;
    return error_of([&] { WordPieceTokenizer::from_pretrained(folder_of("other_ids", files)); });
  };
  const auto config = [&](const std::string& text) { return said({{"tokenizer_config.json", text}}); };
  EXPECT_EQ(config(R"({"tokenizer_class":"ElectraTokenizerFast"})"), "no CheckpointError");
  EXPECT_THAT(config(R"({"tokenizer_class":"MPNetTokenizer"})"),
              HasSubstr("of the class 'MPNetTokenizer', expected BertT"));
  EXPECT_THAT(said({{"config.json", R"({"model_type":"bert","tokenizer_class":"BertJapaneseTokenizer"})"}}),
              HasSubstr("of the class 'BertJapaneseTokenizer'"));
  EXPECT_THAT(said({{"config.json", R"({"model_type":"mpnet"})"}}), HasSubstr("of the model_type 'mpnet'"));
  EXPECT_EQ(said({{"config.json", R"({"model_type":"distilbert"})"}}), "no CheckpointError");
  EXPECT_THAT(config(R"({"split_special_tokens":true})"), HasSubstr("split_special_tokens is true"));
  EXPECT_THAT(config(R"({"cls_token":null})"), HasSubstr("cls_token is null"));
  const auto token = [&](const std::string& flags) {
    return config(R"({"added_tokens_decoder":{"5":{"content":"the",)" + flags + "}}}");
  };
  EXPECT_THAT(token(R"("special":false,"normalized":false)"), HasSubstr("the added token 'the' is not special"));
  EXPECT_THAT(token(R"("special":true,"normalized":true)"), HasSubstr("is sought in cleaned text"));
  EXPECT_THAT(token(R"("special":true,"single_word":true)"), HasSubstr("is one for single words"));
  EXPECT_EQ(token(R"("special":true,"lstrip":true)"), "no CheckpointError") << "spaces are none of a word's";
  EXPECT_THAT(said({{"added_tokens.json", R"({"[E1]":9})"},
                    {"special_tokens_map.json", R"({"additional_special_tokens":["[E1]"]})"}}),
              HasSubstr("the id 9, and the next free one is 6"));
  const auto json = [&](const std::string& model) {
    return said({{"tokenizer.json", R"({"model":{"vocab":{"[UNK]":0},)" + model + "}}"}});
  };
  EXPECT_THAT(json(R"("type":"BPE")"), HasSubstr("model.type is \"BPE\", expected \"WordPiece\""));
  EXPECT_THAT(json(R"("continuing_subword_prefix":"@@")"), HasSubstr("continuing_subword_prefix is \"@@\""));
  EXPECT_THAT(said({{"tokenizer.json", R"({"model":{"vocab":{"[UNK]":0,"[PAD]":2}}})"}}),
              HasSubstr("the id of the token '[PAD]' is 2, expected one of 0 to 1"));
}

TEST(WordPiece, OptionsComeFromTokenizerConfig) {
  const auto loaded = WordPieceTokenizer::from_pretrained(
      folder_with("config", "<pad>\n<unk>\n[CLS]\n[SEP]\n[MASK]\nThe\n",
                  R"({"do_lower_case":false,"strip_accents":null,"model_max_length":1000000000000000019884624838656,)"
                  R"("unk_token":{"content":"<unk>"},"pad_token":"<pad>"})"));
  EXPECT_FALSE(loaded.options().do_lower_case);
  EXPECT_FALSE(loaded.options().strip_accents.has_value());
  EXPECT_EQ(loaded.options().model_max_length, 512);
  EXPECT_THAT(loaded.tokenize("The other"), ElementsAre("The", "<unk>"));
}

TEST(WordPiece, SavedFoldersLoadAgain) {
  const auto folder = fs::path(support::scratch_dir()) / "saved" / "deeper";
  small({.do_lower_case = false, .strip_accents = true, .model_max_length = 77}).save_pretrained(folder);
  const auto loaded = WordPieceTokenizer::from_pretrained(folder);
  EXPECT_EQ(loaded.vocab_size(), static_cast<int64_t>(kVocabulary.size()));
  EXPECT_EQ(loaded.options().model_max_length, 77);
  EXPECT_FALSE(loaded.options().do_lower_case);
  EXPECT_EQ(loaded.options().strip_accents, true);
}

/// Compares with what the reference made of each text; returns the number of texts.
int64_t compare(const WordPieceTokenizer& tokenizer, const fs::path& cases) {
  int64_t count = 0;
  int64_t wrong = 0;
  std::ifstream file(cases);
  for (std::string line; std::getline(file, line); ++count) {
    const auto want = nlohmann::json::parse(line);
    const auto text = want["text"].get<std::string>();
    const auto max_length = want["max_length"].get<int64_t>();
    EncodeOptions options;
    options.truncation = max_length > 0;
    if (max_length > 0) options.max_length = max_length;
    const auto got = want["pair"].is_null() ? tokenizer.encode(text, options)
                                            : tokenizer.encode(text, want["pair"].get<std::string>(), options);
    const bool equal = got.input_ids == want["ids"].get<std::vector<int64_t>>() &&
                       got.token_type_ids == want["types"].get<std::vector<int64_t>>() &&
                       tokenizer.decode(got.input_ids) == want["decoded"].get<std::string>();
    if (!equal && ++wrong <= 5)
      ADD_FAILURE() << line.substr(0, 3000) << "\nids:     " << nlohmann::json(got.input_ids)
                    << "\ndecoded: " << tokenizer.decode(got.input_ids);
  }
  EXPECT_EQ(wrong, 0) << "of " << count << " texts";
  return count;
}

int64_t compare_with_reference(const std::string& mode) {
  const auto out = fs::path(support::scratch_dir()) / (mode + ".jsonl");
  const auto result =
      support::run_python("tests/unit/wordpiece_cases.py", {mode, support::data_dir()->string(), out.string()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return compare(WordPieceTokenizer::from_pretrained(*support::data_dir() / "minilm"), out);
}

TEST(WordPieceReference, AllSentencesOfThePairs) {
  SKIP_WITHOUT_DATA();
  SKIP_WITHOUT_PYTHON();
  EXPECT_EQ(compare_with_reference("pairs"), 7950 * 4);
}

TEST(WordPieceReference, EveryCodePointAndTroublesomeStrings) {
  SKIP_WITHOUT_DATA();
  SKIP_WITHOUT_PYTHON();
  EXPECT_GT(compare_with_reference("unicode"), 10000);
}

TEST(WordPieceReference, FoldersSayWhatTheyDoInTransformers) {
  SKIP_WITHOUT_PYTHON();
  const auto root = fs::path(support::scratch_dir()) / "folders";
  const auto result = support::run_python("tests/unit/wordpiece_cases.py", {"folders", root.string(), "."});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  int64_t count = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    SCOPED_TRACE(entry.path().filename());
    count += compare(WordPieceTokenizer::from_pretrained(entry.path()), entry.path() / "cases.jsonl");
  }
  EXPECT_EQ(count, 15 * 8);
}

TEST(WordPieceReference, TransformersLoadsTheSavedFolder) {
  SKIP_WITHOUT_DATA();
  SKIP_WITHOUT_PYTHON();
  const auto minilm = WordPieceTokenizer::from_pretrained(*support::data_dir() / "minilm");
  std::vector<std::string> vocabulary;
  for (int64_t id = 0; id < minilm.vocab_size(); ++id) vocabulary.push_back(minilm.id_to_token(id));
  const WordPieceTokenizer shorter(vocabulary, {.model_max_length = 77});
  const auto folder = fs::path(support::scratch_dir()) / "for_transformers";
  shorter.save_pretrained(folder);
  const auto out = fs::path(support::scratch_dir()) / "folder.jsonl";
  const auto result = support::run_python("tests/unit/wordpiece_cases.py", {"folder", folder.string(), out.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(compare(shorter, out), 3);
}

}  // namespace
