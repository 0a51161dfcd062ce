// A rank for the tests of logging through the launcher: log_rank in_order | flood | hang | killed_early | killed_late
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>
#include <thread>

#include "accelerate/comm.hpp"
#include "accelerate/logging.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/ops.hpp"

extern "C" __attribute__((noinline)) void busy_with_something_else() {
  std::this_thread::sleep_for(std::chrono::seconds(60));
  asm volatile("");  // no tail call
}

int main(int, char** arguments) {
  using namespace accelerate;
  const std::string what = arguments[1];
  if (what == "killed_late") std::ios_base::sync_with_stdio(false);
  if (what == "killed_early") {
    std::printf("by printf\n");
    std::cout << "by cout " << 1 << "\n";
    ::raise(SIGKILL);
  }
  const PartialState state;
  if (what == "killed_late") {
    std::printf("by printf\n");
    std::cout << "by cout " << 2 << "\n";
    ::raise(SIGKILL);
  }
  const std::string rank = std::to_string(state.process_index());
  const auto logger = get_logger("job", "INFO");
  if (what == "in_order") {
    for (int round = 0; round < 50; ++round)
      logger.info("round " + std::to_string(round) + " of rank " + rank, {.in_order = true});
  } else if (what == "flood") {
    for (int i = 0; i < 500; ++i) logger.info(std::string(1000, rank[0]), {.main_process_only = false});
  } else {
    logger.info("rank " + rank + " begins", {.in_order = true});
    if (state.is_last_process()) busy_with_something_else();
    std::vector<int> numbers{1};
    broadcast_object_list(numbers);
  }
}
