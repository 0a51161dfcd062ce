#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sagemaker/aws.hpp"
#include "sagemaker/source.hpp"

/// A training job, before anything is sent.
namespace sagemaker {

/// The job that `accelerate launch` gives as JSON on the standard input (see launch/sagemaker.cpp).
struct JobPlan {
  Json config;                       ///< the config file's keys, null where it has no value
  std::vector<std::string> command;  ///< program and arguments
  Json environment;                  ///< variables of the job
  int64_t num_machines = 1;
  std::optional<Credentials> given;  ///< on the command line
  bool dry_run = false, quiet = false;
  static JobPlan read(const Json& text);
  std::string text(const std::string& key) const {
    return config.contains(key) && config[key].is_string() ? config[key].get<std::string>() : "";
  }
};

/// The facts that only the account can tell. They are unknown in a dry run, where words in capitals stand for them.
struct Account {
  std::string id = "ACCOUNT", role_arn;
};

/// The reference hands these words to the SageMaker SDK's estimator for Hugging Face's containers; the request is the
/// one that the SDK then makes.
class TrainingJob {
 public:
  /// Reads the tables of inputs and metrics, and looks at the source files. `now`: milliseconds since 1970, which end
  /// the job's name.
  /// @throws ConfigError for what the service or its containers could not run
  TrainingJob(const JobPlan& plan, int64_t now);

  const std::string& name() const { return name_; }
  const std::string& region() const { return region_; }
  bool is_local() const { return instance_type_ == "local" || instance_type_ == "local_gpu"; }
  const std::string& image() const { return image_; }
  /// Variables and their texts.
  Json environment() const;
  std::string text(const std::string& key) const;
  const Json& words() const { return words_; }

  /// Name or ARN, as given.
  std::string role() const { return text("role"); }
  const std::vector<SourceFile>& source() const { return source_; }
  /// The folder where a local container finds the source: the source's own, empty where files must be put together
  /// first.
  const std::string& source_folder() const { return source_folder_; }
  /// The source lies in S3 already.
  bool is_uploaded() const { return uploaded_; }
  /// True when S3 objects go to the account's own bucket, which is made when it isn't there.
  bool uses_default_bucket() const;
  std::string default_bucket(const Account& account) const;
  std::string code_bucket(const Account& account) const;
  std::string code_key() const;
  std::string code_kms_key(const Account& account) const;  ///< "" for the account's usual one
  std::string output_path(const Account& account) const;

  /// The body of CreateTrainingJob.
  Json request(const Account& account) const;
  /// Names and JSON texts, as the containers read them. @param submit_directory  where the source is
  Json hyperparameters(const std::string& submit_directory) const;
  const Json& inputs() const { return inputs_; }  ///< [[channel, location], ...]
  /// Remarks for the user, a line each.
  const std::vector<std::string>& remarks() const { return remarks_; }

 private:
  void take_source(const JobPlan& plan);
  Json distribution() const;
  bool profiles() const;

  std::string region_, name_, instance_type_, image_, entry_point_, source_folder_;
  Json words_, inputs_ = Json::array();
  std::vector<SourceFile> source_;
  std::vector<std::string> remarks_;
  bool uploaded_ = false, executable_ = false;
};

/// The ARN of a role, as far as it can be known without asking.
std::string guessed_role_arn(const std::string& role, const std::string& region);

/// A Python program's arguments as hyperparameters: --name value or --name=value each, numbers and True and False as
/// such. @throws ConfigError
Json arguments_as_hyperparameters(const std::vector<std::string>& arguments);

}  // namespace sagemaker
