#include "optim/optimizer_state.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "accelerate/optim/own_state_dict.hpp"
#include "accelerate/optim/steps_on_pieces.hpp"
#include "optim/describe_own.hpp"
#include "optim/fp32_moments.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

using namespace torch::optim;

// One description per optimizer class: the options and the state by the names that Python uses. Everything below is
// written once over these. `fixed` lists options that exist in Python only, with the one value that says what LibTorch
// does.

template <class State_> struct Adaptive {
  using State = State_;
  template <class Options, class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("betas", o.betas()), v("eps", o.eps()), v("weight_decay", o.weight_decay()),
        v("amsgrad", o.amsgrad());
  }
  template <class Options, class V> static void state(State& s, const Options& o, V&& v) {
    v("step", s.step()), v("exp_avg", s.exp_avg(), true), v("exp_avg_sq", s.exp_avg_sq(), true),
        v("max_exp_avg_sq", s.max_exp_avg_sq(), o.amsgrad());
  }
  static at::ScalarType state_type(const OptimizerOptions& o, const at::Tensor& parameter) {
    return moment_type(o, parameter);
  }
};
struct DescribeAdam : Adaptive<AdamParamState> {
  using Options = AdamOptions;
  static constexpr const char* kName = "Adam";
  static constexpr bool kStateFromStart = false;
  static std::vector<std::pair<const char*, c10::IValue>> fixed() {
    return {{"maximize", false},       {"foreach", {}}, {"capturable", false},
            {"differentiable", false}, {"fused", {}},   {"decoupled_weight_decay", false}};
  }
};
struct DescribeAdamW : Adaptive<AdamWParamState> {
  using Options = AdamWOptions;
  static constexpr const char* kName = "AdamW";
  static constexpr bool kStateFromStart = false;
  static std::vector<std::pair<const char*, c10::IValue>> fixed() {
    return {{"maximize", false},       {"foreach", {}}, {"capturable", false},
            {"differentiable", false}, {"fused", {}},   {"decoupled_weight_decay", true}};
  }
};
struct DescribeSGD {
  using Options = SGDOptions;
  using State = SGDParamState;
  static constexpr const char* kName = "SGD";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("momentum", o.momentum()), v("dampening", o.dampening()), v("weight_decay", o.weight_decay()),
        v("nesterov", o.nesterov());
  }
  template <class V> static void state(State& s, const Options& o, V&& v) {
    v("momentum_buffer", s.momentum_buffer(), o.momentum() != 0);
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() {
    return {{"maximize", false}, {"foreach", {}}, {"differentiable", false}, {"fused", {}}};
  }
};
struct DescribeAdagrad {
  using Options = AdagradOptions;
  using State = AdagradParamState;
  static constexpr const char* kName = "Adagrad";
  static constexpr bool kStateFromStart = true;  // LibTorch makes it in the constructor and relies on finding it
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("lr_decay", o.lr_decay()), v("eps", o.eps()), v("weight_decay", o.weight_decay());
    v("initial_accumulator_value", o.initial_accumulator_value());
  }
  template <class V> static void state(State& s, const Options&, V&& v) {
    v("step", s.step()), v("sum", s.sum(), true);
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() {
    return {{"maximize", false}, {"foreach", {}}, {"differentiable", false}, {"fused", {}}};
  }
};
struct DescribeRMSprop {
  using Options = RMSpropOptions;
  using State = RMSpropParamState;
  static constexpr const char* kName = "RMSprop";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("momentum", o.momentum()), v("alpha", o.alpha()), v("eps", o.eps()), v("centered", o.centered()),
        v("weight_decay", o.weight_decay());
  }
  template <class V> static void state(State& s, const Options& o, V&& v) {
    v("step", s.step()), v("square_avg", s.square_avg(), true),
        v("momentum_buffer", s.momentum_buffer(), o.momentum() > 0);
    v("grad_avg", s.grad_avg(), o.centered());
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() {
    return {{"capturable", false}, {"foreach", {}}, {"maximize", false}, {"differentiable", false}};
  }
};

/// Calls f.operator()<Description>() for the optimizer's class; false when it is none of the above.
template <class F> bool with_description(Optimizer& optimizer, F&& f) {
  const auto matches = [&]<class D>() {
    if (!dynamic_cast<typename D::Options*>(&optimizer.defaults())) return false;
    f.template operator()<D>();
    return true;
  };
  return matches.template operator()<DescribeAdamW>() || matches.template operator()<DescribeAdam>() ||
         matches.template operator()<DescribeSGD>() || matches.template operator()<DescribeAdagrad>() ||
         matches.template operator()<DescribeRMSprop>() || matches.template operator()<DescribeLion>() ||
         matches.template operator()<DescribeDeepSpeedAdam>() || matches.template operator()<DescribeLamb>() ||
         matches.template operator()<DescribeMuon>();
}

/// @throws ConfigError for a class of somebody's own that has borrowed LibTorch's options, and not its states.
template <class D> typename D::State& known_state(const Optimizer& optimizer, OptimizerParamState& state) {
  if (auto* known = dynamic_cast<typename D::State*>(&state)) return *known;
  raise<ConfigError>(
      "an optimizer of class {} has the options of {} and states of its own class {}, expected those of {}; derive it "
      "from optim::OwnStateDict, too, which says what its states are",
      c10::demangle(typeid(optimizer).name()), D::kName, c10::demangle(typeid(state).name()), D::kName);
}

template <class F> void require_description(Optimizer& optimizer, const char* operation, F&& f) {
  if (!with_description(optimizer, f))
    raise<ConfigError>(
        "{}: found an optimizer of class {}, expected SGD, Adam, AdamW, Adagrad, RMSprop or one of accelerate::optim; "
        "others (LBFGS among them) have no state layout in common with Python. Derive it from optim::OwnStateDict, "
        "too, or save it by torch::save in a custom checkpoint object.",
        operation, c10::demangle(typeid(optimizer).name()));
}

struct WriteOptions {
  Dict& dict;
  void operator()(const char* name, double value) const { dict.insert(name, value); }
  void operator()(const char* name, bool value) const { dict.insert(name, value); }
  void operator()(const char* name, const std::string& value) const { dict.insert(name, value); }
  void operator()(const char* name, const std::tuple<double, double>& value) const {
    dict.insert(name, c10::ivalue::Tuple::create({c10::IValue(std::get<0>(value)), c10::IValue(std::get<1>(value))}));
  }
};

struct OptionsReader {
  DictReader& reader;
  void operator()(const char* name, double& value) const { value = reader.number(name); }
  void operator()(const char* name, bool& value) const { value = reader.boolean(name); }
  void operator()(const char* name, std::string& value) const {
    const auto& found = reader.at(name);
    if (!found.isString()) reader.fail("found {} at '{}', expected a text", found.tagKind(), name);
    value = found.toStringRef();
  }
  void operator()(const char* name, std::tuple<double, double>& value) const {
    const auto pair = reader.numbers(name);
    if (pair.size() != 2) reader.fail("found {} numbers at '{}', expected 2", pair.size(), name);
    value = {pair[0], pair[1]};
  }
};

struct WriteState {
  Dict& dict;
  void operator()(const char* name, int64_t step) const {
    dict.insert(name, at::scalar_tensor(static_cast<double>(step), at::kFloat));
  }
  void operator()(const char* name, const at::Tensor& tensor, bool) const {
    if (tensor.defined()) dict.insert(name, tensor);
  }
};

struct BeginState {
  std::map<std::string, at::Tensor>& fields;
  const at::Tensor& parameter;
  at::ScalarType type;
  void operator()(const char* name, int64_t) const { fields[name] = at::scalar_tensor(0, at::kFloat); }
  void operator()(const char* name, const at::Tensor&, bool required) const {
    if (required) fields[name] = at::zeros_like(parameter, parameter.options().requires_grad(false).dtype(type));
  }
};

struct NoteState {
  std::map<std::string, at::Tensor>& fields;
  void operator()(const char*, int64_t) const {}
  void operator()(const char* name, const at::Tensor& tensor, bool) const { fields[name] = tensor; }
};

struct ReadState {
  DictReader& reader;
  const at::Tensor& parameter;
  at::ScalarType type;
  const std::map<std::string, at::Tensor>& present;  ///< that may stay
  const FillState& fill;
  /// In the parameter's own memory layout and place, as a step would have made it.
  at::Tensor place(const char* name) const {
    const auto options = parameter.options().requires_grad(false).dtype(type);
    const auto found = present.find(name);
    if (found == present.end() || !found->second.defined()) return at::empty_like(parameter, options);
    const at::Tensor& there = found->second;
    const bool fits = there.sizes() == parameter.sizes() && there.strides() == parameter.strides() &&
                      there.scalar_type() == type && there.device() == parameter.device();
    return fits ? there : at::empty_like(parameter, options);
  }
  void operator()(const char* name, int64_t& step) const { step = reader.integer(name); }
  void operator()(const char* name, at::Tensor& tensor, bool required) const {
    const auto* value = reader.find(name);
    if (!value || value->isNone()) {
      if (required) reader.fail("found no tensor '{}', which these options need", name);
      return;
    }
    if (!value->isTensor()) reader.fail("found {} at '{}', expected a tensor", value->tagKind(), name);
    const auto& saved = value->toTensor();
    if (saved.sizes() != parameter.sizes())
      reader.fail(
          "found '{}' of shape {}, expected {} like its parameter; the state may belong to another model "
          "or to parameters in another order",
          name, saved.sizes(), parameter.sizes());
    tensor = place(name);
    fill(parameter, tensor, saved);
  }
};

/// The dtype of the state that a step makes for the parameter.
template <class D> at::ScalarType state_type(const typename D::Options& options, const at::Tensor& parameter) {
  if constexpr (requires { D::state_type(options, parameter); }) return D::state_type(options, parameter);
  else return parameter.scalar_type();
}

/// Options that only Python has: a value that asks for other arithmetic than ours is an error; the rest are hints about
/// speed.
template <class D> void check_fixed(DictReader& reader) {
  for (const auto& [name, ours] : D::fixed()) {
    const auto* found = reader.find(name);
    const std::string key = name;
    if (!found || !found->isBool() || !ours.isBool() || (key != "maximize" && key != "decoupled_weight_decay"))
      continue;
    if (found->toBool() != ours.toBool())
      reader.fail(
          "found '{}' {}, expected {}: LibTorch's {} does not compute that. Use the class that does "
          "(decoupled_weight_decay is AdamW), or negate the loss to maximise",
          name, found->toBool(), ours.toBool(), D::kName);
  }
}

}  // namespace

namespace {

/// A shard's state.
template <class State> struct ShardState final : State {
  explicit ShardState(const State& state) : State(state) {}
  std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<ShardState>(*this); }
  void serialize(torch::serialize::OutputArchive&) const override {
    throw ConfigError(
        "torch::save: the optimizer's parameters are sharded, so that this rank holds a piece of each state, expected "
        "whole ones; use accelerator.save_state(), or accelerator.get_optimizer_state_dict(), on all ranks");
  }
};

}  // namespace

void refuse_torch_save(Optimizer& optimizer, const std::function<bool(const void*)>& is_piece) {
  with_description(optimizer, [&]<class D>() {
    using State = typename D::State;
    for (auto& [parameter, state] : optimizer.state())
      if (typeid(*state) == typeid(State) && is_piece(parameter))
        state = std::make_unique<ShardState<State>>(static_cast<const State&>(*state));
  });
}

bool steps_on_pieces(const torch::optim::Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  for (const auto* known : {&typeid(Adam), &typeid(AdamW), &typeid(SGD), &typeid(Adagrad), &typeid(RMSprop)})
    if (type == *known) return true;
  return dynamic_cast<const StepsOnShards*>(&optimizer) != nullptr;
}

bool has_own_state_dict(const Optimizer& optimizer) { return dynamic_cast<const OwnStateDict*>(&optimizer); }

c10::IValue optimizer_state_dict(Optimizer& optimizer) {
  if (const auto* own = dynamic_cast<const OwnStateDict*>(&optimizer)) return own->state_dict();
  Dict result = make_dict();
  require_description(optimizer, "optimizer state_dict", [&]<class D>() {
    Dict states(c10::IntType::get(), c10::AnyType::get());
    std::vector<c10::IValue> groups;
    int64_t index = 0;
    for (auto& group : optimizer.param_groups()) {
      auto& options = static_cast<typename D::Options&>(group.options());
      Dict entry = make_dict();
      D::options(options, WriteOptions{entry});
      for (const auto& [name, value] : D::fixed()) entry.insert(name, value);
      std::vector<int64_t> indices;
      for (const auto& parameter : group.params()) {
        if (const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
            found != optimizer.state().end()) {
          Dict state = make_dict();
          D::state(known_state<D>(optimizer, *found->second), options, WriteState{state});
          states.insert(index, state);
        }
        indices.push_back(index++);
      }
      entry.insert("params", make_list(indices));
      groups.emplace_back(entry);
    }
    result.insert("state", states);
    result.insert("param_groups", make_list(groups));
  });
  return result;
}

std::map<std::string, at::Tensor> initial_state(Optimizer& optimizer, const OptimizerParamGroup& group,
                                                const at::Tensor& parameter) {
  std::map<std::string, at::Tensor> fields;
  require_description(optimizer, "optimizer state_dict", [&]<class D>() {
    typename D::State state;
    const auto& options = static_cast<const typename D::Options&>(group.options());
    D::state(state, options, BeginState{fields, parameter, state_type<D>(options, parameter)});
  });
  return fields;
}

namespace {

/// What an optimizer had before.
struct StateBefore {
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  ska::flat_hash_map<void*, std::unique_ptr<OptimizerParamState>> states;
};

std::shared_ptr<StateBefore> take_state_dict(Optimizer& optimizer, const c10::IValue& saved, bool in_place,
                                             const FillState& fill) {
  auto before = std::make_shared<StateBefore>();
  require_description(optimizer, "optimizer load_state_dict", [&]<class D>() {
    using Options = typename D::Options;
    using State = typename D::State;
    DictReader reader(saved, "optimizer state");
    auto& groups = optimizer.param_groups();
    const auto saved_groups = reader.items("param_groups");
    if (saved_groups.size() != groups.size())
      reader.fail(
          "found {} parameter groups, expected {}; build the optimizer with the groups it had when the state was saved",
          saved_groups.size(), groups.size());

    // Everything is read and checked first, so that a bad file changes nothing.
    struct Place {
      const at::Tensor* parameter;
      const Options* options;
    };
    std::vector<std::unique_ptr<OptimizerOptions>> new_options;
    std::unordered_map<int64_t, Place> places;
    for (size_t g = 0; g < groups.size(); ++g) {
      DictReader group(saved_groups[g], "optimizer state, parameter group " + std::to_string(g));
      auto options = groups[g].options().clone();
      D::options(static_cast<Options&>(*options), OptionsReader{group});
      check_fixed<D>(group);
      if constexpr (requires(const Options& o) { D::same_kind(o, o); })
        if (!D::same_kind(static_cast<const Options&>(groups[g].options()), static_cast<const Options&>(*options)))
          group.fail("found use_muon {}, expected {} as the optimizer's group has", group.boolean("use_muon"),
                     !group.boolean("use_muon"));
      if constexpr (requires { problem_of_own<D>(static_cast<const Options&>(*options)); })
        if (const auto problem = problem_of_own<D>(static_cast<const Options&>(*options)); !problem.empty())
          group.fail("{}, as for an optimizer that is made; the file is damaged or was edited", problem);
      const auto indices = group.items("params");
      const auto& parameters = groups[g].params();
      if (indices.size() != parameters.size())
        group.fail("found {} parameters, expected {}; the model has probably changed", indices.size(),
                   parameters.size());
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!indices[i].isInt()) group.fail("found {} in 'params', expected whole numbers", indices[i].tagKind());
        places[indices[i].toInt()] = {&parameters[i], static_cast<const Options*>(options.get())};
      }
      new_options.push_back(std::move(options));
    }
    if (!reader.at("state").isGenericDict())
      reader.fail("found {} at 'state', expected a dict", reader.at("state").tagKind());
    ska::flat_hash_map<void*, std::unique_ptr<OptimizerParamState>> new_states;
    for (const auto& entry : reader.at("state").toGenericDict()) {
      if (!entry.key().isInt() || !places.contains(entry.key().toInt()))
        reader.fail("found a key in 'state' that no group lists in 'params'; the file is damaged or was edited");
      const Place& place = places.at(entry.key().toInt());
      DictReader fields(entry.value(), "optimizer state of parameter " + std::to_string(entry.key().toInt()));
      auto state = std::make_unique<State>();
      if constexpr (std::is_same_v<State, SGDParamState>) {
        // Python notes parameters without momentum too; LibTorch expects a buffer wherever there is an entry.
        const auto* buffer = fields.find("momentum_buffer");
        if (!buffer || buffer->isNone()) continue;
      }
      std::map<std::string, at::Tensor> present;
      if (const auto there = optimizer.state().find(place.parameter->unsafeGetTensorImpl());
          in_place && there != optimizer.state().end())
        D::state(known_state<D>(optimizer, *there->second), *place.options, NoteState{present});
      D::state(*state, *place.options,
               ReadState{fields, *place.parameter, state_type<D>(*place.options, *place.parameter), present, fill});
      new_states[place.parameter->unsafeGetTensorImpl()] = std::move(state);
    }
    // Files of DeepSpeed have none of what has no elements.
    if (D::kStateFromStart)
      for (const auto& [index, place] : places) {
        void* const key = place.parameter->unsafeGetTensorImpl();
        const auto present = optimizer.state().find(key);
        if (place.parameter->numel() == 0 && present != optimizer.state().end() &&
            new_states.find(key) == new_states.end())
          new_states[key] = present->second->clone();
      }
    if (D::kStateFromStart && new_states.size() != places.size())
      reader.fail("found state for {} parameters, expected {}: {} has state from the start", new_states.size(),
                  places.size(), D::kName);

    for (auto& group : groups) before->options.push_back(group.options().clone());
    for (size_t g = 0; g < groups.size(); ++g) groups[g].set_options(std::move(new_options[g]));
    before->states = std::exchange(optimizer.state(), std::move(new_states));
  });
  return before;
}

}  // namespace

void load_optimizer_state_dict(Optimizer& optimizer, const c10::IValue& saved) {
  if (auto* own = dynamic_cast<OwnStateDict*>(&optimizer)) return own->load_state_dict(saved);
  take_state_dict(
      optimizer, saved, /*in_place=*/false,
      [](const at::Tensor&, const at::Tensor& to, const at::Tensor& values) { at::Tensor(to).copy_(values); });
}

std::function<void()> take_optimizer_state_dict(Optimizer& optimizer, const c10::IValue& saved, bool in_place,
                                                const FillState& fill) {
  return [&optimizer, before = take_state_dict(optimizer, saved, in_place, fill)] {
    for (size_t g = 0; g < before->options.size(); ++g)
      optimizer.param_groups()[g].set_options(std::move(before->options[g]));
    optimizer.state() = std::move(before->states);
  };
}

namespace {

/// Visits a state.
struct MapTensors {
  const std::function<at::Tensor(const at::Tensor&)>& f;
  void operator()(const char*, int64_t&) const {}
  void operator()(const char*, at::Tensor& tensor, bool) const {
    if (tensor.defined()) tensor = f(tensor);
  }
};

}  // namespace

void move_optimizer_state(Optimizer& optimizer, const at::Tensor& from, const at::Tensor& to,
                          const std::function<at::Tensor(const at::Tensor&)>& f) {
  auto& states = optimizer.state();
  const auto found = states.find(from.unsafeGetTensorImpl());
  if (found == states.end()) return;
  const auto& groups = optimizer.param_groups();
  const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const at::Tensor& parameter) { return parameter.is_same(from); });
  });
  const OptimizerOptions& options = group == groups.end() ? optimizer.defaults() : group->options();
  const bool known = with_description(optimizer, [&]<class D>() {
    const auto& typed = static_cast<const typename D::Options&>(options);
    // Made for what a parameter showed, which in mixed precision is an image of 16 bits: as a step on `to` makes it.
    const std::function<at::Tensor(const at::Tensor&)> moved =
        [&, type = state_type<D>(typed, to)](const at::Tensor& state) { return f(state).to(type); };
    D::state(known_state<D>(optimizer, *found->second), typed, MapTensors{moved});
  });
  if (!known) return;
  auto state = std::move(found->second);
  states.erase(found);
  states[to.unsafeGetTensorImpl()] = std::move(state);
}

std::vector<at::Tensor> states_of(Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> states;
  const std::function<at::Tensor(const at::Tensor&)> note = [&](const at::Tensor& tensor) {
    states.push_back(tensor);
    return tensor;
  };
  require_description(optimizer, "step", [&]<class D>() {
    for (const auto& parameter : parameters)
      if (const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl()); found != optimizer.state().end())
        D::state(known_state<D>(optimizer, *found->second), static_cast<typename D::Options&>(optimizer.defaults()),
                 MapTensors{note});
  });
  return states;
}

void map_optimizer_state(Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (auto* own = dynamic_cast<OwnStateDict*>(&optimizer)) return own->map_state(f);
  with_description(optimizer, [&]<class D>() {
    for (auto& [key, state] : optimizer.state())
      D::state(known_state<D>(optimizer, *state), static_cast<typename D::Options&>(optimizer.defaults()),
               MapTensors{f});
  });
}

}  // namespace accelerate::optim
