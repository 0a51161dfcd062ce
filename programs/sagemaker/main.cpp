// accelerate-sagemaker: creates the training job that `accelerate launch` describes on the standard input, and follows
// it. A program of its own, so that the launcher needs no libcurl.
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>

#include "input/json.hpp"
#include "sagemaker/credentials.hpp"
#include "sagemaker/follow.hpp"
#include "sagemaker/job.hpp"
#include "sagemaker/local_mode.hpp"
#include "sagemaker/role.hpp"
#include "utils/program_help.hpp"
#include "utils/raise.hpp"

extern char** environ;

namespace sagemaker {
namespace {

Environment current_environment() {
  Environment environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    if (const size_t equals = text.find('='); equals != std::string::npos)
      environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

void print_request(const TrainingJob& job, const Aws& aws) {
  const Account account{.role_arn = guessed_role_arn(job.role(), job.region())};
  Json files = Json::array();
  for (const auto& file : job.source()) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  Json shown{{"launcher", "sagemaker"}, {"region", job.region()}, {"endpoint", aws.endpoint("sagemaker")}};
  if (!job.is_uploaded())
    shown["source"] = {{"uploaded_to", "s3://" + job.code_bucket(account) + "/" + job.code_key()}, {"files", files}};
  shown["CreateTrainingJob"] = job.request(account);
  std::printf("%s\n", shown.dump(2).c_str());
}

/// The account's own bucket, as the SageMaker SDK calls and makes it.
void make_bucket(const TrainingJob& job, Aws& aws, const Account& account, bool quiet) {
  const std::string bucket = job.default_bucket(account);
  try {
    // Somebody else may have taken the name, which anybody can guess.
    aws.s3("HEAD", bucket, "", {{"x-amz-expected-bucket-owner", account.id}});
    return;
  } catch (const AwsError& error) {
    if (error.status == 403)
      throw AwsError("the bucket " + bucket + " is there, but belongs to another account or may not be used: " +
                         error.what() + ". Name one of yours by additional_args: {output_path: s3://BUCKET/}",
                     error.code, error.status);
    if (error.status != 404) throw;
  }
  std::string place;
  if (job.region() != "us-east-1")
    place = "<CreateBucketConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><LocationConstraint>" +
            job.region() + "</LocationConstraint></CreateBucketConfiguration>";
  try {
    aws.s3("PUT", bucket, "", {{"Content-Type", "application/xml"}}, place);
    if (!quiet) std::fprintf(stderr, "accelerate launch: made the bucket %s\n", bucket.c_str());
  } catch (const AwsError& error) {
    if (error.code != "OperationAborted" && error.code != "BucketAlreadyOwnedByYou")
      throw;  // somebody makes it right now
  }
}

void upload(const TrainingJob& job, Aws& aws, const Account& account, bool quiet) {
  const std::string archive = tar_gz(job.source()), bucket = job.code_bucket(account);
  if (!quiet)
    std::fprintf(stderr, "accelerate launch: %zu source files, %.1f MB packed, to s3://%s/%s\n", job.source().size(),
                 static_cast<double>(archive.size()) / 1e6, bucket.c_str(), job.code_key().c_str());
  std::vector<std::pair<std::string, std::string>> headers{{"Content-Type", "application/gzip"},
                                                           {"x-amz-server-side-encryption", "aws:kms"}};
  if (bucket == job.default_bucket(account)) headers.emplace_back("x-amz-expected-bucket-owner", account.id);
  if (const std::string key = job.code_kms_key(account); !key.empty())
    headers.emplace_back("x-amz-server-side-encryption-aws-kms-key-id", key);
  aws.s3("PUT", bucket, job.code_key(), std::move(headers), archive);
}

void create(const Json& request, Aws& aws) {
  try {
    aws.call("sagemaker", "SageMaker.CreateTrainingJob", request);
  } catch (const AwsError& error) {
    // The name has the time in it, to the millisecond: one that is taken after a lost answer is ours.
    if (error.code != "ResourceInUse" || !aws.was_repeated()) throw;
  }
}

/// Reports the outcome of the job. @return the exit code for it
int report(const Json& description, const TrainingJob& job) {
  const std::string status = text_in(description, "TrainingJobStatus"), name = job.name();
  const auto seconds = [&](const char* key, const char* what) {
    if (const auto found = seconds_in(description, key))
      std::printf("%s seconds: %lld\n", what, *found * job.words()["instance_count"].get<long long>());
  };
  if (status == "Completed" || status == "Stopped") {
    seconds("TrainingTimeInSeconds", "Training");
    seconds("BillableTimeInSeconds", "Billable");
  }
  const std::string model = text_in(field(description, "ModelArtifacts"), "S3ModelArtifacts");
  if (status == "Completed") {
    std::printf("You can find your model data at: %s\n", model.c_str());
    return 0;
  }
  if (status == "Stopped") {
    std::fprintf(stderr,
                 "accelerate launch: the training job %s was stopped before its end, by somebody or by its time limit "
                 "(max_run)%s%s\n",
                 name.c_str(), model.empty() ? "" : "; what it had saved is at ", model.c_str());
    return 1;
  }
  const std::string reason = text_in(description, "FailureReason");
  std::fprintf(stderr, "accelerate launch: the training job %s failed: %s\n", name.c_str(),
               reason.empty() ? "no reason is given" : reason.c_str());
  return 1;
}

int submit(const TrainingJob& job, const JobPlan& plan, const Environment& environment) {
  const Profiles profiles(environment);
  const CredentialsQuery query{job.region(), plan.text("profile"), plan.given};
  const AwsProfile* profile = profiles.find(profile_name(query, environment));
  Aws aws(job.region(), environment, profile ? *profile : AwsProfile{});
  if (plan.dry_run) return print_request(job, aws), 0;

  FoundCredentials found = find_credentials(query, environment, profiles);
  aws.use(std::move(found.credentials), found.source);
  Account account;
  account.id = xml_text(aws.query("sts", {{"Action", "GetCallerIdentity"}, {"Version", "2011-06-15"}}), "Account");
  if (account.id.empty())
    throw AwsError("GetCallerIdentity at " + aws.endpoint("sts") + " named no account. Is it the right address?", "",
                   200);
  if (!plan.quiet)
    std::fprintf(stderr, "accelerate launch: account %s in %s, credentials from %s\n", account.id.c_str(),
                 job.region().c_str(), aws.source().c_str());
  account.role_arn = role_arn(job.role(), aws, plan.quiet);
  if (job.uses_default_bucket()) make_bucket(job, aws, account, plan.quiet);
  if (!job.is_uploaded()) upload(job, aws, account, plan.quiet);

  const Interruption interruption;
  create(job.request(account), aws);
  if (!plan.quiet) std::fprintf(stderr, "accelerate launch: created the training job %s\n", job.name().c_str());
  Json description;
  try {
    description = follow(aws, job.name(), environment);
  } catch (const accelerate::Error& error) {
    throw AwsError(
        "the training job " + job.name() + " has been created and goes on, but can't be followed: " + error.what(), "",
        0);
  }
  const std::string status = text_in(description, "TrainingJobStatus");
  if (Interruption::happened() && status != "Completed" && status != "Failed" && status != "Stopped") {
    std::fprintf(stderr,
                 "accelerate launch: the training job %s goes on without being followed. To stop it: aws sagemaker "
                 "stop-training-job --region %s --training-job-name %s\n",
                 job.name().c_str(), job.region().c_str(), job.name().c_str());
    return 128 + Interruption::signal();
  }
  return report(description, job);
}

int run() {
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  const Json plan_text = accelerate::parse_json<Json>(text);
  if (!plan_text.is_object())
    accelerate::raise<accelerate::ConfigError>(
        "this program is a part of `accelerate launch`, which tells it on the standard input what to do. Start that");
  const JobPlan plan = JobPlan::read(plan_text);
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  const Environment environment = current_environment();
  const TrainingJob job(plan, now);
  if (!plan.quiet)
    for (const auto& remark : job.remarks()) std::fprintf(stderr, "accelerate launch: %s\n", remark.c_str());
  return job.is_local() ? run_locally(job, plan, environment) : submit(job, plan, environment);
}

}  // namespace
}  // namespace sagemaker

int main(int argc, char** argv) {
  command::say_part_of_if_asked(argc, argv, "accelerate-sagemaker sends jobs to Amazon SageMaker and follows them.");
  try {
    return sagemaker::run();
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate launch: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate launch: unexpected error: %s\n", error.what());
    return 70;
  }
}
