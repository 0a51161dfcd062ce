#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

namespace c10d {
class Store;
}

namespace accelerate::comm {

bool is_loopback(const std::string& host);

struct StoreOptions {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::string master_addr;
  uint16_t master_port = 0;
  std::chrono::milliseconds timeout{0};
};

/// Opens c10d's key-value store (rank 0 serves it; on loopback it listens on loopback only) and waits until every rank
/// has checked in. Blocks. @throws ConfigError when the port is busy, CommError naming the ranks that did not check in
/// in time.
c10::intrusive_ptr<c10d::Store> open_store(const StoreOptions& options);

}  // namespace accelerate::comm
