#include "parallel/averaging/averaging.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/any.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "memory/held_bytes.hpp"
#include "memory/meta_memory.hpp"
#include "observe/wait_clock.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/backward_watch.hpp"
#include "parallel/captured_gradient.hpp"
#include "parallel/drift.hpp"
#include "parallel/engines.hpp"
#include "parallel/gradient_hook.hpp"
#include "parallel/join.hpp"
#include "parallel/replica_average.hpp"
#include "parallel/verify_parameters.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/raise.hpp"
#include "utils/run_counts.hpp"

namespace accelerate::parallel {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr size_t kBroadcastBytes = 250 * kMiB;

/// The tensors as they are now (LibTorch's set_data() may have given them other bytes), one dtype after the other.
/// Codes, which never change, are agreed on at the start.
std::vector<at::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named)
    if (!residency::encoded_weight(tensor)) tensors.push_back(tensor.detach());
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.scalar_type() < b.scalar_type(); });
  return tensors;
}

/// Everyone gets rank `from`'s values, in few messages. c10d's function for it would not hear of a peer's failure.
void broadcast_in_place(comm::Group& group, const std::vector<at::Tensor>& tensors, int64_t from) {
  at::NoGradGuard no_grad;
  for (size_t begin = 0, end = 0; begin < tensors.size(); begin = end) {
    std::vector<at::Tensor> flat;
    const auto type = tensors[begin].scalar_type();
    for (size_t bytes = 0; end < tensors.size() && tensors[end].scalar_type() == type && bytes < kBroadcastBytes; ++end)
      bytes += tensors[end].nbytes(), flat.push_back(tensors[end].reshape({-1}));
    const at::Tensor all = group.broadcast(flat.size() == 1 ? flat[0] : at::cat(flat), from);
    int64_t at = 0;
    for (size_t i = begin; i < end && group.rank() != from; ++i) {
      const int64_t length = tensors[i].numel();
      at::Tensor(tensors[i]).copy_(all.narrow(0, at, length).view(tensors[i].sizes()));
      at += length;
    }
  }
}

/// c10d's Reducer, which can be asked where it stands.
class BucketReducer final : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;
  /// Gradients that arrive now are averaged.
  bool expects_gradients() const {
    const std::lock_guard lock(mutex_);
    return expect_autograd_hooks_;
  }
  /// Gradients that were announced do not come. Between steps.
  void expect_nothing() {
    const std::lock_guard lock(mutex_);
    expect_autograd_hooks_ = false;
  }
  /// rebuild_buckets() would send.
  bool has_order_to_agree_on() const { return should_rebuild_buckets() && !rebuilt_params_.empty(); }
  /// How many parameters the latest search found to take no part.
  int64_t found_unused() const { return static_cast<int64_t>(unused_parameters_.size()); }
  /// Averaging has begun and waits for gradients that have not come.
  bool unfinished() const {
    const std::lock_guard lock(mutex_);
    return require_finalize_;
  }
  /// The parameters of each bucket, by their numbers.
  std::vector<std::vector<size_t>> layout() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::vector<size_t>> all;
    for (const auto& bucket : buckets_) all.push_back(bucket.variable_indices);
    return all;
  }
  /// Makes such buckets, and no others after the first step. Between steps.
  void set_layout(std::vector<std::vector<size_t>> layout) {
    rebuilt_params_.clear();
    rebuilt_param_indices_.clear();
    initialize_buckets(std::move(layout));
    has_rebuilt_bucket_ = true;
  }
  /// Counts parameters as used in the micro-steps so far; null: none of them. Where unused ones are looked for.
  void count_as_used(const std::vector<char>* used) {
    const std::lock_guard lock(mutex_);
    if (!local_used_map_.defined()) return;
    local_used_map_.fill_(0);
    auto* const counts = local_used_map_.mutable_data_ptr<int32_t>();
    for (size_t i = 0; used && i < used->size(); ++i) counts[i] = (*used)[i] != 0;
  }
  /// The buckets that have been sent to be averaged and have not come back.
  std::vector<c10::intrusive_ptr<at::ivalue::Future>> in_flight() const {
    const std::lock_guard lock(mutex_);
    std::vector<c10::intrusive_ptr<at::ivalue::Future>> all;
    for (const auto& bucket : buckets_)
      if (bucket.future_work) all.push_back(bucket.future_work);
    return all;
  }
  /// A parameter that micro-steps have used and that is not among these has not been used.
  void count_only(const std::vector<char>& among) {
    const std::lock_guard lock(mutex_);
    if (!local_used_map_.defined()) return;
    auto* const counts = local_used_map_.mutable_data_ptr<int32_t>();
    for (size_t i = 0; i < among.size(); ++i) counts[i] &= among[i];
  }
};

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

}  // namespace

struct Averaging::Impl {
  std::shared_ptr<comm::Group> group = comm::mesh().along(comm::kTokens);  ///< whose gradients are averaged
  NamedTensors parameters, buffers;
  std::unordered_set<const at::TensorImpl*> known;  ///< the parameters
  std::vector<char> trains;                         ///< which of them did when the Reducer was made
  DistributedDataParallelKwargs kwargs;
  std::shared_ptr<BucketReducer> reducer;
  HeldBytes bucket_bytes{HeldFor::communication};  ///< but for those that are the gradients
  std::shared_ptr<c10d::Logger> logger;            ///< the Reducer's search for unused parameters writes to it, unasked
  bool graph_is_static = false;                    ///< the Reducer has been told
  bool delayed = false;  ///< static_graph: the first backward has been told to average at its end
  /// The same, which it has not come to.
  std::shared_ptr<bool> learns = std::make_shared<bool>(false);
  bool buffers_differ = false;                      ///< a forward that nobody announced may have changed them
  WeakTensor loss{at::Tensor().getIntrusivePtr()};  ///< of the backward that runs
  bool grad_sync = true;                            ///< the next backward averages
  /// The last forward was followed by an averaging backward, so buffers may differ from rank 0's.
  bool forward_sync = true;
  bool joining = false;  ///< inside join()
  bool apart = false;    ///< nothing is averaged in backward
  std::shared_ptr<GradientHook> hook;
  /// There were micro-steps without averaging since the last averaging backward; the same on all ranks.
  bool suspended = false;
  bool came = false;  ///< a gradient that is averaged in its backward, since the last step
  BackwardWatch averaging;
  bool of_frozen = false;  ///< some of these may be of layers that are frozen: the next averaging backward takes them
  DriftCheck drift;
  int64_t forwards_of_backward = 0;       ///< that announced the next averaging backward
  bool expected_after_suspended = false;  ///< the same of when the backward that is expected was announced

  struct Trained {
    std::string name;
    at::Tensor tensor;
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    uintptr_t hook;             ///< ours, among those that run after a gradient was added
    bool has_gradient = false;  ///< since the Reducer was last told to expect gradients
  };
  std::vector<Trained> trained_parameters;  ///< in the Reducer's order
  std::unordered_map<const at::TensorImpl*, CapturedGradient> captured;

  void drop_reducer() {
    if (reducer) reducer->remove_autograd_hooks();
    for (const auto& parameter : trained_parameters) parameter.accumulator->del_post_hook(parameter.hook);
    trained_parameters.clear();
    logger.reset(), reducer.reset(), hook.reset();
    bucket_bytes.add(-bucket_bytes.bytes());
    graph_is_static = delayed = *learns = false;
    suspended |= std::exchange(expected_after_suspended, false);
  }

  /// The program may have changed its parameters since the Reducer was made. @throws ConfigError where their gradients
  /// would not reach it any more.
  void check_in_place(const char* operation) const {
    for (const auto& parameter : trained_parameters)
      if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) != parameter.accumulator)
        raise<ConfigError>(
            "{}: the bytes of parameter '{}' were replaced after prepare(), probably by torch::load, module->to(...) "
            "or set_data(); its gradients would not be averaged with the other ranks' any more. Load, move and "
            "convert the module before prepare(); after it accelerator.load_state() and load_checkpoint_in_model() "
            "read weights",
            operation, parameter.name);
  }

  /// Layers may have been frozen or thawed. Between steps, on all ranks alike.
  void follow_flags(const char* operation) {
    check_in_place(operation);
    bool same = true;
    for (size_t i = 0; i < parameters.size(); ++i)
      same &= parameters[i].second.requires_grad() == static_cast<bool>(trains[i]);
    if (same) return;
    if (joining)
      raise<ConfigError>(
          "{}: requires_grad of a parameter was changed within join_uneven_inputs, expected it outside: ranks without "
          "data do not hear of it",
          operation);
    if (reducer) check_finished(operation);
    drop_reducer();
    // Gradients that came without averaging stay with parameters that are frozen from here on, and the Reducer knows
    // nothing of them.
    of_frozen |= suspended && !apart;
    make_reducer();
    count_gradients_as_used();  // by micro-steps that this one has not seen
  }

  void average_those_of_frozen() {
    if (std::exchange(of_frozen, false))
      average_what_is_left([](const at::Tensor& parameter) { return !parameter.requires_grad(); });
  }

  /// Where LibTorch's Reducer looks for unused parameters: of a static graph it remembers them.
  void count_gradients_as_used() {
    if (!suspended || !reducer || !searches_unused()) return;
    const auto used = with_gradients();
    reducer->count_as_used(&used);
  }

  void make_reducer() {
    std::vector<at::Tensor> trained;
    std::unordered_map<size_t, std::string> names;
    trains.clear();
    for (const auto& [name, tensor] : parameters) {
      trains.push_back(static_cast<char>(tensor.requires_grad()));
      if (!tensor.requires_grad()) continue;
      if (kwargs.static_graph && tensor.is_complex())
        raise<ConfigError>(
            "DistributedDataParallelKwargs: found static_graph with the complex parameter '{}', expected real ones: "
            "the first averages of complex gradients come out wrong there. Leave static_graph out",
            name);
      names[trained.size()] = name;
      trained.push_back(tensor);
      captured.try_emplace(tensor.unsafeGetTensorImpl(), tensor,
                           [this, name = name](const at::Tensor& gradient) { return on_captured(name, gradient); });
    }
    if (trained.empty()) return;  // a frozen model has nothing to average
    // Before the Reducer's own hooks: it learns in time of a backward that no forward has announced.
    for (size_t i = 0; i < trained.size(); ++i) {
      auto accumulator = torch::autograd::impl::grad_accumulator(trained[i]);
      const auto hook = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, i](const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) {
            on_gradient(i);
            return outputs;
          }));
      trained_parameters.push_back(
          {.name = names.at(i), .tensor = trained[i], .accumulator = std::move(accumulator), .hook = hook});
    }
    // Regrouping sends tensors from the device to the host, which those of a dry run can't do; its first grouping is
    // the one that a real run regroups to.
    if (trained.front().is_meta()) kwargs.find_unused_parameters = true;
    const meta_memory::Purpose buckets_of(MemoryUse::gradients);
    const int64_t cap = kwargs.bucket_cap_mb * kMiB;
    int64_t gradient_bytes = 0;
    for (const auto& tensor : trained) gradient_bytes += static_cast<int64_t>(tensor.nbytes());
    counts::most(AveragingCount::gradients_most, gradient_bytes);
    if (!kwargs.gradient_as_bucket_view) bucket_bytes.add(gradient_bytes);
    const std::vector<bool> sparse(trained.size(), false);
    // A static graph or unknown order: the Reducer regroups after the first backward, so the first grouping need not be
    // good.
    const std::vector<size_t> limits =
        kwargs.static_graph || !kwargs.find_unused_parameters
            ? std::vector<size_t>{static_cast<size_t>(std::numeric_limits<int64_t>::max())}
            : std::vector<size_t>{static_cast<size_t>(kMiB), static_cast<size_t>(cap)};
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(trained, limits, sparse));
    std::reverse(buckets.begin(), buckets.end());  // gradients become ready from the last layer to the first
    reducer = std::make_shared<BucketReducer>(
        trained, buckets, group->process_group(), sparse, cap, kwargs.find_unused_parameters,
        kwargs.gradient_as_bucket_view, names, kMiB,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<int64_t>{});
    if (kwargs.find_unused_parameters) {
      logger = std::make_shared<c10d::Logger>(reducer);
      reducer->set_logger(logger);
    }
    hook = make_gradient_hook(kwargs, group);
    reducer->register_comm_hook(reducer_hook(hook, kwargs));
  }

  void on_gradient(size_t index) {
    if (!grad_sync) {
      suspended = true;  // also after a step within no_sync, which averaged what had come before
      return;
    }
    if (at::GradMode::is_enabled())
      throw ConfigError(
          "backward: found create_graph = true, with which gradients can't be averaged over ranks as they come, "
          "expected torch::autograd::grad(..., create_graph = true) for the term that needs derivatives of gradients, "
          "and an ordinary backward of the whole loss; FSDP takes both");
    if (trained_parameters[index].tensor.grad().layout() != at::kStrided)
      raise<ConfigError>(
          "backward: found a sparse gradient of '{}', expected dense ones, which alone are averaged over ranks; make "
          "the embedding with sparse(false)",
          trained_parameters[index].name);
    if (averaging.begin()) {
      average_those_of_frozen();
      // Gradients of micro-steps, or of replicas apart, may have been cleared since.
      if (searches_unused()) reducer->count_only(with_gradients());
    }
    came = true;
    // The same parameter again: an earlier backward, whose forward was the module's own, has left others out.
    if (trained_parameters[index].has_gradient && !kwargs.static_graph) check_finished("backward");
    const int64_t forwards = std::exchange(forwards_of_backward, 0);
    if (!reducer->expects_gradients()) {
      expect_unannounced();
    } else if (const at::Tensor root(loss.lock()); forwards > 1 && searches_unused() && root.defined()) {
      expect_gradients({root});  // what the last of several forwards left out, the others may have used
    }
    expected_after_suspended = false;
    // The first backward of a static graph only learns which gradients come when; it averages all of them at its end,
    // which somebody inside of it must ask for.
    if (kwargs.static_graph && !std::exchange(delayed, true)) {
      *learns = true;
      torch::autograd::Engine::get_default_engine().queue_callback([told = reducer, learns = learns] {
        *learns = false;
        told->delay_all_reduce();
      });
    }
    trained_parameters[index].has_gradient = true;
  }

  at::Tensor on_captured(const std::string& name, const at::Tensor& gradient) {
    if (apart) return gradient;
    if (joining)
      raise<ConfigError>(
          "autograd::grad: found it with respect to parameter '{}' within join_uneven_inputs, expected backward: ranks "
          "without data do not hear of it",
          name);
    return average_of_captured(*group, name, gradient);
  }

  /// The model was called by its own forward, or this is a second backward of one forward: what before_forward() and
  /// after_forward() do for averaging is done here, inside of the backward and before its first gradient is counted.
  void expect_unannounced() {
    if (joining)
      throw ConfigError(
          "backward: within join_uneven_inputs the model was called by its own forward (m->forward(x), "
          "net->forward(x)), expected m(x) with the prepared handle m: only that tells the ranks without data that a "
          "step is coming");
    std::vector<at::Tensor> roots;
    if (searches_unused()) {
      const at::Tensor root(loss.lock());
      if (!root.defined())
        throw ConfigError(
            "backward: find_unused_parameters is on and the model was called by its own forward, expected m(x) with "
            "the prepared handle m, or accelerator.backward(loss): which parameters are unused is looked for from "
            "there");
      roots.push_back(root);
    }
    begin_step();
    rebuild_buckets();
    expect_gradients(roots);
    forward_sync = buffers_differ = true;
  }

  /// Ranks agree on the order once, after the first backward.
  void rebuild_buckets() {
    if (reducer && reducer->has_order_to_agree_on())
      group->guard_collective("order of buckets", [&] { reducer->rebuild_buckets(); });
  }

  bool searches_unused() const { return kwargs.find_unused_parameters && !kwargs.static_graph; }

  /// Before a forward whose gradients are to be averaged.
  void begin_step() {
    // Not before: the Reducer would count the gradients of earlier backwards without averaging into the graph that it
    // learns in the first one with it.
    if (kwargs.static_graph && !std::exchange(graph_is_static, true)) {
      reducer->set_static_graph();
      counts::add(AveragingCount::static_graphs);
    }
    reducer->prepare_for_forward();
  }

  void expect_gradients(const std::vector<at::Tensor>& roots) {
    check_finished("forward");
    for (auto& parameter : trained_parameters) parameter.has_gradient = false;
    expected_after_suspended |= std::exchange(suspended, false);
    reducer->prepare_for_backward(roots);
    if (searches_unused()) {
      counts::add(AveragingCount::unused_searches);
      counts::add(AveragingCount::unused_parameters, reducer->found_unused());
    }
  }

  /// @throws ConfigError for a gradient of a parameter that the Reducer does not know.
  void check_all_averaged() const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, tensor] = parameters[i];
      if (trains[i] || !tensor.requires_grad() || !tensor.grad().defined() || apart) continue;
      raise<ConfigError>(
          "step: parameter '{}' was frozen at the last forward of the prepared handle, and has a gradient now, which "
          "no backward since then has averaged over ranks; after requires_grad_(true) call m(x) with the prepared "
          "handle, or accelerator.backward(loss), or clear its gradient before",
          name);
    }
  }

  /// Which of the trained parameters have a gradient.
  std::vector<char> with_gradients() const {
    std::vector<char> result;
    for (const auto& parameter : trained_parameters)
      result.push_back(static_cast<char>(parameter.tensor.grad().defined()));
    return result;
  }

  /// Averages gradients without a backward, also those of layers that were frozen since they came; a parameter that has
  /// one on any rank has one on all of them then.
  void average_what_is_left(bool (*which)(const at::Tensor&) = [](const at::Tensor&) { return true; }) {
    std::vector<int32_t> here;
    for (const auto& [name, tensor] : parameters) here.push_back(which(tensor) && tensor.grad().defined() ? 1 : 0);
    at::Tensor anywhere = at::tensor(here, at::kInt);
    if (!group->dry()) {
      anywhere = anywhere.to(group->device());
      group->all_reduce_(anywhere, Reduction::max);
      anywhere = anywhere.cpu();
    }
    if (joining && anywhere.any().item<bool>())
      throw ConfigError(
          "step: within join_uneven_inputs the last micro-step of an accumulation group did not use a model that "
          "earlier ones gave gradients to, expected that it uses all of them: ranks without data don't average the "
          "rest");
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < here.size(); ++i) {
      if (anywhere[static_cast<int64_t>(i)].item<int32_t>() == 0) continue;
      const at::Tensor& parameter = parameters[i].second;
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) gradient = at::zeros_like(parameter);
      // Divided before the sum, which half precision might not hold.
      at::Tensor average = gradient.div(group->world_size()).contiguous();
      group->all_reduce_(average, Reduction::sum);
      gradient.copy_(average);
    }
  }

  /// The gradients that a rank which stood still has left are older than the others'.
  void take_gradients(int64_t source) {
    at::NoGradGuard no_grad;
    std::vector<int32_t> here;
    for (const auto& [name, tensor] : parameters) here.push_back(tensor.grad().defined() ? 1 : 0);
    const at::Tensor there = group->broadcast(at::tensor(here, at::kInt).to(group->device()), source).cpu();
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < here.size(); ++i) {
      const at::Tensor& parameter = parameters[i].second;
      at::Tensor& gradient = parameter.mutable_grad();
      if (there[static_cast<int64_t>(i)].item<int32_t>() == 0) {
        gradient.reset();
        continue;
      }
      if (!gradient.defined()) gradient = at::zeros_like(parameter);
      gradients.push_back(gradient);
    }
    broadcast_in_place(*group, gradients, source);
  }

  /// After a backward that threw: the averages that it has begun end, and averaging begins anew. Collective, of ranks
  /// to which that has happened alike; the others hear of it.
  void recover() {
    if (!averaging.threw() || !reducer || !(reducer->unfinished() || *learns)) return;
    group->all_gather(at::zeros({1}, at::TensorOptions().device(group->device())), "the end of a backward that threw");
    for (const auto& sent : reducer->in_flight()) group->wait("backward", *sent);
    drop_reducer();
    make_reducer();
    count_gradients_as_used();
  }

  /// @throws ConfigError naming parameters that the last averaging backward waits for.
  void check_finished(const char* operation) const {
    if (!reducer->unfinished()) return;
    constexpr size_t kMost = 10;
    std::vector<std::string> without;
    for (const auto& parameter : trained_parameters)
      if (!parameter.has_gradient) without.push_back(fmt::format("'{}'", parameter.name));
    const size_t count = without.size();
    if (count == 0) return;  // it ended by an error, which somebody has got
    if (count > kMost) without.resize(kMost);
    raise<ConfigError>(
        "{}: the last backward gave no gradient to {}{}, expected one for every parameter, because averaging over "
        "ranks waits for all of them. {}",
        operation, fmt::join(without, ", "), count > kMost ? fmt::format(", … ({} parameters)", count) : "",
        searches_unused()
            ? "Unused parameters are looked for from what the forward returns, so all of that must go into the loss: "
              "return less, or call detach() on the rest."
            : "Remove what takes no part, freeze it (requires_grad_(false)), or add "
              "DistributedDataParallelKwargs{.find_unused_parameters = true} to kwargs_handlers.");
  }

  void sync_buffers(int64_t from) {
    const WaitClock waiting(RunCount::comm_wait_ns, on_host());
    auto tensors = tensors_of(buffers);
    // No news to graphs of earlier forwards: batch norms hand their statistics to backward, which does not use them,
    // and a forward that changes other buffers tells the graphs itself.
    for (at::Tensor& buffer : tensors) buffer = buffer.variable_data();
    broadcast_in_place(*group, tensors, from);
    counts::add(AveragingCount::buffer_broadcasts);
    for (const auto& buffer : tensors) counts::add(AveragingCount::buffer_bytes, static_cast<int64_t>(buffer.nbytes()));
  }

  /// Sums {ranks that still train, ranks of those that will average} over all ranks; a joined rank adds nothing.
  /// @throws ConfigError on all ranks where some of those that train average and some don't.
  std::pair<int64_t, int64_t> count_active(bool active) const {
    at::Tensor counts = at::full({2}, active ? 1 : 0, at::TensorOptions().dtype(at::kLong).device(group->device()));
    if (!grad_sync || !at::GradMode::is_enabled()) counts[1].fill_(0);
    group->all_reduce_(counts, Reduction::sum);
    counts = counts.cpu();
    const auto training = counts[0].item<int64_t>(), averaging = counts[1].item<int64_t>();
    if (0 < averaging && averaging < training)
      raise<ConfigError>(
          "join_uneven_inputs: {} of the {} ranks that still train average gradients in this micro-step, expected all "
          "or none of them; the data of some ranks probably ended in the middle of an accumulation group, which the "
          "loader's last batch ends early. Set GradientAccumulationPlugin{{.sync_with_dataloader = false}}, or give "
          "ranks numbers of batches that end their last groups in the same micro-step",
          averaging, training);
    return {training, averaging};
  }

  /// Whether collectives block the host, and not the device's streams.
  bool on_host() const { return group->device().is_cpu(); }

  /// The part of a rank without data while others take a step, which `averaging` of them will average.
  void shadow(int64_t averaging) {
    const WaitClock waiting(RunCount::comm_wait_ns, on_host());
    // Gradients that a forward before has announced do not come, and would be in the way of new buckets.
    if (reducer && reducer->expects_gradients()) reducer->expect_nothing();
    rebuild_buckets();
    if (kwargs.broadcast_buffers && forward_sync && !buffers.empty()) sync_buffers(last_candidate(*group, false));
    forward_sync = averaging > 0;
    if (averaging == 0 || !reducer) return;
    if (kwargs.static_graph && !delayed)
      throw ConfigError(
          "join_uneven_inputs: this rank's data ended before its first averaging backward, from which a static_graph "
          "is learned, expected one step at least on each rank; leave static_graph out, or give every rank a batch");
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (auto& bucket : reducer->get_grad_buckets(/*return_zero_tensors=*/true))
      futures.push_back(reducer->run_comm_hook(bucket));
    for (auto& future : futures) future->wait();
    if (kwargs.find_unused_parameters) {
      // Zeros of its own: in the Reducer's map the last step's result still stands.
      std::vector<at::Tensor> unused{at::zeros_like(reducer->get_local_used_map_on_device())};
      group->process_group()->allreduce(unused)->wait();
    }
    reducer->push_rebuilt_params_for_all_indices();
  }
};

Averaging::Averaging(NamedTensors parameters, const NamedTensors& buffers, const DistributedDataParallelKwargs& kwargs,
                     const std::vector<Held>& given)
    : impl_(std::make_unique<Impl>()) {
  if (kwargs.bucket_cap_mb < 1)
    raise<ConfigError>("DistributedDataParallelKwargs: bucket_cap_mb is {}, expected at least 1", kwargs.bucket_cap_mb);
  verify_parameters(parameters);
  impl_->parameters = std::move(parameters);
  for (const auto& [name, tensor] : impl_->parameters) impl_->known.insert(tensor.unsafeGetTensorImpl());
  impl_->buffers = buffers;
  impl_->kwargs = kwargs;
  // A hook may leave ranks with other parameters.
  impl_->drift = DriftCheck(impl_->group, kwargs.communication_hook ? 0 : kwargs.compare_parameters_every);
  impl_->group->guard("prepare", [&] {
    for (const Held& held : given) {
      if (held.stand_in) held.stand_in->agree();
    }
    broadcast_in_place(*impl_->group, tensors_of(impl_->parameters), 0);
    broadcast_in_place(*impl_->group, tensors_of(impl_->buffers), 0);
    impl_->make_reducer();
  });
}

Averaging::~Averaging() { impl_->drop_reducer(); }

bool Averaging::averages(const at::Tensor& parameter) const {
  return impl_->known.contains(parameter.unsafeGetTensorImpl());
}

void Averaging::before_forward() {
  Impl& ddp = *impl_;
  impl_->group->guard("forward", [&] {
    const bool training = at::GradMode::is_enabled();
    ddp.recover();
    if (training) ddp.follow_flags("forward");
    if (training && ddp.reducer) ddp.check_finished("forward");
    if (training && ddp.grad_sync && ddp.reducer) ddp.begin_step();
    if (ddp.joining && training) ddp.count_active(true);
    if (training) ddp.rebuild_buckets();
    // As in PyTorch, the first evaluating forward after training takes rank 0's buffers too, so that all ranks evaluate
    // one model.
    if (!ddp.forward_sync || ddp.buffers.empty() || (!training && ddp.joining)) return;
    if (ddp.kwargs.broadcast_buffers) ddp.sync_buffers(ddp.joining ? last_candidate(*impl_->group, true) : 0);
    else counts::add(AveragingCount::buffers_left_alone);
  });
}

void Averaging::after_forward(const std::vector<at::Tensor>& outputs) {
  Impl& ddp = *impl_;
  ddp.forward_sync = at::GradMode::is_enabled() && ddp.grad_sync;
  if (!ddp.reducer) return;
  // The backward of this one leaves averaging to a later one, also where an earlier forward had announced its own.
  if (at::GradMode::is_enabled() && !ddp.grad_sync && !ddp.reducer->unfinished()) {
    ddp.suspended |= std::exchange(ddp.expected_after_suspended, false);
    // A static graph is learned from the first announced backward on, and would have this one's gradients in it, too.
    if (ddp.graph_is_static && !ddp.delayed) {
      ddp.drop_reducer();
      ddp.make_reducer();
    } else {
      ddp.reducer->expect_nothing();
    }
  }
  if (!ddp.forward_sync) return;
  ++ddp.forwards_of_backward;
  ddp.expect_gradients(ddp.searches_unused() ? outputs : std::vector<at::Tensor>{});
}

void Averaging::before_backward(const at::Tensor& loss) {
  Impl& ddp = *impl_;
  ddp.loss = WeakTensor(loss.getIntrusivePtr());
  // The forward may have been the module's own.
  if (ddp.reducer && ddp.reducer->expects_gradients()) ddp.check_in_place("backward");
  else ddp.follow_flags("backward");
}

void Averaging::after_backward() {
  Impl& ddp = *impl_;
  if (ddp.grad_sync && ddp.reducer && !ddp.joining) ddp.drift.after_average([&] { return ddp.parameters; });
  // Not within the backward, which may need those of its forward.
  if (!std::exchange(ddp.buffers_differ, false) || !ddp.kwargs.broadcast_buffers || ddp.buffers.empty()) return;
  impl_->group->guard("backward", [&] { ddp.sync_buffers(0); });
}

bool Averaging::require_backward_grad_sync() const { return impl_->grad_sync; }
void Averaging::set_require_backward_grad_sync(bool value) {
  impl_->grad_sync = value && !impl_->apart;
  if (!impl_->grad_sync) impl_->suspended = true;
}

void Averaging::resume_accumulation() {
  impl_->suspended = impl_->of_frozen = true;
  impl_->count_gradients_as_used();
}

void Averaging::settle_gradients() {
  // For a step whose forward and backward did not come by here.
  impl_->check_in_place("step");
  impl_->check_all_averaged();
  if (impl_->apart) return;
  impl_->group->guard("step", [&] { impl_->recover(); });
  // Others may wait in their backward for what this rank left out.
  if (impl_->reducer && impl_->reducer->unfinished())
    impl_->group->guard("step", [&] { impl_->check_finished("step"); });
  // A forward has announced a backward that did not come: gradients are of micro-steps, or the program's own.
  const bool without = !std::exchange(impl_->came, false) && !impl_->joining;
  const bool left = (std::exchange(impl_->expected_after_suspended, false) || without) && impl_->reducer &&
                    impl_->reducer->expects_gradients();
  if (!std::exchange(impl_->suspended, false) && !left) return;
  impl_->group->guard("step", [&] {
    impl_->average_what_is_left();
    if (impl_->reducer && impl_->searches_unused()) impl_->reducer->count_as_used(nullptr);
  });
  impl_->of_frozen = false;
}

void Averaging::prepare_backward_sync() {
  if (impl_->apart) return;
  impl_->grad_sync = true;
  impl_->forward_sync = true;
  // Unused parameters are looked for when the loss is known.
  if (impl_->reducer && !impl_->searches_unused()) impl_->expect_gradients({});
}

void Averaging::set_apart(bool apart) {
  if (apart && impl_->joining)
    throw ConfigError(
        "LocalSGD: found it within join_uneven_inputs, expected it outside: a rank without data takes no part in "
        "averages of parameters; let the loader give all ranks the same number of batches (even_batches)");
  impl_->apart = apart;
  impl_->grad_sync = impl_->forward_sync = !apart;
  impl_->suspended = impl_->expected_after_suspended = impl_->of_frozen = false;
}

std::optional<int64_t> Averaging::apart() const {
  return impl_->apart ? std::optional(impl_->group->rank()) : std::nullopt;
}

comm::Group* Averaging::replicas() const { return impl_->group.get(); }

bool Averaging::shares_buffers() const { return impl_->kwargs.broadcast_buffers && impl_->forward_sync; }
void Averaging::set_shares_buffers(bool value) { impl_->forward_sync = value; }

c10::IValue Averaging::own_state() const {
  if (!impl_->hook || impl_->hook->state().isNone()) return {};
  c10::List<c10::List<int64_t>> layout;
  for (const auto& bucket : impl_->reducer->layout()) {
    c10::List<int64_t> indices;
    for (const size_t index : bucket) indices.push_back(static_cast<int64_t>(index));
    layout.push_back(indices);
  }
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  state.insert("buckets", layout);
  state.insert("hook", impl_->hook->state());
  return state;
}

std::function<void()> Averaging::stage_own_state(const c10::IValue& state) {
  if (!impl_->hook || impl_->hook->state().isNone()) return Layer::stage_own_state(state);
  std::vector<std::vector<size_t>> layout;
  std::vector<size_t> all;
  c10::IValue hook;
  try {
    const auto dict = state.toGenericDict();
    for (const auto& bucket : dict.at("buckets").toListRef()) {
      layout.emplace_back();
      for (const auto& index : bucket.toListRef()) layout.back().push_back(static_cast<size_t>(index.toInt()));
      all.insert(all.end(), layout.back().begin(), layout.back().end());
    }
    hook = dict.at("hook");
  } catch (const std::exception& error) {
    raise<CheckpointError>("load_state: the state of gradients' buckets can't be read ({})", error.what());
  }
  std::sort(all.begin(), all.end());
  bool fits = all.size() == impl_->trained_parameters.size();
  for (size_t i = 0; fits && i < all.size(); ++i) fits = all[i] == i;
  if (!fits)
    raise<CheckpointError>(
        "load_state: the checkpoint's buckets of gradients are of {} parameters, expected the {} that are trained "
        "here; the model has changed",
        all.size(), impl_->trained_parameters.size());
  return [this, layout, take = impl_->hook->stage(hook)] {
    if (impl_->reducer->layout() != layout) impl_->reducer->set_layout(layout);
    take();
  };
}

void Averaging::begin_join() {
  if (impl_->apart)
    throw ConfigError(
        "join_uneven_inputs: found it within LocalSGD, expected it outside: a rank without data takes no part in "
        "averages of parameters; let the loader give all ranks the same number of batches (even_batches)");
  impl_->group->guard("join_uneven_inputs", [&] {
    impl_->recover();  // a rank without data has no forward in which it would
    impl_->follow_flags("join_uneven_inputs");
    impl_->average_those_of_frozen();  // a rank without data has no backward
  });
  impl_->joining = true;
}
void Averaging::end_join() noexcept { impl_->joining = false; }

std::optional<bool> Averaging::shadow_step() {
  const auto [training, averaging] = impl_->count_active(false);
  if (training == 0) return std::nullopt;
  impl_->shadow(averaging);
  return averaging > 0;
}

void Averaging::finish_join(int64_t source) {
  broadcast_in_place(*impl_->group, tensors_of(impl_->parameters), source);
  broadcast_in_place(*impl_->group, tensors_of(impl_->buffers), source);
  // Gradients that any rank has left over are averaged with the next step of all.
  impl_->suspended = last_candidate(*impl_->group, impl_->suspended) >= 0;
  if (!impl_->suspended) impl_->take_gradients(source);
}

namespace {

class ChosenAveraging final : public ChosenLayer {
 public:
  explicit ChosenAveraging(const DistributedDataParallelKwargs& kwargs) : kwargs_(kwargs) {}
  bool joins_data() const override { return true; }
  std::unique_ptr<Layer> make(const ModelRef& model, const at::Device&, bool evaluation_mode,
                              const std::vector<Held>& given) const override {
    if (comm::mesh().size(comm::kTokens) == 1 || evaluation_mode) return nullptr;
    return std::make_unique<Averaging>(model.parameters(), model.buffers(), kwargs_, given);
  }

 private:
  DistributedDataParallelKwargs kwargs_;
};

}  // namespace

std::unique_ptr<ChosenLayer> choose_averaging(const EngineRequest& request) {
  check_hook_settings(request.ddp);
  return std::make_unique<ChosenAveraging>(request.ddp);
}

}  // namespace accelerate::parallel
