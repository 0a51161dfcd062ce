#include "profiler/other_threads.hpp"

#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "observe/trace.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::profiler {
namespace {

struct RunningOperator final : at::ObserverContext {
  c10::approx_time_t begin = c10::getApproximateTime();
};

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction&) {
  // Kineto itself keeps the operators that it sees, here or on autograd's threads.
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE)) return nullptr;
  return std::make_unique<RunningOperator>();
}

void end_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context) trace::add_operator(function.name(), static_cast<RunningOperator*>(context)->begin);
}

Mutex mutex;
int64_t users ACCELERATE_GUARDED_BY(mutex) = 0;
at::CallbackHandle handle ACCELERATE_GUARDED_BY(mutex) = at::INVALID_CALLBACK_HANDLE;

}  // namespace

OtherThreads::OtherThreads() {
  const MutexLock lock(mutex);
  if (users++ > 0) return;
  handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&begin_operator, &end_operator)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

OtherThreads::~OtherThreads() {
  const MutexLock lock(mutex);
  if (--users == 0) at::removeCallback(handle);
}

}  // namespace accelerate::profiler
