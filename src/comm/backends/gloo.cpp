#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gloo/common/error.h>
#include <gloo/common/logging.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <future>
#include <thread>

#include "comm/backends/backend.hpp"
#include "comm/no_sigpipe.hpp"
#include "comm/store.hpp"
#include "network/local_address.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

/// c10d's own of this kind waits for an error as for a success.
class FutureWork final : public c10d::Work {
 public:
  explicit FutureWork(c10::intrusive_ptr<c10::ivalue::Future> future) : future_(std::move(future)) {}
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return future_->value().toTensorVector(); }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// gloo pairs what ranks send by the collective's kind and number alone. A message that is longer than expected then
/// ends the process on a thread of the transport, and a shorter one passes for the data. Here the length, and what is
/// moved where somebody says so, are a part of the number: ranks that are out of step wait for each other, until the
/// group's timeout says so.
class GlooInStep final : public Gloo {
 public:
  using Gloo::Gloo;
  using Work = c10::intrusive_ptr<c10d::Work>;

  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    number(tensors, options.rootRank);
    return through_host(tensors, tensors, [&](auto& host) { return Gloo::broadcast(host, options); });
  }
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    number(tensors);
    return through_host(tensors, tensors, [&](auto& host) { return Gloo::allreduce(host, options); });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    number({input});
    return through_host({output}, {output, input},
                        [&](auto& host) { return Gloo::_allgather_base(host[0], host[1], options); });
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                     std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& options) override {
    number({input});
    return through_host({output}, {output, input}, [&](auto& host) {
      return Gloo::alltoall_base(host[0], host[1], output_counts, input_counts, options);
    });
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
  /// A device's tensors are copied to the host, where gloo gets them, and the results back: on the stream that is
  /// current now, and before the work is done. gloo's own way with a GPU's tensors has half of the collectives, and its
  /// futures don't wait for its copies.
  /// @param results  the first of `tensors`
  template <class Start>
  static Work through_host(const std::vector<at::Tensor>& results, std::vector<at::Tensor> tensors, Start start) {
    const at::Device device = tensors.front().device();
    if (device.is_cpu()) return start(tensors);
    for (auto& tensor : tensors) tensor = tensor.cpu();
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    const auto moved = start(tensors)->getFuture();
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{device});
    moved->addCallback([done, results, tensors, stream](c10::ivalue::Future& moved) {
      try {
        moved.value();  // or its error
        const at::NoGradGuard no_grad;
        const c10::StreamGuard on(stream);
        for (size_t i = 0; i < results.size(); ++i) at::Tensor(results[i]).copy_(tensors[i]);
        done->markCompleted(results);
      } catch (...) {
        done->setError(std::current_exception());
      }
    });
    return c10::make_intrusive<FutureWork>(done);
  }

  /// The low half of the next collective's number says what it moves; the high half counts.
  void number(const std::vector<at::Tensor>& tensors, int64_t root = 0) {
    uint64_t what = (AboutToMove::now() ^ static_cast<uint64_t>(root)) + 1;
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
