#pragma once

#include <string>

#include "sagemaker/aws.hpp"

namespace sagemaker {

/// The role that `accelerate config` names when it is asked for a new one.
inline constexpr const char* kOwnRole = "accelerate_sagemaker_execution_role";

/// The ARN of a role by its name (an ARN stays as it is). kOwnRole is made when the account has none: SageMaker may
/// take it, and it may do what training needs.
std::string role_arn(const std::string& role, Aws& aws, bool quiet);

}  // namespace sagemaker
