// `accelerate test` runs this on every process: each part of the library that a training needs, on this machine, under
// the chosen config. One line per check, from the main process; all processes must agree that it passed.
#include <accelerate/accelerate.hpp>

#include <cstdio>
#include <filesystem>
#include <numeric>

#include "utils/gloo_gives_way.hpp"
#include "utils/leave_libtorch.hpp"
#include "utils/program_help.hpp"

namespace {

using accelerate::Accelerator;
using torch::Tensor;

class Checks {
 public:
  explicit Checks(Accelerator& accelerator) : accelerator_(accelerator) {}

  /// `check` returns what is wrong on this rank, or "". An exception ends the test: the other ranks may be in the
  /// middle of a collective.
  void run(const char* name, const std::function<std::string()>& check) {
    const std::string mine = check();
    std::string wrong;
    const auto all = accelerate::gather_object(std::vector<std::string>{mine});
    for (size_t rank = 0; rank < all.size(); ++rank)
      if (!all[rank].empty())
        wrong += (wrong.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) + ": " + all[rank];
    if (accelerator_.is_main_process())
      std::printf("%-6s %s%s\n", wrong.empty() ? "ok" : "FAILED", name, wrong.empty() ? "" : (": " + wrong).c_str()),
          std::fflush(stdout);
    failed_ += !wrong.empty();
  }
  int failed() const { return failed_; }

 private:
  Accelerator& accelerator_;
  int failed_ = 0;
};

std::string expect(bool condition, const std::string& otherwise) { return condition ? "" : otherwise; }

std::string values(const Tensor& tensor) {
  std::string text;
  const Tensor flat = tensor.to(torch::kCPU, torch::kDouble).flatten();
  for (int64_t i = 0; i < std::min<int64_t>(flat.numel(), 16); ++i)
    text += (text.empty() ? "" : " ") + std::to_string(flat[i].item<double>());
  return "[" + text + "]";
}

std::string same_values(const Tensor& found, const Tensor& expected) {
  return expect(found.sizes() == expected.sizes() &&
                    torch::equal(found.to(torch::kCPU, torch::kDouble), expected.to(torch::kCPU, torch::kDouble)),
                "found " + values(found) + ", expected " + values(expected));
}

/// Sample i is the number i.
struct NumberedSamples : torch::data::Dataset<NumberedSamples> {
  explicit NumberedSamples(int64_t count) : count_(count) {}
  torch::data::Example<> get(size_t i) override {
    return {torch::full({1}, static_cast<double>(i)), torch::full({1}, static_cast<int64_t>(i), torch::kLong)};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(count_); }
  int64_t count_;
};

/// Points on a line with known noise.
struct NoisyLine {
  explicit NoisyLine(int64_t points) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    x = torch::randn({points, 4}, generator);
    y = x.matmul(torch::tensor({{1.0F}, {-2.0F}, {0.5F}, {3.0F}})) + 0.1 * torch::randn({points, 1}, generator);
  }
  Tensor x, y;
};

/// How the training is shared out: steps of about 24 points, of which each process has at least one in each micro-step.
struct TestPlan {
  constexpr TestPlan(int64_t processes, int64_t accumulation)
      : per_rank(std::max<int64_t>(1, 24 / processes / accumulation)),
        per_step(per_rank * processes * accumulation),
        points(std::max<int64_t>(96, 2 * per_step)) {}
  int64_t per_rank, per_step, points;
};

constexpr bool always_takes_two_steps() {
  for (int64_t processes = 1; processes <= 4096; ++processes)
    for (const int64_t accumulation : {1, 2})
      if (const TestPlan plan(processes, accumulation); plan.points / plan.per_step < 2 || plan.per_rank < 1)
        return false;
  return true;
}
static_assert(always_takes_two_steps(), "the test must train whatever the number of processes");

torch::nn::Sequential small_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
}

std::vector<double> numbers_seen(Accelerator& accelerator, const accelerate::DataLoaderConfiguration& config,
                                 int64_t count, bool shuffle) {
  auto loader = accelerate::data::prepare_data_loader(
      accelerate::data::DataLoader(NumberedSamples(count), {.batch_size = 4, .shuffle = shuffle}),
      {.config = config, .device = accelerator.device()});
  std::vector<double> seen;
  for (auto& batch : loader) {
    const Tensor all = accelerator.gather_for_metrics(batch.target).to(torch::kCPU, torch::kDouble).flatten();
    for (int64_t i = 0; i < all.numel(); ++i) seen.push_back(all[i].item<double>());
  }
  std::sort(seen.begin(), seen.end());
  return seen;
}

std::string each_once(const std::vector<double>& seen, int64_t count) {
  std::vector<double> expected(static_cast<size_t>(count));
  std::iota(expected.begin(), expected.end(), 0.0);
  return expect(seen == expected, "saw " + std::to_string(seen.size()) + " samples of " + std::to_string(count) +
                                      ", or not each of them once");
}

/// After training on all processes the model must be that of one process that takes the same batches whole.
std::string training_parity(Accelerator& accelerator, int64_t accumulation) {
  const int64_t processes = accelerator.num_processes();
  const auto [per_rank, per_step, points] = TestPlan(processes, accumulation);
  const NoisyLine data(points);
  auto model = small_model();
  auto optimizer = torch::optim::SGD(model->parameters(), 0.05);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  auto alone = small_model();
  alone->to(accelerator.device());
  auto alone_optimizer = torch::optim::SGD(alone->parameters(), 0.05);
  accelerator.set_gradient_accumulation_steps(accumulation);
  int64_t at = 0;
  for (; at + per_step <= points; at += per_step) {
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      auto step = accelerator.accumulate(m);
      const int64_t begin = at + (micro * processes + accelerator.process_index()) * per_rank;
      const Tensor x = data.x.slice(0, begin, begin + per_rank).to(accelerator.device()),
                   y = data.y.slice(0, begin, begin + per_rank).to(accelerator.device());
      accelerator.backward(torch::mse_loss(m(x), y));
      opt.step();
      opt.zero_grad();
    }
    const Tensor x = data.x.slice(0, at, at + per_step).to(accelerator.device()),
                 y = data.y.slice(0, at, at + per_step).to(accelerator.device());
    torch::mse_loss(alone->forward(x), y).backward();
    alone_optimizer.step();
    alone_optimizer.zero_grad();
  }
  accelerator.set_gradient_accumulation_steps(1);
  // Compared by what the models say, since a sharded model's parameters are pieces. Sums are in another order; in 16
  // bits the products are rounded too.
  const double tolerance = accelerator.mixed_precision() == "no" ? 1e-4 : 5e-2;
  const torch::NoGradGuard no_grad;
  const Tensor x = data.x.to(accelerator.device());
  const double worst = (m(x) - alone->forward(x)).abs().max().item<double>();
  return expect(at > 0 && worst <= tolerance, "the model's answers differ by " + std::to_string(worst) +
                                                  " from those of one that was trained by one process, at most " +
                                                  std::to_string(tolerance) + " is rounding");
}

int test(Accelerator& accelerator) {
  const int64_t n = accelerator.num_processes(), rank = accelerator.process_index();
  const auto device = accelerator.device();
  Checks checks(accelerator);
  if (accelerator.is_main_process())
    std::printf("%lld processes, %s, mixed precision %s\n", static_cast<long long>(n), device.str().c_str(),
                accelerator.mixed_precision().c_str());
  const auto on = torch::TensorOptions().device(device);

  checks.run("each process knows its rank", [&] {
    return same_values(accelerator.gather(torch::full({1}, rank, on.dtype(torch::kLong))), torch::arange(n));
  });
  checks.run("gather", [&] {
    return same_values(accelerator.gather(torch::full({2}, static_cast<double>(rank), on)),
                       torch::arange(n).repeat_interleave(2));
  });
  checks.run("broadcast", [&] {
    return same_values(accelerate::broadcast(torch::full({3}, static_cast<double>(rank + 5), on), n - 1),
                       torch::full({3}, static_cast<double>(n + 4)));
  });
  checks.run("reduce: sum", [&] {
    return same_values(accelerator.reduce(torch::full({2}, static_cast<double>(rank + 1), on), "sum"),
                       torch::full({2}, static_cast<double>(n * (n + 1) / 2)));
  });
  checks.run("reduce: mean", [&] {
    // Devices that divide by multiplying with 1/n are a rounding off, from n = 49 on.
    const Tensor mean = accelerator.reduce(torch::full({2}, static_cast<double>(2 * rank), on), "mean");
    return same_values(mean.round(), torch::full({2}, static_cast<double>(n - 1)));
  });
  checks.run("pad_across_processes", [&] {
    const Tensor padded = accelerator.pad_across_processes(torch::ones({rank + 1}, on), 0, -1);
    return expect(padded.size(0) == n && padded.sum().item<double>() == static_cast<double>(2 * (rank + 1) - n),
                  "found " + values(padded));
  });
  checks.run("gather_object", [&] {
    const auto all = accelerate::gather_object(std::vector<std::string>{"rank " + std::to_string(rank)});
    return expect(static_cast<int64_t>(all.size()) == n && all.back() == "rank " + std::to_string(n - 1),
                  "found " + std::to_string(all.size()) + " objects");
  });
  checks.run("broadcast_object_list", [&] {
    std::vector<std::string> objects{accelerator.is_main_process() ? "from the main process" : ""};
    accelerate::broadcast_object_list(objects);
    return expect(objects.front() == "from the main process", "found '" + objects.front() + "'");
  });
  checks.run("split_between_processes", [&] {
    std::vector<int64_t> items(static_cast<size_t>(2 * n + 1));
    std::iota(items.begin(), items.end(), 0);
    const auto all = accelerate::gather_object(accelerator.split_between_processes(items));
    return expect(all == items, "found " + std::to_string(all.size()) + " items of " + std::to_string(items.size()));
  });
  checks.run("triggers", [&] {
    if (accelerator.is_last_process()) accelerator.set_trigger();
    return expect(accelerator.check_trigger() && !accelerator.check_trigger(),
                  "a trigger that one process sets must be seen by all, once");
  });
  checks.run("random generators agree after synchronising", [&] {
    torch::manual_seed(rank);
    accelerate::synchronize_rng_states({accelerate::RNGType::torch});
    const Tensor mine = torch::rand({4});
    return same_values(accelerator.gather(mine.to(device)), mine.repeat({n}));
  });
  checks.run("data loader: shards",
             [&] { return each_once(numbers_seen(accelerator, {}, 8 * n + 3, false), 8 * n + 3); });
  checks.run("data loader: shards, shuffled",
             [&] { return each_once(numbers_seen(accelerator, {}, 8 * n + 3, true), 8 * n + 3); });
  checks.run("data loader: split batches", [&] {
    return each_once(numbers_seen(accelerator, {.split_batches = 4 % n == 0}, 8 * n + 3, false), 8 * n + 3);
  });
  checks.run("data loader: dispatched by the main process", [&] {
    return each_once(numbers_seen(accelerator, {.dispatch_batches = true}, 8 * n + 3, false), 8 * n + 3);
  });
  checks.run("training: as one process", [&] { return training_parity(accelerator, 1); });
  checks.run("training: with gradient accumulation", [&] { return training_parity(accelerator, 2); });
  return checks.failed();
}

}  // namespace

int main(int argc, char** argv) {
  command::show_help_if_asked(argc, argv, "test");
  try {
    Accelerator accelerator;
    const int failed = test(accelerator);
    if (failed > 0 && accelerator.is_main_process()) std::printf("%d checks failed\n", failed);
    accelerator.wait_for_everyone();
    return failed > 0 ? 1 : 0;
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate test: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate test: unexpected error: %s\n", error.what());
    return 70;
  }
}
