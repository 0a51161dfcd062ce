// A rank for the monitor's tests: monitor_rank STEPS STEPS_PER_SECOND LINE. It reports its steps by the file that
// docs/monitor.md describes, without the library, and writes LINE and the number of the step. LOCAL_RANK 1 fails after
// its steps if $FAIL is set and this is the first attempt.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

int main(int count, char** arguments) {
  if (count != 4) return 64;
  const auto steps = static_cast<uint64_t>(std::atoi(arguments[1]));
  const double rate = std::atof(arguments[2]);
  const auto text = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  const int file = ::open(text("ACCELERATE_MONITOR_FILE").c_str(), O_WRONLY);
  const auto began = std::chrono::steady_clock::now();  // CLOCK_MONOTONIC
  for (uint64_t step = 1; step <= steps; ++step) {
    const auto due = began + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                 std::chrono::duration<double>(static_cast<double>(step) / rate));
    std::this_thread::sleep_until(due);
    // When it should have been, also where the machine is busy and it is late.
    const uint64_t record[2] = {step, static_cast<uint64_t>(due.time_since_epoch().count())};
    if (file >= 0 && ::pwrite(file, record, sizeof(record), 0) != sizeof(record)) return 74;
    std::printf("%s %llu\n", arguments[3], static_cast<unsigned long long>(step));
    std::fflush(stdout);
  }
  return !text("FAIL").empty() && text("LOCAL_RANK") == "1" && text("TORCHELASTIC_RESTART_COUNT") == "0" ? 3 : 0;
}
