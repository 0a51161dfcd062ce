/// Receipts of data parallelism, precision, schedules and what the launcher decides.

#include <sched.h>
#include <unistd.h>

#include <ATen/Parallel.h>

#include <cmath>

#include "accelerator/receipts.hpp"
#include "utils/environment.hpp"

namespace accelerate::receipts {
namespace {

using Options = AcceleratorOptions;
using Ddp = DistributedDataParallelKwargs;
using Scaling = GradScalerKwargs;
using Dynamo = TorchDynamoPlugin;

// ---- DistributedDataParallelKwargs

constexpr const char* kAveraging = "where several processes average gradients";

/// @param sharded  why it has no meaning where models are sharded
std::optional<Deed> no_averaging(const Facts& f, const char* sharded) {
  if (f.ranks == 1) return nothing("one process has nobody to average with");
  if (f.sharding) return nothing("models are sharded (FSDP), {}", sharded);
  if (f.models == 0) return not_due("no model was prepared");
  return std::nullopt;
}

Deed broadcast_buffers(const Facts& f) {
  if (const auto none = no_averaging(f, "whose buffers are not sent before forwards")) return *none;
  if (const int64_t sent = f[Count::buffer_broadcasts]; sent > 0)
    return acted("rank 0's buffers were sent {}, {}", counted(sent, "time", "times"), bytes(f[Count::buffer_bytes]));
  if (const int64_t left = f[Count::buffers_left_alone]; left > 0)
    return acted("each rank kept its own buffers in {}", counted(left, "forward", "forwards"));
  if (f[Count::gradient_buckets] == 0) return not_due("nothing was trained");
  return nothing("the models have no buffers");
}

Deed compare_parameters_every(const Facts& f) {
  if (f.ranks == 1) return nothing("one process has nobody to compare with");
  if (f.models == 0) return not_due("no model was prepared");
  if (f.ddp.compare_parameters_every == 0) return off("off");
  if (f.ddp.communication_hook) return nothing("a communication_hook may leave the ranks with different parameters");
  if (f[Count::parameter_comparisons] == 0) return not_due("nothing was trained");
  return acted("{} compared {}, and equal", f.sharding ? "what ranks wrote to parameters was" : "parameters were",
               counted(f[Count::parameter_comparisons], "time", "times"));
}

Deed bucket_cap_mb(const Facts& f) {
  if (const auto none = no_averaging(f, "whose gradients travel by units")) return *none;
  if (f[Count::gradient_buckets] == 0) return not_due("nothing was trained");
  constexpr int64_t kMiB = 1 << 20;
  // What differs from the default shows where gradients take more than the smaller of both.
  const int64_t cap = std::min(f.ddp.bucket_cap_mb, Ddp{}.bucket_cap_mb) * kMiB, all = f[Count::gradients_most];
  if (f.ddp.bucket_cap_mb != Ddp{}.bucket_cap_mb && all <= cap + kMiB)
    return nothing("all gradients of a model take {}, for which the buckets are the same as by default", bytes(all));
  return acted("{} averaged, the largest of {}", counted(f[Count::gradient_buckets], "bucket was", "buckets were"),
               bytes(f[Count::bucket_bytes_most]));
}

Deed find_unused_parameters(const Facts& f) {
  if (const auto none = no_averaging(f, "where unused parameters are found anyway")) return *none;
  if (!f.ddp.find_unused_parameters) return off("off");
  if (f.ddp.static_graph) return nothing("static_graph is on, which finds them in the first step");
  if (f[Count::unused_searches] == 0) return not_due("nothing was trained");
  if (f[Count::unused_parameters] == 0)
    return not_due("looked {}, and all parameters were used; each look walks through the graph",
                   counted(f[Count::unused_searches], "time", "times"));
  return acted("looked {}, {} of parameters without a gradient", counted(f[Count::unused_searches], "time", "times"),
               counted(f[Count::unused_parameters], "find", "finds"));
}

Deed gradient_as_bucket_view(const Facts& f) {
  if (const auto none = no_averaging(f, "whose gradients are pieces")) return *none;
  if (!f.ddp.gradient_as_bucket_view) return off("off");
  if (f[Count::gradient_buckets] == 0) return not_due("nothing was trained");
  if (f[Count::gradients_in_buckets] == 0) return nothing("no gradient lay in its bucket");
  return acted("{} were averaged where they lay, and {} of copies were not needed",
               counted(f[Count::gradients_in_buckets], "gradient", "gradients"), bytes(f[Count::gradients_most]));
}

Deed static_graph(const Facts& f) {
  if (const auto none = no_averaging(f, "where nothing is taken from the first graph")) return *none;
  if (!f.ddp.static_graph) return off("off");
  if (f[Count::static_graphs] == 0) return not_due("nothing was trained");
  return acted("{} learnt in the first step",
               counted(f[Count::static_graphs], "model's graph was", "models' graphs were"));
}

Deed comm_hook(const Facts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.ddp.comm_hook == DDPCommunicationHookType::no)
    return off("off: {} as they are", bytes(f[Count::gradient_bytes]));
  if (f[Count::gradient_buckets] == 0) return not_due("nothing was trained");
  const bool powers = f.ddp.comm_hook == DDPCommunicationHookType::power_sgd ||
                      f.ddp.comm_hook == DDPCommunicationHookType::batched_power_sgd;
  if (powers && f[Count::buckets_compressed] == 0)
    return not_due("no bucket was compressed; the first {} are averaged whole, and what is too small always is",
                   counted(f.ddp.comm_state_option.start_powerSGD_iter, "step", "steps"));
  if (f[Count::bytes_saved] == 0) return nothing("gradients are {} already", text_of(f.ddp.comm_hook));
  return acted("{} of gradients travelled as {}", bytes(f[Count::gradient_bytes]),
               bytes(f[Count::gradient_bytes] - f[Count::bytes_saved]));
}

Deed comm_wrapper(const Facts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.ddp.comm_wrapper == DDPCommunicationHookType::no) return off("off");
  if (f[Count::gradient_buckets] == 0) return not_due("nothing was trained");
  if (f[Count::buckets_wrapped] == 0) return nothing("gradients are {} already", text_of(f.ddp.comm_wrapper));
  return acted("{} converted to {} before the hook", counted(f[Count::buckets_wrapped], "bucket was", "buckets were"),
               text_of(f.ddp.comm_wrapper));
}

Deed comm_state_option(const Facts& f) {
  if (const auto none = no_averaging(f, "whose reduce_dtype says how gradients travel")) return *none;
  if (f.ddp.comm_hook != DDPCommunicationHookType::power_sgd &&
      f.ddp.comm_hook != DDPCommunicationHookType::batched_power_sgd)
    return off("comm_hook is {}", text_of(f.ddp.comm_hook));
  if (f[Count::buckets_compressed] == 0) return not_due("no bucket was compressed");
  return acted("{} compressed", counted(f[Count::buckets_compressed], "bucket was", "buckets were"));
}

Deed communication_hook(const Facts& f) {
  if (const auto none = no_averaging(f, "whose gradients are cut over ranks")) return *none;
  if (!f.ddp.communication_hook) return off("unset");
  if (f[Count::user_hook_calls] == 0) return not_due("nothing was trained");
  return acted("it was called {}", counted(f[Count::user_hook_calls], "time", "times"));
}

// ---- precision

constexpr const char* kAutocast = "with mixed_precision fp16, bf16 or fp8";
constexpr const char* kScaled = "with mixed_precision fp16";

Deed mixed_precision(const Facts& f) {
  if (f.precision == PrecisionType::NO) return off("no: everything in the model's own type");
  if (f.precision == PrecisionType::FP8 && f.fp8_counts.fp8_products > 0)
    return acted("{} computed in fp8, all else in bf16",
                 counted(f.fp8_counts.fp8_products, "product was", "products were"));
  if (f.sharding && f[Count::forwards_sharded] > 0)
    return acted("{} of sharded models, {} of {} parameter elements converted for them",
                 counted(f[Count::forwards_sharded], "forward", "forwards"), f[Count::elements_converted],
                 f[Count::elements_sharded]);
  if (f[Count::autocast_regions] > 0)
    return acted("{} ran under autocast", counted(f[Count::autocast_regions], "region", "regions"));
  if (!f.autocast.enabled) return nothing("AutocastKwargs.enabled is false");
  return not_due("no prepared model was called");
}

Deed autocast_enabled(const Facts& f) {
  if (f.precision == PrecisionType::NO) return nothing("mixed_precision is no");
  if (!f.autocast.enabled) return acted("forwards ran without autocast, in the model's own type");
  if (f[Count::autocast_regions] == 0) return not_due("no prepared model was called");
  return acted("{} ran under autocast", counted(f[Count::autocast_regions], "region", "regions"));
}

Deed autocast_cache_enabled(const Facts& f) {
  if (!f.autocast.cache_enabled) return off("unset");
  if (f.precision == PrecisionType::NO || !f.autocast.enabled) return nothing("there is no autocast");
  if (f.sharding && *f.autocast.cache_enabled)
    return nothing("models are sharded, of whose parameters no copies are kept");
  if (f[Count::autocast_regions] == 0) return not_due("no prepared model was called");
  return acted("{}: casts of weights are {}", counted(f[Count::autocast_regions], "region", "regions"),
               *f.autocast.cache_enabled ? "kept for the region" : "made anew each time");
}

std::optional<Deed> no_scaling(const Facts& f) {
  if (f.precision != PrecisionType::FP16)
    return nothing("mixed_precision is {}, where losses are not scaled", to_string(f.precision));
  if (!f.scaling.enabled) return nothing("GradScalerKwargs.enabled is false");
  if (f[Count::backwards] == 0 || !f.loss_scale) return not_due("nothing was trained");
  return std::nullopt;
}

/// How often the scale grew: it is init_scale * growth_factor^growths * backoff_factor^skipped.
int64_t growths(const Facts& f) {
  const double left = std::log(*f.loss_scale / f.scaling.init_scale) -
                      static_cast<double>(f[Count::steps_skipped]) * std::log(f.scaling.backoff_factor);
  return std::lround(left / std::log(f.scaling.growth_factor));
}

Deed init_scale(const Facts& f) {
  if (const auto none = no_scaling(f)) return *none;
  return acted("{} scaled, first by {}, at last by {}", counted(f[Count::backwards], "loss was", "losses were"),
               f.scaling.init_scale, *f.loss_scale);
}
Deed growth(const Facts& f) {
  if (const auto none = no_scaling(f)) return *none;
  if (const int64_t n = growths(f); n > 0)
    return acted("the scale grew {}, to {}", counted(n, "time", "times"), *f.loss_scale);
  return not_due("no {} steps in a row without an overflow yet", f.scaling.growth_interval);
}
Deed backoff(const Facts& f) {
  if (const auto none = no_scaling(f)) return *none;
  if (f[Count::steps_skipped] == 0) return not_due("no gradient overflowed");
  return acted("{} skipped, each with a smaller scale after it; it is {}",
               counted(f[Count::steps_skipped], "step was", "steps were"), *f.loss_scale);
}
Deed scaling_enabled(const Facts& f) {
  if (f.precision != PrecisionType::FP16)
    return nothing("mixed_precision is {}, where losses are not scaled", to_string(f.precision));
  if (f[Count::backwards] == 0) return not_due("nothing was trained");
  return f.scaling.enabled ? init_scale(f)
                           : acted("{} not scaled", counted(f[Count::backwards], "loss was", "losses were"));
}

// ---- the process group, schedules, the launch

Deed backend(const Facts& f) {
  if (f.ranks == 1) return nothing("one process has no process group");
  return acted("{} ranks talk through {}", f.ranks, f.backend);
}
Deed timeout(const Facts& f) {
  if (f.ranks == 1) return nothing("one process waits for nobody");
  if (!f.process_group.timeout) return off("by the back end");
  return acted("in force for all waits; none took as long");
}
Deed init_method(const Facts& f) {
  if (f.ranks == 1) return nothing("one process meets nobody");
  if (f.process_group.init_method.empty()) return off("by MASTER_ADDR and MASTER_PORT");
  return acted("{} ranks met through {}", f.ranks, f.process_group.init_method);
}
Deed step_scheduler_with_optimizer(const Facts& f) {
  if (f.schedulers == 0) return nothing("no schedule was prepared");
  if (const int64_t alone = f[Count::schedule_steps_alone]; alone > 0)
    return acted("schedules made {} of their own", counted(alone, "step", "steps"));
  if (f[Count::schedule_steps] == 0) return not_due("no schedule made a step");
  return acted("schedules made {} after {} of optimizers", counted(f[Count::schedule_steps], "step", "steps"),
               counted(f[Count::optimizer_steps], "step", "steps"));
}

/// What only the environment says.
template <const char* const& Variable> Asked by_variable(const Facts&) {
  return {false, environment::text(Variable).value_or("unset")};
}
constexpr const char* kWorldSize = "WORLD_SIZE";
constexpr const char* kMachines = "GROUP_WORLD_SIZE";
constexpr const char* kDebug = "ACCELERATE_DEBUG_MODE";
constexpr const char* kThreads = "OMP_NUM_THREADS";
constexpr const char* kAffinity = "ACCELERATE_CPU_AFFINITY";
constexpr const char* kUseFsdp = "ACCELERATE_USE_FSDP";
constexpr const char* kUseParallelism = "ACCELERATE_USE_PARALLELISM_CONFIG";

Deed num_processes(const Facts& f) {
  return f.ranks == 1 ? off("this process is alone") : acted("{} processes form one job", f.ranks);
}
Deed num_machines(const Facts& f) {
  if (f.machines == 1) return off("all processes are on this machine");
  return acted("the {} processes are on {} machines, {} of them on this one", f.ranks, f.machines,
               environment::integer({"LOCAL_WORLD_SIZE"}).value_or(1));
}
Deed cpu(const Facts& f) {
  if (!f.device.is_cpu()) return off("the device is {}", f.device.str());
  return f.accelerator
             ? acted("the {} devices of this machine are left alone", c10::DeviceTypeName(*f.accelerator, true))
             : off("there is no accelerator, so the CPU computes anyway");
}
Deed debug(const Facts& f) {
  if (!f.debug) return off("off");
  if (f.ranks == 1) return nothing("one process has nobody to compare with");
  return acted("collectives compare more over {} ranks before they start", f.ranks);
}
Deed threads(const Facts&) {
  if (!environment::text(kThreads))
    return off("unset: LibTorch takes {}", counted(at::get_num_threads(), "thread", "threads"));
  return acted("operators use {}", counted(at::get_num_threads(), "thread", "threads"));
}
Deed affinity(const Facts&) {
  if (!environment::flag(kAffinity).value_or(false)) return off("off");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const long all = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) >= all)
    return nothing("this process may use all {} cores of the machine", all);
  return acted("this process is bound to {} of {} cores", CPU_COUNT(&allowed), all);
}
Deed use_fsdp(const Facts& f) {
  if (!f.sharding) return off("off");
  return f[Count::units] > 0 ? acted("{} of models were sharded", counted(f[Count::units], "unit", "units"))
                             : not_due("no model was prepared");
}
Deed use_parallelism_config(const Facts& f) {
  if (!environment::flag(kUseParallelism).value_or(false)) return off("off");
  if (!f.layout || f.layout->total_size() == 1) return nothing("all its sizes are 1");
  const ParallelMesh mesh = f.layout->mesh();
  return acted("ranks are laid out as {} ({})", fmt::join(mesh.shape, " x "), fmt::join(mesh.dim_names, " x "));
}
constexpr const char* kCompiling = "never in C++";
Asked dynamo_backend_asked(const Facts& f) {
  return {f.given.dynamo_backend || (f.given.dynamo_plugin && f.given.dynamo_plugin->backend),
          text_of(f.compiling.backend)};
}
template <auto Field> Asked dynamo_asked(const Facts& f) {
  return {f.given.dynamo_plugin && (*f.given.dynamo_plugin.*Field).has_value(), text_of(f.compiling.*Field)};
}
/// Where it would compile, there is no Accelerator.
Deed dynamo_backend(const Facts& f) {
  if (f.compiling.disable && *f.compiling.backend != "no") return off("disabled: models run as they are");
  return off("models run as they are");
}
Deed dynamo(const Facts&) { return nothing("nothing is compiled"); }

}  // namespace

std::vector<Row> rows_of_training() {
  return {
      {"DistributedDataParallelKwargs.broadcast_buffers", nullptr, "in models with buffers",
       asked<&Facts::ddp, &Ddp::broadcast_buffers>, broadcast_buffers},
      {"DistributedDataParallelKwargs.bucket_cap_mb", nullptr, kAveraging, asked<&Facts::ddp, &Ddp::bucket_cap_mb>,
       bucket_cap_mb},
      {"DistributedDataParallelKwargs.find_unused_parameters", nullptr, kAveraging,
       asked<&Facts::ddp, &Ddp::find_unused_parameters>, find_unused_parameters},
      {"DistributedDataParallelKwargs.gradient_as_bucket_view", nullptr, kAveraging,
       asked<&Facts::ddp, &Ddp::gradient_as_bucket_view>, gradient_as_bucket_view},
      {"DistributedDataParallelKwargs.static_graph", nullptr, kAveraging, asked<&Facts::ddp, &Ddp::static_graph>,
       static_graph},
      {"DistributedDataParallelKwargs.comm_hook", nullptr, kAveraging, asked<&Facts::ddp, &Ddp::comm_hook>, comm_hook},
      {"DistributedDataParallelKwargs.comm_wrapper", nullptr, kAveraging, asked<&Facts::ddp, &Ddp::comm_wrapper>,
       comm_wrapper},
      {"DistributedDataParallelKwargs.comm_state_option", nullptr, "with comm_hook power_sgd",
       asked<&Facts::ddp, &Ddp::comm_state_option>, comm_state_option},
      {"DistributedDataParallelKwargs.communication_hook", nullptr, kAveraging,
       [](const Facts& f) {
         return Asked{f.ddp.communication_hook != nullptr, f.ddp.communication_hook ? "set" : "unset"};
       },
       communication_hook},
      {"DistributedDataParallelKwargs.compare_parameters_every", nullptr, kAveraging,
       asked<&Facts::ddp, &Ddp::compare_parameters_every>, compare_parameters_every},
      {"mixed_precision", "ACCELERATE_MIXED_PRECISION", "in forwards of prepared models",
       asked<&Facts::given, &Options::mixed_precision>, mixed_precision},
      {"AutocastKwargs.enabled", nullptr, kAutocast, asked<&Facts::autocast, &AutocastKwargs::enabled>,
       autocast_enabled},
      {"AutocastKwargs.cache_enabled", nullptr, kAutocast, asked<&Facts::autocast, &AutocastKwargs::cache_enabled>,
       autocast_cache_enabled},
      {"GradScalerKwargs.init_scale", nullptr, kScaled, asked<&Facts::scaling, &Scaling::init_scale>, init_scale},
      {"GradScalerKwargs.growth_factor", nullptr, kScaled, asked<&Facts::scaling, &Scaling::growth_factor>, growth},
      {"GradScalerKwargs.backoff_factor", nullptr, "when a gradient overflows",
       asked<&Facts::scaling, &Scaling::backoff_factor>, backoff},
      {"GradScalerKwargs.growth_interval", nullptr, kScaled, asked<&Facts::scaling, &Scaling::growth_interval>, growth},
      {"GradScalerKwargs.enabled", nullptr, kScaled, asked<&Facts::scaling, &Scaling::enabled>, scaling_enabled},
      {"InitProcessGroupKwargs.backend", nullptr, "with several processes",
       asked<&Facts::process_group, &InitProcessGroupKwargs::backend>, backend},
      {"InitProcessGroupKwargs.timeout", nullptr, "when a peer does not answer",
       asked<&Facts::process_group, &InitProcessGroupKwargs::timeout>, timeout},
      {"InitProcessGroupKwargs.init_method", nullptr, "with several processes",
       asked<&Facts::process_group, &InitProcessGroupKwargs::init_method>, init_method},
      {"step_scheduler_with_optimizer", nullptr, "in prepared schedules",
       asked<&Facts::given, &Options::step_scheduler_with_optimizer>, step_scheduler_with_optimizer},
      {"cpu", "ACCELERATE_USE_CPU", "where there is an accelerator", asked<&Facts::given, &Options::cpu>, cpu},
      {"launch.num_processes", kWorldSize, "always", by_variable<kWorldSize>, num_processes},
      {"launch.num_machines", kMachines, "with several machines", by_variable<kMachines>, num_machines},
      {"launch.num_cpu_threads_per_process", kThreads, "in operators on the CPU", by_variable<kThreads>, threads},
      {"launch.enable_cpu_affinity", kAffinity, "where processes share a machine", by_variable<kAffinity>, affinity},
      {"launch.debug", kDebug, "with several processes", by_variable<kDebug>, debug},
      {"launch.use_fsdp", kUseFsdp, "in prepare()", by_variable<kUseFsdp>, use_fsdp},
      {"launch.use_parallelism_config", kUseParallelism, "in prepare()", by_variable<kUseParallelism>,
       use_parallelism_config},
      {"launch.dynamo_backend", "ACCELERATE_DYNAMO_BACKEND", kCompiling, dynamo_backend_asked, dynamo_backend},
      {"launch.dynamo_mode", "ACCELERATE_DYNAMO_MODE", kCompiling, dynamo_asked<&Dynamo::mode>, dynamo},
      {"launch.dynamo_use_fullgraph", "ACCELERATE_DYNAMO_USE_FULLGRAPH", kCompiling, dynamo_asked<&Dynamo::fullgraph>,
       dynamo},
      {"launch.dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", kCompiling, dynamo_asked<&Dynamo::dynamic>,
       dynamo},
      {"launch.dynamo_use_regional_compilation", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", kCompiling,
       dynamo_asked<&Dynamo::use_regional_compilation>, dynamo},
  };
}

}  // namespace accelerate::receipts
