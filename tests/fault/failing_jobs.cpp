#include "failing_jobs.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/inference.hpp>

#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace failing {
namespace {

using namespace accelerate;
namespace fs = std::filesystem;
namespace nn = torch::nn;

constexpr int64_t kFaultyStep = 3;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// The steps of a job that goes on to its end; one that is killed at any time must last for some.
const int64_t kSteps = variable("FAULT_WAY") == "killed at random" ? 150 : 30;

void announce() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::printf("\n[fault at %lld]\n",
              static_cast<long long>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
  std::fflush(stdout);
}

/// Where in a step something happens.
enum class Place {
  before,  ///< its first collective
  middle,  ///< between two
  within,  ///< one: called back by it
  after    ///< its last
};

/// The fault of a job, and the rank that has it.
class Fault {
 public:
  const std::string way = variable("FAULT_WAY");

  bool is(const char* name) const { return way == name; }
  bool here() const { return std::to_string(PartialState().process_index()) == variable("FAULT_RANK"); }
  void begin_step(int64_t step) { due_ = step == kFaultyStep; }
  /// Once in each rank, at its place in the faulty step.
  bool due(Place place) { return due_ && place == this->place() && std::exchange(due_, false); }

  /// Where this rank alone does something else than the others.
  void at(Place place) {
    if (is("different shapes") || is("different parameters") || is("disk full") || is("models swapped")) return;
    if (!due(place) || !here()) return;
    announce();
    if (is("killed")) ::raise(SIGKILL);
    else if (is("stopped")) ::raise(SIGSTOP);
    else if (is("exits 0")) std::exit(0);
    else if (way.starts_with("throws")) throw std::runtime_error("the tokenizer has no vocabulary");
    else if (is("out of memory")) torch::empty({int64_t{1} << 50});
    else if (is("other order")) gather(torch::ones({2}));
  }

 private:
  Place place() const {
    if (is("throws within") || is("out of memory")) return Place::within;
    if (is("killed") || is("stopped") || is("exits 0")) return Place::middle;
    return is("throws after") ? Place::after : Place::before;
  }
  bool due_ = false;
};

Fault& fault() {
  static Fault only;
  return only;
}

/// A disk that is full: files of this process end after so many bytes.
void fill_disk() {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{256, RLIM_INFINITY};
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

/// Several ranks do this together in the faulty step, and one does it differently.
void before_step(Accelerator& accelerator) {
  fault().at(Place::before);
  if (fault().is("different shapes") && fault().due(Place::before)) {
    announce();
    gather(torch::ones({1 + accelerator.process_index()}));
  } else if (fault().is("disk full") && fault().due(Place::before)) {
    announce();
    if (fault().here()) fill_disk();
    accelerator.save_state(fs::path(variable("FAULT_FOLDER")) / "checkpoint");
  }
}

/// Passes on what it gets; the faults within a forward and a backward are its own.
struct MiddleImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    if (!x.requires_grad()) {
      fault().at(Place::middle), fault().at(Place::within);
      if (!fault().is("different shapes") || !fault().due(Place::before) || !fault().here()) return x;
      announce();
      return x.slice(0, 0, 1);
    }
    x.register_hook([](const torch::Tensor& gradient) {
      fault().at(Place::within);
      return gradient;
    });
    return x;
  }
};
TORCH_MODULE(Middle);

nn::Sequential make_net(int64_t hidden = 32) {
  torch::manual_seed(0);
  nn::Sequential net(nn::Linear(8, hidden), nn::BatchNorm1d(hidden), Middle(), nn::ReLU(), nn::Linear(hidden, 16),
                     nn::ReLU(), nn::Linear(16, 2));
  if (fault().is("different parameters") && fault().here()) {
    announce();
    net->push_back(nn::Linear(2, 2));
  }
  return net;
}

AcceleratorOptions options(const std::optional<FullyShardedDataParallelPlugin>& plugin = std::nullopt) {
  const auto timeout = std::chrono::seconds(std::atoi(variable("FAULT_TIMEOUT").c_str()));
  return {.fsdp_plugin = plugin, .kwargs_handlers = {InitProcessGroupKwargs{.timeout = timeout}}};
}

FullyShardedDataParallelPlugin sharded() {
  return {.auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
          .state_dict_type = StateDictType::sharded_state_dict,
          .min_num_params = 30};
}

/// Two models, whose collectives come in another order on a rank that calls them in another order.
void train(const std::optional<FullyShardedDataParallelPlugin>& plugin) {
  Accelerator accelerator(options(plugin));
  auto net = make_net(), small = make_net(4);
  auto [model, other, optimizer] = accelerator.prepare(net, small, torch::optim::SGD(net->parameters(), 0.01));
  for (int64_t step = 0; step < kSteps; ++step) {
    fault().begin_step(step);
    before_step(accelerator);
    const auto x = torch::randn({4, 8});
    torch::Tensor loss;
    if (fault().is("models swapped") && fault().due(Place::before) && fault().here()) {
      announce();
      loss = other(x).pow(2).mean();
      loss = loss + model(x).pow(2).mean();
    } else {
      loss = model(x).pow(2).mean();
      loss = loss + other(x).pow(2).mean();
    }
    fault().at(Place::middle);
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    fault().at(Place::after);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void infer() {
  Accelerator accelerator(options());
  auto net = make_net();
  net->eval();
  const torch::NoGradGuard no_grad;
  const auto model = prepare_pippy(net, {.gather_output = true}, torch::ones({6, 8}));
  for (int64_t step = 0; step < kSteps; ++step) {
    fault().begin_step(step);
    if (!fault().is("different shapes")) before_step(accelerator);
    model(torch::ones({6, 8}));
    fault().at(Place::after);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct Samples {
  int64_t size() const { return 6 * kSteps; }
  torch::Tensor get(size_t) const {
    fault().at(Place::within);
    if (!fault().is("different shapes") || !fault().due(Place::before)) return torch::ones({2});
    announce();
    return torch::ones({3});
  }
};

void dispatch() {
  auto with = options();
  with.dataloader_config.dispatch_batches = true;
  Accelerator accelerator(with);
  auto loader = accelerator.prepare(data::DataLoader(Samples{}, {.batch_size = 2}));
  int64_t step = 0;
  for (const auto& batch : loader) {
    fault().begin_step(step++);
    if (!fault().is("different shapes")) before_step(accelerator);
    accelerator.reduce(batch.sum());
    fault().at(Place::middle);
    accelerator.gather_for_metrics(batch);
    fault().at(Place::after);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// A user's object in the checkpoint, of which rank 0 writes the state.
struct Counter {
  int64_t count = 0;
  c10::IValue state_dict() const {
    fault().at(Place::within);
    return count;
  }
  void load_state_dict(const c10::IValue& state) { count = state.toInt(); }
};

void save() {
  const auto folder = fs::path(variable("FAULT_FOLDER")) / "checkpoint";
  Accelerator accelerator(options(sharded()));
  auto net = make_net(fault().is("different shapes") ? 64 : 32);
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters()));
  Counter counter;
  accelerator.register_for_checkpointing(counter);
  const auto hook = accelerator.register_save_state_pre_hook([](const fs::path&) { fault().at(Place::middle); });
  for (int64_t step = 0; step < kSteps / 5; ++step) {
    fault().begin_step(step);
    if (fault().is("different shapes") && fault().due(Place::before)) {
      announce();
      accelerator.free_memory();
      accelerator.register_for_checkpointing(counter);
      auto smaller = make_net(32);
      auto again = accelerator.prepare(smaller, torch::optim::AdamW(smaller->parameters()));
      accelerator.load_state(folder);
    }
    before_step(accelerator);
    ++counter.count;
    accelerator.save_state(folder);
    fault().at(Place::after);
  }
}

/// @throws where wild_clock.cpp is not at work
void see_clock_jump() {
  const auto begin = std::chrono::system_clock::now();
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (std::chrono::abs(std::chrono::system_clock::now() - begin) > std::chrono::minutes(30)) return;
  }
  throw std::logic_error("the clock does not jump");
}

void work() {
  if (fault().is("clock jumps")) see_clock_jump();
  const auto job = variable("FAULT_JOB");
  if (job == "ddp") train(std::nullopt);
  else if (job == "fsdp") train(sharded());
  else if (job == "pipeline") infer();
  else if (job == "dispatcher") dispatch();
  else if (job == "checkpoint") save();
  else throw std::runtime_error("FAULT_JOB is " + job);
}

}  // namespace

int run() {
  std::ofstream(fs::path(variable("FAULT_FOLDER")) / "pids", std::ios::app) << ::getpid() << '\n';
  const bool here = variable("RANK") == variable("FAULT_RANK");
  if (fault().is("killed at random") && here)
    std::thread([after = std::chrono::microseconds(std::stoll(variable("FAULT_AFTER_US")))] {
      std::this_thread::sleep_for(after);
      announce();
      ::raise(SIGKILL);
    }).detach();
  const int status = record(work);
  if (fault().is("throws and stays") && here) ::raise(SIGSTOP);  // its connections stay open; the others have been told
  return status;
}

}  // namespace failing
