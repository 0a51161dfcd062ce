// The cost of logging one number in each step of 5 ms of a training. Steps sleep, so that all processor time is the
// logging's: that of the calls, and that of the threads behind them.
//   bench_trackers STEPS FOLDER
#include <accelerate/accelerate.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

double processor_ms() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

struct Cost {
  double call_us = 0;       ///< the median call
  double processor_us = 0;  ///< of the whole process, a step
};

template <class F> Cost measure(int64_t steps, F&& log) {
  std::vector<double> calls;
  const double before = processor_ms();
  for (int64_t step = 0; step < steps; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto begin = Clock::now();
    log(step);
    calls.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::nth_element(calls.begin(), calls.begin() + steps / 2, calls.end());
  return {calls[static_cast<size_t>(steps / 2)], (processor_ms() - before) * 1e3 / static_cast<double>(steps)};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string steps_text = argv[1], folder = argv[2];
  return accelerate::record([&] {
    const int64_t steps = std::stoll(steps_text);
    accelerate::Accelerator accelerator({.cpu = true, .log_with = {"tensorboard"}, .project_dir = folder});
    accelerator.init_trackers("run");
    const auto idle = measure(steps, [](int64_t) {});
    const auto with = measure(steps, [&](int64_t step) {
      accelerator.log({{"loss", std::sin(static_cast<double>(step))}}, step);
    });
    accelerator.end_training();
    std::cout << "{\"contestant\": \"ours\", \"call_us\": " << with.call_us
              << ", \"processor_us\": " << with.processor_us - idle.processor_us << "}" << std::endl;
  });
}
