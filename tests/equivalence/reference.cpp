#include "reference.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "accelerate/optim/own_state_dict.hpp"
#include "layouts.hpp"
#include "models.hpp"
#include "optimizers.hpp"
#include "writes.hpp"

namespace equivalence {
namespace {

/// Autocast as LibTorch has it, for one forward.
class Autocast {
 public:
  explicit Autocast(const std::string& precision) : on_(precision != "no") {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, precision == "bf16" ? at::kBFloat16 : at::kHalf);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool on_;
};

/// One rank's tensors. Gradients of `net` are averages (where nothing is sharded: with what this rank has added since);
/// a sharded one computes with a copy in the dtype for that, whose gradients are this rank's own.
struct Replica {
  std::shared_ptr<Net> net, computing;
  std::vector<at::Tensor> parameters, computed;  ///< theirs, each once; the same where nothing is sharded
  std::vector<at::Tensor> frozen;                ///< of `parameters`, when they were prepared
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  std::vector<at::Tensor> losses;  ///< of forwards that a backward may go through
  MovingAverage average;
  std::map<torch::optim::Optimizer*, bool> overflows;  ///< of those whose gradients were clipped since the last loss
};

std::optional<at::ScalarType> type_named(const std::string& name) {
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  if (name == "f32") return at::kFloat;
  return std::nullopt;
}

at::Tensor rounded(const at::Tensor& tensor, const std::optional<at::ScalarType>& type) {
  return type && tensor.is_floating_point() ? tensor.to(*type).to(tensor.scalar_type()) : tensor;
}

/// Whole numbers up to `most` times a scale of 256 neighbours in bf16, of what has two dimensions or more; a block with
/// a number that is not finite is NaN.
at::Tensor as_codes(const at::Tensor& tensor, double most) {
  if (tensor.dim() < 2 || !tensor.is_floating_point() || tensor.numel() == 0) return tensor;
  constexpr int64_t kBlock = 256;
  const at::Tensor flat = tensor.detach().to(at::kFloat).flatten();
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& block : flat.split(kBlock)) {
    const auto scale = (block.abs().max() / most).to(at::kBFloat16).to(at::kFloat);
    const bool finite = block.isfinite().all().item<bool>();
    blocks.push_back(!finite                         ? at::full_like(block, std::nan(""))
                     : scale.item<float>() < 1.2e-38 ? at::zeros_like(block)
                                                     : (block * (1 / scale)).round().clamp(-most, most) * scale);
  }
  return at::cat(blocks).view(tensor.sizes()).to(tensor.scalar_type());
}

bool all_finite(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params())
      if (parameter.grad().defined() && !parameter.grad().isfinite().all().item<bool>()) return false;
  return true;
}

/// LibTorch has none in C++. Gradients are kept divided by it, so only when it changes matters.
struct Scale {
  Scale(const Layout& layout, const std::string& precision)
      : value(precision == "fp16" ? 1024 : 1),
        changes(precision == "fp16"),
        of_deepspeed(layout.whole_in_16_bits),
        left(of_deepspeed ? of_deepspeed->hysteresis : 0) {}
  double value;
  bool changes;
  std::optional<WholeIn16Bits> of_deepspeed;
  int64_t left;                             ///< overflows until it is halved: DeepSpeed's
  int64_t updates = 0, last_overflow = -1;  ///< its number
  int64_t successes = 0;                    ///< PyTorch's
  bool stepped = false, overflow = false;   ///< since the last loss

  void update() {
    const bool counts = std::exchange(stepped, false) && changes, overflowed = std::exchange(overflow, false);
    if (!counts) return;
    if (of_deepspeed) return update_as_deepspeed(overflowed);
    if (overflowed) value *= 0.5, successes = 0;
    else if (++successes == 2) value *= 2, successes = 0;
  }
  /// DeepSpeed 0.19.8, DynamicLossScaler.update_scale.
  void update_as_deepspeed(bool overflowed) {
    if (overflowed) {
      if (left > 1) --left;
      else value = std::max(value / 2, static_cast<double>(of_deepspeed->smallest_scale));
      last_overflow = updates;
    } else {
      if (of_deepspeed->consecutive_hysteresis) left = of_deepspeed->hysteresis;
      const int64_t good = updates - last_overflow - 1;
      if (good > 0 && good % of_deepspeed->window == 0) value *= 2, left = of_deepspeed->hysteresis;
    }
    ++updates;
  }
  /// An overflow is an error.
  bool is_at_its_end() const {
    return changes && of_deepspeed && left == 1 && value == static_cast<double>(of_deepspeed->smallest_scale);
  }
};

double norm_of(const std::vector<at::Tensor>& parameters, double kind) {
  std::vector<at::Tensor> elements{at::zeros({1}, at::kDouble)};
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) elements.push_back(parameter.grad().abs().to(at::kDouble).flatten());
  return at::linalg_vector_norm(at::cat(elements), kind).item<double>();
}

class Reference final : public Machine {
 public:
  Reference(const Case& what, Observe observe, double blur, uint64_t seed)
      : case_(what),
        layout_(&layout_named(what["layout"])),
        observe_(std::move(observe)),
        blur_(blur),
        random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    for (int64_t rank = 0; rank < what.integer("ranks"); ++rank) {
      Replica replica;
      replica.net = make_model(what["model"], static_cast<uint64_t>(what.integer("seed")), what["dtype"]);
      replica.parameters = tensors_of(*replica.net);
      begin_in_16_bits(replica);
      share_out(replica);
      replica.optimizers = new_optimizers(replica);
      replicas_.push_back(std::move(replica));
    }
  }

  void forget_graphs() override {
    for (auto& replica : replicas_) replica.losses.clear();
  }

  void run(const Operation& operation) override {
    carry_out(operation);
    for (auto& replica : replicas_) keep_frozen(replica);
  }

 private:
  void carry_out(const Operation& operation) {
    const auto& verb = operation.verb;
    if (verb == "accumulate") {
      gate_ = ++steps_ % case_.integer("accumulation") == 0;
      scopes_.push_back(gate_);
    } else if (verb == "no_sync") {
      scopes_.push_back(false);
    } else if (verb == "end") {
      scopes_.pop_back();
    } else if (verb == "forward") {
      forward(operation);
    } else if (verb == "backward") {
      backward(operation);
    } else if (verb == "step") {
      step(operation);
    } else if (verb == "bare_step") {
      for (auto& replica : replicas_)
        for (auto& optimizer : replica.optimizers) optimizer->step();
    } else if (verb == "zero_grad") {
      if (!gate_) return;
      for (auto& replica : replicas_)
        each_optimizer(replica, operation,
                       [&](auto& optimizer) { zero_grad(replica, optimizer, operation.integer("zeros") == 0); });
    } else if (verb == "bare_zero_grad") {
      for (auto& replica : replicas_)
        for (auto& optimizer : replica.optimizers) optimizer->zero_grad();
    } else if (verb == "module_zero_grad") {
      for (auto& replica : replicas_) {
        replica.net->zero_grad();
        replica.computing->zero_grad();
      }
    } else if (verb == "grad_none") {
      for (auto& replica : replicas_)
        for (auto* all : {&replica.parameters, &replica.computed})
          for (auto& parameter : *all) parameter.mutable_grad().reset();
    } else if (verb == "clip_norm") {
      clip_norm(operation);
    } else if (verb == "clip_value") {
      settle();
      at::NoGradGuard no_grad;
      look_for_overflow(operation);
      for (auto& replica : replicas_)
        for (auto& parameter : replica.parameters)
          if (parameter.grad().defined() && !parameter.is_complex())
            parameter.mutable_grad().clamp_(-operation.number("limit"), operation.number("limit"));
    } else if (verb == "torch_clip") {
      each([&](int64_t rank, Replica& replica) {
        const double norm = torch::nn::utils::clip_grad_norm_(replica.net->parameters(), operation.number("limit"));
        see(rank, "norm", at::scalar_tensor(norm, at::kDouble));
      });
    } else if (verb == "read_grad") {
      each([&](int64_t rank, Replica& replica) {
        for (const auto& [name, parameter] : parameters_of(*replica.net))
          if (parameter.grad().defined()) see(rank, "grad." + name, parameter.grad());
      });
    } else if (verb == "hand_step") {
      for (auto& replica : replicas_) hand_step(replica.parameters, images(replica), operation.number("rate"));
    } else if (verb == "scale_grad") {
      for (auto& replica : replicas_) scale_gradients(replica.parameters, operation);
    } else if (verb == "freeze" || verb == "unfreeze") {
      for (auto& replica : replicas_) {
        set_trained(replica.parameters, operation);
        set_trained(replica.computed, operation);
      }
    } else if (verb == "add_group") {
      for (auto& replica : replicas_) {
        const auto count = replica.parameters.size(), held = count - static_cast<size_t>(case_.integer("withheld"));
        replica.optimizers[0]->add_param_group(std::vector<at::Tensor>(
            replica.parameters.begin() + static_cast<std::ptrdiff_t>(held), replica.parameters.end()));
        if (dynamic_cast<torch::optim::Adagrad*>(replica.optimizers[0].get()) == nullptr) continue;
        // LibTorch's makes states when it is made, and its step fails on what came later.
        for (size_t p = held; p < count; ++p) {
          auto state = std::make_unique<torch::optim::AdagradParamState>();
          state->step(0);
          state->sum(at::zeros_like(replica.parameters[p]));
          replica.optimizers[0]->state()[replica.parameters[p].unsafeGetTensorImpl()] = std::move(state);
        }
      }
    } else if (verb == "save" || verb == "save_model") {
      save(verb + operation.word("name", "a"), verb == "save");
    } else if (verb == "load" || verb == "load_model") {
      load((verb == "load" ? "save" : "save_model") + operation.word("name", "a"));
    } else if (verb == "reload") {
      save("reload", true);
      gate_ = true;
      layout_ = &layout_named(operation.word("layout", layout_->name));
      buffers_may_differ_ = true;
      const auto fresh = tensors_of(*make_model(case_["model"], 1, case_["dtype"]));
      for (auto& replica : replicas_) {
        for (size_t i = 0; i < fresh.size(); ++i) replica.parameters[i].set_requires_grad(fresh[i].requires_grad());
        share_out(replica);
        if (!prepares_optimizers()) replica.optimizers = new_optimizers(replica);
      }
      load("reload");
    } else if (verb == "join") {
      join(operation);
    } else if (verb == "local_sgd") {
      local_sgd(operation);
    } else if (verb == "leave_out") {
      leave_out(operation);
    } else if (verb == "failed_backward") {
      // A loss that is scaled begins a step, whatever becomes of it.
      if (operation.integer("bare") == 0) scale_.update();
      share_buffers(true);
      each([&](int64_t rank, Replica& replica) {
        replica.computing->part = 0;
        see(rank, "output", call(replica, batch(replica, operation, rank)));
        for (auto& optimizer : replica.optimizers) zero_grad(replica, *optimizer, true);
      });
    } else if (verb == "autograd_grad") {
      autograd_grad(operation);
    } else if (verb == "write" || verb == "summon") {
      for (auto& replica : replicas_)
        write_parameters(replica.parameters, verb == "write" ? images(replica) : replica.parameters, operation);
    } else if (verb == "ema") {
      for (auto& replica : replicas_) replica.average.update(images(replica), operation.number("decay"));
    } else if (verb == "ema_swap") {
      for (auto& replica : replicas_) replica.average.swap(replica.parameters, images(replica));
    } else if (verb == "set_rate") {
      each([&](int64_t rank, Replica& replica) {
        each_optimizer(replica, operation, [&](auto& optimizer) {
          for (auto& group : optimizer.param_groups())
            group.options().set_lr(group.options().get_lr() * operation.number("factor"));
          see(rank, "rate", at::scalar_tensor(optimizer.param_groups()[0].options().get_lr(), at::kDouble));
        });
      });
    } else if (verb == "read") {
      each([&](int64_t rank, Replica& replica) {
        const auto shown = images(replica);
        size_t i = 0;
        for (const auto& [name, parameter] : parameters_of(*replica.net)) see(rank, "param." + name, shown[i++]);
        for (const auto& item : replica.net->named_buffers()) see(rank, "buffer." + item.key(), item.value());
      });
    } else if (verb == "state_dict") {
      each([&](int64_t rank, Replica& replica) {
        if (layout_->sharded && rank > 0) return;
        for (const auto& item : replica.net->named_parameters()) see(rank, "state." + item.key(), item.value());
        for (const auto& item : replica.net->named_buffers()) see(rank, "state." + item.key(), item.value());
      });
    } else if (verb == "evaluate") {
      evaluate(operation);
    } else {
      throw std::runtime_error("reference: unknown operation " + verb);
    }
  }

  bool prepares_optimizers() const { return case_["prepare"] == "together" || case_["prepare"] == "late_prepared"; }
  std::vector<std::unique_ptr<torch::optim::Optimizer>> new_optimizers(const Replica& replica) const {
    const bool precise = case_["dtype"] == "f64" && case_["precision"] == "no";
    auto trained = replica.parameters;
    trained.resize(trained.size() - static_cast<size_t>(case_.integer("withheld")));
    const std::string& names = case_["optimizer"];
    return make_optimizers(names == "host_adam" ? "host_adam_written_out" : names, trained, std::stod(case_["rate"]),
                           precise);
  }
  template <class F> void each(F&& f) {
    for (size_t rank = 0; rank < replicas_.size(); ++rank) f(static_cast<int64_t>(rank), replicas_[rank]);
  }
  template <class F> static void each_optimizer(Replica& replica, const Operation& operation, F&& f) {
    const std::string which = operation.word("which", "all");
    const auto count = static_cast<int64_t>(replica.optimizers.size());
    for (int64_t i = 0; i < count; ++i)
      if (which == "all" || std::stoll(which) % count == i) f(*replica.optimizers[static_cast<size_t>(i)]);
  }
  void see(int64_t rank, const std::string& name, const at::Tensor& value) {
    observe_(rank, {at, name, observable(value)});
  }

  /// Whether a backward averages over the ranks.
  bool synchronises() const {
    for (const bool scope : scopes_)
      if (!scope) return false;
    return true;
  }

  void copy_buffers(size_t from) {
    at::NoGradGuard no_grad;
    const auto first = replicas_[from].net->named_buffers();
    for (auto& replica : replicas_)
      for (auto& item : replica.net->named_buffers()) item.value().variable_data().copy_(first[item.key()]);
  }
  void share_buffers(bool training) {
    // As PyTorch: a forward takes rank 0's buffers if the one before it averaged.
    if (layout_->buffers_from_rank0 && buffers_may_differ_) copy_buffers(0);
    buffers_may_differ_ = training && synchronises();
    announced_ |= buffers_may_differ_;
  }

  std::optional<at::ScalarType> compute_type() const {
    return type_named(layout_->param_dtype.empty() ? case_["precision"] : layout_->param_dtype);
  }
  /// DeepSpeed's masters begin with the rounded values, or stay in 16 bits.
  void begin_in_16_bits(Replica& replica) const {
    at::NoGradGuard no_grad;
    const auto type = compute_type();
    if (!layout_->whole_in_16_bits || !type) return;
    for (auto& parameter : replica.parameters) {
      if (!layout_->whole_in_16_bits->masters && parameter.requires_grad()) parameter.set_data(parameter.to(*type));
      else parameter.copy_(rounded(parameter, type));
    }
  }

  /// Makes the copy that a sharded model computes with.
  void share_out(Replica& replica) {
    replica.frozen.clear();
    for (const auto& parameter : replica.parameters)
      if (!parameter.requires_grad()) replica.frozen.push_back(parameter);
    keep_frozen(replica);
    replica.computing = replica.net;
    replica.computed = replica.parameters;
    if (!layout_->sharded) return;
    replica.computing = make_model(case_["model"], 1, case_["dtype"]);
    replica.computed = tensors_of(*replica.computing);
    at::NoGradGuard no_grad;
    const auto type = compute_type();
    const bool keeps_norms = layout_->converts_buffers && !layout_->whole_in_16_bits;
    if (type)
      for (const auto& [name, parameter] : parameters_of(*replica.computing))
        if (parameter.is_floating_point() && !(keeps_norms && name.starts_with("norm")))
          at::Tensor(parameter).set_data(parameter.to(*type));
    auto buffers = replica.computing->named_buffers();
    for (auto& item : replica.net->named_buffers()) {
      if (type && layout_->converts_buffers && item.value().is_floating_point() && !item.key().starts_with("norm"))
        item.value().set_data(item.value().to(*type));
      buffers[item.key()].set_data(item.value());
    }
  }
  /// Whatever is written to them.
  void keep_frozen(Replica& replica) const {
    at::NoGradGuard no_grad;
    if (layout_->frozen_as_codes)
      for (auto& parameter : replica.frozen) parameter.copy_(as_codes(parameter, 127));
  }
  /// Only where something has changed: graphs hold the old values.
  void refresh(Replica& replica) const {
    if (!layout_->sharded) return;
    at::NoGradGuard no_grad;
    const auto values = images(replica);
    for (size_t i = 0; i < replica.computed.size(); ++i)
      if (!at::allclose(replica.computed[i], values[i], 0, 0, /*equal_nan=*/true)) replica.computed[i].copy_(values[i]);
  }
  /// The values that are computed with, and that programs read.
  std::vector<at::Tensor> images(const Replica& replica) const {
    if (!layout_->sharded) return replica.parameters;
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < replica.parameters.size(); ++i) {
      const at::Tensor& parameter = replica.parameters[i];
      // Parameters of four numbers stay whole by ZeRO's stages, see layouts.cpp.
      const bool as_code = layout_->weights_as_codes && parameter.numel() > (layout_->own_limit ? 4 : 0);
      values.push_back((as_code ? as_codes(parameter, 127) : parameter).detach().to(replica.computed[i].scalar_type()));
    }
    return values;
  }

  at::Tensor call(Replica& replica, at::Tensor batch) {
    refresh(replica);
    const auto type = compute_type();
    const bool casts_around = !layout_->whole_in_16_bits;
    if (batch.is_floating_point())
      batch = blurred(batch);  // where an activation is all but flat, its slope is rounding
    if (layout_->sharded && type && batch.is_floating_point()) batch = batch.to(*type);
    const Autocast autocast(casts_around ? case_["precision"] : "no");
    at::Tensor output = replica.computing->forward(batch);
    // Terms of a gradient that cancel leave their roundings.
    if (output.is_floating_point()) output = blurred(output);
    return case_["precision"] == "no" || !casts_around || !output.is_floating_point() ? output : output.to(at::kFloat);
  }

  at::Tensor batch(const Replica& replica, const Operation& operation, int64_t rank) const {
    return batch_of(*replica.net, operation.integer("rows", 2) + rank * operation.integer("ragged"),
                    batch_seed(operation.integer("data"), rank));
  }

  void forward(const Operation& operation) {
    share_buffers(true);
    each([&](int64_t rank, Replica& replica) {
      replica.computing->part =
          part_of(operation, rank, layout_->ranks_of_replica(static_cast<int64_t>(replicas_.size())));
      const at::Tensor input = batch(replica, operation, rank), output = call(replica, input);
      see(rank, "output", output);
      replica.losses.push_back(loss_of(*replica.net, output, input));
    });
  }

  /// The mean over ranks of what never comes to grad().
  void autograd_grad(const Operation& operation) {
    share_buffers(true);
    std::vector<std::vector<at::Tensor>> of_ranks;
    each([&](int64_t rank, Replica& replica) {
      replica.computing->part = 0;
      const at::Tensor input = batch(replica, operation, rank), output = call(replica, input);
      see(rank, "output", output);
      of_ranks.push_back(captured_gradients(loss_of(*replica.net, output, input), replica.computed));
    });
    const auto named = parameters_of(*replicas_[0].net);
    for (size_t p = 0; p < named.size(); ++p) {
      std::vector<at::Tensor> sent;
      for (const auto& found : of_ranks)
        if (found[p].defined()) sent.push_back(blurred(found[p]));
      if (sent.empty()) continue;
      const at::Tensor mean = mean_of(sent, of_ranks.size()).to(replicas_[0].computed[p].scalar_type());
      each([&](int64_t rank, Replica&) { see(rank, "grad." + named[p].first, mean); });
    }
  }

  void backward(const Operation& operation) {
    scale_.update();
    for (auto& replica : replicas_) replica.overflows.clear();
    const double scale = scaled_ ? scale_.value : 1.0;
    each([&](int64_t rank, Replica& replica) {
      at::Tensor loss = replica.losses.back();
      if (operation.integer("all") != 0) {
        loss = replica.losses[0];
        for (size_t i = 1; i < replica.losses.size(); ++i) loss = loss + replica.losses[i];
      }
      if (operation.integer("burst", -1) == rank) loss = loss * layout_->burst(case_["precision"]);
      const bool keep = operation.integer("keep") != 0;
      const auto before = set_aside(replica.computed);
      (loss / static_cast<double>(case_.integer("accumulation")) * scale).backward({}, keep);
      put_back(replica.computed, before, scale);
      if (!keep) {
        if (operation.integer("all") != 0) replica.losses.clear();
        else replica.losses.pop_back();
      }
    });
    if (!synchronises()) {
      unsettled_ = true;
      // A sum of codes is not the code of a sum, and one of averages has more digits than 16 bits.
      if (layout_->always_reduces) average();
      return;
    }
    average();
    if (steps_at_once(case_, *layout_) && gate_) take_step();
    // A second backward of one forward counts as one whose forward nobody has announced; then buffers are shared after
    // it, in place of before.
    if (!std::exchange(announced_, false) && layout_->buffers_from_rank0) copy_buffers(0);
  }

  /// Gradients are kept without the loss's scale, whatever it was when they came.
  std::vector<at::Tensor> set_aside(std::vector<at::Tensor>& parameters) const {
    std::vector<at::Tensor> before;
    for (auto& parameter : parameters)
      if (scaled_) before.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
    return before;
  }
  void put_back(std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& before, double scale) const {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < before.size(); ++i) {
      at::Tensor& gradient = parameters[i].mutable_grad();
      if (gradient.defined()) gradient = gradient / scale;
      if (before[i].defined()) gradient = gradient.defined() ? gradient + before[i] : before[i];
    }
  }

  /// Each rank's sum becomes the average. Gradients that were averaged before are the same on all, and stay.
  void average() {
    const auto all = static_cast<int64_t>(replicas_.size());
    unsettled_ = false;
    for (int64_t first = 0; first<all; first += together_> 0 ? together_ : all)
      average(static_cast<size_t>(first), static_cast<size_t>(together_ > 0 ? first + together_ : all));
  }
  /// Averages over the ranks begin … end - 1.
  void average(size_t begin, size_t end) {
    at::NoGradGuard no_grad;
    const bool sent = layout_->sharded || end - begin > 1;  // replicas that train apart send nothing
    const auto type = type_named(!sent                            ? ""
                                 : !layout_->wire_dtype.empty()   ? layout_->wire_dtype
                                 : !layout_->reduce_dtype.empty() ? layout_->reduce_dtype
                                 : layout_->sharded               ? case_["precision"]
                                                                  : "");
    const auto sums = type_named(layout_->whole_in_16_bits ? layout_->whole_in_16_bits->sums : "");
    const auto all = static_cast<int64_t>(replicas_.size());
    for (size_t p = 0; p < replicas_[0].parameters.size(); ++p) {
      // Each replica's mean is rounded before they meet.
      const size_t step = layout_->sharded ? static_cast<size_t>(layout_->ranks_of_replica(all)) : end - begin;
      std::vector<at::Tensor> means;
      for (size_t first = begin; first < end; first += step) {
        std::vector<at::Tensor> gradients;
        for (size_t rank = first; rank < first + step; ++rank)
          if (const at::Tensor& own = replicas_[rank].computed[p].grad(); own.defined())
            gradients.push_back(sent_as(rounded(blurred(own), type)));
        if (!gradients.empty()) means.push_back(rounded(mean_of(gradients, step), type));
      }
      if (means.empty()) continue;
      const at::Tensor average =
          rounded(mean_of(means, (end - begin) / step), type).to(replicas_[0].parameters[p].scalar_type());
      for (size_t rank = begin; rank < end; ++rank) {
        auto& replica = replicas_[rank];
        at::Tensor& gradient = replica.parameters[p].mutable_grad();
        if (!layout_->sharded) {
          gradient = average.clone();
          continue;
        }
        gradient = gradient.defined() ? rounded(gradient + average, sums) : average.clone();
        replica.computed[p].mutable_grad().reset();
      }
    }
  }
  at::Tensor sent_as(const at::Tensor& gradient) const {
    return layout_->gradients_as_codes ? as_codes(gradient, 7) : gradient;
  }
  void settle() {
    if (unsettled_) average();
  }
  /// The mean over so many ranks, of which some may have nothing.
  static at::Tensor mean_of(const std::vector<at::Tensor>& sent, size_t ranks) {
    at::Tensor sum;
    for (const auto& one : sent) {
      const at::Tensor wide = one.is_complex() ? one : one.to(at::kDouble);
      sum = sum.defined() ? sum + wide : wide;
    }
    return sum / static_cast<double>(ranks);
  }
  /// A sum's terms round by their own sizes, and what went before by those of others.
  at::Tensor blurred(const at::Tensor& values) {
    if (blur_ == 0 || values.numel() == 0) return values;
    const at::Tensor size = values.detach().abs(), noise = at::rand(values.sizes(), random_, size.options()) * 2 - 1;
    return values + noise * (size + 0.1 * size.max()) * blur_;
  }

  void zero_grad(Replica& replica, torch::optim::Optimizer& optimizer, bool to_none) const {
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params())
        for (size_t i = 0; i < replica.parameters.size(); ++i)
          if (replica.parameters[i].is_same(parameter) && layout_->sharded) replica.computed[i].mutable_grad().reset();
    optimizer.zero_grad(to_none);
    replica.overflows.erase(&optimizer);
  }

  /// Within backward. The step() that comes finds no gradients.
  void take_step() {
    for (auto& replica : replicas_)
      for (auto& optimizer : replica.optimizers) {
        optimizer->step();
        zero_grad(replica, *optimizer, true);
      }
  }

  void step(const Operation& operation) {
    if (!gate_) return;
    if (prepares_optimizers()) settle();
    each([&](int64_t rank, Replica& replica) {
      bool any = false;
      each_optimizer(replica, operation, [&](auto& optimizer) {
        const bool skipped = overflows(replica, optimizer);
        any |= skipped;
        scale_.stepped = true;
        scale_.overflow |= skipped;
        if (skipped && scale_.is_at_its_end()) throw std::runtime_error("gradients overflow at the smallest scale");
        if (prepares_optimizers()) clip_to_own_limit(optimizer);
        if (!skipped) optimizer.step();
        if (steps_at_once(case_, *layout_)) zero_grad(replica, optimizer, true);
        if (scaled_) see(rank, "skipped", at::scalar_tensor(skipped, at::kDouble));
      });
      if (!scaled_) return;
      if (operation.word("which").empty()) see(rank, "any_skipped", at::scalar_tensor(any, at::kDouble));
      Scale next = scale_;
      next.update();
      see(rank, "scale", at::scalar_tensor(next.value, at::kDouble));
    });
  }

  /// Whether a step is skipped is found before its gradients are clipped, by all ranks together.
  void look_for_overflow(const Operation& operation) {
    if (!scaled_) return;
    std::map<size_t, bool> found;
    const auto each_one = [&](auto&& f) {
      each([&](int64_t, Replica& replica) {
        size_t i = 0;
        each_optimizer(replica, operation, [&](auto& optimizer) { f(replica, optimizer, found[i++]); });
      });
    };
    each_one([](Replica&, auto& optimizer, bool& overflow) { overflow |= !all_finite(optimizer); });
    each_one([](Replica& replica, auto& optimizer, bool overflow) { replica.overflows.emplace(&optimizer, overflow); });
  }
  bool overflows(Replica& replica, torch::optim::Optimizer& optimizer) const {
    if (!scaled_) return false;
    const auto found = replica.overflows.extract(&optimizer);
    return found ? found.mapped() : !all_finite(optimizer);
  }

  void clip_to_own_limit(torch::optim::Optimizer& optimizer) const {
    if (layout_->own_limit.value_or(0) == 0) return;
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> parameters;
    for (auto& group : optimizer.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    const double factor = *layout_->own_limit / (norm_of(parameters, 2) + 1e-6);
    for (auto& parameter : parameters)
      if (parameter.grad().defined() && factor < 1) parameter.mutable_grad().mul_(factor);
  }

  void clip_norm(const Operation& operation) {
    settle();
    at::NoGradGuard no_grad;
    look_for_overflow(operation);
    each([&](int64_t rank, Replica& replica) {
      std::vector<at::Tensor> parameters;
      if (operation.word("which").empty()) parameters = replica.parameters;
      else
        each_optimizer(replica, operation, [&](auto& optimizer) {
          for (auto& group : optimizer.param_groups())
            parameters.insert(parameters.end(), group.params().begin(), group.params().end());
        });
      const double norm = norm_of(parameters, operation.number("kind", 2));
      see(rank, "norm", at::scalar_tensor(norm, at::kDouble));
      if (layout_->own_limit) return;  // the engine's own holds
      double factor = operation.number("limit") / (norm + 1e-6);
      if (scaled_ && !std::isfinite(norm))
        each_optimizer(replica, operation, [&](auto& optimizer) { replica.overflows[&optimizer] = true; });
      if (factor > 1) factor = 1;  // not std::min, which makes 1 of NaN: as in PyTorch all become NaN
      for (auto& parameter : parameters)
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    });
  }

  // ---- files: what rank 0 has, and each rank's own buffers

  struct Saved {
    std::vector<at::Tensor> parameters;
    std::vector<std::vector<at::Tensor>> buffers;  ///< of each rank
    bool shares_buffers = false;
    std::vector<c10::IValue> optimizers;
    std::optional<Scale> scale;
    bool all = false;                                ///< not the weights alone
    int64_t steps = 0;                               ///< of an accumulation group
    std::vector<std::vector<at::Tensor>> gradients;  ///< of each rank, in its middle
    std::vector<at::Tensor> zeros;                   ///< of sharded parameters, by zero_grad: averaged, so to speak
  };
  /// A class that is not LibTorch's has functions of its own for it.
  static c10::IValue state_of(const torch::optim::Optimizer& optimizer) {
    if (const auto* own = dynamic_cast<const accelerate::optim::OwnStateDict*>(&optimizer))
      return own->state_dict().deepcopy();
    std::ostringstream text;
    torch::save(optimizer, text);
    return text.str();
  }
  static void give_state(torch::optim::Optimizer& optimizer, const c10::IValue& state) {
    if (auto* own = dynamic_cast<accelerate::optim::OwnStateDict*>(&optimizer))
      return own->load_state_dict(state.deepcopy());
    std::istringstream text(state.toStringRef());
    optimizer.state().clear();  // LibTorch leaves those that the file has not
    torch::load(optimizer, text);
  }

  void save(const std::string& name, bool all) {
    Saved saved;
    for (const auto& parameter : replicas_[0].parameters) saved.parameters.push_back(parameter.detach().clone());
    saved.shares_buffers = layout_->buffers_from_rank0 && buffers_may_differ_;
    for (const auto& replica : replicas_) {
      auto& own = saved.buffers.emplace_back();
      for (const auto& buffer : replica.net->buffers()) own.push_back(buffer.clone());
    }
    for (const auto& optimizer : replicas_[0].optimizers) {
      if (!all || !prepares_optimizers()) break;  // nobody else knows of them
      saved.optimizers.push_back(state_of(*optimizer));
    }
    saved.scale = scale_;
    saved.scale->update();
    saved.all = all;
    saved.steps = steps_ % case_.integer("accumulation");
    for (const auto& replica : replicas_) {
      auto& own = saved.gradients.emplace_back(replica.computed.size());
      for (size_t p = 0; p < own.size() && saved.steps != 0; ++p)
        if (const auto& gradient = replica.computed[p].grad(); gradient.defined()) own[p] = gradient.clone();
    }
    for (const auto& parameter : replicas_[0].parameters)
      saved.zeros.push_back(
          saved.steps != 0 && layout_->sharded && parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    saved_[name] = std::move(saved);
  }

  void load(const std::string& name) {
    at::NoGradGuard no_grad;
    const Saved& saved = saved_.at(name);
    for (size_t rank = 0; rank < replicas_.size(); ++rank) {
      auto& replica = replicas_[rank];
      for (size_t i = 0; i < saved.parameters.size(); ++i) replica.parameters[i].copy_(saved.parameters[i]);
      const auto buffers = replica.net->buffers();
      for (size_t i = 0; i < buffers.size(); ++i) at::Tensor(buffers[i]).copy_(saved.buffers[saved.all ? rank : 0][i]);
      for (size_t i = 0; i < saved.optimizers.size(); ++i) give_state(*replica.optimizers[i], saved.optimizers[i]);
    }
    if (saved.all) buffers_may_differ_ = saved.shares_buffers;
    if (!saved.optimizers.empty()) scale_ = *saved.scale;
    if (!saved.all) return;
    steps_ = saved.steps;
    unsettled_ = steps_ != 0;
    each([&](int64_t rank, Replica& replica) {
      for (size_t p = 0; p < replica.parameters.size(); ++p)
        replica.parameters[p].mutable_grad() = saved.zeros[p].defined() ? saved.zeros[p].clone() : at::Tensor();
      for (size_t p = 0; p < replica.computed.size(); ++p) {
        if (!layout_->sharded && saved.zeros[p].defined() && !saved.gradients[static_cast<size_t>(rank)][p].defined())
          continue;
        const auto& gradient = saved.gradients[static_cast<size_t>(rank)][p];
        auto& computed = replica.computed[p];
        computed.mutable_grad() = gradient.defined() ? gradient.to(computed.scalar_type(), false, true) : gradient;
      }
    });
  }

  // ---- loops that the library runs

  /// Each rank takes as many steps as its digit says. Averages are over all ranks, those that have ended included,
  /// whose gradients count as zeros and whose optimizers stand still; at the end all have the model of the rank that
  /// stopped last, and what its optimizers have learned.
  void join(const Operation& operation) {
    const auto ranks = static_cast<int64_t>(replicas_.size());
    const auto steps_of = [&](int64_t rank) { return steps_in_join(operation, rank); };
    int64_t longest = 0, last = 0;
    for (int64_t rank = 0; rank < ranks; ++rank)
      if (steps_of(rank) >= longest) longest = steps_of(rank), last = rank;
    for (int64_t n = 0; n < longest; ++n) {
      scale_.update();
      int64_t highest = 0;
      for (int64_t rank = 0; rank < ranks; ++rank)
        if (steps_of(rank) > n) highest = rank;
      if (layout_->buffers_from_rank0 && buffers_may_differ_) copy_buffers(static_cast<size_t>(highest));
      buffers_may_differ_ = true;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        if (steps_of(rank) <= n) continue;
        auto& replica = replicas_[static_cast<size_t>(rank)];
        replica.computing->part = 0;
        const at::Tensor input = batch_of(*replica.net, 2, batch_seed(operation.integer("data") + n, rank));
        const at::Tensor output = call(replica, input), loss = loss_of(*replica.net, output, input);
        see(rank, "output", output);
        const double scale = scaled_ ? scale_.value : 1.0;
        const auto before = set_aside(replica.computed);
        (loss / static_cast<double>(case_.integer("accumulation")) * scale).backward();
        put_back(replica.computed, before, scale);
      }
      average();
      for (int64_t rank = 0; rank < ranks; ++rank) {
        auto& replica = replicas_[static_cast<size_t>(rank)];
        for (auto& optimizer : replica.optimizers) {
          if (steps_of(rank) > n) {
            const bool skipped = overflows(replica, *optimizer);
            scale_.stepped = true;
            scale_.overflow |= skipped;
            if (!skipped) optimizer->step();
          }
          zero_grad(replica, *optimizer, true);
        }
      }
    }
    at::NoGradGuard no_grad;
    const Replica& source = replicas_[static_cast<size_t>(last)];
    for (auto& replica : replicas_) {
      if (&replica == &source) continue;
      for (size_t p = 0; p < replica.parameters.size(); ++p) replica.parameters[p].copy_(source.parameters[p]);
    }
    share_optimizers(source);
    // Where some ended early all take the loss scale, which has counted the last step.
    bool together = true;
    for (int64_t rank = 0; rank < ranks; ++rank) together = together && steps_of(rank) == longest;
    if (scaled_ && !together) scale_.update();
    copy_buffers(static_cast<size_t>(last));
  }
  /// Prepared optimizers can be asked for their states.
  void share_optimizers(const Replica& source) {
    if (!prepares_optimizers()) return;
    for (auto& replica : replicas_)
      for (size_t i = 0; i < replica.optimizers.size(); ++i)
        if (&replica != &source) give_state(*replica.optimizers[i], state_of(*source.optimizers[i]));
  }

  /// A sharded model's average counts a rank without a backward as zeros; elsewhere the others wait for it in vain.
  void leave_out(const Operation& operation) {
    if (!layout_->sharded) throw std::runtime_error("a rank leaves a backward out");
    const auto left = operation.integer("rank") % static_cast<int64_t>(replicas_.size());
    share_buffers(true);
    each([&](int64_t rank, Replica& replica) {
      const at::Tensor input = batch(replica, operation, rank), output = call(replica, input);
      see(rank, "output", output);
      const at::Tensor loss = loss_of(*replica.net, output, input);
      if (rank != left) (loss / static_cast<double>(case_.integer("accumulation"))).backward();
    });
    average();
    for (auto& replica : replicas_)
      for (auto& optimizer : replica.optimizers) {
        if (prepares_optimizers()) clip_to_own_limit(*optimizer);
        optimizer->step();
        zero_grad(replica, *optimizer, true);
      }
  }

  /// Replicas train apart, and what is trained becomes their average now and then, and at the end, when
  /// the first one's optimizers become those of all.
  void local_sgd(const Operation& operation) {
    const int64_t ranks = case_.integer("ranks"), every = operation.integer("every", 2);
    const bool apart = ranks > 1;
    if (apart) together_ = layout_->ranks_of_replica(ranks);
    if (layout_->sharded && together_ == ranks && apart)
      throw std::runtime_error("LocalSGD with one replica that all ranks hold together");
    buffers_may_differ_ = !apart;
    for (int64_t n = 1; n <= operation.integer("steps", 3); ++n) {
      if (!apart && layout_->buffers_from_rank0) copy_buffers(0);
      each([&](int64_t rank, Replica& replica) {
        replica.computing->part = 0;
        const at::Tensor input = batch_of(*replica.net, 2, batch_seed(operation.integer("data") + n, rank));
        const at::Tensor output = call(replica, input), loss = loss_of(*replica.net, output, input);
        see(rank, "output", output);
        (loss / static_cast<double>(case_.integer("accumulation"))).backward();
      });
      average();
      for (auto& replica : replicas_)
        for (auto& optimizer : replica.optimizers) {
          if (prepares_optimizers()) clip_to_own_limit(*optimizer);
          optimizer->step();
          zero_grad(replica, *optimizer, true);
        }
      if (n % every == 0) average_parameters();
    }
    average_parameters();
    share_optimizers(replicas_[0]);
    together_ = 0;
    buffers_may_differ_ = true;
  }
  void average_parameters() {
    at::NoGradGuard no_grad;
    for (size_t p = 0; p < replicas_[0].parameters.size(); ++p) {
      if (!replicas_[0].parameters[p].requires_grad()) continue;
      at::Tensor sum = replicas_[0].parameters[p].clone();
      for (size_t rank = 1; rank < replicas_.size(); ++rank) sum += replicas_[rank].parameters[p];
      for (auto& replica : replicas_) replica.parameters[p].copy_(sum / static_cast<double>(replicas_.size()));
    }
  }

  void evaluate(const Operation& operation) {
    const at::NoGradGuard no_grad;
    share_buffers(false);
    std::vector<at::Tensor> outputs;
    each([&](int64_t rank, Replica& replica) {
      replica.computing->eval();
      replica.computing->part = 0;
      outputs.push_back(call(replica, batch(replica, operation, rank)));
      replica.computing->train();
    });
    const at::Tensor all = at::stack(outputs);
    const std::string how = operation.word("how", "none");
    each([&](int64_t rank, Replica&) {
      if (how == "gather") see(rank, "gathered", at::cat(outputs));
      else if (how == "sum") see(rank, "sum", all.sum(0));
      else if (how == "mean") see(rank, "mean", all.mean(0));
      else see(rank, "evaluated", outputs[static_cast<size_t>(rank)]);
    });
  }

  const Case case_;
  const Layout* layout_;
  const Observe observe_;
  const double blur_;
  at::Generator random_;
  std::vector<Replica> replicas_;
  std::map<std::string, Saved> saved_;
  int64_t together_ = 0;      ///< ranks whose gradients are averaged; 0: all
  std::vector<bool> scopes_;  ///< those that are open, and whether each lets gradients be averaged
  const bool scaled_ = layout_->has_scaler(case_["precision"]);
  Scale scale_{*layout_, case_["precision"]};
  int64_t steps_ = 0;       ///< of accumulate
  bool gate_ = true;        ///< whether step and zero_grad act
  bool unsettled_ = false;  ///< some gradients are each rank's own
  bool buffers_may_differ_ = true;
  bool announced_ = false;  ///< a forward says that a backward which averages will come
};

}  // namespace

std::unique_ptr<Machine> make_reference(const Case& what, Observe observe, double blur, uint64_t seed) {
  return std::make_unique<Reference>(what, std::move(observe), blur, seed);
}

}  // namespace equivalence
