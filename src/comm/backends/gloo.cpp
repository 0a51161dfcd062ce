#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <future>
#include <thread>

#include "comm/backends/backend.hpp"
#include "comm/no_sigpipe.hpp"
#include "comm/store.hpp"
#include "utils/environment.hpp"
#include "utils/network/local_address.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

/// gloo pairs what ranks send by the collective's kind and number alone. A message that is longer than expected then
/// ends the process on a thread of the transport, and a shorter one passes for the data. Here the length is a part of
/// the number: ranks that are out of step wait for each other, until the group's timeout says so.
class GlooInStep final : public Gloo {
 public:
  using Gloo::Gloo;
  using Work = c10::intrusive_ptr<c10d::Work>;

  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    number(tensors, options.rootRank);
    return Gloo::broadcast(tensors, options);
  }
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    number(tensors);
    return Gloo::allreduce(tensors, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    number({input});
    return Gloo::_allgather_base(output, input, options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& options) override {
    number({input});
    return Gloo::alltoall_base(output, input, output_counts, input_counts, options);
  }
  // These write on the caller's thread, the one the data, the other that it is ready.
  Work send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const NoSigpipe here;
    return Gloo::send(tensors, to, tag);
  }
  Work recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    const NoSigpipe here;
    return Gloo::recv(tensors, from, tag);
  }

  bool settles(std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (;;) {
      {
        const std::lock_guard lock(workMutex_);
        if (workQueue_.empty() && std::none_of(workInProgress_.begin(), workInProgress_.end(),
                                               [](const auto& work) { return work.defined(); }))
          return true;
      }
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

 private:
  /// The low half of the next collective's number says what it moves; the high half counts.
  void number(const std::vector<at::Tensor>& tensors, int64_t root = 0) {
    uint64_t what = static_cast<uint64_t>(root) + 1;
    for (const auto& tensor : tensors) what = (what + tensor.nbytes()) * 0x9E3779B97F4A7C15U;
    collectiveCounter_ = ++count_ << 16 | static_cast<uint32_t>(what >> 48);
  }
  uint32_t count_ = 0;
};

std::vector<std::shared_ptr<gloo::transport::Device>> devices(const BackendOptions& options) {
  if (const auto names = environment::text("GLOO_SOCKET_IFNAME")) {
    std::vector<std::shared_ptr<gloo::transport::Device>> found;
    for (size_t begin = 0; begin <= names->size();) {
      const size_t end = std::min(names->find(',', begin), names->size());
      found.push_back(Gloo::createDeviceForInterface(names->substr(begin, end - begin)));
      begin = end + 1;
    }
    return found;
  }
  // gloo would take the address that this machine's name has, which in many /etc/hosts is a loopback one, or none. On
  // one machine nothing needs to leave it; otherwise the way to the master is one that the others have, too.
  if (is_loopback(options.master_addr)) return {Gloo::createDeviceForHostname("127.0.0.1")};
  if (const auto own = local_address_towards(options.master_addr)) return {Gloo::createDeviceForHostname(*own)};
  return {Gloo::createDefaultDevice()};
}

c10::intrusive_ptr<c10d::Backend> create_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                              const BackendOptions& options) {
  // A peer that ends while they connect is waited for 30 s by gloo, whatever it is told. Then this stays behind.
  std::packaged_task<c10::intrusive_ptr<c10d::Backend>()> connect([store, options] {
    const NoSigpipe of_its_threads;
    auto gloo = Gloo::Options::create(options.timeout);
    gloo->devices = devices(options);
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<GlooInStep>(
        store, static_cast<int>(options.rank), static_cast<int>(options.world_size), gloo));
  });
  auto connected = connect.get_future();
  std::thread(std::move(connect)).detach();
  if (connected.wait_for(options.timeout) != std::future_status::ready)
    raise<CommError>("not all of the peers are connected after {} s", options.timeout.count() / 1000);
  return connected.get();
}

/// A connection that failed or timed out, or a message of another length than was expected.
bool gloo_has_thrown(const std::exception& error) {
  return dynamic_cast<const gloo::Exception*>(&error) || dynamic_cast<const gloo::EnforceNotMet*>(&error);
}

}  // namespace

const BackendFactory kGloo{
    "gloo", true, create_gloo, gloo_has_thrown, "", [](c10d::Backend& backend, std::chrono::milliseconds limit) {
      return dynamic_cast<GlooInStep&>(backend).settles(limit);
    }};

}  // namespace accelerate::comm
