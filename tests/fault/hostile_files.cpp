#include "hostile_files.hpp"

#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <stdexcept>

#include "stored_zip.hpp"

namespace hostile {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

std::string little(uint64_t value, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 255);
  return text;
}

std::string repeated(size_t times, const std::string& text) {
  std::string all;
  all.reserve(times * text.size());
  for (size_t i = 0; i < times; ++i) all += text;
  return all;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  if (at == std::string::npos) throw std::logic_error("'" + from + "' is not in the file that is to be damaged");
  return text.replace(at, from.size(), to);
}

constexpr size_t kDeep = 200'000;

/// Texts that can stand in the place of a number in JSON or YAML.
const Texts kNumbers = {
    "-1", "9223372036854775807", "9223372036854775808", "18446744073709551615", "1e30", "1.5", "\"x\"", "null", "[]",
    "{}"};
const uint64_t kLengths[] = {0,
                             1,
                             UINT64_C(1) << 31,
                             (UINT64_C(1) << 32) - 1,
                             UINT64_C(1) << 62,
                             (UINT64_C(1) << 63) - 1,
                             UINT64_C(1) << 63,
                             ~UINT64_C(0)};

/// JSON texts of any meaning, and none.
Texts json_texts() {
  return {"",
          " ",
          "{",
          "[]",
          "3",
          "null",
          "\"x\"",
          std::string("{}\0{}", 5),
          "\xef\xbb\xbf{}",
          std::string("\xff\xfe{\0}\0", 6),
          "{\"\xff\": 1}",
          "{'a': 1}",
          "{\"a\": 1e999}",
          "{} {}",
          repeated(kDeep, "["),
          repeated(kDeep, "{\"a\":"),
          repeated(kDeep, "[") + repeated(kDeep, "]"),
          repeated(kDeep, "{\"a\":") + "1" + repeated(kDeep, "}"),
          "{\"a\": " + repeated(kDeep, "[") + repeated(kDeep, "]") + "}",
          "[" + repeated(1'000'000, "{},") + "{}]",
          "{\"a\": \"" + std::string(1 << 20, 'x') + "\"}",
          repeated(100'000, "{\"a\":1}")};
}

class Collector {
 public:
  std::vector<Case> take() { return std::move(cases_); }

  void add(Reader reader, const std::string& name, const std::string& target, std::vector<File> files) {
    cases_.push_back({reader, name + "_" + std::to_string(cases_.size()), target, std::move(files)});
  }
  /// A file alone.
  void add(Reader reader, const std::string& name, const std::string& file, const std::string& bytes) {
    add(reader, name, file, std::vector<File>{{file, bytes}});
  }
  /// With others beside it, in a folder that is opened.
  void in_folder(Reader reader, const std::string& name, const std::string& file, const std::string& bytes,
                 const std::vector<File>& others) {
    std::vector<File> files{{file, bytes}};
    files.insert(files.end(), others.begin(), others.end());
    add(reader, name, "", std::move(files));
  }
  /// Whatever else can lie there.
  void no_files(Reader reader, const std::string& file, bool folder_is_opened, const std::vector<File>& others = {}) {
    using Kind = File::Kind;
    for (const auto& [kind, to] :
         {std::pair(Kind::fifo, ""), std::pair(Kind::folder, ""), std::pair(Kind::link, "/dev/zero"),
          std::pair(Kind::link, "/dev/tty"), std::pair(Kind::link, "/nowhere"), std::pair(Kind::sparse, "")}) {
      std::vector<File> files{{file, to, kind}};
      files.insert(files.end(), others.begin(), others.end());
      add(reader, "no_file", folder_is_opened ? "" : file, std::move(files));
    }
    std::vector<File> files{{file, file, Kind::link}};  // to itself
    files.insert(files.end(), others.begin(), others.end());
    add(reader, "circular_link", folder_is_opened ? "" : file, std::move(files));
  }

 private:
  std::vector<Case> cases_;
};

// Each of the following adds what is particular to a format.

std::string safetensors(const std::string& header, size_t data_bytes) {
  return little(header.size(), 8) + header + std::string(data_bytes, '\1');
}

const std::string kHeader =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"U8","shape":[4],"data_offsets":[24,28]}})";

void add_safetensors(Collector& all) {
  const auto add = [&](const std::string& name, const std::string& bytes) {
    all.add(Reader::safetensors, "safetensors_" + name, "model.safetensors", bytes);
  };
  const auto good = safetensors(kHeader, 28);
  add("good", good);
  for (const size_t cut :
       {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, good.size() - 28, good.size() - 4, good.size() - 1})
    add("cut", good.substr(0, cut));
  for (const auto length : kLengths) add("length", little(length, 8) + good.substr(8));
  for (const uint64_t length : {kHeader.size() - 1, kHeader.size() + 1})
    add("length", little(length, 8) + good.substr(8));
  for (const char* number : {"[2,", ",3]", "[0,", ",24]", "[24,"})
    for (const auto& odd : kNumbers) {
      const std::string text(number);
      const auto with = text.front() == '[' ? "[" + odd + "," : "," + odd + "]";
      add("number", safetensors(replaced(kHeader, text, with), 28));
    }
  for (const char* part : {"{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}", "[2,3]", "[0,24]", "\"F32\"",
                           "{\"format\":\"pt\"}"})
    for (const char* odd : {"null", "{}", "[]", "1", "\"F99\"", "[[[[[1]]]]]"})
      add("part", safetensors(replaced(kHeader, part, odd), 28));
  add("overlap", safetensors(replaced(kHeader, "[24,28]", "[20,24]"), 28));
  add("hole", safetensors(replaced(kHeader, "[24,28]", "[25,29]"), 29));
  add("twice", safetensors(replaced(kHeader, "\"b\"", "\"a\""), 28));
  add("appended", good + "x");
  add("dimensions", safetensors(replaced(kHeader, "[4]", "[" + repeated(100'000, "1,") + "4]"), 28));
  add("zero_and_large", safetensors(replaced(kHeader, "[4]", "[4611686018427387904,4611686018427387904,0]"), 28));
  for (const auto& text : json_texts()) add("json", safetensors(text, 0));
  std::string many = "{";
  for (int i = 0; i < 50'000; ++i)
    many += "\"t" + std::to_string(i) + R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)";
  add("many", safetensors(many + "\"__metadata__\":{}}", 0));
  all.no_files(Reader::safetensors, "model.safetensors", false);
}

void add_index(Collector& all) {
  constexpr const char* kFile = "model.safetensors.index.json";
  const File shard{"shard.safetensors", safetensors(kHeader, 28)};
  const auto add = [&](const std::string& name, const std::string& bytes, std::vector<File> others = {}) {
    std::vector<File> files{{kFile, bytes}, shard};
    files.insert(files.end(), others.begin(), others.end());
    all.add(Reader::index, "index_" + name, kFile, std::move(files));
  };
  const auto to = [](const std::string& name) { return R"({"weight_map":{"a":")" + name + R"("}})"; };
  add("good", to("shard.safetensors"));
  for (const auto& name :
       {std::string("../shard.safetensors"), std::string("/etc/passwd"), std::string(), std::string("."),
        std::string(".."), std::string("./shard.safetensors"), std::string("sub/shard.safetensors"),
        std::string("shard.safetensors\\u0000.bin"), std::string(5000, 'x'), std::string("absent"), std::string(kFile)})
    add("name", to(name));
  for (const char* map : {"null", "[]", "3", "{\"a\":3}", "{\"a\":null}", "{\"a\":{}}", "{\"a\":[\"b\"]}"})
    add("map", std::string("{\"weight_map\":") + map + "}");
  add("other_tensor", R"({"weight_map":{"zzz":"shard.safetensors"}})");
  add("link_out", to("out.safetensors"), {{"out.safetensors", "/etc/passwd", File::Kind::link}});
  add("link_in", to("in.safetensors"), {{"in.safetensors", "shard.safetensors", File::Kind::link}});
  add("link_to_device", to("zero.safetensors"), {{"zero.safetensors", "/dev/zero", File::Kind::link}});
  add("fifo", to("fifo.safetensors"), {{"fifo.safetensors", "", File::Kind::fifo}});
  add("folder", to("folder.safetensors"), {{"folder.safetensors", "", File::Kind::folder}});
  for (const auto& text : json_texts()) add("json", text);
  all.no_files(Reader::index, kFile, false);
}

// Opcodes of pickle.
std::string text(const std::string& value) { return "X" + little(value.size(), 4) + value; }
std::string integer(uint64_t value) { return "\x8a\x08" + little(value, 8); }
std::string put(uint32_t slot) { return "r" + little(slot, 4); }
std::string get(uint32_t slot) { return "j" + little(slot, 4); }
std::string tuple(const std::vector<uint64_t>& numbers) {
  std::string items;
  for (const auto number : numbers) items += integer(number);
  return "(" + items + "t";
}
std::string tensor(const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& strides, uint64_t first = 0,
                   const std::string& key = "0") {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nFloatStorage\n" + text(key) +
         text("cpu") + integer(4) + "tQ" + integer(first) + tuple(sizes) + tuple(strides) + "\x89" +
         "ccollections\nOrderedDict\n)RtR";
}
std::string dict_of(const std::string& value) { return "}" + text("w") + value + "s"; }

std::string archive(const std::string& pickle, size_t storage_bytes = 16) {
  return support::stored_zip(
      {{"m/data.pkl", "\x80\x02" + pickle + "."}, {"m/data/0", std::string(storage_bytes, '\1')}});
}

Texts pickles() {
  Texts all = {"",
               ".",
               "N",
               "I1\n",
               "Q",
               "R",
               "b",
               "(",
               "t",
               "u",
               "0",
               "h\5",
               "j" + little(7, 4),
               "r" + little(1 << 30, 4) + "N",
               "X" + little(0xffffffff, 4),
               "\x8d" + little(~UINT64_C(0), 8),
               "\x8a\xff",
               "\x95" + little(~UINT64_C(0), 8) + "N",
               "cos\nsystem\n" + text("true") + "\x85R",
               "cbuiltins\neval\n" + text("1") + "\x85R",
               repeated(kDeep, "]") + "N" + repeated(kDeep, "a"),
               "N" + repeated(kDeep, "\x85"),
               repeated(kDeep, "}" + text("a")) + "N" + repeated(kDeep, "s"),
               dict_of(repeated(1000, "]") + "N" + repeated(1000, "a")),
               "]" + put(0) + get(0) + "a",
               "}" + put(0) + text("w") + get(0) + "s",
               "](" + repeated(3'000'000, "N") + "e",
               "](" + repeated(3'000'000, "]") + "e",
               "](" + repeated(1'000'000, "}") + "e",
               "](" + repeated(700'000, "K\1\x85") + "e",
               "X" + little(4, 4) + "\xff\xff\xff\xff"};
  for (const auto large : {UINT64_C(1) << 62, UINT64_C(1) << 63, ~UINT64_C(0), (UINT64_C(1) << 63) - 1}) {
    all.push_back(dict_of(tensor({large}, {1})));
    all.push_back(dict_of(tensor({2}, {large})));
    all.push_back(dict_of(tensor({2}, {1}, large)));
    all.push_back(dict_of(tensor({large, large, 0}, {1, 1, 1})));
  }
  all.push_back(dict_of(tensor({4}, {1})));
  all.push_back(dict_of(tensor({5}, {1})));
  all.push_back(dict_of(tensor({4}, {1}, 1)));
  all.push_back(dict_of(tensor({4, 4}, {0, 1})));
  all.push_back(dict_of(tensor({2}, {1, 1})));
  all.push_back(dict_of(tensor({4}, {1}, 0, "9")));
  all.push_back(dict_of(tensor(std::vector<uint64_t>(65, 1), std::vector<uint64_t>(65, 1))));
  // Twice what is twice what ...; long texts again and again.
  std::string doubling = "]" + put(0);
  for (uint32_t i = 1; i < 60; ++i) doubling += "0](" + get(i - 1) + get(i - 1) + "e" + put(i);
  all.push_back(dict_of(doubling));
  all.push_back("](" + text(std::string(1 << 20, 't')) + put(0) + repeated(10'000, get(0)) + "e");
  all.push_back("](" + text("t") + put(0) + repeated(1'000'000, get(0)) + "e");
  all.push_back("](" + tensor({4}, {1}) + put(0) + repeated(100'000, get(0)) + "e");
  return all;
}

void add_archives(Collector& all) {
  const auto add = [&](const std::string& name, const std::string& bytes) {
    all.add(Reader::archive, "archive_" + name, "pytorch_model.bin", bytes);
  };
  const auto good = archive(dict_of(tensor({4}, {1})));
  add("good", good);
  for (size_t cut = 0; cut < good.size(); cut += good.size() / 24) add("cut", good.substr(0, cut));
  add("cut", good.substr(0, good.size() - 1));
  const auto directory = good.find("PK\1\2"), end = good.find("PK\5\6");
  // Sizes, lengths of names and places in local headers, the directory and its end: offset and width.
  for (const auto& [at, width] : std::vector<std::pair<size_t, size_t>>{{18, 4},
                                                                        {22, 4},
                                                                        {26, 2},
                                                                        {28, 2},
                                                                        {directory + 10, 2},
                                                                        {directory + 20, 4},
                                                                        {directory + 24, 4},
                                                                        {directory + 28, 2},
                                                                        {directory + 30, 2},
                                                                        {directory + 42, 4},
                                                                        {end + 8, 2},
                                                                        {end + 10, 2},
                                                                        {end + 12, 4},
                                                                        {end + 16, 4},
                                                                        {end + 20, 2}}) {
    uint64_t value = 0;
    for (size_t i = width; i-- > 0;) value = value << 8 | static_cast<unsigned char>(good[at + i]);
    for (const uint64_t wrong : {value - 1, value + 1, ~UINT64_C(0), UINT64_C(1) << (8 * width - 1)}) {
      auto bytes = good;
      add("field", bytes.replace(at, width, little(wrong, width)));
    }
  }
  for (const auto& pickle : pickles()) add("pickle", archive(pickle));
  // One storage of 1 MB under many names: shared. Many names of storages for one place: refused.
  std::string views = "}(", copies = "}(";
  std::vector<std::pair<std::string, std::string>> records;
  for (uint64_t i = 0; i < 1000; ++i) {
    views += text("w" + std::to_string(i)) + tensor({(1 << 18) - i}, {1}, i);
    copies += text("w" + std::to_string(i)) + tensor({1 << 18}, {1}, 0, std::to_string(i));
  }
  add("views", archive(views + "u", 1 << 20));
  auto bytes = archive(copies + "u", 1 << 20);
  const auto entries = bytes.rfind("PK\1\2"), last = bytes.find("PK\5\6");
  std::string more;
  for (int i = 1; i < 1000; ++i) {  // as that of data/0, with another name
    auto entry = bytes.substr(entries, last - entries);
    const auto name = "m/data/" + std::to_string(i);
    entry.replace(28, 2, little(name.size(), 2)).replace(46, std::string::npos, name);
    more += entry;
  }
  bytes.insert(last, more);
  const auto new_end = last + more.size();
  const auto directory_at = bytes.find("PK\1\2");
  bytes.replace(new_end + 8, 12,
                little(1001, 2) + little(1001, 2) + little(new_end - directory_at, 4) + little(directory_at, 4));
  add("one_place_under_many_names", bytes);
  add("big_endian", support::stored_zip({{"m/data.pkl", "\x80\x02N."}, {"m/byteorder", "big"}}));
  add("no_pickle", support::stored_zip({{"m/data/0", "x"}}));
  add("same_name", support::stored_zip({{"m/data.pkl", "\x80\x02N."}, {"m/data.pkl", "\x80\x02]."}}));
  add("stream",
      std::string("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.", 21) + "\x80\x02}.");
  all.no_files(Reader::archive, "pytorch_model.bin", false);
}

void add_custom(Collector& all) {
  const auto counted = [](const std::string& bytes) { return little(bytes.size(), 8) + bytes; };
  const auto add = [&](const std::string& name, const std::string& bytes) {
    const auto tensor = "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nByteStorage\n" +
                        text("0") + text("cpu") + integer(bytes.size()) + "tQ" + integer(0) + tuple({bytes.size()}) +
                        tuple({1}) + "\x89" + "ccollections\nOrderedDict\n)RtR";
    all.add(Reader::custom, "custom_" + name, "custom_checkpoint_0.pkl",
            support::stored_zip({{"m/data.pkl", "\x80\x02" + tensor + "."}, {"m/data/0", bytes}}));
  };
  const auto with = [&](const std::string& value) {  // two names, and a value of that key
    return little(2, 8) + counted("a") + counted("b") + little(1, 8) + counted("k") + counted(value);
  };
  const auto pickled = [](const std::string& pickle) {  // as LibTorch writes and reads them
    return support::stored_zip(
        {{"m/data.pkl", "\x80\x02" + pickle + "."}, {"m/data/0", std::string(16, '\1')}, {"m/version", "3\n"}});
  };
  const auto call = [](const std::string& name, const std::string& arguments) {
    return "ctorch.jit._pickle\n" + name + "\n(" + arguments + "tR";
  };
  const auto good = with(pickled(call("restore_type_tag", "](" + integer(3) + "e" + text("List[int]"))));
  add("good", good);
  for (size_t cut = 0; cut < good.size(); cut += 11) add("cut", good.substr(0, cut));
  for (const auto length : kLengths) {
    add("count", little(length, 8) + good.substr(8));
    add("length", good.substr(0, 8) + little(length, 8) + good.substr(16));
  }
  add("many", little(1 << 20, 8) + std::string(8 << 20, '\0') + little(0, 8));
  add("promised", little(8 << 20, 8) + std::string(8 << 20, '\0'));
  for (const auto& pickle : pickles()) add("pickle", with(pickled(pickle)));
  for (const auto& type :
       {std::string("List[str]"), std::string("Dict[str, int]"), std::string("int"), std::string(), std::string("List"),
        std::string("List[__torch__.A]"), repeated(kDeep, "List["), repeated(99, "List[") + "int" + repeated(99, "]"),
        repeated(kDeep, "("), repeated(kDeep, "not "), repeated(kDeep, "-"), repeated(4000, "a.") + "a",
        "List[Tuple[" + repeated(3000, "a,") + "a]]", std::string("List[\xc3\xa9]")})
    add("type", with(pickled(call("restore_type_tag", "](" + integer(3) + "e" + text(type)))));
  for (const char* name : {"build_intlist", "build_doublelist", "build_boollist", "build_tensorlist"})
    for (const auto& items : {text("x"), "}" + text("a"), "](" + integer(1) + text("x") + "e"}) {
      add("list", with(pickled(call(name, items))));
      add("list", with(pickled(call(name, "](" + items + "e"))));
    }
  add("keys", with(pickled(call("restore_type_tag", "}(" + integer(3) + integer(4) + "u" + text("Dict[str, int]")))));
  add("deep", with(pickled(repeated(1000, "ctorch.jit._pickle\nbuild_intlist\n(") + "]" + repeated(1000, "tR"))));
  add("deep", with(pickled(repeated(kDeep, "ctorch.jit._pickle\nbuild_intlist\n(") + "]" + repeated(kDeep, "tR"))));
  add("self", with(pickled("]" + put(0) + call("restore_type_tag", get(0) + text("List[Any]")) + "a")));
  for (const auto& device : {std::string(), std::string("cpu:99999999999999999999"), std::string(1 << 20, 'x')})
    add("device", with(pickled("ctorch\ndevice\n(" + text(device) + "tR")));
  add("complex", with(pickled("cbuiltins\ncomplex\n(" + text("x") + integer(1) + "tR")));
}

/// A distributed checkpoint's .metadata with one tensor in one file.
/// @param path  of the tensor in the dicts and lists that were saved, a tuple
std::string dcp_metadata(const std::string& size, const std::string& file, uint64_t offset, uint64_t length,
                         const std::string& name = "w", const std::string& path = "") {
  const std::string in = "ctorch.distributed.checkpoint.metadata\n", made = ")\x81}(";
  const auto torch_size = [](const std::string& items) { return "ctorch\nSize\n" + items + "\x85R"; };
  const std::string chunk = in + "ChunkStorageMetadata\n" + made + text("offsets") + torch_size(tuple({0})) +
                            text("sizes") + torch_size(size) + "ub";
  const std::string properties = in + "TensorProperties\n)\x81(ctorch\nfloat32\n" + "N" + "\x89" + "N" + "\x89" + "tb";
  const std::string tensor = in + "TensorStorageMetadata\n" + made + text("properties") + properties + text("size") +
                             torch_size(size) + text("chunks") + "](" + chunk + "e" + "ub";
  const std::string index = in + "MetadataIndex\n" + made + text("fqn") + text(name) + text("offset") +
                            torch_size(tuple({0})) + text("index") + "Nub";
  const std::string place = std::string("ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n") + made +
                            text("relative_path") + text(file) + text("offset") + integer(offset) + text("length") +
                            integer(length) + "ub";
  return "\x80\x02" + in + "Metadata\n" + made + text("state_dict_metadata") + "}(" + text(name) + tensor + "u" +
         text("planner_data") + (path.empty() ? "N" : "}(" + text(name) + path + "u") + text("storage_data") + "}(" +
         index + place + "u" + "ub.";
}

void add_dcp(Collector& all) {
  const auto item =
      support::stored_zip({{"m/data.pkl", "\x80\x02" + tensor({4}, {1}) + "."}, {"m/data/0", std::string(16, '\1')}});
  const File data{"__0_0.distcp", item};
  const auto add = [&](const std::string& name, const std::string& metadata, const std::vector<File>& others) {
    all.in_folder(Reader::dcp, "dcp_" + name, ".metadata", metadata, others);
  };
  const auto good = dcp_metadata(tuple({4}), data.name, 0, item.size());
  add("good", good, {data});
  for (size_t cut = 0; cut < good.size(); cut += good.size() / 20) add("cut", good.substr(0, cut), {data});
  for (const auto large : kLengths) {
    add("size", dcp_metadata(tuple({large}), data.name, 0, item.size()), {data});
    add("offset", dcp_metadata(tuple({4}), data.name, large, item.size()), {data});
    add("length", dcp_metadata(tuple({4}), data.name, 0, large), {data});
  }
  for (const auto& file : {std::string("../x"), std::string("/etc/passwd"), std::string(), std::string("a\0b", 3),
                           std::string(".metadata")})
    add("file", dcp_metadata(tuple({4}), file, 0, item.size()), {data});
  add("link_out", good, {{data.name, "/etc/passwd", File::Kind::link}});
  add("device", good, {{data.name, "/dev/zero", File::Kind::link}});
  add("fifo", good, {{data.name, "", File::Kind::fifo}});
  add("no_data", good, {});
  const auto at = [&](const std::string& steps) {
    return dcp_metadata(tuple({4}), data.name, 0, item.size(), "w", "(" + steps + "t");
  };
  for (const uint64_t index : {UINT64_C(0), UINT64_C(90'000), UINT64_C(9'999'999), UINT64_C(1) << 62, ~UINT64_C(0)})
    add("path", at(text("model") + integer(index)), {data});
  add("path", at(text("model") + repeated(60, text("k") + integer(50'000))), {data});
  add("path", at(repeated(kDeep, text("k"))), {data});
  add("path", at(repeated(kDeep, "K\1")), {data});
  for (const char* odd : {"", "N", "}", "\x88"}) add("path", at(odd), {data});
  // As save_state leaves them: a folder for each model.
  const auto in_folders = [&](std::vector<File> files) { all.add(Reader::dcp, "dcp_folders", "", std::move(files)); };
  const std::string first = "pytorch_model_fsdp_0", second = "pytorch_model_fsdp_1";
  in_folders({{first + "/.metadata", good}, {first + "/" + data.name, item}});
  in_folders({{first + "/.metadata", good}, {second + "/.metadata", good}});
  in_folders({{first + "/.metadata", "", File::Kind::fifo}});
  in_folders({{first, "", File::Kind::fifo}});
  for (const char* to : {".", "..", "/dev/zero", "/proc/self", "pytorch_model_fsdp_0"})
    in_folders({{first, to, File::Kind::link}});
  for (const auto& pickle : pickles()) add("pickle", "\x80\x02" + pickle + ".", {data});
  for (const auto& pickle : pickles()) {
    const auto bytes = archive(pickle);
    if (bytes.size() < 100'000) add("item", dcp_metadata(tuple({4}), data.name, 0, bytes.size()), {{data.name, bytes}});
  }
  all.no_files(Reader::dcp, ".metadata", true, {data});
  // A layout in its place: rules for many ranks, of which there are no files, or no indexes in them.
  const auto layout = [](const std::string& sizes, const std::string& rule) {
    return R"({"format": "accelerate layout", "version": 1, "ranks": 1048576, "entries": [)"
           R"({"path":["w"],"dtype":"float32","sizes":)" +
           sizes + "," + rule + "}]}";
  };
  for (const char* sizes : {"[4]", "[1048576]", "[1048576,1048576]", "[576460752303423488]", "[-1]", "[0]"})
    for (const char* rule :
         {R"("rank":0)", R"("rank":1048575)", R"("rank":-1)",
          R"("shards":{"begin":0,"each":1,"members":1048576,"step":1,"first":0})",
          R"("shards":{"begin":0,"each":4398046511104,"members":1048576,"step":1,"first":0})",
          R"("shards":{"begin":9223372036854775807,"each":9223372036854775807,"members":1,"step":1,"first":0})"})
      all.in_folder(Reader::dcp, "dcp_layout", ".accelerate_layout", layout(sizes, rule), {data});
  all.no_files(Reader::dcp, ".accelerate_layout", true, {data});
}

void add_gguf(Collector& all) {
  const auto add = [&](const std::string& name, const std::string& bytes) {
    all.add(Reader::gguf, "gguf_" + name, "model.gguf", bytes);
  };
  const auto words = [](const std::string& value) { return little(value.size(), 8) + value; };
  const auto head = [](uint64_t tensors, uint64_t values) {
    return "GGUF" + little(3, 4) + little(tensors, 8) + little(values, 8);
  };
  const auto info = [&](const std::vector<uint64_t>& sizes, uint64_t offset, uint32_t type = 0,
                        const std::string& name = "w") {
    std::string bytes = words(name) + little(sizes.size(), 4);
    for (const auto size : sizes) bytes += little(size, 8);
    return bytes + little(type, 4) + little(offset, 8);
  };
  const auto padded = [](std::string bytes) { return bytes + std::string(256, '\0'); };
  const std::string value = words("k") + little(8, 4) + words("v"),
                    list = words("l") + little(9, 4) + little(4, 4) + little(2, 8) + std::string(8, '\1');
  const auto number = [&](const char* key, uint32_t one) { return words(key) + little(4, 4) + little(one, 4); };
  const auto small = [&](const char* key) { return words(key) + little(6, 4) + little(0x3727c5ac, 4); };  // 1e-5
  const std::string llama = words("general.architecture") + little(8, 4) + words("llama") +
                            number("llama.vocab_size", 64) + number("llama.embedding_length", 16) +
                            number("llama.feed_forward_length", 32) + number("llama.block_count", 2) +
                            number("llama.context_length", 32) + number("llama.attention.head_count", 4) +
                            small("llama.attention.layer_norm_rms_epsilon");
  const auto good = head(1, 10) + value + list + llama + info({4, 2}, 0, 0, "output_norm.weight");
  add("good", padded(good));
  for (size_t cut = 0; cut <= good.size(); cut += 9) add("cut", good.substr(0, cut));
  for (const auto length : kLengths) {
    add("tensors", padded("GGUF" + little(3, 4) + little(length, 8) + good.substr(16)));
    add("values", padded("GGUF" + little(3, 4) + little(1, 8) + little(length, 8) + good.substr(24)));
    add("key", padded(head(1, 1) + little(length, 8) + "k"));
    add("array", padded(head(0, 1) + words("l") + little(9, 4) + little(4, 4) + little(length, 8)));
    add("size", padded(head(1, 0) + info({length, 2}, 0)));
    add("offset", padded(head(1, 0) + info({4}, length)));
  }
  add("two_names", padded(head(2, 0) + info({4}, 0) + info({4}, 0)));
  add("key_twice", padded(head(0, 2) + value + value));
  add("dimensions", padded(head(1, 0) + info(std::vector<uint64_t>(9, 1), 0)));
  for (const uint32_t type : {uint32_t{2}, uint32_t{99}, ~uint32_t{0}})
    add("type", padded(head(1, 0) + info({4}, 0, type)));
  add("arrays_in_arrays",
      padded(head(0, 1) + words("l") + little(9, 4) + repeated(100'000, little(9, 4) + little(1, 8))));
  add("alignment", padded(head(0, 1) + words("general.alignment") + little(4, 4) + little(3, 4)));
  add("turned", "FUGG" + good.substr(4));
  all.no_files(Reader::gguf, "model.gguf", false);
}

const std::string kConfig =
    R"({"model_type":"llama","architectures":["LlamaForCausalLM"],"vocab_size":64,"hidden_size":16,)"
    R"("intermediate_size":32,)"
    R"("num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":32,)"
    R"("rms_norm_eps":1e-5,"rope_theta":10000.0,"pad_token_id":0,"hidden_act":"silu"})";

void add_model_configs(Collector& all) {
  const auto add = [&](const std::string& name, const std::string& bytes) {
    all.add(Reader::model_config, "config_" + name, "config.json", bytes);
  };
  add("good", kConfig);
  for (const char* field :
       {"\"vocab_size\":64", "\"num_hidden_layers\":2", "\"num_attention_heads\":4", "\"rms_norm_eps\":1e-5",
        "\"pad_token_id\":0", "\"hidden_act\":\"silu\"", "\"model_type\":\"llama\""})
    for (const auto& odd : kNumbers) {
      const std::string text(field);
      add("number", replaced(kConfig, text, text.substr(0, text.find(':') + 1) + odd));
    }
  for (const auto& text : json_texts()) {
    add("json", text);
    if (text.size() < 5'000'000 && !text.empty())
      add("field", replaced(kConfig, "\"silu\"", "\"silu\",\"unknown\":" + text));
  }
  all.no_files(Reader::model_config, "config.json", false);
}

const std::string kTokenizer =
    R"({"added_tokens":[{"id":3,"content":"<s>","special":true}],"normalizer":{"type":"NFC"},)"
    R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"},)"
    R"("post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},)"
    R"({"Sequence":{"id":"A"}}],)"
    R"("special_tokens":{"<s>":{"id":"<s>","ids":[3],"tokens":["<s>"]}}},)"
    R"("model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}})";

void add_tokenizers(Collector& all) {
  const auto add = [&](const std::string& name, const std::string& bytes) {
    all.in_folder(Reader::tokenizer, "tokenizer_" + name, "tokenizer.json", bytes, {});
  };
  add("good", kTokenizer);
  auto numbers = kNumbers;
  for (const char* id : {"100000000", "99999999", "4611686018427387904", "2147483648", "1.0"}) numbers.emplace_back(id);
  for (const char* field : {"\"id\":3", "\"ids\":[3", "\"ab\":2", "\"merges\":[[\"a\",\"b\"]"})
    for (const auto& odd : numbers) {
      const std::string text(field);
      const auto colon = text.find(':') + 1;
      add("number", replaced(kTokenizer, text, text.substr(0, colon) + (text[colon] == '[' ? "[" : "") + odd));
    }
  for (const char* part :
       {"{\"type\":\"NFC\"}", "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}", "{\"a\":0,\"b\":1,\"ab\":2}"})
    for (const auto& odd : {std::string("null"), std::string("3"), std::string("{}"), std::string(R"({"type":3})"),
                            repeated(60, R"({"type":"Sequence","normalizers":[)") + "null" + repeated(60, "]}"),
                            repeated(20'000, R"({"type":"Sequence","normalizers":[)") + "null" + repeated(20'000, "]}"),
                            std::string(R"x({"type":"Split","pattern":{"Regex":"(a+)+$"},"behavior":"Isolated"})x"),
                            std::string(R"x({"type":"Split","pattern":{"Regex":"((((("},"behavior":"Isolated"})x")})
      add("part", replaced(kTokenizer, part, odd));
  add("merge", replaced(kTokenizer, "[\"a\",\"b\"]", "\"nospace\""));
  add("merge", replaced(kTokenizer, "[\"a\",\"b\"]", "[\"a\"]"));
  for (const auto& text : json_texts()) add("json", text);
  for (const char* vocabulary :
       {R"({"a":0,"b":100000000})", R"({"a":-1})", R"({"a":1.5})", R"({"a":18446744073709551615})", "[]", "{}"})
    all.in_folder(Reader::tokenizer, "vocabulary", "vocab.json", vocabulary, {{"merges.txt", "#version: 0.2\na b\n"}});
  for (const auto& merges :
       {std::string("nospace"), repeated(1'000'000, "\n"), std::string("a b\0c d\n", 8), std::string("\xff \xfe\n")})
    all.in_folder(Reader::tokenizer, "merges", "merges.txt", merges, {{"vocab.json", R"({"a":0,"b":1,"ab":2})"}});
  all.no_files(Reader::tokenizer, "tokenizer.json", true);
  for (const auto& vocabulary :
       {std::string(), std::string("[UNK]"), repeated(2'000'000, "\n"), std::string(1 << 20, '\xff'),
        std::string("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\0\n", 32)})
    all.in_folder(Reader::wordpiece, "wordpiece", "vocab.txt", vocabulary, {});
  const File good{"vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n"};
  for (const char* settings : {R"({"model_max_length":1e300})", R"({"model_max_length":-5})",
                               R"({"model_max_length":"x"})", R"({"unk_token":{"content":3}})"})
    all.in_folder(Reader::wordpiece, "settings", "tokenizer_config.json", settings, {good});
  all.no_files(Reader::wordpiece, "vocab.txt", true);
}

/// A model's folder, of which one file is hostile: what `accelerate generate` opens.
void add_models(Collector& all) {
  const std::string config = replaced(replaced(kConfig, "\"vocab_size\":64", "\"vocab_size\":4"),
                                      "\"num_hidden_layers\":2", "\"num_hidden_layers\":1");
  std::string header = "{";
  size_t bytes = 0;
  const auto weight = [&](const std::string& name, size_t rows, size_t columns) {
    header += (header.size() > 1 ? ",\"" : "\"") + name + R"(.weight":{"dtype":"F32","shape":[)" +
              (rows > 0 ? std::to_string(rows) + "," : "") + std::to_string(columns) + R"(],"data_offsets":[)" +
              std::to_string(bytes) + ",";
    bytes += std::max<size_t>(rows, 1) * columns * 4;
    header += std::to_string(bytes) + "]}";
  };
  weight("model.embed_tokens", 4, 16), weight("model.norm", 0, 16), weight("lm_head", 4, 16);
  const std::string layer = "model.layers.0.";
  weight(layer + "input_layernorm", 0, 16), weight(layer + "post_attention_layernorm", 0, 16);
  weight(layer + "self_attn.q_proj", 16, 16), weight(layer + "self_attn.o_proj", 16, 16);
  weight(layer + "self_attn.k_proj", 8, 16), weight(layer + "self_attn.v_proj", 8, 16);
  weight(layer + "mlp.gate_proj", 32, 16), weight(layer + "mlp.up_proj", 32, 16);
  weight(layer + "mlp.down_proj", 16, 32);
  header += "}";
  const std::string weights = safetensors(header, bytes);
  constexpr const char *kGeneration = "generation_config.json", *kWeights = "model.safetensors";
  const std::string generation = R"({"eos_token_id":2,"pad_token_id":2,"max_length":20,"do_sample":false})";
  const std::vector<File> whole{
      {"config.json", config}, {kWeights, weights}, {"tokenizer.json", kTokenizer}, {kGeneration, generation}};
  const auto others = [&](const std::string& name) {
    auto files = whole;
    std::erase_if(files, [&](const File& file) { return file.name == name; });
    return files;
  };
  const auto add = [&](const std::string& name, const std::string& file, const std::string& content) {
    all.in_folder(Reader::model, "model_" + name, file, content, others(file));
  };
  add("good", kGeneration, generation);
  for (const auto& text : json_texts()) add("generation", kGeneration, text);
  for (const char* field : {"eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "min_new_tokens",
                            "do_sample", "num_beams", "temperature", "top_k", "top_p", "repetition_penalty",
                            "length_penalty", "early_stopping", "stop_strings", "no_such_field"})
    for (const auto& odd : kNumbers)
      add("generation_field", kGeneration, "{\"" + std::string(field) + "\":" + odd + "}");
  for (const char* field : {"\"vocab_size\":4", "\"hidden_size\":16", "\"intermediate_size\":32",
                            "\"num_hidden_layers\":1", "\"num_attention_heads\":4", "\"num_key_value_heads\":2",
                            "\"max_position_embeddings\":32", "\"rms_norm_eps\":1e-5", "\"rope_theta\":10000.0"})
    for (const char* odd : {"0", "1", "3", "1000000", "100000000", "4611686018427387904", "1e300", "-1"}) {
      const std::string text(field);
      add("config", "config.json", replaced(config, text, text.substr(0, text.find(':') + 1) + odd));
    }
  for (const char* id : {"4", "1000", "2147483647"})  // tokens that the model has not
    add("token", "tokenizer.json", replaced(kTokenizer, "\"ab\":2", std::string("\"ab\":") + id));
  for (size_t cut = 0; cut < weights.size(); cut += weights.size() / 8) add("cut", kWeights, weights.substr(0, cut));
  for (const auto& [from, to] : std::vector<std::pair<const char*, const char*>>{{"lm_head", "other"},
                                                                                 {"F32", "F64"},
                                                                                 {"F32", "U32"},
                                                                                 {"[4,16]", "[16,4]"},
                                                                                 {"[4,16]", "[64]"},
                                                                                 {"[16,16]", "[2,2,2,2,2,2,2,2]"}})
    add("weights", kWeights, safetensors(replaced(header, from, to), bytes));
  for (const auto& map : {std::string("{}"), std::string(R"({"lm_head.weight":"model.safetensors"})"),
                          std::string(R"({"a":"../model.safetensors"})"), std::string(R"({"a":"config.json"})")})
    all.in_folder(Reader::model, "model_index", "model.safetensors.index.json", "{\"weight_map\":" + map + "}",
                  others(kWeights));
  for (const auto& file : whole) all.no_files(Reader::model, file.name, true, others(file.name));
}

void add_offload(Collector& all) {
  const File weight{"a.dat", std::string(16, '\1')};
  const auto add = [&](const std::string& name, const std::string& index, const std::vector<File>& others) {
    all.in_folder(Reader::offload, "offload_" + name, "index.json", index, others);
  };
  const std::string good = R"({"a":{"dtype":"float32","shape":[2,2]}})";
  add("good", good, {weight});
  for (const auto& odd : kNumbers) {
    add("number", replaced(good, "[2,", "[" + odd + ","), {weight});
    add("shape", replaced(good, "[2,2]", odd), {weight});
    add("entry", "{\"a\":" + odd + "}", {weight});
  }
  for (const char* shape : {"[4611686018427387904,4611686018427387904,0]", "[4611686018427387904,4]", "[5]", "[0]"})
    add("shape", replaced(good, "[2,2]", shape), {weight});
  add("dimensions", replaced(good, "[2,2]", "[" + repeated(100'000, "1,") + "1]"), {weight});
  for (const char* name : {"../a", "/etc/passwd", "", "a\\u0000b"})
    add("name", replaced(good, "\"a\"", "\"" + std::string(name) + "\""), {weight});
  for (const char* file : {"/etc/passwd", "../x.safetensors", "/dev/zero", "index.json"})
    add("safetensors_file", R"({"a":{"safetensors_file":")" + std::string(file) + "\"}}", {weight});
  add("link_out", good, {{"a.dat", "/etc/passwd", File::Kind::link}});
  add("device", good, {{"a.dat", "/dev/zero", File::Kind::link}});
  add("fifo", good, {{"a.dat", "", File::Kind::fifo}});
  for (const auto& text : json_texts()) add("json", text, {weight});
  all.no_files(Reader::offload, "index.json", true, {weight});
}

void add_launch(Collector& all) {
  for (const auto& text : json_texts()) {
    all.add(Reader::deepspeed, "deepspeed", "ds.json", text);
    all.add(Reader::launch_config, "json", "config.json", text);
  }
  const std::string plan = R"({"train_batch_size":8,"zero_optimization":{"stage":2}})";
  for (const auto& odd : kNumbers) {
    all.add(Reader::deepspeed, "deepspeed_number", "ds.json", replaced(plan, ":8", ":" + odd));
    all.add(Reader::deepspeed, "deepspeed_stage", "ds.json", replaced(plan, ":2", ":" + odd));
  }
  all.no_files(Reader::deepspeed, "ds.json", false);
  const auto yaml = [&](const std::string& text) { all.add(Reader::launch_config, "yaml", "config.yaml", text); };
  for (const char* setting :
       {"num_processes", "num_machines", "machine_rank", "main_process_port", "mixed_precision", "fsdp_config"})
    for (const char* odd : {"-1", "0", "100000000", "-99999999999", "9223372036854775808", "1e30", ".nan", "[1, 2]",
                            "{a: 1}", "!!python/object:os.system x"})
      yaml("distributed_type: MULTI_CPU\nnum_processes: 1\n" + std::string(setting) + ": " + odd + "\n");
  for (const char* deep : {"[", "{a: ", "- ", "? ", "&a [", "!!x "}) yaml("x: " + repeated(50'000, deep));
  yaml("a: &a [*a]\n");
  yaml(
      "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b]\n"
      "d: &d [*c, *c, *c, *c, *c, *c]\ne: [*d, *d, *d, *d, *d, *d, *d, *d]\n");
  yaml(repeated(20'000, "a: 1\n"));
  yaml("[" + repeated(100'000, "a,") + "a]");
  yaml(repeated(20'000, "---\n"));
  yaml(std::string("a: \0b\n", 6));
  yaml("\xff\xfe");
  yaml("a: \"" + std::string(1 << 20, 'x') + "\"");
  all.no_files(Reader::launch_config, "config.yaml", false);
  for (const auto& text : {std::string("a slots=99999999999999999999\n"), std::string("a slots=-1\n"),
                           std::string("-oProxyCommand=x slots=1\n"), std::string("a\0b slots=1\n", 12),
                           std::string("\n"), std::string(1 << 20, 'x'), repeated(100'000, "#\n"), [] {
                             std::string lines;
                             for (int i = 0; i < 20'000; ++i) lines += "h" + std::to_string(i) + " slots=4096\n";
                             return lines;
                           }()})
    all.add(Reader::hostfile, "hostfile", "hosts", text);
  all.no_files(Reader::hostfile, "hosts", false);
}

}  // namespace

std::vector<Case> cases() {
  Collector all;
  for (const auto& add : {add_safetensors, add_index, add_archives, add_custom, add_dcp, add_gguf, add_model_configs,
                          add_tokenizers, add_models, add_offload, add_launch})
    add(all);
  return all.take();
}

fs::path write(const Case& a_case, const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& file : a_case.files) {
    const auto path = folder / file.name;
    fs::create_directories(path.parent_path());
    switch (file.kind) {
      case File::Kind::bytes:
        std::ofstream(path, std::ios::binary) << file.bytes;
        break;
      case File::Kind::link:
        fs::create_symlink(file.bytes, path);
        break;
      case File::Kind::fifo:
        if (::mkfifo(path.c_str(), 0600) != 0) throw std::runtime_error("mkfifo " + path.string());
        break;
      case File::Kind::folder:
        fs::create_directories(path);
        break;
      case File::Kind::sparse:
        std::ofstream(path).close();
        fs::resize_file(path, uintmax_t{64} << 30);
        break;
    }
  }
  return a_case.target.empty() ? folder : folder / a_case.target;
}

int64_t bytes_of(const Case& a_case) {
  int64_t bytes = 0;
  for (const auto& file : a_case.files)
    if (file.kind == File::Kind::bytes) bytes += static_cast<int64_t>(file.bytes.size());
  return bytes;
}

}  // namespace hostile
