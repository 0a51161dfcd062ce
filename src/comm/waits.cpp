#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>

#include "accelerate/utils/error.hpp"
#include "comm/backends/backend.hpp"
#include "comm/group_impl.hpp"
#include "observe/trace.hpp"
#include "observe/wait_clock.hpp"

namespace accelerate::comm {
namespace {

using Clock = std::chrono::steady_clock;

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

/// Also when nobody has asked for its exit status yet.
bool has_ended(int64_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(in, text)) return true;
  const size_t name_end = text.rfind(')');  // a name may contain anything
  return name_end != std::string::npos && name_end + 2 < text.size() &&
         (text[name_end + 2] == 'Z' || text[name_end + 2] == 'X');
}

}  // namespace

void Group::run(const char* operation, const at::Tensor& brought,
                const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  const trace::Span span(trace::SpanKind::collective, operation, bytes_of(brought));
  const InCollective inside(*progress, *impl_->activity, operation, bytes_of(brought));
  const WaitClock waiting(RunCount::comm_wait_ns, !impl_->on_streams());
  try {
    const auto work = start();
    if (impl_->options.backend == "gloo") {
      // Wait for the transport or for news of a failed peer, whichever comes first.
      auto done = std::make_shared<std::atomic<bool>>(false);
      work->getFuture()->addCallback([progress, done](c10::ivalue::Future&) { progress->finish(*done); });
      if (const std::string failure = progress->wait_for(*done); !failure.empty()) throw CommError(failure);
    }
    work->wait();
  } catch (const std::exception& error) {
    impl_->fail(text_of(error));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Group::run_async(const char* operation, const at::Tensor& brought,
                                                         const at::Tensor& result,
                                                         const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                                                         std::function<void()> after, uint64_t of) {
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  GroupActivity* activity = impl_->activity;
  progress->begin(*activity, operation, static_cast<int64_t>(static_cast<uint64_t>(bytes_of(brought)) ^ of));
  const auto label = trace::label_of(operation, std::max(bytes_of(brought), bytes_of(result)));
  auto span = std::make_shared<trace::Span>(label, trace::Lane::communication);
  const auto work = start();
  const auto future = work->getFuture();
  if (impl_->on_streams()) {
    span->cancel();  // it lasts as long as its kernels, which the profiler sees by itself
    progress->end(*activity);
    return future;
  }
  auto pending = std::make_shared<Pending>(operation, device());
  progress->add(pending);
  future->addCallback(
      [progress, activity, pending, result, span, after = std::move(after)](c10::ivalue::Future& transport) {
        if (!transport.hasError() && after) after();
        span->end();
        progress->remove(pending, transport.hasError());
        progress->end(*activity);
        if (transport.hasError()) pending->fail(transport.exception_ptr());
        else pending->complete(result);
      });
  return pending->future;
}

void Group::wait(const char* operation, c10::ivalue::Future& future) {
  const trace::Span span(trace::SpanKind::comm_wait, operation);
  const WaitClock waiting(RunCount::comm_wait_ns, !impl_->on_streams());
  guard(operation, [&] { future.waitAndThrow(); });
}

void Group::watch_processes(std::vector<int64_t> pids) { impl_->pids = std::move(pids); }

void Group::wait_until(const char* operation, const std::function<bool()>& done, bool in_step) {
  constexpr int kSpins = 2000;  // some microseconds: peers on other cores are about as far as we are
  constexpr auto kYields = std::chrono::milliseconds(1);
  constexpr auto kLeast = std::chrono::microseconds(50), kMost = std::chrono::microseconds(1000);
  impl_->check_usable(operation);
  auto progress = impl_->progress;
  std::optional<InCollective> inside;
  if (in_step) inside.emplace(*progress, *impl_->activity, operation);
  const WaitClock waiting(RunCount::comm_wait_ns);
  for (int i = 0; i < kSpins; ++i)
    if (done()) return;
  constexpr auto kLook = std::chrono::milliseconds(200);
  const trace::Span span(trace::SpanKind::comm_wait, operation);
  const auto start = Clock::now();
  Clock::duration next_look = kLook;
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited < kYields) {
      std::this_thread::yield();
      continue;
    }
    // In a long wait a look costs a core more than the sleep before it is worth. So looks come the more rarely
    // the longer it has been: at most a sixty-fourth later than they could.
    std::this_thread::sleep_for(std::clamp<Clock::duration>(waited / 64, kLeast, kMost));
    const bool failed = !progress->failure().empty();
    if (failed || waited > impl_->options.timeout) impl_->fail(failed ? "a peer failed" : "timed out");
    if (waited < next_look) continue;
    next_look = waited + kLook;
    for (size_t rank = 0; rank < impl_->pids.size(); ++rank)
      if (has_ended(impl_->pids[rank]) && !done())
        impl_->fail("the process of rank " + std::to_string(impl_->ranks[rank]) + " has ended");
  }
}

void Group::guard(const char* operation, const std::function<void()>& body) {
  impl_->check_usable(operation);
  try {
    body();
  } catch (const PeerFailure& error) {
    impl_->fail(error.what());
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    // c10d's own collectives (buckets' order, buffers) throw what their back end throws.
    if (impl_->progress->transport_failed() || is_transport_error(error)) impl_->fail(text_of(error));
    throw;
  }
}

void Group::guard_collective(const char* operation, const std::function<void()>& body) {
  const InCollective inside(*impl_->progress, *impl_->activity, operation);
  const WaitClock waiting(RunCount::comm_wait_ns, !impl_->on_streams());
  guard(operation, body);
}

}  // namespace accelerate::comm
