#include "judge.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include "layouts.hpp"
#include "reference.hpp"

namespace equivalence {
namespace {

/// The rounding of the dtype that rounds most.
struct Rounding {
  double tolerance;  ///< how far values may be from the reference's, as a part of the largest of the tensor
  double unit;       ///< of one number
};
Rounding rounding_of(const Case& what) {
  const Layout& layout = layout_named(what["layout"]);
  const auto any = [&](const char* type) {
    return what["precision"] == type || what["dtype"] == type || layout.param_dtype == type ||
           layout.reduce_dtype == type || layout.wire_dtype == type;
  };
  // Steps on parameters of 16 bits round each time, and so do averages of their gradients.
  const bool low_masters = layout.whole_in_16_bits && !layout.whole_in_16_bits->masters;
  if (what["dtype"] == "bf16" || (low_masters && what["precision"] == "bf16")) return {6e-2, 0x1p-8};
  // Programs read codes, and may write what they have read.
  if (any("bf16") || layout.weights_as_codes) return {4e-2, 0x1p-8};
  if (any("fp16")) return {1e-2, 0x1p-11};
  if (what["optimizer"] == "adamw8bit") return {2e-2, 0x1p-24};
  return what["dtype"] == "f64" ? Rounding{1e-8, 0x1p-53} : Rounding{2e-4, 0x1p-24};
}

/// Models return a sum whose terms may be larger than what is left of them, and it is the terms that are rounded.
bool is_returned(const std::string& name) {
  return name == "output" || name == "evaluated" || name == "gathered" || name == "sum" || name == "mean";
}

bool is_normalised(const Case& what) { return what["optimizer"] != "sgd" && what["optimizer"] != "momentum"; }

/// A normalised step is as large as the rate (a fifth of the case's), however small its gradient: where two of them
/// cancel, their roundings are left, of which each step has a few.
double rounding_of_steps(const Case& what) {
  return is_normalised(what) ? 4 * 0.2 * std::stod(what["rate"]) * rounding_of(what).unit : 0;
}

/// The observations of the reference's ranks, and how it failed.
struct Expected {
  std::vector<std::vector<Observation>> seen;
  std::string failure;
};
Expected expect(const Case& what, size_t ranks, double blur = 0, uint64_t seed = 0) {
  Expected expected{std::vector<std::vector<Observation>>(ranks), ""};
  const auto observe = [&](int64_t rank, Observation seen) {
    expected.seen[static_cast<size_t>(rank)].push_back(std::move(seen));
  };
  try {
    interpret(what, *make_reference(what, observe, blur, seed));
  } catch (const std::exception& error) {
    expected.failure = error.what();
  }
  return expected;
}

/// How much a rounding here and there changes what comes out, where something is not as expected: a case may be such
/// that it makes a number of it that has nothing to do with the exact one.
class Sensitivity {
 public:
  Sensitivity(const Case& what, size_t ranks) : what_(what), ranks_(ranks) {}
  /// The sensitivity of one observation, or nothing where the same is not even finite, or not seen.
  std::optional<double> of(size_t rank, size_t index, const Observation& expected) {
    for (uint64_t seed = runs_.size(); seed < kRuns; ++seed)
      runs_.push_back(expect(what_, ranks_, rounding_of(what_).unit, seed + 1));
    double most = 0;
    for (const auto& run : runs_) {
      if (index >= run.seen[rank].size()) return std::nullopt;
      const at::Tensor& other = run.seen[rank][index].value;
      const at::Tensor odd = expected.value.isfinite().logical_not();
      if (other.sizes() != odd.sizes() || !at::equal(odd, other.isfinite().logical_not())) return std::nullopt;
      most = std::max(most, (other - expected.value).masked_fill(odd, 0).abs().max().item<double>());
    }
    return most;
  }

 private:
  static constexpr size_t kRuns = 24;
  const Case& what_;
  const size_t ranks_;
  std::vector<Expected> runs_;
};

std::string shown(const at::Tensor& value) {
  std::ostringstream text;
  const at::Tensor flat = value.flatten();
  text << value.sizes() << " {";
  for (int64_t i = 0; i < std::min<int64_t>(flat.numel(), 6); ++i) {
    if (i > 0) text << ", ";
    if (flat.is_complex()) text << flat[i].item<c10::complex<double>>();
    else text << flat[i].item<double>();
  }
  text << (flat.numel() > 6 ? ", …}" : "}");
  return text.str();
}

/// Empty where they are near enough.
/// @param tolerance  a part of the largest, and @param least  that much anyway
/// @param sensitivity  asked when values are further off than the tolerance: nothing, or how far they may be
std::string difference(const at::Tensor& found, const at::Tensor& expected, double tolerance, double least,
                       const std::function<std::optional<double>()>& sensitivity) {
  if (found.sizes() != expected.sizes()) return "of another shape";
  if (found.scalar_type() != expected.scalar_type()) return "of another type";
  if (expected.numel() == 0) return "";
  // Infinities and NaN must be where they are expected; they are not compared otherwise.
  const at::Tensor odd = expected.isfinite().logical_not();
  if (!at::equal(odd, found.isfinite().logical_not())) return sensitivity() ? "finite elsewhere" : "";
  const double largest = expected.masked_fill(odd, 0).abs().max().item<double>();
  const double off = (found - expected).masked_fill(odd, 0).abs().max().item<double>();
  if (off <= tolerance * (largest + 1e-3) + least) return "";
  // With a handful of samples the largest may be a third of what is possible.
  const auto sensitive = sensitivity();
  if (!sensitive || off <= 3 * *sensitive) return "";
  std::ostringstream text;
  text << "off by " << off << " of " << largest;
  return text.str();
}

/// Observations that some ranks see alone (a state dict that rank 0 gets) are no parameters.
std::vector<const Observation*> parameters_in(const std::vector<Observation>& seen) {
  std::vector<const Observation*> parameters;
  for (const auto& one : seen)
    if (one.name.starts_with("param.")) parameters.push_back(&one);
  return parameters;
}

std::string where(const Case& what, int64_t operation) {
  const auto index = static_cast<size_t>(operation);
  std::string text = "after operation " + std::to_string(operation + 1);
  if (index >= what.program.size()) return "at the end";
  return text + " (" + what.program[index].verb + ")";
}

std::string first_of(const std::string& name) { return name.substr(0, name.find('.')); }

/// Whether so many elements that it is no chance are as expected, in those 16 bits or in more. Where what is stepped on
/// has fp32, and what travels has not, tolerances would hide the contrary.
/// @param stepped  in fp32: a gradient that is zero in exact arithmetic may have left the reference's values as they
/// began, in 16 bits, and rounding moved these
bool same_precision(const at::Tensor& found, const at::Tensor& expected, const std::string& name, bool stepped) {
  const auto type = name == "bf16" ? at::kBFloat16 : at::kHalf;
  const auto in_16_bits = [type](const at::Tensor& values) {
    return at::equal(values, values.to(type).to(values.scalar_type()));
  };
  const bool tells = expected.is_floating_point() && at::count_nonzero(expected.frac()).item<int64_t>() > 4 &&
                     expected.isfinite().all().item<bool>() && found.isfinite().all().item<bool>();
  return !tells || in_16_bits(found) == in_16_bits(expected) || (stepped && in_16_bits(expected));
}
/// Whether a step in fp32 may have changed that state by then.
bool has_stepped_in_fp32(const Case& what, const Observation& seen) {
  if (!seen.name.starts_with("state.") || !layout_named(what["layout"]).whole_in_16_bits->masters) return false;
  const auto end = std::min(static_cast<size_t>(seen.operation), what.program.size());
  return std::any_of(what.program.begin(), what.program.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const Operation& operation) {
                       return operation.verb == "join" || operation.verb.find("step") != std::string::npos;
                     });
}
/// The 16 bits that an observation of that name has, or lacks; empty where that is not told.
std::string precision_to_tell(const Case& what, const std::string& name) {
  const auto& layout = layout_named(what["layout"]);
  // A program that reads masters sees their image, and may write it back.
  const bool writes = std::any_of(what.program.begin(), what.program.end(), [](const Operation& operation) {
    return operation.verb == "write" || operation.verb == "summon" || operation.verb == "ema_swap" ||
           operation.verb == "load_model";
  });
  if (!layout.whole_in_16_bits || what["dtype"] != "f32" || writes) return "";
  const std::string type =
      name.starts_with("state.") || layout.reduce_dtype.empty() ? what["precision"] : layout.reduce_dtype;
  return (name.starts_with("state.") || name.starts_with("grad.")) && type.ends_with("16") ? type : "";
}

/// Compares what a rank saw, as far as it came.
Verdict compare(const Case& what, int64_t rank, const RankReport& report, const std::vector<Observation>& expected,
                Sensitivity& sensitivity) {
  const auto [tolerance, unit] = rounding_of(what);
  const double of_steps = rounding_of_steps(what), of_terms = unit;  // which are about 1
  for (size_t i = 0; i < report.seen.size(); ++i) {
    const Observation& found = report.seen[i];
    if (i >= expected.size() || expected[i].name != found.name || expected[i].operation != found.operation)
      return {"other things seen",
              "rank " + std::to_string(rank) + " has " + found.name + " " + where(what, found.operation) +
                  ", expected " +
                  (i < expected.size() ? expected[i].name + " " + where(what, expected[i].operation)
                                       : std::string("nothing more"))};
    const std::string type = precision_to_tell(what, found.name);
    const std::string off =
        difference(found.value, expected[i].value, tolerance, of_steps + (is_returned(found.name) ? of_terms : 0),
                   [&] { return sensitivity.of(static_cast<size_t>(rank), i, expected[i]); });
    if (off.empty() &&
        (type.empty() || same_precision(found.value, expected[i].value, type, has_stepped_in_fp32(what, found))))
      continue;
    if (off.empty())
      return {"precision: " + first_of(found.name),
              "rank " + std::to_string(rank) + ", " + where(what, found.operation) + ": " + found.name +
                  " has other precision than expected\n  found    " + shown(found.value) + "\n  expected " +
                  shown(expected[i].value)};
    return {"numbers: " + first_of(found.name), "rank " + std::to_string(rank) + ", " + where(what, found.operation) +
                                                    ": " + found.name + " is " + off + "\n  found    " +
                                                    shown(found.value) + "\n  expected " + shown(expected[i].value)};
  }
  if (report.finished && report.seen.size() < expected.size())
    return {"other things seen", "rank " + std::to_string(rank) + " lacks " + expected[report.seen.size()].name + " " +
                                     where(what, expected[report.seen.size()].operation)};
  return {};
}

bool listed(const Case& what, const RankReport& rank, const std::vector<Refusal>& refusals) {
  const std::string text = to_text(what);
  for (const auto& refusal : refusals) {
    bool applies = refusal.error == rank.error && rank.error_text.find(refusal.text) != std::string::npos;
    for (const auto& part : refusal.where) applies &= text.find(part) != std::string::npos;
    if (applies) return true;
  }
  return false;
}

std::string all_errors(const Report& report) {
  std::string text;
  for (size_t rank = 0; rank < report.size(); ++rank) {
    const auto& own = report[rank];
    text += "  rank " + std::to_string(rank) + ": " +
            (own.finished        ? "finished"
             : own.error.empty() ? "no error"
                                 : own.error + ": " + own.error_text.substr(0, 600)) +
            (own.end.empty() ? "" : " (" + own.end + ")") + "\n";
  }
  return text;
}

/// The text of the first error that is not about another rank's.
std::string gist(const Report& report) {
  std::string chosen;
  for (const auto& own : report) {
    if (own.error.empty()) continue;
    std::string text = own.error + " " + own.error_text.substr(0, 60);
    std::erase_if(text, [](char c) { return c >= '0' && c <= '9'; });
    if (chosen.empty() || own.error != "CommError") chosen = text;
  }
  return chosen.substr(0, chosen.find('\n'));
}

}  // namespace

std::vector<Refusal> read_refusals(const std::string& page) {
  std::vector<Refusal> refusals;
  std::ifstream in(page);
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.find("<!-- refusals -->") != std::string::npos) inside = true;
    if (!inside || !line.starts_with("| ") || line.starts_with("| what") || line.starts_with("|--")) continue;
    std::vector<std::string> cells;
    std::istringstream text(line.substr(1));
    for (std::string cell; std::getline(text, cell, '|');) {
      std::erase(cell, '`');
      const auto begin = cell.find_first_not_of(' '), end = cell.find_last_not_of(' ');
      cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
    }
    if (cells.size() < 4) continue;
    Refusal refusal{{}, cells[2], cells[3]};
    std::istringstream parts(cells[1]);
    for (std::string part; std::getline(parts, part, ',');)
      refusal.where.push_back(part.substr(part.find_first_not_of(' ')));
    refusals.push_back(refusal);
  }
  return refusals;
}

Verdict judge(const Case& what, const Report& report, const std::vector<Refusal>& refusals) {
  const auto [expected, failure] = expect(what, report.size());
  Sensitivity sensitivity(what, report.size());
  for (size_t rank = 0; rank < report.size(); ++rank)
    if (const Verdict verdict = compare(what, static_cast<int64_t>(rank), report[rank], expected[rank], sensitivity);
        verdict.failed() && (failure.empty() || verdict.kind != "other things seen"))
      return {verdict.kind, verdict.text + "\n" + all_errors(report)};
  // On all ranks the same to the bit, where one process has the same.
  for (size_t rank = 1; rank < report.size(); ++rank) {
    const auto first = parameters_in(report[0].seen), own = parameters_in(report[rank].seen);
    const auto first_expected = parameters_in(expected[0]), own_expected = parameters_in(expected[rank]);
    for (size_t i = 0; i < std::min({first.size(), own.size(), first_expected.size(), own_expected.size()}); ++i)
      if (at::equal(first_expected[i]->value, own_expected[i]->value) && !at::equal(first[i]->value, own[i]->value) &&
          !first[i]->value.isnan().any().item<bool>())
        return {"ranks differ: param", "rank " + std::to_string(rank) + " has not rank 0's bits of " + first[i]->name +
                                           " " + where(what, first[i]->operation)};
  }
  bool finished = true, ended_well = true, errors = true, killed = false;
  for (const auto& own : report) {
    finished &= own.finished;
    ended_well &= own.end.empty();
    errors &= !own.error.empty();
    killed |= own.end.starts_with("killed");
  }
  if (killed) return {finished ? "does not end" : "hang", all_errors(report)};
  if (finished && ended_well && failure.empty()) return {};
  if (finished && !failure.empty()) return {"reference", "the reference has failed: " + failure};
  if (finished) return {"end", all_errors(report)};
  // A rank that goes on alone may come to its end before the others find out; the job fails by their errors.
  const bool ended =
      std::all_of(report.begin(), report.end(), [](const auto& own) { return own.finished || !own.error.empty(); });
  if (!failure.empty() && ended) return {"refused", "also by LibTorch alone: " + failure};
  if (!ended_well && !errors) return {"crash", all_errors(report)};
  if (!errors) return {"not on all ranks", all_errors(report)};
  for (const auto& own : report)
    if (listed(what, own, refusals)) return {"refused", own.error_text};
  return {"refusal: " + gist(report), all_errors(report)};
}

std::optional<Case> in_double(Case what) {
  if (what["dtype"] != "f32" || what["optimizer"] == "adamw8bit" || !is_normalised(what) ||
      rounding_of(what).unit != 0x1p-24)
    return std::nullopt;
  what.settings["dtype"] = "f64";
  return what;
}

}  // namespace equivalence
