#include "checkpoint/python_generators.hpp"

#include <ATen/core/Dict.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

namespace accelerate::checkpointing {
namespace {

constexpr const char *kRandom = "random_state", *kNumpy = "numpy_random_seed";
constexpr size_t kWords = 624;
using Twister = std::array<uint32_t, kWords>;

/// What both mix a word of the state with: the one before it.
uint32_t mixed(uint32_t before, uint32_t factor) { return (before ^ (before >> 30)) * factor; }

Twister of_number(uint32_t seed) {
  Twister words;
  words[0] = seed;
  for (uint32_t i = 1; i < kWords; ++i) words[i] = mixed(words[i - 1], 1812433253) + i;
  return words;
}

Twister of_words(const std::vector<uint32_t>& key) {
  auto words = of_number(19650218);
  size_t i = 1;
  const auto next = [&] {
    if (++i < kWords) return;
    words[0] = words[kWords - 1];
    i = 1;
  };
  for (size_t k = 0, j = 0; k < std::max(kWords, key.size()); ++k, j = (j + 1) % key.size(), next())
    words[i] = (words[i] ^ mixed(words[i - 1], 1664525)) + key[j] + static_cast<uint32_t>(j);
  for (size_t k = 1; k < kWords; ++k, next())
    words[i] = (words[i] ^ mixed(words[i - 1], 1566083941)) - static_cast<uint32_t>(i);
  words[0] = 0x80000000;
  return words;
}

std::vector<c10::IValue> numbers_of(const Twister& words) {
  std::vector<c10::IValue> numbers;
  for (const auto word : words) numbers.emplace_back(static_cast<int64_t>(word));
  return numbers;
}

c10::IValue tuple_of(std::vector<c10::IValue> items) { return c10::ivalue::Tuple::create(std::move(items)); }

bool is_tuple(const c10::IValue& value, size_t size) {
  return value.isTuple() && value.toTupleRef().elements().size() == size;
}
bool are_words(const c10::IValue& value, size_t count) {
  return is_tuple(value, count) && std::ranges::all_of(value.toTupleRef().elements(), [](const c10::IValue& word) {
           return word.isInt() && word.toInt() >= 0 && word.toInt() <= int64_t{0xffffffff};
         });
}

}  // namespace

PythonGenerators seeded_generators(uint64_t seed) {
  const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  auto words = numbers_of(of_words(high == 0 ? std::vector{low} : std::vector{low, high}));
  words.emplace_back(static_cast<int64_t>(kWords));
  const auto none_drawn = static_cast<int64_t>(kWords);
  return {
      .random = tuple_of({int64_t{3}, tuple_of(std::move(words)), c10::IValue()}),
      .numpy = tuple_of({std::string("MT19937"), tuple_of(numbers_of(of_number(low))), none_drawn, int64_t{0}, 0.0})};
}

std::optional<PythonGenerators> python_generators(const c10::IValue& states) {
  const auto dict = states.toGenericDict();
  if (!dict.contains(kRandom) || !dict.contains(kNumpy)) return std::nullopt;
  PythonGenerators found{.random = dict.at(kRandom), .numpy = dict.at(kNumpy)};
  if (!is_tuple(found.random, 3) || !is_tuple(found.numpy, 5)) return std::nullopt;
  const auto &random = found.random.toTupleRef().elements(), &numpy = found.numpy.toTupleRef().elements();
  const bool fits = random[0].isInt() && are_words(random[1], kWords + 1) &&
                    (random[2].isNone() || random[2].isDouble()) && numpy[0].isString() &&
                    numpy[0].toStringRef() == "MT19937" && are_words(numpy[1], kWords) && numpy[2].isInt() &&
                    numpy[3].isInt() && numpy[4].isDouble();
  return fits ? std::optional(std::move(found)) : std::nullopt;
}

void add_python_generators(const c10::IValue& states, const PythonGenerators& generators) {
  auto dict = states.toGenericDict();
  dict.insert_or_assign(kRandom, generators.random);
  dict.insert_or_assign(kNumpy, generators.numpy);
}

}  // namespace accelerate::checkpointing
