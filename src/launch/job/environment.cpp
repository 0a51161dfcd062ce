#include "launch/job/environment.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "accelerate/config/option.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/option_values.hpp"
#include "utils/device_types.hpp"

namespace accelerate::launcher {
namespace {

using Variables = std::map<std::string, std::string>;

std::string changed(std::string text, int (*change)(int)) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [change](unsigned char c) { return static_cast<char>(change(c)); });
  return text;
}

/// The variables of all settings with a value in one section of the table.
void add_section(Variables& env, const Settings& settings, const std::string& section) {
  for (const auto& group : config::launch_table().groups)
    for (const auto& option : group.options) {
      if (option.form == config::Form::none || !option.section || option.section != section ||
          settings[option.name].is_null())
        continue;
      const std::string text = settings.text(option.name);
      env[option.variable] = option.form == config::Form::lower ? changed(text, std::tolower) : text;
    }
}

void add_fp8(Variables& env, const Settings& settings) {
  add_section(env, settings, "fp8_config");
  const auto& overrides = settings["fp8_override_linear_precision"];
  const char* names[] = {"FPROP", "DGRAD", "WGRAD"};
  for (size_t i = 0; i < 3; ++i)
    env[std::string("ACCELERATE_FP8_OVERRIDE_") + names[i]] = config::python_text(overrides.at(i));
}

void add_parallelism(Variables& env, const Settings& settings) {
  env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true";
  add_section(env, settings, "parallelism_config");
  if (settings.integer("parallelism_config_cp_size").value_or(1) <= 1) env.erase("PARALLELISM_CONFIG_CP_COMM_STRATEGY");
  if (settings.integer("parallelism_config_sp_size").value_or(1) > 1)
    env["PARALLELISM_CONFIG_SP_SEQ_LENGTH"] =
        config::python_text(settings["parallelism_config_sp_seq_length"]);  // "None" when it has none
  else
    for (const char* name : {"SEQ_LENGTH", "SEQ_LENGTH_IS_VARIABLE", "ATTN_IMPLEMENTATION"})
      env.erase(std::string("PARALLELISM_CONFIG_SP_") + name);
}

/// Which keys of DeepSpeed's configuration came from the config file: its plugin complains where DeepSpeed's own file
/// says something else.
std::string deepspeed_fields(const Settings& settings) {
  if (settings.file().is_null()) return "";
  std::vector<std::string> fields;
  for (const auto& [key, value] : settings.file()["deepspeed_config"].items()) fields.push_back(key);
  if (settings.source("mixed_precision") == ValueSource::file) fields.emplace_back("mixed_precision");
  return changed(fmt::format("{}", fmt::join(fields, ",")), std::tolower);
}

void add_deepspeed(Variables& env, const Settings& settings, const Host& host) {
  env["ACCELERATE_USE_DEEPSPEED"] = "true";
  env["ACCELERATE_CONFIG_DS_FIELDS"] = deepspeed_fields(settings);
  add_section(env, settings, "deepspeed_config");
  const auto path = host.variable("PYTHONPATH");
  env["PYTHONPATH"] = (path ? *path + ":" : "") + std::filesystem::current_path().string();
}

/// The source of a setting's value, in the words of receipts.
std::string origin_of(const config::Option& option, ValueSource source, const std::filesystem::path& file) {
  switch (source) {
    case ValueSource::flag:
      return "flag " + flag_of(option);
    case ValueSource::environment:
      return fmt::format("variable {}", option.variable ? option.variable : "SLURM_*");
    case ValueSource::file:
      return "file " + file.string();
    case ValueSource::fallback:
      break;
  }
  return "default";
}

/// So that ranks can say of each variable who has set it.
void add_receipts(Variables& env, const Job& job) {
  if (job.receipts_file.empty()) return;
  const Settings& s = job.settings;
  config::Value sources = config::Value::object();
  const auto tell = [&](const char* variable, const std::string& name) {
    sources[variable] = origin_of(option_called(name), s.source(name), job.config_file);
  };
  for_each_option([&](const config::Option& option) {
    if (option.variable && option.kind != config::Kind::unset) tell(option.variable, option.name);
  });
  tell("WORLD_SIZE", "num_processes");
  tell("GROUP_WORLD_SIZE", "num_machines");
  if (s.source("use_cpu") > s.source("cpu")) tell("ACCELERATE_USE_CPU", "use_cpu");
  env["ACCELERATE_RECEIPTS"] = s.text("receipts") == "strict" ? "strict" : "1";
  env["ACCELERATE_RECEIPTS_FILE"] = job.receipts_file.string();
  env["ACCELERATE_RECEIPTS_SOURCES"] = sources.dump(-1, ' ', false, config::Value::error_handler_t::replace);
}

Variables tpu_protocol(const Settings& settings) {
  Variables env;
  if (settings.on("debug")) env["ACCELERATE_DEBUG_MODE"] = "true";
  if (settings.text("mixed_precision") == "bf16")
    env[settings.on("downcast_bf16") ? "XLA_DOWNCAST_BF16" : "XLA_USE_BF16"] = "1";
  return env;
}

/// The environment of a job on SageMaker. The reference asks for `debug` and forgets it.
Variables sagemaker_protocol(const Settings& settings) {
  Variables env{{"ACCELERATE_USE_SAGEMAKER", "true"},
                {"ACCELERATE_MIXED_PRECISION", settings.text("mixed_precision")},
                {"ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", settings.text("distributed_type")}};
  add_section(env, settings, "dynamo_config");
  env["ACCELERATE_DYNAMO_BACKEND"] = changed(settings.text("dynamo_backend"), std::toupper);
  if (settings.text("mixed_precision") == "fp8") add_fp8(env, settings);
  if (settings.on("debug")) env["ACCELERATE_DEBUG_MODE"] = "true";
  if (const auto steps = settings.integer("gradient_accumulation_steps"))
    env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = std::to_string(*steps);
  return env;
}

/// The variables that mpirun or srun hands to the ranks on all machines of DeepSpeed's hostfile; it numbers them
/// itself. Slurm says where they meet, unless the user does.
void add_for_machines(Variables& env, const Job& job, const Host& host) {
  const Settings& s = job.settings;
  if (!job.main_ip.empty()) env["MASTER_ADDR"] = job.main_ip;
  if (job.starter != Job::Starter::srun || s.source("main_process_port") > ValueSource::fallback)
    env["MASTER_PORT"] = std::to_string(job.main_port);
  if (!host.environment.contains("OMP_NUM_THREADS")) env["OMP_NUM_THREADS"] = std::to_string(s.threads_per_process());
  env.insert(job.exported.begin(), job.exported.end());
}

}  // namespace

std::map<std::string, std::string> protocol(const Settings& settings, const Host& host) {
  const Launcher launcher = settings.launcher();
  if (launcher == Launcher::sagemaker) return sagemaker_protocol(settings);
  if (launcher == Launcher::tpu) return tpu_protocol(settings);
  const std::string precision = settings.text("mixed_precision");
  Variables env{{"ACCELERATE_MIXED_PRECISION", precision}};
  if (precision == "fp8") add_fp8(env, settings);
  if (settings.on("debug")) env["ACCELERATE_DEBUG_MODE"] = "true";
  if (settings.on("enable_cpu_affinity")) env["ACCELERATE_CPU_AFFINITY"] = "1";
  const auto& device = settings.device_type();
  if (const std::string ids = settings.text("gpu_ids"); !ids.empty() && ids != "all") env[device.visible] = ids;
  if (const auto steps = settings.integer("gradient_accumulation_steps"))
    env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = std::to_string(*steps);
  if (launcher == Launcher::deepspeed) {
    add_deepspeed(env, settings, host);
  } else {
    env["OMP_NUM_THREADS"] = std::to_string(settings.threads_per_process());
    // Compilers of graphs are Python's; a Python program started from here looks for them.
    add_section(env, settings, "dynamo_config");
    env["ACCELERATE_DYNAMO_BACKEND"] = changed(settings.text("dynamo_backend"), std::toupper);
  }
  if (launcher == Launcher::simple) {
    env["ACCELERATE_USE_CPU"] = settings.computes_on_cpu() ? "True" : "False";
    if (settings.computes_on_cpu())
      env.insert({{"KMP_AFFINITY", "granularity=fine,compact,1,0"}, {"KMP_BLOCKTIME", "1"}});
    return env;
  }
  if (host.peer_access_is_broken && device.backend == std::string_view("nccl"))
    for (const char* name : {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"})
      if (!host.environment.contains(name)) env[name] = "1";
  if (launcher == Launcher::torchrun && settings.on("use_fsdp")) {
    env["ACCELERATE_USE_FSDP"] = "true";
    add_section(env, settings, "fsdp_config");
  }
  if (launcher == Launcher::torchrun && settings.on("use_megatron_lm")) {
    env["ACCELERATE_USE_MEGATRON_LM"] = "true";
    add_section(env, settings, "megatron_lm_config");
  }
  // FSDP on the CPU has no flag of its own: files say use_cpu. A flag --use_fsdp is stronger than a file about the CPU.
  if (settings.on("use_fsdp") && settings.on("use_cpu") && settings.source("use_cpu") >= settings.source("use_fsdp"))
    env["ACCELERATE_USE_CPU"] = "True";
  if (settings.on("use_parallelism_config")) add_parallelism(env, settings);
  return env;
}

std::map<std::string, std::string> build_environment(const Job& job, const Host& host, int64_t local_rank) {
  Variables env = protocol(job.settings, host);
  add_receipts(env, job);
  if (!job.devices.empty()) env[job.settings.device_type().visible] = fmt::format("{}", fmt::join(job.devices, ","));
  if (!job.remote.empty()) add_for_machines(env, job, host);
  if (!job.tells_ranks()) {
    // Alone, though srun has started other launchers: the program must not take their tasks for its peers.
    if (job.starter == Job::Starter::launcher && host.number("SLURM_STEP_NUM_TASKS").value_or(1) > 1)
      env.insert({{"WORLD_SIZE", "1"}, {"RANK", "0"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}});
    // Also for one process of which a file says that it is several: it may start the others itself.
    if (job.settings.launcher() == Launcher::simple && job.settings.num_processes() > 1)
      env.insert(
          {{"MASTER_ADDR", job.main_ip}, {"MASTER_PORT", std::to_string(job.main_port ? job.main_port : 29500)}});
    return env;
  }
  const auto rank = std::to_string(job.rank(local_rank));
  const auto world_size = std::to_string(job.world_size);
  env.insert({{"MASTER_ADDR", job.main_ip},
              {"MASTER_PORT", std::to_string(job.main_port)},
              {"RANK", rank},
              {"LOCAL_RANK", std::to_string(job.place ? job.place->local_rank : local_rank)},
              {"WORLD_SIZE", world_size},
              {"LOCAL_WORLD_SIZE", std::to_string(job.place ? job.place->local_world_size : job.local_world_size)},
              {"GROUP_RANK", std::to_string(job.machine_rank)},
              {"GROUP_WORLD_SIZE", std::to_string(job.num_machines)},
              {"ROLE_NAME", job.settings.text("role")},
              {"ROLE_RANK", rank},
              {"ROLE_WORLD_SIZE", world_size},
              {"TORCHELASTIC_RUN_ID", job.run_id},
              {"TORCHELASTIC_RESTART_COUNT", std::to_string(job.attempt)},
              {"TORCHELASTIC_MAX_RESTARTS", std::to_string(job.max_restarts)},
              // On one machine the launcher opens no port: rank 0 hosts the store.
              {"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  if (const auto& round = job.round) {
    const std::pair<const char*, std::string> places[] = {
        {"MASTER_ADDR", round->master_addr},
        {"MASTER_PORT", std::to_string(round->master_port)},
        {"WORLD_SIZE", std::to_string(round->world_size)},
        {"GROUP_RANK", std::to_string(round->group_rank)},
        {"GROUP_WORLD_SIZE", std::to_string(round->group_world_size)},
        {"ROLE_RANK", std::to_string(round->first_role_rank + local_rank)},
        {"ROLE_WORLD_SIZE", std::to_string(round->role_world_size)},
        {"TORCHELASTIC_RUN_ID", round->run_id},
        {"TORCHELASTIC_RESTART_COUNT", std::to_string(round->restarts)},
        {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
    for (const auto& [name, value] : places) env[name] = value;
  }
  // Ranks that find no such device say so, where they would else train on the CPU. Nobody asks for that with FSDP.
  if (job.settings.on("multi_gpu") && job.settings.source("multi_gpu") > ValueSource::fallback &&
      !job.settings.computes_on_cpu())
    env["ACCELERATE_LAUNCHED_FOR"] = job.settings.device_type().name;
  if (!host.environment.contains("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    env.emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  return env;
}

std::vector<std::string> merged(const Host& host, const std::map<std::string, std::string>& changes) {
  auto all = changes;
  all.insert(host.environment.begin(), host.environment.end());  // keeps what `changes` already has
  std::vector<std::string> result;
  for (const auto& [name, value] : all) result.push_back(name + "=" + value);
  return result;
}

}  // namespace accelerate::launcher
