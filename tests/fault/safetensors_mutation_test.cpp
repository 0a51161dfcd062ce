#include <fstream>
#include <iterator>
#include <random>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;

std::string valid_file() {
  const auto path = fs::path(support::scratch_dir()) / "valid.safetensors";
  accelerate::save_safetensors(path,
                               {{"embeddings.weight", torch::randn({4, 3})},
                                {"bias", torch::zeros(2, at::kHalf)},
                                {"ids", torch::arange(3)},
                                {"flag", torch::ones(1, at::kBool)}},
                               {{"format", "pt"}});
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// One to four random edits; most of them hit the header, whose syntax characters are the likely replacements.
std::string mutate(std::string bytes, std::mt19937& random) {
  constexpr std::string_view kSyntax = "{}[]\",:0123456789-.eE \\u\n";
  const auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  for (size_t edits = 1 + below(4); edits > 0 && !bytes.empty(); --edits) {
    const size_t at = below(4) == 0 ? below(std::min<size_t>(8, bytes.size())) : below(bytes.size());
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 1:
        bytes[at] = kSyntax[below(kSyntax.size())];
        break;
      case 2:
        bytes.erase(at, 1 + below(8));
        break;
      case 3:
        bytes.insert(at, 1, kSyntax[below(kSyntax.size())]);
        break;
      case 4:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(40)));
        break;
      case 5:
        bytes.resize(at);
        break;
    }
  }
  return bytes;
}

// The same property as the fuzz target's, on a fixed sequence, for builds without libFuzzer: a file is refused with a
// CheckpointError or all of its tensors can be read.
TEST(SafetensorsMutation, NoEditOfAValidFileDoesMoreThanThrowCheckpointError) {
  const auto valid = valid_file();
  const auto path = fs::path(support::scratch_dir()) / "mutant.safetensors";
  std::mt19937 random(20240607);  // fixed, so that a failure can be repeated
  int loaded = 0;
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto mutant = mutate(valid, random);
    std::ofstream(path, std::ios::binary) << mutant;
    try {
      for (const auto& [name, tensor] : accelerate::load_safetensors(path)) static_cast<void>(tensor.clone());
      ++loaded;
    } catch (const accelerate::CheckpointError&) {
      ++refused;
    }  // anything else ends the test as a failure
  }
  EXPECT_GT(loaded, 50) << "edits of the data alone should load";
  EXPECT_GT(refused, 2000);
}

}  // namespace
