// `accelerate launch --tpu` and tpu-config, with a PyTorch/XLA and a gcloud that write down what they are asked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "program.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class Tpu : public testing::Test {
 protected:
  Tpu() : folder_(fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name()) {
    write("train.py",
          "import os, sys\n\ndef main():\n    os.write(1, f\"main {sys.argv[1:]} {os.environ['FORK_LAUNCHED']} "
          "{os.environ.get('XLA_USE_BF16')} {os.environ.get('XLA_DOWNCAST_BF16')}\\n\".encode())\n    if 'fail' in "
          "sys.argv: sys.exit(5)\n\ndef other():\n    os.write(1, b'other\\n')\n");
    // As PyTorch/XLA does it: processes that import the caller's file again.
    write("xla/torch_xla/__init__.py", "");
    write("xla/torch_xla/distributed/__init__.py", "");
    write("xla/torch_xla/distributed/xla_multiprocessing.py",
          "import multiprocessing\n\ndef spawn(fn, args=()):\n    context = multiprocessing.get_context('spawn')\n    "
          "all = [context.Process(target=fn, args=(index, *args)) for index in range(2)]\n"
          "    [process.start() for process in all]\n    [process.join() for process in all]\n    raise "
          "SystemExit(max(process.exitcode for process in all))\n");
    // Workers are reached at the same time: each of them writes its line in one piece.
    const auto gcloud = write("bin/gcloud",
                              "#!/bin/sh\nline=$(printf '[%s]' \"$@\")\nprintf '%s\\n' \"$line\" >> \"$LOG\"\n"
                              "case $* in *wait*) sleep 60;; esac\nexit ${GCLOUD_EXIT:-0}\n");
    ::chmod(gcloud.c_str(), 0755);
  }

  fs::path write(const std::string& name, const std::string& content) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << content;
    return folder_ / name;
  }

  Program::Options options(std::vector<std::string> env = {}) const {
    env.insert(env.end(),
               {"PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin", "LOG=" + (folder_ / "gcloud.log").string(),
                "PYTHON=" + support::python().value_or("python3"), "PYTHONPATH=" + (folder_ / "xla").string()});
    return {.env = env, .input = "", .terminal = false, .read_output = true, .folder = folder_.string()};
  }
  Result run(const std::vector<std::string>& arguments, const std::vector<std::string>& env = {}) const {
    return launch(arguments, options(env));
  }

  std::string log() const {
    std::ifstream in(folder_ / "gcloud.log");
    return {std::istreambuf_iterator<char>(in), {}};
  }

  fs::path folder_;
};

TEST_F(Tpu, AFunctionIsCalledInEachOfXlasProcesses) {
  SKIP_WITHOUT_PYTHON();
  const auto result = run({"--tpu", "--mixed_precision", "bf16", "train.py", "--lr", "0.1"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "main ['--lr', '0.1'] 1 1 None\nmain ['--lr', '0.1'] 1 1 None\n");
  EXPECT_EQ(run({"--tpu", "--mixed_precision", "bf16", "--downcast_bf16", "train.py"}).out,
            "main [] 1 None 1\nmain [] 1 None 1\n");
  EXPECT_EQ(run({"--tpu", "--main_training_function", "other", "--module", "train"}).out, "other\nother\n");
  for (const auto& entry : fs::directory_iterator(support::scratch_dir()))
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("accelerate-xla"))) << "the starter goes with the job";
}

TEST_F(Tpu, WhatGoesWrongThereIsSaid) {
  SKIP_WITHOUT_PYTHON();
  EXPECT_EQ(run({"--tpu", "train.py", "fail"}).exit_code, 5);
  const auto function = run({"--tpu", "--main_training_function", "absent", "train.py"});
  EXPECT_EQ(function.exit_code, 64);
  EXPECT_THAT(function.err, AllOf(HasSubstr("has no function 'absent'"), HasSubstr("--main_training_function")));
  fs::remove_all(folder_ / "xla");
  const auto missing = run({"--tpu", "train.py"});
  EXPECT_EQ(missing.exit_code, 78);
  EXPECT_THAT(missing.err, AllOf(HasSubstr("--tpu needs PyTorch/XLA"), HasSubstr("Install torch_xla")));
}

TEST_F(Tpu, OnlyPythonRunsThere) {
  for (const auto& arguments : {std::vector<std::string>{"--tpu", "/bin/true"},
                                {"--tpu", "--no_python", "train.py"},
                                {"--tpu", "--tpu_cluster", "/bin/true"},
                                {"--tpu", "--dry_run", "/bin/true"}}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 64);
    EXPECT_THAT(result.err, HasSubstr("TPUs are driven by PyTorch/XLA"));
  }
  EXPECT_THAT(run({"--tpu", "absent.py"}).err, HasSubstr("there is no script 'absent.py'"));
  EXPECT_THAT(run({"--tpu", "--num_machines", "2", "train.py"}).err, HasSubstr("counted by Google"));
  EXPECT_THAT(run({"--tpu", "--tpu_cluster", "train.py"}).err, HasSubstr("whose name is not known"));
}

TEST_F(Tpu, ADryRunShowsTheCommand) {
  const auto result = run({"--tpu", "--dry_run", "--mixed_precision", "bf16", "--debug", "train.py", "a b"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("accelerate_xla.py script train.py main 'a b'\n"),
                                HasSubstr("  ACCELERATE_DEBUG_MODE=true\n"), HasSubstr("  FORK_LAUNCHED=1\n"),
                                HasSubstr("  XLA_USE_BF16=1\n")));
}

TEST_F(Tpu, APodsWorkersAreReachedByGcloud) {
  write("pod.yaml",
        "distributed_type: XLA\nnum_processes: 8\ntpu_name: pod\ntpu_zone: europe-west4-a\ntpu_use_cluster: "
        "true\ntpu_use_sudo: true\ntpu_env:\n- A=1\nmixed_precision: bf16\nmain_training_function: train\n");
  const std::string command =
      "sudo env XLA_USE_BF16=1 ACCELERATE_IN_TPU_POD=1 A=1 'B=x y' accelerate-launch --tpu --no_tpu_cluster "
      "--num_machines 1 --mixed_precision no --dynamo_backend no --num_processes 8 --main_training_function train "
      "train.py --text 'it'\\''s'";
  const auto planned = run({"--config_file", "pod.yaml", "--dry_run", "--env", "B=x y", "train.py", "--text", "it's"});
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_THAT(planned.out,
              AllOf(HasSubstr("launcher   tpu, on a pod\n"),
                    HasSubstr("gcloud alpha compute tpus tpu-vm ssh pod --zone europe-west4-a --command '")));
  EXPECT_EQ(log(), "");
  const auto result = run({"--config_file", "pod.yaml", "--env", "B=x y", "train.py", "--text", "it's"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(log(), "[alpha][compute][tpus][tpu-vm][ssh][pod][--zone][europe-west4-a][--command][" + command +
                       "][--worker][all]\n");
}

TEST_F(Tpu, NamedWorkersAreReachedOneByOne) {
  write("pod.yaml",
        "distributed_type: XLA\nnum_processes: 8\ntpu_name: pod\ntpu_zone: z\ntpu_use_cluster: true\ntpu_vm:\n- vm1\n- "
        "vm2\n");
  EXPECT_EQ(run({"--config_file", "pod.yaml", "train.py"}).exit_code, 0);
  EXPECT_THAT(
      log(), AllOf(HasSubstr("[compute][ssh][vm1][--zone][z][--command][env ACCELERATE_IN_TPU_POD=1 accelerate-launch"),
                   HasSubstr("[compute][ssh][vm2][--zone][z]")));
  const auto failed = run({"--config_file", "pod.yaml", "--vm", "mine", "train.py"}, {"GCLOUD_EXIT=3"});
  EXPECT_EQ(failed.exit_code, 3);
  EXPECT_THAT(failed.err, HasSubstr("gcloud for mine ended with exit code 3"));
  EXPECT_THAT(run({"--config_file", "pod.yaml", "--env", "nothing", "train.py"}).err, HasSubstr("expected NAME=VALUE"));
}

TEST_F(Tpu, APodWithoutGcloudIsAnError) {
  write("pod.yaml", "distributed_type: XLA\nnum_processes: 8\ntpu_name: pod\ntpu_use_cluster: true\n");
  const auto result = launch({"--config_file", "pod.yaml", "train.py"}, {.env = {"PATH=" + folder_.string()},
                                                                         .input = "",
                                                                         .terminal = false,
                                                                         .read_output = true,
                                                                         .folder = folder_.string()});
  EXPECT_EQ(result.exit_code, 78);
  EXPECT_THAT(result.err, HasSubstr("gcloud, which is not in PATH"));
}

TEST_F(Tpu, CtrlCEndsGcloud) {
  write("pod.yaml", "distributed_type: XLA\nnum_processes: 8\ntpu_name: wait\ntpu_use_cluster: true\n");
  Program program({accelerate_path(), "launch", "--config_file", "pod.yaml", "train.py"}, options());
  for (int i = 0; i < 1200 && log().empty(); ++i) program.wait_for("never", milliseconds(50));
  program.signal(SIGINT);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_THAT(result.err, HasSubstr("what runs on the pod's workers may go on"));
}

TEST_F(Tpu, TpuConfigRunsGcloud) {
  write("tpu.yaml",
        "distributed_type: XLA\nnum_processes: 8\ntpu_name: pod\ntpu_zone: zone\ncommands:\n- ls -l\n- pwd\n");
  const auto config = [&](std::vector<std::string> arguments, const std::vector<std::string>& env = {}) {
    arguments.insert(arguments.begin(), {accelerate_path(), "tpu-config", "--config_file", "tpu.yaml"});
    return Program(arguments, options(env)).wait();
  };
  EXPECT_EQ(config({}).exit_code, 0);
  EXPECT_EQ(log(),
            "[compute][tpus][tpu-vm][ssh][pod][--zone][zone][--command][cd /usr/share; ls -l; pwd][--worker][all]\n");
  EXPECT_EQ(
      config({"--debug"}).out,
      "Running gcloud compute tpus tpu-vm ssh pod --zone zone --command cd /usr/share; ls -l; pwd --worker all\n");
  EXPECT_EQ(config({}, {"GCLOUD_EXIT=4"}).exit_code, 4) << "what gcloud returns; the reference hides it";
}

}  // namespace
