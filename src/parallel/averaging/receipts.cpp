/// Receipts of DistributedDataParallelKwargs.
//
// settings: DistributedDataParallelKwargs
// without: DistributedDataParallelKwargs.dim: anything but its default is refused
// without: DistributedDataParallelKwargs.check_reduction: anything but its default is refused

#include "parallel/averaging/receipts.hpp"

#include <algorithm>

#include "parallel/averaging/counts.hpp"

namespace accelerate {

static std::string text_of(const PowerSGDOptions& value) {
  return fmt::format("rank {} from step {} on", value.matrix_approximation_rank, value.start_powerSGD_iter);
}
static std::string text_of(DDPCommunicationHookType value) {
  constexpr const char* kNames[] = {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"};
  return kNames[static_cast<size_t>(value)];
}

namespace receipts {
namespace {

using parallel::AveragingCount;
using Ddp = DistributedDataParallelKwargs;

constexpr const char* kAveraging = "where several processes average gradients";

/// @param sharded  why it has no meaning where models are sharded
std::optional<Deed> no_averaging(const AveragingFacts& f, const char* sharded) {
  if (f.run.ranks == 1) return nothing("one process has nobody to average with");
  if (f.sharded) return nothing("models are sharded (FSDP), {}", sharded);
  if (f.run.models == 0) return not_due("no model was prepared");
  return std::nullopt;
}

Deed broadcast_buffers(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose buffers are not sent before forwards")) return *none;
  if (const int64_t sent = read(AveragingCount::buffer_broadcasts); sent > 0)
    return acted("rank 0's buffers were sent {}, {}", counted(sent, "time", "times"),
                 bytes(read(AveragingCount::buffer_bytes)));
  if (const int64_t left = read(AveragingCount::buffers_left_alone); left > 0)
    return acted("each rank kept its own buffers in {}", counted(left, "forward", "forwards"));
  if (read(AveragingCount::gradient_buckets) == 0) return not_due("nothing was trained");
  return nothing("the models have no buffers");
}

Deed compare_parameters_every(const AveragingFacts& f) {
  if (f.run.ranks == 1) return nothing("one process has nobody to compare with");
  if (f.run.models == 0) return not_due("no model was prepared");
  if (f.given.compare_parameters_every == 0) return off("off");
  if (f.given.communication_hook) return nothing("a communication_hook may leave the ranks with different parameters");
  if (read(AveragingCount::parameter_comparisons) == 0) return not_due("nothing was trained");
  return acted("{} compared {}, and equal", f.sharded ? "what ranks wrote to parameters was" : "parameters were",
               counted(read(AveragingCount::parameter_comparisons), "time", "times"));
}

Deed bucket_cap_mb(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose gradients travel by units")) return *none;
  if (read(AveragingCount::gradient_buckets) == 0) return not_due("nothing was trained");
  constexpr int64_t kMiB = 1 << 20;
  // A difference from the default shows where gradients take more than the smaller of both.
  const int64_t cap = std::min(f.given.bucket_cap_mb, Ddp{}.bucket_cap_mb) * kMiB,
                all = read(AveragingCount::gradients_most);
  if (f.given.bucket_cap_mb != Ddp{}.bucket_cap_mb && all <= cap + kMiB)
    return nothing("all gradients of a model take {}, for which the buckets are the same as by default", bytes(all));
  return acted("{} averaged, the largest of {}",
               counted(read(AveragingCount::gradient_buckets), "bucket was", "buckets were"),
               bytes(read(AveragingCount::bucket_bytes_most)));
}

Deed find_unused_parameters(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "where unused parameters are found anyway")) return *none;
  if (!f.given.find_unused_parameters) return off("off");
  if (f.given.static_graph) return nothing("static_graph is on, which finds them in the first step");
  if (read(AveragingCount::unused_searches) == 0) return not_due("nothing was trained");
  if (read(AveragingCount::unused_parameters) == 0)
    return not_due("looked {}, and all parameters were used; each look walks through the graph",
                   counted(read(AveragingCount::unused_searches), "time", "times"));
  return acted("looked {}, {} of parameters without a gradient",
               counted(read(AveragingCount::unused_searches), "time", "times"),
               counted(read(AveragingCount::unused_parameters), "find", "finds"));
}

Deed gradient_as_bucket_view(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose gradients are pieces")) return *none;
  if (!f.given.gradient_as_bucket_view) return off("off");
  if (read(AveragingCount::gradient_buckets) == 0) return not_due("nothing was trained");
  if (read(AveragingCount::gradients_in_buckets) == 0) return nothing("no gradient lay in its bucket");
  return acted("{} were averaged where they lay, and {} of copies were not needed",
               counted(read(AveragingCount::gradients_in_buckets), "gradient", "gradients"),
               bytes(read(AveragingCount::gradients_most)));
}

Deed static_graph(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "where nothing is taken from the first graph")) return *none;
  if (!f.given.static_graph) return off("off");
  if (read(AveragingCount::static_graphs) == 0) return not_due("nothing was trained");
  return acted("{} learnt in the first step",
               counted(read(AveragingCount::static_graphs), "model's graph was", "models' graphs were"));
}

Deed comm_hook(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.given.comm_hook == DDPCommunicationHookType::no)
    return off("off: {} as they are", bytes(read(AveragingCount::gradient_bytes)));
  if (read(AveragingCount::gradient_buckets) == 0) return not_due("nothing was trained");
  const bool powers = f.given.comm_hook == DDPCommunicationHookType::power_sgd ||
                      f.given.comm_hook == DDPCommunicationHookType::batched_power_sgd;
  if (powers && read(AveragingCount::buckets_compressed) == 0)
    return not_due("no bucket was compressed; the first {} are averaged whole, and what is too small always is",
                   counted(f.given.comm_state_option.start_powerSGD_iter, "step", "steps"));
  if (read(AveragingCount::bytes_saved) == 0) return nothing("gradients are {} already", text_of(f.given.comm_hook));
  return acted("{} of gradients travelled as {}", bytes(read(AveragingCount::gradient_bytes)),
               bytes(read(AveragingCount::gradient_bytes) - read(AveragingCount::bytes_saved)));
}

Deed comm_wrapper(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.given.comm_wrapper == DDPCommunicationHookType::no) return off("off");
  if (read(AveragingCount::gradient_buckets) == 0) return not_due("nothing was trained");
  if (read(AveragingCount::buckets_wrapped) == 0)
    return nothing("gradients are {} already", text_of(f.given.comm_wrapper));
  return acted("{} converted to {} before the hook",
               counted(read(AveragingCount::buckets_wrapped), "bucket was", "buckets were"),
               text_of(f.given.comm_wrapper));
}

Deed comm_state_option(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.given.comm_hook != DDPCommunicationHookType::power_sgd &&
      f.given.comm_hook != DDPCommunicationHookType::batched_power_sgd)
    return off("comm_hook is {}", text_of(f.given.comm_hook));
  if (read(AveragingCount::buckets_compressed) == 0) return not_due("no bucket was compressed");
  return acted("{} compressed", counted(read(AveragingCount::buckets_compressed), "bucket was", "buckets were"));
}

Deed communication_hook(const AveragingFacts& f) {
  if (const auto none = no_averaging(f, "whose gradients are cut over ranks")) return *none;
  if (!f.given.communication_hook) return off("unset");
  if (read(AveragingCount::user_hook_calls) == 0) return not_due("nothing was trained");
  return acted("it was called {}", counted(read(AveragingCount::user_hook_calls), "time", "times"));
}

constexpr ReceiptRow<AveragingFacts> kAveragingRows[] = {
    {"DistributedDataParallelKwargs.broadcast_buffers", nullptr, "in models with buffers",
     asked<&AveragingFacts::given, &Ddp::broadcast_buffers>, broadcast_buffers},
    {"DistributedDataParallelKwargs.bucket_cap_mb", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::bucket_cap_mb>, bucket_cap_mb},
    {"DistributedDataParallelKwargs.find_unused_parameters", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::find_unused_parameters>, find_unused_parameters},
    {"DistributedDataParallelKwargs.gradient_as_bucket_view", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::gradient_as_bucket_view>, gradient_as_bucket_view},
    {"DistributedDataParallelKwargs.static_graph", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::static_graph>, static_graph},
    {"DistributedDataParallelKwargs.comm_hook", nullptr, kAveraging, asked<&AveragingFacts::given, &Ddp::comm_hook>,
     comm_hook},
    {"DistributedDataParallelKwargs.comm_wrapper", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::comm_wrapper>, comm_wrapper},
    {"DistributedDataParallelKwargs.comm_state_option", nullptr, "with comm_hook power_sgd",
     asked<&AveragingFacts::given, &Ddp::comm_state_option>, comm_state_option},
    {"DistributedDataParallelKwargs.communication_hook", nullptr, kAveraging,
     [](const AveragingFacts& f) { return asked_for(f.given.communication_hook); }, communication_hook},
    {"DistributedDataParallelKwargs.compare_parameters_every", nullptr, kAveraging,
     asked<&AveragingFacts::given, &Ddp::compare_parameters_every>, compare_parameters_every},
};

}  // namespace

std::vector<Receipt> of_averaging(const AveragingFacts& facts) { return made(kAveragingRows, facts); }

}  // namespace receipts
}  // namespace accelerate
