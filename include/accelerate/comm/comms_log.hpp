#pragma once

/// A log of collectives: how often each ran with messages of each size, and how long it took. `comms_logger` of a
/// DeepSpeed configuration switches the counting on, from prepare() on; end_training() prints the summary. Source:
/// DeepSpeed's manual, "Communication Logging"; deepspeed.comm.log_summary, reset_log.

#include <cstdint>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate::comm {

/// All collectives of one kind with messages of one size, as this rank saw them. Times are from this rank's call to
/// the end of the operation: waiting for slower ranks is in them, and so is what was computed meanwhile where the
/// operation ran behind training.
struct CommsRecord {
  std::string operation;  ///< all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, recv
  int64_t bytes = 0;      ///< that this rank brings: its own piece of an all_gather, the whole of a reduce_scatter
  int64_t count = 0;
  double total_ms = 0;
  double tput_gbps = 0;   ///< mean of each one's bits of the message, the whole one, per second, in 10^9
  double busbw_gbps = 0;  ///< likewise, of what crosses a link of a ring of ranks (the rule of NCCL's tests)
  double average_ms() const { return count == 0 ? 0 : total_ms / static_cast<double>(count); }
};

/// By operation, then by size. Not collective; any thread.
ACCELERATE_API std::vector<CommsRecord> comms_records();
/// The same as the table that log_summary() prints. Not collective.
ACCELERATE_API std::string comms_table();

/// The time that this rank waited for slower ones: the shortest time that any rank was in a collective is its cost, and
/// the rest is waiting.
struct StragglerRecord {
  std::string operation;
  int64_t bytes = 0, count = 0;
  double total_comm_ms = 0;       ///< the same on all ranks
  double total_straggler_ms = 0;  ///< this rank's
  double average_comm_ms() const { return count == 0 ? 0 : total_comm_ms / static_cast<double>(count); }
  double average_straggler_ms() const { return count == 0 ? 0 : total_straggler_ms / static_cast<double>(count); }
};
/// Of those records of which all ranks of the job counted equally many: the first of one is the first of all, and so
/// on. Those of groups within the job are among them where each rank is in as many. Collective, and not counted.
ACCELERATE_API std::vector<StragglerRecord> straggler_records();

/// Prints the table on the main process, and nothing on the others. Not collective, but with `show_straggler`, which
/// adds the table of straggler_records().
ACCELERATE_API void log_summary(bool show_straggler = false);
/// Forgets what was counted. Not collective.
ACCELERATE_API void reset_comms_log();

}  // namespace accelerate::comm
