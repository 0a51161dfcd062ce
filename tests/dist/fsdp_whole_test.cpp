/// Uses of parameters and gradients of a sharded model outside of forward, backward and step: each acts as
/// on whole parameters, once, on any number of ranks, however they are connected. In C++ the names from before
/// prepare() stay in scope, so programs use these, too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "accelerate/optim.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
namespace nn = torch::nn;
using torch::indexing::Slice;

constexpr int64_t kRows = 60;  // of a batch: the numbers of ranks divide it
constexpr double kRate = 0.5;

nn::Sequential make_model() {
  torch::manual_seed(5);
  return nn::Sequential(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 16), nn::Tanh(), nn::Linear(16, 4));
}

/// One process with plain LibTorch, or a rank of ours: programs see the same names.
struct Side {
  nn::Sequential model;
  torch::optim::Optimizer* bare;  ///< the name from before prepare()
  std::function<at::Tensor()> loss;
  std::function<void(const at::Tensor&)> backward;
  std::function<void()> step, zero_grad;
  std::function<void(const std::vector<at::Tensor>&)> add_group;
  std::function<void(const torch::optim::Optimizer::LossClosure&)> step_with;
  bool ours = false;

  void train() const {
    backward(loss());
    step();
    zero_grad();
  }
  nn::SequentialImpl& module() const { return *model.ptr(); }
  std::vector<at::Tensor> parameters() const { return model->parameters(); }
};
using Program = std::function<void(const Side&)>;
using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(const nn::Sequential&)>;

std::shared_ptr<torch::optim::Optimizer> make_sgd(const nn::Sequential& model) {
  return std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(kRate));
}
std::shared_ptr<torch::optim::Optimizer> make_momentum(const nn::Sequential& model) {
  return std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
}

struct Batches {
  int64_t next = 0;
  std::pair<at::Tensor, at::Tensor> operator()() {
    const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(70 + next++));
    const auto x = torch::randn({kRows, 8}, generator, torch::kFloat);
    return {x, x.index({Slice(), Slice(0, 4)}).cos()};
  }
};

std::vector<at::Tensor> run_plain(const Program& program, const MakeOptimizer& make_optimizer) {
  auto model = make_model();
  const auto optimizer = make_optimizer(model);
  Batches batches;
  program({.model = model,
           .bare = optimizer.get(),
           .loss =
               [&] {
                 const auto [x, y] = batches();
                 return torch::mse_loss(model->forward(x), y);
               },
           .backward = [](const at::Tensor& loss) { loss.backward({}, true); },
           .step = [&] { optimizer->step(); },
           .zero_grad = [&] { optimizer->zero_grad(); },
           .add_group = [&](const auto& parameters) { optimizer->add_param_group({parameters}); },
           .step_with = [&](const auto& closure) { optimizer->step(closure); }});
  std::vector<at::Tensor> values;
  for (const auto& parameter : model->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

FullyShardedDataParallelPlugin plugin_of(const std::string& kind) {
  FullyShardedDataParallelPlugin plugin{
      .fsdp_version = 2, .auto_wrap_policy = AutoWrapPolicy::size_based_wrap, .min_num_params = 100};
  if (kind == "keeps") plugin.reshard_after_forward = false;
  if (kind == "bf16")
    plugin.mixed_precision_policy = MixedPrecision{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (kind == "whole") {
    plugin.fsdp_version = 1;
    plugin.sharding_strategy = ShardingStrategy::no_shard;
  }
  return plugin;
}

void compare(const std::string& what, const Program& program, const std::string& kind = "shards",
             const MakeOptimizer& make_optimizer = make_sgd, double tolerance = 2e-6) {
  const auto expected = run_plain(program, make_optimizer);
  support::on_both_stores([&](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of(kind)});
    auto model = make_model();
    const auto optimizer = make_optimizer(model);
    auto [m, opt] = accelerator.prepare(model, optimizer);
    Batches batches;
    const int64_t share = kRows / accelerator.num_processes();
    program({.model = model,
             .bare = optimizer.get(),
             .loss =
                 [&] {
                   const auto [x, y] = batches();
                   const auto mine = [&](const at::Tensor& all) {
                     return all.narrow(0, accelerator.process_index() * share, share);
                   };
                   return torch::mse_loss(m(mine(x)), mine(y));
                 },
             .backward = [&](const at::Tensor& loss) { accelerator.backward(loss, {.retain_graph = true}); },
             .step = [&] { opt.step(); },
             .zero_grad = [&] { opt.zero_grad(); },
             .add_group = [&](const auto& parameters) { opt.add_param_group({parameters}); },
             .step_with = [&](const auto& closure) { opt.step(closure); },
             .ours = true});
    const auto state = accelerator.get_state_dict(m);
    const auto names = model->named_parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor as_rank_0 = broadcast(names[i].value().detach().clone());
      EXPECT_TRUE(torch::equal(as_rank_0, names[i].value().detach())) << what << store << ", ranks differ";
      const auto where = what + ", " + kind + ", " + store + ", " + names[i].key();
      const at::Tensor seen = names[i].value().detach().to(torch::kFloat);
      EXPECT_LE((seen - expected[i]).abs().max().item<double>(), kind == "bf16" ? 2e-2 : tolerance) << where;
      if (accelerator.is_main_process())
        EXPECT_LE((state.at(names[i].key()) - expected[i]).abs().max().item<double>(), tolerance) << where << " saved";
    }
  });
}

/// In place, without a graph.
void write(const Side& side, const std::function<void(at::Tensor&)>& f) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : side.parameters()) f(parameter);
}

RANKS_TEST(FsdpWhole, WritesToParametersActOnce, 1, 2, 3, 5) {
  for (const std::string kind : {"shards", "keeps"}) {
    compare(
        "before the first step",
        [](const Side& side) {
          write(side, [](at::Tensor& p) { p.mul_(0.5); });
          side.train();
        },
        kind);
    compare(
        "between backward and step",
        [](const Side& side) {
          side.backward(side.loss());
          write(side, [](at::Tensor& p) { p.add_(0.01); });
          side.step(), side.zero_grad();
          side.train();
        },
        kind);
    compare(
        "after the step",
        [](const Side& side) {
          side.train();
          write(side, [](at::Tensor& p) { p.copy_(torch::full_like(p, 0.125)); });
        },
        kind);
    compare(
        "in a loop",
        [](const Side& side) {
          for (int i = 0; i < 4; ++i) {
            side.train();
            write(side, [](at::Tensor& p) { p.mul_(0.99).clamp_(-0.2, 0.2); });
          }
        },
        kind);
    compare(
        "that read first",
        [](const Side& side) {
          side.train();
          write(side, [](at::Tensor& p) { p.div_(p.norm()), p.add_(p.mean()); });
          side.train();
        },
        kind);
    compare(
        "through data() and views",
        [](const Side& side) {
          write(side, [](at::Tensor& p) { p.data().mul_(0.9), p.view({-1}).narrow(0, 1, p.numel() - 1).add_(0.1); });
          side.train();
        },
        kind);
    compare(
        "an average in their place while evaluating",
        [](const Side& side) {
          std::vector<at::Tensor> average, before;
          write(side, [&](at::Tensor& p) { average.push_back(p.clone()); });
          for (int i = 0; i < 3; ++i) {
            side.train();
            size_t at = 0;
            write(side, [&](at::Tensor& p) { average[at++].mul_(0.5).add_(p, 0.5); });
          }
          size_t at = 0;
          write(side, [&](at::Tensor& p) { before.push_back(p.clone()), p.copy_(average[at++]); });
          side.train();
          at = 0;
          write(side, [&](at::Tensor& p) { p.copy_(before[at++]); });
        },
        kind);
  }
}

RANKS_TEST(FsdpWhole, SummonedWritesActAndAreLostWhenAskedTo, 1, 2, 3) {
  for (const std::string kind : {"shards", "whole"}) {
    const auto fill = [](const Side& side, float value, bool keep) {
      std::optional<residency::Summon> here;
      if (side.ours) here = residency::summon(side.model, {.writeback = keep});
      if (!side.ours && !keep) return;
      for (auto& p : side.parameters()) std::fill_n(p.data_ptr<float>(), p.numel(), value);
    };
    compare(
        "raw writes",
        [&](const Side& side) {
          side.train();
          fill(side, 0.25, true);
          side.train();
        },
        kind);
    compare(
        "raw writes at the end",
        [&](const Side& side) {
          side.train();
          fill(side, 0.25, true);
        },
        kind);
    compare(
        "raw writes that are lost",
        [&](const Side& side) {
          write(side, [](at::Tensor& p) { p.mul_(0.5); });
          fill(side, 7, false);
          side.train();
          fill(side, 7, false);
        },
        kind);
    compare(
        "what operators write, and is lost",
        [&](const Side& side) {
          for (const bool rank0_only : {false, true}) {
            side.train();
            if (!side.ours) continue;
            const auto here = residency::summon(side.model, {.writeback = false, .rank0_only = rank0_only});
            if (rank0_only && support::rank() != 0) continue;
            write(side, [](at::Tensor& p) { p.mul_(30); });
          }
        },
        kind);
  }
}

RANKS_TEST(FsdpWhole, WritesReachMastersInTheirPrecision, 1, 2, 3) {
  // A factor that bf16 can't tell from 1.
  compare(
      "many small factors",
      [](const Side& side) {
        for (int i = 0; i < 50; ++i) write(side, [](at::Tensor& p) { p.mul_(0.9995); });
      },
      "bf16");
  compare(
      "operators that want one type",
      [](const Side& side) {
        write(side, [](at::Tensor& p) { p.lerp_(torch::full_like(p, 0.5), 0.25).addcmul_(p.clone(), p.clone(), 0.5); });
      },
      "bf16", make_sgd, 2e-3);
  compare(
      "copies",
      [](const Side& side) {
        write(side, [](at::Tensor& p) { p.copy_(torch::linspace(0, 0.3, p.numel()).view(p.sizes())); });
      },
      "bf16");
  compare(
      "summoned",
      [](const Side& side) {
        const auto here = side.ours ? std::optional(residency::summon(side.model)) : std::nullopt;
        write(side, [](at::Tensor& p) { p.fill_(0.75); });
      },
      "bf16");
  // One step in bf16 has errors of its own; what was written before and after must be there beside them.
  compare(
      "around a step",
      [](const Side& side) {
        write(side, [](at::Tensor& p) { p.mul_(0.5); });
        side.train();
        write(side, [](at::Tensor& p) { p.mul_(0.5); });
      },
      "bf16", make_sgd, 4e-3);
}

RANKS_TEST(FsdpWhole, GradientsAreWholeBetweenBackwardAndStep, 1, 2, 3, 5) {
  for (const std::string kind : {"shards", "whole"}) {
    compare(
        "scaled",
        [](const Side& side) {
          side.backward(side.loss());
          for (auto& p : side.parameters()) {
            EXPECT_EQ(p.grad().sizes(), p.sizes());
            p.mutable_grad().mul_(0.25);
          }
          side.step(), side.zero_grad();
          side.train();
        },
        kind);
    compare(
        "a step by hand",
        [](const Side& side) {
          for (int i = 0; i < 3; ++i) {
            side.backward(side.loss());
            write(side, [](at::Tensor& p) { p.sub_(0.3 * p.grad()); });
            side.module().zero_grad();
          }
        },
        kind);
    compare(
        "LibTorch's clipping",
        [](const Side& side) {
          for (int i = 0; i < 3; ++i) {
            side.backward(side.loss());
            EXPECT_GT(nn::utils::clip_grad_norm_(side.parameters(), 0.05), 0.05);
            side.step(), side.zero_grad();
          }
        },
        kind);
    compare(
        "the module's zero_grad",
        [](const Side& side) {
          for (int i = 0; i < 4; ++i) {
            side.module().zero_grad();
            side.backward(side.loss());
            side.step();
          }
        },
        kind);
    compare(
        "the module's zero_grad, between forward and backward",
        [](const Side& side) {
          for (int i = 0; i < 3; ++i) {
            const auto loss = side.loss();
            side.module().zero_grad();
            side.backward(loss);
            side.step();
          }
        },
        kind);
    compare(
        "cleared one by one",
        [](const Side& side) {
          for (int i = 0; i < 3; ++i) {
            for (auto& p : side.parameters()) p.mutable_grad() = at::Tensor();
            side.backward(side.loss());
            side.step();
          }
        },
        kind);
    compare(
        "replaced",
        [](const Side& side) {
          side.backward(side.loss());
          for (auto& p : side.parameters()) p.mutable_grad() = (p.grad() * 0.5 + p.detach() * 0.1).detach();
          side.step(), side.zero_grad();
          side.train();
        },
        kind);
    compare(
        "several backwards",
        [](const Side& side) {
          const auto loss = side.loss();
          side.backward(loss);
          side.backward(loss * 0.5);
          side.backward(side.loss());
          side.step(), side.zero_grad();
        },
        kind);
    compare(
        "LibTorch's own backward, twice",
        [](const Side& side) {
          const auto loss = side.loss();
          loss.backward({}, true);
          loss.backward();
          EXPECT_GT(side.parameters().front().grad().abs().sum().item<double>(), 0);
          side.step(), side.zero_grad();
          side.train();
        },
        kind);
  }
}

RANKS_TEST(FsdpWhole, OptimizersFromBeforeAndAfterPrepareAct, 1, 2, 3, 5) {
  compare(
      "the bare one",
      [](const Side& side) {
        for (int i = 0; i < 3; ++i) {
          side.backward(side.loss());
          side.bare->step();
          side.bare->zero_grad();
        }
      },
      "shards", make_momentum);
  compare("made later", [](const Side& side) {
    torch::optim::SGD late(side.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    for (int i = 0; i < 3; ++i) {
      late.zero_grad();
      side.backward(side.loss());
      late.step();
    }
  });
  const auto first_layer = [](const nn::Sequential& model) {
    return std::make_shared<torch::optim::SGD>(model->ptr(0)->parameters(), torch::optim::SGDOptions(kRate));
  };
  for (const bool bare : {false, true})
    compare(
        bare ? "a group, by the bare name" : "a group",
        [bare](const Side& side) {
          side.train();
          const auto others = side.model->ptr(2)->parameters();
          if (bare) side.bare->add_param_group({others});
          else side.add_group(others);
          side.train(), side.train();
        },
        "shards", first_layer);
  compare(
      "LBFGS",
      [](const Side& side) {
        std::optional<at::Tensor> fixed;
        Batches batches;
        for (int i = 0; i < 2; ++i)
          side.step_with([&] {
            side.zero_grad();
            const auto loss = side.loss();
            side.backward(loss);
            return loss.detach();
          });
      },
      "shards",
      [](const nn::Sequential& model) {
        return std::make_shared<torch::optim::LBFGS>(model->parameters(),
                                                     torch::optim::LBFGSOptions(0.05).max_iter(3).history_size(3));
      },
      2e-5);
}

/// Divides by the norm of a parameter's whole gradient: not element by element.
class Normalised : public torch::optim::Optimizer {
 public:
  explicit Normalised(const std::vector<at::Tensor>& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)}, std::make_unique<torch::optim::SGDOptions>(kRate)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& p : group.params())
        if (p.grad().defined()) p.add_(p.grad() / p.grad().norm(), -0.1);
    return {};
  }
};
/// Changes what it steps on outside of step(), too.
class Restless : public Normalised, public optim::ElementWise {
 public:
  using Normalised::Normalised;
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& p : param_groups()[0].params())
      if (p.grad().defined()) p.add_(p.grad(), -kRate);
    return {};
  }
  void shrink() {
    const torch::NoGradGuard no_grad;
    for (auto& p : param_groups()[0].params()) p.mul_(0.5);
  }
};

RANKS_TEST(FsdpWhole, ForeignOptimizersAct, 1, 2, 3) {
  compare(
      "norms", [](const Side& side) { side.train(), side.train(); }, "shards",
      [](const nn::Sequential& model) { return std::make_shared<Normalised>(model->parameters()); });
  compare(
      "between steps",
      [](const Side& side) {
        for (int i = 0; i < 3; ++i) {
          side.train();
          dynamic_cast<Restless&>(*side.bare).shrink();
          const torch::NoGradGuard no_grad;
          EXPECT_GT(side.loss().item<double>(), 0);
        }
      },
      "shards", [](const nn::Sequential& model) { return std::make_shared<Restless>(model->parameters()); });
}

/// On pieces, or on whole parameters where norms and products are of these: results are those of one process.
RANKS_TEST(FsdpWhole, OptimizersOfThisLibraryAct, 1, 2, 3) {
  const auto train = [](const Side& side) {
    for (int i = 0; i < 4; ++i) side.train();
  };
  compare("Lion", train, "shards", [](const nn::Sequential& model) {
    return std::make_shared<optim::Lion>(model->parameters(), optim::LionOptions(1e-2).weight_decay(0.1));
  });
  compare("DeepSpeedAdam", train, "shards", [](const nn::Sequential& model) {
    return std::make_shared<optim::DeepSpeedAdam>(
        model->parameters(), optim::DeepSpeedAdamOptions(1e-2).eps(1e-3).weight_decay(0.1).adam_w_mode(false));
  });
  compare(
      "Lamb", train, "shards",
      [](const nn::Sequential& model) {
        return std::make_shared<optim::Lamb>(model->parameters(), optim::LambOptions(0.1).eps(1e-3));
      },
      1e-5);
  compare(
      "Muon", train, "shards",
      [](const nn::Sequential& model) {
        std::vector<std::pair<std::string, at::Tensor>> named;
        for (const auto& parameter : model->named_parameters()) named.emplace_back(parameter.key(), parameter.value());
        return std::make_shared<optim::Muon>(
            optim::muon_groups(named, optim::MuonOptions(), optim::MuonOptions(false).lr(1e-2).eps(1e-3)));
      },
      1e-4);
}

RANKS_TEST(FsdpWhole, OptimizersOfThisLibraryAreSavedAndResume, 1, 2) {
  const std::map<std::string, MakeOptimizer> makers{
      {"lion", [](const auto& model) { return std::make_shared<optim::Lion>(model->parameters()); }},
      {"adam", [](const auto& model) { return std::make_shared<optim::DeepSpeedAdam>(model->parameters()); }},
      {"lamb", [](const auto& model) { return std::make_shared<optim::Lamb>(model->parameters()); }},
      {"muon", [](const auto& model) {
         std::vector<std::pair<std::string, at::Tensor>> named;
         for (const auto& parameter : model->named_parameters()) named.emplace_back(parameter.key(), parameter.value());
         return std::make_shared<optim::Muon>(optim::muon_groups(named));
       }}};
  for (const auto& [name, make] : makers) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
    auto model = make_model();
    auto [m, opt] = accelerator.prepare(model, make(model));
    const auto train = [&](int64_t batch) {
      Batches batches{batch};
      const auto [x, y] = batches();
      accelerator.backward(torch::mse_loss(m(x), y));
      opt.step(), opt.zero_grad();
    };
    const auto values = [&] {
      std::vector<at::Tensor> all;
      for (const auto& [key, value] : accelerator.get_state_dict(m)) all.push_back(value.clone());
      return all;
    };
    train(0), train(1);
    const auto folder = support::scratch_dir() + "/" + name;
    accelerator.save_state(folder);
    train(2);
    const auto expected = values();
    if (accelerator.is_main_process()) {
      EXPECT_EQ(expected.size(), 6U);
    }
    train(3);
    accelerator.load_state(folder);
    train(2);
    const auto found = values();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(found[i], expected[i])) << name << " " << i;
  }
}

RANKS_TEST(FsdpWhole, WhatIsFreedTrainsAndWhatIsFrozenStays, 1, 2, 3) {
  const auto set = [](const Side& side, int64_t layer, bool trained) {
    for (auto& p : side.model->ptr(static_cast<size_t>(layer))->parameters()) p.set_requires_grad(trained);
  };
  const auto frozen_from_the_start = [](const nn::Sequential& model) {
    for (auto& p : model->ptr(0)->parameters()) p.set_requires_grad(false);
    for (auto& p : model->ptr(2)->parameters()) p.set_requires_grad(false);
    return make_sgd(model);
  };
  compare(
      "freed",
      [&](const Side& side) {
        side.train(), side.train();
        set(side, 0, true), set(side, 2, true);
        side.train(), side.train();
      },
      "shards", frozen_from_the_start);
  compare("frozen", [&](const Side& side) {
    side.train();
    set(side, 2, false);
    side.train(), side.train();
    set(side, 2, true);
    side.train();
  });
}

RANKS_TEST(FsdpWhole, WeightsOfAFileAreLoadedIntoThePreparedModel, 1, 2, 3) {
  const std::string file = support::scratch_dir() + "/model.safetensors";
  const auto trained = run_plain([](const Side& side) { side.train(), side.train(); }, make_sgd);
  std::map<std::string, at::Tensor> tensors;
  const auto names = make_model()->named_parameters();
  for (size_t i = 0; i < trained.size(); ++i) tensors[names[i].key()] = trained[i];
  if (support::rank() == 0) save_safetensors(file, tensors);
  const PartialState state({.cpu = true});
  state.wait_for_everyone();
  for (const std::string kind : {"shards", "bf16"})
    compare(
        "a file",
        [&](const Side& side) {
          write(side, [](at::Tensor& p) { p.mul_(3); });
          if (side.ours) {
            load_checkpoint_in_model(side.model, file);
          } else {
            size_t at = 0;
            write(side, [&](at::Tensor& p) { p.copy_(trained[at++]); });
          }
          if (kind == "shards") side.train();
        },
        kind);
}

RANKS_TEST(FsdpWhole, LibTorchsSaveOfAnOptimizerInPiecesIsRefused, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
    auto model = make_model();
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
    auto [m, opt] = accelerator.prepare(model, optimizer);
    for (int i = 0; i < 3; ++i) accelerator.backward(m(torch::ones({2, 8})).sum()), opt.step(), opt.zero_grad();
    std::stringstream out;
    const auto save = [&] { torch::save(optimizer, out); };
    if (accelerator.num_processes() == 1) return save();  // whole
    EXPECT_NE(support::message_of<ConfigError>(save).find("save_state"), std::string::npos) << store;
  });
}

RANKS_TEST(FsdpWhole, BatchNormComputesInFullPrecisionInBothVersions, 1, 2) {
  for (const int64_t version : {1, 2})
    support::on_both_stores([&](const std::string& store) {
      auto plugin = plugin_of("shards");
      plugin.fsdp_version = version;
      Accelerator accelerator({.mixed_precision = "bf16", .cpu = true, .fsdp_plugin = plugin});
      torch::manual_seed(1);
      nn::Sequential model(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::Linear(16, 4));
      auto m = accelerator.prepare(model);
      accelerator.backward(m(torch::randn({12, 8})).square().mean());
      EXPECT_EQ(model->ptr(1)->named_parameters()["weight"].scalar_type(), torch::kFloat) << store;
      EXPECT_EQ(model->ptr(1)->named_buffers()["running_var"].scalar_type(), torch::kFloat) << store;
      EXPECT_TRUE(model->ptr(1)->named_buffers()["running_var"].isfinite().all().item<bool>()) << store;
    });
}

RANKS_TEST(FsdpWhole, OneRankThatGathersAloneIsNamed, 2, 3) {
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
  auto model = make_model();
  auto m = accelerator.prepare(model);
  const std::string message = support::message_of<CommError>([&] {
    if (accelerator.is_main_process()) accelerator.get_state_dict(m);
    m(torch::ones({2, 8}));
  });
  EXPECT_NE(message.find("gathering a state dict"), std::string::npos) << message;
  EXPECT_NE(message.find("forward"), std::string::npos) << message;
}

// By sockets reading gathers, so that a program which was tried on one host would stop on two.
RANKS_TEST(FsdpWhole, OneRankThatReadsAloneIsNamed, 2, 3) {
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
  auto model = make_model();
  auto m = accelerator.prepare(model);
  const auto norm = [&] { return m->parameters().front().norm().item<double>(); };
  m(torch::ones({2, 8}));
  norm();
  if (accelerator.is_main_process()) norm();  // of what is there
  m(torch::ones({2, 8}));
  const std::string message = support::message_of<CommError>([&] {
    if (accelerator.is_main_process()) norm();
    m(torch::ones({2, 8}));
  });
  EXPECT_NE(message.find("reading a parameter"), std::string::npos) << message;
  EXPECT_NE(message.find("forward"), std::string::npos) << message;
}

RANKS_TEST(FsdpWhole, ModulesThatTwoModelsShareAreNamed, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
    nn::Linear body(8, 16);
    nn::Sequential first(body), second(body, nn::Linear(16, 2));
    auto m = accelerator.prepare(first);
    const auto message = support::message_of<ConfigError>([&] { accelerator.prepare(second); });
    EXPECT_NE(message.find("belongs to a model that is sharded already"), std::string::npos) << store << message;
  });
}

// Nobody averages them, so they would become another layer on each rank.
RANKS_TEST(FsdpWhole, TrainedIgnoredModulesAreNamed, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (const bool frozen : {true, false}) {
      support::reset_states();
      auto plugin = plugin_of("shards");
      plugin.ignored_modules = "1";
      Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
      nn::Sequential model(nn::Linear(8, 16), nn::Linear(16, 2));
      for (auto& parameter : model[1]->parameters()) parameter.set_requires_grad(!frozen);
      torch::optim::SGD sgd(model->parameters(), 0.1);
      auto [m, optimizer] = accelerator.prepare(model, sgd);
      const at::Tensor loss = m(torch::ones({2, 8})).sum();
      if (frozen || support::world_size() == 1) {
        accelerator.backward(loss);
        continue;
      }
      const auto message = support::message_of<ConfigError>([&] { accelerator.backward(loss); });
      EXPECT_NE(message.find("ignored_modules"), std::string::npos) << store << message;
    }
  });
}

/// A weight of ones, whose gradient is 1 + rank on each rank.
struct ByRankImpl : nn::Module {
  ByRankImpl() { weight = register_parameter("weight", torch::ones({24})); }
  at::Tensor forward(const at::Tensor& scale) { return (weight * scale).sum(); }
  at::Tensor weight;
};
TORCH_MODULE(ByRank);

RANKS_TEST(FsdpWhole, HalfPrecisionIsAveragedOnAnyNumberOfRanks, 1, 2, 3, 5, 6, 7) {
  const int64_t world = support::world_size();
  std::map<std::string, FullyShardedDataParallelPlugin> plugins;
  for (const auto type : {torch::kBFloat16, torch::kHalf, torch::kFloat}) {
    const std::string name = c10::toString(type);
    plugins[name].mixed_precision_policy = MixedPrecision{.param_dtype = type, .reduce_dtype = type};
    plugins[name + " on the wire"].mixed_precision_policy = MixedPrecision{.reduce_dtype = type};
    plugins[name + " kept"].mixed_precision_policy =
        MixedPrecision{.param_dtype = type, .reduce_dtype = type, .keep_low_precision_grads = true};
    plugins[name + " replicas"].mixed_precision_policy = MixedPrecision{.reduce_dtype = type};
    if (world % 2 == 0 || world % 3 == 0) plugins[name + " replicas"].dp_replicate_size = world % 3 == 0 ? 3 : 2;
  }
  for (auto& [name, plugin] : plugins) {
    plugin.fsdp_version = name.ends_with("kept") ? 1 : 2;
    if (name.ends_with("kept")) plugin.sharding_strategy = ShardingStrategy::full_shard;
    if (world > 3 && name.starts_with("Float")) continue;  // the same on any number
    support::on_both_stores([&, &name = name, &plugin = plugin](const std::string& store) {
      Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
      ByRank model;
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
      auto [m, opt] = accelerator.prepare(model, optimizer);
      accelerator.backward(m(torch::full({}, static_cast<double>(1 + support::rank()))));
      opt.step();
      const double average = static_cast<double>(world + 1) / 2;
      const at::Tensor moved = 1 - model->weight.detach().to(torch::kFloat);
      EXPECT_LE((moved - average).abs().max().item<double>(), average / 128) << name << ", " << store;
    });
  }
}

/// Each rank keeps its piece of what it writes, which makes a whole where they write the same.
RANKS_TEST(FsdpWhole, WritesThatDifferBetweenRanksAreNamed, 1, 2, 3, 5) {
  struct WritingImpl : nn::Module {
    WritingImpl() {
      torch::manual_seed(1);
      weight = register_parameter("weight", torch::randn({16, 4}));
      head = register_module("head", nn::Linear(4, 1));
    }
    /// Rows are scaled in place, as an embedding's max_norm does: those that are looked up, or all.
    at::Tensor forward(const at::Tensor& ids) {
      {
        const at::NoGradGuard no_grad;
        if (own_rows) weight.index_put_({ids}, weight.index({ids}).mul(0.5));
        else weight.clamp_(-0.5, 0.5);
      }
      return head(weight.index({ids}));
    }
    at::Tensor weight;
    nn::Linear head{nullptr};
    bool own_rows = false;
  };
  const int64_t rank = support::rank(), ranks = support::world_size();
  support::on_both_stores([&](const std::string& store) {
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const std::string way : {"all rows", "own rows", "own rows, not looked for", "between steps"}) {
        SCOPED_TRACE(store + ", " + at::toString(dtype) + ", " + way);
        support::reset_states();
        Accelerator accelerator(
            {.cpu = true,
             .fsdp_plugin =
                 FullyShardedDataParallelPlugin{.mixed_precision_policy = MixedPrecision{.param_dtype = dtype}},
             .kwargs_handlers = {DistributedDataParallelKwargs{.compare_parameters_every =
                                                                   way == "own rows, not looked for" ? 0 : 500}}});
        const auto net = std::make_shared<WritingImpl>();
        net->own_rows = way.starts_with("own rows");
        auto [m, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
        const auto train = [&, m = m, optimizer = optimizer] {
          for (int64_t step = 0; step < 3; ++step) {
            const auto ids = torch::tensor({rank, (rank + 7 * (step + 1)) % 16});
            accelerator.backward(m(ids).square().mean());
            optimizer.step(), optimizer.zero_grad();
            const at::NoGradGuard no_grad;
            net->weight.mul_(0.99);
            if (way == "between steps") net->weight.add_(0.1 * static_cast<double>(rank));
          }
        };
        const bool in_image = way == "between steps" && dtype == at::kBFloat16;
        if (ranks == 1 || way == "all rows" || way == "own rows, not looked for" || in_image) {
          train();
          continue;
        }
        EXPECT_THAT(support::message_of<ConfigError>(train),
                    testing::HasSubstr(std::string("after ") + (way == "own rows" ? "1" : "2") +
                                       " of them parameter 'weight' has been written with other values on rank 1"));
      }
  });
}

RANKS_TEST(FsdpWhole, AGradientThatIsOverSaysSo, 2) {
  support::on_both_stores([](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
    auto model = make_model();
    auto m = accelerator.prepare(model);
    accelerator.backward(m(torch::ones({2, 8})).sum());
    const at::Tensor held = model->parameters().front().grad();
    const at::Tensor copy = held.clone();
    model->zero_grad();
    accelerator.backward(m(torch::ones({2, 8})).sum() * 2);
    EXPECT_TRUE(model->parameters().front().grad().allclose(copy * 2)) << store;
    EXPECT_NE(support::message_of<std::exception>([&] { held.sum(); }).find("clone()"), std::string::npos) << store;
  });
}

RANKS_TEST(FsdpWhole, RanksThatPartWaysAreNamed, 2, 3) {
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of("shards")});
  auto model = make_model();
  auto m = accelerator.prepare(model);
  const auto run = [&] {
    if (accelerator.is_main_process()) {
      const torch::NoGradGuard no_grad;
      m(torch::ones({2, 8}));
    }
    accelerator.backward(m(torch::ones({2, 8})).sum());
    m(torch::ones({2, 8}));
  };
  const std::string message = support::message_of<CommError>(run);
  EXPECT_NE(message.find("forward"), std::string::npos) << message;
  EXPECT_NE(message.find("reduction of gradients"), std::string::npos) << message;
}

}  // namespace
