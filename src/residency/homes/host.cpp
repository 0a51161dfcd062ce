#include "residency/homes/host.hpp"

#include "residency/homes/kept.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace accelerate::residency {
namespace {

/// The compute stream waits for the copy; the host never does.
class OnStream final : public Transfer {
 public:
  OnStream(c10::Event copied, at::Device device) : copied_(std::move(copied)), device_(device) {}
  void wait() override { copied_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }

 private:
  c10::Event copied_;
  at::Device device_;
};

class HostHome final : public Home {
 public:
  HostHome(at::Tensor master, std::shared_ptr<Worker> worker)
      : master_(std::move(master)), worker_(std::move(worker)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (flat.device().is_meta()) return nullptr;  // a dry run
    if (flat.device().is_cpu()) return worker_->run([flat, master = master_]() mutable { flat.copy_(master); });
    const c10::impl::VirtualGuardImpl device(flat.device().type());
    if (!stream_) stream_ = device.getStreamFromGlobalPool(flat.device(), /*isHighPriority=*/true);
    // The compute stream's work on these bytes (an earlier unit lived in them) comes first.
    c10::Event free(flat.device().type());
    free.record(device.getStream(flat.device()));
    free.block(*stream_);
    c10::Event copied(flat.device().type());
    {
      c10::StreamGuard on(*stream_);
      at::Tensor(flat).copy_(master_, /*non_blocking=*/true);
      copied.record(*stream_);
    }
    flat.record_stream(*stream_);
    return std::make_unique<OnStream>(std::move(copied), flat.device());
  }

  void store(const at::Tensor& flat) override {
    if (!flat.is_meta()) Kept(master_, 0).take_back(flat);
  }
  BytesPlace place() const override { return BytesPlace::host; }

 private:
  at::Tensor master_;
  std::shared_ptr<Worker> worker_;
  std::optional<c10::Stream> stream_;
};

/// Plain memory that is the image of masters in another dtype.
class ImageHome final : public Home {
 public:
  ImageHome(at::Tensor flat, const at::Tensor& master) : flat_(std::move(flat)), kept_(master, 0) {}
  std::unique_ptr<Transfer> fetch(const at::Tensor&) override { return nullptr; }
  void store(const at::Tensor& flat) override { kept_.take_back(flat); }
  std::optional<at::Tensor> mapped() override { return flat_; }
  std::optional<at::ScalarType> keeps() const override { return kept_.dtype(); }
  void refine(int64_t begin, const at::Tensor& values) const override { kept_.refine(begin, values); }
  void take(int64_t begin, const at::Tensor& values) override { kept_.take(begin, values); }
  int64_t version() const override { return kept_.version(); }

 private:
  at::Tensor flat_;
  Kept kept_;
};

class MemoryHome final : public Home {
 public:
  MemoryHome(at::Tensor flat, BytesPlace place) : flat_(std::move(flat)), place_(place) {}
  std::unique_ptr<Transfer> fetch(const at::Tensor&) override { return nullptr; }
  void store(const at::Tensor&) override {}
  std::optional<at::Tensor> mapped() override { return flat_; }
  BytesPlace place() const override { return place_; }

 private:
  at::Tensor flat_;
  BytesPlace place_;
};

}  // namespace

std::unique_ptr<Home> host_home(at::Tensor master, std::shared_ptr<Worker> worker) {
  return std::make_unique<HostHome>(std::move(master), std::move(worker));
}
std::unique_ptr<Home> image_home(at::Tensor flat, const at::Tensor& master) {
  return std::make_unique<ImageHome>(std::move(flat), master);
}
std::unique_ptr<Home> memory_home(at::Tensor flat, BytesPlace place) {
  return std::make_unique<MemoryHome>(std::move(flat), place);
}

}  // namespace accelerate::residency
