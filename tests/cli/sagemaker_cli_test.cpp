// `accelerate launch` with config files for Amazon SageMaker. AWS is moto, behind a gate that checks signatures by
// botocore (aws_server.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>

#include "program.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using nlohmann::json;
using testing::AllOf;
using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr milliseconds kDeadline(60000);

const json& fixture() {
  static const json all =
      json::parse(std::ifstream(std::string(ACCELERATE_SOURCE_DIR) + "/tests/unit/fixtures/sagemaker_requests.json"));
  return all;
}

/// With words for what differs from run to run.
json normal(const json& value) {
  auto text = std::regex_replace(value.dump(), std::regex(R"(\d{4}(-\d\d){5}-\d{3})"), "TIME");
  return json::parse(std::regex_replace(text, std::regex("123456789012"), "ACCOUNT"));
}

/// The fixture's files in a folder of their own, an account without any files of AWS's tools, and AWS itself where a
/// test wants it.
class SageMaker : public testing::Test {
 protected:
  SageMaker()
      : folder_(fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::create_directories(folder_ / "home/.aws");
    for (const auto& [name, content] : fixture().at("files").items()) write(name, content);
    write("sm.json", config().dump());
  }

  static json config(const json& changes = json::object()) {
    json result{{"compute_environment", "AMAZON_SAGEMAKER"}, {"distributed_type", "NO"}, {"mixed_precision", "no"},
                {"ec2_instance_type", "ml.p3.2xlarge"},      {"iam_role_name", "role"},  {"region", "us-east-1"}};
    result.update(changes);
    return result;
  }

  fs::path write(const std::string& name, const std::string& content) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }

  /// Starts AWS. Only with Python: tests skip without.
  void start_aws(std::vector<std::string> options = {}) {
    options.insert(options.begin(),
                   {*support::python(), std::string(ACCELERATE_SOURCE_DIR) + "/tests/cli/aws_server.py",
                    (folder_ / "requests.log").string()});
    if (std::find(options.begin(), options.end(), "--role") == options.end())
      options.insert(options.end(), {"--role", "role"});
    server_ = std::make_unique<Program>(options);
    ASSERT_TRUE(server_->wait_for("listens at", milliseconds(60000))) << server_->wait().err;
    std::string port;
    std::ifstream(folder_ / "requests.log.port") >> port;
    url_ = "http://127.0.0.1:" + port;
  }

  std::vector<std::string> environment(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> env{"HOME=" + (folder_ / "home").string(), "AWS_EC2_METADATA_DISABLED=true",
                                 "ACCELERATE_SAGEMAKER_POLL_SECONDS=0.1", "AWS_MAX_ATTEMPTS=3"};
    for (const char* unset : {"AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN",
                              "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
                              "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                              "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"})
      env.push_back(std::string(unset) + "=");
    const auto given = [&](const char* name) {
      return std::any_of(more.begin(), more.end(),
                         [&](const auto& entry) { return entry.starts_with(std::string(name) + "="); });
    };
    if (!given("AWS_ACCESS_KEY_ID"))
      env.insert(env.end(), {"AWS_ACCESS_KEY_ID=AKIDGOOD", "AWS_SECRET_ACCESS_KEY=secret"});
    if (!url_.empty() && !given("AWS_ENDPOINT_URL")) env.push_back("AWS_ENDPOINT_URL=" + url_);
    // Later entries of the same name would be ignored by the program.
    std::erase_if(env, [&](const auto& entry) { return given(entry.substr(0, entry.find('=')).c_str()); });
    env.insert(env.end(), more.begin(), more.end());
    return env;
  }

  Program::Options options(const std::vector<std::string>& env = {}) const {
    return {.env = environment(env), .input = "", .terminal = false, .read_output = true, .folder = folder_.string()};
  }

  Result run(std::vector<std::string> arguments, const std::vector<std::string>& env = {}) const {
    arguments.insert(arguments.begin(), {accelerate_path(), "launch", "--config_file", "sm.json"});
    return Program(arguments, options(env)).wait(kDeadline);
  }

  json dry_run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "--dry_run");
    const auto result = run(std::move(arguments));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(result.out, nullptr, false);
  }

  std::vector<json> requests() const {
    std::vector<json> all;
    std::ifstream in(folder_ / "requests.log");
    for (std::string line; std::getline(in, line);) all.push_back(json::parse(line));
    return all;
  }

  std::vector<std::string> operations() const {
    std::vector<std::string> names;
    for (const auto& request : requests()) names.push_back(request["operation"]);
    return names;
  }

  json request(const std::string& operation) const {
    for (const auto& entry : requests())
      if (entry["operation"] == operation) return entry;
    return json::object();
  }

  fs::path folder_;
  std::string url_;
  std::unique_ptr<Program> server_;
};

/// AWS is moto, which is there where Python is: scripts/test.sh installs it.
#define NEEDS_MOTO()                                                                                       \
  SKIP_WITHOUT_PYTHON();                                                                                   \
  ASSERT_EQ(Program({*support::python(), "-c", "import moto.server, flask"}).wait(kDeadline).exit_code, 0) \
      << "the Python of ACCELERATE_TEST_PYTHON has no moto[server], which scripts/test.sh installs"

// ---------------------------------------------------------------- what would be sent

TEST_F(SageMaker, RequestsAreTheSageMakerSdks) {
  for (const auto& c : fixture().at("cases")) {
    SCOPED_TRACE(c["case"].get<std::string>());
    write("sm.json", c["config"].dump());
    std::vector<std::string> arguments{"--dry_run"};
    for (const char* part : {"flags", "command"})
      for (const auto& word : c[part]) arguments.push_back(word);
    const auto result = run(arguments, {"AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="});
    if (c.contains("error")) {
      EXPECT_EQ(result.exit_code, 64) << c["error"];
      EXPECT_EQ(result.out, "");
      continue;
    }
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const json ours = normal(json::parse(result.out));
    EXPECT_EQ(ours["CreateTrainingJob"], c["expect"]["request"])
        << json::diff(c["expect"]["request"], ours["CreateTrainingJob"]).dump(1);
    if (!c["expect"].contains("upload")) {
      EXPECT_FALSE(ours.contains("source"));
      continue;
    }
    EXPECT_EQ(ours["source"]["uploaded_to"], c["expect"]["upload"]["to"]);
    std::vector<std::string> names;
    for (const auto& file : ours["source"]["files"]) names.push_back(file["name"]);
    std::sort(names.begin(), names.end());
    EXPECT_EQ(json(names), c["expect"]["upload"]["files"]);
  }
}

TEST_F(SageMaker, TheFilesSettingsReachTheJob) {
  // The reference asks for both and passes neither on.
  write("sm.json",
        config({{"debug", true}, {"dynamo_config", {{"dynamo_backend", "INDUCTOR"}, {"dynamo_mode", "max-autotune"}}}})
            .dump());
  const auto environment =
      dry_run({"--gradient_accumulation_steps", "4", "proj/train.py"})["CreateTrainingJob"]["Environment"];
  EXPECT_EQ(environment["ACCELERATE_DEBUG_MODE"], "true");
  EXPECT_EQ(environment["ACCELERATE_DYNAMO_BACKEND"], "INDUCTOR");
  EXPECT_EQ(environment["ACCELERATE_DYNAMO_MODE"], "max-autotune");
  EXPECT_EQ(environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], "4");
  EXPECT_EQ(dry_run({"--dynamo_mode", "default",
                     "proj/train.py"})["CreateTrainingJob"]["Environment"]["ACCELERATE_DYNAMO_MODE"],
            "default");
}

TEST_F(SageMaker, FlagsThatMeanNothingThereAreNamed) {
  const auto result =
      run({"--dry_run", "--max_restarts", "2", "--tee", "3", "--multi_gpu", "--num_processes", "2", "proj/train.py"});
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("--max_restarts has no effect on Amazon SageMaker"), HasSubstr("--tee has no effect"),
                    HasSubstr("--num_processes has no effect"), HasSubstr("--multi_gpu has no effect")));
}

TEST_F(SageMaker, WhatItCannotRunIsAnErrorBeforeAnythingIsSent) {
  write("proj/program", "not executable");
  write("blanks.tsv", "channel_name data_location\ntrain s3://bkt/train\n");
  const struct {
    std::vector<std::string> arguments;
    json changes;
    const char* says;
  } cases[] = {
      {{"--module", "proj.train"}, {}, "--module can't be used"},
      {{"--no_python", "proj/train.py"}, {}, "--no_python can't be used"},
      {{"proj/program"}, {}, "neither a Python script (.py) nor executable"},
      {{"proj/absent"}, {}, "there is no program 'proj/absent'"},
      {{"--aws_access_key_id", "x", "proj/train.py"}, {}, "belong together"},
      {{"proj/train.py", "word"}, {}, "'word' has no name"},
      {{"proj/train.py", "--a", "1", "--a", "2"}, {}, "there twice"},
      {{"proj/train.py"}, {{"base_job_name", "my_job"}}, "letters, digits and '-'"},
      {{"proj/train.py"}, {{"region", "mars-north-1"}}, "no container is known for the region 'mars-north-1'"},
      {{"proj/train.py"}, {{"num_machines", 0}}, "num_machines is 0"},
      {{"proj/train.py"}, {{"sagemaker_metrics_file", "absent.tsv"}}, "absent.tsv, which can't be read"},
      {{"proj/train.py"},
       {{"sagemaker_inputs_file", "blanks.tsv"}},
       "line 2: expected two columns with a tab between them"},
      {{"proj/train.py"}, {{"additional_args", {{"volume_siz", 1}}}}, "did you mean 'volume_size'?"},
      {{"proj/train.py"}, {{"additional_args", {{"volume_size", "big"}}}}, "expected an integer"},
      {{"proj/train.py"}, {{"additional_args", {{"subnets", json::array({"a"})}}}}, "needs both"},
      {{"proj/train.py"}, {{"additional_args", {{"distribution", {{"horovod", json::object()}}}}}}, "'horovod'"},
      {{"proj/train.py"}, {{"additional_args", {{"output_path", "bucket"}}}}, "expected s3://BUCKET/"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.says);
    write("sm.json", config(c.changes.is_null() ? json::object() : c.changes).dump());
    const auto result = run(c.arguments, {"AWS_ENDPOINT_URL=http://127.0.0.1:9"});
    EXPECT_EQ(result.exit_code, 64) << result.err;
    EXPECT_THAT(result.err, HasSubstr(c.says));
  }
}

// ---------------------------------------------------------------- a job from its beginning to its end

TEST_F(SageMaker, AJobIsMadeAndFollowedToItsEnd) {
  NEEDS_MOTO();
  start_aws({"--line", "step 1", "--line", "step 2", "--status", "InProgress,InProgress,Completed"});
  write("sm.json",
        config({{"distributed_type", "DATA_PARALLEL"}, {"ec2_instance_type", "ml.p3.16xlarge"}, {"num_machines", 2}})
            .dump());
  const auto planned = normal(dry_run({"proj/train.py", "--lr", "0.1"}));
  EXPECT_TRUE(requests().empty()) << "a dry run sends nothing";
  const auto result = run({"proj/train.py", "--lr", "0.1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(
      result.out,
      AllOf(
          HasSubstr("Starting - Preparing the instances\n"),
          HasSubstr("[algo-1] step 1\n[algo-1] step 2\n[algo-2] step 1\n"), HasSubstr("Completed - Job is Completed\n"),
          HasSubstr("Training seconds: 120\nBillable seconds: 100\n"),
          HasSubstr("You can find your model data at: s3://sagemaker-us-east-1-123456789012/accelerate-sagemaker-1-")));
  EXPECT_EQ(result.out.find("step 1"), result.out.find("[algo-1] step 1") + 9) << "each line once";
  EXPECT_EQ(result.out.find("step 2", result.out.rfind("[algo-2] step 2") + 10), std::string::npos);
  EXPECT_THAT(result.err, AllOf(HasSubstr("account 123456789012 in us-east-1"),
                                HasSubstr("made the bucket sagemaker-us-east-1-123456789012"),
                                HasSubstr("created the training job accelerate-sagemaker-1-")));
  for (const auto& entry : requests()) EXPECT_EQ(entry["signature"], "right") << entry;
  // The request that is sent is the one that the dry run showed, but for what only the account knows.
  const json sent = normal(request("CreateTrainingJob")["body"]);
  EXPECT_EQ(sent, planned["CreateTrainingJob"]) << json::diff(planned["CreateTrainingJob"], sent).dump(1);
  EXPECT_EQ(json("s3:/" + request("PutObject")["path"].get<std::string>()).dump(),
            request("CreateTrainingJob")["body"]["HyperParameters"]["sagemaker_submit_directory"]);
  const json files = request("PutObject")["files"];
  EXPECT_EQ(files["train.py"], "print('hello')\n");
  EXPECT_EQ(files["data/words.txt"], "a b c\n");
  EXPECT_TRUE(files["data"].is_null() && files.contains("data"));
  EXPECT_EQ(request("PutObject")["headers"]["x-amz-server-side-encryption"], "aws:kms");
  EXPECT_EQ(request("PutObject")["headers"]["x-amz-expected-bucket-owner"], "123456789012");
  EXPECT_EQ(request("HeadBucket")["headers"]["x-amz-expected-bucket-owner"], "123456789012");
}

TEST_F(SageMaker, ASecondJobFindsTheBucket) {
  NEEDS_MOTO();
  start_aws();
  write("sm.json", config({{"region", "eu-west-1"}}).dump());
  ASSERT_EQ(run({"proj/train.py"}).exit_code, 0);
  const auto before = operations();
  EXPECT_EQ(std::count(before.begin(), before.end(), "CreateBucket"), 1)
      << "with the region in its body, or S3 would refuse it";
  const auto result = run({"-q", "proj/train.py"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  const auto after = operations();
  EXPECT_EQ(std::count(after.begin(), after.end(), "CreateBucket"), 1);
  EXPECT_EQ(std::count(after.begin(), after.end(), "CreateTrainingJob"), 2);
}

TEST_F(SageMaker, ARoleOfItsOwnIsMadeOnce) {
  NEEDS_MOTO();
  start_aws();
  write("sm.json", config({{"iam_role_name", "accelerate_sagemaker_execution_role"}}).dump());
  ASSERT_EQ(run({"proj/train.py"}).exit_code, 0);
  EXPECT_EQ(request("CreateTrainingJob")["body"]["RoleArn"],
            "arn:aws:iam::123456789012:role/accelerate_sagemaker_execution_role");
  const auto trust = json::parse(request("CreateRole")["form"]["AssumeRolePolicyDocument"].get<std::string>());
  EXPECT_EQ(trust["Statement"][0]["Principal"]["Service"], "sagemaker.amazonaws.com");
  const auto rights = json::parse(request("PutRolePolicy")["form"]["PolicyDocument"].get<std::string>());
  EXPECT_EQ(rights["Statement"][0]["Action"].size(), 19);
  ASSERT_EQ(run({"proj/train.py"}).exit_code, 0);
  const auto names = operations();
  EXPECT_EQ(std::count(names.begin(), names.end(), "CreateRole"), 1);
}

TEST_F(SageMaker, AnExecutableComesWithAStartScript) {
  NEEDS_MOTO();
  start_aws();
  const auto program =
      write("bin/trainer",
            "#!/bin/sh\necho \"rank $RANK of $WORLD_SIZE at $MASTER_ADDR: $*\"\n: > \"said$RANK\"\n"
            "[ \"$RANK\" != 3 ] || { until [ -e said2 ]; do sleep 0.05; done; exit 7; }\n");  // ends the other one
  ::chmod(program.c_str(), 0755);
  write("bin/large", "is not sent");
  ASSERT_EQ(run({"bin/trainer", "--fast", "a b", "it's \xc3\xa9"}).exit_code, 0);
  const json body = request("CreateTrainingJob")["body"], files = request("PutObject")["files"];
  EXPECT_EQ(body["HyperParameters"]["sagemaker_program"], "\"accelerate_start.py\"");
  EXPECT_FALSE(body["HyperParameters"].contains("fast"));
  ASSERT_EQ(files.size(), 2);
  EXPECT_EQ(request("PutObject")["modes"]["trainer"], 0755);
  // The script, as the container would run it: two machines with two GPUs each.
  write("container/accelerate_start.py", files["accelerate_start.py"]);
  write("container/trainer", files["trainer"]);
  const auto started = [&](const char* host) {
    return Program({*support::python(), (folder_ / "container/accelerate_start.py").string()},
                   {.env = {R"(SM_HOSTS=["algo-1","algo-2"])", std::string("SM_CURRENT_HOST=") + host, "SM_NUM_GPUS=2"},
                    .input = "",
                    .terminal = false,
                    .read_output = true,
                    .folder = folder_.string()})
        .wait(kDeadline);
  };
  const auto first = started("algo-1");
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_THAT(first.out, AllOf(HasSubstr("rank 0 of 4 at algo-1: --fast a b it's \xc3\xa9\n"),
                               HasSubstr("rank 1 of 4 at algo-1: ")));
  const auto second = started("algo-2");
  EXPECT_EQ(second.exit_code, 7);
  EXPECT_THAT(second.out, AllOf(HasSubstr("rank 2 of 4"), HasSubstr("rank 3 of 4")));
  EXPECT_THAT(second.err, HasSubstr("process 1 of machine 1 ended with 7"));
}

// ---------------------------------------------------------------- how it ends otherwise

TEST_F(SageMaker, AFailedJobIsAFailure) {
  NEEDS_MOTO();
  start_aws({"--status", "InProgress,Failed"});
  const auto result = run({"proj/train.py"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("failed: AlgorithmError: exit code 3"));
  EXPECT_THAT(result.out, Not(HasSubstr("model data")));
}

TEST_F(SageMaker, AStoppedJobIsNoSuccess) {
  NEEDS_MOTO();
  start_aws({"--status", "Stopped"});
  const auto result = run({"proj/train.py"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("was stopped before its end"));
}

TEST_F(SageMaker, CtrlCEndsTheFollowingAndNotTheJob) {
  NEEDS_MOTO();
  start_aws({"--status", "InProgress"});
  Program program({accelerate_path(), "launch", "--config_file", "sm.json", "proj/train.py"}, options());
  ASSERT_TRUE(program.wait_for("Training - Training image download completed"));
  ::kill(-program.pid(), SIGINT);  // as a terminal does: to the launcher and what it started
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("goes on without being followed"),
                    HasSubstr("stop-training-job --region us-east-1 --training-job-name accelerate-sagemaker-1-")));
  EXPECT_THAT(operations(), Not(Contains("StopTrainingJob")));
}

TEST_F(SageMaker, AKilledLauncherTakesTheFollowerAlong) {
  NEEDS_MOTO();
  start_aws({"--status", "InProgress"});
  Program program({accelerate_path(), "launch", "--config_file", "sm.json", "proj/train.py"}, options());
  ASSERT_TRUE(program.wait_for("Training - "));
  std::ifstream children("/proc/" + std::to_string(program.pid()) + "/task/" + std::to_string(program.pid()) +
                         "/children");
  pid_t helper = 0;
  children >> helper;
  ASSERT_GT(helper, 0);
  program.signal(SIGKILL);
  EXPECT_TRUE(gone(helper));
}

TEST_F(SageMaker, BusyServicesAreAskedAgain) {
  NEEDS_MOTO();
  // The third kind: the job was made, and the answer lost. The second try finds the name taken, by itself.
  start_aws({"--fail", "GetCallerIdentity:503:1", "--fail", "PutObject:500:2:InternalError", "--fail",
             "GetRole:400:1:Throttling", "--after", "CreateTrainingJob:503:1", "--fail", "DescribeTrainingJob:0:1",
             "--fail", "GetLogEvents:400:9:AccessDeniedException"});
  const auto result = run({"proj/train.py"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto names = operations();
  EXPECT_EQ(std::count(names.begin(), names.end(), "PutObject"), 3);
  EXPECT_EQ(std::count(names.begin(), names.end(), "CreateTrainingJob"), 2);
  EXPECT_THAT(result.err, AllOf(HasSubstr("trying again"), HasSubstr("PutObject at ")));
}

TEST_F(SageMaker, ServicesThatStayBrokenAreAnError) {
  NEEDS_MOTO();
  start_aws({"--fail", "CreateTrainingJob:503:99"});
  const auto result = run({"proj/train.py"});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, HasSubstr("was refused at last, after 3 attempts: ServiceUnavailable: as told (HTTP 503)"));
  const auto names = operations();
  EXPECT_EQ(std::count(names.begin(), names.end(), "CreateTrainingJob"), 3);
}

TEST_F(SageMaker, NobodyThereIsAnError) {
  const auto result = run({"proj/train.py"}, {"AWS_ENDPOINT_URL=http://127.0.0.1:9", "AWS_MAX_ATTEMPTS=1"});
  EXPECT_EQ(result.exit_code, 71);
  EXPECT_THAT(result.err, AllOf(HasSubstr("GetCallerIdentity at http://127.0.0.1:9 got no answer"),
                                HasSubstr("Is the region 'us-east-1' right")));
  EXPECT_EQ(run({"proj/train.py"}, {"AWS_ENDPOINT_URL=ftp://x"}).exit_code, 64);
  EXPECT_EQ(run({"proj/train.py"}, {"AWS_MAX_ATTEMPTS=often"}).exit_code, 64);
}

TEST_F(SageMaker, RefusalsSayWhy) {
  NEEDS_MOTO();
  start_aws({"--fail", "CreateTrainingJob:400:1:AccessDeniedException", "--fail", "HeadBucket:403:1"});
  const auto wrong_secret =
      run({"proj/train.py"}, {"AWS_ACCESS_KEY_ID=AKIDGOOD", "AWS_SECRET_ACCESS_KEY=a wrong secret"});
  EXPECT_EQ(wrong_secret.exit_code, 71);
  EXPECT_THAT(wrong_secret.err, AllOf(HasSubstr("SignatureDoesNotMatch: as told & done (HTTP 403). The secret doesn't "
                                                "fit the access key; both come from the variables"),
                                      Not(HasSubstr("a wrong secret"))));
  const auto wrong_key = run({"proj/train.py"}, {"AWS_ACCESS_KEY_ID=AKIDBAD", "AWS_SECRET_ACCESS_KEY=secret"});
  EXPECT_THAT(wrong_key.err, HasSubstr("AWS doesn't know the access key"));
  EXPECT_THAT(run({"proj/train.py"}).err, HasSubstr("belongs to another account or may not be used"));
  EXPECT_THAT(run({"proj/train.py"}).err, AllOf(HasSubstr("CreateTrainingJob at "), HasSubstr("may not do this")));
  write("sm.json", config({{"iam_role_name", "nobody"}}).dump());
  const auto role = run({"proj/train.py"});
  EXPECT_EQ(role.exit_code, 64);
  EXPECT_THAT(role.err, HasSubstr("the account has no role 'nobody'"));
}

// ---------------------------------------------------------------- credentials

TEST_F(SageMaker, CredentialsComeFromWhereAwsToolsLookForThem) {
  NEEDS_MOTO();
  start_aws();
  const std::vector<std::string> none{"AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), none.begin(), none.end());
    return more;
  };
  write("home/.aws/credentials",
        "[default]\naws_access_key_id = AKIDBAD\naws_secret_access_key = "
        "x\n[good]\naws_access_key_id=AKIDGOOD\naws_secret_access_key=secret\n");
  write("home/.aws/config",
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/role\nsource_profile = good\nexternal_id = "
        "e\n[profile process]\ncredential_process = echo '{\"Version\": 1, \"AccessKeyId\": \"AKIDGOOD\", "
        "\"SecretAccessKey\": \"secret\"}'\n");
  write("token", "web token\n");
  write("password", "container password\n");
  const struct {
    std::string says;
    std::vector<std::string> flags, env;
    json changes = json::object();
  } cases[] = {
      {"from --aws_access_key_id",
       {"--aws_access_key_id", "AKIDGOOD", "--aws_secret_access_key", "secret"},
       {"AWS_ACCESS_KEY_ID=AKIDBAD", "AWS_SECRET_ACCESS_KEY=x"}},
      {"from the variables", {}, {"AWS_PROFILE=good", "AWS_ACCESS_KEY_ID=AKIDGOOD", "AWS_SECRET_ACCESS_KEY=secret"}},
      {"from the profile 'good'", {}, with({}), {{"profile", "good"}}},
      {"from the profile 'good'", {}, with({"AWS_PROFILE=default"}), {{"profile", "good"}}},
      {"from the profile 'good'", {}, with({"AWS_PROFILE=good"})},
      {"from the profile 'role' (role arn:aws:iam::123456789012:role/role)", {}, with({"AWS_PROFILE=role"})},
      {"from the profile 'process' (credential_process)", {}, with({"AWS_PROFILE=process"})},
      {"from a web identity",
       {},
       with({"AWS_WEB_IDENTITY_TOKEN_FILE=token", "AWS_ROLE_ARN=arn:aws:iam::123456789012:role/role"})},
      {"from the container's role",
       {},
       with({"AWS_SHARED_CREDENTIALS_FILE=absent", "AWS_CONTAINER_CREDENTIALS_FULL_URI=" + url_ + "/container",
             "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=password"})},
      {"from the machine's role 'machine-role'",
       {},
       with({"AWS_SHARED_CREDENTIALS_FILE=absent", "AWS_EC2_METADATA_DISABLED=false",
             "AWS_EC2_METADATA_SERVICE_ENDPOINT=" + url_ + "/"})},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.says);
    write("sm.json", config(c.changes).dump());
    auto arguments = c.flags;
    arguments.push_back("proj/train.py");
    const auto result = run(arguments, c.env);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("credentials " + c.says));
    EXPECT_THAT(result.out + result.err,
                Not(AnyOf(HasSubstr("=secret"), HasSubstr("machine secret"), HasSubstr("token\""))));
  }
  for (const auto& entry : requests()) EXPECT_THAT(entry["signature"].get<std::string>(), AnyOf("right", "none"));
  EXPECT_EQ(request("AssumeRole")["form"]["ExternalId"], "e");
  EXPECT_EQ(request("AssumeRoleWithWebIdentity")["form"]["WebIdentityToken"], "web token");
}

TEST_F(SageMaker, MissingCredentialsAreAnError) {
  const auto failed = [&](std::vector<std::string> env, const json& changes = json::object()) {
    write("sm.json", config(changes).dump());
    env.insert(env.end(), {"AWS_ENDPOINT_URL=http://127.0.0.1:9"});
    if (std::none_of(env.begin(), env.end(), [](const auto& e) { return e.starts_with("AWS_ACCESS_KEY_ID="); }))
      env.insert(env.end(), {"AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="});
    const auto result = run({"proj/train.py"}, env);
    EXPECT_EQ(result.exit_code, 64) << result.err;
    return result.err;
  };
  EXPECT_THAT(failed({}), HasSubstr("no AWS credentials were found. Looked at: --aws_access_key_id"));
  EXPECT_THAT(failed({"AWS_ACCESS_KEY_ID=AKIDGOOD", "AWS_SECRET_ACCESS_KEY="}),
              HasSubstr("AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"));
  write("home/.aws/credentials", "[one]\naws_access_key_id = a\n");
  write("home/.aws/config",
        "[profile sso]\nsso_session = s\n[profile loop]\nrole_arn = r/x\nsource_profile = loop2\n[profile "
        "loop2]\nrole_arn = r/x\nsource_profile = loop\n[profile mfa]\nrole_arn = r/x\nsource_profile = "
        "one\nmfa_serial = m\n");
  EXPECT_THAT(
      failed({}, {{"profile", "absent"}}),
      AllOf(HasSubstr(
          "there is no AWS profile 'absent', which the config file names. There are: loop, loop2, mfa, one, sso")));
  EXPECT_THAT(failed({"AWS_PROFILE=one"}), HasSubstr("aws_access_key_id without aws_secret_access_key"));
  EXPECT_THAT(failed({"AWS_PROFILE=sso"}), HasSubstr("Identity Center"));
  EXPECT_THAT(failed({"AWS_PROFILE=loop"}), HasSubstr("is a source_profile of itself"));
  EXPECT_THAT(failed({"AWS_PROFILE=mfa"}), HasSubstr("MFA"));
  EXPECT_THAT(failed({"AWS_CONTAINER_CREDENTIALS_FULL_URI=http://example.org/x"}),
              HasSubstr("expected https, or an address of this machine"));
  write("home/.aws/credentials", "secret words without a section\n");
  EXPECT_THAT(failed({}), AllOf(HasSubstr("credentials, line 1: neither [a section] nor a setting"),
                                Not(HasSubstr("secret words"))));
}

// ---------------------------------------------------------------- local mode

/// A docker that writes down what it was asked.
constexpr const char* kDocker =
    "#!/bin/sh\nprintf '%s\\n' \"$*\" >> \"$HOME/docker.log\"\ncase $1 in run) env | grep ^AWS_ >> "
    "\"$HOME/docker.env\"; exit ${DOCKER_EXIT:-0};; login) cat >> \"$HOME/docker.password\";; esac\n";

TEST_F(SageMaker, LocalModeRunsTheContainerHere) {
  const auto docker = write("bin/docker", kDocker);
  ::chmod(docker.c_str(), 0755);
  fs::create_directories(folder_ / "data");
  write("inputs.tsv", "channel_name\tdata_location\ntrain\tfile://" + (folder_ / "data").string() + "\n");
  write(
      "sm.json",
      config({{"ec2_instance_type", "local_gpu"}, {"image_uri", "my/image:1"}, {"sagemaker_inputs_file", "inputs.tsv"}})
          .dump());
  const auto planned = dry_run({"proj/train.py", "--lr", "0.1"});
  EXPECT_EQ(planned["files"]["input/config/hyperparameters.json"]["lr"], "0.1");
  EXPECT_EQ(planned["files"]["input/config/hyperparameters.json"]["sagemaker_submit_directory"], "\"/opt/ml/code\"");
  write("home/.aws/credentials", "[default]\naws_access_key_id = AKIDGOOD\naws_secret_access_key = secret\n");
  const auto result = run({"proj/train.py", "--lr", "0.1"}, {"PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin",
                                                             "AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY="});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::ifstream log(folder_ / "home/docker.log");
  const std::string commands{std::istreambuf_iterator<char>(log), {}};
  EXPECT_THAT(commands, AllOf(HasSubstr("--gpus all"), HasSubstr("-v " + (folder_ / "proj").string() + ":/opt/ml/code"),
                              HasSubstr("-v " + (folder_ / "data").string() + ":/opt/ml/input/data/train"),
                              HasSubstr(":/opt/ml/model"), HasSubstr("-e ACCELERATE_USE_SAGEMAKER=true"),
                              HasSubstr("-e AWS_ACCESS_KEY_ID -e AWS_SECRET_ACCESS_KEY"),
                              HasSubstr(" my/image:1 train\n"), Not(HasSubstr("secret\n"))));
  std::ifstream env(folder_ / "home/docker.env");
  EXPECT_THAT((std::string{std::istreambuf_iterator<char>(env), {}}), HasSubstr("AWS_SECRET_ACCESS_KEY=secret\n"));
  EXPECT_THAT(result.err, Not(HasSubstr("=secret")));
  const std::string model =
      result.out.substr(result.out.find("in: ") + 4, result.out.find('\n') - result.out.find("in: ") - 4);
  const fs::path root = fs::path(model).parent_path();
  const auto resources = json::parse(std::ifstream(root / "input/config/resourceconfig.json"));
  EXPECT_EQ(resources["hosts"], json::array({resources["current_host"]}));
  EXPECT_TRUE(fs::is_directory(model));
  // The launch returns what the container returns.
  EXPECT_EQ(
      run({"proj/train.py"}, {"PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin", "DOCKER_EXIT=9"}).exit_code, 9);
}

TEST_F(SageMaker, LocalModePullsAmazonsImages) {
  NEEDS_MOTO();
  start_aws();
  const auto docker = write("bin/docker", kDocker);
  ::chmod(docker.c_str(), 0755);
  const auto program = write("bin/trainer", "#!/bin/sh\n");
  ::chmod(program.c_str(), 0755);
  write("sm.json", config({{"ec2_instance_type", "local_gpu"}}).dump());
  const auto result = run({"bin/trainer", "x"}, {"PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(request("GetAuthorizationToken")["signature"], "right");
  std::ifstream log(folder_ / "home/docker.log");
  EXPECT_THAT((std::string{std::istreambuf_iterator<char>(log), {}}),
              AllOf(HasSubstr("images -q 763104351884.dkr.ecr.us-east-1.amazonaws.com/"), HasSubstr("login https://"),
                    HasSubstr("-u AWS --password-stdin"), HasSubstr("pull 763104351884.dkr.ecr.us-east-1"),
                    HasSubstr("/code:/opt/ml/code")));
  std::ifstream password(folder_ / "home/docker.password");
  EXPECT_FALSE((std::string{std::istreambuf_iterator<char>(password), {}}).empty());
}

TEST_F(SageMaker, LocalModeNeedsDockerAndFoldersHere) {
  const auto fails = [&](const json& changes, int code, const std::string& path = "/nowhere") {
    json all = config({{"ec2_instance_type", "local"}, {"image_uri", "my/image:1"}});
    all.update(changes);
    write("sm.json", all.dump());
    const auto result = run({"proj/train.py"}, {"PATH=" + path});
    EXPECT_EQ(result.exit_code, code) << result.err;
    return result.err;
  };
  EXPECT_THAT(fails(json::object(), 78), HasSubstr("there is no docker in PATH"));
  EXPECT_THAT(fails({{"num_machines", 2}}, 64), HasSubstr("local mode is one container"));
  EXPECT_THAT(fails({{"sagemaker_inputs_file", "inputs.tsv"}}, 64), HasSubstr("aws s3 sync s3://bkt/train FOLDER"));
  EXPECT_THAT(fails({{"additional_args", {{"use_spot_instances", true}}}}, 64), HasSubstr("no meaning in local mode"));
  EXPECT_THAT(fails({{"image_uri", nullptr}}, 64), HasSubstr("containers are for GPUs"));
}

}  // namespace
