// Ways to find out what a process does: memory, environment, what is available, and the hang report.
#include <c10/core/thread_pool.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "accelerate/accelerator.hpp"
#include "accelerate/accelerator/memory_snapshot.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/state.hpp"
#include "accelerate/state/available.hpp"
#include "accelerate/utils/clear_environment.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "accelerate/utils/listify.hpp"
#include "accelerate/utils/log_sink.hpp"
#include "accelerate/utils/memory.hpp"
#include "comm/backends/backend.hpp"
#include "message_of.hpp"
#include "observe/hang_report.hpp"
#include "ranks.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

using support::message_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMiB = 1 << 20;

// ---------------------------------------------------------------- memory

#ifndef __SANITIZE_ADDRESS__  // whose allocator gives nothing back

TEST(LogMemory, FollowsWhatThisProcessHolds) {
  reset_peak_memory();
  const auto before = memory();
  EXPECT_GT(before.resident, 10 * kMiB);
  EXPECT_GE(before.peak_resident, before.resident - kMiB);
  EXPECT_GT(before.host_total, before.host_available);
  EXPECT_GT(before.host_available, 0);
  auto tensor = torch::ones({200 * kMiB / 4});
  const auto full = memory();
  EXPECT_GT(full.resident, before.resident + 190 * kMiB);
  tensor.reset();
  const auto after = memory();
  EXPECT_LT(after.resident, before.resident + 20 * kMiB);
  EXPECT_GT(after.peak_resident, before.resident + 190 * kMiB);
  reset_peak_memory();
  EXPECT_LT(memory().peak_resident, before.resident + 20 * kMiB);
  EXPECT_THAT(full.text(), AllOf(HasSubstr("MiB resident"), Not(HasSubstr("whole parameters"))));
}

TEST(LogMemory, ReleasedObjectsAreEmptyAndTheirMemoryIsGivenBack) {
  // Many small pieces, which malloc keeps until it is told to give them back.
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < 2000; ++i) pieces.push_back(torch::ones({16 << 10}));
  auto tensor = torch::ones(3);
  torch::nn::Linear holder(2, 2);
  auto shared = std::make_shared<torch::nn::LinearImpl>(2, 2);
  auto optimizer = std::make_optional<torch::optim::SGD>(holder->parameters(), 0.1);
  std::string text = "x";
  const auto before = memory().resident;
  const auto last = torch::ones({16 << 10});  // keeps the heap's end where it is
  release_memory(pieces, tensor, holder, shared, optimizer, text);
  EXPECT_LT(memory().resident, before - 100 * kMiB);
  EXPECT_TRUE(pieces.empty() && text.empty());
  EXPECT_FALSE(tensor.defined());
  EXPECT_TRUE(holder.is_empty());
  EXPECT_EQ(shared, nullptr);
  EXPECT_FALSE(optimizer.has_value());
}

TEST(LogMemory, ATrainingIsReleasedWithItsHandles) {
  Accelerator accelerator;
  const auto before = memory().resident;
  torch::nn::Sequential network;
  for (int i = 0; i < 25; ++i) network->push_back(torch::nn::Linear(1024, 1024));  // 100 MiB
  torch::optim::SGD sgd(network->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(network, sgd);
  accelerator.backward(model(torch::ones({2, 1024})).sum());
  optimizer.step();
  optimizer.zero_grad();
  const auto trained = memory().resident;
  EXPECT_GT(trained, before + 190 * kMiB);  // and the momenta
  accelerator.free_memory();
  EXPECT_GT(memory().resident, trained - 20 * kMiB);  // they hold it, too
  accelerator.free_memory(model, optimizer, network, sgd);
  EXPECT_LT(memory().resident, before + 40 * kMiB);
  EXPECT_TRUE(network.is_empty());
}

#endif

TEST(LogMemory, SaysWhatModelsAndOptimizersHold) {
  Accelerator accelerator;
  torch::nn::Linear network(512, 512);
  network->register_buffer("shape", torch::ones(100));
  constexpr int64_t kWeights = 4 * (512 * 512 + 512);
  EXPECT_EQ(accelerator.memory().models->parameters, 0);
  torch::optim::AdamW adam(network->parameters(), 1e-3);
  auto [model, optimizer] = accelerator.prepare(network, adam);
  accelerator.backward(model(torch::ones({2, 512})).sum());
  const auto before = accelerator.memory().models.value();
  EXPECT_EQ(before.parameters, kWeights + 400);
  EXPECT_EQ(before.gradients, kWeights);
  EXPECT_EQ(before.optimizer, 0);
  optimizer.step();
  optimizer.zero_grad();
  const auto after = accelerator.memory();
  EXPECT_EQ(after.models->gradients, 0);
  EXPECT_EQ(after.models->optimizer, 2 * kWeights);  // both moments
  EXPECT_EQ(after.models->on_host, 3 * kWeights + 400);
  EXPECT_EQ(after.communication, 0);
  EXPECT_THAT(after.text(), HasSubstr("\nmodels: parameters 1.0 MiB, gradients 0.0 MiB, optimizer 2.0 MiB"));
  EXPECT_FALSE(memory().models.has_value());
  const auto again = accelerator.prepare(torch::nn::Sequential(network));
  EXPECT_EQ(accelerator.memory().models->parameters, kWeights + 400) << "a storage counts once";
}

TEST(LogMemory, SaysWhatIsOffloadedToFiles) {
  torch::nn::Sequential network(torch::nn::Linear(256, 256), torch::nn::Linear(256, 256));
  constexpr int64_t kWeights = 2 * 4 * (256 * 256 + 256);
  const auto before = memory();
  {
    const auto model = disk_offload(network, support::scratch("weights"),
                                    {.execution_device = at::kCPU, .offload = {.budget_bytes = kWeights / 2}});
    EXPECT_EQ(memory().offloaded_file - before.offloaded_file, kWeights);
    EXPECT_THAT(memory().text(), HasSubstr("; offloaded to files 0.5 MiB"));
  }
  EXPECT_EQ(memory().offloaded_file, before.offloaded_file);
}

RANKS_TEST(LogMemoryRanks, BucketsOfGradientsAndShards, 2) {
  constexpr int64_t kWeights = 4 * 512 * 512;
  const auto trained = [](const AcceleratorOptions& options) {
    AcceleratorState::reset();
    Accelerator accelerator(options);
    torch::nn::Linear network(torch::nn::LinearOptions(512, 512).bias(false));
    torch::optim::AdamW adam(network->parameters(), 1e-3);
    auto [model, optimizer] = accelerator.prepare(network, adam);
    accelerator.backward(model(torch::ones({2, 512})).sum());
    optimizer.step();
    return accelerator.memory();
  };
  const auto replicated = trained({});
  EXPECT_EQ(replicated.communication, kWeights);
  EXPECT_EQ(replicated.models->gradients, kWeights);
  const auto in_buckets =
      trained({.kwargs_handlers = {DistributedDataParallelKwargs{.gradient_as_bucket_view = true}}});
  EXPECT_EQ(in_buckets.communication, 0);
  EXPECT_EQ(in_buckets.models->gradients, kWeights);
  const auto sharded = trained({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2}});
  EXPECT_EQ(sharded.models->parameters, kWeights / 2);
  EXPECT_EQ(sharded.models->gradients, kWeights / 2);
  EXPECT_EQ(sharded.models->optimizer, kWeights);
}

// ---------------------------------------------------------------- environment

TEST(Environment, IsEmptyForAScopeAndAsBeforeAfterIt) {
  ::setenv("KEPT", "1", 1);
  {
    const auto scope = clear_environment();
    EXPECT_TRUE(environ == nullptr || *environ == nullptr);
    ::setenv("KEPT", "2", 1), ::setenv("NEW", "x", 1);
  }
  EXPECT_STREQ(::getenv("KEPT"), "1");
  EXPECT_EQ(::getenv("NEW"), nullptr);
  EXPECT_NE(::getenv("PATH"), nullptr);
}

// ---------------------------------------------------------------- what there is

TEST(Available, SaysWhatThisBuildAndMachineHave) {
  EXPECT_TRUE(is_device_available("cpu"));
  EXPECT_EQ(is_cuda_available(), torch::cuda::is_available());
  EXPECT_FALSE(is_mps_available());
  EXPECT_THAT(message_of<ConfigError>([] { is_device_available("abacus"); }), HasSubstr("'abacus'"));
  EXPECT_TRUE(is_bf16_available());
  EXPECT_TRUE(is_fp16_available());
  EXPECT_TRUE(is_gloo_available());
  EXPECT_EQ(is_mpi_available(), comm::kMpi.available);
  EXPECT_TRUE(is_shared_library_available("libc.so.6"));
  EXPECT_FALSE(is_shared_library_available("libnowhere.so.1"));
}

TEST(Available, PythonIsAskedForItsPackages) {
  EXPECT_TRUE(is_python_package_available("json"));
  EXPECT_FALSE(is_python_package_available("no_such_package"));
  EXPECT_THAT(message_of<ConfigError>([] { is_python_package_available("a'); import os #"); }), HasSubstr("import"));
  ::setenv("ACCELERATE_PYTHON", "/no/such/python", 1);
  EXPECT_FALSE(is_python_package_available("json"));
}

// ---------------------------------------------------------------- lists of numbers

TEST(Listify, MakesListsOfPlainNumbers) {
  const auto floats = listify(torch::tensor({{1.5F, 2.0F}, {3.0F, -4.0F}}).to(torch::kBFloat16)).toList();
  ASSERT_EQ(floats.size(), 2u);
  const c10::IValue row = floats[1];
  EXPECT_EQ(c10::IValue(row.toList()[1]).toDouble(), -4.0);
  EXPECT_EQ(listify(torch::tensor(7, torch::kInt)).toInt(), 7);
  EXPECT_EQ(c10::IValue(listify(torch::tensor({true}))).toListRef()[0].toBool(), true);
  EXPECT_EQ(listify(torch::zeros({0, 3})).toListRef().size(), 0u);
  const auto nested = listify(std::map<std::string, std::vector<at::Tensor>>{{"a", {torch::tensor({1, 2})}}});
  EXPECT_EQ(nested.toGenericDict().at("a").toListRef()[0].toListRef()[1].toInt(), 2);
  const auto tuple = listify(c10::IValue(std::make_tuple(torch::tensor(2.5), std::string("kept"))));
  EXPECT_EQ(tuple.toTupleRef().elements()[0].toDouble(), 2.5);
  EXPECT_EQ(tuple.toTupleRef().elements()[1].toStringRef(), "kept");
  EXPECT_THROW(listify(torch::zeros(1, torch::kComplexFloat)), ShapeError);
}

// ---------------------------------------------------------------- the hang report

/// The records that come while it lives.
class Reports {
 public:
  Reports() {
    set_log_sink([this](const LogRecord& record) {
      const std::lock_guard lock(mutex_);
      if (record.logger == "accelerate.hang_report") texts_.push_back(record.message), changed_.notify_all();
    });
  }
  ~Reports() { set_log_sink({}); }
  std::vector<std::string> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(60), [&] { return texts_.size() >= count; });
    return texts_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_;
};

std::mutex gate;

extern "C" __attribute__((noinline, visibility("hidden"))) void a_function_that_waits_for_the_gate() {
  const std::lock_guard wait(gate);
  asm volatile("");  // no tail call
}

TEST(HangReport, HasTheStacksOfAllThreadsAlsoOfBlockedOnes) {
  const PartialState state;
  hang_report::answer(0, [] { return std::string("waits for a gate"); });
  Reports reports;
  std::unique_lock lock(gate);
  std::vector<std::thread> blocked;
  for (int i = 0; i < 2; ++i) blocked.emplace_back(a_function_that_waits_for_the_gate);
  std::thread deaf([] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ::pthread_setname_np(::pthread_self(), "deaf");
    const std::lock_guard wait(gate);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(::getpid(), SIGUSR2);
  const auto texts = reports.wait_for(2);
  lock.unlock();
  for (auto& thread : blocked) thread.join();
  deaf.join();
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_THAT(texts[0], HasSubstr("rank 0: asked what it does, process " + std::to_string(::getpid())));
  EXPECT_THAT(texts[1], AllOf(HasSubstr("the main thread)"), HasSubstr("AlsoOfBlockedOnes_Test::TestBody()+0x"),
                              HasSubstr("rank 0:   it does not answer: it blocks the signal")));
  // Once, for both threads.
  const auto name = texts[1].find("a_function_that_waits_for_the_gate+0x");
  ASSERT_NE(name, std::string::npos) << texts[1];
  EXPECT_EQ(texts[1].find("a_function_that_waits_for_the_gate+0x", name + 1), std::string::npos) << texts[1];
  EXPECT_THAT(texts[1], Not(HasSubstr("hang_report::on_signal")));
  // Below the stacks once more what it does.
  EXPECT_TRUE(
      texts[1].ends_with("\nrank 0: what process " + std::to_string(::getpid()) + " does:\nrank 0: waits for a gate"))
      << texts[1];
  hang_report::forget_activity();
}

TEST(HangReport, ThreadsThatWaitForWorkAreLeftOut) {
  const PartialState state;
  hang_report::answer(0, [] { return std::string("waits for a gate"); });
  Reports reports;
  std::unique_lock lock(gate);
  c10::ThreadPool idle(1), busy(1);
  busy.run(a_function_that_waits_for_the_gate);
  while (busy.numAvailable() > 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(::getpid(), SIGUSR2);
  const auto texts = reports.wait_for(2);
  lock.unlock();
  busy.waitWorkComplete();
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_THAT(texts[1], HasSubstr("rank 0: left out, since they wait for work: "));
  // The one that works is there, with the loop that called it; the idle one's is not there besides.
  EXPECT_THAT(texts[1], HasSubstr("a_function_that_waits_for_the_gate+0x"));
  const auto loop = texts[1].find("c10::ThreadPool::main_loop");
  ASSERT_NE(loop, std::string::npos) << texts[1];
  EXPECT_EQ(texts[1].find("c10::ThreadPool::main_loop", loop + 1), std::string::npos) << texts[1];
  hang_report::forget_activity();
}

// launch_function() copies the process, without its threads.
TEST(HangReport, AForkAnswersForItself) {
  const PartialState state;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  if (::fork() == 0) {
    Reports reports;
    PartialState::reset();
    const PartialState again;
    ::kill(::getpid(), SIGUSR2);
    const bool answered = !reports.wait_for(2).empty();
    ::_exit(::write(ends[1], answered ? "y" : "n", 1) == 1 ? 0 : 1);
  }
  char answer = 0;
  EXPECT_EQ(::read(ends[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  ::wait(nullptr);
  ::close(ends[0]), ::close(ends[1]);
}

TEST(HangReport, CanBeAskedForAgain) {
  const PartialState state;
  Reports reports;
  for (size_t i = 1; i <= 20; ++i) {
    ::kill(::getpid(), SIGUSR2);
    ASSERT_EQ(reports.wait_for(2 * i).size(), 2 * i);
  }
}

RANKS_TEST(HangReportRanks, SaysWhichCollectiveARankIsIn, 2) {
  const PartialState state;
  Reports reports;
  if (state.process_index() == 0) {
    std::thread([] {
      ASSERT_TRUE(support::heard("rank 1 computes", 1, std::chrono::seconds(60)));
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      ::kill(::getpid(), SIGUSR2);
    }).detach();
    gather(torch::ones(3));  // blocks until rank 1 comes
    const auto texts = reports.wait_for(2);
    ASSERT_EQ(texts.size(), 2u);
    EXPECT_THAT(texts[0],
                testing::ContainsRegex("rank 0: group of all 2 ranks: collective 1 \\(gather\\), inside since "
                                       "[0-9.]+ s"));
    EXPECT_THAT(texts[1], HasSubstr("accelerate::gather"));
  } else {
    support::say("rank 1 computes");
    std::this_thread::sleep_for(std::chrono::seconds(3));
    ::kill(::getpid(), SIGUSR2);
    EXPECT_THAT(reports.wait_for(1).at(0), HasSubstr("outside of collectives since"));
    gather(torch::ones(3));
  }
}

void own_handler(int) {}

TEST(HangReport, LeavesAProgramsOwnHandlerAlone) {
  if (support::is_rank()) {
    ::signal(SIGUSR2, own_handler);
    const PartialState state;
    struct sigaction present {};
    ::sigaction(SIGUSR2, nullptr, &present);
    EXPECT_EQ(present.sa_handler, own_handler);
    return;
  }
  support::expect_ranks_pass("HangReport.LeavesAProgramsOwnHandlerAlone", {.world_size = 1});
}

}  // namespace
