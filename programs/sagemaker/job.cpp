#include "sagemaker/job.hpp"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <sstream>

#include "accelerate/config.hpp"
#include "input/read_file.hpp"
#include "sagemaker/image.hpp"
#include "sagemaker/start_script.hpp"

namespace sagemaker {
namespace {

namespace fs = std::filesystem;
using accelerate::ConfigError;

void require(bool condition, const std::string& message) {
  if (!condition) accelerate::raise<ConfigError>("{}", message);
}

/// The words of additional_args, beside those of the config file itself, and the kind of value of each: text, integer,
/// boolean, array, object.
constexpr std::pair<const char*, char> kWords[] = {
    {"image_uri", 't'},
    {"entry_point", 't'},
    {"source_dir", 't'},
    {"role", 't'},
    {"transformers_version", 't'},
    {"pytorch_version", 't'},
    {"py_version", 't'},
    {"base_job_name", 't'},
    {"instance_count", 'i'},
    {"instance_type", 't'},
    {"debugger_hook_config", 'b'},
    {"distribution", 'o'},
    {"hyperparameters", 'o'},
    {"environment", 'o'},
    {"metric_definitions", 'a'},
    {"volume_size", 'i'},
    {"volume_kms_key", 't'},
    {"max_run", 'i'},
    {"max_wait", 'i'},
    {"use_spot_instances", 'b'},
    {"max_retry_attempts", 'i'},
    {"keep_alive_period_in_seconds", 'i'},
    {"training_plan", 't'},
    {"input_mode", 't'},
    {"output_path", 't'},
    {"output_kms_key", 't'},
    {"code_location", 't'},
    {"disable_output_compression", 'b'},
    {"dependencies", 'a'},
    {"checkpoint_s3_uri", 't'},
    {"checkpoint_local_path", 't'},
    {"tags", 'a'},
    {"subnets", 'a'},
    {"security_group_ids", 'a'},
    {"enable_network_isolation", 'b'},
    {"encrypt_inter_container_traffic", 'b'},
    {"disable_profiler", 'b'},
    {"container_log_level", 'i'},
    {"enable_sagemaker_metrics", 'b'},
    {"enable_remote_debug", 'b'},
    {"enable_infra_check", 'b'},
    {"container_entry_point", 'a'},
    {"container_arguments", 'a'},
};

bool is_kind(const Json& value, char kind) {
  switch (kind) {
    case 't':
      return value.is_string();
    case 'i':
      return value.is_number_integer();
    case 'b':
      return value.is_boolean();
    case 'a':
      return value.is_array();
    default:
      return value.is_object();
  }
}

const char* name_of(char kind) {
  switch (kind) {
    case 't':
      return "a text";
    case 'i':
      return "an integer";
    case 'b':
      return "true or false";
    case 'a':
      return "a list";
    default:
      return "a section";
  }
}

void check_word(const std::string& key, const Json& value) {
  std::vector<std::string> names;
  for (const auto& [name, kind] : kWords) {
    names.emplace_back(name);
    if (key != name) continue;
    require(value.is_null() || is_kind(value, kind),
            "additional_args of the config file has " + key + ": " + value.dump() + ", expected " + name_of(kind));
    return;
  }
  const auto nearest = accelerate::nearest_name(key, names);
  std::string known;
  for (const auto& name : names) known += (known.empty() ? "" : ", ") + name;
  accelerate::raise<ConfigError>(
      "additional_args of the config file has the key '{}'{} It may have {}", key,
      nearest ? ", did you mean '" + *nearest + "'?" : ", which this launcher does not know.", known);
}

/// Sections are joined, everything else is replaced.
void lay_over(Json& below, const Json& above) {
  for (const auto& [key, value] : above.items()) {
    if (value.is_object() && below[key].is_object()) lay_over(below[key], value);
    else below[key] = value;
  }
}

/// A table with a heading: two columns, a tab between them.
std::vector<std::pair<std::string, std::string>> read_table(const std::string& file, const std::string& key,
                                                            const std::string& columns) {
  std::string text;
  const auto problem = accelerate::read_file(file, accelerate::kMostSettingsBytes, text);
  require(problem.empty(), key + " is " + file + ", which can't be read: " + problem);
  std::istringstream in(text);
  std::vector<std::pair<std::string, std::string>> rows;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (number == 1 || line.empty()) continue;
    const size_t tab = line.find('\t');
    require(tab != std::string::npos && tab > 0 && tab + 1 < line.size(),
            key + " " + file + ", line " + std::to_string(number) + ": expected two columns with a tab between them (" +
                columns + ")");
    const std::string rest = line.substr(tab + 1);
    rows.emplace_back(line.substr(0, tab), rest.substr(0, rest.find('\t')));
  }
  return rows;
}

/// {bucket, key} of s3://bucket/key.
std::pair<std::string, std::string> s3_parts(const std::string& url, const std::string& what) {
  require(url.rfind("s3://", 0) == 0 && url.size() > 5, what + " is '" + url + "', expected s3://BUCKET/...");
  const size_t slash = url.find('/', 5);
  std::string key = slash == std::string::npos ? "" : url.substr(slash + 1);
  while (!key.empty() && key.back() == '/') key.pop_back();
  return {url.substr(5, slash == std::string::npos ? slash : slash - 5), key};
}

std::string timestamp(int64_t now) {
  const std::time_t seconds = now / 1000;
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%Y-%m-%d-%H-%M-%S-", &utc);
  std::snprintf(text + length, sizeof(text) - length, "%03d", static_cast<int>(now % 1000));
  return text;
}

/// A number where the text is one in Python, whole ones as integers.
Json inferred(const std::string& text) {
  if (text == "True") return true;
  if (text == "False") return false;
  const char* const begin = text.data() + (text.size() > 1 && text[0] == '+' && text[1] != '-' ? 1 : 0);
  const char* const end = text.data() + text.size();
  double number = 0;
  const auto [rest, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || rest != end || !std::isfinite(number)) return text;
  if (std::floor(number) == number && std::abs(number) < 9e15) return static_cast<int64_t>(number);
  return number;
}

/// As Python's json.dumps, which the containers undo.
std::string encoded(const Json& value) {
  if (!value.is_structured()) return value.dump(-1, ' ', true);
  std::string text = value.is_array() ? "[" : "{";
  bool first = true;
  for (const auto& [key, inner] : value.items()) {
    text += first ? "" : ", ";
    if (value.is_object()) text += Json(key).dump(-1, ' ', true) + ": ";
    text += encoded(inner);
    first = false;
  }
  return text + (value.is_array() ? "]" : "}");
}

std::string as_text(const Json& value) {
  return value.is_string()    ? value.get<std::string>()
         : value.is_boolean() ? (value.get<bool>() ? "True" : "False")
                              : value.dump();
}

}  // namespace

Json arguments_as_hyperparameters(const std::vector<std::string>& arguments) {
  Json result = Json::object();
  const auto is_number = [](const std::string& text) { return inferred(text).is_number(); };
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::string name = arguments[i];
    require(name.size() > 1 && name.front() == '-' && !is_number(name),
            "the program's argument '" + name +
                "' has no name. SageMaker hands arguments on as hyperparameters: --name value");
    std::string value;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    } else {
      require(i + 1 < arguments.size() &&
                  (arguments[i + 1].empty() || arguments[i + 1].front() != '-' || is_number(arguments[i + 1])),
              "the program's argument '" + name +
                  "' has no value. SageMaker hands arguments on as hyperparameters, --name value: give it one, for "
                  "example " +
                  name + " True, and let the program read it");
      value = arguments[++i];
    }
    name.erase(0, name.find_first_not_of('-'));
    std::replace(name.begin(), name.end(), '-', '_');
    require(!name.empty() && !result.contains(name),
            "the program's argument --" + name + " is there twice, or has no name; a hyperparameter has one value");
    result[name] = inferred(value);
  }
  return result;
}

std::string guessed_role_arn(const std::string& role, const std::string& region) {
  return role.find('/') != std::string::npos ? role : "arn:" + partition_of(region) + ":iam::ACCOUNT:role/" + role;
}

JobPlan JobPlan::read(const Json& text) {
  JobPlan plan;
  plan.config = text.at("config");
  plan.command = text.at("command").get<std::vector<std::string>>();
  plan.environment = text.at("environment");
  plan.num_machines = text.at("num_machines");
  if (text.at("keys").is_object()) plan.given = Credentials{text["keys"].at("id"), text["keys"].at("secret"), ""};
  plan.dry_run = text.at("dry_run");
  plan.quiet = text.at("quiet");
  return plan;
}

TrainingJob::TrainingJob(const JobPlan& plan, int64_t now) : region_(plan.text("region")) {
  const auto own = [&](const char* key) { return plan.config.contains(key) ? plan.config[key] : Json(); };
  words_ = {{"image_uri", own("image_uri")},
            {"role", own("iam_role_name")},
            {"transformers_version", own("transformers_version")},
            {"pytorch_version", own("pytorch_version")},
            {"py_version", own("py_version")},
            {"base_job_name", own("base_job_name")},
            {"instance_count", plan.num_machines},
            {"instance_type", own("ec2_instance_type")},
            {"environment", plan.environment},
            {"hyperparameters", Json::object()}};
  executable_ = fs::path(plan.command.front()).extension() != ".py";
  if (plan.text("distributed_type") == "DATA_PARALLEL") {
    // Amazon's library is Python's; a program meets its peers by c10d, with what the start script tells it.
    if (executable_)
      remarks_.push_back(
          "DATA_PARALLEL is Amazon's library for Python; the processes of this program find each other by the usual "
          "variables (MASTER_ADDR, RANK, ...)");
    else words_["distribution"] = {{"smdistributed", {{"dataparallel", {{"enabled", true}}}}}};
  }
  if (const std::string file = plan.text("sagemaker_inputs_file"); !file.empty())
    for (const auto& [channel, location] : read_table(file, "sagemaker_inputs_file", "channel_name, data_location"))
      inputs_.push_back({channel, location});
  if (const std::string file = plan.text("sagemaker_metrics_file"); !file.empty())
    for (const auto& [metric, expression] : read_table(file, "sagemaker_metrics_file", "metric_name, metric_regex"))
      words_["metric_definitions"].push_back({{"Name", metric}, {"Regex", expression}});
  if (!executable_)
    words_["hyperparameters"] = arguments_as_hyperparameters({plan.command.begin() + 1, plan.command.end()});

  if (const Json more = own("additional_args"); !more.is_null()) {
    require(more.is_object(), "additional_args of the config file is no section with names and values");
    for (const auto& [key, value] : more.items()) check_word(key, value);
    lay_over(words_, more);
  }
  require(
      !words_.contains("debugger_hook_config") || words_["debugger_hook_config"] == false,
      "additional_args.debugger_hook_config: SageMaker's debugger is not started from here; leave it out or say false");
  instance_type_ = text("instance_type");
  instance_family(instance_type_);
  require(words_["instance_count"].is_number_integer() && words_["instance_count"].get<int64_t>() >= 1,
          "num_machines is " + words_["instance_count"].dump() + ", expected 1 or more");
  require(!role().empty() || is_local(), "the config file has no iam_role_name, under which the job runs");
  for (const auto& input : inputs_) {
    const std::string location = input[1];
    require(location.rfind("s3://", 0) == 0 || (is_local() && location.rfind("file://", 0) == 0),
            "the input channel '" + input[0].get<std::string>() + "' has the location '" + location +
                "', expected s3://BUCKET/PREFIX" +
                (is_local() ? " or file:///FOLDER" : " (file:// is for local mode)"));
  }

  image_ = text("image_uri");
  if (image_.empty())
    image_ = training_image(
        {region_, instance_type_, text("transformers_version"), text("pytorch_version"), text("py_version")});
  std::string base = text("base_job_name");
  if (base.empty())
    base = image_.substr(image_.rfind('/') + 1, image_.rfind(':') > image_.rfind('/') + 1
                                                    ? image_.rfind(':') - image_.rfind('/') - 1
                                                    : std::string::npos);
  for (const char c : base)
    require(std::isalnum(static_cast<unsigned char>(c)) || c == '-',
            "base_job_name is '" + base + "'; names of jobs are made of letters, digits and '-'");
  require(base.front() != '-', "base_job_name is '" + base + "'; names of jobs begin with a letter or a digit");
  const std::string time = timestamp(now);
  name_ = base.substr(0, 63 - time.size() - 1) + "-" + time;
  take_source(plan);
  // Complain before anything is sent.
  if (is_local()) distribution();
  else request(Account{});
}

std::string TrainingJob::text(const std::string& key) const {
  return words_.contains(key) && words_[key].is_string() ? words_[key].get<std::string>() : "";
}

void TrainingJob::take_source(const JobPlan& plan) {
  const fs::path program = plan.command.front();
  std::string folder = text("source_dir");
  uploaded_ = folder.rfind("s3://", 0) == 0;
  require(!uploaded_ || (!executable_ && !is_local()),
          "additional_args.source_dir is " + folder +
              ", and what is in S3 already can't be looked at: name a folder of this machine");
  entry_point_ = text("entry_point");
  if (executable_) {
    std::error_code ignored;
    require(fs::is_regular_file(program, ignored),
            "there is no program '" + program.string() + "' (seen from " + fs::current_path(ignored).string() + ")");
    require(::access(program.c_str(), X_OK) == 0,
            "'" + program.string() +
                "' is neither a Python script (.py) nor executable. SageMaker's containers start one or the other");
    require(entry_point_.empty(),
            "additional_args.entry_point is for Python scripts; the program is " + program.string());
    SourceFile script{.name = kStartScript,
                      .path = {},
                      .content = start_script(program.filename(), {plan.command.begin() + 1, plan.command.end()}),
                      .modified = std::time(nullptr)};
    script.bytes = static_cast<int64_t>(script.content.size());
    source_.push_back(std::move(script));
    const auto files = files_of(program);
    source_.insert(source_.end(), files.begin(), files.end());
    entry_point_ = kStartScript;
  }
  if (!executable_ && folder.empty()) folder = program.has_parent_path() ? program.parent_path().string() : ".";
  if (!executable_ && entry_point_.empty()) {
    std::error_code ignored;
    const fs::path below = uploaded_ ? fs::path() : fs::relative(program, folder, ignored);
    entry_point_ = below.empty() || *below.begin() == ".." ? program.filename() : below;
  }
  if (uploaded_) return;
  if (!folder.empty()) {
    std::error_code ignored;
    require(fs::is_directory(folder, ignored),
            "there is no folder '" + folder + "' (seen from " + fs::current_path(ignored).string() + ")");
    require(executable_ || fs::is_regular_file(fs::path(folder) / entry_point_, ignored),
            "there is no script '" + (fs::path(folder) / entry_point_).string() + "' (seen from " +
                fs::current_path(ignored).string() + ")");
    for (auto& file : files_below(folder)) {
      if (executable_ && file.name == kStartScript)
        accelerate::raise<ConfigError>(
            "the folder {} has a file {}, which is what the launcher's own start script is called. Rename it", folder,
            kStartScript);
      if (!executable_ || file.name != program.filename()) source_.push_back(std::move(file));
    }
    if (!executable_) source_folder_ = folder;
  }
  if (const auto more = words_.find("dependencies"); more != words_.end() && more->is_array() && !more->empty()) {
    source_folder_.clear();
    for (const auto& path : *more) {
      require(path.is_string(), "additional_args.dependencies has " + path.dump() + ", expected paths");
      const auto files = files_of(path.get<std::string>());
      source_.insert(source_.end(), files.begin(), files.end());
    }
  }
}

bool TrainingJob::uses_default_bucket() const { return text("output_path").empty(); }

std::string TrainingJob::default_bucket(const Account& account) const {
  return "sagemaker-" + region_ + "-" + account.id;
}

std::string TrainingJob::output_path(const Account& account) const {
  return text("output_path").empty() ? "s3://" + default_bucket(account) + "/" : text("output_path");
}

std::string TrainingJob::code_bucket(const Account& account) const {
  if (!text("code_location").empty()) return s3_parts(text("code_location"), "additional_args.code_location").first;
  return s3_parts(output_path(account), "additional_args.output_path").first;
}

std::string TrainingJob::code_kms_key(const Account& account) const {
  return code_bucket(account) == s3_parts(output_path(account), "additional_args.output_path").first
             ? text("output_kms_key")
             : "";
}

std::string TrainingJob::code_key() const {
  const std::string prefix =
      text("code_location").empty() ? "" : s3_parts(text("code_location"), "additional_args.code_location").second;
  return (prefix.empty() ? "" : prefix + "/") + name_ + "/source/sourcedir.tar.gz";
}

/// How the container starts the processes, as hyperparameters.
Json TrainingJob::distribution() const {
  Json result = Json::object();
  if (!words_.contains("distribution") || words_["distribution"].is_null()) return result;
  const Json& given = words_["distribution"];
  const auto enabled = [](const Json& section) {
    return section.is_object() && section.contains("enabled") && section["enabled"] == true;
  };
  for (const auto& [key, value] : given.items())
    require((key == "smdistributed" || key == "torch_distributed" || key == "pytorchddp" || key == "mpi") &&
                value.is_object(),
            "additional_args.distribution has '" + key +
                "', expected a section smdistributed (dataparallel), torch_distributed, pytorchddp or mpi");
  for (const auto& [key, hyperparameter] : {std::pair{"pytorchddp", "sagemaker_pytorch_ddp_enabled"},
                                            {"torch_distributed", "sagemaker_torch_distributed_enabled"}})
    if (given.contains(key)) {
      if (!enabled(given[key])) continue;
      result[hyperparameter] = true;
      result["sagemaker_instance_type"] = instance_type_;
      return result;
    }
  if (given.contains("mpi")) {
    const Json& mpi = given["mpi"];
    result["sagemaker_mpi_enabled"] = enabled(mpi);
    if (mpi.contains("processes_per_host") && mpi["processes_per_host"] != 0)
      result["sagemaker_mpi_num_of_processes_per_host"] = mpi["processes_per_host"];
    result["sagemaker_mpi_custom_mpi_options"] =
        mpi.contains("custom_mpi_options") ? mpi["custom_mpi_options"] : Json("");
  }
  if (given.contains("smdistributed")) {
    const Json& parallel = given["smdistributed"];
    require(parallel.size() == 1 && parallel.contains("dataparallel"),
            "additional_args.distribution.smdistributed has to be a section dataparallel and nothing else; model "
            "parallelism is not started from here");
    const bool on = enabled(parallel["dataparallel"]);
    constexpr const char* kVersions[] = {"1.6",    "1.6.0",  "1.7",    "1.7.1",  "1.8",    "1.8.0", "1.8.1",  "1.9",
                                         "1.9.0",  "1.9.1",  "1.10",   "1.10.0", "1.10.2", "1.11",  "1.11.0", "1.12",
                                         "1.12.0", "1.12.1", "1.13.1", "2.0.0",  "2.0.1",  "2.1.0", "2.1.2",  "2.2.0"};
    require(!on || !text("image_uri").empty() ||
                std::find(std::begin(kVersions), std::end(kVersions), text("pytorch_version")) != std::end(kVersions),
            "distributed_type DATA_PARALLEL is Amazon's library, which the container with PyTorch " +
                text("pytorch_version") +
                " does not have. Take an older pytorch_version, an image_uri of your own, or distributed_type NO and "
                "additional_args: {distribution: {torch_distributed: {enabled: true}}}");
    require(instance_type_.find("p5.48xlarge") == std::string::npos,
            "distributed_type DATA_PARALLEL is Amazon's library, which does not run on " + instance_type_);
    result["sagemaker_distributed_dataparallel_enabled"] = on;
    result["sagemaker_instance_type"] = instance_type_;
    if (on)
      result["sagemaker_distributed_dataparallel_custom_mpi_options"] =
          parallel["dataparallel"].contains("custom_mpi_options") ? parallel["dataparallel"]["custom_mpi_options"]
                                                                  : Json("");
  }
  return result;
}

Json TrainingJob::hyperparameters(const std::string& submit_directory) const {
  Json result = Json::object();
  const auto add = [&](const Json& values) {
    for (const auto& [key, value] : values.items()) result[key] = encoded(value);
  };
  add(words_["hyperparameters"]);
  add({{"sagemaker_submit_directory", submit_directory},
       {"sagemaker_program", entry_point_},
       {"sagemaker_container_log_level",
        words_.contains("container_log_level") ? words_["container_log_level"] : Json(20)},
       {"sagemaker_job_name", name_},
       {"sagemaker_region", region_}});
  add(distribution());
  return result;
}

/// Regions without the profiler.
bool TrainingJob::profiles() const {
  if (words_.contains("disable_profiler") && words_["disable_profiler"] == true) return false;
  for (const char* without : {"us-iso-east-1", "us-isob-east-1", "ap-southeast-3", "ap-southeast-4", "eu-south-2",
                              "me-central-1", "ap-south-2", "eu-central-2", "us-gov-east-1"})
    if (region_ == without) return false;
  return true;
}

Json TrainingJob::environment() const {
  Json result = Json::object();
  for (const auto& [key, value] : words_["environment"].items()) result[key] = as_text(value);
  return result;
}

Json TrainingJob::request(const Account& account) const {
  const auto has = [&](const char* key) { return words_.contains(key) && !words_[key].is_null(); };
  const auto or_else = [&](const char* key, Json otherwise) { return has(key) ? words_[key] : otherwise; };
  Json algorithm{{"TrainingInputMode", or_else("input_mode", "File")}, {"TrainingImage", image_}};
  if (has("container_entry_point")) algorithm["ContainerEntrypoint"] = words_["container_entry_point"];
  if (has("container_arguments")) algorithm["ContainerArguments"] = words_["container_arguments"];
  if (has("metric_definitions")) algorithm["MetricDefinitions"] = words_["metric_definitions"];
  algorithm["EnableSageMakerMetricsTimeSeries"] = or_else("enable_sagemaker_metrics", true);

  Json output{{"S3OutputPath", output_path(account)}};
  if (has("output_kms_key")) output["KmsKeyId"] = words_["output_kms_key"];
  if (or_else("disable_output_compression", false) == true) output["CompressionType"] = "NONE";
  Json stop{{"MaxRuntimeInSeconds", or_else("max_run", 86400)}};
  if (has("max_wait")) stop["MaxWaitTimeInSeconds"] = words_["max_wait"];
  Json resources{{"VolumeSizeInGB", or_else("volume_size", 30)}};
  if (has("volume_kms_key")) resources["VolumeKmsKeyId"] = words_["volume_kms_key"];
  if (has("keep_alive_period_in_seconds"))
    resources["KeepAlivePeriodInSeconds"] = words_["keep_alive_period_in_seconds"];
  resources["InstanceCount"] = words_["instance_count"];
  resources["InstanceType"] = instance_type_;
  if (has("training_plan")) resources["TrainingPlanArn"] = words_["training_plan"];

  Json request{{"AlgorithmSpecification", algorithm}, {"OutputDataConfig", output},  {"TrainingJobName", name_},
               {"StoppingCondition", stop},           {"ResourceConfig", resources}, {"RoleArn", account.role_arn}};
  const auto add_channel = [&](const Json& channel, const Json& location) {
    request["InputDataConfig"].push_back(
        {{"DataSource",
          {{"S3DataSource",
            {{"S3DataType", "S3Prefix"}, {"S3Uri", location}, {"S3DataDistributionType", "FullyReplicated"}}}}},
         {"ChannelName", channel}});
  };
  for (const auto& input : inputs_) add_channel(input[0], input[1]);
  const std::string code = uploaded_ ? text("source_dir") : "s3://" + code_bucket(account) + "/" + code_key();
  // A container without network can't fetch its source: that comes as an input channel.
  const bool isolated = or_else("enable_network_isolation", false) == true;
  if (isolated) add_channel("code", code);
  request["HyperParameters"] = hyperparameters(isolated ? "/opt/ml/input/data/code/sourcedir.tar.gz" : code);
  request["Environment"] = environment();
  if (has("tags")) request["Tags"] = words_["tags"];
  if (has("subnets") || has("security_group_ids")) {
    require(has("subnets") && has("security_group_ids"),
            "additional_args has one of subnets and security_group_ids; a job in a private network needs both");
    request["VpcConfig"] = {{"Subnets", words_["subnets"]}, {"SecurityGroupIds", words_["security_group_ids"]}};
  }
  if (isolated) request["EnableNetworkIsolation"] = true;
  if (or_else("encrypt_inter_container_traffic", false) == true)
    request["EnableInterContainerTrafficEncryption"] = true;
  if (or_else("use_spot_instances", false) == true) request["EnableManagedSpotTraining"] = true;
  if (has("checkpoint_s3_uri")) {
    request["CheckpointConfig"] = {{"S3Uri", words_["checkpoint_s3_uri"]}};
    if (has("checkpoint_local_path")) request["CheckpointConfig"]["LocalPath"] = words_["checkpoint_local_path"];
  }
  request["ProfilerConfig"] = profiles() ? Json{{"S3OutputPath", output_path(account)}, {"DisableProfiler", false}}
                                         : Json{{"DisableProfiler", true}};
  if (has("enable_remote_debug")) request["RemoteDebugConfig"] = {{"EnableRemoteDebug", words_["enable_remote_debug"]}};
  if (has("enable_infra_check")) request["InfraCheckConfig"] = {{"EnableInfraCheck", words_["enable_infra_check"]}};
  if (has("max_retry_attempts")) request["RetryStrategy"] = {{"MaximumRetryAttempts", words_["max_retry_attempts"]}};
  return request;
}

}  // namespace sagemaker
