// The cost of an operator on its way through the residency's chain of handlers: view, t and add on a tensor of four by
// four, where the arithmetic is nothing.
//
//   plain      nobody watches: the operator never comes by
//   member     of a unit that is resident
//   device     a plain tensor in a scope of init_on_device(), in which all operators come by
//   recompute  a plain tensor in a forward whose units are recomputed
//   stages     a plain tensor in a forward of a pipeline
//
// usage: operator_call [ROUNDS]     prints JSON: the nanoseconds per call, best round and median
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/residency/deferred.hpp"
#include "parallel/pipeline/stages.hpp"
#include "residency/activations/unit_checkpoints.hpp"
#include "residency/residency.hpp"

namespace {

using namespace accelerate;
using at::Tensor;

struct CopiedHome final : residency::Home {
  explicit CopiedHome(Tensor bytes) : bytes_(std::move(bytes)) {}
  std::unique_ptr<residency::Transfer> fetch(const Tensor& flat) override {
    Tensor(flat).copy_(bytes_);
    return nullptr;
  }
  void store(const Tensor& flat) override { bytes_.copy_(flat); }

 private:
  Tensor bytes_;
};

void add_unit(residency::Residency& engine, const Tensor& tensor) {
  std::vector<residency::PartSpec> parts(1);
  parts[0].layout = residency::lay_out({tensor});
  parts[0].home = std::make_unique<CopiedHome>(at::ones({parts[0].layout.numel}));
  parts[0].members = {{"weight", tensor}};
  engine.add("unit", std::move(parts));
}

constexpr int kCalls = 1000;

double nanoseconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kCalls;
}

struct Case {
  std::string where, name;
  Tensor tensor;
  std::function<void(const std::function<void()>&)> within;  ///< opens the region
  std::vector<double> times = {};
};

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 300;
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  residency::Residency engine({.prefetch = 0});
  const Tensor member = at::ones({4, 4}), plain = at::ones({4, 4});
  add_unit(engine, member);
  if (at::sum(member).item<float>() != 16) return std::fputs("wrong sum of a member\n", stderr), 1;
  residency::UnitCheckpoints checkpoints(engine, {});
  parallel::pipeline::Stages stages({},
                                    {.own = 0, .carrier = nullptr, .device = at::kCPU, .on_touch = {}, .on_lack = {}});

  const auto nothing = [](const std::function<void()>& run) { run(); };
  const auto device = [](const std::function<void()>& run) {
    const auto scope = init_on_device(at::kCPU);
    run();
  };
  const auto recompute = [&](const std::function<void()>& run) {
    checkpoints.begin();
    run();
    checkpoints.end();
  };
  const auto placed = [&](const std::function<void()>& run) {
    const residency::HandlerScope scope(residency::Link::place, stages);
    run();
  };
  std::vector<Case> cases;
  for (const char* name : {"view", "t", "add"}) {
    cases.push_back({"plain", name, plain, nothing});
    cases.push_back({"member", name, member, nothing});
    cases.push_back({"device", name, plain, device});
    cases.push_back({"recompute", name, plain, recompute});
    cases.push_back({"stages", name, plain, placed});
  }
  const Tensor other = at::ones({4, 4});
  for (int round = 0; round < rounds; ++round)
    for (Case& item : cases)
      item.within([&] {
        const Tensor& x = item.tensor;
        item.times.push_back(item.name == "view" ? nanoseconds([&] { x.view({16}); })
                             : item.name == "t"  ? nanoseconds([&] { x.t(); })
                                                 : nanoseconds([&] { at::add(x, other); }));
      });
  std::puts("{");
  for (size_t i = 0; i < cases.size(); ++i) {
    auto& times = cases[i].times;
    std::sort(times.begin(), times.end());
    std::printf("  \"%s.%s\": [%.1f, %.1f]%s\n", cases[i].where.c_str(), cases[i].name.c_str(), times.front(),
                times[times.size() / 2], i + 1 < cases.size() ? "," : "");
  }
  std::puts("}");
}
