// What every engine must do, whatever it does inside: the same tests run for those of the library and for one that is
// made here, which shows all that a new engine takes. The answers are computed on each rank by LibTorch alone, from the
// batches of all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "accelerate/accelerate.hpp"
#include "accelerate/distributed_checkpoint.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "message_of.hpp"
#include "parallel/engines.hpp"
#include "ranks.hpp"
#include "run_state/holdings.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

// ---- an engine

/// A way of cutting: which slice of the parameter with this number lies on a rank.
struct Cut {
  std::vector<comm::AxisSize> axes;
  comm::Axes over;
  std::function<parallel::Slice(const at::Tensor& parameter, int64_t index, const comm::Mesh& mesh, int64_t rank)>
      slice;
};

/// Columns of an equal number, as far as there are so many: a box.
parallel::Slice columns_of(const at::Tensor& parameter, int64_t place, int64_t places) {
  parallel::Slice slice = parallel::Slice::all_of(parameter.sizes());
  const int64_t columns = parameter.size(-1), width = (columns + places - 1) / places;
  slice.corner.back() = std::min(place * width, columns);
  slice.sizes.back() = std::min(slice.corner.back() + width, columns) - slice.corner.back();
  slice.numel = c10::multiply_integers(slice.sizes);
  return slice;
}

/// Each parameter on one rank alone.
parallel::Slice all_or_none_of(const at::Tensor& parameter, int64_t index, int64_t place, int64_t places) {
  return index % places == place ? parallel::Slice::all_of(parameter.sizes())
                                 : parallel::Slice::stretch(parameter.sizes(), 0, 0);
}

Cut cut_of(const std::string& name, int64_t ranks) {
  using comm::Axis;
  if (name.starts_with("columns"))
    return {{{Axis::tp, ranks}},
            {Axis::tp},
            [back = name.ends_with("right")](const at::Tensor& parameter, int64_t, const auto& mesh, int64_t rank) {
              const int64_t places = mesh.size({Axis::tp}), place = mesh.place({Axis::tp}, rank);
              return columns_of(parameter, back ? places - 1 - place : place, places);
            }};
  if (name == "absent")
    return {{{Axis::pp, ranks}},
            {Axis::pp},
            [](const at::Tensor& parameter, int64_t index, const auto& mesh, int64_t rank) {
              return all_or_none_of(parameter, index, mesh.place({Axis::pp}, rank), mesh.size({Axis::pp}));
            }};
  // Stretches of columns, of which there are copies.
  const int64_t copies = ranks % 2 == 0 ? 2 : 1, columns = ranks % 4 == 0 ? 2 : 1;
  return {{{Axis::dp_replicate, copies}, {Axis::dp_shard, ranks / copies / columns}, {Axis::tp, columns}},
          {Axis::dp_shard, Axis::tp},
          [](const at::Tensor& parameter, int64_t, const auto& mesh, int64_t rank) {
            auto slice = columns_of(parameter, mesh.place({Axis::tp}, rank), mesh.size({Axis::tp}));
            const int64_t all = slice.numel, places = mesh.size({Axis::dp_shard});
            const int64_t width = (all + places - 1) / places;
            slice.begin = std::min(mesh.place({Axis::dp_shard}, rank) * width, all);
            slice.numel = std::min(slice.begin + width, all) - slice.begin;
            return slice;
          }};
}

/// Modules keep whole parameters, and each rank's optimizer holds a slice of each.
class SlicesEngine final : public parallel::Engine {
 public:
  SlicesEngine(const ModelRef& model, Cut cut) : cut_(std::move(cut)), mesh_(comm::world_group(), cut_.axes) {
    at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : model.parameters()) {
      at::Tensor(parameter).copy_(comm::broadcast(parameter.detach(), 0));
      const auto index = static_cast<int64_t>(held_.size());
      const auto slice = cut_.slice(parameter, index, mesh_, rank());
      const bool box = slice.numel == c10::multiply_integers(slice.sizes);
      held_.push_back({.names = {name},
                       .tensor = parameter,
                       .whole = parameter,
                       .value = box ? parameter.new_empty(slice.sizes) : parameter.new_empty({slice.numel}),
                       .slice = slice,
                       .cut = cut_.over,
                       .mesh = &mesh_,
                       .part = index,
                       .engine = this});
      held_.back().value = parallel::slice_of(held_.back(), parameter).requires_grad_();
    }
  }

  void before_forward() override {}
  void after_forward(const std::vector<at::Tensor>&) override {}
  void after_backward() override {
    if (!sync_) return;
    at::NoGradGuard no_grad;
    for (auto& held : held_) {
      auto& gradient = held.tensor.mutable_grad();
      if (!gradient.defined()) continue;
      const at::Tensor mine = parallel::slice_of(held, comm::all_reduce(gradient, Reduction::mean, 1.0));
      if (held.value.grad().defined()) held.value.mutable_grad().add_(mine);
      else held.value.mutable_grad() = mine;
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

  std::vector<parallel::Held> pieces() const override { return held_; }
  bool holds_pieces() const override { return true; }
  std::optional<parallel::Held> gradient(const at::Tensor& parameter) const override {
    for (parallel::Held held : held_)
      if (held.tensor.is_same(parameter)) {
        held.value = held.value.grad();
        return held;
      }
    return std::nullopt;
  }
  void gather_each(const PieceOf& piece_of, const std::function<void(const Whole&)>& take,
                   bool everywhere) const override {
    for (const auto& held : held_) {
      const at::Tensor piece = piece_of(held.tensor, held.value);
      at::Tensor whole;
      if (piece.defined()) {
        whole = at::full(held.whole.sizes(), std::nan(""), piece.options());  // each element comes from a rank
        const auto all = comm::all_gather(at::constant_pad_nd(piece.reshape(-1), {0, whole.numel() - piece.numel()}));
        for (int64_t from = 0; from < world_size(); ++from)
          put(cut_.slice(held.whole, held.part, mesh_, from), all.narrow(0, from * whole.numel(), whole.numel()),
              whole);
      }
      if (everywhere || rank() == 0) take({held.names.front(), held.tensor, whole});
    }
  }

 private:
  static void put(const parallel::Slice& slice, const at::Tensor& values, const at::Tensor& whole) {
    if (slice.numel == 0) return;
    at::Tensor box = whole;
    for (size_t dim = 0; dim < slice.sizes.size(); ++dim)
      box = box.narrow(static_cast<int64_t>(dim), slice.corner[dim], slice.sizes[dim]);
    const at::Tensor in_order = box.contiguous().view(-1).clone();
    in_order.narrow(0, slice.begin, slice.numel).copy_(values.narrow(0, 0, slice.numel));
    box.copy_(in_order.view(box.sizes()));
  }

  Cut cut_;
  comm::Mesh mesh_;
  std::vector<parallel::Held> held_;
  bool sync_ = true;
};

std::string cut_wanted;
std::optional<StateDictType> state_dict_type_wanted;

class Slices final : public parallel::ChosenEngine {
 public:
  std::optional<StateDictType> state_dict_type() const override { return state_dict_type_wanted; }
  std::shared_ptr<parallel::Engine> make(const ModelRef& model, const at::Device&, bool) const override {
    return std::make_shared<SlicesEngine>(model, cut_of(cut_wanted, world_size()));
  }
};

// ---- what all must do

const std::vector<std::string> kEngines = {"ddp", "fsdp", "columns", "absent"};

AcceleratorOptions options_for(const std::string& engine, int64_t accumulation = 1) {
  [[maybe_unused]] static const bool registered = [] {
    auto& kinds = parallel::engine_kinds();
    kinds.insert(kinds.begin(), {"slices", [](const parallel::EngineRequest&) {
                                   return cut_wanted.empty() ? nullptr : std::make_unique<Slices>();
                                 }});
    return true;
  }();
  AcceleratorState::reset();  // else it would have the engine of the first Accelerator
  cut_wanted = engine == "ddp" || engine == "fsdp" ? "" : engine;
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

/// Stretches of columns, which other ranks hold as well: elements count once in norms, and are written once.
RANKS_TEST(Engines, ComposedSlices, 4, 8) {
  const auto folder = std::filesystem::path(support::scratch_dir());
  Weights saved, last;
  const auto step = [](Trained& trained, int64_t number) {
    trained.backward(number);
    const auto norm = trained.accelerator.clip_grad_norm_(trained.model->parameters(), 0.01);
    trained.optimizer.step();
    trained.optimizer.zero_grad();
    return norm.item<double>();
  };
  {
    Expected expected;
    AcceleratorOptions options = options_for("stretches of columns");
    Trained trained(options);
    for (int64_t number = 0; number < 3; ++number) {
      expected.step(number, 1, 0.01);
      EXPECT_NEAR(step(trained, number), expected.norm, 1e-5 * expected.norm);
    }
    expect_close(trained.weights(), expected, "stretches of columns");
    trained.accelerator.save_state(folder / "state");
    distributed_checkpoint::save(distributed_checkpoint::get_model_state_dict(trained.model), folder / "sharded");
    saved = trained.weights();
    step(trained, 3);
    last = trained.weights();
  }
  for (const std::string to : {"stretches of columns", "ddp", "columns"}) {
    Trained trained(to);
    trained.step(77);
    trained.accelerator.load_state(folder / "state");
    expect_equal(trained.weights(), saved, to);
    step(trained, 3);
    if (to == "stretches of columns") expect_equal(trained.weights(), last, "resumed");
    auto state = distributed_checkpoint::get_model_state_dict(trained.model);
    distributed_checkpoint::load(state, folder / "sharded");
    distributed_checkpoint::set_model_state_dict(trained.model, state);
    expect_equal(trained.weights(), saved, "sharded, " + to);
  }
}

/// Each rank's pieces as they are fit the same cut alone: other columns of the same sizes are not taken.
RANKS_TEST(Engines, OwnPiecesOfOtherBoxes, 2) {
  const auto folder = std::filesystem::path(support::scratch_dir());
  state_dict_type_wanted = StateDictType::local_state_dict;
  for (const std::string cut : {"columns", "columns from the right"}) {
    Accelerator accelerator(options_for(cut));
    torch::nn::Linear layer(4, 4);
    const auto model = accelerator.prepare(layer);
    if (cut == "columns") accelerator.save_state(folder);
    else
      EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
                  HasSubstr("found pieces that lie elsewhere than this model's"));
    if (cut == "columns") accelerator.load_state(folder);
  }
  state_dict_type_wanted.reset();
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

/// What rectangles of a file say of a slice is what slice_of() takes: whatever the order of the tensor's memory.
TEST(Slices, LieInFilesWhereTheyLieInTensors) {
  std::mt19937 random(7);
  const auto any = [&](int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random); };
  int64_t in_parts = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<int64_t> sizes(static_cast<size_t>(any(4)));
    for (auto& size : sizes) size = any(8) == 0 ? 0 : 1 + any(4);
    at::Tensor tensor = at::arange(c10::multiply_integers(sizes)).reshape(sizes);
    if (sizes.size() == 4 && any(1)) tensor = tensor.contiguous(at::MemoryFormat::ChannelsLast);
    if (sizes.size() == 2 && any(1)) tensor = tensor.t().contiguous().t();
    parallel::Held held = run_state::whole_on_all_ranks({"w"}, tensor);
    parallel::Slice& slice = held.slice;
    for (size_t dim = 0; dim < sizes.size() && round % 3; ++dim)
      if (sizes[dim] > 0) {
        slice.corner[dim] = any(sizes[dim] - 1);
        slice.sizes[dim] = any(6) ? 1 + any(sizes[dim] - 1 - slice.corner[dim]) : 0;
      }
    const int64_t all = c10::multiply_integers(slice.sizes);
    const bool box = any(3) == 0;
    slice.begin = box ? 0 : any(all), slice.numel = box ? all : any(all - slice.begin);
    held.value = box ? at::empty(slice.sizes, at::kLong) : at::empty({slice.numel}, at::kLong);
    const at::Tensor value = parallel::slice_of(held, tensor);
    ASSERT_EQ(value.sizes(), held.value.sizes());
    // Every element of the slice once, at its place.
    at::Tensor found = at::full(sizes, -1, at::kLong);
    int64_t count = 0;
    const auto parts = run_state::boxes_of(held, value);
    for (const auto& part : parts) {
      at::Tensor there = found;
      for (size_t dim = 0; dim < sizes.size(); ++dim)
        there = there.narrow(static_cast<int64_t>(dim), part.box.offsets[dim], part.box.sizes[dim]);
      EXPECT_TRUE(there.eq(-1).all().item<bool>()) << "an element twice";
      there.copy_(part.values);
      count += part.values.numel();
    }
    EXPECT_EQ(count, slice.numel);
    EXPECT_TRUE(found.eq(-1).logical_or(found.eq(tensor)).all().item<bool>());
    at::Tensor box_of_found = found;
    for (size_t dim = 0; dim < sizes.size(); ++dim)
      box_of_found = box_of_found.narrow(static_cast<int64_t>(dim), slice.corner[dim], slice.sizes[dim]);
    box_of_found.fill_(-1);
    EXPECT_TRUE(found.eq(-1).all().item<bool>()) << "an element outside of the box";
    in_parts += parts.size() > 1;
  }
  EXPECT_GT(in_parts, 10);
}
