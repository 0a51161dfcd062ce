// The program's settings: flags, config files, and what started processes find in their environment.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "../../cli/arguments.hpp"
#include "accelerate/utils/error.hpp"
#include "config/config_file.hpp"
#include "config/yaml.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/request.hpp"
#include "launch/starters/deepspeed.hpp"
#include "launch/starters/mpirun.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::cli_cases {
namespace {

using accelerate::config::Kind;
using accelerate::config::Option;
using accelerate::config::Value;
using namespace accelerate::launcher;

Value ordered(const json& value) { return Value::parse(value.dump()); }

// ---------------------------------------------------------------- cli_flags

std::vector<const Option*> all_options(const accelerate::config::CommandTable& table) {
  std::vector<const Option*> result;
  for (const auto& group : table.groups)
    for (const auto& option : group.options) result.push_back(&option);
  return result;
}

const char* type_of(Kind kind) {
  switch (kind) {
    case Kind::integer:
      return "int";
    case Kind::number:
      return "float";
    case Kind::truth:
      return "bool";
    case Kind::boolean:
      return "str_to_bool";
    case Kind::booleans:
      return "<lambda>";
    default:
      return "str";
  }
}

/// Our option as the file describes the reference's. Python's default of a flag's value may be None, and text where a
/// type turns it into a value.
json described(const Option& option, const json& theirs) {
  json result{{"dest", option.name},
              {"required", option.required},
              {"choices", nullptr},
              {"takes_value", option.takes_value()},
              {"type", nullptr}};
  if (option.choices) result["choices"] = option.choice_list();
  if (option.takes_value()) result["type"] = type_of(option.kind);
  result["default"] = accelerate::config::default_value(option);
  if (theirs["default"].is_null() && !option.takes_value()) result["default"] = nullptr;
  return result;
}

json expectation(json theirs) {
  const bool takes_value = theirs["nargs"] != "0";
  json result{{"dest", theirs["dest"]},
              {"required", theirs["required"]},
              {"choices", theirs["choices"]},
              {"takes_value", takes_value},
              {"type", nullptr},
              {"default", theirs["default"]}};
  if (takes_value) result["type"] = theirs["type"].is_null() ? json("str") : theirs["type"];
  if (theirs["type"] == "str_to_bool" && theirs["default"].is_string())
    result["default"] = theirs["default"] == "true" ? 1 : 0;
  if (theirs["type"] == "<lambda>") result["default"] = {false, false, false};
  return result;
}

bool same_command(json ours, json theirs) {
  if (theirs["dest"] == "save_location")
    ours["default"] = theirs["default"];  // the default folder depends on the machine
  return ours == theirs;
}

void run_flags(const json& file, Report& report) {
  for (const auto& [command, rows] : file.items()) {
    if (!rows.is_array()) continue;
    const accelerate::config::CommandTable* table = nullptr;
    for (const auto& candidate : accelerate::config::command_tables())
      if (command == candidate.name) table = &candidate;
    std::set<std::string> expected_spellings;
    for (const json& row : rows) {
      const auto flags = row["flags"].get<std::vector<std::string>>();
      expected_spellings.insert(flags.begin(), flags.end());
      json found = "no such option";
      bool passed = false;
      for (const Option* option : table ? all_options(*table) : std::vector<const Option*>{}) {
        const auto spellings = option->spellings();
        if (std::find(spellings.begin(), spellings.end(), flags.front()) == spellings.end()) continue;
        found = described(*option, row);
        passed = same_command(found, expectation(row)) && std::all_of(flags.begin(), flags.end(), [&](const auto& f) {
                   return std::find(spellings.begin(), spellings.end(), f) != spellings.end();
                 });
        for (const auto& spelling : spellings) expected_spellings.insert(spelling);
      }
      report.check(passed, [&] {
        return command + " " + flags.front() + "\n    found    " + found.dump() + "\n    expected " +
               expectation(row).dump();
      });
    }
    if (!table) continue;
    // Nothing beside them but what is documented as an addition.
    for (const auto& group : table->groups)
      for (const auto& option : group.options)
        for (const auto& spelling : option.spellings())
          if (group.title != std::string(accelerate::config::kAdditions) &&
              group.title != std::string(accelerate::config::kRetired) && !expected_spellings.contains(spelling))
            report.check(false,
                         [&] { return command + " has an option that the reference does not have: " + spelling; });
  }
}

// ---------------------------------------------------------------- cli_launch_env

/// Variables that torchrun and the store of a launch set; the reference's rows are about what comes before them.
const std::set<std::string> kWorkers{"RANK",
                                     "LOCAL_RANK",
                                     "WORLD_SIZE",
                                     "LOCAL_WORLD_SIZE",
                                     "GROUP_RANK",
                                     "GROUP_WORLD_SIZE",
                                     "ROLE_NAME",
                                     "ROLE_RANK",
                                     "ROLE_WORLD_SIZE",
                                     "TORCHELASTIC_RUN_ID",
                                     "TORCHELASTIC_RESTART_COUNT",
                                     "TORCHELASTIC_MAX_RESTARTS",
                                     "TORCHELASTIC_USE_AGENT_STORE",
                                     "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                                     "ACCELERATE_LAUNCHED_FOR"};  // ours

const char* name_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::simple:
      return "simple";
    case Launcher::torchrun:
      return "torchrun";
    case Launcher::deepspeed:
      return "deepspeed";
    case Launcher::tpu:
      return "tpu";
    case Launcher::sagemaker:
      return "sagemaker";
  }
  return "";
}

/// The caller's Python and `-m` before the program: we find a Python only when the program is a script.
json command_of(const Job& job, const Host& host, const json& expected) {
  json words = json::array();
  if (job.starter == Job::Starter::mpirun) {
    // Which mpirun the reference found is no property of a row: take the one that it used; where it found none, neither
    // do we.
    Mpirun mpirun;
    if (expected.is_array() && !expected.empty())
      mpirun = {expected[0], std::find(expected.begin(), expected.end(), "--hostfile") != expected.end()};
    else mpirun = Mpirun::find(host);
    words = mpirun_words(mpirun, job.settings, {});
  }
  if (!job.settings.on("no_python")) words.push_back("<python>");
  if (job.settings.on("module")) words.push_back("-m");
  for (const auto& word : job.command) words.push_back(word);
  return words;
}

json torchrun_of(const Job& job) {
  const auto& s = job.settings;
  json result{{"nproc_per_node", std::to_string(job.local_world_size)},
              {"rdzv_backend", s.text("rdzv_backend")},
              {"rdzv_conf", s.text("rdzv_conf")},
              {"max_restarts", job.max_restarts},
              {"monitor_interval", s["monitor_interval"].get<double>()},
              {"tee", s.text("tee")},
              {"log_dir", nullptr},
              {"role", s.text("role")},
              {"module", nullptr},
              {"no_python", nullptr}};
  if (!s.text("log_dir").empty()) result["log_dir"] = s.text("log_dir");
  if (s.on("module")) result["module"] = true;
  if (s.on("no_python")) result["no_python"] = true;
  const std::string port = std::to_string(job.main_port ? job.main_port : 29500);
  if (job.num_machines == 1) {
    result["master_port"] = port;
  } else {
    result.update({{"nnodes", std::to_string(job.num_machines)}, {"node_rank", job.machine_rank}});
    if (s.on("same_network")) result.update({{"master_addr", job.main_ip}, {"master_port", port}});
    else result["rdzv_endpoint"] = job.main_ip + ":" + port;
  }
  return result;
}

struct Row {
  json argv, config, env_in, expect;
  int64_t accelerators;
};

/// Our result for a row, in the row's form.
json found_for(const Row& row, const std::string& config_file) {
  Host host{.physical_cores = 8,
            .environment = row.env_in.get<std::map<std::string, std::string>>(),
            .accelerators = row.accelerators};
  const auto given = cli::read(accelerate::config::launch_table(), row.argv.get<std::vector<std::string>>());
  accelerate::LaunchOptions options;
  options.settings = given->given;
  options.command = given->positional;
  options.command.front() += ".py";  // the reference's rows are Python programs, and ours would start other ones itself
  options.config_file = config_file.empty() ? given->text("config_file") : config_file;
  Job job = [&] {
    try {
      return make_job(request_of(options), host);
    } catch (const accelerate::Error& error) {
      // The reference's launcher for the CPU asks for the machine's number nowhere; every process would be rank 0.
      if (row.expect.value("launcher", "") != "simple" ||
          std::string(error.what()).find("--machine_rank must be given") == std::string::npos)
        throw;
      options.machine_rank = 0;
      return make_job(request_of(options), host);
    }
  }();
  job.command = given->positional;
  const std::string launcher = name_of(job.settings.launcher());
  json result{{"launcher", launcher}, {"cmd", nullptr}, {"torchrun", nullptr}};
  // torchrun's rows have their number in nproc_per_node; the reference's other launchers start one process.
  if (launcher == "simple" && job.starter == Job::Starter::launcher && job.local_world_size > 1)
    result["processes"] = job.local_world_size;
  if (launcher == "simple") result["cmd"] = command_of(job, host, row.expect.value("cmd", json()));
  if (job.starter == Job::Starter::deepspeed) {
    result["cmd"] = deepspeed_words(job.settings, job.main_port ? job.main_port : 29500);
    for (const auto& word : job.command) result["cmd"].push_back(word);
  } else if (launcher == "torchrun" || launcher == "deepspeed") result["torchrun"] = torchrun_of(job);
  if (job.main_port == 0) job.main_port = 29500;  // the reference's fixed choice; ours is a free one
  json env = json::object();
  for (const auto& [name, value] : build_environment(job, host, 0)) {
    const bool unchanged = host.environment.contains(name) && host.environment.at(name) == value;
    const bool torchruns = launcher != "simple" && name.starts_with("MASTER_");
    if (!unchanged && !torchruns && !(job.tells_ranks() && kWorkers.contains(name)) && name != "PYTHONPATH")
      env[name] = value;
  }
  result["env"] = env;
  return result;
}

/// Keys of a config file that the reference reads and then forgets, because its flags of these names have defaults.
json without_forgotten_keys(json config) {
  if (config.is_object())
    for (const char* key :
         {"enable_cpu_affinity", "same_network", "rdzv_backend", "downcast_bf16", "tpu_use_sudo", "tpu_use_cluster"})
      config.erase(key);
  return config;
}

constexpr const char* kForeignKeys = "keys of sections that no option has are errors; the reference takes any";

/// Whether a config file has a section with a key that is none of the options of the reference's own `launch`: a key
/// that only our table lacks is a failure.
bool has_foreign_keys(const json& config) {
  if (config.is_string()) return has_foreign_keys(json::parse(accelerate::config::read_yaml(config, "row").dump()));
  if (!config.is_object()) return false;
  static const std::set<std::string> known = [] {
    std::set<std::string> names;
    for (const auto& option : companion("cli_flags").at("launch")) names.insert(option.at("dest"));
    return names;
  }();
  for (const auto& [section, content] : config.items()) {
    if (!section.ends_with("_config") || !content.is_object()) continue;
    const std::string prefix = section.substr(0, section.size() - std::string("config").size());
    for (const auto& [key, value] : content.items())
      if (!known.contains(key) && !known.contains(prefix + key)) return true;
  }
  return false;
}

/// Why a row that is not equal is right nevertheless; "" if there is no reason.
std::string reason(const Row& row, json found, const std::function<json(const json& config)>& again) {
  const json& expected = row.expect;
  if (found.value("processes", 1) > 1) {
    json one = found;
    one.erase("processes");
    if (one == expected)
      return "several processes on the CPU without mpirun, asked for by --num_processes or a file for MULTI_CPU, are "
             "started; the reference starts one";
    return reason(row, one, [&](const json& config) {
      json result = again(config);
      result.erase("processes");
      return result;
    });
  }
  if (found.contains("error")) {
    const std::string error = found["error"];
    if (error.find("can't be shared equally") != std::string::npos)
      return "processes that can't be shared equally are an error; the reference starts fewer than were asked for";
    if (error.find("at least 1 process is needed") != std::string::npos)
      return "0 processes are an error; the reference starts one";
    if (error.find("--use_parallelism_config needs") != std::string::npos)
      return "--use_parallelism_config needs FSDP version 2; the reference means to check that, and compares a text "
             "with a number";
    if (has_foreign_keys(row.config)) return kForeignKeys;
    return "";
  }
  if (expected.contains("error") && found["launcher"] == "sagemaker")
    if (const auto error = expected["error"].get<std::string>();
        error.starts_with("AttributeError") || error.starts_with("TypeError"))
      return "the reference stumbles over SageMaker's config files where it looks for what only others have";
  if (expected.contains("error"))
    return found["env"].value("ACCELERATE_USE_CPU", "") == "True" &&
                   expected["error"].get<std::string>().find("Less than two GPU ids") != std::string::npos
               ? "how many GPUs a file names does not matter on the CPU"
               : "";
  if (json c = without_forgotten_keys(row.config); c != row.config && again(c) == expected)
    return "the reference forgets some keys of the config file";
  json env = found["env"];
  if (expected["env"].value("MASTER_PORT", "") == "0") {
    json with_port = found;
    with_port["env"]["MASTER_PORT"] = "0";
    if (with_port == expected) return "port 0 becomes a free port; the reference passes 0 on to processes on the CPU";
  }
  if (json theirs = expected;
      found["env"].value("FSDP_VERSION", "") == "1" &&
      found["env"].value("FSDP_SHARDING_STRATEGY", "") != expected["env"].value("FSDP_SHARDING_STRATEGY", "")) {
    theirs["env"]["FSDP_SHARDING_STRATEGY"] = found["env"]["FSDP_SHARDING_STRATEGY"];
    if (found == theirs)
      return "FSDP version 1 takes its strategy from fsdp_reshard_after_forward, too, where the reference's questions "
             "write it and nobody reads it";
  }
  for (const char* name :
       {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"})
    env.erase(name);
  json same = found;
  same["env"] = env;
  if (same == expected) return "the NVMe folders are passed on; the reference takes the flags and forgets them";
  env.erase("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
  same["env"] = env;
  if (same == expected) return "--gradient_accumulation_steps is passed on under every launcher";
  env.erase("XLA_USE_BF16");
  env.erase("XLA_DOWNCAST_BF16");
  same["env"] = env;
  if (same == expected) return "the reference looks for a TPU before it sets bf16 for one";
  // Names that the reference's questions write and its reader does not know; three values written as one text, of which
  // it takes the first letters.
  json mine = found, theirs = expected;
  for (json* side : {&mine, &theirs})
    for (const char* name : {"AMAX_HISTORY_LENGTH", "AMAX_COMPUTE_ALGORITHM", "OPTIMIZATION_LEVEL", "AMAX_HISTORY_LEN",
                             "AMAX_COMPUTE_ALGO", "OPT_LEVEL", "OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD"})
      (*side)["env"].erase(std::string("ACCELERATE_FP8_") + name);
  const std::string config = row.config.is_string() ? row.config.get<std::string>() : row.config.dump();
  if (mine == theirs && config.find("fp8_config") != std::string::npos)
    return "fp8 keys as the reference's questions write them are understood";
  return "";
}

void run_launch_env(const json& file, Report& report) {
  const std::string folder = support::scratch_dir() + "/conformance_cli";
  std::filesystem::create_directories(folder);
  for (const json& test : file.at("cases")) {
    const Row row{test["argv"], test["config"], test["env_in"], test["expect"], test["n_accelerators"]};
    const auto with_config = [&](const json& config) {
      std::string path;
      if (!config.is_null()) {
        path = folder + "/config.yaml";
        std::ofstream(path) << (config.is_string() ? config.get<std::string>()
                                                   : accelerate::config::write_yaml(ordered(config)));
      }
      json found;
      std::string what;
      if (throws_error([&] { found = found_for(row, path); }, &what)) found = {{"error", what}};
      return found;
    };
    const json found = with_config(row.config);
    bool passed;
    if (row.expect.contains("error")) {
      passed = found.contains("error");
    } else {
      json expected = row.expect;
      expected["env"].erase("PYTHONPATH");
      passed = found == expected;
    }
    const std::string why = passed ? "" : reason(row, found, with_config);
    if (!why.empty()) report.differs(test, why);
    else
      report.check(test, passed, [&] {
        return test["argv"].dump() + " " + test["config"].dump() + "\n    found    " + found.dump() +
               "\n    expected " + row.expect.dump();
      });
  }
}

// ---------------------------------------------------------------- config files

void run_roundtrip(const json& file, Report& report) {
  const std::string folder = support::scratch_dir() + "/conformance_roundtrip";
  std::filesystem::create_directories(folder);
  for (const json& row : file.at("cases")) {
    const std::string name = folder + "/config." + row[0].get<std::string>();
    std::ofstream(name) << (row[0] == "json"     ? row[1].dump()
                            : row[1].is_string() ? row[1].get<std::string>()
                                                 : accelerate::config::write_yaml(ordered(row[1])));
    std::string text, what;
    const bool failed = throws_error(
        [&] {
          const std::string saved = folder + "/saved." + row[0].get<std::string>();
          accelerate::config::save_config(accelerate::config::load_config(name), saved);
          std::ifstream in(saved);
          text.assign(std::istreambuf_iterator<char>(in), {});
        },
        &what);
    const bool expects_error = row[2].is_object();
    const bool sagemaker = row[1].is_object() && row[1].value("compute_environment", "") == "AMAZON_SAGEMAKER";
    if (expects_error && !failed && sagemaker &&
        row[2]["error"].get<std::string>().find("'num_processes'") != std::string::npos)
      report.differs(row, "a file for SageMaker loads; the reference adds a key to it and then complains of that");
    else if (!failed && !expects_error && row[0] == "yaml" && text != row[2] &&
             accelerate::config::read_yaml(text, "ours") == accelerate::config::read_yaml(row[2], "theirs"))
      report.differs(row, "the same text in other quotes: letters beyond ASCII stand as they are, line ends as \\n");
    else if (failed && !expects_error && has_foreign_keys(row[1])) report.differs(row, kForeignKeys);
    else
      report.check(row, expects_error ? failed : !failed && text == row[2],
                   [&] { return row.dump() + "\n    found " + (failed ? what : text); });
  }
}

void run_default(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    std::string text, what;
    const bool failed = throws_error(
        [&] {
          text = accelerate::config::write_json(
              accelerate::config::without_empty(accelerate::config::basic_config(row[0], row[1])));
        },
        &what);
    report.check(row[2].is_object() ? failed : !failed && text == row[2],
                 [&] { return row.dump() + "\n    found " + (failed ? what : text); });
  }
}

void run_misc(const json& file, Report& report) {
  for (const json& row : file.at("str_to_bool")) {
    json found;
    const bool failed = throws_error([&] { found = accelerate::config::str_to_bool(row[0]) ? 1 : 0; });
    report.check(row[1].is_object() ? failed : !failed && found == row[1],
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  }
  for (const json& row : file.at("to_fsdp2_fsdp_config")) {
    std::vector<std::string> notes;
    const Value converted = accelerate::config::to_fsdp2({{"fsdp_config", ordered(row[0])}}, notes);
    const json found = json::parse(converted["fsdp_config"].dump());
    report.check(found == row[1], [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration flags("cli_flags", {run_flags}), launch_env("cli_launch_env", {run_launch_env}),
    roundtrip("config_roundtrip", {run_roundtrip}), more_launch_env("cli_launch_env_more", {run_launch_env}),
    more_roundtrip("config_roundtrip_more", {run_roundtrip}),  // made by generators/cli.py
    defaults("config_default", {run_default}), misc("cli_misc", {run_misc});

}  // namespace
}  // namespace conformance::cli_cases
