#include "residency/worker.hpp"

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <thread>

using namespace accelerate;
using namespace accelerate::residency;

namespace {

/// LibTorch's count for a thread that computes for the first time.
int threads_of_a_new_thread() {
  int count = 0;
  std::thread([&] { count = at::get_num_threads(); }).join();
  return count;
}

TEST(Worker, ComputesAloneAndLeavesAllOtherThreadsTheirTeams) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  int of_worker = 0;
  {
    Worker worker;
    worker.run([&] { of_worker = at::get_num_threads(); })->wait();
    EXPECT_EQ(of_worker, 1);
    EXPECT_EQ(at::get_num_threads(), 3);
    EXPECT_EQ(threads_of_a_new_thread(), 3)
        << "a model whose forward runs on a thread of its own would compute on one core";
  }
  EXPECT_EQ(threads_of_a_new_thread(), 3);
  at::set_num_threads(before);
}

}  // namespace
