#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "profiler/module_profile.hpp"

namespace accelerate::profiler {
namespace {

double to_hundredths(double number) { return std::round(number * 100) / 100; }

/// "1.5 K"
std::string number_text(double number) {
  struct Unit {
    double size;
    const char* name;
  };
  constexpr Unit kUnits[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "K"}, {1, ""}, {1e-3, "m"}};
  Unit unit{1e-6, "u"};
  for (const auto& larger : kUnits)
    if (number >= larger.size) {
      unit = larger;
      break;
    }
  if (number == 0) unit = {1, ""};
  return fmt::format("{:g} {}", to_hundredths(number / unit.size), unit.name);
}
std::string number_text(int64_t number) { return number_text(static_cast<double>(number)); }

std::string params_text(int64_t params) {
  std::string text = number_text(params);
  std::replace(text.begin(), text.end(), 'G', 'B');
  if (text.ends_with(' ')) text.pop_back();
  return text;
}

double percent(double part, double whole) { return whole > 0 ? to_hundredths(100 * part / whole) : 0; }
double per(double what, double seconds) { return seconds > 0 ? what / seconds : 0; }

/// The rest of a module's line, after its name.
std::string module_text(const ProfiledModule& module, const ModuleCost& cost, const ProfiledModule& root,
                        const ModuleCost& total) {
  std::string text = fmt::format(
      "{} = {:g}% Params, {}MACs = {:g}% MACs, {}s = {:g}% latency, {}FLOPS", params_text(module.num_parameters),
      percent(static_cast<double>(module.num_parameters), static_cast<double>(root.num_parameters)),
      number_text(cost.macs), percent(static_cast<double>(cost.macs), static_cast<double>(total.macs)),
      number_text(cost.seconds), percent(cost.seconds, total.seconds),
      number_text(per(static_cast<double>(cost.flops), cost.seconds)));
  if (!module.settings.empty()) text += ", " + module.settings;
  return text;
}

/// The tree as Python prints modules, with the costs before their settings.
std::string tree_text(const ModuleProfile& profile, const std::vector<ModuleCost>& costs) {
  const auto& modules = profile.modules();
  std::vector<std::vector<size_t>> children(modules.size());
  for (size_t i = 1; i < modules.size(); ++i) children[static_cast<size_t>(modules[i].parent)].push_back(i);
  std::string text;
  const std::function<void(size_t, const std::string&)> write = [&](size_t i, const std::string& indent) {
    text += modules[i].class_name + "(";
    const std::string own = module_text(modules[i], costs[i], modules.front(), costs.front());
    if (children[i].empty()) {
      text += own + ")";
      return;
    }
    text += "\n" + indent + "  " + own;
    for (const size_t child : children[i]) {
      text += "\n" + indent + "  (" + modules[child].name + "): ";
      write(child, indent + "  ");
    }
    text += "\n" + indent + ")";
  };
  write(0, "");
  return text + "\n";
}

/// {'Linear': '1.5 K', …}, the largest first.
std::string top_text(const std::map<std::string, double>& of_class, int64_t most,
                     const std::function<std::string(double)>& shown) {
  std::vector<std::pair<std::string, double>> sorted(of_class.begin(), of_class.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  sorted.resize(std::min(sorted.size(), static_cast<size_t>(std::max(most, int64_t{0}))));
  std::string text = "{";
  for (const auto& [name, value] : sorted)
    text += fmt::format("{}'{}': '{}'", text.size() > 1 ? ", " : "", name, shown(value));
  return text + "}";
}

std::string aggregated_text(const ModuleProfile& profile, const std::vector<ModuleCost>& costs,
                            const ModuleProfileReport& report) {
  struct Sums {
    std::map<std::string, double> params, macs, seconds;  ///< by class
  };
  const auto& modules = profile.modules();
  std::vector<size_t> depths(modules.size(), 0);
  std::vector<Sums> sums;
  for (size_t i = 0; i < modules.size(); ++i) {
    if (i > 0) depths[i] = depths[static_cast<size_t>(modules[i].parent)] + 1;
    if (sums.size() <= depths[i]) sums.resize(depths[i] + 1);
    Sums& at = sums[depths[i]];
    at.params[modules[i].class_name] += static_cast<double>(modules[i].num_parameters);
    at.macs[modules[i].class_name] += static_cast<double>(costs[i].macs);
    at.seconds[modules[i].class_name] += costs[i].seconds;
  }
  std::string text = fmt::format("Top {} modules in terms of params, MACs or fwd latency at different model depths:\n",
                                 report.top_modules);
  for (size_t depth = 0; depth < sums.size(); ++depth) {
    if (report.module_depth >= 0 && depth > static_cast<size_t>(report.module_depth)) break;
    const auto& at = sums[depth];
    text += fmt::format(
        "depth {}:\n    params      - {}\n    MACs        - {}\n    fwd latency - {}\n", depth,
        top_text(at.params, report.top_modules, [](double n) { return params_text(static_cast<int64_t>(n)); }),
        top_text(at.macs, report.top_modules, [](double n) { return number_text(n) + "MACs"; }),
        top_text(at.seconds, report.top_modules, [](double n) { return number_text(n) + "s"; }));
  }
  return text;
}

}  // namespace

std::string text_of(const ModuleProfile& profile, const ModuleProfileReport& report) {
  const auto costs = profile.costs();
  const auto flops = static_cast<double>(costs.front().flops);
  const auto params = profile.modules().front().num_parameters;
  const double forward = report.forward_seconds, backward = report.backward_seconds, step = report.step_seconds;
  const double factor = 2 + report.recompute_fwd_factor;
  const auto micro_steps = static_cast<double>(report.micro_steps);
  std::string text = fmt::format(
      "\n-------------------------- Flops Profiler --------------------------\n"
      "Profile Summary at step {}:\n"
      "Notations:\n"
      "data parallel size (dp_size), model parallel size(mp_size),\n"
      "number of parameters (params), number of multiply-accumulate operations(MACs),\n"
      "number of floating-point operations (flops), floating-point operations per second (FLOPS),\n"
      "fwd latency (forward propagation latency), bwd latency (backward propagation latency),\n"
      "step (weights update latency), iter latency (sum of fwd, bwd and step latency)\n\n",
      report.step);
  const auto line = [&](const std::string& what, const std::string& value) {
    text += fmt::format("{:<70}  {:<8}\n", what + ": ", value);
  };
  line("world size", std::to_string(report.ranks));
  line("data parallel size", std::to_string(report.ranks));
  line("model parallel size", "1");
  line("batch size per GPU", std::to_string(report.batch_size));
  line("params per GPU", params_text(params));
  line("params of model = params per GPU * mp_size", params_text(params));
  line("fwd MACs per GPU", number_text(costs.front().macs) + "MACs");
  line("fwd flops per GPU", number_text(flops));
  line("fwd flops of model = fwd flops per GPU * mp_size", number_text(flops));
  line("fwd latency", number_text(forward) + "s");
  line("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", number_text(per(flops, forward)) + "FLOPS");
  line("bwd latency", number_text(backward) + "s");
  line(fmt::format("bwd FLOPS per GPU = {:g} * fwd flops per GPU / bwd latency", factor),
       number_text(per(factor * flops, backward)) + "FLOPS");
  line(fmt::format("fwd+bwd FLOPS per GPU = {:g} * fwd flops per GPU / (fwd+bwd latency)", factor + 1),
       number_text(per((factor + 1) * flops, forward + backward)) + "FLOPS");
  line("step latency", number_text(step) + "s");
  line("iter latency", number_text(forward + backward + step) + "s");
  line(fmt::format("FLOPS per GPU = {:g} * fwd flops per GPU / iter latency", factor + 1),
       number_text(per((factor + 1) * flops, forward + backward + step)) + "FLOPS");
  line("samples/second", fmt::format("{:g}", to_hundredths(per(static_cast<double>(report.samples),
                                                               micro_steps * (forward + backward) + step))));
  text += "\n----------------------------- Aggregated Profile per GPU -----------------------------\n";
  text += aggregated_text(profile, costs, report);
  if (report.detailed) {
    text +=
        "\n------------------------------ Detailed Profile per GPU ------------------------------\n"
        "Each module profile is listed after its name in the following order:\n"
        "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd "
        "latency, fwd FLOPS\n\n"
        "Note: 1. What a module computes besides its submodules is in its own numbers only.\n"
        "2. Operations are counted by the sizes of tensors; latencies are those of operators, whose sum is less than "
        "the fwd latency above.\n\n" +
        tree_text(profile, costs);
  }
  return text + "------------------------------------------------------------------------------\n";
}

}  // namespace accelerate::profiler
