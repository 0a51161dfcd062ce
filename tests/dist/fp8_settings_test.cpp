// mixed_precision "fp8": which recipe a run has, and what is refused.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "both_stores.hpp"
#include "message_of.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace fp8_settings {
namespace {

using namespace accelerate;
using support::message_of;
using support::reset_states;
using support::Variable;
using support::warnings_of;
using testing::AllOf;
using testing::HasSubstr;

std::string refused(AcceleratorOptions options) {
  reset_states();
  options.cpu = true;
  const std::string message = message_of<ConfigError>([&] { Accelerator accelerator(std::move(options)); });
  reset_states();
  return message;
}

FP8BackendType backend_of(std::vector<KwargsHandler> handlers = {}) {
  reset_states();
  const Accelerator accelerator({.mixed_precision = "fp8", .cpu = true, .kwargs_handlers = std::move(handlers)});
  EXPECT_EQ(accelerator.mixed_precision(), "fp8");
  return accelerator.fp8_backend();
}

class Fp8Settings : public testing::Test {
 protected:
  void TearDown() override { reset_states(); }
};

// The first case of this process.
TEST(Fp8Deprecated, HandlersWarnOnce) {
  EXPECT_THAT(warnings_of([] { resolve(MSAMPRecipeKwargs{.opt_level = "O1"}); }), HasSubstr("MS-AMP is deprecated"));
  const auto say = [] {
    return warnings_of([] {
      resolve(FP8RecipeKwargs{});
      resolve(MSAMPRecipeKwargs{});
    });
  };
  EXPECT_THAT(say(), AllOf(HasSubstr("FP8RecipeKwargs is deprecated"), HasSubstr("opt_level is O2")));
  EXPECT_EQ(say(), "");
}

TEST_F(Fp8Settings, TheBackEndIsTheHandlersElseTheLaunchsElseTorchaos) {
  EXPECT_EQ(backend_of(), FP8BackendType::AO);
  EXPECT_EQ(backend_of({TERecipeKwargs{}}), FP8BackendType::TE);
  EXPECT_EQ(backend_of({AORecipeKwargs{}}), FP8BackendType::AO);
  for (const char* name : {"te", "TE", "Te"}) {
    const Variable variable("ACCELERATE_FP8_BACKEND", name);
    EXPECT_EQ(backend_of(), FP8BackendType::TE);
    EXPECT_EQ(backend_of({AORecipeKwargs{}}), FP8BackendType::AO) << "the program wins";
  }
  {
    const Variable variable("ACCELERATE_FP8_BACKEND", "msamp");
    EXPECT_EQ(backend_of(), FP8BackendType::MSAMP);
    EXPECT_EQ(backend_of({FP8RecipeKwargs{}}), FP8BackendType::MSAMP);
    EXPECT_EQ(backend_of({FP8RecipeKwargs{.backend = "te"}}), FP8BackendType::TE);
  }
  {
    const Variable variable("ACCELERATE_FP8_BACKEND", "cutlass");
    EXPECT_THAT(refused({.mixed_precision = "fp8"}), HasSubstr("'cutlass', expected AO, TE, MSAMP or NO"));
  }
  reset_states();
  EXPECT_EQ(Accelerator({.mixed_precision = "bf16", .cpu = true}).fp8_backend(), FP8BackendType::NO);
  EXPECT_EQ(std::string(to_string(fp8_backend_from_string("no"))), "NO");
}

TEST_F(Fp8Settings, TheLaunchMakesIt) {
  reset_states();
  const Variable precision("ACCELERATE_MIXED_PRECISION", "fp8"), backend("ACCELERATE_FP8_BACKEND", "TE"),
      length("ACCELERATE_FP8_AMAX_HISTORY_LEN", "5");
  Accelerator accelerator({.cpu = true});
  EXPECT_EQ(accelerator.mixed_precision(), "fp8");
  const auto model = accelerator.prepare(torch::nn::Linear(16, 32));
  ASSERT_TRUE(model.core()->fp8);
  EXPECT_EQ(model.core()->fp8->recipe().amax_history_len, 5);
  EXPECT_EQ(model.core()->autocast_dtype, at::kBFloat16);
  EXPECT_EQ(Accelerator().fp8_backend(), FP8BackendType::TE) << "a second one computes alike";
}

TEST_F(Fp8Settings, EachFieldReachesTheRecipe) {
  const auto recipe_of = [](KwargsHandler handler) {
    reset_states();
    Accelerator accelerator({.mixed_precision = "fp8", .cpu = true, .kwargs_handlers = {std::move(handler)}});
    return accelerator.prepare(torch::nn::Linear(16, 32)).core()->fp8->recipe();
  };
  const auto te = recipe_of(TERecipeKwargs{.use_autocast_during_eval = true,
                                           .margin = 2,
                                           .interval = 3,
                                           .fp8_format = "e4m3",
                                           .amax_history_len = 7,
                                           .amax_compute_algo = "MAX",
                                           .override_linear_precision = std::array{true, false, true}});
  EXPECT_EQ(te.backend, FP8Backend::te);
  EXPECT_TRUE(te.use_autocast_during_eval && !te.use_mxfp8_block_scaling);
  EXPECT_EQ(te.margin, 2);
  EXPECT_EQ(te.interval, 3);
  EXPECT_EQ(te.fp8_format, FP8Format::e4m3);
  EXPECT_EQ(te.amax_history_len, 7);
  EXPECT_EQ(te.amax_compute_algo, AmaxComputeAlgo::max);
  EXPECT_EQ(te.override_linear_precision, (std::array{true, false, true}));
  EXPECT_TRUE(recipe_of(TERecipeKwargs{.use_mxfp8_block_scaling = true}).use_mxfp8_block_scaling);
  const auto old = recipe_of(FP8RecipeKwargs{.use_autocast_during_eval = true,
                                             .margin = 1,
                                             .interval = 2,
                                             .fp8_format = "HYBRID",
                                             .amax_history_len = 9,
                                             .amax_compute_algo = "max",
                                             .override_linear_precision = std::array{false, true, false},
                                             .use_mxfp8_block_scaling = false,
                                             .backend = "TE"});
  EXPECT_EQ(old.margin, 1);
  EXPECT_EQ(old.amax_history_len, 9);
  EXPECT_EQ(old.override_linear_precision, (std::array{false, true, false}));
  EXPECT_EQ(recipe_of(MSAMPRecipeKwargs{.opt_level = "O1"}).opt_level, MSAMPOptLevel::O1);
  EXPECT_EQ(recipe_of(FP8RecipeKwargs{.opt_level = "O1", .backend = "MSAMP"}).opt_level, MSAMPOptLevel::O1);
  const auto ao = recipe_of(AORecipeKwargs{.pad_inner_dim = false, .enable_fsdp_float8_all_gather = false});
  EXPECT_EQ(ao.backend, FP8Backend::ao);
  EXPECT_FALSE(ao.pad_inner_dim || ao.enable_fsdp_float8_all_gather);
  EXPECT_EQ(recipe_of(AORecipeKwargs{.config = Float8LinearConfig{.recipe = "rowwise"}}).config, AORecipe::rowwise);
}

TEST_F(Fp8Settings, WhatContradictsIsRefused) {
  EXPECT_THAT(refused({.mixed_precision = "fp8", .kwargs_handlers = {AORecipeKwargs{}, TERecipeKwargs{}}}),
              HasSubstr("holds AORecipeKwargs and TERecipeKwargs, expected one recipe"));
  EXPECT_THAT(refused({.mixed_precision = "fp8", .kwargs_handlers = {TERecipeKwargs{}, TERecipeKwargs{}}}),
              HasSubstr("two handlers of one kind"));
  EXPECT_THAT(refused({.mixed_precision = "bf16", .kwargs_handlers = {TERecipeKwargs{}}}),
              HasSubstr("holds TERecipeKwargs, but mixed_precision is 'bf16', expected 'fp8'"));
  EXPECT_THAT(refused({.mixed_precision = "fp8",
                       .fsdp_plugin = FullyShardedDataParallelPlugin{},
                       .kwargs_handlers = {MSAMPRecipeKwargs{}}}),
              HasSubstr("MS-AMP's, but models are sharded (FSDP), expected AO or TE"));
  EXPECT_THAT(
      refused({.mixed_precision = "fp8",
               .kwargs_handlers = {MSAMPRecipeKwargs{},
                                   DistributedDataParallelKwargs{.comm_hook = DDPCommunicationHookType::bf16}}}),
      HasSubstr("beside MS-AMP's recipe"));
  const auto te = [](TERecipeKwargs kwargs) { return message_of<ConfigError>([&] { resolve(kwargs); }); };
  EXPECT_THAT(te({.interval = 0}), HasSubstr("interval is 0, expected at least 1"));
  EXPECT_THAT(te({.amax_history_len = 0}), HasSubstr("amax_history_len is 0, expected at least 1"));
  EXPECT_THAT(te({.fp8_format = "E4M4"}), AllOf(HasSubstr("fp8_format is 'E4M4', expected HYBRID or E4M3 or E5M2"),
                                                HasSubstr("ACCELERATE_FP8_FORMAT")));
  for (const auto& kwargs : {TERecipeKwargs{.margin = 1, .use_mxfp8_block_scaling = true},
                             TERecipeKwargs{.interval = 2, .use_mxfp8_block_scaling = true},
                             TERecipeKwargs{.amax_history_len = 2, .use_mxfp8_block_scaling = true},
                             TERecipeKwargs{.amax_compute_algo = "max", .use_mxfp8_block_scaling = true}})
    EXPECT_THAT(te(kwargs), HasSubstr("together with use_mxfp8_block_scaling"));
  const auto old = [](FP8RecipeKwargs kwargs) { return message_of<ConfigError>([&] { resolve(kwargs); }); };
  EXPECT_THAT(old({.margin = 3, .backend = "MSAMP"}),
              HasSubstr("FP8RecipeKwargs::margin is given with the backend MSAMP, expected TE"));
  EXPECT_THAT(old({.opt_level = "O1", .backend = "TE"}),
              HasSubstr("FP8RecipeKwargs::opt_level is given with the backend TE, expected MSAMP"));
  const std::vector<std::pair<const char*, FP8RecipeKwargs>> of_te = {
      {"use_autocast_during_eval", {.use_autocast_during_eval = true, .backend = "msamp"}},
      {"interval", {.interval = 2, .backend = "msamp"}},
      {"fp8_format", {.fp8_format = "e4m3", .backend = "msamp"}},
      {"amax_history_len", {.amax_history_len = 2, .backend = "msamp"}},
      {"amax_compute_algo", {.amax_compute_algo = "max", .backend = "msamp"}},
      {"override_linear_precision", {.override_linear_precision = std::array{true, false, false}, .backend = "msamp"}},
      {"use_mxfp8_block_scaling", {.use_mxfp8_block_scaling = true, .backend = "msamp"}}};
  for (const auto& [field, kwargs] : of_te)
    EXPECT_THAT(old(kwargs), HasSubstr(std::string("FP8RecipeKwargs::") + field + " is given with the backend MSAMP"));
  EXPECT_THAT(
      refused({.mixed_precision = "fp8", .kwargs_handlers = {FP8RecipeKwargs{.margin = 3, .backend = "MSAMP"}}}),
      HasSubstr("FP8RecipeKwargs::margin"));
  const auto ao = [](AORecipeKwargs kwargs) { return message_of<ConfigError>([&] { resolve(kwargs); }); };
  EXPECT_THAT(ao({.config = Float8LinearConfig{}, .pad_inner_dim = true}),
              HasSubstr("pad_inner_dim = true beside a config with pad_inner_dim = false"));
  EXPECT_THAT(ao({.config = Float8LinearConfig{.recipe = "columnwise"}}),
              HasSubstr("'columnwise', expected tensorwise or rowwise or rowwise_with_gw_hp"));
  EXPECT_THAT(ao({.config = Float8LinearConfig{.recipe = "rowwise", .enable_fsdp_float8_all_gather = true}}),
              HasSubstr("with the recipe rowwise, expected tensorwise"));
  const auto once = resolve(AORecipeKwargs{.pad_inner_dim = false});
  EXPECT_EQ(resolve(once).config, once.config) << "a resolved one says the same again";
}

// `accelerate launch` sets variables for all back ends.
TEST_F(Fp8Settings, WhatTheLaunchSetsForOtherBackEndsIsNotRefused) {
  const Variable margin("ACCELERATE_FP8_MARGIN", "3"), format("ACCELERATE_FP8_FORMAT", "E4M3"),
      overrides("ACCELERATE_FP8_OVERRIDE_DGRAD", "1"), level("ACCELERATE_FP8_OPT_LEVEL", "O1");
  for (const char* backend : {"MSAMP", "TE"}) {
    const auto once = resolve(FP8RecipeKwargs{.backend = backend});
    EXPECT_EQ(once.margin, 3);
    EXPECT_EQ(once.opt_level, "O1");
    EXPECT_EQ(resolve(once).margin, 3) << "a resolved one says the same again";
  }
  EXPECT_THAT(message_of<ConfigError>([] { resolve(FP8RecipeKwargs{.margin = 1, .backend = "MSAMP"}); }),
              HasSubstr("FP8RecipeKwargs::margin"));
}

}  // namespace
}  // namespace fp8_settings
