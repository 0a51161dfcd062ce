#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <optional>

#include "residency/activations/activation_home.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {
namespace {

/// Runs copy() on the stream `side` after what the current stream has been given so far, and returns the event of its
/// end.
template <class Copy> c10::Event on_side_stream(const at::Tensor& on_device, c10::Stream side, Copy&& copy) {
  const c10::impl::VirtualGuardImpl device(side.device_type());
  c10::Event before(side.device_type()), after(side.device_type());
  before.record(device.getStream(side.device()));
  before.block(side);
  {
    const c10::StreamGuard guard(side);
    copy();
  }
  // Its memory is not given to others before the copy is done.
  device.recordDataPtrOnStream(on_device.storage().data_ptr(), side);
  after.record(side);
  return after;
}

class HostBytes final : public AwayBytes {
 public:
  HostBytes(const at::Tensor& bytes, c10::Stream side, bool pin) : options_(bytes.options()), side_(side) {
    const c10::DeviceGuard guard(side.device());
    host_ = at::empty(bytes.sizes(), bytes.options().device(at::kCPU).pinned_memory(pin));
    on_side_stream(bytes, side_, [&] { host_.copy_(bytes, /*non_blocking=*/true); });
  }
  bool started() const override { return device_.defined(); }
  void prefetch() override {
    if (started()) return;
    const c10::DeviceGuard guard(side_.device());
    device_ = at::empty(host_.sizes(), options_);
    loaded_.emplace(on_side_stream(device_, side_, [&] {
      device_.copy_(host_, /*non_blocking=*/true);
    }));  // after the copy out, which ran on the same stream
  }
  at::Tensor fetch() override {
    prefetch();
    const c10::impl::VirtualGuardImpl device(side_.device_type());
    loaded_->block(device.getStream(side_.device()));
    loaded_.reset();
    return std::exchange(device_, {});
  }

 private:
  const at::TensorOptions options_;
  const c10::Stream side_;
  at::Tensor host_, device_;
  std::optional<c10::Event> loaded_;
};

class HostActivationHome final : public ActivationHome {
 public:
  explicit HostActivationHome(bool pin) : pin_(pin) {}
  std::unique_ptr<AwayBytes> store(at::Tensor bytes) override {
    return std::make_unique<HostBytes>(bytes, side_stream(bytes.device()), pin_);
  }

 private:
  c10::Stream side_stream(c10::Device device) {
    const MutexLock lock(mutex_);
    auto found = streams_.find(device.index());
    if (found == streams_.end())
      found =
          streams_.emplace(device.index(), c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device))
              .first;
    return found->second;
  }

  const bool pin_;
  Mutex mutex_;
  std::map<c10::DeviceIndex, c10::Stream> streams_ ACCELERATE_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<ActivationHome> make_host_home(bool pin_memory) {
  return std::make_unique<HostActivationHome>(pin_memory);
}

}  // namespace accelerate::residency
