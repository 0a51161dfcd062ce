// The cost of the checks of collectives, in pairs that take turns within one process.
//
//   facade BYTES ROUNDS   gather, broadcast, reduce with the question whether all ranks do the same, and without; what
//                         the question takes alone; and pad_across_processes, which has no form without
//   hook ROUNDS           backward of a DDP model of 128 parameters with the hook behind each of them, and without, by
//                         the time that the process computes
//
// usage: accelerate launch --num_processes 2 bench_comm facade|hook …
// prints JSON: {"name": [[microseconds with], [without]]}
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <accelerate/accelerate.hpp>

#include <ctime>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

using namespace accelerate;
namespace nn = torch::nn;
using Call = std::function<void()>;

double now(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

/// How the two are compared, and what comes before each call, untimed.
struct How {
  clockid_t clock = CLOCK_MONOTONIC;
  std::function<void(bool with)> prepare = [](bool) {};
};

/// Microseconds of both calls, taken in turns: with, without, without, with, …
std::string compare(const std::string& name, int64_t rounds, const Call& with, const Call& without,
                    const How& how = {}) {
  std::vector<double> times[2];
  for (int64_t i = 0; i < 2 * rounds; ++i) {
    const bool second = i % 4 == 1 || i % 4 == 2;
    how.prepare(!second);
    const double begin = now(how.clock);
    second ? without() : with();
    times[second].push_back(now(how.clock) - begin);
  }
  std::string text = "\"" + name + "\":[";
  for (const auto& series : times) {
    text += &series == times ? "[" : ",[";
    for (size_t i = 0; i < series.size(); ++i) text += (i ? "," : "") + std::to_string(series[i]);
    text += "]";
  }
  return text + "]";
}

std::string facade(int64_t bytes, int64_t rounds) {
  const auto data = torch::ones({bytes / 4});
  const Call nothing = [] {};
  return compare(
             "gather", rounds, [&] { gather(data); }, [&] { comm::agreed::all_gather(data); }) +
         "," +
         compare(
             "broadcast", rounds, [&] { broadcast(data); }, [&] { comm::agreed::broadcast(data, 0); }) +
         "," +
         compare(
             "reduce", rounds, [&] { reduce(data); }, [&] { comm::agreed::all_reduce(data, Reduction::mean, 1.0); }) +
         "," +
         compare(
             "pad_across_processes", rounds, [&] { pad_across_processes(data); }, nothing) +
         "," +
         compare(
             "the question alone", rounds, [] { comm::barrier(); }, nothing);
}

std::string hook(Accelerator& accelerator, int64_t rounds) {
  constexpr int kLayers = 64;
  std::vector<nn::Sequential> nets;
  std::vector<Call> forwards;
  std::vector<at::Tensor> losses(2);
  const auto x = torch::randn({8, 128});
  for (size_t i = 0; i < 2; ++i) {
    nn::Sequential net;
    for (int layer = 0; layer < kLayers; ++layer) net->push_back(nn::Linear(128, 128)), net->push_back(nn::ReLU());
    auto model = accelerator.prepare(net);
    forwards.emplace_back([model, x, &losses, i]() mutable { losses[i] = model(x).square().mean(); });
    nets.push_back(net);
  }
  // The first of those behind a parameter is ours, after it comes the Reducer's. Gradients are averaged without it,
  // too, where models are called by their handle.
  for (const auto& parameter : nets[1]->parameters()) {
    const auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    const auto& hooks = accumulator->post_hooks();
    if (hooks.size() != 2 || !accumulator->del_post_hook(reinterpret_cast<uintptr_t>(hooks.front().get())))
      throw InternalError("bench_comm: the hooks behind a parameter are others than expected");
  }
  const auto forward = [&](bool with) { nets[with ? 0 : 1]->zero_grad(), forwards[with ? 0 : 1](); };
  return compare(
      "backward, CPU", rounds, [&] { losses[0].backward(); }, [&] { losses[1].backward(); },
      {.clock = CLOCK_PROCESS_CPUTIME_ID, .prepare = forward});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string task = argc > 1 ? argv[1] : "hook";
  const auto number = [&](int at, int64_t otherwise) { return argc > at ? std::stoll(argv[at]) : otherwise; };
  return accelerate::record([&] {
    Accelerator accelerator({.cpu = true});
    const auto text = task == "facade" ? facade(number(2, 1024), number(3, 300)) : hook(accelerator, number(2, 100));
    if (accelerator.is_main_process()) std::cout << "{" << text << "}" << std::endl;
  });
}
