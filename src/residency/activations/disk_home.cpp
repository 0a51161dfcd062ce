#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <thread>

#include "residency/activations/activation_home.hpp"
#include "residency/spill_file.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {
namespace {

/// One tensor's place in the file and the state of its transfers.
struct OnDisk {
  OnDisk(std::shared_ptr<SpillFile> file, const at::Tensor& bytes)
      : file(std::move(file)),
        options(bytes.options()),
        bytes(bytes.numel()),
        offset(this->file->reserve(this->bytes)) {}
  ~OnDisk() { file->release(offset, bytes); }

  const std::shared_ptr<SpillFile> file;
  const at::TensorOptions options;
  const int64_t bytes;
  const int64_t offset;

  enum class Read { none, queued, done };
  Mutex mutex;
  std::condition_variable changed;
  Read read ACCELERATE_GUARDED_BY(mutex) = Read::none;
  /// The tensor that was read, on the CPU; or the original, if it could not be written.
  at::Tensor in_memory ACCELERATE_GUARDED_BY(mutex);
  std::exception_ptr error ACCELERATE_GUARDED_BY(mutex);
};

at::Tensor read_from(const OnDisk& place) {
  auto host = at::empty({place.bytes}, place.options.device(at::kCPU));
  place.file->read(place.offset, host.mutable_data_ptr(), place.bytes);
  return host;
}

/// One thread that reads before it writes: backward waits for what is read, nobody for what is written.
class IoThread {
 public:
  ~IoThread() {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
      reads_.clear();
      writes_.clear();
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void read(std::function<void()> job) {
    const MutexLock lock(mutex_);
    reads_.push_back(std::move(job));
    wake();
  }
  void write(std::function<void()> job) {
    const MutexLock lock(mutex_);
    writes_.push_back(std::move(job));
    wake();
  }

 private:
  void wake() ACCELERATE_REQUIRES(mutex_) {
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
  }
  void run() {
    MutexLock lock(mutex_);
    while (true) {
      while (!stop_ && reads_.empty() && writes_.empty()) lock.wait(changed_);
      if (stop_) return;
      auto& jobs = reads_.empty() ? writes_ : reads_;
      auto job = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
  }

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> reads_ ACCELERATE_GUARDED_BY(mutex_), writes_ ACCELERATE_GUARDED_BY(mutex_);
  bool stop_ ACCELERATE_GUARDED_BY(mutex_) = false;
  std::thread thread_;  ///< made with the mutex held, joined by the destructor without it
};

/// The tensors that wait to be written, and the error that occurred meanwhile.
struct Backlog {
  Mutex mutex;
  std::condition_variable changed;
  int64_t bytes ACCELERATE_GUARDED_BY(mutex) = 0;
  std::exception_ptr error ACCELERATE_GUARDED_BY(mutex);
};

class DiskBytes final : public AwayBytes {
 public:
  DiskBytes(std::shared_ptr<OnDisk> place, IoThread& io) : place_(std::move(place)), io_(io) {}

  bool started() const override {
    const MutexLock lock(place_->mutex);
    return place_->read != OnDisk::Read::none;
  }
  void prefetch() override {
    {
      const MutexLock lock(place_->mutex);
      if (place_->read != OnDisk::Read::none) return;
      place_->read = OnDisk::Read::queued;
    }
    io_.read([weak = std::weak_ptr(place_)] {
      const auto place = weak.lock();
      if (!place) return;
      at::Tensor host;
      std::exception_ptr error;
      try {
        host = read_from(*place);
      } catch (...) {
        error = std::current_exception();
      }
      const MutexLock lock(place->mutex);
      place->in_memory = std::move(host);
      place->error = error;
      place->read = OnDisk::Read::done;
      place->changed.notify_all();
    });
  }

  at::Tensor fetch() override {
    at::Tensor host;
    {
      MutexLock lock(place_->mutex);
      while (place_->read == OnDisk::Read::queued) lock.wait(place_->changed);
      place_->read = OnDisk::Read::none;
      if (place_->error) std::rethrow_exception(std::exchange(place_->error, nullptr));
      host = std::exchange(place_->in_memory, {});
    }
    if (!host.defined()) host = read_from(*place_);
    return host.to(place_->options.device());
  }

 private:
  const std::shared_ptr<OnDisk> place_;
  IoThread& io_;
};

class DiskHome final : public ActivationHome {
 public:
  DiskHome(const std::filesystem::path& directory, int64_t max_pending_bytes)
      : max_pending_bytes_(max_pending_bytes),
        file_(std::make_shared<SpillFile>(
            directory, SpillFile::Wording{.user = "activation offload",
                                          .contents = "the activations of this step",
                                          .advice = "use another directory, a smaller batch, or a larger min_bytes"})) {
  }

  std::unique_ptr<AwayBytes> store(at::Tensor bytes) override {
    const auto size = bytes.numel();
    {
      MutexLock lock(backlog_->mutex);
      while (!backlog_->error && backlog_->bytes != 0 && backlog_->bytes + size > max_pending_bytes_)
        lock.wait(backlog_->changed);
      if (backlog_->error) std::rethrow_exception(std::exchange(backlog_->error, nullptr));
    }
    auto place = std::make_shared<OnDisk>(file_, bytes);
    std::optional<c10::Event> computed;
    if (!bytes.is_cpu()) {
      computed.emplace(bytes.device().type());
      computed->record(c10::impl::VirtualGuardImpl(bytes.device().type()).getStream(bytes.device()));
    }
    {
      const MutexLock lock(backlog_->mutex);
      backlog_->bytes += size;
    }
    // shared_ptr because std::function wants copies of what it holds, and an event has none
    io_.write([backlog = backlog_, weak = std::weak_ptr(place),
               held = std::make_shared<std::pair<at::Tensor, std::optional<c10::Event>>>(std::move(bytes),
                                                                                         std::move(computed)),
               size] {
      auto& [tensor, ready] = *held;
      std::exception_ptr error;
      if (const auto place = weak.lock()) {  // else backward was faster, or the graph is gone
        try {
          const c10::OptionalDeviceGuard guard(tensor.device());
          if (ready) ready->synchronize();
          const auto host = tensor.cpu();
          place->file->write(place->offset, host.const_data_ptr(), place->bytes);
        } catch (...) {
          error = std::current_exception();
          const MutexLock lock(place->mutex);
          place->in_memory = tensor;  // nothing is lost: backward takes it from here
        }
      }
      tensor.reset();
      const MutexLock lock(backlog->mutex);
      backlog->bytes -= size;
      if (error) backlog->error = error;
      backlog->changed.notify_all();
    });
    return std::make_unique<DiskBytes>(std::move(place), io_);
  }

 private:
  const int64_t max_pending_bytes_;
  const std::shared_ptr<SpillFile> file_;
  const std::shared_ptr<Backlog> backlog_ = std::make_shared<Backlog>();
  IoThread io_;
};

}  // namespace

std::unique_ptr<ActivationHome> make_disk_home(const std::filesystem::path& directory, int64_t max_pending_bytes) {
  return std::make_unique<DiskHome>(directory, max_pending_bytes);
}

}  // namespace accelerate::residency
