/// Byte-level BPE against the `tokenizers` package, and alone.

#include <fstream>
#include <set>
#include <sstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/formats/gguf.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "formats/gguf_writer.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::CheckpointError;
using accelerate::models::StreamDecoder;
using accelerate::models::Tokenizer;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

fs::path folder(const std::string& name) {
  const auto path = fs::path(support::scratch_dir()) / name;
  fs::create_directories(path);
  return path;
}

/// Every byte that GPT-2 spells as itself, "ab", "abc", " a" and one special token.
json small_json() {
  json vocab;
  for (char c = '!'; c <= '~'; ++c) vocab[std::string(1, c)] = c;
  vocab["\u0120"] = 0, vocab["\u00c3"] = 1, vocab["\u00a9"] = 2, vocab["\u010a"] = 3;
  vocab["ab"] = 200, vocab["abc"] = 201, vocab["\u0120a"] = 202, vocab["<s>"] = 203;
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"\u0120 a", "a b", json::array({"ab", "c"})}}}},
          {"added_tokens", {{{"id", 203}, {"content", "<s>"}, {"special", true}, {"normalized", false}}}},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"decoder", {{"type", "ByteLevel"}}}};
}

Tokenizer load(const json& tokenizer, const json& config = nullptr) {
  const auto path = folder("small");
  std::ofstream(path / "tokenizer.json") << tokenizer.dump();
  fs::remove(path / "tokenizer_config.json");
  if (!config.is_null()) std::ofstream(path / "tokenizer_config.json") << config.dump();
  return Tokenizer::from_pretrained(path);
}

std::string error_of(const json& tokenizer) {
  return support::message_of<CheckpointError>([&] { load(tokenizer); });
}

TEST(Tokenizer, MergesInTheOrderOfTheList) {
  const auto tokenizer = load(small_json(), {{"eos_token", "<s>"}, {"pad_token", {{"content", "!"}}}});
  EXPECT_THAT(tokenizer.encode("abc"), ElementsAre(201));
  EXPECT_THAT(tokenizer.encode("bab abab"), ElementsAre('b', 200, 202, 'b', 200)) << "' a' is merged before 'ab'";
  EXPECT_THAT(tokenizer.encode("ab<s>ab<s"), ElementsAre(200, 203, 200, '<', 's'));
  EXPECT_THAT(tokenizer.encode("\u00e9"), ElementsAre(1, 2));
  EXPECT_THAT(tokenizer.encode("\u00e8"), ElementsAre(1)) << "a byte without a token is left out";
  EXPECT_THAT(tokenizer.encode(""), IsEmpty());
  EXPECT_EQ(tokenizer.decode({201, 203, 1, 2}), "abc\u00e9");
  EXPECT_EQ(tokenizer.decode({201, 203, 1}, false), "abc<s>\ufffd");
  EXPECT_EQ(tokenizer.eos_token_id(), 203);
  EXPECT_EQ(tokenizer.pad_token_id(), '!');
  EXPECT_EQ(tokenizer.bos_token_id(), std::nullopt);
  EXPECT_EQ(tokenizer.token_to_id("\u0120a"), 202);
  EXPECT_THROW(tokenizer.decode({204}), accelerate::ShapeError);
  EXPECT_THROW(tokenizer.decode({-1}), accelerate::ShapeError);
}

TEST(Tokenizer, LongPiecesAreMergedAsShortOnes) {
  const auto tokenizer = load(small_json());
  std::string text;
  std::vector<int64_t> expected;
  for (int i = 0; i < 50'000; ++i) text += "abc", expected.push_back(201);
  EXPECT_EQ(tokenizer.encode(text), expected);
}

TEST(Tokenizer, BatchesArePaddedOnTheLeft) {
  const auto tokenizer = load(small_json(), {{"pad_token", "!"}});
  const auto batch = tokenizer.encode_batch({"abc", "ab d"});
  EXPECT_TRUE(batch.input_ids.equal(
      torch::tensor({{int64_t{'!'}, int64_t{'!'}, int64_t{201}}, {int64_t{200}, int64_t{0}, int64_t{'d'}}})));
  EXPECT_TRUE(batch.attention_mask.equal(torch::tensor({{0, 0, 1}, {1, 1, 1}}, at::kLong)));
  EXPECT_THROW(tokenizer.encode_batch({}), accelerate::ShapeError);
}

TEST(Tokenizer, StreamsWholeCharacters) {
  StreamDecoder stream(load(small_json()));
  EXPECT_EQ(stream.push(201), "abc");
  EXPECT_EQ(stream.push(1), "");
  EXPECT_EQ(stream.push(2), "\u00e9");
  EXPECT_EQ(stream.push(203), "") << "special";
  EXPECT_EQ(stream.push(205), "") << "embeddings may have more rows than there are tokens";
  EXPECT_EQ(stream.push(2), "\ufffd") << "no character begins so";
  EXPECT_EQ(stream.push(1), "");
  EXPECT_EQ(stream.finish(), "\ufffd");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Tokenizer, StreamsEndBeforeAStopString) {
  const auto said = [](std::vector<std::string> stops, const std::vector<int64_t>& ids) {
    StreamDecoder stream(load(small_json()), true, std::move(stops));
    std::string text;
    for (const auto id : ids) text += stream.push(id) + "|";
    text += stream.finish();
    return text + (stream.stopped() ? " stopped" : "");
  };
  EXPECT_EQ(said({"cx"}, {201, 'x', 'y'}), "ab||| stopped");
  EXPECT_EQ(said({"cx"}, {201, 'y', 'x'}), "ab|cy|x|") << "what may have become one comes later";
  EXPECT_EQ(said({"cx"}, {'a', 201}), "a|ab|c") << "and at the end";
  EXPECT_EQ(said({"bc", "b"}, {201, 'x'}), "a|| stopped") << "within a token";
  EXPECT_EQ(said({"xxy"}, {'x', 'x', 'x', 'y'}), "||x|| stopped");
  EXPECT_EQ(said({"\u00e9"}, {201, 1, 2}), "abc||| stopped");
}

TEST(Tokenizer, NamesWhatItCantDo) {
  const auto with = [](const std::string& key, const json& value) {
    auto changed = small_json();
    changed[key] = value;
    return error_of(changed);
  };
  EXPECT_THAT(with("normalizer", {{"type", "Lowercase"}}),
              HasSubstr("the normalizer {\"type\":\"Lowercase\"} is not supported"));
  EXPECT_THAT(with("pre_tokenizer", {{"type", "Metaspace"}}), HasSubstr("the pre-tokenizer"));
  EXPECT_THAT(with("normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "^|a"}}}, {"content", "x"}}),
              HasSubstr("with a pattern that matches places between characters, the normalizer"));
  EXPECT_THAT(with("post_processor", {{"type", "Wrapping"}}), HasSubstr("the post-processor"));
  const json of_text = {{"Sequence", {{"id", "A"}}}}, of_token = {{"SpecialToken", {{"id", "<s>"}}}};
  const auto template_of = [&](const json& single) {
    return json{{"type", "TemplateProcessing"},
                {"single", single},
                {"pair", {of_text, of_text}},
                {"special_tokens", {{"<s>", {{"ids", {203}}}}}}};
  };
  const auto in_row = [](const json& processors) { return json{{"type", "Sequence"}, {"processors", processors}}; };
  EXPECT_THAT(
      with("post_processor", in_row({template_of({of_token, of_text, of_token}), template_of({of_text, of_token})})),
      HasSubstr("behind another that makes 3 pieces of a text"));
  EXPECT_THAT(with("post_processor", in_row({template_of({of_token, of_text}), template_of({of_text})})),
              HasSubstr("has it 0 times, expected once"));
  EXPECT_THAT(with("post_processor", in_row(json(101, {{"type", "ByteLevel"}}))),
              HasSubstr("more than 100 post-processors"));
  EXPECT_THAT(with("pre_tokenizer", nullptr), HasSubstr("without ByteLevel, the pre-tokenizer null"));
  EXPECT_THAT(with("pre_tokenizer",
                   {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "ByteLevel"}}}}}),
              HasSubstr("behind ByteLevel, the pre-tokenizer {\"type\":\"ByteLevel\"}"));
  auto unknown = small_json();
  unknown["model"]["unk_token"] = "<nothing>";
  EXPECT_THAT(error_of(unknown), HasSubstr("unk_token is '<nothing>', which the vocabulary lacks"));
  EXPECT_THAT(with("decoder", {{"type", "WordPiece"}}), HasSubstr("the decoder"));
  EXPECT_THAT(with("model", {{"type", "Unigram"}}), HasSubstr("the model \"Unigram\""));
  EXPECT_THAT(
      with("model", {{"unk_id", 0}, {"vocab", json::array({json::array({"<unk>", 0.0}), json::array({"a", -1.5})})}}),
      HasSubstr("the model \"Unigram\" is not supported"));
  EXPECT_THAT(with("model", {{"type", "WordPiece"}}), HasSubstr("Encode with WordPieceTokenizer"));
  EXPECT_THAT(with("model", {{"type", "BPE"}}), HasSubstr("a field is not of the form"));
  EXPECT_THAT(with("pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}}),
              HasSubstr("tokenizer pattern '(a'"));
  auto merges = small_json();
  merges["model"]["merges"].push_back("x y");
  EXPECT_THAT(error_of(merges), HasSubstr("the merge of 'x' and 'y' is of tokens that the vocabulary lacks"));
  auto byte_fallback = small_json();
  byte_fallback["model"]["byte_fallback"] = true;
  EXPECT_THAT(error_of(byte_fallback), HasSubstr("byte_fallback"));
  EXPECT_THAT(support::message_of<CheckpointError>([] { Tokenizer::from_pretrained(folder("empty")); }),
              HasSubstr("neither tokenizer.json nor vocab.json"));
}

/// A few bytes that ask for memory of millions of tokens, ids that no model has, nesting without end.
TEST(Tokenizer, IdsAndDepthAreBoundedByWhatTheFileHolds) {
  const auto with_id = [](const json& id) {
    auto changed = small_json();
    changed["model"]["vocab"]["zz"] = id;
    return changed;
  };
  for (const json& id : {json(99'999'999), json(-1), json(1.0), json("7"), json(~uint64_t{0})})
    EXPECT_THAT(error_of(with_id(id)), HasSubstr("the token 'zz' has the id " + id.dump() + ", expected 0 to"));
  EXPECT_EQ(load(with_id(60'000)).vocab_size(), 60'001) << "gaps as special tokens leave them";
  auto changed = small_json();
  changed["added_tokens"].push_back({{"id", 300}, {"content", "<gap>"}});
  EXPECT_THAT(error_of(changed), HasSubstr("give the token '<gap>' the id 300, and the next free one is 102"));
  changed = small_json();
  changed["added_tokens"].push_back({{"id", 99'999'999}, {"content", "<far>"}});
  EXPECT_THAT(error_of(changed), HasSubstr("give the token '<far>' the id 99999999, and the next free one is 102"));
  for (const json& id : {json(int64_t{1} << 62), json(-5), json(204)}) {
    changed = small_json();
    changed["post_processor"] = {{"type", "TemplateProcessing"},
                                 {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                                 {"special_tokens", {{"<s>", {{"ids", {id}}}}}}};
    EXPECT_THAT(error_of(changed), HasSubstr("a special token has the id " + id.dump() + ", and there are 204 tokens"))
        << "which encode() would give out";
  }
  json nested;
  for (int i = 0; i < 40; ++i) nested = {{"type", "Sequence"}, {"normalizers", {nested}}};
  changed = small_json();
  changed["normalizer"] = nested;
  EXPECT_THAT(error_of(changed), HasSubstr("it is nested deeper than 64 levels"));
  const auto path = folder("two_files");
  std::ofstream(path / "merges.txt") << "a b\n";
  std::ofstream(path / "vocab.json") << R"({"a": 0, "b": 100000000})";
  EXPECT_THAT(support::message_of<CheckpointError>([&] { Tokenizer::from_pretrained(path); }),
              HasSubstr("the token 'b' has the id 100000000, expected 0 to 65537 for 2 tokens"));
}

TEST(Tokenizer, ChatMlIsRecognisedAndNothingElse) {
  const std::vector<accelerate::models::ChatMessage> question = {{"user", "Hi {{ x }}"}};
  const auto render = [&](const std::string& text, bool prompt = true) {
    return load(small_json(), {{"chat_template", text}}).apply_chat_template(question, prompt);
  };
  const std::string plain =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
      "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  EXPECT_EQ(render(plain), "<|im_start|>user\nHi {{ x }}<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(render(plain, false), "<|im_start|>user\nHi {{ x }}<|im_end|>\n");
  EXPECT_EQ(render("{%- for message in messages %}\n  {{- \"<|im_start|>\" + message.role + \"\\n\" + message.content "
                   "+ \"<|im_end|>\\n\" }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- "
                   "'<|im_start|>assistant\\n' }}\n{%- endif %}\n"),
            render(plain));
  for (const std::string& other : {plain + "x", "{{ bos_token }}" + plain,
                                   std::string("{% for m in messages %}{% endfor %}"), std::string("{{ 'a' }}")})
    EXPECT_THAT(support::message_of<CheckpointError>([&] { render(other); }), HasSubstr("not of a known form"))
        << other;
  EXPECT_THAT(support::message_of<CheckpointError>([&] { load(small_json()).apply_chat_template(question); }),
              HasSubstr("without a chat template"));
}

/// Templates come from files of others: neither deep recursion, as of std::regex, nor time beyond their length.
TEST(Tokenizer, LongTemplatesAndOddPatternsEndInAnError) {
  const std::vector<accelerate::models::ChatMessage> question = {{"user", "Hi"}};
  for (const std::string& part : {std::string(1'000'000, ' '), std::string(1'000'000, '\n'),
                                  std::string(1'000'000, '+'), "{%" + std::string(1'000'000, ' ') + "-%}"}) {
    const auto tokenizer = load(small_json(), {{"chat_template", part + "{{- x -}}" + part}});
    EXPECT_THAT(support::message_of<CheckpointError>([&] { tokenizer.apply_chat_template(question); }),
                HasSubstr("not of a known form"));
  }
  auto with = small_json();
  const auto split = [](const std::string& regex) {
    return json{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
  };
  with["pre_tokenizer"] = split("\\C");  // would cut characters
  EXPECT_THAT(error_of(with), HasSubstr("tokenizer pattern '\\C'"));
  with["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", json::array()}};
  for (int i = 0; i < 101; ++i) with["pre_tokenizer"]["pretokenizers"].push_back(split("a"));
  EXPECT_THAT(error_of(with), HasSubstr("101 normalizers and pre-tokenizers, expected at most 100"));
  auto misspelt = small_json();
  misspelt["normalizr"] = {{"type", "NFC"}};
  EXPECT_THAT(error_of(misspelt), HasSubstr("it has a field 'normalizr', and the format has added_tokens, decoder"));
  auto newer = small_json();
  newer["version"] = "1.1";
  EXPECT_THAT(error_of(newer), HasSubstr("it is of version \"1.1\", expected \"1.0\""));
  // A match that begins before the last one ended, or behind its own end, cuts nothing twice.
  for (const char* regex : {"(?<=\\Ka)", "a\\Kb", "(?=ab\\K)", "b(?=\\K)"}) {
    with["pre_tokenizer"] = split(regex);
    try {
      EXPECT_EQ(load(with).decode(load(with).encode("!aabb!")), "!aabb!") << regex;
    } catch (const CheckpointError&) {  // newer versions of PCRE2 refuse some
    }
  }
}

// --- against the reference
// -----------------------------------------------------------------------------------------------------------

fs::path smollm() { return *support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"; }

void expect_same(const Tokenizer& tokenizer, const fs::path& cases, const std::string& kind) {
  std::ifstream file(cases);
  int count = 0, wrong = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const auto entry = json::parse(line);
    const auto text = entry["text"].get<std::string>();
    const auto expected = entry["ids"].get<std::vector<int64_t>>();
    const auto ids = tokenizer.encode(text);
    const bool same = ids == expected && tokenizer.decode(expected) == entry["decoded"] &&
                      tokenizer.decode(expected, false) == entry["all"];
    std::string streamed;
    StreamDecoder stream(tokenizer);
    for (const auto id : expected) streamed += stream.push(id);
    if (same && streamed + stream.finish() == entry["decoded"]) continue;
    if (++wrong <= 5)
      ADD_FAILURE() << kind << ": " << text << "\nexpected " << entry["ids"].dump() << "\n     got " << json(ids).dump()
                    << "\ndecoded  " << entry["decoded"] << "\n     got " << json(tokenizer.decode(expected)).dump();
  }
  EXPECT_GT(count, 5000) << kind;
  EXPECT_EQ(wrong, 0) << kind << " of " << count;
}

/// The folder of a kind's tokenizer and cases. The peer makes those of all kinds once for all tests of this program.
fs::path made_by_peer(const std::string& kind) {
  struct Owner {
    Owner() : path(fs::path(testing::TempDir()) / ("tokenizer_" + std::to_string(::getpid()))) {
      fs::create_directories(path);
      const auto peer =
          support::run_python("tests/unit/tokenizer_peer.py", {"cases", smollm().string(), path.string()});
      EXPECT_EQ(peer.exit_code, 0) << peer.output;
    }
    ~Owner() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
    const fs::path path;
  };
  static const Owner owner;
  return owner.path / kind;
}

TEST(TokenizerParity, SmolLm2FromItsModelAndFromTokenizerJson) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto made = made_by_peer("smollm");
  const auto tokenizer = Tokenizer::from_pretrained(smollm());
  expect_same(tokenizer, made / "cases.jsonl", "gguf");
  expect_same(Tokenizer::from_pretrained(made), made / "cases.jsonl", "tokenizer.json");
  EXPECT_EQ(tokenizer.apply_chat_template({{"user", "Hi"}}),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(tokenizer.apply_chat_template({{"system", "S"}, {"user", "Hi"}}, false),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
  EXPECT_THAT(tokenizer.encode("<|im_end|>"), ElementsAre(2));
  EXPECT_EQ(tokenizer.eos_token_id(), 2);
  EXPECT_THAT(tokenizer.encode("The capital of France is"), ElementsAre(504, 3575, 282, 4649, 314));
}

TEST(TokenizerParity, SmolLm2FromFilesThatItsModelAmountsTo) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const accelerate::GgufFile file(smollm());
  Tokenizer::from_pretrained(smollm()).save_pretrained(folder("files"));
  const auto cases = made_by_peer("smollm") / "cases.jsonl";
  const auto ours = Tokenizer::from_pretrained(folder("files")), of_model = Tokenizer::from_pretrained(smollm());
  expect_same(ours, cases, "files");
  const std::vector<accelerate::models::ChatMessage> chat{{"user", "Hi"}, {"assistant", "Yes?"}, {"user", "No."}};
  EXPECT_EQ(ours.apply_chat_template(chat), of_model.apply_chat_template(chat));
  EXPECT_EQ(ours.vocab_size(), of_model.vocab_size());
  EXPECT_EQ(ours.bos_token_id(), of_model.bos_token_id());
  EXPECT_EQ(ours.eos_token_id(), of_model.eos_token_id());
  EXPECT_EQ(ours.pad_token_id(), of_model.pad_token_id());
  const auto peer =
      support::run_python("tests/unit/tokenizer_peer.py", {"auto", folder("files").string(), cases.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto theirs = json::parse(peer.output);
  EXPECT_EQ(theirs["wrong"], 0) << theirs;
  EXPECT_EQ(theirs["chat"], ours.apply_chat_template({{"user", "Hi"}}));
  EXPECT_EQ(theirs["special"], json({1, 2, 2}));
  EXPECT_EQ(theirs["longest"], *file.metadata().integer("llama.context_length"));
}

/// As llama.cpp reads files that don't say whether texts begin with a token.
TEST(Tokenizer, OfAGgufFileBeginsWithATokenWhereItsKindDoes) {
  using accelerate::formats::gguf_entry;
  const std::set<std::string> beginning = {"llama-bpe", "llama3", "llama-v3", "falcon3"};
  for (const std::string cuts :
       {"llama-bpe", "llama3", "llama-v3", "falcon3", "gpt-2", "phi-2", "deepseek-r1-qwen", "megrez"}) {
    const accelerate::formats::GgufOutline outline{
        .entries = {gguf_entry("tokenizer.ggml.model", "gpt2"), gguf_entry("tokenizer.ggml.pre", cuts),
                    gguf_entry("tokenizer.ggml.tokens", std::vector<std::string>{"a", "<s>"}),
                    gguf_entry("tokenizer.ggml.token_type", std::vector<int32_t>{1, 3}),
                    gguf_entry("tokenizer.ggml.merges", std::vector<std::string>()),
                    gguf_entry("tokenizer.ggml.bos_token_id", 1U)}};
    const auto path = folder("begins") / (cuts + ".gguf");
    accelerate::formats::GgufWriter("test", path, outline).finish();
    const std::vector<int64_t> expected =
        beginning.contains(cuts) ? std::vector<int64_t>{1, 0} : std::vector<int64_t>{0};
    EXPECT_EQ(Tokenizer::from_pretrained(path).encode("a"), expected) << cuts;
    const auto files = accelerate::formats::tokenizer_files(accelerate::GgufFile(path).metadata(), path.string());
    EXPECT_EQ(load(json::parse(files.at("tokenizer.json"))).encode("a"), expected) << cuts;
  }
}

TEST(Tokenizer, OfAGgufFileComposesWhereItsKindDoes) {
  using accelerate::formats::gguf_entry;
  for (const std::string cuts : {"qwen2", "deepseek-r1-qwen"}) {
    const accelerate::formats::GgufOutline outline{
        .entries = {
            gguf_entry("tokenizer.ggml.model", "gpt2"), gguf_entry("tokenizer.ggml.pre", cuts),
            gguf_entry("tokenizer.ggml.tokens", std::vector<std::string>{"e", "\u00cc", "\u0123", "\u00c3", "\u00a9"}),
            gguf_entry("tokenizer.ggml.merges", std::vector<std::string>())}};
    const auto path = folder("composes") / (cuts + ".gguf");
    accelerate::formats::GgufWriter("test", path, outline).finish();
    const auto expected = cuts == "qwen2" ? std::vector<int64_t>{3, 4} : std::vector<int64_t>{0, 1, 2};
    EXPECT_EQ(Tokenizer::from_pretrained(path).encode("e\u0301"), expected) << cuts;
  }
}

void expect_special(const Tokenizer& tokenizer, const json& expected) {
  json special;
  for (const auto id : {tokenizer.bos_token_id(), tokenizer.eos_token_id(), tokenizer.pad_token_id()})
    special.push_back(id ? json(*id) : json());
  EXPECT_EQ(special, expected["special"]);
  EXPECT_EQ(tokenizer.vocab_size(), expected["size"].get<int64_t>());
}

void expect_case(const Tokenizer& tokenizer, const fs::path& folder) {
  std::ifstream file(folder / "cases.json");
  const auto expected = json::parse(file);
  for (const auto& one : expected["cases"]) {
    const auto text = one["text"].get<std::string>();
    EXPECT_EQ(json(tokenizer.encode(text)), one["ids"]) << text;
    EXPECT_EQ(tokenizer.decode(one["ids"].get<std::vector<int64_t>>()), one["decoded"].get<std::string>()) << text;
  }
  if (expected.contains("special")) expect_special(tokenizer, expected);
}

/// Each folder that the peer makes: ids and texts are those of its cases. @return how many there are
/// @param saved  if given, gets a folder for each, without a model's config.json: what is read from it is the same
size_t expect_cases(const char* mode, const fs::path& saved = {}) {
  const auto made = folder(mode);
  const auto peer = support::run_python("tests/unit/tokenizer_peer.py", {mode, made.string()});
  EXPECT_EQ(peer.exit_code, 0) << peer.output;
  size_t folders = 0;
  for (const auto& entry : fs::directory_iterator(made)) {
    SCOPED_TRACE(entry.path().filename());
    ++folders;
    const auto tokenizer = Tokenizer::from_pretrained(entry.path());
    expect_case(tokenizer, entry.path());
    if (saved.empty()) continue;
    const auto again = saved / entry.path().filename();
    tokenizer.save_pretrained(again);
    fs::copy_file(entry.path() / "cases.json", again / "cases.json");
    expect_case(Tokenizer::from_pretrained(again), again);
  }
  return folders;
}

TEST(TokenizerParity, PartsOfTokenizerJsonAreThoseOfThePackage) {
  SKIP_WITHOUT_PYTHON();
  EXPECT_EQ(expect_cases("parts"), 57U);
}

/// Every way in which the files around a vocabulary say it; and once more from what save_pretrained() writes.
TEST(TokenizerParity, FilesAroundAVocabularySayWhatTheyDoInTransformers) {
  SKIP_WITHOUT_PYTHON();
  const auto saved = folder("saved");
  EXPECT_EQ(expect_cases("layouts", saved), 57U);
  const auto peer = support::run_python("tests/unit/tokenizer_peer.py", {"saved", saved.string()});
  EXPECT_EQ(peer.exit_code, 0) << peer.output;
}

TEST(Tokenizer, SavedFilesAreThoseThatWereRead) {
  auto files = small_json();
  files["pre_tokenizer"]["add_prefix_space"] = true;  // GPT-2's class, which config.json says, has none
  const auto from = folder("from"), to = folder("to");
  std::ofstream(from / "tokenizer.json") << files.dump();
  std::ofstream(from / "tokenizer_config.json") << R"({"eos_token":"<s>","bos_token":"<s>","unk_token":"<s>"})";
  std::ofstream(from / "config.json") << R"({"model_type":"gpt2"})";
  std::ofstream(from / "chat_template.jinja") << "a template";
  std::ofstream(to / "added_tokens.json") << R"({"<other>": 7000})";
  std::ofstream(to / "notes.txt") << "of somebody";
  const auto tokenizer = Tokenizer::from_pretrained(from);
  fs::remove_all(from);
  tokenizer.save_pretrained(to);
  EXPECT_FALSE(fs::exists(to / "added_tokens.json")) << "another tokenizer's";
  EXPECT_FALSE(fs::exists(to / "config.json"));
  EXPECT_TRUE(fs::exists(to / "notes.txt"));
  EXPECT_TRUE(fs::exists(to / "chat_template.jinja"));
  const auto again = Tokenizer::from_pretrained(to);
  EXPECT_THAT(tokenizer.encode("abc"), ElementsAre(201));
  EXPECT_THAT(again.encode("abc"), ElementsAre(201)) << "the class went along";
  EXPECT_EQ(again.eos_token_id(), tokenizer.eos_token_id());
  std::ifstream written(to / "tokenizer.json");
  EXPECT_EQ(json::parse(written), files);

  using accelerate::formats::gguf_entry;
  const accelerate::formats::GgufOutline outline{
      .entries = {gguf_entry("tokenizer.ggml.model", "gpt2"), gguf_entry("tokenizer.ggml.pre", "gpt-2"),
                  gguf_entry("tokenizer.ggml.tokens", std::vector<std::string>{"a", "\u0120"}),
                  gguf_entry("tokenizer.ggml.merges", std::vector<std::string>()),
                  gguf_entry("tokenizer.ggml.add_space_prefix", true)}};
  accelerate::formats::GgufWriter("test", to / "space.gguf", outline).finish();
  const auto spaced = Tokenizer::from_pretrained(to / "space.gguf");
  EXPECT_THAT(spaced.encode("a"), ElementsAre(1, 0));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { spaced.save_pretrained(to / "never"); }),
              HasSubstr("add_space_prefix"));
  EXPECT_FALSE(fs::exists(to / "never"));
}

/// The same, as recorded: the peer's mode "record" writes the fixture.
TEST(Tokenizer, FilesAroundAVocabularySayWhatTransformersMadeOfThem) {
  std::ifstream file(ACCELERATE_SOURCE_DIR "/tests/unit/fixtures/tokenizer_folders.json");
  const auto recorded = json::parse(file);
  for (const auto& [name, one] : recorded["folders"].items()) {
    SCOPED_TRACE(name);
    const auto path = folder(name);
    const auto& vocabulary = recorded["vocabularies"][one["vocabulary"].get<std::string>()];
    const auto& merges = recorded["merges"].get_ref<const std::string&>();
    auto files = one["files"];
    if (files.contains("tokenizer")) {
      auto& model = files["tokenizer"]["model"];
      model["vocab"] = vocabulary;
      std::istringstream lines(merges);
      std::string line;
      for (std::getline(lines, line); std::getline(lines, line);) model["merges"].push_back(line);
    } else {
      files["vocab"] = vocabulary;
      std::ofstream(path / "merges.txt") << merges;
    }
    for (const auto& [file_name, content] : files.items()) std::ofstream(path / (file_name + ".json")) << content;
    const auto tokenizer = Tokenizer::from_pretrained(path);
    for (size_t i = 0; i < recorded["texts"].size(); ++i)
      EXPECT_EQ(json(tokenizer.encode(recorded["texts"][i].get<std::string>())), one["expected"]["ids"].at(i)) << i;
    expect_special(tokenizer, one["expected"]);
  }
}

/// Files that contradict each other, too: equal ids and texts, or an error that names the contradiction.
TEST(TokenizerParity, FilesAroundAVocabularyAtRandom) {
  SKIP_WITHOUT_PYTHON();
  const auto made = folder("random");
  const auto peer = support::run_python("tests/unit/tokenizer_peer.py", {"random", made.string(), "1", "40"});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  int same = 0;
  for (const auto& entry : fs::directory_iterator(made)) {
    SCOPED_TRACE(entry.path().filename());
    if (!fs::exists(entry.path() / "cases.json")) continue;
    try {
      expect_case(Tokenizer::from_pretrained(entry.path()), entry.path());
      ++same;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("which of them the model was trained with can't be known"));
    }
  }
  EXPECT_GE(same, 38) << "of the 40 few contradict each other";
}

TEST(Tokenizer, FilesAroundAVocabularyThatCantBeFollowedAreNamed) {
  const auto error = [](const std::map<std::string, json>& files) {
    const auto path = folder("around");
    for (const auto& entry : fs::directory_iterator(path)) fs::remove(entry.path());
    std::ofstream(path / "vocab.json") << R"({"a": 0, "b": 1, "ab": 2})";
    std::ofstream(path / "merges.txt") << "a b\n";
    for (const auto& [name, content] : files) std::ofstream(path / (name + ".json")) << content.dump();
    return support::message_of<CheckpointError>([&] { Tokenizer::from_pretrained(path); });
  };
  EXPECT_THAT(error({{"added_tokens", {{"<x>", 7}}}}),
              AllOf(HasSubstr("give the token '<x>' the id 7, and the next free one is 3"), HasSubstr("transformers")));
  EXPECT_THAT(error({{"tokenizer_config", {{"added_tokens_decoder", {{"1", {{"content", "a"}}}}}}}}),
              HasSubstr("the token 'a' the id 1, and in the vocabulary it is 0"));
  EXPECT_THAT(error({{"tokenizer_config", {{"added_tokens_decoder", {{"x", {{"content", "a"}}}}}}}}),
              HasSubstr("added_tokens_decoder has the id 'x'"));
  EXPECT_THAT(error({{"tokenizer_config", {{"tokenizer_class", "WhisperTokenizerFast"}}}}),
              AllOf(HasSubstr("it is of the class WhisperTokenizer"), HasSubstr("save_pretrained")));
  EXPECT_THAT(error({{"tokenizer_config", {{"tokenizer_class", "RobertaTokenizer"}, {"cls_token", nullptr}}}}),
              HasSubstr("puts cls_token before a text and sep_token after it"));
  EXPECT_THAT(error({{"tokenizer_config", {{"eos_token", 2}}}}), HasSubstr("eos_token is 2, expected a token"));
  EXPECT_THAT(error({{"config", {{"model_type", "llama"}}}}), HasSubstr("for this model_type"));
  EXPECT_THAT(error({{"tokenizer_config", {{"fast_tokenizer_files", {"tokenizer.json", "tokenizer.4.0.0.json"}}}}}),
              HasSubstr("fast_tokenizer_files names"));
  EXPECT_THAT(error({{"special_tokens_map", json::array()}}),
              AllOf(HasSubstr("special_tokens_map.json"), HasSubstr("not a JSON object")));
  EXPECT_THAT(error({{"tokenizer_config", {{"add_bos_token", 1}}}}), HasSubstr("add_bos_token is 1, expected true"));
}

TEST(TokenizerParity, Gpt2FromVocabularyAndMerges) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto made = made_by_peer("gpt2");
  expect_same(Tokenizer::from_pretrained(made), made / "cases.jsonl", "gpt2");
}

TEST(TokenizerParity, Llama3PatternAndTemplate) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto made = made_by_peer("llama3");
  expect_same(Tokenizer::from_pretrained(made), made / "cases.jsonl", "llama3");
}

TEST(TokenizerParity, NormalizersPrefixSpaceAndStrippingTokens) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto made = made_by_peer("nfc");
  expect_same(Tokenizer::from_pretrained(made), made / "cases.jsonl", "nfc");
}

// As one text, which is longer than any of the cases.
TEST(TokenizerParity, ProseIsOneText) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  std::ifstream pairs(*support::data_dir() / "pairs.tsv");
  std::string text{std::istreambuf_iterator<char>(pairs), {}};
  text.resize(text.find('\n', 300'000));
  const auto path = folder("prose") / "text";
  std::ofstream(path, std::ios::binary) << text;
  const auto peer =
      support::run_python("tests/unit/tokenizer_peer.py", {"prose", made_by_peer("smollm").string(), path.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  EXPECT_EQ(Tokenizer::from_pretrained(smollm()).encode(text), json::parse(peer.output).get<std::vector<int64_t>>());
}

}  // namespace
