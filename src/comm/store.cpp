#include "comm/store.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <optional>

#include "comm/no_sigpipe.hpp"
#include "comm/rank_list.hpp"
#include "network/guarded_port.hpp"
#include "network/wait_for_server.hpp"
#include "utils/environment.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

// The store would listen on every interface and believe whoever connects; on one machine nobody outside has any
// business with it, and no other user either.
GuardedPort guard(uint16_t port) {
  std::string why;
  if (auto guarded = GuardedPort::open(port, why)) return std::move(*guarded);
  raise<ConfigError>(
      "rendezvous: can't listen on 127.0.0.1:{} ({}), where rank 0 must serve the other ranks; another job probably "
      "uses this port. Choose another with MASTER_PORT or --main_process_port (0 picks a free one)",
      port, why);
}

/// A base, so that it goes after the store that listens behind it.
struct Guard {
  const GuardedPort guarded;
};

/// Rank 0's store behind a guard.
class GuardedStore : private Guard, public c10d::PrefixStore {
 public:
  GuardedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, GuardedPort guarded)
      : Guard{std::move(guarded)}, c10d::PrefixStore(prefix, std::move(store)) {}
};

/// How many groups this process has joined: as many as its peers, when the next one begins.
int64_t joined_before = 0;

[[noreturn]] void raise_unreachable(const StoreOptions& options, const std::string& where, const std::string& why) {
  raise<CommError>(
      "rendezvous: rank {} can't reach rank 0's store on {} within {} s; rank 0 may not have started or a firewall may "
      "be in the way: check MASTER_ADDR and MASTER_PORT. ({})",
      options.rank, where, options.timeout.count() / 1000, why);
}

c10::intrusive_ptr<c10d::Store> connect(const StoreOptions& options, const std::string& host,
                                        const c10d::TCPStoreOptions& tcp, const std::string& where) {
  const NoSigpipe of_the_server;
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, tcp);
  } catch (const std::exception& error) {
    if (tcp.isServer)
      raise<ConfigError>(
          "rendezvous: rank 0 can't serve the store on {}; the port is probably busy: choose another with MASTER_PORT "
          "or --main_process_port. ({})",
          where, accelerate::text_of(error));
    raise_unreachable(options, where, accelerate::text_of(error));
  }
}

/// Waits until rank 0 has checked in. @return false: the store ended instead, so it was that of the group before
bool is_of_this_group(c10d::Store& store, std::chrono::milliseconds timeout) {
  try {
    store.wait({"joined/0"}, timeout);
  } catch (const c10::DistNetworkError&) {
    return false;
  } catch (const std::exception&) {  // out of time, as the ranks that wait for all say
  }
  return true;
}

}  // namespace

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

c10::intrusive_ptr<c10d::Store> open_store(const StoreOptions& options) {
  const std::string where = options.master_addr + ":" + std::to_string(options.master_port);
  const std::string host = is_loopback(options.master_addr) ? "127.0.0.1" : options.master_addr;
  const auto end = std::chrono::steady_clock::now() + options.timeout;
  const auto left = [end] {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::ceil<std::chrono::milliseconds>(std::max(end - now, decltype(end - now){1}));
  };
  c10d::TCPStoreOptions tcp;
  tcp.port = options.master_port;
  tcp.numWorkers = static_cast<size_t>(options.world_size);
  tcp.waitWorkers = false;  // we wait ourselves, to say who is missing
  // Under torchrun the agent serves the store and rank 0 is a client like the rest.
  tcp.isServer = options.rank == 0 && environment::text("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True";
  std::optional<GuardedPort> guarded;
  if (tcp.isServer && is_loopback(options.master_addr)) {
    guarded = guard(options.master_port);
    tcp.masterListenFd = guarded->listening();
  }
  // Neither a restarted job nor a second group of these processes may read the keys of the one before.
  const std::string prefix = "accelerate/" + environment::text("TORCHELASTIC_RESTART_COUNT").value_or("0") +
                             (joined_before ? "/" + std::to_string(joined_before) : "");
  c10::intrusive_ptr<c10d::Store> store;
  do {
    // If nobody listens, c10d's store goes on for two to three times as long as it is told.
    std::string why;
    if (!tcp.isServer && !wait_for_server(host, options.master_port, end, why)) raise_unreachable(options, where, why);
    tcp.timeout = left();
    store = connect(options, host, tcp, where);
    if (guarded) store = c10::make_intrusive<GuardedStore>(prefix, std::move(store), std::move(*guarded));
    else store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
    // The rank that is back first may meet the store of the group before, which rank 0 is about to leave.
  } while (joined_before > 0 && !tcp.isServer && !is_of_this_group(*store, left()));
  store->set("joined/" + std::to_string(options.rank), std::vector<uint8_t>{1});
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < options.world_size; ++rank) keys.push_back("joined/" + std::to_string(rank));
  try {
    store->wait(keys, left());
  } catch (const std::exception& error) {
    std::vector<int64_t> missing;
    try {
      for (int64_t rank = 0; rank < options.world_size; ++rank)
        if (!store->check({keys[static_cast<size_t>(rank)]})) missing.push_back(rank);
    } catch (const std::exception&) {
      raise<CommError>(
          "rendezvous: rank 0's store on {} went away while waiting for the other ranks; look at rank 0's own error",
          where);
    }
    raise<CommError>(
        "rendezvous on {}: rank(s) {} of {} did not check in within {} s; they may have failed before joining: look at "
        "their output, or raise InitProcessGroupKwargs::timeout",
        where, list_of(missing), options.world_size, options.timeout.count() / 1000);
  }
  store->setTimeout(options.timeout);
  ++joined_before;
  return store;
}

}  // namespace accelerate::comm
