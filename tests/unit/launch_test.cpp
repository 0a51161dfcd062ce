#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "accelerate/config.hpp"
#include "accelerate/config/option.hpp"
#include "accelerate/launch.hpp"
#include "accelerate/utils/error.hpp"
#include "deadline.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/outcome.hpp"
#include "launch/job/streams.hpp"
#include "launch/request.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/supervise/report.hpp"
#include "launch/supervise/stop_clock.hpp"
#include "launch/system/affinity.hpp"
#include "launch/system/output.hpp"
#include "launch/system/ports.hpp"
#include "ranks.hpp"
#include "utils/device_types.hpp"
#include "utils/slurm.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate;
using namespace accelerate::launcher;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

template <class Function> std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

Job job_of(const LaunchOptions& options, const Host& host) { return make_job(request_of(options), host); }

// ---------------------------------------------------------------- settings and environment

TEST(LaunchEnvironment, RanksOfTwoMachines) {
  const Host host{.physical_cores = 8, .environment = {}};
  const Job job = job_of({.command = {"x"},
                          .num_processes = 6,
                          .num_machines = 2,
                          .machine_rank = 1,
                          .main_process_ip = "10.0.0.1",
                          .main_process_port = 1234},
                         host);
  const auto env = build_environment(job, host, 2);
  const std::map<std::string, std::string> expected{{"RANK", "5"},
                                                    {"LOCAL_RANK", "2"},
                                                    {"WORLD_SIZE", "6"},
                                                    {"LOCAL_WORLD_SIZE", "3"},
                                                    {"GROUP_RANK", "1"},
                                                    {"ROLE_RANK", "5"},
                                                    {"GROUP_WORLD_SIZE", "2"},
                                                    {"MASTER_ADDR", "10.0.0.1"},
                                                    {"MASTER_PORT", "1234"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "False"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(env.at(name), value) << name;
}

/// The variables that srun set on two machines of Slurm 22.05: `srun -N 2 -n 4`, the second machine's only task.
std::map<std::string, std::string> slurm_task() {
  return {{"SLURM_GTIDS", "3"},          {"SLURM_JOB_ID", "2"},         {"SLURM_LOCALID", "0"},
          {"SLURM_NNODES", "2"},         {"SLURM_NODEID", "1"},         {"SLURM_NTASKS", "4"},
          {"SLURM_PROCID", "3"},         {"SLURM_STEP_ID", "0"},        {"SLURM_STEP_NODELIST", "n[1-2]"},
          {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_TASKS_PER_NODE", "3,1"}};
}

TEST(Slurm, TasksOfAStep) {
  auto variables = slurm_task();
  const auto look = [&](const char* name) {
    return variables.contains(name) ? std::optional(variables[name]) : std::nullopt;
  };
  auto task = slurm::this_task(look);
  ASSERT_TRUE(task);
  EXPECT_EQ(std::tuple(task->rank, task->world_size, task->local_rank, task->local_world_size), std::tuple(3, 4, 0, 1));
  EXPECT_EQ(task->address, "n1");
  EXPECT_EQ(task->port, 15030);
  variables["SLURM_GTIDS"] = "0,1,2";
  EXPECT_EQ(slurm::this_task(look)->local_world_size, 3);
  variables["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ(slurm::this_task(look)->address, "127.0.0.1");
  variables["SLURM_PROCID"] = "x";
  EXPECT_THAT(message_of([&] { slurm::this_task(look); }), HasSubstr("SLURM_PROCID is 'x'"));
  variables.erase("SLURM_STEP_NUM_TASKS");  // as in a batch script, whose SLURM_NTASKS are for srun to start
  EXPECT_FALSE(slurm::this_task(look));
}

TEST(Slurm, FirstMachineOfAList) {
  const std::pair<const char*, const char*> lists[] = {{"n1", "n1"},
                                                       {"n[1-2]", "n1"},
                                                       {"a-[001-003,7],b", "a-001"},
                                                       {"rack[3,5]n[07-09]-ib", "rack3n07-ib"},
                                                       {"b,a[1-2]", "b"},
                                                       {"n[12]", "n12"},
                                                       {"", ""},
                                                       {"n[", "n"}};
  for (const auto& [list, first] : lists) EXPECT_EQ(slurm::first_machine(list), first) << list;
}

TEST(Slurm, LaunchersOfAStepAreItsMachines) {
  Host host{.physical_cores = 8, .environment = slurm_task()};
  const LaunchOptions options{.command = {"x"}, .num_processes = 8};
  const Job job = job_of(options, host);
  EXPECT_EQ(std::tuple(job.num_machines, job.machine_rank, job.local_world_size, job.main_ip, job.main_port),
            std::tuple(4, 3, 2, "n1", 15030));
  EXPECT_THAT(job.settings.remarks(), ElementsAre("Slurm's step 2.0: machine 3 of 4, meeting at n1:15030"));
  EXPECT_EQ(job_of({.command = {"x"}}, host).world_size, 4);
  // Flags win, also over the choice to be one job.
  EXPECT_EQ(job_of({.command = {"x"}, .num_processes = 8, .main_process_ip = "10.0.0.1", .main_process_port = 77}, host)
                .main_ip,
            "10.0.0.1");
  const Job alone = job_of({.command = {"x"}, .num_machines = 1}, host);
  EXPECT_EQ(alone.num_machines, 1);
  EXPECT_EQ(build_environment(alone, host, 0).at("WORLD_SIZE"), "1");  // or the program would wait for the other tasks
  host.environment["SLURM_GTIDS"] = "2,3";  // two on this machine: ranks, each of which is one process
  const Job rank = job_of(options, host);
  EXPECT_EQ(std::tuple(rank.num_machines, rank.world_size, rank.local_world_size, rank.main_ip, rank.main_port),
            std::tuple(1, 4, 1, "n1", 15030));
  const auto env = build_environment(rank, host, 0);
  EXPECT_EQ(std::tuple(env.at("RANK"), env.at("LOCAL_RANK"), env.at("LOCAL_WORLD_SIZE")), std::tuple("3", "0", "2"));
  host.environment["WORLD_SIZE"] = "4";  // a rank of somebody's job that launches something itself
  EXPECT_EQ(job_of(options, host).num_machines, 1);
}

// A launcher that is one of N must not become N times N processes.
TEST(LaunchEnvironment, InsideMpirunALauncherTakesItsRanksPlace) {
  using Variables = std::map<std::string, std::string>;
  const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "5"},
                           {"OMPI_COMM_WORLD_SIZE", "8"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
  const Variables hydra{{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
  for (const auto& variables : {open_mpi, hydra}) {
    const Host host{.physical_cores = 8, .environment = variables};
    for (const bool fsdp : {false, true}) {
      LaunchOptions options{.command = {"x"}, .num_processes = 8, .main_process_ip = "10.0.0.1"};
      if (fsdp) options.settings = {{"use_fsdp", "true"}};
      const Job job = job_of(options, host);
      EXPECT_EQ(job.local_world_size, 1);
      EXPECT_FALSE(job.needs_port());
      const auto env = build_environment(job, host, 0);
      for (const auto& [name, value] : Variables{{"RANK", "5"},
                                                 {"WORLD_SIZE", "8"},
                                                 {"LOCAL_RANK", "1"},
                                                 {"LOCAL_WORLD_SIZE", "4"},
                                                 {"MASTER_ADDR", "10.0.0.1"},
                                                 {"MASTER_PORT", "29500"}})
        EXPECT_EQ(env.at(name), value) << name;
    }
    EXPECT_FALSE(job_of({.command = {"x"}, .num_machines = 1}, host).place);  // a job of its own
    EXPECT_EQ(job_of({.command = {"x"},
                      .num_processes = 16,
                      .num_machines = 8,
                      .machine_rank = 5,
                      .main_process_ip = "10.0.0.1",
                      .main_process_port = 77},
                     host)
                  .local_world_size,
              2);  // a launcher for each machine
    Host first = host;
    first.environment[variables.begin()->first.starts_with("O") ? "OMPI_COMM_WORLD_RANK" : "PMI_RANK"] = "0";
    EXPECT_THAT(job_of({.command = {"x"}, .num_processes = 2}, first).settings.remarks(),
                ElementsAre(AllOf(HasSubstr("has started 8 launchers: each starts one process"),
                                  HasSubstr("num_processes, which is 2, has no effect"))));
    Host inner = host;
    inner.environment["WORLD_SIZE"] = "8";  // a rank that launches something itself
    EXPECT_FALSE(job_of({.command = {"x"}}, inner).place);
  }
}

// PMIx's own launcher says which rank this is and not of how many.
TEST(LaunchEnvironment, ARankOfUnknownManyIsNamed) {
  const Host host{.physical_cores = 8, .environment = {{"PMIX_RANK", "2"}}};
  EXPECT_THAT(
      [&] { job_of({.command = {"x"}, .num_processes = 8}, host); },
      testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("PMIX_RANK 2"), HasSubstr("--machine_rank $PMIX_RANK"))));
  EXPECT_FALSE(job_of({.command = {"x"}, .num_machines = 1}, host).place);
  const LaunchOptions machines{.command = {"x"},
                               .num_processes = 8,
                               .num_machines = 8,
                               .machine_rank = 2,
                               .main_process_ip = "10.0.0.1",
                               .main_process_port = 77};
  EXPECT_EQ(build_environment(job_of(machines, host), host, 0).at("RANK"), "2");
}

TEST(LaunchEnvironment, NumbersInFilesForOneProcessStartOne) {
  const fs::path file = fs::path(support::scratch_dir()) / "one.yaml";
  const auto ranks = [&](const std::string& type, bool cpu, std::optional<int64_t> flag = {}) {
    std::ofstream(file) << "distributed_type: " << type << "\nnum_processes: 8\n";
    LaunchOptions options{.command = {"x"}, .config_file = file};
    if (cpu) options.cpu = true;
    if (flag) options.num_processes = *flag;
    return job_of(options, Host{.physical_cores = 8, .environment = {}, .accelerators = 8}).local_world_size;
  };
  EXPECT_EQ(ranks("'NO'", false), 1);
  EXPECT_EQ(ranks("MULTI_GPU", true), 1);
  EXPECT_EQ(ranks("MULTI_GPU", false), 8);
  EXPECT_EQ(ranks("MULTI_CPU", false), 8);
  EXPECT_EQ(ranks("'NO'", false, 3), 3);
  const Host gpus{.physical_cores = 8, .environment = {}, .accelerators = 8};
  LaunchOptions cpu{.command = {"x"}};
  cpu.cpu = true;
  EXPECT_EQ(job_of(cpu, gpus).local_world_size, 1);
}

// Python's FSDP and DeepSpeed look for LOCAL_RANK.
TEST(LaunchEnvironment, OneProcessOfTorchrunsKindIsToldItsRank) {
  const Host host;
  LaunchOptions options{.command = {"x"}, .num_processes = 1};
  EXPECT_FALSE(build_environment(job_of(options, host), host, 0).contains("RANK"));
  options.settings = {{"use_fsdp", "true"}};
  const Job job = job_of(options, host);
  EXPECT_TRUE(job.needs_port());
  const auto env = build_environment(job, host, 0);
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"RANK", "0"}, {"LOCAL_RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}})
    EXPECT_EQ(env.at(name), value) << name;
}

// Operators of clusters start one launcher in each container and tell it where the others are.
TEST(LaunchEnvironment, TorchrunsVariablesAct) {
  const Host host{.physical_cores = 8,
                  .environment = {{"PET_NNODES", "2"},
                                  {"PET_NODE_RANK", "1"},
                                  {"PET_MASTER_ADDR", "job-master-0"},
                                  {"PET_MASTER_PORT", "23456"},
                                  {"PET_MAX_RESTARTS", "3"},
                                  {"PET_NPROC_PER_NODE", "auto"},
                                  {"PET_REDIRECTS", "3"}}};
  const Job job = job_of({.command = {"x"}, .num_processes = 4, .settings = {{"use_fsdp", "true"}}}, host);
  EXPECT_EQ(std::tuple(job.num_machines, job.machine_rank, job.local_world_size, job.main_ip, job.main_port),
            std::tuple(2, 1, 4, "job-master-0", 23456));
  EXPECT_EQ(job.max_restarts, 3);
  EXPECT_EQ(job.settings.text("redirects"), "3");
  const Job flags = job_of(
      {.command = {"x"}, .num_processes = 4, .num_machines = 1, .max_restarts = 0, .settings = {{"use_fsdp", "true"}}},
      host);
  EXPECT_EQ(std::tuple(flags.num_machines, flags.local_world_size, flags.max_restarts), std::tuple(1, 4, 0));
  EXPECT_EQ(job_of({.command = {"x"}, .cpu = true}, host).num_machines, 1);  // no launcher of torchrun's kind
}

TEST(LaunchEnvironment, AccumulationStepsArePassedOn) {
  const Host host;
  const auto env = build_environment(job_of({.command = {"x"}, .gradient_accumulation_steps = 4}, host), host, 0);
  EXPECT_EQ(env.at("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), "4");
  EXPECT_FALSE(env.contains("RANK"));  // one process needs no peers
}

TEST(LaunchEnvironment, ChangesReplaceInheritedValues) {
  const Host host{.physical_cores = 1, .environment = {{"A", "1"}, {"B", "2"}}};
  EXPECT_THAT(merged(host, {{"B", "3"}, {"C", "4"}}), ElementsAre("A=1", "B=3", "C=4"));
}

/// A folder that stands in for "/", with these files in it.
fs::path machine_with(const std::string& name, const std::map<std::string, std::string>& files) {
  const fs::path root = fs::path(support::scratch_dir()) / ("machine_" + name);
  fs::remove_all(root);
  for (const auto& [file, text] : files) {
    fs::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text;
  }
  return root;
}

TEST(DeviceTypes, AreCountedByTheirNodesAndTheVariableThatHidesSome) {
  const auto count = [](const char* type, const fs::path& root, std::optional<std::string> visible = std::nullopt) {
    return devices::count(*devices::find(type), root, [&](const char*) { return visible; });
  };
  const auto nvidia = machine_with("nvidia", {{"dev/nvidia0", ""}, {"dev/nvidia1", ""}, {"dev/nvidiactl", ""}});
  EXPECT_STREQ(devices::present(nvidia)->name, "cuda");
  EXPECT_THAT((std::vector{count("cuda", nvidia), count("cuda", nvidia, "1"), count("cuda", nvidia, ""),
                           count("cuda", nvidia, "-1"), count("npu", nvidia)}),
              ElementsAre(2, 1, 0, 0, 0));
  const auto ascend = machine_with("ascend", {{"dev/davinci0", ""}, {"dev/davinci7", ""}, {"dev/davinci_manager", ""}});
  EXPECT_STREQ(devices::present(ascend)->name, "npu");
  EXPECT_EQ(count("npu", ascend), 2);
  const auto intel = machine_with("intel", {{"dev/dri/renderD128", ""},
                                            {"sys/class/drm/renderD128/device/vendor", "0x8086\n"},
                                            {"dev/dri/renderD129", ""},
                                            {"sys/class/drm/renderD129/device/vendor", "0x1002\n"}});
  EXPECT_STREQ(devices::present(intel)->name, "xpu");
  EXPECT_EQ(count("xpu", intel), 1) << "the other is AMD's";
  EXPECT_EQ(devices::present(machine_with("none", {{"dev/null", ""}})), nullptr);
}

TEST(DeviceTypes, GpuIdsGoToTheVariableOfTheirKind) {
  for (const auto& type : devices::types()) {
    if (!*type.visible) continue;
    const Host host{.environment = {}, .accelerators = 4, .device_type = type.name};
    const Job job = job_of({.command = {"x"}, .num_processes = 2, .settings = {{"gpu_ids", "0,1"}}}, host);
    const auto env = build_environment(job, host, 0);
    EXPECT_EQ(env.at(type.visible), "0,1") << type.name;
    EXPECT_EQ(env.contains("CUDA_VISIBLE_DEVICES"), type.name == std::string("cuda"));
    EXPECT_FALSE(env.contains("ACCELERATE_LAUNCHED_FOR")) << "nobody asked for devices";
    EXPECT_EQ(testing::PrintToString(job.settings.remarks()).find("communicate through") != std::string::npos,
              type.name != std::string("cuda"));
  }
  // A file says which kind, whatever this machine has.
  const auto file = machine_with("file", {{"c.yaml", "distributed_type: MULTI_XPU\nnum_processes: 2\ngpu_ids: 2,3\n"}});
  const Host host{.environment = {}};
  const Job job = job_of({.command = {"x"}, .config_file = file / "c.yaml"}, host);
  const auto env = build_environment(job, host, 0);
  EXPECT_EQ(env.at("ZE_AFFINITY_MASK"), "2,3");
  EXPECT_EQ(env.at("ACCELERATE_LAUNCHED_FOR"), "xpu");
  const Job gpus = job_of({.command = {"x"}, .num_processes = 2, .settings = {{"multi_gpu", "true"}}}, host);
  EXPECT_EQ(build_environment(gpus, host, 0).at("ACCELERATE_LAUNCHED_FOR"), "cuda");
}

TEST(DeviceTypes, OldDriversOfRtx40GetNoDirectTransfers) {
  const auto machine = [](const std::string& driver, const std::string& model) {
    return machine_with("rtx",
                        {{"proc/driver/nvidia/gpus/0/information", "Model: \t NVIDIA GeForce " + model + "\n"},
                         {"proc/driver/nvidia/gpus/1/information", "Model: \t NVIDIA GeForce RTX 3090\n"},
                         {"proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " + driver +
                                                            "  Thu Jan 1 2024\nGCC version: 13.2.0\n"}});
  };
  EXPECT_TRUE(devices::peer_access_is_broken(machine("545.23.08", "RTX 4090")));
  EXPECT_FALSE(devices::peer_access_is_broken(machine("550.40.07", "RTX 4090")));
  EXPECT_FALSE(devices::peer_access_is_broken(machine("545.23.08", "RTX 3090")));
  const Host host{.environment = {{"NCCL_IB_DISABLE", "0"}}, .accelerators = 2, .peer_access_is_broken = true};
  const auto env = build_environment(job_of({.command = {"x"}}, host), host, 0);
  EXPECT_EQ(env.at("NCCL_P2P_DISABLE"), "1");
  EXPECT_FALSE(env.contains("NCCL_IB_DISABLE")) << "the caller has decided that";
}

TEST(LaunchOptions, ContradictionsAreNamed) {
  const Host host;
  const auto error = [&](LaunchOptions options) { return message_of([&] { job_of(options, host); }); };
  EXPECT_THAT(error({}), HasSubstr("no program was given"));
  EXPECT_THAT(error({.command = {"x"}, .module = true, .no_python = true}), HasSubstr("contradict"));
  EXPECT_THAT(error({.command = {"x"}, .num_processes = 0}), HasSubstr("at least 1 process"));
  EXPECT_THAT(error({.command = {"x"}, .num_processes = 4, .num_machines = 2}),
              HasSubstr("--machine_rank must be given"));
  EXPECT_THAT(error({.command = {"x"}, .num_processes = 4, .num_machines = 2, .machine_rank = 0}),
              HasSubstr("--main_process_ip must be given"));
  EXPECT_THAT(
      error({.command = {"x"}, .num_processes = 4, .num_machines = 2, .machine_rank = 0, .main_process_ip = "h"}),
      HasSubstr("--main_process_port must be given"));
  EXPECT_THAT(error({.command = {"x"},
                     .num_processes = 5,
                     .num_machines = 2,
                     .machine_rank = 0,
                     .main_process_ip = "h",
                     .main_process_port = 1}),
              HasSubstr("multiple of 2"));
  EXPECT_THAT(error({.command = {"x"},
                     .num_processes = 4,
                     .num_machines = 2,
                     .machine_rank = 2,
                     .main_process_ip = "h",
                     .main_process_port = 1}),
              HasSubstr("expected 0 to 1"));
  EXPECT_THAT(error({.command = {"x"}, .mixed_precision = "bf17"}), HasSubstr("Did you mean 'bf16'?"));
  EXPECT_THAT(error({.command = {"x"}, .main_process_port = 70000}), HasSubstr("70000"));
  EXPECT_THAT(error({.command = {"x"}, .tee = "4"}), HasSubstr("--tee"));
  for (const auto& [name, value] : {std::pair("fp8_interval", "0"),
                                    {"fp8_interval", "-2"},
                                    {"fp8_amax_history_len", "0"},
                                    {"fp8_amax_history_len", "-5"}}) {
    EXPECT_THAT(error({.command = {"x"}, .mixed_precision = "fp8", .settings = {{name, value}}}),
                HasSubstr("--" + std::string(name) + " is " + value + ", expected at least 1"));
    EXPECT_THAT(error({.command = {"x"}, .settings = {{name, value}}}), "(no error)") << "has no effect there";
  }
}

TEST(LaunchOptions, Fp8SettingsOfABackEndThatNobodyNamedAreRemarked) {
  const Job job = job_of({.command = {"x"},
                          .mixed_precision = "fp8",
                          .settings = {{"fp8_margin", "3"}, {"fp8_pad_inner_dim", "false"}, {"fp8_opt_level", "O1"}}},
                         Host());
  EXPECT_THAT(job.settings.remarks(),
              ElementsAre("--fp8_margin has no effect unless the program chooses te; give --fp8_backend te",
                          "--fp8_opt_level has no effect unless the program chooses msamp; give --fp8_backend msamp"));
}

TEST(LaunchOptions, OursBehindTheProgramAreRemarked) {
  const auto remarks = [](const std::vector<std::string>& command) {
    return job_of({.command = command}, Host()).remarks;
  };
  EXPECT_THAT(
      remarks({"train", "--num-processes=2", "--use_fsdp"}),
      ElementsAre("--num-processes=2 behind the program goes to the program; the launcher's own options stand in "
                  "front of it",
                  HasSubstr("--use_fsdp behind the program")));
  EXPECT_THAT(remarks({"train", "--mixed_precision", "fp16", "--processes", "2"}), testing::IsEmpty());
}

TEST(LaunchOptions, SettingsOfACompilerThatNobodyNamedAreRemarked) {
  const auto remarks = [](const LaunchOptions& options) { return job_of(options, Host()).settings.remarks(); };
  EXPECT_THAT(
      remarks({.command = {"x"}, .settings = {{"dynamo_mode", "max-autotune"}, {"dynamo_use_dynamic", "true"}}}),
      ElementsAre("--dynamo_mode has no effect without --dynamo_backend",
                  "--dynamo_use_dynamic has no effect without --dynamo_backend"));
  EXPECT_THAT(
      remarks({.command = {"x"}, .settings = {{"dynamo_backend", "inductor"}, {"dynamo_mode", "max-autotune"}}}),
      testing::IsEmpty());
}

TEST(LaunchOptions, AnExplicitDefaultIsAWord) {
  const Host host{.environment = {{"ACCELERATE_USE_CPU", "1"}, {"ACCELERATE_DEBUG_MODE", "1"}}};
  const auto settings = [&](const LaunchOptions& options) { return job_of(options, host).settings; };
  const Settings silent = settings({.command = {"x"}});
  EXPECT_TRUE(silent.on("cpu") && silent.on("debug"));
  EXPECT_EQ(silent.source("tee"), ValueSource::fallback);
  const Settings explicit_ones = settings({.command = {"x"},
                                           .cpu = false,
                                           .debug = false,
                                           .tee = "0",
                                           .max_restarts = 0,
                                           .role = "default",
                                           .monitor_interval = std::chrono::milliseconds(100)});
  EXPECT_FALSE(explicit_ones.on("cpu") || explicit_ones.on("debug"));
  for (const char* name : {"cpu", "debug", "tee", "max_restarts", "role", "monitor_interval"})
    EXPECT_EQ(explicit_ones.source(name), ValueSource::flag) << name;
}

TEST(LaunchOptions, FieldsAreShortForSettings) {
  const LaunchOptions options{.command = {"x"},
                              .module = true,
                              .num_processes = 3,
                              .mixed_precision = "bf16",
                              .num_cpu_threads_per_process = 5,
                              .log_dir = "logs",
                              .redirects = "0:1",
                              .tee = "3",
                              .max_restarts = 2,
                              .monitor_interval = std::chrono::milliseconds(1250),
                              .grace = std::chrono::seconds(3),
                              .settings = {{"role", "worker"}, {"tee", "1"}},
                              .dry_run = true};
  EXPECT_THAT(
      request_of(options).settings,
      ElementsAre(Pair("module", "true"), Pair("num_processes", "3"), Pair("mixed_precision", "bf16"),
                  Pair("num_cpu_threads_per_process", "5"), Pair("log_dir", "logs"), Pair("redirects", "0:1"),
                  Pair("tee", "3"), Pair("max_restarts", "2"), Pair("monitor_interval", "1.25"),
                  Pair("grace_seconds", "3"), Pair("dry_run", "true"), Pair("role", "worker"), Pair("tee", "1")));
  const LaunchOptions others{.no_python = true,
                             .num_machines = 2,
                             .machine_rank = 1,
                             .main_process_ip = "10.0.0.1",
                             .main_process_port = 29500,
                             .cpu = true,
                             .gradient_accumulation_steps = 4,
                             .debug = true,
                             .quiet = true,
                             .role = "worker"};
  EXPECT_THAT(request_of(others).settings,
              ElementsAre(Pair("no_python", "true"), Pair("num_machines", "2"), Pair("machine_rank", "1"),
                          Pair("main_process_ip", "10.0.0.1"), Pair("main_process_port", "29500"), Pair("cpu", "true"),
                          Pair("gradient_accumulation_steps", "4"), Pair("debug", "true"), Pair("quiet", "true"),
                          Pair("role", "worker")));
  const Job job = job_of(options, Host{});
  EXPECT_EQ(std::tuple(job.monitor_interval, job.grace, job.max_restarts, job.settings.text("tee")),
            std::tuple(std::chrono::milliseconds(1250), std::chrono::milliseconds(3000), 2, "1"));
}

TEST(SettingsTable, DefaultsHaveTheTypeOfTheirKind) {
  using config::Kind;
  for (const auto& table : config::command_tables())
    for (const auto& group : table.groups)
      for (const auto& option : group.options) {
        const config::Value value = config::default_value(option);
        if (value.is_null()) continue;
        const std::string what = std::string(table.name) + " --" + option.name;
        switch (option.kind) {
          case Kind::integer:
          case Kind::boolean:
            EXPECT_TRUE(value.is_number_integer()) << what;
            break;
          case Kind::number:
            EXPECT_TRUE(value.is_number_float()) << what;
            break;
          case Kind::flag:
          case Kind::unset:
          case Kind::truth:
            EXPECT_TRUE(value.is_boolean()) << what;
            break;
          case Kind::booleans:
          case Kind::append:
          case Kind::words:
            EXPECT_TRUE(value.is_array()) << what;
            break;
          case Kind::text:
            EXPECT_TRUE(value.is_string()) << what;
            break;
        }
        if (option.choices && value.is_string()) {
          EXPECT_THAT(option.choice_list(), testing::Contains(value.get<std::string>())) << what;
        }
      }
}

// ---------------------------------------------------------------- stopping

TEST(StopClock, AsksAfterPatienceAndKillsAfterGrace) {
  using std::chrono::milliseconds;
  const Clock::time_point start{};
  StopClock clock(milliseconds(100), milliseconds(1000));
  EXPECT_FALSE(clock.next());
  clock.failed(start);
  clock.failed(start + milliseconds(50));  // the first failure counts
  EXPECT_TRUE(clock.waits_for_failures());
  EXPECT_EQ(clock.due(start + milliseconds(99)), StopClock::Due::nothing);
  EXPECT_EQ(clock.due(start + milliseconds(100)), StopClock::Due::ask);
  clock.asked(start + milliseconds(100));
  EXPECT_FALSE(clock.waits_for_failures());
  clock.failed(start + milliseconds(200));  // of having been asked
  EXPECT_EQ(clock.next(), start + milliseconds(1100));
  EXPECT_EQ(clock.since_asked(start + milliseconds(350)), milliseconds(250));
  EXPECT_EQ(clock.due(start + milliseconds(1099)), StopClock::Due::nothing);
  EXPECT_EQ(clock.due(start + milliseconds(1100)), StopClock::Due::kill);
  clock.killed(start + milliseconds(1100));
  EXPECT_EQ(clock.due(start + milliseconds(5000)), StopClock::Due::nothing);
  StopClock saving(milliseconds(100), milliseconds(1000));
  saving.asked(start);
  saving.wait_on(start + milliseconds(1000));
  EXPECT_EQ(saving.due(start + milliseconds(1400)), StopClock::Due::nothing) << "ranks that save are looked at again";
  EXPECT_EQ(saving.due(start + milliseconds(1500)), StopClock::Due::kill);
  // A rank that only reports the end of another gives that one time; the failure of that one counts at once.
  StopClock patient(milliseconds(100), milliseconds(10000));
  patient.failed(start, /*only_of_a_peer=*/true);
  EXPECT_EQ(patient.due(start + milliseconds(2900)), StopClock::Due::nothing);
  EXPECT_EQ(patient.due(start + milliseconds(3000)), StopClock::Due::ask);
  patient.failed(start + milliseconds(1000));
  EXPECT_EQ(patient.due(start + milliseconds(1100)), StopClock::Due::ask);
}

TEST(Outcome, FirstFailure) {
  const Clock::time_point start{};
  const auto after = [&](int ms) { return start + std::chrono::milliseconds(ms); };
  const auto failed = [](int code, int signal, Clock::time_point at, bool asked = false) {
    return End{.exit_code = code, .signal = signal, .at = at, .asked = asked};
  };
  std::vector<RankRecord> ranks(4);
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].place = static_cast<int64_t>(i);
  ranks[0].end = failed(69, 0, after(0));  // its peer went away
  ranks[1].end = failed(1, 0, after(5));   // seen later, spoke first
  ranks[1].last_word = after(1);
  ranks[2].end = failed(1, 0, after(4));
  ranks[3].end = failed(0, SIGTERM, after(2), true);
  EXPECT_EQ(first_failure(ranks), 1u);
  ranks[2].end = failed(0, SIGKILL, after(9));  // nobody else causes that
  EXPECT_EQ(first_failure(ranks), 2u);
  for (auto& rank : ranks) rank.end = End{};
  EXPECT_EQ(first_failure(ranks), std::nullopt);
}

TEST(Outcome, RanksHaveSavedIfNoneHasFailedOtherwise) {
  Outcome outcome{.ranks = std::vector<RankRecord>(3), .first_failure = {}, .recalled = {}};
  for (auto& rank : outcome.ranks) rank.end = End{};
  EXPECT_FALSE(outcome.saved());
  EXPECT_EQ(outcome.exit_code(), 0);
  outcome.stop_signal = SIGTERM;
  outcome.ranks[1].end->exit_code = 75;
  EXPECT_TRUE(outcome.saved()) << "the others had nothing left to do";
  EXPECT_EQ(outcome.exit_code(), 75);
  outcome.ranks[2].end->signal = SIGKILL;
  EXPECT_FALSE(outcome.saved());
  EXPECT_EQ(outcome.exit_code(), 128 + SIGTERM);
  outcome.ranks[2].end = End{.exit_code = 1};
  EXPECT_FALSE(outcome.saved());
}

// ---------------------------------------------------------------- functions in several processes

TEST(LaunchFunction, RunsCopiesWithTheirRanks) {
  const std::string folder = support::scratch_dir();
  const auto name = [&](int64_t rank) { return folder + "/function_" + std::to_string(rank); };
  int changed = 0;
  notebook_launcher(
      [&] {
        changed = 1;  // in the copy
        std::ofstream(folder + "/function_" + std::getenv("RANK"))
            << std::getenv("LOCAL_RANK") << " of " << std::getenv("WORLD_SIZE") << " "
            << std::getenv("ACCELERATE_MIXED_PRECISION");
      },
      {.num_processes = 3, .mixed_precision = "bf16"});
  EXPECT_EQ(changed, 0);
  for (int64_t rank = 0; rank < 3; ++rank) {
    std::string text;
    std::ifstream in(name(rank));
    std::getline(in, text);
    EXPECT_EQ(text, std::to_string(rank) + " of 3 bf16");
  }
  debug_launcher([&] { std::ofstream(folder + "/debug") << std::getenv("ACCELERATE_USE_CPU"); }, 1);
  std::string cpu;
  std::ifstream(folder + "/debug") >> cpu;
  EXPECT_EQ(cpu, "True");
}

TEST(LaunchFunction, FirstFailureIsNamedAndTheOthersAreKilled) {
  const support::Deadline deadline;
  const auto message = message_of([] {
    launch_function(
        [] {
          if (std::string(std::getenv("RANK")) == "1") throw ConfigError("boom");
          ::sleep(1000);
        },
        {.num_processes = 3});
  });
  EXPECT_THAT(message, HasSubstr("rank 1 of 3 failed: boom"));
  EXPECT_THAT(message_of([] { launch_function([] { ::raise(SIGKILL); }, {.num_processes = 1}); }),
              HasSubstr("was killed by SIGKILL"));
}

/// The rank that learned of its peer's end is reported first, and is not the cause.
TEST(LaunchFunction, TheCauseIsNamedAndNotItsVictim) {
  const support::Deadline deadline;
  const auto message = message_of([] {
    launch_function(
        [] {
          if (std::string(std::getenv("RANK")) == "0") throw CommError("rank 1 is gone");
          ::usleep(300000);
          throw ConfigError("boom");
        },
        {.num_processes = 2});
  });
  EXPECT_THAT(message, HasSubstr("rank 1 of 2 failed: boom"));
}

TEST(LaunchFunction, OthersMayFailByThemselvesFirst) {
  const support::Deadline deadline;
  const std::string file = support::scratch_dir() + "/unwound";
  const auto message = message_of([&] {
    launch_function(
        [&] {
          if (std::string(std::getenv("RANK")) == "0") throw ConfigError("boom");
          ::usleep(500000);
          std::ofstream(file) << "in time";
          ::_exit(3);
        },
        {.num_processes = 2, .monitor_interval = std::chrono::minutes(1)});
  });
  EXPECT_THAT(message, HasSubstr("rank 0 of 2 failed: boom"));
  EXPECT_TRUE(fs::exists(file));
}

TEST(LaunchFunction, OtherChildrenAreLeftToTheProgram) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(7);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);  // it has ended, and can be waited for
  launch_function([] {}, {.num_processes = 2});
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(LaunchFunction, AnEndpointIsShortForAddressAndPort) {
  const std::string file = support::scratch_dir() + "/endpoint";
  const auto found = [&](const std::string& endpoint) {
    launch_function(
        [&] {
          std::ofstream(file) << std::getenv("MASTER_ADDR") << ':' << std::getenv("MASTER_PORT") << ' '
                              << std::getenv("TORCHELASTIC_RUN_ID");
        },
        {.num_processes = 1, .use_port = 29556, .rdzv_endpoint = endpoint, .rdzv_id = "night"});
    std::ifstream in(file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(found("localhost:29556"), "localhost:29556 night");
  EXPECT_EQ(found("localhost"), "localhost:29556 night");
}

TEST(LaunchFunction, Restarts) {
  const std::string file = support::scratch_dir() + "/restarts";
  const auto count = [&] {
    std::ifstream in(file);
    return std::string(std::istreambuf_iterator<char>(in), {}).size();
  };
  launch_function(
      [&] {
        std::ofstream(file, std::ios::app) << 'x';
        if (count() < 3) ::_exit(9);
      },
      {.num_processes = 1, .max_restarts = 5});
  EXPECT_EQ(count(), 3u);
  for (const int64_t restarts : {0, 2}) {
    fs::remove(file);
    const auto fails = [&] {
      std::ofstream(file, std::ios::app) << 'x';
      ::_exit(9);
    };
    const auto message = message_of([&] { launch_function(fails, {.num_processes = 1, .max_restarts = restarts}); });
    EXPECT_THAT(message, HasSubstr(restarts ? "exit code 9 (after 2 restarts)" : "exit code 9"));
    EXPECT_EQ(count(), static_cast<size_t>(1 + restarts));
  }
}

TEST(LaunchFunction, NumaAffinityBindsProcessesToSharesOfTheCores) {
  const auto mine = [] {
    std::set<int> cores;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    ::sched_getaffinity(0, sizeof(cpus), &cpus);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &cpus)) cores.insert(cpu);
    return cores;
  };
  if (mine().size() < 2) GTEST_SKIP() << "needs two cores";
  const std::string folder = support::scratch_dir();
  launch_function(
      [&] {
        const auto rank = std::stoll(std::getenv("LOCAL_RANK"));
        set_numa_affinity(rank, 2);
        std::ofstream out(folder + "/cores_" + std::to_string(rank));
        for (const int cpu : mine()) out << cpu << ' ';
      },
      {.num_processes = 2});
  std::set<int> all;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const auto share = cores_of(Topology::current(), {}, rank, 2);
    std::ifstream in(folder + "/cores_" + std::to_string(rank));
    const std::set<int> bound{std::istream_iterator<int>(in), {}};
    EXPECT_EQ(bound, std::set<int>(share.begin(), share.end())) << "rank " << rank;
    EXPECT_LT(bound.size(), mine().size());
    for (const int cpu : bound) EXPECT_TRUE(all.insert(cpu).second) << "core " << cpu << " is of both";
  }
  EXPECT_THAT(message_of([] { set_numa_affinity(2, 2); }), HasSubstr("local_rank is 2, expected 0 to 1"));
}

// Processes that ThreadSanitizer watches have one thread more, from their first fork or thread on.
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadOfTheSanitizer = true;
#else
constexpr bool kThreadOfTheSanitizer = false;
#endif

TEST(LaunchFunction, TwoMachinesWithRestarts) {
  if (kThreadOfTheSanitizer) GTEST_SKIP() << "ThreadSanitizer runs a thread of its own, and launch_function counts it";
  const std::string folder = support::scratch_dir() + "/machines_";
  std::vector<pid_t> machines;
  for (int64_t machine = 0; machine < 2; ++machine) {
    machines.push_back(::fork());
    if (machines.back() != 0) continue;
    launch_function(
        [&] {
          std::ofstream(folder + std::getenv("RANK"), std::ios::app)
              << std::getenv("LOCAL_RANK") << '/' << std::getenv("WORLD_SIZE") << ' ' << std::getenv("NODE_RANK") << ' '
              << std::getenv("MASTER_ADDR") << ':' << std::getenv("MASTER_PORT") << ' '
              << std::getenv("TORCHELASTIC_RESTART_COUNT") << std::endl;
          if (std::string(std::getenv("TORCHELASTIC_RESTART_COUNT")) == "0") {
            ::usleep(200000);  // until all have written
            ::_exit(1);
          }
        },
        {.num_processes = 2,
         .num_nodes = 2,
         .node_rank = machine,
         .master_addr = "localhost",
         .use_port = 29555,
         .max_restarts = 1});
    ::_exit(0);
  }
  for (const pid_t pid : machines) {
    int status = -1;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  for (int64_t rank = 0; rank < 4; ++rank) {
    std::ifstream in(folder + std::to_string(rank));
    const std::string line = std::to_string(rank % 2) + "/4 " + std::to_string(rank / 2) + " localhost:29555 ";
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), line + "0\n" + line + "1\n") << rank;
  }
}

TEST(LaunchFunction, ImpossibleOptions) {
  if (kThreadOfTheSanitizer) GTEST_SKIP() << "ThreadSanitizer runs a thread of its own, and launch_function counts it";
  const auto error = [](const FunctionLaunchOptions& options) {
    return message_of([&] { launch_function([] {}, options); });
  };
  EXPECT_THAT(error({.num_processes = 0}), HasSubstr("at least 1"));
  EXPECT_THAT(error({.num_nodes = 2}), HasSubstr("need master_addr and use_port"));
  EXPECT_THAT(error({.num_nodes = 2, .node_rank = 2}), HasSubstr("expected 0 to num_nodes - 1"));
  EXPECT_THAT(error({.mixed_precision = "bf61"}), HasSubstr("Did you mean 'bf16'?"));
  EXPECT_THAT(error({.rdzv_endpoint = "node0:1x"}), HasSubstr("rdzv_endpoint is 'node0:1x', expected a port"));
  EXPECT_THAT(error({.rdzv_endpoint = ":29500"}), HasSubstr("expected host or host:port"));
  EXPECT_THAT(error({.use_port = 29501, .rdzv_endpoint = "node0:29500"}), HasSubstr("use_port is 29501"));
  EXPECT_THAT(error({.master_addr = "node1", .rdzv_endpoint = "node0:29500"}), HasSubstr("master_addr is 'node1'"));
  EXPECT_THAT(error({.monitor_interval = std::chrono::milliseconds(-1)}), HasSubstr("monitor_interval"));
  EXPECT_THAT(error({.rdzv_backend = "c10d"}), HasSubstr("`accelerate launch --rdzv_backend c10d`"));
  EXPECT_THAT(error({.rdzv_conf = {{"timeout", "3"}}}), HasSubstr("rdzv_conf sets 'timeout'"));
  EXPECT_THAT(error({.log_line_prefix_template = "[${rank}]: "}), HasSubstr("ACCELERATE_LOG_RANK=true"));
  std::mutex mutex;
  mutex.lock();
  std::thread thread([&] { std::lock_guard guard(mutex); });
  EXPECT_THAT(error({}), HasSubstr("2 threads already"));
  mutex.unlock();
  thread.join();
}

TEST(PatchedEnvironment, PutsBackWhatWasThere) {
  ::setenv("ACCELERATE_TEST_A", "1", 1);
  ::unsetenv("ACCELERATE_TEST_B");
  {
    const auto patched = patch_environment({{"ACCELERATE_TEST_A", "2"}, {"ACCELERATE_TEST_B", "3"}});
    EXPECT_STREQ(std::getenv("ACCELERATE_TEST_A"), "2");
    EXPECT_STREQ(std::getenv("ACCELERATE_TEST_B"), "3");
  }
  EXPECT_STREQ(std::getenv("ACCELERATE_TEST_A"), "1");
  EXPECT_EQ(std::getenv("ACCELERATE_TEST_B"), nullptr);
}

// ---------------------------------------------------------------- small parts

TEST(NearestName, FindsTyposAndNothingFarAway) {
  const std::vector<std::string> names{"--num_processes", "--num_machines", "--cpu"};
  EXPECT_EQ(nearest_name("--num_proceses", names), "--num_processes");
  EXPECT_EQ(nearest_name("--NUM-MACHINE", names), "--num_machines");
  EXPECT_EQ(nearest_name("--cup", names), "--cpu");
  EXPECT_EQ(nearest_name("--learning_rate", names), std::nullopt);
}

TEST(Affinity, EqualSharesOfTheGpusNodeOrOfAllCores) {
  const Topology cpus{.nodes = {{0, {{0, 4}, {1, 5}}}, {1, {{2, 6}, {3, 7}}}}, .gpu_nodes = {}};
  EXPECT_THAT(cores_of(cpus, {}, 0, 2), ElementsAre(0, 4, 1, 5));
  EXPECT_THAT(cores_of(cpus, {}, 1, 2), ElementsAre(2, 6, 3, 7));
  EXPECT_THAT(cores_of(cpus, {}, 2, 3),
              ElementsAre(2, 6, 3, 7));                    // 4 cores for 3 ranks: 1, 1 and 2, and none is shared
  EXPECT_THAT(cores_of(cpus, {}, 1, 6), ElementsAre(4));   // more ranks than cores: threads are shared out
  EXPECT_THAT(cores_of(cpus, {}, 9, 10), ElementsAre(4));  // more ranks than cores take turns
  // Three GPUs on node 1, one on node 0; the fourth rank's GPU is unknown to the system.
  const Topology gpus{.nodes = cpus.nodes, .gpu_nodes = {1, 1, 0, -1}};
  EXPECT_THAT(cores_of(gpus, {}, 0, 3), ElementsAre(2, 6));
  EXPECT_THAT(cores_of(gpus, {}, 1, 3), ElementsAre(3, 7));
  EXPECT_THAT(cores_of(gpus, {}, 2, 3), ElementsAre(0, 4, 1, 5));
  EXPECT_THAT(cores_of(gpus, {2, 0}, 0, 2), ElementsAre(0, 4, 1, 5));
  EXPECT_THAT(cores_of(gpus, {3}, 0, 1), ElementsAre(0, 4, 1, 5, 2, 6, 3, 7));
  size_t here = 0;
  for (const auto& node : Topology::current().nodes) here += node.cores.size();
  EXPECT_GE(here, 1u);
}

TEST(Streams, BothNotations) {
  EXPECT_THAT(parse_streams("--tee", "3", 2), ElementsAre(3, 3));
  EXPECT_THAT(parse_streams("--tee", "0:1,2:3", 3), ElementsAre(1, 0, 3));
  for (const char* bad : {"", "4", "-1", "x", "0:4", "0:", ":1", "0:1,", "0:1;1:2", "1,2"}) {
    if (std::string(bad) == "0:1,") continue;  // a trailing comma is harmless
    EXPECT_THROW(parse_streams("--tee", bad, 2), ConfigError) << bad;
  }
  EXPECT_THAT(message_of([] { parse_streams("--tee", "2:1", 2); }), HasSubstr("local ranks 0 to 1"));
}

TEST(Ports, ChosenOneIsFreeAndABusyOneIsNamed) {
  std::set<int64_t> seen;
  for (int i = 0; i < 20; ++i) {
    const int64_t port = choose_port();
    EXPECT_GT(port, 0);
    EXPECT_NO_THROW(require_free_port(port));
    seen.insert(port);
  }
  EXPECT_GT(seen.size(), 10u);  // two launches at the same moment should not meet

  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  socklen_t length = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const auto message = message_of([&] { require_free_port(ntohs(address.sin_port)); });
  EXPECT_THAT(message, HasSubstr(std::to_string(ntohs(address.sin_port))));
  EXPECT_THAT(message, HasSubstr("already in use"));
  ::close(fd);
}

TEST(LastLines, KeepsTheEndAndTheLastStateOfABar) {
  EXPECT_THAT(last_lines("a\nb\nc\n", 2), ElementsAre("b", "c"));
  EXPECT_THAT(last_lines("a\n\n 10%\r 20%\r", 5), ElementsAre("a", " 20%"));
  EXPECT_THAT(last_lines("", 5), ElementsAre());
}

TEST(LastLines, LeaveBacktracesOut) {
  std::string text =
      "step 7\n  what():  mat1 and mat2 shapes cannot be multiplied\n"
      "Exception raised from meta at /src/LinearAlgebra.cpp:203 (most recent call first):\n";
  for (int i = 0; i < 128; ++i)
    text += "frame #" + std::to_string(i) + ": <unknown function> + 0x1234 (0x7f in lib.so)\n";
  EXPECT_THAT(last_lines(text, 20), ElementsAre("step 7", "  what():  mat1 and mat2 shapes cannot be multiplied"));
}

TEST(ErrorFile, BothOfTorchrunsFormats) {
  const std::string file = support::scratch_dir() + "/error.json";
  std::ofstream(file) << R"({"message": {"message": "RuntimeError: boom", "extraInfo": {}}})";
  EXPECT_EQ(error_file_message(file), "RuntimeError: boom");
  std::ofstream(file) << R"({"message": "boom"})";
  EXPECT_EQ(error_file_message(file), "boom");
  std::ofstream(file) << "{ not json";
  EXPECT_EQ(error_file_message(file), "");
  EXPECT_EQ(error_file_message(file + ".absent"), "");
}

// ---------------------------------------------------------------- forwarding of lines

/// Two ranks' streams and the file that they are forwarded to.
class Forwarding : public testing::Test {
 protected:
  Forwarding()
      : file_(::open((support::scratch_dir() + "/out").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600)),
        sink_(file_.get()) {}

  LineForwarder make(Fd& writer, const std::string& prefix = "") {
    Pipe pipe = make_pipe();
    writer = std::move(pipe.write);
    return LineForwarder(std::move(pipe.read), {.sink = &sink_, .prefix = prefix, .log = {}});
  }
  static void say(const Fd& writer, LineForwarder& forwarder, std::string_view text) {
    ASSERT_EQ(::write(writer.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    forwarder.read_some();
  }
  std::string shown() {
    sink_.flush();
    std::string text(1 << 20, '\0');
    text.resize(static_cast<size_t>(std::max<ssize_t>(0, ::pread(file_.get(), text.data(), text.size(), 0))));
    return text;
  }

  Fd file_;
  Sink sink_;
};

TEST_F(Forwarding, HalfALineWaitsForItsEnd) {
  Fd a_in, b_in;
  auto a = make(a_in), b = make(b_in);
  say(a_in, a, "hel");
  say(b_in, b, "other\nunfin");
  say(a_in, a, "lo\n");
  EXPECT_EQ(shown(), "other\nhello\n");
  b.finish();
  EXPECT_EQ(shown(), "other\nhello\nunfin\n");
}

TEST_F(Forwarding, AFullDiskEndsTheLogOnceAndNotTheLines) {
  Fd in;
  Pipe pipe = make_pipe();
  in = std::move(pipe.write);
  LineForwarder forwarder(
      std::move(pipe.read),
      {.sink = &sink_, .prefix = "", .log = Fd(::open("/dev/full", O_WRONLY)), .log_name = "logs/stdout.log"});
  say(in, forwarder, "one\n");
  say(in, forwarder, "two\n");
  EXPECT_EQ(shown(), "accelerate launch: the log file logs/stdout.log ends here: No space left on device\none\ntwo\n");
}

TEST_F(Forwarding, ProgressBarMovesAtOnceAndDoesNotSwallowLines) {
  Fd a_in, b_in;
  auto a = make(a_in), b = make(b_in);
  say(a_in, a, "\r 10%");
  EXPECT_EQ(shown(), "\r 10%");
  say(a_in, a, "\r 20%");
  say(b_in, b, "line of b\n");
  say(a_in, a, "\r 30%");
  say(a_in, a, "\r100%\n");
  say(a_in, a, "next");
  EXPECT_EQ(shown(), "\r 10%\r 20%\nline of b\n\r 30%\r100%\n");
}

TEST_F(Forwarding, PrefixBeforeEachLine) {
  Fd a_in;
  auto a = make(a_in, "[rank0]:");
  say(a_in, a, "one\n\ntw");
  say(a_in, a, "o\n");
  EXPECT_EQ(shown(), "[rank0]:one\n[rank0]:\n[rank0]:two\n");
}

TEST_F(Forwarding, EndlessLineIsBounded) {
  Fd a_in;
  auto a = make(a_in);
  const std::string piece(32 << 10, 'x');
  for (int i = 0; i < 40; ++i) {
    say(a_in, a, piece);
    sink_.flush();
  }
  EXPECT_GE(shown().size(), size_t{1} << 20);
}

/// The kernel gives SIGCHLD to a thread that does not block it, which loses it.
TEST(Launch, EndsInAProgramWithThreads) {
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  ::alarm(60);  // ends this process, by SIGALRM, if launch() never returns
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(accelerate::launch({.command = {"true"}, .num_processes = 2, .quiet = true}), 0);
  ::alarm(0);
  over = true;
  other.join();
}

}  // namespace
