// The numbers that LibTorch draws after set_seed. The fields for numpy's and Python's generators have no counterpart
// here.
#include <torch/torch.h>

#include "accelerate/data/random.hpp"
#include "runner.hpp"

namespace conformance::set_seed_cases {
namespace {

json values(const torch::Tensor& tensor) {
  const auto t = tensor.to(torch::kDouble).contiguous();
  return std::vector<double>(t.data_ptr<double>(), t.data_ptr<double>() + t.numel());
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    accelerate::set_seed(row[0]);
    json found = json::array();
    found.push_back(values(torch::rand(4)));
    found.push_back(values(torch::randn(4)));
    found.push_back(values(torch::randint(0, 1000, {4})));
    found.push_back(values(torch::randperm(10)));
    bool same = true;
    for (size_t i = 0; i < found.size(); ++i) same = same && close(found[i], row[i + 1], 0);
    report.check(same, [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration registration("set_seed", {run});

}  // namespace
}  // namespace conformance::set_seed_cases
