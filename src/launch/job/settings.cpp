#include "launch/job/settings.hpp"

#include <algorithm>

#include "config/config_file.hpp"
#include "launch/job/host.hpp"
#include "launch/job/option_values.hpp"
#include "launch/job/rendezvous.hpp"
#include "launch/job/require.hpp"
#include "utils/slurm.hpp"

namespace accelerate::launcher {
namespace {

using config::Kind;
using config::Option;
using config::Value;

constexpr const char* kParadigms[] = {"multi_gpu",     "tpu",      "tpu_use_cluster",
                                      "use_deepspeed", "use_fsdp", "use_megatron_lm"};

constexpr const char* kStrategies[] = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"};

}  // namespace

Settings::Settings(const LaunchRequest& request, const Host& host) {
  for_each_option([&](const Option& option) {
    if (option.kind != Kind::unset) entries_[option.name].value = config::default_value(option);
  });
  take_flags(request.settings);
  check_flags();
  take_environment(host);
  take_slurm(host);
  if (!request.config_file.empty()) take_file(request.config_file);
  take_rdzv_conf();
  take_place(host);
  fill_in(host);
  take_torchrun_variables(host);
  choose_threads(host);
  remark();
}

const Value& Settings::operator[](const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) raise<InternalError>("no setting is called {}", name);
  if (!found->second.error.empty()) raise<ConfigError>("{}", found->second.error);
  return found->second.value;
}

ValueSource Settings::source(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) raise<InternalError>("no setting is called {}", name);
  return found->second.source;
}

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
void Settings::set(const std::string& name, Value value, ValueSource source) {
  Entry& entry = entries_[name];
  if (source >= entry.source) entry = {std::move(value), source, ""};
}

std::string Settings::without_minimum(const std::string& name, const std::string& text, ValueSource source,
                                      const std::string& where) {
  if (name != "num_machines" || source < this->source(name)) return text;
  min_machines_.reset();
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return text;
  const Option& option = option_called(name);
  const int64_t least = config::parse_value(option, text.substr(0, colon), where).get<int64_t>(),
                most = config::parse_value(option, text.substr(colon + 1), where).get<int64_t>();
  require(least >= 1 && least <= most, "{} is '{}', expected MIN:MAX with at least 1 machine and MIN not above MAX",
          where, text);
  min_machines_ = least;
  return text.substr(colon + 1);
}

void Settings::take_flags(const GivenSettings& given) {
  for (const auto& [name, text] : given) {
    const Option& option = option_called(name);
    const std::string flag = flag_of(option);
    Value value = config::parse_value(option, without_minimum(name, text, ValueSource::flag, flag), flag);
    if (option.kind == Kind::truth && (text == "False" || text == "false" || text == "0" || text == "no"))
      remarks_.push_back(fmt::format(
          "{} {} means True, as any text does in Hugging Face Accelerate; leave the option out, or write false in a "
          "config file",
          flag, text));
    if (option.kind == Kind::append && entries_[name].source == ValueSource::flag)
      entries_[name].value.push_back(value);
    else set(name, option.kind == Kind::append ? Value::array({value}) : value, ValueSource::flag);
  }
}

void Settings::check_flags() const {
  int several = 0;
  for (const char* name : {"multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp"}) several += on(name);
  require(several <= 1,
          "--cpu, --multi_gpu, --tpu, --use_deepspeed and --use_fsdp exclude each other: give one of them");
  require(!on("multi_gpu") || integer("num_processes").value_or(2) >= 2,
          "--multi_gpu needs at least 2 processes, and --num_processes is {}", text("num_processes"));
  require(!on("use_parallelism_config") || (on("use_fsdp") && text("fsdp_version") == "2"),
          "--use_parallelism_config needs --use_fsdp and --fsdp_version 2");
  require(!(on("module") && on("no_python")),
          "--module and --no_python contradict each other: a module is always run by Python. Leave one out");
  require(integer("num_processes").value_or(1) >= 1, "--num_processes is {}, but at least 1 process is needed",
          text("num_processes"));
}

void Settings::take_environment(const Host& host) {
  for_each_option([&](const Option& option) {
    if (!option.variable || option.kind == Kind::unset || std::string_view(option.variable) == "OMP_NUM_THREADS")
      return;
    if (const auto given = host.variable(option.variable))
      set(option.name, from_environment(option, *given), ValueSource::environment);
  });
}

/// Launchers that srun has started, one on each machine, are the machines of one job.
void Settings::take_slurm(const Host& host) {
  if (host.environment.contains("WORLD_SIZE")) return;  // a rank of another launcher, whatever started that
  const auto task = slurm::this_task([&](const char* name) { return host.variable(name); });
  if (!task || task->world_size < 2 || !text("hostfile").empty()) return;
  if (source("num_machines") > ValueSource::file && num_machines() != task->world_size)
    return;                                // somebody has another plan, such as jobs of one machine each
  if (task->local_world_size > 1) return;  // ranks, not machines: take_place()
  set("num_machines", task->world_size, ValueSource::environment);
  set("machine_rank", task->rank, ValueSource::environment);
  set("main_process_ip", task->address, ValueSource::environment);
  set("main_process_port", task->port, ValueSource::environment);
  set("deepspeed_multinode_launcher", "standard", ValueSource::environment);  // all of them are started already
  slurm_step_ = task->step;
}

/// People give there what they would give torchrun itself.
void Settings::take_rdzv_conf() {
  const auto take = [this](const std::string& key, const std::string& name, const std::string& text) {
    const std::string where = fmt::format("--rdzv_conf {}", key);
    const Value value = config::parse_value(option_called(name), text, where);
    const bool open = source(name) == ValueSource::fallback;
    // A user who has numbered the machines means a fixed set of them, as the reference starts it.
    if (name == "rdzv_backend" ? open && (*this)["machine_rank"].is_null() : open)
      entries_[name] = {value, source("rdzv_conf"), ""};
    else if ((*this)[name] != value)
      remarks_.push_back(fmt::format("'{}' in --rdzv_conf has no effect: {} is {}", key, flag_of(option_called(name)),
                                     this->text(name)));
  };
  for (const auto& [key, value] : rendezvous_entries(text("rdzv_conf"))) {
    for (const auto& [word, name] : kTorchrunKeys)
      if (key == word) take(key, name, value);
    if (key != kEndpointKey) continue;
    const size_t colon = value.rfind(':');
    take(key, "main_process_ip", value.substr(0, colon));
    if (colon != std::string::npos) take(key, "main_process_port", value.substr(colon + 1));
  }
}

/// Ranks of another launcher's are one process each, or N of them would become N times N.
void Settings::take_place(const Host& host) {
  if (host.environment.contains("WORLD_SIZE") || !text("hostfile").empty()) return;
  // Somebody has another plan: these are machines, or (by a flag) jobs of their own.
  if (num_machines() > 1 || source("num_machines") > ValueSource::file) return;
  place_ = place_in_mpi(host);
  const auto task = slurm::this_task([&](const char* name) { return host.variable(name); });
  if (!place_ && task && task->world_size > 1)
    place_ = {.launcher = "srun",
              .rank = task->rank,
              .world_size = task->world_size,
              .local_rank = task->local_rank,
              .local_world_size = task->local_world_size,
              .address = task->address,
              .port = task->port};
  if (const auto rank = host.number("PMIX_RANK"); !place_ && rank && *rank > 0)
    raise<ConfigError>(
        "launch: found PMIX_RANK {}, and no variable that says how many ranks there are: each launcher would start a "
        "job of its own. Start by mpirun or srun, which say it, or give --num_machines N --machine_rank $PMIX_RANK "
        "--num_processes N; --num_machines 1 if these are jobs of their own",
        *rank);
  if (!place_) return;
  if (const auto address = host.variable("MASTER_ADDR")) place_->address = *address;
  if (const auto port = host.number("MASTER_PORT")) place_->port = *port;
  if (const std::string address = text("main_process_ip"); !address.empty()) place_->address = address;
  if (const auto port = integer("main_process_port"); port.value_or(0) > 0) place_->port = *port;
  if (place_->rank > 0) return;
  const auto asked = integer("num_processes");
  remarks_.push_back(
      fmt::format("{} has started {} launchers: each starts one process, and these meet at {}:{}{}. Jobs of their own "
                  "are they with --num_machines 1",
                  place_->launcher, place_->world_size, place_->address, place_->port,
                  source("num_processes") > ValueSource::fallback && asked && *asked != place_->world_size
                      ? fmt::format("; num_processes, which is {}, has no effect", *asked)
                      : ""));
}

void Settings::take_file(const std::filesystem::path& path) {
  file_name_ = path.string();
  file_ = config::load_config(path);
  if (config::is_sagemaker(file_)) {
    for (const char* name : {"mixed_precision", "debug", "num_machines", "gpu_ids", "distributed_type"})
      if (!file_[name].is_null()) set(name, file_[name], ValueSource::file);
    if (file_["dynamo_config"].is_object()) take_section("dynamo_config", file_["dynamo_config"]);
    return;
  }
  for (const auto& [key, value] : file_.items())
    if (!value.is_object()) take_key(key, value);
  choose_paradigm();
  // Settings of an engine that the job does not use have no say, and may be nonsense.
  for (const auto& [section, content] : file_.items()) {
    if (!content.is_object() || content.empty()) continue;
    if (uses_section(section)) take_section(section, content);
    else
      remarks_.push_back(
          fmt::format("'{}' in the config file {} has no effect: this job does not use it", section, file_name_));
  }
}

void Settings::take_key(const std::string& key, const Value& value) {
  const std::string where = fmt::format("the config file {}: '{}'", file_name_, key);
  try {
    Value converted =
        from_file(option_called(key),
                  value.is_string() ? Value(without_minimum(key, value, ValueSource::file, where)) : value, file_name_);
    if (!converted.is_null()) set(key, std::move(converted), ValueSource::file);
  } catch (const ConfigError& error) {
    if (Entry& entry = entries_[key]; entry.source <= ValueSource::file)
      entry.source = ValueSource::file, entry.error = error.what();
  }
}

void Settings::take_section(const std::string& section, const Value& content) {
  for (const auto& [key, value] : content.items()) {
    if (const auto* option = config::option_of(section, key)) {
      if (Value converted = from_file(*option, value, file_name_); !converted.is_null())
        set(option->name, std::move(converted), ValueSource::file);
      continue;
    }
    const auto nearest = config::nearest_key(section, key);
    remarks_.push_back(fmt::format("'{}' in {} of the config file {} has no effect: there is no such setting{}", key,
                                   section, file_name_, nearest ? fmt::format(". Did you mean '{}'?", *nearest) : ""));
  }
}

bool Settings::uses_section(const std::string& section) const {
  const std::pair<const char*, const char*> engines[] = {{"deepspeed_config", "use_deepspeed"},
                                                         {"fsdp_config", "use_fsdp"},
                                                         {"megatron_lm_config", "use_megatron_lm"},
                                                         {"parallelism_config", "use_parallelism_config"}};
  for (const auto& [name, engine] : engines)
    if (section == name) return on(engine) && !on("cpu");
  return section != "fp8_config" || in_small_letters(text("mixed_precision")) == "fp8";
}

/// The file's kind of training, unless a flag or a variable says another.
void Settings::choose_paradigm() {
  const bool chosen = std::any_of(std::begin(kParadigms), std::end(kParadigms),
                                  [&](const char* name) { return source(name) > ValueSource::file && on(name); });
  const std::string type = text("distributed_type");
  if (chosen) return;
  set("use_deepspeed", type == "DEEPSPEED", ValueSource::file);
  set("use_fsdp", type == "FSDP", ValueSource::file);
  set("use_megatron_lm", type == "MEGATRON_LM", ValueSource::file);
  set("tpu", type == "XLA", ValueSource::file);
  set("multi_gpu", type.starts_with("MULTI_") && type != "MULTI_CPU", ValueSource::file);
  set("use_parallelism_config", !file_["parallelism_config"].empty(), ValueSource::file);
}

void Settings::fill_in(const Host& host) {
  const bool sagemaker = !file_.is_null() && config::is_sagemaker(file_);
  if (!file_.is_null()) {
    require(num_processes() != -1 || place_,
            "the config file {} leaves the number of processes open: give --num_processes", file_name_);
    if ((*this)["gpu_ids"].is_null()) set("gpu_ids", "all", ValueSource::file);
  } else {
    if ((*this)["num_processes"].is_null())
      set("num_processes",
          slurm_step_.empty() ? host.accelerators : std::max<int64_t>(1, host.accelerators) * num_machines(),
          ValueSource::fallback);
    if (num_processes() > 1 && host.accelerators > 1) set("multi_gpu", true, ValueSource::fallback);
    set("use_cpu", (*this)["cpu"], ValueSource::fallback);
  }
  if ((*this)["mixed_precision"].is_null()) set("mixed_precision", "no", ValueSource::fallback);
  if ((*this)["dynamo_backend"].is_null()) set("dynamo_backend", "no", ValueSource::fallback);
  // The reference's files say MULTI_GPU of any machine whose devices behave like CUDA's.
  const auto* named = devices::of_distributed_type(text("distributed_type"));
  const auto* here = devices::find(host.device_type);
  device_type_ = named && named->name != std::string_view("cuda") ? named : here;
  const std::string ids = text("gpu_ids");
  require(!on("multi_gpu") || on("cpu") || num_machines() > 1 || ids.empty() || ids == "all" ||
              ids.find(',') != std::string::npos,
          "--gpu_ids names one GPU ({}), and several are to be used. Name at least two, or all", ids);
  const std::string backend = in_small_letters(text("dynamo_backend"));
  const auto& dynamo = option_called("dynamo_backend");
  if (backend != "torchxla_trace_once" && backend != "hpu_backend" && backend != "neuron")
    config::parse_value(dynamo, backend, "dynamo_backend");
  entries_["mixed_precision"].value = config::parse_value(option_called("mixed_precision"),
                                                          in_small_letters(text("mixed_precision")), "mixed_precision");
  // Each rank would refuse this.
  if (text("mixed_precision") == "fp8")
    for (const char* name : {"fp8_interval", "fp8_amax_history_len"})
      require(integer(name).value_or(1) >= 1, "{} is {}, expected at least 1: every process would refuse it",
              flag_of(option_called(name)), text(name));

  if (sagemaker) launcher_ = Launcher::sagemaker;
  else if (on("cpu")) launcher_ = Launcher::simple;
  else if (on("use_deepspeed")) launcher_ = Launcher::deepspeed;
  else if (on("use_fsdp") || on("use_megatron_lm") || on("multi_gpu")) launcher_ = Launcher::torchrun;
  else if (on("tpu")) launcher_ = Launcher::tpu;
  name_strategy();
  require(launcher_ != Launcher::torchrun || !on("use_fsdp") || !on("fsdp_cpu_ram_efficient_loading") ||
              on("fsdp_sync_module_states"),
          "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: only one process reads the weights, so the "
          "others must take them from it");
}

/// torchrun reads its options from PET_<NAME>, too (operators of clusters set them); flags and files are stronger.
void Settings::take_torchrun_variables(const Host& host) {
  if (launcher_ != Launcher::torchrun && launcher_ != Launcher::deepspeed) return;
  const auto take = [&](const char* variable, const std::string& name, ValueSource weaker) {
    const auto text = host.variable(variable);
    if (!text || source(name) > weaker) return;
    const std::string where = fmt::format("the environment variable {}", variable);
    const std::string plain = without_minimum(name, *text, ValueSource::environment, where);
    set(name, config::parse_value(option_called(name), plain, where), ValueSource::environment);
  };
  for (const auto& [variable, name] : {std::pair("PET_MAX_RESTARTS", "max_restarts"),
                                       {"PET_MONITOR_INTERVAL", "monitor_interval"},
                                       {"PET_TEE", "tee"},
                                       {"PET_REDIRECTS", "redirects"},
                                       {"PET_LOG_DIR", "log_dir"},
                                       {"PET_ROLE", "role"},
                                       {"PET_RDZV_CONF", "rdzv_conf"}})
    take(variable, name, ValueSource::fallback);
  const auto here = host.number("PET_NPROC_PER_NODE");  // or a word: gpu, auto
  if (here && source("num_processes") == ValueSource::fallback) set("num_processes", *here, ValueSource::environment);
  const auto machines = host.variable("PET_NNODES");
  if (!machines || *machines == "1" || num_machines() > 1 || source("num_machines") > ValueSource::file) return;
  // The user who has set these has started all machines.
  take("PET_NNODES", "num_machines", ValueSource::file);
  take("PET_NODE_RANK", "machine_rank", ValueSource::file);  // which each file has
  take("PET_RDZV_BACKEND", "rdzv_backend", ValueSource::file);
  set("deepspeed_multinode_launcher", "standard", ValueSource::environment);
  take("PET_MASTER_ADDR", "main_process_ip", ValueSource::fallback);
  take("PET_MASTER_PORT", "main_process_port", ValueSource::fallback);
  if (const auto place = host.variable("PET_RDZV_ENDPOINT"); place && text("main_process_ip").empty()) {
    const size_t colon = place->rfind(':');
    set("main_process_ip", place->substr(0, colon), ValueSource::environment);
    if (colon != std::string::npos)
      set("main_process_port",
          config::parse_value(option_called("main_process_port"), place->substr(colon + 1), "PET_RDZV_ENDPOINT"),
          ValueSource::environment);
  }
  // torchrun's numbers are those of a machine.
  const int64_t each = std::max<int64_t>(1, num_processes());
  entries_["processes_per_machine"] = {each, ValueSource::environment, ""};
  entries_["num_processes"].value = each * num_machines();
}

/// Version 1 has its strategy from fsdp_sharding_strategy; the reference's questions write it as
/// fsdp_reshard_after_forward, where nobody reads it.
void Settings::name_strategy() {
  if (!on("use_fsdp") || text("fsdp_version") != "1") return;
  const std::string given = in_small_letters(text("fsdp_reshard_after_forward"));
  if (std::find(std::begin(kStrategies), std::end(kStrategies), given) == std::end(kStrategies)) return;
  const ValueSource source = this->source("fsdp_reshard_after_forward"), other = this->source("fsdp_sharding_strategy");
  const bool differs = other != ValueSource::fallback && in_small_letters(text("fsdp_sharding_strategy")) != given;
  // Where both have one source, the reference takes the one that it reads.
  if (other == ValueSource::fallback || source > other)
    entries_["fsdp_sharding_strategy"] = {(*this)["fsdp_reshard_after_forward"], source, ""};
  if (differs)
    remarks_.push_back(
        fmt::format("fsdp_reshard_after_forward and fsdp_sharding_strategy name different strategies, "
                    "which in version 1 are one setting: {} counts",
                    text("fsdp_sharding_strategy")));
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

}  // namespace accelerate::launcher
