#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <optional>

#include "comm/comms_log.hpp"
#include "comm/group_impl.hpp"
#include "comm/rank_list.hpp"
#include "observe/trace.hpp"
#include "observe/wait_clock.hpp"

namespace accelerate::comm {

/// One tensor on its way between two ranks, which have an activity of their own: the others of the group take no part
/// in it.
class Group::Transfer {
 public:
  /// @param start  c10d's send or recv
  Transfer(Impl& group, const LoggedCollective& logged, const at::Tensor& contiguous, int64_t other,
           c10::intrusive_ptr<c10d::Work> (c10d::ProcessGroup::*start)(std::vector<at::Tensor>&, int, int))
      : tensor_(contiguous), progress_(group.progress), logged_(logged) {
    group.check_device("transfer", contiguous);
    group.check_usable("transfer");
    const auto [first, second] = std::minmax(group.options.rank, other);
    ranks_ = {group.ranks[static_cast<size_t>(first)], group.ranks[static_cast<size_t>(second)]};
    key_ = group.key + "/pair:" + list_of(ranks_);
    inside_.emplace(*progress_, progress_->activity(key_, "ranks " + list_of(ranks_)), "transfer");
    // gloo has no way from a device's memory to another rank's.
    moved_ = {group.on_streams() ? as_bytes(contiguous) : as_bytes(contiguous).cpu()};
    receives_ = start == &c10d::ProcessGroup::recv;
    try {
      work_ = (group.process_group.get()->*start)(moved_, static_cast<int>(other), /*tag=*/0);
    } catch (const std::exception& error) {
      group.fail(text_of(error), key_, ranks_);
    }
  }

  void wait(Impl& group) {
    const trace::Span span(trace::SpanKind::comm_wait, receives_ ? "receive" : "send",
                           static_cast<int64_t>(tensor_.nbytes()));
    const WaitClock waiting(RunCount::comm_wait_ns, !group.on_streams());
    std::string error;
    if (progress_->add_transfer(work_.get())) {
      try {
        if (!work_->wait()) error = "interrupted by a failure elsewhere";
      } catch (const std::exception& thrown) {
        error = text_of(thrown);
      }
      progress_->remove_transfer(work_.get());
    } else {
      error = "a peer failed";
    }
    if (!error.empty()) group.fail(error, key_, ranks_);
    if (receives_ && !tensor_.is_cpu() && moved_.front().is_cpu()) as_bytes(tensor_).copy_(moved_.front());
    inside_.reset();
    logged_.end();
  }

 private:
  const at::Tensor tensor_;
  std::vector<at::Tensor> moved_;  ///< its bytes; live as long as the transport reads them
  bool receives_ = false;
  const std::shared_ptr<Progress> progress_;
  LoggedCollective logged_;
  std::string key_;  ///< of the two ranks' activity
  std::vector<int64_t> ranks_;
  std::optional<InCollective> inside_;
  c10::intrusive_ptr<c10d::Work> work_;
};

std::shared_ptr<Group::Transfer> Group::send(const at::Tensor& contiguous, int64_t to) {
  const LoggedCollective logged(Collective::send, static_cast<int64_t>(contiguous.nbytes()), *this);
  return std::make_shared<Transfer>(*impl_, logged, contiguous, to, &c10d::ProcessGroup::send);
}

void Group::receive_(at::Tensor& contiguous, int64_t from) {
  const LoggedCollective logged(Collective::recv, static_cast<int64_t>(contiguous.nbytes()), *this);
  Transfer(*impl_, logged, contiguous, from, &c10d::ProcessGroup::recv).wait(*impl_);
}

void Group::wait(Transfer& transfer) { transfer.wait(*impl_); }

at::Tensor Group::gather(const at::Tensor& tensor) {
  if (dry()) return all_gather(tensor);  // nobody is there to send it to
  const at::Tensor input = (tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor).contiguous();
  if (rank() != 0) {
    if (input.numel() > 0) wait(*send(input, 0));
    return {};
  }
  auto sizes = input.sizes().vec();
  sizes[0] *= world_size();
  const at::Tensor output = at::empty(sizes, input.options());
  if (input.numel() == 0) return output;
  const auto parts = output.chunk(world_size());
  parts[0].copy_(input);
  for (int64_t from = 1; from < world_size(); ++from) {
    at::Tensor part = parts[static_cast<size_t>(from)];
    receive_(part, from);
  }
  return output;
}

}  // namespace accelerate::comm
