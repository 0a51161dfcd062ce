/// PowerSGD. Source: arXiv:1905.13727; order of operations and random numbers are those of PyTorch 2.13's
/// powerSGD_hook and batched_powerSGD_hook, so that both can be compared.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Dict.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <sstream>

#include "comm/group.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/gradient_hook.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// Makes the columns of each matrix [B, n, r] orthonormal, in place.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const auto type = matrices.scalar_type();
  const int64_t columns = matrices.size(2);
  // QR is quicker from three columns on, but unknown for half precision.
  if (columns > 2 && type != at::kHalf && type != at::kBFloat16) {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
    return;
  }
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = at::linalg_vector_norm(column, 2, {1}, /*keepdim=*/true);
    // A column of zeros, of a gradient that is zero or has a lower rank, has no direction and stays as it is.
    column.div_(epsilon == 0 ? norm.masked_fill(norm == 0, 1) : norm + epsilon);
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum({1}, /*keepdim=*/true) * column);
  }
}

/// Columns that hold nothing to go on from: an overflow would stay in them for ever, and zeros would never become
/// anything else. They get directions that no gradient has on purpose, the same on all ranks, as the columns are.
/// PyTorch keeps them.
void revive(const at::Tensor& matrices) {
  const auto options = matrices.options().dtype(at::kFloat);
  const at::Tensor others =
      at::outer(at::arange(1, matrices.size(1) + 1, options), at::arange(1, matrices.size(2) + 1, options))
          .cos()
          .to(matrices.scalar_type());
  const at::Tensor norm = at::linalg_vector_norm(matrices, 2, {1}, /*keepdim=*/true);
  matrices.copy_(at::where(norm.isfinite() & (norm > 0), matrices, others));
}

/// numpy's RandomState.randint(1_000_000_000).
uint64_t draw(std::mt19937& random) {
  constexpr uint32_t kMask = (1U << 30) - 1, kMost = 999'999'999;
  for (;;)
    if (const auto value = static_cast<uint32_t>(random()) & kMask; value <= kMost) return value;
}

class PowerSGD final : public GradientHook {
 public:
  PowerSGD(std::shared_ptr<comm::Group> group, const PowerSGDOptions& options, bool batched)
      : options_(options),
        batched_(batched),
        group_(std::move(group)),
        plain_(wire_hook(group_, at::ScalarType::Undefined)),
        random_(options.random_seed) {}

  /// A bucket takes two sums over ranks, and what is sent in the second depends on the first. They go out bucket after
  /// bucket from this thread, the second of one before the first of the next: in one order on all ranks, while backward
  /// goes on between them.
  GradientHookFuture run(GradientBucket& bucket) override {
    at::NoGradGuard no_grad;
    if (bucket.index == 0) running_.clear();  // of a backward that did not end well
    if (iteration_ < options_.start_powerSGD_iter) {
      if (bucket.last) ++iteration_;
      return plain_->run(bucket);
    }
    while (running_.size() > 1) finish_first();
    if (!running_.empty()) send_right(running_.back());
    running_.push_back(begin(bucket));
    const auto result = running_.back().result;
    if (bucket.last) {
      send_right(running_.back());
      while (!running_.empty()) finish_first();
      ++iteration_;
    }
    return result;
  }

  c10::IValue state() const override {
    using Dict = c10::impl::GenericDict;
    Dict errors(c10::IntType::get(), c10::TensorType::get()), rights(c10::IntType::get(), c10::TensorType::get());
    for (const auto& [index, error] : errors_) errors.insert(index, error.cpu().clone());
    for (const auto& [index, right] : rights_) rights.insert(index, right.cpu().clone());
    std::ostringstream random;
    random << random_;
    Dict state(c10::StringType::get(), c10::AnyType::get());
    state.insert("iteration", iteration_);
    state.insert("next_report", next_report_);
    state.insert("numel_before", numel_before_);
    state.insert("numel_after", numel_after_);
    state.insert("random", random.str());
    state.insert("errors", errors);
    state.insert("rights", rights);
    return state;
  }

  std::function<void()> stage(const c10::IValue& state) override {
    try {
      const auto dict = state.toGenericDict();
      const auto tensors = [&](const char* name) {
        std::map<int64_t, at::Tensor> all;
        for (const auto& item : dict.at(name).toGenericDict()) all.emplace(item.key().toInt(), item.value().toTensor());
        return all;
      };
      std::mt19937 random;
      std::istringstream(dict.at("random").toStringRef()) >> random;
      return [this, random, errors = tensors("errors"), rights = tensors("rights"),
              numbers = std::array{dict.at("iteration").toInt(), dict.at("next_report").toInt(),
                                   dict.at("numel_before").toInt(), dict.at("numel_after").toInt()}] {
        const auto& device = group_->device();
        errors_.clear(), rights_.clear(), running_.clear();
        for (const auto& [index, error] : errors) errors_[index] = error.to(device, false, /*copy=*/true);
        for (const auto& [index, right] : rights) rights_[index] = right.to(device, false, /*copy=*/true);
        random_ = random;
        std::tie(iteration_, next_report_, numel_before_, numel_after_) = std::tuple_cat(numbers);
      };
    } catch (const std::exception& error) {
      raise<CheckpointError>("load_state: the state of PowerSGD can't be read ({}), expected one that save_state wrote",
                             error.what());
    }
  }

 private:
  /// Matrices of one shape, and where they come from.
  struct Batch {
    at::Tensor matrices;                ///< [B, n, m]
    std::vector<at::Tensor> originals;  ///< to copy back to; empty: `matrices` is a view of them
    at::Tensor left, right;             ///< [B, n, r] and [B, m, r]; their product comes near the matrices
  };
  /// A bucket on its way.
  struct Running {
    int64_t index;
    at::Tensor buffer, square;      ///< square: the buffer with zeros behind it, batched only
    at::Tensor before;              ///< with the errors of the last step, before compression
    std::vector<at::Tensor> whole;  ///< sent as they are
    std::vector<Batch> batches;
    at::Tensor first;  ///< `whole` and the left matrices, one after the other
    GradientHookFuture sent, result;
    bool right_sent = false;
  };

  int64_t rank_of(int64_t n, int64_t m) const { return std::min({n, m, options_.matrix_approximation_rank}); }

  Running begin(const GradientBucket& bucket) {
    Running b;
    b.index = static_cast<int64_t>(bucket.index);
    b.buffer = bucket.buffer;
    const std::vector<c10::Device> devices =
        b.buffer.is_cuda() ? std::vector<c10::Device>{b.buffer.device()} : std::vector<c10::Device>{};
    b.result = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    if (batched_) {
      const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(b.buffer.numel()))));
      b.square = at::zeros({side * side}, b.buffer.options());
      b.square.narrow(0, 0, b.buffer.numel()).copy_(b.buffer);
    }
    at::Tensor compressed = batched_ ? b.square : b.buffer;
    if (options_.use_error_feedback) {
      if (const auto error = errors_.find(b.index); error != errors_.end()) compressed.add_(error->second);
      b.before = compressed.clone();
    }
    divide(b, bucket);
    report(bucket);

    int64_t whole = 0, left = 0, right = 0;
    for (const auto& tensor : b.whole) whole += tensor.numel();
    for (const auto& batch : b.batches) {
      const int64_t r = rank_of(batch.matrices.size(1), batch.matrices.size(2)) * batch.matrices.size(0);
      left += batch.matrices.size(1) * r, right += batch.matrices.size(2) * r;
    }
    counts::add(AveragingCount::bytes_saved,
                (b.buffer.numel() - whole - left - right) * static_cast<int64_t>(b.buffer.element_size()));
    if (left > 0) counts::add(AveragingCount::buckets_compressed);
    b.first = at::empty({whole + left}, b.buffer.options());
    int64_t at = 0;
    for (const auto& tensor : b.whole) {
      b.first.narrow(0, at, tensor.numel()).copy_(tensor.reshape({-1}));
      at += tensor.numel();
    }
    at::Tensor& rights = rights_[b.index];
    const bool fresh = !options_.warm_start || !rights.defined();
    if (fresh) rights = at::empty({right}, b.buffer.options());
    int64_t right_at = 0;
    const auto slice = [](const at::Tensor& memory, int64_t& from, std::vector<int64_t> sizes) {
      const int64_t length = sizes[0] * sizes[1] * sizes[2];
      from += length;
      return memory.narrow(0, from - length, length).view(sizes);
    };
    at::Generator random;
    if (fresh) random = at::make_generator<at::CPUGeneratorImpl>(draw(random_));
    for (auto& batch : b.batches) {
      const int64_t count = batch.matrices.size(0), n = batch.matrices.size(1), m = batch.matrices.size(2);
      batch.left = slice(b.first, at, {count, n, rank_of(n, m)});
      batch.right = slice(rights, right_at, {count, m, rank_of(n, m)});
      if (fresh) batch.right.copy_(at::randn(batch.right.sizes(), random, at::dtype(rights.scalar_type())));
      if (!fresh) revive(batch.right);
      orthogonalize(batch.right, epsilon());
      at::bmm_out(batch.left, batch.matrices, batch.right);
    }
    b.sent = group_->all_reduce_async(b.first);
    return b;
  }

  double epsilon() const { return batched_ ? 0 : options_.orthogonalization_epsilon; }

  /// Divides gradients into those that are compressed and those that are not worth it.
  void divide(Running& b, const GradientBucket& bucket) {
    if (batched_) {
      const auto side = static_cast<int64_t>(std::lround(std::sqrt(static_cast<double>(b.square.numel()))));
      numel_before_ += b.buffer.numel();
      numel_after_ += side * rank_of(side, side) * 2;
      b.batches.push_back({.matrices = b.square.view({1, side, side}), .originals = {}, .left = {}, .right = {}});
      return;
    }
    std::vector<std::vector<at::Tensor>> by_shape;  // in the order in which shapes first come
    for (const auto& gradient : bucket.gradients) {
      numel_before_ += gradient.numel();
      if (gradient.dim() > 0 && gradient.numel() > 0) {
        const at::Tensor matrix = gradient.view({gradient.size(0), -1});
        const int64_t n = matrix.size(0), m = matrix.size(1), narrow = (n + m) * rank_of(n, m);
        if (static_cast<double>(narrow) * options_.min_compression_rate < static_cast<double>(n * m)) {
          numel_after_ += narrow;
          const auto same = std::find_if(by_shape.begin(), by_shape.end(),
                                         [&](const auto& others) { return others[0].sizes() == matrix.sizes(); });
          if (same == by_shape.end()) by_shape.push_back({matrix});
          else same->push_back(matrix);
          continue;
        }
      }
      numel_after_ += gradient.numel();
      b.whole.push_back(gradient);
    }
    for (const auto& matrices : by_shape) {
      if (options_.batch_tensors_with_same_shape && matrices.size() > 1) {
        b.batches.push_back({.matrices = at::stack(matrices), .originals = matrices, .left = {}, .right = {}});
        continue;
      }
      for (const auto& matrix : matrices)
        b.batches.push_back({.matrices = matrix.unsqueeze(0), .originals = {}, .left = {}, .right = {}});
    }
  }

  /// The first sum is there; starts the second one.
  void send_right(Running& b) {
    if (std::exchange(b.right_sent, true)) return;
    group_->wait("backward", *b.sent);
    b.sent.reset();
    int64_t at = 0;
    for (auto& tensor : b.whole) {
      tensor.copy_(b.first.narrow(0, at, tensor.numel()).div_(group_->world_size()).view(tensor.sizes()));
      at += tensor.numel();
    }
    if (b.batches.empty()) return;
    // The lefts need no division: they are made orthonormal.
    for (auto& batch : b.batches) orthogonalize(batch.left, epsilon());
    for (auto& batch : b.batches) at::bmm_out(batch.right, batch.matrices.transpose(1, 2), batch.left);
    b.sent = group_->all_reduce_async(rights_[b.index]);
  }

  void finish_first() {
    Running b = std::move(running_.front());
    running_.pop_front();
    if (b.sent) {
      group_->wait("backward", *b.sent);
      rights_[b.index].div_(group_->world_size());
    }
    for (auto& batch : b.batches) {
      at::bmm_out(batch.matrices, batch.left, batch.right.transpose(1, 2));
      for (size_t i = 0; i < batch.originals.size(); ++i)
        batch.originals[i].copy_(batch.matrices[static_cast<int64_t>(i)]);
    }
    if (options_.use_error_feedback) {
      // One overflow, which a scaler skips, is not the loss of all later steps. No branch: the host need not wait.
      const at::Tensor error = b.before - (batched_ ? b.square : b.buffer);
      errors_[b.index] = at::where(error.isfinite().all(), error, at::zeros({}, error.options()));
    }
    if (batched_) b.buffer.copy_(b.square.narrow(0, 0, b.buffer.numel()));
    if (!options_.warm_start) rights_.erase(b.index);
    b.result->markCompleted(c10::IValue(std::vector<at::Tensor>{b.buffer}));
  }

  void report(const GradientBucket& bucket) {
    if (!options_.compression_stats_logging_frequency || !bucket.last || iteration_ < next_report_) return;
    next_report_ = iteration_ + *options_.compression_stats_logging_frequency;
    if (group_->rank() != 0) return;
    // Somebody asked for it: whatever the level is.
    const double fewer = static_cast<double>(numel_before_) / static_cast<double>(std::max<int64_t>(numel_after_, 1));
    logs::emit(LogLevel::info, "accelerate.parallel",
               fmt::format("PowerSGD: after {} steps {} elements of gradients became {}, {:.2f} times fewer",
                           iteration_, numel_before_, numel_after_, fewer));
  }

  PowerSGDOptions options_;
  bool batched_;
  std::shared_ptr<comm::Group> group_;
  std::shared_ptr<GradientHook> plain_;  ///< before start_powerSGD_iter
  std::mt19937 random_;
  std::map<int64_t, at::Tensor> errors_, rights_;  ///< by bucket
  std::deque<Running> running_;
  int64_t iteration_ = 0, next_report_ = 0, numel_before_ = 0, numel_after_ = 0;
};

}  // namespace

std::shared_ptr<GradientHook> power_sgd_hook(std::shared_ptr<comm::Group> group, const PowerSGDOptions& options,
                                             bool batched) {
  return std::make_shared<PowerSGD>(std::move(group), options, batched);
}

}  // namespace accelerate::parallel
