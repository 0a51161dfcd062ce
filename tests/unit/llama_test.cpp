/// LLaMA against transformers, and alone.

#include <array>
#include <atomic>
#include <fstream>
#include <set>

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "models/row_operators.hpp"
#include "models/weights.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using support::largest_difference;
using support::scratch;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

LlamaConfig tiny() {
  LlamaConfig config;
  config.vocab_size = 20;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.initializer_range = 0.3;
  return config;
}

TEST(Llama, ParameterNamesAreHuggingFaces) {
  std::vector<std::string> names;
  for (const auto& item : LlamaForCausalLM(tiny())->named_parameters()) names.push_back(item.key());
  EXPECT_EQ(names.size(), 2 * 9 + 3U);
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"})
    EXPECT_THAT(names, Contains(name));
  auto tied = tiny();
  tied.tie_word_embeddings = true;
  EXPECT_EQ(LlamaForCausalLM(tied)->parameters().size(), 2 * 9 + 2U);
}

TEST(Llama, TokensSeeOnlyWhatIsBeforeThem) {
  torch::manual_seed(0);
  LlamaForCausalLM model(tiny());
  model->eval();
  auto input = torch::randint(0, 20, {1, 6});
  const auto before = model(input);
  input[0][4] = (input[0][4] + 1) % 20;
  const auto after = model(input);
  EXPECT_EQ(largest_difference(before.slice(1, 0, 4), after.slice(1, 0, 4)), 0);
  EXPECT_GT(largest_difference(before.slice(1, 4), after.slice(1, 4)), 1e-3);
}

TEST(Llama, LeftPaddingAndShiftedPositionsChangeNothing) {
  torch::manual_seed(0);
  LlamaForCausalLM model(tiny());
  model->eval();
  const auto input = torch::randint(1, 20, {1, 5});
  const auto plain = model(input);
  // Rotary positions are relative, and a masked token is not seen.
  EXPECT_LT(largest_difference(plain, model(input, torch::Tensor(), torch::arange(100, 105).unsqueeze(0))), 1e-4);
  const auto padded = torch::cat({torch::zeros({1, 2}, at::kLong), input}, 1);
  const auto mask = torch::cat({torch::zeros({1, 2}), torch::ones({1, 5})}, 1);
  EXPECT_LT(largest_difference(plain, model(padded, mask).slice(1, 2)), 1e-4);
  EXPECT_GT(largest_difference(plain, model(padded).slice(1, 2)), 1e-3) << "without a mask they must count";
}

/// The same model with half of each sequence in the cache, then token by token, with and without left padding.
TEST(Llama, ACacheChangesNothing) {
  torch::manual_seed(0);
  for (const auto window : {std::optional<int64_t>(), std::optional<int64_t>(3)}) {
    auto config = tiny();
    config.sliding_window = window;
    if (window) config.layer_types = {"sliding_attention", "full_attention"};
    LlamaForCausalLM model(config);
    model->eval();
    const torch::NoGradGuard no_grad;
    const auto ids = torch::randint(0, 20, {2, 9});
    auto padded = torch::ones({2, 9});
    padded[1].slice(0, 0, 2).zero_();
    for (const auto& mask : {torch::Tensor(), padded}) {
      const auto whole = model(ids, mask);
      KeyValueCache cache;
      const auto forward = [&](int64_t from, int64_t to, int64_t keep = 0) {
        return model(ids.slice(1, from, to), mask.defined() ? mask.slice(1, 0, to) : mask, torch::Tensor(), &cache,
                     keep);
      };
      std::vector<torch::Tensor> parts = {forward(0, 4), forward(4, 7), forward(7, 8), forward(8, 9)};
      EXPECT_EQ(cache.length(), 9);
      // Other shapes sum in another order: a few units in the last place of logits of a size of about 5. Row 1 begins
      // with padding, whose logits nobody reads.
      EXPECT_LT(largest_difference(torch::cat(parts, 1).slice(1, 2), whole.slice(1, 2)), 1e-5);
      cache.truncate(5);
      EXPECT_LT(largest_difference(forward(5, 9, 2), whole.slice(1, 7)), 1e-5)
          << "and only the last two tokens' logits";
      EXPECT_GT(largest_difference(model(ids.slice(1, 8)), whole.slice(1, 8)), 1e-3) << "what was before must count";
    }
  }
}

TEST(Llama, BeamsReorderTheCache) {
  torch::manual_seed(0);
  LlamaForCausalLM model(tiny());
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto ids = torch::randint(0, 20, {2, 5}), next = torch::randint(0, 20, {3, 1});
  KeyValueCache cache;
  model(ids, torch::Tensor(), torch::Tensor(), &cache);
  const auto rows = torch::tensor({1, 1, 0}, at::kLong);
  cache.reorder(rows);
  const auto whole = model(torch::cat({ids.index_select(0, rows), next}, 1));
  EXPECT_LT(largest_difference(model(next, torch::Tensor(), torch::Tensor(), &cache), whole.slice(1, 5)), 1e-5);
  EXPECT_THAT(
      support::message_of<accelerate::ShapeError>([&] { model(ids, torch::Tensor(), torch::Tensor(), &cache); }),
      HasSubstr("layer 0 got keys of shape [2, 2, 5, 4]"));
  cache.clear();
  EXPECT_EQ(cache.length(), 0);
}

/// One row without gradients takes another way than at::linear, an operator of our own. Sizes with and without a rest
/// behind the vectors. Tolerance: sums of up to 600 products of a size of 1 in another order.
/// Counts what is allocated on this thread: layers without operators make no tensors.
struct Allocations final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { count += bytes > 0; }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t count = 0;
};

TEST(Llama, OneRowGoesThroughLayersDirectlyUnlessSomebodyWatchesOperators) {
  torch::manual_seed(3);
  auto grouped = tiny();
  grouped.hidden_size = 32, grouped.intermediate_size = 64;  // whole blocks of codes
  auto biased = grouped, odd = grouped, gelu = grouped;
  biased.qkv_bias = biased.attention_bias = biased.mlp_bias = true;
  odd.num_key_value_heads.reset(), odd.head_dim = 24, odd.tie_word_embeddings = true;
  gelu.hidden_act = "gelu";
  for (const auto& config : {grouped, biased, odd, gelu}) {
    LlamaForCausalLM model(config);
    model->eval();
    const auto codes =
        accelerate::load_and_quantize_model(accelerate::ModelRef(model), {.load_in_4bit = true,
                                                                          .bnb_4bit_quant_type = "nf4",
                                                                          .bnb_4bit_compute_dtype = at::kFloat,
                                                                          .bnb_4bit_blocksize = 32});
    const auto tokens = torch::randint(20, {1, 70});  // more than a cache has room for at first
    const auto last_logits = [&](int64_t prompt, int64_t& allocations) {
      KeyValueCache cache;
      at::Tensor logits = model->forward(tokens.narrow(1, 0, prompt), {}, {}, &cache, 1);
      auto counted = std::make_shared<Allocations>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counted);
      for (int64_t i = prompt; i < tokens.size(1); ++i)
        logits = model->forward(tokens.narrow(1, i, 1), {}, {}, &cache, 1);
      EXPECT_EQ(cache.length(), tokens.size(1));
      allocations = counted->count;
      return logits;
    };
    const torch::NoGradGuard no_grad;
    int64_t direct = 0, by_operators = 0, with_gradients = 0;
    const auto whole = model->forward(tokens, {}, {}, nullptr, 1);
    // Rounding activations to 8 bits changes half a percent of a product, and the last bit of one may decide on how.
    const double near = 0.05 * whole.abs().max().item<double>();
    EXPECT_LT(largest_difference(last_logits(3, direct), whole), near);
    {
      const torch::AutoGradMode watched(true);
      EXPECT_LT(largest_difference(last_logits(3, with_gradients).detach(), whole), 3 * near) << "exact products";
    }
    std::atomic<int64_t> operators{0};
    static std::atomic<int64_t>* seen;
    seen = &operators;
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return ++*seen, nullptr; }));
    EXPECT_LT(largest_difference(last_logits(3, by_operators), whole), near);
    at::removeCallback(handle);
    EXPECT_GT(operators, 67 * 2 * 7) << "a profile shows all operators";
    EXPECT_GT(with_gradients, by_operators / 2);
    if (config.hidden_act == "silu") EXPECT_LT(direct, by_operators / 2) << "no tensors in the layers";
    else EXPECT_GT(direct, by_operators / 2) << "another activation goes by operators";
  }
}

TEST(RowProduct, EqualsLinear) {
  torch::manual_seed(0);
  for (const int64_t inputs : {1, 15, 16, 576, 601}) {
    const auto x = torch::randn({1, 1, inputs}), weight = torch::randn({70, inputs}), bias = torch::randn({70});
    const torch::NoGradGuard no_grad;
    EXPECT_LT(largest_difference(accelerate::models::detail::project(x, weight), at::linear(x, weight)), 1e-4)
        << inputs;
    EXPECT_LT(largest_difference(accelerate::models::detail::project(x, weight, bias), at::linear(x, weight, bias)),
              1e-4)
        << inputs;
    EXPECT_EQ(accelerate::models::detail::project(x, weight).sizes(), (std::vector<int64_t>{1, 1, 70}));
    EXPECT_EQ(accelerate::models::detail::project(x.to(at::kBFloat16), weight.to(at::kBFloat16)).scalar_type(),
              at::kBFloat16);
  }
  EXPECT_TRUE(
      accelerate::models::detail::project(torch::randn({1, 4}), torch::randn({3, 4}).requires_grad_()).requires_grad());
}

TEST(RowOperators, NormEqualsLibTorchs) {
  torch::manual_seed(0);
  for (const int64_t size : {1, 7, 576}) {
    const auto x = torch::randn({1, 1, size}), weight = torch::randn({size});
    EXPECT_LT(largest_difference(accelerate::models::detail::rms_norm(x, weight, 1e-5),
                                 at::rms_norm(x, {size}, weight, 1e-5)),
              1e-5)
        << size;
  }
  const auto several = torch::randn({2, 3, 8}), weight = torch::randn({8});
  EXPECT_TRUE(torch::equal(accelerate::models::detail::rms_norm(several, weight, 1e-5),
                           at::rms_norm(several, {8}, weight, 1e-5)));
  EXPECT_TRUE(accelerate::models::detail::rms_norm(torch::randn({1, 4}), torch::randn({4}).requires_grad_(), 1e-5)
                  .requires_grad());
}

/// Keys and values as a cache gives them: the beginning of larger buffers.
TEST(RowOperators, AttentionOfOneTokenEqualsLibTorchs) {
  torch::manual_seed(0);
  for (const auto& [batch, heads, groups, keys, size] :
       std::vector<std::array<int64_t, 5>>{{1, 9, 3, 50, 64}, {3, 4, 4, 1, 5}, {2, 4, 1, 700, 16}}) {
    SCOPED_TRACE(::testing::Message() << batch << " " << heads << " " << groups << " " << keys << " " << size);
    const auto query = torch::randn({batch, 1, heads, size}).transpose(1, 2),
               key = torch::randn({batch, groups, keys + 14, size}).narrow(2, 0, keys),
               value = torch::randn({batch, groups, keys + 3, size}).narrow(2, 0, keys);
    const auto expected = at::scaled_dot_product_attention(query, key, value, {}, 0, false, 0.3, /*enable_gqa=*/true)
                              .transpose(1, 2)
                              .flatten(2);
    const auto found = accelerate::models::detail::attend_with_one_token(query, key, value, 0.3);
    ASSERT_TRUE(found.defined());
    EXPECT_LT(largest_difference(found, expected), 1e-5);
    EXPECT_FALSE(accelerate::models::detail::attend_with_one_token(query.to(at::kHalf), key, value, 0.3).defined());
    EXPECT_FALSE(
        accelerate::models::detail::attend_with_one_token(query.detach().requires_grad_(), key, value, 0.3).defined());
  }
}

TEST(KeyValueCache, GrowsWithoutTouchingWhatItGave) {
  KeyValueCache cache;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> given, copies;
  for (int64_t i = 0; i < 200; ++i) {
    given.push_back(cache.update(0, torch::full({1, 2, 1, 4}, i), torch::full({1, 2, 1, 4}, -i)));
    copies.emplace_back(given.back().first.clone(), given.back().second.clone());
  }
  EXPECT_EQ(cache.length(), 200);
  for (int64_t i = 0; i < 200; ++i) {
    EXPECT_EQ(given[i].first.size(2), i + 1);
    EXPECT_TRUE(given[i].first.equal(copies[i].first) && given[i].second.equal(copies[i].second));
    EXPECT_EQ(given[199].first[0][1][i][0].item<double>(), static_cast<double>(i));
  }
  EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] { cache.truncate(201); }),
              HasSubstr("201 tokens, expected 0 to 200"));
}

TEST(Llama, WrongInputsAndFieldsAreNamed) {
  LlamaForCausalLM model(tiny());
  const auto shape = [&](const torch::Tensor& ids, const torch::Tensor& mask = {},
                         const torch::Tensor& positions = {}) {
    return support::message_of<accelerate::ShapeError>([&] { model(ids, mask, positions); });
  };
  EXPECT_THAT(shape(torch::zeros({3}, at::kLong)), HasSubstr("[3]"));
  EXPECT_THAT(shape(torch::zeros({1, 3}, at::kLong), torch::ones({1, 4})),
              HasSubstr("attention_mask has shape [1, 4], but input_ids [1, 3]"));
  EXPECT_THAT(shape(torch::zeros({2, 3}, at::kLong), {}, torch::zeros({3, 3}, at::kLong)),
              HasSubstr("position_ids has shape [3, 3]"));
  const auto field = [](auto&& change) {
    auto config = tiny();
    change(config);
    return support::message_of<accelerate::ConfigError>([&] { LlamaModel model(config); });
  };
  EXPECT_THAT(field([](auto& c) { c.num_key_value_heads = 3; }),
              HasSubstr("num_key_value_heads is 3, expected a divisor of num_attention_heads, which is 4"));
  EXPECT_THAT(field([](auto& c) { c.hidden_size = 18; }), HasSubstr("hidden_size is 18"));
  EXPECT_THAT(field([](auto& c) { c.head_dim = 5; }), HasSubstr("head_dim is 5"));
  EXPECT_THAT(
      field([](auto& c) { c.rope_scaling.type = "su"; }),
      HasSubstr("rope_type is 'su', expected one of default, dynamic, linear, llama3, longrope, proportional, yarn"));
  EXPECT_THAT(field([](auto& c) {
                c.rope_scaling = {.type = "longrope", .short_factor = {1, 1}, .long_factor = {2}};
              }),
              HasSubstr("long_factor is a list of 1, expected one number for each of the 2 frequencies"));
  EXPECT_THAT(field([](auto& c) { c.rope_scaling = {.type = "yarn", .factor = 0}; }),
              HasSubstr("rope_scaling.factor is 0, expected more than 0"));
  EXPECT_THAT(field([](auto& c) {
                c.rope_scaling = {.type = "llama3", .factor = 8, .low_freq_factor = 4, .high_freq_factor = 4};
              }),
              HasSubstr("high_freq_factor is 4, expected more than low_freq_factor"));
  EXPECT_THAT(field([](auto& c) { c.hidden_act = "geglu"; }), HasSubstr("hidden_act is 'geglu'"));
}

TEST(Llama, BuiltWithoutMemoryItIsTheSameModel) {
  torch::manual_seed(3);
  LlamaForCausalLM eager(tiny());
  torch::manual_seed(3);
  LlamaForCausalLM deferred = nullptr;
  {
    auto empty = accelerate::init_empty_weights();
    deferred = LlamaForCausalLM(tiny());
  }
  EXPECT_TRUE(deferred->parameters().front().is_meta());
  accelerate::materialize(deferred);
  for (const auto& item : eager->named_parameters())
    EXPECT_TRUE(item.value().equal(deferred->named_parameters()[item.key()])) << item.key();
}

TEST(LlamaLoading, OtherArchitecturesHolesAndHalfPrecision) {
  const auto folder = scratch("llama");
  LlamaForCausalLM model(tiny());
  model->save_pretrained(folder);
  const auto half = LlamaForCausalLM::from_pretrained(folder, {.dtype = at::kBFloat16});
  for (const auto& item : half->named_parameters())
    EXPECT_TRUE(item.value().equal(model->named_parameters()[item.key()].to(at::kBFloat16))) << item.key();
  LoadReport report;
  LlamaModel::from_pretrained(folder, {}, &report);
  EXPECT_THAT(report.unexpected_keys, UnorderedElementsAre("lm_head.weight"));
  auto tensors = accelerate::load_safetensors(folder / "model.safetensors");
  tensors.erase("model.layers.1.mlp.up_proj.weight");
  accelerate::save_safetensors(folder / "model.safetensors", tensors);
  EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { LlamaForCausalLM::from_pretrained(folder); }),
              HasSubstr("1 tensors of the model are missing:\n  model.layers.1.mlp.up_proj.weight"));
  std::ofstream(folder / "config.json") << R"({"model_type": "gpt2"})";
  EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { LlamaForCausalLM::from_pretrained(folder); }),
              HasSubstr("model_type is \"gpt2\", expected llama, mistral, qwen2 or mixtral"));
}

/// Both ways of writing rotary parameters, and the configurations that the examples ship.
TEST(LlamaLoading, WeightsOfOneBlockLiveAndDieByThemselves) {
  const auto folder = scratch("llama_block");
  LlamaForCausalLM saved(tiny());
  saved->save_pretrained(folder);
  auto loaded = LlamaForCausalLM::from_pretrained(folder);
  const auto kept = loaded->named_parameters()["model.norm.weight"];
  std::set<const void*> storages;
  for (const auto& parameter : loaded->parameters()) {
    storages.insert(parameter.storage().unsafeGetStorageImpl());
    EXPECT_EQ(parameter.storage().nbytes(), parameter.nbytes());  // nobody saves or moves its neighbours with it
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.data_ptr()) % 64, 0);
    EXPECT_TRUE(parameter.requires_grad());
  }
  EXPECT_EQ(storages.size(), loaded->parameters().size());
  // One behind the other, in the order of names: weights that are read together lie together, no page between them.
  const char* end = nullptr;
  for (const auto& [name, weight] : named_weights(*loaded)) {
    const auto* begin = static_cast<const char*>(weight.const_data_ptr());
    if (end) {
      EXPECT_EQ(begin - end, 0) << name;
    }
    end = begin + (weight.nbytes() + 63) / 64 * 64;
  }
  loaded = nullptr;
  EXPECT_TRUE(torch::equal(kept, saved->named_parameters()["model.norm.weight"]));
}

TEST(LlamaLoading, ConfigurationsAreUnderstood) {
  const auto folder = scratch("config");
  fs::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, "factor": 8.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "pad_token_id": -1})";
  const auto config = LlamaConfig::from_pretrained(folder);
  EXPECT_EQ(config.rope_theta, 7);
  EXPECT_EQ(config.rope_scaling.type, "llama3");
  EXPECT_EQ(config.rope_scaling.original_max_position_embeddings, 64);
  EXPECT_FALSE(config.pad_token_id);
  const std::pair<const char*, int64_t> sizes[] = {{"llama-3-8b", 8030261248}, {"llama-3-70b", 70553706496}};
  for (const auto& [name, count] : sizes) {
    const auto path = fs::path(ACCELERATE_SOURCE_DIR) / "examples/configs" / name;
    auto empty = accelerate::init_empty_weights();
    const LlamaForCausalLM model(LlamaConfig::from_pretrained(path));
    int64_t sum = 0;
    for (const auto& parameter : model->parameters()) sum += parameter.numel();
    EXPECT_EQ(sum, count) << "as the published models";
    if (!support::python()) continue;
    const auto result = support::run_python("tests/unit/llama_peer.py", {"count", path.string()});
    EXPECT_THAT(result.output, HasSubstr(std::to_string(count))) << result.output;
  }
}

TEST(LlamaLoading, ImpossibleNumbersAreRefused) {
  const auto folder = scratch("impossible");
  fs::create_directories(folder);
  for (const auto& [fields, expected] : std::vector<std::pair<std::string, std::string>>{
           {R"("num_attention_heads":0,"rope_scaling":{"type":"linear","factor":2})", "num_attention_heads is 0"},
           {R"("num_hidden_layers":1000000000000000000,"model_type":"qwen2","use_sliding_window":true)",
            "num_hidden_layers is 1000000000000000000, expected at most 10000"},
           {R"("num_hidden_layers":100000000,"model_type":"qwen2","use_sliding_window":true)", "at most 10000"},
           {R"("rope_scaling":{"type":"linear","factor":2,"partial_rotary_factor":1e300})",
            "partial_rotary_factor is 1e+300"}}) {
    std::ofstream(folder / "config.json") << "{" << fields << "}";
    EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { LlamaConfig::from_pretrained(folder); }),
                HasSubstr(expected));
  }
}

/// Tolerance: the same fp32 operations in another order of summation; measured are at most 2e-6 for logits of a size of
/// about 5.
TEST(LlamaReference, LogitsAndGradientsEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  for (const std::string kind : {"plain", "grouped", "tied", "biased", "linear", "llama3"}) {
    SCOPED_TRACE(kind);
    const auto folder = scratch("tiny-" + kind);
    const auto out = scratch("tiny.safetensors");
    const auto result = support::run_python("tests/unit/llama_peer.py", {"tiny", folder.string(), out.string()});
    ASSERT_EQ(result.exit_code, 0) << result.output;
    const auto expected = accelerate::load_safetensors(out);
    LoadReport report;
    auto model = LlamaForCausalLM::from_pretrained(folder, {}, &report);
    EXPECT_THAT(report.missing_keys, IsEmpty());
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    model->eval();
    const auto& ids = expected.at("input_ids");
    const auto logits = model(ids, torch::Tensor(), expected.at("position_ids"));
    EXPECT_LT(largest_difference(logits, expected.at("logits")), 1e-5);
    torch::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten()).backward();
    for (const auto& item : model->named_parameters())
      EXPECT_LT(largest_difference(item.value().grad(), expected.at("grad." + item.key())), 1e-5) << item.key();
    const auto seen = expected.at("attention_mask").unsqueeze(-1);
    EXPECT_LT(largest_difference(model(ids, expected.at("attention_mask")) * seen, expected.at("masked_logits") * seen),
              1e-5);
    EXPECT_LT(largest_difference(LlamaModel::from_pretrained(folder)(ids, torch::Tensor(), expected.at("position_ids")),
                                 expected.at("hidden")),
              1e-5);
  }
}

TEST(LlamaReference, TransformersLoadsWhatWeSave) {
  SKIP_WITHOUT_PYTHON();
  const LlamaRopeScaling scalings[] = {
      {.type = "llama3",
       .factor = 8,
       .low_freq_factor = 1,
       .high_freq_factor = 4,
       .original_max_position_embeddings = 64},
      {.type = "dynamic", .factor = 3},
      {.type = "yarn",
       .factor = 4,
       .original_max_position_embeddings = 16,
       .mscale = 1.3,
       .mscale_all_dim = 0.6,
       .beta_fast = 4,
       .beta_slow = 0.5,
       .truncate = false},
      {.type = "longrope",
       .factor = 2,
       .original_max_position_embeddings = 32,
       .attention_factor = 1.3,
       .short_factor = {1, 1.5},
       .long_factor = {2, 6}},
      {.type = "proportional", .factor = 2, .partial_rotary_factor = 0.5},
  };
  for (const auto& scaling : scalings) {
    SCOPED_TRACE(scaling.type);
    torch::manual_seed(1);
    auto config = tiny();
    config.tie_word_embeddings = true;
    config.rope_theta = 50;
    config.max_position_embeddings = 34;
    config.rope_scaling = scaling;
    LlamaForCausalLM model(config);
    model->eval();
    const auto folder = scratch("for_transformers");
    model->save_pretrained(folder);
    const std::map<std::string, at::Tensor> inputs = {{"input_ids", torch::randint(0, 20, {2, 7})},
                                                      {"position_ids", torch::arange(30, 37).repeat({2, 1})}};
    accelerate::save_safetensors(scratch("inputs.safetensors"), inputs);
    const auto out = scratch("logits.safetensors");
    const auto result = support::run_python(
        "tests/unit/llama_peer.py", {"logits", folder.string(), scratch("inputs.safetensors").string(), out.string()});
    ASSERT_EQ(result.exit_code, 0) << result.output;
    const auto logits = model(inputs.at("input_ids"), torch::Tensor(), inputs.at("position_ids"));
    EXPECT_LT(largest_difference(logits, accelerate::load_safetensors(out).at("logits")), 1e-5);
    EXPECT_LT(largest_difference(logits, LlamaForCausalLM::from_pretrained(folder)(
                                             inputs.at("input_ids"), torch::Tensor(), inputs.at("position_ids"))),
              1e-7);
  }
}

}  // namespace
