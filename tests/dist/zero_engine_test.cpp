/// Requests to DeepSpeed's engine itself: states that are away for a while, and the handle on it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/generate.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "warnings_of.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using enum OffloadStateTypeEnum;
using testing::AllOf;
using testing::HasSubstr;

const std::vector<OffloadStateTypeEnum> kAll{optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer};

/// The weights after some steps in that precision. @param between  called before each micro-step and before each step
template <class Between>
std::vector<at::Tensor> trained_in(const std::string& precision, int64_t number, Between&& between) {
  support::reset_states();
  const std::string scale = precision == "fp16" ? R"(, "fp16": {"enabled": true, "initial_scale_power": 4})" : "";
  Accelerator accelerator({.mixed_precision = precision, .cpu = true, .deepspeed_plugin = stage(number, scale)});
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 0.01));
  const auto dtype = m->first->weight.scalar_type();
  int64_t now = 0;
  for (int64_t step = 0; step < kSteps; ++step)
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      between(m, now++);
      accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()).to(dtype))));
      between(m, now++);
      opt.step();
      opt.zero_grad();
    }
  std::vector<at::Tensor> weights;
  for (const auto& parameter : m->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

void expect_same_bits(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << "parameter " << i;
}

}  // namespace

// Before forwards, and with gradients that wait for the step.
RANKS_TEST(ZeroStates, TrainingGoesOnExactlyWhenTheyAreBack, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t number = 1; number <= 3; ++number)
      for (const std::string precision : {"no", "bf16", "fp16"}) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + ", " + precision);
        const auto expected = trained_in(precision, number, [](auto&, int64_t) {});
        const auto found = trained_in(precision, number, [](auto& m, int64_t now) {
          if (now % 6 == 5) m.offload_states();
          else m.offload_states({.include = {{kAll[static_cast<size_t>(now % 6)]}}, .pin_memory = now % 2 == 0});
          m.offload_states({.include = {{hp_params}}});  // a second time, or more of them
          m.reload_states(/*non_blocking=*/now % 4 == 0);
          m.reload_states();
        });
        expect_same_bits(found, expected);
      }
  });
}

RANKS_TEST(ZeroStates, WhatIsAwayIsNamedWhereItIsNeeded, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t number = 1; number <= 3; ++number) {
      SCOPED_TRACE(store + ", stage " + std::to_string(number));
      support::reset_states();
      Accelerator accelerator({.mixed_precision = "bf16", .cpu = true, .deepspeed_plugin = stage(number)});
      ThreeLayers model;
      auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
      const auto input = batch_of(0, 0, support::rank()).to(at::kBFloat16);
      const auto names = [](const char* state) {
        return AllOf(HasSubstr(std::string("'") + state + "'"), HasSubstr("reload_states()"));
      };
      const auto error = [](auto&& f) { return support::message_of<ConfigError>(f); };

      m.offload_states({.include = {{lp_params}}});
      EXPECT_THAT(error([&] { m(input); }), AllOf(HasSubstr("forward: "), names("lp_params")));
      m.reload_states();
      {
        // Text is generated meanwhile, say.
        m.offload_states({.include = {{optim_states, hp_params, lp_grads, contiguous_grad_buffer}}});
        const at::NoGradGuard no_grad;
        EXPECT_EQ(m(input).size(1), 3);
        m.reload_states();
      }
      for (const auto& [state, name] :
           {std::pair(lp_grads, "lp_grads"), std::pair(contiguous_grad_buffer, "contiguous_grad_buffer")}) {
        const auto loss = loss_of(m(input));
        m.offload_states({.include = {{state}}});
        EXPECT_THAT(error([&, before = loss] { accelerator.backward(before, {.retain_graph = true}); }), names(name));
        m.reload_states();
        accelerator.backward(loss);
        opt.zero_grad();
      }
      accelerator.backward(loss_of(m(input)));
      const auto gradient = m->first->weight.grad().detach().clone();
      m.offload_states({.include = {{lp_grads}}});
      EXPECT_FALSE(m->first->weight.grad().defined());
      EXPECT_THAT(error([&] { accelerator.clip_grad_norm_(m->parameters(), 1.0); }), names("lp_grads"));
      EXPECT_THAT(error([&] { opt.step(); }), names("lp_grads"));
      m.reload_states();
      EXPECT_TRUE(m->first->weight.grad().equal(gradient));
      for (const auto& [state, name] : {std::pair(hp_params, "hp_params"), std::pair(optim_states, "optim_states"),
                                        std::pair(lp_params, "lp_params")}) {
        m.offload_states({.include = {{state}}});
        EXPECT_THAT(error([&] { opt.step(); }), AllOf(HasSubstr("step: "), names(name)));
        m.reload_states();
      }
      opt.step();
      opt.zero_grad();

      const auto folder = support::scratch_dir() + "/tags";
      m.offload_states();
      m.save_checkpoint(folder, "away");
      EXPECT_THAT(error([&] { m.load_checkpoint(folder, "away"); }),
                  AllOf(HasSubstr("loading a checkpoint: "), HasSubstr("reload_states()")));
      m.reload_states();
      m.load_checkpoint(folder, "away");
    }
  });
}

// On the host only these can be freed.
RANKS_TEST(ZeroStates, WhatIsGatheredAndBuffersAreFreed, 2) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  for (const int64_t number : {1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(number));
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(number)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    accelerator.backward(loss_of(m(batch_of(0, 0, support::rank()))));
    const auto held = [&] { return accelerator.memory().communication; };
    const auto before = held();
    ASSERT_GT(before, 0) << "buffers of gradients";
    m.offload_states({.include = {{contiguous_grad_buffer}}});
    const auto without = held();
    EXPECT_LT(without, before);
    ASSERT_GT(residency::stats().resident_bytes, 0);
    m.offload_states({.include = {{lp_params}}});
    EXPECT_EQ(residency::stats().resident_bytes, 0);
    EXPECT_EQ(held(), 0) << "no unit's memory waits for the next one";
    m.reload_states();
    opt.step();
    EXPECT_GT(m(batch_of(0, 0, 0)).abs().sum().item<float>(), 0);
  }
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

TEST(ZeroStates, WhereTheyCannotGoIsSaid) {
  const auto refusal = [](const DeepSpeedPlugin& plugin, const OffloadStatesOptions& options, bool trains = true) {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin});
    ThreeLayers model;
    auto m = accelerator.prepare(model);
    if (trains) accelerator.prepare(with_momentum(model->parameters()));
    return support::message_of<ConfigError>([&] { m.offload_states(options); });
  };
  EXPECT_THAT(refusal(stage(2), {.device = OffloadDeviceEnum::nvme}), HasSubstr("device is nvme"));
  EXPECT_THAT(refusal(stage(0), {}), HasSubstr("stage 0"));
  EXPECT_THAT(refusal(stage(2), {}, /*trains=*/false), HasSubstr("no prepared optimizer"));
  EXPECT_THAT(refusal({.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
                         "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})"},
                      {}),
              HasSubstr("offload_param"));
  support::reset_states();
  {
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(2)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    EXPECT_THAT(support::warnings_of([&] { m.offload_states({.device = OffloadDeviceEnum::none}); }),
                HasSubstr("nothing was offloaded"));
    EXPECT_EQ(m(batch_of(0, 0, 0)).size(1), 3) << "nothing is away";
  }
  support::reset_states();
  Accelerator accelerator({.cpu = true});
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
  EXPECT_THAT(support::message_of<ConfigError>([&] { m.offload_states(); }),
              HasSubstr("not trained by a DeepSpeed configuration"));
}

// ------------------------------------------------------------------------------------------------- the engine's handle

RANKS_TEST(ZeroEngine, TrainsAsTheAcceleratorDoes, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t number = 0; number <= 3; ++number) {
      SCOPED_TRACE(store + ", stage " + std::to_string(number));
      const auto weights_after = [&](const auto& loop) {
        support::reset_states();
        Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(number, R"(, "gradient_clipping": 0.05)")});
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
        loop(accelerator, m, opt);
        std::vector<at::Tensor> weights;
        for (const auto& parameter : m->parameters()) weights.push_back(parameter.detach().clone());
        return weights;
      };
      const auto expected = weights_after([](auto& accelerator, auto& m, auto& opt) { train(accelerator, m, opt); });
      const auto found = weights_after([](auto& accelerator, auto& m, auto& opt) {
        const auto engine = accelerator.deepspeed_engine_wrapped();
        for (int64_t step = 0; step < kSteps; ++step)
          for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
            const bool last = micro + 1 == kMicroSteps;
            engine.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()))), last);
            EXPECT_EQ(accelerator.sync_gradients(), last);
            opt.step();
            opt.zero_grad();
          }
      });
      expect_same_bits(found, expected);
    }
  });
}

// Before the step, after it, clipped or not, and times no loss scale.
RANKS_TEST(ZeroEngine, TellsTheNormOfAllGradients, 1, 2, 3) {
  for (const std::string precision : {"no", "fp16"})
    for (const std::string limit : {"0", "0.05"})
      for (int64_t number = 0; number <= 3; ++number) {
        SCOPED_TRACE(precision + ", limit " + limit + ", stage " + std::to_string(number));
        support::reset_states();
        Accelerator accelerator({.mixed_precision = precision,
                                 .cpu = true,
                                 .deepspeed_plugin = stage(number, R"(, "gradient_clipping": )" + limit)});
        ThreeLayers model, alone;
        auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.0));  // moves nothing
        const DeepSpeedEngineWrapper engine(m);
        EXPECT_FALSE(engine.get_global_grad_norm().has_value()) << "no group has ended";
        const auto dtype = m->first->weight.scalar_type();
        for (int64_t rank = 0; rank < support::world_size(); ++rank)
          (loss_of(alone(batch_of(0, 0, rank))) / static_cast<double>(support::world_size() * kMicroSteps)).backward();
        const double expected = torch::nn::utils::clip_grad_norm_(alone->parameters(), 1e30);
        engine.backward(loss_of(m(batch_of(0, 0, support::rank()).to(dtype)).to(at::kFloat)));
        const double tolerance = (precision == "no" ? 1e-5 : 1e-2) * expected;
        EXPECT_NEAR(engine.get_global_grad_norm().value(), expected, tolerance) << "before the step";
        opt.step();
        opt.zero_grad();
        EXPECT_NEAR(engine.get_global_grad_norm().value(), expected, tolerance) << "after it";
        engine.backward(loss_of(1e30 * m(batch_of(0, 0, support::rank()).to(dtype)).to(at::kFloat)));
        if (precision == "no") continue;
        EXPECT_EQ(engine.get_global_grad_norm().value(), std::numeric_limits<double>::infinity());
        opt.step();
        EXPECT_EQ(engine.get_global_grad_norm().value(), std::numeric_limits<double>::infinity());
      }
}

TEST(ZeroEngine, AStepThatNobodyTakesIsNamed) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(1)});
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerator.deepspeed_engine_wrapped(); }),
              HasSubstr("expected prepare()"));
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
  const DeepSpeedEngineWrapper engine(m);
  engine.backward(loss_of(m(batch_of(0, 0, 0))));
  engine.backward(loss_of(m(batch_of(0, 0, 0))), /*sync_gradients=*/false);
  const auto loss = loss_of(m(batch_of(0, 0, 0)));
  EXPECT_THAT(support::message_of<ConfigError>([&] { engine.backward(loss); }), HasSubstr("expected optimizer.step()"));
  accelerator.set_sync_gradients(true);
  opt.step();
  engine.backward(loss);
}

// At stage 3 units come once for a text, however long it gets, as if they had been summoned around it: the file's
// numbers have room for the model. Where they have none, each token fetches them.
RANKS_TEST(ZeroEngine, UnitsComeOnceForAGeneratedText, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (const bool by_wrapper : {true, false})
      for (const std::string more : {"", R"(, "stage3_max_live_parameters": 0)"}) {
        SCOPED_TRACE(store + (by_wrapper ? ", by the wrapper" : ", by the model") + more);
        support::reset_states();
        torch::manual_seed(3);
        Accelerator accelerator({.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
          "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3,
          "stage3_param_persistence_threshold": 0)" + more + "}}"}});
        const models::GPT2Config config{.vocab_size = 40, .n_positions = 64, .n_embd = 16, .n_layer = 3, .n_head = 2};
        models::GPT2LMHeadModel model(config), whole(config);
        {
          const at::NoGradGuard no_grad;
          for (size_t i = 0; i < whole->parameters().size(); ++i) whole->parameters()[i].copy_(model->parameters()[i]);
        }
        auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.0));
        const auto ids = torch::tensor({{3, 1, 4}, {1, 5, 9}});
        accelerator.backward(m(ids).square().mean());
        opt.step();
        opt.zero_grad();
        const auto fetched = [&](int64_t tokens, auto& with) {
          residency::reset_stats();
          m->eval();
          whole->eval();
          EXPECT_TRUE(models::generate(with, ids, {.max_new_tokens = tokens})
                          .equal(models::generate(whole, ids, {.max_new_tokens = tokens})));
          const auto stats = residency::stats();
          return stats.faults + stats.prefetch_hits;
        };
        const auto counted = [&](int64_t tokens) {
          if (!by_wrapper) return fetched(tokens, model);
          const models::CausalForward forward = [&](const at::Tensor& input, const at::Tensor& mask,
                                                    const at::Tensor& positions, models::KeyValueCache* cache,
                                                    int64_t keep) { return m(input, mask, positions, cache, keep); };
          return fetched(tokens, forward);
        };
        const int64_t first = counted(4), few = counted(4), many = counted(32);
        if (store.back() == '1') EXPECT_EQ(first + few + many, 0) << "all lie in shared memory";
        else if (more.empty()) EXPECT_TRUE(first > 0 && few == 0 && many == 0) << first << ", " << few << ", " << many;
        else EXPECT_EQ(many, 8 * few) << "nothing has room beside what is used";
      }
  });
}

namespace {

DeepSpeedPlugin with_init(int64_t number, std::optional<bool> asked) {
  auto plugin = stage(number);
  plugin.zero3_init_flag = asked;
  return plugin;
}

bool have_no_memory(const torch::nn::Module& model) {
  const auto all = model.parameters();
  for (const auto& parameter : all) EXPECT_EQ(is_deferred(parameter), is_deferred(all.front()));
  for (const auto& buffer : model.buffers()) EXPECT_FALSE(is_deferred(buffer));
  return is_deferred(all.front());
}

/// Losses of some steps of a model that `make` makes after the Accelerator.
template <class Make> std::vector<double> losses_from(const DeepSpeedPlugin& plugin, bool empty, Make&& make) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin});
  torch::manual_seed(3);
  auto model = make();
  EXPECT_EQ(have_no_memory(*model.ptr()), empty);
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model.ptr()->parameters(), 0.1));
  std::vector<double> losses;
  for (int64_t step = 0; step < 3; ++step) {
    const auto tokens = (torch::arange(12).view({2, 6}) * (step + 2) + accelerator.process_index()) % 20;
    const auto scope = accelerator.accumulate(m);
    const auto loss = torch::cross_entropy_loss(m(tokens).flatten(0, 1), tokens.flatten());
    accelerator.backward(loss);
    opt.step();
    opt.zero_grad();
    losses.push_back(loss.template item<double>());
  }
  // The first rank's generator stands where it does otherwise; the others get its values, and draw nothing.
  if (support::rank() == 0) losses.push_back(torch::rand({1}).item<double>());
  return losses;
}

}  // namespace

// zero3_init_flag acts on what makes models from files, as transformers' zero.Init: by default at stage 3.
RANKS_TEST(ZeroInit, ModelsOfFilesAreSplitFromTheStart, 1, 2, 3) {
  const auto folder = support::scratch("llama_" + std::to_string(support::rank()));
  models::LlamaConfig config;
  config.vocab_size = 20, config.hidden_size = 16, config.intermediate_size = 24;
  config.num_hidden_layers = 2, config.num_attention_heads = 4;
  torch::manual_seed(2);
  models::LlamaForCausalLM saved(config);
  saved->to(torch::kBFloat16);
  saved->save_pretrained(folder);
  const auto loaded = [&] { return models::AutoModelForCausalLM::from_pretrained(folder); };
  const auto loaded_low = [&] {
    return models::AutoModelForCausalLM::from_pretrained(folder, {.dtype = torch::kBFloat16});
  };
  const auto typed = [&] { return models::LlamaForCausalLM::from_pretrained(folder); };
  const auto drawn = [&] { return models::AutoModelForCausalLM::from_config(folder); };
  const auto tied_folder = support::scratch("gpt2_" + std::to_string(support::rank()));
  const models::GPT2Config small{.vocab_size = 20,
                                 .n_positions = 8,
                                 .n_embd = 16,
                                 .n_layer = 1,
                                 .n_head = 4,
                                 .resid_pdrop = 0,
                                 .embd_pdrop = 0,
                                 .attn_pdrop = 0};
  models::GPT2LMHeadModel(small)->save_pretrained(tied_folder);
  const auto typed_and_tied = [&] { return models::GPT2LMHeadModel::from_pretrained(tied_folder); };
  const auto same = [](auto&& make) {
    const auto plain = losses_from(with_init(3, false), false, make);
    EXPECT_EQ(losses_from(with_init(3, true), true, make), plain);
    EXPECT_EQ(losses_from(with_init(3, {}), true, make), plain);
    EXPECT_GT(plain[0], plain[2]);
  };
  same(loaded);
  same(loaded_low);
  same(typed);
  same(typed_and_tied);
  same(drawn);
  losses_from(with_init(2, {}), false, loaded);

  // The active plugin's holds, while there is one.
  support::reset_states();
  {
    Accelerator both(
        {.cpu = true, .deepspeed_plugins = {{"student", with_init(3, {})}, {"teacher", with_init(2, {})}}});
    EXPECT_TRUE(have_no_memory(*loaded().module()));
    AcceleratorState().select_deepspeed_plugin("teacher");
    EXPECT_FALSE(have_no_memory(*loaded().module()));
    AcceleratorState().select_deepspeed_plugin("student");
    EXPECT_TRUE(have_no_memory(*loaded().module()));
  }
  support::reset_states();
  EXPECT_FALSE(have_no_memory(*loaded().module()));
}
