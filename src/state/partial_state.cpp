#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <ostream>

#include "accelerate/comm.hpp"
#include "accelerate/state.hpp"
#include "comm/backends/backend.hpp"
#include "comm/group.hpp"
#include "observe/hang_report.hpp"
#include "state/lines_at_once.hpp"
#include "utils/device_types.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/slurm.hpp"

namespace accelerate {

struct PartialState::Shared {
  at::Device device = at::kCPU;
  DistributedType type = DistributedType::NO;
  int64_t num_processes = 1, process_index = 0, local_process_index = 0, num_local_processes = 1;
  bool cpu = false, debug = false;
  std::string backend;
  InitProcessGroupKwargs asked;
  std::shared_ptr<comm::Group> group;
};

namespace {

/// The group is made once. @param backend  of the group; empty: there is none, and nothing to be different
void warn_of_another_group(const InitProcessGroupKwargs& wanted, const InitProcessGroupKwargs& first,
                           const std::string& backend) {
  if (backend.empty()) return;
  std::string differs;
  if (!wanted.backend.empty() && wanted.backend != backend) differs = "backend";
  else if (!wanted.init_method.empty() && wanted.init_method != first.init_method) differs = "init_method";
  else if (wanted.timeout && wanted.timeout != first.timeout) differs = "timeout";
  if (differs.empty()) return;
  logs::warn("accelerate.state",
             "InitProcessGroupKwargs: this {} has no effect, since the process group is there already, with the first "
             "Accelerator's or PartialState's. Give it to that one, or call AcceleratorState::reset(true) before",
             differs);
}

struct Identity {
  int64_t rank, world_size, local_rank, local_world_size;
  std::string master_addr = "127.0.0.1";
  int64_t master_port = 29500;
};

/// torchrun's and our launcher's names first, then those of MPI implementations; what these leave open is as Slurm
/// says, if it started all of them.
Identity read_identity() {
  Identity id{};
  const auto world_size =
      environment::integer({"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"});
  auto task = slurm::this_task(environment::text);
  if (task && world_size.value_or(task->world_size) != task->world_size) task.reset();
  id.world_size = world_size.value_or(task ? task->world_size : 1);
  id.rank = environment::integer({"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"})
                .value_or(task ? task->rank : 0);
  id.local_rank =
      environment::integer({"LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"})
          .value_or(task                ? task->local_rank
                    : id.world_size > 1 ? id.rank
                                        : 0);
  id.local_world_size = environment::integer({"LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE",
                                              "MV2_COMM_WORLD_LOCAL_SIZE"})
                            .value_or(task ? task->local_world_size : id.world_size);
  if (task) id.master_addr = task->address, id.master_port = task->port;
  if (const auto address = environment::text("MASTER_ADDR")) id.master_addr = *address;
  id.master_port = environment::integer({"MASTER_PORT"}).value_or(id.master_port);
  if (id.world_size < 1 || id.rank < 0 || id.rank >= id.world_size || id.local_rank < 0)
    raise<ConfigError>(
        "environment: found RANK={}, WORLD_SIZE={}, LOCAL_RANK={}, expected 0 <= RANK < WORLD_SIZE and LOCAL_RANK >= "
        "0; start the program with `accelerate launch`, or unset these variables to run alone",
        id.rank, id.world_size, id.local_rank);
  return id;
}

/// Notes in `id` where ranks meet, from InitProcessGroupKwargs::init_method.
void meet_at(const std::string& init_method, Identity& id) {
  if (init_method.empty() || init_method == "env://") return;
  constexpr std::string_view kTcp = "tcp://";
  const size_t colon = init_method.rfind(':');
  const std::string port = colon == std::string::npos ? "" : init_method.substr(colon + 1);
  if (!init_method.starts_with(kTcp) || colon < kTcp.size() + 1 || port.empty() || port.size() > 5 ||
      port.find_first_not_of("0123456789") != std::string::npos)
    raise<ConfigError>(
        "InitProcessGroupKwargs: init_method is '{}', expected env:// (MASTER_ADDR and MASTER_PORT) or "
        "tcp://host:port; ranks meet through a store on a port, so files and queries (?rank=) are not known",
        init_method);
  id.master_addr = init_method.substr(kTcp.size(), colon - kTcp.size());
  id.master_port = std::stoll(port);
}

at::Device choose_device(bool cpu, int64_t local_rank) {
  if (const auto wanted = environment::text("ACCELERATE_TORCH_DEVICE")) {
    try {
      const at::Device device(*wanted);
      at::empty({0}, device);  // what LibTorch can't use is an error now, not at the first tensor
      return device;
    } catch (const c10::Error&) {
      const std::string type = wanted->substr(0, wanted->find(':'));
      if (devices::find(type))
        raise<NotBuiltError>(
            "environment: ACCELERATE_TORCH_DEVICE is '{}', and this LibTorch can't use {} here. Take a build of "
            "LibTorch for it and check its driver, or unset the variable",
            *wanted, type);
      raise<ConfigError>(
          "environment: ACCELERATE_TORCH_DEVICE is '{}', expected a device such as cpu, cuda, cuda:1, xpu or mps",
          *wanted);
    }
  }
  if (cpu) return at::kCPU;
  const auto type = at::getAccelerator();
  if (!type) return at::kCPU;
  const int64_t count = at::accelerator::deviceCount();  // NOLINT(bugprone-signed-char-misuse): c10 counts in them
  if (count < 1) return at::kCPU;
  if (environment::text("SLURM_GPUS_PER_TASK") && count < local_rank + 1)
    local_rank %= count;  // each task sees its own devices only, counted from 0
  if (local_rank >= count)
    raise<ConfigError>(
        "PartialState: local rank {} has no device of its own, found {} {} device(s); launch at most one process per "
        "device, or pass --cpu",
        local_rank, count, c10::DeviceTypeName(*type, true));
  const at::Device device(*type, static_cast<c10::DeviceIndex>(local_rank));
  at::accelerator::setDeviceIndex(device.index());
  return device;
}

/// A launch for devices must not end on the CPU without a word.
void check_launched_for(const at::Device& device) {
  const auto wanted = environment::text("ACCELERATE_LAUNCHED_FOR");
  if (!wanted || device.type() == at::kMeta || *wanted == c10::DeviceTypeName(device.type(), true)) return;
  raise<NotBuiltError>(
      "PartialState: the launch was for {} devices (--multi_gpu, or distributed_type in the config file), and this "
      "LibTorch finds none: it would train on {}. Use a build of LibTorch for {} and check the driver, or launch with "
      "--cpu",
      *wanted, c10::DeviceTypeName(device.type(), true), *wanted);
}

/// The back end for several ranks on such devices.
std::string backend_for(const at::Device& device) {
  if (device.is_cpu()) return "gloo";
  if (device.is_cuda()) return comm::kNccl.available ? "nccl" : "gloo";
  const std::string name = c10::DeviceTypeName(device.type(), true);
  const auto* type = devices::find(name);
  raise<NotBuiltError>(
      "PartialState: several ranks on {} devices {}, and this library has no back end for that. Train in one process, "
      "or on the CPU (--cpu)",
      name, type && *type->backend ? fmt::format("communicate through {}", type->backend) : "can't communicate");
}

}  // namespace

const char* to_string(DistributedType type) {
  switch (type) {
    case DistributedType::NO:
      return "NO";
    case DistributedType::MULTI_CPU:
      return "MULTI_CPU";
    case DistributedType::MULTI_GPU:
      return "MULTI_GPU";
    case DistributedType::MULTI_XPU:
      return "MULTI_XPU";
    case DistributedType::DEEPSPEED:
      return "DEEPSPEED";
    case DistributedType::FSDP:
      return "FSDP";
  }
  return "?";
}

std::string PartialState::text() const {
  return fmt::format(
      "Distributed environment: DistributedType.{}{}{}\nNum processes: {}\nProcess index: {}\nLocal process index: {}\n"
      "Device: {}\n",
      to_string(distributed_type()), backend().empty() ? "" : "  Backend: ", backend(), num_processes(),
      process_index(), local_process_index(), device().str());
}
std::ostream& operator<<(std::ostream& out, const PartialState& state) { return out << state.text(); }

std::shared_ptr<PartialState::Shared>& PartialState::shared() {
  static std::shared_ptr<Shared> state;
  return state;
}

PartialState::PartialState(const PartialStateOptions& options) {
  auto& state = shared();
  logs::take_libtorch_warnings();  // also on a further thread
  if (state) {
    if (options.cpu && *options.cpu != state->cpu)
      raise<ConfigError>(
          "PartialState: cpu is {}, but this process has already started with {}; pass it to the first Accelerator or "
          "PartialState only, or call PartialState::reset() before",
          *options.cpu, state->cpu);
    warn_of_another_group(options.process_group, state->asked, state->backend);
    shared_ = state;
    return;
  }
  logs::check_settings();
  show_lines_at_once();
  auto fresh = std::make_shared<Shared>();
  const auto& pretence = options.pretence;
  Identity id = pretence ? Identity{.rank = pretence->process_index,
                                    .world_size = pretence->num_processes,
                                    .local_rank = 0,
                                    .local_world_size = 1}
                         : read_identity();
  meet_at(options.process_group.init_method, id);
  fresh->cpu = options.cpu.value_or(environment::flag("ACCELERATE_USE_CPU").value_or(false));
  fresh->debug = environment::flag("ACCELERATE_DEBUG_MODE").value_or(false);
  fresh->device = pretence ? at::Device(at::kMeta) : choose_device(fresh->cpu, id.local_rank);
  if (!pretence && !fresh->cpu) check_launched_for(fresh->device);
  fresh->num_processes = id.world_size;
  fresh->process_index = id.rank;
  fresh->local_process_index = id.local_rank;
  fresh->num_local_processes = id.local_world_size;
  if (pretence && id.world_size > 1) {
    fresh->type = DistributedType::MULTI_CPU;
    fresh->backend = "dry";
    fresh->group = comm::Group::join({.rank = id.rank,
                                      .world_size = id.world_size,
                                      .backend = fresh->backend,
                                      .master_addr = {},
                                      .dry = pretence->traffic,
                                      .dry_on_host = fresh->cpu});
    comm::set_world_group(fresh->group);
  } else if (id.world_size > 1) {
    fresh->type = fresh->device.is_cpu()   ? DistributedType::MULTI_CPU
                  : fresh->device.is_xpu() ? DistributedType::MULTI_XPU
                                           : DistributedType::MULTI_GPU;
    fresh->backend = options.process_group.backend.empty() ? backend_for(fresh->device) : options.process_group.backend;
    if (id.master_port < 1 || id.master_port > 65535)
      raise<ConfigError>("environment: MASTER_PORT is {}, expected 1 to 65535", id.master_port);
    fresh->group = comm::Group::join(
        {.rank = id.rank,
         .world_size = id.world_size,
         .backend = fresh->backend,
         .master_addr = id.master_addr,
         .master_port = static_cast<uint16_t>(id.master_port),
         .timeout = options.process_group.timeout.value_or(std::chrono::seconds(fresh->backend == "nccl" ? 600 : 1800)),
         .device = fresh->device,
         .debug = fresh->debug,
         .local_world_size = id.local_world_size});
    comm::set_world_group(fresh->group);
  }
  fresh->asked = options.process_group;
  logs::set_rank(id.rank);
  hang_report::answer(id.rank, fresh->group ? fresh->group->activity() : nullptr);
  shared_ = state = fresh;
}

const at::Device& PartialState::device() const { return shared_->device; }
DistributedType PartialState::distributed_type() const { return shared_->type; }
int64_t PartialState::num_processes() const { return shared_->num_processes; }
int64_t PartialState::process_index() const { return shared_->process_index; }
int64_t PartialState::local_process_index() const { return shared_->local_process_index; }
int64_t PartialState::num_local_processes() const { return shared_->num_local_processes; }
bool PartialState::debug() const { return shared_->debug; }
const std::string& PartialState::backend() const { return shared_->backend; }

void PartialState::wait_for_everyone() const { comm::barrier(); }

void PartialState::print(const std::string& text) const {
  if (!is_local_main_process()) return;
  std::fprintf(stdout, "%s\n", text.c_str());
  std::fflush(stdout);
}

namespace {

/// The first runs at once, the others wait until it has left; the second barrier is the first's leaving.
std::shared_ptr<void> first_then_others(bool first) {
  if (!first) {
    comm::barrier();
    return std::shared_ptr<void>(nullptr, [](void*) {});
  }
  return std::shared_ptr<void>(nullptr, [before = std::uncaught_exceptions()](void*) {
    // If it fails, the others are not let in: they hear of it while they wait.
    if (std::uncaught_exceptions() > before) return;
    try {
      comm::barrier();
    } catch (const Error& error) {
      logs::warn("accelerate.state", "main_process_first: {}", error.what());
    }
  });
}

}  // namespace

std::shared_ptr<void> PartialState::main_process_first() const { return first_then_others(is_main_process()); }
std::shared_ptr<void> PartialState::local_main_process_first() const {
  return first_then_others(is_local_main_process());
}

void PartialState::abort(const std::string& reason) const noexcept {
  if (shared_->group) shared_->group->announce_failure(reason);
}

bool PartialState::initialized() { return shared() != nullptr; }

void PartialState::reset() {
  hang_report::forget_activity();
  logs::set_rank({});
  comm::set_world_group(nullptr);
  shared().reset();
}

}  // namespace accelerate
