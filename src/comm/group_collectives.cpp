#include <ATen/ATen.h>

#include <limits>
#include <utility>
#include <vector>

#include "comm/average.hpp"
#include "comm/backends/backend.hpp"
#include "comm/comms_log.hpp"
#include "comm/compat.hpp"
#include "comm/group_impl.hpp"
#include "memory/meta_memory.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

/// Found out here, and not by a back end in the middle of a collective, the group stays usable.
void check_reducible(const at::Tensor& tensor, Reduction reduction) {
  constexpr auto is_one_of = [](at::ScalarType type, auto... types) { return ((type == types) || ...); };
  const auto type = tensor.scalar_type();
  if (is_one_of(type, at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble))
    return;
  if (reduction != Reduction::max && is_one_of(type, at::kComplexFloat, at::kComplexDouble)) return;
  raise<ShapeError>(
      "reduce: found a tensor of type {}, which has no {} in the back ends, expected Bool, an integer up to 64 bits, "
      "Half, BFloat16, Float, Double or, for sums, a complex type; convert it first",
      at::toString(type), reduction == Reduction::max ? "maximum" : "sum");
}

/// The function that run_async() calls once the operation is complete, and before anybody hears of that.
std::function<void()> counted_after(LoggedCollective logged) {
  if (!logged) return nullptr;
  return [logged = std::move(logged)]() mutable { logged.end(); };
}
/// On a device's streams nothing tells when it is complete: this waits for it.
c10::intrusive_ptr<c10::ivalue::Future> counted_now(LoggedCollective logged,
                                                    c10::intrusive_ptr<c10::ivalue::Future> future) {
  if (!logged) return future;
  future->wait();
  logged.end();
  return future;
}

}  // namespace

void Group::Impl::check_device(const char* operation, const at::Tensor& tensor) const {
  if (!tensor.defined())
    raise<ShapeError>("{}: found a tensor that is not defined, expected one with values; leave it out", operation);
  if (tensor.device().type() != options.device.type() && !(options.dry && tensor.is_meta()))
    raise<ShapeError>(
        "{}: found a tensor on {}, expected one on {}, which the back end '{}' serves; move it there first "
        "(send_to_device)",
        operation, tensor.device().str(), options.device.str(), options.backend);
}

at::Tensor Group::all_gather(const at::Tensor& tensor, const char* operation) {
  impl_->check_device(operation, tensor);
  const at::Tensor input = (tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor).contiguous();
  auto sizes = input.sizes().vec();
  sizes[0] *= world_size();
  at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() == 0) {  // nothing to send, but ranks must still meet
    barrier();
    return output;
  }
  at::Tensor in = as_bytes(input), out = as_bytes(output);
  const LoggedScope logged(Collective::all_gather, in.numel(), *this);
  run(operation, in, [&] { return compat::all_gather_single(*impl_->process_group, out, in); });
  return output;
}

at::Tensor Group::broadcast(const at::Tensor& tensor, int64_t from) {
  impl_->check_device("broadcast", tensor);
  if (from < 0 || from >= world_size())
    raise<ConfigError>("broadcast: from_process is {}, expected a rank from 0 to {}", from, world_size() - 1);
  at::Tensor output = tensor.detach().clone(at::MemoryFormat::Contiguous);
  if (output.numel() == 0) {
    barrier();
    return output;
  }
  std::vector<at::Tensor> bytes{as_bytes(output)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  const LoggedScope logged(Collective::broadcast, bytes.front().numel(), *this);
  run("broadcast", output, [&] { return impl_->process_group->broadcast(bytes, options); });
  return output;
}

void Group::all_reduce_(at::Tensor& tensor, Reduction reduction) {
  impl_->check_device("reduce", tensor);
  check_reducible(tensor, reduction);
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction == Reduction::max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  if (tensor.numel() == 0) return barrier();
  // Back ends take the larger of two numbers, and no comparison with NaN is true: which of them is left depends on the
  // order of the ranks. A maximum with a NaN is NaN, as it is within one process, and the ranks must know.
  const bool may_be_nan = reduction == Reduction::max && tensor.is_floating_point();
  std::vector<at::Tensor> nan;
  if (may_be_nan) nan.push_back(at::isnan(tensor).to(at::kByte));
  const LoggedScope logged(Collective::all_reduce, static_cast<int64_t>(tensor.nbytes()), *this);
  run("reduce", tensor, [&] { return impl_->process_group->allreduce(tensors, options); });
  if (!may_be_nan) return;
  run("reduce", nan[0], [&] { return impl_->process_group->allreduce(nan, options); });
  tensor.masked_fill_(nan[0].to(at::kBool), std::numeric_limits<double>::quiet_NaN());
}

void Group::barrier() {
  at::Tensor token = at::zeros({1}, at::TensorOptions().device(device()));
  std::vector<at::Tensor> tensors{token};
  const LoggedScope logged(Collective::barrier, 0, *this);
  run("barrier", token, [&] { return impl_->process_group->allreduce(tensors); });
  if (!device().is_cpu()) token.item<float>();  // the host must wait too
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_reduce_async(const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  LoggedCollective logged(Collective::all_reduce, static_cast<int64_t>(tensor.nbytes()), *this);
  auto future = run_async(
      "all_reduce of gradients", tensor, tensor, [&] { return impl_->process_group->allreduce(tensors); },
      counted_after(logged));
  return impl_->on_streams() ? counted_now(logged, std::move(future)) : future;
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_gather_async(at::Tensor output, at::Tensor input, uint64_t of) {
  LoggedCollective logged(Collective::all_gather, static_cast<int64_t>(input.nbytes()), *this);
  auto future = run_async(
      "all_gather of parameters", input, output,
      [&] {
        const AboutToMove what(of);
        return compat::all_gather_single(*impl_->process_group, output, input);
      },
      counted_after(logged), of);
  return impl_->on_streams() ? counted_now(logged, std::move(future)) : future;
}

c10::intrusive_ptr<c10::ivalue::Future> Group::reduce_scatter_async(at::Tensor output, at::Tensor input,
                                                                    double divisor) {
  constexpr const char* kName = "reduce_scatter of gradients";
  LoggedCollective logged(Collective::reduce_scatter, static_cast<int64_t>(input.nbytes()), *this);
  if (impl_->on_streams() || dry()) {
    const meta_memory::Purpose on_the_way(MemoryUse::staging);
    const at::Tensor pieces = impl_->options.dry_on_host ? at::empty_like(input) : at::Tensor();  // as below
    return counted_now(logged, run_async(kName, input, output, [&] {
                         return compat::reduce_scatter_single(*impl_->process_group, output, input);
                       }));
  }
  // gloo's reduce-scatter can't be waited for together with other events, and sends everything to everyone. Each rank
  // gets its pieces instead, and adds them in the order of the ranks.
  at::Tensor pieces = at::empty_like(input);
  return run_async(
      kName, input, output,
      [&] {
        at::Tensor to = as_bytes(pieces), from = as_bytes(input);  // of any type, complex ones among them
        return compat::all_to_all_single(*impl_->process_group, to, from);
      },
      [output, pieces, input, divisor, world = world_size(), logged]() mutable {
        const at::NoGradGuard no_grad;
        const auto rows = pieces.view({world, -1});
        if (output.is_cpu() && can_average(output.scalar_type())) {
          std::vector<const void*> all;
          for (int64_t rank = 0; rank < world; ++rank) all.push_back(rows[rank].const_data_ptr());
          average(output.scalar_type(), output.mutable_data_ptr(), all, output.numel(), divisor);
        } else {
          output.copy_(rows[0]);
          for (int64_t rank = 1; rank < world; ++rank) output.add_(rows[rank]);
          if (divisor != 1) output.div_(divisor);
        }
        // The transport keeps what it calls at its end until its next one.
        pieces.reset(), input.reset(), output.reset();
        logged.end();
      });
}

c10::intrusive_ptr<c10::ivalue::Future> Group::all_to_all_async(at::Tensor output, at::Tensor input) {
  LoggedCollective logged(Collective::reduce_scatter, static_cast<int64_t>(input.nbytes()), *this);
  auto future = run_async(
      "all_to_all of gradients", input, output,
      [&] {
        at::Tensor to = as_bytes(output), from = as_bytes(input);
        return compat::all_to_all_single(*impl_->process_group, to, from);
      },
      counted_after(logged));
  return impl_->on_streams() ? counted_now(logged, std::move(future)) : future;
}

}  // namespace accelerate::comm
