#include "parallel/gradient_hook.hpp"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <chrono>

#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "observe/trace.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/engines.hpp"
#include "utils/raise.hpp"
#include "utils/run_counts.hpp"

namespace accelerate::parallel {
namespace {
using Type = DDPCommunicationHookType;

at::ScalarType wire_of(Type type) {
  return type == Type::fp16 ? at::kHalf : type == Type::bf16 ? at::kBFloat16 : at::ScalarType::Undefined;
}

bool is_power_sgd(Type type) { return type == Type::power_sgd || type == Type::batched_power_sgd; }

/// The same bucket in another type.
GradientBucket converted(const GradientBucket& bucket, at::ScalarType type) {
  GradientBucket narrow = bucket;
  narrow.buffer = bucket.buffer.to(type);
  for (auto& gradient : narrow.gradients)
    gradient = narrow.buffer.narrow(0, gradient.storage_offset() - bucket.buffer.storage_offset(), gradient.numel())
                   .view(gradient.sizes());
  return narrow;
}

std::atomic<int64_t> last_bucket_began{0};  ///< 0: none

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The hook that c10d's Reducer calls.
class ReducerHook final : public c10d::CommHookInterface {
 public:
  ReducerHook(std::shared_ptr<GradientHook> hook, at::ScalarType wrapper) : hook_(std::move(hook)), wrapper_(wrapper) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& theirs) override {
    auto averaged = start(theirs);
    if (theirs.isLast() && theirs.getBuffer().is_cpu()) last_bucket_began = now_ns();
    return averaged;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return tensor_of(result); }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> start(c10d::GradBucket& theirs) {
    const at::Tensor buffer = theirs.getBufferRef();
    count(theirs);
    const trace::Topic topic(trace::SpanKind::gradient_reduce, "bucket", static_cast<int64_t>(buffer.nbytes()),
                             static_cast<int64_t>(theirs.getIndex()));
    GradientBucket bucket{.index = theirs.getIndex(),
                          .last = theirs.isLast(),
                          .buffer = buffer,
                          .gradients = theirs.getGradients(),
                          .parameters = theirs.getParameters()};
    if (wrapper_ == at::ScalarType::Undefined || buffer.scalar_type() == wrapper_) return hook_->run(bucket);
    counts::add(AveragingCount::buckets_wrapped);
    const auto width = static_cast<int64_t>(buffer.element_size() - c10::elementSize(wrapper_));
    counts::add(AveragingCount::bytes_saved, buffer.numel() * width);
    GradientBucket narrow = converted(bucket, wrapper_);
    return hook_->run(narrow)->then(
        [buffer](c10::ivalue::Future& done) {
          buffer.copy_(tensor_of(done.value()).view(buffer.sizes()));
          return c10::IValue(std::vector<at::Tensor>{buffer});
        },
        c10::ListType::ofTensors());
  }

  static void count(const c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBuffer();
    const auto bytes = static_cast<int64_t>(buffer.nbytes());
    counts::add(AveragingCount::gradient_buckets);
    counts::add(AveragingCount::gradient_bytes, bytes);
    counts::most(AveragingCount::bucket_bytes_most, bytes);
    for (const at::Tensor& parameter : bucket.getParameters())
      if (parameter.grad().defined() && parameter.grad().is_alias_of(buffer))
        counts::add(AveragingCount::gradients_in_buckets);
  }

  std::shared_ptr<GradientHook> hook_;
  at::ScalarType wrapper_;
};

/// The program's own function.
class UserHook final : public GradientHook {
 public:
  UserHook(CommunicationHook hook, std::shared_ptr<comm::Group> group)
      : hook_(std::move(hook)), group_(std::move(group)) {}
  GradientHookFuture run(GradientBucket& bucket) override {
    counts::add(AveragingCount::user_hook_calls);
    const at::Tensor buffer = bucket.buffer;
    return hook_(bucket, group_)
        .future()
        ->then(
            [buffer](c10::ivalue::Future& done) {
              const at::Tensor result = tensor_of(done.value());
              if (!result.defined() || result.numel() != buffer.numel())
                raise<ConfigError>(
                    "communication_hook: found a result of {} elements, expected the bucket's {}; return a future of "
                    "the averaged buffer",
                    result.defined() ? result.numel() : 0, buffer.numel());
              return c10::IValue(std::vector<at::Tensor>{result.reshape({-1})});
            },
            c10::ListType::ofTensors());
  }

 private:
  CommunicationHook hook_;
  HookGroup group_;
};

}  // namespace

at::Tensor tensor_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : value.toTensorVector().at(0);
}

GradientHookFuture completed(const at::Tensor& gradients) {
  const std::vector<c10::Device> devices =
      gradients.is_cuda() ? std::vector<c10::Device>{gradients.device()} : std::vector<c10::Device>{};
  auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
  done->markCompleted(c10::IValue(std::vector<at::Tensor>{gradients}));
  return done;
}

int64_t take_wait_since_last_bucket() {
  const int64_t began = last_bucket_began.exchange(0);
  return began == 0 ? 0 : now_ns() - began;
}

std::function<void()> GradientHook::stage(const c10::IValue&) {
  throw CheckpointError(
      "load_state: the checkpoint has a state of PowerSGD, but gradients are not compressed by it now, expected the "
      "comm_hook that it was saved with");
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): what hooks return converts to it
GradientFuture::GradientFuture(at::Tensor tensor) : future_(completed(tensor)) {}
GradientFuture::GradientFuture(c10::intrusive_ptr<c10::ivalue::Future> future) : future_(std::move(future)) {}

GradientFuture GradientFuture::then(std::function<at::Tensor(const at::Tensor&)> next) const {
  return GradientFuture(future_->then(
      [next = std::move(next)](c10::ivalue::Future& done) {
        return c10::IValue(std::vector<at::Tensor>{next(tensor_of(done.value()))});
      },
      c10::ListType::ofTensors()));
}

HookGroup::HookGroup(std::shared_ptr<comm::Group> group) : group_(std::move(group)) {}
int64_t HookGroup::rank() const { return group_->rank(); }
int64_t HookGroup::world_size() const { return group_->world_size(); }
GradientFuture HookGroup::all_reduce(const at::Tensor& tensor) { return {group_->all_reduce_async(tensor)}; }
GradientFuture HookGroup::all_gather(const at::Tensor& tensor) {
  return {group_->all_gather_async(at::empty({world_size() * tensor.numel()}, tensor.options()),
                                   tensor.reshape({-1}).contiguous())};
}
at::Tensor HookGroup::wait(const GradientFuture& future) {
  group_->wait("communication hook", *future.future());
  return tensor_of(future.future()->value());
}

const char* name_of(Type type) {
  switch (type) {
    case Type::no:
      return "no";
    case Type::fp16:
      return "fp16";
    case Type::bf16:
      return "bf16";
    case Type::power_sgd:
      return "power_sgd";
    case Type::batched_power_sgd:
      return "batched_power_sgd";
  }
  return "?";
}

void check_hook_settings(const DistributedDataParallelKwargs& kwargs) {
  const auto refuse = [](const std::string& what) {
    raise<ConfigError>("Accelerator: DistributedDataParallelKwargs::{}", what);
  };
  const auto& powers = kwargs.comm_state_option;
  if (kwargs.dim != 0)
    refuse(
        fmt::format("dim is {}, expected 0: a process computes on one device, and no batch is split along a "
                    "dimension; leave it out, and let prepared loaders give each process its share",
                    kwargs.dim));
  if (kwargs.check_reduction)
    refuse(
        "check_reduction is true, expected false: that all gradients were averaged is always checked, and a "
        "parameter that was left out is named; leave it out");
  if (kwargs.communication_hook && kwargs.comm_hook != Type::no)
    refuse(fmt::format("comm_hook is {} beside a communication_hook, expected one of them", name_of(kwargs.comm_hook)));
  if (is_power_sgd(kwargs.comm_wrapper))
    refuse(fmt::format("comm_wrapper is {}, expected no, fp16 or bf16; give it as comm_hook",
                       name_of(kwargs.comm_wrapper)));
  if (kwargs.comm_wrapper != Type::no && kwargs.comm_hook == Type::no && !kwargs.communication_hook)
    refuse(
        fmt::format("comm_wrapper is {} without a comm_hook that it could be around, expected one; to send "
                    "gradients as {} set comm_hook",
                    name_of(kwargs.comm_wrapper), name_of(kwargs.comm_wrapper)));
  if (!is_power_sgd(kwargs.comm_hook)) {
    if (!(powers == PowerSGDOptions{}))
      refuse(
          fmt::format("comm_state_option is set, but comm_hook is {}, which has no options, expected power_sgd or "
                      "batched_power_sgd; leave it out",
                      name_of(kwargs.comm_hook)));
    return;
  }
  if (powers.matrix_approximation_rank < 1)
    refuse(fmt::format("comm_state_option.matrix_approximation_rank is {}, expected at least 1",
                       powers.matrix_approximation_rank));
  if ((powers.use_error_feedback || powers.warm_start) && powers.start_powerSGD_iter <= 1)
    refuse(
        fmt::format("comm_state_option.start_powerSGD_iter is {}, expected at least 2 with use_error_feedback or "
                    "warm_start: buckets change once after the first step",
                    powers.start_powerSGD_iter));
  if (powers.compression_stats_logging_frequency.value_or(1) < 1)
    refuse(fmt::format("comm_state_option.compression_stats_logging_frequency is {}, expected at least 1",
                       *powers.compression_stats_logging_frequency));
  if (kwargs.comm_hook == Type::batched_power_sgd) {
    const PowerSGDOptions defaults;
    const auto only_single = [&](bool set, const char* field) {
      if (set)
        refuse(
            fmt::format("comm_state_option.{} is set, but batched_power_sgd does not look at it, expected "
                        "power_sgd; leave it out",
                        field));
    };
    only_single(powers.min_compression_rate != defaults.min_compression_rate, "min_compression_rate");
    only_single(powers.orthogonalization_epsilon != defaults.orthogonalization_epsilon, "orthogonalization_epsilon");
    only_single(powers.batch_tensors_with_same_shape, "batch_tensors_with_same_shape");
  }
}

std::shared_ptr<GradientHook> make_gradient_hook(const DistributedDataParallelKwargs& kwargs,
                                                 std::shared_ptr<comm::Group> group) {
  if (kwargs.communication_hook) return std::make_shared<UserHook>(kwargs.communication_hook, std::move(group));
  if (is_power_sgd(kwargs.comm_hook))
    return power_sgd_hook(std::move(group), kwargs.comm_state_option, kwargs.comm_hook == Type::batched_power_sgd);
  return wire_hook(std::move(group), wire_of(kwargs.comm_hook));
}

std::unique_ptr<c10d::CommHookInterface> reducer_hook(std::shared_ptr<GradientHook> hook,
                                                      const DistributedDataParallelKwargs& kwargs) {
  return std::make_unique<ReducerHook>(std::move(hook), wire_of(kwargs.comm_wrapper));
}

void guard_backward(const std::function<void()>& backward) {
  const auto& group = comm::mesh().all();
  if (!group) return backward();
  take_wait_since_last_bucket();  // of a backward that threw
  group->guard("backward", backward);
  counts::add(RunCount::comm_wait_ns, take_wait_since_last_bucket());
}

}  // namespace accelerate::parallel
