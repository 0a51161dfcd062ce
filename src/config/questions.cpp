#include <functional>
#include <set>

#include "accelerate/config.hpp"
#include "config/config_file.hpp"
#include "config/yaml.hpp"
#include "utils/device_types.hpp"
#include "utils/raise.hpp"

/// The questions of `accelerate config`: which setting is asked for when. Texts, defaults and possible answers
/// come from the table.
namespace accelerate::config {
namespace {

/// Puts questions, remembers the answers, and can therefore go back: it asks all over again and answers from memory up
/// to the question before.
class Questions {
 public:
  explicit Questions(Dialog& dialog) : dialog_(dialog) {}

  Value run(const std::function<Value(Questions&)>& all) {
    for (;;) {
      next_ = 0;
      try {
        return all(*this);
      } catch (const Dialog::Back&) {
        if (answers_.empty()) dialog_.say("This is the first question.");
        else answers_.pop_back();
      }
    }
  }

  void say(const std::string& line) {
    if (next_ == answers_.size()) dialog_.say(line);
  }

  size_t choose(const std::string& question, const std::vector<std::string>& choices, size_t usual = 0) {
    return std::stoul(remembered([&] { return std::to_string(dialog_.choose(question, choices, usual)); }));
  }

  bool yes(const std::string& question, bool usual) { return choose(question, {"no", "yes"}, usual ? 1 : 0) == 1; }

  /// Asks until `check` finds nothing wrong; it returns a reason or "".
  std::string text(const std::string& question, const std::string& usual,
                   const std::function<std::string(const std::string&)>& check = nullptr) {
    return remembered([&] {
      for (;;) {
        const std::string answer = dialog_.ask(question, usual);
        const std::string reason = check ? check(answer) : "";
        if (reason.empty()) return answer;
        dialog_.say(reason);
      }
    });
  }

  std::string something(const std::string& question, const std::string& usual = "") {
    return text(question, usual,
                [](const std::string& answer) { return answer.empty() ? "This needs an answer." : ""; });
  }

  int64_t number(const std::string& question, int64_t usual, int64_t least, int64_t most = INT64_MAX) {
    const auto check = [&](const std::string& answer) -> std::string {
      const auto value = whole(answer);
      if (!value) return "'" + answer + "' is not a whole number.";
      if (*value < least) return std::to_string(*value) + " is too small: the least is " + std::to_string(least) + ".";
      if (*value > most) return std::to_string(*value) + " is too large: the most is " + std::to_string(most) + ".";
      return "";
    };
    return *whole(text(question, std::to_string(usual), check));
  }

  /// Asks for a setting of the launch table: its help is the question, its kind says how it is asked.
  Value setting(const std::string& name, Value usual = nullptr) {
    const Option* option = launch_table().find(name);
    if (!option) raise<InternalError>("no setting is called {}", name);
    if (usual.is_null()) usual = default_value(*option);
    const std::string question = option->help;
    const std::string form = option->value ? option->value : "";
    if (form == "true|false" || form == "true|false|NAME" || option->kind == Kind::flag ||
        option->kind == Kind::boolean || option->kind == Kind::truth)
      return yes(question + "?", usual == true || usual == "true" || usual == 1);
    auto choices = option->choice_list();
    if (choices.empty() && form.find('|') != std::string::npos) choices = split(form);
    if (!choices.empty()) return choice(question, choices, usual);
    if (option->kind == Kind::integer) return number(question + ":", usual.is_null() ? 1 : usual.get<int64_t>(), 1);
    if (option->kind == Kind::number) {
      const auto check = [&](const std::string& answer) -> std::string {
        try {
          const double value = parse_value(*option, answer, "the answer");
          return value < 0 ? "It can't be negative." : "";
        } catch (const ConfigError& error) {
          return error.what();
        }
      };
      return parse_value(*option, text(question + ":", python_text(usual), check), name);
    }
    return something(question + ":", usual.is_null() ? "" : python_text(usual));
  }

  Value choice(const std::string& question, const std::vector<std::string>& choices, const Value& usual) {
    size_t index = 0;
    for (size_t i = 0; i < choices.size(); ++i)
      if (usual == choices[i]) index = i;
    return choices[choose(question + ":", choices, index)];
  }

 private:
  static std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts(1);
    for (char c : text) {
      if (c == '|') parts.emplace_back();
      else parts.back() += c;
    }
    return parts;
  }

  static std::optional<int64_t> whole(const std::string& text) {
    if (text.empty() || text.size() > 15 ||
        text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) != std::string::npos || text == "-")
      return std::nullopt;
    return std::stoll(text);
  }

  std::string remembered(const std::function<std::string()>& ask) {
    if (next_ == answers_.size()) answers_.push_back(ask());
    return answers_[next_++];
  }

  Dialog& dialog_;
  std::vector<std::string> answers_;
  size_t next_ = 0;
};

std::vector<std::string> with_commas(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  for (char c : text + ",") {
    if (c != ',') {
      if (c != ' ' || !part.empty()) part += c;
    } else if (!part.empty()) {
      parts.push_back(part), part.clear();
    }
  }
  return parts;
}

void ask_dynamo(Questions& q, Value& config) {
  if (!q.yes("Will Python programs be compiled by torch.compile? C++ programs need nothing here:", false)) return;
  auto backends = launch_table().find("dynamo_backend")->choice_list();
  backends.erase(backends.begin());  // "no"
  std::string backend = q.choice("Which graph compiler", backends, "inductor");
  for (char& c : backend) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  Value& dynamo = config["dynamo_config"];
  dynamo["dynamo_backend"] = backend;
  if (!q.yes("Should it work otherwise than by default?", false)) return;
  for (const char* name :
       {"dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"})
    dynamo[name] = q.setting(name);
}

void ask_machines(Questions& q, Value& config) {
  const int64_t machines = q.number("How many machines take part?", 1, 1);
  config["num_machines"] = machines;
  if (machines == 1) return;
  std::vector<std::string> ranks;
  for (int64_t i = 0; i < machines && i < 1000; ++i) ranks.push_back(std::to_string(i));
  config["machine_rank"] = machines <= 16 ? static_cast<int64_t>(q.choose("Which one is this machine?", ranks))
                                          : q.number("Which one is this machine?", 0, 0, machines - 1);
  config["main_process_ip"] = q.something("What is the address of machine 0, as the others reach it?");
  config["main_process_port"] = q.number("On which port of machine 0 do the processes meet?", 29500, 1, 65535);
  config["same_network"] = q.yes("Are all machines on one local network?", true);
  if (config["same_network"] == false)
    config["rdzv_backend"] = q.choice("How do the machines find each other", {"static", "c10d"}, "static");
}

void ask_deepspeed(Questions& q, Value& config) {
  Value& section = config["deepspeed_config"];
  if (q.yes("Is there a configuration file of DeepSpeed's own (JSON)?", false)) {
    section["deepspeed_config_file"] = q.setting("deepspeed_config_file");
  } else {
    const auto stage = static_cast<int64_t>(q.choose(
        "What should ZeRO shard?", {"0: nothing", "1: optimizer state", "2: gradients too", "3: parameters too"}, 2));
    section["zero_stage"] = stage;
    if (stage >= 2) {
      for (const std::string what : {"optimizer", "param"})
        section["offload_" + what + "_device"] = q.setting("offload_" + what + "_device", "none");
      for (const std::string what : {"param", "optimizer"})
        if (section["offload_" + what + "_device"] == "nvme")
          section["offload_" + what + "_nvme_path"] = q.setting("offload_" + what + "_nvme_path", "/nvme");
    }
    section["gradient_accumulation_steps"] = q.setting("gradient_accumulation_steps", 1);
    if (q.yes("Should gradients be clipped?", false))
      section["gradient_clipping"] = q.setting("gradient_clipping", 1.0);
    if (stage == 3) section["zero3_save_16bit_model"] = q.setting("zero3_save_16bit_model");
  }
  section["zero3_init_flag"] = q.setting("zero3_init_flag");
  if (q.yes("Is the model a mixture of experts?", false))
    section["deepspeed_moe_layer_cls_names"] = q.setting("deepspeed_moe_layer_cls_names");
  if (config.value("num_machines", Value(1)) == 1) return;
  section["deepspeed_multinode_launcher"] = q.choice(
      "Who starts the other machines", {"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"}, "pdsh");
  if (section["deepspeed_multinode_launcher"] == "standard") return;
  section["deepspeed_hostfile"] = q.setting("deepspeed_hostfile");
  if (q.yes("Should some machines or slots be left out?", false))
    section["deepspeed_exclusion_filter"] = q.setting("deepspeed_exclusion_filter");
  if (q.yes("Should only some machines or slots be used?", false))
    section["deepspeed_inclusion_filter"] = q.setting("deepspeed_inclusion_filter");
}

void ask_fsdp(Questions& q, Value& config) {
  Value& section = config["fsdp_config"];
  const int64_t version =
      static_cast<int64_t>(q.choose(
          "Which FSDP?", {"Version 1: units of flat parameters", "Version 2: each parameter sharded by itself"}, 1)) +
      1;
  section["fsdp_version"] = version;
  if (version == 1)
    section["fsdp_sharding_strategy"] =
        q.choice("What should be sharded",
                 {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}, "FULL_SHARD");
  else
    section["fsdp_reshard_after_forward"] =
        q.yes("Should whole parameters be given up between forward and backward?", true);
  section["fsdp_offload_params"] = q.setting("fsdp_offload_params");
  const Value policy = q.choice("What becomes a unit that is gathered at once",
                                {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}, "TRANSFORMER_BASED_WRAP");
  section["fsdp_auto_wrap_policy"] = policy;
  if (policy == "TRANSFORMER_BASED_WRAP" &&
      !q.yes("Does the model say by itself which layers? Models of Transformers and of this library do, own C++ models "
             "don't:",
             false))
    section["fsdp_transformer_layer_cls_to_wrap"] =
        q.something("Which classes of modules, with commas (BertLayer,GPT2Block)?");
  if (policy == "SIZE_BASED_WRAP") section["fsdp_min_num_params"] = q.setting("fsdp_min_num_params");
  if (version == 1)
    section["fsdp_backward_prefetch"] = q.choice("When is the next unit of backward fetched",
                                                 {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}, "BACKWARD_PRE");
  if (version == 1)
    section["fsdp_state_dict_type"] =
        q.choice("How are checkpoints written", {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"},
                 "FULL_STATE_DICT");
  else
    section["fsdp_state_dict_type"] =
        q.choice("How are checkpoints written", {"SHARDED_STATE_DICT", "FULL_STATE_DICT"}, "SHARDED_STATE_DICT");
  if (version == 1) {
    section["fsdp_forward_prefetch"] = q.setting("fsdp_forward_prefetch");
    section["fsdp_use_orig_params"] = q.setting("fsdp_use_orig_params");
  }
  section["fsdp_cpu_ram_efficient_loading"] = q.setting("fsdp_cpu_ram_efficient_loading");
  // With only one process reading the weights, the others must take them from it.
  if (version == 1)
    section["fsdp_sync_module_states"] =
        section["fsdp_cpu_ram_efficient_loading"] == true ? Value(true) : q.setting("fsdp_sync_module_states");
  section["fsdp_activation_checkpointing"] = q.setting("fsdp_activation_checkpointing");
  if (version == 2 && section["fsdp_activation_checkpointing"] == true)
    section["fsdp_activation_checkpointing_offload"] = q.setting("fsdp_activation_checkpointing_offload");
  if (version == 1 || !q.yes("Should several kinds of parallelism be combined?", false)) return;
  Value& parallelism = config["parallelism_config"];
  for (const char* name : {"dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"})
    parallelism["parallelism_config_" + std::string(name)] = q.setting("parallelism_config_" + std::string(name));
  if (parallelism["parallelism_config_cp_size"].get<int64_t>() > 1)
    parallelism["parallelism_config_cp_comm_strategy"] = q.setting("parallelism_config_cp_comm_strategy");
}

void ask_megatron(Questions& q, Value& config) {
  Value& section = config["megatron_lm_config"];
  const auto ask = [&](const std::string& name, const Value& usual = nullptr) {
    return section["megatron_lm_" + name] = q.setting("megatron_lm_" + name, usual);
  };
  if (ask("tp_degree").get<int64_t>() > 1) ask("sequence_parallelism", true);
  if (ask("pp_degree").get<int64_t>() > 1) ask("num_micro_batches", 1);
  ask("recompute_activations", true);
  ask("use_distributed_optimizer", true);
  ask("gradient_clipping");
}

void ask_tpu(Questions& q, Value& config) {
  config["main_training_function"] = q.setting("main_training_function", "main");
  config["tpu_use_cluster"] = q.yes("Is it a pod of several hosts?", false);
  if (config["tpu_use_cluster"] == false) return;
  config["tpu_name"] = q.something("What is the pod's name?");
  config["tpu_zone"] = q.something("In which zone is it?");
  config["tpu_use_sudo"] = q.setting("tpu_use_sudo");
  if (q.yes("Should commands run on each host at the start?", false)) {
    if (q.yes("Are they in a file?", false)) {
      config["command_file"] = std::filesystem::absolute(q.something("Which file?")).string();
    } else {
      Value commands = Value::array();
      do commands.push_back(q.something("Which command?"));
      while (q.yes("Another one?", false));
      config["commands"] = commands;
    }
  }
  config["tpu_vm"] = with_commas(q.text("If it is no instance group: the names of its hosts, with commas:", ""));
  config["tpu_env"] = with_commas(q.text("Variables for each host, as NAME=VALUE with commas:", ""));
}

void ask_fp8(Questions& q, Value& config) {
  Value& section = config["fp8_config"];
  const size_t backend = q.choose("Who computes in fp8?", {"torchao", "Transformer Engine", "MS-AMP"});
  section["backend"] = std::vector<const char*>{"AO", "TE", "MSAMP"}[backend];
  // The keys are those that the reference reads; its own questions write three of them under names that it does not
  // know.
  const auto ask = [&](const std::string& name) {
    section[name.starts_with("fp8_format") ? name : name.substr(4)] = q.setting(name);
  };
  if (backend == 1) {
    for (const char* name : {"fp8_use_autocast_during_eval", "fp8_margin", "fp8_interval", "fp8_format",
                             "fp8_amax_history_len", "fp8_amax_compute_algo"}) {
      if (std::string(name) == "fp8_margin")
        section["margin"] = q.number(std::string(launch_table().find(name)->help) + ":", 0, 0);
      else ask(name);
    }
    Value three = Value::array({false, false, false});
    if (q.yes("Should some products be computed in higher precision?", false)) {
      size_t i = 0;
      for (const char* what : {"the forward product", "the gradient of the input", "the gradient of the weights"})
        three[i++] = q.yes(std::string("In higher precision: ") + what + "?", false);
    }
    section["override_linear_precision"] = three;
  } else if (backend == 0) {
    ask("fp8_enable_fsdp_float8_all_gather");
    ask("fp8_pad_inner_dim");
  } else {
    ask("fp8_opt_level");
  }
}

struct Machine {
  const char* type;
  const char* label;
  const char* plural;
};
constexpr Machine kMachines[] = {{"NO", "One process", ""},
                                 {"MULTI_CPU", "Several CPU processes", "processes"},
                                 {"MULTI_XPU", "Several Intel GPUs (XPU)", "XPUs"},
                                 {"MULTI_HPU", "Several Gaudi accelerators (HPU)", "HPUs"},
                                 {"MULTI_GPU", "Several GPUs (CUDA, ROCm)", "GPUs"},
                                 {"MULTI_NPU", "Several Ascend accelerators (NPU)", "NPUs"},
                                 {"MULTI_MLU", "Several Cambricon accelerators (MLU)", "MLUs"},
                                 {"MULTI_SDAA", "Several Tecorigin accelerators (SDAA)", "SDAAs"},
                                 {"MULTI_MUSA", "Several Moore Threads GPUs (MUSA)", "MUSAs"},
                                 {"MULTI_NEURON", "Several Trainium or Inferentia cores (Neuron)", "Neuron cores"},
                                 {"XLA", "TPU", "TPU cores"}};

Value ask_cluster(Questions& q) {
  Value config{{"compute_environment", "LOCAL_MACHINE"},
               {"downcast_bf16", "no"},
               {"tpu_env", Value::array()},
               {"same_network", true}};
  std::vector<std::string> labels;
  for (const auto& machine : kMachines) labels.emplace_back(machine.label);
  const Machine& machine = kMachines[q.choose("What should the training run on?", labels)];
  std::string type = machine.type;
  const bool on_devices = type.starts_with("MULTI_") && type != "MULTI_CPU";
  if (type.starts_with("MULTI_")) {
    ask_machines(q, config);
    config["debug"] = q.yes(
        "Should tensor shapes be compared before each collective? Slower, but an error instead of a hang:", false);
  }
  if (const auto* device = devices::of_distributed_type(type); device && device->backend != std::string_view("nccl"))
    q.say("C++ programs can't use several: this library has no back end " + std::string(device->backend) +
          ". Python programs can.");
  bool cpu = type == "MULTI_CPU";
  if (type == "NO") cpu = q.yes("Should it run on the CPU even where there is an accelerator?", false);
  config["use_cpu"] = cpu;
  if (type == "MULTI_CPU" && q.yes("Should mpirun start the processes?", false)) {
    std::string file = q.something("Which file lists the machines for mpirun?", "~/hostfile");
    if (const char* home = std::getenv("HOME"); home && file.starts_with("~/")) file = home + file.substr(1);
    config["mpirun_config"]["mpirun_hostfile"] = file;
  }
  ask_dynamo(q, config);
  if ((on_devices || type == "NO") && type != "MULTI_NEURON" && q.yes("Train with DeepSpeed?", false))
    type = "DEEPSPEED", ask_deepspeed(q, config);
  const bool ranks_on_cpu = type == "MULTI_CPU" && !config.contains("mpirun_config");
  if ((on_devices || ranks_on_cpu) && type == machine.type && type != "MULTI_NEURON" &&
      q.yes("Shard parameters, gradients and optimizer state (FSDP)?", false))
    type = "FSDP", ask_fsdp(q, config);
  if (type == "MULTI_GPU" && q.yes("Train with Megatron-LM?", false)) type = "MEGATRON_LM", ask_megatron(q, config);
  config["distributed_type"] = type;

  const int64_t machines = config.value("num_machines", Value(1)).get<int64_t>();
  config["num_processes"] = 1;
  if (type != "NO") {
    const std::string plural = *machine.plural ? machine.plural : "GPUs";
    const int64_t least = type == "MULTI_GPU" && machines == 1 ? 2 : machines;
    const int64_t usual =
        std::max({least, machine.type == std::string("MULTI_GPU") ? count_accelerators() * machines : 1});
    for (;;) {
      const int64_t processes = q.number("How many " + plural + " on all machines together?", usual, least);
      config["num_processes"] = processes;
      if (processes % machines == 0) break;
      q.say(std::to_string(processes) + " can't be shared equally by " + std::to_string(machines) + " machines.");
    }
  }
  if ((on_devices || type == "NO") && (type == machine.type) && !cpu) {
    config["gpu_ids"] = q.text(
        "Which accelerators of this machine, by their numbers with commas?", "all",
        [](const std::string& answer) -> std::string {
          if (answer == "all" || (!answer.empty() && answer.find_first_not_of("0123456789,") == std::string::npos &&
                                  answer.front() != ',' && answer.back() != ','))
            return "";
          return "'" + answer + "' is not a list like 0,1,3, and not all.";
        });
  }
  if ((type == "NO" || type == "MULTI_GPU") && !cpu) config["enable_cpu_affinity"] = q.setting("enable_cpu_affinity");
  if (type == "XLA") {
    config["mixed_precision"] = "no";
    ask_tpu(q, config);
  } else if (!(type == "DEEPSPEED" && config["deepspeed_config"].contains("deepspeed_config_file"))) {
    config["mixed_precision"] =
        q.choice("In which number format should it compute", {"no", "fp16", "bf16", "fp8"}, "no");
    if (config["mixed_precision"] == "fp8") ask_fp8(q, config);
  }
  return config;
}

Value ask_sagemaker(Questions& q) {
  Value config{{"compute_environment", "AMAZON_SAGEMAKER"}, {"use_cpu", false}};
  if (q.choose("How is the job authorised?",
               {"By a profile of the AWS credentials", "By keys that are given to `accelerate launch`"}) == 0)
    config["profile"] = q.something("Which profile?", "default");
  else q.say("Give them as --aws_access_key_id and --aws_secret_access_key; they are not written to the file.");
  config["region"] = q.something("In which AWS region?", "us-east-1");
  if (q.choose("Under which IAM role does the job run?",
               {"Under one that exists", "Under a new one, which the first launch makes"}) == 0)
    config["iam_role_name"] = q.something("What is its name?");
  else config["iam_role_name"] = "accelerate_sagemaker_execution_role";  // the name that the launch knows
  if (q.yes("Is there a container image of your own?", false)) config["image_uri"] = q.something("Which image?");
  if (q.yes("Are there input channels?", false))
    config["sagemaker_inputs_file"] = q.something("Which file lists them (columns channel_name, data_location)?");
  if (q.yes("Should metrics be found in the logs?", false))
    config["sagemaker_metrics_file"] = q.something("Which file lists them (columns metric_name, metric_regex)?");
  const bool parallel = q.choose("What kind of training?", {"One machine", "Data parallel"}) == 1;
  config["distributed_type"] = parallel ? "DATA_PARALLEL" : "NO";
  ask_dynamo(q, config);
  if (parallel) {
    config["ec2_instance_type"] =
        q.choice("Which kind of machine", {"ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"}, "ml.p3.16xlarge");
    config["debug"] = q.yes("Should tensor shapes be compared before each collective?", false);
    config["num_machines"] = q.number("How many machines?", 1, 1);
  } else {
    config["ec2_instance_type"] = q.something("Which kind of machine?", "ml.p3.2xlarge");
  }
  config["mixed_precision"] = q.choice("In which number format should it compute", {"no", "fp16", "bf16", "fp8"}, "no");
  return config;
}

}  // namespace
}  // namespace accelerate::config

namespace accelerate {

std::string ask_config(Dialog& dialog, const std::filesystem::path& file) {
  using namespace config;
  Questions questions(dialog);
  const Value given = questions.run([](Questions& q) {
    return q.choose("Where should the training run?", {"On this machine", "On Amazon SageMaker"}) == 0
               ? ask_cluster(q)
               : ask_sagemaker(q);
  });
  const Value complete = complete_config(given, file.string());
  save_config(complete, file);
  return file.extension() == ".json" ? write_json(without_empty(complete)) : write_yaml(without_empty(complete));
}

}  // namespace accelerate
