#pragma once

// Takes the counts behind receipts out of the running program and puts them back, so that steps with and without them
// take turns in one process, with the same code at the same addresses. benchmarks/prices.py finds the instructions.

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "data/counts.hpp"

/// x86 only. Without the variable BENCH_COUNTS it does nothing. All functions: while no other thread counts.
class CountsSwitch {
 public:
  /// BENCH_COUNTS names a file of lines "offset length": instructions that count, in bytes from where the program is
  /// loaded.
  CountsSwitch() {
    const char* file = std::getenv("BENCH_COUNTS");
    if (!file) return;
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* where) { return *static_cast<uintptr_t*>(where) = info->dlpi_addr, 1; },
        &base);  // the first one is the program
    std::ifstream in(file);
    size_t offset = 0, length = 0;
    while (in >> offset >> length) {
      auto* at = reinterpret_cast<unsigned char*>(base + offset);  // NOLINT(performance-no-int-to-ptr)
      const auto page = static_cast<uintptr_t>(::getpagesize());
      auto* begin = reinterpret_cast<void*>((base + offset) / page * page);  // NOLINT(performance-no-int-to-ptr)
      if (at[0] != kLock || ::mprotect(begin, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
        fail("the instructions are not where the file says, or may not be written");
      sites_.push_back({at, {at, at + length}});
    }
    if (sites_.empty()) fail("the file has no instructions");
  }

  /// Before each step. One counts of two that follow each other; which comes first changes without a period
  /// (Thue-Morse). Both kinds write all instructions, which costs the same.
  void next() {
    if (sites_.empty()) return;
    const int64_t now = total();
    if (!on_ && now != counted_before_) fail("a step without counts has counted");
    if (step_ == kByOnes + 1) adds_ = now - counted_before_;
    counted_before_ = now;
    on_ = std::popcount(static_cast<uint64_t>(step_)) % 2 == 0;
    for (const auto& site : sites_) {
      if (on_) std::memcpy(site.at, site.bytes.data(), site.bytes.size());
      else std::memset(site.at, kNop, site.bytes.size());
      if (step_ == kByOnes) count_one(site.at);
    }
    counted_ += (step_++ > 0 ? "," : "") + std::to_string(on_);
    cpu_begin_ = cpu();
  }
  /// At the end of what is timed.
  void end() {
    if (sites_.empty()) return;
    cpu_ms_ += (step_ > 1 ? "," : "") + std::to_string(static_cast<double>(cpu() - cpu_begin_) / 1e6);
  }
  /// More of the JSON: whether each step counted, the milliseconds that this process computed in it, how many times a
  /// step counts, and the nanoseconds that it takes to count once.
  std::string json() const {
    if (sites_.empty()) return "";
    constexpr int kTimes = 1'000'000;
    const int64_t begin = cpu();
    for (int i = 0; i < kTimes; ++i) accelerate::counts::add(accelerate::data::DataCount::batches);
    return ",\"counted\":[" + counted_ + "],\"cpu_ms\":[" + cpu_ms_ + "],\"adds\":" + std::to_string(adds_) +
           ",\"add_ns\":" + std::to_string(static_cast<double>(cpu() - begin) / kTimes);
  }

 private:
  static constexpr int kLock = 0xf0, kNop = 0x90;
  static constexpr int64_t kByOnes = 3;  ///< the step in which all add 1, so that the sum says how many there are

  /// Turns "lock add register, memory" into "lock inc memory"; what adds a constant, which is 1, stays.
  static void count_one(unsigned char* at) {
    constexpr unsigned char kAddRegister = 0x01, kInc = 0xff, kWide = 0x48, kRexR = 0x04, kRegisterBits = 0x38;
    if ((at[1] & 0xf8) != kWide) fail("an instruction is not one of 64 bits");
    if (at[2] != kAddRegister) return;
    at[1] &= static_cast<unsigned char>(~kRexR);
    at[2] = kInc;
    at[3] &= static_cast<unsigned char>(~kRegisterBits);
  }
  struct Site {
    unsigned char* at;
    std::vector<unsigned char> bytes;
  };
  static int64_t total() {
    int64_t sum = 0;
    for (const auto values : accelerate::counts::all())
      for (const auto& value : values) sum += value.load();
    return sum;
  }
  static int64_t cpu() {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
  }
  [[noreturn]] static void fail(const char* why) {
    std::fprintf(stderr, "BENCH_COUNTS: %s\n", why);
    std::exit(1);
  }
  std::vector<Site> sites_;
  std::string counted_, cpu_ms_;
  int64_t step_ = 0, counted_before_ = 0, cpu_begin_ = 0, adds_ = 0;
  bool on_ = true;
};
