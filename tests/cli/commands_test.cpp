// The commands beside `launch`: config files, questions, descriptions of the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string content(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Commands : public testing::Test {
 protected:
  Commands() : folder(support::scratch_dir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
  Result run(std::vector<std::string> arguments, const std::string& input = "",
             std::vector<std::string> env = {}) const {
    arguments.insert(arguments.begin(), accelerate_path());
    env.push_back("HF_HOME=" + folder.string());
    return Program(arguments, {.env = std::move(env), .input = input, .folder = folder}).wait();
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder / name) << text;
    return folder / name;
  }
  /// Config files as Python's Accelerate reads them, a line of JSON with sorted keys for each; "" when there is no
  /// Python to ask.
  std::string python_reads(const std::vector<std::string>& files) const {
    const char* python = std::getenv("ACCELERATE_TEST_PYTHON");
    if (!python) return "";
    std::vector<std::string> words{
        python, "-c",
        "import json,sys; from accelerate.commands.config.config_args import load_config_from_file as l\n"
        "for f in sys.argv[1:]: print(json.dumps(l(f).to_dict(), sort_keys=True))"};
    words.insert(words.end(), files.begin(), files.end());
    const auto result = Program(words).wait(milliseconds(150000));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  }

  const fs::path folder;
};

// ---------------------------------------------------------------- config files

TEST_F(Commands, ConfigDefaultWritesAFileThatLaunchTakes) {
  const auto made = run({"config", "default", "--mixed_precision", "bf16"}, "", {"CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  const fs::path file = folder / "accelerate/default_config.yaml";
  EXPECT_THAT(content(file),
              AllOf(HasSubstr("compute_environment: LOCAL_MACHINE\n"), HasSubstr("distributed_type: 'NO'\n"),
                    HasSubstr("mixed_precision: bf16\n"), HasSubstr("use_cpu: true\n")));
  EXPECT_THAT(run({"launch", "-q", "/bin/sh", "-c", "echo $ACCELERATE_MIXED_PRECISION $ACCELERATE_USE_CPU"}).out,
              "bf16 True\n");
  // It stays as it is.
  const auto again = run({"config", "default"});
  EXPECT_EQ(again.exit_code, 0);
  EXPECT_THAT(again.out, HasSubstr("is there already"));
  EXPECT_THAT(content(file), HasSubstr("bf16"));
  EXPECT_EQ(run({"config", "default", "--config_file", folder / "other.json"}).exit_code, 0);
  EXPECT_THAT(content(folder / "other.json"), StartsWith("{\n  \"compute_environment\": \"LOCAL_MACHINE\","));
}

/// The system reads arguments and variables up to their first NUL: what is behind it would be lost without a word.
TEST_F(Commands, NulBytesAreRefused) {
  const auto text = write("nul.yaml", std::string("distributed_type: 'NO'\n\0x: 1\n", 29));
  EXPECT_THAT(run({"launch", "--config_file", text, "/bin/true"}).err, HasSubstr("holds a NUL byte: it is not YAML"));
  const auto lines = write("commands", std::string("ls\n\0rm\n", 7));
  EXPECT_THAT(run({"tpu-config", "--debug", "--tpu_name", "a", "--tpu_zone", "b", "--command_file", lines}).err,
              HasSubstr("holds a NUL byte, where the shell would stop reading"));
  const auto escaped = write("escaped.yaml",
                             "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n"
                             "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: \"A\\0B\"\n");
  const auto result = run({"launch", "--config_file", escaped, "/bin/true"});
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_THAT(result.err, HasSubstr("has a NUL byte behind 'FSDP_TRANSFORMER_CLS_TO_WRAP=A'"));
}

TEST_F(Commands, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const auto file = write("c.yaml", "distributed_type: 'NO'\nmixed_precision: bf16\n");
  const auto precision = [&](std::vector<std::string> options, std::vector<std::string> env) {
    options.insert(options.begin(), {"launch", "-q"});
    options.insert(options.end(), {"/bin/sh", "-c", "echo $ACCELERATE_MIXED_PRECISION"});
    return run(options, "", std::move(env)).out;
  };
  EXPECT_EQ(precision({}, {}), "no\n");
  EXPECT_EQ(precision({"--config_file", file}, {}), "bf16\n");
  EXPECT_EQ(precision({"--config_file", file}, {"ACCELERATE_MIXED_PRECISION=fp16"}), "fp16\n");
  EXPECT_EQ(precision({"--config_file", file, "--mixed-precision=no"}, {"ACCELERATE_MIXED_PRECISION=fp16"}), "no\n");
  EXPECT_THAT(run({"launch", "/bin/true"}, "", {"ACCELERATE_MIXED_PRECISION=bf61"}).err,
              HasSubstr("the environment variable ACCELERATE_MIXED_PRECISION is 'bf61'"));
}

TEST_F(Commands, ConfigUpdateWritesOldKeysInTheNewForm) {
  const auto file =
      write("old.yaml",
            "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 4\ndynamo_backend: EAGER\nfsdp_config: {}\n");
  EXPECT_EQ(run({"config", "update", "--config_file", file}).exit_code, 0);
  EXPECT_EQ(content(file),
            "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\ndowncast_bf16: "
            "false\ndynamo_config:\n  dynamo_backend: EAGER\nenable_cpu_affinity: false\nmachine_rank: 0\n"
            "main_training_function: main\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 4\nrdzv_backend: "
            "static\nsame_network: false\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n");
  if (std::getenv("ACCELERATE_TEST_PYTHON")) {
    EXPECT_THAT(python_reads({file}), HasSubstr("\"dynamo_backend\": \"EAGER\""));
  }
}

TEST_F(Commands, MistakesInConfigFilesAreNamed) {
  const auto error = [&](const std::string& text) {
    const auto result = run({"launch", "--config_file", write("bad.yaml", text), "/bin/true"});
    EXPECT_EQ(result.exit_code, 64) << text;
    return result.err;
  };
  EXPECT_THAT(error("num_processes: 2\n"), HasSubstr("no 'distributed_type'"));
  EXPECT_THAT(error("distributed_type: 'NO'\nmixed_precison: bf16\n"),
              HasSubstr("Did you mean 'mixed_precision' for 'mixed_precison'?"));
  EXPECT_THAT(error("distributed_type: MULTI_GUP\n"), HasSubstr("Did you mean 'MULTI_GPU'?"));
  EXPECT_THAT(error("distributed_type: 'NO'\nnum_processes: two\n"), HasSubstr("expected a whole number"));
  EXPECT_THAT(error("distributed_type: 'NO'\n  x: [\n"), AllOf(HasSubstr("not YAML"), HasSubstr("line ")));
  EXPECT_THAT(error(""), HasSubstr("it is empty"));
  EXPECT_THAT(error("distributed_type: MULTI_GPU\n"), HasSubstr("give --num_processes"));
  EXPECT_THAT(error("distributed_type: MULTI_CPU\nnum_processes: 100000000\n"),
              AllOf(HasSubstr("100000000"), HasSubstr("expected at most")));
  EXPECT_THAT(error("distributed_type: MULTI_CPU\nnum_processes: -99999999999\n"), HasSubstr("-99999999999"));
  EXPECT_THAT(error("distributed_type: MULTI_CPU\nnum_processes: 18446744073709551615\n"),
              HasSubstr("expected a whole number"));
  EXPECT_THAT(error("distributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 9000000000\n"),
              HasSubstr("expected at most"));
  for (const char* deep : {"[", "{a: ", "- ", "? "})
    EXPECT_THAT(error("x: \n  " +
                      [&] {
                        std::string text;
                        for (int i = 0; i < 60'000; ++i) text += deep;
                        return text;
                      }()),
                HasSubstr("bad.yaml"))
        << deep;
  EXPECT_THAT(error(std::string(10 << 20, 'x')), HasSubstr("is longer than 256 KB"));
  std::string noise(10 << 20, '\0');
  std::mt19937 generator(1);
  for (auto& byte : noise) byte = static_cast<char>(generator());
  EXPECT_THAT(error(noise), HasSubstr("is longer than 256 KB"));
  EXPECT_THAT(error(noise.substr(0, 100000)), HasSubstr("bad.yaml"));
  EXPECT_THAT(error(","), HasSubstr("bad.yaml"));  // yaml-cpp's way of reading all documents never ended here
  EXPECT_THAT(error("---\ndistributed_type: 'NO'\n---\ndistributed_type: 'NO'\n"), HasSubstr("several documents"));
  EXPECT_THAT(error("a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, "
                    "*b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\n"
                    "e: &e [*d, *d, *d, *d, *d, *d, *d, *d]\n"),
              HasSubstr("more levels or entries"));
  const auto missing = run({"launch", "--config_file", "nowhere.yaml", "/bin/true"});
  EXPECT_EQ(missing.exit_code, 64);
  EXPECT_THAT(missing.err, HasSubstr("does not exist"));
  const auto unreadable = run({"launch", "--config_file", folder, "/bin/true"});
  EXPECT_EQ(unreadable.exit_code, 64);
  EXPECT_THAT(unreadable.err, HasSubstr("is a folder"));
}

TEST_F(Commands, ToFsdp2) {
  const auto file = write("one.yaml",
                          "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  "
                          "fsdp_use_orig_params: true\n  fsdp_offload_params: true\n");
  EXPECT_THAT(run({"to-fsdp2", "--config_file", file}).err, HasSubstr("--output_file"));
  const auto result = run({"to-fsdp2", "--config_file", file, "--output_file", folder / "two.yaml"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("fsdp_use_orig_params is left out"));
  EXPECT_EQ(content(folder / "two.yaml"),
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n  fsdp_reshard_after_forward: false\n  "
            "fsdp_version: 2\n");
  EXPECT_THAT(run({"to-fsdp2", "--config_file", file, "--output_file", folder / "two.yaml"}).err,
              HasSubstr("is there already"));
  EXPECT_EQ(run({"to-fsdp2", "--config_file", file, "--overwrite"}).exit_code, 0);
  EXPECT_THAT(content(file), HasSubstr("fsdp_version: 2"));
}

TEST_F(Commands, Env) {
  const auto file = write("c.yaml", "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n");
  const auto plain = run({"env", "--config_file", file});
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_THAT(plain.out, AllOf(HasSubstr("- `accelerate` version: "), HasSubstr("- LibTorch version: 2."),
                               HasSubstr("- System RAM: "), HasSubstr("- fsdp_config.fsdp_version: 2\n")));
  const auto json = run({"env", "--json"});
  EXPECT_THAT(json.out, AllOf(StartsWith("{\n"), HasSubstr("\"config file\": null")));
}

TEST_F(Commands, TpuConfigPrintsWhatItWouldRun) {
  const auto file =
      write("tpu.yaml", "distributed_type: XLA\nnum_processes: 8\ntpu_name: pod\ntpu_zone: zone\ncommands:\n- ls\n");
  EXPECT_EQ(run({"tpu-config", "--config_file", file, "--debug"}).out,
            "Running gcloud compute tpus tpu-vm ssh pod --zone zone --command cd /usr/share; ls --worker all\n");
  EXPECT_EQ(run({"tpu-config", "--config_file", file, "--command", "echo a", "--command", "echo b",
                 "--install_accelerate", "--accelerate_version", "1.0.0", "--use_alpha", "--debug"})
                .out,
            "Running gcloud alpha compute tpus tpu-vm ssh pod --zone zone --command cd /usr/share; pip install "
            "accelerate==1.0.0; echo a; echo b --worker all\n");
  EXPECT_THAT(run({"tpu-config", "--debug"}).err, HasSubstr("nothing to run"));
}

// ---------------------------------------------------------------- questions

TEST_F(Commands, QuestionsInLines) {
  // this machine, several GPUs, 1 machine, debug no, dynamo no, deepspeed no, fsdp yes, version 2, ... with mistakes
  // and a step back
  const std::string input =
      "0\n"          // where
      "4\n"          // several GPUs
      "zero\n1\n"    // machines: a mistake first
      "maybe\nno\n"  // debug: a mistake first
      "\n\nyes\n"    // dynamo, DeepSpeed, FSDP
      "1\n"          // version 2
      "\nyes\n"      // reshard, offload: yes ...
      "<\nno\n"      // ... no, back: no
      "0\nno\nBertLayer\n"
      "\n\nyes\n"  // state dict, RAM, checkpointing
      "yes\n"      // with inputs on the host
      "no\n"       // parallelism
      "4\n"        // processes
      "2\n";       // bf16
  const auto result = run({"config", "--config_file", folder / "asked.yaml"}, input);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("'zero' is not a whole number"), HasSubstr("'maybe' is neither yes nor no")));
  const std::string expected =
      "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: "
      "'no'\nenable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
      "  fsdp_activation_checkpointing_offload: true\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  "
      "fsdp_cpu_ram_efficient_loading: true\n  fsdp_offload_params: "
      "false\n  fsdp_reshard_after_forward: true\n"
      "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: BertLayer\n  fsdp_version: "
      "2\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\n"
      "num_machines: 1\nnum_processes: 4\nrdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: "
      "false\ntpu_use_sudo: false\nuse_cpu: false\n";
  EXPECT_EQ(content(folder / "asked.yaml"), expected);
  EXPECT_THAT(result.out, HasSubstr(expected));  // it is shown at the end
  if (std::getenv("ACCELERATE_TEST_PYTHON")) {
    EXPECT_THAT(python_reads({folder / "asked.yaml"}),
                AllOf(HasSubstr("\"fsdp_version\": 2"), HasSubstr("\"distributed_type\": \"FSDP\"")));
  }
}

/// Each file of examples/config_yaml_templates is read without a remark, and does what its comment says.
TEST_F(Commands, TemplatesOfConfigFilesAct) {
  const std::map<std::string, std::vector<std::string>> acts = {
      {"cpu.yaml", {"processes  2 of 2", "ACCELERATE_USE_CPU=True"}},
      {"single_gpu.yaml", {"processes  1 of 1", "CUDA_VISIBLE_DEVICES=0", "ACCELERATE_MIXED_PRECISION=bf16"}},
      {"multi_gpu.yaml", {"processes  8 of 8", "ACCELERATE_LAUNCHED_FOR=cuda", "ACCELERATE_CPU_AFFINITY=1"}},
      {"multi_node.yaml", {"processes  8 of 16 on machine 0 of 2", "meeting at 192.168.0.1:29500"}},
      {"fsdp.yaml", {"FSDP_VERSION=2", "FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP", "ACCELERATE_USE_FSDP=true"}},
      {"hybrid_fsdp.yaml",
       {"processes  8 of 16", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2", "PARALLELISM_CONFIG_DP_SHARD_SIZE=8"}},
      {"fp8.yaml", {"ACCELERATE_MIXED_PRECISION=fp8", "ACCELERATE_FP8_BACKEND=AO", "ACCELERATE_USE_FSDP=true"}}};
  std::set<std::string> there, known;
  const auto templates = fs::path(ACCELERATE_SOURCE_DIR) / "examples" / "config_yaml_templates";
  for (const auto& entry : fs::directory_iterator(templates))
    if (entry.path().extension() == ".yaml") there.insert(entry.path().filename());
  for (const auto& [name, lines] : acts) {
    known.insert(name);
    const auto result =
        run({"launch", "--config_file", templates / name, "--dry_run", "/bin/true"}, "", {"CUDA_VISIBLE_DEVICES="});
    EXPECT_EQ(result.exit_code, 0) << name;
    EXPECT_EQ(result.err, "") << name;
    for (const auto& line : lines) EXPECT_THAT(result.out, HasSubstr(line)) << name;
  }
  EXPECT_EQ(there, known);
}

/// Answers for every kind of training, up to the end; what the file must hold.
TEST_F(Commands, QuestionsOfEveryKind) {
  const struct {
    const char* what;
    const char* answers;
    std::vector<std::string> holds;
  } kinds[] = {
      {"one process", "0\n0\nno\n\nno\nall\n\nno\n", {"distributed_type: 'NO'", "gpu_ids: all", "use_cpu: false"}},
      {"CPU with mpirun",
       "0\n1\n2\n1\n10.0.0.1\n2222\nyes\nno\nyes\n/h\nno\n4\nno\n",
       {"distributed_type: MULTI_CPU", "mpirun_hostfile: /h", "machine_rank: 1", "main_process_port: 2222",
        "use_cpu: true", "num_processes: 4"}},
      {"several GPUs",
       "0\n4\n1\nno\nno\nno\nno\nno\n2\n0,1\nyes\nfp16\n",
       {"distributed_type: MULTI_GPU", "gpu_ids: 0,1", "enable_cpu_affinity: true", "mixed_precision: fp16"}},
      {"DeepSpeed",
       "0\n4\n1\nno\nno\nyes\nno\n3\ncpu\nnvme\n/n\n4\nyes\n0.5\nyes\nyes\nno\n2\nbf16\n",
       {"distributed_type: DEEPSPEED", "zero_stage: 3", "offload_param_nvme_path: /n", "gradient_accumulation_steps: 4",
        "gradient_clipping: 0.5", "zero3_save_16bit_model: true", "zero3_init_flag: true"}},
      {"DeepSpeed with its file",
       "0\n4\n1\nno\nno\nyes\nyes\nds.json\nno\nno\n2\n",
       {"deepspeed_config_file: ds.json", "zero3_init_flag: false"}},
      {"FSDP 1",
       "0\n4\n1\nno\nno\nno\nyes\n0\nFULL_SHARD\nno\n1\n1000\n0\n0\nno\nyes\nno\nyes\nno\n2\nno\n",
       {"fsdp_version: 1", "fsdp_sharding_strategy: FULL_SHARD", "fsdp_min_num_params: 1000",
        "fsdp_backward_prefetch: BACKWARD_PRE", "fsdp_sync_module_states: true"}},
      {"parallelism",
       "0\n4\n1\nno\nno\nno\nyes\n1\nyes\nno\n2\n0\nyes\nno\nyes\n1\n2\n1\n2\nalltoall\n4\nno\n",
       {"parallelism_config_dp_shard_size: 2", "parallelism_config_cp_size: 2",
        "parallelism_config_cp_comm_strategy: alltoall"}},
      {"FSDP on the CPU",
       "0\n1\n1\nno\nno\nno\nyes\n1\nyes\nno\n2\n0\nno\nno\nno\n2\nno\n",
       {"distributed_type: FSDP", "use_cpu: true", "num_processes: 2", "fsdp_version: 2"}},
      {"Megatron-LM",
       "0\n4\n1\nno\nno\nno\nno\nyes\n2\nyes\n2\n4\nno\nyes\n0.5\n4\nno\n",
       {"distributed_type: MEGATRON_LM", "megatron_lm_tp_degree: 2", "megatron_lm_sequence_parallelism: true",
        "megatron_lm_num_micro_batches: 4", "megatron_lm_gradient_clipping: 0.5"}},
      {"TPU",
       "0\n10\nno\n8\ntrain\nyes\npod\nzone\nno\nyes\nno\nls\nyes\npwd\nno\nvm1,vm2\nA=1\n",
       {"distributed_type: XLA", "main_training_function: train", "commands:\n- ls\n- pwd", "tpu_vm:\n- vm1\n- vm2",
        "tpu_env:\n- A=1", "tpu_name: pod"}},
      {"fp8",
       "0\n0\nno\nno\nno\nall\nno\nfp8\n1\nno\n0\n1\nE4M3\n16\nmax\nyes\nyes\nno\nno\n",
       {"backend: TE", "fp8_format: E4M3", "amax_history_len: 16", "amax_compute_algo: max",
        "override_linear_precision:\n  - true\n  - false\n  - false"}},
      {"dynamo",
       "0\n0\nyes\nyes\ninductor\nyes\nmax-autotune\nno\nyes\nno\nno\nno\n",
       {"dynamo_backend: INDUCTOR", "dynamo_mode: max-autotune", "dynamo_use_dynamic: true"}},
      {"SageMaker",
       "1\n0\ndefault\nus-east-1\n0\nrole\nno\nno\nno\n1\nno\n0\nno\n2\nbf16\n",
       {"compute_environment: AMAZON_SAGEMAKER", "distributed_type: DATA_PARALLEL", "ec2_instance_type: ml.p3.16xlarge",
        "iam_role_name: role", "num_machines: 2"}},
  };
  std::vector<std::string> files;
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.what);
    files.push_back(folder / (std::to_string(files.size()) + ".yaml"));
    const auto result = run({"config", "--config_file", files.back()}, kind.answers, {"CUDA_VISIBLE_DEVICES="});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    for (const auto& text : kind.holds) EXPECT_THAT(content(files.back()), HasSubstr(text + "\n"));
  }
  if (std::getenv("ACCELERATE_TEST_PYTHON")) {
    const std::string read = python_reads(files);
    EXPECT_EQ(static_cast<size_t>(std::count(read.begin(), read.end(), '\n')), files.size());
  }
}

TEST_F(Commands, FsdpOnTheCpuIsLaunchedThere) {
  const auto file = write("cpu.yaml", "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n");
  EXPECT_THAT(run({"launch", "--config_file", file, "--dry_run", "/bin/true"}).out,
              AllOf(HasSubstr("ACCELERATE_USE_CPU=True\n"), HasSubstr("ACCELERATE_USE_FSDP=true\n")));
}

TEST_F(Commands, QuestionsSayWhatCppProgramsCantUse) {
  EXPECT_THAT(run({"config"}, "0\n2\n1\nno\n").out, HasSubstr("this library has no back end xccl"));
  EXPECT_THAT(run({"config"}, "0\n4\n1\nno\n").out, Not(HasSubstr("has no back end")));
}

TEST_F(Commands, QuestionsEndWithTheInput) {
  const auto result = run({"config", "--config_file", folder / "asked.yaml"}, "0\n");
  EXPECT_EQ(result.exit_code, 64);
  EXPECT_THAT(result.err, HasSubstr("the input ended"));
  EXPECT_FALSE(fs::exists(folder / "asked.yaml"));
}

TEST_F(Commands, QuestionsOnATerminal) {
  Program program({accelerate_path(), "config", "--config_file", folder / "asked.yaml"},
                  {.env = {"HF_HOME=" + folder.string()}, .terminal = true});
  const std::string up = "\x1b[A", down = "\x1b[B", left = "\x1b[D";
  ASSERT_TRUE(program.wait_for("On Amazon SageMaker"));
  program.type("\n");
  ASSERT_TRUE(program.wait_for("TPU"));
  program.type(down + down + up + "\n");  // several CPU processes
  ASSERT_TRUE(program.wait_for("How many machines"));
  program.type("<\n");  // back to the menu before
  program.type("1\n");
  program.type("\n");  // one machine
  ASSERT_TRUE(program.wait_for("compared before each collective"));
  program.type("\n");
  ASSERT_TRUE(program.wait_for("mpirun start"));
  program.type(down + left);  // back to the question before, and on again
  program.type("\n");
  program.type("\n");
  ASSERT_TRUE(program.wait_for("torch.compile"));
  program.type("\n");
  ASSERT_TRUE(program.wait_for("(FSDP)"));
  program.type("\n");
  ASSERT_TRUE(program.wait_for("processes on all machines"));
  program.type("3\n");
  ASSERT_TRUE(program.wait_for("number format"));
  program.type("2\n");
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_THAT(content(folder / "asked.yaml"),
              AllOf(HasSubstr("distributed_type: MULTI_CPU\n"), HasSubstr("num_processes: 3\n"),
                    HasSubstr("mixed_precision: bf16\n")));
}

TEST_F(Commands, MenusTakeNumbersAndWords) {
  // The same answers as without a terminal: numbers of two digits, beginnings and whole words.
  for (const std::string answers :
       {"0\n10\nno\n8\ntrain\nyes\npod\nzone\nno\nyes\nno\nls\nyes\npwd\nno\nvm1,vm2\nA=1\n",
        "1\n0\ndefault\nus-east-1\n0\nrole\nno\nno\nno\n1\nno\n0\nno\n2\nbf16\n",
        "0\n4\n1\nno\nno\nno\nyes\n0\nFULL_SHARD\nno\n1\n1000\n0\n0\nno\nyes\nno\ny\nno\n2\nno\n"}) {
    fs::remove(folder / "lines.yaml");
    fs::remove(folder / "menus.yaml");
    EXPECT_EQ(run({"config", "--config_file", folder / "lines.yaml"}, answers, {"CUDA_VISIBLE_DEVICES="}).exit_code, 0);
    Program program({accelerate_path(), "config", "--config_file", folder / "menus.yaml"},
                    {.env = {"HF_HOME=" + folder.string(), "CUDA_VISIBLE_DEVICES="}, .terminal = true});
    ASSERT_TRUE(program.wait_for("On Amazon SageMaker"));
    std::istringstream lines(answers);
    for (std::string answer; std::getline(lines, answer);) {
      program.type(answer + "\n");
      program.wait_for("\x1b[never", milliseconds(100));  // until the next question stands there
    }
    EXPECT_EQ(program.wait().exit_code, 0);
    EXPECT_EQ(content(folder / "menus.yaml"), content(folder / "lines.yaml"));
  }
}

TEST_F(Commands, CtrlCInAMenuWritesNothing) {
  Program program({accelerate_path(), "config", "--config_file", folder / "asked.yaml"}, {.terminal = true});
  ASSERT_TRUE(program.wait_for("On Amazon SageMaker"));
  program.type("\x03");
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_FALSE(fs::exists(folder / "asked.yaml"));
}

// ---------------------------------------------------------------- the program describes itself

TEST_F(Commands, SettingsPageIsUpToDate) {
  const auto page = run({"docs", "markdown"});
  EXPECT_EQ(page.exit_code, 0);
  EXPECT_EQ(content(std::string(ACCELERATE_SOURCE_DIR) + "/docs/settings.md"), page.out)
      << "write it again: accelerate docs markdown > docs/settings.md";
}

TEST_F(Commands, CompletionsAreScriptsOfTheirShells) {
  const auto bash = run({"completion", "bash"});
  EXPECT_THAT(bash.out, AllOf(HasSubstr("--fsdp_version"), HasSubstr("to-fsdp2")));
  const auto script = write(
      "complete.bash",
      bash.out +
          "COMP_WORDS=(accelerate launch --fsdp_v); COMP_CWORD=2; _accelerate; echo \"${COMPREPLY[@]}\"\n"
          "COMP_WORDS=(accelerate launch --mixed_precision b); COMP_CWORD=3; _accelerate; echo \"${COMPREPLY[@]}\"\n"
          "COMP_WORDS=(accelerate to); COMP_CWORD=1; _accelerate; echo \"${COMPREPLY[@]}\"\n");
  EXPECT_EQ(Program({"/bin/bash", script}).wait().out, "--fsdp_version\nbf16\nto-fsdp2\n");
  EXPECT_THAT(run({"completion", "zsh"}).out,
              AllOf(StartsWith("#compdef accelerate\n"), HasSubstr("'--fsdp_version[")));
  EXPECT_THAT(run({"completion", "fish"}).out, HasSubstr("-l fsdp_version"));
  EXPECT_THAT(run({"completion", "tcsh"}).err, HasSubstr("expected one of: bash, zsh, fish"));
}

TEST_F(Commands, CompletionsInZsh) {
  ASSERT_EQ(::access("/usr/bin/zsh", X_OK), 0) << "there is no zsh here (Debian: zsh), which scripts/test.sh installs";
  // zsh completes on a terminal only: one of its own, from which is read until it shows what is expected.
  write("_accelerate", run({"completion", "zsh"}).out);
  const auto script = write(
      "complete.zsh",
      "zmodload zsh/zpty\nzpty z /usr/bin/zsh -f -i\n"
      "zpty -w z \"PS1=; fpath=(" +
          folder.string() +
          " \\$fpath); autoload -Uz compinit; compinit -u -D; bindkey '^I' complete-word; print re''ady\"\nzpty -r z "
          "out '*ready*'\n"
          "expect() { zpty -w -n z \"$1\"$'\\t'; zpty -r z out \"*$2*\"; print -r -- \"$2\"; zpty -w -n z $'\\x15' }\n"
          "expect 'accelerate to-' to-fsdp2\nexpect 'accelerate launch --fsdp_vers' --fsdp_version\nexpect 'accelerate "
          "launch --mixed_precision bf' bf16\nzpty -d z\n");
  EXPECT_EQ(Program(std::vector<std::string>{"/usr/bin/zsh", "-f", script}).wait().out,
            "to-fsdp2\n--fsdp_version\nbf16\n");
}

TEST_F(Commands, CompletionsInFish) {
  ASSERT_EQ(::access("/usr/bin/fish", X_OK), 0)
      << "there is no fish here (Debian: fish), which scripts/test.sh installs";
  const std::string here = folder;
  const auto script = write("accelerate.fish", run({"completion", "fish"}).out);
  const auto offered = [&](const std::string& line) {
    return Program(std::vector<std::string>{"/usr/bin/fish", "--no-config", "-c",
                                            "source " + script + "; complete -C '" + line + "'"},
                   Program::Options{.env = {"HOME=" + here, "XDG_CONFIG_HOME=" + here, "XDG_DATA_HOME=" + here},
                                    .input = "",
                                    .folder = here})
        .wait()
        .out;
  };
  EXPECT_THAT(offered("accelerate to-"), StartsWith("to-fsdp2"));
  EXPECT_THAT(offered("accelerate launch --fsdp_vers"), StartsWith("--fsdp_version"));
  EXPECT_THAT(offered("accelerate launch --mixed_precision bf"), StartsWith("bf16"));
}

TEST_F(Commands, ManualPage) {
  EXPECT_THAT(run({"docs", "man"}).out,
              AllOf(StartsWith(".TH ACCELERATE 1"), HasSubstr(".B \\-\\-fsdp_version"), HasSubstr("\n69\n")));
}

TEST_F(Commands, NamesWithADash) {
  const auto alias = accelerate_path() + "-launch";
  EXPECT_EQ(Program({alias, "-q", "/bin/sh", "-c", "exit 3"}).wait().exit_code, 3);
  for (const std::string name : {"config", "env", "estimate-memory", "test", "tpu-config"}) {
    const auto help = Program({accelerate_path() + "-" + name, "--help"}).wait();
    EXPECT_EQ(help.exit_code, 0) << name << help.err;
    EXPECT_THAT(help.out, HasSubstr("accelerate " + name)) << name;
  }
}

TEST_F(Commands, MistypedCommands) {
  EXPECT_THAT(run({"confg"}).err, HasSubstr("Did you mean 'config'?"));
  EXPECT_THAT(run({"env", "--jsn"}).err, HasSubstr("Did you mean '--json'?"));
  EXPECT_THAT(run({"env", "more"}).err, HasSubstr("nothing that 'more' could mean"));
}

// ---------------------------------------------------------------- what launch does with them

TEST_F(Commands, FlagsWithoutEffectAreNamed) {
  const auto result = run({"launch", "--fsdp_offload_params", "true", "--zero_stage", "3", "--rdzv_conf", "timeout=5",
                           "--same_network", "/bin/true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("--fsdp_offload_params has no effect without --use_fsdp"),
                                HasSubstr("--zero_stage has no effect without --use_deepspeed"),
                                HasSubstr("--rdzv_conf has no effect"), HasSubstr("--same_network has no effect")));
  const auto several = write("several.yaml", "num_processes: 2\nnum_machines: 1\nsame_network: true\n");
  EXPECT_THAT(run({"launch", "--config_file", several, "--dry_run", "/bin/true"}).err, Not(HasSubstr("same_network")))
      << "`accelerate config` writes it into every file";
}

TEST_F(Commands, RetiredSettingsAreReadAndSayWhatHappensInstead) {
  const auto file = write("ipex.yaml",
                          "distributed_type: MULTI_CPU\nipex_config:\n  ipex: true\n  use_xpu: false\nmpirun_config:\n"
                          "  mpirun_ccl: '1'\nnum_processes: 2\nuse_cpu: true\n");
  const auto result = run({"launch", "--config_file", file, "--dry_run", "/bin/true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("'ipex' in the config file " + file + " is retired and has no effect."),
                                HasSubstr("'mpirun_ccl' in the config file"), Not(HasSubstr("use_xpu"))));
  const auto flags = run({"launch", "--ipex", "--use_xpu", "--dry_run", "/bin/true"});
  EXPECT_EQ(flags.exit_code, 0);
  EXPECT_THAT(flags.err, AllOf(HasSubstr("--ipex is retired"), HasSubstr("--use_xpu is retired")));
  EXPECT_THAT(run({"launch", "--dry_run", "/bin/true"}).err, Not(HasSubstr("retired")));
}

TEST_F(Commands, WhatTheDocumentationCallsSettingsIsRead) {
  const auto fp8 = write("fp8.yaml",
                         "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config:\n  amax_compute_algorithm: max\n"
                         "  amax_history_length: 512\n  backend: TE\n  override_linear_precision: false\n");
  const auto plan = run({"launch", "--config_file", fp8, "--dry_run", "/bin/true"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_THAT(plan.out, AllOf(HasSubstr("ACCELERATE_FP8_OVERRIDE_FPROP=False\n"),
                              HasSubstr("ACCELERATE_FP8_OVERRIDE_WGRAD=False\n"),
                              HasSubstr("ACCELERATE_FP8_AMAX_HISTORY_LEN=512\n")));
  const auto margin = run({"launch", "--mixed_precision", "fp8", "--fp8_backend", "ao", "--fp8_margin", "1",
                           "--fp8_pad_inner_dim", "false", "--dry_run", "/bin/true"});
  EXPECT_THAT(margin.err, AllOf(HasSubstr("--fp8_margin has no effect with --fp8_backend ao, but with te"),
                                Not(HasSubstr("--fp8_pad_inner_dim"))));
  EXPECT_THAT(margin.out, HasSubstr("ACCELERATE_FP8_MARGIN=1\n"));
  EXPECT_THAT(run({"launch", "--mixed_precision", "fp8", "--fp8_backend", "TE", "--dry_run", "/bin/true"}).out,
              AllOf(HasSubstr("ACCELERATE_MIXED_PRECISION=fp8\n"), HasSubstr("ACCELERATE_FP8_BACKEND=te\n")))
      << "letters as in files and variables, values as ever";
  EXPECT_THAT(run({"launch", "--use_fsdp", "--fsdp_backward_prefetch_policy", "BACKWARD_POST", "--num_processes", "2",
                   "--dry_run", "/bin/true"})
                  .out,
              HasSubstr("FSDP_BACKWARD_PREFETCH=BACKWARD_POST\n"));
}

// Files are shared with other programs and versions: what nobody reads ends no job, and is spoken of.
TEST_F(Commands, SectionsOfConfigFilesMayHoldWhatNobodyReads) {
  const auto plan = [&](const std::string& text, std::vector<std::string> options = {}) {
    options.insert(options.begin(), {"launch", "--config_file", write("c.yaml", text)});
    options.insert(options.end(), {"--dry_run", "/bin/true"});
    const auto result = run(options);
    EXPECT_EQ(result.exit_code, 0) << text << result.err;
    return result;
  };
  const auto unknown =
      plan("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_verison: 2\n  other: [1]\n");
  EXPECT_THAT(unknown.err, AllOf(HasSubstr("'fsdp_verison' in fsdp_config"), HasSubstr("Did you mean 'fsdp_version'?"),
                                 HasSubstr("'other' in fsdp_config")));
  const auto left_over = plan(
      "distributed_type: MULTI_CPU\nnum_processes: 2\ndeepspeed_config:\n  gradient_accumulation_steps: four\n"
      "fsdp_config: {}\nmegatron_lm_config: null\n");
  EXPECT_THAT(left_over.err, AllOf(HasSubstr("'deepspeed_config' in the config file"), HasSubstr("has no effect"),
                                   Not(HasSubstr("fsdp_config")), Not(HasSubstr("megatron"))));
  EXPECT_THAT(left_over.out, Not(HasSubstr("GRADIENT_ACCUMULATION")));
  // Some settings are not read on one machine.
  EXPECT_THAT(plan("distributed_type: MULTI_CPU\nnum_processes: 2\nmachine_rank: one\ntpu_use_sudo: perhaps\n").out,
              HasSubstr("processes  2 of 2"));
  EXPECT_THAT(plan("distributed_type: MULTI_CPU\nnum_processes: 2\nmachine_rank: 1\n").out,
              HasSubstr("GROUP_RANK=0\n"));
  const std::string deepspeed = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n";
  EXPECT_THAT(
      plan(deepspeed + "  gradient_accumulation_steps: auto\n  gradient_clipping: auto\n  zero_stage: null\n").out,
      AllOf(HasSubstr("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=auto\n"),
            HasSubstr("ACCELERATE_GRADIENT_CLIPPING=auto\n"), Not(HasSubstr("ZERO_STAGE"))));
  EXPECT_THAT(plan(deepspeed + "  gradient_accumulation_steps: 4\n").out,
              HasSubstr("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4\n"));
  for (const char* number : {"1e8", "1.0e+8", "100000000", "null"})
    EXPECT_THAT(plan(std::string("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_min_num_params: ") +
                     number + "\n")
                    .out,
                HasSubstr("FSDP_MIN_NUM_PARAMS=100000000\n"))
        << number;
}

TEST_F(Commands, ToFsdp2KeepsWhatSaysNothing) {
  const auto file = write("one.yaml",
                          "deepspeed_config: {}\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: "
                          "FULL_SHARD\nmain_process_ip: null\n");
  EXPECT_EQ(run({"to-fsdp2", "--config_file", file, "--overwrite"}).exit_code, 0);
  EXPECT_EQ(content(file),
            "deepspeed_config: {}\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_reshard_after_forward: true\n  "
            "fsdp_version: 2\nmain_process_ip: null\n");
}

// Torchrun has no list of these keys, so files and recipes have its own words among them.
TEST_F(Commands, TorchrunsWordsInRdzvConf) {
  const auto plan = [&](std::vector<std::string> options) {
    options.insert(options.begin(), "launch");
    options.insert(options.end(), {"--dry_run", "/bin/true"});
    const auto result = run(options);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  };
  const auto all = plan({"--num_machines", "2", "--num_processes", "4", "--rdzv_conf",
                         "rdzv_backend=c10d,rdzv_endpoint=10.0.0.1:6000,max_restarts=3"});
  EXPECT_THAT(all.out, AllOf(HasSubstr("meeting at 10.0.0.1:6000"), HasSubstr("TORCHELASTIC_MAX_RESTARTS=3\n")));
  const auto weaker = plan({"--num_machines", "2", "--num_processes", "4", "--machine_rank", "1", "--main_process_ip",
                            "10.0.0.1", "--main_process_port", "6000", "--max_restarts", "0", "--rdzv_conf",
                            "rdzv_backend=c10d,rdzv_endpoint=10.0.0.1:6000,max_restarts=3,joint_timeout=5"});
  EXPECT_THAT(weaker.err, AllOf(HasSubstr("'rdzv_backend' in --rdzv_conf has no effect: --rdzv_backend is static"),
                                HasSubstr("'max_restarts' in --rdzv_conf has no effect: --max_restarts is 0"),
                                HasSubstr("'joint_timeout' in --rdzv_conf has no effect, did you mean 'join_timeout'?"),
                                Not(HasSubstr("endpoint' in"))));
}

TEST_F(Commands, WhatOthersCallAnOptionIsUnderstood) {
  for (const auto& [theirs, ours] : {std::pair("--nproc-per-node", "--num_processes"),
                                     {"--num_proc", "--num_processes"},
                                     {"--nnodes=2", "--num_machines"},
                                     {"--node_rank", "--machine_rank"},
                                     {"--master_port", "--main_process_port"},
                                     {"--num_proceses", "--num_processes"}})
    EXPECT_THAT(run({"launch", theirs, "2", "/bin/true"}).err, HasSubstr(std::string("Did you mean '") + ours + "'?"))
        << theirs;
}

TEST_F(Commands, ProgramsBesideTheLauncherHaveItsHelp) {
  int there = 0;
  for (const auto& entry : fs::directory_iterator(ACCELERATE_BIN_DIR)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("accelerate-") || !fs::is_regular_file(entry.path())) continue;
    ++there;
    const auto help = Program({entry.path(), "--help"}).wait();
    EXPECT_EQ(help.exit_code, 0) << name << help.err;
    EXPECT_THAT(help.out, HasSubstr("accelerate ")) << name;
  }
  if (there == 0) GTEST_SKIP() << "none of them is built";
}

// The reference's questions write it under a name that nobody reads in version 1.
TEST_F(Commands, TheStrategyOfFsdp1ActsUnderBothNames) {
  const auto plan = [&](const std::string& section, std::vector<std::string> options = {}) {
    const auto file = write("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n" + section);
    options.insert(options.begin(), {"launch", "--config_file", file});
    options.insert(options.end(), {"--dry_run", "/bin/true"});
    return run(options);
  };
  const auto strategy = [](const std::string& name) { return HasSubstr("FSDP_SHARDING_STRATEGY=" + name + "\n"); };
  const std::string one = "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n";
  EXPECT_THAT(plan(one).out, strategy("SHARD_GRAD_OP"));
  EXPECT_THAT(plan(one).err, Not(HasSubstr("different strategies")));
  const auto both = plan(one + "  fsdp_sharding_strategy: NO_SHARD\n");
  EXPECT_THAT(both.out, strategy("NO_SHARD"));
  EXPECT_THAT(both.err, HasSubstr("different strategies, which in version 1 are one setting: NO_SHARD counts"));
  const auto flag = plan("  fsdp_sharding_strategy: NO_SHARD\n", {"--fsdp_reshard_after_forward", "hybrid_shard"});
  EXPECT_THAT(flag.out, strategy("hybrid_shard"));
  EXPECT_THAT(flag.err, HasSubstr("hybrid_shard counts"));
  EXPECT_THAT(plan("  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n").out, strategy("FULL_SHARD"));
}

TEST_F(Commands, OptionsOfSeveralMachinesAreRemarkedOnWithOne) {
  const auto remarks = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"launch", "--dry_run"});
    words.emplace_back("/bin/true");
    return run(words).err;
  };
  EXPECT_THAT(remarks({"--rdzv_backend", "c10d", "--num_processes", "2"}),
              HasSubstr("--rdzv_backend c10d has no effect with one machine"));
  EXPECT_THAT(remarks({"--main_process_ip", "10.0.0.1", "--num_processes", "1"}),
              HasSubstr("--main_process_ip has no effect with one process"));
  EXPECT_THAT(remarks({"--main_process_ip", "127.0.0.1", "--num_processes", "2"}), Not(HasSubstr("has no effect")));
  EXPECT_THAT(remarks({"--rdzv_backend", "c10d", "--num_machines", "1:2", "--num_processes", "2", "--main_process_ip",
                       "127.0.0.1", "--main_process_port", "29511"}),
              Not(HasSubstr("has no effect")));
}

TEST_F(Commands, WhatCantWorkHereIsAnError) {
  EXPECT_THAT(run({"launch", "--rdzv_backend", "etcd", "/bin/true"}).err, HasSubstr("expected static or c10d"));
  EXPECT_THAT(run({"launch", "--cpu", "--use_fsdp", "/bin/true"}).err, HasSubstr("exclude each other"));
}

TEST_F(Commands, DryRunStartsNothing) {
  const auto result = run({"launch", "--dry_run", "--num_processes", "2", "/bin/sh", "-c", "echo started"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("processes  2 of 2"), HasSubstr("  WORLD_SIZE=2\n"), Not(HasSubstr("\nstarted"))));
}

TEST_F(Commands, RanksAreBoundToTheirShareOfTheCores) {
  const auto lists = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"launch", "-q", "--num_processes", "2"});
    options.insert(options.end(), {"/bin/sh", "-c",
                                   "echo $RANK $ACCELERATE_CPU_AFFINITY $(grep Cpus_allowed_list /proc/self/status)"});
    return run(options).out;
  };
  const auto cores = std::stoi(Program({"/usr/bin/nproc"}).wait().out);
  const std::string bound = lists({"--enable_cpu_affinity"});
  EXPECT_THAT(bound, AllOf(HasSubstr("0 1 Cpus_allowed_list:"), HasSubstr("1 1 Cpus_allowed_list:")));
  if (cores == 2) {
    EXPECT_THAT(bound, AllOf(HasSubstr("0 1 Cpus_allowed_list: 0\n"), HasSubstr("1 1 Cpus_allowed_list: 1\n")));
    EXPECT_THAT(lists({}), AllOf(HasSubstr("0 Cpus_allowed_list: 0-1\n"), HasSubstr("1 Cpus_allowed_list: 0-1\n")));
  }
}

TEST_F(Commands, MpirunGetsTheWordsOfItsKind) {
  const auto hosts = write("hosts", "localhost slots=2\n");
  const auto fake = [&](const std::string& version) {
    const auto file =
        write("mpirun",
              "#!/bin/sh\n[ \"$1\" = --version ] && { echo '" + version +
                  "'; exit; }\necho \"$@\" at $MASTER_ADDR:${MASTER_PORT:+port} cpu $ACCELERATE_USE_CPU rank $RANK\n");
    fs::permissions(file, fs::perms::owner_all);
  };
  const auto words = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"launch", "-q", "--cpu", "--num_processes", "2"});
    options.insert(options.end(), {"/bin/echo", "x"});
    const auto result = run(options, "", {"PATH=" + folder.string() + ":/usr/bin:/bin"});
    return result.out + result.err;
  };
  fake("mpirun (Open MPI) 4.1.4");
  EXPECT_EQ(
      words({"--mpirun_hostfile", hosts}),
      "--hostfile " + hosts + " --npernode 2 -n 2 --bind-to socket /bin/echo x at 127.0.0.1:port cpu True rank\n");
  fake("Intel(R) MPI Library for Linux* OS, Version 2021.9");
  EXPECT_EQ(words({"--mpirun_hostfile", hosts}),
            "-f " + hosts + " -ppn 2 -n 2 /bin/echo x at 127.0.0.1:port cpu True rank\n");
  // Only the other machines may have the file that is looked at.
  const std::string absent = (folder / "absent").string();
  const auto plan = words({"--mpirun_hostfile", absent, "--dry_run"});
  EXPECT_THAT(plan, AllOf(HasSubstr("launcher   mpirun, which starts the processes\nprocesses  2, 2 on each machine\n"),
                          HasSubstr("hostfile   " + absent + " does not exist here"),
                          HasSubstr("-f " + absent + " -ppn 2 -n 2 /bin/echo x\n")));
  EXPECT_THAT(words({"--mpirun_hostfile", hosts, "--dry_run"}), Not(HasSubstr("does not exist")));
  EXPECT_THAT(words({"--mpirun_hostfile", absent}), HasSubstr("can't be read"));
  EXPECT_THAT(words({"--mpirun_hostfile", absent, "--dry_run", "--num_machines", "2", "--machine_rank", "0",
                     "--main_process_port", "29500"}),
              HasSubstr("--main_process_ip must be given"));
  const auto several = write("several", "node1:1\nnode2:1\n");
  EXPECT_THAT(words({"--mpirun_hostfile", several}), HasSubstr("--main_process_ip must be given"));
  fake("mpirun (Open MPI) 4.1.4");
  EXPECT_THAT(words({"--mpirun_hostfile", several, "--main_process_ip", "node1"}),
              AllOf(HasSubstr("-x MASTER_ADDR -x MASTER_PORT"), HasSubstr("at node1:port")));
}

/// Launches under DeepSpeed on two machines, with only the folder's programs and the system's in PATH.
class DeepSpeedMachines : public Commands {
 protected:
  DeepSpeedMachines() { write("hosts", "# name and number\nb slots=4\na slots=2  # the smaller one\n"); }
  void program(const std::string& name, const std::string& script) const {
    fs::permissions(write(name, "#!/bin/sh\n" + script + "\n"), fs::perms::owner_all);
  }
  Result start(std::vector<std::string> options, const std::vector<std::string>& command = {"/bin/echo", "x"},
               std::vector<std::string> env = {}) const {
    options.insert(options.begin(), {"launch", "--use_deepspeed", "--num_machines", "2"});
    options.insert(options.end(), command.begin(), command.end());
    env.insert(env.end(), {"PATH=" + folder.string() + ":/usr/bin:/bin", "HOME=" + folder.string()});
    return run(options, "", std::move(env));
  }
  std::string words(const std::vector<std::string>& options,
                    const std::vector<std::string>& command = {"/bin/echo", "x"},
                    std::vector<std::string> env = {}) const {
    const auto result = start(options, command, std::move(env));
    return result.out + result.err;
  }
  /// Without the words for the launcher's own files, which no two machines have alike.
  std::string plan(std::vector<std::string> options, std::vector<std::string> env = {}) const {
    options.insert(options.begin(), {"--dry_run", "--deepspeed_hostfile", "hosts"});
    return words(options, {"/bin/echo", "x"}, std::move(env));
  }
  std::string error(std::vector<std::string> options) const {
    options.insert(options.begin(), {"--deepspeed_hostfile", "hosts"});
    const auto result = start(options);
    EXPECT_EQ(result.exit_code, 64) << result.out << result.err;
    return result.err;
  }
};

TEST_F(DeepSpeedMachines, PythonProgramsAreStartedByItsOwn) {
  const std::vector<std::string> all{"-q",   "--machine_rank",    "0",        "--num_processes",
                                     "8",    "--main_process_ip", "10.0.0.1", "--main_process_port",
                                     "29511"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), all.begin(), all.end());
    return more;
  };
  const std::vector<std::string> script{write("train.py", ""), "x"};
  EXPECT_THAT(words(all, script), HasSubstr("--deepspeed_hostfile must be given"));
  EXPECT_THAT(words(with({"--deepspeed_hostfile", "hosts"}), script), HasSubstr("`deepspeed`, which is not in PATH"));
  program("deepspeed", "echo \"$@\" $ACCELERATE_USE_DEEPSPEED");
  EXPECT_EQ(
      words(with({"--deepspeed_hostfile", "hosts", "--deepspeed_inclusion_filter", "a@b:0,2", "--zero_stage", "3"}),
            script),
      "--hostfile hosts --no_local_rank --launcher pdsh --include a@b:0,2 --master_addr 10.0.0.1 --master_port "
      "29511 " +
          script[0] + " x true\n");
  EXPECT_THAT(content(folder / ".deepspeed_env"), HasSubstr("ACCELERATE_DEEPSPEED_ZERO_STAGE=3\n"));
  // An interpreter, and a script that names one, by whatever name.
  program("python3", "");
  program("tool", "");
  fs::permissions(write("tool", "#!/usr/bin/env python3\n"), fs::perms::owner_all);
  for (const char* name : {"python3", "tool", "./tool"})
    EXPECT_EQ(words(with({"--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "nossh"}), {name}),
              "--hostfile hosts --node_rank 0 --no_ssh --num_gpus 4 --master_addr 10.0.0.1 --master_port 29511 "
              "--no_python " +
                  std::string(name) + " true\n");
}

TEST_F(DeepSpeedMachines, AllOthersAreStartedByThisLauncherInTheHostfilesOrder) {
  const auto both = plan({"--num_processes", "4"});
  EXPECT_THAT(both, AllOf(HasSubstr("processes  2 of 2 on machine 0 of 1\nmeeting at b:29500\nmachine 0  /usr/bin/pdsh "
                                    "-R ssh -S -N -b -w b "),
                          HasSubstr("\nmachine 1  /usr/bin/pdsh -R ssh -S -N -b -w a ")));
  for (const char* rank : {"0", "1"})
    EXPECT_THAT(both, HasSubstr("--num_machines '2' --machine_rank '" + std::string(rank) +
                                "' --num_processes '4' --processes_per_machine '2' --main_process_ip 'b' "
                                "--main_process_port '29500' --gpu_ids '0,1' --deepspeed_multinode_launcher 'standard' "
                                "'/bin/echo' 'x'"));
  // Without a number each slot has a process, and a filter has the last word.
  EXPECT_THAT(plan({}), HasSubstr("--processes_per_machine '4' --main_process_ip 'b' --main_process_port '29500' "
                                  "--gpu_ids '0,1,2,3'"));
  EXPECT_THAT(plan({"--deepspeed_inclusion_filter", "a@b:3,1", "--num_processes", "4", "--main_process_port", "29511"}),
              AllOf(HasSubstr("--main_process_port '29511' --gpu_ids '1,3'"), HasSubstr("--gpu_ids '0,1'"),
                    Not(HasSubstr("which count"))));
  EXPECT_THAT(plan({"--deepspeed_exclusion_filter", "a@b:0", "--num_processes", "4"}),
              AllOf(HasSubstr("leave 3 processes on 1 machines, which count: --num_machines is 2, --num_processes 4"),
                    HasSubstr("--num_machines '1' --machine_rank '0' --num_processes '3'"), HasSubstr("'1,2,3'"),
                    Not(HasSubstr("standard"))));
  // Another shell takes pdsh's place.
  EXPECT_THAT(plan({"--remote_shell", "ssh"}), HasSubstr("/usr/bin/ssh b cd"));
  EXPECT_THAT(plan({"--gpu_ids", "5"}), AllOf(HasSubstr("--gpu_ids has no effect with --deepspeed_multinode_launcher "
                                                        "pdsh: the hostfile's slots are the devices"),
                                              Not(HasSubstr("'5'"))));
}

TEST_F(DeepSpeedMachines, WithNosshEachMachineTakesItsSlots) {
  const auto of = [&](const std::string& rank) {
    return plan(
        {"--deepspeed_multinode_launcher", "NoSSH", "--machine_rank", rank, "--deepspeed_exclusion_filter", "b:1@a:0"});
  };
  EXPECT_THAT(of("0"), AllOf(HasSubstr("processes  3 of 4 on machine 0 of 2\nmeeting at b:29500\n"),
                             HasSubstr("CUDA_VISIBLE_DEVICES=0,2,3\n"), HasSubstr(" RANK=0\n")));
  EXPECT_THAT(of("1"), AllOf(HasSubstr("processes  1 of 4 on machine 1 of 2\n"), HasSubstr("CUDA_VISIBLE_DEVICES=1\n"),
                             HasSubstr(" RANK=3\n")));
  EXPECT_THAT(of("2"), HasSubstr("--machine_rank is 2, expected this machine's place"));
}

TEST_F(DeepSpeedMachines, MpirunAndSrunGetItsWords) {
  write("hosts", "a slots=2\nb slots=2\n");
  const auto fake = [&](const std::string& version) {
    program("mpirun",
            "[ \"$1\" = --version ] && { echo '" + version +
                "'; exit; }\necho words \"$@\" at $MASTER_ADDR:$MASTER_PORT with $ACCELERATE_USE_DEEPSPEED $MINE "
                "$OMP_NUM_THREADS $UCX_TLS $MV2_SUPPORT_DL");
  };
  program("srun", "echo words \"$@\" at ${MASTER_ADDR:-any}:${MASTER_PORT:-any} with $ACCELERATE_USE_DEEPSPEED $MINE");
  write(".deepspeed_env", "MINE=x y\nACCELERATE_USE_DEEPSPEED=old\nRANK=7\n");
  const auto by = [&](const std::string& launcher, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"-q", "--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", launcher});
    return words(more, {"/bin/echo", "x"}, {"NCCL_DEBUG=WARN", "OTHER=1"});
  };
  fake("mpirun (Open MPI) 4.1.4");
  const auto open_mpi = by("openmpi", {"--main_process_ip", "10.0.0.1"});
  EXPECT_THAT(open_mpi,
              StartsWith("words -n 4 -hostfile hosts --mca btl ^openib --mca btl_tcp_if_include eth0 --bind-to "
                         "socket -x ACCELERATE_CONFIG_DS_FIELDS "));
  EXPECT_THAT(open_mpi, AllOf(HasSubstr(" -x MASTER_ADDR -x MASTER_PORT -x MINE -x OMP_NUM_THREADS "),
                              HasSubstr(" -x NCCL_DEBUG"), HasSubstr(" -x UCX_TLS"), Not(HasSubstr("OTHER")),
                              Not(HasSubstr("-x RANK"))));
  EXPECT_THAT(open_mpi, HasSubstr(" /bin/echo x at 10.0.0.1:29500 with true x y 1 tcp\n"));
  program("mpirun.mpich", "echo 'mpirun (Open MPI) 4.1.4'");  // a real one would be found
  EXPECT_THAT(by("mpich"), AllOf(HasSubstr("needs an mpirun or mpiexec of MPICH or MVAPICH, and found only another"),
                                 HasSubstr(folder / "mpirun")));
  fake("HYDRA build details:");
  program("mpiexec", "");
  EXPECT_EQ(by("mpich"), "words -n 4 -ppn 2 -hosts a,b -genvall /bin/echo x at a:29500 with true x y 1\n");
  EXPECT_EQ(by("MVAPICH"), "words -np 4 -ppn 2 -hosts a,b -genvall /bin/echo x at a:29500 with true x y 1 1\n");
  // Slurm knows where its tasks meet, and names of machines count where a filter chose them.
  EXPECT_EQ(by("slurm"),
            "words -n 4 --nodes 2 --ntasks-per-node 2 --export=ALL /bin/echo x at any:any with true x y\n");
  EXPECT_EQ(
      by("slurm", {"--num_processes", "2", "--main_process_ip", "10.0.0.1", "--main_process_port", "29511"}),
      "words -n 2 --nodes 2 --ntasks-per-node 1 --export=ALL --gpus-per-node 1 /bin/echo x at 10.0.0.1:29511 with true "
      "x y\n");
  EXPECT_EQ(
      by("slurm", {"--deepspeed_inclusion_filter", "b:0@a:0"}),
      "words -n 2 --nodes 2 --ntasks-per-node 1 --export=ALL --nodelist a,b /bin/echo x at any:any with true x y\n");
  EXPECT_THAT(plan({"--deepspeed_multinode_launcher", "slurm"}),
              AllOf(HasSubstr("launcher   srun, which starts the processes\nprocesses  4 on 2 machines\nmeeting at the "
                              "first machine that Slurm gives\n"),
                    HasSubstr("of the hostfile only their number counts")));
}

// Where mpirun's ranks meet is the first machine, which need not be this one.
TEST_F(DeepSpeedMachines, AnotherMachinesPortMayBeBusyHere) {
  program("mpirun", "[ \"$1\" = --version ] && { echo Open MPI; exit; }\necho started");
  const int busy = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(busy, reinterpret_cast<sockaddr*>(&address), size) | ::listen(busy, 1), 0);
  ASSERT_EQ(::getsockname(busy, reinterpret_cast<sockaddr*>(&address), &size), 0);
  EXPECT_EQ(words({"-q", "--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "openmpi",
                   "--main_process_port", std::to_string(ntohs(address.sin_port))}),
            "started\n");
  ::close(busy);
}

// Launchers that others have started on each machine are the machines, whatever a config file says of starting them.
TEST_F(DeepSpeedMachines, AreThereWhereOthersHaveStartedThem) {
  const auto file = write("c.yaml",
                          "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 2\ndeepspeed_config:\n"
                          "  deepspeed_multinode_launcher: pdsh\n  deepspeed_hostfile: hosts\n");
  const auto slurm = run({"launch", "--dry_run", "--config_file", file, "/bin/true"}, "",
                         {"SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID=1", "SLURM_GTIDS=1", "SLURM_JOB_ID=7",
                          "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=a,b"});
  EXPECT_THAT(slurm.out, HasSubstr("processes  2 of 4 on machine 1 of 2\nmeeting at a:")) << slurm.err;
  const auto operator_of_a_cluster =
      run({"launch", "--dry_run", "--use_deepspeed", "/bin/true"}, "",
          {"PET_NNODES=2", "PET_NODE_RANK=1", "PET_NPROC_PER_NODE=2", "PET_MASTER_ADDR=a", "PET_MASTER_PORT=29511"});
  EXPECT_THAT(operator_of_a_cluster.out, HasSubstr("processes  2 of 4 on machine 1 of 2\nmeeting at a:29511\n"))
      << operator_of_a_cluster.err;
}

TEST_F(DeepSpeedMachines, VariablesOfDeepspeedEnvReachTheMachines) {
  write(".deepspeed_env", "A=1\nB=1\nACCELERATE_MIXED_PRECISION=fp16\n");
  fs::create_directories(folder / "home");
  write("home/.deepspeed_env", "B=2\nC=it's $HERE\n");
  const std::vector<std::string> at_home{"HOME=" + (folder / "home").string()};
  EXPECT_THAT(plan({"--remote_shell", "ssh"}, at_home),
              AllOf(HasSubstr(" 'A=1' 'B=1' 'C=it'\\''s $HERE' "), Not(HasSubstr("fp16")),
                    HasSubstr("C of .deepspeed_env is passed on as it stands")));
  EXPECT_THAT(plan({"--remote_shell", "ssh"}, {at_home[0], "DS_ENV_FILE=other"}), Not(HasSubstr("'A=1'")));
  write(".deepspeed_env", "A=1\nB\n");
  EXPECT_THAT(plan({}), HasSubstr(".deepspeed_env, line 2 is 'B', expected NAME=VALUE"));
}

TEST_F(DeepSpeedMachines, Mistakes) {
  EXPECT_THAT(words({}), HasSubstr("--deepspeed_hostfile must be given"));
  EXPECT_THAT(words({"--deepspeed_hostfile", "none"}), HasSubstr("--deepspeed_hostfile none can't be read"));
  EXPECT_THAT(error({"--deepspeed_multinode_launcher", "mpic"}), HasSubstr("Did you mean 'mpich'?"));
  EXPECT_THAT(error({"--deepspeed_inclusion_filter", "c"}),
              HasSubstr("--deepspeed_inclusion_filter names 'c', which is not in the hostfile"));
  EXPECT_THAT(error({"--deepspeed_exclusion_filter", "a:2"}), HasSubstr("names slot '2' of a, which has slots 0 to 1"));
  EXPECT_THAT(error({"--deepspeed_exclusion_filter", "a@b"}),
              HasSubstr("--deepspeed_exclusion_filter a@b leaves no machine"));
  EXPECT_THAT(error({"--deepspeed_exclusion_filter", "a", "--deepspeed_inclusion_filter", "b"}),
              HasSubstr("--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other"));
  EXPECT_THAT(error({"--num_processes", "6"}), HasSubstr("asks for 3 slots on each machine, and in the hostfile hosts "
                                                         "a has 2"));
  EXPECT_THAT(error({"--num_processes", "3"}), HasSubstr("3 can't be shared equally by 2 machines"));
  EXPECT_THAT(error({"--machine_rank", "1"}), HasSubstr("pdsh starts all machines from one"));
  EXPECT_THAT(error({"--deepspeed_multinode_launcher", "nossh"}), HasSubstr("--machine_rank is not given"));
  for (const std::string launcher : {"pdsh", "slurm"})
    EXPECT_THAT(error({"--main_process_port", "0", "--deepspeed_multinode_launcher", launcher}),
                HasSubstr("--main_process_port is 0"));
  EXPECT_THAT(error({"--rdzv_backend", "c10d"}), HasSubstr("names a fixed set of machines"));
  for (const std::string mpi : {"openmpi", "mpich", "mvapich"})
    EXPECT_THAT(error({"--deepspeed_multinode_launcher", mpi, "--deepspeed_inclusion_filter", "a"}),
                HasSubstr(mpi + " starts all slots of the hostfile"));
  EXPECT_THAT(error({"--deepspeed_multinode_launcher", "openmpi", "--num_processes", "4"}),
              HasSubstr("a process for each slot of the hostfile, which has 6"));
  for (const std::string equal : {"mpich", "mvapich", "slurm"})
    EXPECT_THAT(error({"--deepspeed_multinode_launcher", equal}),
                HasSubstr(equal + " needs as many slots on each machine, found 4 on b and 2 on a"));
  EXPECT_THAT(error({"--deepspeed_multinode_launcher", "slurm", "--deepspeed_inclusion_filter", "b:1,2@a"}),
              HasSubstr("slurm can't choose slots by their numbers, found 1,2 on b"));
  write("hosts", "a slots=2\na slots=4\n");
  EXPECT_THAT(error({}), HasSubstr("line 2 names a again"));
  write("hosts", "a slots=2\nb slots=two\n");
  EXPECT_THAT(error({}), HasSubstr("line 2 is 'b slots=two', expected NAME slots=N"));
  write("hosts", "# nobody\n");
  EXPECT_THAT(error({}), HasSubstr("names no machine"));
}

TEST_F(DeepSpeedMachines, WhatHasNoEffectIsSaid) {
  EXPECT_THAT(words({"--dry_run", "--deepspeed_multinode_launcher", "standard", "--deepspeed_hostfile", "hosts",
                     "--machine_rank", "0", "--main_process_ip", "a", "--num_processes", "2"}),
              AllOf(HasSubstr("--deepspeed_hostfile has no effect with --deepspeed_multinode_launcher standard"),
                    Not(HasSubstr("--deepspeed_multinode_launcher has no effect"))));
  EXPECT_THAT(words({"--dry_run", "--num_machines", "1", "--deepspeed_inclusion_filter", "a",
                     "--deepspeed_multinode_launcher", "nossh"}),
              AllOf(HasSubstr("--deepspeed_inclusion_filter has no effect with one machine"),
                    HasSubstr("--deepspeed_multinode_launcher has no effect with one machine")));
  EXPECT_THAT(run({"launch", "--dry_run", "--include", "a", "--remote_shell", "pdsh", "/bin/true"}).err,
              AllOf(HasSubstr("--include has no effect without --hostfile"),
                    HasSubstr("--remote_shell has no effect without --hostfile")));
  EXPECT_THAT(
      plan({"--deepspeed_multinode_launcher", "openmpi", "--rdzv_conf", "timeout=1", "--remote_shell", "ssh",
            "--processes_per_machine", "1"}),
      AllOf(HasSubstr("--rdzv_conf has no effect with --deepspeed_multinode_launcher openmpi"),
            HasSubstr("--remote_shell has no effect with"), HasSubstr("--processes_per_machine has no effect")));
}

TEST_F(Commands, FailedJobsAreRestarted) {
  // Fails until the third attempt, of which there is a log folder each.
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || "
      "{ [ $RANK = 0 ] && exit 7; sleep 60; }";
  const auto result = run(
      {"launch", "--num_processes", "2", "--max_restarts", "3", "--log_dir", folder / "logs", "/bin/sh", "-c", script});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("restart 1 of 3"), HasSubstr("restart 2 of 3"), Not(HasSubstr("restart 3 of 3"))));
  int logs = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder / "logs"))
    logs += entry.path().filename() == "stdout.log";
  EXPECT_EQ(logs, 6);
  const auto says = run({"launch", "--max_restarts", "2", "/bin/sh", "-c", "exit 7"});
  EXPECT_THAT(says.err, HasSubstr("no restart is left of 2"));
  EXPECT_THAT(run({"launch", "/bin/sh", "-c", "exit 7"}).err, Not(HasSubstr("no restart")));
  const auto gives_up = run({"launch", "-q", "--max_restarts", "1", "/bin/sh", "-c", "echo x; exit 7"});
  EXPECT_EQ(gives_up.exit_code, 7);
  EXPECT_EQ(gives_up.out, "x\nx\n");
}

}  // namespace
