#include "accelerate/trackers/mlflow_tracker.hpp"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "trackers/built_in.hpp"
#include "trackers/images.hpp"
#include "trackers/json_lines.hpp"
#include "trackers/keyword_arguments.hpp"
#include "trackers/mlflow_server.hpp"
#include "trackers/said_once.hpp"
#include "trackers/url.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using config::Value;
namespace fs = std::filesystem;

constexpr size_t kMostMetrics = 1000, kMostParameters = 100, kLongestParameter = 6000;  // of one request
constexpr int64_t kMostArtifactBytes = int64_t{2} << 30;

/// The variable wins, as in the reference.
std::string text_option(const KeywordArguments& given, const char* name, const char* variable) {
  if (const auto text = environment::text(variable)) return *text;
  return given.text(name);
}

/// A map, or JSON of one.
std::map<std::string, std::string> tags_of(const TrackerValues& options) {
  Value tags;
  if (const auto text = environment::text("MLFLOW_TAGS")) tags = Value(*text);
  else if (const auto found = options.find("tags"); found != options.end()) tags = to_plain_json(found->second);
  if (tags.is_null()) return {};
  if (tags.is_string()) tags = parse_json<Value>(tags.get<std::string>());
  if (!tags.is_object())
    throw ConfigError(
        "mlflow: the tags (MLFLOW_TAGS, or init_kwargs' 'tags') are no map of names and values, as "
        "{\"team\": \"vision\"} is");
  std::map<std::string, std::string> result;
  for (const auto& [name, value] : tags.items()) result[name] = config::python_text(value);
  return result;
}

std::string user_name() {
  for (const char* variable : {"LOGNAME", "USER"})
    if (const auto name = environment::text(variable)) return *name;
  const passwd* const entry = ::getpwuid(::geteuid());
  return entry ? entry->pw_name : "unknown";
}

std::string program_name() {
  std::error_code ignored;
  return fs::read_symlink("/proc/self/exe", ignored).string();
}

Value pairs(const std::map<std::string, std::string>& values) {
  Value list = Value::array();
  for (const auto& [name, value] : values) list.push_back({{"key", name}, {"value", value}});
  return list;
}

std::string text_at(const Value& answer, std::initializer_list<const char*> way) {
  const Value* place = &answer;
  for (const char* name : way) {
    if (!place->is_object() || !place->contains(name)) return "";
    place = &(*place)[name];
  }
  return place->is_string() ? place->get<std::string>() : "";
}

std::string type_of(const fs::path& file) {
  const std::string kind = file.extension().string();
  return kind == ".json"                    ? "application/json"
         : kind == ".png"                   ? "image/png"
         : kind == ".txt" || kind == ".log" ? "text/plain"
                                            : "application/octet-stream";
}

void check_name(const char* what, const std::string& name) {
  if (const auto problem = mlflow_name_problem(name); !problem.empty())
    raise<ConfigError>("mlflow: found the name '{}' of {}, which MLflow does not allow: {}", name.substr(0, 300), what,
                       problem);
}

int64_t milliseconds_of(double seconds) { return static_cast<int64_t>(std::llround(seconds * 1000)); }

}  // namespace

struct MlflowTracker::Impl {
  std::string experiment_name, run_id, run_name, artifact_location, parent_run_id, description;
  std::map<std::string, std::string> tags;
  MlflowServer server = {};

  std::string experiment_id = {}, artifacts = {};  ///< where the run keeps them
  Value metrics = Value::array();                  ///< not sent yet
  std::map<std::string, Value> tables = {};
  SaidOnce said = {};

  void left_out(const std::string& name, const std::string& why) {
    if (said.is_first(name))
      logs::warn("accelerate.trackers", "mlflow: '{}' {}. Left out; this is said once.", name, why);
  }

  std::string find_experiment() {
    const auto known = [&] {
      return text_at(server.get("experiments/get-by-name", {{"experiment_name", experiment_name}}),
                     {"experiment", "experiment_id"});
    };
    try {
      return known();
    } catch (const MlflowRefusal& refusal) {
      if (refusal.code != "RESOURCE_DOES_NOT_EXIST") throw;
    }
    Value body = {{"name", experiment_name}, {"tags", pairs(tags)}};
    if (!artifact_location.empty()) body["artifact_location"] = artifact_location;
    try {
      return text_at(server.post("experiments/create", body), {"experiment_id"});
    } catch (const MlflowRefusal& refusal) {
      if (refusal.code != "RESOURCE_ALREADY_EXISTS") throw;  // somebody was quicker
      return known();
    }
  }

  void begin(int64_t now) {
    auto all = tags;
    if (!description.empty()) all["mlflow.note.content"] = description;
    if (!run_id.empty()) {
      const Value run = server.get("runs/get", {{"run_id", run_id}});
      experiment_id = text_at(run, {"run", "info", "experiment_id"});
      artifacts = text_at(run, {"run", "info", "artifact_uri"});
      Value update = {{"run_id", run_id}, {"status", "RUNNING"}};
      if (!run_name.empty()) update["run_name"] = run_name;
      server.post("runs/update", update);
      if (!all.empty()) server.post("runs/log-batch", {{"run_id", run_id}, {"tags", pairs(all)}});
      return;
    }
    experiment_id = find_experiment();
    all.insert({{"mlflow.user", user_name()}, {"mlflow.source.name", program_name()}, {"mlflow.source.type", "LOCAL"}});
    if (!parent_run_id.empty()) all["mlflow.parentRunId"] = parent_run_id;
    Value body = {
        {"experiment_id", experiment_id}, {"start_time", now}, {"user_id", user_name()}, {"tags", pairs(all)}};
    if (!run_name.empty()) body["run_name"] = run_name;
    const Value run = server.post("runs/create", body);
    run_id = text_at(run, {"run", "info", "run_id"});
    artifacts = text_at(run, {"run", "info", "artifact_uri"});
    if (run_id.empty())
      throw TrackerGone("mlflow: the server began no run. Is MLFLOW_TRACKING_URI the address of an MLflow server?");
  }

  void send_metrics() {
    if (metrics.empty()) return;
    server.post("runs/log-batch", {{"run_id", run_id}, {"metrics", metrics}});
    metrics = Value::array();
  }

  void need_run() const {
    if (experiment_id.empty()) throw ConfigError("mlflow: there is no run yet: call connect() first");
  }

  /// @param path  below the run's artifacts
  void send_artifact(const std::string& path, std::string bytes) {
    need_run();
    const std::string below = url_encoded(path, "/");
    if (artifacts.rfind("mlflow-artifacts:", 0) == 0) {
      std::string place = artifacts.substr(artifacts.find(':') + 1), host = server.uri();
      if (place.rfind("//", 0) == 0) {  // another server than that of the runs
        const size_t end = place.find('/', 2);
        const std::string authority = place.substr(2, end - 2);
        if (!authority.empty()) host = host.substr(0, host.find("//") + 2) + authority;
        place = end == std::string::npos ? "" : place.substr(end);
      }
      server.put(
          host + "/api/2.0/mlflow-artifacts/artifacts" + (place.rfind('/', 0) == 0 ? "" : "/") + place + "/" + below,
          type_of(path), std::move(bytes));
    } else if (artifacts.rfind("http://", 0) == 0 || artifacts.rfind("https://", 0) == 0) {
      server.put(artifacts + "/" + below, type_of(path), std::move(bytes));
    } else {
      raise<ConfigError>(
          "mlflow: the run keeps its artifacts in {}, which only MLflow's own client reaches; so there is no place for "
          "{}. Start the server with --artifacts-destination, which makes it pass artifacts on",
          artifacts, path);
    }
  }
};

MlflowTracker::MlflowTracker(const TrackerSetup& setup) {
  const TrackerValues& options = setup.init_kwargs;
  const KeywordArguments given(
      "mlflow: init_kwargs", options,
      {"experiment_name", "run_id", "tags", "nested_run", "parent_run_id", "run_name", "description", "logging_dir"});
  const bool nested = environment::flag("MLFLOW_NESTED_RUN").value_or(given.truth("nested_run", false));
  const std::string parent = given.text("parent_run_id");
  if (nested != !parent.empty())
    raise<ConfigError>(
        "mlflow: {}; expected both: nested_run, and in parent_run_id the run that the new one belongs to",
        nested ? "nested_run was given without a parent_run_id" : "parent_run_id was given without nested_run");
  const std::string experiment = text_option(given, "experiment_name", "MLFLOW_EXPERIMENT_NAME");
  // NOLINTNEXTLINE(modernize-make-unique): an aggregate that does not move
  impl_.reset(new Impl{.experiment_name = experiment.empty() ? setup.project_name : experiment,
                       .run_id = text_option(given, "run_id", "MLFLOW_RUN_ID"),
                       .run_name = given.text("run_name"),
                       .artifact_location = given.text("logging_dir"),
                       .parent_run_id = parent,
                       .description = given.text("description"),
                       .tags = tags_of(options)});
}

MlflowTracker::~MlflowTracker() = default;

void MlflowTracker::connect() {
  try {
    impl_->begin(milliseconds_of(time()));
  } catch (const MlflowRefusal& refusal) {
    throw TrackerGone(refusal.what());
  }
}

void MlflowTracker::store_init_configuration(const TrackerValues& config) {
  std::vector<Value> batches{Value::array()};
  for (const auto& [name, value] : config) {
    const std::string text = config::python_text(to_plain_json(value));
    if (text.size() > kLongestParameter)
      impl_->left_out(name, fmt::format("is a parameter of {} characters, of which MLflow takes {}", text.size(),
                                        kLongestParameter));
    else {
      check_name("a parameter", name);
      if (batches.back().size() == kMostParameters) batches.push_back(Value::array());
      batches.back().push_back({{"key", name}, {"value", text}});
    }
  }
  for (const auto& batch : batches)
    if (!batch.empty()) impl_->server.post("runs/log-batch", {{"run_id", impl_->run_id}, {"params", batch}});
}

void MlflowTracker::log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  const KeywordArguments given("mlflow: log_kwargs", log_kwargs, {"timestamp"});
  const int64_t timestamp = given.whole("timestamp").value_or(milliseconds_of(time()));
  Value metrics = Value::array();
  for (const auto& [name, value] : values) {
    const auto number = value.number();
    if (!number) {
      impl_->left_out(name, "is no number, and MLflow's metrics are");
      continue;
    }
    check_name("a metric", name);
    metrics.push_back(mlflow_metric(name, *number, timestamp, step.value_or(0)));
  }
  for (auto& metric : metrics) {
    if (impl_->metrics.size() == kMostMetrics) flush();
    impl_->metrics.push_back(std::move(metric));
  }
}

void MlflowTracker::log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                               const TrackerValues& log_kwargs) {
  for (const auto& [name, image] : images) {
    check_name("an image", name);
    const at::Tensor batch = images_as_nhwc(name, image, log_kwargs);
    const std::string stem = "images/" + name + "/" + std::to_string(step.value_or(0));
    for (int64_t place = 0; place < batch.size(0); ++place)
      impl_->send_artifact(stem + (batch.size(0) == 1 ? "" : "_" + std::to_string(place)) + ".png",
                           encode_png(batch[place]));
  }
}

void MlflowTracker::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                              const std::vector<TrackerList>& rows, std::optional<int64_t>, const TrackerValues&) {
  check_name("a table", table_name);
  Value& table = impl_->tables[table_name];
  const bool is_new = table.is_null();
  if (is_new) table = {{"columns", columns}, {"data", Value::array()}};
  else if (table["columns"] != Value(columns))
    raise<ShapeError>("mlflow: the table '{}' was logged before with other columns: found {}, expected {}", table_name,
                      config::python_text(Value(columns)), config::python_text(table["columns"]));
  for (const auto& row : rows) table["data"].push_back(to_plain_json(row));
  const std::string file = table_name + ".json";
  impl_->send_artifact(file, table.dump(-1, ' ', false, Value::error_handler_t::replace));
  // MLflow's own load_table and its page find tables by this.
  if (!is_new) return;
  Value list = Value::array();
  for (const auto& [name, ignored] : impl_->tables) list.push_back({{"path", name + ".json"}, {"type", "table"}});
  impl_->server.post("runs/set-tag",
                     {{"run_id", impl_->run_id}, {"key", "mlflow.loggedArtifacts"}, {"value", list.dump()}});
}

void MlflowTracker::flush() {
  try {
    impl_->send_metrics();
  } catch (const MlflowRefusal& refusal) {
    impl_->metrics = Value::array();
    raise<ResourceError>("{}", refusal.what());
  }
}

void MlflowTracker::finish() {
  if (impl_->experiment_id.empty()) return;
  flush();
  impl_->server.post("runs/update",
                     {{"run_id", impl_->run_id}, {"status", "FINISHED"}, {"end_time", milliseconds_of(time())}});
}

void MlflowTracker::log_artifact(const fs::path& local_path, const std::string& artifact_path) {
  std::string bytes;
  if (const auto problem = read_file(local_path, kMostArtifactBytes, bytes); !problem.empty())
    raise<CheckpointError>("mlflow: log_artifact: {} {}", local_path.string(), problem);
  impl_->send_artifact((fs::path(artifact_path) / local_path.filename()).generic_string(), std::move(bytes));
}

void MlflowTracker::log_artifacts(const fs::path& local_dir, const std::string& artifact_path) {
  std::error_code error;
  if (!fs::is_directory(local_dir, error))
    raise<CheckpointError>("mlflow: log_artifacts: found {}, expected a folder", local_dir.string());
  for (const auto& entry : fs::recursive_directory_iterator(local_dir, error))
    if (entry.is_regular_file(error))
      log_artifact(
          entry.path(),
          (fs::path(artifact_path) / entry.path().lexically_relative(local_dir).parent_path()).generic_string());
}

TrackerClass mlflow_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            return std::make_shared<MlflowTracker>(setup);
          },
          .available =
              [] {
                const auto uri = environment::text("MLFLOW_TRACKING_URI");
                return uri && uri->rfind("http", 0) == 0 && http::is_available();
              }};
}

const std::string& MlflowTracker::run_id() const { return impl_->run_id; }
const std::string& MlflowTracker::experiment_id() const { return impl_->experiment_id; }

}  // namespace accelerate
