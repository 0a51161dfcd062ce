// DeepSpeed's dynamic loss scale: scale and hysteresis after each step, whose gradients overflow or not. (What the
// file's sections of a configuration are read as is for the reader of configurations.)
#include <torch/optim/sgd.h>

#include <limits>

#include "accelerate/optim/grad_scaler.hpp"
#include "runner.hpp"

namespace conformance::deepspeed_loss_scaler_cases {
namespace {

json trace_of(const json& row) {
  const at::Tensor weight = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.1));
  accelerate::optim::GradScaler scaler(
      accelerate::optim::DynamicLossScale{.initial_scale = std::exp2(row[0].get<int>()),
                                          .window = row[1],
                                          .hysteresis = row[2],
                                          .consecutive_hysteresis = row[3],
                                          .min_scale = row[4]});
  json found{{"scale_and_hysteresis", json::array()}};
  const auto note = [&] {
    found["scale_and_hysteresis"].push_back({scaler.get_scale(), scaler.get_hysteresis().value()});
  };
  note();
  std::string what;
  const bool failed = throws_error(
      [&] {
        for (const json& overflows : row[5]) {
          sgd.zero_grad();
          const double factor = overflows == 1 ? std::numeric_limits<double>::infinity() : 1e-3;
          scaler.scale((weight * factor).sum()).backward();
          const bool stepped = scaler.step(sgd);
          if (stepped == (overflows == 1)) throw std::runtime_error("a step was taken, or skipped, wrongly");
          scaler.update(sgd);
          note();
        }
      },
      &what);
  if (failed) found["error"] = what;
  return found;
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases"))
    report.guarded(row, [&] {
      const json expected = row.back(), found = trace_of(row);
      const bool same = found["scale_and_hysteresis"] == expected["scale_and_hysteresis"] &&
                        found.contains("error") == expected.contains("error") &&
                        found.value("error", "smallest").find("smallest") != std::string::npos;
      report.check(same, [&] { return row.dump() + "\n    found " + found.dump(); });
    });
}

const Registration registration("deepspeed_loss_scaler", {run});

}  // namespace
}  // namespace conformance::deepspeed_loss_scaler_cases
