#include "optim/optimizer_state.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>
#include <unordered_map>

#include "optim/ivalue_access.hpp"

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
  template <class V> static void state(State& s, const Options&, V&& v) {
    v("momentum_buffer", s.momentum_buffer(), false);
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
         matches.template operator()<DescribeRMSprop>();
}

template <class F> void require_description(Optimizer& optimizer, const char* operation, F&& f) {
  if (!with_description(optimizer, f))
    throw ConfigError(std::string(operation) + ": found an optimizer of class " + typeid(optimizer).name() +
                      ", expected SGD, Adam, AdamW, Adagrad or RMSprop; others (LBFGS among them) have no state layout "
                      "in common with Python. "
                      "Save it by torch::save in a custom checkpoint object instead.");
}

struct WriteOptions {
  Dict& dict;
  void operator()(const char* name, double value) const { dict.insert(name, value); }
  void operator()(const char* name, bool value) const { dict.insert(name, value); }
  void operator()(const char* name, const std::tuple<double, double>& value) const {
    dict.insert(name, c10::ivalue::Tuple::create({c10::IValue(std::get<0>(value)), c10::IValue(std::get<1>(value))}));
  }
};

struct ReadOptions {
  DictReader& reader;
  void operator()(const char* name, double& value) const { value = reader.number(name); }
  void operator()(const char* name, bool& value) const { value = reader.boolean(name); }
  void operator()(const char* name, std::tuple<double, double>& value) const {
    const auto pair = reader.numbers(name);
    if (pair.size() != 2)
      reader.fail("found " + std::to_string(pair.size()) + " numbers at '" + name + "', expected 2");
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

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (const int64_t size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

struct ReadState {
  DictReader& reader;
  const at::Tensor& parameter;
  void operator()(const char* name, int64_t& step) const { step = reader.integer(name); }
  void operator()(const char* name, at::Tensor& tensor, bool required) const {
    const auto* value = reader.find(name);
    if (!value || value->isNone()) {
      if (required) reader.fail(std::string("found no tensor '") + name + "', which these options need");
      return;
    }
    if (!value->isTensor()) reader.fail("found " + value->tagKind() + " at '" + name + "', expected a tensor");
    const auto& saved = value->toTensor();
    if (saved.sizes() != parameter.sizes())
      reader.fail(std::string("found '") + name + "' of shape " + shape_text(saved) + ", expected " +
                  shape_text(parameter) +
                  " like its parameter; the state may belong to another model or to parameters in another order");
    // In the parameter's own memory layout, dtype and place, as a step would have made it.
    tensor = at::empty_like(parameter, parameter.options().requires_grad(false)).copy_(saved);
  }
};

/// Options that only Python has: a value that asks for other arithmetic than ours is an error; the rest are hints about
/// speed.
template <class D> void check_fixed(DictReader& reader) {
  for (const auto& [name, ours] : D::fixed()) {
    const auto* found = reader.find(name);
    const std::string key = name;
    if (!found || !found->isBool() || !ours.isBool() || (key != "maximize" && key != "decoupled_weight_decay"))
      continue;
    if (found->toBool() != ours.toBool())
      reader.fail(std::string("found '") + name + "' " + (found->toBool() ? "true" : "false") + ", expected " +
                  (ours.toBool() ? "true" : "false") + ": LibTorch's " + D::kName +
                  " does not compute that. Use the class that does (decoupled_weight_decay is AdamW), or negate the "
                  "loss to maximise");
  }
}

}  // namespace

c10::IValue optimizer_state_dict(Optimizer& optimizer) {
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
          D::state(static_cast<typename D::State&>(*found->second), options, WriteState{state});
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

void load_optimizer_state_dict(Optimizer& optimizer, const c10::IValue& saved) {
  require_description(optimizer, "optimizer load_state_dict", [&]<class D>() {
    using Options = typename D::Options;
    using State = typename D::State;
    DictReader reader(saved, "optimizer state");
    auto& groups = optimizer.param_groups();
    const auto saved_groups = reader.items("param_groups");
    if (saved_groups.size() != groups.size())
      reader.fail("found " + std::to_string(saved_groups.size()) + " parameter groups, expected " +
                  std::to_string(groups.size()) +
                  "; build the optimizer with the groups it had when the state was saved");

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
      D::options(static_cast<Options&>(*options), ReadOptions{group});
      check_fixed<D>(group);
      const auto indices = group.items("params");
      const auto& parameters = groups[g].params();
      if (indices.size() != parameters.size())
        group.fail("found " + std::to_string(indices.size()) + " parameters, expected " +
                   std::to_string(parameters.size()) + "; the model has probably changed");
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!indices[i].isInt()) group.fail("found " + indices[i].tagKind() + " in 'params', expected whole numbers");
        places[indices[i].toInt()] = {&parameters[i], static_cast<const Options*>(options.get())};
      }
      new_options.push_back(std::move(options));
    }
    if (!reader.at("state").isGenericDict())
      reader.fail("found " + reader.at("state").tagKind() + " at 'state', expected a dict");
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
      D::state(*state, *place.options, ReadState{fields, *place.parameter});
      new_states[place.parameter->unsafeGetTensorImpl()] = std::move(state);
    }
    if (D::kStateFromStart && new_states.size() != places.size())
      reader.fail("found state for " + std::to_string(new_states.size()) + " parameters, expected " +
                  std::to_string(places.size()) + ": " + D::kName + " has state from the start");

    for (size_t g = 0; g < groups.size(); ++g) groups[g].set_options(std::move(new_options[g]));
    optimizer.state() = std::move(new_states);
  });
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
  const bool known = with_description(optimizer, [&]<class D>() {
    D::state(static_cast<typename D::State&>(*found->second), static_cast<typename D::Options&>(optimizer.defaults()),
             MapTensors{f});
  });
  if (!known) return;
  auto state = std::move(found->second);
  states.erase(found);
  states[to.unsafeGetTensorImpl()] = std::move(state);
}

void map_optimizer_state(Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor&)>& f) {
  with_description(optimizer, [&]<class D>() {
    for (auto& [key, state] : optimizer.state())
      D::state(static_cast<typename D::State&>(*state), static_cast<typename D::Options&>(optimizer.defaults()),
               MapTensors{f});
  });
}

}  // namespace accelerate::optim
