/// Steps of optimizers on flat slices: the same bits however they are cut, on any processor.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "optim/kernels/operators.hpp"
#include "optim/kernels/step.hpp"
#include "optim/kernels/step_loops.hpp"

namespace {

using namespace accelerate::optim::kernels;

/// All that this processor has.
std::vector<std::pair<std::string, const AllLoops*>> all_loops() {
  std::vector<std::pair<std::string, const AllLoops*>> all{{"plain", &plain_loops()}};
  if (avx2_loops()) all.emplace_back("AVX2", avx2_loops());
  if (avx512_loops()) all.emplace_back("AVX-512", avx512_loops());
  return all;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

struct Types {
  at::ScalarType parameter, gradient, state;
};
const std::vector<Types> kTypes = {
    {at::kFloat, at::kFloat, at::kFloat},          {at::kDouble, at::kDouble, at::kDouble},
    {at::kBFloat16, at::kBFloat16, at::kBFloat16}, {at::kHalf, at::kHalf, at::kHalf},
    {at::kFloat, at::kBFloat16, at::kFloat},       {at::kBFloat16, at::kHalf, at::kFloat}};

struct Rule {
  std::string name;
  std::function<void(const std::vector<StepSlice>&, double divisor)> step;
  std::function<std::vector<StepDigest>(const std::vector<StepSlice>&, const std::vector<SliceAhead>&, double divisor)>
      ahead;
  size_t states;
};
std::vector<Rule> rules() {
  const auto of = [](const char* name, const auto& rule, size_t states) {
    return Rule{
        name, [rule](const auto& on, double divisor) { step(rule, on, divisor); },
        [rule](const auto& on, const auto& ahead, double divisor) { return step_ahead(rule, on, ahead, divisor); },
        states};
  };
  const auto adam = [&](const char* name, bool decoupled, double decay, size_t states) {
    return of(name, AdamStep{1e-2, 0.9, 0.99, 1e-6, decay, decoupled, 3}, states);
  };
  const auto sgd = [&](const char* name, double momentum, bool nesterov, bool first) {
    return of(name, SgdStep{0.1, momentum, nesterov ? 0.0 : 0.3, 0.1, nesterov, first}, momentum != 0 ? 1 : 0);
  };
  return {adam("AdamW", true, 0.1, 2),
          adam("Adam with L2", false, 0.1, 2),
          adam("Adam", false, 0, 2),
          adam("AMSGrad", true, 0, 3),
          sgd("SGD", 0, false, false),
          sgd("momentum", 0.9, false, false),
          sgd("Nesterov", 0.9, true, false),
          sgd("a first step", 0.9, false, true),
          of("Adagrad", AdagradStep{0.1, 0.01, 1e-8, 0.1, 4}, 1),
          of("Lion", LionStep{1e-2, 0.9, 0.99, 0.1}, 1),
          of("Adam without correction", AdamStep{1e-2, 0.9, 0.99, 1e-6, 0.1, true, 3, false}, 2)};
}

/// A parameter, its gradient and up to three states, which are not negative.
struct Tensors {
  Tensors(int64_t count, const Types& types, size_t states) {
    torch::manual_seed(7);
    const auto numbers = [&](at::ScalarType type) { return torch::randn({count}, at::kDouble).to(type); };
    parameter = numbers(types.parameter), gradient = numbers(types.gradient);
    for (size_t i = 0; i < states; ++i) state.push_back(numbers(types.state).abs());
  }
  /// @param begins  where slices begin; with the number of all at the end
  std::vector<StepSlice> cut(const std::vector<int64_t>& begins) const {
    std::vector<StepSlice> slices;
    const auto at = [](const at::Tensor& tensor, int64_t from) {
      return static_cast<char*>(tensor.mutable_data_ptr()) + from * static_cast<int64_t>(tensor.element_size());
    };
    for (size_t i = 0; i + 1 < begins.size(); ++i) {
      StepSlice s{.count = begins[i + 1] - begins[i],
                  .parameter_type = parameter.scalar_type(),
                  .gradient_type = gradient.scalar_type(),
                  .parameter = at(parameter, begins[i]),
                  .gradient = at(gradient, begins[i])};
      s.state_type = state.empty() ? s.parameter_type : state[0].scalar_type();
      void** const places[] = {&s.first, &s.second, &s.largest};
      for (size_t k = 0; k < state.size(); ++k) *places[k] = at(state[k], begins[i]);
      slices.push_back(s);
    }
    return slices;
  }
  bool operator==(const Tensors& other) const {
    bool same = same_bits(parameter, other.parameter) && same_bits(gradient, other.gradient);
    for (size_t i = 0; i < state.size(); ++i) same &= same_bits(state[i], other.state[i]);
    return same;
  }
  at::Tensor parameter, gradient;
  std::vector<at::Tensor> state;
};

TEST(StepKernels, GiveTheSameBitsHoweverTensorsAreCut) {
  constexpr int64_t kCount = 100'003;  // three threads' worth, and a tail behind all vectors
  const int threads = at::get_num_threads();
  for (const Types& types : kTypes) {
    for (const Rule& rule : rules()) {
      for (const double divisor : {1.0, 1024.0}) {
        const Tensors whole(kCount, types, rule.states);
        at::set_num_threads(1);
        rule.step(whole.cut({0, kCount}), divisor);
        for (const int64_t several : {1, 3}) {
          at::set_num_threads(static_cast<int>(several));
          const Tensors parts(kCount, types, rule.states);
          rule.step(parts.cut({0, 1, 8, 21, 21, 1045, 50'001, 99'999, kCount}), divisor);
          EXPECT_TRUE(parts == whole) << rule.name << ", " << at::toString(types.parameter) << ", "
                                      << at::toString(types.gradient) << ", " << several << " threads";
        }
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(StepKernels, AheadTheyGiveTheSameBitsAndChangeNothing) {
  constexpr int64_t kCount = 70'003;
  for (const Types& types : kTypes)
    for (const Rule& rule : rules())
      for (const double divisor : {1.0, 1024.0}) {
        SCOPED_TRACE(rule.name + ", " + at::toString(types.parameter) + ", " + at::toString(types.gradient));
        const Tensors stepped(kCount, types, rule.states), untouched(kCount, types, rule.states),
            old(kCount, types, rule.states), fresh(kCount, types, rule.states);
        rule.step(stepped.cut({0, kCount}), divisor);
        fresh.parameter.zero_();
        for (const auto& state : fresh.state) state.zero_();
        const std::vector<int64_t> begins{0, 1, 1045, 50'001, kCount};
        std::vector<SliceAhead> ahead;
        for (const auto& slice : fresh.cut(begins))
          ahead.push_back({slice.parameter, slice.first, slice.second, slice.largest});
        const auto read = rule.ahead(old.cut(begins), ahead, divisor);
        EXPECT_TRUE(old == untouched);
        EXPECT_TRUE(same_bits(fresh.parameter, stepped.parameter));
        for (size_t i = 0; i < rule.states; ++i) EXPECT_TRUE(same_bits(fresh.state[i], stepped.state[i]));
        EXPECT_EQ(digests(old.cut(begins), divisor), read);
        divide_gradients(old.cut({0, kCount}), divisor);
        EXPECT_TRUE(same_bits(old.gradient, stepped.gradient)) << "as a step leaves it";
      }
}

// One bit, wherever it is; two elements that change places; all of them by a little.
TEST(StepKernels, DigestsTellWhatHasChanged) {
  constexpr int64_t kCount = 2100;
  for (const auto& [name, loops] : all_loops()) {
    const auto check = [&, name = name]<class T>(const StepLoops<T>& of, at::Tensor values) {
      SCOPED_TRACE(name + ", " + std::to_string(sizeof(T)));
      auto* const data = values.mutable_data_ptr<T>();
      const auto all = [&] { return of.digest(data, kCount, 0); };
      const uint64_t before = all();
      EXPECT_EQ(before, of.digest(data, 1001, 0) + of.digest(data + 1001, kCount - 1001, 1001)) << "cut anywhere";
      const auto differs = [&](const char* what, const std::function<void()>& change) {
        const at::Tensor kept = values.clone();
        change();
        EXPECT_NE(all(), before) << what;
        values.copy_(kept);
      };
      for (const int64_t i : {int64_t{0}, int64_t{7}, int64_t{1024}, kCount - 1})
        for (const size_t byte : {size_t{0}, sizeof(T) - 1})
          differs("a bit", [&] { reinterpret_cast<unsigned char*>(data + i)[byte] ^= 0x80; });
      for (const int64_t i : {int64_t{1}, int64_t{8}, int64_t{1024}})
        differs("two change places", [&] { std::swap(data[0], data[i]); });
      differs("all but a little", [&] { values.mul_(1.0000002); });
      differs("signs", [&] { values.neg_(); });
      EXPECT_EQ(all(), before);
    };
    torch::manual_seed(3);
    check(loops->of_floats, torch::randn({kCount}));
    check(loops->of_doubles, torch::randn({kCount}, at::kDouble));
  }
}

TEST(StepKernels, GiveTheSameBitsOnAllProcessors) {
  constexpr int64_t kCount = 1003;
  const AdamRates<float> adam{0.999F, 0, {0.9F, 0.99F}, {0.1F, 0.01F}, 0.02F, 1e-6F},
      l2{1, 0.1F, {0.9F, 0.99F}, {0.1F, 0.01F}, 0.02F, 1e-6F};
  const SgdRates<float> sgd{0.1F, 0.1F, 0.9F, 0.7F, true, false, true};
  const AdagradRates<float> adagrad{0.1F, 0.1F, 1e-8F};
  const LionRates<float> lion{0.999F, {0.9F, 0.99F}, {0.1F, 0.01F}, 0.02F};
  const auto after = [&](const AllLoops& loops, const std::string& rule) {
    Tensors t(kCount, kTypes[0], 3);
    t.gradient[5] = std::numeric_limits<float>::infinity(), t.gradient[6] = std::numeric_limits<float>::quiet_NaN();
    t.state[1][7] = 0, t.gradient[7] = 0;
    auto* const p = t.parameter.mutable_data_ptr<float>();
    const auto* const g = t.gradient.const_data_ptr<float>();
    float* s[3];
    for (size_t i = 0; i < 3; ++i) s[i] = t.state[i].mutable_data_ptr<float>();
    if (rule == "Adam") loops.of_floats.adam(p, g, s[0], s[1], nullptr, kCount, adam);
    if (rule == "L2 and AMSGrad") loops.of_floats.adam(p, g, s[0], s[1], s[2], kCount, l2);
    if (rule == "SGD") loops.of_floats.sgd(p, g, s[0], kCount, sgd);
    if (rule == "Adagrad") loops.of_floats.adagrad(p, g, s[1], kCount, adagrad);
    if (rule == "Lion") loops.of_floats.lion(p, g, s[0], kCount, lion);
    return t;
  };
  for (const auto& [name, loops] : all_loops())
    for (const std::string rule : {"Adam", "L2 and AMSGrad", "SGD", "Adagrad", "Lion"}) {
      const Tensors plain = after(plain_loops(), rule), found = after(*loops, rule);
      for (int64_t i : {5, 6})  // which NaN it is may differ
        plain.parameter[i] = plain.state[0][i] = plain.state[1][i] = plain.state[2][i] = plain.gradient[i] =
            found.parameter[i] = found.state[0][i] = found.state[1][i] = found.state[2][i] = found.gradient[i] = 0;
      EXPECT_TRUE(found == plain) << rule << " with " << name;
    }
}

/// All numbers of 16 bits, and fp32 numbers on and between them.
TEST(StepKernels, ConvertAsLibTorchDoes) {
  std::vector<uint16_t> low(1 << 16);
  for (size_t i = 0; i < low.size(); ++i) low[i] = static_cast<uint16_t>(i);
  const auto as = [&](at::ScalarType type) {
    return at::from_blob(low.data(), {static_cast<int64_t>(low.size())}, at::TensorOptions().dtype(type));
  };
  for (const auto& [name, loops] : all_loops()) {
    for (const int format : {kBf16, kFp16}) {
      const auto type = format == kBf16 ? at::kBFloat16 : at::kHalf;
      const at::Tensor wide = as(type).to(at::kFloat), found = at::empty_like(wide);
      loops->widen[format](low.data(), found.mutable_data_ptr<float>(), wide.numel());
      const at::Tensor numbers = wide.isnan().logical_not();
      EXPECT_TRUE(at::equal(found.isnan(), wide.isnan())) << name << at::toString(type);
      EXPECT_TRUE(same_bits(found.masked_select(numbers), wide.masked_select(numbers))) << name << at::toString(type);
      // Each, the middle between neighbours, and a bit more and less than these.
      const at::Tensor finite = wide.masked_select(wide.isfinite());
      const at::Tensor sorted = std::get<0>(finite.sort());
      const at::Tensor middle = (sorted.slice(0, 1) / 2 + sorted.slice(0, 0, -1) / 2);
      const float infinity = std::numeric_limits<float>::infinity();
      const at::Tensor many = at::cat({wide, middle, at::nextafter(middle, at::full_like(middle, infinity)),
                                       at::nextafter(middle, at::full_like(middle, -infinity)),
                                       torch::tensor({65519.F, 65520.F, 1e30F, -1e30F, infinity, -infinity, 1e-30F})});
      const at::Tensor expected = many.to(type), narrow = at::empty_like(expected);
      loops->narrow[format](many.const_data_ptr<float>(), static_cast<uint16_t*>(narrow.mutable_data_ptr()),
                            many.numel());
      const at::Tensor kept = many.isnan().logical_not();
      EXPECT_TRUE(at::equal(narrow.isnan(), expected.isnan())) << name << at::toString(type);
      EXPECT_TRUE(same_bits(narrow.masked_select(kept), expected.masked_select(kept))) << name << at::toString(type);
    }
  }
}

/// The moments of 16 bits are rounded once per step, and so is the parameter.
TEST(StepKernels, RoundOnce) {
  const Rule rule = rules()[0];
  const Tensors low(777, kTypes[2], 2);
  Tensors high = low;
  high.parameter = low.parameter.to(at::kFloat), high.gradient = low.gradient.to(at::kFloat);
  for (auto& state : high.state) state = state.to(at::kFloat);
  rule.step(high.cut({0, 777}), 1);
  rule.step(low.cut({0, 777}), 1);
  EXPECT_TRUE(same_bits(low.parameter, high.parameter.to(at::kBFloat16)));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(same_bits(low.state[i], high.state[i].to(at::kBFloat16)));
}

TEST(StepKernels, DivideGradientsAndLeaveThemDivided) {
  for (const Rule& rule : rules()) {
    Tensors scaled(100, kTypes[0], rule.states);
    const Tensors plain(100, kTypes[0], rule.states);
    scaled.gradient.mul_(1024);
    rule.step(scaled.cut({0, 100}), 1024);
    rule.step(plain.cut({0, 100}), 1);
    EXPECT_TRUE(scaled == plain) << rule.name;
  }
}

}  // namespace
