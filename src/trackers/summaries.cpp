#include "trackers/summaries.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "trackers/images.hpp"
#include "trackers/protobuf.hpp"
#include "utils/raise.hpp"

namespace accelerate::summaries {
namespace {

namespace pb = protobuf;

enum DataType : int64_t { kFloat = 1, kDouble = 2, kString = 7 };

/// Summary.value = {tag, ...}
std::string summary(const std::string& tag, const std::string& content) {
  return pb::bytes(1, pb::bytes(1, tag) + content);
}
/// Value.metadata.plugin_data
std::string for_plugin(const char* name, const std::string& content = {}) {
  return pb::bytes(9, pb::bytes(1, pb::bytes(1, name) + (content.empty() ? "" : pb::bytes(2, content))));
}
std::string tensor(DataType type, const std::string& content) { return pb::bytes(8, pb::whole(1, type) + content); }

std::string packed(const std::vector<double>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)};
}

const std::vector<double>& bin_edges() {
  static const auto edges = [] {
    std::vector<double> positive, all;
    for (double edge = 1e-12; edge < 1e20; edge *= 1.1) positive.push_back(edge);
    for (auto edge = positive.rbegin(); edge != positive.rend(); ++edge) all.push_back(-*edge);
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    return all;
  }();
  return edges;
}

/// As the HParams plugin's `google.protobuf.Value`.
std::string hparam(const TrackerValue& value) {
  if (const auto* truth = std::get_if<bool>(&value.value)) return pb::whole(4, *truth ? 1 : 0);
  if (const auto number = value.number()) return pb::real(2, *number);
  return pb::bytes(3, *value.text());
}
int64_t hparam_type(const TrackerValue& value) {
  constexpr int64_t kText = 1, kTruth = 2, kNumber = 3;
  return value.text() ? kText : std::holds_alternative<bool>(value.value) ? kTruth : kNumber;
}
/// HParamsPluginData, whose version is 0, the default
std::string hparams(const char* tag, int field, const std::string& content) {
  return summary(tag, for_plugin("hparams", pb::bytes(field, content)));
}

}  // namespace

std::string scalar(const std::string& tag, double value, ScalarForm form) {
  switch (form) {
    case ScalarForm::simple:
      return summary(tag, pb::real(2, static_cast<float>(value)));
    case ScalarForm::tensor:
      return summary(tag, tensor(kFloat, pb::bytes(5, pb::raw(static_cast<float>(value)))) + for_plugin("scalars"));
    case ScalarForm::double_precision:
      return summary(tag, tensor(kDouble, pb::bytes(6, pb::raw(value))) + for_plugin("scalars"));
  }
  return {};
}

std::string text(const std::string& tag, const std::string& markdown) {
  const auto one_dimension_of_one = pb::bytes(2, pb::bytes(2, pb::whole(1, 1)));
  return summary(tag + "/text_summary",
                 tensor(kString, one_dimension_of_one + pb::bytes(8, markdown)) + for_plugin("text"));
}

std::string image(const std::string& tag, const at::Tensor& hwc) {
  return summary(tag, pb::bytes(4, pb::whole(1, hwc.size(0)) + pb::whole(2, hwc.size(1)) + pb::whole(3, hwc.size(2)) +
                                       pb::bytes(4, encode_png(hwc))));
}

std::string histogram(const std::string& tag, const at::Tensor& values, std::optional<int64_t> max_bins) {
  const auto all = values.detach().to(at::kCPU, at::kDouble).reshape({-1}).contiguous();
  const auto* data = all.const_data_ptr<double>();
  const auto& edges = bin_edges();
  std::vector<double> counts(edges.size() - 1), limits(edges);
  double least = HUGE_VAL, most = -HUGE_VAL, sum = 0, squares = 0;
  int64_t n = 0;
  for (int64_t i = 0; i < all.numel(); ++i) {
    const double x = data[i];
    if (!std::isfinite(x)) continue;
    ++n, sum += x, squares += x * x;
    least = std::min(least, x), most = std::max(most, x);
    const auto above = std::upper_bound(edges.begin(), edges.end(), x);  // a bin has its left edge
    if (above != edges.begin() && above != edges.end()) ++counts[static_cast<size_t>(above - edges.begin() - 1)];
  }
  if (n == 0)
    raise<ShapeError>("log_histogram: '{}' has {} values and none of them is finite, expected at least one", tag,
                      all.numel());
  if (max_bins && static_cast<int64_t>(counts.size()) > *max_bins) {
    const size_t together = counts.size() / static_cast<size_t>(*max_bins);
    std::vector<double> joined, left;
    for (size_t i = 0; i < counts.size(); i += together) {
      const auto end = counts.begin() + static_cast<int64_t>(std::min(i + together, counts.size()));
      joined.push_back(std::accumulate(counts.begin() + static_cast<int64_t>(i), end, 0.0));
      left.push_back(limits[i]);
    }
    left.push_back(limits.back());
    counts.swap(joined), limits.swap(left);
  }
  // Only the right limits are kept. Bins that are empty on both sides are cut off but for one on the left.
  const auto used = [](double count) { return count > 0; };
  const auto first = std::find_if(counts.begin(), counts.end(), used);
  const auto last = std::find_if(counts.rbegin(), counts.rend(), used).base();
  std::vector<double> bucket, limit;
  if (first == counts.end()) {  // all beyond the last edge
    bucket = {0, static_cast<double>(n)}, limit = {std::nextafter(least, -HUGE_VAL), most};
  } else {
    const auto begin = first - counts.begin(), end = last - counts.begin();
    if (begin == 0) bucket.push_back(0);
    bucket.insert(bucket.end(), counts.begin() + std::max<int64_t>(begin - 1, 0), counts.begin() + end);
    limit.assign(limits.begin() + begin, limits.begin() + end + 1);
  }
  return summary(tag, pb::bytes(5, pb::real(1, least) + pb::real(2, most) + pb::real(3, static_cast<double>(n)) +
                                       pb::real(4, sum) + pb::real(5, squares) + pb::bytes(6, packed(limit)) +
                                       pb::bytes(7, packed(bucket))));
}

std::string hparams_experiment(const TrackerValues& values, double time) {
  std::string experiment = pb::real(3, time);
  for (const auto& [name, value] : values)
    experiment += pb::bytes(4, pb::bytes(1, name) + pb::whole(4, hparam_type(value)));
  return hparams("_hparams_/experiment", 2, experiment);
}

std::string hparams_start(const TrackerValues& values, double time) {
  std::string session;
  for (const auto& [name, value] : values) session += pb::bytes(1, pb::bytes(1, name) + pb::bytes(2, hparam(value)));
  return hparams("_hparams_/session_start_info", 3, session + pb::real(5, time));
}

std::string hparams_end(double time) {
  constexpr int64_t kSuccess = 1;
  return hparams("_hparams_/session_end_info", 4, pb::whole(1, kSuccess) + pb::real(2, time));
}

}  // namespace accelerate::summaries
