#include "accelerate/optim/adam8bit.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_map>

#include "codes/blockwise.hpp"
#include "optim/begin_step.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/paged_memory.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

using codes::Map;
using torch::optim::OptimizerParamGroup;

constexpr int64_t kBlock = 256;
/// Elements that are decoded at a time on the CPU: a whole number of blocks, and of the parts that LibTorch gives to
/// its threads; values in between stay in the cache.
constexpr int64_t kStretch = 131072;
/// The number of elements from which a parameter's states are paged: bitsandbytes' number.
constexpr int64_t kLeastPaged = 100000;
/// The name under which bitsandbytes hides its tensors from PyTorch.
constexpr const char* kWrapped = "__bnb_optimizer_quant_state__";

int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

/// The place of a state's values.
enum class MomentPlace : uint8_t { beside_parameter, host, file };

/// Zeros for the values of one parameter's states. @param pages  of Place::file
at::Tensor make_values(const at::Tensor& parameter, at::ScalarType dtype, MomentPlace place, const PagedMemory* pages) {
  if (place == MomentPlace::file) return pages->zeros(parameter.sizes(), dtype);
  return at::zeros(parameter.sizes(), at::TensorOptions().dtype(dtype).device(
                                          place == MomentPlace::host ? at::Device(at::kCPU) : parameter.device()));
}

/// One moment of the gradients, of all elements of a parameter.
struct Moment {
  Map map;
  at::Tensor values;  ///< uint8 codes, or fp32; of the parameter's shape
  at::Tensor absmax;  ///< undefined: `values` is fp32. On the parameter's device
  MomentPlace place;

  Moment(Map map, const at::Tensor& parameter, bool in_codes, MomentPlace place, const PagedMemory* pages)
      : map(map), values(make_values(parameter, in_codes ? at::kByte : at::kFloat, place, pages)), place(place) {
    if (in_codes)
      absmax = at::zeros({blocks_of(parameter.numel())}, parameter.options().requires_grad(false).dtype(at::kFloat));
  }
  Moment(Map map, at::Tensor values, at::Tensor absmax, MomentPlace place)
      : map(map), values(std::move(values)), absmax(std::move(absmax)), place(place) {}

  bool in_codes() const { return absmax.defined(); }
  /// A part of the values on the parameter's device: they themselves where they are there, else a copy.
  at::Tensor part(int64_t begin, int64_t end, const at::Device& device) const {
    return values.view(-1).slice(0, begin, end).to(device);
  }
  /// Writes back the values that part() gave, changed.
  void put(int64_t begin, int64_t end, const at::Tensor& part) const {
    if (part.device() != values.device()) values.view(-1).slice(0, begin, end).copy_(part);
  }
  codes::Blockwise range(int64_t begin, int64_t end, const at::Device& device) const {
    return {part(begin, end, device), absmax.slice(0, begin / kBlock, blocks_of(end))};
  }
};

struct Adam8bitState : torch::optim::OptimizerParamState {
  int64_t step = 0;
  Moment first, second;

  Adam8bitState(const at::Tensor& parameter, bool in_codes, MomentPlace place, const PagedMemory* pages)
      : first(Map::dynamic, parameter, in_codes, place, pages),
        second(Map::dynamic_unsigned, parameter, in_codes, place, pages) {}
  Adam8bitState(int64_t step, Moment first, Moment second)
      : step(step), first(std::move(first)), second(std::move(second)) {}
  std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<Adam8bitState>(*this); }

  void will_need() const {
    if (first.place == MomentPlace::file) PagedMemory::will_need(first.values), PagedMemory::will_need(second.values);
  }
  void let_go() const {
    if (first.place == MomentPlace::file) PagedMemory::let_go(first.values), PagedMemory::let_go(second.values);
  }
};

/// Others can be there, too: param_groups() is open to all.
const AdamW8bitOptions& options_of(const OptimizerParamGroup& group) {
  const torch::optim::OptimizerOptions& options = group.options();
  if (const auto* ours = dynamic_cast<const AdamW8bitOptions*>(&options)) return *ours;
  raise<ConfigError>(
      "AdamW8bit: found options of class {} in a parameter group, expected AdamW8bitOptions: those of other optimizers "
      "have other fields, or mean something else by them. Give the group AdamW8bitOptions, or none",
      c10::demangle(typeid(options).name()));
}

/// A group's options, with `defaults` in the place of those that it leaves at their default: as LibTorch merges those
/// of its own classes.
AdamW8bitOptions merged(const AdamW8bitOptions& given, const AdamW8bitOptions& defaults) {
  const AdamW8bitOptions unset;
  AdamW8bitOptions result = given;
  const auto inherit = [](auto& value, const auto& left_out, const auto& otherwise) {
    if (value == left_out) value = otherwise;
  };
  inherit(result.lr(), unset.lr(), defaults.lr());
  inherit(result.betas(), unset.betas(), defaults.betas());
  inherit(result.eps(), unset.eps(), defaults.eps());
  inherit(result.weight_decay(), unset.weight_decay(), defaults.weight_decay());
  inherit(result.min_8bit_size(), unset.min_8bit_size(), defaults.min_8bit_size());
  inherit(result.paged(), unset.paged(), defaults.paged());
  inherit(result.paging_folder(), unset.paging_folder(), defaults.paging_folder());
  return result;
}

/// Nothing, or what is out of range.
std::string problem_of(const AdamW8bitOptions& options) {
  const auto [beta1, beta2] = options.betas();
  std::string problem;
  const auto in = [&](const char* name, double value, double below) {
    if (problem.empty() && !(value >= 0 && value < below))
      problem = fmt::format("found {} {}, expected a number of at least 0{}", name, value,
                            std::isinf(below) ? "" : " and below 1");
  };
  constexpr double kAny = std::numeric_limits<double>::infinity();
  in("lr", options.lr(), kAny), in("eps", options.eps(), kAny), in("weight_decay", options.weight_decay(), kAny);
  in("betas[0]", beta1, 1), in("betas[1]", beta2, 1);
  in("min_8bit_size", static_cast<double>(options.min_8bit_size()), kAny);
  if (problem.empty() && !options.paged() && !options.paging_folder().empty())
    problem =
        fmt::format("found paging_folder '{}' without paged, expected paged(true) with it", options.paging_folder());
  return problem;
}

void check(const AdamW8bitOptions& options) {
  if (const auto problem = problem_of(options); !problem.empty()) raise<ConfigError>("AdamW8bit: {}", problem);
}

MomentPlace place_for(const at::Tensor& parameter, const AdamW8bitOptions& options) {
  if (!options.paged() || parameter.numel() < kLeastPaged) return MomentPlace::beside_parameter;
  return parameter.is_cpu() || !options.paging_folder().empty() ? MomentPlace::file : MomentPlace::host;
}

/// The numbers that a step takes from the options and the number of steps.
struct Rates {
  double beta1, beta2, eps, correction1, correction2, lr, decay;

  Rates(const AdamW8bitOptions& options, int64_t step)
      : beta1(std::get<0>(options.betas())),
        beta2(std::get<1>(options.betas())),
        eps(options.eps()),
        correction1(1 - std::pow(beta1, static_cast<double>(step))),
        correction2(std::sqrt(1 - std::pow(beta2, static_cast<double>(step)))),
        lr(options.lr()),
        decay(1 - options.lr() * options.weight_decay()) {}

  void advance(const at::Tensor& first, const at::Tensor& second, const at::Tensor& gradient) const {
    first.mul_(beta1).add_(gradient, 1 - beta1);
    second.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  }
};

// In the order of bitsandbytes' operations, which differs between the two, so that results are equal to the bit.

/// Steps on one slice, whose tensors are flat and, but for the moments, fp32.
void step_in_codes(const at::Tensor& parameter, const at::Tensor& gradient, const Moment& first, const Moment& second,
                   int64_t begin, int64_t end, const Rates& rates) {
  const auto device = parameter.device();
  const auto first_codes = first.range(begin, end, device), second_codes = second.range(begin, end, device);
  const auto m = codes::decode_blockwise(first_codes, first.map, kBlock);
  const auto v = codes::decode_blockwise(second_codes, second.map, kBlock);
  rates.advance(m, v, gradient);
  const auto divisor = v.sqrt().div_(rates.correction2).add_(rates.eps);
  if (rates.decay != 1) parameter.mul_(rates.decay);
  parameter.addcdiv_(m, divisor, -rates.lr / rates.correction1);
  codes::encode_blockwise(m, first.map, kBlock, codes::Search::nearest, first_codes);
  codes::encode_blockwise(v, second.map, kBlock, codes::Search::nearest, second_codes);
  first.put(begin, end, first_codes.codes), second.put(begin, end, second_codes.codes);
}

void step_in_fp32(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& first,
                  const at::Tensor& second, const Rates& rates) {
  rates.advance(first, second, gradient);
  if (rates.decay != 1) parameter.mul_(rates.decay);
  const auto update = first / second.sqrt().add_(rates.eps * rates.correction2);
  parameter.add_(update, -rates.lr * rates.correction2 / rates.correction1);
}

void step_parameter(const at::Tensor& whole, Adam8bitState& state, const AdamW8bitOptions& options) {
  const Rates rates(options, ++state.step);
  const auto parameter = whole.detach().contiguous().view(-1);
  const auto gradient = whole.grad().detach().contiguous().view(-1);
  const int64_t count = parameter.numel();
  const int64_t range = parameter.is_cpu() ? kStretch : std::max<int64_t>(count, 1);
  for (int64_t begin = 0; begin < count; begin += range) {
    const int64_t end = std::min(begin + range, count);
    const auto place = parameter.slice(0, begin, end);
    const auto p = place.to(at::kFloat), g = gradient.slice(0, begin, end).to(at::kFloat);
    if (state.first.in_codes()) {
      step_in_codes(p, g, state.first, state.second, begin, end, rates);
    } else {
      const auto m = state.first.part(begin, end, p.device()), v = state.second.part(begin, end, p.device());
      step_in_fp32(p, g, m, v, rates);
      state.first.put(begin, end, m), state.second.put(begin, end, v);
    }
    if (!p.is_same(place)) place.copy_(p);
  }
  if (!whole.is_contiguous()) whole.detach().copy_(parameter.view(whole.sizes()));
}

}  // namespace

struct AdamW8bit::Pages {
  /// Null where nothing lies in a file. @throws as SpillFile
  const PagedMemory* of(const AdamW8bitOptions& options) {
    if (!options.paged()) return nullptr;
    auto& memory = by_folder[options.paging_folder()];
    if (!memory) {
      const bool given = !options.paging_folder().empty();
      memory = std::make_unique<PagedMemory>(given ? std::filesystem::path(options.paging_folder())
                                                   : std::filesystem::temp_directory_path());
    }
    return memory.get();
  }
  std::map<std::string, std::unique_ptr<PagedMemory>> by_folder;
};

AdamW8bit::AdamW8bit(const std::vector<OptimizerParamGroup>& groups, const AdamW8bitOptions& defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::make_unique<AdamW8bitOptions>(defaults)),
      pages_(std::make_shared<Pages>()) {
  check(defaults);
  for (const auto& group : groups) add_param_group(group);
}

void AdamW8bit::add_param_group(const OptimizerParamGroup& group) {
  const auto& defaults = static_cast<const AdamW8bitOptions&>(this->defaults());  // the constructor's
  auto options =
      std::make_unique<AdamW8bitOptions>(group.has_options() ? merged(options_of(group), defaults) : defaults);
  check(*options);
  pages_->of(*options);
  for (const auto& parameter : group.params())
    if (const auto dtype = parameter.scalar_type(); dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16)
      raise<ConfigError>(
          "AdamW8bit: found a parameter of {} {}, expected fp32, fp16 or bf16: steps are computed in fp32. Use "
          "torch::optim::AdamW for it",
          c10::toString(dtype), parameter.sizes());
  Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  param_groups().back().set_options(std::move(options));
}

at::Tensor AdamW8bit::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss = begin_step(*this, "AdamW8bit", closure);
  struct Work {
    const at::Tensor* parameter;
    Adam8bitState* state;
    const AdamW8bitOptions* options;
  };
  std::vector<Work> work;
  for (auto& group : param_groups())
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const auto& options = options_of(group);
      auto& held = state()[parameter.unsafeGetTensorImpl()];
      if (!held) {
        const MomentPlace place = place_for(parameter, options);
        held = std::make_unique<Adam8bitState>(parameter, parameter.numel() >= options.min_8bit_size(), place,
                                               place == MomentPlace::file ? pages_->of(options) : nullptr);
      }
      work.push_back({&parameter, static_cast<Adam8bitState*>(held.get()), &options});
    }
  for (size_t i = 0; i < work.size(); ++i) {
    if (i + 1 < work.size()) work[i + 1].state->will_need();
    step_parameter(*work[i].parameter, *work[i].state, *work[i].options);
    work[i].state->let_go();
  }
  return loss;
}

c10::IValue AdamW8bit::state_dict() const {
  Dict states(c10::IntType::get(), c10::AnyType::get());
  std::vector<c10::IValue> groups;
  int64_t index = 0;
  for (const auto& group : param_groups()) {
    const auto& options = options_of(group);
    Dict entry = make_dict();
    entry.insert("lr", options.lr());
    const auto [beta1, beta2] = options.betas();
    entry.insert("betas", c10::ivalue::Tuple::create({c10::IValue(beta1), c10::IValue(beta2)}));
    entry.insert("eps", options.eps());
    entry.insert("weight_decay", options.weight_decay());
    entry.insert("alpha", 0.0);  // of AdEMAMix, with which it shares its class
    entry.insert("t_alpha", c10::IValue());
    entry.insert("t_beta3", c10::IValue());
    std::vector<int64_t> indices;
    for (const auto& parameter : group.params()) {
      if (const auto found = state().find(parameter.unsafeGetTensorImpl()); found != state().end()) {
        const auto& held = static_cast<const Adam8bitState&>(*found->second);
        Dict tensors = make_dict();
        for (const auto& [moment, number] : {std::pair(&held.first, "1"), std::pair(&held.second, "2")}) {
          tensors.insert(std::string("state") + number, moment->values);
          if (!moment->in_codes()) continue;
          tensors.insert(std::string("qmap") + number, codes::values_of(moment->map));
          tensors.insert(std::string("absmax") + number, moment->absmax);
        }
        Dict fields = make_dict();
        fields.insert("step", held.step);
        fields.insert(kWrapped, tensors);
        states.insert(index, fields);
      }
      indices.push_back(index++);
    }
    entry.insert("params", make_list(indices));
    groups.emplace_back(entry);
  }
  Dict result = make_dict();
  result.insert("state", states);
  result.insert("param_groups", make_list(groups));
  return result;
}

namespace {

const at::Tensor& tensor_at(DictReader& fields, const std::string& name) {
  const auto& value = fields.at(name);
  if (!value.isTensor()) fields.fail("found {} at '{}', expected a tensor", value.tagKind(), name);
  return value.toTensor();
}

Moment read_moment(DictReader& fields, Map map, const std::string& number, const at::Tensor& parameter,
                   MomentPlace place, const PagedMemory* pages) {
  const auto owned = [&](const at::Tensor& saved) {
    return at::empty(saved.sizes(), saved.options().device(parameter.device())).copy_(saved);
  };
  const auto owned_values = [&](const at::Tensor& saved) {
    const auto copy = make_values(parameter, saved.scalar_type(), place, pages).copy_(saved);
    if (place == MomentPlace::file) PagedMemory::let_go(copy);
    return copy;
  };
  const auto& values = tensor_at(fields, "state" + number);
  if (values.sizes() != parameter.sizes())
    fields.fail(
        "found 'state{}' of shape {}, expected {} like its parameter; the state may belong to another model or to "
        "parameters in another order",
        number, values.sizes(), parameter.sizes());
  if (values.scalar_type() == at::kFloat) return {map, owned_values(values), at::Tensor(), place};
  if (values.scalar_type() != at::kByte)
    fields.fail("found 'state{}' of {}, expected codes (uint8) or fp32", number, c10::toString(values.scalar_type()));
  const auto& absmax = tensor_at(fields, "absmax" + number);
  const int64_t blocks = blocks_of(parameter.numel());
  if (absmax.scalar_type() != at::kFloat || absmax.dim() != 1 || absmax.size(0) != blocks)
    fields.fail(
        "found 'absmax{}' of {} {}, expected fp32 [{}]: a scale per {} elements of {}; blocks of another size (2048 "
        "before bitsandbytes 0.44) can't be read",
        number, c10::toString(absmax.scalar_type()), absmax.sizes(), blocks, kBlock, parameter.numel());
  const auto& known = codes::values_of(map);
  if (const auto& qmap = tensor_at(fields, "qmap" + number);
      qmap.sizes() != known.sizes() || !at::allclose(qmap.to(at::kCPU, at::kFloat), known, 1e-5, 1e-9))
    fields.fail("found another 'qmap{}' than the dynamic map, expected that one; nothing else is understood", number);
  return {map, owned_values(values), owned(absmax), place};
}

std::unique_ptr<Adam8bitState> read_state(const c10::IValue& saved, const at::Tensor& parameter, int64_t index,
                                          MomentPlace place, const PagedMemory* pages) {
  const auto where = "optimizer state of parameter " + std::to_string(index);
  DictReader outer(saved, where);
  const auto* wrapped = outer.find(kWrapped);
  DictReader fields(wrapped ? *wrapped : saved, where);
  for (const auto& [name, option] : std::initializer_list<std::pair<const char*, const char*>>{
           {"max1", "block_wise=False"}, {"gnorm_vec", "percentile_clipping"}, {"unorm_vec", "max_unorm"}})
    if (fields.find(name))
      fields.fail(
          "found '{}', which bitsandbytes keeps with {}, expected the state of AdamW8bit with its defaults; that "
          "option is not offered here",
          name, option);
  auto first = read_moment(fields, Map::dynamic, "1", parameter, place, pages);
  auto second = read_moment(fields, Map::dynamic_unsigned, "2", parameter, place, pages);
  if (first.in_codes() != second.in_codes())
    fields.fail("found 'state1' and 'state2' of different kinds, expected both as codes or both in fp32");
  constexpr int64_t kMostSteps = int64_t{1} << 53;  // of which a double, as files may have it, knows each
  const double step = outer.number("step");
  if (!(step >= 0 && step <= static_cast<double>(kMostSteps)) || step != std::floor(step))
    outer.fail("found {} at 'step', expected how many steps were made, 0 or more; the file is damaged or was edited",
               step);
  return std::make_unique<Adam8bitState>(static_cast<int64_t>(step), std::move(first), std::move(second));
}

}  // namespace

void AdamW8bit::load_state_dict(const c10::IValue& saved) {
  DictReader reader(saved, "state of AdamW8bit");
  const auto saved_groups = reader.items("param_groups");
  if (saved_groups.size() != param_groups().size())
    reader.fail(
        "found {} parameter groups, expected {}; build the optimizer with the groups it had when the state was saved",
        saved_groups.size(), param_groups().size());
  // Everything is read and checked first, so that a bad file changes nothing.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> new_options;
  std::unordered_map<int64_t, std::pair<const at::Tensor*, const AdamW8bitOptions*>> parameters;
  for (size_t g = 0; g < saved_groups.size(); ++g) {
    DictReader group(saved_groups[g], "state of AdamW8bit, parameter group " + std::to_string(g));
    auto options = options_of(param_groups()[g]);
    const auto betas = group.numbers("betas");
    if (betas.size() != 2) group.fail("found {} numbers at 'betas', expected 2", betas.size());
    options.lr(group.number("lr")).betas({betas[0], betas[1]}).eps(group.number("eps"));
    options.weight_decay(group.number("weight_decay"));
    if (const auto problem = problem_of(options); !problem.empty())
      group.fail("{}, as for an optimizer that is made; the file is damaged or was edited", problem);
    const auto indices = group.items("params");
    const auto& own = param_groups()[g].params();
    if (indices.size() != own.size())
      group.fail("found {} parameters, expected {}; the model has probably changed", indices.size(), own.size());
    for (size_t i = 0; i < own.size(); ++i) {
      if (!indices[i].isInt()) group.fail("found {} in 'params', expected whole numbers", indices[i].tagKind());
      parameters[indices[i].toInt()] = {&own[i], &options_of(param_groups()[g])};
    }
    new_options.push_back(std::make_unique<AdamW8bitOptions>(options));
  }
  if (!reader.at("state").isGenericDict())
    reader.fail("found {} at 'state', expected a dict", reader.at("state").tagKind());
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> states;
  for (const auto& entry : reader.at("state").toGenericDict()) {
    if (!entry.key().isInt() || !parameters.contains(entry.key().toInt()))
      reader.fail("found a key in 'state' that no group lists in 'params'; the file is damaged or was edited");
    const auto& [parameter, options] = parameters.at(entry.key().toInt());
    const MomentPlace place = place_for(*parameter, *options);
    states[parameter->unsafeGetTensorImpl()] = read_state(entry.value(), *parameter, entry.key().toInt(), place,
                                                          place == MomentPlace::file ? pages_->of(*options) : nullptr);
  }
  for (size_t g = 0; g < new_options.size(); ++g) param_groups()[g].set_options(std::move(new_options[g]));
  state() = std::move(states);
}

void AdamW8bit::map_state(const std::function<at::Tensor(const at::Tensor&)>& f) {
  for (auto& [parameter, held] : state())
    for (Moment* moment : {&static_cast<Adam8bitState&>(*held).first, &static_cast<Adam8bitState&>(*held).second}) {
      // Paged values are where they belong.
      if (moment->place == MomentPlace::beside_parameter) moment->values = f(moment->values);
      if (moment->in_codes()) moment->absmax = f(moment->absmax);
    }
}

void AdamW8bit::save(torch::serialize::OutputArchive& archive) const {
  static_cast<void>(archive);
  throw ConfigError(
      "torch::save: AdamW8bit has no layout in LibTorch's archives; write state_dict() by accelerate::checkpointing, "
      "or let Accelerator::save_state do it");
}
void AdamW8bit::load(torch::serialize::InputArchive& archive) {
  static_cast<void>(archive);
  throw ConfigError(
      "torch::load: AdamW8bit has no layout in LibTorch's archives; read by load_state_dict(), or let "
      "Accelerator::load_state do it");
}

}  // namespace accelerate::optim
