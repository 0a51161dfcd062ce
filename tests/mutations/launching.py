"""Faults in starting programs."""
from faults import F

# ---- launch
n = "launch_tests LaunchFunction."
file = "src/launch/function.cpp"
F("FunctionLaunchOptions::max_restarts", file, "if («attempt >= options.max_restarts»)",
  "attempt + 1 >= options.max_restarts", n + "Restarts")
F("FunctionLaunchOptions::mixed_precision", file, '{"ACCELERATE_MIXED_PRECISION", «o.mixed_precision»}',
  'std::string("no")', n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::cpu", file, '{"ACCELERATE_USE_CPU", «o.cpu» ?', "false", n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::num_processes", file, "for (int64_t i = 0; i < «o.num_processes»; ++i) { Pipe", "int64_t{1}",
  n + "RunsCopiesWithTheirRanks")
F("FunctionLaunchOptions::num_nodes", file, "std::to_string(o.num_processes * «o.num_nodes»)", "int64_t{1}",
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::node_rank", file, "const int64_t rank = «o.node_rank» * o.num_processes", "int64_t{0}",
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::master_addr", file, '{"MASTER_ADDR", «o.master_addr»}', 'std::string("127.0.0.1")',
  n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::use_port", file, "«options.use_port.value_or(0) > 0 ? *options.use_port : choose_port()»",
  "choose_port()", n + "TwoMachinesWithRestarts")
F("FunctionLaunchOptions::rdzv_endpoint", file, "if («o.rdzv_endpoint.empty()») return o;", "true",
  n + "AnEndpointIsShortForAddressAndPort")
F("FunctionLaunchOptions::rdzv_id", file, '{"TORCHELASTIC_RUN_ID", «o.rdzv_id»}', 'std::string("none")',
  n + "AnEndpointIsShortForAddressAndPort")
F("FunctionLaunchOptions::monitor_interval", file, "clock_(«o.monitor_interval», ", "std::chrono::milliseconds(100)",
  n + "OthersMayFailByThemselvesFirst")
F("FunctionLaunchOptions::rdzv_backend", file, "require(«o.rdzv_backend == \"static\"»,", "true", n + "ImpossibleOptions")
F("FunctionLaunchOptions::rdzv_conf", file, "require(«o.rdzv_conf.empty()»,", "true", n + "ImpossibleOptions")
F("FunctionLaunchOptions::log_line_prefix_template", file, "require(«o.log_line_prefix_template.empty()»,", "true",
  n + "ImpossibleOptions")
F("set_numa_affinity", file, "if («::sched_setaffinity(0, sizeof(cpus), &cpus) != 0»)", "false",
  n + "NumaAffinityBindsProcessesToSharesOfTheCores")
request = ("module", "no_python", "num_processes", "num_machines", "machine_rank", "main_process_port", "cpu",
           "gradient_accumulation_steps", "num_cpu_threads_per_process", "debug", "quiet", "redirects", "tee",
           "max_restarts", "role", "monitor_interval", "grace_seconds", "dry_run")
file = "src/launch/request.cpp"
F("LaunchOptions::", file, "«if (value) given.emplace_back(name, flag_text(*value));»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings", each="name", of=request)
F("LaunchOptions::", file, "«if (!value.empty()) given.emplace_back(name, flag_text(value));»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings", each="name",
  of=("main_process_ip", "mixed_precision", "log_dir"))
F("LaunchOptions::settings", file, "«given.insert(given.end(), o.settings.begin(), o.settings.end());»", "",
  "launch_tests LaunchOptions.FieldsAreShortForSettings")
file = "src/launch/job/environment.cpp"

# ---- settings of the launcher, as ranks find them
F("launch --", "src/launch/job/environment.cpp", "if («option.form == config::Form::none» || !option.section", "true",
  "conformance_tests cli_launch_env", each="option.name",
  of=("fsdp_version", "fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_offload_params", "fsdp_state_dict_type",
      "dynamo_mode", "megatron_lm_tp_degree", "zero_stage", "offload_optimizer_device",
      "parallelism_config_dp_replicate_size"))
F("launch --gradient_accumulation_steps", "src/launch/job/environment.cpp",
  'if (const auto steps = settings.integer("gradient_accumulation_steps")) '
  '«env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = std::to_string(*steps);» if (launcher == Launcher::deepspeed)', "",
  "launch_tests LaunchEnvironment.AccumulationStepsArePassedOn")
F("launch --mixed_precision", "src/launch/job/environment.cpp",
  'Variables env{{"ACCELERATE_MIXED_PRECISION", «precision»}};', 'std::string("no")',
  "conformance_tests cli_launch_env")
F("launch --debug", "src/launch/job/environment.cpp",
  'if (precision == "fp8") add_fp8(env, settings); if («settings.on("debug")»)', "false",
  "conformance_tests cli_launch_env")
F("launch --num_cpu_threads_per_process", "src/launch/job/settings.cpp", "threads_ = «*given»;", "int64_t{1}",
  "conformance_tests cli_launch_env")
F("launch --max_restarts", "src/launch/job/job.cpp", 'job.max_restarts = «s["max_restarts"].get<int64_t>()»;',
  "int64_t{0}", "launch_tests LaunchOptions.FieldsAreShortForSettings")
F("launch --grace_seconds", "src/launch/job/job.cpp", 'job.grace = read_seconds(s, «"grace_seconds"»);',
  '"monitor_interval"', "launch_tests LaunchOptions.FieldsAreShortForSettings")
F("launch --monitor_interval", "src/launch/job/job.cpp",
  'job.monitor_interval = read_seconds(s, «"monitor_interval"»);', '"grace_seconds"',
  "launch_tests LaunchOptions.FieldsAreShortForSettings")
file = "src/config/config.cpp"
tpu = "plugins_tests TpuFields.ComeFromTheFile"
F("TpuConfig::name", file, 'text_of(config[«"tpu_name"»]);', '"tpu_zone"', tpu)
F("TpuConfig::zone", file, 'text_of(config[«"tpu_zone"»]);', '"tpu_name"', tpu)
F("TpuConfig::command_file", file, 'text_of(config[«"command_file"»]);', '"tpu_name"', tpu)
F("TpuConfig::commands", file, 'if («config["commands"].is_array()»)', "false", tpu)

# ---- DeepSpeed's machines
words = "options_tests OptionsOfModels.WordPiece"
file = "src/launch/job/deepspeed_machines.cpp"
d = "commands_tests DeepSpeedMachines."
first = d + "AllOthersAreStartedByThisLauncherInTheHostfilesOrder"
nossh, words, variables = (d + name for name in ("WithNosshEachMachineTakesItsSlots", "MpirunAndSrunGetItsWords",
                                                 "VariablesOfDeepspeedEnvReachTheMachines"))
F("deepspeed: C++ programs are started without its program", "src/launch/job/job.cpp",
  "if (deepspeed_starts_machines(s) && «!is_python_program(job.command, s, host)») return", "false", first)
F("deepspeed: Python programs are started by its program", "src/launch/job/program_file.cpp",
  'if («settings.on("module") || program.extension() == ".py" || program.filename().string().starts_with("python")») '
  "return true;", "false", d + "PythonProgramsAreStartedByItsOwn")
F("deepspeed: a script may name Python", "src/launch/job/program_file.cpp",
  'return first && («first->starts_with("#!") ? first->find("python") != std::string::npos : !is_executable(program)»);',
  "false", d + "PythonProgramsAreStartedByItsOwn")
F("deepspeed_inclusion_filter", file, 'include = «s.text("deepspeed_inclusion_filter")»,', "std::string()", first)
F("deepspeed_exclusion_filter", file, 'exclude = «s.text("deepspeed_exclusion_filter")»,', "std::string()", first)
F("deepspeed: num_processes of a machine's slots", file, "machine.slots.resize(«each»);", "machine.slots.size()", first)
F("deepspeed: --remote_shell in place of pdsh", file,
  'job.remote_shell = «s.source("remote_shell") > ValueSource::fallback» ?', "false", first)
F("deepspeed: all machines are told their slots", file, "machine.chosen_slots = «true»;", "false", first)
F("deepspeed: the job's own variables are stronger", file,
  "«for (const auto& [own, value] : protocol(job.settings, host)) job.exported.erase(own);»", "", variables)
F("deepspeed: ranks have no numbers of a file's", file,
  'for (const char* own : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) '
  "«job.exported.erase(own);»", "", words)
F("deepspeed: DS_ENV_FILE", file, 'const std::string name = «host.variable("DS_ENV_FILE")».value_or(',
  "std::optional<std::string>()", variables)
F("deepspeed: variables of MVAPICH", file, 'if («launcher != "mvapich"») return;', "true", words)
F("deepspeed: one command starts all machines", file, "require(«rank == 0»,", "true", d + "Mistakes")
F("deepspeed: a place among the hostfile's machines", file, "job.first_rank = «all_slots({job.remote.begin(), job.remote.begin() + rank})»;",
  "0", nossh)
F("deepspeed: nossh's devices", "src/launch/job/environment.cpp", "if («!job.devices.empty()») env", "false", nossh)
F("deepspeed: where ranks of mpirun's meet", "src/launch/job/environment.cpp", "if («!job.remote.empty()») add_for_machines",
  "false", words)
F("deepspeed: variables reach mpirun's ranks", "src/launch/job/environment.cpp",
  "«env.insert(job.exported.begin(), job.exported.end());»", "", words)
F("deepspeed: variables reach launchers", "src/launch/starters/remote.cpp",
  "for (const auto& [name, value] : «job.exported») line +=", "std::map<std::string, std::string>()", variables)
F("deepspeed: launchers start no others", "src/launch/starters/remote.cpp",
  "if («job.remote.size() > 1 && s.launcher() == Launcher::deepspeed») add(", "false", first)
F("deepspeed: an mpirun of the launcher's kind", "src/launch/starters/mpirun.cpp", "if («is_open_mpi(path) == open_mpi») return",
  "true", words)
F("deepspeed: variables of libraries reach Open MPI's ranks", "src/launch/starters/deepspeed.cpp",
  "if («is_passed_on(name) && !variables.contains(name)») add", "false", words)
F("deepspeed: srun's machines by their names", "src/launch/starters/deepspeed.cpp", "if («filtered») words.insert", "false",
  words)
F("deepspeed: srun's GPUs", "src/launch/starters/deepspeed.cpp",
  'else if («s.source("num_processes") > ValueSource::fallback && !s.computes_on_cpu()») words.insert', "false", words)
F("deepspeed: another machine's port may be busy here", "src/launch/launch.cpp",
  "if (job.needs_port() && «job.remote.empty()»)", "true", d + "AnotherMachinesPortMayBeBusyHere")
F("deepspeed: a step of Slurm's has its machines", "src/launch/job/settings.cpp",
  'set("main_process_port", task->port, ValueSource::environment); '
  '«set("deepspeed_multinode_launcher", "standard", ValueSource::environment);»', "",
  d + "AreThereWhereOthersHaveStartedThem")
F("deepspeed: machines of torchrun's variables are there", "src/launch/job/settings.cpp",
  'take("PET_RDZV_BACKEND", "rdzv_backend", ValueSource::file); '
  '«set("deepspeed_multinode_launcher", "standard", ValueSource::environment);»', "",
  d + "AreThereWhereOthersHaveStartedThem")
F("deepspeed: flags without effect are said", "src/launch/job/remarks.cpp",
  "if («launcher_ == Launcher::deepspeed && !machines_by_deepspeed»)", "false", d + "WhatHasNoEffectIsSaid")
F("launch: slots that a filter chose are the devices", "src/launch/job/hostfile.cpp",
  "host.chosen_slots = «is_named && !whole»;", "false", "machines_fault_tests Hostfile.FiltersChooseMachinesAndSlots")
F("choices in other letters", "cli/arguments.cpp", "«return void(text = choice);»", "{}",
  "commands_tests Commands.WhatTheDocumentationCallsSettingsIsRead")
F("generate finds names of the cache", "programs/generate.cpp", "given = «accelerate::bigmodel::local_model(model)»;",
  "model", "generate_cli_tests Generate.FindsModelsInTheHubsCacheByName")
F("quantize finds names of the cache", "programs/quantize.cpp", "quantize(«accelerate::bigmodel::local_model(words[0])», out",
  "words[0]", "generate_cli_tests Generate.FindsModelsInTheHubsCacheByName")
