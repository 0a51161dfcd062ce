// What every engine must do, whatever it does inside: the same tests run for those of the library and for one that is
// made here, which shows all that a new engine takes. The answers are computed on each rank by LibTorch alone, from the
// batches of all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerate.hpp"
#include "message_of.hpp"
#include "parallel/engines.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

// ---- an engine

/// Modules keep whole parameters, and each rank's optimizer holds some columns of each: a box, unlike FSDP's stretches.
class ColumnsEngine final : public parallel::Engine {
 public:
  explicit ColumnsEngine(const ModelRef& model) {
    at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : model.parameters()) {
      at::Tensor(parameter).copy_(comm::broadcast(parameter.detach(), 0));
      const int64_t last = parameter.dim() - 1, columns = parameter.size(last);
      const int64_t from = std::min(rank() * width(parameter), columns);
      const int64_t to = std::min(from + width(parameter), columns);
      std::vector<int64_t> corner(static_cast<size_t>(parameter.dim()), 0);
      corner.back() = from;
      held_.push_back({.names = {name},
                       .tensor = parameter,
                       .piece = parameter.detach().narrow(last, from, to - from).clone().requires_grad_(),
                       .place = {.corner = std::move(corner)},
                       .part = static_cast<int64_t>(held_.size())});
    }
  }

  void before_forward() override {}
  void after_forward(const std::vector<at::Tensor>&) override {}
  void after_backward() override {
    if (!sync_) return;
    at::NoGradGuard no_grad;
    for (auto& holding : held_) {
      auto& gradient = holding.tensor.mutable_grad();
      if (!gradient.defined()) continue;
      const at::Tensor mine = parallel::piece_of(holding, comm::all_reduce(gradient, Reduction::mean, 1.0));
      if (holding.piece.grad().defined()) holding.piece.mutable_grad().add_(mine);
      else holding.piece.mutable_grad() = mine;
      gradient.reset();
    }
  }
  void after_step() override {
    at::NoGradGuard no_grad;
    gather_each([](const at::Tensor&, const at::Tensor& piece) { return piece.detach(); },
                [](const Whole& whole) { at::Tensor(whole.parameter).copy_(whole.value); }, /*everywhere=*/true);
  }
  bool require_backward_grad_sync() const override { return sync_; }
  void set_require_backward_grad_sync(bool value) override { sync_ = value; }
  void prepare_backward_sync() override { sync_ = true; }

  std::vector<parallel::Holding> pieces() const override { return held_; }
  bool holds_pieces() const override { return true; }
  std::optional<parallel::PieceGradient> gradient(const at::Tensor& parameter) const override {
    for (const auto& holding : held_)
      if (holding.tensor.is_same(parameter)) return parallel::PieceGradient{.value = holding.piece.grad()};
    return std::nullopt;
  }
  void gather_each(const PieceOf& piece_of, const std::function<void(const Whole&)>& take,
                   bool everywhere) const override {
    for (const auto& holding : held_) {
      at::Tensor piece = piece_of(holding.tensor, holding.piece), whole;
      if (piece.defined()) {
        // Columns as rows, as many on each rank.
        piece = at::constant_pad_nd(piece, {0, width(holding.tensor) - piece.size(-1)}).movedim(-1, 0).contiguous();
        whole = comm::all_gather(piece).narrow(0, 0, holding.tensor.size(-1)).movedim(0, -1).contiguous();
      }
      if (everywhere || rank() == 0) take({holding.names.front(), holding.tensor, whole});
    }
  }

 private:
  static int64_t width(const at::Tensor& tensor) { return (tensor.size(-1) + world_size() - 1) / world_size(); }

  std::vector<parallel::Holding> held_;
  bool sync_ = true;
};

class Columns final : public parallel::ChosenEngine {
 public:
  std::shared_ptr<parallel::Engine> make(const ModelRef& model, const at::Device&, bool) const override {
    return std::make_shared<ColumnsEngine>(model);
  }
};

bool columns_wanted = false;

// ---- what all must do

const std::vector<std::string> kEngines = {"ddp", "fsdp", "columns"};

AcceleratorOptions options_for(const std::string& engine, int64_t accumulation = 1) {
  [[maybe_unused]] static const bool registered = [] {
    auto& kinds = parallel::engine_kinds();
    kinds.insert(kinds.begin(), {"columns", [](const parallel::EngineRequest&) {
                                   return columns_wanted ? std::make_unique<Columns>() : nullptr;
                                 }});
    return true;
  }();
  AcceleratorState::reset();  // else it would have the engine of the first Accelerator
  columns_wanted = engine == "columns";
  AcceleratorOptions options{.gradient_accumulation_steps = accumulation, .cpu = true};
  if (engine == "fsdp")
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                                                         .state_dict_type = StateDictType::full_state_dict,
                                                         .min_num_params = 10};
  return options;
}

/// Sizes that no number of ranks divides.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 3));
    scale = register_buffer("scale", torch::full({1}, 0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))) * scale; }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Net);

constexpr int64_t kRows = 4;  ///< per rank and micro-step
torch::Tensor all_rows(int64_t step) {
  return torch::randn({kRows * world_size(), 5}, at::make_generator<at::CPUGeneratorImpl>(100 + uint64_t(step)));
}
torch::Tensor own_rows(int64_t step) { return all_rows(step).slice(0, rank() * kRows, (rank() + 1) * kRows); }
torch::Tensor loss_of(const torch::Tensor& output) { return (output - 0.3).pow(2).mean(); }

using Weights = std::map<std::string, torch::Tensor>;

/// Training by LibTorch alone.
struct Expected {
  Net net;
  torch::optim::Adam optimizer{net->parameters(), torch::optim::AdamOptions(0.05)};
  double norm = 0;

  void step(int64_t first, int64_t micro_steps = 1, double max_norm = 0) {
    optimizer.zero_grad();
    for (int64_t i = 0; i < micro_steps; ++i)
      (loss_of(net->forward(all_rows(first + i))) / static_cast<double>(micro_steps)).backward();
    if (max_norm > 0) norm = torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm);
    optimizer.step();
  }
};

/// The same by an engine.
struct Trained {
  Accelerator accelerator;
  Net net;
  torch::optim::Adam own{net->parameters(), torch::optim::AdamOptions(0.05)};
  Prepared<Net> model;
  AcceleratedOptimizer optimizer;

  explicit Trained(const std::string& engine, int64_t accumulation = 1) : Trained(options_for(engine, accumulation)) {}
  explicit Trained(const AcceleratorOptions& options)
      : accelerator(options), model(accelerator.prepare(net)), optimizer(accelerator.prepare(own)) {}

  void backward(int64_t step) { accelerator.backward(loss_of(model(own_rows(step)))); }
  void step(int64_t number) {
    backward(number);
    optimizer.step();
    optimizer.zero_grad();
  }
  /// As they are now: the state dict of a model that is whole here is its own memory.
  Weights weights() {
    Weights now;
    for (const auto& [name, value] : accelerator.get_state_dict(model)) now[name] = value.clone();
    return now;
  }
};

void expect_close(const Weights& weights, const Expected& expected, const std::string& what) {
  if (rank() != 0) return;
  ASSERT_EQ(weights.size(), 5u) << what;
  for (const auto& parameter : expected.net->named_parameters())
    EXPECT_TRUE(torch::allclose(weights.at(parameter.key()), parameter.value(), 1e-4, 1e-6))
        << what << " " << parameter.key();
}
/// On rank 0: the others may have no whole weights.
void expect_equal(const Weights& a, const Weights& b, const std::string& what) {
  if (rank() != 0) return;
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, value] : a) EXPECT_TRUE(torch::equal(value, b.at(name))) << what << " " << name;
}

}  // namespace

RANKS_TEST(Engines, TrainAsOneProcess, 1, 2, 3) {
  for (const auto& engine : kEngines) {
    Expected expected;
    Trained trained(engine);
    for (int64_t step = 0; step < 4; ++step) expected.step(step), trained.step(step);
    expect_close(trained.weights(), expected, engine);
    // What modules compute with is what optimizers stepped on, on all ranks.
    torch::NoGradGuard no_grad;
    const auto rows = all_rows(50);
    EXPECT_TRUE(torch::allclose(trained.model(rows), expected.net->forward(rows), 1e-4, 1e-6)) << engine;
  }
}

RANKS_TEST(Engines, AccumulateWithoutSynchronising, 2) {
  for (const auto& engine : kEngines) {
    Expected expected;
    Trained trained(engine, 3);
    for (int64_t step = 0; step < 6; ++step) {
      if (step % 3 == 0) expected.step(step, 3);
      const auto scope = trained.accelerator.accumulate(trained.model);
      trained.step(step);
    }
    expect_close(trained.weights(), expected, engine);
  }
}

RANKS_TEST(Engines, ClipTheNormOfTheWhole, 2, 3) {
  for (const auto& engine : kEngines) {
    Expected expected;
    Trained trained(engine);
    for (int64_t step = 0; step < 3; ++step) {
      expected.step(step, 1, 0.01);
      trained.backward(step);
      const auto norm = trained.accelerator.clip_grad_norm_(trained.model->parameters(), 0.01);
      EXPECT_NEAR(norm.item<double>(), expected.norm, 1e-5 * expected.norm) << engine;
      trained.optimizer.step();
      trained.optimizer.zero_grad();
    }
    expect_close(trained.weights(), expected, engine);
    trained.backward(9);
    trained.accelerator.clip_grad_value_(trained.model->parameters(), 1e-4);
    const auto largest =
        trained.accelerator.clip_grad_norm_(trained.model->parameters(), 1.0, std::numeric_limits<double>::infinity());
    EXPECT_FLOAT_EQ(largest.item<float>(), 1e-4f) << engine;
  }
}

/// Saved under each engine and loaded under each: the same bits, and the uninterrupted run.
RANKS_TEST(Engines, SaveAndLoad, 2, 3) {
  for (const auto& from : kEngines) {
    const auto folder = std::filesystem::path(support::scratch_dir()) / from;
    Weights saved, last;
    {
      Trained trained(from);
      for (int64_t step = 0; step < 2; ++step) trained.step(step);
      trained.accelerator.save_state(folder);
      trained.accelerator.save_model(trained.model, folder / "weights");
      saved = trained.weights();
      for (int64_t step = 2; step < 4; ++step) trained.step(step);
      last = trained.weights();
    }
    if (rank() == 0) expect_equal(load_safetensors(folder / "weights" / "model.safetensors"), saved, from);
    for (const auto& to : kEngines) {
      Trained trained(to);
      trained.step(77);  // another state than the saved one
      trained.accelerator.load_state(folder);
      expect_equal(trained.weights(), saved, from + " to " + to);
      for (int64_t step = 2; step < 4; ++step) trained.step(step);
      const auto resumed = trained.weights();
      if (from == to) expect_equal(resumed, last, "resumed under " + to);
      if (rank() != 0) continue;
      for (const auto& [name, value] : resumed)
        EXPECT_TRUE(torch::allclose(value, last.at(name), 1e-4, 1e-6)) << from << " to " << to << " " << name;
    }
  }
}

/// Each machine has a disk of its own: what lies in pieces on all of them is made whole on each.
RANKS_TEST(Engines, SaveOnEachMachine, 2) {
  ::setenv("LOCAL_RANK", "0", 1);
  ::setenv("LOCAL_WORLD_SIZE", "1", 1);
  for (const std::string engine : {"ddp", "columns"}) {
    AcceleratorOptions options = options_for(engine, 1);
    options.project_config.save_on_each_node = true;
    Trained trained(options);
    trained.step(0);
    const auto disk = std::filesystem::path(support::scratch_dir()) / (engine + std::to_string(rank()));
    trained.accelerator.save_state(disk);
    ASSERT_TRUE(std::filesystem::exists(disk / "model.safetensors")) << engine;
    trained.accelerator.wait_for_everyone();
    if (rank() != 0) continue;
    const auto other = std::filesystem::path(support::scratch_dir()) / (engine + "1");
    const auto weights = load_safetensors(disk / "model.safetensors");
    expect_equal(load_safetensors(other / "model.safetensors"), weights, engine);
    EXPECT_EQ(weights.size(), 5u);
    EXPECT_EQ(std::filesystem::file_size(disk / "optimizer.bin"), std::filesystem::file_size(other / "optimizer.bin"));
  }
}

/// Ranks with different numbers of batches, or an error that says why not, before anything runs.
RANKS_TEST(Engines, JoinOrSayWhyNot, 2) {
  for (const auto& engine : kEngines) {
    Trained trained(engine);
    const auto loop = [&] {
      for (int64_t step = 0; step < 2 + rank(); ++step) trained.step(step);
    };
    if (engine == "ddp") {
      trained.accelerator.join_uneven_inputs(trained.model, loop);
      const auto weights = trained.net->first->weight.detach();
      EXPECT_TRUE(torch::equal(comm::broadcast(weights, 0), weights));
    } else {
      EXPECT_THAT(message_of<ConfigError>([&] { trained.accelerator.join_uneven_inputs(trained.model, loop); }),
                  HasSubstr("sharded parameters"))
          << engine;
      trained.step(0);  // all ranks are still in step
    }
  }
}
