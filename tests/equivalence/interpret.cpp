#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include "layouts.hpp"
#include "machine.hpp"

namespace equivalence {
namespace {

/// Where a program stands, as far as it decides which operations make sense: what makes none is left out by both
/// machines, so that any part of a program is a program. No tensors.
class Flow {
 public:
  Flow(const Case& what, Machine& machine)
      : what_(what),
        machine_(machine),
        ranks_(what.integer("ranks")),
        scaled_(layout_named(what["layout"]).has_scaler(what["precision"])),
        unprepared_(what["prepare"] == "never" || what["prepare"] == "late"),
        mixed_(what["precision"] != "no"),
        accumulation_(what.integer("accumulation")),
        withheld_(what.integer("withheld") != 0) {
    lay_out(what["layout"]);
  }

  bool admits(const Operation& operation) {
    const auto& verb = operation.verb;
    // All else is an error between a backward that has stepped and step(), see docs/fsdp.md.
    if (taken_ && (verb == "step" ? !gate_ : verb == "zero_grad" ? gate_ : !kAfterAStepInBackward.contains(verb)))
      return false;
    // What waits is averaged by clipping, too, and stepped on then.
    if (at_once_ && (verb == "failed_backward" || (unsynchronised_ && verb.starts_with("clip_")))) return false;
    if (verb == "step") taken_ = false;
    if (verb == "accumulate" || verb == "no_sync") return begin(verb);
    if (verb == "end") return end();
    if (verb == "forward") return forwards_ < 3 && ((kept_ = false), ++forwards_ > 0);
    if (verb == "backward") return backward(operation);
    if (verb == "step" || verb == "zero_grad") {
      // While gradients accumulate these are called, too, and do nothing.
      const std::string which = operation.word("which", "all");
      // A bare step takes gradients as they are.
      if (unprepared_ && (unsynchronised_ || forwards_ > 0)) return false;
      if (verb == "step") {
        // Loss scaling wants a loss, and gradients that were not stepped on already.
        if (scaled_ && gate_ &&
            (!scaled_once_ || stepped_.contains(which) || stepped_.contains("all") ||
             (which == "all" && !stepped_.empty())))
          return false;
        if (!gate_) return true;
        stepped_on_ = true;
        forget_graphs();
        unsynchronised_ = false;
        if (scaled_) stepped_.insert(which);
      } else if (gate_) {
        if (which == "all") stepped_.clear();
        else stepped_.erase(which);
        if (which == "all" && !withheld_) unsynchronised_ = has_gradients_ = averaged_ = false;
      }
      return true;
    }
    if (verb == "clip_norm" || verb == "clip_value") {
      if (!gate_ || !stepped_.empty() || (scaled_ && !scaled_once_)) return false;
      unsynchronised_ = false;
      return true;
    }
    if (verb == "save" || verb == "load" || verb == "reload" || verb == "save_model" || verb == "load_model")
      return file(operation);
    // Gradients of what no optimizer clears are of those ranks alone that had data to the end of a join, and of each
    // replica by itself after LocalSGD.
    if (verb == "join" || verb == "local_sgd" || verb == "leave_out") {
      if (forwards_ > 0 || has_gradients_ || !scopes_.empty() || !gate_ || unprepared_ ||
          (withheld_ && verb != "leave_out") || (scaled_ && verb != "join"))
        return false;
      for (int64_t rank = 0; rank < ranks_; ++rank)
        scaled_once_ |= verb != "join" || steps_in_join(operation, rank) > 0;
      return true;
    }
    if (verb == "autograd_grad") return forwards_ == 0 && !unprepared_ && !scaled_;
    if (verb == "failed_backward")
      return forwards_ == 0 && !has_gradients_ && scopes_.empty() && gate_ && !unprepared_ && !withheld_;
    if (verb == "add_group") return std::exchange(withheld_, false) && !unprepared_;
    if (kOnGradients.contains(verb)) {
      // LibTorch's own names know nothing of gradients that are to be averaged later, nor of scales.
      const bool own_ones_show = verb == "read_grad" && !sharded_;
      // The graph of a forward that goes backward several times does not mind what becomes of gradients in between.
      const bool between = kept_ && forwards_ == 1 && kOfGradientsAlone.contains(verb);
      if ((unsynchronised_ && !own_ones_show) || scaled_ || (forwards_ > 0 && !between)) return false;
      // Gradients that a bare optimizer has cleared still show on a sharded model's parameters, see docs/fsdp.md.
      if (verb == "bare_zero_grad") bare_cleared_ = sharded_;
      else if (bare_cleared_ && verb != "bare_step") return false;
      // Nothing shows a step of LibTorch's SGD on gradients that were stepped on, or of which the program has cleared
      // or replaced what it sees, see docs/fsdp.md.
      if (verb == "bare_step" && ((rounds_ && stepped_on_) || (sharded_ && cleared_))) return false;
      if (verb == "grad_none" || verb == "module_zero_grad") has_gradients_ = averaged_ = false, cleared_ = true;
      if (verb == "scale_grad" && operation.integer("new") != 0) cleared_ = true;
      return true;
    }
    if (kWriting.contains(verb)) return forwards_ == 0;
    if (kReading.contains(verb)) return true;
    throw std::runtime_error("case: unknown operation " + verb);
  }

 private:
  void lay_out(const std::string& layout) {
    sharded_ = layout_named(layout).sharded;
    at_once_ = steps_at_once(what_, layout_named(layout));
    rounds_ = sharded_ && (mixed_ || !layout_named(layout).param_dtype.empty());
  }
  bool begin(const std::string& verb) {
    forget_graphs();
    if (is_in("no_sync") || is_in(verb)) {
      scopes_.push_back("none");
      return false;
    }
    scopes_.push_back(verb);
    if (verb == "accumulate") gate_ = ++steps_ % accumulation_ == 0;
    return true;
  }
  bool end() {
    if (scopes_.empty()) return false;
    const bool real = scopes_.back() != "none";
    scopes_.pop_back();
    if (real) forget_graphs();
    return real;
  }
  /// Files have no gradients but those of an accumulation group that is half done, which are each rank's own.
  bool file(const Operation& operation) {
    const auto& verb = operation.verb;
    const bool weights = verb.ends_with("_model"), half_done = steps_ % accumulation_ != 0;
    const std::string name = operation.word("name", "a") + (weights ? " weights" : "");
    if (verb.starts_with("load") && !saved_.contains(name)) return false;
    if (forwards_ > 0 || !scopes_.empty() || (half_done && weights) || (has_gradients_ && (averaged_ || !half_done)))
      return false;
    if (verb.starts_with("save")) saved_[name] = {steps_ % accumulation_, has_gradients_};
    if (verb == "load") {
      steps_ = saved_[name].steps;
      unsynchronised_ = has_gradients_ = saved_[name].has_gradients;
    }
    if (verb == "reload") {
      gate_ = true, scaled_once_ = false;
      if (const auto layout = operation.word("layout", ""); !layout.empty()) lay_out(layout);
    }
    return true;
  }
  bool backward(const Operation& operation) {
    if (forwards_ == 0 || !stepped_.empty()) return false;
    kept_ = operation.integer("keep") != 0;
    if (!kept_) forwards_ -= operation.integer("all") != 0 ? forwards_ : 1;
    scaled_once_ = has_gradients_ = true;
    stepped_on_ = cleared_ = false;
    unsynchronised_ = is_in("no_sync") || (is_in("accumulate") && !gate_);
    averaged_ |= !unsynchronised_;
    taken_ = at_once_ && !unsynchronised_ && gate_;
    bare_cleared_ &= unsynchronised_;
    return true;
  }
  bool is_in(const std::string& scope) const {
    return std::find(scopes_.begin(), scopes_.end(), scope) != scopes_.end();
  }
  /// A step changes what graphs of earlier forwards have saved, and a scope is for forwards with their backwards.
  void forget_graphs() {
    forwards_ = 0;
    machine_.forget_graphs();
  }

  static inline const std::set<std::string> kOnGradients = {"module_zero_grad", "grad_none",  "bare_step",
                                                            "bare_zero_grad",   "torch_clip", "read_grad",
                                                            "hand_step",        "scale_grad"};
  static inline const std::set<std::string> kOfGradientsAlone = {"module_zero_grad", "grad_none", "bare_zero_grad",
                                                                 "read_grad", "scale_grad"};
  static inline const std::set<std::string> kAfterAStepInBackward = {
      "accumulate", "no_sync", "end",    "step",     "zero_grad", "read",
      "state_dict", "write",   "summon", "ema_swap", "freeze",    "unfreeze"};
  static inline const std::set<std::string> kWriting = {"write", "summon", "ema", "ema_swap", "freeze", "unfreeze"};
  static inline const std::set<std::string> kReading = {"evaluate", "read", "state_dict", "set_rate"};

  const Case& what_;
  Machine& machine_;
  const int64_t ranks_;
  const bool scaled_, unprepared_, mixed_;
  const int64_t accumulation_;
  bool sharded_ = false;
  bool at_once_ = false;  ///< optimizers step within backward
  bool taken_ = false;    ///< and have, since step()
  bool rounds_ = false;   ///< what computes is an image of what is stepped on
  bool withheld_;         ///< some parameters are in no optimizer
  std::vector<std::string> scopes_;
  int64_t forwards_ = 0;         ///< whose graphs are kept
  bool kept_ = false;            ///< the last of them has been gone through, and may be again
  int64_t steps_ = 0;            ///< of accumulate
  bool gate_ = true;             ///< GradientState::sync_gradients()
  bool unsynchronised_ = false;  ///< some gradients are each rank's own
  bool has_gradients_ = false;   ///< some parameter may have one
  bool cleared_ = false;         ///< or replaced: those of the module, by its own names
  bool bare_cleared_ = false;    ///< those of a sharded model's pieces, by its optimizer as it is
  bool averaged_ = false;        ///< and some of them are of all ranks
  struct Place {
    int64_t steps = 0;
    bool has_gradients = false;
  };
  std::map<std::string, Place> saved_;
  bool scaled_once_ = false;       ///< there was a loss
  bool stepped_on_ = false;        ///< the gradients that are there, by a prepared optimizer
  std::set<std::string> stepped_;  ///< with loss scaling: optimizers that have, on the gradients that are there
};

}  // namespace

void interpret(const Case& what, Machine& machine) {
  Flow flow(what, machine);
  auto program = what.program;
  // Open scopes are closed, and all is looked at in two ways.
  for (int i = 0; i < 4; ++i) program.push_back({"end", {}});
  program.push_back({"read", {}});
  program.push_back({"state_dict", {}});
  program.push_back({"evaluate", {{"data", "999"}, {"rows", "2"}}});
  for (const auto& operation : program) {
    if (flow.admits(operation)) machine.run(operation);
    ++machine.at;
  }
}

at::Tensor observable(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  at::Tensor value = tensor.detach();
  if (value.is_complex()) return value.to(at::kComplexDouble).cpu().contiguous().clone();
  if (at::isIntegralType(value.scalar_type(), true)) return value.to(at::kLong).cpu().contiguous().clone();
  return value.to(at::kDouble).cpu().contiguous().clone();
}

}  // namespace equivalence
