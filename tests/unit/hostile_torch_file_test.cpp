// Files as torch.save and TorchScript could have written them, made so that few bytes describe endlessly much or the
// impossible. Needs no LibTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "stored_zip.hpp"

namespace {

using accelerate::find_model;
using testing::AllOf;
using testing::HasSubstr;

std::string little(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 255);
  return text;
}

std::string text(const std::string& value) { return "X" + little(value.size(), 4) + value; }
std::string integer(int64_t value) { return std::string("\x8a\x08") + little(static_cast<uint64_t>(value), 8); }
std::string put(uint32_t slot) { return "r" + little(slot, 4); }
std::string get(uint32_t slot) { return "j" + little(slot, 4); }
std::string tuple(const std::vector<int64_t>& numbers) {
  std::string items;
  for (const auto number : numbers) items += integer(number);
  return "(" + items + "t";
}
std::string tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t first = 0) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\nFloatStorage\n" + text("0") +
         text("cpu") + integer(4) + "tQ" + integer(first) + tuple(sizes) + tuple(strides) + "\x89" +
         "ccollections\nOrderedDict\n)RtR";
}
/// A module with these attributes: names and values.
std::string module(const std::string& attributes) { return "c__torch__\nM\n)\x81}(" + attributes + "ub"; }

std::filesystem::path save(const std::string& pickle, bool script) {
  std::vector<std::pair<std::string, std::string>> records = {{"m/data.pkl", "\x80\x02" + pickle + "."},
                                                              {"m/data/0", std::string(16, '\0')}};
  if (script) records.emplace_back("m/code/m.py", "");
  auto path = std::filesystem::path(support::scratch_dir()) / "hostile.pt";
  std::ofstream(path, std::ios::binary) << support::stored_zip(records);
  return path;
}

accelerate::ModelDescription script(const std::string& root) { return find_model(save(root, true).string()); }
std::string script_error(const std::string& root) {
  return support::message_of<accelerate::CheckpointError>([&] { script(root); });
}
accelerate::ModelDescription tensors(const std::string& items) {
  return find_model(save("}(" + items + "u", false).string());
}
std::string tensors_error(const std::string& items) {
  return support::message_of<accelerate::CheckpointError>([&] { tensors(items); });
}

/// Modules of which each has the next one under two names.
std::string doubling(uint32_t levels) {
  std::string pickle = module(text("w") + tensor({2}, {1})) + put(0);
  for (uint32_t level = 1; level <= levels; ++level)
    pickle += "0" + module(text("a") + get(level - 1) + text("b") + get(level - 1)) + put(level);
  return pickle;
}

TEST(HostileTorchFile, SharedModulesHaveANameForEachPlaceUpToALimit) {
  const auto model = script(doubling(4));
  EXPECT_EQ(model.tree.numel(), 2) << "one tensor under 16 names";
  const auto tied = accelerate::find_tied_parameters(model.tree);
  ASSERT_EQ(tied.size(), 1u);
  EXPECT_EQ(tied[0].size(), 16u);
  EXPECT_EQ(tied[0].front(), "a.a.a.a.w");
  EXPECT_THAT(script_error(doubling(60)),
              AllOf(HasSubstr("hostile.pt"), HasSubstr("describes more than 1000000 modules and tensors")));
}

TEST(HostileTorchFile, ModulesInCirclesAndInTheDepthAreErrors) {
  EXPECT_THAT(script_error("c__torch__\nM\n)\x81" + put(0) + "}(" + text("self") + get(0) + "ub"),
              HasSubstr("nested deeper than 100 levels"));
  std::string begin, end;
  for (int i = 0; i < 100'000; ++i) begin += "c__torch__\nM\n)\x81}(" + text("a"), end += "ub";
  EXPECT_THAT(script_error(begin + "N" + end), HasSubstr("nested deeper than 100 levels"));
  // Values in values, where a tensor is expected.
  std::string lists, closing;
  for (int i = 0; i < 100'000; ++i) lists += "]", closing += "a";
  EXPECT_THAT(tensors_error(text("w") + lists + "N" + closing), HasSubstr("under 'w' is a list, expected a tensor"));
  std::string name = "w";
  for (int i = 0; i < 200; ++i) name += ".w";
  EXPECT_THAT(tensors_error(text(name) + tensor({2}, {1})), HasSubstr("a name of more than 100 parts"));
}

TEST(HostileTorchFile, LongNamesInManyPlacesAreErrors) {
  std::string attributes = text(std::string(1 << 20, 'n')) + put(0) + tensor({2}, {1}) + put(1);
  for (int i = 0; i < 1000; ++i) attributes += get(0) + get(1);
  EXPECT_THAT(script_error(module(attributes)), HasSubstr("more than 64 MiB of names"));
  EXPECT_THAT(tensors_error(attributes), HasSubstr("more than 64 MiB of names"));
}

TEST(HostileTorchFile, ManyAttributesOfOneModuleInManyPlacesAreErrors) {
  std::string attributes = text("n") + put(0);
  for (int i = 0; i < 2000; ++i) attributes += (i > 0 ? get(0) : "") + "N";
  std::string root = module(attributes) + put(1);
  attributes.clear();
  for (int i = 0; i < 2000; ++i) attributes += get(0) + get(1);
  EXPECT_THAT(script_error(root + "0" + module(attributes)), HasSubstr("describes more than 1000000"));
}

TEST(HostileTorchFile, DtypesThatDoNotExistAreErrorsOfTheFile) {
  for (const bool script : {false, true}) {
    const auto tensor = "ctorch._utils\n_rebuild_tensor_v3\n((" + text("storage") + "ctorch.storage\nUntypedStorage\n" +
                        text("0") + text("cpu") + integer(4) + "tQ" + integer(0) + tuple({2}) + tuple({1}) + "\x89" +
                        "ccollections\nOrderedDict\n)Rctorch\nuint15\ntR";
    EXPECT_THAT(script ? script_error(module(text("w") + tensor)) : tensors_error(text("w") + tensor),
                HasSubstr("there is no dtype 'uint15'"));
  }
}

TEST(HostileTorchFile, ImpossibleTensorsAreErrors) {
  constexpr int64_t kLarge = int64_t{1} << 62;
  EXPECT_EQ(tensors(text("w") + tensor({2, 2}, {2, 1})).tree.numel(), 4);
  EXPECT_EQ(tensors(text("w") + tensor({0, 5}, {5, 1}, 7)).tree.numel(), 0);
  EXPECT_EQ(tensors(text("w") + tensor({1 << 20, 4}, {0, 1})).tree.numel(), 4 << 20)
      << "an expanded tensor is described as PyTorch does it";
  for (const auto& impossible : {tensor({kLarge, 4}, {0, 1}), tensor({3}, {kLarge}), tensor({2}, {kLarge}, kLarge),
                                 tensor({2, 2}, {1}), tensor({2}, {1}, -1)})
    EXPECT_THAT(tensors_error(text("w") + impossible), HasSubstr("which don't fit together"));
  EXPECT_THAT(tensors_error(text("w") + tensor({5}, {1})), HasSubstr("does not fit into the 16 bytes of its storage"))
      << "what the loader refuses";
  EXPECT_THAT(tensors_error(text("w") + tensor({-2}, {1})),
              HasSubstr("the size of a tensor has the negative entry -2"));
  EXPECT_THAT(tensors_error(text("w") + tensor({2}, {-1})),
              HasSubstr("the stride of a tensor has the negative entry -1"));
  EXPECT_THAT(tensors_error(text("w") + tensor(std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1))),
              HasSubstr("the size of a tensor has 65 entries, expected at most 64"));
}

}  // namespace
