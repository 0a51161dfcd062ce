#include "launch/settings.hpp"

#include <algorithm>

#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"
#include "config/config_file.hpp"
#include "launch/job.hpp"
#include "utils/slurm.hpp"

namespace accelerate::launcher {
namespace {

using config::Kind;
using config::Option;
using config::Value;

template <class Function> void for_each_option(Function function) {
  for (const auto& group : config::launch_table().groups)
    for (const auto& option : group.options)
      if (!option.positional()) function(option);
}

const Option& option_called(const std::string& name) {
  if (const Option* option = config::launch_table().find(name)) return *option;
  std::vector<std::string> names;
  for_each_option([&](const Option& option) { names.push_back(option.name); });
  const auto nearest = nearest_name(name, names);
  throw ConfigError("there is no setting '" + name + "'" + (nearest ? ". Did you mean '" + *nearest + "'?" : ""));
}

/// How a user would have written the setting.
std::string flag_of(const Option& option) {
  const auto spellings = option.spellings();
  for (const auto& spelling : spellings)
    if (spelling.starts_with("--")) return spelling;
  return option.name;
}

/// A file's value as the setting's kind: files say 'no' with and without quotes, numbers as text, "(false, false,
/// false)" for three.
Value from_file(const Option& option, const Value& value, const std::string& file) {
  const std::string where = "the config file " + file + ": '" + option.name + "'";
  if (value.is_null() ||
      (value.is_string() && (option.kind == Kind::integer || option.kind == Kind::number) && value == ""))
    return nullptr;
  switch (option.kind) {
    case Kind::integer:
      if (!value.is_number_integer()) return config::parse_value(option, config::python_text(value), where);
      return value;
    case Kind::number:
      if (!value.is_number()) return config::parse_value(option, config::python_text(value), where);
      return value;
    case Kind::flag:
      return value.is_string() ? Value(config::str_to_bool(value, where)) : Value(config::truthy(value));
    case Kind::booleans: {
      if (!value.is_string()) {
        if (!value.is_array() || value.size() != 3)
          throw ConfigError(where + " is " + config::python_text(value) +
                            ", expected three values: [false, false, false]");
        return value;
      }
      std::string plain;
      for (char c : value.get<std::string>())
        if (c != '(' && c != ')' && c != '[' && c != ']' && c != ' ') plain += c;
      Value three = config::parse_value(option, plain, where);
      for (auto& item : three) item = config::truthy(item);
      return three;
    }
    case Kind::append:
    case Kind::words:
      return value.is_array() ? value : Value::array({value});
    default:
      return value;
  }
}

/// What a caller's environment variable means. The protocol writes names in capitals that flags take in small letters.
Value from_environment(const Option& option, std::string text) {
  if (option.kind == Kind::truth)
    return config::str_to_bool(text, std::string("the environment variable ") + option.variable);
  if (option.choices) {
    const auto choices = option.choice_list();
    for (const auto& choice : choices)
      if (std::equal(choice.begin(), choice.end(), text.begin(), text.end(),
                     [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); }))
        text = choice;
  }
  return config::parse_value(option, text, std::string("the environment variable ") + option.variable);
}

constexpr const char* kParadigms[] = {"multi_gpu",     "tpu",      "tpu_use_cluster",
                                      "use_deepspeed", "use_fsdp", "use_megatron_lm"};

void require_setting(bool condition, const std::string& message) {
  if (!condition) throw ConfigError(message);
}

}  // namespace

Settings::Settings(const LaunchOptions& options, const Host& host) {
  for_each_option([&](const Option& option) {
    if (option.kind != Kind::unset) entries_[option.name].value = config::default_value(option);
  });
  take_options(options);
  check_flags();
  take_environment(host);
  take_slurm(host);
  if (!options.config_file.empty()) take_file(options.config_file);
  fill_in(host);
  choose_threads(host);
  remark();
}

const Value& Settings::operator[](const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw InternalError("no setting is called " + name);
  return found->second.value;
}

Source Settings::source(const std::string& name) const { return (*this)[name], entries_.at(name).source; }

std::string Settings::text(const std::string& name) const {
  const Value& value = (*this)[name];
  return value.is_null() ? "" : config::python_text(value);
}

std::optional<int64_t> Settings::integer(const std::string& name) const {
  const Value& value = (*this)[name];
  return value.is_number_integer() ? std::optional(value.get<int64_t>()) : std::nullopt;
}

int64_t Settings::num_processes() const { return integer("num_processes").value_or(0); }

/// The strongest source wins; of one source the last word does.
void Settings::set(const std::string& name, Value value, Source source) {
  Entry& entry = entries_[name];
  if (source >= entry.source) entry = {std::move(value), source};
}

std::string Settings::without_minimum(const std::string& name, const std::string& text, Source source,
                                      const std::string& where) {
  if (name != "num_machines" || source < this->source(name)) return text;
  min_machines_.reset();
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return text;
  const Option& option = option_called(name);
  const int64_t least = config::parse_value(option, text.substr(0, colon), where).get<int64_t>(),
                most = config::parse_value(option, text.substr(colon + 1), where).get<int64_t>();
  require_setting(least >= 1 && least <= most,
                  where + " is '" + text + "', expected MIN:MAX with at least 1 machine and MIN not above MAX");
  min_machines_ = least;
  return text.substr(colon + 1);
}

void Settings::take_options(const LaunchOptions& o) {
  const auto give = [&](const char* name, bool given, Value value) {
    if (given) set(name, std::move(value), Source::flag);
  };
  const auto maybe = [&](const char* name, const std::optional<int64_t>& value) {
    give(name, value.has_value(), value.value_or(0));
  };
  const LaunchOptions usual;
  give("module", o.module, true);
  give("no_python", o.no_python, true);
  give("cpu", o.cpu, true);
  give("debug", o.debug, true);
  give("quiet", o.quiet, true);
  give("dry_run", o.dry_run, true);
  maybe("num_processes", o.num_processes);
  maybe("num_machines", o.num_machines);
  maybe("machine_rank", o.machine_rank);
  maybe("main_process_port", o.main_process_port);
  maybe("gradient_accumulation_steps", o.gradient_accumulation_steps);
  maybe("num_cpu_threads_per_process", o.num_cpu_threads_per_process);
  give("main_process_ip", !o.main_process_ip.empty(), o.main_process_ip);
  if (!o.mixed_precision.empty())
    set("mixed_precision",
        config::parse_value(option_called("mixed_precision"), o.mixed_precision, "--mixed_precision"), Source::flag);
  give("log_dir", !o.log_dir.empty(), o.log_dir.string());
  give("redirects", o.redirects != usual.redirects, o.redirects);
  give("tee", o.tee != usual.tee, o.tee);
  give("max_restarts", o.max_restarts != usual.max_restarts, o.max_restarts);
  give("role", o.role != usual.role, o.role);
  give("monitor_interval", o.monitor_interval != usual.monitor_interval,
       static_cast<double>(o.monitor_interval.count()) / 1000);
  give("grace_seconds", o.grace != usual.grace, static_cast<double>(o.grace.count()) / 1000);
  for (const auto& [name, text] : o.settings) {
    const Option& option = option_called(name);
    Value value =
        config::parse_value(option, without_minimum(name, text, Source::flag, flag_of(option)), flag_of(option));
    if (option.kind == Kind::truth && !text.empty() &&
        (text == "False" || text == "false" || text == "0" || text == "no"))
      remarks_.push_back(flag_of(option) + " " + text +
                         " means True, as any text does in Hugging Face Accelerate; leave the option out, or write "
                         "false in a config file");
    if (option.kind == Kind::append && entries_[name].source == Source::flag) entries_[name].value.push_back(value);
    else set(name, option.kind == Kind::append ? Value::array({value}) : value, Source::flag);
  }
}

void Settings::check_flags() const {
  int several = 0;
  for (const char* name : {"multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp"}) several += on(name);
  require_setting(several <= 1,
                  "--cpu, --multi_gpu, --tpu, --use_deepspeed and --use_fsdp exclude each other: give one of them");
  require_setting(!on("multi_gpu") || integer("num_processes").value_or(2) >= 2,
                  "--multi_gpu needs at least 2 processes, and --num_processes is " + text("num_processes"));
  require_setting(!on("use_parallelism_config") || (on("use_fsdp") && text("fsdp_version") == "2"),
                  "--use_parallelism_config needs --use_fsdp and --fsdp_version 2");
  require_setting(!(on("module") && on("no_python")),
                  "--module and --no_python contradict each other: a module is always run by Python. Leave one out");
  require_setting(integer("num_processes").value_or(1) >= 1,
                  "--num_processes is " + text("num_processes") + ", but at least 1 process is needed");
}

void Settings::take_environment(const Host& host) {
  for_each_option([&](const Option& option) {
    if (!option.variable || option.kind == Kind::unset || std::string_view(option.variable) == "OMP_NUM_THREADS")
      return;
    const auto found = host.environment.find(option.variable);
    if (found != host.environment.end() && !found->second.empty())
      set(option.name, from_environment(option, found->second), Source::environment);
  });
}

/// Launchers that srun has started, one on each machine, are the machines of one job.
void Settings::take_slurm(const Host& host) {
  if (host.environment.contains("WORLD_SIZE")) return;  // a rank of another launcher, whatever started that
  const auto task = slurm::this_task([&](const char* name) -> std::optional<std::string> {
    const auto found = host.environment.find(name);
    return found == host.environment.end() || found->second.empty() ? std::nullopt : std::optional(found->second);
  });
  if (!task || task->world_size < 2 || !text("hostfile").empty()) return;
  if (source("num_machines") > Source::file && num_machines() != task->world_size)
    return;  // somebody has another plan, such as jobs of one machine each
  require_setting(
      task->local_world_size == 1,
      "srun has started " + std::to_string(task->local_world_size) + " launchers on this machine (Slurm's step " +
          task->step + " has " + std::to_string(task->world_size) +
          " tasks). A launcher starts the processes of its machine itself: give srun --ntasks-per-node=1. Or let srun "
          "start the program without a launcher, or say that these are jobs of their own with --num_machines 1");
  set("num_machines", task->world_size, Source::environment);
  set("machine_rank", task->rank, Source::environment);
  set("main_process_ip", task->address, Source::environment);
  set("main_process_port", task->port, Source::environment);
  slurm_step_ = task->step;
}

void Settings::take_file(const std::filesystem::path& path) {
  file_name_ = path.string();
  file_ = config::load_config(path);
  if (config::is_sagemaker(file_)) {
    for (const char* name : {"mixed_precision", "debug", "num_machines", "gpu_ids", "distributed_type"})
      if (!file_[name].is_null()) set(name, file_[name], Source::file);
    if (file_["dynamo_config"].is_object())
      for (const auto& [key, value] : file_["dynamo_config"].items()) {
        const std::string name = config::setting_name("dynamo_config", key);
        set(name, from_file(option_called(name), value, file_name_), Source::file);
      }
    return;
  }
  for (const auto& [key, value] : file_.items()) {
    if (value.is_object()) {
      for (const auto& [inner, setting] : value.items()) {
        const std::string name = config::setting_name(key, inner);
        set(name, from_file(option_called(name), setting, file_name_), Source::file);
      }
    } else if (Value converted = from_file(
                   option_called(key),
                   value.is_string() ? Value(without_minimum(key, value, Source::file,
                                                             "the config file " + file_name_ + ": '" + key + "'"))
                                     : value,
                   file_name_);
               !converted.is_null()) {
      set(key, std::move(converted), Source::file);
    }
  }
  const bool chosen = std::any_of(std::begin(kParadigms), std::end(kParadigms),
                                  [&](const char* name) { return source(name) > Source::file && on(name); });
  const std::string type = text("distributed_type");
  if (chosen) return;
  set("use_deepspeed", type == "DEEPSPEED", Source::file);
  set("use_fsdp", type == "FSDP", Source::file);
  set("use_megatron_lm", type == "MEGATRON_LM", Source::file);
  set("tpu", type == "XLA", Source::file);
  set("multi_gpu", type.starts_with("MULTI_") && type != "MULTI_CPU", Source::file);
  set("use_parallelism_config", !file_["parallelism_config"].empty(), Source::file);
}

void Settings::fill_in(const Host& host) {
  const bool sagemaker = !file_.is_null() && config::is_sagemaker(file_);
  if (!file_.is_null()) {
    require_setting(num_processes() != -1,
                    "the config file " + file_name_ + " leaves the number of processes open: give --num_processes");
    if ((*this)["gpu_ids"].is_null()) set("gpu_ids", "all", Source::file);
  } else {
    if ((*this)["num_processes"].is_null())
      set("num_processes",
          slurm_step_.empty() ? host.accelerators : std::max<int64_t>(1, host.accelerators) * num_machines(),
          Source::fallback);
    if (num_processes() > 1 && host.accelerators > 1) set("multi_gpu", true, Source::fallback);
    set("use_cpu", (*this)["cpu"], Source::fallback);
  }
  if ((*this)["mixed_precision"].is_null()) set("mixed_precision", "no", Source::fallback);
  if ((*this)["dynamo_backend"].is_null()) set("dynamo_backend", "no", Source::fallback);
  const std::string ids = text("gpu_ids");
  require_setting(!on("multi_gpu") || on("cpu") || num_machines() > 1 || ids.empty() || ids == "all" ||
                      ids.find(',') != std::string::npos,
                  "--gpu_ids names one GPU (" + ids + "), and several are to be used. Name at least two, or all");
  std::string backend = text("dynamo_backend");
  std::transform(backend.begin(), backend.end(), backend.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto& dynamo = option_called("dynamo_backend");
  if (backend != "torchxla_trace_once" && backend != "hpu_backend" && backend != "neuron")
    config::parse_value(dynamo, backend, "dynamo_backend");
  std::string precision = text("mixed_precision");
  std::transform(precision.begin(), precision.end(), precision.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  entries_["mixed_precision"].value =
      config::parse_value(option_called("mixed_precision"), precision, "mixed_precision");

  if (sagemaker) launcher_ = Launcher::sagemaker;
  else if (on("cpu")) launcher_ = Launcher::simple;
  else if (on("use_deepspeed")) launcher_ = Launcher::deepspeed;
  else if (on("use_fsdp") || on("use_megatron_lm") || on("multi_gpu")) launcher_ = Launcher::torchrun;
  else if (on("tpu")) launcher_ = Launcher::tpu;
  require_setting(
      launcher_ != Launcher::torchrun || !on("use_fsdp") || !on("fsdp_cpu_ram_efficient_loading") ||
          on("fsdp_sync_module_states"),
      "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: only one process reads the weights, so the "
      "others must take them from it");
}

void Settings::choose_threads(const Host& host) {
  const int64_t inherited = host.number("OMP_NUM_THREADS").value_or(0);
  if (const auto given = integer("num_cpu_threads_per_process")) {
    threads_ = *given;
    return;
  }
  threads_chosen_ = inherited <= 0;
  threads_ = std::max<int64_t>(1, inherited);
  // The reference's rule, with its quirk that the cores are shared out only when the number of processes is known.
  if (!threads_chosen_ || !on("use_cpu") || num_processes() < 1) return;
  int64_t ranks_here = std::max<int64_t>(1, num_processes() / std::max<int64_t>(1, num_machines()));
  for (const char* name : {"MV2_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
    if (const auto value = host.number(name); value.value_or(0) > 0) ranks_here = *value;
  threads_ = std::max<int64_t>(1, host.physical_cores / ranks_here);
}

void Settings::remark() {
  const auto unused = [&](const char* section, bool used, const std::string& needs) {
    if (used) return;
    for_each_option([&](const Option& option) {
      if (option.section && option.section == std::string(section) && source(option.name) == Source::flag &&
          option.kind != Kind::unset)
        remarks_.push_back(flag_of(option) + " has no effect without " + needs);
    });
  };
  unused("fsdp_config", on("use_fsdp") && launcher_ == Launcher::torchrun, "--use_fsdp");
  unused("megatron_lm_config", on("use_megatron_lm") && launcher_ == Launcher::torchrun, "--use_megatron_lm");
  unused("parallelism_config", on("use_parallelism_config"), "--use_parallelism_config");
  unused("fp8_config", text("mixed_precision") == "fp8", "--mixed_precision fp8");
  if (launcher_ != Launcher::deepspeed)
    for (const char* name :
         {"deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
          "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_clipping", "zero3_init_flag",
          "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
          "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"})
      if (source(name) == Source::flag)
        remarks_.push_back("--" + std::string(name) + " has no effect without --use_deepspeed");
  if (launcher_ != Launcher::tpu)
    for (const char* name : {"vm", "env", "main_training_function", "downcast_bf16", "tpu_use_sudo", "tpu_use_cluster"})
      if (source(name) == Source::flag)
        remarks_.push_back(flag_of(option_called(name)) + " has no effect without --tpu");
  if (launcher_ == Launcher::sagemaker)
    for_each_option([&](const Option& option) {
      const std::string name = option.name;
      if (source(name) != Source::flag || name.starts_with("dynamo_") || name.starts_with("fp8_") ||
          option.kind == Kind::unset)
        return;
      for (const char* known :
           {"config_file", "quiet", "dry_run", "module", "no_python", "debug", "mixed_precision", "num_machines",
            "gradient_accumulation_steps", "aws_access_key_id", "aws_secret_access_key"})
        if (name == known) return;
      remarks_.push_back(flag_of(option) + " has no effect on Amazon SageMaker");
    });
  else
    for (const char* name : {"aws_access_key_id", "aws_secret_access_key"})
      if (source(name) == Source::flag)
        remarks_.push_back("--" + std::string(name) +
                           " has no effect: the config file is not one for Amazon SageMaker");
  if (launcher_ != Launcher::simple && source("mpirun_hostfile") == Source::flag)
    remarks_.push_back(
        "--mpirun_hostfile has no effect here: mpirun starts processes that compute on the CPU, with --cpu");
  if (source("monitor_host") == Source::flag && !integer("monitor_port"))
    remarks_.push_back("--monitor_host has no effect without --monitor_port");
  if (source("monitor_seconds") == Source::flag && !integer("monitor_port") && !on("monitor"))
    remarks_.push_back("--monitor_seconds has no effect without --monitor or --monitor_port");
  if (source("rdzv_conf") == Source::flag && num_machines() == 1)
    remarks_.push_back(
        "--rdzv_conf has no effect on one machine, where nobody needs to be waited for; how long the ranks wait for "
        "each other is InitProcessGroupKwargs.timeout in the program");
  if (!slurm_step_.empty())
    remarks_.push_back("Slurm's step " + slurm_step_ + ": machine " + text("machine_rank") + " of " +
                       text("num_machines") + ", meeting at " + text("main_process_ip") + ":" +
                       text("main_process_port"));
  if (on("use_parallelism_config") && (!on("use_fsdp") || text("fsdp_version") != "2"))
    remarks_.push_back("the parallelism config is for FSDP version 2");
}

}  // namespace accelerate::launcher
