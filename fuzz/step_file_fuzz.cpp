#include <cmath>
#include <cstdlib>
#include <cstring>

#include "launch/monitor/step_counter.hpp"
#include "scratch_folder.hpp"

// Whatever a rank writes into the file in which it counts its steps is a number of steps and a rate that can be shown,
// or nothing.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  launcher::StepCounter counter(folder.path() / "steps");
  for (size_t at = 0; at + sizeof(StepRecord) <= size; at += sizeof(StepRecord)) {
    StepRecord record{};
    std::memcpy(&record, data + at, sizeof(record));
    folder.write("steps", {reinterpret_cast<const char*>(data) + at, sizeof(record)});
    counter.look();
    const auto rate = counter.per_second(record.at_ns + at);
    if (rate && !(std::isfinite(*rate) && *rate >= 0)) std::abort();
    if (const auto steps = counter.steps(); steps && *steps < 0) std::abort();
    if (const auto tokens = counter.tokens(); tokens && *tokens < 0) std::abort();
    for (const auto& figure : {counter.tokens_per_second(record.at_ns), counter.flops_per_second(record.at_ns)})
      if (figure && !(std::isfinite(*figure) && *figure >= 0)) std::abort();
    for (const auto& share : {counter.comm_share(), counter.data_share()})
      if (share && !(*share >= 0 && *share <= 1)) std::abort();
  }
  return 0;
}
