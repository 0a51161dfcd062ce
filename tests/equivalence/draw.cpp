#include <algorithm>
#include <vector>

#include "case.hpp"
#include "layouts.hpp"
#include "models.hpp"
#include "optimizers.hpp"
#include "random.hpp"

namespace equivalence {
namespace {

/// Writes the program: iterations of a few common forms, with something unusual here and there.
class Author {
 public:
  Author(Random& random, const Case& what, const Wish& wish)
      : random_(random), what_(what), layout_(layout_named(what["layout"])), plain_(wish.plain) {}

  std::vector<Operation> write() {
    if (!plain_ && random_.chance(0.25)) begin();
    for (int64_t left = random_.between(2, 4); left > 0; --left) {
      if (!plain_ && random_.chance(0.3)) between();
      if (!plain_ && random_.chance(0.05)) freeze_within_a_group();
      iteration();
      if (random_.chance(0.3)) look();
    }
    if (random_.chance(0.5)) forward();  // the next forward sees what the last step left
    return std::move(program_);
  }

 private:
  void add(const std::string& verb, std::map<std::string, std::string> values = {}) {
    program_.push_back({verb, std::move(values)});
  }

  /// Begins a part that is not averaged, where that can be.
  void begin_local() {
    if (!layout_.always_reduces || random_.chance(0.03)) add("no_sync"), ++local_;
  }
  void end_local() {
    if (local_ > 0) add("end"), --local_;
  }

  void forward() {
    std::map<std::string, std::string> values{{"data", std::to_string(random_.between(1, 99))},
                                              {"rows", std::to_string(random_.between(1, 4))}};
    if (random_.chance(0.2)) values["ragged"] = "1";
    if (what_["model"] == "branches" && layout_.finds_unused && random_.chance(0.6))
      values["part"] = std::to_string(random_.between(1, 2));
    // Another branch on each replica, or on each rank, which a sharded model refuses.
    const int64_t replica = layout_.ranks_of_replica(what_.integer("ranks"));
    if (values.contains("part") && replica > 1 && replica < what_.integer("ranks") && random_.chance(0.5))
      values["replicas"] = "1";
    else if (values.contains("part") && random_.chance(replica > 1 ? 0.05 : 0.5)) values["spread"] = "1";
    add("forward", values);
    unusual(0.04);
  }
  void backward(std::map<std::string, std::string> values = {}) {
    // Without a scaler what overflows on its way stays.
    if (random_.chance(layout_.has_scaler(what_["precision"]) ? 0.15 : layout_.reduce_dtype == "fp16" ? 0.05 : 0))
      values["burst"] = std::to_string(random_.below(what_.integer("ranks")));
    add("backward", std::move(values));
    unusual(0.08);
  }
  void clip() {
    if (random_.chance(0.6)) return;
    if (random_.chance(0.75)) {
      std::map<std::string, std::string> values{{"limit", random_.of({"0.02", "0.1", "1", "100"})}};
      if (random_.chance(0.2)) values["kind"] = random_.of({"1", "inf"});
      if (two() && random_.chance(0.5)) values["which"] = random_.of({"0", "1"});
      add("clip_norm", values);
    } else add("clip_value", {{"limit", random_.of({"0.001", "0.01", "0.1"})}});
  }
  bool two() const { return what_["optimizer"].find('+') != std::string::npos; }
  void step() {
    clip();
    if (two() && random_.chance(0.5)) {  // as the two of a GAN, each in its turn
      const std::string which = random_.of({"0", "1"});
      add("step", {{"which", which}});
      return add("zero_grad", {{"which", which}});
    }
    add(!plain_ && random_.chance(0.06) ? "bare_step" : "step");
    unusual(0.08);
    add("zero_grad", random_.chance(0.15) ? std::map<std::string, std::string>{{"zeros", "1"}}
                                          : std::map<std::string, std::string>{});
    unusual(0.06);
  }

  void iteration() {
    if (random_.chance(0.06)) forward();  // whose result is looked at, and no more
    const int64_t micro_steps = what_.integer("accumulation");
    const int64_t form = random_.below(micro_steps > 1 ? 10 : 7);
    if (form >= 5) {
      for (int64_t i = 0; i < std::max<int64_t>(micro_steps, 1); ++i) {
        add("accumulate");
        forward();
        if (i + 1 < micro_steps || !random_.chance(0.08)) backward();  // one that was announced may not come
        step();
        add("end");
        unusual(0.03);
        if (i + 1 < micro_steps && random_.chance(0.05)) files();
      }
      return;
    }
    switch (form) {
      case 0:  // by hand
        if (random_.chance(0.5)) forward();
        for (int64_t i = random_.between(1, 2); i > 0; --i) {
          begin_local();
          forward();
          backward();
          if (!plain_ && random_.chance(0.15)) add("read_grad");
          if (!plain_ && random_.chance(0.15)) step();
          end_local();
        }
        if (random_.chance(0.7)) {
          forward();
          backward();
        }
        break;
      case 1:
        forward();
        forward();
        backward({{"all", "1"}});
        break;
      case 2:
        forward();
        backward({{"keep", "1"}});
        if (!plain_ && random_.chance(0.3)) {  // each task's gradient by itself
          add("read_grad");
          add(random_.of({"module_zero_grad", "grad_none", "bare_zero_grad", "zero_grad"}));
          backward(random_.chance(0.5) ? std::map<std::string, std::string>{{"keep", "1"}}
                                       : std::map<std::string, std::string>{});
          add("read_grad");
        } else backward();
        break;
      case 3:
        for (int64_t i = random_.between(2, 3); i > 0; --i) {
          forward();
          backward();
        }
        break;
      default:
        forward();
        backward();
    }
    step();
  }

  void look() {
    switch (random_.below(4)) {
      case 0:
        return add("read");
      case 1:
        return add("state_dict");
      default:
        return add("evaluate", {{"data", std::to_string(random_.between(1, 99))},
                                {"rows", "2"},
                                {"how", random_.of({"none", "gather", "sum", "mean"})}});
    }
  }

  /// Something that is done where no gradient and no graph waits.
  void between() {
    switch (random_.below(6)) {
      case 0:
        return freeze();
      case 1:
        return files();
      case 2:
      case 3:
        return write_parameters();
      default:
        loops();
    }
  }

  /// Something that a run can begin with, before an engine has seen an ordinary step.
  void begin() {
    switch (random_.below(4)) {
      case 0:  // a rank of a sharded model leaves its first backward out
        if (what_.integer("ranks") > 1 && (layout_.keeps || random_.chance(0.1))) leave_out();
        break;
      case 1:
        begin_local();
        forward();
        if (random_.chance(0.7)) backward();
        end_local();
        if (random_.chance(0.5)) return;  // what waits goes into the first iteration
        break;
      default:
        return loops();
    }
    forward();
    backward();
    step();
  }
  /// A layer is frozen, or comes back, while gradients wait, and a checkpoint is made of that.
  void freeze_within_a_group() {
    begin_local();
    forward();
    backward();
    end_local();
    freeze();
    if (random_.chance(0.7)) files();
    if (random_.chance(0.3)) freeze();
    forward();
    backward();
    step();
  }

  void freeze() { add(random_.of({"freeze", "unfreeze"}), {{"index", std::to_string(random_.below(4))}}); }

  void unusual(double probability) {
    if (!random_.chance(probability)) return;
    const int64_t kind = random_.below(plain_ ? 4 : 22);
    if (kind == 0) return add("zero_grad");
    if (kind == 1) return add("set_rate", {{"factor", random_.of({"0.5", "2", "0.1"})}});
    if (kind < 4) return look();
    if (kind < 8) return names_from_before();
    if (kind < 12) return write_parameters();
    if (kind < 14) return freeze();
    if (kind < 17) return files();
    loops();
  }

  /// Calls that LibTorch itself offers, which stay in scope when a model is prepared.
  void names_from_before() {
    const std::string verb = random_.of({"module_zero_grad", "grad_none", "bare_step", "bare_zero_grad", "torch_clip",
                                         "read_grad", "hand_step", "scale_grad"});
    if (verb == "torch_clip") return add(verb, {{"limit", random_.of({"0.02", "0.1", "1"})}});
    if (verb == "hand_step") return add(verb, {{"rate", "0.1"}});
    if (verb == "scale_grad") return add(verb, {{"factor", random_.of({"0.5", "3"})}, {"new", random_.of({"0", "1"})}});
    add(verb);
  }

  void write_parameters() {
    if (random_.chance(0.3)) {
      add("ema", {{"decay", "0.9"}});
      if (random_.chance(0.3)) return;
      iteration();
      add("ema", {{"decay", "0.9"}});
      add("ema_swap");
      look();
      return add("ema_swap");
    }
    std::map<std::string, std::string> values{
        {"kind", random_.of({"mul", "add", "copy", "lerp", "zero", "fill", "clamp", "constant", "row", "index",
                             "scaled", "own_copy", "nudge"})},
        {"value", random_.of({"0.9", "0.5", "0.1"})},
        {"data", std::to_string(random_.between(1, 99))}};
    if (random_.chance(0.5)) values["index"] = std::to_string(random_.below(6));
    // Codes of weights have no room for small changes one by one, and what they become in 16 bits has none either.
    if (layout_.frozen_as_codes && what_["precision"] != "no" && values["kind"] == "nudge") values["kind"] = "mul";
    const bool as_one = layout_.frozen_as_codes && values["kind"] == "nudge";
    add(random_.chance(0.25) || as_one ? "summon" : "write", values);
  }

  void files() {
    if (what_.integer("withheld") != 0) return add("add_group");
    const std::string name = random_.of({"a", "b"});
    switch (random_.below(3)) {
      case 0:
        add("save", {{"name", name}});
        iteration();
        return add("load", {{"name", name}});
      case 1:
        add("save_model", {{"name", name}});
        iteration();
        return add("load_model", {{"name", name}});
      default: {
        std::vector<std::string> others;
        for (const auto& layout : layouts())
          if (std::find(layout.ranks.begin(), layout.ranks.end(), what_.integer("ranks")) != layout.ranks.end() &&
              std::count(layout.precisions.begin(), layout.precisions.end(), what_["precision"]) > 0 &&
              (what_["precision"] == "no" || goes_on_in(layout)) &&
              layout.param_dtype + layout.reduce_dtype + layout.wire_dtype == "" && !layout.has_codes() &&
              layout.finds_unused == layout_.finds_unused)
            others.push_back(layout.name);
        if (others.empty()) return;
        add("reload", {{"layout", random_.of(others)}});
      }
    }
  }

  /// Whether a run goes on in it, as far as 16 bits and the loss scale matter.
  bool goes_on_in(const Layout& layout) const {
    return layout.whole_in_16_bits == layout_.whole_in_16_bits && layout.optimizer == layout_.optimizer &&
           (!layout.whole_in_16_bits || layout.converts_buffers == layout_.converts_buffers);
  }

  /// Loops that the library has a hand in.
  void loops() {
    const std::string data = std::to_string(random_.between(100, 199));
    if (random_.chance(layout_.keeps ? 0.2 : 0.03) && what_.integer("ranks") > 1) return leave_out();
    if (random_.chance(0.15)) return add("autograd_grad", {{"data", data}});
    if (random_.chance(0.15))
      return add("failed_backward",
                 {{"data", data}, {"index", std::to_string(random_.below(6))}, {"bare", random_.of({"0", "1"})}});
    // Where there is one replica only, LocalSGD is refused, and so is a join where models are sharded.
    const bool refused = random_.chance(0.05), several = layout_.ranks_of_replica(2) < 2 || layout_.shard_ranks != 0;
    if (random_.chance(0.5) && (several || refused))
      return add("local_sgd",
                 {{"data", data}, {"every", random_.of({"1", "2", "3"})}, {"steps", random_.of({"3", "4", "5"})}});
    if (!layout_.sharded || refused)
      add("join", {{"data", data}, {"steps", random_.of({"21", "132", "20", "02", "333"})}});
  }
  void leave_out() {
    add("leave_out", {{"data", std::to_string(random_.between(100, 199))}, {"rank", std::to_string(random_.below(6))}});
  }

  Random& random_;
  const Case& what_;
  const Layout& layout_;
  const bool plain_;
  int64_t local_ = 0;  ///< scopes of no_sync that are open
  std::vector<Operation> program_;
};

/// Whether the optimizer's kernels step on what it holds.
bool can_step_ahead(const std::map<std::string, std::string>& settings) {
  const auto& optimizer = settings.at("optimizer");
  const auto& low = layout_named(settings.at("layout")).whole_in_16_bits;
  const bool has_kernel = optimizer != "foreign" && optimizer != "adamw8bit";
  const bool is_exact = settings.at("dtype") != "bf16" && (!low || low->masters || settings.at("precision") == "no");
  return has_kernel && settings.at("model") != "complex" && is_exact;
}

/// Whether one prepared optimizer steps element by element on all.
bool can_step_at_once(const std::map<std::string, std::string>& settings) {
  const auto& optimizer = settings.at("optimizer");
  return optimizer != "foreign" && optimizer.find('+') == std::string::npos && settings.at("withheld") == "0" &&
         settings.at("prepare") == "together";
}

bool is_mixed(const Layout& layout) {
  return !layout.param_dtype.empty() || !layout.reduce_dtype.empty() || !layout.wire_dtype.empty() ||
         layout.has_codes();
}

}  // namespace

Case draw(uint64_t seed, const Wish& wish) {
  Random random(seed);
  Case what = simplest();
  auto& s = what.settings;
  s["seed"] = std::to_string(random.between(1, 1000000));
  const auto choose = [&](const char* name, const std::string& value) {
    const auto wished = wish.settings.find(name);
    s[name] = wished == wish.settings.end() ? value : wished->second;
  };
  // The layout that people use most comes as often as all the rest of its kind.
  std::vector<std::string> names;
  const std::string family = random.of({"fsdp", "ddp", "deepspeed"});
  for (const auto& layout : layouts())
    if (layout.name.starts_with(family) || layout.name == "one") names.push_back(layout.name);
  const std::string any = random.of(names);
  choose("layout", random.chance(0.25) ? random.of({"ddp", "fsdp2", "deepspeed2"}) : any);
  const auto& possible = layout_named(s["layout"]).ranks;
  const int64_t common = random.chance(0.6) ? random.between(2, 3) : random.of(possible);
  const bool fits = std::find(possible.begin(), possible.end(), common) != possible.end();
  choose("ranks", std::to_string(fits ? common : possible.front()));
  choose("transport", random.of({"memory", "sockets"}));
  choose("model", random.chance(0.3) ? "mlp" : random.of(model_names()));
  // Where a layout is about buffers, or about what takes no part, the model has some.
  if (layout_named(s["layout"]).starts_from_rank0 && random.chance(s["layout"] == "ddp_own_buffers" ? 0.7 : 0.2))
    choose("model", random.of({"buffers", "conv"}));
  if (s["layout"] == "ddp_unused" ? random.chance(0.6) : layout_named(s["layout"]).sharded && random.chance(0.1))
    choose("model", "branches");
  choose("precision", random.of(layout_named(s["layout"]).precisions));
  const bool scaled = layout_named(s["layout"]).has_scaler(s["precision"]);
  const bool mixed = s["precision"] != "no" || is_mixed(layout_named(s["layout"]));
  choose("dtype", mixed ? "f32" : random.chance(0.1) ? "bf16" : random.of({"f64", "f64", "f32"}));
  // Half precision has no complex numbers, and rounds where a batch norm's or an optimizer's noise shows.
  if ((mixed || s["dtype"] == "bf16") && (s["model"] == "complex" || s["model"] == "conv")) choose("model", "mlp");
  choose("optimizer", random.of({"sgd", "sgd", "momentum", "adamw", "adagrad", "sgd+adamw", "sgd+adamw", "foreign"}));
  choose("rate", random.of({"0.1", "0.3"}));
  choose("accumulation", random.of({"1", "1", "2", "3"}));
  const bool in_full = wish.plain || random.chance(0.75);
  // A scaler divides what optimizers hold, and nothing else.
  choose("withheld", in_full || scaled || random.chance(0.6) ? "0" : random.of({"1", "2"}));
  choose("prepare", in_full || scaled || s["withheld"] != "0"
                        ? "together"
                        : random.of({"together", "late", "late_prepared", "never"}));
  choose("recompute", random.chance(0.9) || s["layout"] == "fsdp2_recompute" ? "0" : "1");
  if (s["dtype"] == "f32" && !layout_named(s["layout"]).sharded && random.chance(0.1)) choose("optimizer", "adamw8bit");
  if (const auto& only = layout_named(s["layout"]).optimizer; !only.empty()) choose("optimizer", only);
  // Drawn from the seed itself, so that the rest of a case is as without it.
  choose("ahead", layout_named(s["layout"]).sharded && Random(seed + 1).chance(0.3) && can_step_ahead(s) ? "1"
                  : layout_named(s["layout"]).can_step_at_once(s["precision"]) && Random(seed + 2).chance(0.2) &&
                          can_step_at_once(s)
                      ? "2"
                      : "0");
  what.program = Author(random, what, wish).write();
  return what;
}

}  // namespace equivalence
