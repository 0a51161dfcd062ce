// FSDP steps of a model of 20 M parameters over a slow wire, in turns with the same steps whose collectives return at
// once. A trace must call exposed what a step saves without communication. judge.py runs it.
// usage: bench_exposed_communication FOLDER PAIRS MB_PER_SECOND
#include <accelerate/accelerate.hpp>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <map>
#include <thread>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/group.hpp"

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;

namespace {

/// An operation that somebody else ends.
class Promised final : public c10d::Work {
 public:
  explicit Promised(const at::Tensor& result)
      : result_(result), future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}
  void complete() { future_->markCompleted(c10::IValue(std::vector<at::Tensor>{result_})); }
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return !future_->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  at::Tensor result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Ends operations when a wire of that speed would have carried their bytes, one after the other.
class Wire {
 public:
  explicit Wire(double bytes_per_second) : bytes_per_second_(bytes_per_second), thread_([this] { run(); }) {}
  ~Wire() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  /// @return when they have passed
  Clock::time_point send(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::chrono::duration<double> takes(static_cast<double>(bytes) / bytes_per_second_);
    return free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  }
  void complete_at(Clock::time_point when, c10::intrusive_ptr<Promised> work) {
    const std::lock_guard lock(mutex_);
    due_.emplace(when, std::move(work));
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (due_.empty()) changed_.wait(lock);
      else if (due_.begin()->first > Clock::now()) changed_.wait_until(lock, due_.begin()->first);
      else {
        const auto work = std::move(due_.begin()->second);
        due_.erase(due_.begin());
        lock.unlock();
        work->complete();
        lock.lock();
      }
    }
  }

  double bytes_per_second_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, c10::intrusive_ptr<Promised>> due_;
  Clock::time_point free_;
  bool stop_ = false;
  std::thread thread_;
};

/// gloo behind the wire, or nobody at all.
class Switch final : public c10d::Backend {
 public:
  Switch(c10::intrusive_ptr<c10d::Backend> gloo, double bytes_per_second)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), wire_(bytes_per_second) {}
  bool on = true;

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return pass(tensors.front(), [&] { return gloo_->allreduce(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return pass(tensors.front(), [&] { return gloo_->broadcast(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return pass(output, [&] { return gloo_->_allgather_base(output, input, options); });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to,
                                               std::vector<int64_t>& from,
                                               const c10d::AllToAllOptions& options) override {
    return pass(output, [&] { return gloo_->alltoall_base(output, input, to, from, options); });
  }

 private:
  c10::intrusive_ptr<c10d::Work> pass(const at::Tensor& result,
                                      const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
    auto work = c10::make_intrusive<Promised>(result);
    if (!on) {
      work->complete();
      return work;
    }
    // The others' share comes in.
    const auto bytes = static_cast<int64_t>(result.nbytes()) * (getSize() - 1) / getSize();
    const auto when = wire_.send(bytes);
    const auto real = start();
    real->getFuture()->addCallback([this, when, work, real](c10::ivalue::Future&) { wire_.complete_at(when, work); });
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Wire wire_;
};

struct BlockImpl : nn::Module {
  nn::LayerNorm norm;
  nn::Linear up, down;
  explicit BlockImpl(int64_t d) : norm(nn::LayerNormOptions({d})), up(d, 4 * d), down(4 * d, d) {
    register_module("norm", norm), register_module("up", up), register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
};
TORCH_MODULE(Block);

constexpr int64_t kWidth = 512, kBlocks = 10, kRows = 32;  // 10 * 8 * 512^2 = 21 M parameters

struct Net : nn::Module {
  std::vector<Block> blocks;
  Net() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks.push_back(register_module("h" + std::to_string(i), Block(kWidth)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string folder = argv[1];
  const int64_t pairs = std::stoll(argv[2]);
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);  // shards travel
  return accelerate::record([&] {
    accelerate::Accelerator accelerator({.cpu = true,
                                         .fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{
                                             .sharding_strategy = accelerate::ShardingStrategy::full_shard,
                                             .backward_prefetch = accelerate::BackwardPrefetch::backward_pre,
                                             .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
                                             .transformer_cls_names_to_wrap = {{"Block"}}}});
    torch::manual_seed(accelerator.process_index());
    auto net = std::make_shared<Net>();
    // Values stay: what steps without communication compute is wrong, and must not get slow as well.
    auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.0));
    const auto& group = accelerate::comm::world_group()->process_group();
    const auto wire = c10::make_intrusive<Switch>(group->getBackend(c10::kCPU), std::stod(argv[3]) * 1e6);
    group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, c10::intrusive_ptr<c10d::Backend>(wire));

    const auto x = torch::randn({kRows, kWidth});
    const auto step = [&] {
      accelerator.backward(model(x).pow(2).mean());
      optimizer.step();
      optimizer.zero_grad();
    };
    for (int i = 0; i < 3; ++i) step();  // the order of units is learnt
    std::ofstream times(folder + "/times_" + std::to_string(accelerator.process_index()) + ".txt");
    accelerate::Profile profile =
        accelerator.profile(accelerate::ProfileKwargs{.activities = {{"cpu"}}, .output_trace_dir = folder});
    for (int64_t i = 0; i < 2 * pairs; ++i) {
      wire->on = true;
      accelerator.wait_for_everyone();
      wire->on = i % 2 == 0;
      const auto begin = Clock::now();
      {
        RECORD_USER_SCOPE(i % 2 == 0 ? "with communication" : "without communication");
        step();
      }
      times << std::chrono::duration<double, std::milli>(Clock::now() - begin).count() << "\n";
    }
    wire->on = true;
    profile.stop();
    accelerator.wait_for_everyone();
  });
}
