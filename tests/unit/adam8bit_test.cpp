// 8-bit optimizers against bitsandbytes (tests/unit/adam8bit_peer.py) and by themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "accelerate/checkpoint.hpp"
#include "accelerate/optim.hpp"
#include "accelerate/utils/error.hpp"
#include "codes/blockwise.hpp"
#include "message_of.hpp"
#include "optim/ivalue_access.hpp"
#include "python.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

namespace fs = std::filesystem;
using namespace accelerate::optim;
using codes::Map;
using codes::Search;
using support::message_of;
using support::scratch;
using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

void run_peer(const std::vector<std::string>& arguments) {
  const auto peer = support::run_python("tests/unit/adam8bit_peer.py", arguments);
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
}

codes::Blockwise encode(const at::Tensor& values, Map map, Search search = Search::nearest) {
  codes::Blockwise result{torch::empty(values.sizes(), torch::kByte), torch::empty({(values.numel() + 255) / 256})};
  codes::encode_blockwise(values, map, 256, search, result);
  return result;
}

/// Equal to the bit, but that -0 is 0.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && torch::equal(a, b);
}

std::map<std::string, at::Tensor> adversarial_values() {
  torch::manual_seed(1);
  auto outlier = torch::randn({512}) * 1e-4;
  outlier[3] = 1e4;
  auto first_half = torch::randn({300});
  first_half.slice(0, 0, 256).zero_();
  return {{"normal", torch::randn({64, 65})},
          {"wide", torch::randn({5000}) * torch::exp(torch::randn({5000}) * 4)},
          {"outlier", outlier},
          {"zeros", torch::zeros({300})},
          {"some_zeros", first_half},
          {"one", torch::full({1}, -2.5)},
          {"even_steps", torch::linspace(-1, 1, 4096)},
          {"empty", torch::empty({0})}};
}

TEST(BlockwiseCodes, AreThoseOfBitsandbytes) {
  SKIP_WITHOUT_PYTHON();
  auto given = adversarial_values();
  given.erase("empty");
  checkpointing::save_object(checkpointing::to_dict(given), scratch("values.bin"));
  run_peer({"codes", scratch("values.bin"), scratch("codes.bin")});
  const auto theirs = checkpointing::load_object(scratch("codes.bin")).toGenericDict();
  for (const auto& [name, values] : given)
    for (const Map map : {Map::dynamic, Map::dynamic_unsigned})
      for (const Search search : {Search::nearest, Search::on_grid}) {
        const auto key =
            name + (map == Map::dynamic ? ".signed." : ".unsigned.") + (search == Search::nearest ? "nearest" : "grid");
        const auto expected = theirs.at(key).toGenericDict();
        const auto ours = encode(map == Map::dynamic ? values : values.abs(), map, search);
        EXPECT_TRUE(same(ours.codes, expected.at("codes").toTensor())) << key;
        EXPECT_TRUE(same(ours.absmax, expected.at("absmax").toTensor())) << key;
        EXPECT_TRUE(same(codes::decode_blockwise(ours, map, 256), expected.at("values").toTensor())) << key;
      }
}

TEST(BlockwiseCodes, TheNearestValueIsFound) {
  for (const Map map : {Map::dynamic, Map::dynamic_unsigned}) {
    const auto& known = codes::values_of(map);
    ASSERT_EQ(known.numel(), 256);
    EXPECT_TRUE((known.slice(0, 1) > known.slice(0, 0, 255)).all().item<bool>());
    for (const auto& [name, values] : adversarial_values()) {
      const auto given = map == Map::dynamic ? values : values.abs();
      const auto back = codes::decode_blockwise(encode(given, map), map, 256);
      for (int64_t begin = 0; begin < given.numel(); begin += 256) {
        const auto block = given.view(-1).slice(0, begin, begin + 256);
        const auto largest = block.abs().max();
        const auto best = (block.unsqueeze(1) - known * largest).abs().amin(1);
        const auto error = (block - back.view(-1).slice(0, begin, begin + 256)).abs();
        EXPECT_LE((error - best).max().item<float>(), largest.item<float>() * 1e-6F) << name;
      }
    }
  }
}

TEST(BlockwiseCodes, ValuesThatAreNoNumbersStayVisible) {
  auto values = torch::ones({600});
  values[300] = std::numeric_limits<float>::quiet_NaN();
  values[590] = -std::numeric_limits<float>::infinity();
  for (const bool by_operators : {false, true}) {
    auto blocks = encode(values, Map::dynamic);
    if (by_operators) codes::encode_by_operators(values, Map::dynamic, 256, blocks);
    const auto back = codes::decode_blockwise(blocks, Map::dynamic, 256);
    EXPECT_TRUE(back.slice(0, 0, 256).eq(1).all().item<bool>());
    EXPECT_TRUE(back.slice(0, 256).isnan().all().item<bool>());
  }
}

/// As on a GPU.
TEST(BlockwiseCodes, ByOperatorsAreThose) {
  auto given = adversarial_values();
  given.erase("empty");
  for (const auto& [name, values] : given)
    for (const Map map : {Map::dynamic, Map::dynamic_unsigned}) {
      const auto source = map == Map::dynamic ? values : values.abs();
      const auto expected = encode(source, map);
      codes::Blockwise found{torch::empty_like(expected.codes), torch::empty_like(expected.absmax)};
      codes::encode_by_operators(source, map, 256, found);
      EXPECT_TRUE(same(found.absmax, expected.absmax)) << name;
      const auto values_found = codes::decode_by_operators(found, map, 256);
      EXPECT_TRUE(same(values_found, codes::decode_blockwise(found, map, 256))) << name;
      // Between two values that are equally near, rounding may choose either.
      const auto apart = (found.codes.to(torch::kInt) - expected.codes.to(torch::kInt)).abs();
      EXPECT_LE(apart.max().item<int>(), 1) << name;
      EXPECT_LE(apart.sum().item<int64_t>(), 1 + values.numel() / 1000) << name;
    }
  const auto meta = torch::empty({300}, torch::kMeta);
  const codes::Blockwise blocks{torch::empty({300}, meta.options().dtype(torch::kByte)),
                                torch::empty({2}, meta.options())};
  codes::encode_blockwise(meta, Map::dynamic, 256, Search::nearest, blocks);
  EXPECT_EQ(codes::decode_blockwise(blocks, Map::dynamic, 256).sizes(), meta.sizes());
}

/// Parameters below and above the limit of 8 bits, of an odd size, not contiguous, and, where it is asked for, of more
/// elements than are decoded at a time.
Tensors make_parameters(at::ScalarType dtype = at::kFloat, bool large = false) {
  torch::manual_seed(3);
  Tensors params{torch::randn({64, 65}), torch::randn({100}), torch::randn({80, 70}).t()};
  if (large) params.push_back(torch::randn({300, 449}));
  for (auto& p : params) p = p.to(dtype).set_requires_grad(true);
  return params;
}

Tensors gradients_of(const Tensors& params, int64_t step) {
  torch::manual_seed(1000 + step);
  Tensors result;
  for (const auto& p : params) result.push_back((torch::randn(p.sizes()) * 0.1).to(p.scalar_type()));
  result[0].slice(0, 0, 9).zero_();  // rows that are never looked up
  return result;
}

void step(torch::optim::Optimizer& optimizer, const Tensors& params, int64_t number) {
  const auto gradients = gradients_of(params, number);
  for (size_t i = 0; i < params.size(); ++i) params[i].mutable_grad() = gradients[i];
  optimizer.step();
}

struct Settings {
  const char* name;
  AdamW8bitOptions options;
};

c10::IValue case_of(const Settings& settings, const Tensors& params, int64_t first, int64_t count) {
  Dict result = make_dict();
  result.insert("class", settings.name);
  const auto& o = settings.options;
  result.insert("lr", o.lr()), result.insert("eps", o.eps()), result.insert("weight_decay", o.weight_decay());
  result.insert("min_8bit_size", o.min_8bit_size());
  result.insert("betas", make_list(std::vector<double>{std::get<0>(o.betas()), std::get<1>(o.betas())}));
  Tensors detached;
  for (const auto& p : params) detached.push_back(p.detach().clone());
  result.insert("params", make_list(detached));
  std::vector<c10::IValue> gradients;
  for (int64_t i = first; i < first + count; ++i) gradients.emplace_back(make_list(gradients_of(params, i)));
  result.insert("gradients", make_list(gradients));
  return result;
}

std::shared_ptr<AdamW8bit> make(const Settings& settings, const Tensors& params) {
  if (settings.name == std::string("Adam8bit")) return std::make_shared<Adam8bit>(params, settings.options);
  if (settings.name == std::string("PagedAdamW8bit")) return std::make_shared<PagedAdamW8bit>(params, settings.options);
  return std::make_shared<AdamW8bit>(params, settings.options);
}

/// Which fields of a state dict differ.
std::string difference(const c10::IValue& a, const c10::IValue& b, const std::string& at = "") {
  if (a.isGenericDict()) {
    const auto x = a.toGenericDict(), y = b.toGenericDict();
    std::string found = x.size() == y.size() ? "" : at + ": sizes ";
    for (const auto& entry : x) {
      const auto name =
          at + "." + (entry.key().isString() ? entry.key().toStringRef() : std::to_string(entry.key().toInt()));
      found += y.contains(entry.key()) ? difference(entry.value(), y.at(entry.key()), name) : name + " is missing ";
    }
    return found;
  }
  if (a.isTensor()) return b.isTensor() && same(a.toTensor(), b.toTensor()) ? "" : at + " ";
  if (a.isList() || a.isTuple()) {
    const auto x = a.isList() ? a.toListRef().vec() : a.toTupleRef().elements().vec();
    const auto y = b.isList() ? b.toListRef().vec() : b.toTupleRef().elements().vec();
    std::string found = x.size() == y.size() ? "" : at + ": sizes ";
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      found += difference(x[i], y[i], at + "[" + std::to_string(i) + "]");
    return found;
  }
  const auto number = [](const c10::IValue& v) { return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble(); };
  if (a.isNone() || b.isNone()) return a.isNone() == b.isNone() ? "" : at + " ";
  return number(a) == number(b) ? "" : at + " ";
}

const std::vector<Settings>& all_settings() {
  static const std::vector<Settings> all{
      {"AdamW8bit", AdamW8bitOptions(1e-2)},
      {"Adam8bit", Adam8bitOptions(3e-3).betas({0.8, 0.95}).eps(1e-6)},
      {"AdamW8bit", AdamW8bitOptions(1e-2).weight_decay(0.3).min_8bit_size(50)},
      {"AdamW8bit", AdamW8bitOptions(1e-2).min_8bit_size(1 << 20)},
  };
  return all;
}

TEST(Adam8bitTest, TwentyStepsAreThoseOfBitsandbytesToTheBit) {
  SKIP_WITHOUT_PYTHON();
  struct Run {
    const Settings& settings;
    Tensors params;
    fs::path result;
  };
  std::vector<Run> runs;
  std::vector<std::string> arguments{"train"};  // all in one process: its imports are what takes time
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto& settings : all_settings()) {
      const auto params = make_parameters(dtype, dtype == at::kFloat && &settings == all_settings().data());
      const auto number = std::to_string(runs.size());
      const auto given = scratch("case" + number + ".bin"), result = scratch("result" + number + ".bin");
      checkpointing::save_object(case_of(settings, params, 0, 20), given);
      arguments.push_back(given), arguments.push_back(result);
      runs.push_back({settings, params, result});
    }
  arguments.push_back("nearest");
  run_peer(arguments);
  for (const auto& [settings, params, result] : runs) {
    const auto optimizer = make(settings, params);
    for (int64_t i = 0; i < 20; ++i) step(*optimizer, params, i);
    const auto theirs = checkpointing::load_object(result).toGenericDict();
    const auto expected = theirs.at("params").toListRef();
    for (size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(same(params[i].detach(), expected[i].toTensor())) << settings.name << " parameter " << i;
    EXPECT_EQ(difference(optimizer->state_dict(), theirs.at("state")), "") << settings.name;
  }
}

/// bitsandbytes' library for CPUs finds codes on a grid (Search::on_grid): another rounding, and elements whose
/// gradient is zero move by some 0.4 % of the learning rate a step.
TEST(Adam8bitTest, TwentyStepsAreNearThoseOfBitsandbytesOwnLibrary) {
  SKIP_WITHOUT_PYTHON();
  const Settings settings{"Adam8bit", Adam8bitOptions(1e-2)};
  const auto params = make_parameters();
  const auto start = params[0].detach().clone();
  checkpointing::save_object(case_of(settings, params, 0, 20), scratch("case.bin"));
  run_peer({"train", scratch("case.bin"), scratch("result.bin"), "native"});
  const auto optimizer = make(settings, params);
  for (int64_t i = 0; i < 20; ++i) step(*optimizer, params, i);
  const auto loaded = checkpointing::load_object(scratch("result.bin"));
  const auto theirs = loaded.toGenericDict().at("params").toListRef();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto apart = (params[i].detach() - theirs[i].toTensor()).abs();
    EXPECT_LT(apart.mean().item<double>(), 0.02 * 20 * 1e-2) << i;
  }
  // The first 512 elements never had a gradient.
  EXPECT_TRUE(same(params[0].detach().view(-1).slice(0, 0, 585), start.view(-1).slice(0, 0, 585)));
}

/// Ours plain, theirs paged, and ours paged: the files are the same.
TEST(Adam8bitTest, StatesGoToBitsandbytesAndBack) {
  SKIP_WITHOUT_PYTHON();
  const Settings settings{"AdamW8bit", AdamW8bitOptions(1e-2)};
  const auto params = make_parameters(at::kFloat, true);
  const auto optimizer = make(settings, params);
  for (int64_t i = 0; i < 3; ++i) step(*optimizer, params, i);
  const auto wanted =
      case_of({"PagedAdamW8bit", AdamW8bitOptions(0.5)}, params, 3, 2);  // the state brings its own rate
  wanted.toGenericDict().insert("state", optimizer->state_dict());
  checkpointing::save_object(wanted, scratch("case.bin"));
  run_peer({"train", scratch("case.bin"), scratch("result.bin"), "nearest"});
  const auto theirs = checkpointing::load_object(scratch("result.bin")).toGenericDict();
  for (int64_t i = 3; i < 5; ++i) step(*optimizer, params, i);
  EXPECT_EQ(difference(optimizer->state_dict(), theirs.at("state")), "");

  const auto again = make_parameters(at::kFloat, true);
  for (size_t i = 0; i < again.size(); ++i) again[i].detach().copy_(theirs.at("params").toListRef()[i].toTensor());
  const auto loaded = make({"PagedAdamW8bit", AdamW8bitOptions(0.5)}, again);
  loaded->load_state_dict(theirs.at("state"));
  step(*optimizer, params, 5), step(*loaded, again, 5);
  for (size_t i = 0; i < params.size(); ++i) EXPECT_TRUE(same(params[i], again[i])) << i;
}

TEST(Adam8bitTest, TrainsAsAdamWDoes) {
  const auto train = [](auto&& make_optimizer) {
    torch::manual_seed(7);
    const auto x = torch::randn({256, 64}), y = torch::randn({256, 64}).mul(0.1) + x.matmul(torch::randn({64, 64}));
    torch::nn::Sequential net(torch::nn::Linear(64, 128), torch::nn::Tanh(), torch::nn::Linear(128, 64));
    const auto optimizer = make_optimizer(net->parameters());
    double loss = 0;
    for (int i = 0; i < 150; ++i) {
      optimizer->zero_grad();
      const auto error = torch::mse_loss(net->forward(x), y);
      error.backward();
      optimizer->step();
      loss = error.template item<double>();
    }
    return loss;
  };
  const double full =
      train([](Tensors p) { return std::make_shared<torch::optim::AdamW>(p, torch::optim::AdamWOptions(1e-2)); });
  const double few = train([](Tensors p) { return std::make_shared<AdamW8bit>(p, AdamW8bitOptions(1e-2)); });
  EXPECT_NEAR(few, full, 0.1 * full);
}

/// A second moment of 1e-8 of its block's largest is nearest to zero. Divided by eps alone, what is left of the first
/// one would be a step of 900 learning rates.
TEST(Adam8bitTest, ASmallGradientAndThenNoneIsASmallStep) {
  const auto params = Tensors{torch::zeros({4096}).set_requires_grad(true)};
  AdamW8bit optimizer(params, AdamW8bitOptions(1e-3));
  for (int i = 0; i < 3; ++i) {
    params[0].mutable_grad() = torch::ones({4096});
    params[0].mutable_grad()[7] = i == 0 ? 1e-4 : 0;
    optimizer.step();
  }
  EXPECT_LT(params[0].abs().max().item<double>(), 4e-3);
}

TEST(Adam8bitTest, StatesTakeAByteEach) {
  const auto params = Tensors{torch::randn({1000, 1000}).set_requires_grad(true)};
  AdamW8bit optimizer(params);
  params[0].mutable_grad() = torch::randn({1000, 1000});
  optimizer.step();
  int64_t bytes = 0;
  optimizer.map_state([&](const at::Tensor& tensor) {
    bytes += static_cast<int64_t>(tensor.nbytes());
    return tensor;
  });
  EXPECT_EQ(bytes, 2 * (1000000 + 4 * 3907));
}

/// How much of the memory at this place is in this process, in KB; -1 for a place that is not mapped by itself.
int64_t resident_kilobytes(const void* place) {
  std::ifstream maps("/proc/self/smaps");
  const auto address = reinterpret_cast<uintptr_t>(place);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = begin <= address && address < end;
    else if (inside && line.starts_with("Rss:")) return std::stoll(line.substr(4));
  }
  return -1;
}

at::Tensor values_of_state(AdamW8bit& optimizer, int64_t parameter, const char* name) {
  const auto fields = optimizer.state_dict().toGenericDict().at("state").toGenericDict().at(parameter).toGenericDict();
  return fields.at("__bnb_optimizer_quant_state__").toGenericDict().at(name).toTensor();
}

Tensors large_parameters() {
  torch::manual_seed(3);
  return {torch::randn({500, 300}).set_requires_grad(true), torch::randn({3000}).set_requires_grad(true),
          torch::randn({99999}).set_requires_grad(true), torch::randn({400, 301}).set_requires_grad(true)};
}

TEST(Adam8bitTest, PagedStatesAreEqualToTheBitAndOutOfMemory) {
  const auto folder = scratch("pages");
  std::filesystem::create_directories(folder);
  for (const int64_t min_8bit_size : {4096, 1 << 30}) {
    const auto params = large_parameters(), twins = large_parameters();
    AdamW8bit plain(params, AdamW8bitOptions(1e-2).min_8bit_size(min_8bit_size));
    PagedAdamW8bit paged(twins, AdamW8bitOptions(1e-2).min_8bit_size(min_8bit_size).paging_folder(folder.string()));
    for (int64_t i = 0; i < 3; ++i) {
      torch::manual_seed(i);
      for (size_t p = 0; p < params.size(); ++p)
        twins[p].mutable_grad() = params[p].mutable_grad() = torch::randn_like(params[p]);
      plain.step(), paged.step();
    }
    const int64_t kilobytes = (min_8bit_size == 4096 ? 1 : 4) * 150;
    for (const char* name : {"state1", "state2"}) {
      // The first and the last parameter are looked at: the others are too small.
      EXPECT_EQ(resident_kilobytes(values_of_state(paged, 0, name).const_data_ptr()), 0);
      EXPECT_EQ(resident_kilobytes(values_of_state(paged, 3, name).const_data_ptr()), 0);
      EXPECT_GE(resident_kilobytes(values_of_state(plain, 0, name).const_data_ptr()), kilobytes * 1000 / 1024);
      EXPECT_NE(resident_kilobytes(values_of_state(paged, 2, name).const_data_ptr()), 0);
    }
    for (size_t p = 0; p < params.size(); ++p) EXPECT_TRUE(same(params[p], twins[p])) << p;
    EXPECT_EQ(difference(plain.state_dict(), paged.state_dict()), "");
    // Loaded states are paged, too, and go on as they were.
    PagedAdamW8bit again(twins, AdamW8bitOptions(0.5).min_8bit_size(min_8bit_size));
    again.load_state_dict(plain.state_dict());
    EXPECT_EQ(resident_kilobytes(values_of_state(again, 0, "state1").const_data_ptr()), 0);
    plain.step(), again.step();
    for (size_t p = 0; p < params.size(); ++p) EXPECT_TRUE(same(params[p], twins[p])) << p;
    EXPECT_EQ(difference(plain.state_dict(), again.state_dict()), "");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "the file has a name";
}

TEST(Adam8bitTest, AStateThatDoesNotFitChangesNothing) {
  const auto params = make_parameters();
  const auto optimizer = make(all_settings()[0], params);
  step(*optimizer, params, 0);
  const auto changed = [&](const std::function<void(Dict&, Dict&)>& change) {
    auto saved = optimizer->state_dict().deepcopy();
    auto state = saved.toGenericDict().at("state").toGenericDict().at(0).toGenericDict();
    auto tensors = state.at("__bnb_optimizer_quant_state__").toGenericDict();
    change(state, tensors);
    return message_of<CheckpointError>([&] { optimizer->load_state_dict(saved); });
  };
  const auto before = optimizer->state_dict().deepcopy();
  EXPECT_THAT(changed([](Dict&, Dict& t) { t.insert_or_assign("absmax1", torch::zeros({3})); }),
              AllOf(HasSubstr("parameter 0"), HasSubstr("'absmax1'"), HasSubstr("[17]")));
  EXPECT_THAT(changed([](Dict&, Dict& t) { t.insert_or_assign("qmap2", torch::linspace(0, 1, 256)); }),
              HasSubstr("'qmap2'"));
  EXPECT_THAT(changed([](Dict&, Dict& t) { t.insert_or_assign("state1", torch::zeros({3}, torch::kByte)); }),
              HasSubstr("[64, 65]"));
  EXPECT_THAT(changed([](Dict&, Dict& t) {
                t.insert_or_assign("state2", torch::zeros({64, 65}, torch::kInt));
              }),
              HasSubstr("uint8"));
  EXPECT_THAT(changed([](Dict&, Dict& t) {
                t.insert_or_assign("state2", torch::zeros({64, 65}));
              }),
              HasSubstr("different kinds"));
  EXPECT_THAT(changed([](Dict&, Dict& t) { static_cast<void>(t.erase("state1")); }), HasSubstr("'state1'"));
  EXPECT_THAT(changed([](Dict& s, Dict&) { static_cast<void>(s.erase("step")); }), HasSubstr("'step'"));
  for (const c10::IValue& steps : {c10::IValue(-1), c10::IValue(0.5), c10::IValue(1e300)})
    EXPECT_THAT(changed([&](Dict& s, Dict&) { s.insert_or_assign("step", steps); }),
                AllOf(HasSubstr("parameter 0"), HasSubstr("'step'"), HasSubstr("0 or more")));
  EXPECT_THAT(changed([](Dict&, Dict& t) { t.insert("gnorm_vec", torch::zeros({100})); }),
              HasSubstr("percentile_clipping"));
  EXPECT_THAT(changed([](Dict&, Dict& t) { t.insert("max1", torch::zeros({1})); }), HasSubstr("block_wise=False"));
  const auto with_option = [&](const char* name, const c10::IValue& value) {
    auto saved = optimizer->state_dict().deepcopy();
    auto group = saved.toGenericDict().at("param_groups").toListRef()[0].toGenericDict();
    group.insert_or_assign(name, value);
    return message_of<CheckpointError>([&] { optimizer->load_state_dict(saved); });
  };
  EXPECT_THAT(with_option("lr", -0.5), AllOf(HasSubstr("parameter group 0"), HasSubstr("found lr -0.5")));
  EXPECT_THAT(with_option("lr", std::numeric_limits<double>::quiet_NaN()), HasSubstr("found lr nan"));
  EXPECT_THAT(with_option("eps", -1.0), HasSubstr("found eps -1"));
  EXPECT_THAT(with_option("weight_decay", -1.0), HasSubstr("found weight_decay -1"));
  EXPECT_THAT(with_option("betas", make_list(std::vector<double>{0.9, 1.0})), HasSubstr("found betas[1] 1"));
  EXPECT_EQ(difference(before, optimizer->state_dict()), "");
}

using torch::optim::OptimizerParamGroup;

/// Adam's first step is the learning rate, whatever the gradient; before it a parameter shrinks by lr * weight_decay.
TEST(Adam8bitTest, GroupsHaveTheirOwnOptions) {
  const auto make_parameter = [] { return torch::full({3}, 2.0).set_requires_grad(true); };
  const Tensors p{make_parameter(), make_parameter(), make_parameter(), make_parameter(), make_parameter()};
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p[0]}, std::make_unique<AdamW8bitOptions>(1.0));
  groups.emplace_back(std::vector{p[1]});
  groups.emplace_back(std::vector{p[2]}, std::make_unique<Adam8bitOptions>(1.0));
  groups.emplace_back(std::vector{p[3]}, std::make_unique<PagedAdamW8bitOptions>());
  AdamW8bit optimizer(groups, AdamW8bitOptions(0.1).weight_decay(0.5).betas({0.8, 0.9}));
  optimizer.add_param_group(
      OptimizerParamGroup(Tensors{p[4]}, std::make_unique<AdamW8bitOptions>(AdamW8bitOptions(0.2).eps(1e-7))));
  for (const auto& parameter : p) parameter.mutable_grad() = torch::full({3}, 0.25);
  optimizer.step();
  const auto value = [&](size_t i) { return p[i][0].item<double>(); };
  EXPECT_NEAR(value(0), 2 * (1 - 1.0 * 0.5) - 1.0, 1e-5);
  EXPECT_NEAR(value(1), 2 * (1 - 0.1 * 0.5) - 0.1, 1e-5);
  EXPECT_NEAR(value(2), 2 - 1.0, 1e-5) << "Adam8bitOptions' decay is 0";
  EXPECT_NEAR(value(3), 2 * (1 - 0.1 * 0.5) - 0.1, 1e-5);
  EXPECT_NEAR(value(4), 2 * (1 - 0.2 * 0.5) - 0.2, 1e-5);
  const auto options = [&](size_t i) {
    return static_cast<const AdamW8bitOptions&>(optimizer.param_groups()[i].options());
  };
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_EQ(options(i).betas(), std::tuple(0.8, 0.9)) << i;
    EXPECT_EQ(options(i).eps(), i == 4 ? 1e-7 : 1e-8) << i;
    EXPECT_EQ(options(i).paged(), i == 3) << i;
  }
  accelerate::AcceleratedOptimizer(optimizer, /*device_placement=*/false)
      .add_param_group(OptimizerParamGroup(Tensors{make_parameter()}, std::make_unique<AdamW8bitOptions>(0.3)));
  EXPECT_EQ(options(p.size()).lr(), 0.3);
  // An optimizer that pages does so in all groups.
  std::vector<OptimizerParamGroup> paged_groups;
  paged_groups.emplace_back(std::vector{p[0]}, std::make_unique<AdamW8bitOptions>(1.0));
  PagedAdamW8bit paged(paged_groups, AdamW8bitOptions(0.1).min_8bit_size(7));
  const auto& own = static_cast<const AdamW8bitOptions&>(paged.param_groups()[0].options());
  EXPECT_TRUE(own.paged());
  EXPECT_EQ(own.lr(), 1);
  EXPECT_EQ(own.min_8bit_size(), 7);
}

TEST(Adam8bitTest, GroupsWithOtherOptionsAreRefusedByName) {
  const auto params = make_parameters();
  const auto group_of = [&](size_t i, std::unique_ptr<torch::optim::OptimizerOptions> options) {
    return OptimizerParamGroup(Tensors{params[i]}, std::move(options));
  };
  const auto foreign = [&](size_t i) { return group_of(i, std::make_unique<torch::optim::AdamWOptions>(1.0)); };
  const auto named = AllOf(HasSubstr("torch::optim::AdamWOptions"), HasSubstr("expected AdamW8bitOptions"));
  EXPECT_THAT(message_of<ConfigError>([&] { AdamW8bit({foreign(0)}, AdamW8bitOptions(0.1)); }), named);
  AdamW8bit optimizer({group_of(0, nullptr)}, AdamW8bitOptions(0.1));
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.add_param_group(foreign(1)); }), named);
  EXPECT_THAT(
      message_of<ConfigError>([&] { optimizer.add_param_group(group_of(1, std::make_unique<AdamW8bitOptions>(-1))); }),
      HasSubstr("found lr -1"));
  const auto doubles = torch::zeros({3}, torch::dtype(torch::kDouble).requires_grad(true));
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.add_param_group(OptimizerParamGroup(Tensors{doubles})); }),
              HasSubstr("Double"));
  EXPECT_EQ(optimizer.param_groups().size(), 1);
  optimizer.param_groups()[0].set_options(std::make_unique<torch::optim::AdamWOptions>(1.0));
  params[0].mutable_grad() = torch::ones({64, 65});
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.step(); }), named);
}

TEST(Adam8bitTest, WhatCanNotWorkIsRefusedByName) {
  const auto doubles = Tensors{torch::zeros({3}, torch::dtype(torch::kDouble).requires_grad(true))};
  EXPECT_THAT(message_of<ConfigError>([&] { AdamW8bit optimizer(doubles); }), HasSubstr("Double"));
  const auto params = make_parameters();
  EXPECT_THAT(message_of<ConfigError>([&] {
                AdamW8bit(params, AdamW8bitOptions(1e-3).betas({0.9, 1.0}));
              }),
              HasSubstr("betas[1]"));
  EXPECT_THAT(message_of<ConfigError>([&] { AdamW8bit(params, AdamW8bitOptions(-1)); }), HasSubstr("lr"));
  EXPECT_THAT(message_of<ConfigError>([&] { AdamW8bit(params, AdamW8bitOptions(1e-3).paging_folder("/tmp")); }),
              AllOf(HasSubstr("paging_folder '/tmp'"), HasSubstr("paged(true)")));
  EXPECT_THAT(
      message_of<ConfigError>([&] { AdamW8bit(params, AdamW8bitOptions(1e-3).paged(true).paging_folder("/nowhere")); }),
      AllOf(HasSubstr("paged optimizer states"), HasSubstr("'/nowhere'")));
  AdamW8bit optimizer(params);
  params[0].mutable_grad() = torch::zeros({64, 65}).to_sparse();
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("sparse"));
  std::ostringstream stream;
  EXPECT_THAT(message_of<ConfigError>([&] { torch::save(optimizer, stream); }), HasSubstr("state_dict()"));
}

}  // namespace
