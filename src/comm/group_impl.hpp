#pragma once

#include <exception>
#include <map>
#include <utility>

#include "comm/group.hpp"
#include "comm/progress.hpp"
#include "comm/shared_memory.hpp"
#include "comm/watchdog.hpp"
#include "utils/error_text.hpp"

namespace c10d {
class Store;
}

namespace accelerate::comm {

struct Group::Impl {
  GroupOptions options;        ///< rank and world_size are those of this group
  std::vector<int64_t> ranks;  ///< the job's, by rank
  std::string key;             ///< the same on all members; "" is the group of all
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  /// By name and all ranks' colors.
  std::map<std::pair<std::string, std::vector<int64_t>>, std::shared_ptr<Group>> splits;
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Watchdog> watchdog;
  GroupActivity* activity = nullptr;  ///< in progress
  std::vector<int64_t> pids;          ///< by rank, or none
  int64_t messages = 0;               ///< by which ranks have agreed
  std::shared_ptr<SharedMemory> board;

  /// Whether collectives run on streams of the device, where nothing blocks the host. gloo takes tensors of a device
  /// through host memory, by threads of its own.
  bool on_streams() const { return !options.device.is_cpu() && options.backend != "gloo"; }

  int64_t own() const { return ranks[static_cast<size_t>(options.rank)]; }

  /// Makes process_group and activity of the rest. Blocks until all members have called it.
  /// @param name  for messages: "group of all 4 ranks"
  void connect(const std::string& name);

  /// @throws ShapeError for a tensor on a device that the back end doesn't serve.
  void check_device(const char* operation, const at::Tensor& tensor) const;
  /// @throws CommError after a failure.
  void check_usable(const char* operation) const;

  /// Asks the peers what they are doing, and tells them. @throws CommError that explains what happened.
  [[noreturn]] void fail(const std::string& what) { fail(what, key, ranks); }
  /// @param key, ranks  what was going on among whom: the group's own, or two ranks of it
  [[noreturn]] void fail(const std::string& what, const std::string& key, const std::vector<int64_t>& ranks);
};

using accelerate::text_of;  // beside this module's own of that name

/// Back ends know few dtypes; copying bytes needs none.
inline at::Tensor as_bytes(const at::Tensor& contiguous) {
  return contiguous.resolve_conj().resolve_neg().view({-1}).view(at::kByte);
}

}  // namespace accelerate::comm
