/// Receipts of what the launcher decides.

#include "accelerator/receipts.hpp"

#include <ATen/Parallel.h>
#include <sched.h>
#include <unistd.h>

#include "parallel/sharding/counts.hpp"
#include "utils/environment.hpp"

namespace accelerate::receipts {
namespace {

using parallel::ShardingCount;
using Dynamo = TorchDynamoPlugin;

/// A setting that only the environment has.
template <const char* const& Variable> Asked by_variable(const OwnFacts&) {
  return {false, environment::text(Variable).value_or("unset")};
}
constexpr const char* kWorldSize = "WORLD_SIZE";
constexpr const char* kMachines = "GROUP_WORLD_SIZE";
constexpr const char* kDebug = "ACCELERATE_DEBUG_MODE";
constexpr const char* kThreads = "OMP_NUM_THREADS";
constexpr const char* kAffinity = "ACCELERATE_CPU_AFFINITY";
constexpr const char* kUseFsdp = "ACCELERATE_USE_FSDP";
constexpr const char* kUseParallelism = "ACCELERATE_USE_PARALLELISM_CONFIG";

Deed num_processes(const OwnFacts& f) {
  return f.run.ranks == 1 ? off("this process is alone") : acted("{} processes form one job", f.run.ranks);
}
Deed num_machines(const OwnFacts& f) {
  if (f.machines == 1) return off("all processes are on this machine");
  return acted("the {} processes are on {} machines, {} of them on this one", f.run.ranks, f.machines,
               environment::integer({"LOCAL_WORLD_SIZE"}).value_or(1));
}
Deed cpu(const OwnFacts& f) {
  if (!f.run.device.is_cpu()) return off("the device is {}", f.run.device.str());
  return f.accelerator
             ? acted("the {} devices of this machine are left alone", c10::DeviceTypeName(*f.accelerator, true))
             : off("there is no accelerator, so the CPU computes anyway");
}
Deed debug(const OwnFacts& f) {
  if (!f.debug) return off("off");
  if (f.run.ranks == 1) return nothing("one process has nobody to compare with");
  return acted("collectives compare more over {} ranks before they start", f.run.ranks);
}
Deed threads(const OwnFacts&) {
  if (!environment::text(kThreads))
    return off("unset: LibTorch takes {}", counted(at::get_num_threads(), "thread", "threads"));
  return acted("operators use {}", counted(at::get_num_threads(), "thread", "threads"));
}
Deed affinity(const OwnFacts&) {
  if (!environment::flag(kAffinity).value_or(false)) return off("off");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const long all = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) >= all)
    return nothing("this process may use all {} cores of the machine", all);
  return acted("this process is bound to {} of {} cores", CPU_COUNT(&allowed), all);
}
Deed use_fsdp(const OwnFacts& f) {
  if (!f.sharded) return off("off");
  return read(ShardingCount::units) > 0
             ? acted("{} of models were sharded", counted(read(ShardingCount::units), "unit", "units"))
             : not_due("no model was prepared");
}
Deed use_parallelism_config(const OwnFacts& f) {
  if (!environment::flag(kUseParallelism).value_or(false)) return off("off");
  if (!f.layout || f.layout->total_size() == 1) return nothing("all its sizes are 1");
  const ParallelMesh mesh = f.layout->mesh();
  return acted("ranks are laid out as {} ({})", fmt::join(mesh.shape, " x "), fmt::join(mesh.dim_names, " x "));
}
constexpr const char* kCompiling = "never in C++";
Asked dynamo_backend_asked(const OwnFacts& f) {
  return {f.given.dynamo_backend || (f.given.dynamo_plugin && f.given.dynamo_plugin->backend),
          text_of(f.compiling.backend)};
}
template <auto Field> Asked dynamo_asked(const OwnFacts& f) {
  return {f.given.dynamo_plugin && (*f.given.dynamo_plugin.*Field).has_value(), text_of(f.compiling.*Field)};
}
/// If it would compile, there is no Accelerator.
Deed dynamo_backend(const OwnFacts& f) {
  if (f.compiling.disable && *f.compiling.backend != "no") return off("disabled: models run as they are");
  return off("models run as they are");
}
Deed dynamo(const OwnFacts&) { return nothing("nothing is compiled"); }

constexpr ReceiptRow<OwnFacts> kLaunchRows[] = {
    {"cpu", "ACCELERATE_USE_CPU", "where there is an accelerator", asked<&OwnFacts::given, &AcceleratorOptions::cpu>,
     cpu},
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
    {"launch.dynamo_use_dynamic", "ACCELERATE_DYNAMO_USE_DYNAMIC", kCompiling, dynamo_asked<&Dynamo::dynamic>, dynamo},
    {"launch.dynamo_use_regional_compilation", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", kCompiling,
     dynamo_asked<&Dynamo::use_regional_compilation>, dynamo},
};

}  // namespace

std::vector<Receipt> of_launch(const OwnFacts& facts) { return made(kLaunchRows, facts); }

}  // namespace accelerate::receipts
