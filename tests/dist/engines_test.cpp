// Duties of every engine, whatever its layers do inside: the same tests run for those of the library and for layers
// that are made here, one by one and on each other, which shows all that a new layer takes. The answers are computed on
// each rank by LibTorch alone, from the batches of all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <any>
#include <map>
#include <random>

#include "accelerate/accelerate.hpp"
#include "accelerate/distributed_checkpoint.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "message_of.hpp"
#include "parallel/engines.hpp"
#include "parallel/layer.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "run_state/holdings.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

// ---- layers

/// How one layer cuts what it is given, of sizes and a number, for a place among several.
struct Cut {
  std::string name;
  comm::Axis axis;
  bool joins_data = false;
  std::function<parallel::Slice(at::IntArrayRef sizes, int64_t index, int64_t place, int64_t places)> slice;
};

/// Columns of an equal number, as far as there are so many: a box.
parallel::Slice columns_of(at::IntArrayRef whole, int64_t place, int64_t places) {
  parallel::Slice slice = parallel::Slice::all_of(whole);
  const int64_t columns = whole.back(), width = (columns + places - 1) / places;
  slice.corner.back() = std::min(place * width, columns);
  slice.sizes.back() = std::min(slice.corner.back() + width, columns) - slice.corner.back();
  slice.numel = c10::multiply_integers(slice.sizes);
  return slice;
}

const std::map<std::string, Cut>& cuts() {
  using comm::Axis;
  static const std::map<std::string, Cut> all = {
      {"columns",
       {"columns", Axis::tp, false,
        [](at::IntArrayRef sizes, int64_t, int64_t place, int64_t places) {
          return columns_of(sizes, place, places);
        }}},
      {"columns from the right",
       {"columns", Axis::tp, false,
        [](at::IntArrayRef sizes, int64_t, int64_t place, int64_t places) {
          return columns_of(sizes, places - 1 - place, places);
        }}},
      // Each parameter at one place alone.
      {"absent",
       {"absent", Axis::pp, false,
        [](at::IntArrayRef sizes, int64_t index, int64_t place, int64_t places) {
          return index % places == place ? parallel::Slice::all_of(sizes) : parallel::Slice::range(sizes, 0, 0);
        }}},
      {"stretches",
       {"stretches", Axis::dp_shard, true, [](at::IntArrayRef sizes, int64_t, int64_t place, int64_t places) {
          const int64_t all = c10::multiply_integers(sizes), width = (all + places - 1) / places;
          const int64_t begin = std::min(place * width, all);
          return parallel::Slice::range(sizes, begin, std::min(begin + width, all) - begin);
        }}}};
  return all;
}

/// Modules keep whole parameters, and what is given is cut once more on each rank. So gradients go down from layer to
/// layer, and values up again after each step.
class CutLayer final : public parallel::Layer {
 public:
  CutLayer(const Cut& cut, const std::vector<parallel::Held>& given)
      : cut_(cut), group_(comm::mesh().along({cut.axis})), given_(given) {
    for (size_t i = 0; i < given_.size(); ++i) {
      const auto& from = given_[i];
      const auto slice = slice_at(i, comm::mesh().place({cut_.axis}));
      const bool box = slice.numel == c10::multiply_integers(slice.sizes);
      // The slices in what is given, and in the whole.
      local_.push_back({.names = from.names,
                        .tensor = from.tensor,
                        .whole = from.value,
                        .value = box ? from.value.new_empty(slice.sizes) : from.value.new_empty({slice.numel}),
                        .slice = slice});
      held_.push_back(from);
      held_.back().value = parallel::slice_of(local_[i], from.value).requires_grad_();
      if (from.slice.numel > 0) {
        held_.back().slice = slice;
        for (size_t dim = 0; dim < slice.corner.size(); ++dim) held_.back().slice.corner[dim] += from.slice.corner[dim];
      }
      held_.back().cut = from.cut | comm::Axes{cut_.axis};
      held_.back().part = static_cast<int64_t>(i);
    }
  }

  std::string name() const override { return cut_.name; }

  void after_backward() override {
    if (!sync_) return;
    at::NoGradGuard no_grad;
    const auto readers = cut_.joins_data ? comm::mesh().along(comm::kTokens) : nullptr;
    for (size_t i = 0; i < given_.size(); ++i) {
      auto& gradient = given_[i].value.mutable_grad();
      if (!gradient.defined()) continue;
      if (readers && gradient.numel() > 0) {
        readers->all_reduce_(gradient, Reduction::sum);
        gradient.div_(readers->world_size());
      }
      const at::Tensor mine = parallel::slice_of(local_[i], gradient);
      if (held_[i].value.grad().defined()) held_[i].value.mutable_grad().add_(mine);
      else held_[i].value.mutable_grad() = mine;
      gradient.reset();
    }
  }
  void after_step() override {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < given_.size(); ++i) given_[i].value.detach().copy_(widen(held_[i], held_[i].value.detach()));
  }
  bool require_backward_grad_sync() const override { return sync_; }
  void set_require_backward_grad_sync(bool value) override { sync_ = value; }
  void prepare_backward_sync() override { sync_ = true; }

  bool cuts() const override { return true; }
  std::vector<parallel::Held> held() const override { return held_; }
  std::optional<parallel::Held> gradient(const at::Tensor& parameter) const override {
    for (parallel::Held held : held_)
      if (held.tensor.is_same(parameter) || held.value.is_same(parameter)) {
        held.value = held.value.grad();
        return held;
      }
    return std::nullopt;
  }
  at::Tensor widen(const parallel::Held& held, const at::Tensor& piece) const override {
    const auto i = static_cast<size_t>(held.part);
    if (!group_ || given_[i].slice.numel == 0) return piece.reshape(given_[i].value.sizes());
    at::Tensor whole = at::full(given_[i].value.sizes(), std::nan(""), piece.options());  // each comes from a rank
    const auto all =
        group_->all_gather(at::constant_pad_nd(piece.reshape(-1), {0, whole.numel() - piece.numel()}), "widen");
    for (int64_t place = 0; place < group_->world_size(); ++place)
      put(slice_at(i, place), all.narrow(0, place * whole.numel(), whole.numel()), whole);
    return whole;
  }

  /// Ranks along its axis have the same batches.
  void begin_join() override {
    if (cut_.joins_data) Layer::begin_join();
  }
  void finish_join(int64_t) override {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < given_.size(); ++i)
      held_[i].value.detach().copy_(parallel::slice_of(local_[i], given_[i].value));
  }

 private:
  parallel::Slice slice_at(size_t i, int64_t place) const {
    const auto& value = given_[i].value;
    if (given_[i].slice.numel == 0) return parallel::Slice::range(value.sizes(), 0, 0);
    return cut_.slice(value.sizes(), static_cast<int64_t>(i), place, comm::mesh().size({cut_.axis}));
  }
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
  std::shared_ptr<comm::Group> group_;  ///< along its axis; null: one place
  std::vector<parallel::Held> given_;
  std::vector<parallel::Held> local_;  ///< as held_, with slices in what is given
  std::vector<parallel::Held> held_;
  bool sync_ = true;
};

/// Modules compute with some rows of each parameter, as in tensor parallelism: the module's tensors become these.
class RowsLayer final : public parallel::Layer {
 public:
  RowsLayer(const std::vector<parallel::Held>& given, comm::Axis axis) : group_(comm::mesh().along({axis})) {
    for (const auto& from : given) {
      held_.push_back(from);
      auto& held = held_.back();
      held.whole = at::empty_like(from.tensor, at::TensorOptions().device(at::kMeta));
      const int64_t rows = from.tensor.size(0) / group_->world_size();
      held.slice.corner[0] = rows * group_->rank();
      held.slice.sizes[0] = rows;
      held.slice.numel = c10::multiply_integers(held.slice.sizes);
      held.cut = held.cut | comm::Axes{axis};
      held.part = static_cast<int64_t>(held_.size()) - 1;
      held.tensor.set_data(from.tensor.detach().narrow(0, held.slice.corner[0], rows).clone());
    }
  }
  std::string name() const override { return "rows"; }
  bool cuts() const override { return true; }
  std::vector<parallel::Held> held() const override { return held_; }
  std::optional<parallel::Held> gradient(const at::Tensor& parameter) const override {
    for (parallel::Held held : held_)
      if (held.tensor.is_same(parameter)) {
        held.value = held.tensor.grad();
        return held;
      }
    return std::nullopt;
  }
  at::Tensor widen(const parallel::Held&, const at::Tensor& piece) const override {
    return group_->all_gather(piece.contiguous(), "widen");
  }

 private:
  std::shared_ptr<comm::Group> group_;
  std::vector<parallel::Held> held_;
};

/// The layers' doings, in order.
std::vector<std::string> doings;

/// Runs the backwards of a group when its last one comes, as a pipeline does whose stages compute other micro-steps
/// meanwhile.
class LaterLayer final : public parallel::Layer {
 public:
  std::string name() const override { return "later"; }
  void before_forward() override { doings.emplace_back("forward"); }
  void backward(const std::function<void()>& run) override {
    waiting_.push_back(run);
    if (sync_) settle_gradients();
  }
  void before_backward(const at::Tensor&) override { doings.emplace_back(sync_ ? "backward" : "local backward"); }
  void settle_gradients() override {
    for (const auto& run : std::exchange(waiting_, {})) run();
  }
  bool require_backward_grad_sync() const override { return sync_; }
  void set_require_backward_grad_sync(bool value) override { sync_ = value; }
  void prepare_backward_sync() override { sync_ = true; }

 private:
  std::vector<std::function<void()>> waiting_;
  bool sync_ = true;
};

/// Optimizers step on two tensors at a time, and then on the last one; between steps what they keep of the others is
/// here.
class PartsLayer final : public parallel::Layer {
 public:
  explicit PartsLayer(const std::vector<parallel::Held>& given) {
    for (size_t i = 0; i + 1 < given.size(); ++i) {
      if (i % 2 == 0) parts_.emplace_back();
      parts_.back().push_back(given[i].value);
    }
    kept_.resize(parts_.size());
  }
  std::string name() const override { return "parts"; }
  std::vector<std::vector<at::Tensor>> step_parts() const override { return parts_; }
  void before_part(size_t part, const std::vector<at::Tensor>& states) override {
    doings.push_back("part " + std::to_string(part) + " with " + std::to_string(states.size()));
    for (size_t i = 0; i < states.size(); ++i) states[i].set_data(kept_[part][i]);
    kept_[part].clear();
  }
  void after_part(size_t part, const std::vector<at::Tensor>& states) override {
    for (const auto& state : states) {
      kept_[part].push_back(state.detach().clone());
      state.set_data(at::empty({0}, state.options()));
    }
  }

 private:
  std::vector<std::vector<at::Tensor>> parts_, kept_;
};

/// Steps within backward, on one tensor after the other.
class AtOnceLayer final : public parallel::Layer {
 public:
  explicit AtOnceLayer(const std::vector<parallel::Held>& given) : given_(given) {}
  std::string name() const override { return "at once"; }
  void set_step(std::function<void(const std::vector<at::Tensor>&)> step) override { step_ = std::move(step); }
  void after_backward() override {
    for (const auto& held : given_) {
      step_({held.value});
      held.value.mutable_grad().reset();
    }
  }

 private:
  std::vector<parallel::Held> given_;
  std::function<void(const std::vector<at::Tensor>&)> step_;
};

std::vector<std::string> stack_wanted;  ///< of cuts(); what joins the data is averaging where none of them does
std::vector<comm::AxisSize> axes_wanted;
std::optional<StateDictType> state_dict_type_wanted;

class ChosenCut final : public parallel::ChosenLayer {
 public:
  explicit ChosenCut(const Cut& cut) : cut_(cut) {}
  bool joins_data() const override { return cut_.joins_data; }
  std::vector<comm::AxisSize> axes(const comm::Group&) const override { return axes_wanted; }
  std::optional<StateDictType> state_dict_type() const override { return state_dict_type_wanted; }
  std::unique_ptr<parallel::Layer> make(const ModelRef&, const at::Device&, bool,
                                        const std::vector<parallel::Held>& given) const override {
    return std::make_unique<CutLayer>(cut_, given);
  }

 private:
  Cut cut_;
};

class ChosenTiming final : public parallel::ChosenLayer {
 public:
  explicit ChosenTiming(std::string name) : name_(std::move(name)) {}
  std::unique_ptr<parallel::Layer> make(const ModelRef&, const at::Device&, bool,
                                        const std::vector<parallel::Held>& given) const override {
    if (name_ == "later") return std::make_unique<LaterLayer>();
    if (name_ == "parts") return std::make_unique<PartsLayer>(given);
    return std::make_unique<AtOnceLayer>(given);
  }

 private:
  std::string name_;
};

/// A program may ask for it with this.
struct RowsPlugin {
  int64_t places = 2;
};

class ChosenRows final : public parallel::ChosenLayer {
 public:
  explicit ChosenRows(const std::vector<comm::AxisSize>& axes) : axes_(axes) {}
  std::vector<comm::AxisSize> axes(const comm::Group&) const override { return axes_; }
  std::vector<Receipt> receipts() const override {
    return {{.setting = "RowsPlugin.places",
             .value = std::to_string(axes_.back().size),
             .source = "call",
             .expected = "modules compute with rows",
             .state = ReceiptState::acted,
             .effect = "rows are cut"}};
  }
  std::unique_ptr<parallel::Layer> make(const ModelRef&, const at::Device&, bool,
                                        const std::vector<parallel::Held>& given) const override {
    return std::make_unique<RowsLayer>(given, axes_.back().axis);
  }

 private:
  std::vector<comm::AxisSize> axes_;
};

std::unique_ptr<parallel::ChosenLayer> choose_rows(const parallel::EngineRequest& request) {
  using comm::Axis;
  if (const auto* plugin = request.plugin<RowsPlugin>())
    return std::make_unique<ChosenRows>(
        std::vector<comm::AxisSize>{{Axis::dp_replicate, world_size() / plugin->places}, {Axis::tp, plugin->places}});
  if (std::find(stack_wanted.begin(), stack_wanted.end(), "rows") == stack_wanted.end()) return nullptr;
  return std::make_unique<ChosenRows>(axes_wanted);
}

/// The layers of a name, and how many ranks they lie over.
void want(const std::string& engine) {
  using comm::Axis;
  const int64_t ranks = world_size(), copies = ranks % 2 == 0 ? 2 : 1, columns = ranks % 4 == 0 ? 2 : 1;
  stack_wanted.clear();
  if (engine == "columns" || engine == "columns from the right") {
    stack_wanted = {engine};
    axes_wanted = {{Axis::tp, ranks}};
  } else if (engine == "absent") {
    stack_wanted = {engine};
    axes_wanted = {{Axis::pp, ranks}};
  } else if (engine == "stretches of columns") {
    stack_wanted = {"columns", "stretches"};
    axes_wanted = {{Axis::dp_replicate, copies}, {Axis::dp_shard, ranks / copies / columns}, {Axis::tp, columns}};
  } else if (engine == "averaged rows" || engine == "sharded rows") {
    stack_wanted = {"rows"};
    axes_wanted = {{engine == "sharded rows" ? Axis::dp_shard : Axis::dp_replicate, ranks / 2}, {Axis::tp, 2}};
  } else if (engine == "rows of each rank's samples") {
    stack_wanted = {"rows"};
    axes_wanted = {{Axis::dp_replicate, ranks / 2}, {Axis::dp_shard, 2}};
  } else if (engine == "averaged columns") {
    stack_wanted = {"columns"};
    axes_wanted = {{Axis::dp_replicate, ranks / 2}, {Axis::tp, 2}};
  } else if (engine == "stretches of columns, some absent") {
    stack_wanted = {"absent", "columns", "stretches"};
    axes_wanted = {{Axis::pp, 2}, {Axis::dp_shard, ranks / 4}, {Axis::tp, 2}};
  }
}

// ---- what all must do

const std::vector<std::string> kEngines = {"ddp", "fsdp", "columns", "absent"};

AcceleratorOptions options_for(const std::string& engine, int64_t accumulation = 1) {
  [[maybe_unused]] static const bool registered = [] {
    auto& kinds = parallel::layer_kinds();
    auto next = kinds.begin();
    const auto wanted = [](const std::string& name) {
      return std::find(stack_wanted.begin(), stack_wanted.end(), name) != stack_wanted.end();
    };
    for (const std::string name : {"rows", "absent", "columns", "columns from the right", "stretches"}) {
      const auto choose = [=](const parallel::EngineRequest& request) -> std::unique_ptr<parallel::ChosenLayer> {
        if (name == "rows") return choose_rows(request);
        return wanted(name) ? std::make_unique<ChosenCut>(cuts().at(name)) : nullptr;
      };
      next = std::next(kinds.insert(next, {name, choose}));
    }
    for (const std::string name : {"later", "parts", "at once"}) {
      const auto choose = [=](const parallel::EngineRequest&) -> std::unique_ptr<parallel::ChosenLayer> {
        return wanted(name) ? std::make_unique<ChosenTiming>(name) : nullptr;
      };
      // It is about the pieces that sharding leaves.
      kinds.insert(name == "later" ? kinds.begin() : kinds.end(), {name, choose});
    }
    return true;
  }();
  AcceleratorState::reset();  // else it would have the engine of the first Accelerator
  const auto also = engine.find(", ");
  want(engine.substr(0, also));
  if (also != std::string::npos && engine.find("some absent") == std::string::npos)
    stack_wanted.push_back(engine.substr(also + 2));
  AcceleratorOptions options{.gradient_accumulation_steps = accumulation, .cpu = true};
  if (engine.starts_with("fsdp") || engine == "sharded rows")
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

constexpr int64_t kRows = 4;  ///< of a micro-step, for each rank of the job
torch::Tensor all_rows(int64_t step) {
  return torch::randn({kRows * world_size(), 5}, at::make_generator<at::CPUGeneratorImpl>(100 + uint64_t(step)));
}
/// Ranks that differ in the axes of the data have other rows.
torch::Tensor own_rows(int64_t step) {
  return all_rows(step).chunk(
      comm::mesh().size(comm::kSamples))[static_cast<size_t>(comm::mesh().place(comm::kSamples))];
}
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
    // Modules compute with what optimizers stepped on, on all ranks.
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

// Layers on each other. Where others hold the same elements these count once in norms, and are written once; what is
// saved in one layout is loaded in every other.
RANKS_TEST(Engines, ComposedLayers, 4, 8) {
  const std::filesystem::path folder = support::scratch_dir();
  const auto step = [](Trained& trained, int64_t number) {
    trained.backward(number);
    const auto norm = trained.accelerator.clip_grad_norm_(trained.model->parameters(), 0.01);
    trained.optimizer.step();
    trained.optimizer.zero_grad();
    return norm.item<double>();
  };
  std::vector<std::string> stacks = {"stretches of columns", "averaged columns"};
  if (world_size() == 8) stacks.emplace_back("stretches of columns, some absent");
  auto layouts = stacks;
  layouts.insert(layouts.end(), {"ddp", "fsdp", "columns"});
  for (const auto& from : stacks) {
    const auto state_folder = folder / from / "state", sharded = folder / from / "sharded";
    Weights saved, last;
    {
      Expected expected;
      Trained trained(from);
      for (int64_t number = 0; number < 3; ++number) {
        expected.step(number, 1, 0.01);
        EXPECT_NEAR(step(trained, number), expected.norm, 1e-5 * expected.norm) << from;
      }
      expect_close(trained.weights(), expected, from);
      trained.accelerator.save_state(state_folder);
      distributed_checkpoint::save(distributed_checkpoint::get_model_state_dict(trained.model), sharded);
      saved = trained.weights();
      step(trained, 3);
      last = trained.weights();
      if (rank() == 0 && support::python()) {
        save_safetensors(folder / "expected.safetensors", saved, {});
        const auto read = support::run_python("tests/dist/engines_peer.py",
                                              {sharded.string(), (folder / "expected.safetensors").string()});
        EXPECT_EQ(read.exit_code, 0) << from << ": " << read.output;
      }
    }
    for (const auto& to : layouts) {
      Trained trained(to);
      trained.step(77);
      trained.accelerator.load_state(state_folder);
      expect_equal(trained.weights(), saved, from + " to " + to);
      step(trained, 3);
      if (to == from) expect_equal(trained.weights(), last, "resumed, " + from);
      auto state = distributed_checkpoint::get_model_state_dict(trained.model);
      distributed_checkpoint::load(state, sharded);
      distributed_checkpoint::set_model_state_dict(trained.model, state);
      expect_equal(trained.weights(), saved, "sharded, " + from + " to " + to);
    }
  }
}

/// A loss that is the sum of what its ranks compute of it.
struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    torch::manual_seed(12);
    weight = register_parameter("weight", torch::randn({6, 5}));
    bias = register_parameter("bias", torch::randn({6}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return (x.matmul(weight.t()) + bias - 0.3).pow(2).sum() / static_cast<double>(6 * x.size(0));
  }
  torch::Tensor weight, bias;
};
TORCH_MODULE(Parts);

// Sharding and averaging of what modules have a part of: they take the boxes that they are given.
RANKS_TEST(Engines, LayersOnBoxesThatModulesComputeWith, 2, 4) {
  const std::filesystem::path folder = support::scratch_dir();
  std::vector<std::string> engines = {"averaged rows", "sharded rows"};
  struct Run {
    Accelerator accelerator;
    Parts net;
    torch::optim::Adam own{net->parameters(), torch::optim::AdamOptions(0.05)};
    Prepared<Parts> model;
    AcceleratedOptimizer optimizer;
    explicit Run(const std::string& engine)
        : accelerator(options_for(engine)), model(accelerator.prepare(net)), optimizer(accelerator.prepare(own)) {}
    double step(int64_t number) {
      accelerator.backward(model(own_rows(number)));
      const auto norm = accelerator.clip_grad_norm_(net->parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      return norm.item<double>();
    }
    Weights weights() {
      Weights now;
      for (const auto& [name, value] : accelerator.get_state_dict(model)) now[name] = value.clone();
      return now;
    }
  };
  {
    struct Unknown final : torch::optim::Optimizer {
      explicit Unknown(const std::vector<torch::Tensor>& parameters)
          : Optimizer(parameters, std::make_unique<torch::optim::SGDOptions>(0.1)) {}
      torch::Tensor step(LossClosure) override { return {}; }
    };
    Accelerator accelerator(options_for("averaged rows"));
    Parts net;
    Unknown optimizer(net->parameters());
    EXPECT_THAT(message_of<ConfigError>([&] { accelerator.prepare(net, optimizer); }),
                HasSubstr("of which each rank computes with a part"));
  }
  {
    Accelerator accelerator(options_for("rows of each rank's samples"));
    Parts net;
    EXPECT_THAT(message_of<ConfigError>([&] { accelerator.prepare(net); }),
                HasSubstr("have the same elements of parameter 'weight', expected all"));
  }
  for (const auto& from : engines) {
    Weights saved, last;
    {
      Parts plain;
      torch::optim::Adam plainly(plain->parameters(), torch::optim::AdamOptions(0.05));
      Run run(from);
      for (int64_t number = 0; number < 3; ++number) {
        plainly.zero_grad();
        plain->forward(all_rows(number)).backward();
        const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
        plainly.step();
        EXPECT_NEAR(run.step(number), norm, 1e-5 * norm) << from;
      }
      saved = run.weights();
      if (rank() == 0)
        for (const auto& parameter : plain->named_parameters())
          EXPECT_TRUE(torch::allclose(saved.at(parameter.key()), parameter.value(), 1e-4, 1e-6))
              << from << " " << parameter.key();
      run.accelerator.save_state(folder / from);
      distributed_checkpoint::save(distributed_checkpoint::get_model_state_dict(run.model), folder / from / "sharded");
      run.step(3);
      last = run.weights();
    }
    auto layouts = engines;
    layouts.insert(layouts.end(), {"ddp", "fsdp"});
    for (const auto& to : layouts) {
      // Without the layer of rows a module computes with all of them, and the loss is whole.
      Run run(to);
      run.step(77);
      run.accelerator.load_state(folder / from);
      expect_equal(run.weights(), saved, from + " to " + to);
      run.step(3);
      const auto resumed = run.weights();
      if (to == from) expect_equal(resumed, last, "resumed, " + from);
      if (rank() == 0)
        for (const auto& [name, value] : resumed)
          EXPECT_TRUE(torch::allclose(value, last.at(name), 1e-4, 1e-6)) << from << " to " << to << " " << name;
      auto state = distributed_checkpoint::get_model_state_dict(run.model);
      distributed_checkpoint::load(state, folder / from / "sharded");
      distributed_checkpoint::set_model_state_dict(run.model, state);
      expect_equal(run.weights(), saved, "sharded, " + from + " to " + to);
    }
  }
}

RANKS_TEST(Engines, PluginsOfLayers, 2, 4) {
  auto options = options_for("ddp");
  options.layer_plugins = {RowsPlugin{.places = 2}};
  {
    Accelerator accelerator(options);
    EXPECT_EQ(comm::mesh().size({comm::Axis::tp}), 2);
    Parts net;
    const auto model = accelerator.prepare(net);
    EXPECT_EQ(net->weight.size(0), 3);
    EXPECT_EQ(accelerator.receipts()["RowsPlugin.places"].value, "2");
    // The first one's.
    Accelerator second({.cpu = true});
    Parts other;
    const auto with_it = second.prepare(other);
    EXPECT_EQ(other->weight.size(0), 3);
  }
  struct Stranger {};
  const auto refusal = [](std::vector<std::any> plugins) {
    auto wrong = options_for("ddp");
    wrong.layer_plugins = std::move(plugins);
    return message_of<ConfigError>([&] { Accelerator accelerator(wrong); });
  };
  EXPECT_THAT(refusal({Stranger{}}), HasSubstr("Stranger, which no layer of this run takes"));
  EXPECT_THAT(refusal({RowsPlugin{}, RowsPlugin{}}), HasSubstr("has two of"));
}

RANKS_TEST(Engines, ComposedLayersAccumulate, 4) {
  for (const std::string engine : {"stretches of columns", "averaged columns"}) {
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

// Ranks along the columns have the same batches, those along the data different numbers of them: a rank without one
// adds zeros to the average, and all end with the last one's model and moments.
RANKS_TEST(Engines, ComposedLayersJoin, 4) {
  Trained trained("averaged columns");
  const int64_t place = comm::mesh().place(comm::kSamples), readers = comm::mesh().size(comm::kSamples);
  Expected expected;
  const auto steps_of = [](int64_t reader) { return reader == 0 ? 3 : 1; };
  trained.accelerator.join_uneven_inputs(trained.model, [&] {
    for (int64_t number = 0; number < steps_of(place); ++number) trained.step(number);
  });
  for (int64_t number = 0; number < 3; ++number) {
    expected.optimizer.zero_grad();
    const auto rows = all_rows(number).chunk(readers);
    for (int64_t reader = 0; reader < readers; ++reader)
      if (number < steps_of(reader))
        (loss_of(expected.net->forward(rows[static_cast<size_t>(reader)])) / static_cast<double>(readers)).backward();
    expected.optimizer.step();
  }
  expect_close(trained.weights(), expected, "joined");
  expected.step(5), trained.step(5);
  expect_close(trained.weights(), expected, "after the join");
}

/// A pipeline's schedule: backwards of a group run behind the forwards of all of its micro-steps.
RANKS_TEST(Engines, BackwardsRunLater, 1, 2, 3) {
  const auto trains_as_one = [](const AcceleratorOptions& options, const std::string& engine) {
    Expected expected;
    Trained trained(options);
    doings.clear();
    for (int64_t step = 0; step < 7; ++step) {
      if (step % 3 == 0 && step < 6) expected.step(step, 3, 0.01);
      const auto scope = trained.accelerator.accumulate(trained.model);
      trained.backward(step);
      if (trained.accelerator.sync_gradients()) {
        const auto norm = trained.accelerator.clip_grad_norm_(trained.model->parameters(), 0.01);
        EXPECT_NEAR(norm.item<double>(), expected.norm, 1e-5 * expected.norm) << engine;
      }
      trained.optimizer.step();
      trained.optimizer.zero_grad();
    }
    expect_close(trained.weights(), expected, engine);
    const std::vector<std::string> group = {"forward",        "forward",        "forward",
                                            "local backward", "local backward", "backward"};
    std::vector<std::string> as_planned = group;
    as_planned.insert(as_planned.end(), group.begin(), group.end());
    as_planned.emplace_back("forward");  // of a group that has not ended
    EXPECT_EQ(doings, as_planned) << engine;
  };
  for (const std::string engine : {"ddp, later", "fsdp, later", "columns, later"})
    trains_as_one(options_for(engine, 3), engine);
  for (const bool is_static : {false, true}) {
    auto options = options_for("ddp, later", 3);
    options.kwargs_handlers.emplace_back(
        DistributedDataParallelKwargs{.find_unused_parameters = !is_static, .static_graph = is_static});
    trains_as_one(options, is_static ? "static, later" : "unused ones, later");
  }
}

/// ZeRO's optimizers, whose states are elsewhere but for the part that is stepped on.
RANKS_TEST(Engines, OptimizersStepPartByPart, 1, 2, 3) {
  for (const std::string engine : {"ddp, parts", "fsdp, parts"}) {
    Expected expected;
    Trained trained(engine);
    doings.clear();
    for (int64_t step = 0; step < 3; ++step) {
      expected.step(step), trained.step(step);
      int64_t here = 0;
      for (const auto& [parameter, state] : trained.own.state())
        here += static_cast<torch::optim::AdamParamState&>(*state).exp_avg().numel() > 0 ? 1 : 0;
      EXPECT_LE(here, 1) << "the last tensor's, which is in no part";
    }
    expect_close(trained.weights(), expected, engine);
    EXPECT_EQ(doings, (std::vector<std::string>{"part 0 with 0", "part 1 with 0", "part 0 with 4", "part 1 with 2",
                                                "part 0 with 4", "part 1 with 2"}))
        << engine;
  }
  auto options = options_for("ddp, parts");
  Accelerator accelerator(options);
  Net net;
  torch::optim::LBFGS own(net->parameters());
  const auto model = accelerator.prepare(net);
  const auto optimizer = accelerator.prepare(own);
  accelerator.backward(loss_of(model(own_rows(0))));
  EXPECT_THAT(message_of<ConfigError>([&] { optimizer.step([&] { return loss_of(model(own_rows(0))); }); }),
              HasSubstr("LBFGS, which may need all of its parameters at once"));
}

/// And those that step within backward, of which step() finds nothing left.
RANKS_TEST(Engines, OptimizersStepWithinBackward, 1, 2, 3) {
  Expected expected;
  Trained trained("ddp, at once");
  for (int64_t step = 0; step < 4; ++step) {
    expected.step(step), trained.backward(step);
    for (const auto& parameter : trained.net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    trained.optimizer.step();
    trained.optimizer.zero_grad();
  }
  expect_close(trained.weights(), expected, "at once");
  auto options = options_for("ddp, at once");
  options.mixed_precision = "fp16";
  Accelerator accelerator(options);
  Net net;
  torch::optim::SGD own(net->parameters(), 0.1);
  const auto model = accelerator.prepare(net);
  const auto optimizer = accelerator.prepare(own);
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.backward(loss_of(model(own_rows(0)))); }),
              HasSubstr("a step within backward together with loss scaling"));
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
  for (const std::string engine : {"ddp", "fsdp", "stretches of columns", "columns"}) {
    Trained trained(engine);
    const auto loop = [&] {
      for (int64_t step = 0; step < 2 + comm::mesh().place(comm::kSamples); ++step) trained.step(step);
    };
    if (engine == "ddp") {
      trained.accelerator.join_uneven_inputs(trained.model, loop);
      const auto weights = trained.net->first->weight.detach();
      EXPECT_TRUE(torch::equal(comm::broadcast(weights, 0), weights));
    } else if (engine == "columns") {  // all ranks have the same batches
      Expected expected;
      for (int64_t step = 0; step < 2; ++step) expected.step(step);
      trained.accelerator.join_uneven_inputs(trained.model, loop);
      expect_close(trained.weights(), expected, engine);
    } else {
      EXPECT_THAT(message_of<ConfigError>([&] { trained.accelerator.join_uneven_inputs(trained.model, loop); }),
                  HasSubstr(engine == "fsdp" ? "sharded parameters" : "trained with 'stretches', which needs all"))
          << engine;
      trained.step(0);  // all ranks are still in step
    }
  }
}

/// Rectangles of a file are the same slice as that of slice_of(), whatever the order of the tensor's memory.
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
