#include "residency/homes/kept_slice.hpp"

#include <ATen/ops/empty.h>

#include <optional>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/kept.hpp"

namespace accelerate::residency {
namespace {

/// For a flat storage on a device: the host's memory comes between.
class ThroughHost final : public Transfer {
 public:
  ThroughHost(std::unique_ptr<Transfer> coming, at::Tensor host, at::Tensor flat)
      : coming_(std::move(coming)), host_(std::move(host)), flat_(std::move(flat)) {}
  void wait() override {
    if (coming_) coming_->wait();
    flat_.copy_(host_);
  }

 private:
  std::unique_ptr<Transfer> coming_;
  at::Tensor host_, flat_;
};

class SliceOnDisk final : public Home {
 public:
  SliceOnDisk(std::shared_ptr<DiskMemory> disk, at::Tensor slice) : disk_(std::move(disk)), slice_(std::move(slice)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (flat.is_meta() || flat.numel() == 0) return nullptr;  // a dry run
    const bool here = flat.is_cpu() && flat.scalar_type() == slice_.scalar_type();
    const at::Tensor to = here ? flat : at::empty(slice_.sizes(), slice_.options());
    auto coming = disk_->read(slice_, to);
    if (here) return coming;
    return std::make_unique<ThroughHost>(std::move(coming), to, flat);
  }
  void store(const at::Tensor& flat) override {
    if (!flat.is_meta() && flat.numel() > 0) disk_->write(slice_, flat.to(slice_.options()).contiguous());
  }
  BytesPlace place() const override { return BytesPlace::file; }

 private:
  std::shared_ptr<DiskMemory> disk_;
  at::Tensor slice_;
};

class KeptHome final : public Home {
 public:
  explicit KeptHome(KeptSlice own) : own_(std::move(own)), kept_(own_.masters, 0) {}
  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    own_.make_current();
    return own_.home->fetch(flat);
  }
  void store(const at::Tensor& flat) override { kept_.take_back(flat); }
  std::optional<at::ScalarType> keeps() const override { return kept_.dtype(); }
  void refine(int64_t begin, const at::Tensor& values) const override { kept_.refine(begin, values); }
  void take(int64_t begin, const at::Tensor& values) override { kept_.take(begin, values); }
  int64_t version() const override { return kept_.version(); }
  BytesPlace place() const override { return own_.home->place(); }

 private:
  KeptSlice own_;
  Kept kept_;
};

}  // namespace

void KeptSlice::make_current(bool anyway) const {
  if (!made_of || masters.is_meta() || (!anyway && *made_of == masters._version())) return;
  const at::Tensor values = masters.detach().to(dtype);
  if (const auto mapped = home->mapped()) at::Tensor(*mapped).copy_(values);
  else home->store(values);
  *made_of = masters._version();
}

void KeptSlice::make_ahead() const {
  if (!ahead || bytes.numel() == 0) return;
  *ahead = {};
  const bool on_disk = home->place() == BytesPlace::file;
  if (on_disk && masters.is_meta()) return;  // a dry run
  at::Tensor values = masters.detach().to(dtype);
  if (on_disk) ahead->going = DiskMemory::of(bytes)->write_beside(bytes, values);
  else ahead->values = std::move(values);
}

bool KeptSlice::take_ahead() const {
  if (!ahead) return false;
  const Ahead made = std::exchange(*ahead, {});
  if (made.going) {
    try {
      made.going->wait();
    } catch (const ResourceError&) {
      return false;
    }
    DiskMemory::of(bytes)->exchange({bytes});
  } else if (made.values.defined()) {
    at::Tensor(bytes).copy_(made.values);
  } else {
    return false;
  }
  *made_of = masters._version();
  return true;
}

KeptSlice in_memory(at::Tensor slice) {
  KeptSlice own{.home = nullptr, .numel = slice.numel(), .dtype = slice.scalar_type()};
  own.bytes = slice;
  own.home = memory_home(std::move(slice));
  return own;
}

KeptSlice on_disk(const std::shared_ptr<DiskMemory>& disk, at::Tensor slice) {
  KeptSlice own{
      .home = std::make_shared<SliceOnDisk>(disk, slice), .numel = slice.numel(), .dtype = slice.scalar_type()};
  own.bytes = slice;
  own.masters = std::move(slice);
  return own;
}

KeptSlice image_of(at::Tensor masters, KeptSlice image) {
  image.masters = std::move(masters);
  image.made_of = std::make_shared<int64_t>(-1);
  image.ahead = std::make_shared<KeptSlice::Ahead>();
  return image;
}

std::unique_ptr<Home> kept_home(KeptSlice whole) { return std::make_unique<KeptHome>(std::move(whole)); }

}  // namespace accelerate::residency
