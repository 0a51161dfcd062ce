#include "ours.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <optional>

#include "accelerate/accelerate.hpp"
#include "layouts.hpp"
#include "models.hpp"
#include "optimizers.hpp"
#include "writes.hpp"

namespace equivalence {
namespace {

using accelerate::Accelerator;
using accelerate::AcceleratorOptions;

AcceleratorOptions options_of(const Case& what, const Layout& layout) {
  AcceleratorOptions options{.gradient_accumulation_steps = what.integer("accumulation"), .cpu = true};
  if (what["precision"] != "no") options.mixed_precision = what["precision"];
  // A rank that leaves others waiting shall be told of it soon; a slow machine must not look like that.
  const bool waits = std::any_of(what.program.begin(), what.program.end(),
                                 [](const Operation& operation) { return operation.verb == "leave_out"; });
  options.kwargs_handlers.emplace_back(
      accelerate::InitProcessGroupKwargs{.timeout = std::chrono::seconds(waits ? 6 : 15)});
  if (what["precision"] == "fp16" && !layout.whole_in_16_bits)
    options.kwargs_handlers.emplace_back(accelerate::GradScalerKwargs{.init_scale = 1024, .growth_interval = 2});
  layout.choose(options);
  if (steps_at_once(what, layout)) {
    if (options.fsdp_plugin) options.fsdp_plugin->step_at_once = true;
    if (options.deepspeed_plugin) options.deepspeed_plugin->step_at_once = true;
  } else if (what.integer("ahead") == 1) {
    if (options.fsdp_plugin) options.fsdp_plugin->step_in_backward = true;
    if (options.deepspeed_plugin) options.deepspeed_plugin->step_in_backward = true;
  }
  return options;
}

/// The objects that a program makes at its start. Gone as a whole, in the order of a program's end.
struct Objects {
  Objects(const Case& what, const Layout& layout, uint64_t seed)
      : layout(layout),
        accelerator(options_of(what, layout)),
        of_replica(layout.ranks_of_replica(accelerator.num_processes())) {
    const bool precise = what["dtype"] == "f64" && what["precision"] == "no";
    const auto make = [&] {
      // A prepared optimizer steps a tied weight once, however often LibTorch lists it.
      const bool prepared = what["prepare"] == "together" || what["prepare"] == "late_prepared";
      const bool as_listed =
          prepared && what.integer("withheld") == 0 && what["optimizer"].find('+') == std::string::npos;
      auto trained = as_listed ? net->parameters() : tensors_of(*net);
      trained.resize(trained.size() - static_cast<size_t>(what.integer("withheld")));
      made = make_optimizers(what["optimizer"], trained, std::stod(what["rate"]), precise);
    };
    const uint64_t other = layout.starts_from_rank0 ? static_cast<uint64_t>(accelerator.process_index()) : 0;
    net = make_model(what["model"], seed + other, what["dtype"]);
    if (what.integer("recompute") != 0)
      net->run_segment = [](const Net::Segment& segment, const at::Tensor& x) {
        return accelerate::checkpoint(segment, {}, x);
      };
    const std::string& prepare = what["prepare"];
    if (prepare == "together") {
      make();
      if (made.size() == 1) {
        auto [m, optimizer] = accelerator.prepare(net, *made[0]);
        model.emplace(m);
        optimizers = {optimizer};
      } else {
        auto [m, first, second] = accelerator.prepare(net, *made.at(0), *made.at(1));
        model.emplace(m);
        optimizers = {first, second};
      }
      return;
    }
    if (prepare == "never") make();
    model.emplace(accelerator.prepare(net));
    if (prepare != "never") make();
    if (prepare == "late_prepared")
      for (auto& optimizer : made) optimizers.push_back(accelerator.prepare(*optimizer));
  }

  const Layout& layout;
  Accelerator accelerator;
  const int64_t of_replica;  ///< ranks
  std::shared_ptr<Net> net;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> made;
  std::optional<accelerate::Prepared<std::shared_ptr<Net>>> model;
  std::vector<accelerate::AcceleratedOptimizer> optimizers;  ///< none where the program does not prepare them
  std::vector<accelerate::Scope> scopes;
  std::vector<at::Tensor> losses;
};

class Ours final : public Machine {
 public:
  Ours(const Case& what, std::string folder, Observe observe)
      : case_(what),
        folder_(std::move(folder)),
        observe_(std::move(observe)),
        o_(std::make_unique<Objects>(what, layout_named(what["layout"]), static_cast<uint64_t>(what.integer("seed")))) {
  }

  void forget_graphs() override { o_->losses.clear(); }

  void run(const Operation& operation) override {
    const auto& verb = operation.verb;
    auto& accelerator = o_->accelerator;
    auto& m = *o_->model;
    auto& net = *o_->net;
    if (verb == "accumulate") {
      o_->scopes.push_back(accelerator.accumulate(m));
    } else if (verb == "no_sync") {
      o_->scopes.push_back(accelerator.no_sync(m));
    } else if (verb == "end") {
      o_->scopes.pop_back();
    } else if (verb == "forward") {
      net.part = part_of(operation, rank(), o_->of_replica);
      o_->losses.push_back(loss_on(batch(operation)));
    } else if (verb == "backward") {
      backward(operation);
    } else if (verb == "step") {
      step(operation);
    } else if (verb == "bare_step") {
      for (auto& optimizer : o_->made) optimizer->step();
    } else if (verb == "zero_grad") {
      zero_grad(operation);
    } else if (verb == "bare_zero_grad") {
      for (auto& optimizer : o_->made) optimizer->zero_grad();
    } else if (verb == "module_zero_grad") {
      m->zero_grad();
    } else if (verb == "grad_none") {
      for (auto& parameter : m->parameters()) parameter.mutable_grad().reset();
    } else if (verb == "clip_norm") {
      std::vector<at::Tensor> parameters;
      if (operation.word("which").empty()) parameters = m->parameters();
      else
        each_made(operation, [&](auto& optimizer) {
          for (auto& group : optimizer.param_groups())
            parameters.insert(parameters.end(), group.params().begin(), group.params().end());
        });
      see("norm", accelerator.clip_grad_norm_(parameters, operation.number("limit"), operation.number("kind", 2)));
    } else if (verb == "clip_value") {
      accelerator.clip_grad_value_(tensors_to_clamp(), operation.number("limit"));
    } else if (verb == "torch_clip") {
      const double norm = torch::nn::utils::clip_grad_norm_(m->parameters(), operation.number("limit"));
      see("norm", at::scalar_tensor(norm, at::kDouble));
    } else if (verb == "read_grad") {
      for (const auto& [name, parameter] : parameters_of(net))
        if (parameter.grad().defined()) see("grad." + name, parameter.grad());
    } else if (verb == "scale_grad") {
      scale_gradients(tensors_of(net), operation);
    } else if (verb == "hand_step") {
      hand_step(tensors_of(net), tensors_of(net), operation.number("rate"));
    } else if (verb == "write") {
      write_parameters(tensors_of(net), tensors_of(net), operation);
    } else if (verb == "summon") {
      const auto here = accelerate::residency::summon(o_->net);
      write_parameters(tensors_of(net), tensors_of(net), operation);
    } else if (verb == "ema") {
      average_.update(tensors_of(net), operation.number("decay"));
    } else if (verb == "ema_swap") {
      average_.swap(tensors_of(net), tensors_of(net));
    } else if (verb == "freeze" || verb == "unfreeze") {
      set_trained(tensors_of(net), operation);
    } else if (verb == "add_group") {
      const auto all = tensors_of(net);
      const auto held = static_cast<std::ptrdiff_t>(all.size()) - case_.integer("withheld");
      o_->optimizers[0].add_param_group(std::vector<at::Tensor>(all.begin() + held, all.end()));
    } else if (verb == "set_rate") {
      each_made(operation, [&](auto& optimizer) {
        for (auto& group : optimizer.param_groups())
          group.options().set_lr(group.options().get_lr() * operation.number("factor"));
        see("rate", at::scalar_tensor(optimizer.param_groups()[0].options().get_lr(), at::kDouble));
      });
    } else if (verb == "read") {
      for (const auto& [name, parameter] : parameters_of(net)) see("param." + name, parameter);
      for (const auto& item : net.named_buffers()) see("buffer." + item.key(), item.value());
    } else if (verb == "state_dict") {
      state_dict();
    } else if (verb == "evaluate") {
      evaluate(operation);
    } else if (verb == "save") {
      accelerator.save_state(file(operation));
    } else if (verb == "load") {
      accelerator.load_state(file(operation));
    } else if (verb == "save_model") {
      accelerator.save_model(m, file(operation) + "_weights");
    } else if (verb == "load_model") {
      accelerator.wait_for_everyone();
      accelerate::load_checkpoint_in_model(o_->net, file(operation) + "_weights");
    } else if (verb == "reload") {
      reload(operation);
    } else if (verb == "join") {
      join(operation);
    } else if (verb == "local_sgd") {
      local_sgd(operation);
    } else if (verb == "leave_out") {
      const at::Tensor loss = loss_on(batch(operation));
      if (rank() != operation.integer("rank") % accelerator.num_processes()) accelerator.backward(loss);
      step({"step", {}});
      zero_grad({"zero_grad", {}});
    } else if (verb == "autograd_grad") {
      autograd_grad(operation);
    } else if (verb == "failed_backward") {
      failed_backward(operation);
    } else {
      throw std::runtime_error("ours: unknown operation " + verb);
    }
  }

 private:
  template <class F> static void each_of(size_t count, const Operation& operation, F&& f) {
    const std::string which = operation.word("which", "all");
    for (size_t i = 0; i < count; ++i)
      if (which == "all" || static_cast<size_t>(std::stoll(which)) % count == i) f(i);
  }
  template <class F> void each_made(const Operation& operation, F&& f) {
    each_of(o_->made.size(), operation, [&](size_t i) { f(*o_->made[i]); });
  }
  int64_t rank() const { return o_->accelerator.process_index(); }
  void see(const std::string& name, const at::Tensor& value) { observe_(rank(), {at, name, observable(value)}); }
  std::string file(const Operation& operation) const { return folder_ + "_" + operation.word("name", "a"); }
  at::Tensor batch(const Operation& operation) const {
    return batch_of(*o_->net, operation.integer("rows", 2) + rank() * operation.integer("ragged"),
                    batch_seed(operation.integer("data"), rank()));
  }
  at::Tensor output_of(const at::Tensor& input) {
    const bool low = o_->layout.wants_low_inputs(case_["precision"]);
    return (*o_->model)(low ? as_read(input, case_["precision"]) : input);
  }
  at::Tensor loss_on(const at::Tensor& input) {
    const at::Tensor output = output_of(input);
    see("output", output);
    return loss_of(*o_->net, output, input);
  }
  /// LibTorch has no order of complex numbers.
  std::vector<at::Tensor> tensors_to_clamp() const {
    auto tensors = tensors_of(*o_->net);
    std::erase_if(tensors, [](const at::Tensor& tensor) { return tensor.is_complex(); });
    return tensors;
  }

  void backward(const Operation& operation) {
    auto& losses = o_->losses;
    at::Tensor loss = losses.back();
    if (operation.integer("all") != 0) {
      loss = losses[0];
      for (size_t i = 1; i < losses.size(); ++i) loss = loss + losses[i];
    }
    if (operation.integer("burst", -1) == rank()) loss = loss * o_->layout.burst(case_["precision"]);
    const bool keep = operation.integer("keep") != 0;
    o_->accelerator.backward(loss, {.retain_graph = keep});
    if (keep) return;
    if (operation.integer("all") != 0) losses.clear();
    else losses.pop_back();
  }

  /// Gradients that never come to grad().
  void autograd_grad(const Operation& operation) {
    o_->net->part = 0;
    const auto found = captured_gradients(loss_on(batch(operation)), tensors_of(*o_->net));
    const auto named = parameters_of(*o_->net);
    for (size_t p = 0; p < found.size(); ++p)
      if (found[p].defined()) see("grad." + named[p].first, found[p]);
  }

  /// Which throws when it reaches one of the parameters, on all ranks; the program goes on without.
  void failed_backward(const Operation& operation) {
    struct OutOfLuck {};
    o_->net->part = 0;  // on all ranks: of another branch each it might throw on some only
    const at::Tensor loss = loss_on(batch(operation));
    std::vector<at::Tensor> trained;
    for (const auto& parameter : tensors_of(*o_->net))
      if (parameter.requires_grad()) trained.push_back(parameter);
    if (trained.empty()) return;
    const at::Tensor& where = trained[static_cast<size_t>(operation.integer("index")) % trained.size()];
    const auto hook = where.register_hook([](const at::Tensor&) { throw OutOfLuck(); });
    try {
      if (operation.integer("bare") != 0) loss.backward();
      else o_->accelerator.backward(loss);
    } catch (const OutOfLuck&) {
    }
    where.remove_hook(hook);
    zero_grad({"zero_grad", {}});
  }

  void step(const Operation& operation) {
    auto& accelerator = o_->accelerator;
    if (o_->optimizers.empty()) {
      if (accelerator.sync_gradients()) each_made(operation, [](auto& optimizer) { optimizer.step(); });
      return;
    }
    const bool scaled = accelerator.scaler() && accelerator.sync_gradients();
    each_of(o_->optimizers.size(), operation, [&](size_t i) {
      o_->optimizers[i].step();
      if (scaled) see("skipped", at::scalar_tensor(o_->optimizers[i].step_was_skipped(), at::kDouble));
    });
    if (scaled && operation.word("which").empty())
      see("any_skipped", at::scalar_tensor(accelerator.optimizer_step_was_skipped(), at::kDouble));
    if (scaled) see("scale", at::scalar_tensor(accelerator.scaler()->get_scale(), at::kDouble));
  }

  void zero_grad(const Operation& operation) {
    const bool to_none = operation.integer("zeros") == 0;
    if (o_->optimizers.empty()) {
      if (o_->accelerator.sync_gradients())
        each_made(operation, [&](auto& optimizer) { optimizer.zero_grad(to_none); });
      return;
    }
    each_of(o_->optimizers.size(), operation, [&](size_t i) { o_->optimizers[i].zero_grad(to_none); });
  }

  void state_dict() {
    const auto state = o_->accelerator.get_state_dict(*o_->model);
    std::vector<std::string> names;
    for (const auto& item : o_->net->named_parameters()) names.push_back(item.key());
    for (const auto& item : o_->net->named_buffers()) names.push_back(item.key());
    for (const auto& name : names)
      if (const auto found = state.find(name); found != state.end()) see("state." + name, found->second);
  }

  void evaluate(const Operation& operation) {
    const at::NoGradGuard no_grad;
    auto& accelerator = o_->accelerator;
    o_->net->eval();
    o_->net->part = 0;
    const at::Tensor output = output_of(batch(operation));
    o_->net->train();
    const std::string how = operation.word("how", "none");
    if (how == "gather") see("gathered", accelerator.gather(output));
    else if (how == "sum") see("sum", accelerator.reduce(output));
    else if (how == "mean") see("mean", accelerator.reduce(output, "mean"));
    else see("evaluated", output);
  }

  /// The program ends, and begins anew in another layout, from its checkpoint.
  void reload(const Operation& operation) {
    const std::string folder = folder_ + "_reload" + std::to_string(at);
    o_->accelerator.save_state(folder);
    o_.reset();
    accelerate::AcceleratorState::reset();
    accelerate::GradientState::reset();
    o_ = std::make_unique<Objects>(case_, layout_named(operation.word("layout", case_["layout"])), 77);
    o_->accelerator.load_state(folder);
  }

  void one_step(const Operation& operation, int64_t n) {
    o_->net->part = 0;
    const at::Tensor loss = loss_on(batch_of(*o_->net, 2, batch_seed(operation.integer("data") + n, rank())));
    o_->accelerator.backward(loss);
    for (auto& optimizer : o_->optimizers) optimizer.step();
    for (auto& optimizer : o_->optimizers) optimizer.zero_grad();
  }
  void join(const Operation& operation) {
    o_->accelerator.join_uneven_inputs(*o_->model, [&] {
      for (int64_t n = 0; n < steps_in_join(operation, rank()); ++n) one_step(operation, n);
    });
  }
  void local_sgd(const Operation& operation) {
    accelerate::LocalSGD local_sgd(o_->accelerator, *o_->model, operation.integer("every", 2));
    for (int64_t n = 1; n <= operation.integer("steps", 3); ++n) {
      one_step(operation, n);
      local_sgd.step();
    }
  }

  const Case case_;
  const std::string folder_;
  const Observe observe_;
  std::unique_ptr<Objects> o_;
  MovingAverage average_;
};

}  // namespace

std::unique_ptr<Machine> make_ours(const Case& what, const std::string& folder, Observe observe) {
  return std::make_unique<Ours>(what, folder, std::move(observe));
}

void leave_job() {
  accelerate::AcceleratorState::reset(/*reset_partial_state=*/true);
  accelerate::GradientState::reset();
}

}  // namespace equivalence
