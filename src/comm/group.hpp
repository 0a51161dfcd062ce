#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/comm.hpp"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}

namespace accelerate::comm {

class SharedMemory;
class TrafficCounter;

struct GroupOptions {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::string backend;
  std::string master_addr;
  uint16_t master_port = 0;
  std::chrono::milliseconds timeout{0};
  at::Device device = at::kCPU;
  bool debug = false;            ///< compare more before each collective
  int64_t local_world_size = 1;  ///< ranks that the launcher started on this machine
  /// Set: no peers, no store; this process alone pretends, and what it would send is counted here (see
  /// DryProcessGroup).
  std::shared_ptr<TrafficCounter> dry;
  bool dry_on_host = false;  ///< it pretends to be one of ranks that compute on CPUs
};

/// The group of all ranks, or some of them: c10d moves the bytes, this class makes sure that nobody waits in silence.
/// Every wait ends with the data, or with a CommError that names the operation, its number, and which ranks are late,
/// gone, failed or somewhere else.
///
/// Collectives of one group are called from one thread at a time, in the same order on every rank of it. Tensors live
/// on the group's device (CPU for gloo and mpi).
class Group : public std::enable_shared_from_this<Group> {
 public:
  /// Collective; blocks until all ranks have joined.
  static std::shared_ptr<Group> join(const GroupOptions& options);
  ~Group();

  /// Groups within this one: ranks of the same color become one, in their order here. Timeouts, faults and the watchdog
  /// are those of all: an error names ranks by their numbers in the job, and the failure of any rank of the job ends
  /// the waits of every group. The same split again gives the same groups, and one that takes in everybody is this
  /// group. Collective over this group; blocks until the new one has met.
  /// @param name      the same on all ranks: "shard" is "shard group of ranks 0, 1" in errors.
  /// @param color_of  a number for each rank of this group, the same function on all ranks.
  std::shared_ptr<Group> split(const std::string& name, const std::function<int64_t(int64_t rank)>& color_of);

  /// In this group.
  int64_t rank() const;
  int64_t world_size() const;
  /// The ranks' numbers in the job, by their rank in this group.
  const std::vector<int64_t>& global_ranks() const;
  int64_t local_world_size() const;
  const std::string& backend() const;
  const at::Device& device() const;
  bool debug() const;
  /// Nobody else is there: tensors of the meta device may be sent, and `device()`, where ranks' notes to each other
  /// lie, is the CPU.
  bool dry() const;
  /// For c10d components (Reducer). Waits inside them are bounded by the group's timeout.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const;

  /// @param operation  for messages
  at::Tensor all_gather(const at::Tensor& tensor, const char* operation = "gather");
  /// The same for rank 0 alone, other ranks get a tensor that is not defined. Each part goes straight to its place, by
  /// the transfers below: rank 0 needs no memory but the result's, the others none. Collective, but only rank 0 waits
  /// for all.
  at::Tensor gather(const at::Tensor& tensor);
  at::Tensor broadcast(const at::Tensor& tensor, int64_t from);
  void all_reduce_(at::Tensor& tensor, Reduction reduction);
  void barrier();

  /// Starts a sum over ranks in place and returns at once. The future's value is the list of that one tensor, as c10d's
  /// communication hooks want; it fails with a CommError when a peer announces its failure, even while nothing moves.
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce_async(const at::Tensor& tensor);
  /// The same for an all-gather: output [P*n], input [n], 1-D and contiguous. Both stay untouched until the future is
  /// complete. @param of  a number for what is gathered: ranks that gather different things are out of step (on the
  /// host; on a device those of one size mix them up).
  c10::intrusive_ptr<c10::ivalue::Future> all_gather_async(at::Tensor output, at::Tensor input, uint64_t of = 0);
  /// And for a sum of which each rank gets its part: output [n], input [P*n]. @param divisor  of the sum; on the host
  /// half precision is rounded once, after the division, on a device it must be 1.
  c10::intrusive_ptr<c10::ivalue::Future> reduce_scatter_async(at::Tensor output, at::Tensor input, double divisor = 1);
  /// And for pieces that are different for each rank: output and input [P*n], 1-D and contiguous; the p-th n elements
  /// of the input go to rank p, and the p-th of the output are from it. Counts as a reduce-scatter: it is how messages
  /// that can't be added up on their way make one.
  c10::intrusive_ptr<c10::ivalue::Future> all_to_all_async(at::Tensor output, at::Tensor input);
  /// Blocks until one of the futures above is complete (on a GPU: until the current stream waits for it). @throws
  /// CommError.
  void wait(const char* operation, c10::ivalue::Future& future);

  /// One tensor to or from one rank of this group; dense, and of any dtype. Two ranks call what fits together in the
  /// same order, the others don't take part. Returns at once. The tensor stays untouched until wait() has returned.
  class Transfer;
  std::shared_ptr<Transfer> send(const at::Tensor& contiguous, int64_t to);
  /// Blocks until the tensor has come.
  void receive_(at::Tensor& contiguous, int64_t from);
  /// Blocks until the tensor has left. @throws CommError as collectives do, here and in receive_().
  void wait(Transfer& transfer);

  /// Waits for something that peers do outside of c10d (shared memory): polls `done`, at first without giving up the
  /// processor. @throws CommError when a peer fails meanwhile or the group's timeout passes.
  /// @param in_step  it counts as a collective: all ranks wait here equally often
  void wait_until(const char* operation, const std::function<bool()>& done, bool in_step = true);
  /// Memory for the short messages by which ranks agree, where all of them are processes of this host; null: there is
  /// none, they go through the back end. Made when some have been sent, so that short runs don't pay for it. In step.
  SharedMemory* board();
  /// All ranks of the group are processes of this host: a wait_until() ends when one of them has ended. @param pids  by
  /// rank.
  void watch_processes(std::vector<int64_t> pids);

  /// Ranks find a place that all of them are still to come to, while they run on: somebody calls, the watchdogs ask
  /// each rank how far it is, within about a second, and all learn the greatest answer. Of the group of all ranks; once
  /// in its life; any thread. Nothing is asked, and nothing sent, before somebody calls.
  void call_ranks();
  /// @param how_far  gives this rank's answer, 0 or more; called once, on the watchdog's thread. The question waits
  /// until there is one. A rank that leaves has been everywhere.
  void answer_calls(std::function<int64_t()> how_far);
  /// The greatest answer, when all ranks have given theirs.
  std::optional<int64_t> furthest() const;

  /// Runs c10d code that waits by itself; its exceptions become CommErrors with the peers' states. Other exceptions
  /// pass through.
  void guard(const char* operation, const std::function<void()>& body);
  /// The same of c10d code that is one collective of all ranks: peers count it among theirs.
  void guard_collective(const char* operation, const std::function<void()>& body);

  /// Says what this rank does in all groups of the job, a line for each, for people. Any thread, also after the end of
  /// this group.
  std::function<std::string()> activity() const;

  /// Tells all peers that this rank takes no part any more, as the group's end does. Not collective.
  void leave() noexcept;
  /// Tells all peers that this rank failed. Never throws, not collective.
  void announce_failure(const std::string& reason) noexcept;

 private:
  friend class Notes;
  struct Impl;
  explicit Group(std::unique_ptr<Impl> impl);
  void run(const char* operation, const at::Tensor& brought,
           const std::function<c10::intrusive_ptr<c10d::Work>()>& start);
  c10::intrusive_ptr<c10::ivalue::Future> run_async(const char* operation, const at::Tensor& brought,
                                                    const at::Tensor& result,
                                                    const std::function<c10::intrusive_ptr<c10d::Work>()>& start,
                                                    std::function<void()> after = nullptr, uint64_t of = 0);
  std::unique_ptr<Impl> impl_;
};

/// Byte strings in one group, see comm.hpp.
std::vector<std::string> all_gather_bytes(Group& group, const std::string& bytes);
std::string broadcast_bytes(Group& group, const std::string& bytes, int64_t from);

/// The group that the free functions of comm.hpp use; null alone. Set by PartialState.
const std::shared_ptr<Group>& world_group();
void set_world_group(std::shared_ptr<Group> group);

}  // namespace accelerate::comm
