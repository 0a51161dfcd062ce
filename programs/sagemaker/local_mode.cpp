#include "sagemaker/local_mode.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>

#include "input/json.hpp"
#include "sagemaker/image.hpp"
#include "utils/raise.hpp"

namespace sagemaker {
namespace {

namespace fs = std::filesystem;
using accelerate::ConfigError;

/// Runs a program to its end; its exit code, 128 + signal, or 127 when it can't be started.
int run(const std::vector<std::string>& words, const std::string* input = nullptr, std::string* output = nullptr) {
  int in[2] = {-1, -1}, out[2] = {-1, -1};
  if ((input && ::pipe(in) != 0) || (output && ::pipe(out) != 0))
    accelerate::raise<accelerate::ResourceError>("no pipe can be opened: {}", std::strerror(errno));
  std::vector<char*> argv;
  for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) accelerate::raise<accelerate::ResourceError>("no process can be started: {}", std::strerror(errno));
  if (pid == 0) {
    if (input) ::dup2(in[0], STDIN_FILENO), ::close(in[1]);
    if (output) ::dup2(out[1], STDOUT_FILENO), ::close(out[0]);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  if (input) {
    ::close(in[0]);
    [[maybe_unused]] const ssize_t written = ::write(in[1], input->data(), input->size());
    ::close(in[1]);
  }
  if (output) {
    ::close(out[1]);
    char bytes[4096];
    for (ssize_t count; (count = ::read(out[0], bytes, sizeof(bytes))) > 0;)
      output->append(bytes, static_cast<size_t>(count));
    ::close(out[0]);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string base64_decoded(const std::string& text) {
  std::string result;
  unsigned bits = 0, have = 0;
  for (const char c : text) {
    const char* const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char* const at = c ? std::strchr(alphabet, c) : nullptr;
    if (!at) break;
    bits = bits << 6 | static_cast<unsigned>(at - alphabet);
    if ((have += 6) < 8) continue;
    have -= 8;
    result += static_cast<char>(bits >> have & 0xff);
  }
  return result;
}

/// Logs in to Amazon's registry and gets the image. Other registries are docker's own business.
void pull(const TrainingJob& job, const std::string& image, const CredentialsQuery& query,
          const std::optional<FoundCredentials>& found, const Environment& environment, const Profiles& profiles) {
  const std::string account = registry_account(image);
  std::string here;
  if (account.empty() || (run({"docker", "images", "-q", image}, nullptr, &here) == 0 && !here.empty())) return;
  if (!found) find_credentials(query, environment, profiles);  // says what is missing
  const AwsProfile* profile = profiles.find(profile_name(query, environment));
  Aws aws(job.region(), environment, profile ? *profile : AwsProfile{});
  aws.use(found->credentials, found->source);
  const Json answer =
      aws.call("ecr", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken", {{"registryIds", {account}}});
  const Json data = list_in(answer, "authorizationData"), first = data.empty() ? Json() : data[0];
  const std::string pair = base64_decoded(text_in(first, "authorizationToken")),
                    proxy = text_in(first, "proxyEndpoint");
  const size_t colon = pair.find(':');
  if (colon == std::string::npos)
    accelerate::raise<accelerate::LaunchError>("Amazon's registry gave no token for docker");
  const std::string password = pair.substr(colon + 1);
  std::string said;  // "Login Succeeded"
  if (run({"docker", "login", proxy.empty() ? image.substr(0, image.find('/')) : proxy, "-u", pair.substr(0, colon),
           "--password-stdin"},
          &password, &said) != 0)
    accelerate::raise<accelerate::LaunchError>("docker could not log in to Amazon's registry; its message is above");
  if (run({"docker", "pull", image}) != 0)
    accelerate::raise<accelerate::LaunchError>("docker could not get the image {}; its message is above", image);
}

std::string random_letters(size_t count) {
  std::random_device random;
  std::string text;
  for (size_t i = 0; i < count; ++i) text += "abcdefghijklmnopqrstuvwxyz0123456789"[random() % 36];
  return text;
}

/// The place of the container's folders: a local output_path, else a new folder for temporary files.
fs::path new_root(const TrainingJob& job) {
  const std::string given = job.text("output_path");
  std::error_code error;
  if (given.rfind("file://", 0) == 0) {
    const fs::path root = fs::absolute(given.substr(7)) / job.name();
    if (fs::create_directories(root, error), error)
      accelerate::raise<ConfigError>("additional_args.output_path: the folder {} can't be made: {}", root.string(),
                                     error.message());
    return root;
  }
  std::string name = (fs::temp_directory_path() / "accelerate-sagemaker-XXXXXX").string();
  if (!::mkdtemp(name.data()))
    accelerate::raise<accelerate::ResourceError>("no temporary folder {} can be made: {}", name, std::strerror(errno));
  return name;
}

}  // namespace

std::vector<std::string> docker_command(const TrainingJob& job, const fs::path& root, const std::string& host,
                                        const std::vector<std::string>& passed) {
  std::vector<std::string> words{"docker", "run", "--rm", "--name", job.name(), "--hostname", host};
  if (job.text("instance_type") == "local_gpu") words.insert(words.end(), {"--gpus", "all"});
  const auto mount = [&](const fs::path& from, const std::string& to) {
    words.insert(words.end(), {"-v", fs::absolute(from).lexically_normal().string() + ":" + to});
  };
  mount(root / "input", "/opt/ml/input");
  mount(root / "output", "/opt/ml/output");
  mount(root / "model", "/opt/ml/model");
  mount(job.source_folder().empty() ? root / "code" : fs::path(job.source_folder()), "/opt/ml/code");
  for (const auto& input : job.inputs())
    mount(input[1].get<std::string>().substr(std::strlen("file://")),
          "/opt/ml/input/data/" + input[0].get<std::string>());
  const Json environment = job.environment();
  for (const auto& [name, value] : environment.items())
    words.insert(words.end(), {"-e", name + "=" + value.get<std::string>()});
  words.insert(words.end(), {"-e", "AWS_REGION=" + job.region(), "-e", "TRAINING_JOB_NAME=" + job.name()});
  for (const auto& name : passed) words.insert(words.end(), {"-e", name});
  words.insert(words.end(), {job.image(), "train"});
  return words;
}

std::vector<std::pair<std::string, std::string>> container_files(const TrainingJob& job, const std::string& host) {
  const Json resources{{"current_host", host},
                       {"hosts", {host}},
                       {"network_interface_name", "eth0"},
                       {"current_instance_type", job.text("instance_type")}};
  Json channels = Json::object();
  for (const auto& input : job.inputs()) channels[input[0].get<std::string>()] = {{"TrainingInputMode", "File"}};
  return {{"input/config/hyperparameters.json", job.hyperparameters("/opt/ml/code").dump()},
          {"input/config/resourceconfig.json", resources.dump()},
          {"input/config/inputdataconfig.json", channels.dump()}};
}

int run_locally(const TrainingJob& job, const JobPlan& plan, const Environment& environment) {
  if (job.words()["instance_count"] != 1)
    accelerate::raise<ConfigError>("num_machines is {}, and local mode is one container: leave it at 1",
                                   job.words()["instance_count"].dump());
  for (const auto& input : job.inputs())
    if (input[1].get<std::string>().rfind("file://", 0) != 0)
      accelerate::raise<ConfigError>(
          "the input channel '{}' is in S3, and local mode reads folders of this machine. Fetch it (aws s3 sync {} "
          "FOLDER) and name file://FOLDER",
          input[0].get<std::string>(), input[1].get<std::string>());
  for (const char* key : {"checkpoint_s3_uri", "use_spot_instances"})
    if (job.words().contains(key) && job.words()[key] != false)
      accelerate::raise<ConfigError>("additional_args.{} has no meaning in local mode: leave it out", key);
  const std::string host = "algo-1-" + random_letters(5);

  if (plan.dry_run) {
    const fs::path root = fs::temp_directory_path() / "accelerate-sagemaker-XXXXXX";
    Json files = Json::object();
    for (const auto& [name, content] : container_files(job, host)) files[name] = accelerate::parse_json<Json>(content);
    Json source = Json::array();
    for (const auto& file : job.source()) source.push_back({{"name", file.name}, {"bytes", file.bytes}});
    const Json shown{
        {"launcher", "sagemaker local mode"},
        {"command", docker_command(job, root, host, {})},
        {"folder", root.string()},
        {"files", files},
        {"source",
         {{"folder", job.source_folder().empty() ? (root / "code").string()
                                                 : fs::absolute(job.source_folder()).lexically_normal().string()},
          {"files", source}}}};
    std::printf("%s\n", shown.dump(2).c_str());
    return 0;
  }
  std::string version;
  if (run({"docker", "--version"}, nullptr, &version) != 0)
    accelerate::raise<accelerate::NotBuiltError>(
        "ec2_instance_type is '{}', which runs the container on this machine by docker, and there is no docker in "
        "PATH. Install it, or choose an instance type of SageMaker (ml....)",
        job.text("instance_type"));

  const fs::path root = new_root(job);
  for (const char* folder : {"input/config", "input/data", "output/data", "model"})
    fs::create_directories(root / folder);
  const auto write = [&](const fs::path& file, const std::string& content) {
    if (!(std::ofstream(file, std::ios::binary) << content).flush())
      accelerate::raise<accelerate::ResourceError>("the file {} can't be written", file.string());
  };
  for (const auto& [name, content] : container_files(job, host)) write(root / name, content);
  if (job.source_folder().empty()) {
    fs::create_directories(root / "code");
    for (const auto& file : job.source()) {
      const fs::path to = root / "code" / file.name;
      if (file.name.back() == '/') fs::create_directories(to);
      else if (file.path.empty()) write(to, file.content);
      else fs::copy_file(file.path, to);
    }
  }

  // Programs in the container may want S3 too; so they get the credentials, if there are any.
  const Profiles profiles(environment);
  const CredentialsQuery query{job.region(), plan.text("profile"), plan.given};
  std::optional<FoundCredentials> found;
  try {
    found = find_credentials(query, environment, profiles);
  } catch (const ConfigError& error) {
    if (!plan.quiet)
      std::fprintf(stderr, "accelerate launch: the container gets no AWS credentials: %s\n", error.what());
  }
  pull(job, job.image(), query, found, environment, profiles);
  std::vector<std::string> passed;
  if (found)
    for (const auto& [name, value] : {std::pair{"AWS_ACCESS_KEY_ID", found->credentials.key_id},
                                      {"AWS_SECRET_ACCESS_KEY", found->credentials.secret},
                                      {"AWS_SESSION_TOKEN", found->credentials.token}})
      if (!value.empty()) {
        ::setenv(name, value.c_str(), 1);
        passed.emplace_back(name);
      }
  const auto command = docker_command(job, root, host, passed);
  if (!plan.quiet) {
    std::fprintf(stderr, "accelerate launch:");
    for (const auto& word : command) std::fprintf(stderr, " %s", word.c_str());
    std::fprintf(stderr, "\n");
  }
  const int code = run(command);
  if (code == 0) std::printf("You can find your model data in: %s\n", (root / "model").c_str());
  else
    std::fprintf(stderr, "accelerate launch: the container ended with %d; what it left is in %s\n", code, root.c_str());
  return code;
}

}  // namespace sagemaker
