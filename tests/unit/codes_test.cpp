/// Weights in few bits: codes, scales and decoded values against bitsandbytes and gguf, to the bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <ctime>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "accelerate/codes/codes.hpp"
#include "accelerate/codes/kernels.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "codes/blockwise.hpp"
#include "codes/decode_by_operators.hpp"
#include "codes/k_blocks.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace codes = accelerate::codes;
namespace fs = std::filesystem;
using accelerate::ConfigError;
using accelerate::ShapeError;
using codes::Codes;
using codes::Encoding;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// "nf4/64/dq/normal"
struct Case {
  Encoding encoding;
  int64_t block_size;
  bool nested;

  explicit Case(const std::string& name) {
    const size_t first = name.find('/'), second = name.find('/', first + 1);
    encoding = codes::encoding_named(name.substr(0, first)).value();
    block_size = std::stoll(name.substr(first + 1, second - first - 1));
    nested = name.compare(second + 1, 3, "dq/") == 0;
  }
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && (a.numel() == 0 || a.equal(b));
}

TEST(Codes, AreThoseOfThePeersToTheBit) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto file = fs::path(support::scratch_dir()) / "codes.safetensors";
  const auto run =
      support::run_python("tests/unit/codes_peer.py",
                          {"encode", file.string(), (*support::data_dir() / "minilm/model.safetensors").string()});
  ASSERT_EQ(run.exit_code, 0) << run.output;
  const accelerate::SafetensorsFile expected(file);
  std::set<std::string> cases;
  for (const auto& name : expected.names())
    if (name.ends_with(".input")) cases.insert(name.substr(0, name.size() - 6));
  EXPECT_GE(cases.size(), 150U);
  for (const auto& name : cases) {
    SCOPED_TRACE(name);
    const Case how(name);
    const auto input = expected.tensor(name + ".input");
    codes::EncodeOptions options{.encoding = how.encoding, .double_quantize = how.nested};
    if (how.block_size > 0) options.block_size = how.block_size;
    const Codes made = codes::encode(input, options);
    EXPECT_NO_THROW(codes::check(made));
    EXPECT_EQ(made.dtype, input.scalar_type());
    EXPECT_EQ(at::IntArrayRef(made.shape), input.sizes());
    EXPECT_EQ(made.numel(), input.numel());
    if (made.numel() > 0 || !codes::is_four_bit(how.encoding)) {
      EXPECT_TRUE(same(made.data.view(-1), expected.tensor(name + ".data").view(-1)));
    }
    int64_t bytes = static_cast<int64_t>(made.data.nbytes());
    if (!codes::is_gguf(how.encoding)) {
      EXPECT_TRUE(same(made.scales, expected.tensor(name + ".scales")));
      bytes += static_cast<int64_t>(made.scales.nbytes());
    }
    ASSERT_EQ(made.nested.has_value(), how.nested);
    if (how.nested) {
      EXPECT_TRUE(same(made.nested->absmax, expected.tensor(name + ".nested")));
      EXPECT_EQ(made.nested->offset, expected.tensor(name + ".offset").item<float>());
      bytes += static_cast<int64_t>(made.nested->absmax.nbytes());
    }
    EXPECT_EQ(made.bytes(), bytes);
    EXPECT_TRUE(same(codes::decode(made), expected.tensor(name + ".decoded")));
  }
  const auto values = [](c10::ArrayRef<float> list) { return torch::tensor(list.vec()); };
  EXPECT_TRUE(same(values(codes::dynamic_map()), expected.tensor("dynamic_map")));
  EXPECT_TRUE(same(values(codes::table(Encoding::nf4)), expected.tensor("nf4")));
  EXPECT_TRUE(same(values(codes::table(Encoding::fp4)), expected.tensor("fp4")));
}

/// Every encoding.
std::vector<codes::EncodeOptions> all_ways() {
  std::vector<codes::EncodeOptions> ways;
  for (size_t i = 0; i < codes::kEncodings; ++i) ways.push_back({.encoding = static_cast<Encoding>(i)});
  ways.push_back({.encoding = Encoding::nf4, .block_size = 256, .double_quantize = true});
  return ways;
}

TEST(Codes, OfPartsAndOtherDtypesAreDecodedAsTheWhole) {
  torch::manual_seed(1);
  const auto values = torch::randn({6, 5, 256});
  for (const auto& way : all_ways()) {
    SCOPED_TRACE(std::string(codes::name(way.encoding)));
    const Codes made = codes::encode(values, way);
    const auto whole = codes::decode(made);
    EXPECT_TRUE(same(codes::decode(made, at::kBFloat16), whole.to(at::kBFloat16)));
    EXPECT_TRUE(same(codes::decode(made, at::kHalf), whole.to(at::kHalf)));
    for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{{0, 30}, {7, 11}, {29, 1}, {30, 0}})
      EXPECT_TRUE(same(codes::decode_rows(made, first, count, at::kHalf),
                       whole.view({30, 256}).narrow(0, first, count).to(at::kHalf)));
    const auto place = torch::empty({30 * 256}, torch::kBFloat16);
    codes::decode_into(made, place);
    EXPECT_TRUE(same(place, whole.flatten().to(at::kBFloat16)));
    EXPECT_THAT(support::message_of<ShapeError>([&] { codes::decode_rows(made, 30, 1); }), HasSubstr("of the 30"));
  }
  // Rows of an odd number of elements begin in the middle of a byte.
  const auto odd = codes::encode(torch::randn({9, 33}), {.encoding = Encoding::nf4});
  EXPECT_TRUE(same(codes::decode_rows(odd, 3, 4), codes::decode(odd).narrow(0, 3, 4)));
  EXPECT_TRUE(same(codes::decode(codes::encode(values.transpose(0, 2), {}))  // strides don't matter
                   ,
                   codes::decode(codes::encode(values.transpose(0, 2).contiguous(), {}))));
}

/// The way of other devices: any codes, those with infinite scales too.
TEST(Codes, AreDecodedByOperatorsAsByLoopsToTheBit) {
  torch::manual_seed(3);
  std::vector<Codes> all;
  for (const auto& way : all_ways()) all.push_back(codes::encode(torch::randn({7, 512}), way));
  for (const int64_t numel : {33 * 9, 31, 64}) {  // blocks that go on from row to row
    all.push_back(codes::encode(torch::randn({1, numel}), {.encoding = Encoding::fp4, .block_size = 32}));
    all.push_back(codes::encode(torch::randn({numel, 3}), {.encoding = Encoding::nf4, .double_quantize = true}));
  }
  for (const auto& [encoding, bytes] : std::vector<std::pair<Encoding, int64_t>>{{Encoding::q4_0, 18 * 16},
                                                                                 {Encoding::q5_1, 24 * 16},
                                                                                 {Encoding::q2_k, 84 * 2},
                                                                                 {Encoding::q3_k, 110 * 2},
                                                                                 {Encoding::q4_k, 144 * 2},
                                                                                 {Encoding::q5_k, 176 * 2},
                                                                                 {Encoding::q6_k, 210 * 2}}) {
    Codes any;
    any.encoding = encoding;
    any.shape = {50, 512};
    any.data = torch::randint(256, {50, bytes}, torch::kByte);
    all.push_back(any);
  }
  const auto same_bits = [](const at::Tensor& a, const at::Tensor& b) {
    return same(a.isnan(), b.isnan()) && same(a.nan_to_num(5), b.nan_to_num(5));  // NaN's own bits mean nothing
  };
  for (const Codes& one : all) {
    SCOPED_TRACE(std::string(codes::name(one.encoding)) + (one.nested ? " nested" : ""));
    const int64_t rows = one.rows(), first = rows / 3, count = rows - first;
    EXPECT_TRUE(same_bits(codes::decode_by_operators(one, 0, rows, at::kFloat), codes::decode(one, at::kFloat)));
    EXPECT_TRUE(same_bits(codes::decode_by_operators(one, first, count, at::kHalf),
                          codes::decode_rows(one, first, count, at::kHalf)));
    const auto indices = torch::randint(rows, {5}, torch::kLong);
    EXPECT_TRUE(same_bits(codes::rows_by_operators(one, indices), codes::embedding(indices, one, at::kFloat)));
    if (codes::is_four_bit(one.encoding)) {
      EXPECT_TRUE(same(codes::scales_by_operators(one), codes::plain_scales(one)));
    }
  }
}

/// Relative errors in the Frobenius norm, of a large normal matrix.
TEST(Codes, AreAsNearAsTheirNumberOfBitsAllows) {
  torch::manual_seed(2);
  const auto values = torch::randn({1024, 1024});
  const auto error = [&](const codes::EncodeOptions& way) {
    return ((codes::decode(codes::encode(values, way)) - values).norm() / values.norm()).item<double>();
  };
  EXPECT_LT(error({.encoding = Encoding::int8_rowwise}), 0.00868 * 1.02);
  EXPECT_LT(error({.encoding = Encoding::nf4}), 0.0920 * 1.02);
  const double of_larger_blocks = error({.encoding = Encoding::nf4, .block_size = 256});
  EXPECT_LT(of_larger_blocks, 0.0987 * 1.02);
  EXPECT_GT(of_larger_blocks, 0.0920 * 1.02);
  EXPECT_LT(error({.encoding = Encoding::nf4, .double_quantize = true}), 0.0920 * 1.02);
  EXPECT_LT(error({.encoding = Encoding::fp4}), 0.1219 * 1.02);
  EXPECT_LT(error({.encoding = Encoding::q8_0}), 0.006);
}

constexpr Encoding kFamily[] = {Encoding::q2_k, Encoding::q3_k, Encoding::q4_k, Encoding::q5_k, Encoding::q6_k};

double error_of_k(const at::Tensor& values, Encoding encoding) {
  const auto apart = codes::decode(codes::encode(values, {.encoding = encoding})) - values;
  return (apart.norm() / values.norm()).item<double>();
}

/// Relative errors in the Frobenius norm: half a percent above what was measured; in the second place those of ggml's
/// own encoder (llama.cpp of 2026-11, ggml_quantize_chunk without an importance matrix) on such a matrix.
TEST(CodesOfTheKFamily, AreNearerThanThoseOfGgml) {
  torch::manual_seed(2);
  const auto values = torch::randn({1024, 1024});
  const double most[] = {0.2591, 0.1438, 0.0694, 0.03431, 0.01654},
               of_ggml[] = {0.2967, 0.1509, 0.0713, 0.0361, 0.0177};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LT(error_of_k(values, kFamily[i]), most[i] * 1.005) << codes::name(kFamily[i]);
    EXPECT_LT(most[i] * 1.005, of_ggml[i]);
  }
}

/// As above, of real weights: MiniLM's, and SmolLM2's embedding, of which we have 8 bits. (ggml's: 0.3093, 0.1608,
/// 0.0758, 0.0386, 0.0196 and 0.3126, 0.1650, 0.0775, 0.0392, 0.0200.)
TEST(CodesOfTheKFamily, AreNearOnRealWeights) {
  SKIP_WITHOUT_DATA();
  const accelerate::SafetensorsFile minilm(*support::data_dir() / "minilm/model.safetensors");
  const accelerate::GgufFile smollm(*support::data_dir() / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
  const auto dense = minilm.tensor("encoder.layer.2.output.dense.weight").slice(0, 0, 512).to(at::kFloat);
  // Its rows of 576 elements are no whole number of blocks; only the values matter.
  auto table = torch::empty({1024, 576});
  smollm.read("model.embed_tokens.weight", table);
  table = table.view({-1, 256});
  const double of_dense[] = {0.2653, 0.1528, 0.0737, 0.0367, 0.0184},
               of_table[] = {0.2700, 0.1572, 0.0753, 0.0373, 0.0188};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_LT(error_of_k(dense, kFamily[i]), of_dense[i] * 1.005) << codes::name(kFamily[i]);
    EXPECT_LT(error_of_k(table, kFamily[i]), of_table[i] * 1.005) << codes::name(kFamily[i]);
  }
}

TEST(CodesOfTheKFamily, AreTheSameOnAllProcessorsAndWithAnyNumberOfThreads) {
  torch::manual_seed(3);
  const auto values = torch::randn({64, 512});
  for (const auto encoding : kFamily) {
    const auto made = codes::encode(values, {.encoding = encoding}).data;
    auto plain = torch::empty_like(made);
    codes::encode_k_blocks(encoding, values.const_data_ptr<float>(), 128, plain.mutable_data_ptr<uint8_t>(), false);
    EXPECT_TRUE(made.equal(plain)) << codes::name(encoding);
  }
}

TEST(CodesOfTheKFamily, HoldOddTensors) {
  torch::manual_seed(4);
  for (const auto encoding : kFamily) {
    SCOPED_TRACE(std::string(codes::name(encoding)));
    const bool has_least = encoding != Encoding::q3_k && encoding != Encoding::q6_k;
    const auto decoded = [&](const at::Tensor& values) {
      return codes::decode(codes::encode(values, {.encoding = encoding}));
    };
    const auto apart = [&](const at::Tensor& values) {
      return (decoded(values) - values).abs().max().item<double>() / values.abs().max().item<double>();
    };
    EXPECT_TRUE(decoded(torch::zeros({3, 256})).equal(torch::zeros({3, 256})));
    EXPECT_EQ(decoded(torch::zeros({0, 256})).sizes(), (std::vector<int64_t>{0, 256}));
    // One value: there is a code for it, up to the rounding of a scale to fp16 (and, of scales, to the group's bits).
    EXPECT_LT(apart(torch::full({1, 256}, 0.37)), 1e-3);
    EXPECT_LT(apart(torch::full({1, 256}, -123.0)), 1e-3);
    EXPECT_LT(apart(torch::full({1, 256}, 3e4)), 1e-3);
    // An outlier is kept and costs its block alone.
    auto outlier = torch::randn({2, 256}) * 1e-3;
    const auto second = decoded(outlier)[1].clone();
    outlier[0][77] = 1000;
    EXPECT_NEAR(decoded(outlier)[0][77].item<double>(), 1000, 20);
    EXPECT_TRUE(decoded(outlier)[1].equal(second));
    // fp16's least number is 6e-8, and no scale can be less: what is nearer to zero than half of it becomes zero.
    EXPECT_TRUE(decoded(torch::full({1, 256}, 1e-38)).equal(torch::zeros({1, 256})));
    EXPECT_TRUE(decoded(torch::full({1, 256}, 1e-42)).equal(torch::zeros({1, 256})));
    EXPECT_TRUE(decoded(torch::randn({1, 256}) * 1e-6).isfinite().all().item<bool>());
    EXPECT_LT((decoded(torch::randn({4, 256}) * 1e-6)).abs().max().item<double>(), 1e-5);
    // One sign only, far from zero.
    const auto high = torch::rand({4, 256}) + 10;
    EXPECT_LT(apart(high), encoding == Encoding::q2_k ? 0.5 : 0.13);
    EXPECT_LT(apart(-high), has_least ? 0.04 : 0.13);
  }
}

/// fp32 has no inverse of what is less than 2.9e-39: such blocks count as zeros.
TEST(Codes, OfHardlyAnythingAreZero) {
  auto values = torch::zeros({3, 64});
  for (int64_t row = 0; row < 3; ++row) values[row][5] = 9e-40 * static_cast<double>(row + 1);
  for (const codes::EncodeOptions& how :
       {codes::EncodeOptions{.encoding = Encoding::nf4, .double_quantize = true},
        codes::EncodeOptions{.encoding = Encoding::nf4}, codes::EncodeOptions{.encoding = Encoding::int8_rowwise}})
    EXPECT_LT(codes::decode(codes::encode(values, how), at::kFloat).abs().max().item<double>(), 1e-37);
  for (const auto map : {codes::Map::dynamic, codes::Map::dynamic_unsigned}) {
    auto made = torch::full({192}, 77, at::kByte), by_operators = torch::full({192}, 77, at::kByte);
    auto scales = torch::full({3}, 7.0), other_scales = torch::full({3}, 7.0);
    codes::encode_blockwise(values.view({-1}), map, 64, codes::Search::nearest, {made, scales});
    codes::encode_by_operators(values.view({-1}), map, 64, {by_operators, other_scales});
    EXPECT_TRUE(torch::equal(scales, torch::zeros({3}))) << scales;
    EXPECT_TRUE(torch::equal(other_scales, scales));
    EXPECT_TRUE(torch::equal(made, torch::zeros({192}, at::kByte)));
    EXPECT_TRUE(torch::equal(made, by_operators));
  }
}

/// Another thread has a part of the processor time that this takes, which no other program changes.
TEST(Codes, AreMadeAndDecodedByAllThreads) {
  torch::manual_seed(16);
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const auto values = torch::randn({1024, 4096});
  const auto share_of_this_thread = [](const std::function<void()>& work) {
    const auto now = [](clockid_t clock) {
      timespec time{};
      clock_gettime(clock, &time);
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
    };
    work();  // buffers, tables
    const double all = now(CLOCK_PROCESS_CPUTIME_ID), mine = now(CLOCK_THREAD_CPUTIME_ID);
    // The kernel adds up what a thread on another core takes at its clock's ticks only, some milliseconds apart.
    double own = 0;
    while (own < 0.1) {
      work();
      own = now(CLOCK_THREAD_CPUTIME_ID) - mine;
    }
    return own / (now(CLOCK_PROCESS_CPUTIME_ID) - all);
  };
  for (const auto encoding : {Encoding::nf4, Encoding::int8_rowwise, Encoding::q4_0, Encoding::q4_k}) {
    codes::Codes made;
    EXPECT_LT(share_of_this_thread([&] { made = codes::encode(values, {.encoding = encoding}); }), 0.8)
        << codes::name(encoding);
    const auto to = torch::empty_like(values);
    EXPECT_LT(share_of_this_thread([&] { codes::decode_into(made, to.view({-1})); }), 0.8) << codes::name(encoding);
  }
  codes::Blockwise blocks{torch::empty({1024 * 4096}, at::kByte), torch::empty({16384})};
  const auto flat = values.view({-1});
  EXPECT_LT(share_of_this_thread(
                [&] { codes::encode_blockwise(flat, codes::Map::dynamic, 256, codes::Search::nearest, blocks); }),
            0.8);
  EXPECT_LT(share_of_this_thread([&] { codes::decode_blockwise(blocks, codes::Map::dynamic, 256); }), 0.8);
  at::set_num_threads(before);
}

TEST(Codes, HaveNamesBothWays) {
  for (size_t i = 0; i < codes::kEncodings; ++i) {
    const auto encoding = static_cast<Encoding>(i);
    EXPECT_EQ(codes::encoding_named(codes::name(encoding)), encoding);
  }
  EXPECT_EQ(codes::encoding_named("Q4_K"), Encoding::q4_k);
  EXPECT_EQ(codes::encoding_named("q4"), std::nullopt);
}

TEST(Codes, ThatCantBeAreRefusedWithTheReason) {
  const auto says = [](const at::Tensor& values, const codes::EncodeOptions& way) {
    return support::message_of<accelerate::Error>([&] { codes::encode(values, way); });
  };
  auto values = torch::ones({4, 64});
  values[2][5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(says(values, {}), AllOf(HasSubstr("element 133"), HasSubstr("nan")));
  values[2][5] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(says(values, {.encoding = Encoding::int8_rowwise}), HasSubstr("-inf"));
  EXPECT_THAT(says(torch::ones({4, 33}), {.encoding = Encoding::q8_0}), HasSubstr("33 elements"));
  EXPECT_THAT(says(torch::ones({4, 64}), {.block_size = 96}), HasSubstr("block_size = 96"));
  EXPECT_THAT(says(torch::ones({4, 320}), {.encoding = Encoding::q4_k}),
              AllOf(HasSubstr("rows of 320 elements can't be q4_k, whose blocks have 256"), HasSubstr("q8_0")));
  for (const auto encoding : {Encoding::q4_k, Encoding::q6_k}) {
    EXPECT_THAT(says(torch::full({1, 256}, 1e9), {.encoding = encoding}), HasSubstr("fp16"));
    EXPECT_THAT(says(torch::full({1, 256}, 3e38), {.encoding = encoding}), HasSubstr("fp16"));
    EXPECT_THAT(says(torch::full({2, 256}, NAN), {.encoding = encoding}), HasSubstr("element 0"));
  }
  EXPECT_THAT(says(torch::ones({4, 64}, torch::kDouble), {}), HasSubstr("Double"));
  EXPECT_THAT(says(torch::ones({}), {.encoding = Encoding::int8_rowwise}), HasSubstr("at least one dimension"));
  EXPECT_THAT(says(torch::full({1, 32}, 1e7), {.encoding = Encoding::q8_0}), HasSubstr("fp16"));
  EXPECT_THAT(says(torch::ones({0, 64}), {.double_quantize = true}), HasSubstr("empty"));
  EXPECT_THAT(says(torch::ones({1, 64}), {.encoding = Encoding::q8_0, .double_quantize = true}),
              HasSubstr("double_quantize"));
}

TEST(Codes, OfTheLargestShapeAreNoOverflow) {
  const Codes made{.encoding = Encoding::nf4,
                   .shape = {std::numeric_limits<int64_t>::max()},
                   .data = torch::zeros({1, 1}, at::kByte),
                   .scales = torch::zeros({1}),
                   .block_size = 64};
  EXPECT_THAT(support::message_of<ShapeError>([&] { codes::check(made, "w"); }), HasSubstr("[4611686018427387904, 1]"));
}

TEST(Codes, WhosePartsDoNotFitAreRefusedByName) {
  const auto good = codes::encode(torch::ones({4, 64}), {.double_quantize = true});
  const auto says = [](Codes broken) { return support::message_of<ShapeError>([&] { codes::decode(broken); }); };
  auto broken = good;
  broken.shape = {5, 64};
  EXPECT_THAT(says(broken), HasSubstr("the codes is Byte [128, 1] on cpu, expected Byte [160, 1]"));
  broken = good, broken.scales = at::Tensor();
  EXPECT_THAT(says(broken), HasSubstr("the scales is missing"));
  broken = good, broken.scales = torch::ones({4});
  EXPECT_THAT(says(broken), HasSubstr("Float"));
  broken = good, broken.block_size = 63;
  EXPECT_THAT(says(broken), HasSubstr("63"));
  broken = good, broken.nested->absmax = torch::ones({2});
  EXPECT_THAT(says(broken), HasSubstr("scales' scales"));
  broken = good, broken.data = broken.data.repeat({1, 2}).slice(1, 0, 1);
  EXPECT_THAT(says(broken), HasSubstr("with gaps"));
  broken = good, broken.encoding = Encoding::q4_0;
  EXPECT_THAT(says(broken), HasSubstr("codes"));
  auto rows = codes::encode(torch::ones({4, 64}), {.encoding = Encoding::int8_rowwise});
  rows.shape = {-4, 64};
  EXPECT_THAT(says(rows), HasSubstr("negative"));
}

}  // namespace
