#include "sagemaker/role.hpp"
#include "utils/raise.hpp"

#include <cstdio>

namespace sagemaker {
namespace {

/// Makes the role with the rights that the reference gives it.
void make(Aws& aws) {
  const std::string name = kOwnRole;
  const std::string service = "sagemaker." + domain_of(aws.region());
  const Json trust{
      {"Version", "2012-10-17"},
      {"Statement", {{{"Effect", "Allow"}, {"Principal", {{"Service", service}}}, {"Action", "sts:AssumeRole"}}}}};
  const Json rights{
      {"Version", "2012-10-17"},
      {"Statement",
       {{{"Effect", "Allow"},
         {"Action",
          {"sagemaker:*", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage", "ecr:BatchCheckLayerAvailability",
           "ecr:GetAuthorizationToken", "cloudwatch:PutMetricData", "cloudwatch:GetMetricData",
           "cloudwatch:GetMetricStatistics", "cloudwatch:ListMetrics", "logs:CreateLogGroup", "logs:CreateLogStream",
           "logs:DescribeLogStreams", "logs:PutLogEvents", "logs:GetLogEvents", "s3:CreateBucket", "s3:ListBucket",
           "s3:GetBucketLocation", "s3:GetObject", "s3:PutObject"}},
         {"Resource", "*"}}}}};
  aws.query("iam", {{"Action", "CreateRole"},
                    {"Version", "2010-05-08"},
                    {"RoleName", name},
                    {"AssumeRolePolicyDocument", trust.dump()}});
  aws.query("iam", {{"Action", "PutRolePolicy"},
                    {"Version", "2010-05-08"},
                    {"RoleName", name},
                    {"PolicyName", name + "_policy_permission"},
                    {"PolicyDocument", rights.dump()}});
}

std::string arn_of(const std::string& role, Aws& aws) {
  return xml_text(aws.query("iam", {{"Action", "GetRole"}, {"Version", "2010-05-08"}, {"RoleName", role}}), "Arn");
}

}  // namespace

std::string role_arn(const std::string& role, Aws& aws, bool quiet) {
  if (role.find('/') != std::string::npos) return role;
  try {
    return arn_of(role, aws);
  } catch (const AwsError& error) {
    if (error.code != "NoSuchEntity") throw;
    if (role != kOwnRole)
      accelerate::raise<accelerate::ConfigError>(
          "the account has no role '{}' (iam_role_name of the config file), under which the job was to run. Correct "
          "the name, give the role's ARN, or name {} to have one made",
          role, kOwnRole);
  }
  if (!quiet) std::fprintf(stderr, "accelerate launch: making the role %s for SageMaker\n", kOwnRole);
  make(aws);
  return arn_of(role, aws);
}

}  // namespace sagemaker
